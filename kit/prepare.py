"""From options to everything a run needs: images and model on this machine, and the frozen plan.

Names are checked first, before anything is fetched, built or started.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kit import build, model
from kit.build import BuiltImage
from kit.compose import MOUNT, Runtime, runtime_of
from kit.errors import IdentityMismatch, ModelDamaged, NotLocked, UsageError
from kit.experiment import (
    Experiment,
    Flag,
    against_itself,
    apply_variant,
    between_images,
    find_experiment,
    without_answers,
)
from kit.image import ImageRecord, find_image, find_server
from kit.load_tool import CLIENT_MEMORY_BYTES, LoadTool
from kit.lock_file import lock_sha256, read_identity_lock, read_lock
from kit.manifest import RanImage
from kit.model import ModelRecord, find_model
from kit.paths import INSIDE, RUNS
from kit.plan import Plan, PlannedImage, PlannedModel, Resources, Role, make_plan
from kit.platform import DEFAULT_IMAGES, Platform, check_device
from kit.sampler_tool import planned_sampler, sampler_program
from kit.sequential import Stopping
from kit.store import let_read
from kit.tasks import TASKS, check_tasks
from kit.verdict import MIN_PAIRS

Say = Callable[[str], None]

SHARING: dict[str, Flag] = {"gpu-memory-utilization": 0.4}
"""What an engine may take of a device that another one is on."""

ROLES: tuple[Role, Role] = ("baseline", "candidate")


@dataclass(frozen=True)
class Options:
    """What a person may choose about a run; None takes the default."""

    variant: str | None = None
    image: str | None = None
    versions: tuple[str, str] | None = None
    model: str | None = None
    platform: str | None = None
    pairs: int = MIN_PAIRS
    stopping: Stopping | None = None
    spare_pairs: int = 0
    equivalence: float | None = None
    seed: int = 1
    against_itself: bool = False
    shared_device: bool = False
    load_tool: LoadTool = "kit"
    out: Path = RUNS
    stub: Mapping[str, Any] | None = None
    ready_timeout_s: float | None = None


def choose(name: str, options: Options) -> Experiment:
    """Return the experiment that the options ask for; every name in them is checked.

    Raises `UnknownName` or `UsageError`.
    """
    experiment = apply_variant(find_experiment(name), name, options.variant)
    if options.versions:
        experiment = between_images(experiment, *options.versions)
    if options.against_itself:
        experiment = against_itself(experiment)
    if options.pairs < 1:
        raise UsageError("--replicates must be at least 1", hint="leave it out for 6 pairs")
    if options.spare_pairs < 0:
        raise UsageError("--spare must be at least 0", hint="leave it out for 3 pairs")
    if options.equivalence is not None:
        if not 0 < options.equivalence < math.inf:
            raise UsageError("--equivalence must be above 0", hint="0.1 is a factor of 1.105")
        registered = experiment.hypothesis.model_copy(update={"equivalence": options.equivalence})
        experiment = replace(experiment, hypothesis=registered)
    for chosen in (options.image, *(arm.image for arm in experiment.variable.arms)):
        if chosen:
            find_server(chosen)
    record = find_model(options.model or experiment.model or model.DEFAULT)
    return experiment if record.weights == "real" else without_answers(experiment)


@dataclass(frozen=True)
class Prepared:
    """A plan and everything on this machine that it needs."""

    plan: Plan
    files: dict[str, bytes]
    images: dict[str, RanImage]
    runtimes: dict[str, Runtime]
    model: Path
    platform: Platform
    sampler: Path | None = None


def prepare(
    name: str,
    experiment: Experiment,
    platform: Platform,
    options: Options,
    say: Say,
) -> Prepared:
    """Make images and model ready and freeze the plan. Raises what building and fetching raise."""
    records = _choose_images(experiment, platform.default_image, options)
    chosen = find_model(options.model or experiment.model or model.DEFAULT)
    _check_needs(name, experiment, chosen)
    _check_devices(platform, records)
    tools = _tools(experiment)
    built = {r.id: build.ensure_image(r, say) for r in dict.fromkeys((*records, *tools))}
    ran = {key: _ran(b) for key, b in built.items()}
    files = model.ensure_model(chosen, built[records[1].id], say)
    planned = {
        key: PlannedImage(id=key, identity=r.identity, lock_sha256=r.lock_sha256)
        for key, r in ran.items()
    }
    plan, lines = _freeze(
        name, experiment, platform.name, options, records, planned, chosen, files.files
    )
    sampler = _sampler(plan, say)
    return Prepared(plan, lines, ran, _runtimes(built), files.path, platform, sampler)


def plan_ahead(name: str, options: Options) -> Plan:
    """Return the plan that a run with these options will freeze, from the locks alone.

    Needs no engine; `options.platform` must say the platform. Raises what `choose` raises, and
    `NotLocked` where an image has no locked identity that could be known beforehand.
    """
    if options.platform not in DEFAULT_IMAGES:
        raise UsageError(f"no platform `{options.platform}`", hint="cpu or cuda")
    experiment = choose(name, options)
    records = _choose_images(experiment, DEFAULT_IMAGES[options.platform], options)
    chosen = find_model(options.model or experiment.model or model.DEFAULT)
    _check_needs(name, experiment, chosen)
    planned = {record.id: _locked(record) for record in (*records, *_tools(experiment))}
    files = model.read_model_lock(chosen).files
    return _freeze(name, experiment, options.platform, options, records, planned, chosen, files)[0]


def _tools(experiment: Experiment) -> tuple[ImageRecord, ...]:
    """Return the images that are run beside the servers and measure nothing of speed."""
    asked = experiment.evaluation
    return () if asked is None else (find_image(asked.image),)


def _locked(record: ImageRecord) -> PlannedImage:
    """Return an image as every machine will have it, from its lock."""
    locked = None if record.source == "adopted" else read_identity_lock(record)
    if locked is None:
        raise NotLocked(
            f"the image {record.id} has no locked identity, so no plan can name its bits ahead",
            hint=f"`nox -s verify_image -- {record.id}` on a machine with an engine locks it",
        )
    lock = lock_sha256(read_lock(record))
    return PlannedImage(id=record.id, identity=locked.digest, lock_sha256=lock)


def _freeze(
    name: str,
    experiment: Experiment,
    platform: str,
    options: Options,
    records: tuple[ImageRecord, ImageRecord],
    planned: Mapping[str, PlannedImage],
    chosen: ModelRecord,
    files: dict[str, str],
) -> tuple[Plan, dict[str, bytes]]:
    """Freeze the plan; the same inputs give the same one anywhere."""
    entrypoints = {role: _entrypoint(r, options) for role, r in zip(ROLES, records, strict=True)}
    if options.stub is not None:
        experiment = _on_stub(experiment, options.stub)
    resources = Resources()
    if options.ready_timeout_s:
        resources = resources.model_copy(update={"ready_timeout_s": options.ready_timeout_s})
    if options.load_tool != "kit":
        resources = resources.model_copy(update={"client_memory_bytes": CLIENT_MEMORY_BYTES})
    return make_plan(
        name,
        experiment,
        variant=options.variant,
        against_itself=options.against_itself,
        images={"baseline": planned[records[0].id], "candidate": planned[records[1].id]},
        entrypoints=entrypoints,
        engine="vllm" if options.stub is None else "stub",
        client_image=planned[records[1].id],
        model=PlannedModel(id=chosen.id, weights=chosen.weights, files=files),
        model_flags=chosen.flags(platform),
        platform=platform,
        platform_flags=SHARING if options.shared_device and platform == "cuda" else {},
        platform_env={},
        pairs=options.pairs,
        stopping=options.stopping,
        spare_pairs=options.spare_pairs,
        seed=options.seed,
        resources=resources,
        shared_device=options.shared_device,
        sampler=planned_sampler(),
        evaluation_image=_evaluation_image(experiment, planned),
        load_tool=options.load_tool,
    )


def prepare_again(
    plan: Plan,
    files: Mapping[str, bytes],
    platform: Platform,
    say: Say,
    how: Mapping[str, str],
) -> Prepared:
    """Make images and model ready for a plan that exists already.

    `how` says of images that were just brought in where from, by their ids.

    Raises what building and fetching raise, and `IdentityMismatch` or `ModelDamaged` where what
    is here is not what the plan names.
    """
    if plan.evaluation is not None:
        check_tasks(plan.evaluation.tasks, plan.evaluation.files)
    wanted = {image.id: image for image in plan.distinct_images}
    _check_devices(platform, map(find_image, wanted))
    built = {key: build.ensure_image(find_image(key), say) for key in wanted}
    for key, image in built.items():
        if image.identity.digest != wanted[key].identity:
            raise IdentityMismatch(
                f"the image {key} here is {image.identity.digest[:19]}, the plan's "
                f"{wanted[key].identity[:19]}",
                hint=f"`nox -s verify_image -- {key}` says which file differs",
            )
    folder = model.ensure_model(find_model(plan.model.id), built[plan.client_image.id], say)
    if folder.files != plan.model.files:
        raise ModelDamaged(
            f"the model {plan.model.id} here has other files than the plan's",
            hint="use the commit of the kit that the manifest names",
        )
    ran = {key: _ran(image, how.get(key)) for key, image in built.items()}
    sampler = _sampler(plan, say)
    return Prepared(plan, dict(files), ran, _runtimes(built), folder.path, platform, sampler)


def _evaluation_image(
    experiment: Experiment, planned: Mapping[str, PlannedImage]
) -> PlannedImage | None:
    asked = experiment.evaluation
    return None if asked is None else planned[asked.image]


def _sampler(plan: Plan, say: Say) -> Path | None:
    """Return the program that the plan samples stacks with; None where it samples none."""
    return sampler_program(plan.sampler, say) if plan.sampler else None


def _check_devices(platform: Platform, records: Iterable[ImageRecord]) -> None:
    """Refuse before anything is built what the machine's driver or devices could not run."""
    for record in records:
        locked = None if record.source == "adopted" else read_identity_lock(record)
        archs = () if locked is None else locked.inside.cuda_archs
        check_device(platform, record.id, record.cuda, archs)


def _runtimes(built: Mapping[str, BuiltImage]) -> dict[str, Runtime]:
    let_read(INSIDE)
    let_read(TASKS)
    return {
        key: runtime_of(b.image_id, interpreter=b.record.interpreter, user=b.record.user)
        for key, b in built.items()
    }


def _ran(built: BuiltImage, how: str | None = None) -> RanImage:
    return RanImage(
        id=built.record.id,
        engine_id=built.image_id,
        config_digest=built.identity.config_digest,
        manifest_digest=built.identity.manifest_digest,
        diff_ids=built.identity.diff_ids,
        identity=built.identity.digest,
        lock_sha256=built.lock_sha256,
        how=how or built.how,
        state=built.state,
    )


def _choose_images(
    experiment: Experiment, default: str, options: Options
) -> tuple[ImageRecord, ImageRecord]:
    default = options.image or default
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


def _check_needs(name: str, experiment: Experiment, chosen: ModelRecord) -> None:
    if experiment.needs.real_weights and chosen.weights != "real":
        raise UsageError(
            f"{name} needs real weights, and {chosen.id} has random ones",
            hint=f"leave --model out to take {model.DEFAULT}",
        )
    if experiment.needs.random_weights and chosen.weights == "real":
        raise UsageError(
            f"{name} asks this of a shape with random weights, and {chosen.id} has real ones",
            hint="give a --model of the kind `shape`; see docker/models.yaml",
        )
    if experiment.needs.data:
        raise UsageError(
            f"{name} needs the data sets {', '.join(experiment.needs.data)}, each at a revision of "
            "40 hex digits, and the kit has none of them",
            hint="nothing is pinned or fetched yet; `--variant lm-eval` asks the kit's own tasks",
        )
    missing = experiment.needs.missing_files(
        model.read_model_lock(chosen).files if experiment.needs.model_files else ()
    )
    if missing:
        raise UsageError(
            f"{name} needs {missing[0]} in the model's folder, and {chosen.id} has none",
            hint="give a --model whose record in docker/models.yaml carries a draft model",
        )
