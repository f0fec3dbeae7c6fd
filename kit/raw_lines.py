"""The lines of a run's raw files, checked as they are read: a run may come from anybody.

What the kit computes with must have its type; keys that it does not know are kept and ignored.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, NotRequired

from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict  # pydantic reads this one, or Python 3.12's own

from kit.errors import BadFile
from kit.value import explain

_OPEN = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


@with_config(_OPEN)
class SampleLine(TypedDict):
    """A line of samples.jsonl; see `kit.inside.writer.sample_of`."""

    id: str
    lane: NotRequired[str | None]
    tags: NotRequired[dict[str, Any]]
    intended_s: float | None
    connect_s: NotRequired[float | None]
    sent_s: float | None
    chunk_s: list[float]
    chunk_chars: NotRequired[list[int]]
    text: NotRequired[str]
    done_s: NotRequired[float | None]
    status: NotRequired[int | None]
    prompt_tokens: NotRequired[int | None]
    completion_tokens: NotRequired[int | None]
    cached_tokens: NotRequired[int | None]
    finish_reason: NotRequired[str | None]
    prompt_logprobs: NotRequired[list[float | None] | None]
    error: NotRequired[str | None]


@with_config(_OPEN)
class TelemetryLine(TypedDict):
    """A line of telemetry.jsonl; see `kit.watch`."""

    t_s: float
    busy_s: NotRequired[float | None]
    ours_s: NotRequired[float | None]
    cpuset: NotRequired[list[int]]
    throttled: NotRequired[str | bool | None]
    power_limited: NotRequired[bool | None]


@with_config(_OPEN)
class RequestLine(TypedDict):
    """A line of a workload's load file; see `kit.inside.spec`."""

    id: str
    body: dict[str, Any]
    lane: NotRequired[str | None]
    at_s: NotRequired[float | None]
    tags: NotRequired[dict[str, Any]]


@with_config(_OPEN)
class ScrapeLine(TypedDict):
    """A line of metrics.jsonl.gz; see `kit.inside.scrape`."""

    t_s: float
    status: NotRequired[int | None]
    text: NotRequired[str | None]


@with_config(_OPEN)
class LoadFile(TypedDict):
    """A window's load.json; see `kit.inside.window.summarise`."""

    stamps: NotRequired[str | None]
    clock_step_s: NotRequired[float | None]


SAMPLE: TypeAdapter[Any] = TypeAdapter(SampleLine)
TELEMETRY: TypeAdapter[Any] = TypeAdapter(TelemetryLine)
REQUEST: TypeAdapter[Any] = TypeAdapter(RequestLine)
SCRAPE: TypeAdapter[Any] = TypeAdapter(ScrapeLine)
LOAD: TypeAdapter[Any] = TypeAdapter(LoadFile)


def read_lines(path: Path, kind: TypeAdapter[Any]) -> Iterator[dict[str, Any]]:
    """Yield a file's lines, packed or not; raise `BadFile` with the number of a bad one."""
    number, where = 0, f"{path.name} in {path.parent}"
    opened: Callable[[Path, str], IO[bytes]] = gzip.open if path.suffix == ".gz" else open  # type: ignore[assignment]
    try:
        with opened(path, "rb") as lines:
            for number, line in enumerate(lines, 1):  # noqa: B007
                yield kind.validate_json(line)
    except FileNotFoundError:
        raise BadFile(f"{where} is not there") from None
    except ValidationError as error:
        raise BadFile(f"{where}, line {number}: {explain(error)}") from None
    except (OSError, EOFError, zlib.error) as error:
        raise BadFile(f"{where}, after line {number}: {error}") from None


def check(value: Mapping[str, Any], kind: TypeAdapter[Any], where: str) -> dict[str, Any]:
    """Return a document that was read already, if it is of this kind."""
    try:
        return dict(kind.validate_python(value))
    except ValidationError as error:
        raise BadFile(f"{where}: {explain(error)}") from None
