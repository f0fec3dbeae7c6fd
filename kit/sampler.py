"""Samples the engines' stacks beside a phase, from containers of their own. Effects only.

Whether a host lets one container look into another's processes is the host's to say, so a sampler
that is refused never fails a run: what it said is kept, and readings are null for that reason.
"""

from __future__ import annotations

import base64
import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import docker.errors

from kit.errors import BadFile, KitError, ProbeFailed
from kit.fact import ContainerPlace
from kit.ready import log_tail
from kit.secret import masked
from kit.stacks import SampledEngine, index_file, stacks_file
from kit.store import write_bytes, write_json
from kit.value import parse_value

FOLDER = "/tmp/stacks"  # noqa: S108 - inside the sampler's container
READY_S = 30
DONE_S = 90
PTRACE_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")


def sampler_user(scope_file: Path = PTRACE_SCOPE) -> str:
    """Return the user that the samplers must be here; empty for the engine's own.

    The engine's own user may look into the engine's processes unless Yama forbids it to all but
    their parents (`ptrace_scope` 1 or 2). The capability then decides, and of a container's
    capabilities only root's take effect.
    """
    try:
        scope = int(scope_file.read_text("ascii"))
    except (OSError, ValueError):  # a kernel without Yama
        return ""
    return "0:0" if scope else ""


def command(program: str, rate_hz: int) -> list[str]:
    """Return the words after the module's name that a sampler's container is started with."""
    return [program, str(rate_hz), FOLDER, "--stay"]


@contextlib.contextmanager
def sampled(
    start: Callable[[], Mapping[str, ContainerPlace]],
    engines: tuple[str, ...],
    folder: Path,
    *,
    rate_hz: int,
) -> Iterator[None]:
    """Sample the engines while the block runs, and keep what was found in `folder` afterwards.

    `start` starts their samplers and returns where they are, by engine.
    """
    problems: dict[str, str] = {}
    places: Mapping[str, ContainerPlace] = {}
    try:
        places = start()
    except KitError as error:
        if type(error) is not KitError:  # the engine is lost, or its disk is full
            raise
        problems = dict.fromkeys(engines, error.message)
    for engine, place in places.items():
        problem = _wait_ready(place)
        if problem:
            problems[engine] = problem
    yield
    for engine in engines:
        told = {} if engine in problems else _end(places[engine])
        problem = problems.get(engine) or told.get("problem")
        keep(told, problem, engine, folder, rate_hz=rate_hz)


def _wait_ready(place: ContainerPlace) -> str | None:
    """Return why a sampler does not sample; None when it does."""
    try:
        told = place.inside("probe_stacks", FOLDER, "ready.json", str(READY_S))
    except ProbeFailed as error:
        return _why(place, error)
    return None if told else f"the sampler was not ready after {READY_S} s"


def _end(place: ContainerPlace) -> dict[str, Any]:
    """End the sampling; return what the sampler tells, or a `problem`."""
    try:
        place.container.kill(signal="SIGUSR1")
        told = place.inside("probe_stacks", FOLDER, "done.json", str(DONE_S))
    except ProbeFailed as error:
        return {"problem": _why(place, error)}
    except docker.errors.APIError as error:
        return {"problem": f"the sampler ended before it was told to: {error.explanation}"}
    return told or {"problem": f"the sampler had not ended after {DONE_S} s"}


def _why(place: ContainerPlace, error: ProbeFailed) -> str:
    lines = log_tail(place.container, 5).strip().splitlines()
    return f"{error.message}: {lines[-1]}" if lines else error.message


def keep(
    told: Mapping[str, Any], problem: str | None, engine: str, folder: Path, *, rate_hz: int
) -> None:
    """Write what a sampler told, and its files, under the names that a run keeps them by."""
    files = told.get("files") or {}
    processes = [
        {
            **each,
            "title": masked(str(each.get("title"))),
            "said": [masked(str(line)) for line in each.get("said") or ()],
            "file": stacks_file(engine, each["file"]) if each.get("file") in files else None,
        }
        for each in told.get("processes") or ()
    ]
    record: dict[str, Any] = {"version": 1, "rate_hz": rate_hz, "processes": processes}
    if problem:
        record["problem"] = masked(problem)[:500]
    try:
        parse_value(SampledEngine, json.loads(json.dumps(record)), index_file(engine))
    except BadFile as error:
        record = {"version": 1, "rate_hz": rate_hz, "processes": [], "problem": error.message}
        files = {}
    for name, content in files.items():
        write_bytes(folder / stacks_file(engine, name), base64.b64decode(content))
    write_json(folder / index_file(engine), record)
