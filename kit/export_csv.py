"""A run's samples as CSV, for spreadsheets and data frames: the raw values, nothing rounded.

`samples.csv` has a row for each request, `chunks.csv` for each received chunk, `measures.csv` for
each reading of the manifest. Times are seconds from their window's start.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from kit.manifest import Manifest, Replicate
from kit.measure import Sample, load_window, max_itl_s, tpot_s, ttft_s

WHERE = ("replicate", "pair", "role", "arm", "set_aside", "phase")
GIVEN = (
    "id", "lane", "intended_s", "sent_s", "done_s", "status", "error", "finish_reason",
    "prompt_tokens", "completion_tokens", "cached_tokens", "stamps",
)  # fmt: skip
COMPUTED = {"ttft_s": ttft_s, "tpot_s": tpot_s, "max_itl_s": max_itl_s}


def csv_files(run: Path, manifest: Manifest) -> dict[str, str]:
    """Return the three tables by file name; raises `BadFile` for a raw file that cannot be read."""
    samples: list[list[Any]] = []
    chunks: list[list[Any]] = []
    for where, sample in _samples(run, manifest):
        given = [sample.get(key) for key in GIVEN]
        computed = [of(sample) for of in COMPUTED.values()]
        tags = json.dumps(sample.get("tags") or {}, ensure_ascii=False, sort_keys=True)
        samples.append([*where, *given, *computed, len(sample.get("chunk_s") or []), tags])
        sizes = sample.get("chunk_chars") or []
        for place, at in enumerate(sample.get("chunk_s") or []):
            size = sizes[place] if place < len(sizes) else None
            chunks.append([*where, sample.get("id"), place, at, size])
    return {
        "samples.csv": _table([*WHERE, *GIVEN, *COMPUTED, "chunks", "tags"], samples),
        "chunks.csv": _table([*WHERE, "id", "chunk", "received_s", "characters"], chunks),
        "measures.csv": _table(
            [*WHERE[:5], "measure", "unit", "value", "n", "reason"],
            (
                [*_place(manifest, r), x.name, x.unit, x.value, x.n, x.reason]
                for r in manifest.replicates
                for x in r.readings
            ),
        ),
    }


def _samples(run: Path, manifest: Manifest) -> Iterator[tuple[list[Any], Sample]]:
    for r in manifest.replicates:
        for phase in manifest.plan.phases if r.status == "complete" else ():
            window = load_window(run, f"{r.folder}/{phase.name}", ("no series",))
            for sample in window.samples:
                yield [*_place(manifest, r), phase.name], sample


def _place(manifest: Manifest, r: Replicate) -> list[Any]:
    aside = int(r.pair in manifest.set_aside)
    return [r.replicate, r.pair, r.role, manifest.plan.arm(r.role).name, aside]


def _table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    return out.getvalue()
