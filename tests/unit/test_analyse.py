"""From raw data to the verdict: the same in memory, from files, and at any later time."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from virtual_run import drawn, exp1_run, write_raw, write_run

from kit.again import analyse_again
from kit.analyse import Analysis, analyse, comparable, conclude, has_answer, is_enough
from kit.cli import main
from kit.errors import BadFile, NotFound
from kit.fact import Fact
from kit.planted import FAULTS
from kit.sequential import Stopping
from kit.virtual import VirtualRun, World, bench_frame, draw_run, truncated


def concluded(run: VirtualRun) -> Analysis:
    return conclude(run.plan, run.experiment, run.replicates, run.raws, run.requests, run.telemetry)


def test_a_planted_effect_is_found_at_its_size() -> None:
    found = concluded(drawn(0.30))
    assert found.verdict.word == "supported"
    assert found.effect.ratio == pytest.approx(1.3, rel=0.1)
    assert found.effect.low is not None
    assert found.effect.high is not None
    assert found.effect.low < 1.3 < found.effect.high


@pytest.mark.parametrize(("fault", "word"), [(f, w) for f, (_, w) in FAULTS.items()])
def test_every_planted_fault_ends_in_its_word(fault: str, word: str) -> None:
    run = drawn(0.30)
    FAULTS[fault][0](run, np.random.default_rng(3), True)
    assert concluded(run).verdict.word == word


def test_files_give_what_memory_gives(tmp_path: Path) -> None:
    run = drawn(0.10)
    write_raw(tmp_path, run)
    assert analyse(tmp_path, run.plan, run.experiment, run.replicates) == concluded(run)


def test_unsupported_is_handed_through() -> None:
    run = drawn()
    found = conclude(run.plan, run.experiment, (), {}, {}, {}, unsupported="no fp8 here")
    assert (found.verdict.word, found.verdict.reason) == ("unsupported", "no fp8 here")


def test_a_run_without_replicates_is_inconclusive() -> None:
    run = drawn()
    found = conclude(run.plan, run.experiment, (), {}, run.requests, {})
    assert found.verdict.word == "inconclusive"


def test_a_missing_pair_is_noticed_and_not_counted() -> None:
    run = drawn(0.30)
    FAULTS["one replicate lost"][0](run, np.random.default_rng(3), True)
    found = concluded(run)
    assert len(found.effect.values) == 7
    assert "pair_incomplete" in [n.code for n in found.notices]


def test_a_device_at_its_own_power_limit_is_a_warning_and_no_fault() -> None:
    run = drawn(0.30)
    for line in run.telemetry[3][:2]:
        line["power_limited"] = True
    found = concluded(run)
    assert found.verdict.word == "supported"
    (told,) = [n for n in found.notices if n.code == "power_limited"]
    assert f"{2 / len(run.telemetry[3]):.1%}" in told.text.en
    assert "power_limited" not in [n.code for n in concluded(drawn(0.30)).notices]


# -- confounders -------------------------------------------------------------------------------


def with_info(run: VirtualRun, change: Callable[[dict[str, Any], str], dict[str, Any]]) -> Analysis:
    for r in run.replicates:
        raw = run.raws[r.replicate]
        run.raws[r.replicate] = replace(raw, server_info=change(dict(raw.server_info), r.role))
    return concluded(run)


def test_an_unknown_configuration_is_no_evidence_of_equal_arms() -> None:
    found = with_info(drawn(), lambda _info, _role: {})
    assert found.verdict.word == "confounded"
    assert "the resolved configuration of replicate 0 is unknown" in found.confounders


def test_a_second_variable_in_the_environment_is_found() -> None:
    found = with_info(drawn(), lambda info, role: {**info, "vllm_env": {"VLLM_X": role}})
    assert found.confounders == ("vllm_env.VLLM_X: 'baseline' / 'candidate'",)


def test_what_is_drawn_anew_at_each_start_is_no_difference() -> None:
    assert comparable({"vllm_config.a": 1, "vllm_config.x_port": 5, "system_env.os": "L"}) == {
        "a": 1
    }


def fact(name: str, value: Any, group: str = "host", match: str = "must") -> Fact:
    raw = {"group": group, "name": name, "value": value, "how": "planted", "state": "verified",
           "match": match, "reason": None if value is not None else "unread"}  # fmt: skip
    return Fact.model_validate({**raw, "service": "server"})


def with_facts(run: VirtualRun, facts: Callable[[str, int], list[Fact]]) -> Analysis:
    run.replicates = [
        r.model_copy(update={"facts": tuple(facts(r.role, r.replicate))}) for r in run.replicates
    ]
    return concluded(run)


def test_a_fact_that_must_agree_and_does_not_confounds() -> None:
    found = with_facts(drawn(), lambda role, _: [fact("cpu_governor", role)])
    assert found.confounders == ("facts.server.host.cpu_governor: 'baseline' / 'candidate'",)


def test_a_fact_that_is_only_reported_or_unknown_in_one_replicate_does_not() -> None:
    def facts(role: str, number: int) -> list[Fact]:
        return [fact("free_bytes", number, match="reported"), fact("turbo", number or None)]

    assert with_facts(drawn(), facts).confounders == ()


def test_environment_may_differ_where_the_plan_says_so_and_nowhere_else() -> None:
    run = drawn()
    arms = tuple(a.model_copy(update={"env": {"VLLM_X": a.role}}) for a in run.plan.arms)
    run.plan = run.plan.model_copy(update={"arms": arms})

    def facts(role: str, _number: int) -> list[Fact]:
        return [fact("environment", {"VLLM_X": role, "VLLM_Y": role}, group="vllm")]

    assert with_facts(run, facts).confounders == (
        "facts.server.vllm.environment.VLLM_Y: 'baseline' / 'candidate'",
    )


@pytest.mark.parametrize(("topology", "told"), [("pd-shared-ipc", 0), ("pd", 2)])
def test_engines_choose_their_device_where_they_all_see_all_devices(
    topology: str, told: int
) -> None:
    run = drawn()
    baseline, candidate = run.plan.arms
    arms = (
        baseline.model_copy(update={"topology": "replicas"}),
        candidate.model_copy(update={"topology": topology}),
    )
    run.plan = run.plan.model_copy(update={"arms": arms})

    def facts(role: str, _number: int) -> list[Fact]:
        chosen = {"CUDA_VISIBLE_DEVICES": None if role == "baseline" else "0"}
        return [
            fact("environment", chosen, group="vllm").model_copy(update={"service": name})
            for arm in arms
            if arm.role == role
            for name in run.plan.topology_of(arm.role).engines
        ]

    found = with_facts(run, facts).confounders
    assert len([each for each in found if "CUDA_VISIBLE_DEVICES" in each]) == told, found


def test_packages_may_differ_only_when_the_image_is_the_variable() -> None:
    def facts(role: str, _number: int) -> list[Fact]:
        return [fact("packages", {"torch": role}, group="packages")]

    run = drawn()
    assert with_facts(run, facts).verdict.word == "confounded"
    run = drawn()
    baseline, candidate = run.plan.arms
    other = candidate.model_copy(
        update={"image": candidate.image.model_copy(update={"id": "other"})}
    )
    run.plan = run.plan.model_copy(update={"arms": (baseline, other)})
    assert with_facts(run, facts).confounders == ()


# -- a stopping rule ---------------------------------------------------------------------------


def test_a_strong_effect_stops_at_the_first_look_and_says_so() -> None:
    run = draw_run(bench_frame(1, 16, Stopping()), World(effect=0.3), np.random.default_rng(1))
    answers = {n: has_answer(r.plan, r.experiment, r.replicates, r.raws)
               for n in range(1, 17) for r in [truncated(run, n)]}  # fmt: skip
    assert min(n for n, yes in answers.items() if yes) == 6
    found = concluded(truncated(run, 6))
    assert found.verdict.word == "supported"
    assert "stopped_early" in [n.code for n in found.notices]


def test_without_a_rule_there_is_no_early_answer() -> None:
    run = drawn(0.30)
    assert not has_answer(run.plan, run.experiment, run.replicates, run.raws)


def test_half_a_pair_is_no_place_to_stop() -> None:
    run = draw_run(bench_frame(1, 16, Stopping()), World(effect=0.3), np.random.default_rng(1))
    assert not has_answer(run.plan, run.experiment, run.replicates[:13], run.raws)


# -- at any later time -------------------------------------------------------------------------


def test_analysing_again_gives_the_same_bytes(tmp_path: Path) -> None:
    manifest = write_run(tmp_path, exp1_run())
    assert manifest.verdict is not None
    assert manifest.verdict.word == "supported"
    again = analyse_again(tmp_path)
    assert again["equal"] is True
    assert again["changed_files"] == []
    recorded = json.loads((tmp_path / "manifest.json").read_text("utf-8"))
    for key in ("verdict", "effect", "guards"):
        assert json.dumps(again[key]) == json.dumps(recorded[key])
    readings = [r["readings"] for r in recorded["replicates"]]
    assert json.dumps(again["readings"]) == json.dumps(readings)


def change_first_sample(run: Path) -> str:
    path = next(run.glob("replicates/00-*/measure/samples.jsonl"))
    lines = path.read_text("utf-8").splitlines()
    sample = json.loads(lines[0])
    sample["chunk_s"] = [t + 9 for t in sample["chunk_s"]]
    sample["done_s"] += 9
    path.write_text("\n".join([json.dumps(sample), *lines[1:]]) + "\n", "utf-8")
    return path.relative_to(run).as_posix()


def test_a_changed_sample_gives_other_numbers_and_is_named(tmp_path: Path) -> None:
    write_run(tmp_path, exp1_run())
    name = change_first_sample(tmp_path)
    again = analyse_again(tmp_path)
    assert again["equal"] is False
    assert again["changed_files"] == [f"{name}: other bytes than the manifest says"]


def test_a_byte_that_changes_no_number_is_named_all_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path, exp1_run())
    path = next(tmp_path.glob("replicates/00-*/measure/samples.jsonl"))
    path.write_text(path.read_text("utf-8").replace(": ", ":  ", 1), "utf-8")
    assert main(["analyse", str(tmp_path)]) == 70
    told = capsys.readouterr().err
    assert f"changed: {path.relative_to(tmp_path).as_posix()}: other bytes" in told
    assert "no number differs" in told


def test_what_differs_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, exp1_run())
    change_first_sample(tmp_path)
    assert main(["analyse", str(tmp_path)]) == 70
    assert "NOT equal to the manifest: readings" in capsys.readouterr().err


def test_a_run_that_has_not_ended_is_not_analysed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path, exp1_run())
    path = tmp_path / "manifest.json"
    raw = json.loads(path.read_text("utf-8"))
    path.write_text(json.dumps(raw | {"status": "running", "verdict": None}), "utf-8")
    assert main(["analyse", str(tmp_path)]) == 11
    assert "the run has not ended" in capsys.readouterr().err


def test_a_number_changed_in_the_manifest_is_found(tmp_path: Path) -> None:
    write_run(tmp_path, exp1_run())
    path = tmp_path / "manifest.json"
    raw = json.loads(path.read_text("utf-8"))
    raw["replicates"][0]["readings"][0]["value"] *= 1.000001
    path.write_text(json.dumps(raw), "utf-8")
    assert analyse_again(tmp_path)["equal"] is False


def test_a_claim_changed_after_the_data_is_refused(tmp_path: Path) -> None:
    write_run(tmp_path, exp1_run())
    path = tmp_path / "manifest.json"
    raw = json.loads(path.read_text("utf-8"))
    raw["plan"]["hypothesis"]["margin"] = 0.01
    path.write_text(json.dumps(raw), "utf-8")
    with pytest.raises(BadFile, match="not the plan that was hashed"):
        analyse_again(tmp_path)


@pytest.mark.parametrize(
    ("lost", "error"),
    [("manifest.json", NotFound), ("workload/measure.jsonl", BadFile)],
)
def test_a_missing_file_is_named(tmp_path: Path, lost: str, error: type[Exception]) -> None:
    write_run(tmp_path, exp1_run())
    (tmp_path / lost).unlink()
    with pytest.raises(error, match=Path(lost).name):
        analyse_again(tmp_path)


def spared(spoil: Sequence[int], *, ran: int = 9) -> VirtualRun:
    """Return 6 pairs and 3 spare ones, of which `ran` were run; some replicates are spoiled."""
    run = draw_run(bench_frame(1, 6, None, 3), World(effect=0.3), np.random.default_rng(1))
    for replicate in spoil:
        for i, line in enumerate(run.telemetry[replicate]):
            line["ours_s"] = line["busy_s"] - 4.0 * i * 0.2
    return truncated(run, ran)


def enough(run: VirtualRun) -> bool:
    return is_enough(
        run.plan, run.experiment, run.replicates, run.raws, run.requests, run.telemetry
    )


def test_a_spare_pair_stands_in_for_a_spoiled_one() -> None:
    run = spared([3], ran=7)  # the second pair
    found = concluded(run)
    assert found.set_aside == (1,)
    assert found.verdict.word == "supported"
    assert len(found.effect.values) == 6
    assert any(not g.ok and g.replicate == 3 for g in found.guards)
    assert any(n.code == "pairs_set_aside" for n in found.notices)


def test_without_spoiled_pairs_none_is_set_aside() -> None:
    found = concluded(spared([], ran=6))
    assert found.set_aside == ()
    assert found.verdict.word == "supported"


def test_more_spoiled_pairs_than_spare_ones_leave_the_run_invalid() -> None:
    found = concluded(spared([0, 2, 4, 6]))
    assert found.set_aside == ()
    assert found.verdict.word == "invalid"


def test_a_run_ends_with_as_many_unspoiled_pairs_as_planned_or_when_that_is_out_of_reach() -> None:
    assert not enough(spared([], ran=5))
    assert enough(spared([], ran=6))
    assert not enough(spared([3], ran=6))
    assert enough(spared([3], ran=7))
    assert not enough(spared([0, 2, 4], ran=8))
    assert enough(spared([0, 2, 4, 6], ran=6))


def test_other_faults_are_never_set_aside() -> None:
    run = spared([], ran=6)
    FAULTS["half of the requests fail"][0](run, np.random.default_rng(1), True)
    found = concluded(run)
    assert found.set_aside == ()
    assert found.verdict.word == "invalid"


def test_a_plan_without_spare_pairs_keeps_the_hash_it_had_before_there_were_any() -> None:
    plan = bench_frame(1, 6, None).plan
    assert "spare_pairs" not in plan.model_dump()
    assert bench_frame(1, 6, None, 3).plan.sha256 != plan.sha256


def test_a_shared_device_is_no_performance_result() -> None:
    run = drawn(effect=0.30)
    assert concluded(run).verdict.word == "supported"
    run.plan = run.plan.model_copy(update={"shared_device": True})
    found = concluded(run)
    assert (found.verdict.word, found.verdict.reason) == (
        "inconclusive",
        "a shared device, not a performance result",
    )
    assert "shared_device" in [n.code for n in found.notices]
