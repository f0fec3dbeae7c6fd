"""Which compose file a run starts and which part each of its services plays."""

from __future__ import annotations

from pathlib import Path

from kit.experiment import unknown
from kit.paths import COMPOSE
from kit.value import Value


class Topology(Value):
    """A compose file and its services: `engines` run vLLM, `entry` is asked by the client."""

    name: str
    engines: tuple[str, ...]
    entry: str

    @property
    def file(self) -> Path:
        return COMPOSE / f"{self.name}.yml"


TOPOLOGIES = {
    "single": Topology(name="single", engines=("server",), entry="server"),
}


def find_topology(name: str) -> Topology:
    """Return the topology of that name; raise `UnknownName` with those there are."""
    if name not in TOPOLOGIES:
        raise unknown("topology", name, sorted(TOPOLOGIES))
    return TOPOLOGIES[name]
