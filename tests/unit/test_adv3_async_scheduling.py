"""adv3: the switch acted if the engine resolved it, and one that was forced off is unsupported."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from virtual_run import write_raw

from kit.analyse import analyse, answered, conclude
from kit.experiment import Scale, against_itself, apply_variant, between_images, find_experiment
from kit.experiments.adv3_async_scheduling import HIGH, LOW, MIDDLE, OF_STACKS, SAMPLE_HZ
from kit.measure import Raw, Reading, Window
from kit.overlap import Overlap
from kit.plan import flag_words
from kit.stacks import Folded, SampledEngine, SampledProcess, Stacks
from kit.trace import Trace
from kit.verdict import Verdict
from kit.virtual import VirtualRun, World, draw_run, frame, virtual_experiment

NAME = "adv3_async_scheduling"
EXPERIMENT = find_experiment(NAME)


def run_with(baseline: Any, candidate: Any) -> VirtualRun:
    """Draw a run whose engines resolved the switch to these values."""
    drawable = replace(EXPERIMENT, workload=virtual_experiment().workload)
    run = draw_run(frame(NAME, drawable, pairs=6), World(effect=0.2), np.random.default_rng(1))
    told = {"baseline": baseline, "candidate": candidate}
    for r in run.replicates:
        info = {"vllm_config": {"scheduler_config": {"async_scheduling": told[r.role]}}}
        run.raws[r.replicate] = replace(run.raws[r.replicate], server_info=info)
    return run


def verdict(run: VirtualRun) -> Verdict:
    found = conclude(
        run.plan, run.experiment, run.replicates, run.raws, run.requests, run.telemetry
    )
    return found.verdict


def test_a_switch_that_the_engine_resolved_as_asked_is_judged() -> None:
    found = verdict(run_with(False, True))
    assert found.word in ("supported", "not supported", "inconclusive")
    assert "output_tok_per_s" in found.reason


def test_a_switch_that_was_forced_off_in_silence_is_unsupported() -> None:
    found = verdict(run_with(False, False))
    assert found.word == "unsupported"
    assert found.reason.startswith("the engine was told --async-scheduling and switched it off")
    assert "async_scheduling of candidate == 1 was asked, and seen: 0" in found.reason


def test_without_a_baseline_that_is_off_the_numbers_only_describe() -> None:
    found = verdict(run_with(True, True))
    assert found.word == "inconclusive"
    assert "no comparable baseline, so the numbers describe and claim nothing" in found.reason


def test_an_unknown_configuration_does_not_speak_for_the_platform() -> None:
    found = verdict(run_with(None, None))
    assert found.word == "inconclusive"
    assert "async_scheduling is None, not a number" in found.reason


def test_the_first_candidate_that_was_forced_off_ends_the_run(tmp_path: Path) -> None:
    run = run_with(False, False)
    write_raw(tmp_path, run)
    first = next(r for r in run.replicates if r.role == "candidate")
    before = [r for r in run.replicates if r.replicate < first.replicate]
    assert not before or not answered(tmp_path, run.plan, EXPERIMENT, before)
    done = [*before, first]
    assert answered(tmp_path, run.plan, EXPERIMENT, done)
    assert analyse(tmp_path, run.plan, EXPERIMENT, done).verdict.word == "unsupported"
    acting = run_with(False, True)
    write_raw(tmp_path, acting)
    assert not answered(tmp_path, acting.plan, EXPERIMENT, done)


def test_the_arms_differ_in_the_supported_switch_alone() -> None:
    baseline, candidate = EXPERIMENT.variable.arms
    assert flag_words(baseline.flags) == ["--no-async-scheduling"]
    assert flag_words(candidate.flags) == ["--async-scheduling"]
    assert (baseline.env, baseline.topology) == (candidate.env, candidate.topology)


@pytest.mark.parametrize(("variant", "lanes"), [("low", LOW), (None, MIDDLE), ("high", HIGH)])
def test_three_loads_that_carry_a_99th_percentile(variant: str | None, lanes: int) -> None:
    measured = apply_variant(EXPERIMENT, NAME, variant).workload(Scale("m", 1, "cuda"))[-1]
    assert measured.concurrency == len({r["lane"] for r in measured.requests}) == lanes
    assert len(measured.requests) * 0.01 >= 5
    assert lanes <= int(str(EXPERIMENT.settings["max-num-seqs"]))


def test_the_trace_comes_last_and_feeds_no_timing() -> None:
    traced = apply_variant(EXPERIMENT, NAME, "profile")
    phases = traced.workload(Scale("m", 1, "cuda"))
    assert phases[:-1] == EXPERIMENT.workload(Scale("m", 1, "cuda"))
    assert phases[-1].profile
    assert len({r["lane"] for r in phases[-1].requests}) == MIDDLE
    assert traced.hypothesis == EXPERIMENT.hypothesis
    share = next(m for m in traced.measures if m.name == "schedule_hidden_share")

    def read(trace: Trace | None) -> Reading:
        traces = {} if trace is None else {"trace-server-rank0.json.gz": trace}
        return share.compute(Raw({"profile": Window("r/profile", (), (), {}, traces=traces)}))

    overlap = Overlap(schedule_s=0.4, forward_s=2.0, both_s=0.1)
    found = read(Trace(split=None, overlap=overlap))
    assert (found.value, found.sources) == (0.25, ("r/profile/trace-server-rank0.json.gz",))
    for nothing in (None, Trace(split=None, overlap=None)):
        found = read(nothing)
        assert found.value is None
        assert found.reason == "the trace marks no scheduling beside a forward pass"


def test_the_sampled_phase_comes_last_and_feeds_no_timing() -> None:
    sampled = apply_variant(EXPERIMENT, NAME, "sampled")
    phases = sampled.workload(Scale("m", 1, "cuda"))
    before = EXPERIMENT.workload(Scale("m", 1, "cuda"))
    assert phases[:-1] == before
    assert [p.sample_hz for p in phases] == [0] * len(before) + [SAMPLE_HZ]
    assert [r["body"] for r in phases[-1].requests] == [r["body"] for r in before[-1].requests]
    assert sampled.settings == EXPERIMENT.settings
    assert sampled.env == EXPERIMENT.env
    assert sampled.hypothesis == EXPERIMENT.hypothesis
    assert {m.name for m in sampled.measures} - {m.name for m in EXPERIMENT.measures} == {
        m.name for m in OF_STACKS
    }


CORE_FILE = "stacks-server-engine-core-7.txt.gz"


def stacks_of(
    *, samples: int = 50, said: str = "Samples: 400 Errors: 2", role: str = "engine-core"
) -> Stacks:
    core = SampledProcess(
        pid=7, role=role, title="t", file=CORE_FILE, window_s=4.0, status=0, said=(said,)
    )
    folded = Folded(
        samples=samples, skipped=0, scheduling={"schedule": samples // 5, "update_from_output": 5}
    )
    engine = SampledEngine(version=1, rate_hz=100, processes=(core,))
    return Stacks(engines={"server": engine}, files={CORE_FILE: folded})


def sampled_readings(stacks: Stacks) -> dict[str, Reading]:
    raw = Raw({"sampled": Window("r/sampled", (), (), {}, stacks=stacks)})
    return {m.name: m.read(raw) for m in OF_STACKS}


def test_seconds_are_the_share_of_the_looks_times_the_window() -> None:
    found = sampled_readings(stacks_of())
    assert {name: r.value for name, r in found.items()} == {
        "sampled_schedule_share": 0.2,
        "sampled_schedule_s": 0.1,  # 10 of 400 looks in 4 s: the core slept in most of them
        "sampled_update_s": 0.05,
        "sampled_window_s": 4.0,
        "sampled_stacks": 50.0,
        "sampling_errors": 2.0,
    }
    expected = ("r/sampled/stacks-server.json", f"r/sampled/{CORE_FILE}")
    assert {r.sources for r in found.values()} == {expected}
    assert {r.n for r in found.values()} == {50}


@pytest.mark.parametrize(
    ("stacks", "reason"),
    [
        (Stacks(), "nothing tells of the sampling"),
        (stacks_of(role="other"), "no process of the name EngineCore"),
        (stacks_of(samples=0, said="Error: Operation not permitted"), "Operation not permitted"),
        (
            Stacks(
                engines={
                    "server": SampledEngine(version=1, rate_hz=1, processes=(), problem="it died")
                }
            ),
            "the sampler: it died",
        ),
    ],
)
def test_what_was_not_sampled_is_null_for_a_reason(stacks: Stacks, reason: str) -> None:
    for reading in sampled_readings(stacks).values():
        assert reading.value is None
        assert reason in str(reading.reason)


def test_without_the_number_of_looks_there_are_no_seconds_but_a_share() -> None:
    found = sampled_readings(stacks_of(said="killed"))
    assert found["sampled_schedule_share"].value == 0.2
    for name in ("sampled_schedule_s", "sampled_update_s", "sampling_errors"):
        assert found[name].reason == "the sampler did not say how often it looked"


def test_only_the_sampled_plan_names_a_sampler() -> None:
    for variant in (None, *EXPERIMENT.variants):
        changed = apply_variant(EXPERIMENT, NAME, variant)
        told = frame(NAME, changed).plan.model_dump(mode="json")
        rates = [p["sample_hz"] for p in told["phases"] if "sample_hz" in p]
        assert rates == ([SAMPLE_HZ] if variant == "sampled" else [])
        assert "sampler" not in told  # a virtual plan runs none


def test_nothing_is_asked_of_the_platform_where_both_arms_are_the_baseline() -> None:
    assert against_itself(EXPERIMENT).offered == ()


def test_between_two_images_both_must_offer_it() -> None:
    both = between_images(EXPERIMENT, "old", "new")
    assert [p.holds.arm for p in both.offered] == ["candidate", "baseline"]  # type: ignore[union-attr]


def test_plans_without_it_keep_their_form() -> None:
    plan = frame("exp1_prefix_cache", find_experiment("exp1_prefix_cache")).plan.model_dump()
    assert "offered" not in plan
    assert "otherwise" not in plan["acted"][0]
