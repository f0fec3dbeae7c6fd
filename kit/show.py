"""One run on one screen: what came out, of what, on what, and where everything is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kit import compare, store
from kit.compare_table import load
from kit.explain import find_explanation
from kit.export_llmd import fact_value
from kit.manifest import Manifest
from kit.report import number_text

PLACES = {
    "page": "report.en.html",
    "page, 中文": "report.zh.html",
    "manifest": "manifest.json",
    "samples": "replicates/*/measure/samples.jsonl",
    "metrics": "replicates/*/measure/metrics*.jsonl.gz",
    "server logs": "replicates/*/logs/",
}


def summarise(path: Path) -> dict[str, Any]:
    """Return a run's summary as JSON values, from its folder or its manifest alone.

    `changed_files` are raw files that are not as recorded; null where only a manifest was given.
    """
    return summary_of(load(path), path)


def summary_of(manifest: Manifest, path: Path) -> dict[str, Any]:
    """Return what `summarise` does, of a manifest that was read from there."""
    verdict, effect, failure = manifest.verdict, manifest.effect, manifest.failure
    found = find_explanation("verdict", verdict.word) if verdict else None
    return {
        "run": str(path),
        "run_id": manifest.run_id,
        "experiment": manifest.plan.experiment,
        "case": manifest.plan.case,
        "title": manifest.plan.title.en,
        "started_utc": manifest.started_utc,
        "finished_utc": manifest.finished_utc,
        "status": manifest.status,
        "failure": failure.message if failure else None,
        "verdict": verdict.model_dump(mode="json") if verdict else None,
        "next": found.next.en if found else None,
        "effect": effect.model_dump(mode="json") if effect else None,
        "arms": [_arm(manifest, role) for role in ("baseline", "candidate")],
        "images": [
            {"id": i.id, "identity": i.identity, "state": i.state, "how": i.how}
            for i in manifest.images
        ],
        "model": {"id": manifest.plan.model.id, "weights": manifest.plan.model.weights},
        "machine": {
            name: fact_value(manifest.facts, group, name)
            for group, name in (
                ("host", "cpu_model"),
                ("host", "cpu_cores"),
                ("host", "memory_total_bytes"),
                ("gpu", "device0_name"),
                ("gpu", "device_count"),
                ("gpu", "driver_version"),
            )
        },
        "warnings": [n.code for n in manifest.notices],
        "broken_guards": _broken(manifest),
        "changed_files": store.changed_files(path, manifest.files) if path.is_dir() else None,
        "where": _where(path) if path.is_dir() else {},
    }


def _arm(manifest: Manifest, role: str) -> dict[str, Any]:
    arm = next(a for a in manifest.plan.arms if a.role == role)
    measure = manifest.plan.hypothesis.measure
    readings = [x for r in manifest.replicates for x in r.readings if x.name == measure]
    return {
        "role": role,
        "label": arm.label.en,
        "measure": measure,
        "unit": readings[0].unit if readings else "",
        "median": compare.medians(manifest).get(measure, {}).get(role),
        "values": compare.levels(manifest, role),
    }


def _broken(manifest: Manifest) -> list[str]:
    """Return the guards that broke in a replicate that counts."""
    counted = {r.replicate for r in manifest.counted}
    return sorted({g.name for g in manifest.guards if not g.ok and g.replicate in counted})


def _where(run: Path) -> dict[str, str]:
    """Return the places that are there."""
    return {name: place for name, place in PLACES.items() if any(run.glob(place))}


def lines(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the summary as lines of a screen: what, value."""
    verdict = summary["verdict"]
    head = f"{verdict['word']}: {verdict['reason']}" if verdict else summary["status"]
    found = [
        ("run", f"{summary['experiment']}, {summary['case']}"),
        ("", f"{summary['run_id']}, started {summary['started_utc']}"),
        ("verdict", head),
    ]
    found += [("failure", summary["failure"])] if summary["failure"] else []
    found += [("effect", _effect(summary["effect"]))] if summary["effect"] else []
    found += [(arm["role"], _arm_text(arm)) for arm in summary["arms"]]
    found += [
        ("image", f"{i['id']}, {i['state']}, {i['identity'][:19]} ({i['how']})")
        for i in summary["images"]
    ]
    found += [
        ("model", f"{summary['model']['id']}, {summary['model']['weights']} weights"),
        ("machine", _machine(summary["machine"])),
        ("guards", _guards_text(summary)),
        ("warnings", ", ".join(summary["warnings"]) or "none"),
        ("", "`nox -s explain -- WORD` says what a verdict, guard or warning means"),
    ]
    if summary["changed_files"]:
        found.append(("STALE", f"{summary['changed_files'][0]}: no number above can be trusted"))
    found += [("where" if not n else "", text) for n, text in enumerate(_places(summary))]
    found += [("next", summary["next"])] if summary["next"] else []
    return [(name, "".join(c if c.isprintable() else " " for c in text)) for name, text in found]


def _guards_text(summary: dict[str, Any]) -> str:
    if summary["verdict"] is None:
        return "not judged: the run has no verdict" if summary["finished_utc"] else "not judged yet"
    return "broken: " + ", ".join(g) if (g := summary["broken_guards"]) else "all held"


def _effect(effect: dict[str, Any]) -> str:
    count = len(effect["values"])
    pairs = f"{count} pair" + "s" * (count != 1)
    if effect["ratio"] is None:
        return f"{effect['measure']}: no ratio, {pairs}"
    text = f"{effect['measure']}, candidate over baseline: {effect['ratio']:.3f}"
    if effect["low"] is not None:
        text += f" (95 % interval {effect['low']:.3f} – {effect['high']:.3f})"
    return f"{text}, {pairs}"


def _arm_text(arm: dict[str, Any]) -> str:
    if arm["median"] is None:
        return f"{arm['label']}: no value of {arm['measure']}"
    unit = "" if arm["unit"] == "1" else f" {arm['unit']}"
    text = f"{arm['label']}: {number_text(arm['median'])}{unit}"
    low, high = min(arm["values"]), max(arm["values"])
    return text if low == high else f"{text} ({number_text(low)} – {number_text(high)})"


def _machine(machine: dict[str, Any]) -> str:
    memory = machine["memory_total_bytes"]
    parts = [
        str(machine["cpu_model"] or "processor unknown"),
        f"{machine['cpu_cores']} cores" if machine["cpu_cores"] else "",
        f"{memory / 2**30:.1f} GiB" if memory else "",
    ]
    if machine["device0_name"]:
        parts.append(f"{machine['device_count'] or 1} x {machine['device0_name']}")
        parts.append(f"driver {machine['driver_version']}")
    return ", ".join(part for part in parts if part)


def _places(summary: dict[str, Any]) -> list[str]:
    folder = Path(summary["run"])
    return [f"{name}: {folder / place}" for name, place in summary["where"].items()]
