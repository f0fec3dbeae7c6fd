"""How KV really travelled: the transports that UCX chose for reading the other leg's memory.

Asked for and used are two things: separate containers fall back from CUDA IPC to TCP in silence.
UCX tells what it chose in the log of the leg that reads, once a transfer has happened.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from kit.fact import Fact, Place, observe
from kit.inside.probe_field import Absent

GROUP = "transfer"
ASKED = "UCX_PROTO_INFO"


def collect(place: Place) -> list[Fact]:
    """Read the log of a container whose UCX was told to say what it does; others give none."""
    container = place.container
    if container is None or not _asked(container.attrs["Config"].get("Env") or []):
        return []
    how = f"container log, {ASKED}=y: tables of ucp_get"

    def read() -> list[str]:
        found = read_transports(container.logs().decode("utf-8", "replace"))
        if not found:
            raise Absent("no memory was read from another engine yet")
        return found

    return [observe(GROUP, "transports", how, read, service=place.service)]


def _asked(environment: Iterable[str]) -> bool:
    return any(pair.startswith(f"{ASKED}=y") for pair in environment)


def read_transports(log: str) -> list[str]:
    """Return the `transport/device` pairs of UCX's tables for remote reads, sorted.

    A table is a title between pipes, then rows of range, description and configuration.
    """
    found: set[str] = set()
    reading = False
    for line in log.splitlines():
        cells = [cell.strip() for cell in line.partition("|")[2].split("|")[:-1]]
        if len(cells) == 1:
            reading = "ucp_get" in cells[0]
        elif len(cells) == 3 and reading:
            found.update(re.findall(r"[a-z][a-z0-9_]*/[\w.:-]+", cells[2]))
    return sorted(found)
