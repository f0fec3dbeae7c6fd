"""Compares two images file by file, from their `docker save` streams."""

from __future__ import annotations

import contextlib
import hashlib
import json
import tarfile
from collections.abc import Iterable, Iterator

from kit.image import as_file

Entry = tuple[object, ...]
_FIELDS = (
    "type", "mode", "owner", "group", "owner name", "group name", "size", "time", "link target",
    "extended attributes", "content",
)  # fmt: skip


def read_layers(chunks: Iterable[bytes]) -> list[dict[str, Entry]]:
    """Return, for each layer of a saved image in order, every member with all that tar records."""
    found: dict[str, dict[str, Entry]] = {}
    manifest: list[dict[str, list[str]]] = []
    with tarfile.open(fileobj=as_file(chunks), mode="r|") as archive:
        for member in archive:
            body = archive.extractfile(member) if member.isfile() else None
            if body is None:
                continue
            if member.name == "manifest.json":
                manifest = json.loads(body.read())
                continue
            with contextlib.suppress(tarfile.ReadError):  # configuration and index are JSON
                found[member.name] = dict(_entries(body))
    return [found.get(name, {}) for name in manifest[0]["Layers"]]


def _entries(layer: object) -> Iterator[tuple[str, Entry]]:
    with tarfile.open(fileobj=layer, mode="r|*") as archive:  # type: ignore[call-overload]
        for item in archive:
            digest = ""
            body = archive.extractfile(item) if item.isfile() else None
            if body is not None:
                digest = hashlib.file_digest(body, "sha256").hexdigest()
            yield (
                item.name,
                (
                    item.type, item.mode, item.uid, item.gid, item.uname, item.gname, item.size,
                    item.mtime, item.linkname, tuple(sorted(item.pax_headers.items())), digest,
                ),
            )  # fmt: skip


def compare_layers(
    first: list[dict[str, Entry]], second: list[dict[str, Entry]], *, names: tuple[str, str]
) -> list[str]:
    """Return one line for each member that differs: layer, path, and what about it differs."""
    lines = []
    if len(first) != len(second):
        lines.append(f"{names[0]} has {len(first)} layers, {names[1]} has {len(second)}")
    for place, (a, b) in enumerate(zip(first, second, strict=False), start=1):
        for path in sorted(a.keys() | b.keys()):
            if path not in a or path not in b:
                lines.append(f"layer {place}: {path}: only in {names[0 if path in a else 1]}")
            elif a[path] != b[path]:
                what = [f for f, x, y in zip(_FIELDS, a[path], b[path], strict=True) if x != y]
                lines.append(f"layer {place}: {path}: {', '.join(what)}")
        if list(a) != list(b) and a == b:
            lines.append(f"layer {place}: the same members in another order")
    return lines
