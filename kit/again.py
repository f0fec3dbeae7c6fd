"""Computes a finished run's numbers again from its raw files alone, without an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kit.analyse import Analysis, analyse
from kit.experiment import against_itself, apply_variant, find_experiment
from kit.manifest import Manifest, load_manifest


def analyse_again(run: Path) -> dict[str, Any]:
    """Return the recomputed parts of the manifest and whether they equal the recorded ones.

    Reads only the run's folder; raises `BadFile` or `NotFound` naming what is missing.
    """
    manifest = load_manifest(run / "manifest.json")
    plan = manifest.plan
    experiment = apply_variant(find_experiment(plan.experiment), plan.experiment, plan.variant)
    if plan.against_itself:
        experiment = against_itself(experiment)
    bare = [r.model_copy(update={"readings": ()}) for r in manifest.replicates]
    parts = _parts(analyse(run, plan, experiment, bare))
    return {**parts, "equal": parts == _recorded(manifest)}


def _parts(found: Analysis) -> dict[str, Any]:
    return {
        "readings": [[x.model_dump(mode="json") for x in r.readings] for r in found.replicates],
        "guards": [g.model_dump(mode="json") for g in found.guards],
        "confounders": list(found.confounders),
        "not_acted": list(found.not_acted),
        "effect": found.effect.model_dump(mode="json"),
        "verdict": found.verdict.model_dump(mode="json"),
    }


def _recorded(manifest: Manifest) -> dict[str, Any]:
    return {
        "readings": [[x.model_dump(mode="json") for x in r.readings] for r in manifest.replicates],
        "guards": [g.model_dump(mode="json") for g in manifest.guards],
        "confounders": list(manifest.confounders),
        "not_acted": list(manifest.not_acted),
        "effect": manifest.effect.model_dump(mode="json") if manifest.effect else None,
        "verdict": manifest.verdict.model_dump(mode="json") if manifest.verdict else None,
    }
