"""A run as llm-d Benchmark Reports, schema 0.2: one report for each replicate.

The schema wants a mean wherever it has a statistic. Where this run has a mean (a rate over the
window, or lengths that are all the same) it is given there; every reading, quantiles and counters
too, stands under `results.observability`, which the schema leaves open.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kit.experiment import MEASURED
from kit.fact import Fact
from kit.manifest import Manifest, Replicate
from kit.plan import PlannedArm, PlannedPhase, canonical_sha256

VERSION = "0.2"
_STATISTICS = {  # reading -> where its mean belongs, in which unit
    "output_tok_per_s": ("throughput", "output_token_rate", "tokens/s"),
    "tpot_mean_s": ("latency", "time_per_output_token", "s/token"),
}


def llm_d_reports(manifest: Manifest) -> dict[str, dict[str, Any]]:
    """Return the reports of a run's complete replicates, by the name of their folder."""
    return {
        replicate.folder.rpartition("/")[2]: _report(manifest, replicate)
        for replicate in manifest.replicates
        if replicate.status == "complete"
    }


def _report(manifest: Manifest, replicate: Replicate) -> dict[str, Any]:
    plan, arm = manifest.plan, manifest.plan.arm(replicate.role)
    return {
        "version": VERSION,
        "run": {
            "uid": f"{manifest.run_id}-{replicate.replicate}",
            "eid": manifest.run_id,
            "time": {"start": replicate.started_utc, "duration": f"PT{replicate.wall_s}S"},
            "description": f"{plan.title.en}: {arm.label.en}",
            "keywords": [plan.experiment, replicate.role, arm.name],
        },
        "scenario": _without_none(
            {"stack": [_engine(manifest, replicate, arm)], "load": _load(manifest, replicate)}
        ),
        "results": _results(manifest, replicate),
    }


def _engine(manifest: Manifest, replicate: Replicate, arm: PlannedArm) -> dict[str, Any]:
    """Return the server as a component; `generic` without an accelerator, as the schema has it."""
    version = fact_value(replicate.facts, "vllm", "version") or arm.image.id
    standard: dict[str, Any] = {"tool": manifest.plan.engine, "tool_version": version}
    name = fact_value(replicate.facts, "gpu", "device0_name")
    if name is None:
        standard |= {"kind": "generic", "model": {"name": manifest.plan.model.id}}
    else:
        standard |= {
            "kind": "inference_engine",
            "role": "replica",
            "replicas": 1,
            "model": {"name": manifest.plan.model.id},
            "accelerator": {
                "model": name,
                "count": fact_value(replicate.facts, "gpu", "device_count"),
                "parallelism": {"tp": int(flags_of(arm.args).get("--tensor-parallel-size") or 1)},
            },
        }
    return {
        "metadata": {
            "label": "server",
            "cfg_id": canonical_sha256(arm.model_dump(mode="json")),
            "description": f"image {arm.image.id}, identity {arm.image.identity}",
        },
        "standardized": standard,
        "native": {"args": flags_of(arm.args), "envars": dict(arm.env)},
    }


def _load(manifest: Manifest, replicate: Replicate) -> dict[str, Any] | None:
    """Return the measured window's load; None where the prompts' lengths were not seen."""
    phase = _phase(manifest)
    low, high = (_reading(replicate, f"input_tokens_{end}") for end in ("min", "max"))
    if phase is None or low is None or high is None:
        return None
    asked = phase.output_tokens
    return {
        "metadata": {
            "cfg_id": phase.requests_sha256,
            "description": "input_seq_len.value is the longest prompt; cfg_id is the sha256 of "
            f"workload/{phase.name}.jsonl",
        },
        "standardized": {
            "tool": "vllm-kit",
            "tool_version": manifest.kit.version,
            "source": "unknown",
            "input_seq_len": _length(int(low), int(high)),
            "output_seq_len": _length(min(asked), max(asked)),
            "concurrency": phase.concurrency,
        },
        "native": {"config": phase.model_dump(mode="json")},
    }


def _results(manifest: Manifest, replicate: Replicate) -> dict[str, Any]:
    aggregate: dict[str, Any] = {"requests": _requests(manifest, replicate)}
    for name, (group, key, units) in _STATISTICS.items():
        value = _reading(replicate, name)
        if value is not None:
            aggregate.setdefault(group, {})[key] = {"units": units, "mean": value}
    observed: dict[str, Any] = {
        "readings": [r.model_dump(mode="json") for r in replicate.readings],
    }
    ratio = _reading(replicate, "prefix_hit_ratio")
    if ratio is not None:
        hit_rate = {"cache_hit_rate": {"units": "fraction", "mean": ratio}}
        observed["components"] = [{"component_label": "server", "aggregate": hit_rate}]
    return {
        "request_performance": {"aggregate": _without_none(aggregate)},
        "observability": observed,
    }


def _requests(manifest: Manifest, replicate: Replicate) -> dict[str, Any] | None:
    phase = _phase(manifest)
    if phase is None:
        return None
    found: dict[str, Any] = {"total": phase.requests}
    window = f"{replicate.folder}/{phase.name}/"
    for guard in manifest.guards:
        is_here = guard.name == "failed_requests" and guard.source.startswith(window)
        if is_here and guard.seen is not None:
            found["failures"] = int(guard.seen)
    for key in ("input", "output"):
        low, high = (_reading(replicate, f"{key}_tokens_{end}") for end in ("min", "max"))
        if low is not None and low == high:  # only then is the mean known
            found[f"{key}_length"] = {"units": "count", "mean": low, "min": low, "max": high}
    return found


def _phase(manifest: Manifest) -> PlannedPhase | None:
    return next((p for p in manifest.plan.phases if p.name == MEASURED), None)


def _reading(replicate: Replicate, name: str) -> float | None:
    return next((r.value for r in replicate.readings if r.name == name), None)


def _length(low: int, high: int) -> dict[str, Any]:
    if low == high:
        return {"distribution": "fixed", "value": low}
    return {"distribution": "other", "value": high, "min": low, "max": high}


def fact_value(facts: Sequence[Fact], group: str, name: str) -> Any:
    """Return a fact's value, the server's before any other service's; None without one."""
    found = [f for f in facts if (f.group, f.name) == (group, name) and f.value is not None]
    found.sort(key=lambda f: f.service not in (None, "server"))
    return found[0].value if found else None


def flags_of(args: Sequence[str]) -> dict[str, str | None]:
    """Return a command line's flags with their values; None for a flag without one."""
    flags: dict[str, str | None] = {}
    for word, after in zip(args, [*args[1:], "--"], strict=False):
        if word.startswith("--"):
            flags[word] = None if after.startswith("--") else after
    return flags


def _without_none(fields: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if value is not None}
