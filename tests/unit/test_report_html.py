"""The page: the manifest's numbers, nothing loaded, nothing run, readable by everyone."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from virtual_run import exp1_run, write_long_run, write_run

from kit import store
from kit.manifest import Manifest, load_manifest, manifest_json
from kit.paths import MANIFESTS
from kit.reference import unpack_reference
from kit.report import LANGUAGES, number_text, render
from kit.report_files import write_reports
from kit.report_html import NOTES, grouped, render_pages
from kit.report_plots import ecdf, thin
from kit.verdict import Verdict

REFERENCE = MANIFESTS / "exp1_prefix_cache" / "v0.32.0-cpu--smollm2-135m-instruct--cpu.json"
NUMBER = re.compile(r'<a class="number" href="#note-(\d+)">([^<]*)</a>')
HOSTILE = "\"><script>alert(1)</script><img src=x onerror=alert(2)>'{{ 7*7 }} `<b>`"


class Page(HTMLParser):
    """What a browser would see: tags with their attributes, and the text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.shown: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))

    def handle_data(self, data: str) -> None:
        self.shown.append(data)

    def all(self, name: str) -> list[dict[str, str]]:
        return [attrs for tag, attrs in self.tags if tag == name]

    @property
    def ids(self) -> list[str]:
        return [attrs["id"] for _, attrs in self.tags if "id" in attrs]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Manifest, dict[str, str]]:
    run = unpack_reference(REFERENCE, tmp_path_factory.mktemp("reference"))
    manifest = load_manifest(run / "manifest.json")
    return run, manifest, render_pages(run, manifest)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    write_run(tmp_path, exp1_run(pairs=2))
    return tmp_path


def manifest_of(run: Path) -> Manifest:
    return load_manifest(run / "manifest.json")


Whole = tuple[Path, Manifest, dict[str, str]]


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_page_shows_the_numbers_of_the_markdown(reference: Whole, language: str) -> None:
    _, manifest, pages = reference
    markdown = render(manifest, language)
    shown = {text for _, text in NUMBER.findall(pages[language])}
    plain = re.findall(r"([\w.,:/%()<>=+ –-]+?)\[\^\d+\]", markdown.replace("**", "| "))
    assert len(plain) > 40
    for number in plain:
        assert any(number.strip(" (|–").endswith(each) for each in shown), number


def test_the_numbers_are_the_manifests(reference: Whole) -> None:
    _, manifest, pages = reference
    shown = [text for _, text in NUMBER.findall(pages["en"])]
    for r in manifest.replicates:
        value = next(x.value for x in r.readings if x.name == "ttft_p50_s")
        assert value is not None
        assert number_text(value) in shown
    assert manifest.effect is not None
    for value in (manifest.effect.ratio, manifest.effect.low, manifest.effect.high):
        assert f"{value:.3f}" in shown
    lag = max((g for g in manifest.guards if g.name == "send_lag"), key=lambda g: g.seen / g.limit)
    assert number_text(lag.seen or 0) in shown
    facts = [*manifest.facts, *(f for r in manifest.replicates for f in r.facts)]
    assert f"{sum(f.state == 'failed' for f in facts):,}" in shown


def test_both_languages_show_the_same_numbers_and_drawings(reference: Whole) -> None:
    _, _, pages = reference
    assert NUMBER.findall(pages["en"]) == NUMBER.findall(pages["zh"])
    drawn = [re.findall(r' d="[^"]*"', pages[language]) for language in LANGUAGES]
    assert drawn[0] == drawn[1]
    assert ">time in the window (s)<" in pages["en"]
    assert ">窗口内时间（s）<" in pages["zh"]
    assert ">time in the window (s)<" not in pages["zh"]


def test_every_number_leads_to_files_with_their_hashes(reference: Whole) -> None:
    run, manifest, pages = reference
    page = Page(pages["en"])
    assert {f"note-{mark}" for mark, _ in NUMBER.findall(pages["en"])} <= set(page.ids)
    hashes = re.findall(r'<td class="hash">([0-9a-f]{64})</td>', pages["en"])
    assert len(hashes) > 50
    assert set(hashes) <= {f.sha256 for f in manifest.files.values()}
    linked = [a["href"] for a in page.all("a") if a["href"].startswith("./")]
    assert linked
    assert all((run / href).is_file() for href in linked)


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_page_says_all_that_a_reader_needs(reference: Whole, language: str) -> None:
    _, manifest, pages = reference
    text = " ".join(Page(pages[language]).shown)
    plan = manifest.plan
    needed = {
        "en": ("Observation", "Conclusion", "Pitfalls", "Author's notes", "What it means"),
        "zh": ("观察", "结论", "踩坑", "作者笔记", "含义"),
    }
    said = [getattr(t, language) for t in (plan.goal, plan.hypothesis.text, plan.arms[1].label)]
    assert manifest.verdict is not None
    for each in (
        *needed[language],
        *said,
        manifest.verdict.reason,
        *(getattr(n.text, language) for n in manifest.notices),
        "nox -s reproduce -- manifest.json",
        f"nox -s {plan.experiment} -- --image",
        "foreign_cpu",
        manifest.plan_sha256[:16],
    ):
        assert each in text, each


def test_the_same_run_gives_the_same_bytes(run: Path) -> None:
    manifest = manifest_of(run)
    assert render_pages(run, manifest) == render_pages(run, manifest)


def test_reports_are_beside_the_run_and_no_raw_files(run: Path) -> None:
    before = store.hash_files(run)
    written = write_reports(run, manifest_of(run))
    assert [p.name for p in written] == [
        "report.en.md",
        "report.zh.md",
        "report.en.html",
        "report.zh.html",
    ]
    (run / NOTES).write_text("my own words", "utf-8")
    assert store.hash_files(run) == before


# -- nothing loaded, nothing run ---------------------------------------------------------------


def hostile(run: Path) -> Manifest:
    """Return the run's manifest with hostile text wherever a manifest can hold text."""
    raw = json.loads((run / "manifest.json").read_text("utf-8"))
    texts = [raw["plan"][key] for key in ("title", "goal", "variable_text")]
    texts += [arm["label"] for arm in raw["plan"]["arms"]]
    texts += [raw["plan"]["hypothesis"]["text"]]
    raw["notices"] = [{"code": HOSTILE, "text": {}}]
    texts += [raw["notices"][0]["text"]]
    for text in texts:
        text |= {"en": HOSTILE, "zh": HOSTILE}
    raw["verdict"]["reason"] = raw["run_id"] = raw["plan"]["model"]["id"] = HOSTILE
    measure = raw["plan"]["hypothesis"]["measure"]
    evil = "javascript:alert(3)//" + HOSTILE
    raw["files"][evil] = next(iter(raw["files"].values()))
    for guard in raw["guards"][:3]:
        guard |= {"name": HOSTILE, "text": HOSTILE, "ok": False, "source": evil}
    for replicate in raw["replicates"]:
        for reading in replicate["readings"]:
            reading["unit"] = HOSTILE if reading["name"] == measure else reading["unit"]
            reading["sources"] = [evil]
    raw["facts"][0]["value"] = HOSTILE
    raw["images"][0]["id"] = HOSTILE
    return Manifest.model_validate(raw)


def test_hostile_text_is_shown_and_never_run(run: Path) -> None:
    (run / NOTES).write_text(f"</pre>{HOSTILE}", "utf-8")
    for text in render_pages(run, hostile(run)).values():
        page = Page(text)
        assert not {"script", "img", "iframe", "b", "object", "base", "form"} & {
            tag for tag, _ in page.tags
        }
        assert not [name for _, attrs in page.tags for name in attrs if name.startswith("on")]
        assert all(a["href"].startswith(("#", "./", "report.")) for a in page.all("a"))
        assert "".join(page.shown).count("<script>alert(1)</script>") > 8
        assert "{{ 7*7 }}" in "".join(page.shown)


@pytest.mark.parametrize("language", LANGUAGES)
def test_nothing_is_loaded_from_anywhere(reference: Whole, language: str) -> None:
    text = reference[2][language]
    page = Page(text)
    policy = [m["content"] for m in page.all("meta") if "http-equiv" in m]
    assert policy == [
        "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
    ]
    assert not {"script", "link", "img", "iframe", "object", "embed"} & {t for t, _ in page.tags}
    assert "http" not in text.replace("http-equiv", "")
    assert re.findall(r"url\((?!#)", text) == []
    assert "@import" not in text
    assert all("//" not in value for _, attrs in page.tags for value in attrs.values())


# -- readable by everyone ----------------------------------------------------------------------


@pytest.mark.parametrize("language", LANGUAGES)
def test_headings_tables_and_figures_can_be_read_aloud(reference: Whole, language: str) -> None:
    text = reference[2][language]
    page = Page(text)
    levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch(r"h[1-6]", tag)]
    assert levels.count(1) == 1
    assert levels[0] == 1
    assert all(b <= a + 1 for a, b in itertools.pairwise(levels))
    assert all(th.get("scope") in ("col", "row") for th in page.all("th"))
    assert page.all("html")[0]["lang"].startswith(language)
    drawings = [attrs for _, attrs in page.tags if attrs.get("role") == "img"]
    assert len(drawings) == len(page.all("figure")) == text.count("<svg") == 3
    for attrs in drawings:
        assert attrs["aria-label"]
        assert attrs["aria-describedby"] in page.ids
    assert len(page.ids) == len(set(page.ids))
    inside = [a["href"][1:] for a in page.all("a") if a["href"].startswith("#")]
    used = re.findall(r"(?:url\(|<use[^>]* href=\")#([^)\"]+)", text)
    assert set(inside) | set(used) <= set(page.ids)


def test_drawings_are_sound_and_take_the_pages_colours(reference: Whole) -> None:
    drawings = re.findall(r"<svg.*?</svg>", reference[2]["en"], flags=re.DOTALL)
    for each in drawings:
        root = ET.fromstring(each)
        assert root.get("viewBox")
        assert root.get("width") is None
        colours = set(re.findall(r"(?:fill|stroke): ?([^;\"]+)", each))
        assert colours <= {"none", "currentColor", "var(--baseline)", "var(--candidate)"}
    assert "preemptions" not in drawings[2], "this run had none"
    assert "KV cache used (%)" in drawings[2]


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_text_and_marks_stand_out_in_light_dark_and_print(reference: Whole) -> None:
    blocks = re.findall(r":root \{(.*?)\}", reference[2]["en"], flags=re.DOTALL)
    assert len(blocks) == 3
    light = dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", blocks[0]))
    for block in blocks:
        colours = light | dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", block))
        for ground in ("paper", "card"):
            for name, least in {"ink": 7, "muted": 4.5, "link": 4.5, "baseline": 3}.items():
                pair = sorted(luminance(colours[c]) for c in (name, ground))
                assert (pair[1] + 0.05) / (pair[0] + 0.05) >= least, (name, ground)


# -- size and odd runs -------------------------------------------------------------------------


def test_100_000_samples_stay_small(tmp_path: Path) -> None:
    pages = render_pages(tmp_path, write_long_run(tmp_path, 100_000))
    for text in pages.values():
        assert len(text.encode()) < 5_000_000
        assert text.count("<use") < 1000, "no mark for each sample"


def test_many_replicates_stay_small(tmp_path: Path) -> None:
    write_run(tmp_path, exp1_run(pairs=20))
    text = render_pages(tmp_path, manifest_of(tmp_path))["en"]
    assert len(text.encode()) < 5_000_000


def test_a_run_that_measured_nothing_has_a_page_without_drawings(run: Path) -> None:
    verdict = Verdict(word="unsupported", reason="needs 2 devices, this machine has 1")
    nothing: dict[str, Any] = {"replicates": (), "guards": (), "effect": None, "cost": None}
    manifest = manifest_of(run).model_copy(update={**nothing, "verdict": verdict})
    store.write_text(run / "manifest.json", manifest_json(manifest))
    for text in render_pages(run, manifest).values():
        assert "needs 2 devices" in text
        assert "<svg" not in text


def test_the_author_speaks_in_a_section_of_their_own(run: Path) -> None:
    (run / NOTES).write_text("# 踩坑\n\n1 < 2 & it was *warm*", "utf-8")
    for text in render_pages(run, manifest_of(run)).values():
        own = re.findall(r'<pre class="note">(.*?)</pre>', text, flags=re.DOTALL)
        assert own == ["# 踩坑\n\n1 &lt; 2 &amp; it was *warm*"]
    (run / NOTES).unlink()
    (run / NOTES).symlink_to("/etc/hostname")
    assert '<pre class="note">' not in render_pages(run, manifest_of(run))["en"]


def test_files_of_one_name_are_listed_together() -> None:
    files = ["plan.json", "replicates/01-b/facts.json", "replicates/00-a/facts.json"]
    assert grouped(files) == [
        {
            "name": "facts.json",
            "places": [
                ("replicates/00-a/", "replicates/00-a/facts.json"),
                ("replicates/01-b/", "replicates/01-b/facts.json"),
            ],
        },
        {"name": "plan.json", "places": [("", "plan.json")]},
    ]


def test_matplotlib_is_imported_only_to_draw() -> None:
    code = "import sys, kit.run, kit.report_files; print('matplotlib' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


# -- thinning ----------------------------------------------------------------------------------

VALUES = st.lists(st.floats(0, 1e6), min_size=1, max_size=2000)


@given(VALUES, st.integers(16, 300))
def test_a_thinned_line_keeps_its_ends_and_extremes(values: list[float], most: int) -> None:
    x, y = thin(range(len(values)), values, most)
    assert len(x) <= max(most, 4)
    assert (x[0], x[-1]) == (0, len(values) - 1)
    assert (min(y), max(y)) == (min(values), max(values))
    assert all(values[int(at)] == value for at, value in zip(x, y, strict=True))


@given(VALUES, st.integers(16, 300))
def test_a_thinned_distribution_is_one_of_the_values(values: list[float], most: int) -> None:
    x, y = ecdf(np.array(values), most)
    assert len(x) <= most + 1
    assert (x[0], x[-1], y[0], y[-1]) == (min(values), max(values), 0, 1)
    assert list(x) == sorted(x)
    for value, share in list(zip(x, y, strict=True))[1:]:
        assert value in values
        assert sum(v <= value for v in values) >= share * len(values) - 1e-6
