"""From a run's raw data to its measures, guards, effect and verdict.

`conclude` is pure: everything it needs comes in as values. `analyse` reads a run's folder and
hands it over, at the end of a run and at any later time, so both give the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kit.experiment import Condition, Experiment, Precondition, find_refusal
from kit.guard import (
    GuardResult,
    SamePrompts,
    check_replicate,
    foreign_share,
    limited_share,
)
from kit.load_tool import TOOL_NAMES
from kit.manifest import Replicate
from kit.measure import Measure, Raw, Reading, load_raw, median_span_s
from kit.notice import Notice, notice
from kit.plan import Plan, PlannedArm
from kit.quality import Compared, check_quality, compare_pairs
from kit.raw_lines import REQUEST, TELEMETRY, read_lines
from kit.verdict import (
    Effect,
    Pair,
    Verdict,
    check_acted,
    effect_of,
    find_confounders,
    find_pairs,
    flatten,
    judge,
    may_stop,
)

Requests = Mapping[str, Sequence[Mapping[str, Any]]]
"""The lines that were to be sent, by phase."""
Telemetry = Mapping[int, Sequence[Mapping[str, Any]]]
"""The host samples taken beside the measured window, by replicate."""


@dataclass(frozen=True)
class Analysis:
    """What the raw data say; `replicates` now carry their readings.

    `set_aside` are the pairs that do not count: the machine's other load spoiled them, and the
    plan's spare pairs stand in. Their guards are among `guards` all the same.
    """

    replicates: tuple[Replicate, ...]
    set_aside: tuple[int, ...]
    guards: tuple[GuardResult, ...]
    confounders: tuple[str, ...]
    not_acted: tuple[str, ...]
    comparisons: tuple[Compared, ...]
    effect: Effect
    verdict: Verdict
    notices: tuple[Notice, ...]


def analyse(
    run: Path,
    plan: Plan,
    experiment: Experiment,
    replicates: Sequence[Replicate],
    *,
    unsupported: str | None = None,
) -> Analysis:
    """Compute everything from the raw files of the complete replicates.

    Raises `BadFile` naming the first file that is missing or cannot be read.
    """
    raws, telemetry = load_raws(run, plan, replicates)
    requests = requests_of(run, plan)
    return conclude(plan, experiment, replicates, raws, requests, telemetry, unsupported)


def requests_of(run: Path, plan: Plan) -> dict[str, list[dict[str, Any]]]:
    """Return of each phase's load file what the guards ask of its lines; no prompt's text."""
    return {
        p.name: [
            {"id": line["id"], "body": {k: v for k, v in line["body"].items() if _is_asked(k, v)}}
            for line in read_lines(run / "workload" / f"{p.name}.jsonl", REQUEST)
        ]
        for p in plan.phases
    }


def _is_asked(key: str, value: object) -> bool:
    lengths = ("max_tokens", "max_completion_tokens", "ignore_eos")
    return key in lengths or (key == "prompt" and isinstance(value, list))


KEPT_BYTES = 16 * 2**20
"""Raw files of a run that are kept in memory once read; they take some ten times as much there."""


class Raws(Mapping[int, Raw]):
    """The raw data of a run's complete replicates, by replicate: read when asked for.

    A long run's samples do not fit into memory together, so they are not kept.
    """

    def __init__(self, run: Path, phases: Sequence[str], replicates: Sequence[Replicate]) -> None:
        self._run, self._phases = run, list(phases)
        self._folders = {r.replicate: r.folder for r in replicates if r.status == "complete"}
        files = (p for f in self._folders.values() for p in (run / f).rglob("*") if p.is_file())
        self._keeps = sum(p.stat().st_size for p in files) <= KEPT_BYTES
        self._kept: dict[int, Raw] = {}

    def __getitem__(self, replicate: int) -> Raw:
        if replicate in self._kept:
            return self._kept[replicate]
        raw = load_raw(self._run, self._folders[replicate], self._phases)
        if self._keeps:
            self._kept[replicate] = raw
        return raw

    def __contains__(self, replicate: object) -> bool:
        return replicate in self._folders

    def __iter__(self) -> Iterator[int]:
        return iter(self._folders)

    def __len__(self) -> int:
        return len(self._folders)


def load_raws(
    run: Path, plan: Plan, replicates: Sequence[Replicate]
) -> tuple[Raws, dict[int, list[dict[str, Any]]]]:
    """Return raw data and telemetry of the complete replicates, by replicate."""
    raws = Raws(run, [p.name for p in plan.phases], replicates)
    telemetry = {
        r.replicate: list(read_lines(run / r.folder / "telemetry.jsonl", TELEMETRY))
        for r in replicates
        if r.replicate in raws
    }
    return raws, telemetry


@dataclass
class Looked:
    """What is kept of replicates once their raw data were looked at, one after the other.

    `bare` is the raw data without requests and series.
    """

    replicates: list[Replicate] = field(default_factory=list)
    guards: list[GuardResult] = field(default_factory=list)
    bare: dict[int, Raw] = field(default_factory=dict)


def look(
    plan: Plan,
    measures: Sequence[Measure],
    replicates: Sequence[Replicate],
    raws: Mapping[int, Raw],
    requests: Requests,
    telemetry: Telemetry,
) -> Looked:
    """Read each replicate once: its readings, its guards."""
    found, prompts, same = Looked(), SamePrompts(plan.limits), []
    for r in replicates:
        if r.replicate not in raws:
            found.replicates.append(r)
            continue
        raw = raws[r.replicate]
        read = _with_readings(r, raw, measures)
        found.replicates.append(read)
        found.guards += _guards(plan, read, raw, requests, telemetry)
        same.append(prompts.check(r.replicate, raw))
        found.bare[r.replicate] = _bare(raw)
    found.guards += same
    return found


def _bare(raw: Raw) -> Raw:
    windows = {
        name: replace(window, samples=(), scrapes=(), legs={}, traces={})
        for name, window in raw.windows.items()
    }
    return replace(raw, windows=windows)


def conclude(
    plan: Plan,
    experiment: Experiment,
    replicates: Sequence[Replicate],
    raws: Mapping[int, Raw],
    requests: Requests,
    telemetry: Telemetry,
    unsupported: str | None = None,
) -> Analysis:
    """Compute everything from raw data; no input or output.

    `raws` and `telemetry` hold the complete replicates, by replicate; a replicate that is not in
    `raws` has no readings, and its pair does not count.
    """
    looked = look(plan, experiment.all_measures, replicates, raws, requests, telemetry)
    read, guards = tuple(looked.replicates), tuple(looked.guards)
    aside = spoiled_pairs(plan, read, guards)
    if len(_pairs_of(read)) - len(aside) < plan.pairs:
        aside = []  # the spare ones did not suffice, so every pair counts, the spoiled too
    counted = [r for r in read if r.pair not in aside]
    whole = [r for r in counted if r.replicate in raws]
    compared = compare_pairs(experiment.comparisons, RawPairs(whole, raws))
    guards = (*check_preconditions(plan.preconditions, whole, compared), *guards)
    unsupported = unsupported or unoffered(plan, whole)
    confounders = tuple(_confounders(plan, whole, looked.bare))
    pairs, missing = primary_pairs(plan, counted)
    effect = effect_of(plan.hypothesis, pairs)
    not_acted = tuple(
        check_acted(
            plan.acted, {(r.role, x.name, r.replicate): x for r in whole for x in r.readings}
        )
    )
    verdict = judge(
        plan.hypothesis,
        effect=effect,
        unsupported=unsupported,
        guards=[g for g in guards if g.replicate in {r.replicate for r in counted}],
        confounders=confounders,
        not_acted=not_acted,
        pairs_planned=len(_pairs_due(plan, counted)),
        quality=check_quality(plan.quality, compared),
        stopping=plan.stopping,
    )
    if plan.shared_device and verdict.word in ("supported", "not supported"):
        words = "a shared device, not a performance result"
        verdict = Verdict(word="inconclusive", reason=words)
    if not experiment.answers_judged and verdict.word == "supported":
        # the registered limits on the answers are a part of what would be supported
        verdict = Verdict(word="inconclusive", reason="quality not judged")
    notices = list(_notices(plan, counted, looked.bare, telemetry, missing))
    if aside:
        notices.append(notice("pairs_set_aside", f"{len(aside)}"))
    if not experiment.answers_judged:
        notices.append(notice("answers_not_judged", plan.model.id))
    return Analysis(
        replicates=read,
        set_aside=tuple(aside),
        guards=guards,
        confounders=confounders,
        not_acted=not_acted,
        comparisons=compared,
        effect=effect,
        verdict=verdict,
        notices=tuple(notices),
    )


OTHER_LOAD = ("foreign_cpu", "send_lag")
"""Guards that tell of the machine's other load, and nothing of what is measured."""


def spoiled_pairs(
    plan: Plan, replicates: Sequence[Replicate], guards: Sequence[GuardResult]
) -> list[int]:
    """Return the pairs that other load spoiled, where the plan holds spare ones for them.

    Which pairs these are depends on the machine alone, never on what came out.
    """
    if not plan.spare_pairs:
        return []
    pair = {r.replicate: r.pair for r in replicates}
    return sorted({pair[g.replicate] for g in guards if g.name in OTHER_LOAD and not g.ok})


def _pairs_of(replicates: Sequence[Replicate]) -> list[int]:
    return sorted({r.pair for r in replicates})


def refused(run: Path, experiment: Experiment, replicates: Sequence[Replicate]) -> str | None:
    """Return the engine's words in the log of a replicate that did not complete, or None.

    Only words that the experiment declares mean "cannot"; any other end of a server is a failure.
    """
    complete = {r.folder for r in replicates if r.status == "complete"}
    for log in sorted(run.glob("replicates/*/logs/*.log")):
        if log.parent.parent.relative_to(run).as_posix() not in complete:
            words = find_refusal(log.read_text("utf-8", errors="replace"), experiment.refusals)
            if words:
                return words
    return None


def answered(
    run: Path, plan: Plan, experiment: Experiment, replicates: Sequence[Replicate]
) -> bool:
    """Tell whether a run may end now, from its files: by its rule, or as nothing can come of it."""
    if not replicates:
        return False
    if plan.offered and _shows_unoffered(run, plan, experiment, replicates[-1:]):
        return True
    if len(replicates) % 2 or (plan.stopping is None and not plan.spare_pairs):
        return False
    if plan.stopping is None and len(_pairs_of(replicates)) < plan.pairs:
        return False  # before anything is read
    raws, telemetry = load_raws(run, plan, replicates)
    if plan.stopping is not None:
        return has_answer(plan, experiment, replicates, raws)
    requests = requests_of(run, plan)
    return is_enough(plan, experiment, replicates, raws, requests, telemetry)


def _shows_unoffered(
    run: Path, plan: Plan, experiment: Experiment, replicates: Sequence[Replicate]
) -> bool:
    raws, _ = load_raws(run, plan, replicates)
    read = _all_with_readings(replicates, raws, experiment.all_measures)
    return unoffered(plan, read) is not None


def unoffered(plan: Plan, replicates: Sequence[Replicate]) -> str | None:
    """Return what these replicates show that the platform does not offer, or None.

    What could not be read says nothing about the platform.
    """
    found = check_preconditions(plan.offered, replicates, ())
    return next((each.text for each in found if not each.ok and each.seen is not None), None)


def is_enough(
    plan: Plan,
    experiment: Experiment,
    replicates: Sequence[Replicate],
    raws: Mapping[int, Raw],
    requests: Requests,
    telemetry: Telemetry,
) -> bool:
    """Tell whether a run with spare pairs needs no further one after these whole pairs.

    It has as many unspoiled pairs as the plan wants, or cannot get them any more.
    """
    ran = len(_pairs_of(replicates))
    if ran < plan.pairs:
        return False
    primary = [m for m in experiment.all_measures if m.name == plan.hypothesis.measure]
    looked = look(plan, primary, replicates, raws, requests, telemetry)
    spoiled = len(spoiled_pairs(plan, looked.replicates, looked.guards))
    return ran - spoiled >= plan.pairs or spoiled > plan.spare_pairs


class RawPairs(Mapping[int, tuple[Raw, Raw]]):
    """The raw data of every complete pair, baseline and candidate, read when asked for."""

    def __init__(self, replicates: Sequence[Replicate], raws: Mapping[int, Raw]) -> None:
        by_role = {(r.pair, r.role): r.replicate for r in replicates}
        self._raws = raws
        self._pairs = {
            pair: (number, by_role[pair, "candidate"])
            for (pair, role), number in by_role.items()
            if role == "baseline" and (pair, "candidate") in by_role
        }

    def __getitem__(self, pair: int) -> tuple[Raw, Raw]:
        baseline, candidate = self._pairs[pair]
        return self._raws[baseline], self._raws[candidate]

    def __iter__(self) -> Iterator[int]:
        return iter(self._pairs)

    def __len__(self) -> int:
        return len(self._pairs)


def has_answer(
    plan: Plan,
    experiment: Experiment,
    replicates: Sequence[Replicate],
    raws: Mapping[int, Raw],
) -> bool:
    """Tell whether a run with a stopping rule may end after the replicates so far.

    False in the middle of a pair, between looks and without a rule; a pair without a value can
    be made up for by no further pair, so then it is True.
    """
    if plan.stopping is None or len(replicates) % 2:
        return False
    primary = [m for m in experiment.all_measures if m.name == plan.hypothesis.measure]
    read = _all_with_readings(replicates, raws, primary)
    pairs, missing = primary_pairs(plan, read)
    return bool(missing) or may_stop(plan.hypothesis, pairs, plan.stopping)


def primary_pairs(plan: Plan, replicates: Sequence[Replicate]) -> tuple[list[Pair], list[str]]:
    """Return the complete pairs of the primary measure, and why others are incomplete."""
    primary: dict[tuple[int, str], Reading] = {
        (r.pair, r.role): reading
        for r in replicates
        if (reading := _reading(r, plan.hypothesis.measure)) is not None
    }
    return find_pairs(primary, _pairs_due(plan, replicates), plan.hypothesis.kind)


def _pairs_due(plan: Plan, replicates: Sequence[Replicate]) -> Sequence[int]:
    """Return the pairs that there must be: those planned, or those begun where a rule decides."""
    begun = _pairs_of(replicates)
    if plan.stopping is not None or len(begun) >= plan.pairs:
        return begun
    return [*begun, *(p for p in range(plan.pairs) if p not in begun)][: plan.pairs]


def _reading(replicate: Replicate, measure: str) -> Reading | None:
    return next((x for x in replicate.readings if x.name == measure), None)


def _all_with_readings(
    replicates: Sequence[Replicate], raws: Mapping[int, Raw], measures: Sequence[Measure]
) -> list[Replicate]:
    return [
        _with_readings(r, raws[r.replicate], measures) if r.replicate in raws else r
        for r in replicates
    ]


def _with_readings(r: Replicate, raw: Raw, measures: Sequence[Measure]) -> Replicate:
    return r.model_copy(update={"readings": tuple(m.read(raw) for m in measures)})


def _guards(
    plan: Plan, r: Replicate, raw: Raw, requests: Requests, telemetry: Telemetry
) -> list[GuardResult]:
    return check_replicate(
        raw,
        replicate=r.replicate,
        requests=requests,
        primary_s=lag_scale_s(_reading(r, plan.hypothesis.measure), raw),
        telemetry=telemetry.get(r.replicate, ()),
        telemetry_file=f"{r.folder}/telemetry.jsonl",
        limits=plan.limits,
    )


def lag_scale_s(primary: Reading | None, raw: Raw) -> float | None:
    """Return the time that a late send is held against: the primary measure, if it is a time.

    A throughput or a count is made of whole requests: then it is their median duration.
    """
    if primary is not None and primary.unit == "s":
        return primary.value
    return median_span_s(raw.measured.samples)


def check_preconditions(
    preconditions: Sequence[Precondition],
    replicates: Sequence[Replicate],
    compared: Sequence[Compared],
) -> list[GuardResult]:
    """Check what must hold before any number counts; what is unknown does not hold."""
    found = []
    for each in preconditions:
        if isinstance(each.holds, Condition):
            asked = each.holds
            seen = [
                (r.replicate, _reading(r, asked.measure)) for r in replicates if r.role == asked.arm
            ]
        else:
            name = each.holds.comparison
            seen = [
                (_of_pair(replicates, one.pair), next(r for r in one.readings if r.name == name))
                for one in compared
            ]
        found += [_precondition(each, replicate, reading) for replicate, reading in seen]
    return found


def _of_pair(replicates: Sequence[Replicate], pair: int) -> int:
    return next(r.replicate for r in replicates if (r.pair, r.role) == (pair, "candidate"))


def _precondition(each: Precondition, replicate: int, reading: Reading | None) -> GuardResult:
    value = None if reading is None else reading.value
    why = f"{value:g}" if value is not None else (reading.reason if reading else "it was not read")
    ok = value is not None and each.holds.holds(value)
    text = f"{each.holds} was asked, and seen: {why} (replicate {replicate})"
    return GuardResult(
        name="precondition",
        replicate=replicate,
        ok=ok,
        seen=value,
        limit=each.holds.value,
        text=text if ok else f"{each.otherwise}: {text}",
        source=reading.sources[0] if reading and reading.sources else "",
    )


def _confounders(plan: Plan, replicates: Sequence[Replicate], raws: Mapping[int, Raw]) -> list[str]:
    """Compare what the engines resolved and what was seen around them, engine by engine.

    Engines are compared in the order in which their topologies name them; where an arm has fewer,
    its last one is compared with the others' rest.
    """
    engines = {a.role: plan.topology_of(a.role).engines for a in plan.arms}
    declared = (*plan.consequences, *_own_differences(plan, replicates))
    found = []
    for place in range(max(map(len, engines.values()))):
        leg: dict[str, str] = {
            role: names[min(place, len(names) - 1)] for role, names in engines.items()
        }
        resolved: dict[str, list[dict[str, Any]]] = {"baseline": [], "candidate": []}
        around = _surroundings(replicates, leg, others=place == 0)
        for r in replicates:
            raw = raws[r.replicate]
            info = raw.legs.get(leg[r.role], {}) if raw.legs else raw.server_info
            if not info:
                whose = f"of `{leg[r.role]}` " if raw.legs else ""
                found.append(
                    f"the resolved configuration {whose}of replicate {r.replicate} is unknown"
                )
            resolved[r.role].append({**comparable(flatten(info)), **around[r.replicate]})
        names = list(dict.fromkeys(leg.values()))
        where = f"{' / '.join(names)}: " if max(map(len, engines.values())) > 1 else ""
        found += [f"{where}{each}" for each in find_confounders(resolved, declared)]
    return found


NEVER_EQUAL = (
    "instance_id",
    "engine_id",
    "data_parallel_master_port",
    "_port",
    "run_id",
    "VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME",  # drawn at random by each server
)


def comparable(info: Mapping[str, Any]) -> dict[str, Any]:
    """Return the flat configuration without what is drawn anew at every start."""
    return {
        path.removeprefix("vllm_config."): value
        for path, value in info.items()
        if not path.startswith("system_env.") and not path.endswith(NEVER_EQUAL)
    }


SEEN_ELSEWHERE = ("vllm_config", "vllm_env")  # facts that /server_info tells path by path


def _surroundings(
    replicates: Sequence[Replicate], leg: Mapping[str, str], *, others: bool
) -> dict[int, dict[str, Any]]:
    """Return each replicate's facts that must agree, flat; what one of them lacks is left out.

    `leg` is the engine of each arm, by role; it goes by the baseline's name. With `others` the
    services that are no engines are told as well.
    """
    engines = {str(f.service) for r in replicates for f in r.facts if f.group == "vllm"}

    def told(r: Replicate) -> dict[str, Any]:
        return {
            f"facts.{leg['baseline'] if f.service == leg[r.role] else f.service}"
            f".{f.group}.{f.name}": f.value
            for f in r.facts
            if f.match == "must" and f.value is not None and f.name not in SEEN_ELSEWHERE
            if f.service == leg[r.role] or (others and str(f.service) not in engines)
        }

    each = {r.replicate: told(r) for r in replicates}
    known = set.intersection(*map(set, each.values())) if each else set()
    return {
        number: flatten_all({path: value for path, value in facts.items() if path in known})
        for number, facts in each.items()
    }


def flatten_all(values: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten each value below its own path."""
    return {p: leaf for path, value in values.items() for p, leaf in flatten(value, path).items()}


def _own_differences(plan: Plan, replicates: Sequence[Replicate]) -> list[str]:
    """Return the paths in which the arms must differ because the plan itself says so."""
    baseline, candidate = plan.arms
    ours, theirs = (_environments(arm) for arm in plan.arms)
    changed = sorted(n for n in {*ours, *theirs} if ours.get(n) != theirs.get(n))
    if len({plan.topology_of(a.role).devices_are_shared for a in plan.arms}) > 1:
        changed.append("CUDA_VISIBLE_DEVICES")  # how engines that see all devices choose theirs
    services = sorted({str(f.service) for r in replicates for f in r.facts})
    found = [f"vllm_env.{name}" for name in changed]
    found += [f"facts.{s}.vllm.environment.{name}" for s in services for name in changed]
    if baseline.image != candidate.image:
        inside = ("packages", "vllm", "container.layer_diff_ids", "container.layers_as_locked")
        found += [f"facts.{s}.{path}" for s in services for path in inside]
    return found


def _environments(arm: PlannedArm) -> dict[str, tuple[str, ...]]:
    """Return each variable's values over an arm's services."""
    found: dict[str, tuple[str, ...]] = {name: (value,) for name, value in arm.env.items()}
    for service in arm.services:
        for name, value in service.env.items():
            found[name] = (*found.get(name, ()), value)
    return found


def _notices(
    plan: Plan,
    replicates: Sequence[Replicate],
    raws: Mapping[int, Raw],
    telemetry: Telemetry,
    missing: Sequence[str],
) -> list[Notice]:
    found = [notice("pair_incomplete", reason) for reason in missing]
    if any(w.load.get("stamps") != "kernel" for raw in raws.values() for w in raw.windows.values()):
        found.append(notice("user_stamps", ""))
    nulls = sorted({x.name for r in replicates for x in r.readings if x.value is None})
    if nulls:
        found.append(notice("null_measures", ", ".join(nulls)))
    if plan.against_itself:
        found.append(notice("against_itself", ""))
    if plan.shared_device:
        found.append(notice("shared_device", ""))
    if plan.load_tool != "kit":
        found.append(notice("load_tool", TOOL_NAMES[plan.load_tool]))
    if plan.stopping is not None and (ran := len(_pairs_due(plan, replicates))) < plan.pairs:
        found.append(notice("stopped_early", str(ran)))
    shares = [share for each in telemetry.values() if (share := foreign_share(each)) is not None]
    if shares and max(shares) > plan.limits.foreign_cpu_share / 2:
        found.append(notice("busy_machine", f"{max(shares):.1%}"))
    limited = max((limited_share(each) for each in telemetry.values()), default=0.0)
    if limited > plan.limits.throttled_share:
        found.append(notice("power_limited", f"{limited:.1%}"))
    return [*found, *_of_sampling(raws)]


def _of_sampling(raws: Mapping[int, Raw]) -> Iterator[Notice]:
    """Yield what the readers of sampled stacks must know."""
    stacks = [w.stacks for raw in raws.values() for w in raw.windows.values() if w.stacks.engines]
    nothing = dict.fromkeys(s.problem for s in stacks if s.problem)
    if nothing:
        yield notice("nothing_sampled", "; ".join(each for each in nothing if each))
    behind = max((s.behind_s for s in stacks), default=0.0)
    if behind:
        yield notice("sampler_behind", f"{behind:.2f} s")
