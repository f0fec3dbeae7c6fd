"""The one ancestor of every value that is written to or read from a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from kit.errors import BadFile, NotFound


class Value(BaseModel):
    """An immutable record; an unknown key is an error, so that nothing is dropped in silence."""

    model_config = ConfigDict(frozen=True, extra="forbid")


V = TypeVar("V", bound=BaseModel)


def explain(error: ValidationError) -> str:
    """Return the first complaint as `path.inside[0].file: what is wrong`."""
    first = error.errors()[0]
    path = ""
    for part in first["loc"]:
        key = part if isinstance(part, int) or part.isprintable() else ascii(part)[1:-1]
        path += f"[{key}]" if isinstance(key, int) else f".{key[:80]}"
    more = error.error_count() - 1
    tail = f" (and {more} more)" if more else ""
    return f"{path.lstrip('.') or '(top)'}: {first['msg']}{tail}"


def parse_value(cls: type[V], raw: Any, source: str) -> V:
    """Build a value from parsed JSON or YAML; raise `BadFile` naming source and path inside."""
    try:
        return cls.model_validate(raw)
    except ValidationError as error:
        raise BadFile(
            f"{source}: {explain(error)}", hint="correct the file at that place"
        ) from None


def read_text(path: Path, *, shown: str | None = None) -> str:
    """Read a UTF-8 file; raise `NotFound` or `BadFile` with the file's name."""
    name = shown or str(path)
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise NotFound(f"{name} is not there") from None
    except IsADirectoryError:
        raise NotFound(f"{name} is a folder, not a file") from None
    except UnicodeDecodeError as error:
        raise BadFile(f"{name}: not UTF-8 at byte {error.start}") from None


def load_json(path: Path) -> dict[str, Any]:
    """Parse a JSON file that holds an object; raise `BadFile` with file and place."""
    try:
        value = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:  # the latter: nested too deeply
        raise BadFile(f"{path}: not JSON: {error}", hint="correct the file") from None
    if not isinstance(value, dict):
        raise BadFile(f"{path}: not an object", hint="correct the file")
    return value


def load_yaml(path: Path, *, shown: str | None = None) -> Any:
    """Parse a YAML file; raise `BadFile` with file, line and column when it is malformed."""
    name = shown or str(path)
    try:
        return yaml.safe_load(read_text(path, shown=name))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}" if mark else "unknown place"
        raise BadFile(f"{name}: {where}: {error.problem}", hint="correct the YAML") from None
    except yaml.YAMLError as error:
        raise BadFile(f"{name}: {error}", hint="correct the YAML") from None
