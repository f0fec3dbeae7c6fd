"""The attack bench: does the verdict survive planted effects and planted faults?

Virtual runs whose truth is known go through `kit.analyse.conclude`, the same function that judges
real ones. What comes out is counted beside what theory gives for the same test.
"""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np

from kit.analyse import conclude, has_answer, is_enough
from kit.attack_cells import Cell, cells
from kit.attack_table import Row, Table, broken_promises, render_table
from kit.attack_theory import theory_of
from kit.paths import ROOT
from kit.planted import FAULTS
from kit.store import write_text
from kit.verdict import Word
from kit.virtual import VirtualRun, bench_frame, draw_run, truncated

__all__ = ["attack", "broken_promises", "render_table", "write_document"]

Say = Callable[[str], None]

CHUNK = 50  # runs that a worker takes at once
DOCUMENT = ROOT / "docs" / "attack.md"


def attack(
    runs: int,
    seed: int,
    say: Say,
    *,
    workers: int | None = None,
    chosen: Sequence[Cell] | None = None,
) -> Table:
    """Run every cell `runs` times; `seed` fixes all chance, `workers` (processes) changes nothing.

    A fault's cell and its twin draw the same noise. `chosen` are the cells to run, by default all;
    leaving some out changes nothing in the others.
    """
    known = cells()
    chosen = known if chosen is None else chosen
    numbers = {cell: _stream(cell, known) for cell in chosen}
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
    shared = bench_frame(1 + number % 2, cell.pairs, cell.stopping, cell.spare)
    run = draw_run(shared, cell.world, draw)
    if cell.fault is not None:
        FAULTS[cell.fault][0](run, draw, cell.kind == "fault")
    if cell.stopping is not None:
        looks = (truncated(run, pairs) for pairs in cell.stopping.looks)
        run = next(r for r in looks if has_answer(r.plan, r.experiment, r.replicates, r.raws))
    if cell.spare:
        looks = (truncated(run, cell.pairs + more) for more in range(cell.spare + 1))
        run = next(r for r in looks if _may_end(r))
    found = conclude(
        run.plan, run.experiment, run.replicates, run.raws, run.requests, run.telemetry
    )
    return found.verdict.word, len(run.replicates) // 2


def _may_end(run: VirtualRun) -> bool:
    if len(run.replicates) == len(run.plan.slots):
        return True
    return is_enough(
        run.plan, run.experiment, run.replicates, run.raws, run.requests, run.telemetry
    )


def write_document(table: Table, path: Path = DOCUMENT) -> None:
    """Write docs/attack.md."""
    write_text(path, render_table(table))
