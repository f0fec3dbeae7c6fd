"""What a window is asked to do: the spec file and the requests file, read and checked."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from json.decoder import scanstring  # type: ignore[attr-defined]
from pathlib import Path
from typing import Any

from .text import printable

STAMPS = ("auto", "kernel", "user")
_SPEC_KEYS = frozenset(
    {
        *("version", "host", "port", "requests", "out", "scrape_every_s", "metrics_path"),
        *("deadline_s", "stamps", "concurrency", "legs", "tool"),
    }
)
_REQUEST_KEYS = frozenset(("id", "path", "body", "tags", "at_s", "lane", "start_s"))
_TEXT = 500  # characters of a refusal
_LARGEST = 1e9  # seconds: a number beyond it is a mistake
_ID = re.compile(r"[!-~]{1,200}")  # it travels as an HTTP header
_PATH = re.compile(r"/[!-~]*")
_LEG = re.compile(r"[a-z][a-z0-9-]*")
_ADDRESS = re.compile(r"[!-~]+:[0-9]{1,5}")


class BadSpec(Exception):
    """The spec or the requests file cannot be used; the text names file and place."""

    def __init__(self, text: str) -> None:
        super().__init__(printable(text, _TEXT))


@dataclass(frozen=True)
class Request:
    """One request to send. `body` is sent as it is; exactly one of `at_s` and `lane` is set."""

    id: str
    path: str
    body: bytes
    streamed: bool
    tags: dict[str, Any]
    at_s: float | None
    lane: str | None
    start_s: float

    def head(self, host: str, port: int) -> bytes:
        """Return the request's bytes up to the body."""
        return (
            f"POST {self.path} HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nX-Request-Id: {self.id}\r\n"
            f"Content-Length: {len(self.body)}\r\n\r\n"
        ).encode("ascii")


@dataclass(frozen=True)
class WindowSpec:
    """One measured window. Files are absolute; times are seconds.

    `legs` are engines behind `host`, name to `host:port`, whose metrics are kept as well. `tool`
    are the words of another load generator that is to send the load; see `inside.tool_window`.
    """

    host: str
    port: int
    requests: Path
    out: Path
    scrape_every_s: float | None
    metrics_path: str
    deadline_s: float
    stamps: str
    concurrency: int | None
    legs: dict[str, str]
    tool: tuple[str, ...] = ()

    @property
    def scraped(self) -> dict[Path, str]:
        """The addresses whose metrics are kept, by the file that keeps them."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        addresses = {"metrics.jsonl.gz": f"{host}:{self.port}"}
        addresses |= {f"metrics-{leg}.jsonl.gz": address for leg, address in self.legs.items()}
        return {
            self.out / file: f"http://{at}{self.metrics_path}" for file, at in addresses.items()
        }


def load_spec(path: Path) -> WindowSpec:
    """Read a spec; paths in it are relative to its folder. Raises `BadSpec`."""
    raw = _parse(_read(path), path.name)
    _known(raw, _SPEC_KEYS, path.name)
    if raw.get("version") != 1:
        raise BadSpec(f"{path.name}: version: 1 is what this reads, not {raw.get('version')!r}")
    get = _Fields(raw, path.name)
    every_s = get.number("scrape_every_s", 0.5, low=0.01, nullable=True)
    limit = get.number("concurrency", None, low=1, nullable=True, whole=True)
    stamps = get.text("stamps", "auto")
    if stamps not in STAMPS:
        raise BadSpec(f"{path.name}: stamps: one of {', '.join(STAMPS)}, not {stamps!r}")
    return WindowSpec(
        host=get.text("host"),
        port=int(get.number("port", low=1, high=65_535, whole=True) or 0),
        requests=path.parent / get.text("requests", "requests.jsonl"),
        out=path.parent / get.text("out"),
        scrape_every_s=every_s,
        metrics_path=get.text("metrics_path", "/metrics"),
        deadline_s=get.number("deadline_s", 600.0, low=0.001) or 0.0,
        stamps=stamps,
        concurrency=None if limit is None else int(limit),
        legs=_legs(raw.get("legs", {}), path.name),
        tool=_words(raw.get("tool", []), path.name),
    )


def _words(raw: object, where: str) -> tuple[str, ...]:
    if not isinstance(raw, list) or not all(isinstance(word, str) for word in raw):
        raise BadSpec(f"{where}: tool: a list of words is needed")
    return tuple(raw)


def _legs(raw: object, where: str) -> dict[str, str]:
    """Check names (they become files') and addresses of engines behind the host."""
    if not isinstance(raw, dict):
        raise BadSpec(f"{where}: legs: an object is needed")
    for name, address in raw.items():
        if not _LEG.fullmatch(name):
            raise BadSpec(f"{where}: legs: {name!r} is no name of a leg")
        if not isinstance(address, str) or not _ADDRESS.fullmatch(address):
            raise BadSpec(f"{where}: legs: {name}: host:port is needed, not {address!r}")
    return dict(raw)


def load_requests(path: Path) -> list[Request]:
    """Read a requests file, one JSON object a line. Raises `BadSpec` with the line's number."""
    requests = []
    seen: set[str] = set()
    for number, line in enumerate(_read(path).split("\n"), 1):
        if not line.strip():
            continue
        request = _request(line, f"{path.name}, line {number}")
        if request.id in seen:
            raise BadSpec(f"{path.name}, line {number}: id: {request.id!r} was there before")
        seen.add(request.id)
        requests.append(request)
    if not requests:
        raise BadSpec(f"{path.name}: no request in it")
    return requests


def member_text(text: str, name: str) -> str:
    """Return one member's value of a JSON object as it is written, byte for byte."""
    decoder = json.JSONDecoder()
    space = re.compile(r"[ \t\n\r]*")

    def skip(at: int) -> int:
        return space.match(text, at).end()  # type: ignore[union-attr]

    at = skip(text.index("{") + 1)
    found = ""
    while text[at] == '"':
        key, at = scanstring(text, at + 1)
        start = skip(skip(at) + 1)  # over the colon
        _, end = decoder.raw_decode(text, start)
        if key == name:
            found = text[start:end]
        at = skip(end)
        if text[at] == ",":
            at = skip(at + 1)
    return found


def _request(line: str, where: str) -> Request:
    raw = _parse(line, where)
    _known(raw, _REQUEST_KEYS, where)
    get = _Fields(raw, where)
    body, tags = raw.get("body"), raw.get("tags", {})
    if not isinstance(body, dict):
        raise BadSpec(f"{where}: body: an object is needed")
    if not isinstance(tags, dict):
        raise BadSpec(f"{where}: tags: an object is needed")
    at_s = get.number("at_s", None, low=0.0, nullable=True)
    lane = get.text("lane", None)
    if (at_s is None) == (not lane):
        raise BadSpec(f"{where}: exactly one of at_s and lane is needed")
    if "start_s" in raw and not lane:
        raise BadSpec(f"{where}: start_s: only a lane has one")
    return Request(
        id=get.text("id", pattern=_ID),
        path=get.text("path", pattern=_PATH),
        body=member_text(line, "body").encode("utf-8"),
        streamed=body.get("stream") is True,
        tags=tags,
        at_s=at_s,
        lane=lane or None,
        start_s=get.number("start_s", 0.0, low=0.0) or 0.0,
    )


class _Fields:
    """Reads an object's fields with their types; a wrong one is named with its place."""

    _MISSING = object()

    def __init__(self, raw: dict[str, Any], where: str) -> None:
        self._raw = raw
        self._where = where

    def _get(self, key: str, default: object) -> Any:
        value = self._raw.get(key, default)
        if value is self._MISSING:
            raise BadSpec(f"{self._where}: {key}: missing")
        return value

    def text(
        self, key: str, default: object = _MISSING, *, pattern: re.Pattern[str] | None = None
    ) -> str:
        value = self._get(key, default)
        if value is None and default is None:
            return ""
        if not isinstance(value, str) or not value:
            raise BadSpec(f"{self._where}: {key}: a text is needed, not {value!r}")
        if pattern and not pattern.fullmatch(value):
            raise BadSpec(f"{self._where}: {key}: {value!r} does not match {pattern.pattern}")
        return value

    def number(
        self,
        key: str,
        default: object = _MISSING,
        *,
        low: float,
        high: float = _LARGEST,
        nullable: bool = False,
        whole: bool = False,
    ) -> float | None:
        value = self._get(key, default)
        if value is None and nullable:
            return None
        kinds = int if whole else (int, float)
        if not isinstance(value, kinds) or isinstance(value, bool) or not low <= value <= high:
            kind = "whole number" if whole else "number"
            asked = f"a {kind} from {low:g} to {high:g} is needed"
            raise BadSpec(f"{self._where}: {key}: {asked}, not {value!r}")
        return float(value)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise BadSpec(f"{path.name}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise BadSpec(f"{path.name}: not UTF-8 at byte {error.start}") from None


def _parse(text: str, where: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadSpec(f"{where}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise BadSpec(f"{where}: an object is needed")
    return value


def _known(raw: dict[str, Any], keys: frozenset[str], where: str) -> None:
    unknown = sorted(set(raw) - keys)
    if unknown:
        raise BadSpec(f"{where}: {unknown[0]}: unknown (known: {', '.join(sorted(keys))})")
