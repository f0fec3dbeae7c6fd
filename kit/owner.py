"""Whose containers are whose. A run holds a lock while it lives; what a dead run left is removed.

Every object of a run carries the label `kit.run=<run id>`, and only objects with that label are
ever stopped or removed. The lock is a file lock, which the kernel drops with the process however
it dies, so a run is dead exactly when its lock can be taken.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import docker
import docker.errors

from kit.engine import NO_ANSWER
from kit.errors import BadFile, EngineLost, Interrupted, KitError
from kit.manifest import load_manifest, manifest_json, now_utc
from kit.paths import cache_dir
from kit.store import give_to_caller, release, write_text

LABEL = "kit.run"


@dataclass(frozen=True)
class Leftover:
    """What a dead run had left: its id, the names of the objects removed, its folder.

    `unwritable` says why the folder could not be put right; the next sweep tries it again.
    """

    run_id: str
    removed: tuple[str, ...]
    folder: Path
    unwritable: str | None = None


def _folder() -> Path:
    folder = cache_dir() / "active"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def engine_id(client: docker.DockerClient) -> str:
    """Return by which name the engine knows itself: a run is swept on its own engine alone."""
    return str(client.info().get("ID", ""))


@contextlib.contextmanager
def claim(run_id: str, run_folder: Path, engine: str = "") -> Iterator[None]:
    """Hold a run's lock while the block runs; `engine` is the id of the engine it runs on.

    The lock's file stays for `sweep` where the end of the run could not be seen to: it is killed,
    the engine is gone, or its manifest cannot be written.
    """
    path = _folder() / f"{run_id}.json"
    with path.open("w", encoding="utf-8") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        json.dump({"run_folder": str(run_folder), "engine": engine}, held)
        held.flush()
        seen_to = True
        try:
            yield
        except NO_ANSWER:
            seen_to = False
            raise
        finally:
            if seen_to and not _says_running(run_folder):
                _forget(run_id)


def _says_running(run_folder: Path) -> bool:
    try:
        return load_manifest(run_folder / "manifest.json").status == "running"
    except KitError:
        return False


def _forget(run_id: str) -> None:
    shutil.rmtree(_folder() / run_id, ignore_errors=True)
    (_folder() / f"{run_id}.json").unlink(missing_ok=True)


def scratch(run_id: str) -> Path:
    """Return the folder for a live run's rendered compose files."""
    folder = _folder() / run_id
    folder.mkdir(exist_ok=True)
    return folder


def sweep(client: docker.DockerClient) -> list[Leftover]:
    """Remove what dead runs left and mark their manifests interrupted; return what was found.

    Runs of another engine are left for a sweep there.
    """
    found, here = [], None
    for path in sorted(_folder().glob("*.json")):
        with contextlib.suppress(FileNotFoundError), path.open("r+", encoding="utf-8") as held:
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue  # that run is alive
            try:
                told = json.load(held)
                folder, its_engine = Path(told["run_folder"]), told.get("engine")
            except (ValueError, KeyError):
                folder, its_engine = Path(), None  # died before it wrote: it had started nothing
            here = here or engine_id(client)
            if its_engine and its_engine != here:
                continue
            removed = remove_objects(client, path.stem)
            unwritable = None
            try:
                _put_right(folder)
                _forget(path.stem)
            except KitError as error:
                unwritable = error.message
            found.append(Leftover(path.stem, tuple(removed), folder, unwritable))
    return found


def _put_right(folder: Path) -> None:
    """Make a dead run's folder what a run leaves that ends by itself."""
    if folder.parts:
        release(folder)
        give_to_caller(folder)
    mark_interrupted(folder)


def mark_interrupted(folder: Path) -> None:
    """Set a manifest that still says `running` to `interrupted`; leave any other as it is."""
    path = folder / "manifest.json"
    if not folder.parts or not path.is_file():
        return
    try:
        manifest = load_manifest(path)
    except BadFile:
        return
    if manifest.status == "running":
        ended = manifest.model_copy(update={"status": "interrupted", "finished_utc": now_utc()})
        write_text(path, manifest_json(ended))


def objects_of(client: docker.DockerClient, run_id: str) -> dict[str, list[Any]]:
    """Return the run's containers, networks and volumes."""
    chosen: dict[str, str | list[str] | bool] = {"label": f"{LABEL}={run_id}"}
    return {
        "container": client.containers.list(all=True, filters=chosen, ignore_removed=True),
        "network": client.networks.list(filters=chosen),
        "volume": client.volumes.list(filters=chosen),
    }


def remove_objects(
    client: docker.DockerClient, run_id: str, *, patience_s: float = 60.0
) -> list[str]:
    """Remove all objects of a run until none is left; return their names.

    Repeats, since a compose that was ended in mid-flight may still have one request under way.
    """
    removed: dict[str, None] = {}
    deadline = time.monotonic() + patience_s
    clean = 0
    while clean < 2:
        left = objects_of(client, run_id)
        if not any(left.values()):
            clean += 1
            time.sleep(0.2 if removed else 0.0)
            continue
        clean = 0
        if time.monotonic() > deadline:
            names = ", ".join(o.name for each in left.values() for o in each)
            raise EngineLost(
                f"the engine does not remove what the run left: {names}",
                hint=f"the next run tries again to remove what carries {LABEL}={run_id}",
            )
        for each in left.values():
            for one in each:
                removed[one.name] = None
                _remove(one)
    return list(removed)


def _remove(one: Any) -> None:
    """Remove one object; an answer of "gone", "busy" or "in use" is left to the next round."""
    with contextlib.suppress(docker.errors.NotFound, docker.errors.APIError):
        if hasattr(one, "kill"):
            one.remove(force=True, v=True)
        else:
            one.remove()


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Turn SIGINT and SIGTERM into `Interrupted` while the block runs."""

    def raise_interrupted(signum: int, _frame: FrameType | None) -> None:
        raise Interrupted(signum)

    with _handlers(raise_interrupted):
        yield


@contextlib.contextmanager
def shielded(say: Any, *, then_stop: bool = False) -> Iterator[None]:
    """Let a clean-up finish: signals inside the block are answered and set aside.

    With `then_stop` the first of them is raised as `Interrupted` when the block is through: for a
    clean-up that is no end of its own, after which the program would go on.
    """
    came: list[int] = []

    def answer(signum: int, _frame: FrameType | None) -> None:
        came.append(signum)
        say("cleaning up, a moment please")

    with _handlers(answer):
        yield
    if came and then_stop:
        raise Interrupted(came[0])


@contextlib.contextmanager
def _handlers(handler: Any) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {s: signal.signal(s, handler) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for signum, old in before.items():
            signal.signal(signum, old)
