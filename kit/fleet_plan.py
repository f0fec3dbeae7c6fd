"""What a fleet's plan file says, and the cases it comes to. Needs neither an engine nor Slurm.

A case is one run: experiment x image x model x variant x seed x class of nodes. Each has the hash
of the very plan that its run will freeze, known beforehand from the locks, so that a finished case
is recognised by what went into it and not by its name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from kit.errors import BadFile, KitError, UsageError
from kit.plan import Plan
from kit.platform import NAMES
from kit.prepare import Options, plan_ahead
from kit.value import Value, load_json, load_yaml, parse_value
from kit.verdict import MIN_PAIRS

BETWEEN = ".."
"""Stands between two image ids where a case compares versions."""

DEFAULT_SPARE = 3


class NodeClass(Value):
    """Nodes that are alike, and what a job asks Slurm for on one of them.

    `constraint` and `partition` are Slurm's words. A measurement wants its node for itself:
    `exclusive` is false only where something else keeps jobs apart. `gpus` is the number of the
    experiment's devices unless given. With `each` every case runs once on each of these nodes, by
    name: with `aa` that finds the sick one. `scratch` is a folder on the node itself to measure
    in; without it the shared output is used. `env` is set for the kit there (`DOCKER_HOST` for an
    engine of the user's own). Times are minutes, memory is GiB.
    """

    platform: str
    partition: str | None = None
    constraint: str | None = None
    exclusive: bool = True
    gpus: int | None = Field(default=None, ge=0)
    cpus: int | None = Field(default=None, ge=1)
    memory_gib: int | None = Field(default=None, ge=1)
    time_min: int = Field(default=240, ge=1)
    at_once: int = Field(default=256, ge=1)
    each: tuple[str, ...] = ()
    scratch: Path | None = None
    env: dict[str, str] = {}

    @field_validator("platform")
    @classmethod
    def _known(cls, value: str) -> str:
        if value not in NAMES:
            raise ValueError(f"must be one of {', '.join(NAMES)}")
        return value


class FleetFile(Value):
    """The whole file. A null model, image or variant takes the experiment's or class's default.

    `images` entries are ids, or `OLD..NEW` to compare two versions. `bring` says where a node
    that has not got an image takes it from: a registry's `HOST/NAME@sha256:…` or a bundle on
    shared storage; without an entry it is built from its lock. Either way it is checked.
    """

    out: Path
    nodes: dict[str, NodeClass] = Field(min_length=1)
    experiments: tuple[str, ...] = Field(min_length=1)
    images: tuple[str | None, ...] = Field(default=(None,), min_length=1)
    models: tuple[str | None, ...] = Field(default=(None,), min_length=1)
    variants: tuple[str | None, ...] = Field(default=(None,), min_length=1)
    seeds: tuple[int, ...] = Field(default=(1,), min_length=1)
    bring: dict[str, str] = {}
    quick: bool = False
    aa: bool = False
    replicates: int = Field(default=MIN_PAIRS, ge=1)
    spare: int = Field(default=DEFAULT_SPARE, ge=0)
    ready_timeout_s: float | None = Field(default=None, gt=0)
    stub: Path | None = None


class Case(Value):
    """One run on one node: what the kit is asked, which plan that is, what Slurm is asked for."""

    name: str
    experiment: str
    words: tuple[str, ...]
    plan_sha256: str
    node_class: str
    node: str | None
    devices: int

    @property
    def key(self) -> str:
        """Names the case's folder: readable, and never the same for two plans or places."""
        return f"{self.name}--{self.plan_sha256[:12]}"


class Fleet(Value):
    """A plan file, read and checked, and its cases in order."""

    file: FleetFile
    cases: tuple[Case, ...]


def read_fleet(path: Path) -> Fleet:
    """Read a fleet's plan file; paths in it start at its folder.

    Raises `BadFile` naming the key for anything that is not right, names included.
    """
    source = path.name
    raw = load_yaml(path)
    if not isinstance(raw, dict):
        raise BadFile(f"{source}: (top): must be a record of keys and values")
    file = parse_value(FleetFile, raw, source)
    file = file.model_copy(
        update={
            "out": _from(path, file.out),
            "stub": None if file.stub is None else _from(path, file.stub),
            "bring": {
                image: text if "@sha256:" in text else str(_from(path, Path(text)))
                for image, text in file.bring.items()
            },
        }
    )
    for key in ("experiments", "images", "models", "variants", "seeds"):
        _check_once(source, key, getattr(file, key))
    stub = None if file.stub is None else load_json(file.stub)
    return Fleet(file=file, cases=tuple(_cases(source, file, stub)))


def _from(path: Path, named: Path) -> Path:
    return (path.resolve().parent / named.expanduser()).resolve()


def _check_once(source: str, key: str, values: tuple[object, ...]) -> None:
    for index, value in enumerate(values):
        if value in values[:index]:
            raise BadFile(f"{source}: {key}[{index}]: `{value}` stands there twice")


def _cases(source: str, file: FleetFile, stub: Mapping[str, Any] | None) -> Iterator[Case]:
    axes = (file.experiments, file.images, file.models, file.variants, file.seeds)
    for (label, nodes), values in product(file.nodes.items(), product(*axes)):
        experiment, image, model, variant, seed = values
        where = f"{experiment}, image {image}, model {model}, variant {variant}, nodes.{label}"
        try:
            options = _options(file, nodes, image, model, variant, seed, stub)
            plan = plan_ahead(experiment, options)
        except KitError as error:
            raise BadFile(f"{source}: {where}: {error.message}", hint=error.hint) from None
        words = tuple(_words(file, nodes, values))
        for node in nodes.each or (None,):
            yield Case(
                name=_name(plan, label, node, seed),
                experiment=experiment,
                words=words,
                plan_sha256=plan.sha256,
                node_class=label,
                node=node,
                devices=plan.devices,
            )


def _name(plan: Plan, label: str, node: str | None, seed: int) -> str:
    parts = [plan.experiment, plan.case, f"seed{seed}", label, *([node] if node else [])]
    return "--".join(parts)


def _versions(image: str | None) -> tuple[str, str] | None:
    if image is None or BETWEEN not in image:
        return None
    old, _, new = image.partition(BETWEEN)
    return old, new


def _options(
    file: FleetFile,
    nodes: NodeClass,
    image: str | None,
    model: str | None,
    variant: str | None,
    seed: int,
    stub: Mapping[str, Any] | None,
) -> Options:
    """Return the options that the command line makes of `_words`, for the plan beforehand."""
    versions = _versions(image)
    if versions and file.aa:
        raise UsageError("`aa` and a comparison of versions exclude each other")
    pairs = 1 if file.quick else file.replicates
    return Options(
        variant=variant,
        image=None if versions else image,
        versions=versions,
        model=model,
        platform=nodes.platform,
        pairs=pairs,
        spare_pairs=0 if pairs < MIN_PAIRS else file.spare,
        seed=seed,
        against_itself=file.aa,
        stub=stub,
        ready_timeout_s=file.ready_timeout_s,
    )


def _words(file: FleetFile, nodes: NodeClass, values: tuple[Any, ...]) -> Iterator[str]:
    """Yield the kit's command for a case, all but the folder for its output."""
    experiment, image, model, variant, seed = values
    versions = _versions(image)
    if versions:
        yield from ("compare-versions", experiment, *versions)
    else:
        yield from ("run", experiment)
    yield from ("--platform", nodes.platform, "--seed", str(seed), "--json")
    if file.quick:
        yield "--quick"
    else:
        yield from ("--replicates", str(file.replicates), "--spare", str(file.spare))
    if file.aa:
        yield "--aa"
    given = (
        ("--image", None if versions else image),
        ("--model", model),
        ("--variant", variant),
        ("--ready-timeout", file.ready_timeout_s),
        ("--stub", file.stub),
    )
    for word, value in given:
        if value is not None:
            yield from (word, str(value))
