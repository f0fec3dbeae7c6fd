"""Guards: each fault is caught by the guard that is there for it, at its limit and not before."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from virtual_run import drawn

from kit.guard import GuardResult, Limits, check_replicate, check_same_prompts, foreign_share
from kit.measure import Scrape
from kit.planted import FAULTS
from kit.virtual import VirtualRun

LIMITS = Limits()


def results(run: VirtualRun, replicate: int = 0, **changed: Any) -> dict[str, GuardResult]:
    """Return the broken guards of a replicate, by name."""
    values: dict[str, Any] = {
        "requests": run.requests,
        "primary_s": 0.1,
        "telemetry": run.telemetry[replicate],
        "telemetry_file": "r/telemetry.jsonl",
        "limits": LIMITS,
        **changed,
    }
    found = check_replicate(run.raws[replicate], replicate=replicate, **values)
    return {g.name: g for g in found if not g.ok}


def measured(run: VirtualRun, change: Callable[[dict[str, Any]], dict[str, Any]]) -> VirtualRun:
    """Change every measured sample of replicate 0."""
    raw = run.raws[0]
    window = replace(raw.measured, samples=tuple(change(dict(s)) for s in raw.measured.samples))
    run.raws[0] = replace(raw, windows={**raw.windows, "measure": window})
    return run


def test_a_sound_replicate_breaks_no_guard() -> None:
    assert results(drawn()) == {}


@pytest.mark.parametrize("fault", [f for f, (_, word) in FAULTS.items() if word == "invalid"])
def test_every_fault_that_invalidates_breaks_a_guard_and_its_twin_none(fault: str) -> None:
    def broken(real: bool) -> list[str]:
        run = drawn()
        FAULTS[fault][0](run, np.random.default_rng(7), real)
        each = [name for r in run.raws for name in results(run, r)]
        return each + [g.name for g in check_same_prompts(run.raws, LIMITS) if not g.ok]

    assert broken(True)
    assert broken(False) == []


def test_one_failed_request_is_too_many_and_says_why() -> None:
    run = measured(drawn(), lambda s: {**s, "error": "HTTP 500"} if s["id"] == "q03" else s)
    found = results(run)["failed_requests"]
    assert found.text == "1 of 12 requests failed (replicate 0, measure): HTTP 500"
    assert found.source == run.raws[0].measured.samples_file


def test_status_other_than_200_is_a_failure_without_an_error() -> None:
    run = measured(drawn(), lambda s: {**s, "status": 404})
    assert "status 404" in results(run)["failed_requests"].text


@pytest.mark.parametrize("name", ["q00", "stranger"])
def test_doubled_and_unknown_samples_count_as_lost(name: str) -> None:
    run = measured(drawn(), lambda s: {**s, "id": name} if s["id"] == "q01" else s)
    assert results(run)["lost_samples"].seen == 2


def test_lengths_are_compared_only_where_they_were_fixed() -> None:
    run = measured(drawn(), lambda s: {**s, "completion_tokens": 9})
    free = {
        phase: [{**r, "body": {**r["body"], "ignore_eos": False}} for r in requests]
        for phase, requests in run.requests.items()
    }
    assert results(run)["token_counts"].seen == pytest.approx(7 / 16)
    assert results(run, requests=free) == {}


def test_a_missing_token_count_is_not_as_asked() -> None:
    run = measured(drawn(), lambda s: {**s, "completion_tokens": None})
    assert results(run)["token_counts"].seen == 1.0


def test_a_prompt_of_token_ids_must_be_served_with_as_many_tokens() -> None:
    run = drawn()
    asked = {
        phase: [{**r, "body": {**r["body"], "prompt": list(range(60))}} for r in requests]
        for phase, requests in run.requests.items()
    }
    assert results(run, requests=asked)["token_counts"].seen == pytest.approx(4 / 60)


@pytest.mark.parametrize(("late_s", "ok"), [(0.0019, True), (0.0021, False)])
def test_send_lag_may_be_two_per_cent_of_the_primary_measure(late_s: float, ok: bool) -> None:
    run = measured(drawn(), lambda s: {**s, "lane": None, "intended_s": s["sent_s"] - late_s})
    assert ("send_lag" not in results(run)) == ok


@pytest.mark.parametrize(("late_s", "ok"), [(0.0009, True), (0.0011, False)])
def test_send_lag_may_be_a_millisecond_whatever_is_measured(late_s: float, ok: bool) -> None:
    run = measured(drawn(), lambda s: {**s, "lane": None, "intended_s": s["sent_s"] - late_s})
    assert ("send_lag" not in results(run, primary_s=None)) == ok


@pytest.mark.parametrize(("late_s", "ok"), [(0.0039, True), (0.0041, False)])
def test_send_lag_of_a_lane_may_be_two_per_cent_of_its_requests(late_s: float, ok: bool) -> None:
    """A lane's latency counts from the send: late, it only asks for a little less."""

    def late(sample: dict[str, Any]) -> dict[str, Any]:
        sent = sample["sent_s"]
        return {**sample, "lane": "a", "intended_s": sent - late_s, "done_s": sent + 0.2}

    assert ("send_lag" not in results(measured(drawn(), late))) == ok


def test_a_clock_that_nobody_watched_is_not_trusted() -> None:
    run = drawn()
    raw = run.raws[0]
    window = replace(raw.windows["cold"], load={})
    run.raws[0] = replace(raw, windows={**raw.windows, "cold": window})
    assert results(run)["clock"].text == "nobody watched the clock (replicate 0, cold)"


def test_a_step_of_the_clock_in_any_window_counts() -> None:
    run = drawn()
    raw = run.raws[0]
    window = replace(raw.windows["cold"], load={"clock_step_s": -0.02})
    run.raws[0] = replace(raw, windows={**raw.windows, "cold": window})
    assert results(run)["clock"].seen == 0.02


def test_a_first_request_that_was_cached_betrays_a_warm_server() -> None:
    run = drawn()
    raw = run.raws[0]
    warm = tuple({**s, "cached_tokens": 48} for s in raw.windows["cold"].samples)
    window = replace(raw.windows["cold"], samples=warm)
    run.raws[0] = replace(raw, windows={**raw.windows, "cold": window})
    found = results(run)["fresh_server"]
    assert found.seen == 48
    assert found.source == window.samples_file


def test_a_counter_may_not_fall_between_two_windows_either() -> None:
    run = drawn()
    raw = run.raws[0]
    fallen = [
        Scrape(s.t_s, {k: v - 64 if k[0] == "vllm:prompt_tokens_total" else v
                       for k, v in s.values.items()})
        for s in raw.measured.scrapes
    ]  # fmt: skip
    window = replace(raw.measured, scrapes=tuple(fallen))
    run.raws[0] = replace(raw, windows={**raw.windows, "measure": window})
    found = results(run)["counters"]
    assert "vllm:prompt_tokens_total" in found.text
    assert found.source == window.metrics_file


def test_gauges_may_fall() -> None:
    run = drawn()
    raw = run.raws[0]
    gauge = ("vllm:num_requests_running", frozenset[tuple[str, str]]())
    values = [3.0, 9.0, 0.0]
    scrapes = [
        replace(s, values={**s.values, gauge: v})
        for s, v in zip(raw.measured.scrapes, values, strict=True)
    ]
    window = replace(raw.measured, scrapes=tuple(scrapes))
    run.raws[0] = replace(raw, windows={**raw.windows, "measure": window})
    assert results(run) == {}


def lines(busy: float, ours: float, **more: Any) -> list[dict[str, Any]]:
    start = {"t_s": 0.0, "cpuset": [0, 1], "busy_s": 0.0, "ours_s": 0.0, **more}
    return [start, {**start, "t_s": 10.0, "busy_s": busy, "ours_s": ours}]


def test_foreign_share_is_what_others_used_of_the_servers_cpus() -> None:
    assert foreign_share(lines(busy=18, ours=15)) == pytest.approx(0.15)
    assert foreign_share(lines(busy=14, ours=15)) == 0.0  # clocks of two sources: never below 0
    assert foreign_share(lines(busy=1, ours=1)[:1]) is None


@pytest.mark.parametrize(("foreign", "ok"), [(1.9, True), (2.1, False)])
def test_foreign_load_may_be_a_tenth(foreign: float, ok: bool) -> None:
    found = results(drawn(), telemetry=lines(busy=10 + foreign, ours=10))
    assert ("foreign_cpu" not in found) == ok


def test_unknown_foreign_load_is_not_trusted() -> None:
    assert "unknown" in results(drawn(), telemetry=[])["foreign_cpu"].text


def test_throttling_of_more_than_one_per_cent_counts_and_unknown_says_nothing() -> None:
    calm = lines(10, 10, throttled=False)
    hot = [*calm, {**calm[1], "throttled": "thermal"}]
    assert results(drawn(), telemetry=hot)["throttled"].text.endswith("thermal (replicate 0)")
    assert results(drawn(), telemetry=calm) == {}
    assert results(drawn(), telemetry=lines(10, 10, throttled=None)) == {}


def test_telemetry_guards_name_their_file() -> None:
    assert results(drawn(), telemetry=[])["foreign_cpu"].source == "r/telemetry.jsonl"


def test_prompts_of_other_lengths_are_found_in_the_replicate_that_differs() -> None:
    run = drawn()
    raw = run.raws[5]
    longer = tuple({**s, "prompt_tokens": 4106} for s in raw.measured.samples)
    window = replace(raw.measured, samples=longer)
    run.raws[5] = replace(raw, windows={**raw.windows, "measure": window})
    broken = [g for g in check_same_prompts(run.raws, LIMITS) if not g.ok]
    assert [(g.replicate, g.source) for g in broken] == [(5, window.samples_file)]
