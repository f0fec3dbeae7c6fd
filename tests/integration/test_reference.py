"""Reference manifests: each is whole, says by today's rules what it says, and renders."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest
from references import EACH, EACH_IN_TIME, REFERENCES, SMALLEST

from kit import store
from kit.again import analyse_again
from kit.errors import BadFile, NotFound, StaleNumber
from kit.manifest import Failure, load_manifest, manifest_json
from kit.reference import AS_RUN, archive_of, conclude_again, keep_reference, unpack_reference
from kit.report_files import write_reports

PRIVATE = (b"/root/", b'"/home/', b"BEGIN PRIVATE")


@pytest.fixture(params=EACH)
def reference(request: pytest.FixtureRequest) -> Path:
    return Path(request.param)


def test_there_are_references() -> None:
    assert REFERENCES


def test_a_reference_is_named_by_its_experiment_and_case(reference: Path) -> None:
    plan = load_manifest(reference).plan
    assert (reference.parent.name, reference.stem) == (plan.experiment, plan.case)


def test_a_reference_is_whole_and_renders_from_itself_alone(
    reference: Path, tmp_path: Path
) -> None:
    run = unpack_reference(reference, tmp_path / "run")
    manifest = load_manifest(run / "manifest.json")
    assert manifest.status == "complete"
    assert manifest.kit.dirty is False
    assert not store.changed_files(run, manifest.files)
    assert analyse_again(run)["equal"], "`python -m kit reference RUNDIR` concludes it again"
    write_reports(run, manifest)
    assert "## Conclusion" in (run / "report.en.md").read_text("utf-8")


def test_a_reference_names_no_folder_of_the_machine(reference: Path, tmp_path: Path) -> None:
    run = unpack_reference(reference, tmp_path)
    for path in (p for p in run.rglob("*") if p.is_file() and "logs" not in p.parts):
        content = path.read_bytes()
        assert not [word for word in PRIVATE if word in content], path.name


@pytest.mark.parametrize("reference", EACH_IN_TIME)
def test_the_runs_own_manifest_stays_and_keeping_again_changes_nothing(
    reference: Path, tmp_path: Path
) -> None:
    run = unpack_reference(reference, tmp_path / "run")
    own = load_manifest(run / AS_RUN)
    kept = load_manifest(reference)
    assert (own.plan, own.facts, own.kit) == (kept.plan, kept.facts, kept.kit)
    again = keep_reference(run, tmp_path / "home")
    assert archive_of(again).read_bytes() == archive_of(reference).read_bytes()
    assert load_manifest(again).files == kept.files


def test_a_changed_raw_file_or_plan_is_never_concluded(tmp_path: Path) -> None:
    run = unpack_reference(REFERENCES[0], tmp_path / "run")
    manifest = json.loads((run / "manifest.json").read_text())
    manifest["plan"]["hypothesis"]["margin"] = 0.5
    (run / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(BadFile):
        conclude_again(run)
    run = unpack_reference(REFERENCES[0], tmp_path / "other")
    samples = next(run.rglob("samples.jsonl"))
    samples.write_text(samples.read_text() + "\n")
    with pytest.raises(StaleNumber, match=r"samples\.jsonl"):
        conclude_again(run)


def failed(run: Path, **changes: object) -> None:
    """Make of a reference what a fault of a measure had left of the run."""
    manifest = load_manifest(run / "manifest.json")
    bare = [r.model_copy(update={"readings": ()}) for r in manifest.replicates]
    failure = Failure(error="KeyError", exit_code=1, message="a fault of the kit itself")
    left = {
        "status": "failed",
        "failure": failure,
        "verdict": None,
        "effect": None,
        "notices": (),
        "cost": None,
        "replicates": tuple(bare),
        **changes,
    }
    text = manifest_json(manifest.model_copy(update=left))
    (run / "manifest.json").write_text(text, "utf-8")
    (run / AS_RUN).unlink()


def test_a_run_that_only_a_fault_of_the_kit_kept_from_its_verdict_is_concluded(
    tmp_path: Path,
) -> None:
    run = unpack_reference(SMALLEST, tmp_path)
    kept = load_manifest(SMALLEST)
    files = {name: f for name, f in kept.files.items() if name != AS_RUN}
    failed(run, files=files)
    again = conclude_again(run)
    assert (again.status, again.failure) == ("complete", None)
    assert (again.verdict, again.effect, again.cost) == (kept.verdict, kept.effect, kept.cost)
    assert load_manifest(run / AS_RUN).status == "failed"
    assert "(in the run itself: it ended with KeyError)" in again.notices[-1].text.en
    others = [n for n in kept.notices if n.code not in ("concluded_again", "shared_cores")]
    assert sorted(n.code for n in again.notices[:-1]) == sorted(n.code for n in others)
    assert conclude_again(run).notices == again.notices


@pytest.mark.parametrize(
    "changes",
    [
        {"status": "interrupted"},
        {"failure": Failure(error="ServerDied", exit_code=30, message="gone")},
        {"replicates": ()},
    ],
)
def test_any_other_failed_run_has_no_verdict(tmp_path: Path, changes: dict[str, object]) -> None:
    run = unpack_reference(SMALLEST, tmp_path)
    failed(run, **changes)
    with pytest.raises(BadFile, match="not complete"):
        conclude_again(run)


def test_a_manifest_without_its_archive_is_one_clear_error(tmp_path: Path) -> None:
    lonely = tmp_path / "case.json"
    lonely.write_bytes(REFERENCES[0].read_bytes())
    with pytest.raises(NotFound, match=r"case\.tar\.xz"):
        unpack_reference(lonely, tmp_path / "run")


@pytest.mark.parametrize("name", ["../out", "/etc/out", "a/../../out"])
def test_an_archive_that_leaves_its_folder_is_refused(tmp_path: Path, name: str) -> None:
    manifest = tmp_path / "case.json"
    manifest.write_text("{}", "utf-8")
    with tarfile.open(archive_of(manifest), "w:xz") as archive:
        archive.addfile(tarfile.TarInfo(name))
    with pytest.raises(BadFile, match="out"):
        unpack_reference(manifest, tmp_path / "deep" / "run")
    assert not list(tmp_path.rglob("out"))


def test_links_and_torn_archives_are_refused(tmp_path: Path) -> None:
    manifest = tmp_path / "case.json"
    manifest.write_text("{}", "utf-8")
    link = tarfile.TarInfo("link")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    with tarfile.open(archive_of(manifest), "w:xz") as archive:
        archive.addfile(link)
    with pytest.raises(BadFile, match="not a plain file"):
        unpack_reference(manifest, tmp_path / "run")
    archive_of(manifest).write_bytes(archive_of(REFERENCES[0]).read_bytes()[:5000])
    with pytest.raises(BadFile, match="not a whole archive"):
        unpack_reference(manifest, tmp_path / "other")
