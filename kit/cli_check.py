"""`kit check`: what would keep a stack of compose/ from starting, before anything starts."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from kit import clash, console, engine, process
from kit.errors import BadFile, PortTaken, ServicesClash
from kit.experiment import unknown
from kit.paths import COMPOSE
from kit.topology import TOPOLOGIES

FILES = sorted({topology.compose for topology in TOPOLOGIES.values()})


def check_command(
    name: Annotated[str, typer.Argument(help=f"One of {', '.join(FILES)}.")],
    profile: Annotated[list[str] | None, typer.Option(help="As for docker compose.")] = None,
) -> None:
    """Check a stack before it starts by hand: taken ports by holder, shared devices, addresses."""
    document = _document(name, profile or [])
    for sentence in clash.clashes(document):
        raise ServicesClash(sentence, hint="give each service its own in compose/.env")
    for service, ports in clash.published(document).items():
        for port in filter(clash.is_taken, ports):
            holder = clash.holder_of(port) or "a process that this user may not see"
            raise PortTaken(
                f"port {port} of `{service}` is taken by {holder}",
                hint="stop its holder, or choose another port; the head of the file names them",
            )
    console.say(f"compose/{name}.yml: nothing is in its way")


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
