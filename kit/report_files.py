"""Writes a run's reports beside its manifest: Markdown and a page, in both languages.

Nothing is written while a raw file differs from its hash.
"""

from __future__ import annotations

from pathlib import Path

from kit import store
from kit.errors import StaleNumber
from kit.manifest import Manifest
from kit.report import LANGUAGES, render
from kit.report_html import render_pages


def write_reports(folder: Path, manifest: Manifest) -> list[Path]:
    """Write report.<language>.md and .html beside the manifest; return the files.

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
    pages = render_pages(folder, manifest)
    written |= {f"report.{language}.html": page for language, page in pages.items()}
    for name, text in written.items():
        store.write_text(folder / name, text)
    return [folder / name for name in written]
