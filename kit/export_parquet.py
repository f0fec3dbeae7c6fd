"""A run's samples as Parquet: the tables of `kit.export_csv` with typed columns, zstd-packed."""

from __future__ import annotations

import csv
import io
from pathlib import Path

from kit.export_csv import csv_files
from kit.manifest import Manifest

_WHOLE = (
    "replicate", "pair", "set_aside", "status", "prompt_tokens", "completion_tokens",
    "cached_tokens", "chunks", "chunk", "characters", "n",
)  # fmt: skip


def parquet_files(run: Path, manifest: Manifest) -> dict[str, bytes]:
    """Return the three tables by file name; an empty cell of the CSV is null.

    Raises `BadFile` for a raw file that cannot be read.
    """
    texts = csv_files(run, manifest)
    return {name.replace(".csv", ".parquet"): _packed(text) for name, text in texts.items()}


def _packed(text: str) -> bytes:
    from arro3.core import DataType, Field, Schema  # only who asks for Parquet loads it
    from arro3.io import read_csv, write_parquet

    def kind(column: str) -> DataType:
        if column in _WHOLE:
            return DataType.int64()
        is_number = column == "value" or column.endswith("_s")
        return DataType.float64() if is_number else DataType.utf8()

    columns = next(csv.reader(io.StringIO(text)))
    schema = Schema([Field(column, kind(column), nullable=True) for column in columns])
    out = io.BytesIO()
    rows = read_csv(io.BytesIO(text.encode()), schema, has_header=True)
    write_parquet(rows, out, compression="zstd(3)")
    return out.getvalue()
