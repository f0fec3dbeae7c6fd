"""What makes a run invalid, whatever its numbers say. Pure; the limits are in the plan's hash."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kit.measure import Raw, Window, median_span_s, quantile, start_s
from kit.value import Value


class Limits(Value):
    """The guards' limits. Shares are fractions of 1, times seconds."""

    send_lag_floor_s: float = 0.001
    send_lag_share: float = 0.02
    foreign_cpu_share: float = 0.10
    throttled_share: float = 0.01
    token_count_share: float = 0.01
    clock_step_s: float = 0.001
    device_memory_bytes: int = 64 * 2**20  # what the driver itself keeps moves by some MiB


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
    telemetry_file: str,
    limits: Limits,
) -> list[GuardResult]:
    """Run every guard on one replicate.

    `requests` are the lines that were to be sent, by phase; `primary_s` the primary measure when
    it is a time; `telemetry` the host samples taken beside the measured window, and their file.
    """
    found: list[GuardResult] = []
    for phase, window in raw.windows.items():
        found += _requests(window, requests[phase], replicate, limits)
        found += _clock(window, replicate, limits)
    found += _lag(raw.measured, replicate, primary_s, limits)
    found += _fresh(raw, replicate)
    found += _resets(raw, replicate)
    found += _foreign(telemetry, telemetry_file, replicate, limits)
    found += _throttle(telemetry, telemetry_file, replicate, limits)
    found += _devices(raw.devices, telemetry_file, replicate, limits)
    return found


def _requests(
    window: Window, asked: Sequence[Mapping[str, Any]], replicate: int, limits: Limits
) -> Iterator[GuardResult]:
    where = _where(window, replicate)
    yield _failed(window, where, replicate)
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
    bodies = {str(r["id"]): r["body"] for r in asked}
    answered = [s for s in window.samples if not s.get("error")]
    worst = max((_token_gap(s, bodies.get(str(s.get("id")), {})) for s in answered), default=0.0)
    yield GuardResult(
        name="token_counts",
        replicate=replicate,
        ok=worst <= limits.token_count_share,
        seen=worst,
        limit=limits.token_count_share,
        text=f"served output tokens differ from asked by {worst:.1%} ({where})",
        source=window.samples_file,
    )


def _failed(window: Window, where: str, replicate: int) -> GuardResult:
    failed = [s for s in window.samples if s.get("error") or s.get("status") != 200]
    return GuardResult(
        name="failed_requests",
        replicate=replicate,
        ok=not failed,
        seen=len(failed),
        limit=0,
        text=f"{len(failed)} of {len(window.samples)} requests failed ({where})"
        + (f": {_why(failed[0])}" if failed else ""),
        source=window.samples_file,
    )


def check_imported(window: Window, asked: int | None) -> Iterator[GuardResult]:
    """Check what can be judged of another tool's result; `asked` requests, if it says how many."""
    yield _failed(window, "imported", 0)
    if asked is not None:
        lost = abs(asked - len({s.get("id") for s in window.samples}))
        yield GuardResult(
            name="lost_samples",
            replicate=0,
            ok=not lost,
            seen=lost,
            limit=0,
            text=f"{lost} samples are missing, doubled or unknown (imported)",
            source=window.samples_file,
        )


def _why(sample: Mapping[str, Any]) -> str:
    return str(sample.get("error") or f"status {sample.get('status')}")


def _where(window: Window, replicate: int) -> str:
    return f"replicate {replicate}, {window.folder.rsplit('/', 1)[-1]}"


def _token_gap(sample: Mapping[str, Any], body: Mapping[str, Any]) -> float:
    """Return |served - asked| / asked: of the output where its length was fixed, and of the input
    where the prompt was given as token ids; the larger of the two.
    """
    gap = 0.0
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and all(isinstance(token, int) for token in prompt):
        gap = _share_off(sample.get("prompt_tokens"), len(prompt))
    wanted = body.get("max_tokens") or body.get("max_completion_tokens") or 0
    if body.get("ignore_eos") and wanted:
        gap = max(gap, _share_off(sample.get("completion_tokens"), wanted))
    return gap


def _share_off(served: float | None, asked: float) -> float:
    return 1.0 if served is None else abs(served - asked) / asked


def check_same_prompts(raws: Mapping[int, Raw], limits: Limits) -> Iterator[GuardResult]:
    """Check the prompts of all replicates, in their order; `raws` by replicate."""
    same = SamePrompts(limits)
    for replicate, raw in raws.items():
        yield same.check(replicate, raw)


class SamePrompts:
    """Checks that a request has as many input tokens in each replicate as in the first one.

    Arms that were asked different things answer different questions.
    """

    def __init__(self, limits: Limits) -> None:
        self._limit = limits.token_count_share
        self._first: dict[tuple[str, str], float | None] = {}

    def check(self, replicate: int, raw: Raw) -> GuardResult:
        """Compare one replicate with those before it."""
        worst, source = 0.0, raw.measured.samples_file
        for phase, window in raw.windows.items():
            for sample in window.samples:
                served = sample.get("prompt_tokens")
                wanted = self._first.setdefault((phase, str(sample.get("id"))), served)
                if wanted and not sample.get("error") and _share_off(served, wanted) > worst:
                    worst, source = _share_off(served, wanted), window.samples_file
        return GuardResult(
            name="same_prompts",
            replicate=replicate,
            ok=worst <= self._limit,
            seen=worst,
            limit=self._limit,
            text=f"input tokens of one request differ by {worst:.1%} from those of the first "
            f"replicate (replicate {replicate})",
            source=source,
        )


def _lag(
    window: Window, replicate: int, primary_s: float | None, limits: Limits
) -> Iterator[GuardResult]:
    """Hold late sends against what they can distort.

    In an open loop latency counts from the schedule: the primary measure. In a lane it counts
    from the send, and a late one only thins the load: the duration of the lane's requests.
    """
    for closed in (False, True):
        samples = [s for s in window.samples if (s.get("lane") is not None) == closed]
        lags = sorted(
            s["sent_s"] - s["intended_s"]
            for s in samples
            if s.get("sent_s") is not None and s.get("intended_s") is not None
        )
        if not lags:
            continue
        p99 = quantile(lags, 0.99)
        scale = median_span_s(samples) if closed else primary_s
        limit = max(limits.send_lag_floor_s, limits.send_lag_share * (scale or 0.0))
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
    told = "clock_step_s" in window.load
    step = abs(float(window.load.get("clock_step_s") or 0.0))
    backwards = sum(_runs_backwards(s) for s in window.samples)
    yield GuardResult(
        name="clock",
        replicate=replicate,
        ok=told and step <= limits.clock_step_s and not backwards,
        seen=step if told else None,
        limit=limits.clock_step_s,
        text=f"the clock stepped by {step * 1e3:.1f} ms, {backwards} answers run backwards "
        f"({_where(window, replicate)})"
        if told
        else f"nobody watched the clock ({_where(window, replicate)})",
        source=f"{window.folder}/load.json",
    )


def _runs_backwards(sample: Mapping[str, Any]) -> bool:
    times = [
        t for t in (start_s(sample), *sample["chunk_s"], sample.get("done_s")) if t is not None
    ]
    return any(b < a for a, b in itertools.pairwise(times))


BEFORE_FIRST = (
    "vllm:request_success_total",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:prefix_cache_hits_total",
)


def _fresh(raw: Raw, replicate: int) -> Iterator[GuardResult]:
    """Check that the server had served nothing before its first request, and cached none of it."""
    window = next(iter(raw.windows.values()))
    served = {
        file: sum(scrapes[0].total(name) or 0.0 for name in BEFORE_FIRST) if scrapes else 0.0
        for file, scrapes in window.engines.items()
    }
    first = min(window.samples, key=lambda s: s.get("sent_s") or 0.0, default={})
    before, cached = sum(served.values()), float(first.get("cached_tokens") or 0.0)
    used = next((file for file, count in served.items() if count), window.samples_file)
    yield GuardResult(
        name="fresh_server",
        replicate=replicate,
        ok=not before and not cached,
        seen=before + cached,
        limit=0,
        text=f"the server was not fresh: its counters stood at {before:g} before the first "
        f"request, of which {cached:g} tokens were cached (replicate {replicate})",
        source=used if before else window.samples_file if cached else next(iter(served)),
    )


def _resets(raw: Raw, replicate: int) -> Iterator[GuardResult]:
    """Check that no counter fell and no series was made anew, from the first scrape to the last.

    A counter that restarts and then passes its old value shows only in its time of creation.
    """
    fell: dict[str, str] = {}
    last: dict[Any, float] = {}
    for window in raw.windows.values():
        for file, scrapes in window.engines.items():
            leg = file.rsplit("/", 1)[-1]
            for (name, labels), value in (each for s in scrapes for each in s.values.items()):
                anew = name.endswith(("_created", "process_start_time_seconds"))
                if not anew and not name.endswith(("_total", "_count", "_bucket")):
                    continue
                before = last.get((leg, name, labels), value)
                if value < before or (anew and value != before):
                    fell.setdefault(name, file)
                last[leg, name, labels] = value
    yield GuardResult(
        name="counters",
        replicate=replicate,
        ok=not fell,
        seen=len(fell),
        limit=0,
        text=f"{len(fell)} counters were reset: {', '.join(sorted(fell)[:3])} "
        f"(replicate {replicate})",
        source=next(iter(fell.values()), raw.measured.metrics_file),
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
    telemetry: Sequence[Mapping[str, Any]], source: str, replicate: int, limits: Limits
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
        source=source,
    )


def limited_share(telemetry: Sequence[Mapping[str, Any]]) -> float:
    """Return the share of the samples in which a device met its own power limit."""
    return sum(bool(t.get("power_limited")) for t in telemetry) / max(1, len(telemetry))


def _throttle(
    telemetry: Sequence[Mapping[str, Any]], source: str, replicate: int, limits: Limits
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
        source=source,
    )


def _devices(
    seen: Mapping[str, Any], telemetry_file: str, replicate: int, limits: Limits
) -> Iterator[GuardResult]:
    """Check that nobody else computed on the devices, and that all of their memory came back."""
    if not seen:
        return
    source = telemetry_file.replace("telemetry.jsonl", "devices.json")
    strangers = [p["name"] for each in seen["before"] for p in each["processes"] or ()]
    yield GuardResult(
        name="device_shared",
        replicate=replicate,
        ok=not strangers,
        seen=len(strangers),
        limit=0,
        text=f"{len(strangers)} other processes were on the device before the start: "
        f"{', '.join(sorted(strangers)) or 'none'} (replicate {replicate})",
        source=source,
    )
    kept = kept_bytes(seen)
    holders = [p["name"] for each in seen["after"] for p in each["processes"] or ()]
    yield GuardResult(
        name="device_memory",
        replicate=replicate,
        ok=kept is not None and kept <= limits.device_memory_bytes,
        seen=kept,
        limit=limits.device_memory_bytes,
        text=(
            f"{kept / 2**20:.0f} MiB of device memory did not come back, held by "
            f"{', '.join(sorted(holders)) or 'nobody that shows'} (replicate {replicate})"
            if kept is not None
            else f"the device does not tell its memory (replicate {replicate})"
        ),
        source=source,
    )


def kept_bytes(seen: Mapping[str, Any]) -> int | None:
    """Return by how many bytes the device that grew most is above where it was before."""
    used = [
        (then["memory_used_bytes"], now["memory_used_bytes"])
        for then, now in zip(seen["before"], seen["after"], strict=True)
    ]
    if any(then is None or now is None for then, now in used):
        return None
    return max((now - then for then, now in used), default=0)
