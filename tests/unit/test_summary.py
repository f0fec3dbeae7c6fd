"""The page of what the tests said has a row for each file, and keeps those of other calls."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import summary
from matrix import rows_of


def test_a_call_puts_its_own_rows_and_leaves_the_others(tmp_path: Path) -> None:
    path = tmp_path / "tests.md"
    path.write_text(summary.DOCUMENT.read_text("utf-8"), "utf-8")
    before = rows_of(path.read_text("utf-8"), "summary")
    for counts, seconds, chosen, where in (
        (Counter(passed=3, failed=1), 90.0, "", "0123abc"),
        (Counter(passed=2), 30.0, "cut or late", "0123abc"),
        (Counter(passed=4, skipped=1), 60.0, "", "4567def+"),
    ):
        new = summary.rows({"tests/z.py": counts}, {"tests/z.py": seconds}, chosen, where)
        summary.write(new, path)
    rows = rows_of(path.read_text("utf-8"), "summary")
    assert rows.keys() == before.keys() | {"`tests/z.py`", "`tests/z.py` -k 'cut or late'"}
    whole, part = rows["`tests/z.py`"], rows["`tests/z.py` -k 'cut or late'"]
    assert (*whole[1:5], whole[6]) == ("4", "0", "1", "1.0", "4567def+")
    assert (*part[1:5], part[6]) == ("2", "0", "0", "0.5", "0123abc")


def test_the_commit_is_this_checkout_s() -> None:
    assert len(summary.commit().rstrip("+")) >= 7
