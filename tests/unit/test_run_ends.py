"""However a run ends, its manifest says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import requests
from virtual_run import exp1_run, write_run

from kit import store
from kit.errors import EngineLost, Interrupted, RunFolderLost, ServerLost
from kit.manifest import load_manifest
from kit.run import Record, _finishing


@pytest.mark.parametrize(
    ("what", "told", "status", "error", "exit_code"),
    [
        (ServerLost("gone"), ServerLost, "failed", "ServerLost", 62),
        (requests.ConnectionError("refused"), EngineLost, "failed", "EngineLost", 25),
        (PermissionError(13, "no", "RUN/x"), RunFolderLost, "failed", "RunFolderLost", 71),
        (Interrupted(15), Interrupted, "interrupted", "SIGTERM", 143),
        (ZeroDivisionError("a fault"), ZeroDivisionError, "failed", "ZeroDivisionError", 1),
    ],
)
def test_what_ended_a_run_is_in_its_manifest(
    tmp_path: Path,
    what: Any,
    told: type[BaseException],
    status: str,
    error: str,
    exit_code: int,
) -> None:
    run = tmp_path / "run"
    manifest = write_run(run, exp1_run(pairs=1))
    record = Record(manifest.model_copy(update={"status": "running"}), run)
    if isinstance(what, OSError) and what.filename:
        what.filename = what.filename.replace("RUN", str(run))
    store.reserve(run)
    record.update()
    with pytest.raises(told), _finishing(record, lambda _: None):
        raise what
    left = load_manifest(run / "manifest.json")
    assert left.status == status
    assert left.failure is not None
    assert (left.failure.error, left.failure.exit_code) == (error, exit_code)
    assert not (run / store.RESERVE).exists()
