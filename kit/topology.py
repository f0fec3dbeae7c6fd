"""Which services of which compose file a run starts, and which part each of them plays."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from kit.experiment import unknown
from kit.paths import COMPOSE
from kit.value import Value

PORT = 8000  # of every service, inside the containers' own network

Part = Literal["producer", "consumer", "replica"]


class Topology(Value):
    """A compose file and the services that a run starts, one after the other, in this order.

    `engines` run vLLM; `entry` is what the client asks: the one engine, or the proxy before them,
    for which `parts` says what each engine is. `settings` are the compose file's own variables.
    """

    name: str
    compose: str
    engines: tuple[str, ...]
    entry: str
    parts: dict[str, Part] = {}
    settings: dict[str, str] = {}

    @property
    def file(self) -> Path:
        return COMPOSE / f"{self.compose}.yml"

    @property
    def proxy(self) -> str | None:
        """The service that relays to the engines; None where the client asks the engine itself."""
        return None if self.entry in self.engines else self.entry

    @property
    def services(self) -> tuple[str, ...]:
        """The services that must be healthy, in the order in which they start."""
        return self.engines if self.proxy is None else (*self.engines, self.proxy)

    @property
    def devices_are_shared(self) -> bool:
        """Whether every engine sees all devices, not its own alone."""
        return self.settings.get("KIT_ISOLATION") == "shared-ipc"

    @property
    def proxy_words(self) -> tuple[str, ...]:
        """The proxy's arguments; empty without one."""
        if self.proxy is None:
            return ()
        legs = [w for name, part in self.parts.items() for w in (f"--{part}", f"{name}:{PORT}")]
        return ("--port", str(PORT), *legs)


def _pd(name: str, isolation: str) -> Topology:
    return Topology(
        name=name,
        compose="pd",
        engines=("producer", "consumer"),
        entry="proxy",
        parts={"producer": "producer", "consumer": "consumer"},
        settings={"KIT_ISOLATION": isolation},
    )


_ALL = (
    Topology(name="single", compose="single", engines=("server",), entry="server"),
    Topology(name="tp", compose="tp", engines=("server",), entry="server"),
    Topology(
        name="tp-proxied",
        compose="tp",
        engines=("server",),
        entry="proxy",
        parts={"server": "replica"},
    ),
    Topology(
        name="replicas",
        compose="pd",
        engines=("replica-1", "replica-2"),
        entry="baseline",
        parts={"replica-1": "replica", "replica-2": "replica"},
    ),
    _pd("pd", "strict"),
    _pd("pd-shared-ipc", "shared-ipc"),
)
TOPOLOGIES = {each.name: each for each in _ALL}


def find_topology(name: str) -> Topology:
    """Return the topology of that name; raise `UnknownName` with those there are."""
    if name not in TOPOLOGIES:
        raise unknown("topology", name, sorted(TOPOLOGIES))
    return TOPOLOGIES[name]
