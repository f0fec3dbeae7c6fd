"""What came of a reproduction, for people: the preflight table, and a report with a plot."""

from __future__ import annotations

import io
import math
import statistics
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jinja2
import yaml

from kit import compare, console, store
from kit.equivalence import Closeness
from kit.experiment import Text
from kit.manifest import Manifest, load_manifest
from kit.paths import TEMPLATES
from kit.report import LANGUAGES
from kit.reproduce import Preflight, Reproduction

PLOT = "reproduction.svg"
NAMES = {"baseline": "#0072B2", "candidate": "#D55E00"}  # told apart by the colour-blind too


def show_preflight(preflight: Preflight) -> None:
    """Print every difference: those that must not be first."""
    order = _must_first(preflight.differences)
    if order:
        console.table(
            "differences from the recorded run",
            ["what", "recorded", "here", "match"],
            [[d.where, compare.short(d.first), compare.short(d.second), d.match] for d in order],
        )
    console.say(f"hardware: {preflight.distance}; original checked: {preflight.checked}")


def write(folder: Path, first: Manifest, result: Reproduction) -> None:
    """Write reproduction.en.md, reproduction.zh.md and the plot into the new run's folder."""
    second = load_manifest(folder / "manifest.json")
    store.write_text(folder / PLOT, plot(first, second))
    for language in LANGUAGES:
        text = render(first, second, result, language)
        store.write_text(folder / f"reproduction.{language}.md", text)


def render(first: Manifest, second: Manifest, result: Reproduction, language: str) -> str:
    """Return the report's text."""
    words = yaml.safe_load((TEMPLATES / "words.yml").read_text("utf-8"))
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        autoescape=False,  # noqa: S701 - Markdown, not HTML
        keep_trailing_newline=True,
    )
    environment.filters["say"] = partial(_say, language)
    environment.filters["short"] = compare.short
    return environment.get_template("reproduction.md.j2").render(
        w={key: both[language] for key, both in words.items()},
        first=first,
        second=second,
        result=result,
        close=[_closeness(c) for c in result.outcome.closeness],
        arms=_arms(first, second),
        differences=_must_first(result.differences),
        plot=PLOT,
    )


def _must_first(found: Sequence[compare.Difference]) -> list[compare.Difference]:
    return sorted(found, key=lambda d: (d.match != "must", d.where))


def _say(language: str, text: Text) -> str:
    return text.zh if language == "zh" else text.en


def _closeness(c: Closeness) -> dict[str, str]:
    def number(value: float | None) -> str:
        return "—" if value is None else f"{value:.4f}"

    return {
        "what": c.what,
        "ratio": number(c.ratio),
        "interval": f"{number(c.low)} – {number(c.high)}",
        "bounds": f"{number(math.exp(-c.bound))} – {number(math.exp(c.bound))}",
        "says": c.says,
    }


def _arms(first: Manifest, second: Manifest) -> list[dict[str, str]]:
    rows = []
    for role in ("baseline", "candidate"):
        values = [compare.levels(m, role) for m in (first, second)]
        rows.append({"role": role, "first": _spread(values[0]), "second": _spread(values[1])})
    return rows


def _spread(values: Sequence[float]) -> str:
    if not values:
        return "—"
    text = f"{statistics.median(values):.4g}"
    return f"{text} ({min(values):.4g} – {max(values):.4g})" if len(values) > 1 else text


def plot(first: Manifest, second: Manifest) -> str:
    """Return an SVG: each replicate's primary measure, and each pair's ratio, of both runs.

    The bytes are the same for the same data.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({"svg.hashsalt": "kit", "svg.fonttype": "none"}):
        figure = Figure(figsize=(8, 3.2), layout="constrained")
        left, right = figure.subplots(1, 2)
        for place, manifest in enumerate((first, second)):
            for shift, (role, colour) in zip((-0.12, 0.12), NAMES.items(), strict=True):
                values = compare.levels(manifest, role)
                _dots(left, place + shift, values, colour, role if place == 0 else None)
            ratios = [r for r in (manifest.effect.pairs if manifest.effect else ()) if r]
            _dots(right, place, ratios, "#333333", None)
        left.set_title(first.plan.hypothesis.measure)
        right.set_title("candidate / baseline")
        for axis in (left, right):
            axis.set_xticks([0, 1], ["original", "again"])
            axis.set_xlim(-0.5, 1.5)
            axis.set_ylim(bottom=0)
            axis.grid(axis="y", alpha=0.3)
        left.legend(frameon=False)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()


def _dots(axis: Any, place: float, values: Sequence[float], colour: str, name: str | None) -> None:
    """Draw each value as a dot, slightly apart, and the median as a line."""
    if not values:
        return
    step = 0.14 / max(1, len(values) - 1)
    at = [place - 0.07 + i * step for i in range(len(values))]
    axis.plot(at, values, "o", color=colour, alpha=0.7, markersize=5, label=name)
    axis.hlines(statistics.median(values), place - 0.1, place + 0.1, color=colour, linewidth=2)
