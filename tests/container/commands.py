"""What the container tests share: the command line as a person starts it, and what it leaves."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docker

from kit import owner
from kit.manifest import Manifest, load_manifest
from kit.paths import ROOT

FAST = {"ttft_s": 0.05, "itl_s": 0.002}
# a hit saves 0.4 s; times far above what a client that shares its cores adds
CACHED = {"ttft_s": 0.1, "ttft_per_token_s": 0.0004, "itl_s": 0.02, "block_tokens": 16}


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


class Started(subprocess.Popen[str]):
    """A command that, where it does not end in time, tells where each of its threads stands."""

    def communicate(
        self,
        input: str | None = None,  # noqa: A002 - its name in the standard library
        timeout: float | None = None,
    ) -> tuple[str, str]:
        try:
            return super().communicate(input, timeout)
        except subprocess.TimeoutExpired as late:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGABRT)  # Python's fault handler answers it
            with contextlib.suppress(subprocess.TimeoutExpired):
                _, told = super().communicate(timeout=10)
                late.add_note(f"where it stood:\n{told}")
            raise


def start_kit(*words: str, root: Path = ROOT, **environment: str) -> Started:
    """Start a command of a checkout; `communicate` waits for it and reads what it printed."""
    return Started(
        kit_words(*words),
        cwd=root,
        env={**os.environ, "PYTHONFAULTHANDLER": "1", **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_kit(*words: str, timeout_s: float = 600, root: Path = ROOT, **environment: str) -> Ran:
    """Run a command of a checkout to its end."""
    begin = time.monotonic()
    child = start_kit(*words, root=root, **environment)
    try:
        stdout, stderr = child.communicate(timeout=timeout_s)
    except BaseException:
        child.terminate()
        child.communicate(timeout=120)
        raise
    return Ran(child.returncode, stdout, stderr, time.monotonic() - begin)


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


NOISE = ("other programs used", "ms late")  # what a busy machine, not the kit, makes invalid


def quietly(run: Callable[[Path], Ran], out: Path) -> tuple[Ran, Path]:
    """Run below `out`; again, twice, where only the machine's other load made the run invalid."""
    for attempt in ("first", "second", "third"):
        ran = run(out / attempt)
        told = ran.result if ran.stdout.startswith("{") else {}
        reason = (told.get("verdict") or told.get("outcome") or {}).get("reason", "")
        if not any(words in reason for words in NOISE):
            break
    return ran, out / attempt


def only_manifest(out: Path) -> tuple[Manifest, Path]:
    """Return the one manifest below a folder, and the run folder it is in."""
    found = list(out.rglob("manifest.json"))
    assert len(found) == 1, found
    return load_manifest(found[0]), found[0].parent


def objects_of_runs(client: docker.DockerClient, out: Path) -> list[str]:
    """Return the names of every object that runs below a folder have on the engine."""
    names = []
    for path in out.rglob("manifest.json"):
        left = owner.objects_of(client, load_manifest(path).run_id)
        names += [one.name for each in left.values() for one in each]
    return sorted(names)


def service_of(client: docker.DockerClient, out: Path, service: str) -> Any:
    """Return the running container of a service of the one run below a folder."""
    run_id = only_manifest(out)[0].run_id
    labels = [f"{owner.LABEL}={run_id}", f"com.docker.compose.service={service}"]
    (found,) = client.containers.list(filters={"label": labels})
    return found


def wait_for(
    path: Path, pattern: str, timeout_s: float = 90, child: subprocess.Popen[str] | None = None
) -> Path:
    """Wait until a file below a folder appears; return it. `child` is what shall make it."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        found = next(path.rglob(pattern), None)
        if found is not None:
            return found
        if child is not None and child.poll() is not None:
            raise AssertionError(f"{pattern} never appeared: {child.communicate()[1]}")
        time.sleep(0.05)
    raise AssertionError(f"{pattern} never appeared")


def checkout(to: Path) -> Path:
    """Return a copy of this checkout's files at `to`, without what was made in it."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    ).stdout.split(b"\0")
    for name in filter(None, map(os.fsdecode, listed)):
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, to / name)
    return to
