"""One whole run of real vLLM in real containers, looked at from every side."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import Ran, only_manifest, quietly, run_nox

from kit.again import analyse_again
from kit.fact import Fact
from kit.image import find_image
from kit.lock import read_identity_lock
from kit.manifest import Manifest
from kit.store import changed_files


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> tuple[Ran, Manifest, Path]:
    out = tmp_path_factory.mktemp("vllm")
    words = ("-s", "exp1_prefix_cache", "--", "--quick", "--platform", "cpu", "--json", "--out")
    ran, where = quietly(lambda folder: run_nox(*words, str(folder)), out)
    assert ran.code == 0, ran.stderr
    manifest, run = only_manifest(where)
    return ran, manifest, run


Quick = tuple[Ran, Manifest, Path]


def fact(manifest: Manifest, group: str, name: str, service: str | None = None) -> Fact:
    facts = [*manifest.facts, *manifest.replicates[0].facts]
    return next(f for f in facts if (f.group, f.name, f.service) == (group, name, service))


@pytest.mark.timeout(1200)
def test_quick_run_takes_under_four_minutes_and_never_decides(quick: Quick) -> None:
    ran, manifest, _ = quick
    busy = any(n.code == "busy_machine" for n in manifest.notices)  # the time was not the kit's
    assert ran.wall_s < (480 if busy else 240)
    assert manifest.status == "complete"
    assert manifest.verdict is not None
    assert manifest.verdict.word == "inconclusive"
    assert "too few replicates" in manifest.verdict.reason


def test_the_variable_acted(quick: Quick) -> None:
    _, manifest, _ = quick
    assert manifest.not_acted == ()
    hits = {
        r.role: x.value
        for r in manifest.replicates
        for x in r.readings
        if x.name == "prefix_hits_tokens"
    }
    assert hits["baseline"] == 0
    assert hits["candidate"] is not None
    assert hits["candidate"] > 10_000


def test_the_arms_differ_in_the_variable_alone(quick: Quick) -> None:
    assert quick[1].confounders == ()


def test_every_guard_was_asked(quick: Quick) -> None:
    names = {g.name for g in quick[1].guards}
    wanted = {"failed_requests", "lost_samples", "token_counts", "send_lag", "clock", "foreign_cpu"}
    assert wanted <= names


def test_lengths_are_those_asked_for(quick: Quick) -> None:
    for replicate in quick[1].replicates:
        values = {x.name: x.value for x in replicate.readings}
        assert values["output_tokens_min"] == values["output_tokens_max"] == 16
        assert 900 < (values["input_tokens_min"] or 0) < 1200


def test_manifest_files_are_the_files_on_disk(quick: Quick) -> None:
    _, manifest, run = quick
    assert changed_files(run, manifest.files) == []
    assert any(name.endswith("logs/server.log") for name in manifest.files)


def test_raw_files_give_the_same_numbers_again(quick: Quick) -> None:
    assert analyse_again(quick[2])["equal"] is True


def test_the_image_is_the_locked_one(quick: Quick) -> None:
    locked = read_identity_lock(find_image("v0.32.0-cpu"))
    assert locked is not None
    assert [i.identity for i in quick[1].images] == [locked.digest]


def test_the_kit_costs_at_most_a_tenth(quick: Quick) -> None:
    cost = quick[1].cost
    assert cost is not None
    assert 1.0 <= cost.ratio <= 1.10


def test_report_names_what_was_run(quick: Quick) -> None:
    _, manifest, run = quick
    cpu = str(fact(manifest, "host", "cpu_model").value)
    for language in ("en", "zh"):
        text = (run / f"report.{language}.md").read_text("utf-8")
        for named in ("smollm2-135m-instruct", "v0.32.0-cpu", cpu, "driver_version"):
            assert named in text, (language, named)


def test_posture_of_the_server_container(quick: Quick) -> None:
    manifest = quick[1]
    values = {f.name: f.value for f in manifest.replicates[0].facts if f.service == "server"}
    assert values["uid"] == 10001
    assert values["no_new_privileges"] is True
