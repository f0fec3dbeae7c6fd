"""Text of others as an error may show it."""

from __future__ import annotations


def printable(text: str, at_most: int) -> str:
    """Return a text on one line, every character printable, cut to a length."""
    shown = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text[:at_most])
    return shown + ("…" if len(text) > at_most else "")
