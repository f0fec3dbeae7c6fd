"""Keeps the tables of README.md equal to the code they describe; puts tables into documents."""

from __future__ import annotations

import re
from pathlib import Path

from kit.errors import KitError, all_errors
from kit.experiment import experiment_docs
from kit.manifest import load_manifest
from kit.paths import MANIFESTS, ROOT
from kit.report import number_text
from kit.show import summary_of
from kit.store import write_text


def readme_tables() -> dict[str, str]:
    """Return the generated tables by the name that README's markers give them."""
    experiments = [f"| `{name}` | {doc} |" for name, doc in experiment_docs().items()]
    errors = [
        f"| {cls.exit_code} | `{cls.__name__}` | {(cls.__doc__ or '').splitlines()[0]} |"
        for cls in all_errors()
        if cls is not KitError
    ]
    return {
        "experiments": "\n".join(["| Session | Question |", "|---|---|", *experiments]),
        "errors": "\n".join(["| Code | Error | Meaning |", "|---|---|---|", *errors]),
        "results": results_table(),
    }


def results_table() -> str:
    """Return what the reference manifests measured, a row each; nothing that no manifest has."""
    head = "| Experiment | Where | Measure | Baseline | Candidate | Pairs | Verdict |"
    paths = sorted(MANIFESTS.glob("*/*.json"))
    return "\n".join([head, "|---|---|---|---|---|---|---|", *map(_result, paths)])


def _result(path: Path) -> str:
    manifest = load_manifest(path)
    told = summary_of(manifest, path)
    machine, (baseline, candidate) = told["machine"], told["arms"]
    processor = f"{machine['cpu_cores']} CPU cores"
    where = f"{machine['device0_name'] or processor}, {told['model']['id']}"
    plan = manifest.plan
    between = [arm.image.id for arm in plan.arms] if len(set(plan.images)) > 1 else []
    case = ", ".join(filter(None, [plan.variant, " → ".join(between)]))
    name = plan.experiment + (f" ({case})" if case else "")
    numbers = [
        f"{'none' if arm['median'] is None else number_text(arm['median'])}{_unit(arm['unit'])}"
        for arm in (baseline, candidate)
    ]
    pairs = len(manifest.effect.values) if manifest.effect else 0
    verdict = f"{told['verdict']['word']}: {told['verdict']['reason']}"
    link = f"[{name}](manifests/{path.parent.name}/{path.name})"
    cells = (link, where, baseline["measure"], *numbers, str(pairs), verdict)
    return f"| {' | '.join(cells)} |"


def _unit(unit: str) -> str:
    return "" if unit == "1" else f" {unit}"


def with_tables(text: str) -> str:
    """Return README's text with every generated table put between its markers."""
    for name, table in readme_tables().items():
        text = with_table(text, name, table)
    return text


def with_table(text: str, name: str, table: str) -> str:
    """Return a document's text with a table put between its markers, if it has such."""
    pattern = rf"(<!-- {name}: begin[^\n]*-->\n).*?(<!-- {name}: end -->)"
    found = re.search(pattern, text, flags=re.DOTALL)
    if not found:
        return text
    return f"{text[: found.start()]}{found[1]}{table}\n{found[2]}{text[found.end() :]}"


def write_readme() -> None:
    """Write README.md with its tables made anew."""
    path = ROOT / "README.md"
    write_text(path, with_tables(path.read_text("utf-8")))
