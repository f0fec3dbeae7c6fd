"""Computes a finished run's numbers again from its raw files alone, without an engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kit import store
from kit.analyse import Analysis, analyse, refused
from kit.errors import BadFile, StaleNumber
from kit.experiment import (
    Experiment,
    against_itself,
    apply_variant,
    find_experiment,
    without_answers,
)
from kit.manifest import Manifest, load_manifest
from kit.plan import Plan


def analyse_again(run: Path) -> dict[str, Any]:
    """Return the recomputed parts of the manifest and whether they equal the recorded ones.

    `equal` compares the bytes of both as JSON, `differs` names the parts that are not equal;
    `changed_files` are the files that are not as the manifest says. Reads only the run's folder;
    raises `BadFile` or `NotFound` naming what is missing, and `BadFile` when the plan is not the
    one that was hashed before the run.
    """
    manifest = load_manifest(run / "manifest.json")
    if manifest.plan.sha256 != manifest.plan_sha256:
        raise BadFile(
            "manifest.json: plan: not the plan that was hashed before the run",
            hint="its hypothesis, limits or order were changed afterwards",
        )
    plan = manifest.plan
    experiment = experiment_of(plan)
    bare = [r.model_copy(update={"readings": ()}) for r in manifest.replicates]
    unsupported = refused(run, experiment, bare)
    parts = _parts(analyse(run, plan, experiment, bare, unsupported=unsupported))
    recorded = _parts(manifest)
    return {
        **parts,
        "equal": _bytes(parts) == _bytes(recorded),
        "differs": [name for name in parts if _bytes(parts[name]) != _bytes(recorded[name])],
        "changed_files": store.changed_files(run, manifest.files),
    }


def experiment_of(plan: Plan) -> Experiment:
    """Return the experiment that a plan was made from, as this kit knows it.

    Raises `UnknownName` where it has no such experiment or variant. What the plan itself holds
    (hypothesis, limits, arms) is taken from the plan; measures and refusals come from here.
    """
    experiment = apply_variant(find_experiment(plan.experiment), plan.experiment, plan.variant)
    if plan.model.weights == "dummy":
        experiment = without_answers(experiment)
    return against_itself(experiment) if plan.against_itself else experiment


def check_numbers(run: Path) -> None:
    """Raise `StaleNumber` unless the manifest's numbers are what its raw files give."""
    result = analyse_again(run)
    if result["changed_files"]:
        raise StaleNumber(
            f"the raw files are not those of the manifest: {result['changed_files'][0]}",
            hint="`nox -s analyse -- RUNDIR` computes the numbers from the files as they are",
            detail="\n".join(result["changed_files"]),
        )
    if not result["equal"]:
        raise StaleNumber(
            "the numbers in manifest.json are not what the raw files give",
            hint="`nox -s analyse -- RUNDIR --json` shows what they give",
        )


def _bytes(parts: object) -> bytes:
    return json.dumps(parts, ensure_ascii=False, sort_keys=True).encode()


def _parts(found: Analysis | Manifest) -> dict[str, Any]:
    """Return what both an analysis and a manifest hold of a run's numbers, as JSON values."""
    return {
        "readings": [[x.model_dump(mode="json") for x in r.readings] for r in found.replicates],
        "set_aside": list(found.set_aside),
        "guards": [g.model_dump(mode="json") for g in found.guards],
        "confounders": list(found.confounders),
        "not_acted": list(found.not_acted),
        "comparisons": [c.model_dump(mode="json") for c in found.comparisons],
        "effect": found.effect.model_dump(mode="json") if found.effect else None,
        "verdict": found.verdict.model_dump(mode="json") if found.verdict else None,
    }
