"""A flame graph of sampled stacks as SVG for the inside of a page. Pure; no script, no address.

A frame is as wide as its share of the samples and stands on its caller. What is inside the
scheduler is filled in the candidate's colour and has a thick edge, everything else is a light wash
of the text's own colour, so the two are told apart without any colour too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

from kit.stacks import SCHEDULER

WIDTH = 960
ROW = 17
LEAST = 0.002
"""The least share of the samples that is drawn."""
DEEPEST = 80
_CHAR = 6.3  # of a font of 10.5 px


@dataclass
class Frame:
    """A frame: how many samples are in it, and what it called."""

    samples: int = 0
    called: dict[str, Frame] = field(default_factory=dict)


@dataclass(frozen=True)
class Box:
    """A frame as drawn: left edge and width as shares of all samples, and whether scheduling."""

    name: str
    samples: int
    depth: int
    left: float
    width: float
    scheduling: bool


def grown(stacks: Mapping[tuple[str, ...], int]) -> Frame:
    """Return the tree of all stacks; its root is no frame of theirs."""
    root = Frame()
    for frames, seen in stacks.items():
        at = root
        at.samples += seen
        for name in frames[:DEEPEST]:
            at = at.called.setdefault(name, Frame())
            at.samples += seen
    return root


def boxes(root: Frame) -> list[Box]:
    """Return every frame wide enough to be drawn, callers first, in the order of their names."""
    found: list[Box] = []
    waiting: list[tuple[Frame, int, float, bool]] = [(root, 0, 0.0, False)]
    while waiting:
        frame, depth, left, inside = waiting.pop()
        for name, one in sorted(frame.called.items()):
            width = one.samples / root.samples if root.samples else 0.0
            scheduling = inside or SCHEDULER.match(name) is not None
            if width >= LEAST:
                found.append(Box(name, one.samples, depth, left, width, scheduling))
                waiting.append((one, depth + 1, left, scheduling))
            left += width
    return found


def draw(graphs: Sequence[tuple[str, Counter[tuple[str, ...]]]]) -> str:
    """Return one SVG of several graphs, each below its title; nothing for none with samples."""
    lines: list[str] = []
    top = 0
    for title, stacks in graphs:
        found = boxes(grown(stacks))
        if not found:
            continue
        bottom = top + ROW * (2 + max(each.depth for each in found))
        lines.append(f'<text x="0" y="{top + 12}" font-weight="bold">{escape(title)}</text>')
        for each in found:
            lines += _drawn(each, bottom - ROW * (each.depth + 1) + ROW)
        top = bottom + 2 * ROW
    if not lines:
        return ""
    head = (
        f'<svg viewBox="0 0 {WIDTH} {top}" font-size="10.5" font-family="monospace" '
        'fill="currentColor">'
    )
    return "\n".join([head, *lines, "</svg>"])


def _drawn(box: Box, y: int) -> Iterator[str]:
    x, width = box.left * WIDTH, max(0.5, box.width * WIDTH - 0.5)
    paint = (
        'fill="var(--candidate)" fill-opacity="0.45" stroke="currentColor" stroke-width="1.5"'
        if box.scheduling
        else 'fill="currentColor" fill-opacity="0.12" stroke="currentColor" stroke-width="0.3"'
    )
    told = escape(f"{box.name}: {box.samples:,} ({box.width:.1%})")
    yield (
        f'<g><title>{told}</title><rect x="{x:.1f}" y="{y}" width="{width:.1f}" '
        f'height="{ROW - 1}" {paint}/>'
    )
    room = int((width - 4) / _CHAR)
    if room >= 4:
        name = box.name if len(box.name) <= room else box.name[: room - 1] + "…"
        yield f'<text x="{x + 2:.1f}" y="{y + 12}">{escape(name)}</text>'
    yield "</g>"
