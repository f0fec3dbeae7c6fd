"""Keeps docs/proxy.md: what the proxy was measured to cost, when and where."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from kit.bench_proxy import COLUMNS, ProxyCost, cells_of
from kit.docs import with_table
from kit.facts.host import cpu_model_of, parse_cpuinfo
from kit.paths import ROOT
from kit.store import write_text

DOCUMENT = ROOT / "docs" / "proxy.md"


def write_document(
    results: Sequence[ProxyCost], *, day: str, machine: str, path: Path = DOCUMENT
) -> None:
    """Put the results of that day and machine into the document, in place of what was there."""
    rows = [list(COLUMNS), ["---"] * len(COLUMNS), *(cells_of(r) for r in results)]
    lines = [f"Measured on {day} on {machine}.", "", *(f"| {' | '.join(r)} |" for r in rows)]
    write_text(path, with_table(path.read_text("utf-8"), "proxy", "\n".join(lines)))


def this_machine() -> str:
    """Return what the numbers depend on: the processor and how many of its threads are ours."""
    (first, *_) = parse_cpuinfo(Path("/proc/cpuinfo").read_text("utf-8"))
    return f"{cpu_model_of(first)}, {len(os.sched_getaffinity(0))} hardware threads"
