"""What the proxy costs: the same load against the same stub, direct and through it.

A delay is how much later than the truth the client reads; the truth is the stub's own log, as in
`kit.bench`. What the proxy adds is the difference of the two loads' quantiles.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from kit import console
from kit.bench import (
    MODES,
    free_port,
    run_window,
    running_server,
    running_stub,
    with_truth,
    write_inputs,
)
from kit.inside import proxy
from kit.value import Value

PROXY_TARGET_S = 0.0005
ROUNDS = 5
"""A load has one first token for each stream: the 99th percentile of one load is its worst."""
_WARM_TOKENS = 3
_TICK_S = 0.002


class ProxyCost(Value):
    """Delays between stub and client in seconds: to the first token and back, and of each token.

    `separate_cores` is false where the stub and the client share one, for lack of a third;
    `noise_p99_s` is how late a timer beside the proxy woke up: what other programs cost there.
    """

    streams: int
    mode: str
    tokens: int
    direct_ttft_p50_s: float
    direct_ttft_p99_s: float
    direct_token_p50_s: float
    direct_token_p99_s: float
    proxy_ttft_p50_s: float
    proxy_ttft_p99_s: float
    proxy_token_p50_s: float
    proxy_token_p99_s: float
    separate_cores: bool
    noise_p99_s: float

    @property
    def added_ttft_p99_s(self) -> float:
        return self.proxy_ttft_p99_s - self.direct_ttft_p99_s

    @property
    def added_token_p99_s(self) -> float:
        return self.proxy_token_p99_s - self.direct_token_p99_s

    @property
    def ok(self) -> bool:
        """Whether the targets are met."""
        return max(self.added_ttft_p99_s, self.added_token_p99_s) <= PROXY_TARGET_S


def bench_proxy(
    streams: Sequence[int] = (64,),
    *,
    modes: Sequence[str] = MODES,
    tokens: int = 100,
    rounds: int = ROUNDS,
) -> list[ProxyCost]:
    """Measure the same load direct and through the proxy, which has a core of its own, in turn.

    Raises `ServerNotReady` and `ClientFailed` as `bench` does.
    """
    results = []
    for count in streams:
        for mode in modes:
            with tempfile.TemporaryDirectory(prefix="kit-bench-") as folder:
                results.append(_measure_proxy(Path(folder), count, mode, tokens, rounds))
    return results


COLUMNS = (
    "streams",
    "start",
    "TTFT direct p50/p99 ms",
    "TTFT proxy p50/p99 ms",
    "token direct p50/p99 ms",
    "token proxy p50/p99 ms",
    "added p99 TTFT/token ms",
    "core noise p99 ms",
    "own cores",
    "within targets",
)


def cells_of(cost: ProxyCost) -> list[str]:
    """Return a row of the table, times in ms."""

    def ms(*seconds: float) -> str:
        return " / ".join(f"{s * 1e3:.3f}" for s in seconds)

    return [
        str(cost.streams),
        cost.mode,
        ms(cost.direct_ttft_p50_s, cost.direct_ttft_p99_s),
        ms(cost.proxy_ttft_p50_s, cost.proxy_ttft_p99_s),
        ms(cost.direct_token_p50_s, cost.direct_token_p99_s),
        ms(cost.proxy_token_p50_s, cost.proxy_token_p99_s),
        ms(cost.added_ttft_p99_s, cost.added_token_p99_s),
        ms(cost.noise_p99_s),
        "yes" if cost.separate_cores else "no",
        "yes" if cost.ok else "no",
    ]


def show_proxy(results: Sequence[ProxyCost]) -> None:
    """Print the results as a table, times in ms."""
    console.table("what the proxy adds, one replica", list(COLUMNS), [cells_of(r) for r in results])


def _measure_proxy(folder: Path, streams: int, mode: str, tokens: int, rounds: int) -> ProxyCost:
    cores = sorted(os.sched_getaffinity(0))
    server, own = cores[1 % max(1, len(cores) - 1)], cores[-1]
    found: dict[str, tuple[list[float], list[float]]] = {"direct": ([], []), "proxy": ([], [])}
    noise: list[float] = []
    for turn, name in itertools.product(range(rounds), found):
        place = folder / f"{name}{turn}"
        place.mkdir()
        port = free_port()
        with running_stub(place, port, server), contextlib.ExitStack() as through:
            if name == "proxy":
                port = through.enter_context(_proxy(port, own))
            _warm(place, port, streams, cores[0])
            if name == "proxy":
                through.enter_context(_watched(own, noise))
            write_inputs(place, port, streams, mode, tokens, "auto")
            run_window(place, cores[0])
        for kept, seen in zip(found[name], _delays(place), strict=True):
            kept += seen
    numbers = {
        f"{name}_{what}_p{q}_s": float(np.quantile(seen, q / 100))
        for name, delays in found.items()
        for what, seen in zip(("ttft", "token"), delays, strict=True)
        for q in (50, 99)
    }
    return ProxyCost(
        streams=streams,
        mode=mode,
        tokens=len(found["proxy"][1]),
        separate_cores=len({cores[0], server, own}) == 3,
        noise_p99_s=float(np.quantile(noise, 0.99)),
        **numbers,
    )


def _warm(folder: Path, port: int, streams: int, core: int) -> None:
    """Send one short load first, as each measured window of a run has one before it.

    In its first load a fresh process touches most of its memory for the first time: a few first
    tokens then wait for 6 to 30 ms. The stub logs this load too, under ids that the measured load
    uses again, whose lines come later and count.
    """
    place = folder / "warm"
    place.mkdir()
    write_inputs(place, port, streams, "burst", _WARM_TOKENS, "auto")
    run_window(place, core)


def _delays(folder: Path) -> tuple[list[float], list[float]]:
    """Return each request's delay to its first token and back, and each token's; in seconds."""
    t0_s = json.loads((folder / "out" / "load.json").read_text("utf-8"))["t0_monotonic_s"]
    first, each = [], []
    for sample, true in with_truth(folder):
        read, sent = np.array(sample["chunk_s"]), np.array(true["chunk_s"])
        first.append(float((read[0] - sample["sent_s"]) - (sent[0] - true["arrived_s"])))
        each += (t0_s + read - sent).tolist()
    return first, each


@contextlib.contextmanager
def _proxy(stub_port: int, core: int) -> Iterator[int]:
    """Run a proxy in front of a stub on its own core; yield its port."""
    port = free_port()
    words = ["--host", "127.0.0.1", "--port", str(port), "--replica", f"127.0.0.1:{stub_port}"]
    with running_server(proxy.main, words, port, core):
        yield port


@contextlib.contextmanager
def _watched(core: int, noise: list[float]) -> Iterator[None]:
    """Let a timer run on a core; its delays, in seconds, are in `noise` after the block.

    The block begins when the timer runs: its process starts with a second of imports, which must
    not be taken for the proxy's time.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    watcher = context.Process(target=_watch, args=(theirs, core))
    watcher.start()
    try:
        ours.recv()
        yield
        ours.send(None)
        noise += ours.recv()
    finally:
        watcher.terminate()
        watcher.join()


def _watch(end: Connection, core: int) -> None:
    os.sched_setaffinity(0, {core})
    end.send(None)
    late: list[float] = []
    while not late or not end.poll():
        began_s = time.monotonic()
        time.sleep(_TICK_S)
        late.append(time.monotonic() - began_s - _TICK_S)
    end.send(late)
