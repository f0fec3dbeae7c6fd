"""Everything that goes into a run, resolved, frozen and hashed before anything starts.

A plan holds no fact about the machine it was made on: the same experiment, images, model,
platform and options give the same plan and hash anywhere.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import rfc8785
from pydantic import Field

from kit.errors import BadFile
from kit.experiment import (
    MEASURED,
    Arm,
    Condition,
    Evaluation,
    Experiment,
    Flag,
    Hypothesis,
    Leg,
    Phase,
    Precondition,
    QualityLimit,
    Scale,
    Text,
    unknown,
)
from kit.guard import Limits
from kit.load_tool import LoadTool, tool_words
from kit.sequential import Stopping
from kit.tasks import evaluation_words, task_files
from kit.topology import PORT, Topology, find_topology
from kit.value import Value, is_empty

Role = Literal["baseline", "candidate"]

_TP = "--tensor-parallel-size"


class PlannedImage(Value):
    """The image an arm or the client runs: its id in images.yaml and what identity it must have.

    `identity` is the sha256 over OCI config and layer diff ids; `lock_sha256` is null for an
    adopted image.
    """

    id: str
    identity: str
    lock_sha256: str | None


class PlannedModel(Value):
    """The model: its id in models.yaml, whether its weights are real, sha256 of every file."""

    id: str
    weights: Literal["real", "dummy"]
    files: dict[str, str]


class PlannedSampler(Value):
    """The program that samples the engines' stacks: a wheel of the package index, by its hash."""

    name: Literal["py-spy"] = "py-spy"
    version: str = Field(pattern=r"^[0-9][0-9.]{0,20}$")
    wheel_sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class PlannedService(Value):
    """What one service gets beside the arm's own; all that a proxy gets."""

    name: str
    args: tuple[str, ...]
    env: dict[str, str]


class PlannedArm(Value):
    """One arm, down to the last argument and environment value that its processes receive.

    `args` and `env` are every engine's. `topology` and `services` are left out of file and hash
    where the arm has none of its own, so that plans with one server keep their hashes.
    """

    role: Role
    name: str
    label: Text
    image: PlannedImage
    entrypoint: tuple[str, ...]
    args: tuple[str, ...]
    env: dict[str, str]
    topology: str | None = Field(default=None, exclude_if=is_empty)
    services: tuple[PlannedService, ...] = Field(default=(), exclude_if=is_empty)

    def service(self, name: str) -> PlannedService:
        """Return a service's own arguments and environment; empty where it has none."""
        empty = PlannedService(name=name, args=(), env={})
        return next((each for each in self.services if each.name == name), empty)

    @property
    def ranks(self) -> int:
        """How many devices each engine takes."""
        words = dict(zip(self.args, self.args[1:], strict=False))
        return int(words.get(_TP, 1))


class PlannedPhase(Value):
    """One window: how many requests, the sha256 of the file that holds them, concurrency.

    `tool` are the words of another load generator that sends it, see `kit.load_tool`.
    """

    name: str
    requests: int
    requests_sha256: str
    concurrency: int
    output_tokens: tuple[int, ...]
    scrape_every_s: float | None
    profile: bool = Field(default=False, exclude_if=is_empty)
    sample_hz: int = Field(default=0, ge=0, le=1000, exclude_if=is_empty)
    tool: tuple[str, ...] = Field(default=(), exclude_if=is_empty)


class PlannedEvaluation(Value):
    """What lm-eval is run with while a replicate's server is still up.

    `args` are its words; `files` the sha256 of every file below `docker/tasks` that the tasks need.
    """

    image: PlannedImage
    args: tuple[str, ...]
    tasks: tuple[str, ...]
    files: dict[str, str]
    timeout_s: float


class Slot(Value):
    """One replicate in the order in which they run; the two of a pair are adjacent."""

    replicate: int
    pair: int
    role: Role


class Resources(Value):
    """What each engine container may use, and how long each wait may take."""

    server_memory_bytes: int = 12 * 2**30
    client_memory_bytes: int = 2 * 2**30
    shm_bytes: int = 2**30
    pids: int = 1024
    ready_timeout_s: float = 300.0
    request_deadline_s: float = 180.0
    stop_grace_s: int = 20


class Plan(Value):
    """The whole plan. `sha256` covers every field.

    With `stopping` a run may end at one of its looks, and with `spare_pairs` as soon as `pairs`
    of them were not spoiled by the machine's other load; `slots` are then the most it may need.
    With `shared_device` all engines are on one device, and no effect is judged. What came after
    the first plans is left out where it is empty, so that older plans keep their hash.
    """

    schema_version: Literal["1.0"] = "1.0"
    experiment: str
    variant: str | None
    against_itself: bool
    title: Text
    goal: Text
    variable: str
    variable_text: Text
    consequences: tuple[str, ...]
    hypothesis: Hypothesis
    acted: tuple[Condition, ...]
    quality: tuple[QualityLimit, ...] = ()
    preconditions: tuple[Precondition, ...] = Field(default=(), exclude_if=is_empty)
    offered: tuple[Precondition, ...] = Field(default=(), exclude_if=is_empty)
    measures: tuple[str, ...]
    limits: Limits
    engine: Literal["vllm", "stub"] = "vllm"
    topology: str
    platform: str
    client_image: PlannedImage
    model: PlannedModel
    arms: tuple[PlannedArm, PlannedArm]
    phases: tuple[PlannedPhase, ...]
    slots: tuple[Slot, ...]
    stopping: Stopping | None = None
    spare_pairs: int = Field(default=0, exclude_if=is_empty)
    seed: int
    resources: Resources
    shared_device: bool = Field(default=False, exclude_if=is_empty)
    sampler: PlannedSampler | None = Field(default=None, exclude_if=is_empty)
    evaluation: PlannedEvaluation | None = Field(default=None, exclude_if=is_empty)

    @property
    def sha256(self) -> str:
        """The hash of the plan's canonical JSON (RFC 8785)."""
        return canonical_sha256(self.model_dump(mode="json"))

    @property
    def case(self) -> str:
        """The folder name of this case: images, model, platform and variant."""
        images = dict.fromkeys(arm.image.id for arm in self.arms)
        parts = ["-vs-".join(images), self.model.id, self.platform]
        parts += [self.variant] if self.variant else []
        parts += ["aa"] if self.against_itself else []
        parts += ["shared-device"] if self.shared_device else []
        parts += [self.load_tool] if self.load_tool != "kit" else []
        return "--".join(parts)

    @property
    def images(self) -> tuple[str, str]:
        """The ids of the arms' images, baseline first."""
        return (self.arms[0].image.id, self.arms[1].image.id)

    @property
    def distinct_images(self) -> tuple[PlannedImage, ...]:
        """Each image of arms, client and evaluation once."""
        tools = () if self.evaluation is None else (self.evaluation.image,)
        each = (*(arm.image for arm in self.arms), self.client_image, *tools)
        return tuple({image.id: image for image in each}.values())

    @property
    def load_tool(self) -> LoadTool:
        """What sends the measured phase."""
        return "vllm-bench" if any(phase.tool for phase in self.phases) else "kit"

    @property
    def pairs(self) -> int:
        """How many pairs are to count; under a stopping rule the most that can."""
        return 1 + max(slot.pair for slot in self.slots) - self.spare_pairs

    @property
    def devices(self) -> int:
        """How many devices a run of this plan needs: those of its larger arm."""
        return max(a.ranks * len(self.topology_of(a.role).engines) for a in self.arms)

    def arm(self, role: Role) -> PlannedArm:
        return self.arms[0] if role == "baseline" else self.arms[1]

    def topology_of(self, role: Role) -> Topology:
        """Return the services that an arm runs on."""
        return find_topology(self.arm(role).topology or self.topology)


def canonical_sha256(value: Any) -> str:
    """Return the sha256 of a JSON value in canonical form (RFC 8785).

    Raises `BadFile` for what has none, such as a whole number beyond 2^53.
    """
    try:
        return hashlib.sha256(rfc8785.dumps(value)).hexdigest()
    except rfc8785.CanonicalizationError as error:
        raise BadFile(f"a value has no canonical form: {error}") from None


def request_lines(phase: Phase) -> bytes:
    """Return the load file of a phase: one request a line, UTF-8, stable bytes."""
    lines = (
        json.dumps(r, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
        for r in phase.requests
    )
    return ("\n".join(lines) + "\n").encode()


def flag_words(flags: Mapping[str, Flag]) -> list[str]:
    """Return the words of vLLM flags, sorted by name: `--a`, `--no-b`, `--c`, `5`."""
    words = []
    for name, value in sorted(flags.items()):
        if value is None:
            continue
        if value is True:
            words.append(f"--{name}")
        elif value is False:
            words.append(f"--no-{name}")
        else:
            words += [f"--{name}", str(value)]
    return words


def make_slots(pairs: int, seed: int) -> tuple[Slot, ...]:
    """Return the order of replicates: adjacent pairs, A B B A, who begins drawn by the seed.

    Alternating the order inside pairs cancels a linear drift of the machine.
    """
    first = random.Random(seed).randrange(2)  # noqa: S311 - an order, not a secret
    roles: tuple[Role, Role] = ("baseline", "candidate")
    slots: list[Slot] = []
    for pair in range(pairs):
        order = roles if (pair + first) % 2 == 0 else roles[::-1]
        for role in order:
            slots.append(Slot(replicate=len(slots), pair=pair, role=role))
    return tuple(slots)


def make_plan(
    name: str,
    experiment: Experiment,
    *,
    variant: str | None,
    against_itself: bool,
    images: Mapping[Role, PlannedImage],
    entrypoints: Mapping[Role, Sequence[str]],
    client_image: PlannedImage,
    model: PlannedModel,
    model_flags: Mapping[str, Flag],
    platform: str,
    platform_flags: Mapping[str, Flag],
    platform_env: Mapping[str, str],
    pairs: int,
    seed: int,
    resources: Resources | None = None,
    engine: Literal["vllm", "stub"] = "vllm",
    stopping: Stopping | None = None,
    spare_pairs: int = 0,
    shared_device: bool = False,
    sampler: PlannedSampler | None = None,
    evaluation_image: PlannedImage | None = None,
    load_tool: LoadTool = "kit",
) -> tuple[Plan, dict[str, bytes]]:
    """Resolve an experiment into a plan and the load files it names (phase -> bytes).

    With `stopping`, `pairs` and `spare_pairs` are not used: the rule says how many pairs a run
    may need. `sampler` is needed where a phase is sampled, and else left out. `load_tool` sends the
    measured phase; raises `UsageError` where it cannot.
    """
    spare = 0 if stopping else spare_pairs
    given = resources or Resources()

    def arm(role: Role, chosen: Arm) -> PlannedArm:
        flags = {**model_flags, **platform_flags, **experiment.settings, **chosen.flags}
        return PlannedArm(
            role=role,
            name=chosen.name,
            label=chosen.label,
            image=images[role],
            entrypoint=tuple(entrypoints[role]),
            args=(*_serve_words(model.id, seed), *flag_words(flags)),
            env={**platform_env, **experiment.env, **chosen.env},
            topology=chosen.topology,
            services=_plan_services(
                find_topology(chosen.topology or experiment.topology), chosen.legs, given
            ),
        )

    phases = experiment.workload(Scale(model=model.id, seed=seed, platform=platform))
    files = {phase.name: request_lines(phase) for phase in phases}
    plan = Plan(
        experiment=name,
        variant=variant,
        against_itself=against_itself,
        title=experiment.title,
        goal=experiment.goal,
        variable=experiment.variable.name,
        variable_text=experiment.variable.what,
        consequences=experiment.variable.consequences,
        hypothesis=experiment.hypothesis,
        acted=experiment.acted,
        quality=experiment.quality,
        preconditions=experiment.preconditions,
        offered=experiment.offered,
        measures=tuple(m.name for m in experiment.all_measures),
        limits=Limits(),
        engine=engine,
        topology=experiment.topology,
        platform=platform,
        client_image=client_image,
        model=model,
        arms=(
            arm("baseline", experiment.variable.baseline),
            arm("candidate", experiment.variable.candidate),
        ),
        phases=tuple(_plan_phase(phase, files[phase.name], load_tool) for phase in phases),
        slots=make_slots(pairs + spare if stopping is None else stopping.pairs, seed),
        stopping=stopping,
        spare_pairs=spare,
        seed=seed,
        resources=given,
        shared_device=shared_device,
        sampler=sampler if any(phase.sample_hz for phase in phases) else None,
        evaluation=_plan_evaluation(
            experiment.evaluation,
            evaluation_image,
            model.id,
            find_topology(experiment.topology).entry,
            seed,
        ),
    )
    return plan, files


def _plan_evaluation(
    asked: Evaluation | None, image: PlannedImage | None, model: str, entry: str, seed: int
) -> PlannedEvaluation | None:
    """Resolve an evaluation to the words of lm-eval; None where none is asked for."""
    if asked is None or image is None:
        return None
    return PlannedEvaluation(
        image=image,
        args=evaluation_words(
            asked, model=model, url=f"http://{entry}:{PORT}/v1/completions", seed=seed
        ),
        tasks=asked.tasks,
        files=task_files(asked.tasks),
        timeout_s=asked.timeout_s,
    )


def _plan_services(
    topology: Topology, legs: Mapping[str, Leg], resources: Resources
) -> tuple[PlannedService, ...]:
    """Return what single services get; raise `UnknownName` for one that the topology lacks."""
    for name in legs:
        if name not in topology.services:
            raise unknown(f"service of {topology.name}", name, list(topology.services))
    found = []
    for name in topology.services:
        leg = legs.get(name, Leg())
        words = flag_words(leg.flags)
        if name == topology.proxy:
            deadline = ("--deadline-s", f"{resources.request_deadline_s:g}")
            words = [*topology.proxy_words, *deadline, *words]
        if words or leg.env:
            found.append(PlannedService(name=name, args=tuple(words), env=leg.env))
    return tuple(found)


def _serve_words(model: str, seed: int) -> tuple[str, ...]:
    return (
        "serve",
        "/model",
        "--served-model-name",
        model,
        "--host",
        "0.0.0.0",  # noqa: S104 - inside a container on an internal network
        "--port",
        str(PORT),
        "--seed",
        str(seed),
    )


def _plan_phase(phase: Phase, lines: bytes, load_tool: LoadTool) -> PlannedPhase:
    lengths = {_output_tokens(r["body"]) for r in phase.requests}
    return PlannedPhase(
        name=phase.name,
        requests=len(phase.requests),
        requests_sha256=hashlib.sha256(lines).hexdigest(),
        concurrency=phase.concurrency,
        output_tokens=tuple(sorted(lengths)),
        scrape_every_s=phase.scrape_every_s,
        profile=phase.profile,
        sample_hz=phase.sample_hz,
        tool=tool_words(phase.requests, load_tool) if phase.name == MEASURED else (),
    )


def _output_tokens(body: Mapping[str, Any]) -> int:
    return int(body.get("max_completion_tokens") or body.get("max_tokens") or 0)


def describe_difference(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """Return `path: a / b` for every leaf in which two plans' JSON forms differ."""
    return _differences(a, b, "")


def _differences(a: Any, b: Any, path: str) -> list[str]:
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        keys: Sequence[str] = sorted({*a, *b})
        return [
            d for k in keys for d in _differences(a.get(k), b.get(k), f"{path}.{k}".lstrip("."))
        ]
    return [] if a == b else [f"{path}: {a!r} / {b!r}"]
