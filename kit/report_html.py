"""The report as one page: self-contained, without a script, with the numbers of the Markdown one.

A page names no address and its policy lets nothing be loaded or run; all text is escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any
from urllib.parse import quote

from markupsafe import Markup

from kit.compare import short
from kit.explain import find_explanation
from kit.guard import GuardResult
from kit.inline_svg import in_language
from kit.manifest import Manifest
from kit.report import LANGUAGES, Notes, fill, number_text, report_words, values_of
from kit.report_plots import Figure, draw_figures

NOTES = "notes.md"
NOTES_CHARACTERS = 100_000
STATES = ("verified", "declared", "failed")


def render_pages(run: Path, manifest: Manifest) -> dict[str, str]:
    """Return the page in each language; needs a manifest with a verdict and its raw files."""
    words = report_words()
    drawn = {key: both["en"] for key, both in words.items()}
    figures = draw_figures(run, manifest, drawn)
    note = _author_note(run)
    return {
        language: fill(
            "report.html.j2",
            _values(manifest, language, _shown(figures, drawn, words, language), note),
            language,
            html=True,
        )
        for language in LANGUAGES
    }


def _shown(
    figures: Sequence[Figure],
    drawn: Mapping[str, str],
    words: Mapping[str, Mapping[str, str]],
    language: str,
) -> list[dict[str, Any]]:
    shown = {key: both[language] for key, both in words.items()}
    return [
        {
            "name": each.name,
            "svg": Markup(in_language(each.svg, drawn, shown)),  # noqa: S704 - drawn here
            "files": each.sources,
        }
        for each in figures
    ]


def _values(
    manifest: Manifest, language: str, figures: list[dict[str, Any]], note: str | None
) -> dict[str, Any]:
    values = values_of(manifest, language)
    notes: Notes = values["notes"]
    assert manifest.verdict is not None
    measure = manifest.plan.hypothesis.measure
    primary = next((row for row in values["rows"] if row["name"] == measure), None)
    return {
        **values,
        "language": language,
        "other": next(each for each in LANGUAGES if each != language),
        "word": find_explanation("verdict", manifest.verdict.word),
        "primary": primary,
        "unit": primary["unit"].removeprefix("1") if primary else "",
        "counted": notes.number(str(len(_counted(manifest))), ["plan.json"]),
        "figures": figures,
        "guards": _guards(manifest, notes),
        "author_note": note,
        "states": _states(manifest, notes),
        "facts": _facts(manifest),
        "about": find_explanation,
        "address": address,
        "grouped": grouped,
        "behind": lambda: _behind(manifest, notes, figures),
    }


def _author_note(run: Path) -> str | None:
    """Return the author's own words, or None."""
    path = run / NOTES
    if not path.is_file() or path.is_symlink():
        return None
    return path.read_text("utf-8", errors="replace")[:NOTES_CHARACTERS]


def _counted(manifest: Manifest) -> tuple[Any, ...]:
    return manifest.effect.values if manifest.effect else ()


def address(name: str) -> str:
    """Return the link to a file of the run: below the page's own folder, whatever its name."""
    return "./" + quote(name)


def grouped(files: Iterable[str]) -> list[dict[str, Any]]:
    """Return files that are of one name in several replicates as one entry."""
    split = sorted((_split(name) for name in files), key=lambda each: (each[1], each[0]))
    return [
        {"name": name, "places": [(place, f"{place}{name}") for place, _ in of_name]}
        for name, of_name in ((n, list(g)) for n, g in groupby(split, key=lambda each: each[1]))
    ]


def _split(name: str) -> tuple[str, str]:
    """Return a file's replicate (`replicates/03-…/`, or nothing) and its name below it."""
    parts = name.split("/", 2)
    if parts[0] == "replicates" and len(parts) == 3:
        return f"{parts[0]}/{parts[1]}/", parts[2]
    return "", name


def _guards(manifest: Manifest, notes: Notes) -> list[dict[str, Any]]:
    """Return a row for each guard: the worst that was seen, and what broke."""
    aside = {r.replicate for r in manifest.replicates if r.pair in manifest.set_aside}
    rows = []
    for name in dict.fromkeys(g.name for g in manifest.guards):
        of_name = [g for g in manifest.guards if g.name == name]
        broken = [g for g in of_name if not g.ok]
        counted = [g for g in broken if g.replicate not in aside]
        rows.append(
            {
                "name": name,
                "about": find_explanation("guard", name),
                "state": "broken" if counted else "aside" if broken else "held",
                "broken": broken,
                **_worst(of_name, notes),
            }
        )
    return rows


def _worst(guards: Sequence[GuardResult], notes: Notes) -> dict[str, Any]:
    """Return the largest value seen, by its share of the limit where limits differ."""
    known = [g for g in guards if g.seen is not None and g.source]
    if not known:
        return {"worst": "—", "limit": "—"}
    worst = max(known, key=lambda g: (not g.ok, (g.seen or 0.0) / (g.limit or 1.0)))
    assert worst.seen is not None
    return {
        "worst": notes.number(number_text(worst.seen), [worst.source]),
        "limit": "—"
        if worst.limit is None
        else notes.number(number_text(worst.limit), ["plan.json"]),
    }


def _states(manifest: Manifest, notes: Notes) -> list[dict[str, Any]]:
    """Return how many facts are in each state, over the machine and all replicates."""
    files = [name for name in manifest.files if name.rsplit("/", 1)[-1] == "facts.json"]
    facts = [*manifest.facts, *(f for r in manifest.replicates for f in r.facts)]
    return [
        {"state": state, "count": notes.number(f"{sum(f.state == state for f in facts):,}", files)}
        for state in (STATES if files else ())
    ]


def _facts(manifest: Manifest) -> list[dict[str, str]]:
    first = manifest.replicates[0].facts if manifest.replicates else ()
    return [
        {
            "name": f"{f.group}.{f.name}",
            "service": f.service or "",
            "value": short(f.value) if f.value is not None else short(f.reason),
            "state": f.state,
        }
        for f in (*manifest.facts, *first)
    ]


def _behind(
    manifest: Manifest, notes: Notes, figures: Sequence[Mapping[str, Any]]
) -> list[dict[str, str]]:
    """Return every file that a number or figure of the page came from, with hash and size."""
    names = {f["name"] for note in notes for f in note["files"]}
    names |= {name for figure in figures for name in figure["files"]}
    return [
        {
            "name": name,
            "sha256": manifest.files[name].sha256,
            "bytes": f"{manifest.files[name].bytes:,}",
        }
        for name in sorted(names & manifest.files.keys())
    ]
