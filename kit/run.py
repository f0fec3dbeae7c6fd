"""Carries out one experiment, from a name to a manifest and a report.

The stages, in order: sweep (what dead runs left) -> choose (experiment, platform, model, images)
-> ensure (image and model are there, bit for bit) -> plan (frozen and hashed) -> preflight ->
replicates -> analysis -> report. The manifest is written after every step.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import docker

from kit import console, engine, facts, identity, owner, pull_request, report_files, store
from kit.analyse import analyse, answered, refused
from kit.conclusion import cautions, cost_of
from kit.errors import BadFile, DiskFull, Interrupted, KitError, RunFolderLost, ServerDied
from kit.experiment import (
    Experiment,
)
from kit.fact import HostPlace
from kit.fit import shape_of, split_refusal
from kit.manifest import (
    Failure,
    Manifest,
    Original,
    Status,
    load_manifest,
    manifest_json,
    now_utc,
)
from kit.measure import MODEL_FILE
from kit.notice import Notice, notice
from kit.plan import Plan
from kit.platform import find_platform
from kit.prepare import Options, Prepared, choose, prepare
from kit.replicate import Bench, measure_slot
from kit.secret import find_private, masked
from kit.surroundings import ignored
from kit.value import load_json

Say = Callable[[str], None]

FACTS = "facts.json"
FREE_BYTES = 2 * 2**30  # logs and samples of a long run, with room


@dataclass
class Record:
    """The manifest while it grows, and the folder it lives in."""

    manifest: Manifest
    folder: Path
    _written: bool = False

    def check_there(self) -> None:
        """Refuse to go on in a folder that was removed, though a part of it were made anew."""
        if self._written and not (self.folder / "manifest.json").is_file():
            raise RunFolderLost("the run folder was removed during the run", hint="run it again")

    def update(self, **changes: object) -> None:
        """Set fields and write the manifest; a run folder that is gone is an error."""
        self.check_there()
        self.manifest = self.manifest.model_copy(update=changes)
        store.write_text(self.folder / "manifest.json", manifest_json(self.manifest))
        self._written = True

    def finish(self, status: Status, **changes: object) -> None:
        """Hash all files and set the final status; a full disk gives the reserved space back."""
        store.release(self.folder)
        files = store.hash_files(self.folder)
        self.update(status=status, finished_utc=now_utc(), files=files, **changes)
        if found := find_private(manifest_json(self.manifest)):
            console.warn(
                f"manifest.json, {found[0]} ({len(found)} such lines): look before sharing"
            )


def run_experiment(name: str, options: Options, say: Say) -> tuple[Manifest, Path]:
    """Run an experiment to its verdict; return the manifest and the run's folder.

    Raises a `KitError` or `Interrupted`; when replicates had begun, the manifest then says
    `failed` or `interrupted`, no container, network or volume is left, and `resume` can go on.
    """
    experiment = choose(name, options)
    check_out(options.out)
    client = engine.connect()
    sweep_leftovers(client, say)
    platform = find_platform(options.platform)
    say(f"platform {platform.name}: {platform.why}")
    if stray := ignored(os.environ):
        say(f"ignored, a run takes nothing from them: {', '.join(stray)}")
    prepared = prepare(name, experiment, platform, options, say)
    return carry_out(client, experiment, prepared, options.out, say)


def sweep_leftovers(client: docker.DockerClient, say: Say) -> None:
    """Remove what runs that died had left, and name it."""
    for left in owner.sweep(client):
        names = ", ".join(left.removed) or "nothing"
        now = left.unwritable or "its manifest now says how it ended"
        say(f"run {left.run_id} had died; {now}; removed: {names}")
        with contextlib.suppress(KitError):  # it may have died before it had a folder
            _say_how_to_go_on(load_manifest(left.folder / "manifest.json"), left.folder, say)


def check_out(out: Path) -> None:
    """Refuse before anything starts when the output cannot be written."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(out).free
    except OSError as error:
        raise store.disk_error(error, out) from None
    if free < FREE_BYTES:
        raise DiskFull(
            f"{free / 2**20:.0f} MiB are free for runs, {FREE_BYTES / 2**20:.0f} needed",
            hint="free space, or choose --out elsewhere",
        )
    if not os.access(out, os.W_OK):
        raise RunFolderLost(f"the folder {out} cannot be written", hint="choose another --out")


def carry_out(
    client: docker.DockerClient,
    experiment: Experiment,
    prepared: Prepared,
    out: Path,
    say: Say,
    reproduces: Original | None = None,
) -> tuple[Manifest, Path]:
    """Carry out a frozen plan below the folder `out`; see `run_experiment`."""
    plan = prepared.plan
    started = datetime.now(UTC)
    run_id = f"{started:%Y%m%dt%H%M%S}{secrets.token_hex(3)}"
    stamp = f"{started:%Y%m%dT%H%M%S}Z-{run_id[-6:]}"
    folder = out / plan.experiment / plan.case / stamp
    say(f"run {run_id}, plan {plan.sha256[:12]}, {len(plan.slots)} replicates")
    with owner.claim(run_id, folder, owner.engine_id(client)):
        record = _new_record(run_id, folder, prepared, reproduces)
        with _finishing(record, say):
            _lay_out(record, prepared)
            place = HostPlace(client=client, endpoint_kind=engine.endpoint_kind())
            found = facts.collect(place)
            store.write_json(folder / FACTS, [f.model_dump(mode="json") for f in found])
            record.update(facts=tuple(found), notices=tuple(_of_machine(prepared)))
            _measure_and_conclude(client, record, experiment, prepared, say)
    return record.manifest, folder


def carry_on(
    client: docker.DockerClient,
    record: Record,
    experiment: Experiment,
    prepared: Prepared,
    say: Say,
) -> Manifest:
    """Carry out what a claimed run's plan still asks for, after its whole replicates."""
    with _finishing(record, say):
        store.reserve(record.folder)
        record.update(status="running", finished_utc=None, failure=None, files={})
        _measure_and_conclude(client, record, experiment, prepared, say)
    return record.manifest


def _measure_and_conclude(
    client: docker.DockerClient,
    record: Record,
    experiment: Experiment,
    prepared: Prepared,
    say: Say,
) -> None:
    unsupported = _measure_all(client, record, experiment, prepared, say)
    _conclude(record, experiment, prepared, unsupported)
    say(f"report: {record.folder / 'report.en.html'}")


def _of_machine(prepared: Prepared) -> Iterator[Notice]:
    if prepared.platform.shared_cores:
        yield notice("shared_cores", str(os.cpu_count()))


def _lay_out(record: Record, prepared: Prepared) -> None:
    """Make the run folder: the manifest first, so that nothing is ever there without one."""
    store.make_folder(record.folder / "workload")
    store.reserve(record.folder)
    record.update()
    for phase, lines in prepared.files.items():
        store.write_bytes(record.folder / "workload" / f"{phase}.jsonl", lines)
    for path in (record.folder, record.folder / "workload"):
        path.chmod(0o755)  # the client container reads the workload as another user
    for path in (record.folder / "workload").iterdir():
        path.chmod(0o644)
    store.write_json(record.folder / "plan.json", prepared.plan.model_dump(mode="json"))
    store.write_json(record.folder / MODEL_FILE, told_of_model(prepared.model))


def told_of_model(folder: Path) -> dict[str, Any]:
    """Return what a run keeps of its model beside the files' hashes: configuration and sizes."""
    config = folder / "config.json"
    return {
        "config": load_json(config) if config.is_file() else {},
        "files": {
            path.relative_to(folder).as_posix(): path.stat().st_size
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        },
    }


def _new_record(
    run_id: str, folder: Path, prepared: Prepared, reproduces: Original | None
) -> Record:
    plan = prepared.plan
    manifest = Manifest(
        run_id=run_id,
        status="running",
        started_utc=now_utc(),
        finished_utc=None,
        kit=identity.kit_identity(),
        plan=plan,
        plan_sha256=plan.sha256,
        reproduces=reproduces,
        images=tuple(prepared.images.values()),
        facts=(),
        replicates=(),
        set_aside=(),
        guards=(),
        confounders=(),
        not_acted=(),
        effect=None,
        verdict=None,
        notices=(),
        cost=None,
        failure=None,
        files={},
    )
    return Record(manifest, folder)


@contextlib.contextmanager
def _finishing(record: Record, say: Say) -> Iterator[None]:
    """Leave a manifest that says how the run ended, whatever ends it."""
    try:
        with engine.answering(), store.writing(record.folder):
            yield
    except KitError as error:
        record.check_there()  # that is what happened, whatever came of it
        _fail(record, type(error).__name__, error.exit_code, error.message, say)
        raise
    except Interrupted as stop:
        _fail(record, str(stop), stop.exit_code, "stopped by a signal", say, status="interrupted")
        raise
    except BaseException as fault:
        _fail(record, type(fault).__name__, KitError.exit_code, "a fault of the kit itself", say)
        raise


def _fail(
    record: Record, error: str, exit_code: int, message: str, say: Say, *, status: Status = "failed"
) -> None:
    failure = Failure(error=error, exit_code=exit_code, message=masked(message))
    with contextlib.suppress(KitError), owner.shielded(say):
        record.finish(status, failure=failure)
        _say_how_to_go_on(record.manifest, record.folder, say)


def _say_how_to_go_on(manifest: Manifest, folder: Path, say: Say) -> None:
    whole = len(manifest.replicates)
    if whole and manifest.reproduces is None:
        say(f"replicates that are whole: {whole}; `nox -s resume -- {folder}` goes on")


def _measure_all(
    client: docker.DockerClient,
    record: Record,
    experiment: Experiment,
    prepared: Prepared,
    say: Say,
) -> str | None:
    """Measure the replicates; return why when this machine or the engine cannot do this."""
    plan, platform = prepared.plan, prepared.platform
    shares = platform.shares(plan.devices, shared=plan.shared_device)
    missing = too_little(plan, len(shares), prepared.model)
    if missing:
        say(f"  nothing is started: {missing}")
        return missing
    bench = Bench(
        client=client,
        plan=plan,
        run_id=record.manifest.run_id,
        run=record.folder,
        runtimes=prepared.runtimes,
        images=prepared.images,
        model=prepared.model,
        sampler=prepared.sampler,
        accel=platform.accel,
        shares=shares,
        device_indices=tuple(
            each.index
            for each in platform.devices
            if each.passed_as in {share.passed_as for share in shares}
        ),
        server_cpuset=platform.server_cpuset,
        client_cpuset=platform.client_cpuset,
        say=say,
    )
    begin, first = time.monotonic(), len(record.manifest.replicates)
    for slot in plan.slots[first:]:
        if answered(record.folder, plan, experiment, record.manifest.replicates):
            say("  no further pair is needed")
            break
        arm = plan.arm(slot.role)
        rest = _rest(begin, slot.replicate - first, len(plan.slots) - first)
        say(f"> replicate {slot.replicate + 1} of {len(plan.slots)}: {arm.name}{rest}")
        try:
            done = measure_slot(bench, slot)
        except ServerDied:
            words = refused(record.folder, experiment, record.manifest.replicates)
            if words is None:
                raise
            say(f"  the engine cannot do this here: {words}")
            return words
        say(f"  done in {done.wall_s:.0f} s: replicate {slot.replicate + 1}")
        record.update(replicates=(*record.manifest.replicates, done))
    return None


def too_little(plan: Plan, devices: int, model: Path) -> str | None:
    """Return why a machine with that many devices cannot run the plan; None when it can."""
    if devices < plan.devices:
        return f"needs {plan.devices} devices, this machine has {devices}"
    ranks = max(arm.ranks for arm in plan.arms)
    if ranks == 1:
        return None
    with contextlib.suppress(BadFile):  # of a family that is not known here: the engine will say
        return split_refusal(shape_of(load_json(model / "config.json"), plan.model.id), ranks)
    return None


def _rest(begin: float, done: int, of: int) -> str:
    elapsed = time.monotonic() - begin
    if not done:
        return ""
    left = elapsed / done * (of - done)
    return f" ({elapsed / 60:.1f} min so far, at most {left / 60:.1f} to go)"


def _conclude(
    record: Record, experiment: Experiment, prepared: Prepared, unsupported: str | None
) -> None:
    """Compute everything from the raw files, then write manifest and reports."""
    plan, manifest = prepared.plan, record.manifest
    found = analyse(record.folder, plan, experiment, manifest.replicates, unsupported=unsupported)
    record.finish(
        "complete",
        replicates=found.replicates,
        set_aside=found.set_aside,
        guards=found.guards,
        confounders=found.confounders,
        not_acted=found.not_acted,
        comparisons=found.comparisons,
        effect=found.effect,
        verdict=found.verdict,
        notices=(*found.notices, *manifest.notices, *cautions(manifest, found.verdict)),
        cost=cost_of(manifest.replicates),
    )
    report_files.write_reports(record.folder, record.manifest)
    if len(set(plan.images)) > 1:
        block = pull_request.pull_request_block(record.manifest)
        store.write_text(record.folder / "pull-request.md", block)
