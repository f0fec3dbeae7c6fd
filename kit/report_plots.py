"""The report's figures as inline SVG, drawn from raw files. The same data give the same bytes.

Text stays text, and colours are the page's own (`currentColor`, `var(--baseline)`), so that one
drawing serves light, dark and print, and both languages. However many samples there are, a
line has a few hundred points at most.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from kit.flame_graph import draw
from kit.inline_svg import INK, inline
from kit.manifest import Manifest, Replicate
from kit.measure import Reading, Sample, Window, load_window, max_itl_s, start_s, tpot_s, ttft_s
from kit.stacks import read_stacks
from kit.verdict import find_pairs

KV = "vllm:kv_cache_usage_perc"
RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"
PREEMPTIONS = "vllm:num_preemptions_total"
SERIES = (KV, RUNNING, WAITING, PREEMPTIONS)

ROLES = ("baseline", "candidate")
STYLE: Mapping[str, Mapping[str, Any]] = {
    "baseline": {"color": "#0072b2", "linestyle": "-", "marker": "o"},
    "candidate": {"color": "#d55e00", "linestyle": "--", "marker": "^"},
}
"""Told apart by the colour-blind (Okabe and Ito), and in black and white by line and mark."""
MOST_POINTS = 240  # of one line
ALL_POINTS = 9_000  # of one kind of line, over all replicates
MARKS = 120  # above it a replicate's requests are drawn as their middle and their spread

Points = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]
Of = Callable[[Sample], float | None]


@dataclass(frozen=True)
class Figure:
    """One drawing: its name (its words are `<name>_title` and `<name>_text`) and its raw files."""

    name: str
    svg: str
    sources: tuple[str, ...]


@dataclass(frozen=True)
class Seen:
    """A replicate that was measured, and what is drawn of its measured window.

    `window` holds no samples: `kept` are the values of every answered request that has one,
    unsorted, by what they are of; `firsts` are moment and duration of each first token, in a row.
    """

    replicate: Replicate
    window: Window
    kept: Mapping[Of, np.ndarray[Any, Any]]
    firsts: np.ndarray[Any, Any]

    def values(self, of: Of) -> np.ndarray[Any, Any]:
        """Return the values of one kind."""
        return self.kept[of]


def _seen(run: Path, r: Replicate) -> Seen:
    window = load_window(run, f"{r.folder}/measure", SERIES)
    answered = [s for s in window.samples if not s.get("error")]
    kept: dict[Of, np.ndarray[Any, Any]] = {
        of: np.array([v for s in answered if (v := of(s)) is not None], dtype=float)
        for of in (ttft_s, tpot_s, max_itl_s)
    }
    firsts = [
        (begin + value, value)
        for s in answered
        if (begin := start_s(s)) is not None and (value := ttft_s(s)) is not None
    ]
    shape = np.array(sorted(firsts), dtype=float).reshape(-1, 2)
    return Seen(r, replace(window, samples=()), kept, shape)


def draw_figures(run: Path, manifest: Manifest, words: Mapping[str, str]) -> list[Figure]:
    """Return the figures that the run's raw files allow; empty where nothing was measured.

    Raises `BadFile` naming a raw file that cannot be read.
    """
    seen = [_seen(run, r) for r in manifest.replicates if r.status == "complete"]
    if not seen:
        return []
    found = [
        _effect(manifest, words),
        _distributions(seen, words),
        _timeline(seen, words),
        _flame(run, manifest, words),
    ]
    return [each for each in found if each is not None]


# -- thinning ----------------------------------------------------------------------------------


def ecdf(values: np.ndarray[Any, Any], most: int = MOST_POINTS) -> Points:
    """Return the empirical distribution in about `most` points: value, share at most so large."""
    ordered = np.sort(values)
    at = np.unique(np.linspace(0, len(ordered) - 1, min(len(ordered), most)).round().astype(int))
    return ordered[[0, *at]], np.array([0, *(at + 1)]) / len(ordered)


def thin(x: Sequence[float], y: Sequence[float], most: int = MOST_POINTS) -> Points:
    """Return a line's points; of long ones first, lowest, highest and last of each stretch.

    So a peak stays, however short it was.
    """
    xs, ys = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    if len(xs) <= most:
        return xs, ys
    kept: set[int] = set()
    for stretch in np.array_split(np.arange(len(xs)), max(1, most // 4)):
        inside = ys[stretch]
        kept |= {stretch[0], stretch[-1], stretch[inside.argmin()], stretch[inside.argmax()]}
    at = np.array(sorted(kept))
    return xs[at], ys[at]


def _share(seen: Sequence[Seen], most: int) -> int:
    """Return how many points one replicate's line may have, so that all together are bounded."""
    return max(16, min(most, ALL_POINTS // max(1, len(seen))))


# -- drawing -----------------------------------------------------------------------------------


def _draw(name: str, size: tuple[float, float], paint: Callable[[Any], None]) -> str:
    """Return what `paint` draws on a new figure, as SVG for the inside of a page."""
    import matplotlib as mpl
    from matplotlib.figure import Figure as Canvas

    settings: Any = {
        "svg.hashsalt": f"kit {name}",
        "svg.fonttype": "none",
        "text.parse_math": False,
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.axisbelow": True,
        "axes.titlesize": 9,
        "axes.labelsize": 9,
        "grid.alpha": 0.18,
        "grid.color": INK,
        "lines.linewidth": 1.1,
        **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor"), INK),
        **dict.fromkeys(("axes.titlecolor", "xtick.color", "ytick.color"), INK),
    }
    with mpl.rc_context():
        mpl.rcdefaults()  # whatever this user's matplotlibrc says
        mpl.rcParams.update(settings)
        figure = Canvas(figsize=size, layout="constrained")
        paint(figure)
        out = io.StringIO()
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    return inline(out.getvalue(), name)


def _plain(axis: Any) -> None:
    """Write tick labels as plain numbers, on logarithmic axes too."""
    from matplotlib.ticker import LogLocator

    if axis.get_scale() == "log":
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_minor_formatter(lambda *_: "")


# -- the figures -------------------------------------------------------------------------------


def _effect(manifest: Manifest, words: Mapping[str, str]) -> Figure | None:
    """Draw the primary measure of each pair, and beside it each pair's ratio against the margin."""
    name, effect = manifest.plan.hypothesis.measure, manifest.effect
    readings = [
        (r, x)
        for r in manifest.replicates
        for x in r.readings
        if x.name == name and x.value is not None
    ]
    if not readings:
        return None
    counted = _counted_pairs(manifest)
    ratios = [
        (pair, ratio)
        for pair, ratio in zip(counted, effect.pairs if effect else (), strict=False)
        if ratio
    ]
    pairs = sorted({r.pair for r, _ in readings})

    def paint(figure: Any) -> None:
        left, right = figure.subplots(1, 2) if ratios else (figure.subplots(1, 1), None)
        for pair in pairs:
            both = [x.value for r, x in readings if r.pair == pair]
            left.plot([pair + 1] * len(both), both, color=INK, alpha=0.25)
        for role in ROLES:
            for aside in (False, True):
                chosen = [
                    (r.pair + 1, x.value)
                    for r, x in readings
                    if r.role == role and (r.pair in manifest.set_aside) == aside
                ]
                if chosen:
                    style = {**STYLE[role], "linestyle": "none", "markersize": 6}
                    fill = {"markerfacecolor": "none"} if aside else {}
                    left.plot(*zip(*chosen, strict=True), **style, **fill)
        values = [x.value or 0 for _, x in readings]
        if min(values) >= 0 < max(values):
            left.set_ylim(0, 1.08 * max(values))
        left.set_xticks([pair + 1 for pair in pairs])
        left.set_xlabel(words["plot_pair"])
        left.set_ylabel(f"{name} ({readings[0][1].unit})")
        left.grid(axis="y")
        if right is not None:
            _paint_ratios(right, manifest, ratios, words)

    rows = max(len(pairs), 4)
    sources = dict.fromkeys(s for _, x in readings for s in x.sources)
    return Figure("effect", _draw("effect", (8, 1.6 + 0.2 * rows), paint), tuple(sources))


def _counted_pairs(manifest: Manifest) -> list[int]:
    """Return the pairs that the effect's values are of, in their order."""
    hypothesis = manifest.plan.hypothesis
    readings: dict[tuple[int, str], Reading] = {
        (r.pair, r.role): x
        for r in manifest.counted
        for x in r.readings
        if x.name == hypothesis.measure
    }
    return [
        pair
        for pair in sorted({pair for pair, _ in readings})
        if find_pairs(readings, [pair], hypothesis.kind)[0]
    ]


def _paint_ratios(
    axis: Any, manifest: Manifest, ratios: Sequence[tuple[int, float]], words: Mapping[str, str]
) -> None:
    effect, hypothesis = manifest.effect, manifest.plan.hypothesis
    assert effect is not None
    down = hypothesis.direction == "decrease"
    margin = 1 - hypothesis.margin if down else 1 + hypothesis.margin
    rows = {pair: len(ratios) - place for place, (pair, _) in enumerate(ratios)}
    axis.plot(
        [ratio for _, ratio in ratios], [rows[p] for p, _ in ratios], "o", color=INK, markersize=4
    )
    if effect.ratio is not None:
        axis.plot([effect.ratio], [0], "D", color="#d55e00", markersize=7)
        if effect.low is not None and effect.high is not None:
            axis.plot([effect.low, effect.high], [0, 0], "-", color="#d55e00", linewidth=2.5)
    seen = [r for _, r in ratios] + [x for x in (effect.low, effect.high) if x] + [1.0, margin]
    if max(seen) > 3 * min(seen):
        axis.set_xscale("log")
    axis.margins(x=0.08)
    axis.axvline(1.0, color=INK, linewidth=0.8)
    axis.axvline(margin, color=INK, linewidth=1.1, linestyle=(0, (4, 2)))
    low, high = axis.get_xlim()
    axis.axvspan(low if down else margin, margin if down else high, color=INK, alpha=0.06, lw=0)
    axis.set_xlim(low, high)
    axis.set_yticks([*rows.values(), 0], [*(str(p + 1) for p in rows), words["plot_all"]])
    axis.set_ylim(-0.7, len(ratios) + 0.7)
    axis.set_ylabel(words["plot_pair"])
    axis.set_xlabel(words["plot_ratio"])
    axis.set_title(words["plot_beyond"])
    _plain(axis.xaxis)
    axis.grid(axis="x")


def _distributions(seen: Sequence[Seen], words: Mapping[str, str]) -> Figure | None:
    """Draw the distribution of TTFT, TPOT and longest gap, a line for each replicate."""
    kinds = (("TTFT (s)", ttft_s), ("TPOT (s)", tpot_s), (words["plot_gap"], max_itl_s))
    panels = [each for each in kinds if any(len(one.values(each[1])) for one in seen)]
    if not panels:
        return None
    most = _share(seen, MOST_POINTS)

    def paint(figure: Any) -> None:
        for axis, (title, of) in zip(
            figure.subplots(1, len(panels), sharey=True, squeeze=False)[0], panels, strict=True
        ):
            for each in seen:
                values = each.values(of)
                if len(values):
                    x, y = ecdf(values, most)
                    style = {k: v for k, v in STYLE[each.replicate.role].items() if k != "marker"}
                    axis.plot(x, y, drawstyle="steps-post", alpha=0.75, **style)
            axis.set_xlim(left=0)
            axis.set_xlabel(title)
            axis.set_ylim(0, 1.02)
            axis.grid()
            if axis.get_subplotspec().is_first_col():
                axis.set_ylabel(words["plot_share"])

    sources = tuple(each.window.samples_file for each in seen)
    return Figure("distribution", _draw("distribution", (8, 2.7), paint), sources)


def _timeline(seen: Sequence[Seen], words: Mapping[str, str]) -> Figure | None:
    """Draw TTFT over the measured window, and what the scheduler did beneath, an arm a column."""
    rows: list[tuple[str, Callable[[Any, Seen, int], None]]] = []
    if any(len(each.values(ttft_s)) for each in seen):
        rows.append(("TTFT (s)", _paint_ttft))
    for title, series in (
        ("plot_kv", (KV,)),
        ("plot_requests", (RUNNING, WAITING)),
        ("plot_preemptions", (PREEMPTIONS,)),
    ):
        if any(_has(each, name) for each in seen for name in series):
            rows.append((words[title], _painter(series)))
    if not rows:
        return None
    most = _share(seen, MOST_POINTS)

    def paint(figure: Any) -> None:
        axes = figure.subplots(len(rows), 2, sharex=True, sharey="row", squeeze=False)
        for row, (title, paint_one) in enumerate(rows):
            for column, role in enumerate(ROLES):
                axis = axes[row][column]
                for each in seen:
                    if each.replicate.role == role:
                        paint_one(axis, each, most)
                axis.grid()
                if not column:
                    axis.set_ylabel(title)
                if row == len(rows) - 1:
                    axis.set_xlabel(words["plot_time"])
                if not row:
                    axis.set_title(words[f"plot_{role}"])
            axes[row][0].set_ylim(bottom=0)

    sources = [file for each in seen for file in (each.window.samples_file, *each.window.engines)]
    size = (8, 0.9 + 1.35 * len(rows))
    return Figure("timeline", _draw("timeline", size, paint), tuple(sources))


def _flame(run: Path, manifest: Manifest, words: Mapping[str, str]) -> Figure | None:
    """Draw the engine core's sampled stacks of each arm's first replicate that has some."""
    graphs, sources = [], []
    for role in ROLES:
        files = [
            path
            for r in manifest.replicates
            if (r.role, r.status) == (role, "complete")
            for path in sorted((run / r.folder).glob("*/stacks-*.txt.gz"))
        ]
        if files:
            first = next((p for p in files if "-engine-core-" in p.name), files[0])
            graphs.append((words[f"plot_{role}"], read_stacks(first)[0]))
            sources.append(first.relative_to(run).as_posix())
    svg = draw(graphs)
    return Figure("flame", svg, tuple(sources)) if svg else None


def _has(each: Seen, name: str) -> bool:
    """Tell whether a series is in the window; a counter only where it rose."""
    values = [
        v
        for scrapes in each.window.engines.values()
        for s in scrapes
        if (v := s.total(name)) is not None
    ]
    return bool(values) and (name != PREEMPTIONS or max(values) > min(values))


def _paint_ttft(axis: Any, each: Seen, most: int) -> None:
    """Draw each request at the moment of its first token; many as their middle and their spread."""
    if not len(each.firsts):
        return
    style = STYLE[each.replicate.role]
    x, y = each.firsts.T
    if len(x) <= min(MARKS, most):
        axis.plot(x, y, style["marker"], color=style["color"], markersize=3, alpha=0.6)
        return
    stretches = np.array_split(np.arange(len(x)), max(4, most // 4))
    middle = [np.median(x[s]) for s in stretches]
    axis.fill_between(
        middle,
        [y[s].min() for s in stretches],
        [y[s].max() for s in stretches],
        color=style["color"],
        alpha=0.12,
        linewidth=0,
    )
    axis.plot(middle, [np.median(y[s]) for s in stretches], color=style["color"], alpha=0.8)


def _painter(names: Sequence[str]) -> Callable[[Any, Seen, int], None]:
    """Return what draws these series of a replicate, each engine's apart: solid, then dotted."""

    def paint(axis: Any, each: Seen, most: int) -> None:
        for scrapes in each.window.engines.values():
            for name, line in zip(names, ("-", ":"), strict=False):
                known = [(s.t_s, v) for s in scrapes if (v := s.total(name)) is not None]
                if known:
                    x, y = thin([t for t, _ in known], [v for _, v in known], most)
                    shown = {KV: y * 100, PREEMPTIONS: y - y[0]}.get(name, y)
                    colour = STYLE[each.replicate.role]["color"]
                    axis.plot(x, shown, line, color=colour, alpha=0.6)

    return paint
