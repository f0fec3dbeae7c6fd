"""When an interrupted run may go on, and what becomes of what it had half done."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from virtual_run import exp1_run, write_run

from kit.errors import BadFile, EnvironmentChanged, StaleNumber, UsageError
from kit.manifest import Manifest, Original, load_manifest
from kit.resume import check_open, check_same, set_aside

ORIGINAL = Original(run_id="a", manifest_sha256="b", plan_sha256="c", accepted=())


@pytest.fixture
def run(tmp_path: Path) -> Path:
    write_run(tmp_path / "run", exp1_run())
    return tmp_path / "run"


@pytest.fixture
def manifest(run: Path) -> Manifest:
    """A run of which two replicates are whole."""
    whole = load_manifest(run / "manifest.json")
    return whole.model_copy(
        update={"status": "interrupted", "replicates": whole.replicates[:2], "files": {}}
    )


def test_a_run_that_was_interrupted_or_failed_is_open(manifest: Manifest) -> None:
    check_open(manifest)
    check_open(manifest.model_copy(update={"status": "failed"}))


@pytest.mark.parametrize(
    ("changes", "error", "why"),
    [
        ({"status": "complete"}, UsageError, "the run is complete"),
        ({"status": "running"}, UsageError, "still running"),
        ({"replicates": ()}, UsageError, "no replicate of the run is whole"),
        ({"reproduces": ORIGINAL}, UsageError, "reproduces another one"),
        ({"plan_sha256": "0" * 64}, BadFile, "not the plan that was hashed"),
    ],
)
def test_any_other_run_is_not(
    manifest: Manifest, changes: dict[str, Any], error: type[Exception], why: str
) -> None:
    with pytest.raises(error, match=why):
        check_open(manifest.model_copy(update=changes))


def test_what_differs_is_named(run: Path, manifest: Manifest) -> None:
    """A virtual run's image and machine are nowhere."""
    with pytest.raises(EnvironmentChanged, match="cannot go on here: ") as caught:
        check_same(run, manifest, ())
    assert "image.virtual: sha256:" in caught.value.detail
    assert "host.cpu_model: Virtual CPU -> None" in caught.value.detail


def test_a_changed_file_of_the_run_is_named(run: Path) -> None:
    manifest = load_manifest(run / "manifest.json")
    sample = next(run.glob("replicates/*/measure/samples.jsonl"))
    sample.write_text(sample.read_text("utf-8").replace("0.5", "0.6", 1), "utf-8")
    with pytest.raises(StaleNumber, match=r"measure/samples\.jsonl: other bytes"):
        check_same(run, manifest, ())


def test_a_load_file_that_is_gone_is_named(run: Path, manifest: Manifest) -> None:
    (run / "workload" / "measure.jsonl").unlink()
    with pytest.raises(StaleNumber, match=r"workload/measure\.jsonl"):
        check_same(run, manifest, ())


def test_what_was_half_done_is_kept_apart(run: Path, manifest: Manifest) -> None:
    before = sorted(p.name for p in (run / "replicates").iterdir())
    set_aside(run, manifest)
    assert sorted(p.name for p in (run / "replicates").iterdir()) == before[:2]
    assert sorted(p.name for p in (run / "interrupted" / "1").iterdir()) == before[2:]
