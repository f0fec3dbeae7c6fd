"""Reads one thing at a time, so that a field that fails never takes the others with it.

Runs inside containers and on the host: standard library only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Field = dict[str, Any]
"""`{"value": JSON or None, "how": str, "error": str or None, "absent": bool}`."""

READ_ERRORS: tuple[type[Exception], ...] = (
    OSError,  # file not there, not permitted, no such device; sockets
    ValueError,  # text that is no number; also UnicodeDecodeError and JSONDecodeError
    LookupError,  # KeyError and IndexError: a line or key that is not there; also Absent
    AttributeError,  # a library or Python without this function
    TypeError,  # a function of another signature, or null where a number belongs
    OverflowError,  # a counter that the library cannot represent
)
"""What reading a field can raise. Anything else is a mistake of ours and must be seen."""

_REASON_CHARS = 200


class Absent(LookupError):
    """The place was read and holds no such thing: an answer, not a failure."""


def reason_of(error: Exception) -> str:
    """Return the error's class name and a short text, on one line."""
    text = " ".join(str(error).split())
    if isinstance(error, Absent):
        return text[:_REASON_CHARS]
    name = type(error).__name__
    return f"{name}: {text}"[:_REASON_CHARS] if text else name


def read_field(
    how: str,
    read: Callable[[], Any],
    errors: tuple[type[Exception], ...] = READ_ERRORS,
) -> Field:
    """Call `read` and return its value, or null with the reason; `how` names the source."""
    try:
        return {"value": read(), "how": how, "error": None, "absent": False}
    except errors as error:
        return {
            "value": None,
            "how": how,
            "error": reason_of(error),
            "absent": isinstance(error, Absent),
        }


def read_fields(
    readers: Mapping[str, tuple[str, Callable[[], Any]]],
    errors: tuple[type[Exception], ...] = READ_ERRORS,
) -> dict[str, Field]:
    """Read every named field: name -> (how, function)."""
    return {name: read_field(how, read, errors) for name, (how, read) in readers.items()}


def read_text(path: str | Path) -> str:
    """Return a file of /proc or /sys as stripped text; odd bytes are kept visible."""
    return Path(path).read_text(encoding="utf-8", errors="backslashreplace").strip()


def key_lines(text: str, separator: str = ":") -> dict[str, str]:
    """Parse lines of `key<separator> value`; the first of several equal keys stands."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        key, mark, value = line.partition(separator)
        if mark:
            found.setdefault(key.strip(), value.strip())
    return found


def kib_to_bytes(text: str) -> int:
    """Turn `123 kB` of /proc/meminfo into bytes."""
    number, unit = text.split()
    if unit != "kB":
        raise ValueError(f"unit {unit!r} instead of kB")
    return int(number) * 1024
