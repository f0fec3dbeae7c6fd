"""The index over runs, and two of them side by side: from disk, nothing stale, nothing run."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
from pathlib import Path

import pytest
from test_report_html import HOSTILE, Page
from virtual_run import exp1_run, write_run

from kit import compare_table, store
from kit.cli import main
from kit.errors import NotFound, StaleNumber
from kit.manifest import load_manifest
from kit.paths import TEMPLATES
from kit.report_index import COMPARED, write_index


def change(run: Path, **fields: object) -> None:
    raw = json.loads((run / "manifest.json").read_text("utf-8"))
    store.write_json(run / "manifest.json", raw | fields)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make three runs: two that can be compared, and one whose raw file was changed."""
    runs = tmp_path_factory.mktemp("made") / "runs"
    for number, effect in enumerate((-0.30, -0.05, -0.30)):
        run = runs / "exp1_prefix_cache" / "a case" / f"2026010{number}t0000"
        write_run(run, exp1_run(effect, pairs=2, seed=number))
        change(run, run_id=f"run{number}", started_utc=f"2026-01-0{number + 1}T00:00:00.000Z")
    (run / "plan.json").write_text("{}", "utf-8")
    store.write_text(runs / "exp1_prefix_cache/a case/20260101t0000/report.en.html", "a page")
    return runs


@pytest.fixture
def runs(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "runs"))


def test_the_index_lists_every_run_with_the_manifests_numbers(runs: Path) -> None:
    text = write_index(runs).read_text("utf-8")
    page = Page(text)
    rows = [attrs for attrs in page.all("tr") if "data-experiment" in attrs]
    assert [r["data-verdict"] for r in rows] == ["stale", "inconclusive", "inconclusive"]
    assert {r["data-hardware"] for r in rows} == {"Virtual CPU"}
    for run in sorted(runs.glob("*/*/*"))[:2]:
        effect = load_manifest(run / "manifest.json").effect
        assert effect is not None
        assert f"{effect.ratio:.3f} ({effect.low:.3f} – {effect.high:.3f})" in text
    stale = load_manifest(runs / "exp1_prefix_cache/a case/20260102t0000/manifest.json").effect
    assert stale is not None
    assert f"{stale.ratio:.3f}" not in text
    assert "plan.json: other bytes than the manifest says" in text


def test_the_index_leads_to_reports_and_comparisons_that_are_there(runs: Path) -> None:
    page = Page(write_index(runs).read_text("utf-8"))
    links = [a["href"] for a in page.all("a")]
    assert links == [
        "./exp1_prefix_cache/a%20case/20260101t0000/report.en.html",
        "./compare/run0--run1.html",
    ]
    assert (runs / "compare" / "run0--run1.html").is_file()


def test_the_page_of_two_runs_has_what_compare_says(runs: Path) -> None:
    write_index(runs)
    text = (runs / "compare" / "run0--run1.html").read_text("utf-8")
    page = Page(text)
    pair = [runs / "exp1_prefix_cache" / "a case" / f"2026010{n}t0000" for n in (0, 1)]
    said = compare_table.two(*pair)
    assert len(page.all("tr")) == 1 + len(said.rows)
    shown = "".join(page.shown)
    assert all(cell in shown for row in said.rows for cell in row)
    href = page.all("a")[0]["href"]
    assert href == "./../exp1_prefix_cache/a%20case/20260101t0000/report.en.html"
    assert not page.all("script")


def test_only_the_newest_of_an_experiment_are_compared(made: Path, tmp_path: Path) -> None:
    first = made / "exp1_prefix_cache" / "a case" / "20260100t0000"
    for number in range(COMPARED + 2):
        run = shutil.copytree(first, tmp_path / "runs" / f"r{number}")
        change(run, run_id=f"r{number}", started_utc=f"2026-02-0{number + 1}T00:00:00.000Z")
    write_index(tmp_path / "runs")
    pages = sorted(p.stem for p in (tmp_path / "runs" / "compare").iterdir())
    assert len(pages) == COMPARED * (COMPARED - 1) // 2
    assert not [p for p in pages if "r0" in p or "r1" in p]


def test_filters_need_the_script_and_reading_does_not(runs: Path) -> None:
    text = write_index(runs).read_text("utf-8")
    page = Page(text)
    assert [s["name"] for s in page.all("select")] == [
        "experiment",
        "image",
        "hardware",
        "verdict",
    ]
    hidden = [tag for tag, attrs in page.tags if "hidden" in attrs]
    assert set(hidden) == {"div", "input"}
    assert "hidden" in next(a for t, a in page.tags if a.get("id") == "tools")
    script = (TEMPLATES / "index.js").read_text("utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"<script>{script}</script>" in text
    assert f"script-src 'sha256-{digest}'" in text
    assert write_index(runs).read_text("utf-8") == text


def test_hostile_runs_are_shown_and_never_run(runs: Path) -> None:
    run = runs / "exp1_prefix_cache" / "a case" / "20260100t0000"
    raw = json.loads((run / "manifest.json").read_text("utf-8"))
    raw["verdict"]["reason"] = HOSTILE
    raw["run_id"] = "../../" + HOSTILE
    raw["facts"][0]["value"] = HOSTILE
    raw["plan"]["experiment"] = HOSTILE
    store.write_json(run / "manifest.json", raw)
    broken = runs / HOSTILE.replace("/", "-") / "manifest.json"
    store.write_text(broken, '{"schema_version": "<script>"}')
    text = write_index(runs).read_text("utf-8")
    pages = [text, *(p.read_text("utf-8") for p in (runs / "compare").glob("*"))]
    for one in pages:
        page = Page(one)
        assert len(page.all("script")) == (one is text)
        assert not page.all("img")
        assert not [name for _, attrs in page.tags for name in attrs if name.startswith("on")]
        assert all(a["href"].startswith("./") for a in page.all("a"))
        assert "http" not in one.replace("http-equiv", "")
    assert "unreadable" in text
    assert {p.name for p in runs.parent.iterdir()} == {"runs"}, "nothing is written elsewhere"


def test_the_report_command_takes_a_run_or_a_folder_of_runs(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(runs)]) == 0
    assert "index.html" in capsys.readouterr().err
    run = runs / "exp1_prefix_cache" / "a case" / "20260100t0000"
    assert main(["report", str(run)]) == 0
    assert re.findall(r"report\.\w\w\.\w+", capsys.readouterr().err) == [
        "report.en.md",
        "report.zh.md",
        "report.en.html",
        "report.zh.html",
    ]
    stale = run.parent / "20260102t0000"
    assert main(["report", str(stale)]) == StaleNumber.exit_code
    assert not list(stale.glob("report.*"))
    with pytest.raises(NotFound, match="no run is below"):
        write_index(run / "workload")


def test_compare_writes_a_page_of_any_two_runs(runs: Path, tmp_path: Path) -> None:
    pair = [str(runs / "exp1_prefix_cache" / "a case" / f"2026010{n}t0000") for n in (1, 0)]
    page = tmp_path / "two.html"
    assert main(["compare", *pair, "--html", str(page)]) == 0
    assert "Two runs side by side" in page.read_text("utf-8")
