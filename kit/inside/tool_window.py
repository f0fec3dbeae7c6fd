"""One measured window that another load generator sends: `python -m inside.tool_window SPEC.json`.

The kit scrapes beside it, watches the clock, and turns what the tool told into samples.jsonl and
load.json as `inside.window` writes them; the tool's own result and words stay beside these. Times
are the tool's. It tells no schedule, so that a late send cannot be seen and latency counts from the
send. Exit status: 0; 2 for a spec that cannot be used; 69 when the tool gave no result; 70 when a
result cannot be written.
"""

from __future__ import annotations

import json
import math
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from itertools import accumulate
from pathlib import Path
from typing import Any

from .clock import NS, Arrivals, Clock
from .scrape import Scraper
from .spec import Request, WindowSpec, load_requests, load_spec
from .text import printable
from .vllm_bench import RESULT, in_order
from .window import EXIT_BAD_SPEC, IDLE_LIMIT_S, say, status_of, write_json
from .writer import encode_line

EXIT_NO_RESULT = 69
LOG = "load-tool.log"
START_S = 180.0
"""For the import of vLLM and PyTorch, on a slow machine as well."""
_TELL_EVERY_S = 1.0
_LISTS = ("start_times", "ttfts", "itls", "errors", "input_lens", "output_lens", "generated_texts")
_ERROR = 500  # characters


class NoResult(Exception):
    """The tool ended without a result that can be read; the text says how."""


def longest_s(spec: WindowSpec, requests: Sequence[Request]) -> float:
    """Return how long the tool may take at most, its start included, in seconds."""
    lanes = len({request.lane for request in requests if request.lane})
    in_turn = math.ceil(len(requests) / lanes) if lanes else 1
    last_s = max(request.at_s or 0.0 for request in requests)
    return START_S + 2 * last_s + in_turn * spec.deadline_s


def samples_of(
    told: Mapping[str, Any], requests: Sequence[Request], t0_s: float
) -> list[dict[str, Any]]:
    """Return samples of the tool's lists, which are in the order of sending; raises `NoResult`.

    `t0_s` is on CLOCK_MONOTONIC, as the tool's times are.
    """
    lists = [told.get(name) for name in _LISTS]
    if not all(isinstance(each, list) and len(each) == len(requests) for each in lists):
        raise NoResult(f"its result does not hold {len(requests)} requests")
    try:
        return [
            _sample(request, t0_s, *row)
            for request, row in zip(requests, zip(*lists, strict=True), strict=True)
        ]
    except (TypeError, ValueError, AttributeError) as error:
        raise NoResult(f"its result holds values of another kind: {error}") from None


def _sample(
    request: Request,
    t0_s: float,
    started_s: float,
    ttft_s: float,
    gaps_s: list[float],
    error: str,
    prompt_tokens: int,
    completion_tokens: int,
    text: str,
) -> dict[str, Any]:
    sent_s = started_s - t0_s
    passed = [] if error else accumulate([ttft_s, *gaps_s])
    chunks = [round(sent_s + each, 6) for each in passed]
    return {
        "id": request.id,
        "tags": request.tags,
        "lane": request.lane or request.id,
        "intended_s": None,
        "connect_s": None,
        "sent_s": round(sent_s, 6),
        "chunk_s": chunks,
        "text": text,
        "done_s": chunks[-1] if chunks else None,
        "status": None if error else 200,
        "prompt_tokens": None if error else prompt_tokens,
        "completion_tokens": None if error else completion_tokens,
        "cached_tokens": None,
        "finish_reason": None,
        "prompt_logprobs": None,
        "error": printable(error.strip().splitlines()[-1], _ERROR) if error.strip() else None,
        "stamps": "user",
        "shared_stamps": 0,
        "recv_lag_max_s": None,
    }


def run_window(path: Path, spec: WindowSpec, requests: list[Request], clock: Clock) -> int:
    """Measure one window; return the exit status.

    Raises `NoResult`, `OSError` and `ScraperLost`.
    """
    spec.out.mkdir(parents=True, exist_ok=True)
    out = (spec.out / "samples.jsonl").open("xb", buffering=0)
    scraper = Scraper(spec.scraped, spec.scrape_every_s)
    scraper.wait_first()
    arrivals = Arrivals(clock, use_kernel=False)
    t0_ns = clock.monotonic_ns()
    t0_utc = datetime.fromtimestamp(time.time(), UTC)
    scraper.begin(t0_ns)
    with (spec.out / LOG).open("xb") as log:
        argv = [sys.executable, "-m", f"{__package__}.vllm_bench", str(path)]
        env = {**os.environ, "HOME": "/tmp", "HF_HUB_OFFLINE": "1"}  # noqa: S108 - in a container
        child = subprocess.Popen(argv, stdout=log, stderr=subprocess.STDOUT, env=env)
        try:
            _wait(child, arrivals, longest_s(spec, requests), len(requests))
        finally:
            child.kill()
            child.wait()
    wall_s = (clock.monotonic_ns() - t0_ns) / NS
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    scraped = scraper.finish(IDLE_LIMIT_S)
    if child.returncode:
        raise NoResult(_last_words(spec.out / LOG) or f"it ended with {child.returncode}")
    samples = samples_of(_read(spec.out / RESULT), in_order(requests), t0_ns / NS)
    with out:
        for sample in samples:
            out.write(encode_line(sample))
    seen = arrivals.report()
    failed = sum(sample["error"] is not None for sample in samples)
    summary = {
        "version": 1,
        "tool": "vllm-bench",
        "t0_monotonic_s": t0_ns / NS,
        "t0_utc": t0_utc.isoformat(timespec="microseconds"),
        "wall_s": round(wall_s, 6),
        "cpu_s": round(used.ru_utime + used.ru_stime, 6),
        "requests": len(requests),
        "sent": len(samples),
        "ended": len(samples),
        "unsent": 0,
        "failed": failed,
        "stopped_by": None,
        "stamps": "user",
        "clock_offset_start_s": seen.offset_start_s,
        "clock_offset_end_s": seen.offset_end_s,
        "clock_drift_s": seen.drift_s,
        "clock_step_s": seen.clock_step_s,
        "connect_in_ttft": True,
        "scrapes": scraped.scrapes,
        "scrapes_failed": scraped.failed,
        "idle": scraped.idle,
        "idle_wait_s": scraped.idle_wait_s,
    }
    write_json(spec.out / "load.json", summary)
    say("end", done=len(samples), of=len(requests), failed=failed)
    return 0


def _wait(child: subprocess.Popen[bytes], arrivals: Arrivals, limit_s: float, of: int) -> None:
    deadline_s = time.monotonic() + limit_s
    while True:
        try:
            child.wait(_TELL_EVERY_S)
            return
        except subprocess.TimeoutExpired:
            pass
        if time.monotonic() > deadline_s:
            raise NoResult(f"it did not end within {limit_s:.0f} s")
        arrivals.look_for_step()
        say("progress", done=0, of=of, failed=0)


def _read(path: Path) -> dict[str, Any]:
    try:
        told = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise NoResult(f"its result cannot be read: {error}") from None
    if not isinstance(told, dict):
        raise NoResult("its result is no object")
    return told


def _last_words(path: Path) -> str:
    lines = [line for line in path.read_text("utf-8", "replace").splitlines() if line.strip()]
    return printable(" | ".join(lines[-3:]), _ERROR)


def main(argv: Sequence[str], clock: Clock | None = None) -> int:
    """Run the command; return its exit status."""
    if len(argv) != 1:
        print("usage: python -m inside.tool_window SPEC.json", file=sys.stderr)
        return EXIT_BAD_SPEC
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda number, _: sys.exit(128 + number))
    path = Path(argv[0])

    def run() -> int:
        spec = load_spec(path)
        return run_window(path, spec, load_requests(spec.requests), clock or Clock())

    try:
        return status_of(run)
    except NoResult as error:
        print(f"vllm bench serve: {error}", file=sys.stderr)
        return EXIT_NO_RESULT


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
