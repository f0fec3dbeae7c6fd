"""Writes a finished run in the formats of others, beside the run's own files.

Every number in them is one of the manifest's; nothing is measured, rounded or guessed here.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from kit import store
from kit.errors import StaleNumber, UnknownName
from kit.export_crate import METADATA, ro_crate
from kit.export_llmd import llm_d_reports
from kit.export_mlperf import mlperf_system
from kit.export_tables import Table, tables_of, to_csv, to_parquet
from kit.manifest import Manifest, RawFile, load_manifest


def export(run: Path, name: str) -> list[Path]:
    """Write a run's folder in the format of that name; return the files written.

    Raises `UnknownName`, and `StaleNumber` when a raw file is not the one of the manifest.
    """
    if name not in FORMATS:
        raise UnknownName(
            f"no export format `{name}`; known: {', '.join(FORMATS)}", hint="take one of these"
        )
    manifest = load_manifest(run / "manifest.json")
    if wrong := store.changed_files(run, manifest.files):
        raise StaleNumber(
            f"a raw file is not as the manifest says: {wrong[0]}",
            hint=store.CHANGED_HINT,
            detail="\n".join(wrong),
        )
    return FORMATS[name](run, manifest)


def _write_crate(run: Path, manifest: Manifest) -> list[Path]:
    written = {
        name: RawFile(sha256=store.sha256_file(run / name), bytes=(run / name).stat().st_size)
        for name in sorted(store.NOT_HASHED - {METADATA})
        if (run / name).is_file()
    }
    store.write_json(run / METADATA, ro_crate(manifest, written))
    return [run / METADATA]


def _write_llm_d(run: Path, manifest: Manifest) -> list[Path]:
    paths = []
    for name, document in llm_d_reports(manifest).items():
        path = run / store.EXPORTS / "llm-d" / f"{name}.json"
        store.write_json(path, document)
        paths.append(path)
    return paths


def _write_mlperf(run: Path, manifest: Manifest) -> list[Path]:
    path = run / store.EXPORTS / "mlperf" / "system.json"
    store.write_json(path, mlperf_system(manifest))
    return [path]


def _tables(
    suffix: str, encode: Callable[[Table], bytes]
) -> Callable[[Path, Manifest], list[Path]]:
    """Return what writes a run's tables in one encoding: all of them, or none on an error."""

    def write(run: Path, manifest: Manifest) -> list[Path]:
        contents = {name: encode(table) for name, table in tables_of(run, manifest).items()}
        folder = run / store.EXPORTS / suffix
        for name, content in contents.items():
            store.write_bytes(folder / f"{name}.{suffix}", content)
        return [folder / f"{name}.{suffix}" for name in contents]

    return write


FORMATS: dict[str, Callable[[Path, Manifest], list[Path]]] = {
    "ro-crate": _write_crate,
    "llm-d": _write_llm_d,
    "mlperf": _write_mlperf,
    "csv": _tables("csv", to_csv),
    "parquet": _tables("parquet", to_parquet),
}
