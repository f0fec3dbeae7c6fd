"""The knee of a load curve: found where a server's capacity was planted, and null where it is not
in what was asked.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kit.analyse import Analysis, conclude
from kit.curve import SETTLING, Stair, at_knee, find_knee, served_in, staircase, stairs_of
from kit.experiment import Scale, against_itself, apply_variant, find_experiment
from kit.experiments.adv2_tp_scaling import RATES, STAIR_S
from kit.measure import Raw, Window
from kit.virtual import World, draw_run, frame

NAME = "adv2_tp_scaling"
EXPERIMENT = apply_variant(find_experiment(NAME), NAME, "load-curve")
TOKENS = 16
ROOM = 64  # requests that the server runs at once


def served(
    capacity_req_per_s: float,
    rates: Sequence[float] = RATES["cpu"],
    *,
    tokens: int = TOKENS,
    alone_s: float = 1.0,
) -> list[dict[str, Any]]:
    """Serve a staircase: each step gives every running request a token, and takes its time.

    Alone, a request takes `alone_s`; together they get `capacity_req_per_s` times `tokens` tokens
    a second, and no more than that; `ROOM` of them run at once.
    """
    requests = [
        {
            "id": f"r{i:04d}",
            "tags": arrival.tags,
            "lane": None,
            "intended_s": arrival.at_s,
            "sent_s": arrival.at_s,
            "chunk_s": [],
            "status": 200,
            "prompt_tokens": 32,
            "completion_tokens": tokens,
            "error": None,
        }
        for i, arrival in enumerate(staircase(rates, STAIR_S))
    ]
    coming, running = deque(requests), deque[dict[str, Any]]()
    now = 0.0
    while coming or running:
        while coming and coming[0]["intended_s"] <= now and len(running) < ROOM:
            running.append(coming.popleft())
        if not running:
            now = coming[0]["intended_s"]
            continue
        now += max(alone_s / tokens, len(running) / (capacity_req_per_s * tokens))
        for request in list(running):
            request["chunk_s"].append(now)
            if len(request["chunk_s"]) == tokens:
                request["done_s"] = now
                running.remove(request)
    return requests


def raw_of(samples: Sequence[dict[str, Any]]) -> Raw:
    return Raw({"measure": Window("r/measure", tuple(samples), (), {})})


KNEE = at_knee(lambda stair: stair.served_req_per_s)


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(sorted(RATES)), st.floats(0, 1), st.floats(0.1, 3.0))
def test_a_planted_knee_is_found(platform: str, place: float, alone_s: float) -> None:
    rates = RATES[platform]
    low, high = 1.15 * rates[0], 0.85 * rates[-1]
    capacity = low * (high / low) ** place
    found = KNEE(raw_of(served(capacity, rates, alone_s=alone_s)))
    # at the lowest rates one step of all running requests lasts as long as a stair
    assert found.value == pytest.approx(min(capacity, ROOM / alone_s), rel=0.15)
    assert found.sources == ("r/measure/samples.jsonl",)


@settings(deadline=None, max_examples=20)
@given(st.floats(1.3, 20.0))
def test_a_server_that_keeps_up_with_every_rate_has_no_knee_here(beyond: float) -> None:
    found = KNEE(raw_of(served(beyond * RATES["cpu"][-1])))
    assert found.value is None
    assert found.reason == (
        "every rate was still served, up to 2 requests/s: the knee is beyond it"
    )


@settings(deadline=None, max_examples=20)
@given(st.floats(0.1, 0.8))
def test_a_server_that_the_lowest_rate_is_too_much_for_has_none_either(share: float) -> None:
    found = KNEE(raw_of(served(share * RATES["cpu"][0])))
    assert found.value is None
    assert str(found.reason).startswith("even the lowest rate was too much: ")
    assert "of 0.25 requests/s were served" in str(found.reason)


def test_what_still_queues_when_the_load_ends_biases_no_stair() -> None:
    samples = served(0.3, tokens=1024, alone_s=4.0)
    end_s = STAIR_S * len(RATES["cpu"])
    queued = [s for s in samples if s["chunk_s"][0] > end_s]
    assert len(queued) > 10
    for s in queued:  # whenever they are served, and whether
        s["chunk_s"] = [100 * c for c in s["chunk_s"]] if s["id"] < "r0080" else []
    again = served(0.3, tokens=1024, alone_s=4.0)
    assert stairs_of(samples) == stairs_of(again)
    assert KNEE(raw_of(samples)).value == pytest.approx(0.3, rel=0.1)


def test_a_steady_server_gives_each_stair_what_was_offered_in_it() -> None:
    stairs = stairs_of(served(100.0))
    assert [s.number for s in stairs] == [1, 2, 3, 4, 5]
    assert [s.offered_req_per_s for s in stairs] == list(RATES["cpu"])
    for stair in stairs:
        assert stair.served_req_per_s == pytest.approx(stair.offered_req_per_s)
        assert stair.tokens_per_request == TOKENS
        assert not stair.is_saturated


@pytest.mark.parametrize("platform", sorted(RATES))
def test_the_counted_part_of_every_stair_holds_whole_requests(platform: str) -> None:
    for rate in RATES[platform]:
        assert (rate * STAIR_S).is_integer()
        assert (rate * STAIR_S * SETTLING).is_integer()
    asked = EXPERIMENT.workload(Scale("m", 1, platform))[-1].requests
    assert len(asked) == sum(RATES[platform]) * STAIR_S
    times = [r["at_s"] for r in asked]
    assert times == sorted(times)
    assert {r["tags"]["stair"] for r in asked} == {1, 2, 3, 4, 5}
    assert times[-1] < STAIR_S * len(RATES[platform])


def test_failed_requests_serve_nothing_and_break_nothing() -> None:
    lost = [{**s, "chunk_s": [], "completion_tokens": None, "error": "x"} for s in served(1.0)]
    assert {s.served_tok_per_s for s in stairs_of(lost)} == {0.0}
    assert "0 of 0.25" in str(KNEE(raw_of(lost)).reason)


def test_samples_of_no_staircase_have_no_knee() -> None:
    plain = [{**s, "tags": {}} for s in served(1.0)]
    assert find_knee(stairs_of(plain)) == "no request belongs to a stair"
    assert served_in(1)(raw_of(plain)).reason == "the load has no stair 1"


def test_the_plateau_counts_and_not_the_first_saturated_stair() -> None:
    def stair(number: int, offered: float, got: float) -> Stair:
        return Stair(number, offered, 10, got * 10)

    rising = [stair(1, 1, 1), stair(2, 2, 1.7), stair(3, 4, 2.4), stair(4, 8, 2.1)]
    knee = find_knee(rising)
    assert isinstance(knee, Stair)
    assert knee.served_req_per_s == 2.4


# -- the variant as a whole --------------------------------------------------------------------


def judged(gain: float, *, aa: bool) -> Analysis:
    """Conclude a run whose candidate has `gain` times the baseline's capacity, with some noise."""
    experiment = against_itself(EXPERIMENT) if aa else EXPERIMENT
    run = draw_run(frame(NAME, experiment, pairs=6), World(), np.random.default_rng(3))
    draw = np.random.default_rng(4)
    for r in run.replicates:
        on = r.role == "candidate"
        capacity = 0.8 * (gain if on else 1.0) * math.exp(draw.normal(0.0, 0.03))
        raw = run.raws[r.replicate]
        warm, measured = raw.windows["warmup"], raw.measured
        warm = replace(warm, samples=tuple({**s, "prompt_tokens": 32} for s in warm.samples))
        measured = replace(measured, samples=tuple(served(capacity, tokens=32)))
        ranks = {"tensor_parallel_size": 2 if on and not aa else 1}
        run.raws[r.replicate] = replace(
            raw,
            windows={"warmup": warm, "measure": measured},
            server_info={"vllm_config": {"parallel_config": ranks}},
        )
    return conclude(run.plan, experiment, run.replicates, run.raws, run.requests, run.telemetry)


def test_a_higher_knee_is_supported_and_told_per_device() -> None:
    found = judged(1.6, aa=False)
    assert found.verdict.word == "supported", found.verdict
    assert found.effect.ratio == pytest.approx(1.6, rel=0.1)
    scaling = [r.value for c in found.comparisons for r in c.readings]
    assert scaling == pytest.approx([0.8] * 6, rel=0.15)


def test_the_baseline_against_itself_is_no_effect() -> None:
    found = judged(1.0, aa=True)
    assert found.verdict.word == "not supported", found.verdict
    assert found.effect.ratio == pytest.approx(1.0, abs=0.1)
    assert [g.text for g in found.guards if not g.ok] == []
