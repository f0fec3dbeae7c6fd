"""Starts the real proxy in front of real stubs, and reads what they count."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families
from stub_process import Stub, running_stub

from kit.paths import ROOT


@dataclass
class RunningProxy:
    """A running proxy; its log is what it prints."""

    process: subprocess.Popen[str]
    port: int
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def requests(self) -> list[dict[str, Any]]:
        """Return its log's lines about requests, so far."""
        lines = [json.loads(line) for line in self.log.read_text().splitlines()]
        return [line for line in lines if line["event"] == "request"]


@contextlib.contextmanager
def running_proxy(folder: Path, *words: str) -> Iterator[RunningProxy]:
    """Run a proxy on a free port until the block ends."""
    log = folder / "proxy.log"
    module = [sys.executable, "-m", "kit.inside.proxy", "--host", "127.0.0.1", "--port", "0"]
    with log.open("w") as out:
        process = subprocess.Popen([*module, *words], cwd=ROOT, stdout=out)
    try:
        wait_until(lambda: "\n" in log.read_text() or process.poll() is not None)
        first = log.read_text().splitlines()
        yield RunningProxy(process, json.loads(first[0])["port"] if first else 0, log)
    finally:
        process.kill()
        process.wait()


@dataclass
class Pair:
    """A proxy with a producer and a consumer behind it."""

    proxy: RunningProxy
    producer: Stub
    consumer: Stub


def role(name: str, **told: str) -> tuple[str, str]:
    config = {"kv_connector": "NixlConnector", "kv_role": f"kv_{name}", **told}
    return "--kv-transfer-config", json.dumps(config)


@contextlib.contextmanager
def running_pair(
    folder: Path,
    *words: str,
    producer: dict[str, Any] | None = None,
    consumer: dict[str, Any] | None = None,
    policy: str = "fail",
) -> Iterator[Pair]:
    """Run both legs with what is planted in them, and a proxy with these arguments.

    `policy` is what the consumer does with a prompt whose blocks it could not load.
    """
    with contextlib.ExitStack() as stack:
        legs = {}
        for name, config in (("producer", producer), ("consumer", consumer)):
            place = folder / name
            place.mkdir()
            told = role(name, kv_load_failure_policy=policy)
            arguments = ("--port", "0", "--block-size", "4", *told)
            legs[name] = stack.enter_context(running_stub(place, *arguments, **(config or {})))
        addresses = [w for n, leg in legs.items() for w in (f"--{n}", f"127.0.0.1:{leg.port}")]
        proxy = stack.enter_context(running_proxy(folder, *addresses, *words))
        yield Pair(proxy, legs["producer"], legs["consumer"])


def metrics(url: str) -> dict[str, float]:
    """Return a page's samples by name, with a label that tells series apart after a colon."""
    found = {}
    for family in text_string_to_metric_families(httpx.get(url, trust_env=False).text):
        for sample in family.samples:
            told = [sample.labels.get(k) for k in ("source", "leg", "kind", "finished_reason")]
            found[":".join([sample.name, *(v for v in told if v)])] = sample.value
    return found


def wait_until(holds: Callable[[], bool], within_s: float = 10.0) -> float:
    """Wait until it holds; return how long that took, in seconds."""
    began = time.monotonic()
    while not holds():
        assert time.monotonic() - began < within_s, "it never came true"
        time.sleep(0.02)
    return time.monotonic() - began
