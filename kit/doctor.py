"""What this machine can run, and why not, from what was seen of it. Pure.

`check_machine` judges one thing a line, `check_experiments` each experiment on each topology.
`kit.cli_doctor` looks; nothing here starts, fetches or changes anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from kit.errors import (
    BadFile,
    DeviceMissing,
    DiskFull,
    DriverTooOld,
    IndexUnreachable,
    NotLocked,
    ToolMissing,
    UsageError,
)
from kit.experiment import Experiment, apply_variant
from kit.fit import ELEMENT_BYTES, shape_of, split_refusal
from kit.platform import cuda_version, driver_serves
from kit.seen import Looked, Problem, SeenImage, SeenModel
from kit.topology import find_topology
from kit.value import Value

DEFAULT_EXPERIMENT = "exp1_prefix_cache"
RUN_BYTES = 2 * 2**30
BUILD_BYTES = {"cpu": 10 * 2**30, "cuda": 45 * 2**30}
"""What the engine's store needs for a first build, its build cache included."""
ENGINE_BYTES = 4 * 2**30
"""What the host's memory should hold for one engine on CPU: its KV space, weights and processes."""
DEVICE_SHARE = 0.9  # of an accelerator's memory is the engine's
KERNEL_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "bf16", "sve")

State = Literal["ok", "missing", "not needed", "unsupported"]


class Line(Value):
    """One thing that was looked at, and the next step where something is to do.

    `exit_code` is that of the error in which a run would end; 0 unless missing.
    """

    what: str
    state: State
    found: str
    next: str = ""
    exit_code: int = 0


class Form(Value):
    """One experiment on the services of its arms, for the variants that need the same of a machine.

    `unsupported` runs can be started and end in that verdict.
    """

    experiment: str
    variants: tuple[str, ...]
    topology: str
    devices: int
    model: str
    state: State
    why: str = ""
    next: str = ""
    exit_code: int = 0


def check_machine(seen: Looked) -> list[Line]:
    """Return a line for each thing that a run of the default image and model needs or may need."""
    return [
        *_engine(seen),
        *_space(seen),
        *_processor(seen),
        *_accelerators(seen),
        *(_image(seen, each) for each in seen.images),
        *(_model(seen, each) for each in seen.models),
        *_sources(seen),
    ]


def _engine(seen: Looked) -> Iterator[Line]:
    if isinstance(seen.engine, Problem):
        yield _missing("engine", seen.engine)
    else:
        yield Line(what="engine", state="ok", found=f"Docker Engine {seen.engine}")
    for plugin in ("compose", "buildx"):
        if isinstance(seen.plugins, Problem):
            yield _missing(plugin, seen.plugins)
        else:
            yield Line(what=plugin, state="ok", found=seen.plugins[plugin])


def _missing(what: str, problem: Problem) -> Line:
    return Line(
        what=what,
        state="missing",
        found=problem.message,
        next=problem.hint,
        exit_code=problem.exit_code,
    )


def _space(seen: Looked) -> Iterator[Line]:
    for what, free in seen.free_bytes.items():
        yield _enough(f"disk, {what}", free, RUN_BYTES, "free space there")
    image = _default(seen.images, seen.default_image)
    least = RUN_BYTES if image.built else BUILD_BYTES[seen.platform]
    if seen.store_free_bytes is not None:
        yield _enough("disk, images", seen.store_free_bytes, least, "free space for the engine")
    if seen.memory_available_bytes is not None:
        yield _enough("memory", seen.memory_available_bytes, ENGINE_BYTES, "close other programs")


def _enough(what: str, there: int, needed: int, step: str) -> Line:
    found = f"{there / 2**30:.1f} GiB free, {needed / 2**30:.0f} needed"
    if there >= needed:
        return Line(what=what, state="ok", found=found)
    return Line(what=what, state="missing", found=found, next=step, exit_code=DiskFull.exit_code)


def _processor(seen: Looked) -> Iterator[Line]:
    there = [flag for flag in KERNEL_FLAGS if flag in seen.cpu_flags]
    lacking = not {"avx512f", "amx_bf16", "bf16"} & set(there)
    yield Line(
        what="processor",
        state="ok",
        found=f"{seen.server_cpus} CPUs for the server: {', '.join(there) or 'no wide vectors'}",
        next="bfloat16 is slow on it: models are served in float32" if lacking else "",
    )


def _accelerators(seen: Looked) -> Iterator[Line]:
    wanted = seen.platform == "cuda"
    if seen.gpu_refusal or not seen.devices:
        yield Line(
            what="GPUs",
            state="missing" if wanted else "not needed",
            found=seen.gpu_refusal or "none",
            next="install the NVIDIA driver and a CDI description" if wanted else "",
            exit_code=DeviceMissing.exit_code if wanted else 0,
        )
        return
    sizes = [d.memory_bytes for d in seen.devices if d.memory_bytes is not None]
    memory = f", {min(sizes) / 2**30:.0f} GiB each" if sizes else ""
    name = seen.devices[0].name or "unnamed"
    yield Line(what="GPUs", state="ok", found=f"{len(seen.devices)} x {name}{memory}")
    image = _default(seen.images, seen.default_image)
    if not wanted or image.cuda == "cpu":
        return
    found = f"driver {seen.driver or 'unknown'} for CUDA {seen.driver_cuda or 'unknown'}, "
    found += f"{image.id} needs {cuda_version(image.cuda)}"
    if driver_serves(seen.driver_cuda, image.cuda):
        yield Line(what="driver", state="ok", found=found)
    else:
        yield Line(
            what="driver",
            state="missing",
            found=found,
            next="update the driver, or take an image of an older CUDA",
            exit_code=DriverTooOld.exit_code,
        )


def _image(seen: Looked, image: SeenImage) -> Line:
    what = f"image {image.id}"
    built = {True: "built", False: "not built", None: "no engine says whether it is built"}
    found = f"{image.lock}, {built[image.built]}"
    if image.id != seen.default_image:
        return Line(what=what, state="ok" if image.built else "not needed", found=found)
    if image.built or image.lock == "adopted":
        return Line(what=what, state="ok", found=found)
    step = f"nox -s build -- {image.id}"
    if image.lock != "locked":
        code, step = NotLocked.exit_code, f"nox -s lock -- {image.id} --write"
    elif image.inputs_here or seen.network:
        return Line(what=what, state="ok", found=found, next=f"the first run builds it; or {step}")
    else:
        code = IndexUnreachable.exit_code
        step = "find a network, or take it from a bundle or registry"
    own = [i.id for i in seen.images if i.lock == "adopted" and i.built and i.cuda == image.cuda]
    if own:
        step += f"; or run with `--image {own[0]}`, adopted here"
    return Line(what=what, state="missing", found=found, next=step, exit_code=code)


def _model(seen: Looked, model: SeenModel) -> Line:
    what = f"model {model.id}"
    found = f"{model.weights} weights, {'present' if model.present else 'not made yet'}"
    if model.present:
        return Line(what=what, state="ok", found=found)
    can = model.source_here or seen.network
    if model.id != seen.default_model:
        return Line(what=what, state="not needed", found=found)
    if can:
        return Line(what=what, state="ok", found=found, next="the first run makes it")
    return Line(
        what=what,
        state="missing",
        found=found,
        next="find a network, or take it from a bundle",
        exit_code=IndexUnreachable.exit_code,
    )


def _sources(seen: Looked) -> Iterator[Line]:
    image = _default(seen.images, seen.default_image)
    model = _default(seen.models, seen.default_model)
    here = (image.built or image.inputs_here) and (model.present or model.source_here)
    yield Line(
        what="network",
        state="ok" if seen.network else "not needed" if here else "missing",
        found="the package index answers" if seen.network else "offline",
        next="" if seen.network or here else "needed once, for image and model",
        exit_code=0 if seen.network or here else IndexUnreachable.exit_code,
    )
    lacks = ", ".join(seen.base_lacks)
    needed = bool(lacks) and not image.built and not image.inputs_here
    yield Line(
        what="base's programs",
        state="missing" if needed else "not needed" if lacks else "ok",
        found=f"not installed: {lacks}" if lacks else "installed",
        next="`nox -s engine` as root installs them" if needed else "",
        exit_code=ToolMissing.exit_code if needed else 0,
    )
    yield Line(
        what="container registry",
        state="not needed",
        found="images are built here; `nox -s push` and `pull` alone use one",
    )


def _default(each: Sequence[Any], name: str) -> Any:
    return next(one for one in each if one.id == name)


# -- experiments -------------------------------------------------------------------------------


def check_experiments(
    seen: Looked, lines: Iterable[Line], experiments: Mapping[str, Experiment]
) -> list[Form]:
    """Return what can be run: one row for all variants that need the same of a machine."""
    broken = next((line for line in lines if line.state == "missing"), None)
    rows: dict[Form, list[str]] = {}
    for name, base in experiments.items():
        for variant in (None, *base.variants):
            form = _form(seen, name, apply_variant(base, name, variant), broken)
            rows.setdefault(form, []).append(variant or "default")
    return [form.model_copy(update={"variants": tuple(names)}) for form, names in rows.items()]


def can_run(forms: Iterable[Form]) -> Form:
    """Return the row of the experiment that decides whether this machine is ready."""
    return next(f for f in forms if f.experiment == DEFAULT_EXPERIMENT and "default" in f.variants)


def _form(seen: Looked, name: str, experiment: Experiment, broken: Line | None) -> Form:
    arms = experiment.variable.arms
    places = [find_topology(arm.topology or experiment.topology) for arm in arms]
    ranks = [int(arm.flags.get("tensor-parallel-size") or 1) for arm in arms]
    form = Form(
        experiment=name,
        variants=(),
        topology=" / ".join(dict.fromkeys(place.name for place in places)),
        devices=max(n * len(place.engines) for n, place in zip(ranks, places, strict=True)),
        model=experiment.model or seen.default_model,
        state="ok",
    )
    found = next(_obstacles(seen, experiment, form, max(ranks), broken), None)
    if found is None:
        return form
    state, why, step, code = found
    return form.model_copy(update={"state": state, "why": why, "next": step, "exit_code": code})


Obstacle = tuple[State, str, str, int]


def _obstacles(
    seen: Looked, experiment: Experiment, form: Form, ranks: int, broken: Line | None
) -> Iterator[Obstacle]:
    """Yield what keeps this from running here, or from a verdict, the hardest first."""
    if broken is not None:
        yield "missing", f"{broken.what}: {broken.found}", broken.next, broken.exit_code
    model = _default(seen.models, form.model)
    lacking = experiment.needs.missing_files(model.files)
    if lacking:
        step = "give a --model whose folder has it"
        yield "missing", f"{model.id} has no {lacking[0]}", step, UsageError.exit_code
    if not (model.present or model.source_here or seen.network):
        code = IndexUnreachable.exit_code
        yield "missing", f"{model.id} is not here, and no network is", "find a network", code
    there = len(seen.devices) if seen.platform == "cuda" else seen.server_cpus
    if form.devices > there:
        why = f"needs {form.devices} devices, this machine has {there}"
        yield "unsupported", why, "take a larger machine", 0
    yield from _of_model(seen, model, ranks)
    if seen.platform not in experiment.needs.platforms:
        yield "unsupported", f"the platform {seen.platform} does not offer it", "", 0
    wanted = experiment.needs.cpu_flags
    if seen.platform == "cpu" and wanted and not set(wanted) & set(seen.cpu_flags):
        yield "unsupported", f"the processor has none of {', '.join(wanted)}", "", 0


def _of_model(seen: Looked, model: SeenModel, ranks: int) -> Iterator[Obstacle]:
    """Yield what the model's shape forbids; a family that is not known here is left to the engine.

    Sizes are those of a 16-bit type, which is what a GPU serves.
    """
    if model.config is None:
        return
    try:
        shape = shape_of(model.config, model.id)
    except BadFile:
        return
    refusal = split_refusal(shape, ranks)
    if refusal:
        yield "unsupported", refusal, "give another --model", 0
    weights = shape.parameters * ELEMENT_BYTES["bfloat16"] // ranks
    sizes = [d.memory_bytes for d in seen.devices if d.memory_bytes is not None]
    there = min(sizes) * DEVICE_SHARE if seen.platform == "cuda" and sizes else None
    if seen.platform == "cpu" and seen.memory_available_bytes is not None:
        there = float(seen.memory_available_bytes)
    if there is not None and weights > there:
        why = f"{model.id} has {weights / 2**30:.1f} GiB of weights, {there / 2**30:.1f} are there"
        yield "missing", why, "give a smaller --model", DeviceMissing.exit_code
