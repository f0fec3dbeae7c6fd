"""The report of an imported result: what it tells, and first of all what is not known.

As in every report, each number leads to its raw files. Markdown and a page, in both languages.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kit import store
from kit.imported import Imported, measures_of
from kit.report import LANGUAGES, Notes, fill, number_text, report_words
from kit.report_html import address


def write_imported_reports(folder: Path, record: Imported) -> list[Path]:
    """Write report.<language>.md and .html beside the record; return the files."""
    written = {}
    for language in LANGUAGES:
        for form in ("md", "html"):
            template, html = f"imported.{form}.j2", form == "html"
            text = fill(template, _values(record, language), language, html=html)
            written[f"report.{language}.{form}"] = text
    for name, text in written.items():
        store.write_text(folder / name, text)
    return [folder / name for name in written]


def _values(record: Imported, language: str) -> dict[str, Any]:
    words = {key: both[language] for key, both in report_words().items()}
    notes = Notes(record.files)
    what = {m.name: m.what for m in measures_of(per_token=True)}
    rows = []
    for reading in record.readings:
        null = f"{words['no_value']}: {reading.reason}"
        number = reading.value
        sources = reading.sources
        rows.append(
            {
                "name": reading.name,
                "what": what[reading.name],
                "unit": reading.unit,
                "value": null if number is None else notes.number(number_text(number), sources),
                "n": notes.number(str(reading.n), sources),
            }
        )
    return {
        "record": record,
        "language": language,
        "other": next(each for each in LANGUAGES if each != language),
        "w": words,
        "unknown": [words[f"imported_no_{name}"] for name in record.unknown],
        "rows": rows,
        "notes": notes,
        "files": [
            {"name": name, "sha256": file.sha256, "bytes": f"{file.bytes:,}"}
            for name, file in record.files.items()
        ],
        "address": address,
    }
