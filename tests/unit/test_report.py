"""The report: every number names its raw files, and none is printed while one of them changed."""

import json
import re
import shutil
from pathlib import Path

import pytest
from virtual_run import COMMIT, exp1_run, write_run

from kit import report, store
from kit.errors import StaleNumber
from kit.manifest import Manifest
from kit.report import LANGUAGES, Notes, render
from kit.report_files import write_reports

MARKED = re.compile(r"\[\^(\d+)\]")
NOTE = re.compile(r"^\[\^(\d+)\]: (.*)$", re.MULTILINE)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    write_run(folder, exp1_run())
    return folder


@pytest.fixture(scope="module")
def manifest(run: Path) -> Manifest:
    return Manifest.model_validate_json((run / "manifest.json").read_text("utf-8"))


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_mark_has_a_note_of_files_with_their_hashes(
    manifest: Manifest, language: str
) -> None:
    text = render(manifest, language)
    notes = dict(NOTE.findall(text))
    assert set(MARKED.findall(text)) == set(notes)
    for listed in notes.values():
        files = re.findall(r"\[([^\]]+)\]\(\1\) `sha256:([0-9a-f]{16})`", listed)
        assert files
        for name, sha256 in files:
            assert manifest.files[name].sha256.startswith(sha256)


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_number_of_the_measures_is_marked(manifest: Manifest, language: str) -> None:
    text = render(manifest, language)
    rows = [r for r in text.splitlines() if re.search(r"\(`\w+`\) \| (s|1|tok/s|tokens) \|", r)]
    assert len(rows) == len(manifest.plan.measures)
    for row in rows:
        for cell in row.split("|")[3:5]:
            null = "no value" in cell or "无值" in cell
            assert null or MARKED.search(cell), row
    effect = manifest.effect
    assert effect is not None
    assert f"**{effect.ratio:.3f}[^" in text


def test_the_numbers_are_those_of_the_manifest(manifest: Manifest) -> None:
    text = render(manifest, "en")
    for r in manifest.replicates:
        value = next(x.value for x in r.readings if x.name == "ttft_p50_s")
        assert f"| {value:.4g}[^" in text


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_report_names_what_a_reader_needs_to_judge_it(
    manifest: Manifest, language: str
) -> None:
    text = render(manifest, language)
    plan = manifest.plan
    measured = next(p for p in plan.phases if p.name == "measure")
    for needed in (
        plan.model.id,
        COMMIT,
        "Virtual CPU",
        "580.1.2",
        plan.arms[0].image.id,
        f"| {measured.concurrency}[^",
        f"| {measured.requests}[^",
        f"| {plan.pairs}[^",
        " + 1 (cold)[^",
        "16[^",  # output length asked
        "| 64[^",  # input length served
        f"nox -s {plan.experiment} --",
        f"--replicates {plan.pairs} --seed {plan.seed}",
        manifest.plan_sha256[:16],
    ):
        assert needed in text, needed
    for label in (
        {"en": "Input length", "zh": "输入长度"},
        {"en": "Output length", "zh": "输出长度"},
        {"en": "Concurrency", "zh": "并发"},
        {"en": "Warm-up requests", "zh": "预热请求数"},
        {"en": "Model", "zh": "模型"},
        {"en": "vLLM commit", "zh": "vLLM 提交"},
        {"en": "Hardware", "zh": "硬件"},
        {"en": "GPU driver", "zh": "GPU 驱动"},
        {"en": "Pitfalls", "zh": "踩坑"},
    ):
        assert f"{label[language]}" in text


def test_both_languages_carry_the_same_numbers(manifest: Manifest) -> None:
    def numbers(language: str) -> list[str]:
        return re.findall(r"([\d.,]+)\[\^", render(manifest, language))

    assert numbers("en") == numbers("zh")
    assert len(numbers("en")) > 15


# -- nothing stale -----------------------------------------------------------------------------


def test_reports_are_written_while_the_files_are_as_recorded(run: Path, manifest: Manifest) -> None:
    write_reports(run, manifest)
    for language in LANGUAGES:
        written = (run / f"report.{language}.md").read_text("utf-8")
        assert written == render(manifest, language)


RAW = (
    "replicates/00-*/measure/samples.jsonl",
    "replicates/03-*/measure/metrics.jsonl.gz",
    "replicates/02-*/telemetry.jsonl",
    "replicates/01-*/server_info.json",
    "workload/measure.jsonl",
    "plan.json",
)


@pytest.mark.parametrize("pattern", RAW)
def test_one_changed_byte_and_no_report_is_written(
    run: Path, tmp_path: Path, manifest: Manifest, pattern: str
) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy, ignore=shutil.ignore_patterns("report.*"))
    path = next(copy.glob(pattern))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))
    with pytest.raises(StaleNumber, match=path.name):
        write_reports(copy, manifest)
    assert list(copy.glob("report.*")) == []


def test_a_lost_raw_file_and_no_report_is_written(
    run: Path, tmp_path: Path, manifest: Manifest
) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    next(copy.glob(RAW[0])).unlink()
    with pytest.raises(StaleNumber, match="missing"):
        write_reports(copy, manifest)


# -- no number without a source ----------------------------------------------------------------


def test_a_number_needs_files_of_the_run(manifest: Manifest) -> None:
    notes = Notes(manifest.files)
    assert str(notes.number("5", ["plan.json"])) == "5[^1]"
    assert str(notes.number("6", ["plan.json", "plan.json"])) == "6[^1]"
    for sources in ([], ["made/up.json"], ["plan.json", "made/up.json"]):
        with pytest.raises(StaleNumber, match="cannot be traced"):
            notes.number("7", sources)


@pytest.mark.parametrize(
    "printed", ["m.plan.seed", "m.effect.ratio", "1 + 1", "m.plan.hypothesis.margin"]
)
def test_a_bare_number_in_the_template_makes_rendering_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, manifest: Manifest, printed: str
) -> None:
    copy = tmp_path / "templates"
    shutil.copytree(report.TEMPLATES, copy)
    template = copy / "report.md.j2"
    text = template.read_text("utf-8")
    store.write_text(template, text + "{{ " + printed + " }}\n")
    monkeypatch.setattr(report, "TEMPLATES", copy)
    with pytest.raises(StaleNumber, match="names no raw file"):
        render(manifest, "en")


def test_a_reading_from_a_file_that_is_not_recorded_cannot_be_shown(manifest: Manifest) -> None:
    raw = json.loads(manifest.model_dump_json())
    for name in [n for n in raw["files"] if n.endswith("measure/samples.jsonl")]:
        del raw["files"][name]
    with pytest.raises(StaleNumber, match="cannot be traced"):
        render(Manifest.model_validate(raw), "en")
