"""What theory gives for the verdict's test, without the pipeline around it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from scipy import stats

from kit.attack_cells import PAIRS, Cell
from kit.verdict import ALPHA, sign_flip_p
from kit.virtual import MARGIN, REQUESTS, World, bench_frame, replicate_factors

THEORY_RUNS = 20_000


@dataclass(frozen=True)
class Theory:
    """What the test alone gives: shares of runs, by the sign-flip test and by a t test."""

    supported: float
    not_supported: float
    t_supported: float | None


@lru_cache
def median_sd() -> float:
    """Return the sd of the median of as many standard normals as a replicate has requests."""
    draw = np.random.default_rng(0)
    return float(np.median(draw.normal(size=(200_000, REQUESTS)), axis=1).std())


def theory_of(cell: Cell) -> Theory | None:
    """Return what the test gives on pairs drawn straight from the cell's distribution.

    The t test's power is analytic and given for normal noise alone; None for faults.
    """
    if cell.kind in ("fault", "twin", "spare"):
        return None
    gains = _drawn_gains(cell)
    plain = World(effect=cell.world.effect) == cell.world
    return Theory(
        supported=float((sign_flip_ps(gains) <= ALPHA).mean()),
        not_supported=float((sign_flip_ps(-gains) <= ALPHA).mean()),
        t_supported=t_power(cell.world, cell.pairs) if plain else None,
    )


def _drawn_gains(cell: Cell) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return log ratios beyond the margin, one row a run, one column a pair."""
    draw = np.random.default_rng(1)
    shared = bench_frame(1, cell.pairs, cell.stopping)
    on = np.array([r.role == "candidate" for r in shared.replicates])
    runs = THEORY_RUNS if cell.pairs <= PAIRS else THEORY_RUNS // 10
    logs = np.log([replicate_factors(shared, cell.world, draw) for _ in range(runs)])
    logs += draw.normal(0.0, cell.world.within_sd * median_sd(), logs.shape)
    return logs[:, on] - logs[:, ~on] - math.log1p(MARGIN)


def sign_flip_ps(gains: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return the exact one-sided sign-flip p of every row; few pairs by listing all patterns."""
    pairs = gains.shape[1]
    if pairs > PAIRS:
        return np.array([sign_flip_p(row) for row in gains])
    signs = 1.0 - 2.0 * (np.arange(2**pairs)[:, None] >> np.arange(pairs) & 1)
    sums = np.abs(gains) @ signs.T
    found: np.ndarray[Any, np.dtype[np.float64]] = np.mean(
        sums >= gains.sum(axis=1, keepdims=True) - 1e-12, axis=1
    )
    return found


def t_power(world: World, pairs: int) -> float:
    """Return the power of the one-sided t test at ALPHA against the margin, normal noise."""
    sd = math.sqrt(2 * (world.between_sd**2 + (world.within_sd * median_sd()) ** 2))
    beyond = math.log1p(world.effect) - math.log1p(MARGIN)
    limit = stats.t.ppf(1 - ALPHA, pairs - 1)
    return float(stats.nct.sf(limit, pairs - 1, beyond / sd * math.sqrt(pairs)))
