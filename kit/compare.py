"""Two recorded runs side by side: plans, environments, hardware, results. Pure.

Every fact declares how two environments are compared in it (`match`): a difference in a `must`
fact keeps two results from being the same measurement, a `reported` one is shown, and an
`ignored` one is expected to move.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from pydantic import JsonValue

from kit.analyse import comparable
from kit.equivalence import Closeness, compare_counts, compare_logs
from kit.fact import Fact, Match
from kit.manifest import Manifest
from kit.plan import Plan, canonical_sha256
from kit.value import Value
from kit.verdict import MIN_PAIRS, flatten

Distance = Literal["same machine", "same class", "different", "incomparable"]
Word = Literal["reproduced", "not reproduced", "inconclusive", "incomparable"]

MACHINE = ("host", "engine", "gpu")  # groups that describe the machine, not what ran on it
RESOLVED = ("vllm_config", "vllm_env")  # facts that are whole configurations


class Difference(Value):
    """One thing in which two runs, or a run and this machine, differ.

    `where` names it (`plan.seed`, `host.cpu_model`, `candidate.server.packages.packages.torch`)
    and is what `--accept` takes; `first` and `second` are the values, null where there is none.
    """

    where: str
    first: JsonValue
    second: JsonValue
    match: Match

    def __str__(self) -> str:
        return f"{self.where}: {short(self.first)} / {short(self.second)}"


def short(value: Any) -> str:
    """Return a value in at most 60 characters."""
    text = "none" if value is None else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


class Outcome(Value):
    """Whether a result came back: the word, its reason in one sentence, and what it rests on."""

    word: Word
    reason: str
    distance: Distance
    closeness: tuple[Closeness, ...] = ()


Seen = Mapping[str, tuple[Any, Match]]
"""What was seen of an environment: path -> value and how it is compared."""


def machine_of(facts: Iterable[Fact]) -> dict[str, tuple[Any, Match]]:
    """Return the machine's own facts, `host.cpu_model` -> value; lists and numbers are leaves."""
    return {
        f"{f.group}.{f.name}": (f.value, f.match)
        for f in facts
        if f.service is None and f.group in MACHINE
    }


def inside_of(manifest: Manifest) -> dict[str, tuple[Any, Match]]:
    """Return what was seen inside each arm's containers, from the arm's first replicate."""
    seen: dict[str, tuple[Any, Match]] = {}
    done: set[str] = set()
    for replicate in manifest.replicates:
        if replicate.role in done or not replicate.facts:
            continue
        done.add(replicate.role)
        for f in replicate.facts:
            if f.group in MACHINE:
                continue  # the machine again, as seen from inside
            path = f"{replicate.role}.{f.service}.{f.group}.{f.name}"
            value = flatten(f.value) if isinstance(f.value, dict) else {"": f.value}
            if f.name in RESOLVED:
                value = comparable(value)
            seen |= {f"{path}.{p}".rstrip("."): (v, f.match) for p, v in value.items()}
    return seen


def differences(first: Seen, second: Seen) -> list[Difference]:
    """Return every difference that is not ignored; what only one side has is just reported."""
    found = []
    for where in sorted({*first, *second}):
        a, match = first.get(where, (None, "reported"))
        b, other = second.get(where, (None, "reported"))
        if a == b or "ignored" in (match, other):
            continue
        whole = a is not None and b is not None and match == other == "must"
        found.append(
            Difference(where=where, first=a, second=b, match="must" if whole else "reported")
        )
    return found


def plan_differences(first: Plan, second: Plan) -> list[Difference]:
    """Return every leaf in which two plans differ; each of them must match."""
    flat = [flatten(_keyed(plan.model_dump(mode="json")), "plan") for plan in (first, second)]
    return differences(*({p: (v, "must") for p, v in each.items()} for each in flat))


def _keyed(value: Any) -> Any:
    """Return JSON with its lists of records as mappings by index, so that leaves have names."""
    if isinstance(value, Mapping):
        return {key: _keyed(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple) and any(isinstance(inner, Mapping) for inner in value):
        return {str(index): _keyed(inner) for index, inner in enumerate(value)}
    return value


def environment_sha256(manifest: Manifest) -> str:
    """Return the hash of everything seen that must match: equal on the same host with same bits."""
    seen = {**machine_of(manifest.facts), **inside_of(manifest)}
    return canonical_sha256({p: v for p, (v, match) in seen.items() if match == "must"})


def distance(first: Iterable[Fact], second: Iterable[Fact], platforms: set[str]) -> Distance:
    """Return how far apart two machines are, from their own facts.

    Incomparable: another architecture or platform. Different: any fact of the machine that must
    match does not. The same machine shows the same mark.
    """
    here, there = machine_of(first), machine_of(second)
    architectures = {seen.get("host.architecture", (None,))[0] for seen in (here, there)} - {None}
    if len(architectures) > 1 or len(platforms) > 1:
        return "incomparable"
    if any(d.match == "must" for d in differences(here, there)):
        return "different"
    mark = here.get("host.machine_mark", (None,))[0]
    same = mark is not None and mark == there.get("host.machine_mark", (None,))[0]
    return "same machine" if same else "same class"


def levels(manifest: Manifest, role: str) -> list[float]:
    """Return the primary measure of every replicate of an arm that has one."""
    name = manifest.plan.hypothesis.measure
    return [
        x.value
        for r in manifest.counted
        if r.role == role
        for x in r.readings
        if x.name == name and x.value is not None
    ]


def closeness(first: Manifest, second: Manifest, with_levels: bool) -> tuple[Closeness, ...]:
    """Compare the effects, and the arms' levels where the hardware is the same.

    A slow-down of both arms leaves the effect as it is; only the levels show it.
    """
    hypothesis = first.plan.hypothesis
    sides = [
        [ratio for ratio in (m.effect.pairs if m.effect else ()) if ratio] for m in (first, second)
    ]
    found = []
    if all(len(side) >= MIN_PAIRS for side in sides):
        found.append(_compare("effect", sides, hypothesis.equivalence))
    if with_levels:
        for role in ("baseline", "candidate"):
            values = [levels(m, role) for m in (first, second)]
            if all(values):
                found.append(_compare(role, values, hypothesis.equivalence))
    return tuple(found)


def _compare(what: str, sides: Sequence[Sequence[float]], bound: float) -> Closeness:
    """Counts that never vary, or that are 0, are compared exactly; all else by a test."""
    first, second = sides
    fixed = len(set(first)) == len(set(second)) == 1
    if fixed or min(*first, *second) <= 0 or min(len(first), len(second)) < 2:
        return compare_counts(what, first, second, bound)
    return compare_logs(what, first, second, bound)


def judge_again(
    first: Manifest,
    second: Manifest,
    *,
    accepted: Iterable[str] = (),
    found: Sequence[Difference] = (),
) -> Outcome:
    """Say whether the second run brought the first one's result back.

    `found` are the differences of plan and environment; those whose `where` is in `accepted` do
    not count. The first finding that forbids a verdict decides.
    """
    apart = distance(first.facts, second.facts, {first.plan.platform, second.plan.platform})
    allowed = set(accepted)
    blocking = [d for d in found if d.match == "must" and d.where not in allowed]
    if apart == "different":  # another machine resolves another configuration
        blocking = [d for d in blocking if not _is_resolved(d.where)]

    def say(word: Word, reason: str, *close: Closeness) -> Outcome:
        return Outcome(word=word, reason=reason, distance=apart, closeness=tuple(close))

    if apart == "incomparable":
        return say("incomparable", "the architecture or platform is another")
    if blocking:
        more = f" (and {len(blocking) - 1} more)" if len(blocking) > 1 else ""
        return say("incomparable", f"{blocking[0]}{more}")
    stop = _no_verdict(first, second)
    if stop:
        return say(*stop)
    if min(_pairs(first), _pairs(second)) < MIN_PAIRS:
        return say(
            "inconclusive",
            f"too few replicates: {_pairs(first)} and {_pairs(second)} pairs, at least "
            f"{MIN_PAIRS} needed in each run",
        )
    near = apart in ("same machine", "same class")
    close = closeness(first, second, with_levels=near)
    scope = "effect and levels" if near else "the effect alone, on different hardware,"
    apart_now = [c for c in close if c.says == "different"]
    if apart_now:
        c = apart_now[0]
        return say(
            "not reproduced",
            f"the {c.what} differs by {_factor(c.ratio)}, beyond the registered bound of "
            f"{_factor(math.exp(c.bound))}",
            *close,
        )
    if not close:
        return say("inconclusive", "there is no ratio between the arms to judge")
    open_ones = [c.what for c in close if c.says == "undecided"]
    if open_ones:
        return say(
            "inconclusive",
            f"the data neither show nor rule out a difference in {', '.join(open_ones)}",
            *close,
        )
    words = [m.verdict.word for m in (first, second) if m.verdict]
    if set(words) == {"supported", "not supported"}:
        return say("inconclusive", f"the verdicts contradict: {words[0]}, then {words[1]}", *close)
    return say("reproduced", f"{scope} came back within the registered bounds", *close)


def _is_resolved(where: str) -> bool:
    return any(f".vllm.{name}" in where for name in RESOLVED)


def _no_verdict(first: Manifest, second: Manifest) -> tuple[Word, str] | None:
    """Return what ends the comparison before any number is looked at."""
    then, now = first.verdict, second.verdict
    if then is None or now is None:
        return "inconclusive", "one of the runs has no verdict"
    if "unsupported" in (then.word, now.word):
        if then.word == now.word:
            return "reproduced", f"both are unsupported: {now.reason}"
        return "incomparable", f"only one of the machines can do this: {_unsupported(then, now)}"
    stop = _unjudged("original", first) or _unjudged("new run", second)
    return ("inconclusive", stop) if stop else None


def _unjudged(name: str, manifest: Manifest) -> str | None:
    """Return why nothing can be said about a result, from one of the two runs alone."""
    verdict = manifest.verdict
    if verdict is not None and verdict.word in ("invalid", "confounded"):
        return f"the {name} is {verdict.word}: {verdict.reason}"
    if manifest.not_acted:
        return f"in the {name} the variable was not seen to act: {manifest.not_acted[0]}"
    return None


def only_inconclusive(first: Manifest, *, quick: bool) -> str | None:
    """Return why running an original again can only end inconclusive, known before it runs."""
    if first.verdict is not None and first.verdict.word == "unsupported":
        return None
    if stop := _unjudged("original", first):
        return stop
    if (pairs := _pairs(first)) < MIN_PAIRS:
        return f"the original has {pairs} of at least {MIN_PAIRS} pairs"
    return "--quick runs one pair" if quick else None


def _unsupported(then: Any, now: Any) -> str:
    return str(now.reason if now.word == "unsupported" else then.reason)


def _pairs(manifest: Manifest) -> int:
    return len(manifest.effect.values) if manifest.effect else 0


def _factor(ratio: float | None) -> str:
    return "more than any factor" if ratio is None else f"a factor of {ratio:.3f}"


def medians(manifest: Manifest) -> dict[str, dict[str, float]]:
    """Return measure -> role -> median over the replicates that have a value."""
    table: dict[str, dict[str, list[float]]] = {}
    for r in manifest.counted:
        for x in r.readings:
            if x.value is not None:
                table.setdefault(x.name, {}).setdefault(r.role, []).append(x.value)
    return {
        name: {role: statistics.median(values) for role, values in roles.items()}
        for name, roles in table.items()
    }
