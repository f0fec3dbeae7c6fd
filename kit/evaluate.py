"""Runs lm-eval against a server that is still up and keeps what it wrote. Effects only.

That it fails is no failed run: its scores are then null, with the reason.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import docker
import docker.errors

from kit import compose
from kit.compose import EVALUATION, Stack
from kit.plan import PlannedEvaluation
from kit.ready import service_container, state_of
from kit.scores import ENDED_FILE, FOLDER, RESULTS_FILE
from kit.store import write_json

Say = Callable[[str], None]
POLL_S = 1.0
SAY_S = 30.0
_RESULTS = re.compile(r"results_[0-9T.-]+\.json")
_SAMPLES = re.compile(r"samples_(?P<task>[a-z0-9_]+)_[0-9]{4}-[0-9T.-]+\.jsonl")


def make_folder(out: Path) -> None:
    """Make the folder that the container writes to, before the stack that mounts it."""
    folder = out / FOLDER
    folder.mkdir()
    if os.geteuid() == 0:
        os.chown(folder, 10001, 0)


def evaluate(
    client: docker.DockerClient,
    stack: Stack,
    planned: PlannedEvaluation,
    out: Path,
    say: Say,
    check: Callable[[], None],
) -> None:
    """Run lm-eval to its end or its time limit; `check` raises when a server is gone."""
    begin = time.monotonic()
    say(f"  evaluation: {', '.join(planned.tasks)}")
    compose.up(stack, [EVALUATION])
    container = service_container(client, stack.project, EVALUATION)
    code = _wait(container, begin + planned.timeout_s, say, check)
    wall_s = time.monotonic() - begin
    keep_results(out / FOLDER)
    ended = {"exit_code": code, "timed_out": code is None, "wall_s": round(wall_s, 3)}
    write_json(out / FOLDER / ENDED_FILE, ended)
    how = "was stopped" if code is None else f"ended with exit code {code}"
    say(f"  evaluation: {how} after {wall_s:.0f} s")
    check()


def _wait(container: Any, until: float, say: Say, check: Callable[[], None]) -> int | None:
    """Wait until the container ended; return its exit code, None where it was stopped for time."""
    told = time.monotonic()
    while True:
        state = state_of(container)
        if state is None:
            return -1  # somebody removed it: whatever it wrote is looked at
        if not state["Running"] and state.get("Status") not in ("created", "restarting"):
            return int(state["ExitCode"])
        now = time.monotonic()
        if now >= until:
            with contextlib.suppress(docker.errors.APIError):
                container.kill()
            return None
        check()
        if now - told >= SAY_S:
            told = now
            say("  evaluation: still asking")
        time.sleep(POLL_S)


def keep_results(folder: Path) -> None:
    """Give lm-eval's files names without a time: `results.json`, `samples-<task>.jsonl`."""
    for path in sorted(p for p in folder.rglob("*") if p.is_file() and not p.is_symlink()):
        samples = _SAMPLES.fullmatch(path.name)
        if _RESULTS.fullmatch(path.name):
            path.replace(folder / RESULTS_FILE)
        elif samples:
            path.replace(folder / f"samples-{samples['task']}.jsonl")
    for path in sorted((p for p in folder.rglob("*") if p.is_dir()), reverse=True):
        with contextlib.suppress(OSError):  # not empty: something that nobody expected is kept
            path.rmdir()
