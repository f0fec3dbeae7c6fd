"""Writes a run's reports beside its manifest: Markdown and a page, in both languages."""

from __future__ import annotations

from pathlib import Path

from kit import store
from kit.errors import StaleNumber
from kit.manifest import Manifest
from kit.report import LANGUAGES, render


def write_reports(folder: Path, manifest: Manifest) -> list[Path]:
    """Write report.<language>.md beside the manifest; return the files.

    Raises `StaleNumber` naming the first raw file that is not as the manifest says.
    """
    wrong = store.changed_files(folder, manifest.files)
    if wrong:
        raise StaleNumber(
            f"the raw files are not those of the manifest: {wrong[0]}",
            hint="`nox -s analyse -- RUNDIR` computes the numbers from the files as they are",
            detail="\n".join(wrong),
        )
    written = {f"report.{language}.md": render(manifest, language) for language in LANGUAGES}
    for name, text in written.items():
        store.write_text(folder / name, text)
    return [folder / name for name in written]
