"""When a run may stop early: a group-sequential rule that is registered before any data.

Looking at the data several times with the plain test would raise its error rate. Here each look
may spend a part of the error rate, fixed in the plan. The rule is exact: given the sizes of the
pairs' effects, every pattern of their signs is equally likely when there is no effect beyond the
margin, and the patterns that would stop the run, over all looks together, are at most that share
of them - whatever the shape of the noise, as long as it is symmetric.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from pydantic import model_validator

from kit.value import Value

Floats = np.ndarray[Any, np.dtype[np.float64]]
Flags = np.ndarray[Any, np.dtype[np.bool_]]

MAX_PAIRS = 20  # 2**20 sign patterns are held at once


class Stopping(Value):
    """The rule of `--replicates auto`: `looks` in pairs, `spent` the error rate used up to each.

    The first look can stop a run only when all six pairs lie beyond the margin (2**-6).
    """

    looks: tuple[int, ...] = (6, 9, 12, 16)
    spent: tuple[float, ...] = (8 / 512, 10 / 512, 91 / 4096, 0.025)

    @model_validator(mode="after")
    def _usable(self) -> Stopping:
        if not self.looks or len(self.looks) != len(self.spent):
            raise ValueError("as many looks as shares of the error rate are needed")
        if list(self.looks) != sorted(set(self.looks)) or self.looks[0] < 1:
            raise ValueError("looks must rise")
        if self.looks[-1] > MAX_PAIRS:
            raise ValueError(f"at most {MAX_PAIRS} pairs can be enumerated")
        if list(self.spent) != sorted(self.spent) or not 0 < self.spent[0] <= self.spent[-1] < 1:
            raise ValueError("the error rate spent must rise, between 0 and 1")
        return self

    @property
    def pairs(self) -> int:
        """The most pairs that a run may need."""
        return self.looks[-1]


def stopping_patterns(rule: Stopping, sizes: Sequence[float]) -> list[Flags]:
    """Return, for each look that `sizes` reach, which sign patterns stop the run there.

    `sizes` are absolute effects, in the order in which the pairs ran. Bit i of a pattern's number
    is the sign of pair i (1 is negative). A pattern that stopped at an earlier look is not among
    those of a later one.
    """
    absolute = np.abs(np.asarray(sizes, dtype=float))
    stopped: Flags = np.zeros(1, dtype=bool)
    held, found = 0, []
    for pairs, spent in zip(rule.looks, rule.spent, strict=True):
        if pairs > len(absolute):
            break
        sums = signed_sums(absolute[:pairs])
        before = np.tile(stopped, 2 ** (pairs - held))
        allowed = int(spent * 2**pairs + 1e-9) - int(before.sum())
        now = _largest(sums, ~before, allowed, float(absolute[:pairs].sum()) * 1e-12)
        found.append(now)
        stopped, held = before | now, pairs
    return found


def signed_sums(absolute: Floats) -> Floats:
    """Return the sums under all sign patterns; bit i of an index makes value i negative."""
    sums: Floats = np.zeros(1)
    for value in absolute:
        sums = np.concatenate((sums + value, sums - value))
    return sums


def _largest(sums: Floats, among: Flags, allowed: int, tolerance: float) -> Flags:
    """Mark the largest sums, at most `allowed` of them; of equal sums all or none."""
    nothing: Flags = np.zeros(len(sums), dtype=bool)
    ordered = np.sort(sums[among])[::-1]
    if allowed <= 0 or not len(ordered):
        return nothing
    if allowed >= len(ordered):
        return among
    limit = ordered[allowed - 1]
    if ordered[allowed] >= limit - tolerance:  # the tie goes on: leave the whole of it out
        above = ordered[ordered > limit + tolerance]
        if not len(above):
            return nothing
        limit = above[-1]
    chosen: Flags = among & (sums >= limit - tolerance)
    return chosen


def stops_at(rule: Stopping, gains: Sequence[float]) -> int | None:
    """Return the number of pairs at which gains above 0 stop the run, or None.

    `gains` are log ratios beyond the margin, in the order in which the pairs ran.
    """
    pattern = sum(1 << i for i, gain in enumerate(gains) if gain < 0)
    for pairs, stopping in zip(rule.looks, stopping_patterns(rule, gains), strict=False):
        if stopping[pattern & (2**pairs - 1)]:
            return pairs
    return None
