"""compose/pd.yml started by hand for tests of faults: legs whose side channel can be cut alone."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import docker
import httpx
from one_request import Told, finish, send
from proxy_process import metrics, wait_until

from kit import engine
from kit.paths import COMPOSE

LEGS = ("producer", "consumer")
LOAD_FAILED = (500, "InternalServerError", None)  # vLLM's own words in its own stream
EXPIRED = "vllm:nixl_num_kv_expired_reqs_total"
MOVED = "vllm:prompt_tokens_by_source_total:external_kv_transfer"
ABORTED = "vllm:request_success_total:abort"


@dataclass
class Stack:
    """Producer, consumer and proxy, up by plain compose under a project name and port of its own.

    `deadline_s` is the proxy's. The legs' side channel has a network of its own, `side`.
    """

    client: docker.DockerClient
    override: Path
    project: str
    port: int
    deadline_s: float
    body: dict[str, Any]
    killed: set[str] = field(default_factory=set)

    def compose(self, *words: str) -> None:
        files = ("-f", str(COMPOSE / "pd.yml"), "-f", str(self.override))
        done = subprocess.run(
            [engine.cli_program(), "compose", "-p", self.project, *files, *words],
            env={**os.environ, "KIT_PORT": str(self.port)},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, done.stderr

    def up(self, legs: dict[str, dict[str, Any]]) -> None:
        """Start it with these changes to each leg; a leg is made anew where they are others."""
        for name, leg in legs.items():
            leg.setdefault("environment", {})["VLLM_NIXL_SIDE_CHANNEL_HOST"] = f"{name}-side"
            leg["networks"] = {"inside": {}, "side": {"aliases": [f"{name}-side"]}}
        words = [word for name in LEGS for word in (f"--{name}", f"{name}:8000")]
        proxy = {"command": ["--port", "8000", *words, "--deadline-s", str(self.deadline_s)]}
        document = {"services": {**legs, "proxy": proxy}, "networks": {"side": {"internal": True}}}
        self.override.write_text(json.dumps(document))
        self.compose("up", "--wait")

    def down(self) -> None:
        """End it, and check that nothing is left."""
        self.compose("down", "--timeout", "1")
        chosen: dict[str, Any] = {"label": f"com.docker.compose.project={self.project}"}
        assert self.client.containers.list(all=True, filters=chosen) == []
        assert self.client.networks.list(filters=chosen) == []

    def container(self, service: str) -> Any:
        return self.client.containers.get(f"{self.project}-{service}-1")

    def kill(self, service: str) -> None:
        self.killed.add(service)
        self.container(service).kill()

    def since(self) -> dict[str, str]:
        """Return since when each engine runs; nothing for one that does not."""
        states = {leg: self.container(leg).attrs["State"] for leg in LEGS}
        return {leg: state["StartedAt"] for leg, state in states.items() if state["Running"]}

    def health(self) -> int:
        """Return the status of the proxy's /health; 0 where it does not answer."""
        try:
            url = f"http://127.0.0.1:{self.port}/health"
            return httpx.get(url, trust_env=False).status_code
        except httpx.HTTPError:
            return 0

    def heal(self, within_s: float = 30) -> None:
        """Start what was killed, and wait until the proxy finds both legs healthy."""
        for service in self.killed:
            self.container(service).start()
        self.killed.clear()
        wait_until(lambda: self.health() == 200, within_s)

    def metrics(self, leg: str) -> dict[str, float]:
        return metrics(f"http://127.0.0.1:{self.port}/metrics/{leg}")

    def running(self, *legs: str) -> float:
        """Return how many requests the legs hold, those that wait included."""
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
        return sum(self.metrics(leg)[name] for leg in legs for name in names)

    def send(self, **changed: Any) -> socket.socket:
        return send(self.port, **{**self.body, "stream": True, **changed})

    def ask(self, meanwhile: Callable[[], object] = lambda: None, **changed: Any) -> Told:
        """Send a request, do something meanwhile, and return how it ended: within the deadline."""
        sock = self.send(**changed)
        meanwhile()
        return self.finish(sock)

    def finish(self, sock: socket.socket) -> Told:
        """Read an answer to its end, which must come within the deadline of both hops."""
        began = time.monotonic()
        told = finish(sock)
        assert time.monotonic() - began < 2 * self.deadline_s
        return told

    # -- moments of a request --------------------------------------------------------------------

    def computes(self) -> None:
        """Wait until the producer has a request."""
        wait_until(lambda: self.running("producer") == 1)

    def handed_over(self) -> None:
        """Wait until the consumer has a request."""
        wait_until(lambda: self.running("consumer") == 1)

    def decodes(self) -> None:
        """Wait until one more prompt has come over."""
        before = self.metrics("consumer")[MOVED]
        wait_until(lambda: self.metrics("consumer")[MOVED] > before)

    # -- networks --------------------------------------------------------------------------------

    def cut(self, network: str, leg: str) -> None:
        """Disconnect a leg from `side` or from `inside`."""
        self.client.networks.get(f"{self.project}_{network}").disconnect(self.container(leg))

    def join(self, network: str, leg: str) -> None:
        """Undo `cut`; the leg starts anew, as its address may be another one."""
        alias = leg if network == "inside" else f"{leg}-side"
        found = self.client.networks.get(f"{self.project}_{network}")
        found.connect(self.container(leg), aliases=[alias])
        assert leg in self.since()
        self.kill(leg)
