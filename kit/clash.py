"""What two services of a rendered topology would take from each other, or others hold already.

`docker compose config` accepts all of it; the engine notices half of the stack later.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

SIDE_CHANNEL = ("VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT")
_TP = "--tensor-parallel-size"


def published(document: Mapping[str, Any]) -> dict[str, list[int]]:
    """Return the host's ports that each service publishes."""
    return {
        name: [int(port["published"]) for port in service.get("ports", ()) if port.get("published")]
        for name, service in document["services"].items()
    }


def clashes(document: Mapping[str, Any]) -> Iterator[str]:
    """Yield what two services of a document both claim, and side channels nobody can reach."""
    yield from _shared("port {} is published by", published(document))
    services = document["services"]
    apart = {n: s for n, s in services.items() if "CUDA_VISIBLE_DEVICES" not in _environment(s)}
    yield from _shared("device {} is given to", {n: _devices(s) for n, s in apart.items()})
    channels = {n: _side_channels(s) for n, s in services.items()}
    yield from _shared("side channel {} is used by", channels)
    for name, ports in channels.items():
        if any(port.startswith(("localhost:", "127.")) for port in ports):
            yield f"the side channel of `{name}` is at {ports[0]}, where no other container is"


def _shared(sentence: str, claims: Mapping[str, list[Any]]) -> Iterator[str]:
    holders: dict[Any, list[str]] = {}
    for name, claimed in claims.items():
        for one in claimed:
            holders.setdefault(one, []).append(f"`{name}`")
    for one, names in holders.items():
        if len(names) > 1:
            yield f"{sentence.format(one)} {' and '.join(names)}"


def _environment(service: Mapping[str, Any]) -> Mapping[str, Any]:
    found: Mapping[str, Any] = service.get("environment") or {}
    return found


def _devices(service: Mapping[str, Any]) -> list[str]:
    reservations = service.get("deploy", {}).get("resources", {}).get("reservations", {})
    return [i for each in reservations.get("devices", ()) for i in each.get("device_ids", ())]


def _side_channels(service: Mapping[str, Any]) -> list[str]:
    """Return `host:port` for every rank of a service that has one."""
    host, port = (_environment(service).get(key) for key in SIDE_CHANNEL)
    if host is None:
        return []
    words = [str(word) for word in service.get("command") or ()]
    ranks = next((int(w.split("=")[1]) for w in words if w.startswith(f"{_TP}=")), 1)
    return [f"{host}:{int(port or 5600) + rank}" for rank in range(ranks)]


def is_taken(port: int) -> bool:
    """Tell whether something listens on the port of the loopback address already."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return True
    return False


def holder_of(port: int, proc: Path = Path("/proc")) -> str | None:
    """Return `name (process id)` of what listens on a TCP port; None where this user may not see.

    By the socket's inode in /proc/net/tcp and the open files of the processes.
    """
    wanted = _inodes(port, proc)
    for folder in proc.glob("[0-9]*"):
        with contextlib.suppress(OSError):
            for link in (folder / "fd").iterdir():
                found = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(link))
                if found and found[1] in wanted:
                    name = (folder / "comm").read_text("utf-8", errors="replace").strip()
                    return f"{name} ({folder.name})"
    return None


def _inodes(port: int, proc: Path) -> set[str]:
    found = set()
    for table in ("net/tcp", "net/tcp6"):
        with contextlib.suppress(OSError):
            for line in (proc / table).read_text("ascii").splitlines()[1:]:
                words = line.split()
                if words[3] == "0A" and int(words[1].rpartition(":")[2], 16) == port:
                    found.add(words[9])
    return found
