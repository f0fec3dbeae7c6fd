"""How exact the load generator's clock is, measured against a stub that logs its own send times.

Error = the client's reading minus the truth. The truth is the stub's: the kernel's stamp of the
request's arrival, and the clock just before each chunk is written. Both run on one machine, so
both read the same CLOCK_MONOTONIC.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np

from kit import console, paths, process
from kit.clash import holder_of, is_taken
from kit.errors import ClientFailed, PortTaken, ServerNotReady
from kit.inside import stub
from kit.value import Value

TTFT_S = 0.1
ITL_S = 0.05
STAGGER_S = 1.0
"""Staggered streams start evenly over this long; a burst starts all at once."""
MODES = ("staggered", "burst")

TTFT_TARGET_S = 0.0002
ITL_TARGET_S = 0.0001
CPU_TARGET_S = 0.05
_READY_S = 10.0


class BenchResult(Value):
    """One run of the generator. Errors are absolute, in seconds.

    CPU is the client's (loop and writer) from its first connection on; what starting Python and
    reading the requests takes is in `startup_s`.
    """

    streams: int
    mode: str
    tokens: int
    ttft_error_p50_s: float
    ttft_error_p99_s: float
    itl_error_p50_s: float
    itl_error_p99_s: float
    cpu_s_per_1k_tokens: float
    startup_s: float
    send_lag_p99_s: float
    recv_lag_p99_s: float | None
    shared_stamps: int
    stamps: str | None

    @property
    def ok(self) -> bool:
        """Whether the targets are met."""
        return (
            self.ttft_error_p99_s <= TTFT_TARGET_S
            and self.itl_error_p99_s <= ITL_TARGET_S
            and self.cpu_s_per_1k_tokens <= CPU_TARGET_S
        )


def bench(
    streams: Sequence[int] = (64, 256),
    *,
    modes: Sequence[str] = MODES,
    tokens: int = 100,
    stamps: str = "auto",
) -> list[BenchResult]:
    """Measure each number of streams in each mode; the client has one core, the stub another.

    Raises `ServerNotReady` when the stub does not start, `ClientFailed` when the generator ends
    with an error.
    """
    results = []
    for count in streams:
        for mode in modes:
            with tempfile.TemporaryDirectory(prefix="kit-bench-") as folder:
                results.append(measure(Path(folder), count, mode, tokens, stamps))
    return results


def show(results: Sequence[BenchResult]) -> None:
    """Print the results as a table, times in ms."""
    columns = ["streams", "start", "TTFT error p50/p99 ms", "ITL error p50/p99 ms"]
    columns += ["CPU s/1k tokens", "start-up s", "send lag p99 ms", "stamps", "within targets"]
    rows = [
        [
            str(r.streams),
            r.mode,
            f"{r.ttft_error_p50_s * 1e3:.3f} / {r.ttft_error_p99_s * 1e3:.3f}",
            f"{r.itl_error_p50_s * 1e3:.3f} / {r.itl_error_p99_s * 1e3:.3f}",
            f"{r.cpu_s_per_1k_tokens:.4f}",
            f"{r.startup_s:.2f}",
            f"{r.send_lag_p99_s * 1e3:.2f}",
            str(r.stamps),
            "yes" if r.ok else "no",
        ]
        for r in results
    ]
    console.table("load generator against a stub with a true log", columns, rows)


def measure(folder: Path, streams: int, mode: str, tokens: int, stamps: str) -> BenchResult:
    """Measure one load; the stub's log and the samples stay in the folder."""
    cores = sorted(os.sched_getaffinity(0))
    port = free_port()
    write_inputs(folder, port, streams, mode, tokens, stamps)
    with running_stub(folder, port, cores[-1]):
        began_s = run_window(folder, cores[0])
    return _compare(folder, streams, mode, began_s)


def run_window(folder: Path, core: int) -> float:
    """Run the load on one core; return when it was started, CLOCK_MONOTONIC seconds."""
    began_s = time.monotonic()
    argv = [sys.executable, "-m", "kit.inside.window", str(folder / "spec.json")]
    with _pinned(core):
        left = process.run(argv, cwd=paths.ROOT, timeout_s=600)
    if not left.ok:
        raise ClientFailed("the load generator ended with an error", detail=left.tail)
    return began_s


def write_inputs(
    folder: Path, port: int, streams: int, mode: str, tokens: int, stamps: str
) -> None:
    body = {"model": "stub", "prompt": "one two three", "max_tokens": tokens, "stream": True}
    gap_s = STAGGER_S / streams if mode == "staggered" else 0.0
    lines = [
        json.dumps(
            {"id": f"r{i}", "path": "/v1/completions", "body": body, "tags": {}, "at_s": i * gap_s}
        )
        for i in range(streams)
    ]
    (folder / "requests.jsonl").write_text("\n".join(lines) + "\n", "utf-8")
    spec = {"version": 1, "host": "127.0.0.1", "port": port, "requests": "requests.jsonl"}
    spec |= {"out": "out", "scrape_every_s": None, "stamps": stamps}
    (folder / "spec.json").write_text(json.dumps(spec), "utf-8")


def _compare(folder: Path, streams: int, mode: str, began_s: float) -> BenchResult:
    load = json.loads((folder / "out" / "load.json").read_text("utf-8"))
    ttft_errors, itl_errors = [], []
    for sample, true in with_truth(folder):
        read, sent = np.array(sample["chunk_s"]), np.array(true["chunk_s"])
        ttft_errors.append(abs((read[0] - sample["sent_s"]) - (sent[0] - true["arrived_s"])))
        itl_errors.append(np.abs(np.diff(read) - np.diff(sent)))
    itl = np.concatenate(itl_errors)
    count = len(ttft_errors) + len(itl)
    return BenchResult(
        streams=streams,
        mode=mode,
        tokens=count,
        ttft_error_p50_s=float(np.quantile(ttft_errors, 0.5)),
        ttft_error_p99_s=float(np.quantile(ttft_errors, 0.99)),
        itl_error_p50_s=float(np.quantile(itl, 0.5)),
        itl_error_p99_s=float(np.quantile(itl, 0.99)),
        cpu_s_per_1k_tokens=(load["cpu_s"] - load["startup_cpu_s"]) / count * 1000,
        startup_s=load["t0_monotonic_s"] - began_s,
        send_lag_p99_s=load["send_lag_s"]["p99"],
        recv_lag_p99_s=load["recv_lag_s"]["p99"],
        shared_stamps=load["shared_stamps"],
        stamps=load["stamps"],
    )


def with_truth(folder: Path) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Yield what the load saw of each request with what the stub did. Raises `ClientFailed`."""
    truth = {t["id"]: t for t in json_lines(folder / "stub_times.jsonl")}
    for sample in json_lines(folder / "out" / "samples.jsonl"):
        true = truth.get(sample["id"])
        if sample["error"] or true is None or len(true["chunk_s"]) != len(sample["chunk_s"]):
            raise ClientFailed(
                f"the generator lost tokens of {sample['id']}", detail=str(sample["error"])
            )
        yield sample, true


def json_lines(path: Path) -> list[Mapping[str, Any]]:
    """Return the objects of a file with one a line."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def _pinned(core: int) -> Iterator[None]:
    """Put this process, and what it starts meanwhile, on one core."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _serve(main: Callable[[Sequence[str]], int], words: Sequence[str], core: int) -> None:
    os.sched_setaffinity(0, {core})
    with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere):
        status = main(words)  # stdout is for the results
    sys.exit(status)


@contextlib.contextmanager
def running_stub(folder: Path, port: int, core: int) -> Iterator[None]:
    """Run the stub on its own core, from listening to its end."""
    times = str(folder / "stub_times.jsonl")
    config = {"port": port, "ttft_s": TTFT_S, "itl_s": ITL_S, "times_out": times}
    path = folder / "stub.json"
    path.write_text(json.dumps(config), "utf-8")
    with running_server(stub.main, [str(path)], port, core):
        yield


@contextlib.contextmanager
def running_server(
    main: Callable[[Sequence[str]], int], words: Sequence[str], port: int, core: int
) -> Iterator[None]:
    context = multiprocessing.get_context("spawn")
    server = context.Process(target=_serve, args=(main, words, core))
    server.start()
    try:
        _wait_listening(port, server)
        yield
    finally:
        server.terminate()
        server.join()


def _wait_listening(port: int, server: BaseProcess) -> None:
    """Wait until this very process listens: another may have taken the port since it was free."""
    until_s = time.monotonic() + _READY_S
    while time.monotonic() < until_s:
        alive, holder = server.is_alive(), holder_of(port)
        if holder is not None and holder.endswith(f" ({server.pid})"):
            return
        if not alive and is_taken(port):
            who = holder or "another program"
            raise PortTaken(f"port {port} was taken by {who} meanwhile", hint="run it again")
        if not alive:
            break
        time.sleep(0.02)
    raise ServerNotReady(f"port {port} was not listened on within {_READY_S:g} s")
