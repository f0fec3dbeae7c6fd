"""The attack bench: does the verdict survive planted effects and planted faults?

Virtual runs whose truth is known go through `kit.analyse.conclude`, the same function that judges
real ones. What comes out is counted beside what theory gives for the same test.
"""

from __future__ import annotations

import gc
import math
import os
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from scipy import stats

from kit.analyse import conclude, has_answer
from kit.paths import ROOT
from kit.planted import FAULTS
from kit.sequential import Stopping
from kit.store import write_text
from kit.verdict import ALPHA, Word, sign_flip_p
from kit.virtual import (
    MARGIN,
    REQUESTS,
    World,
    bench_frame,
    draw_run,
    replicate_factors,
    truncated,
)

Say = Callable[[str], None]
Kind = Literal["effect", "auto", "fault", "twin"]

PAIRS = 8
CHUNK = 50  # runs that a worker takes at once
FALSE_SUPPORTED = 0.05
POWER = 0.90
STRONG = 0.30
DOCUMENT = ROOT / "docs" / "attack.md"
WORDS: tuple[Word, ...] = get_args(Word)


@dataclass(frozen=True)
class Cell:
    """What is planted in all runs of one row of the table; `null` when `supported` is false."""

    name: str
    kind: Kind
    world: World
    fault: str | None = None
    null: bool = False

    @property
    def stopping(self) -> Stopping | None:
        return Stopping() if self.kind == "auto" else None

    @property
    def pairs(self) -> int:
        return self.stopping.pairs if self.stopping else PAIRS


@dataclass(frozen=True)
class Theory:
    """What the test alone gives: shares of runs, by the sign-flip test and by a t test."""

    supported: float
    not_supported: float
    t_supported: float | None


@dataclass(frozen=True)
class Row:
    """A cell, how often each word came out, the mean number of pairs, and theory."""

    cell: Cell
    words: Counter[str]
    mean_pairs: float
    theory: Theory | None

    @property
    def runs(self) -> int:
        return self.words.total()

    def share(self, word: Word) -> float:
        return self.words[word] / self.runs


@dataclass(frozen=True)
class Table:
    """All rows, and how to get them again."""

    runs: int
    seed: int
    rows: tuple[Row, ...]


def _worlds() -> dict[str, tuple[World, bool]]:
    """Return the worlds of the effect cells; True where `supported` would be false."""
    plain: dict[str, tuple[World, bool]] = {
        "no effect": (World(), True),
        "+3 %": (World(effect=0.03), True),
        "exactly the margin": (World(effect=MARGIN), True),
        "+10 %": (World(effect=0.10), False),
        "+15 %": (World(effect=0.15), False),
        "+20 %": (World(effect=0.20), False),
        "+30 %": (World(effect=STRONG), False),
        "-10 %": (World(effect=-0.10), True),
    }
    shapes: tuple[tuple[str, dict[str, Any]], ...] = (
        ("bimodal servers", {"bimodal": 0.2}),
        ("linear drift", {"drift": "linear"}),
        ("warming up", {"drift": "warming"}),
        ("a step in time", {"drift": "step"}),
    )
    for name, world in shapes:
        plain[f"{name}, no effect"] = (World(**world), True)
        plain[f"{name}, the margin"] = (World(effect=MARGIN, **world), True)
        plain[f"{name}, +30 %"] = (World(effect=STRONG, **world), False)
    return plain


def cells() -> list[Cell]:
    """Return every cell of the bench; the order is part of what a seed means."""
    worlds = _worlds()
    found = [Cell(name, "effect", world, null=null) for name, (world, null) in worlds.items()]
    for name in ("no effect", "exactly the margin", "+10 %", "+15 %", "+20 %", "+30 %"):
        found.append(Cell(name, "auto", worlds[name][0], null=worlds[name][1]))
    for name in ("bimodal servers, the margin", "linear drift, the margin"):
        found.append(Cell(name, "auto", worlds[name][0], null=True))
    for fault in FAULTS:
        found.append(Cell(fault, "fault", World(effect=STRONG), fault))
        found.append(Cell(fault, "twin", World(effect=STRONG), fault))
    return found


def attack(runs: int, seed: int, say: Say, *, workers: int | None = None) -> Table:
    """Run every cell `runs` times; `seed` fixes all chance, `workers` (processes) changes nothing.

    A fault's cell and its twin draw the same noise.
    """
    chosen = cells()
    numbers = {cell: _stream(cell, chosen) for cell in chosen}
    workers = workers or os.cpu_count() or 1
    rows = []
    with ProcessPoolExecutor(workers, initializer=gc.disable) as pool:
        due = {
            cell: [
                pool.submit(run_cell, cell, seed, numbers[cell], first, min(CHUNK, runs - first))
                for first in range(0, runs, CHUNK)
            ]
            for cell in chosen
        }
        theories = {cell: pool.submit(theory_of, cell) for cell in chosen}
        for cell, parts in due.items():
            words: Counter[str] = Counter()
            pairs = 0
            for part in parts:
                counted, ran = part.result()
                words += counted
                pairs += ran
            rows.append(Row(cell, words, pairs / runs, theories[cell].result()))
            listed = ", ".join(f"{word} {n}" for word, n in words.most_common())
            say(f"{cell.kind}: {cell.name}: {listed}")
    return Table(runs, seed, tuple(rows))


def _stream(cell: Cell, all_cells: Sequence[Cell]) -> int:
    """Return the number of a cell's stream of chance; a twin has that of its fault."""
    names = [c.fault or f"{c.kind}: {c.name}" for c in all_cells]
    return names.index(cell.fault or f"{cell.kind}: {cell.name}")


def run_cell(
    cell: Cell, seed: int, stream: int, first: int, count: int
) -> tuple[Counter[str], int]:
    """Return the words of `count` runs of a cell from number `first` on, and their pairs."""
    words: Counter[str] = Counter()
    pairs = 0
    for number in range(first, first + count):
        word, ran = run_once(cell, np.random.default_rng([seed, stream, number]), number)
        words[word] += 1
        pairs += ran
    gc.collect()  # the workers collect here only: a fifth of their time otherwise
    return words, pairs


def run_once(cell: Cell, draw: np.random.Generator, number: int) -> tuple[Word, int]:
    """Draw one run of a cell and judge it; every other run begins with the other arm."""
    shared = bench_frame(1 + number % 2, cell.pairs, cell.stopping)
    run = draw_run(shared, cell.world, draw)
    if cell.fault is not None:
        FAULTS[cell.fault][0](run, draw, cell.kind == "fault")
    if cell.stopping is not None:
        looks = (truncated(run, pairs) for pairs in cell.stopping.looks)
        run = next(r for r in looks if has_answer(r.plan, r.experiment, r.replicates, r.raws))
    found = conclude(
        run.plan, run.experiment, run.replicates, run.raws, run.requests, run.telemetry
    )
    return found.verdict.word, len(run.replicates) // 2


# -- theory ------------------------------------------------------------------------------------

THEORY_RUNS = 20_000


@lru_cache
def median_sd() -> float:
    """Return the sd of the median of as many standard normals as a replicate has requests."""
    draw = np.random.default_rng(0)
    return float(np.median(draw.normal(size=(200_000, REQUESTS)), axis=1).std())


def theory_of(cell: Cell) -> Theory | None:
    """Return what the test gives on pairs drawn straight from the cell's distribution.

    The t test's power is analytic and given for normal noise alone; None for faults.
    """
    if cell.kind not in ("effect", "auto"):
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


# -- what must hold, and the table -------------------------------------------------------------


def broken_promises(
    table: Table, *, false_supported: float = FALSE_SUPPORTED, power: float = POWER
) -> list[str]:
    """Return what the table shows that must not be; empty when the verdict survived."""
    broken = []
    for row in table.rows:
        cell, name = row.cell, f"{row.cell.kind}: {row.cell.name}"
        supported = row.share("supported")
        if cell.null and supported > false_supported:
            broken.append(f"{name}: {supported:.1%} falsely supported")
        is_strong = cell.world.effect == STRONG and not cell.world.bimodal
        if is_strong and cell.kind != "fault" and supported < power:
            broken.append(f"{name}: only {supported:.1%} supported")
        if not cell.null and row.share("not supported") > false_supported:
            broken.append(f"{name}: {row.share('not supported'):.1%} falsely not supported")
        if cell.kind == "fault":
            wanted = FAULTS[str(cell.fault)][1]
            others = {w: n for w, n in row.words.items() if w != wanted}
            broken += [f"{name}: {n} times {w}, not {wanted}" for w, n in others.items()]
    return broken


def render_table(table: Table) -> str:
    """Return docs/attack.md."""
    lines = [
        "# The attack bench",
        "",
        f"Made by `nox -s attack -- --runs {table.runs} --seed {table.seed}`; do not edit.",
        "",
        f"Each row: {table.runs:,} virtual runs through `kit.analyse.conclude`, the function that "
        "judges real ones. Planted noise:",
        f"between replicates {World.between_sd:.0%}, within a replicate {World.within_sd:.0%}, "
        f"{REQUESTS} requests a replicate. Claim on trial: the",
        f"median TTFT rises by more than {MARGIN:.0%} ({PAIRS} pairs, one-sided alpha {ALPHA}). "
        "All numbers are per cent of the runs.",
        "",
        "## Planted effects",
        "",
        "*Test*: the same sign-flip test on pairs drawn straight from the planted distribution "
        f"({THEORY_RUNS:,} draws). *t*: analytic power of the t test, normal noise.",
        "",
        "| planted | supported | test | t | not supported | test | inconclusive |",
        "|---|--:|--:|--:|--:|--:|--:|",
        *(_effect_line(row) for row in table.rows if row.cell.kind == "effect"),
        "",
        *_auto_lines(table),
        "",
        "## Planted faults",
        "",
        f"Under every fault lies a true effect of +{STRONG:.0%}; the twin is the same run with the "
        "fault left out.",
        "",
        "| fault | verdicts | invalid | confounded | inconclusive | twin: supported |",
        "|---|--:|--:|--:|--:|--:|",
        *_fault_lines(table),
        "",
        *_promise_lines(table),
    ]
    return "\n".join(lines) + "\n"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f}"


def _effect_line(row: Row) -> str:
    theory = row.theory
    assert theory is not None
    shown = (
        row.share("supported"),
        theory.supported,
        theory.t_supported,
        row.share("not supported"),
        theory.not_supported,
        row.share("inconclusive"),
    )
    return f"| {row.cell.name} | " + " | ".join(map(_percent, shown)) + " |"


def _auto_lines(table: Table) -> list[str]:
    rule = Stopping()
    looks = ", ".join(f"{n} ({100 * s:.2f} %)" for n, s in zip(rule.looks, rule.spent, strict=True))
    return [
        "## `--replicates auto`",
        "",
        f"Looks after so many pairs, with the error rate spent up to each: {looks}. *Fixed*: the "
        f"test at {rule.pairs} pairs without looking before.",
        "",
        "| planted | supported | fixed | not supported | fixed | inconclusive | mean pairs |",
        "|---|--:|--:|--:|--:|--:|--:|",
        *(
            f"| {row.cell.name} | {_percent(row.share('supported'))} | "
            f"{_percent(row.theory.supported if row.theory else None)} | "
            f"{_percent(row.share('not supported'))} | "
            f"{_percent(row.theory.not_supported if row.theory else None)} | "
            f"{_percent(row.share('inconclusive'))} | {row.mean_pairs:.1f} |"
            for row in table.rows
            if row.cell.kind == "auto"
        ),
    ]


def _fault_lines(table: Table) -> list[str]:
    twins = {row.cell.fault: row for row in table.rows if row.cell.kind == "twin"}
    lines = []
    for row in (r for r in table.rows if r.cell.kind == "fault"):
        verdicts = row.words["supported"] + row.words["not supported"]
        shown = [_percent(row.share(w)) for w in WORDS if w in ("invalid", "confounded")]
        shown += [_percent(row.share("inconclusive"))]
        twin = _percent(twins[row.cell.fault].share("supported"))
        lines.append(f"| {row.cell.name} | {verdicts} | {' | '.join(shown)} | {twin} |")
    return lines


def _promise_lines(table: Table) -> list[str]:
    broken = broken_promises(table)
    promised = (
        f"Promised: falsely `supported` in at most {FALSE_SUPPORTED:.0%} up to the margin, "
        f"`supported` in at least {POWER:.0%} at +{STRONG:.0%}, no verdict under a fault."
    )
    return [promised + (" All held." if not broken else " Broken:"), *(f"- {b}" for b in broken)]


def write_document(table: Table, path: Path = DOCUMENT) -> None:
    """Write docs/attack.md."""
    write_text(path, render_table(table))
