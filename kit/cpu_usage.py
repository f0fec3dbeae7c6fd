"""CPU seconds of programs and of a core over time, read from /proc."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

_EVERY_S = 0.2
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass
class Usage:
    """CPU seconds of a tool's processes, and of its whole core, over time."""

    core: int
    times: list[float] = field(default_factory=list)
    tree: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)
    roots: Sequence[int] | None = None

    def follow(self, roots: Sequence[int] | None) -> None:
        """Count these processes and all below them; None: all that this one starts."""
        self.roots = roots

    @contextlib.contextmanager
    def followed(self, core: int) -> Iterator[None]:
        """Look at them a few times a second, from another core, until the block ends."""
        before = set(_children(os.getpid()))
        ended = threading.Event()

        def look() -> None:
            os.sched_setaffinity(0, {core})  # of this thread alone
            while not ended.wait(_EVERY_S):
                ours = [pid for pid in _children(os.getpid()) if pid not in before]
                self.times.append(time.monotonic())
                self.tree.append(sum(map(_tree_cpu_s, self.roots or ours)))
                self.busy.append(_core_cpu_s(self.core))

        thread = threading.Thread(target=look, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def tree_s(self, begin_s: float, end_s: float) -> float:
        """Return the CPU seconds of the tool between two times."""
        begin, end = np.interp([begin_s, end_s], self.times, self.tree)
        return float(end - begin)

    def other_share(self, begin_s: float, end_s: float) -> float:
        """Return the share of the core that other programs took between two times."""
        begin, end = np.interp([begin_s, end_s], self.times, self.busy)
        other = (end - begin - self.tree_s(begin_s, end_s)) / (end_s - begin_s)
        return float(max(0.0, other))


def _children(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += [int(word) for word in task.read_text("ascii").split()]
    return found


def _tree_cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process, of all below it, and of those that it has outlived."""
    total = sum(map(_tree_cpu_s, _children(pid)))
    with contextlib.suppress(OSError):
        told = Path(f"/proc/{pid}/stat").read_text("utf-8", errors="replace")
        total += sum(map(int, told.rpartition(")")[2].split()[11:15])) / _TICKS
    return total


def _core_cpu_s(core: int) -> float:
    """Return the CPU seconds of a core but for idling and interrupts."""
    for line in Path("/proc/stat").read_text("ascii").splitlines():
        name, *ticks = line.split()
        if name == f"cpu{core}":
            user, nice, system, *_, steal = map(int, ticks[:8])
            return (user + nice + system + steal) / _TICKS
    return 0.0
