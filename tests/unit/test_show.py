"""A run on one screen: the manifest's own numbers, and nothing trusted that has changed."""

import json
from pathlib import Path

import pytest
from virtual_run import exp1_run, write_run

from kit.cli import main
from kit.manifest import Failure, load_manifest, manifest_json
from kit.paths import MANIFESTS
from kit.report_files import write_reports
from kit.show import lines, summarise

REFERENCE = MANIFESTS / "exp1_prefix_cache" / "v0.32.0-cpu--smollm2-135m-instruct--cpu.json"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    write_run(tmp_path, exp1_run(pairs=2))
    return tmp_path


def test_the_screen_has_the_manifests_verdict_effect_and_arms() -> None:
    manifest = load_manifest(REFERENCE)
    shown = lines(summarise(REFERENCE))
    text = "\n".join(value for _, value in shown)
    assert manifest.verdict is not None
    assert manifest.effect is not None
    assert f"{manifest.verdict.word}: {manifest.verdict.reason}" in text
    assert f"{manifest.effect.ratio:.3f} (95 % interval {manifest.effect.low:.3f}" in text
    assert "prefix caching on: 0.2746 s (0.2257 – 0.3327)" in text
    assert "Intel(R) Xeon(R) Processor, 2 cores, 23.5 GiB" in text
    assert manifest.images[0].identity[:19] in text
    assert "all held" in text
    assert len(shown) <= 24, "one screen"


def test_it_says_where_what_is_and_what_has_changed(run: Path) -> None:
    write_reports(run, load_manifest(run / "manifest.json"))
    found = summarise(run)
    assert found["changed_files"] == []
    assert all(any(run.glob(place)) for place in found["where"].values())
    assert {"page", "page, 中文", "manifest", "samples"} <= set(found["where"])
    (run / "plan.json").write_text("{}", "utf-8")
    assert dict(lines(summarise(run)))["STALE"].startswith("plan.json")


def test_a_run_that_failed_says_why(run: Path) -> None:
    whole = load_manifest(run / "manifest.json")
    failure = Failure(error="ServerDied", exit_code=60, message="the server died")
    changes = {"status": "failed", "verdict": None, "effect": None, "failure": failure}
    (run / "manifest.json").write_text(manifest_json(whole.model_copy(update=changes)), "utf-8")
    shown = dict(lines(summarise(run)))
    assert shown["verdict"] == "failed"
    assert shown["failure"] == "the server died"


def test_a_strangers_manifest_cannot_write_to_the_terminal(run: Path) -> None:
    whole = load_manifest(run / "manifest.json")
    evil = whole.model_copy(update={"run_id": "a\x1b[2J\nb"})
    (run / "manifest.json").write_text(manifest_json(evil), "utf-8")
    assert all(value.isprintable() for _, value in lines(summarise(run)))


def test_the_command_prints_a_screen_or_json(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(run)]) == 0
    assert "too few replicates: 2 pairs" in capsys.readouterr().out
    assert main(["show", str(run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["verdict"]["word"] == "inconclusive"
    assert found["arms"][1]["median"] > 0


def test_a_run_that_goes_on_is_not_said_to_have_held_its_guards(run: Path) -> None:
    path = run / "manifest.json"
    raw = json.loads(path.read_text("utf-8"))
    begun = raw | {"status": "running", "verdict": None, "finished_utc": None}
    path.write_text(json.dumps(begun), "utf-8")
    assert dict(lines(summarise(run)))["guards"] == "not judged yet"
