"""Carries out one experiment, from a name to a manifest and a report.

The stages, in order: sweep (what dead runs left) -> choose (experiment, platform, model, images)
-> ensure (image and model are there, bit for bit) -> plan (frozen and hashed) -> preflight ->
replicates -> analysis -> report. The manifest is written after every step.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import docker

from kit import build, engine, facts, identity, model, owner, report, store
from kit.analyse import analyse, answered, refused
from kit.compose import MOUNT, Runtime, runtime_of
from kit.errors import DiskFull, Interrupted, KitError, RunFolderLost, ServerDied, UsageError
from kit.experiment import (
    Experiment,
    against_itself,
    apply_variant,
    find_experiment,
)
from kit.fact import HostPlace
from kit.image import ImageRecord, find_image
from kit.manifest import (
    Cost,
    Failure,
    Manifest,
    RanImage,
    Replicate,
    Status,
    manifest_json,
    now_utc,
)
from kit.model import ModelRecord, find_model
from kit.notice import notice
from kit.paths import RUNS
from kit.plan import Plan, PlannedImage, PlannedModel, Resources, Role, make_plan
from kit.platform import Platform, find_platform
from kit.replicate import Bench, measure_slot
from kit.sequential import Stopping
from kit.topology import find_topology
from kit.verdict import MIN_PAIRS

Say = Callable[[str], None]

ROLES: tuple[Role, Role] = ("baseline", "candidate")
FREE_BYTES = 2 * 2**30  # logs and samples of a long run, with room


@dataclass(frozen=True)
class Options:
    """What a person may choose about a run; None takes the default."""

    variant: str | None = None
    image: str | None = None
    model: str | None = None
    platform: str | None = None
    pairs: int = MIN_PAIRS
    stopping: Stopping | None = None
    seed: int = 1
    against_itself: bool = False
    out: Path = RUNS
    stub: Mapping[str, Any] | None = None
    ready_timeout_s: float | None = None


@dataclass
class Record:
    """The manifest while it grows, and the folder it lives in."""

    manifest: Manifest
    folder: Path
    _begin: float = field(default_factory=time.monotonic)

    def update(self, **changes: object) -> None:
        """Set fields and write the manifest; a run folder that is gone is an error."""
        if not self.folder.is_dir():
            raise RunFolderLost("the run folder was removed during the run", hint="run it again")
        self.manifest = self.manifest.model_copy(update=changes)
        store.write_text(self.folder / "manifest.json", manifest_json(self.manifest))

    def finish(self, status: Status, **changes: object) -> None:
        """Hash all files and set the final status; a full disk gives the reserved space back."""
        store.release(self.folder)
        files = store.hash_files(self.folder)
        self.update(status=status, finished_utc=now_utc(), files=files, **changes)


def run_experiment(name: str, options: Options, say: Say) -> tuple[Manifest, Path]:
    """Run an experiment to its verdict; return the manifest and the run's folder.

    Raises a `KitError` or `Interrupted`; when replicates had begun, the manifest then says
    `failed` or `interrupted`, and no container, network or volume is left.
    """
    experiment = apply_variant(find_experiment(name), name, options.variant)
    if options.against_itself:
        experiment = against_itself(experiment)
    if options.pairs < 1:
        raise UsageError("--replicates must be at least 1", hint="leave it out for 6 pairs")
    for chosen in (options.image, *(arm.image for arm in experiment.variable.arms)):
        if chosen:
            find_image(chosen)
    find_model(options.model or model.DEFAULT)
    _preflight(options.out)
    client = engine.connect()
    sweep_leftovers(client, say)
    platform = find_platform(options.platform)
    say(f"platform {platform.name}: {platform.why}")
    prepared = _prepare(name, experiment, platform, options, say)
    return _carry_out(client, experiment, prepared, options, say)


def sweep_leftovers(client: docker.DockerClient, say: Say) -> None:
    """Remove what runs that died had left, and name it."""
    for left in owner.sweep(client):
        names = ", ".join(left.removed) or "nothing"
        say(f"run {left.run_id} had died; its manifest now says interrupted; removed: {names}")


@dataclass(frozen=True)
class Prepared:
    """A plan and everything on this machine that it needs."""

    plan: Plan
    files: dict[str, bytes]
    images: dict[str, RanImage]
    runtimes: dict[str, Runtime]
    model: Path
    platform: Platform


def _prepare(
    name: str,
    experiment: Experiment,
    platform: Platform,
    options: Options,
    say: Say,
) -> Prepared:
    records = _choose_images(experiment, platform, options)
    built = {r.id: build.ensure_image(r, say) for r in dict.fromkeys(records)}
    ran = {
        key: RanImage(
            id=key,
            engine_id=b.image_id,
            config_digest=b.identity.config_digest,
            diff_ids=b.identity.diff_ids,
            identity=b.identity.digest,
            lock_sha256=b.lock_sha256,
            how=b.how,
            state=b.state,
        )
        for key, b in built.items()
    }
    chosen = find_model(options.model or model.DEFAULT)
    _check_needs(name, experiment, platform, chosen)
    files = model.ensure_model(chosen, built[records[0].id], say)
    planned = {
        key: PlannedImage(id=key, identity=r.identity, lock_sha256=r.lock_sha256)
        for key, r in ran.items()
    }
    entrypoints = {role: _entrypoint(r, options) for role, r in zip(ROLES, records, strict=True)}
    if options.stub is not None:
        experiment = _on_stub(experiment, options.stub)
    resources = Resources()
    if options.ready_timeout_s:
        resources = resources.model_copy(update={"ready_timeout_s": options.ready_timeout_s})
    plan, lines = make_plan(
        name,
        experiment,
        variant=options.variant,
        against_itself=options.against_itself,
        images={"baseline": planned[records[0].id], "candidate": planned[records[1].id]},
        entrypoints=entrypoints,
        engine="vllm" if options.stub is None else "stub",
        client_image=planned[records[0].id],
        model=PlannedModel(id=chosen.id, weights=chosen.weights, files=files.files),
        model_flags=chosen.flags(platform.name),
        platform=platform.name,
        platform_flags={},
        platform_env={},
        pairs=options.pairs,
        stopping=options.stopping,
        seed=options.seed,
        resources=resources,
    )
    runtimes = {
        r.id: runtime_of(built[r.id].image_id, interpreter=r.interpreter, user=r.user)
        for r in records
    }
    return Prepared(plan, lines, ran, runtimes, files.path, platform)


def _choose_images(
    experiment: Experiment, platform: Platform, options: Options
) -> tuple[ImageRecord, ImageRecord]:
    default = options.image or platform.default_image
    arms = experiment.variable.arms
    return (find_image(arms[0].image or default), find_image(arms[1].image or default))


def _entrypoint(record: ImageRecord, options: Options) -> tuple[str, ...]:
    if options.stub is None:
        return record.entrypoint
    return ("env", "-C", MOUNT, record.interpreter, "-m", "inside.stub")


def _on_stub(experiment: Experiment, stub: Mapping[str, Any]) -> Experiment:
    """Let the kit's stub stand in for vLLM: it is told what to plant by its environment."""
    env = {**experiment.env, "KIT_STUB": json.dumps(dict(stub))}
    return replace(experiment, env=env)


def _check_needs(
    name: str, experiment: Experiment, platform: Platform, chosen: ModelRecord
) -> None:
    if experiment.needs.real_weights and chosen.weights != "real":
        raise UsageError(
            f"{name} needs real weights, and {chosen.id} has random ones",
            hint=f"leave --model out to take {model.DEFAULT}",
        )
    missing = experiment.needs.missing_files(
        model.read_model_lock(chosen).files if experiment.needs.model_files else ()
    )
    if missing:
        raise UsageError(
            f"{name} needs {missing[0]} in the model's folder, and {chosen.id} has none",
            hint="give a --model whose record in docker/models.yaml carries a draft model",
        )


def _preflight(out: Path) -> None:
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


def _carry_out(
    client: docker.DockerClient,
    experiment: Experiment,
    prepared: Prepared,
    options: Options,
    say: Say,
) -> tuple[Manifest, Path]:
    plan = prepared.plan
    started = datetime.now(UTC)
    run_id = f"{started:%Y%m%dt%H%M%S}{secrets.token_hex(3)}"
    stamp = f"{started:%Y%m%dT%H%M%S}Z-{run_id[-6:]}"
    folder = options.out / plan.experiment / plan.case / stamp
    say(f"run {run_id}, plan {plan.sha256[:12]}, {len(plan.slots)} replicates")
    with owner.claim(run_id, folder):
        record = _new_record(run_id, folder, prepared)
        with _finishing(record, say):
            _lay_out(record, prepared)
            place = HostPlace(client=client, endpoint_kind=engine.endpoint_kind())
            record.update(facts=tuple(facts.collect(place)))
            unsupported = _measure_all(client, record, experiment, prepared, say)
            _conclude(record, experiment, prepared, unsupported)
    say(f"report: {folder / 'report.en.md'}")
    return record.manifest, folder


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


def _new_record(run_id: str, folder: Path, prepared: Prepared) -> Record:
    plan = prepared.plan
    manifest = Manifest(
        run_id=run_id,
        status="running",
        started_utc=now_utc(),
        finished_utc=None,
        kit=identity.kit_identity(),
        plan=plan,
        plan_sha256=plan.sha256,
        images=tuple(prepared.images.values()),
        facts=(),
        replicates=(),
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
        yield
    except KitError as error:
        failure = Failure(
            error=type(error).__name__, exit_code=error.exit_code, message=error.message
        )
        with contextlib.suppress(KitError), owner.shielded(say):
            record.finish("failed", failure=failure)
        raise
    except Interrupted as stop:
        failure = Failure(error=str(stop), exit_code=stop.exit_code, message="stopped by a signal")
        with contextlib.suppress(KitError), owner.shielded(say):
            record.finish("interrupted", failure=failure)
        raise


def _measure_all(
    client: docker.DockerClient,
    record: Record,
    experiment: Experiment,
    prepared: Prepared,
    say: Say,
) -> str | None:
    """Measure the replicates; return the engine's words when it says that it cannot do this."""
    plan, platform = prepared.plan, prepared.platform
    bench = Bench(
        client=client,
        plan=plan,
        run_id=record.manifest.run_id,
        run=record.folder,
        topology=find_topology(plan.topology),
        runtimes=prepared.runtimes,
        images=prepared.images,
        model=prepared.model,
        accel=platform.accel,
        device=platform.device,
        device_indices=tuple(each.index for each in platform.devices[:1]),
        server_cpuset=platform.server_cpuset,
        client_cpuset=platform.client_cpuset,
        say=say,
    )
    begin = time.monotonic()
    for slot in plan.slots:
        arm = plan.arm(slot.role)
        rest = _rest(begin, slot.replicate, len(plan.slots))
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
        if answered(record.folder, plan, experiment, record.manifest.replicates):
            say("  the registered rule is met: no further pair is needed")
            break
    return None


def _rest(begin: float, done: int, of: int) -> str:
    elapsed = time.monotonic() - begin
    if not done:
        return ""
    return f" ({elapsed / 60:.1f} min so far, about {elapsed / done * (of - done) / 60:.1f} to go)"


def _conclude(
    record: Record, experiment: Experiment, prepared: Prepared, unsupported: str | None
) -> None:
    """Compute everything from the raw files, then write manifest and reports."""
    plan, manifest = prepared.plan, record.manifest
    found = analyse(record.folder, plan, experiment, manifest.replicates, unsupported=unsupported)
    cost = _cost(manifest.replicates)
    notices = list(found.notices)
    if plan.engine == "stub":
        notices.append(notice("stub_engine", ""))
    if prepared.platform.shared_cores:
        notices.append(notice("shared_cores", str(os.cpu_count())))
    if plan.pairs < MIN_PAIRS and not unsupported:
        notices.append(notice("few_pairs", str(plan.pairs)))
    notices += [
        notice("commit_declared" if i.lock_sha256 else "image_declared", i.id)
        for i in prepared.images.values()
        if i.state != "verified"
    ]
    if manifest.kit.dirty:
        notices.append(notice("dirty_kit", ""))
    if cost and cost.ratio > 1.10:
        notices.append(notice("kit_cost", f"{cost.ratio:.2f}"))
    record.finish(
        "complete",
        replicates=found.replicates,
        guards=found.guards,
        confounders=found.confounders,
        not_acted=found.not_acted,
        comparisons=found.comparisons,
        effect=found.effect,
        verdict=found.verdict,
        notices=tuple(notices),
        cost=cost,
    )
    report.write_reports(record.folder, record.manifest)


def _cost(replicates: tuple[Replicate, ...]) -> Cost | None:
    known = [(r.wall_s, r.accounted_s) for r in replicates if r.accounted_s]
    if not known:
        return None
    wall = sum(w for w, _ in known)
    accounted = sum(a for _, a in known if a)
    return Cost(wall_s=wall, accounted_s=accounted, ratio=wall / accounted)
