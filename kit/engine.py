"""Speaks to the Docker Engine: the SDK for facts and containers, the CLI for compose and buildx.

Both always talk to one endpoint, resolved here in the CLI's own order: `DOCKER_HOST`, then
`DOCKER_CONTEXT` or the current context of the Docker configuration, then the default socket.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import json
import os
import re
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import docker
import docker.errors
import requests
import urllib3

from kit import process
from kit.errors import (
    DiskFull,
    EngineForbidden,
    EngineLost,
    EngineMissing,
    EngineTooOld,
    EngineUnreachable,
    ToolMissing,
)

DEFAULT_SOCKET = "unix:///var/run/docker.sock"
SYSTEM_CLI = "/usr/bin/docker"
MINIMUM_ENGINE = 26
SETUP_HINT = "run `nox -s engine`, or install Docker Engine >= 26 with compose v2 and buildx"
_KINDS = {"unix": "unix socket", "tcp": "tcp", "http": "tcp", "https": "tcp", "ssh": "ssh"}
_PLUGINS = ("compose", "buildx")
_CONNECT_TIMEOUT_S = 5.0
NO_SPACE = "no space left on device"
NO_ANSWER = (EngineLost, EngineMissing, EngineUnreachable)
"""Errors after which nobody can say what is still on the engine."""
BACK_AFTER_S = 60.0


@dataclass(frozen=True)
class Endpoint:
    """Where the engine listens. `chosen_by` names the setting; the address is never recorded."""

    host: str
    chosen_by: str = "default"
    cert_dir: Path | None = None
    verify: bool = True

    @property
    def kind(self) -> str:
        scheme = urlsplit(self.host).scheme
        if scheme not in _KINDS:
            raise EngineUnreachable(
                f"the engine address of {self.chosen_by} starts with no scheme the kit knows",
                hint="use unix://, tcp:// or ssh://, or unset it",
            )
        return _KINDS[scheme]


def endpoint() -> Endpoint:
    """Resolve the engine's address; raise `EngineUnreachable` for a context that is not there."""
    cert_dir = os.environ.get("DOCKER_CERT_PATH")
    verify = bool(os.environ.get("DOCKER_TLS_VERIFY"))
    host = os.environ.get("DOCKER_HOST")
    if host:
        certs = Path(cert_dir) if cert_dir else None
        return Endpoint(host, "DOCKER_HOST", certs if verify else None, verify)
    name = os.environ.get("DOCKER_CONTEXT") or _current_context()
    if name in ("", "default"):
        return Endpoint(DEFAULT_SOCKET)
    return _context_endpoint(name)


def config_dir() -> Path:
    """Return the folder of the caller's Docker configuration."""
    chosen = os.environ.get("DOCKER_CONFIG")
    return Path(chosen) if chosen else Path.home() / ".docker"


def _current_context() -> str:
    path = config_dir() / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return ""
    except (ValueError, RecursionError):
        raise EngineUnreachable(f"{path} is not JSON", hint="correct it, or remove it") from None
    return str(config.get("currentContext") or "") if isinstance(config, dict) else ""


def _context_endpoint(name: str) -> Endpoint:
    digest = hashlib.sha256(name.encode()).hexdigest()
    contexts = config_dir() / "contexts"
    try:
        meta = json.loads((contexts / "meta" / digest / "meta.json").read_text(encoding="utf-8"))
        found = meta["Endpoints"]["docker"]
        host = str(found.get("Host") or DEFAULT_SOCKET)
    except (OSError, ValueError, KeyError, TypeError):
        raise EngineUnreachable(
            f"the Docker context `{name}` is not there or names no engine",
            hint="see `docker context ls`; `docker context use default` takes the local engine",
        ) from None
    certs = contexts / "tls" / digest / "docker"
    verify = not found.get("SkipTLSVerify", False)
    return Endpoint(host, f"context {name}", certs if certs.is_dir() else None, verify)


def connect(*, timeout_s: float = 60.0) -> docker.DockerClient:
    """Return a client of the engine, checked to answer and to be new enough.

    Raises `EngineMissing`, `EngineForbidden`, `EngineUnreachable` or `EngineTooOld`.
    """
    where = endpoint()
    _check_reachable(where)
    try:
        client = docker.DockerClient(
            base_url=where.host,
            timeout=timeout_s,  # type: ignore[arg-type]
            tls=_tls(where),
            use_ssh_client=where.kind == "ssh",
        )
        version = client.version()
    except (docker.errors.DockerException, requests.RequestException, OSError) as error:
        raise _unreachable(where, str(error)) from None
    number = str(version.get("Version", "")) or "(unknown)"
    if is_podman(version):
        found = f"Podman {number} answers"
    elif _major(number) < MINIMUM_ENGINE:
        found = f"Docker Engine {number} is too old"
    else:
        return client
    client.close()
    raise EngineTooOld(f"{found}, Docker Engine {MINIMUM_ENGINE} is needed", hint=SETUP_HINT)


def is_podman(version: Mapping[str, Any]) -> bool:
    """Say whether Podman gave this answer to Docker's question about versions."""
    return any(part.get("Name") == "Podman Engine" for part in version.get("Components") or [])


def _major(version: str) -> int:
    found = re.match(r"v?(\d+)", version)
    return int(found.group(1)) if found else 0


def _tls(where: Endpoint) -> Any:
    if where.cert_dir is None:
        return False
    pair = (str(where.cert_dir / "cert.pem"), str(where.cert_dir / "key.pem"))
    try:
        return docker.tls.TLSConfig(
            client_cert=pair if Path(pair[0]).exists() else None,
            ca_cert=str(where.cert_dir / "ca.pem") if where.verify else None,
            verify=where.verify,
        )
    except docker.errors.TLSParameterError as error:
        raise EngineUnreachable(
            f"the TLS files of {where.chosen_by} cannot be used: {error}".splitlines()[0],
            hint="correct DOCKER_CERT_PATH or the context",
        ) from None


def _check_reachable(where: Endpoint) -> None:
    """Open the socket once: the SDK's own errors do not tell missing, refused and forbidden."""
    parts = urlsplit(where.host)
    try:
        if where.kind == "unix socket":
            with socket.socket(socket.AF_UNIX) as probe:
                probe.settimeout(_CONNECT_TIMEOUT_S)
                probe.connect(parts.path)
        elif where.kind == "tcp":
            address = (parts.hostname or "localhost", parts.port or 2375)
            socket.create_connection(address, _CONNECT_TIMEOUT_S).close()
    except (OSError, ValueError) as error:
        raise _refusal(where, error) from None


def _refusal(where: Endpoint, error: OSError | ValueError) -> Exception:
    number = error.errno if isinstance(error, OSError) else None
    if number in (errno.EACCES, errno.EPERM):
        return EngineForbidden(
            "the engine's socket refuses this user",
            hint="run as root, or join the group `docker` (`sudo usermod -aG docker $USER`)",
        )
    if where.chosen_by == "default" and number in (errno.ENOENT, errno.ENOTDIR):
        return EngineMissing("no Docker Engine answers on this machine", hint=SETUP_HINT)
    return _unreachable(where, str(error))


def _unreachable(where: Endpoint, reason: str) -> EngineUnreachable:
    if where.chosen_by == "default":
        hint = "start the daemon (`nox -s engine`, or `systemctl start docker`)"
    else:
        hint = f"correct or unset it ({where.chosen_by}), or start that engine"
    return EngineUnreachable(
        f"the engine that {where.chosen_by} points to ({where.kind}) does not answer",
        hint=hint,
        detail=reason,
    )


@contextlib.contextmanager
def answering() -> Iterator[None]:
    """Turn the loss of the engine inside the block into `EngineLost`, its full disk into `DiskFull`

    Answers by which it refuses one request stay what they are.
    """
    try:
        yield
    except docker.errors.APIError as error:
        if NO_SPACE in str(error.explanation):
            raise disk_full(str(error.explanation)) from error
        raise
    except (requests.RequestException, urllib3.exceptions.HTTPError, ConnectionError) as error:
        raise lost(str(error)) from error


def disk_full(words: str) -> DiskFull:
    """Return what an engine whose own disk is full means, in its words."""
    return DiskFull(f"the engine has no space left: {words}", hint="free space for the engine")


def lost(detail: str) -> EngineLost:
    """Return what an engine that went away in the middle of the work means."""
    return EngineLost(
        "the engine stopped answering",
        hint="start it again; the next run removes what this one may have left",
        detail=detail,
    )


def wait_until_back(
    client: docker.DockerClient, say: Callable[[str], None], *, patience_s: float = BACK_AFTER_S
) -> bool:
    """Wait for an engine that does not answer; return whether it had been away.

    Raises `EngineLost` when it stays away for longer than `patience_s`.
    """
    away, deadline = False, time.monotonic() + patience_s
    while True:
        try:
            with answering():
                client.ping()
            return away
        except EngineLost:
            if time.monotonic() > deadline:
                raise
        if not away:
            say(f"  the engine does not answer; waiting up to {patience_s:.0f} s to clean up")
            away = True
        time.sleep(0.5)


def endpoint_kind() -> str:
    """Return how the engine is reached ("unix socket", "tcp", "ssh"), never its address."""
    return endpoint().kind


def cli_env() -> dict[str, str]:
    """Return the environment in which the CLI talks to the very endpoint the SDK uses.

    Whatever else would change what it does (a platform, a builder) is left out.
    """
    where = endpoint()
    env = {
        key: value
        for key, value in os.environ.items()
        if key == "DOCKER_CONFIG" or not key.startswith(("DOCKER_", "BUILDX_", "BUILDKIT_"))
    }
    env["DOCKER_HOST"] = where.host
    if where.cert_dir is not None:
        env["DOCKER_CERT_PATH"] = str(where.cert_dir)
        env["DOCKER_TLS_VERIFY" if where.verify else "DOCKER_TLS"] = "1"
    return env


def cli_program() -> str:
    """Return a Docker CLI that has compose v2 and buildx.

    The distribution's own comes first: a bare client that stands earlier in PATH lacks plugins.
    Raises `EngineMissing`.
    """
    names = [SYSTEM_CLI]
    names += [f"{folder}/docker" for folder in os.get_exec_path() if folder]
    found = [name for name in dict.fromkeys(names) if shutil.which(name)]
    for name in found:
        if all(_plugin_version(name, plugin) for plugin in _PLUGINS):
            return name
    if not found:
        raise EngineMissing("the Docker CLI is not installed", hint=SETUP_HINT)
    lacking = [plugin for plugin in _PLUGINS if not _plugin_version(found[0], plugin)]
    raise EngineMissing(f"the Docker CLI has no {' and no '.join(lacking)}", hint=SETUP_HINT)


def _plugin_version(program: str, plugin: str) -> str:
    """Return a plugin's version, or "" where it is absent or not of the second generation."""
    stamp = Path(program).stat().st_mtime_ns
    return _ask_plugin(program, plugin, stamp) or _ask_plugin.__wrapped__(program, plugin, stamp)


@functools.lru_cache(maxsize=32)
def _ask_plugin(program: str, plugin: str, stamp: int) -> str:
    del stamp  # part of the cache's key: an installed or replaced CLI is asked anew
    try:
        done = process.run([program, plugin, "version"], timeout_s=30)
    except (ToolMissing, PermissionError):
        return ""
    found = re.search(r"\bv?(\d+\.\d+\.\d+\S*)", done.stdout)
    if not done.ok or found is None:
        return ""
    return found.group(1) if plugin != "compose" or _major(found.group(1)) >= 2 else ""


def cli(
    *args: str,
    timeout_s: float | None = None,
    stdin: bytes | None = None,
    env: Mapping[str, str] | None = None,
) -> process.Completed:
    """Run `docker ARGS` against the resolved endpoint; `env` adds to the environment.

    Never raises for a bad exit status; raises `EngineMissing` where no usable CLI is installed.
    """
    full = cli_env() | dict(env or {})
    return process.run([cli_program(), *args], env=full, stdin=stdin, timeout_s=timeout_s)


def plugin_versions() -> dict[str, str]:
    """Return the versions of the CLI's plugins; no engine is asked. Raises `EngineMissing`."""
    program = cli_program()
    return {plugin: _plugin_version(program, plugin) for plugin in _PLUGINS}


def versions() -> dict[str, str | None]:
    """Return the versions and settings of engine, plugins and host that can change results."""
    client = connect()
    try:
        told: dict[str, Any] = client.version()
        info: dict[str, Any] = client.info()
    finally:
        client.close()
    plugins = plugin_versions()
    names = {part.get("Name"): part.get("Version") for part in told.get("Components") or []}
    return {
        "engine": told.get("Version"),
        "api": told.get("ApiVersion"),
        "endpoint": endpoint_kind(),
        **plugins,
        "containerd": names.get("containerd"),
        "runc": names.get("runc"),
        "storage_driver": info.get("Driver"),
        "cgroup_version": info.get("CgroupVersion"),
        "cgroup_driver": info.get("CgroupDriver"),
        "os": info.get("OperatingSystem"),
        "kernel": info.get("KernelVersion"),
        "architecture": info.get("Architecture"),
    }
