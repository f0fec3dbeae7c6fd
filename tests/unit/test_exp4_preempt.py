"""exp4: pressure is proven first, and preemptions have a ratio although they may be none."""

from typing import Any

import pytest

from kit.experiment import Scale, apply_variant, find_experiment
from kit.experiments.exp4_preempt import (
    AMPLE,
    BLOCK_TOKENS,
    HALF,
    OUTPUT_TOKENS,
    PROMPT_TOKENS,
    REQUESTS,
    SCARCE,
    workload,
)
from kit.measure import Raw, Reading, Scrape, Window, parse_metrics
from kit.verdict import check_acted, effect_of, judge

NAME = "exp4_preempt"
EXPERIMENT = find_experiment(NAME)
SETTINGS = EXPERIMENT.settings


def scrape(t_s: float, usage: float, waiting: int, preemptions: int) -> Scrape:
    text = "".join(
        f"# TYPE vllm:{name} {kind}\nvllm:{name}{{engine='0'}} {value}\n".replace("'", '"')
        for name, kind, value in (
            ("kv_cache_usage_perc", "gauge", usage),
            ("num_requests_waiting", "gauge", waiting),
            ("num_requests_running", "gauge", 8),
            ("num_preemptions_total", "counter", preemptions),
        )
    )
    return Scrape(t_s, parse_metrics(text))


def raw(usage: float, waiting: int, preemptions: int) -> Raw:
    samples: list[dict[str, Any]] = [{"id": str(i), "error": None} for i in range(20)]
    scrapes = (
        scrape(-0.1, 0.0, 0, 0),
        scrape(1.0, usage, waiting, 0),  # the counter lags behind
        scrape(9.0, 0.0, 0, preemptions),
    )
    return Raw(windows={"measure": Window("r/measure", tuple(samples), scrapes, {})})


def read(raw_of: Raw, name: str) -> Reading:
    return next(m for m in EXPERIMENT.measures if m.name == name).read(raw_of)


CALM, PRESSED = raw(0.5, 0, 0), raw(1.0, 12, 10)


def judged(baseline: Raw, candidate: Raw) -> str:
    arms = (("baseline", baseline), ("candidate", candidate))
    readings = {
        (role, c.measure, i): read(arm, c.measure)
        for i, (role, arm) in enumerate(arms)
        for c in EXPERIMENT.acted
    }
    values = [read(arm, EXPERIMENT.hypothesis.measure).value for _, arm in arms]
    pair = (values[0] or 0.0, values[1] or 0.0)
    return judge(
        EXPERIMENT.hypothesis,
        effect=effect_of(EXPERIMENT.hypothesis, [pair] * 6),
        unsupported=None,
        guards=(),
        confounders=(),
        not_acted=check_acted(EXPERIMENT.acted, readings),
        pairs_planned=6,
    ).word


def test_preemptions_under_pressure_are_supported() -> None:
    assert judged(CALM, PRESSED) == "supported"


def test_no_preemption_without_pressure_is_inconclusive_never_a_result() -> None:
    assert judged(CALM, CALM) == "inconclusive"
    assert judged(CALM, raw(1.0, 0, 0)) == "inconclusive"
    assert judged(CALM, raw(0.6, 12, 30)) == "inconclusive"


def test_no_preemption_under_proven_pressure_is_not_supported() -> None:
    assert judged(CALM, raw(1.0, 12, 0)) == "not supported"


def test_pressure_in_the_baseline_too_is_inconclusive() -> None:
    assert judged(PRESSED, PRESSED) == "inconclusive"


def test_starts_are_one_and_preemptions_and_the_last_scrape_counts() -> None:
    assert read(CALM, "starts_per_request").value == 1.0
    assert read(PRESSED, "starts_per_request").value == 1.5
    assert read(PRESSED, "preemptions").value == 10
    assert read(PRESSED, "kv_usage_mean").value == pytest.approx(0.5)


def test_a_missing_counter_is_null_and_not_one_start() -> None:
    bare = Raw(windows={"measure": Window("r/measure", ({"id": "0", "error": None},), (), {})})
    reading = read(bare, "starts_per_request")
    assert (reading.value, reading.reason) == (
        None,
        "vllm:num_preemptions_total was not in two scrapes",
    )


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_the_sizes_make_pressure_in_one_arm_only(platform: str) -> None:
    needed = -(-(PROMPT_TOKENS + OUTPUT_TOKENS) // BLOCK_TOKENS)  # blocks of a whole request
    at_once = min(REQUESTS[platform], int(str(SETTINGS["max-num-seqs"])))
    assert at_once * needed < 0.9 * AMPLE
    assert at_once * needed > 2 * SCARCE
    for blocks in (AMPLE, SCARCE, HALF):  # else the engine refuses to start
        assert blocks * BLOCK_TOKENS >= int(str(SETTINGS["max-model-len"]))


def test_half_of_the_requests_are_urgent_and_come_later() -> None:
    priority = apply_variant(EXPERIMENT, NAME, "priority")
    requests = priority.workload(Scale(model="m", seed=1))[-1].requests
    urgent = [r for r in requests if r["tags"]["kind"] == "urgent"]
    assert len(urgent) * 2 == len(requests)
    assert {r["body"]["priority"] for r in urgent} == {0}
    assert {r["body"]["priority"] for r in requests if r not in urgent} == {10}
    assert min(r["at_s"] for r in urgent) > 0.0
    assert "priority" not in workload(Scale(model="m", seed=1))[-1].requests[0]["body"]


def test_halving_asks_for_more_than_twice_the_preemptions() -> None:
    halved = apply_variant(EXPERIMENT, NAME, "kv-halved")
    flags = [a.flags["num-gpu-blocks-override"] for a in halved.variable.arms]
    assert flags == [SCARCE, HALF]
    assert halved.hypothesis.margin == 1.0
    assert {c.arm for c in halved.acted} == {"baseline", "candidate"}
