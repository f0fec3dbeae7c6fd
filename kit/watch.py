"""Watches a run from outside its containers: the engine's events and the host's telemetry.

Both write each line as it happens, so that a crash keeps what was seen.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import docker
import docker.errors
import requests

from kit import engine
from kit.errors import KitError
from kit.owner import LABEL
from kit.store import disk_error

EVENTS = ("start", "health_status", "kill", "die", "oom", "destroy")


class JsonLines:
    """Appends lines to a file from a thread; what goes wrong there is raised in the main one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._failed: KitError | None = None

    def append(self, line: dict[str, Any]) -> None:
        """Write one line and flush it; after a failure lines are dropped."""
        if self._failed is not None:
            return
        try:
            with self._path.open("a", encoding="utf-8") as out:
                out.write(json.dumps(line) + "\n")
        except OSError as error:
            self._failed = disk_error(error, self._path)

    def check(self) -> None:
        """Raise what went wrong."""
        if self._failed is not None:
            raise self._failed


class EventLog:
    """Records the engine's container events of one run as they arrive.

    Each line: `t_s` (engine's UNIX time), `action`, `service`, `container` (id, 12 hex digits),
    `exit_code` where the engine gives one.
    """

    def __init__(self, run_id: str, path: Path) -> None:
        self._run_id = run_id
        self._file = JsonLines(path)
        self._stream: Any = None
        self._client: docker.DockerClient | None = None
        self._thread = threading.Thread(target=self._record, daemon=True, name="events")
        self.lines: list[dict[str, Any]] = []

    def __enter__(self) -> EventLog:
        self._client = engine.connect()
        self._stream = self._client.api.events(
            decode=True, filters={"label": f"{LABEL}={self._run_id}", "type": "container"}
        )
        self._thread.start()
        return self

    def _record(self) -> None:
        for event in self._events():
            action = event.get("Action", "")
            if not action.startswith(EVENTS):
                continue
            attributes = event["Actor"]["Attributes"]
            line = {
                "t_s": event["timeNano"] / 1e9,
                "action": action,
                "service": attributes.get("com.docker.compose.service"),
                "container": event["Actor"]["ID"][:12],
                "exit_code": attributes.get("exitCode"),
            }
            self.lines.append(line)
            self._file.append(line)

    def _events(self) -> Iterator[dict[str, Any]]:
        """Yield events until the stream is closed, here or by the engine's end."""
        try:
            yield from self._stream
        except (requests.RequestException, docker.errors.DockerException, OSError, ValueError):
            return

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._stream is not None:
            with contextlib.suppress(OSError, AttributeError):  # of an engine that is gone
                self._stream.close()
        self._thread.join(timeout=5)
        if self._client is not None:
            self._client.close()
        if kind is None:
            self._file.check()


def accounted_s(
    events: Sequence[dict[str, Any]], services: Sequence[str], load_s: float
) -> float | None:
    """Return the time that vLLM and the load needed, from the engine's events.

    Container started to first healthy of each service (they start one after the other), plus
    `load_s` (first send to last byte, from samples), plus first stop asked to last container
    removed. None when an event is missing.
    """

    def first(action: str, service: str | None = None) -> float | None:
        found = [
            float(e["t_s"])
            for e in events
            if e["action"].startswith(action) and service in (None, e["service"])
        ]
        return min(found, default=None)

    starting_s = 0.0
    for service in services:
        started, healthy = first("start", service), first("health_status: healthy", service)
        if started is None or healthy is None:
            return None
        starting_s += healthy - started
    asked = first("kill")
    gone = [float(e["t_s"]) for e in events if e["action"] == "destroy"]
    if asked is None or not gone:
        return None
    return starting_s + load_s + (max(gone) - asked)


class Telemetry:
    """Samples the host beside a measured window.

    Each line: `t_s` (monotonic), `cpuset` (CPU numbers of the server), `busy_s` (time these CPUs
    were busy, stolen time included), `ours_s` (CPU time of the run's containers on them),
    `load_1m`, and for GPUs `devices`, `throttled` (a reason, false, or null when unknown) and
    `power_limited`.
    """

    def __init__(
        self,
        containers: Sequence[str],
        cpus: Sequence[int],
        path: Path,
        *,
        every_s: float = 2.0,
        devices: Callable[[], dict[str, Any]] | None = None,
    ) -> None:
        self._containers = containers
        self._cpus = list(cpus)
        self._file = JsonLines(path)
        self._every_s = every_s
        self._devices = devices
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True, name="telemetry")
        self.lines: list[dict[str, Any]] = []

    def __enter__(self) -> Telemetry:
        self._client = engine.connect()
        self._take()
        self._thread.start()
        return self

    def _sample(self) -> None:
        while not self._stop.wait(self._every_s):
            self._take()

    def _take(self) -> None:
        line: dict[str, Any] = {
            "t_s": time.monotonic(),
            "cpuset": self._cpus,
            "busy_s": _busy_s(self._cpus),
            "ours_s": self._ours_s(),
            "load_1m": os.getloadavg()[0],
        }
        line.update(self._devices() if self._devices else {})
        self.lines.append(line)
        self._file.append(line)

    def _ours_s(self) -> float:
        """Sum the containers' CPU time; a container that is gone keeps its last value."""
        total = 0.0
        for name in self._containers:
            try:
                stats = self._client.api.stats(name, stream=False, one_shot=True)
                total += stats["cpu_stats"]["cpu_usage"]["total_usage"] / 1e9
            except (requests.RequestException, ConnectionError, KeyError):
                continue  # the engine's refusals among them
        return total

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._stop.set()
        self._thread.join(timeout=10)
        self._take()
        self._client.close()
        if kind is None:
            self._file.check()


def _busy_s(cpus: Sequence[int]) -> float:
    """Return seconds in which these CPUs were not idle, from /proc/stat (steal included)."""
    wanted = {f"cpu{n}" for n in cpus}
    ticks = 0
    for line in Path("/proc/stat").read_text("ascii").splitlines():
        name, *fields = line.split()
        if name in wanted:
            user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, fields[:8])
            ticks += user + nice + system + irq + softirq + steal
    return ticks / os.sysconf("SC_CLK_TCK")
