"""Samples the stacks of the engine's processes: `python -m inside.sample_stacks PROGRAM RATE OUT`.

Runs in a container of its own that shares the engine's process ids. It starts one `py-spy record`
for each process of the engine, writes OUT/ready.json once each of them samples or has ended, and at
SIGUSR1 ends them by SIGINT, at which they write what they have; then OUT/done.json says
of each: its process, how long it was sampled in seconds, its exit status and what it said. With
--stay it then waits to be removed, as what it wrote is in its own memory.

Stacks are taken while the process is held still (no `--nonblocking`): scheduling is made of short
functions, whose stacks would often be torn, and errors are not spread evenly over what runs. That
makes the engine slower, in a phase of which no time is measured. Only the thread that holds the
interpreter's lock is counted (`--gil`), which scheduling does: from another container py-spy cannot
tell which threads are on a CPU, and would count every one that waits.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

ATTACH_S = 20.0  # an interpreter's symbols are looked for in files of hundreds of MB
END_S = 60.0
SAID_CHARS = 4000
_STARTED = "Sampling process"
_ENGINE = (("engine-core", re.compile(r"EngineCore")), ("worker", re.compile(r"Worker(_|Proc|\b)")))


def role_of(title: str) -> str:
    """Return what a process of an engine is, by the title that it gave itself."""
    return next((role for role, pattern in _ENGINE if pattern.search(title)), "other")


def chosen(titles: dict[int, str]) -> dict[int, str]:
    """Return which processes to sample, and their roles; all where none is an engine's core."""
    roles = {pid: role_of(title) for pid, title in titles.items()}
    if "engine-core" in roles.values():
        return {pid: role for pid, role in roles.items() if role != "other"}
    return roles


def titles_of(proc: Path, own: int) -> dict[int, str]:
    """Return titles of the processes by id that run Python, but those of this container itself.

    Two containers that share process ids still have mounts of their own, by which they differ.
    """
    found = {}
    mine = _mounts(proc, own)
    for folder in proc.glob("[0-9]*"):
        pid = int(folder.name)
        try:
            raw = (folder / "cmdline").read_bytes().replace(b"\0", b" ")
            name = (folder / "comm").read_text("utf-8", errors="replace").strip()
        except OSError:  # it ended
            continue
        words = raw.decode("utf-8", "replace")
        title = f"{name} {words}".strip()
        known = re.search(r"python|vllm", title, re.IGNORECASE)
        if words and known and "resource_tracker" not in title and _mounts(proc, pid) != mine:
            found[pid] = title
    return found


def _mounts(proc: Path, pid: int) -> str:
    try:
        return os.readlink(proc / str(pid) / "ns" / "mnt")
    except OSError:  # of another user, so of another container
        return f"unknown of {pid}"


class Sampled:
    """One process under its sampler, and what the sampler said."""

    def __init__(self, program: str, rate: int, out: Path, pid: int, role: str, title: str) -> None:
        self.pid, self.role, self.title = pid, role, title
        self.file = out / f"stacks-{role}-{pid}.txt"
        self._said: list[str] = []
        self._began: float | None = None
        self._ended: float | None = None
        self._heard = threading.Event()
        words = ["record", "--pid", str(pid), "--format", "raw", "--rate", str(rate)]
        words += ["--function", "--full-filenames", "--threads", "--gil", "--duration"]
        words += ["unlimited", "-o", str(self.file)]
        self._child = subprocess.Popen(
            [program, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        assert self._child.stdout is not None
        for raw in self._child.stdout:
            line = raw.decode("utf-8", "replace").rstrip()
            if _STARTED in line:
                self._began = time.monotonic()
                self._heard.set()
            if sum(map(len, self._said)) < SAID_CHARS:
                self._said.append(line[:SAID_CHARS])
            else:
                self._said[-1] = line[:SAID_CHARS]  # the last line holds the counts
        self._heard.set()

    def wait_started(self, seconds: float) -> None:
        self._heard.wait(seconds)

    def ask_to_end(self) -> None:
        self._ended = time.monotonic()
        if self._child.poll() is None:
            self._child.send_signal(signal.SIGINT)

    def report(self, seconds: float) -> dict[str, Any]:
        """Wait for its end, and tell of it."""
        try:
            status = self._child.wait(max(0.1, seconds))
        except subprocess.TimeoutExpired:
            self._child.kill()
            status = self._child.wait()
        self._listener.join(5)
        whole = self._began is not None and self._ended is not None
        return {
            "pid": self.pid,
            "role": self.role,
            "title": self.title[:200],
            "file": self.file.name if self.file.is_file() else None,
            "window_s": self._ended - self._began if whole else None,  # type: ignore[operator]
            "status": status,
            "said": self._said,
        }


def main(program: str, rate: int, out: Path) -> None:
    """Sample until the signal; see the module's docstring."""
    asked = threading.Event()
    signal.signal(signal.SIGUSR1, lambda *_: asked.set())
    out.mkdir(parents=True, exist_ok=True)
    titles = titles_of(Path("/proc"), os.getpid())
    children = [
        Sampled(program, rate, out, pid, role, titles[pid])
        for pid, role in sorted(chosen(titles).items())
    ]
    deadline = time.monotonic() + ATTACH_S
    for child in children:
        child.wait_started(max(0.0, deadline - time.monotonic()))
    _write(out / "ready.json", {"processes": len(children)})
    asked.wait()
    for child in children:
        child.ask_to_end()
    deadline = time.monotonic() + END_S
    told = [child.report(deadline - time.monotonic()) for child in children]
    _write(out / "done.json", {"version": 1, "rate_hz": rate, "processes": told})


def _write(path: Path, value: dict[str, Any]) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps(value), "utf-8")
    part.replace(path)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
    if "--stay" in sys.argv:
        while True:
            signal.pause()
