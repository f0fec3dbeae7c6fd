"""What an experiment is: one file under `kit/experiments/`, found by its name.

An experiment says what is asked (goal, hypothesis), the one thing that differs (variable), what
stays fixed (settings, workload), what is read (measures) and how one knows that the variable
acted at all (acted). It does nothing: `kit.plan` freezes it, `kit.run` carries the plan out.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from kit.errors import UnknownName
from kit.measure import SERVED, Comparison, Measure
from kit.value import Value, is_empty

FOLDER = Path(__file__).resolve().parent / "experiments"

Flag = str | int | float | bool | None
"""A vLLM flag's value. True: `--flag`. False: `--no-flag`. None: leave the flag out."""


class Text(Value):
    """One sentence in both report languages."""

    en: str
    zh: str


CAPACITY = (
    "cache_config.num_gpu_blocks",
    "cache_config.kv_cache_size_tokens",
    "cache_config.kv_cache_max_concurrency",
    "cache_config.kv_cache_memory_bytes",
)
"""What follows from another number of bytes for a token, or from other memory for the cache."""

QUALITY_PHASE = "quality"
"""The phase whose answers alone are of interest; random weights have none."""

ANYTHING = "*"
"""As a consequence: the variable may change any of the resolved configuration."""


class Leg(Value):
    """What one service of a topology gets beside what its arm gives to all engines."""

    flags: dict[str, Flag] = {}
    env: dict[str, str] = {}


class Arm(Value):
    """One value of the variable: the flags, environment, image or topology that differ.

    `topology` is None where it is the experiment's; `legs` are by the names of its services.
    """

    name: str
    label: Text
    flags: dict[str, Flag] = {}
    env: dict[str, str] = {}
    image: str | None = None
    topology: str | None = None
    legs: dict[str, Leg] = {}


class Variable(Value):
    """The one thing that differs between the arms.

    `consequences` are paths in the engine's resolved configuration (`cache_config.block_size`)
    that may differ because the variable differs; any other difference makes a run `confounded`.
    """

    name: str
    what: Text
    baseline: Arm
    candidate: Arm
    consequences: tuple[str, ...] = ()

    @property
    def arms(self) -> tuple[Arm, Arm]:
        return (self.baseline, self.candidate)


class Hypothesis(Value):
    """What is claimed before any data, and what effect is worth having.

    `margin` is the smallest relative change of the primary measure worth having (0.10 = 10 %).
    `equivalence` bounds the log ratio of two runs' effects for calling them the same.
    `kind` is `ratio` (a sign-flip test on log ratios of pairs) or `exact` (counts, compared
    exactly).
    """

    text: Text
    measure: str
    direction: Literal["decrease", "increase"]
    margin: float
    equivalence: float
    kind: Literal["ratio", "exact"] = "ratio"


Op = Literal[">=", ">", "<=", "<", "=="]


def holds(reading: float, op: Op, value: float) -> bool:
    """Tell whether `reading op value` is true."""
    return {
        ">=": reading >= value,
        ">": reading > value,
        "<=": reading <= value,
        "<": reading < value,
        "==": reading == value,
    }[op]


class Condition(Value):
    """One thing that every replicate of an arm must show, or the variable did not act.

    `otherwise` says what it means where it does not hold; left out of file and hash where empty.
    """

    measure: str
    arm: Literal["baseline", "candidate"]
    op: Op
    value: float
    otherwise: str = Field(default="", exclude_if=is_empty)

    def holds(self, reading: float) -> bool:
        return holds(reading, self.op, self.value)

    def __str__(self) -> str:
        return f"{self.measure} of {self.arm} {self.op} {self.value:g}"


class QualityLimit(Value):
    """What the answers of every pair must be worth for an effect to count as a gain."""

    comparison: str
    op: Op
    value: float

    def holds(self, reading: float) -> bool:
        return holds(reading, self.op, self.value)

    def __str__(self) -> str:
        return f"{self.comparison} {self.op} {self.value:g}"


class Precondition(Value):
    """What must hold for a run's numbers to mean anything; else `invalid: <otherwise>`.

    As what a platform offers: what must hold for the question to be asked there at all; else
    `unsupported: <otherwise>`.

    A condition is asked of every replicate of its arm, a limit on a comparison of every pair.
    """

    otherwise: str
    holds: Condition | QualityLimit

    @property
    def is_of_baseline(self) -> bool:
        """Whether it can be asked where both arms are the baseline."""
        return not isinstance(self.holds, Condition) or self.holds.arm == "baseline"


class Evaluation(Value):
    """What lm-eval asks of the server after the measured windows: an image of it, and tasks.

    `tasks` are names of the kit's own in `docker/tasks`; `limit` is the most items asked of one.
    """

    image: str
    tasks: tuple[str, ...]
    limit: int
    timeout_s: float = 1800.0


class Needs(Value):
    """What a platform, build and model must offer for the question to make sense.

    `data` are data sets that are not the kit's own, by their repositories.

    `model_files` are files that the model's folder must hold, such as a draft model's.
    `cpu_flags` are processor features of which the engine wants one on the platform `cpu`. That and
    `platforms` only tell beforehand what a run would end in; the engine itself decides.
    """

    platforms: tuple[str, ...] = ("cpu", "cuda")
    real_weights: bool = False
    random_weights: bool = False
    model_files: tuple[str, ...] = ()
    cpu_flags: tuple[str, ...] = ()
    data: tuple[str, ...] = ()

    def missing_files(self, files: Iterable[str]) -> list[str]:
        """Return the needed files that a model with these files does not have."""
        present = set(files)
        return [name for name in self.model_files if name not in present]


MEASURED = "measure"


@dataclass(frozen=True)
class Phase:
    """Requests that are sent in one window; `requests` are the lines of the load file.

    The phase named `measure` is the measured one; others come before it in order (warm-up, a
    cold first request) and are recorded apart. One with `profile` runs under the engines' own
    profilers, and in one with `sample_hz` their stacks are sampled so many times a second; such a
    phase comes last, since what it takes is no time of anything.
    """

    name: str
    requests: tuple[dict[str, Any], ...]
    concurrency: int
    scrape_every_s: float | None = 0.5
    profile: bool = False
    sample_hz: int = 0


@dataclass(frozen=True)
class Scale:
    """What a workload may depend on: the served model's name, the plan's seed, the platform."""

    model: str
    seed: int
    platform: str = "cpu"


@dataclass(frozen=True)
class Experiment:
    """The whole of one experiment; see the module's docstring.

    `comparisons` are numbers between the arms of a pair; `quality` are limits on them, and
    `of_answers` measures of what the answers are worth; `without_answers` gives the form that
    does without all three.
    `preconditions` are what a run must show before its numbers count. `model` is the one that is
    taken unless another is asked for; None takes the kit's default.
    `refusals` are regular expressions of the engine's own words in a server log which mean that
    this platform or build cannot do it at all; `offered` is what the first replicates must show
    where the engine says no such words and does something else in silence.
    """

    title: Text
    goal: Text
    variable: Variable
    hypothesis: Hypothesis
    workload: Callable[[Scale], tuple[Phase, ...]]
    measures: tuple[Measure, ...]
    acted: tuple[Condition, ...]
    settings: Mapping[str, Flag]
    env: Mapping[str, str] = field(default_factory=dict)
    topology: str = "single"
    needs: Needs = field(default_factory=Needs)
    variants: Mapping[str, Callable[[Experiment], Experiment]] = field(default_factory=dict)
    comparisons: tuple[Comparison, ...] = ()
    quality: tuple[QualityLimit, ...] = ()
    preconditions: tuple[Precondition, ...] = ()
    refusals: tuple[str, ...] = ()
    offered: tuple[Precondition, ...] = ()
    model: str | None = None
    of_answers: tuple[Measure, ...] = ()
    answers_judged: bool = True
    evaluation: Evaluation | None = None

    @property
    def all_measures(self) -> tuple[Measure, ...]:
        """Its own measures and those that every experiment reports."""
        return (*self.measures, *self.of_answers, *SERVED)


def without_answers(experiment: Experiment) -> Experiment:
    """Return the form for random weights, whose answers are worth nothing: speed alone is judged.

    An experiment that sets no limit on its answers stays as it is.
    """
    if not experiment.quality:
        return experiment

    def workload(scale: Scale) -> tuple[Phase, ...]:
        return tuple(p for p in experiment.workload(scale) if p.name != QUALITY_PHASE)

    return replace(
        experiment,
        workload=workload,
        comparisons=(),
        quality=(),
        of_answers=(),
        answers_judged=False,
        evaluation=None,
    )


def against_itself(experiment: Experiment) -> Experiment:
    """Return the A/A form: both arms are the baseline, so every difference is noise."""
    variable = experiment.variable
    twin = variable.baseline.model_copy(
        update={
            "name": f"{variable.baseline.name}-again",
            "label": Text(
                en=f"{variable.baseline.label.en} (again)",
                zh=f"{variable.baseline.label.zh}（再次）",
            ),
        }
    )
    return replace(
        experiment,
        variable=variable.model_copy(update={"candidate": twin}),
        acted=(),
        preconditions=tuple(p for p in experiment.preconditions if p.is_of_baseline),
        offered=tuple(p for p in experiment.offered if p.is_of_baseline),
    )


def find_refusal(log: str, patterns: Sequence[str]) -> str | None:
    """Return the engine's own line by which it refused, or None.

    The last matching line counts, from the match on: what is before it is a time and a process.
    """
    for line in reversed(log.splitlines()):
        for pattern in patterns:
            found = re.search(pattern, line)
            if found:
                return line[found.start() :].strip()
    return None


def between_images(experiment: Experiment, old: str, new: str) -> Experiment:
    """Return the experiment as a comparison of two images, everything else equal.

    Both arms are the candidate arm. The image brings its own resolved configuration along, so
    any difference there is part of the variable; the run lists what differs.
    """
    arm = experiment.variable.candidate
    hypothesis = experiment.hypothesis
    verb = {"decrease": ("lowers", "降低"), "increase": ("raises", "提高")}[hypothesis.direction]

    def on(image: str) -> Arm:
        label = Text(en=f"{image}, {arm.label.en}", zh=f"{image}，{arm.label.zh}")
        return arm.model_copy(update={"name": image, "label": label, "image": image})

    variable = Variable(
        name="image",
        what=Text(en=f"the image, {old} or {new}", zh=f"镜像：{old} 或 {new}"),
        baseline=on(old),
        candidate=on(new),
        consequences=(ANYTHING,),
    )
    text = Text(
        en=f"Going from {old} to {new} {verb[0]} {hypothesis.measure}.",
        zh=f"从 {old} 换到 {new} 会{verb[1]} {hypothesis.measure}。",
    )
    acted = [c for c in experiment.acted if c.arm == "candidate"]
    return replace(
        experiment,
        variable=variable,
        hypothesis=hypothesis.model_copy(update={"text": text}),
        acted=(*acted, *(c.model_copy(update={"arm": "baseline"}) for c in acted)),
        preconditions=tuple(_of_both_arms(experiment.preconditions)),
        offered=tuple(_of_both_arms(experiment.offered)),
    )


def _of_both_arms(preconditions: Iterable[Precondition]) -> Iterator[Precondition]:
    """Yield what must hold when both arms are the candidate."""
    for each in preconditions:
        if not isinstance(each.holds, Condition):
            yield each
        elif each.holds.arm == "candidate":
            yield each
            twin = each.holds.model_copy(update={"arm": "baseline"})
            yield each.model_copy(update={"holds": twin})


def experiment_names() -> list[str]:
    """Return the names of all experiments, from the folder's file names."""
    return sorted(p.stem for p in FOLDER.glob("*.py") if not p.stem.startswith("_"))


def experiment_docs() -> dict[str, str]:
    """Return name -> first line of the file's docstring, without importing anything."""
    docs = {}
    for name in experiment_names():
        doc = ast.get_docstring(ast.parse((FOLDER / f"{name}.py").read_text("utf-8"))) or ""
        docs[name] = doc.splitlines()[0] if doc else ""
    return docs


def find_experiment(name: str) -> Experiment:
    """Return the experiment of that name; raise `UnknownName` with the names there are."""
    names = experiment_names()
    if name not in names:
        raise unknown("experiment", name, names)
    found = importlib.import_module(f"kit.experiments.{name}").EXPERIMENT
    assert isinstance(found, Experiment)
    return found


def apply_variant(experiment: Experiment, name: str, variant: str | None) -> Experiment:
    """Return the experiment as its named variant changes it; None leaves it as it is."""
    if variant is None:
        return experiment
    if variant not in experiment.variants:
        raise unknown(f"variant of {name}", variant, list(experiment.variants))
    return experiment.variants[variant](experiment)


def unknown(kind: str, name: str, names: list[str]) -> UnknownName:
    """Build the error for a name that is not among `names`, with the nearest one."""
    near = difflib.get_close_matches(name, names, n=1)
    return UnknownName(
        f"there is no {kind} `{name}`",
        hint=(f"did you mean `{near[0]}`? " if near else "") + f"known: {', '.join(names)}",
    )
