"""One measured window in one process start: `python -m inside.window SPEC.json`.

Scrape /metrics once, scrape beside the load, run the load, wait until the engine is idle, scrape
once more, write the summary. Files in the spec's `out`: samples.jsonl (a line a request, as they
end), metrics.jsonl.gz (and metrics-LEG.jsonl.gz of each engine behind it), load.json.

Exit status: 0 when the window was measured, failed requests included (they are data); 2 for a
spec that cannot be used; 70 when a result cannot be written; 143 / 130 after SIGTERM / SIGINT,
with everything written that was there.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import platform
import resource
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httptools
import uvloop

from .clock import NS, Arrivals, Clock
from .load import Load, LoadTotals
from .scrape import Scraper, ScrapeReport, ScraperLost
from .spec import BadSpec, Request, WindowSpec, load_requests, load_spec
from .writer import Writer, WriterLost, WriterReport, lag_summary

IDLE_LIMIT_S = 5.0
_LEAD_NS = NS * 15 // 100
"""From the loop's start to the window's: the time to open the first connections."""
_PROGRESS_EVERY_S = 1.0
EXIT_BAD_SPEC = 2
EXIT_CANNOT_WRITE = 70


@dataclass(frozen=True)
class Ran:
    """What the event loop left behind."""

    t0_ns: int
    t0_utc: str
    wall_s: float
    startup_cpu_s: float
    totals: LoadTotals
    signum: int | None


def say(event: str, **fields: object) -> None:
    """Print one JSON line on stdout."""
    print(json.dumps({"event": event, **fields}), flush=True)


def run_window(spec: WindowSpec, requests: list[Request], clock: Clock) -> int:
    """Measure one window; return the exit status.

    Raises `OSError`, `WriterLost` and `ScraperLost` when a result cannot be written.
    """
    spec.out.mkdir(parents=True, exist_ok=True)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a file a request under way
    gc.collect()
    gc.freeze()  # also keeps the forked processes from copying these pages
    scraper = Scraper(spec.scraped, spec.scrape_every_s)
    writer = Writer(requests, spec.out / "samples.jsonl")
    scraper.wait_first()
    arrivals = Arrivals(clock, use_kernel=spec.stamps != "user")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        ran = runner.run(_drive(spec, requests, arrivals, writer, scraper))
    scraped = scraper.finish(0.0 if ran.signum else IDLE_LIMIT_S)
    written = writer.finish()
    summary = summarise(ran, arrivals, written, scraped)
    write_json(spec.out / "load.json", summary)
    say("end", done=ran.totals.ended, of=ran.totals.of, failed=written.failed)
    return 128 + ran.signum if ran.signum else 0


async def _drive(
    spec: WindowSpec,
    requests: list[Request],
    arrivals: Arrivals,
    writer: Writer,
    scraper: Scraper,
) -> Ran:
    """Run the load with the collector off, progress once a second, until its end or a signal."""
    loop = asyncio.get_running_loop()
    load = Load(loop, requests, spec=spec, arrivals=arrivals, record=writer.push)
    got: list[int] = []

    def on_signal(signum: int) -> None:
        got.append(signum)
        load.stop("terminated: the load was told to stop")

    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, on_signal, signum)
    t0_ns = arrivals.clock.monotonic_ns() + _LEAD_NS
    t0_utc = datetime.fromtimestamp(time.time() + _LEAD_NS / NS, UTC)
    writer.attach(loop, t0_ns)
    scraper.begin(t0_ns)
    progress = asyncio.create_task(_show_progress(load, writer, arrivals))
    gc.disable()
    startup_cpu_s = time.process_time()
    try:
        totals = await load.run(t0_ns)
    finally:
        gc.enable()
        progress.cancel()
    wall_s = (arrivals.clock.monotonic_ns() - t0_ns) / NS
    writer.detach()
    stopped_by = got[0] if got else None
    return Ran(
        t0_ns=t0_ns,
        t0_utc=t0_utc.isoformat(timespec="microseconds"),
        wall_s=wall_s,
        startup_cpu_s=startup_cpu_s,
        totals=totals,
        signum=stopped_by,
    )


async def _show_progress(load: Load, writer: Writer, arrivals: Arrivals) -> None:
    while True:
        await asyncio.sleep(_PROGRESS_EVERY_S)
        writer.poll()
        if writer.lost:
            load.stop("terminated: samples cannot be written")
        arrivals.look_for_step()
        say("progress", done=load.totals.ended, of=load.totals.of, failed=writer.failed)


def summarise(
    ran: Ran, arrivals: Arrivals, written: WriterReport, scraped: ScrapeReport
) -> dict[str, Any]:
    """Return load.json's content; keys carry their units."""
    totals = ran.totals
    clock = arrivals.report()
    return {
        "version": 1,
        "t0_monotonic_s": ran.t0_ns / NS,
        "t0_utc": ran.t0_utc,
        "wall_s": round(ran.wall_s, 6),
        "cpu_s": round(time.process_time() + written.cpu_s, 6),
        "startup_cpu_s": round(ran.startup_cpu_s, 6),
        "scrape_cpu_s": round(scraped.cpu_s, 6),
        "requests": totals.of,
        "sent": totals.sent,
        "ended": totals.ended,
        "unsent": totals.unsent,
        "failed": written.failed,
        "stopped_by": signal.Signals(ran.signum).name if ran.signum else None,
        "send_lag_s": lag_summary(totals.send_lags_ns),
        "recv_lag_s": written.recv_lag_s,
        "chunks": written.chunks,
        "shared_stamps": written.shared_stamps,
        "stamps": written.stamps,
        "clock_offset_start_s": clock.offset_start_s,
        "clock_offset_end_s": clock.offset_end_s,
        "clock_drift_s": clock.drift_s,
        "clock_step_s": clock.clock_step_s,
        "connect_in_ttft": False,
        "scrapes": scraped.scrapes,
        "scrapes_failed": scraped.failed,
        "idle": scraped.idle,
        "idle_wait_s": scraped.idle_wait_s,
        "python": platform.python_version(),
        "uvloop": getattr(uvloop, "__version__", None),
        "httptools": getattr(httptools, "__version__", None),
    }


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write a file that is there whole or not at all."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    part.replace(path)


def main(argv: Sequence[str], clock: Clock | None = None) -> int:
    """Run the command; return its exit status."""
    if len(argv) != 1:
        print("usage: python -m inside.window SPEC.json", file=sys.stderr)
        return EXIT_BAD_SPEC
    path = Path(argv[0])

    def run() -> int:
        spec = load_spec(path)
        return run_window(spec, load_requests(spec.requests), clock or Clock())

    return status_of(run)


def status_of(run: Callable[[], int]) -> int:
    """Run a window; return its exit status, and say on stderr why it could not be."""
    try:
        return run()
    except BadSpec as error:
        print(f"bad spec: {error}", file=sys.stderr)
        return EXIT_BAD_SPEC
    except FileExistsError as error:
        name = os.path.basename(str(error.filename))
        print(f"bad spec: out: {name} is there already and is never overwritten", file=sys.stderr)
        return EXIT_BAD_SPEC
    except (OSError, WriterLost, ScraperLost) as error:
        print(f"cannot write: {error}", file=sys.stderr)
        return EXIT_CANNOT_WRITE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
