"""Renders a manifest as Markdown, in English and Chinese, and gives its numbers to the page.

Every number is a `Number`: a value with the raw files it came from. The template engine refuses
to print a bare number. `kit.report_files` writes the reports, `kit.report_html` makes the page.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jinja2
import yaml
from markupsafe import Markup

from kit.again import experiment_of
from kit.errors import StaleNumber
from kit.experiment import Text
from kit.explain import find_explanation
from kit.fact import Fact
from kit.guard import GuardResult
from kit.manifest import Manifest, RawFile
from kit.measure import Reading
from kit.paths import TEMPLATES
from kit.verdict import MIN_PAIRS

LANGUAGES = ("en", "zh")


@dataclass(frozen=True)
class Number:
    """A number as text, with the mark of the note that names its raw files.

    In Markdown the mark follows the number; in HTML the number itself leads to the note.
    """

    text: str
    mark: str

    def __str__(self) -> str:
        return f"{self.text}[^{self.mark}]"

    def __html__(self) -> str:
        return Markup('<a class="number" href="#note-{}">{}</a>').format(self.mark, self.text)


@dataclass
class Notes:
    """The notes of one report over a run's files: a mark for each distinct set of them."""

    files: Mapping[str, RawFile]
    _marks: dict[tuple[str, ...], str] = field(default_factory=dict)

    def number(self, text: str, sources: Iterable[str]) -> Number:
        """Return a number; raise `StaleNumber` when a source is no file of the run."""
        files = tuple(dict.fromkeys(sources))
        unknown = [f for f in files if f not in self.files]
        if unknown or not files:
            raise StaleNumber(f"the number {text} cannot be traced to a raw file: {unknown}")
        mark = self._marks.setdefault(files, str(len(self._marks) + 1))
        return Number(text, mark)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield the notes of all numbers that were given until now, as a template shows them."""
        for files, mark in list(self._marks.items()):
            listed = [{"name": f, "sha256": self.files[f].sha256} for f in files]
            yield {"mark": mark, "files": listed}


def render(manifest: Manifest, language: str) -> str:
    """Return the report's Markdown; needs a manifest with a verdict."""
    return fill("report.md.j2", values_of(manifest, language), language)


def fill(template: str, values: dict[str, Any], language: str, *, html: bool = False) -> str:
    """Fill a template whose numbers all name their raw files; in HTML every text is escaped."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        finalize=_refuse_bare_numbers,
        autoescape=html,  # noqa: S701 - on for HTML, off for Markdown
        trim_blocks=html,
        lstrip_blocks=html,
        keep_trailing_newline=True,
    )
    environment.filters["say"] = partial(_say_html if html else _say, language)
    environment.filters["zh"] = partial(_say_html, "zh")
    return environment.get_template(template).render(values)


def report_words() -> dict[str, dict[str, str]]:
    """Return the reports' fixed words: key -> language -> text."""
    return dict(yaml.safe_load((TEMPLATES / "words.yml").read_text("utf-8")))


def values_of(manifest: Manifest, language: str) -> dict[str, Any]:
    """Return what every form of the report shows; needs a manifest with a verdict."""
    assert manifest.verdict is not None
    words = report_words()
    notes = Notes(manifest.files)
    aside = {r.replicate for r in manifest.replicates if r.pair in manifest.set_aside}
    broken = [g for g in manifest.guards if not g.ok and g.replicate not in aside]
    return {
        "m": manifest,
        "w": {key: both[language] for key, both in words.items()},
        "margin": notes.number(f"{manifest.plan.hypothesis.margin:.0%}", ["plan.json"]),
        "rows": _rows(manifest, notes, language, words),
        "effect": _effect(manifest, notes),
        "comparisons": _comparisons(manifest, notes, words["no_value"][language]),
        "replicates": _replicates(manifest, notes, language),
        "broken": broken,
        "spoiled": [g for g in manifest.guards if not g.ok and g.replicate in aside],
        "advice": _advice(broken),
        "environment": _environment(manifest, notes, language, words),
        "asked": _asked(manifest, notes),
        "cost": _cost(manifest, notes),
        "command": command(manifest),
        "notes": notes,
    }


def _say(language: str, text: Text) -> str:
    return text.zh if language == "zh" else text.en


def _say_html(language: str, text: Text) -> Markup:
    """Return the text escaped, with what stands in backticks as code."""
    parts = _say(language, text).split("`")
    marked = [Markup("<code>{}</code>").format(p) if i % 2 else p for i, p in enumerate(parts)]
    return Markup().join(marked)


def _refuse_bare_numbers(value: Any) -> Any:
    if isinstance(value, int | float) and not isinstance(value, bool):
        raise StaleNumber(f"the template prints {value}, which names no raw file")
    return value


def command(manifest: Manifest) -> str:
    """Return the command line that runs the same plan again."""
    plan = manifest.plan
    old, new = plan.images
    if old != new:
        words = [f"nox -s compare_versions -- {plan.experiment} {old} {new}"]
    else:
        words = [f"nox -s {plan.experiment} -- --image {new}"]
    pairs = "auto" if plan.stopping else str(plan.pairs)
    words += [f"--model {plan.model.id}", f"--platform {plan.platform}"]
    words += [f"--replicates {pairs}", f"--seed {plan.seed}"]
    words += [f"--spare {plan.spare_pairs}"] if plan.pairs >= MIN_PAIRS else []
    words += [f"--variant {plan.variant}"] if plan.variant else []
    words += ["--aa"] if plan.against_itself else []
    words += ["--shared-device"] if plan.shared_device else []
    words += [f"--load-tool {plan.load_tool}"] if plan.load_tool != "kit" else []
    return " ".join(words)


def _rows(manifest: Manifest, notes: Notes, language: str, words: Any) -> list[dict[str, Any]]:
    plan = manifest.plan
    what = {m.name: m.what for m in experiment_of(plan).all_measures}
    rows = []
    for name in manifest.plan.measures:
        sides = {}
        unit = ""
        for role in ("baseline", "candidate"):
            found = [
                x for r in manifest.counted if r.role == role for x in r.readings if x.name == name
            ]
            unit = found[0].unit if found else unit
            sides[role] = _summary(found, notes, words["no_value"][language])
        rows.append({"name": name, "what": what.get(name, name), "unit": unit, **sides})
    return rows


def _comparisons(manifest: Manifest, notes: Notes, null: str) -> list[dict[str, Any]]:
    """Return a row for each comparison between the arms, over all pairs, with its limit."""
    limits = {q.comparison: f"{q.op} {q.value:g}" for q in manifest.plan.quality}
    rows = []
    for name in dict.fromkeys(r.name for c in manifest.comparisons for r in c.readings):
        found = [r for c in manifest.comparisons for r in c.readings if r.name == name]
        limit = limits.get(name)
        rows.append(
            {
                "name": name,
                "value": _summary(found, notes, null),
                "limit": notes.number(limit, ["plan.json"]) if limit else "—",
            }
        )
    return rows


def _summary(readings: Sequence[Reading], notes: Notes, null: str) -> Number | str:
    known = [r for r in readings if r.value is not None]
    if not known:
        return f"{null}: {readings[0].reason}" if readings else null
    values = [r.value for r in known if r.value is not None]
    text = number_text(statistics.median(values))
    if min(values) != max(values):
        text += f" ({number_text(min(values))} – {number_text(max(values))})"
    return notes.number(text, [s for r in known for s in r.sources])


def number_text(value: float) -> str:
    """Return a number as reports show it: whole ones whole, others with four digits."""
    if value == int(value) and abs(value) < 1e15:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def _effect(manifest: Manifest, notes: Notes) -> dict[str, Any] | None:
    effect = manifest.effect
    if effect is None or effect.ratio is None:
        return None
    sources = [
        s
        for r in manifest.counted
        for x in r.readings
        if x.name == effect.measure
        for s in x.sources
    ]
    known = {"ratio": effect.ratio, "low": effect.low, "high": effect.high}
    return {
        name: None if value is None else notes.number(f"{value:.3f}", sources)
        for name, value in known.items()
    }


def _replicates(manifest: Manifest, notes: Notes, language: str) -> list[dict[str, Any]]:
    rows = []
    for r in manifest.replicates:
        reading = next((x for x in r.readings if x.name == manifest.plan.hypothesis.measure), None)
        if reading is None or reading.value is None:
            value: Any = reading.reason if reading else "—"
        else:
            value = notes.number(number_text(reading.value), reading.sources)
        rows.append(
            {
                "replicate": str(r.replicate + 1),
                "pair": str(r.pair + 1),
                "arm": _say(language, manifest.plan.arm(r.role).label),
                "aside": r.pair in manifest.set_aside,
                "value": value,
            }
        )
    return rows


SHOWN = (
    # label, group, fact, service
    ("vllm", "vllm", "version", "server"),
    ("commit", "vllm", "commit", "server"),
    ("torch", "vllm", "torch_version", "server"),
    ("hardware", "host", "cpu_model", None),
    ("hardware", "host", "cpu_cores", None),
    ("hardware", "host", "memory_total_bytes", None),
    ("hardware", "gpu", "device0_name", None),
    ("driver", "gpu", "driver_version", None),
    ("kernel", "host", "kernel_release", None),
    ("engine_version", "engine", "version", None),
)


def _environment(
    manifest: Manifest, notes: Notes, language: str, words: Any
) -> list[dict[str, Any]]:
    rows = []
    facts = [(f, "facts.json") for f in manifest.facts]
    for r in manifest.replicates[:1]:
        facts += [(f, f"{r.folder}/facts.json") for f in r.facts]
    for label, group, name, service in SHOWN:
        found = [(f, s) for f, s in facts if (f.group, f.name, f.service) == (group, name, service)]
        if not found:
            continue
        fact, source = found[0]
        if fact.value is None:
            text: Number | str = f"{words['unknown'][language]}: {fact.reason}"
        else:
            text = notes.number(_fact_text(fact), [source])
        rows.append(
            {
                "label": words[label][language],
                "name": name,
                "value": text,
                "state": fact.state,
            }
        )
    return rows


def _fact_text(fact: Fact) -> str:
    if fact.name.endswith("_bytes") and isinstance(fact.value, int):
        return f"{fact.value / 2**30:.1f} GiB"
    return str(fact.value)


def _asked(manifest: Manifest, notes: Notes) -> dict[str, Any]:
    plan = manifest.plan
    phases = {p.name: p for p in plan.phases}
    measured = phases["measure"]
    warm = [p for p in plan.phases if p.name != "measure" and not (p.profile or p.sample_hz)]

    def planned(text: str) -> Number:
        return notes.number(text, ["plan.json"])

    return {
        "input": _served(manifest, notes, "input_tokens"),
        "output": planned(" / ".join(str(n) for n in measured.output_tokens)),
        "served": _served(manifest, notes, "output_tokens"),
        "concurrency": planned(str(measured.concurrency)),
        "warmup": planned(" + ".join(f"{p.requests} ({p.name})" for p in warm)),
        "requests": planned(str(measured.requests)),
        "pairs": planned(str(plan.pairs)),
    }


def _served(manifest: Manifest, notes: Notes, name: str) -> Number | str:
    """Return the shortest and longest length that the server counted, over all replicates."""
    found = [x for r in manifest.replicates for x in r.readings if x.name.startswith(name)]
    values = [x.value for x in found if x.value is not None]
    if not values:
        return "—"
    text = number_text(min(values))
    if max(values) != min(values):
        text += f" – {number_text(max(values))}"
    return notes.number(text, [s for x in found for s in x.sources])


def _advice(broken: Sequence[GuardResult]) -> list[dict[str, Any]]:
    """Return what to do about the guards that did not hold, each name once."""
    names = dict.fromkeys(g.name for g in broken)
    known = [(name, find_explanation("guard", name)) for name in names]
    return [{"name": name, "next": found.next} for name, found in known if found]


def _cost(manifest: Manifest, notes: Notes) -> Number | None:
    if manifest.cost is None:
        return None
    sources = [f"{r.folder}/events.jsonl" for r in manifest.replicates]
    text = (
        f"{manifest.cost.wall_s:.0f} s / {manifest.cost.accounted_s:.0f} s = "
        f"{manifest.cost.ratio:.3f}"
    )
    return notes.number(text, sources)
