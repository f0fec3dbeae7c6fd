"""The attack bench's table: what came out, beside theory, and what must not have come out."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import get_args

from kit.attack_cells import PAIRS, SPARE, STRONG, Cell
from kit.attack_theory import THEORY_RUNS, Theory
from kit.planted import FAULTS
from kit.sequential import Stopping
from kit.verdict import ALPHA, Word
from kit.virtual import MARGIN, REQUESTS, World

FALSE_SUPPORTED = 0.05
POWER = 0.90
WORDS: tuple[Word, ...] = get_args(Word)


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


def broken_promises(
    table: Table, *, false_supported: float = FALSE_SUPPORTED, power: float = POWER
) -> list[str]:
    """Return what the table shows that must not be; empty when the verdict survived."""
    broken = []
    for row in table.rows:
        cell, name = row.cell, f"{row.cell.kind}: {row.cell.name}"
        if cell.kind == "limit":
            continue
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
        *EFFECT_HEAD,
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
        *_spare_lines(table),
        "",
        *_promise_lines(table),
        "",
        *_limit_lines(table),
    ]
    return "\n".join(lines) + "\n"


EFFECT_HEAD = (
    "| planted | supported | test | t | not supported | test | inconclusive |",
    "|---|--:|--:|--:|--:|--:|--:|",
)


def _limit_lines(table: Table) -> list[str]:
    return [
        "## What the test cannot promise",
        "",
        "A pair's noise is taken to be as likely up as down. Noise of the same shape in both arms",
        "is, whatever that shape; that of an arm which alone is now and then much faster is not.",
        "Such an arm shows in a report's table of replicates.",
        "",
        *EFFECT_HEAD,
        *(_effect_line(row) for row in table.rows if row.cell.kind == "limit"),
    ]


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


def _spare_lines(table: Table) -> list[str]:
    return [
        "## Spare pairs",
        "",
        f"In 5 % of the replicates other load takes a fifth of the CPUs and makes them 25 % "
        f"slower; {SPARE} spare pairs",
        "stand in for the pairs that the foreign-load guard refused.",
        "",
        "| planted | supported | not supported | inconclusive | invalid | mean pairs |",
        "|---|--:|--:|--:|--:|--:|",
        *(
            f"| {row.cell.name} | {_percent(row.share('supported'))} | "
            f"{_percent(row.share('not supported'))} | {_percent(row.share('inconclusive'))} | "
            f"{_percent(row.share('invalid'))} | {row.mean_pairs:.1f} |"
            for row in table.rows
            if row.cell.kind == "spare"
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
