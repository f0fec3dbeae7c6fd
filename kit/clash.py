"""What two services of a rendered topology would take from each other, or others hold already.

`docker compose config` accepts all of it; the engine notices half of the stack later, or the legs
of a pair at their first request.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kit.errors import BadFile, ServicesClash
from kit.platform import parse_cpus

SIDE_CHANNEL = ("VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT")
_TRANSFER = "--kv-transfer-config"
_RANKS = ("--tensor-parallel-size", "-tp", "--data-parallel-size", "-dp")
_EQUAL = (
    "--dtype",
    "--kv-cache-dtype",
    "--load-format",
    "--quantization",
    "--revision",
    "--seed",
)
"""What the legs of a pair must be told alike: else they refuse each other, or texts are wrong."""


def check_services(document: Mapping[str, Any], name: str, *, shared_device: bool = False) -> None:
    """Raise `ServicesClash` or, for legs that cannot be a pair, `BadFile`; `name` is the file's.

    With `shared_device` the engines are meant to be on one device.
    """
    for sentence in clashes(document, shared_device=shared_device):
        raise ServicesClash(sentence, hint="give each service its own in compose/.env")
    for sentence in unequal(document):
        raise BadFile(f"{name}: {sentence}", hint="both legs need one image, model and dtype")


def published(document: Mapping[str, Any]) -> dict[str, list[int]]:
    """Return the host's ports that each service publishes; the engine itself chooses in a range."""
    return {
        name: [
            int(port["published"])
            for port in service.get("ports", ())
            if str(port.get("published", "")).isdecimal()
        ]
        for name, service in document["services"].items()
    }


def clashes(document: Mapping[str, Any], *, shared_device: bool = False) -> Iterator[str]:
    """Yield what two services of a document both claim, and side channels nobody can reach."""
    yield from _shared("port {} is published by", published(document))
    services = document["services"]
    if not shared_device:
        apart = {n: s for n, s in services.items() if "CUDA_VISIBLE_DEVICES" not in _environment(s)}
        yield from _shared(
            "device {} is given to", _all_named({n: _devices(apart[n]) for n in apart})
        )
        yield from _shared("CPU {} is given to", {n: _cpus(s) for n, s in services.items()})
    channels = {n: _side_channels(s) for n, s in services.items()}
    yield from _shared("side channel {} is used by", channels)
    for name, ports in channels.items():
        own = _option(services[name], "--port") or "8000"
        if any(port.startswith(("localhost:", "127.")) for port in ports):
            yield f"the side channel of `{name}` is at {ports[0]}, where no other container is"
        if any(port.endswith(f":{own}") for port in ports):
            yield f"the side channel of `{name}` is at port {own}, where it answers requests"


def unequal(document: Mapping[str, Any]) -> Iterator[str]:
    """Yield in what the legs of a pair differ that must be the same."""
    legs = {n: s for n, s in document["services"].items() if _option(s, _TRANSFER)}
    for (first, one), (second, other) in zip(legs.items(), list(legs.items())[1:], strict=False):
        for what, a in _told(one).items():
            b = _told(other)[what]
            if a != b:
                yield f"`{first}` and `{second}` have different {what}: {a} / {b}"


def _told(leg: Mapping[str, Any]) -> dict[str, str | None]:
    mounts = leg.get("volumes") or ()
    model = next((m.get("source") for m in mounts if m.get("target") == "/model"), None)
    return {"image": leg.get("image"), "model": model} | {k: _option(leg, k) for k in _EQUAL}


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


def _option(service: Mapping[str, Any], *names: str) -> str | None:
    """Return an option's value in a service's command; of several the last, as vLLM does."""
    found = None
    words = [str(word) for word in service.get("command") or ()]
    for word, following in zip(words, [*words[1:], ""], strict=False):
        name, equals, value = word.partition("=")
        if name in names:
            found = value if equals else following
    return found


def _devices(service: Mapping[str, Any]) -> list[str]:
    """Return the devices reserved for a service; `all` for a reservation that names none."""
    reservations = service.get("deploy", {}).get("resources", {}).get("reservations", {})
    found = []
    for each in reservations.get("devices", ()):
        for name in each.get("device_ids") or ["all"]:
            found += str(name).split(",")
    return found


def _all_named(claims: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """Return the claims with the names of the others' devices in place of all devices."""
    every = {d for devices in claims.values() for d in devices if not _is_all(d)} or {"all"}
    return {
        name: sorted(every) if any(map(_is_all, devices)) else devices
        for name, devices in claims.items()
    }


def _is_all(device: str) -> bool:
    return device.rpartition("=")[2] == "all"


def _cpus(service: Mapping[str, Any]) -> list[int]:
    """Return the CPUs that are an engine's device: on GPUs it may share them."""
    if "VLLM_CPU_OMP_THREADS_BIND" not in _environment(service) or not service.get("cpuset"):
        return []
    return parse_cpus(service["cpuset"])


def _side_channels(service: Mapping[str, Any]) -> list[str]:
    """Return `host:port` for every rank of a service that has one; the host is vLLM's default."""
    host, port = (_environment(service).get(key) for key in SIDE_CHANNEL)
    if host is None and "NixlConnector" not in (_option(service, _TRANSFER) or ""):
        return []
    ranks = max(int(_option(service, *pair) or 1) for pair in (_RANKS[:2], _RANKS[2:]))
    return [f"{host or 'localhost'}:{int(port or 5600) + rank}" for rank in range(ranks)]


def is_taken(port: int) -> bool:
    """Tell whether something listens on the port of the loopback address already."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            return error.errno == errno.EADDRINUSE  # a low port may be the engine's, not ours
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
