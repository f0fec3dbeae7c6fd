"""From a run's raw files to its measures, guards, effect and verdict. Pure but for reading.

The same function serves the end of a run and a later look at its folder, so both give the same.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kit.errors import BadFile
from kit.experiment import Experiment
from kit.guard import GuardResult, check_replicate, foreign_share
from kit.manifest import Replicate
from kit.measure import Raw, Reading, load_raw
from kit.notice import Notice, notice
from kit.plan import Plan
from kit.verdict import (
    Effect,
    Verdict,
    check_acted,
    effect_of,
    find_confounders,
    flatten,
    judge,
    pair_logs,
)


@dataclass(frozen=True)
class Analysis:
    """What the raw files say; `replicates` now carry their readings."""

    replicates: tuple[Replicate, ...]
    guards: tuple[GuardResult, ...]
    confounders: tuple[str, ...]
    not_acted: tuple[str, ...]
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
    """Compute everything from the raw files of the complete replicates."""
    whole = [r for r in replicates if r.status == "complete"]
    phases = [p.name for p in plan.phases]
    raws = {r.replicate: load_raw(run, r.folder, phases) for r in whole}
    requests = {p: _json_lines(run / "workload" / f"{p}.jsonl") for p in phases}
    read = tuple(_with_readings(r, raws, experiment) for r in replicates)
    guards = tuple(_guards(run, plan, raws, requests, read))
    confounders = tuple(find_confounders(_resolved(whole, raws), plan.consequences))
    readings = _readings(read)
    primary = _readings_of(readings, plan.hypothesis.measure)
    logs, missing = pair_logs(primary, plan.pairs)
    effect = effect_of(plan.hypothesis, logs)
    not_acted = tuple(
        check_acted(plan.acted, {(r.role, m, r.replicate): v for r, m, v in readings})
    )
    verdict = judge(
        plan.hypothesis,
        effect=effect,
        unsupported=unsupported,
        guards=guards,
        confounders=confounders,
        not_acted=not_acted,
        pairs_planned=plan.pairs,
    )
    notices = tuple(_notices(run, plan, raws, read, missing))
    return Analysis(read, guards, confounders, not_acted, effect, verdict, notices)


def _with_readings(r: Replicate, raws: Mapping[int, Raw], experiment: Experiment) -> Replicate:
    if r.replicate not in raws:
        return r
    raw = raws[r.replicate]
    return r.model_copy(update={"readings": tuple(m.read(raw) for m in experiment.all_measures)})


def _readings(replicates: Sequence[Replicate]) -> list[tuple[Replicate, str, Reading]]:
    return [(r, reading.name, reading) for r in replicates for reading in r.readings]


def _readings_of(
    readings: Sequence[tuple[Replicate, str, Reading]], measure: str
) -> dict[tuple[int, str], Reading]:
    return {(r.pair, r.role): reading for r, name, reading in readings if name == measure}


def _guards(
    run: Path,
    plan: Plan,
    raws: Mapping[int, Raw],
    requests: Mapping[str, list[dict[str, Any]]],
    replicates: Sequence[Replicate],
) -> list[GuardResult]:
    found = []
    for r in replicates:
        if r.replicate not in raws:
            continue
        primary = next((x for x in r.readings if x.name == plan.hypothesis.measure), None)
        telemetry = f"{r.folder}/telemetry.jsonl"
        for result in check_replicate(
            raws[r.replicate],
            replicate=r.replicate,
            requests=requests,
            primary_s=primary.value if primary and primary.unit == "s" else None,
            telemetry=_json_lines(run / telemetry),
            limits=plan.limits,
        ):
            source = telemetry if result.source == "telemetry.jsonl" else result.source
            found.append(result.model_copy(update={"source": source}))
    return found


def _resolved(
    replicates: Sequence[Replicate], raws: Mapping[int, Raw]
) -> dict[str, list[dict[str, Any]]]:
    """Return each arm's resolved configuration and environment, as the engines told it."""
    found: dict[str, list[dict[str, Any]]] = {"baseline": [], "candidate": []}
    for r in replicates:
        info = flatten(dict(raws[r.replicate].server_info))
        found[r.role].append(comparable(info))
    return found


NEVER_EQUAL = ("instance_id", "engine_id", "data_parallel_master_port", "_port", "run_id")


def comparable(info: Mapping[str, Any]) -> dict[str, Any]:
    """Return the flat configuration without what is drawn anew at every start."""
    return {
        path.removeprefix("vllm_config."): value
        for path, value in info.items()
        if not path.startswith("system_env.") and not path.endswith(NEVER_EQUAL)
    }


def _notices(
    run: Path,
    plan: Plan,
    raws: Mapping[int, Raw],
    replicates: Sequence[Replicate],
    missing: Sequence[str],
) -> list[Notice]:
    found = []
    for reason in missing:
        found.append(notice("pair_incomplete", reason))
    if any(w.load.get("stamps") != "kernel" for raw in raws.values() for w in raw.windows.values()):
        found.append(notice("user_stamps", ""))
    nulls = sorted({x.name for r in replicates for x in r.readings if x.value is None})
    if nulls:
        found.append(notice("null_measures", ", ".join(nulls)))
    if plan.against_itself:
        found.append(notice("against_itself", ""))
    shares = [
        share
        for r in replicates
        if r.replicate in raws
        and (share := foreign_share(_json_lines(run / r.folder / "telemetry.jsonl"))) is not None
    ]
    if shares and max(shares) > plan.limits.foreign_cpu_share / 2:
        found.append(notice("busy_machine", f"{max(shares):.1%}"))
    return found


def _json_lines(path: Path) -> list[dict[str, Any]]:
    try:
        return [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise BadFile(f"{path.name} in {path.parent.name}: {error}") from None
