"""Keeps reviewed runs under `manifests/`: the manifest, and an archive of the raw files beside it.

A reference outlives the kit that made it. `conclude_again` computes a run's numbers and verdict
from its raw files by the rules of today; the manifest that the run itself wrote stays beside them.
"""

from __future__ import annotations

import lzma
import tarfile
from pathlib import Path

from kit import report_files, store
from kit.again import experiment_of
from kit.analyse import Analysis, analyse, refused
from kit.archive import fault_of_name, shown
from kit.conclusion import cautions, cost_of
from kit.errors import BadFile, KitError, NotFound, StaleNumber
from kit.identity import kit_identity
from kit.manifest import Manifest, load_manifest, manifest_json
from kit.notice import Notice, notice
from kit.paths import MANIFESTS

AS_RUN = "manifest.as-run.json"
HOST_FACTS = "facts.json"
OF_ANALYSIS = frozenset(
    {
        "against_itself",
        "answers_not_judged",
        "busy_machine",
        "concluded_again",
        "null_measures",
        "pair_incomplete",
        "pairs_set_aside",
        "power_limited",
        "shared_device",
        "stopped_early",
        "user_stamps",
    }
)
"""Notices that an analysis gives; all others are the run's own and stay."""


def conclude_again(run: Path) -> Manifest:
    """Compute measures, guards and verdict of a whole run anew; write manifest and reports.

    Plan, facts and raw files stay as they are, and so does the run's own manifest, under another
    name; a notice says that this was done. Whole is also a run that measured all of its plan and
    then failed by a fault of the kit's own, as in a measure: no hour of a GPU is lost to that.
    Raises `StaleNumber` when a raw file has changed, `BadFile` when the run is not whole or its
    plan is not the one that was hashed.
    """
    manifest = load_manifest(run / "manifest.json")
    if not _is_whole(manifest) or manifest.plan.sha256 != manifest.plan_sha256:
        raise BadFile(
            "manifest.json: the run is not complete, or its plan is not the hashed one",
            hint="only a whole run can be concluded",
        )
    if wrong := store.changed_files(run, manifest.files):
        raise StaleNumber(
            f"a raw file is not as the manifest says: {wrong[0]}", hint=store.CHANGED_HINT
        )
    found = _analyse(run, manifest)
    if not (run / AS_RUN).exists():
        store.write_bytes(run / AS_RUN, (run / "manifest.json").read_bytes())
    if HOST_FACTS not in manifest.files:  # a kit before this file wrote them to the manifest alone
        store.write_json(run / HOST_FACTS, [f.model_dump(mode="json") for f in manifest.facts])
    again = manifest.model_copy(
        update={
            "status": "complete",
            "failure": None,
            "cost": cost_of(manifest.replicates),
            "replicates": found.replicates,
            "set_aside": found.set_aside,
            "guards": found.guards,
            "confounders": found.confounders,
            "not_acted": found.not_acted,
            "comparisons": found.comparisons,
            "effect": found.effect,
            "verdict": found.verdict,
            "notices": _notices(run, manifest, found),
            "files": store.hash_files(run),
        }
    )
    store.write_text(run / "manifest.json", manifest_json(again))
    report_files.write_reports(run, again)
    return again


def _is_whole(manifest: Manifest) -> bool:
    if manifest.status == "complete":
        return True
    fault, measured = manifest.failure, [r.replicate for r in manifest.replicates]
    return (
        manifest.status == "failed"
        and fault is not None
        and fault.exit_code == KitError.exit_code
        and measured == list(range(len(manifest.plan.slots)))
        and all(r.status == "complete" for r in manifest.replicates)
    )


def _analyse(run: Path, manifest: Manifest) -> Analysis:
    plan = manifest.plan
    experiment = experiment_of(plan)
    bare = [r.model_copy(update={"readings": ()}) for r in manifest.replicates]
    return analyse(run, plan, experiment, bare, unsupported=refused(run, experiment, bare))


def _notices(run: Path, manifest: Manifest, found: Analysis) -> tuple[Notice, ...]:
    own = [n for n in manifest.notices if n.code not in OF_ANALYSIS]
    if manifest.verdict is None:  # it failed before it had a word to say about itself
        own += cautions(manifest, found.verdict)
    first = load_manifest(run / AS_RUN)
    if first.verdict is not None:
        said = f"{first.verdict.word}: {first.verdict.reason}"
    else:
        assert first.failure is not None
        said = f"it ended with {first.failure.error}"
    seen = f"{(kit_identity().commit or 'unknown')[:12]} (in the run itself: {said})"
    return (*found.notices, *own, notice("concluded_again", seen))


def keep_reference(run: Path, home: Path = MANIFESTS) -> Path:
    """Conclude a run again and put it under `manifests/<experiment>/<case>`; return the manifest.

    Beside it lies `<case>.tar.xz` with every raw file, its bytes the same for the same files.
    """
    manifest = conclude_again(run)
    path = home / manifest.plan.experiment / f"{manifest.plan.case}.json"
    store.write_text(path, manifest_json(manifest))
    with tarfile.open(archive_of(path), "w:xz", preset=9) as archive:
        for name in sorted(manifest.files):
            archive.add(run / name, arcname=name, filter=_plain)
    return path


def _plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Leave out whose file it was and when it was written."""
    member.uid = member.gid = member.mtime = 0
    member.uname = member.gname = ""
    member.mode = 0o644
    return member


def archive_of(manifest: Path) -> Path:
    """Return where the raw files of a reference manifest are."""
    return manifest.with_suffix(".tar.xz")


def unpack_reference(manifest: Path, run: Path) -> Path:
    """Lay a reference out as a run folder, for `nox -s analyse` and `report`; return it.

    Takes plain files below the folder alone; raises `BadFile` naming any other member.
    """
    archive = archive_of(manifest)
    if not archive.is_file():
        raise NotFound(f"{archive.name} is not beside its manifest")
    run.mkdir(parents=True, exist_ok=True)
    try:
        with tarfile.open(archive) as members:
            for member in members:
                fault = fault_of_name(member.name)
                body = members.extractfile(member) if member.isfile() else None
                if fault or body is None:
                    why = fault or "not a plain file"
                    raise BadFile(f"{archive.name}: {shown(member.name)}: {why}")
                store.write_bytes(run / member.name, body.read())
    except (tarfile.TarError, lzma.LZMAError, EOFError) as error:
        raise BadFile(f"{archive.name}: not a whole archive: {error}") from None
    store.write_bytes(run / "manifest.json", manifest.read_bytes())
    return run
