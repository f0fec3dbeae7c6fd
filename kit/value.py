"""The one ancestor of every value that is written to or read from a file."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from kit.errors import BadFile, NotFound
from kit.inside.text import printable

MAX_JSON_BYTES = 256 << 20
MAX_JSON_DEPTH = 64
_SHOWN_CHARACTERS = 120
_SURELY_FINITE_DIGITS = 300
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class Value(BaseModel):
    """An immutable record; an unknown key is an error, so that nothing is dropped in silence."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def is_empty(value: object) -> bool:
    """For `exclude_if`: what is empty is left out, so that older files keep their hash."""
    return not value


V = TypeVar("V", bound=BaseModel)


def explain(error: ValidationError) -> str:
    """Return the first complaint as `path.inside[0].file: what is wrong`."""
    first = error.errors()[0]
    path = ""
    for part in first["loc"]:
        path += f"[{part}]" if isinstance(part, int) else f".{one_line(part)}"
    more = error.error_count() - 1
    tail = f" (and {more} more)" if more else ""
    return f"{path.lstrip('.') or '(top)'}: {first['msg']}{tail}"


def one_line(text: str) -> str:
    """Return a text from a file as an error may show it: printable, on one line, not too long."""
    return printable(text, _SHOWN_CHARACTERS)


def parse_value(cls: type[V], raw: Any, source: str, *, strict: bool = False) -> V:
    """Build a value from parsed JSON or YAML; raise `BadFile` naming source and path inside.

    With `strict` a text is never taken for a number, so that "inf" is none either.
    """
    try:
        if strict:  # as JSON: there a list may stand for a tuple even so
            return cls.model_validate_json(json.dumps(raw), strict=True)
        return cls.model_validate(raw)
    except ValidationError as error:
        raise BadFile(
            f"{source}: {explain(error)}", hint="correct the file at that place"
        ) from None


def read_text(path: Path, *, shown: str | None = None) -> str:
    """Read a UTF-8 file; raise `NotFound` or `BadFile` with the file's name.

    More than `MAX_JSON_BYTES` are refused before they are decoded.
    """
    name = shown or str(path)
    try:
        with path.open("rb") as source:
            content = source.read(MAX_JSON_BYTES + 1)
    except FileNotFoundError:
        raise NotFound(f"{name} is not there") from None
    except IsADirectoryError:
        raise NotFound(f"{name} is a folder, not a file") from None
    except OSError as error:
        raise NotFound(f"{name} cannot be read: {error.strerror}") from None
    if len(content) > MAX_JSON_BYTES:
        raise BadFile(f"{name}: larger than {MAX_JSON_BYTES >> 20} MiB")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise BadFile(f"{name}: not UTF-8 at byte {error.start}") from None


def load_json(path: Path, *, finite: bool = True) -> dict[str, Any]:
    """Parse a JSON file that holds an object; raise `BadFile` with file and place.

    Stricter than Python's parser, so that every reader sees the same: no key twice in an object,
    no NaN, no number beyond a float, no half of a character, no more than `MAX_JSON_DEPTH` levels.
    Without `finite` the words NaN and Infinity are numbers: other programs write them.
    """
    text = read_text(path)
    try:
        value = json.loads(
            text,
            object_pairs_hook=_unique_keys,
            parse_constant=_finite if finite else float,
            parse_float=_finite,
            parse_int=_whole,
        )
        _check_depth(value)
        if _SURROGATE.search(text):  # an escaped pair is one character, half a pair is none
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise BadFile(f"{path}: more than {MAX_JSON_DEPTH} levels deep") from None
    except UnicodeEncodeError:
        raise BadFile(f"{path}: an escape stands for half of a character") from None
    except ValueError as error:
        raise BadFile(f"{path}: not JSON: {error}", hint="correct the file") from None
    if not isinstance(value, dict):
        raise BadFile(f"{path}: not an object", hint="correct the file")
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"the key `{one_line(twice)}` stands twice in one object")
    return found


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{one_line(text)} is no finite number")
    return number


def _whole(text: str) -> int:
    if len(text) > _SURELY_FINITE_DIGITS:
        _finite(text)  # a field that holds a float would make it infinite
    return int(text)


def _check_depth(value: Any) -> None:
    """Raise `RecursionError` beyond the depth that every later step can carry."""
    level = [value]
    for _ in range(MAX_JSON_DEPTH):
        level = [
            inner
            for each in level
            if isinstance(each, list | dict)
            for inner in (each.values() if isinstance(each, dict) else each)
        ]
    if level:
        raise RecursionError


def load_yaml(path: Path, *, shown: str | None = None) -> Any:
    """Parse a YAML file; raise `BadFile` with file, line and column when it is malformed."""
    name = shown or str(path)
    try:
        return yaml.safe_load(read_text(path, shown=name))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}" if mark else "unknown place"
        raise BadFile(f"{name}: {where}: {error.problem}", hint="correct the YAML") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # a date that is none, and so on
        raise BadFile(f"{name}: {error}", hint="correct the YAML") from None
