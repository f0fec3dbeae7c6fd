"""What makes a run invalid, whatever its numbers say. Pure; the limits are in the plan's hash."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from kit.measure import Raw, Window, start_s
from kit.value import Value


class Limits(Value):
    """The guards' limits. Shares are fractions of 1, times seconds."""

    send_lag_floor_s: float = 0.001
    send_lag_share: float = 0.02
    foreign_cpu_share: float = 0.10
    throttled_share: float = 0.01
    token_count_share: float = 0.01
    clock_step_s: float = 0.001


class GuardResult(Value):
    """One guard on one replicate: what was seen, the limit, and the sentence for a report."""

    name: str
    replicate: int
    ok: bool
    seen: float | None
    limit: float | None
    text: str
    source: str


def check_replicate(
    raw: Raw,
    *,
    replicate: int,
    requests: Mapping[str, Sequence[Mapping[str, Any]]],
    primary_s: float | None,
    telemetry: Sequence[Mapping[str, Any]],
    limits: Limits,
) -> list[GuardResult]:
    """Run every guard on one replicate.

    `requests` are the lines that were to be sent, by phase; `primary_s` the primary measure when
    it is a time; `telemetry` the host samples taken beside the measured window.
    """
    found: list[GuardResult] = []
    for phase, window in raw.windows.items():
        found += _requests(window, requests[phase], replicate, limits)
    found += _lag(raw.measured, replicate, primary_s, limits)
    found += _clock(raw.measured, replicate, limits)
    found += _foreign(telemetry, replicate, limits)
    found += _throttle(telemetry, replicate, limits)
    return found


def _requests(
    window: Window, asked: Sequence[Mapping[str, Any]], replicate: int, limits: Limits
) -> Iterator[GuardResult]:
    where = f"replicate {replicate}, {window.folder.rsplit('/', 1)[-1]}"
    failed = [s for s in window.samples if s.get("error") or s.get("status") != 200]
    yield GuardResult(
        name="failed_requests",
        replicate=replicate,
        ok=not failed,
        seen=len(failed),
        limit=0,
        text=f"{len(failed)} of {len(window.samples)} requests failed ({where})"
        + (f": {_why(failed[0])}" if failed else ""),
        source=window.samples_file,
    )
    ids = [s.get("id") for s in window.samples]
    lost = {str(r["id"]) for r in asked} ^ {str(i) for i in ids}
    lost_count = len(lost) + len(ids) - len(set(ids))
    yield GuardResult(
        name="lost_samples",
        replicate=replicate,
        ok=not lost_count,
        seen=lost_count,
        limit=0,
        text=f"{lost_count} samples are missing, doubled or unknown ({where})",
        source=window.samples_file,
    )
    worst = max((_token_gap(s, asked) for s in window.samples if not s.get("error")), default=0.0)
    yield GuardResult(
        name="token_counts",
        replicate=replicate,
        ok=worst <= limits.token_count_share,
        seen=worst,
        limit=limits.token_count_share,
        text=f"served output tokens differ from asked by {worst:.1%} ({where})",
        source=window.samples_file,
    )


def _why(sample: Mapping[str, Any]) -> str:
    return str(sample.get("error") or f"status {sample.get('status')}")


def _token_gap(sample: Mapping[str, Any], asked: Sequence[Mapping[str, Any]]) -> float:
    """Return |served - asked| / asked for a request that fixed its length, else 0."""
    body: Mapping[str, Any] = next(
        (r["body"] for r in asked if r["id"] == sample.get("id")), {}
    )
    if not body.get("ignore_eos"):
        return 0.0
    wanted = body.get("max_tokens") or body.get("max_completion_tokens") or 0
    served = sample.get("completion_tokens")
    if served is None:
        return 1.0
    return abs(served - wanted) / wanted if wanted else 0.0


def _lag(
    window: Window, replicate: int, primary_s: float | None, limits: Limits
) -> Iterator[GuardResult]:
    lags = [
        s["sent_s"] - s["intended_s"]
        for s in window.samples
        if s.get("sent_s") is not None and s.get("intended_s") is not None
    ]
    p99 = float(np.quantile(lags, 0.99)) if lags else 0.0
    limit = max(limits.send_lag_floor_s, limits.send_lag_share * (primary_s or 0.0))
    yield GuardResult(
        name="send_lag",
        replicate=replicate,
        ok=p99 <= limit,
        seen=p99,
        limit=limit,
        text=f"the load generator sent {p99 * 1e3:.2f} ms late at p99, {limit * 1e3:.2f} ms "
        f"allowed (replicate {replicate})",
        source=window.samples_file,
    )


def _clock(window: Window, replicate: int, limits: Limits) -> Iterator[GuardResult]:
    step = abs(float(window.load.get("clock_step_s") or 0.0))
    backwards = [
        s.get("id")
        for s in window.samples
        if any(b < a for a, b in itertools.pairwise(s["chunk_s"]))
        or (s["chunk_s"] and (start_s(s) or 0.0) > s["chunk_s"][0])
    ]
    yield GuardResult(
        name="clock",
        replicate=replicate,
        ok=step <= limits.clock_step_s and not backwards,
        seen=step,
        limit=limits.clock_step_s,
        text=f"the clock stepped by {step * 1e3:.1f} ms, {len(backwards)} answers run backwards "
        f"(replicate {replicate})",
        source=f"{window.folder}/load.json",
    )


def foreign_share(telemetry: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the share of the server's CPUs that others used between first and last sample.

    Others are everything but this run's containers: other processes, the kit, stolen time.
    """
    if len(telemetry) < 2:
        return None
    first, last = telemetry[0], telemetry[-1]
    span = (last["t_s"] - first["t_s"]) * len(first["cpuset"])
    if span <= 0:
        return None
    busy = last["busy_s"] - first["busy_s"]
    ours = last["ours_s"] - first["ours_s"]
    return float(max(0.0, busy - ours) / span)


def _foreign(
    telemetry: Sequence[Mapping[str, Any]], replicate: int, limits: Limits
) -> Iterator[GuardResult]:
    share = foreign_share(telemetry)
    yield GuardResult(
        name="foreign_cpu",
        replicate=replicate,
        ok=share is not None and share <= limits.foreign_cpu_share,
        seen=share,
        limit=limits.foreign_cpu_share,
        text=(
            f"other programs used {share:.1%} of the server's CPUs, "
            f"{limits.foreign_cpu_share:.0%} allowed (replicate {replicate})"
            if share is not None
            else f"the CPU use of others is unknown (replicate {replicate})"
        ),
        source="telemetry.jsonl",
    )


def _throttle(
    telemetry: Sequence[Mapping[str, Any]], replicate: int, limits: Limits
) -> Iterator[GuardResult]:
    told = [t["throttled"] for t in telemetry if t.get("throttled") is not None]
    if not told:
        return
    share = sum(bool(t) for t in told) / len(told)
    reason = next((str(t) for t in told if t), "none")
    yield GuardResult(
        name="throttled",
        replicate=replicate,
        ok=share <= limits.throttled_share,
        seen=share,
        limit=limits.throttled_share,
        text=f"the device was throttled in {share:.1%} of the samples: {reason} "
        f"(replicate {replicate})",
        source="telemetry.jsonl",
    )
