"""The document of faults holds what was counted, run in one call or in parts."""

from __future__ import annotations

from pathlib import Path

import matrix
import pytest
from matrix import Ending, Matrix, Scaled, rows_of


def test_a_part_that_is_run_again_replaces_its_own_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "hostile.md"
    path.write_text(matrix.DOCUMENT.read_text("utf-8"), "utf-8")
    monkeypatch.setattr(matrix, "DOCUMENT", path)
    before = rows_of(path.read_text("utf-8"), "matrix")
    first, second = Matrix(), Matrix()
    first.endings += [Ending("z a", "complete", 5, 0, 0, 0), Ending("z b", "failed", 9, 9, 0, 0)]
    first.scaled.append(Scaled("analysis", 1000, 10**6, 1.5, "in all"))
    first.write()
    second.endings += [Ending("z b", "failed", 7, 0, 0, 0), Ending("z b", "failed", 1200, 0, 1, 2)]
    second.secrets.append(("z files", 12, 0))
    second.write()
    text = path.read_text("utf-8")
    rows = rows_of(text, "matrix")
    assert rows.keys() == before.keys() | {"z a", "z b", matrix.ALL}
    assert rows["z a"][1:7] == ["1", "complete", "5", "0", "0", "0"]
    assert rows["z b"][1:7] == ["2", "2 failed", "1,207", "0", "1", "2"]
    assert rows_of(text, "secrets")["z files"][1:3] == ["12", "0"]
    assert rows_of(text, "load")["analysis, 1,000 samples"][1:3] == ["1 MB", "1.5 s (in all)"]
    sums = [row for name, row in rows.items() if name != matrix.ALL]
    assert rows[matrix.ALL][1] == f"{sum(int(row[1].replace(',', '')) for row in sums):,}"
