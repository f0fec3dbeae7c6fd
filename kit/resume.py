"""Goes on with a run that was interrupted, after its last whole replicate.

Only where nothing has changed: the same machine, kit, images, model, workload and plan. What a
half-measured replicate had written is kept in the run's folder, apart from what counts.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from kit import compare, engine, owner, reproduce, store
from kit.errors import BadFile, EnvironmentChanged, StaleNumber, UsageError
from kit.fact import Fact
from kit.manifest import Manifest, Resumed, load_manifest, now_utc
from kit.prepare import prepare_again
from kit.reproduce import Checkup, Recorded
from kit.run import Record, carry_on, check_out, sweep_leftovers

Say = Callable[[str], None]

LEFT = "interrupted"


def resume_run(run: Path, say: Say) -> Manifest:
    """Carry an interrupted or failed run to its end; return its manifest.

    Raises `UsageError` where there is nothing to go on with, `EnvironmentChanged` naming what
    differs, `StaleNumber` where a raw file was changed, and what a run raises.
    """
    file = run / "manifest.json"
    run_id = load_manifest(file).run_id
    check_out(run)
    client = engine.connect()
    sweep_leftovers(client, say)
    check_open(load_manifest(file))
    with owner.claim(run_id, run, owner.engine_id(client)):
        manifest = load_manifest(file)
        check_open(manifest)  # another may have gone on with it meanwhile
        checkup = check_same(run, manifest, reproduce.host_facts())
        assert checkup.experiment is not None
        assert checkup.platform is not None
        prepared = prepare_again(manifest.plan, checkup.files, checkup.platform, say, {})
        done = len(manifest.replicates)
        set_aside(run, manifest)
        ended = None if manifest.failure is None else manifest.failure.message
        resumed = Resumed(resumed_utc=now_utc(), after=done, ended=ended)
        record = Record(manifest.model_copy(update={"resumed": (*manifest.resumed, resumed)}), run)
        say(f"run {manifest.run_id} goes on after {done} of {len(manifest.plan.slots)} replicates")
        return carry_on(client, record, checkup.experiment, prepared, say)


def check_open(manifest: Manifest) -> None:
    """Refuse a run that ended, that still runs, or that has nothing whole to go on from."""
    again = "run it again"
    if manifest.status == "complete":
        raise UsageError("the run is complete", hint="`nox -s reproduce` runs its plan once more")
    if manifest.status == "running":
        raise UsageError("the run is still running", hint="wait for it, or stop it first")
    if manifest.reproduces is not None:
        raise UsageError("the run reproduces another one, which is done in one go", hint=again)
    if not manifest.replicates:
        raise UsageError("no replicate of the run is whole", hint=again)
    if manifest.plan.sha256 != manifest.plan_sha256:
        raise BadFile("manifest.json: plan: not the plan that was hashed before the run")


def check_same(run: Path, manifest: Manifest, here: Iterable[Fact]) -> Checkup:
    """Compare the run with this machine, this kit and its own files; any difference is refused."""
    if wrong := store.changed_files(run, manifest.files):
        raise StaleNumber(f"a file of the run is not as it was: {wrong[0]}")
    recorded = Recorded(manifest, "", "raw files", _workload(run, manifest))
    found = reproduce.check(recorded, (), here)
    changed = {d.where: d for d in found.preflight.differences}
    if found.preflight.distance == "same machine":  # what may vary there did so before, too
        machine = compare.machine_of(manifest.facts)
        changed = {where: d for where, d in changed.items() if where not in machine}
    if changed or found.preflight.blocking:
        first = next(iter(changed.values()), None)
        what = (
            f"{first.where} was {first.first}, is {first.second}"
            if first
            else found.preflight.blocking[0]
        )
        raise EnvironmentChanged(
            f"the run cannot go on here: {what}",
            hint="both halves of a run must be one experiment: go back, or run it again",
            detail="\n".join(f"{d.where}: {d.first} -> {d.second}" for d in changed.values()),
        )
    return found


def _workload(run: Path, manifest: Manifest) -> dict[str, bytes]:
    files = {p.name: run / "workload" / f"{p.name}.jsonl" for p in manifest.plan.phases}
    for path in files.values():
        if not path.is_file():
            raise StaleNumber(f"a file of the run is gone: workload/{path.name}")
    return {name: path.read_bytes() for name, path in files.items()}


def set_aside(run: Path, manifest: Manifest) -> None:
    """Move what an interrupted replicate wrote out of the way of its next attempt."""
    whole = {Path(each.folder).name for each in manifest.replicates}
    for folder in sorted((run / "replicates").iterdir()):
        if folder.name not in whole:
            target = run / LEFT / str(len(manifest.resumed) + 1) / folder.name
            with store.writing(run):
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.move(folder, target)
