"""A run's samples as tables, for spreadsheets and data frames: the raw values, nothing rounded.

`samples` has a row for each request, `chunks` for each received chunk, `measures` for each reading
of the manifest. Times are seconds from their window's start. CSV leaves a cell without a value
empty; Parquet, whose columns have types, holds a null there.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kit.errors import BadFile, ToolMissing
from kit.manifest import Manifest, Replicate
from kit.measure import Sample, load_window, max_itl_s, tpot_s, ttft_s

WHERE = ("replicate", "pair", "role", "arm", "set_aside", "phase")
GIVEN = (
    "id", "lane", "intended_s", "sent_s", "done_s", "status", "error", "finish_reason",
    "prompt_tokens", "completion_tokens", "cached_tokens", "stamps",
)  # fmt: skip
COMPUTED = {"ttft_s": ttft_s, "tpot_s": tpot_s, "max_itl_s": max_itl_s}
INTEGERS = frozenset(
    [
        "replicate",
        "pair",
        "set_aside",
        "status",
        "prompt_tokens",
        "completion_tokens",
        "cached_tokens",
        "chunks",
        "chunk",
        "characters",
        "n",
    ]
)


@dataclass(frozen=True)
class Table:
    """Rows of equal columns; a cell is a text, a number or None."""

    columns: tuple[str, ...]
    rows: list[list[Any]] = field(default_factory=list)


def tables_of(run: Path, manifest: Manifest) -> dict[str, Table]:
    """Return the three tables by name; raises `BadFile` for a raw file that cannot be read."""
    samples = Table((*WHERE, *GIVEN, *COMPUTED, "chunks", "tags"))
    chunks = Table((*WHERE, "id", "chunk", "received_s", "characters"))
    measures = Table((*WHERE[:5], "measure", "unit", "value", "n", "reason"))
    for where, sample in _samples(run, manifest):
        given = [sample.get(key) for key in GIVEN]
        computed = [of(sample) for of in COMPUTED.values()]
        tags = json.dumps(sample.get("tags") or {}, ensure_ascii=False, sort_keys=True)
        samples.rows.append([*where, *given, *computed, len(sample.get("chunk_s") or []), tags])
        sizes = sample.get("chunk_chars") or []
        for place, at in enumerate(sample.get("chunk_s") or []):
            size = sizes[place] if place < len(sizes) else None
            chunks.rows.append([*where, sample.get("id"), place, at, size])
    for r in manifest.replicates:
        place_of = _place(manifest, r)
        measures.rows.extend(
            [*place_of, x.name, x.unit, x.value, x.n, x.reason] for x in r.readings
        )
    return {"samples": samples, "chunks": chunks, "measures": measures}


def to_csv(table: Table) -> bytes:
    """Return a table as CSV with a line of names."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(table.columns)
    writer.writerows(table.rows)
    return out.getvalue().encode()


def to_parquet(table: Table) -> bytes:
    """Return a table as Parquet: integers, float64 and texts, also where a column has no value.

    Raises `ToolMissing` where pyarrow is not installed, `BadFile` for a value of another type.
    """
    try:
        import pyarrow
        from pyarrow import parquet
    except ModuleNotFoundError:
        raise ToolMissing(
            "pyarrow is not installed in this environment",
            hint="start it as `nox -s export -- RUNDIR --format parquet`",
        ) from None
    values = list(zip(*table.rows, strict=True)) or [()] * len(table.columns)
    arrays = []
    for name, column in zip(table.columns, values, strict=True):
        try:
            arrays.append(pyarrow.array(column, type=_type(name)))
        except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError) as error:
            raise BadFile(f"the column {name} holds another type: {error}") from None
    out = pyarrow.BufferOutputStream()
    parquet.write_table(pyarrow.table(arrays, names=list(table.columns)), out, compression="zstd")
    written: bytes = out.getvalue().to_pybytes()
    return written


def _type(column: str) -> str:
    """Return pyarrow's name of a column's type."""
    if column in INTEGERS:
        return "int64"
    return "float64" if column.endswith("_s") or column == "value" else "string"


def _samples(run: Path, manifest: Manifest) -> Iterator[tuple[list[Any], Sample]]:
    for r in manifest.replicates:
        for phase in manifest.plan.phases if r.status == "complete" else ():
            window = load_window(run, f"{r.folder}/{phase.name}", ("no series",))
            for sample in window.samples:
                yield [*_place(manifest, r), phase.name], sample


def _place(manifest: Manifest, r: Replicate) -> list[Any]:
    aside = int(r.pair in manifest.set_aside)
    return [r.replicate, r.pair, r.role, manifest.plan.arm(r.role).name, aside]
