"""What the container tests share: the command line as a person starts it, and what it leaves."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docker

from kit.manifest import Manifest, load_manifest
from kit.paths import ROOT

FAST = {"ttft_s": 0.05, "itl_s": 0.002}


@dataclass(frozen=True)
class Ran:
    """A finished command: exit status, what it printed, and how long it took."""

    code: int
    stdout: str
    stderr: str
    wall_s: float

    @property
    def result(self) -> dict[str, Any]:
        return dict(json.loads(self.stdout))


def kit_words(*words: str) -> list[str]:
    return [sys.executable, "-m", "kit", *words]


def run_kit(*words: str, timeout_s: float = 600) -> Ran:
    begin = time.monotonic()
    done = subprocess.run(
        kit_words(*words), cwd=ROOT, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    return Ran(done.returncode, done.stdout, done.stderr, time.monotonic() - begin)


def run_nox(*words: str, timeout_s: float = 900) -> Ran:
    """Run nox as README shows it."""
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "nox", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    return Ran(done.returncode, done.stdout, done.stderr, time.monotonic() - begin)


def only_manifest(out: Path) -> tuple[Manifest, Path]:
    """Return the one manifest below a folder, and the run folder it is in."""
    found = list(out.rglob("manifest.json"))
    assert len(found) == 1, found
    return load_manifest(found[0]), found[0].parent


def labelled(client: docker.DockerClient) -> list[str]:
    """Return the names of every object that carries the kit's label."""
    chosen: dict[str, Any] = {"label": "kit.run"}
    return sorted(
        [c.name for c in client.containers.list(all=True, filters=chosen, ignore_removed=True)]
        + [n.name for n in client.networks.list(filters=chosen)]
        + [v.name for v in client.volumes.list(filters=chosen)]
    )
