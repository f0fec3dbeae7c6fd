"""Turns matplotlib's SVG into a part of a page: no address, the page's colours, its own names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from html import escape

INK = "#010101"
COLOURS = {INK: "currentColor", "#0072b2": "var(--baseline)", "#d55e00": "var(--candidate)"}
"""What is drawn in these is shown in the page's own."""

_DROPPED = (
    r"<metadata>.*?</metadata>",
    r"<!--.*?-->",
    r"<style.*?</style>",
    r' xmlns(:\w+)?="[^"]*"',
    r'(?<=<svg) width="[^"]*"| height="[^"]*pt"',
)


def inline(svg: str, name: str) -> str:
    """Return matplotlib's SVG as a part of a page: no prolog, no address, names of its own."""
    text = svg[svg.index("<svg") :]
    for pattern in _DROPPED:
        text = re.sub(pattern, "", text, flags=re.DOTALL)
    text = text.replace("xlink:href", "href")
    used = set(re.findall(r'(?:href="|url\()#([^")]+)', text))
    text = re.sub(r' id="([^"]*)"', lambda m: f' id="{name}-{m[1]}"' if m[1] in used else "", text)
    text = re.sub(r'(href="|url\()#', rf"\1#{name}-", text)
    text = re.sub(r"(font(?:-size)?: [\d.]+px)[^;\"]*(?:'[^']*'[^;\"]*)*", _bare_font, text)
    for drawn, shown in COLOURS.items():
        text = re.sub(drawn, shown, text, flags=re.IGNORECASE)
    text = re.sub(r' (?:d|x|y|transform)="[^"]*"', _short_numbers, text)
    return re.sub(r"\n\s*", "\n", text)


def in_language(svg: str, drawn: Mapping[str, str], shown: Mapping[str, str]) -> str:
    """Return a drawing with its own words (`plot_*`) in another language."""
    for key in (key for key in drawn if key.startswith("plot_")):
        text = escape(shown[key], quote=False)
        svg = svg.replace(f">{escape(drawn[key], quote=False)}<", f">{text}<")
    return svg


def _bare_font(found: re.Match[str]) -> str:
    return "font-size: " + found[1].rpartition(" ")[2]


def _short_numbers(found: re.Match[str]) -> str:
    return re.sub(r"(\d\.\d\d)\d+", r"\1", found[0])
