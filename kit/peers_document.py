"""Keeps docs/peers.md: what other load generators were measured to read, when and where."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kit.bench_peers import (
    CLAIMED_AT,
    CLAIMED_ITL,
    CLAIMED_TTFT,
    COLUMNS,
    PeerResult,
    advantages,
    cells_of,
    failures,
    told,
)
from kit.docs import with_table
from kit.paths import ROOT
from kit.store import write_text

DOCUMENT = ROOT / "docs" / "peers.md"


def write_document(
    results: Sequence[PeerResult], *, day: str, machine: str, path: Path = DOCUMENT
) -> None:
    """Put the results of that day and machine into the document, in place of what was there."""
    versions = sorted({f"{r.tool} {r.version}" for r in results if r.version})
    rows = [list(COLUMNS), ["---"] * len(COLUMNS), *(cells_of(r) for r in results)]
    lines = [
        f"Measured on {day} on {machine}: {', '.join(versions)}.",
        "",
        *(f"| {' | '.join(row)} |" for row in rows),
        "",
        *(f"- {each}." for each in (*failures(results), *map(told, advantages(results)))),
        "",
        _claim(results),
    ]
    write_text(path, with_table(path.read_text("utf-8"), "peers", "\n".join(lines)))


def _claim(results: Sequence[PeerResult]) -> str:
    """Return whether the claim holds in these results."""
    streams, start = CLAIMED_AT
    claim = (
        f"Claimed at {streams} streams, {start}: TTFT at least {CLAIMED_TTFT:g} times and ITL at "
        f"least {CLAIMED_ITL:g} times smaller than the best other tool's at p99."
    )
    here = [a for a in advantages(results) if (a.streams, a.mode) == CLAIMED_AT]
    if not here:
        return f"{claim} Not measured here."
    return f"{claim} {'It holds' if here[0].ok else 'It does not hold'} in this measurement."
