"""One page over all runs below a folder, and pages of two runs side by side; all work from disk.

Numbers are those of the manifests; a run whose raw files have changed is named and shows none.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any
from urllib.parse import quote

from markupsafe import Markup

from kit import compare_table, store
from kit.compare_table import Result, manifests_below
from kit.errors import BadFile, NotFound
from kit.explain import find_explanation
from kit.export_llmd import fact_value
from kit.manifest import Manifest
from kit.paths import TEMPLATES
from kit.report import fill
from kit.value import load_json, one_line

COMPARED = 6  # of each experiment the newest so many are compared, every two of them
FILTERS = ("experiment", "image", "hardware", "verdict")


@dataclass(frozen=True)
class Row:
    """One run of the index. `manifest` is None where it cannot be read or is stale."""

    path: Path
    name: str
    cells: dict[str, str]
    manifest: Manifest | None


def write_index(folder: Path) -> Path:
    """Write index.html and the comparisons it leads to; return it.

    Raises `NotFound` where no run is below the folder.
    """
    rows = sorted(_rows(folder), key=lambda r: r.cells.get("started", ""), reverse=True)
    if not rows:
        raise NotFound(f"no run is below {folder}", hint="give a run's folder, or one of many")
    pairs = list(_pairs(rows))
    for one, other, name in pairs:
        assert one.manifest is not None
        assert other.manifest is not None
        result = compare_table.two_of(one.manifest, other.manifest)
        write_comparison(folder / name, one.path, other.path, result)
    script = (TEMPLATES / "index.js").read_text("utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    values = {
        "rows": [_shown(row, folder) for row in rows],
        "folder": folder.resolve().name,
        "count": str(len(rows)),
        "choices": {key: _choices(rows, key) for key in FILTERS},
        "pairs": [{"first": a.name, "second": b.name, "page": quote(n)} for a, b, n in pairs],
        "script": Markup(script),  # noqa: S704 - the kit's own file
        "script_sha256": digest,
    }
    path = folder / "index.html"
    store.write_text(path, fill("index.html.j2", values, "en", html=True))
    return path


def write_comparison(page: Path, first: Path, second: Path, result: Result) -> None:
    """Write two runs side by side, as `compare` has them, to a page."""
    word = str(result.data["outcome"]["word"])
    values = {
        "runs": [_link(path, page.parent) for path in (first, second)],
        "rows": result.rows,
        "columns": result.columns,
        "outcome": word,
        "reason": str(result.data["outcome"]["reason"]),
        "about": find_explanation("outcome", word),
    }
    store.write_text(page, fill("compare.html.j2", values, "en", html=True))


def _rows(folder: Path) -> Iterator[Row]:
    for path, manifest in manifests_below(folder):
        if path.name != "manifest.json":
            continue
        run = path.parent
        name = run.relative_to(folder).as_posix()
        if isinstance(manifest, BadFile):
            yield Row(run, name, {"verdict": "unreadable", "reason": manifest.message}, None)
        elif wrong := store.changed_files(run, manifest.files):
            cells = {**_cells(manifest), "verdict": "stale", "reason": wrong[0]}
            yield Row(run, name, {**cells, "effect": "", "pairs": ""}, None)
        else:
            cells = _cells(manifest)
            node = node_of(run)
            if node:
                cells["hardware"] += f" ({node})"
            yield Row(run, name, cells, manifest)


def _cells(manifest: Manifest) -> dict[str, str]:
    effect, verdict = manifest.effect, manifest.verdict
    interval = ""
    if effect and effect.ratio is not None:
        interval = f"{effect.ratio:.3f}"
        if effect.low is not None and effect.high is not None:
            interval += f" ({effect.low:.3f} – {effect.high:.3f})"
    return {
        "started": manifest.started_utc[:19].replace("T", " "),
        "experiment": manifest.plan.experiment,
        "image": " ".join(dict.fromkeys(manifest.plan.images)),
        "hardware": _hardware(manifest),
        "verdict": verdict.word if verdict else manifest.status,
        "reason": verdict.reason if verdict else "",
        "effect": interval,
        "pairs": str(len(effect.values)) if effect else "0",
    }


def node_of(run: Path) -> str:
    """Return the node that a fleet's run was on, from the record beside it; empty elsewhere."""
    record = run.parent / "fleet.json"
    if not record.is_file():
        return ""
    try:
        return one_line(str(load_json(record).get("node", "")))
    except BadFile:
        return ""


def _hardware(manifest: Manifest) -> str:
    """Return the accelerator's name, else the processor's."""
    names = [
        fact_value(manifest.facts, group, name)
        for group, name in (("gpu", "device0_name"), ("host", "cpu_model"))
    ]
    return str(next((name for name in names if name), "unknown"))


def _choices(rows: Sequence[Row], key: str) -> list[str]:
    """Return what a column can be filtered by; a comparison of versions has two images."""
    values = {row.cells.get(key, "") for row in rows}
    if key == "image":
        values = {image for value in values for image in value.split()}
    return sorted(values - {""})


def _pairs(rows: Sequence[Row]) -> Iterator[tuple[Row, Row, str]]:
    """Yield the newest runs of each experiment two by two, the older one first, with a page."""
    known = [row for row in rows if row.manifest is not None and row.manifest.verdict is not None]
    for experiment in dict.fromkeys(row.cells["experiment"] for row in known):
        newest = [row for row in known if row.cells["experiment"] == experiment][:COMPARED]
        for newer, older in combinations(newest, 2):
            names = [_file_name(each.manifest.run_id) for each in (older, newer) if each.manifest]
            yield older, newer, f"compare/{'--'.join(names)}.html"


def _file_name(run_id: str) -> str:
    """Return a run's id as part of a file's name; one of a strange form by its hash."""
    if re.fullmatch(r"[A-Za-z0-9_-]{1,64}", run_id):
        return run_id
    return hashlib.sha256(run_id.encode()).hexdigest()[:16]


def _shown(row: Row, folder: Path) -> dict[str, Any]:
    reports = [
        {"text": text, "href": f"{quote(row.name)}/{name}", "language": language}
        for language, text in (("en", "English"), ("zh", "中文"))
        for name in (f"report.{language}.html", f"report.{language}.md")
        if (row.path / name).is_file()
    ]
    reports = list({each["language"]: each for each in reversed(reports)}.values())[::-1]
    empty = dict.fromkeys(("started", "experiment", "image", "hardware", "effect", "pairs"), "")
    about = {"name": row.name, "reports": reports, "comparable": row.manifest is not None}
    return {**empty, **row.cells, **about}


def _link(run: Path, place: Path) -> dict[str, str]:
    """Return a run's name and the way to its page from a folder, where there is one."""
    page = run / "report.en.html"
    href = ""
    if page.is_file():
        href = quote(Path(os.path.relpath(page.resolve(), place.resolve())).as_posix())
    return {"name": run.name, "href": href}
