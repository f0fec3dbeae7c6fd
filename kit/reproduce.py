"""Brings a colleague's run back: the same bits, the same plan, and whether the result came back.

`check` compares a recorded run with what this kit and this machine would do, before anything is
built or started. `reproduce` then runs the recorded plan, not one made anew from its name.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kit import compare, engine, facts, lock_file, model, store
from kit.again import check_numbers, experiment_of
from kit.compare import Difference, Distance, Outcome, Seen, judge_again
from kit.errors import BadFile, DeviceMissing, KitError, UnknownName, UsageError
from kit.experiment import Experiment, Scale
from kit.fact import Fact, HostPlace
from kit.identity import kit_identity
from kit.image import find_image
from kit.manifest import Manifest, Original, load_manifest, manifest_json
from kit.obtain import Source, obtain
from kit.plan import Plan, PlannedImage, request_lines
from kit.platform import Platform, find_platform
from kit.prepare import prepare_again
from kit.reference import archive_of, unpack_reference
from kit.run import carry_out, check_out, sweep_leftovers
from kit.value import Value

Say = Callable[[str], None]
Checked = Literal["raw files", "manifest alone"]

RECORD = "reproduction.json"
EXIT = {"reproduced": 0, "not reproduced": 6, "inconclusive": 7, "incomparable": 8}


class Preflight(Value):
    """What differs before anything runs. `blocking` are the names of what was not accepted."""

    checked: Checked
    distance: Distance
    differences: tuple[Difference, ...]
    blocking: tuple[str, ...]


class Reproduction(Value):
    """A finished attempt: the original by run id and hash, this run, and the outcome.

    `again_sha256` is over the bytes of this run's manifest file.
    """

    schema_version: Literal["1.0"] = "1.0"
    original: Original
    original_verdict: str
    checked: Checked
    again_run_id: str
    again_sha256: str
    differences: tuple[Difference, ...]
    outcome: Outcome


@dataclass(frozen=True)
class Recorded:
    """A recorded run as it was found: its manifest, the file's hash, its workload's bytes."""

    manifest: Manifest
    sha256: str
    checked: Checked
    workload: Mapping[str, bytes]


@dataclass(frozen=True)
class Checkup:
    """A preflight, and what the run needs: the plan with accepted differences, load files."""

    preflight: Preflight
    recorded: Recorded
    plan: Plan
    files: Mapping[str, bytes]
    experiment: Experiment | None
    platform: Platform | None


def read_recorded(file: Path) -> Recorded:
    """Read a manifest, or a run folder's; check its numbers where its raw files are at hand.

    Raw files are those of the run folder, or the archive beside a reference. Raises `BadFile` for
    a run that is not complete or whose plan is not the hashed one, `StaleNumber` when a raw file
    or a number is not the recorded one.
    """
    path = file / "manifest.json" if file.is_dir() else file
    manifest = load_manifest(path)
    if manifest.status != "complete" or manifest.plan.sha256 != manifest.plan_sha256:
        raise BadFile(
            f"{path.name}: the run is {manifest.status}"
            if manifest.status != "complete"
            else f"{path.name}: plan: not the plan that was hashed before the run",
            hint="only a whole run can be reproduced",
        )
    digest = store.sha256_file(path)
    if (path.parent / "plan.json").is_file():
        return _from_raw(path.parent, manifest, digest)
    if archive_of(path).is_file():
        with tempfile.TemporaryDirectory(prefix="kit-reproduce-") as folder:
            return _from_raw(unpack_reference(path, Path(folder)), manifest, digest)
    return Recorded(manifest, digest, "manifest alone", {})


def _from_raw(run: Path, manifest: Manifest, digest: str) -> Recorded:
    check_numbers(run)
    workload = {
        p.name: (run / "workload" / f"{p.name}.jsonl").read_bytes() for p in manifest.plan.phases
    }
    return Recorded(manifest, digest, "raw files", workload)


def check(recorded: Recorded, accept: Iterable[str], found_here: Iterable[Fact]) -> Checkup:
    """Compare a recorded run with this kit and this machine; nothing is built or started.

    Raises `UsageError` for an accepted difference that there is not.
    """
    original = recorded.manifest
    plan, accepted = original.plan, set(accept)
    experiment, differing = _experiment(plan)
    platform, missing = _platform(plan)
    files, workload = _workload(plan, recorded.workload, experiment)
    plan_here, image_changes = _images(plan, accepted)
    here = list(found_here)
    environment = [
        d.model_copy(update={"match": "reported"})  # the machine decides the distance, not whether
        for d in compare.differences(compare.machine_of(original.facts), compare.machine_of(here))
    ]
    found = [*differing, *missing, *workload, *image_changes, *_model(plan), *_kit(original)]
    unknown = accepted - {d.where for d in found if d.match == "must"}
    if unknown:
        raise UsageError(
            f"--accept {min(unknown)}: there is no such difference",
            hint=f"there are: {', '.join(d.where for d in found if d.match == 'must') or 'none'}",
        )
    blocking = [d.where for d in found if d.match == "must" and d.where not in accepted]
    apart = compare.distance(original.facts, here, {plan.platform})
    if apart == "incomparable":
        blocking.append("host.architecture")
    preflight = Preflight(
        checked=recorded.checked,
        distance=apart,
        differences=(*found, *environment),
        blocking=tuple(blocking),
    )
    plan_here = _taken(plan_here, files, accepted)
    return Checkup(preflight, recorded, plan_here, files, experiment, platform)


def _taken(plan: Plan, files: Mapping[str, bytes], accepted: set[str]) -> Plan:
    """Return the plan with the workload and model of this kit where a difference was accepted."""
    phases = tuple(
        p.model_copy(update={"requests_sha256": hashlib.sha256(files[p.name]).hexdigest()})
        if f"workload.{p.name}" in accepted and p.name in files
        else p
        for p in plan.phases
    )
    chosen = plan.model
    if any(f"model.{name}" in accepted for name in chosen.files):
        files_here = model.read_model_lock(model.find_model(chosen.id)).files
        chosen = chosen.model_copy(update={"files": files_here})
    return plan.model_copy(update={"phases": phases, "model": chosen})


def host_facts() -> list[Fact]:
    """Return this machine's facts; without an engine its own group says so."""
    try:
        client = engine.connect()
    except KitError:
        return facts.collect(HostPlace())
    try:
        return facts.collect(HostPlace(client=client, endpoint_kind=engine.endpoint_kind()))
    finally:
        client.close()


def _must(where: str, first: object, second: object) -> Difference:
    return Difference.model_validate(
        {"where": where, "first": first, "second": second, "match": "must"}
    )


def _experiment(plan: Plan) -> tuple[Experiment | None, list[Difference]]:
    """Return the experiment as this kit has it, and in what its measures differ."""
    try:
        experiment = experiment_of(plan)
        for arm in plan.arms:
            plan.topology_of(arm.role)
    except UnknownName as error:
        return None, [_must("experiment", plan.experiment, error.message)]
    names = [m.name for m in experiment.all_measures]
    gone = [name for name in plan.measures if name not in names]
    return experiment, [_must("measures", ", ".join(gone), None)] if gone else []


def _platform(plan: Plan) -> tuple[Platform | None, list[Difference]]:
    try:
        return find_platform(plan.platform), []
    except DeviceMissing as error:
        return None, [_must("platform", plan.platform, error.message)]


def _workload(
    plan: Plan, kept: Mapping[str, bytes], experiment: Experiment | None
) -> tuple[dict[str, bytes], list[Difference]]:
    """Return the bytes of each phase's load file: the recorded ones, else made again."""
    files, found = dict(kept), []
    if not files and experiment is not None:
        scale = Scale(model=plan.model.id, seed=plan.seed, platform=plan.platform)
        files = {phase.name: request_lines(phase) for phase in experiment.workload(scale)}
    for phase in plan.phases:
        made = files.get(phase.name)
        digest = None if made is None else hashlib.sha256(made).hexdigest()
        if digest != phase.requests_sha256:
            found.append(_must(f"workload.{phase.name}", phase.requests_sha256, digest))
    return files, found


def _images(plan: Plan, accepted: set[str]) -> tuple[Plan, list[Difference]]:
    """Compare the plan's images with the locks here; return the plan with accepted ones replaced.

    An adopted image has no lock: whether it is the same shows when it is looked at.
    """
    found = []
    taken: dict[str, PlannedImage] = {}
    for wanted in plan.distinct_images:
        taken[wanted.id] = wanted
        here = _locked_here(wanted.id)
        if here is None:
            found.append(_must(f"image.{wanted.id}", wanted.identity, None))
        elif wanted.lock_sha256 and here.identity != wanted.identity:
            found.append(_must(f"image.{wanted.id}", wanted.identity, here.identity))
            if f"image.{wanted.id}" in accepted:
                taken[wanted.id] = here
    arms = tuple(a.model_copy(update={"image": taken[a.image.id]}) for a in plan.arms)
    images: dict[str, object] = {"arms": arms, "client_image": taken[plan.client_image.id]}
    if plan.evaluation is not None:
        tool = {"image": taken[plan.evaluation.image.id]}
        images["evaluation"] = plan.evaluation.model_copy(update=tool)
    return plan.model_copy(update=images), found


def _locked_here(name: str) -> PlannedImage | None:
    """Return the image that this kit would build or take under a name, or None."""
    try:
        record = find_image(name)
    except UnknownName:
        return None
    if record.source == "adopted":
        return PlannedImage(id=name, identity="adopted", lock_sha256=None)
    locked = lock_file.read_identity_lock(record) if record.locked else None
    if locked is None:
        return None
    digest = lock_file.lock_sha256(lock_file.read_lock(record))
    return PlannedImage(id=name, identity=locked.digest, lock_sha256=digest)


def _model(plan: Plan) -> list[Difference]:
    try:
        files = model.read_model_lock(model.find_model(plan.model.id)).files
    except KitError as error:
        return [_must("model", plan.model.id, error.message)]
    names = sorted({*files, *plan.model.files})
    return [
        _must(f"model.{name}", plan.model.files.get(name), files.get(name))
        for name in names
        if plan.model.files.get(name) != files.get(name)
    ]


def _kit(original: Manifest) -> list[Difference]:
    here = kit_identity().model_dump()
    seen: list[Seen] = [
        {f"kit.{key}": (value, "reported") for key, value in each.items()}
        for each in (original.kit.model_dump(), here)
    ]
    return compare.differences(*seen)


def reproduce(
    checkup: Checkup,
    accept: Iterable[str],
    out: Path,
    say: Say,
    *,
    quick: bool = False,
    source: Source | None = None,
) -> tuple[Reproduction, Path]:
    """Run the recorded plan here and judge; return the record and the new run's folder.

    The image is what this engine has, else comes from `source`, else is built from its lock.

    `quick` runs its first pair alone, which shows the way and decides nothing. The preflight
    must not be blocked. Raises what a run raises.
    """
    assert checkup.experiment is not None
    assert checkup.platform is not None
    recorded = checkup.recorded
    original = Original(
        run_id=recorded.manifest.run_id,
        manifest_sha256=recorded.sha256,
        plan_sha256=recorded.manifest.plan_sha256,
        accepted=tuple(sorted({*accept, *(["plan.slots"] if quick else [])})),
    )
    plan = _first_pair(checkup.plan) if quick else checkup.plan
    check_out(out)
    client = engine.connect()
    sweep_leftovers(client, say)
    how = obtain(recorded.manifest, plan, source or Source(), say)
    prepared = prepare_again(plan, checkup.files, checkup.platform, say, how)
    again, folder = carry_out(client, checkup.experiment, prepared, out, say, original)
    result = conclude(recorded, again, checkup.preflight.differences, original.accepted)
    store.write_text(folder / RECORD, result.model_dump_json(indent=2) + "\n")
    return result, folder


def _first_pair(plan: Plan) -> Plan:
    slots = tuple(s for s in plan.slots if s.pair == plan.slots[0].pair)
    return plan.model_copy(update={"slots": slots, "stopping": None})


def conclude(
    recorded: Recorded,
    again: Manifest,
    found: Iterable[Difference],
    accepted: Iterable[str],
) -> Reproduction:
    """Judge a finished run against the recorded one; pure."""
    first = recorded.manifest
    machine = compare.differences(compare.machine_of(first.facts), compare.machine_of(again.facts))
    inside = compare.differences(compare.inside_of(first), compare.inside_of(again))
    before = [d for d in found if d.where.split(".")[0] not in compare.MACHINE]
    allowed = set(accepted)
    if any(where.startswith("image.") for where in allowed):
        inside = [d.model_copy(update={"match": "reported"}) for d in inside]
    outcome = judge_again(first, again, accepted=allowed, found=[*before, *inside])
    shown = [d.model_copy(update={"match": "reported"}) for d in machine]
    assert again.reproduces is not None
    assert first.verdict is not None
    return Reproduction(
        original=again.reproduces,
        original_verdict=first.verdict.word,
        checked=recorded.checked,
        again_run_id=again.run_id,
        again_sha256=hashlib.sha256(manifest_json(again).encode()).hexdigest(),
        differences=(*before, *shown, *inside),
        outcome=outcome,
    )
