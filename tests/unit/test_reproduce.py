"""Reproduction up to the point where containers start: what is read, compared, and refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from references import EACH_IN_TIME, REFERENCES
from virtual_run import HOST_FACTS, exp1_run, write_run

from kit import store
from kit.bundle import make_bundle
from kit.cli import main
from kit.errors import BadFile, BundleDamaged, StaleNumber, UsageError
from kit.fact import Fact
from kit.manifest import Manifest, Original, load_manifest, manifest_json, parse_manifest
from kit.obtain import registry_digest
from kit.paths import MANIFESTS
from kit.reproduce import check, conclude, read_recorded
from kit.reproduction_report import plot, render


@pytest.fixture
def run(tmp_path: Path) -> Path:
    write_run(tmp_path / "run", exp1_run())
    return tmp_path / "run"


def edit(run: Path, change: Any) -> None:
    raw = json.loads((run / "manifest.json").read_text("utf-8"))
    change(raw)
    store.write_json(run / "manifest.json", raw)


def test_a_run_folder_is_read_with_its_numbers_checked(run: Path) -> None:
    recorded = read_recorded(run)
    assert recorded.checked == "raw files"
    assert set(recorded.workload) == {p.name for p in recorded.manifest.plan.phases}
    assert read_recorded(run / "manifest.json").sha256 == recorded.sha256


def test_a_manifest_alone_is_read_and_says_so(run: Path, tmp_path: Path) -> None:
    alone = tmp_path / "mail.json"
    alone.write_bytes((run / "manifest.json").read_bytes())
    assert read_recorded(alone).checked == "manifest alone"


def test_a_changed_sample_is_refused_by_name(run: Path) -> None:
    sample = next(run.glob("replicates/*/measure/samples.jsonl"))
    sample.write_text(sample.read_text("utf-8").replace("0.5", "0.6", 1), "utf-8")
    with pytest.raises(StaleNumber, match=r"measure/samples\.jsonl"):
        read_recorded(run)


def test_a_changed_number_is_refused(run: Path) -> None:
    edit(run, lambda raw: raw["effect"].update(ratio=0.5))
    with pytest.raises(StaleNumber, match="not what the raw files give"):
        read_recorded(run)


def test_a_changed_plan_is_refused(run: Path) -> None:
    edit(run, lambda raw: raw["plan"]["hypothesis"].update(equivalence=9.0))
    with pytest.raises(BadFile, match="not the plan that was hashed"):
        read_recorded(run)


def test_an_unfinished_run_is_refused(run: Path) -> None:
    edit(run, lambda raw: raw.update(status="interrupted"))
    with pytest.raises(BadFile, match="interrupted"):
        read_recorded(run)


def test_preflight_names_what_this_kit_does_not_have(run: Path) -> None:
    preflight = check(read_recorded(run), (), HOST_FACTS).preflight
    assert set(preflight.blocking) == {"image.virtual", "model"}
    assert preflight.distance == "same class"


def test_another_workload_is_named_phase_by_phase(run: Path, tmp_path: Path) -> None:
    edit(run, lambda raw: raw["plan"].update(seed=2))
    alone = tmp_path / "mail.json"
    raw = json.loads((run / "manifest.json").read_text("utf-8"))
    raw["plan"]["phases"][0]["requests_sha256"] = "0" * 64
    manifest = parse_manifest(raw, "x")
    raw["plan_sha256"] = manifest.plan.sha256
    store.write_json(alone, raw)
    preflight = check(read_recorded(alone), (), HOST_FACTS).preflight
    assert f"workload.{manifest.plan.phases[0].name}" in preflight.blocking


def test_only_a_difference_that_is_there_can_be_accepted(run: Path) -> None:
    recorded = read_recorded(run)
    accepted = check(recorded, ["image.virtual"], HOST_FACTS).preflight
    assert accepted.blocking == ("model",)
    with pytest.raises(UsageError, match=r"image\.other.*no such difference"):
        check(recorded, ["image.other"], HOST_FACTS)


@pytest.mark.parametrize("reference", EACH_IN_TIME)
def test_only_check_of_a_reference_answers_without_an_engine(
    reference: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere.sock")
    code = main(["reproduce", str(reference), "--only-check", "--json"])
    told = json.loads(capsys.readouterr().out)
    assert code == (8 if told["preflight"]["blocking"] else 0)
    assert told["preflight"]["checked"] == "raw files"


@pytest.fixture
def both(tmp_path: Path) -> tuple[Path, Path]:
    first, second = tmp_path / "first", tmp_path / "second"
    write_run(first, exp1_run())
    manifest = write_run(second, exp1_run(seed=2))
    digest = store.sha256_file(first / "manifest.json")
    original = Original(
        run_id=manifest.run_id,
        manifest_sha256=digest,
        plan_sha256=manifest.plan_sha256,
        accepted=(),
    )
    again = manifest.model_copy(update={"reproduces": original})
    store.write_text(second / "manifest.json", manifest_json(again))
    return first, second


def loaded(run: Path) -> Manifest:
    return load_manifest(run / "manifest.json")


def test_the_record_names_both_runs_by_the_bytes_of_their_manifests(
    both: tuple[Path, Path],
) -> None:
    result = conclude(read_recorded(both[0]), loaded(both[1]), (), ())
    assert result.original.manifest_sha256 == store.sha256_file(both[0] / "manifest.json")
    assert result.again_sha256 == store.sha256_file(both[1] / "manifest.json")
    assert result.outcome.word == "reproduced"


def test_the_report_says_the_outcome_in_both_languages(both: tuple[Path, Path]) -> None:
    first, second = loaded(both[0]), loaded(both[1])
    result = conclude(read_recorded(both[0]), second, (), ())
    for language, heading in (("en", "# Reproduction"), ("zh", "# 复现")):
        text = render(first, second, result, language)
        assert text.startswith(heading)
        assert "**reproduced.**" in text
        assert first.run_id in text


def test_the_plot_has_the_same_bytes_for_the_same_data(both: tuple[Path, Path]) -> None:
    first, second = loaded(both[0]), loaded(both[1])
    drawn = plot(first, second)
    assert drawn == plot(first, second)
    assert drawn != plot(second, first)
    assert drawn.count("<svg") == 1


def test_compare_shows_two_runs_and_many(
    both: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", *map(str, both), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["outcome"]["word"] == "reproduced"
    assert len(set(told["environment_sha256"])) == 1
    assert main(["compare", str(both[0].parent)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert main(["compare", str(both[0].parent), "--verdict", "invalid", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []


def test_references_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(MANIFESTS), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert len(rows) == len(REFERENCES)


def test_a_bundle_is_read_like_the_run_in_it(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle, _ = make_bundle(run, tmp_path / "run.kitbundle", print, with_image=False)
    monkeypatch.setenv("KIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere.sock")
    capsys.readouterr()
    assert main(["reproduce", str(bundle), "--only-check", "--json"]) == 8
    told = json.loads(capsys.readouterr().out)
    assert told["preflight"]["checked"] == "raw files"
    assert set(told["preflight"]["blocking"]) == {"image.virtual", "model"}
    assert list((tmp_path / "cache").glob("bundle-*")) == []


def test_a_bundle_with_one_other_byte_is_not_reproduced(run: Path, tmp_path: Path) -> None:
    bundle, _ = make_bundle(run, tmp_path / "run.kitbundle", print, with_image=False)
    raw = bytearray(bundle.read_bytes())
    place = raw.rindex(b'"sent_s"')
    raw[place + 1] ^= 1
    bundle.write_bytes(raw)
    assert main(["reproduce", str(bundle), "--only-check"]) == BundleDamaged.exit_code


def test_the_digest_of_a_registry_is_found_by_image(run: Path) -> None:
    manifest = load_manifest(run / "manifest.json")
    assert registry_digest(manifest, "virtual") is None
    known = Fact(
        group="container",
        name="registry_digest",
        value=["sha256:d"],
        how="planted",
        state="verified",
        service="server",
    )
    replicates = tuple(
        r.model_copy(update={"facts": (*r.facts, known)}) for r in manifest.replicates
    )
    told = manifest.model_copy(update={"replicates": replicates})
    assert registry_digest(told, "virtual") == "sha256:d"
    assert registry_digest(told, "other") is None
