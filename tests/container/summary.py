"""What the long tests said when they were last run: the table of docs/tests.md.

`--write-summary` puts a row there for each file of tests that a call ran. All of `--full` takes
hours; run in parts, each part puts its own rows, with its day and the commit it ran on.
"""

from __future__ import annotations

import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from matrix import rows_of, table_of

from kit.docs import with_table
from kit.manifest import now_utc
from kit.paths import ROOT
from kit.store import write_text

DOCUMENT = ROOT / "docs" / "tests.md"
COLUMNS = ("Tests", "Passed", "Failed", "Skipped", "Minutes", "Day", "Commit")


def commit() -> str:
    """Return the commit of this checkout, with a `+` where files differ from it."""
    words = ["git", "describe", "--always", "--abbrev=9", "--dirty=+", "--exclude=*"]
    return subprocess.run(
        words, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()


def rows(
    outcomes: Mapping[str, Counter[str]], seconds: Mapping[str, float], chosen: str, where: str
) -> dict[str, list[str]]:
    """Return a row for each file: `outcomes` counts by file, `chosen` is -k's expression."""
    found = {}
    for file, counts in outcomes.items():
        name = f"`{file}`" + (f" -k {chosen!r}" if chosen else "")
        ends = [str(counts[end]) for end in ("passed", "failed", "skipped")]
        found[name] = [name, *ends, f"{seconds[file] / 60:.1f}", now_utc()[:10], where]
    return found


def write(new: Mapping[str, Sequence[str]], document: Path = DOCUMENT) -> None:
    """Put rows into the document; those of other files stay as they are."""
    text = document.read_text("utf-8")
    merged = rows_of(text, "summary") | {name: list(row) for name, row in new.items()}
    write_text(
        document, with_table(text, "summary", table_of(COLUMNS, dict(sorted(merged.items()))))
    )
