"""`kit check`: what would keep a stack of compose/ from starting, before anything starts."""

from __future__ import annotations

import contextlib
import json
from typing import Annotated, Any

import docker.errors
import typer

from kit import clash, console, engine, process
from kit.errors import BadFile, KitError, PortTaken
from kit.experiment import unknown
from kit.paths import COMPOSE
from kit.topology import TOPOLOGIES

FILES = sorted({topology.compose for topology in TOPOLOGIES.values()})


def check_command(
    name: Annotated[str, typer.Argument(help=f"One of {', '.join(FILES)}.")],
    profile: Annotated[list[str] | None, typer.Option(help="As for docker compose.")] = None,
) -> None:
    """Check a stack before it starts by hand: taken ports by holder, shared devices, equal legs."""
    document = _document(name, profile or [])
    clash.check_services(document, f"compose/{name}.yml")
    for service, ports in clash.published(document).items():
        for port in filter(clash.is_taken, ports):
            raise PortTaken(
                f"port {port} of `{service}` is taken by {_holder(port)}",
                hint="stop its holder, or choose another port; the head of the file names them",
            )
    console.say(f"compose/{name}.yml: nothing is in its way")


def _holder(port: int) -> str:
    """Name what listens on a port: the container that publishes it, else the process."""
    with (
        contextlib.suppress(KitError, docker.errors.DockerException),
        contextlib.closing(engine.connect()) as client,
    ):
        for container in client.containers.list():
            for bound in container.ports.values():
                if any(each["HostPort"] == str(port) for each in bound or ()):
                    return f"the container {container.name}"
    return clash.holder_of(port) or "a process that this user may not see"


def _document(name: str, profiles: list[str]) -> dict[str, Any]:
    """Return what plain compose would start here, compose/.env and variables included."""
    if name not in FILES:
        raise unknown("stack", name, FILES)
    chosen = [word for profile in profiles for word in ("--profile", profile)]
    words = ["compose", "--file", str(COMPOSE / f"{name}.yml"), *chosen, "config"]
    done = process.run(
        [engine.cli_program(), *words, "--format", "json"], env=engine.cli_env(), timeout_s=60
    )
    if not done.ok:
        raise BadFile(f"{name}.yml: compose cannot read it", detail=done.tail)
    document: dict[str, Any] = json.loads(done.stdout)
    return document
