"""How long two kinds of work ran at the same time, from their intervals. Pure.

`schedule` and `forward` come from a trace as lists of (begin, end) on one clock; an interval may
overlap others of its own kind (threads, streams): time is counted once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from kit.value import Value

Interval = tuple[float, float]
"""Begin and end in seconds."""


class Overlap(Value):
    """Seconds in which each kind of work ran at all, and both at once."""

    schedule_s: float
    forward_s: float
    both_s: float

    @property
    def hidden_share(self) -> float | None:
        """The share of the scheduling that a forward pass hides; None where nothing was scheduled.

        It says how much of the critical path is saved, not how much work.
        """
        return self.both_s / self.schedule_s if self.schedule_s else None


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """Return disjoint intervals in order that cover the same time; empty ones are left out.

    Raises `ValueError` for an end before its begin, or a time that is not finite.
    """
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if not (math.isfinite(begin) and math.isfinite(end) and begin <= end):
            raise ValueError(f"no interval: from {begin} to {end}")
        if begin == end:
            continue
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def length_s(intervals: Iterable[Interval]) -> float:
    """Return how long at least one of the intervals lasts."""
    return math.fsum(end - begin for begin, end in merged(intervals))


def common(first: Iterable[Interval], second: Iterable[Interval]) -> list[Interval]:
    """Return when both an interval of the first and one of the second last; disjoint, in order."""
    a, b = merged(first), merged(second)
    found: list[Interval] = []
    i = j = 0
    while i < len(a) and j < len(b):
        begin, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if begin < end:
            found.append((begin, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return found


def overlap_of(schedule: Iterable[Interval], forward: Iterable[Interval]) -> Overlap:
    """Compute how much of the scheduling ran during a forward pass."""
    ours, theirs = list(schedule), list(forward)
    return Overlap(
        schedule_s=length_s(ours), forward_s=length_s(theirs), both_s=length_s(common(ours, theirs))
    )
