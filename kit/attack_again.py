"""The attack bench of reproductions: does "reproduced" survive planted differences?

Pairs of virtual runs whose truth is known go through `kit.analyse.conclude` and
`kit.compare.judge_again`, the functions that judge real ones.
"""

from __future__ import annotations

import gc
import math
import os
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import get_args

import numpy as np

from kit.analyse import conclude
from kit.attack_cells import PAIRS
from kit.compare import Word, differences, inside_of, judge_again
from kit.manifest import KitIdentity, Manifest
from kit.paths import ROOT
from kit.store import write_text
from kit.virtual import VirtualRun, World, bench_frame, draw_run, truncated, virtual_experiment

Say = Callable[[str], None]

CHUNK = 50
DOCUMENT = ROOT / "docs" / "reproduction.md"
FALSE_REPRODUCED = 0.05
POWER = 0.80
BOUND = virtual_experiment().hypothesis.equivalence
PLANTED = 0.30


@dataclass(frozen=True)
class Cell:
    """Two worlds: that of the original and that of the second run.

    `slower` stretches both arms of the second run; `truth` is what is the case: the same, exactly
    at the bound or beyond it, or something that leaves nothing to say.
    """

    name: str
    first: World
    second: World
    truth: str
    slower: float = 0.0
    pairs: int = PAIRS
    other_image: bool = False


def cells() -> tuple[Cell, ...]:
    """Return all cells."""
    base = World(effect=PLANTED)
    at_bound = World(effect=(1 + PLANTED) * math.exp(BOUND) - 1)
    beyond = World(effect=(1 + PLANTED) * math.exp(2 * BOUND) - 1)
    noisy = replace(base, between_sd=0.40)
    drifting = replace(base, drift="linear")
    return (
        Cell("the same", base, base, "same"),
        Cell("the same, no effect in either", World(), World(), "same"),
        Cell("the same, linear drift in both", drifting, drifting, "same"),
        Cell("effect differs by exactly the bound", base, at_bound, "bound"),
        Cell(
            "effect differs by exactly the bound, bimodal servers",
            replace(base, bimodal=0.15),
            replace(at_bound, bimodal=0.15),
            "bound",
        ),
        Cell(
            "effect differs by exactly the bound, step drift",
            replace(base, drift="step"),
            replace(at_bound, drift="step"),
            "bound",
        ),
        Cell("both arms slower by exactly the bound", base, base, "bound", math.expm1(BOUND)),
        Cell("both arms 30 % slower", base, base, "beyond", 0.30),
        Cell("effect differs by twice the bound", base, beyond, "beyond"),
        Cell("very noisy servers", noisy, noisy, "nothing to say"),
        Cell("five pairs each", base, base, "nothing to say", pairs=5),
        Cell("another image", base, base, "another environment", other_image=True),
    )


def run_once(cell: Cell, seed: int, stream: int, number: int) -> Word:
    """Draw both runs of a cell and judge the second by the first."""
    runs = []
    for side, world in enumerate((cell.first, cell.second)):
        draw = np.random.default_rng([seed, stream, number, side])
        run = draw_run(bench_frame(1, PAIRS, None), world, draw)
        if side and cell.slower:
            _slow_down(run, 1 + cell.slower)
        runs.append(truncated(run, cell.pairs))
    first, second = map(manifest_of, runs)
    if cell.other_image:
        second = _on_another_image(second)
    found = differences(inside_of(first), inside_of(second))
    return judge_again(first, second, found=found).word


def _slow_down(run: VirtualRun, factor: float) -> None:
    """Stretch the time to every first token."""
    for number, raw in run.raws.items():
        windows = {}
        for phase, window in raw.windows.items():
            samples = []
            shift: dict[str, float] = {}
            for s in window.samples:
                late = shift.get(s["lane"], 0.0)
                more = (s["chunk_s"][0] - s["sent_s"]) * (factor - 1)
                shift[s["lane"]] = late + more
                samples.append(
                    {
                        **s,
                        "sent_s": s["sent_s"] + late,
                        "intended_s": s["intended_s"] + late,
                        "chunk_s": [t + late + more for t in s["chunk_s"]],
                        "done_s": s["done_s"] + late + more,
                    }
                )
            windows[phase] = replace(window, samples=tuple(samples))
        run.raws[number] = replace(raw, windows=windows)


def _on_another_image(manifest: Manifest) -> Manifest:
    replicates = tuple(
        r.model_copy(
            update={"facts": tuple(f.model_copy(update={"value": "2.9.1"}) for f in r.facts)}
        )
        for r in manifest.replicates
    )
    return manifest.model_copy(update={"replicates": replicates})


@cache
def _blank() -> Manifest:
    """Return a manifest in which only what a run found is missing."""
    shared = bench_frame(1, PAIRS, None)
    return Manifest(
        run_id="virtual",
        status="complete",
        started_utc="2026-01-01T00:00:00.000Z",
        finished_utc="2026-01-01T00:10:00.000Z",
        kit=KitIdentity(version="0", commit=None, dirty=None, diff_sha256=None),
        plan=shared.plan,
        plan_sha256=shared.plan.sha256,
        reproduces=None,
        images=(),
        facts=(),
        replicates=(),
        set_aside=(),
        guards=(),
        confounders=(),
        not_acted=(),
        effect=None,
        verdict=None,
        notices=(),
        cost=None,
        failure=None,
        files={},
    )


def manifest_of(run: VirtualRun) -> Manifest:
    """Return what a virtual run's manifest says, as far as two runs are compared by it."""
    found = conclude(
        run.plan, run.experiment, run.replicates, run.raws, run.requests, run.telemetry
    )
    return _blank().model_copy(
        update={
            "replicates": found.replicates,
            "set_aside": found.set_aside,
            "not_acted": found.not_acted,
            "effect": found.effect,
            "verdict": found.verdict,
        }
    )


def _run_chunk(cell: Cell, seed: int, stream: int, first: int, count: int) -> Counter[str]:
    words = Counter[str](run_once(cell, seed, stream, n) for n in range(first, first + count))
    gc.collect()
    return words


def attack_again(runs: int, seed: int, say: Say) -> dict[Cell, Counter[str]]:
    """Run every cell `runs` times; `seed` fixes all chance."""
    found = {}
    with ProcessPoolExecutor(os.cpu_count() or 1, initializer=gc.disable) as pool:
        due = {
            cell: [
                pool.submit(_run_chunk, cell, seed, stream, first, min(CHUNK, runs - first))
                for first in range(0, runs, CHUNK)
            ]
            for stream, cell in enumerate(cells())
        }
        for cell, parts in due.items():
            words: Counter[str] = sum((p.result() for p in parts), Counter())
            found[cell] = words
            say(f"{cell.name}: {', '.join(f'{w} {n}' for w, n in words.most_common())}")
    return found


def broken_promises(
    table: dict[Cell, Counter[str]],
    *,
    false_reproduced: float = FALSE_REPRODUCED,
    power: float = POWER,
) -> list[str]:
    """Return what the table shows that must not be; empty when the judgement survived."""
    broken = []
    for cell, words in table.items():
        share = {word: words[word] / words.total() for word in get_args(Word)}
        allowed = {
            "same": (power, 1.0),
            "bound": (0.0, false_reproduced),
            "beyond": (0.0, 0.0),
            "nothing to say": (0.0, 0.0 if cell.pairs < PAIRS else false_reproduced),
            "another environment": (0.0, 0.0),
        }[cell.truth]
        if not allowed[0] <= share["reproduced"] <= allowed[1]:
            broken.append(f"{cell.name}: {share['reproduced']:.1%} reproduced")
        if cell.truth in ("same", "nothing to say") and share["not reproduced"] > 0.05:
            broken.append(f"{cell.name}: {share['not reproduced']:.1%} not reproduced")
        if cell.truth == "beyond" and share["not reproduced"] < power:
            broken.append(f"{cell.name}: only {share['not reproduced']:.1%} not reproduced")
        if cell.truth == "another environment" and share["incomparable"] < 1:
            broken.append(f"{cell.name}: not always incomparable")
    return broken


def render_table(table: dict[Cell, Counter[str]], runs: int, seed: int) -> str:
    """Return docs/reproduction.md."""
    lines = [
        "# How far to trust `reproduced`",
        "",
        f"Made by `nox -s attack -- --again --runs {runs} --seed {seed}`; do not edit.",
        "",
        f"Each row: {runs:,} pairs of virtual runs, each run through `kit.analyse.conclude` and "
        "both through",
        "`kit.compare.judge_again`, the functions that judge real ones. Planted noise: between "
        f"replicates {World.between_sd:.0%},",
        f"within a replicate {World.within_sd:.0%}; {PAIRS} pairs of arms a run; registered bound "
        f"{BOUND:g} (a factor of {math.exp(BOUND):.3f}) on effect and levels.",
        "All numbers are per cent of the pairs of runs.",
        "",
        f"| planted | truth | {' | '.join(get_args(Word))} |",
        "|---|---|---|---|---|---|",
    ]
    for cell, words in table.items():
        shares = " | ".join(f"{100 * words[w] / words.total():.1f}" for w in get_args(Word))
        lines.append(f"| {cell.name} | {cell.truth} | {shares} |")
    lines += [
        "",
        f"Promised: `reproduced` in at least {POWER:.0%} where both are the same, in at most "
        f"{FALSE_REPRODUCED:.0%} where they differ by exactly the bound, never beyond it.",
        "",
    ]
    return "\n".join(lines)


def write_document(
    table: dict[Cell, Counter[str]], runs: int, seed: int, path: Path = DOCUMENT
) -> None:
    """Write docs/reproduction.md."""
    write_text(path, render_table(table, runs, seed))
