"""Runs programs of the host. The only module that starts a process."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kit.errors import ToolMissing


@dataclass(frozen=True)
class Completed:
    """What a finished program left: its exit status and what it printed, as text."""

    argv: tuple[str, ...]
    returncode: int
    stdout: str
    stderr: str

    @property
    def ok(self) -> bool:
        return self.returncode == 0

    @property
    def tail(self) -> str:
        """The last 30 lines of what it printed, for an error's detail."""
        lines = (self.stdout + self.stderr).splitlines()
        return "\n".join(lines[-30:])


def require(program: str, *, hint: str) -> str:
    """Return the program's path, or raise `ToolMissing` with the hint."""
    found = shutil.which(program)
    if found is None:
        raise ToolMissing(f"the program `{program}` is not installed", hint=hint)
    return found


def run(
    argv: Sequence[str | Path],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    stdin: bytes | None = None,
    timeout_s: float | None = None,
    stdout: Path | None = None,
) -> Completed:
    """Run a program to its end and return what it left; never raises for a bad exit status.

    The program gets a process group of its own. Whatever ends the wait (a time-out, Ctrl-C)
    ends the whole group, TERM first, so that nothing stays behind. With `stdout` its standard
    output goes to that file instead. Raises `subprocess.TimeoutExpired` and `ToolMissing`.
    """
    words = [os.fspath(word) for word in argv]
    sink = stdout.open("wb") if stdout is not None else subprocess.PIPE
    try:
        child = subprocess.Popen(
            words,
            env=dict(env) if env is not None else None,
            cwd=cwd,
            stdin=subprocess.PIPE if stdin is not None else subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except FileNotFoundError:
        raise ToolMissing(
            f"the program `{words[0]}` is not installed", hint="install it, or see README"
        ) from None
    finally:
        if stdout is not None:
            sink.close()  # type: ignore[union-attr]
    try:
        out, err = child.communicate(stdin, timeout=timeout_s)
    except BaseException:
        end_group(child)
        raise
    return Completed(
        tuple(words),
        child.returncode,
        (out or b"").decode("utf-8", "replace"),
        err.decode("utf-8", "replace"),
    )


def end_group(child: subprocess.Popen[bytes], *, grace_s: float = 10.0) -> None:
    """End a program that `run` started: TERM to its group, then KILL after the grace."""
    for signum, wait_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 5.0)):
        try:
            os.killpg(child.pid, signum)
        except ProcessLookupError:
            break
        try:
            child.wait(wait_s)
            break
        except subprocess.TimeoutExpired:
            continue
    for pipe in (child.stdin, child.stdout, child.stderr):
        if pipe is not None:
            pipe.close()
