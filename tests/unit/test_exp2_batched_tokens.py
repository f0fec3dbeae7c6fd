"""exp2: a stall shows in the primary statistic; the budgets act by what streams get."""

from typing import Any

import pytest

from kit.asked import random_ids
from kit.experiment import Scale, apply_variant, find_experiment
from kit.experiments.exp2_batched_tokens import LANES, SIZES, SMALL, workload
from kit.measure import Raw, Window
from kit.verdict import check_acted

NAME = "exp2_batched_tokens"
EXPERIMENT = find_experiment(NAME)


def measure(name: str, raw: Raw) -> float | None:
    return next(m for m in EXPERIMENT.all_measures if m.name == name).read(raw).value


def stream(number: int, kind: str, gaps: list[float]) -> dict[str, Any]:
    times = [1.0]
    for gap in gaps:
        times.append(times[-1] + gap)
    return {
        "id": f"{kind}{number}",
        "tags": {"kind": kind},
        "lane": kind,
        "sent_s": 0.0,
        "chunk_s": times,
        "done_s": times[-1],
        "completion_tokens": len(times),
        "prompt_tokens": 5,
        "error": None,
    }


def raw(samples: list[dict[str, Any]]) -> Raw:
    return Raw(windows={"measure": Window("r/measure", tuple(samples), (), {})})


def test_few_long_stalls_show_in_the_primary_and_hide_in_the_pooled_gaps() -> None:
    stalled = raw([stream(i, "short", [0.01] * 150 + [4.0]) for i in range(10)])
    chunked = raw([stream(i, "short", [0.5] * 6 + [0.01] * 145) for i in range(10)])
    assert measure("stream_max_itl_p50_s", stalled) == pytest.approx(4.0)
    assert measure("stream_max_itl_p50_s", chunked) == pytest.approx(0.5)
    pooled = [measure("stream_gaps_p99_s", r) for r in (stalled, chunked)]
    assert pooled[0] == pytest.approx(0.01)
    assert pooled[1] == pytest.approx(0.5)  # the wrong way round


def test_long_prompts_stay_out_of_the_streams_numbers() -> None:
    samples = [stream(i, "short", [0.1]) for i in range(10)]
    with_long = [*samples, *(stream(i, "long", [9.0]) for i in range(6))]
    assert measure("stream_max_itl_p50_s", raw(with_long)) == pytest.approx(0.1)
    assert measure("long_ttft_mean_s", raw(with_long)) == pytest.approx(1.0)


def test_tpot_p99_is_null_where_the_sample_cannot_carry_it() -> None:
    assert measure("stream_tpot_p99_s", raw([stream(i, "short", [0.1]) for i in range(20)])) is None
    many = raw([stream(i, "short", [0.1]) for i in range(500)])
    assert measure("stream_tpot_p99_s", many) == pytest.approx(0.1)


def beside_a_prefill(steps: int) -> Raw:
    """A stream that gets a token a second, `steps` of them while a long prompt is read."""
    long = {**stream(0, "long", [0.1]), "sent_s": 0.5, "chunk_s": [1.0 + steps, 9.9]}
    return raw([stream(0, "short", [1.0] * 20), long])


def holds(variant: str | None, baseline: Raw, candidate: Raw) -> bool:
    experiment = apply_variant(EXPERIMENT, NAME, variant)
    measures = {m.name: m for m in experiment.measures}
    readings = {
        (role, c.measure, i): measures[c.measure].read(seen)
        for i, (role, seen) in enumerate((("baseline", baseline), ("candidate", candidate)))
        for c in experiment.acted
    }
    return not check_acted(experiment.acted, readings)


@pytest.mark.parametrize("variant", [None, "budgets-1024-16384"])
def test_acted_needs_streams_that_go_on_in_the_small_arm_and_stall_in_the_large(
    variant: str | None,
) -> None:
    assert measure("tokens_during_prefill", beside_a_prefill(6)) == 6
    assert holds(variant, beside_a_prefill(2), beside_a_prefill(6))
    assert not holds(variant, beside_a_prefill(6), beside_a_prefill(6))
    assert not holds(variant, beside_a_prefill(2), beside_a_prefill(2))


def test_a_long_prompt_that_met_no_stream_proves_nothing() -> None:
    alone = {**stream(0, "long", [0.1]), "sent_s": 50.0, "chunk_s": [55.0, 55.1]}
    assert measure("tokens_during_prefill", raw([stream(0, "short", [0.1]), alone])) is None
    assert measure("tokens_during_prefill", raw([alone])) is None


def first_tokens(times: list[float]) -> Raw:
    return raw([{**stream(i, "short", [0.1]), "chunk_s": [t]} for i, t in enumerate(times)])


def test_batch_acted_needs_prompts_that_end_together_in_the_large_arm_only() -> None:
    together, apart = first_tokens([1.0, 1.002, 1.004, 1.006]), first_tokens([1.0, 1.5, 2.0, 2.5])
    assert holds("batch-only", apart, together)
    assert not holds("batch-only", together, together)
    assert not holds("batch-only", apart, apart)


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_long_prompts_outlast_the_streams_and_every_stream_meets_a_stall(platform: str) -> None:
    size = SIZES[platform]
    tokens_of_a_cycle = 11  # one step with the whole prompt, ten of the long answer
    assert size.stream_tokens > tokens_of_a_cycle
    assert size.streams * size.stream_tokens <= size.longs * tokens_of_a_cycle
    assert size.long_tokens > SMALL * 2
    requests = workload(Scale(model="m", seed=1, platform=platform))[-1].requests
    assert len({r["lane"] for r in requests}) == LANES + 1
    prompts = [tuple(r["body"]["prompt"]) for r in requests if r["tags"]["kind"] == "long"]
    assert len(set(prompts)) == size.longs


def test_a_random_prompt_has_exactly_its_tokens_and_follows_the_seed() -> None:
    one = random_ids(Scale(model="m", seed=1), "l0", 50)
    assert len(one) == 50
    assert one == random_ids(Scale(model="m", seed=1), "l0", 50)
    assert one != random_ids(Scale(model="m", seed=2), "l0", 50)


def test_batch_only_asks_whether_the_large_budget_raises_throughput() -> None:
    batch = apply_variant(EXPERIMENT, NAME, "batch-only")
    assert [a.name for a in batch.variable.arms] == ["small", "large"]
    assert (batch.hypothesis.measure, batch.hypothesis.direction) == (
        "output_tok_per_s",
        "increase",
    )
