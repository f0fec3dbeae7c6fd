"""Text of others as an error may show it: printable, and without what looks like a credential."""

from __future__ import annotations

import re

MASK = "<masked>"
_FORMS = (
    (re.compile(r"(?<=://)[^/@\s]+@"), f"{MASK}@"),  # user and password in an address
    (  # and in one without a scheme; NAME:TAG@sha256:… is an image
        re.compile(r"(?<![\w.+:/@-])[\w.+-]+:[^/@\s]+@(?!sha256:)(?=[\w.-]+[/:])"),
        f"{MASK}@",
    ),
    (re.compile(r"(?i)\b(bearer|basic)\s+[\w.~+/=-]{8,}"), rf"\1 {MASK}"),
    (re.compile(r"\bhf_[A-Za-z0-9]{20,}\b"), MASK),  # a Hugging Face token
)


def mask_text(text: str) -> str:
    """Mask what looks like a credential: users in addresses, bearer headers, hub tokens."""
    for form, instead in _FORMS:
        text = form.sub(instead, text)
    return text


def printable(text: str, at_most: int) -> str:
    """Return a text on one line, every character printable, cut to a length."""
    shown = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text[:at_most])
    return shown + ("…" if len(text) > at_most else "")
