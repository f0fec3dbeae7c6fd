"""Recorded runs as tables: two side by side, or many below a folder."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kit import compare
from kit.errors import BadFile, NotFound
from kit.manifest import Manifest, load_manifest


@dataclass(frozen=True)
class Result:
    """A table for people and the same as data for scripts."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    data: Any


def load(path: Path) -> Manifest:
    """Read a manifest, or that of a run's folder."""
    return load_manifest(path / "manifest.json" if path.is_dir() else path)


def two(first: Path, second: Path) -> Result:
    """Compare two runs: every difference, the medians of both, and whether the result is the same.

    The judgement is that of `reproduce`, with no difference accepted.
    """
    return two_of(load(first), load(second))


def two_of(a: Manifest, b: Manifest) -> Result:
    """Compare two runs by their manifests; see `two`."""
    machine = compare.differences(compare.machine_of(a.facts), compare.machine_of(b.facts))
    found = [
        *compare.plan_differences(a.plan, b.plan),
        *compare.differences(compare.inside_of(a), compare.inside_of(b)),
    ]
    outcome = compare.judge_again(a, b, found=found)
    medians = [compare.medians(m) for m in (a, b)]
    rows = [["outcome", outcome.word, outcome.reason, ""]]
    rows += [["hardware", outcome.distance, "", ""]]
    rows += [[f"verdict {n}", *_verdict(m), ""] for n, m in (("1", a), ("2", b))]
    for name in sorted({*medians[0], *medians[1]}):
        for role in ("baseline", "candidate"):
            values = [m.get(name, {}).get(role) for m in medians]
            rows.append([f"{role} {name}", *(_number(v) for v in values), ""])
    rows += [
        [d.where, compare.short(d.first), compare.short(d.second), d.match]
        for d in [*found, *machine]
    ]
    data = {
        "outcome": outcome.model_dump(mode="json"),
        "medians": medians,
        "differences": [d.model_dump(mode="json") for d in [*found, *machine]],
        "environment_sha256": [compare.environment_sha256(m) for m in (a, b)],
    }
    return Result("comparison", ["what", "first", "second", "match"], rows, data)


def many(folder: Path, experiment: str | None, image: str | None, verdict: str | None) -> Result:
    """List the runs below a folder; a manifest that cannot be read is named in its row."""
    if not folder.is_dir():
        raise NotFound(f"{folder} is no folder", hint="give two runs, or a folder of runs")
    rows = []
    for path, manifest in manifests_below(folder):
        if isinstance(manifest, BadFile):
            rows.append({"run": str(path.parent), "verdict": manifest.message})
            continue
        row = _row(path, manifest)
        wanted = ((experiment, row["experiment"]), (verdict, row["verdict"]))
        if all(asked in (None, seen) for asked, seen in wanted) and (
            image is None or image in manifest.plan.images
        ):
            rows.append(row)
    columns = ["run", "experiment", "case", "verdict", "effect", "pairs", "environment"]
    cells = [[str(row.get(column, "")) for column in columns] for row in rows]
    return Result(f"{len(rows)} runs", columns, cells, rows)


def manifests_below(folder: Path) -> Iterator[tuple[Path, Manifest | BadFile]]:
    """Yield every manifest below a folder with its path, or why it cannot be read."""
    for path in sorted(folder.rglob("*.json")):
        if path.name != "manifest.json" and path.parent.parent != folder:
            continue  # a reference lies two levels down under its case's name
        try:
            yield path, load_manifest(path)
        except BadFile as error:
            if path.name == "manifest.json":
                yield path, error


def _row(path: Path, manifest: Manifest) -> dict[str, str]:
    effect = manifest.effect
    run = path.parent.name if path.name == "manifest.json" else path.name
    return {
        "run": run,
        "experiment": manifest.plan.experiment,
        "case": manifest.plan.case,
        "verdict": manifest.verdict.word if manifest.verdict else manifest.status,
        "effect": _number(effect.ratio if effect else None),
        "pairs": str(len(effect.values) if effect else 0),
        "environment": compare.environment_sha256(manifest)[:12],
    }


def _verdict(manifest: Manifest) -> tuple[str, str]:
    verdict = manifest.verdict
    return (verdict.word, verdict.reason) if verdict else (manifest.status, "")


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}"
