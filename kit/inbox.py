"""Runs the code of `kit/inside` in the client container and reads what it prints."""

from __future__ import annotations

import errno
import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import docker
import docker.errors

from kit.errors import ClientFailed, DiskFull, KitError, ProbeFailed
from kit.inside.tool_window import EXIT_NO_RESULT, LOG
from kit.ready import how_it_ended, state_of

_KILLED = 128 + signal.SIGKILL


class ClientBox:
    """The client container of one replicate."""

    def __init__(
        self,
        client: docker.DockerClient,
        container: Any,
        interpreter: str,
        python_path: str = "/kit",
    ) -> None:
        self._api = client.api
        self._container = container
        self._interpreter = interpreter
        self._python_path = python_path

    def ask(self, method: str, url: str, *, timeout_s: float = 10.0) -> dict[str, Any]:
        """Send one control request; return {status, body, error}."""
        words = (method, url, "--timeout", str(timeout_s))
        lines = list(self._lines("inside.ask", *words, told_by=(0, 1)))
        try:
            answer = json.loads(lines[-1])
        except (IndexError, ValueError):
            raise ClientFailed(f"no answer from the client container: {lines[-1:]}") from None
        if answer.get("error"):
            raise ProbeFailed(
                f"the server runs but the client container cannot ask it: {answer['error']}",
                hint="check the server's --host and --port, and the network `inside`",
            )
        return dict(answer)

    def window(
        self,
        spec: str,
        progress: Callable[[dict[str, Any]], None],
        *,
        module: str = "inside.window",
    ) -> None:
        """Run one measured window from its spec file; hand on its progress events."""
        for line in self._lines(module, spec):
            try:
                event = json.loads(line)
            except ValueError:
                continue
            progress(event)

    def _lines(self, module: str, *words: str, told_by: Sequence[int] = (0,)) -> Iterator[str]:
        """Run a module; yield its stdout lines; raise `ClientFailed` for a bad exit status.

        `told_by` are those with which its last line says all; without a line each but 0 is bad.
        """
        spoke = False
        try:
            exec_id = self._api.exec_create(
                self._container.id,
                [self._interpreter, "-m", module, *words],
                environment={"PYTHONPATH": self._python_path},
            )["Id"]
            stream = self._api.exec_start(exec_id, stream=True, demux=True)
            pending, errors = b"", b""
            for out, err in stream:
                errors = (errors + (err or b""))[-4000:]
                pending += out or b""
                *whole, pending = pending.split(b"\n")
                spoke = spoke or bool(whole)
                yield from (line.decode("utf-8", "replace") for line in whole)
            if pending:
                spoke = True
                yield pending.decode("utf-8", "replace")
            code = self._exit_code(exec_id)
        except docker.errors.APIError as error:
            raise ClientFailed(
                f"the engine would not run {module} in the client container: {error.explanation}"
            ) from None
        if code != 0 and not (spoke and code in told_by):
            raise self._error(module, code, errors.decode("utf-8", "replace"))

    def _exit_code(self, exec_id: str) -> int | None:
        """Return how a module ended; after its last word the engine may not know it at once."""
        for _ in range(40):
            code: int | None = self._api.exec_inspect(exec_id)["ExitCode"]
            if code is not None:
                return code
            time.sleep(0.05)
        return None

    def _error(self, module: str, code: int | None, words: str) -> KitError:
        """Tell what became of the container, where that is why a module ended."""
        state = state_of(self._container, killed=code == _KILLED)
        if state is None:
            return ClientFailed("the client container was removed by somebody else")
        if not state["Running"]:
            return ClientFailed(f"the client container died with {how_it_ended(state)}")
        if state.get("OOMKilled"):
            return ClientFailed(
                f"{module} was killed for memory in the client container", detail=words
            )
        return _client_error(module, code, words)


def _client_error(module: str, code: int | None, words: str) -> KitError:
    """Tell a full disk from a fault of the load generator itself."""
    if os.strerror(errno.ENOSPC) in words:
        return DiskFull(
            "no space left while the client container wrote its samples",
            hint="free space, or choose --out elsewhere",
        )
    if code == EXIT_NO_RESULT and words.strip():  # another load generator, in its words
        return ClientFailed(
            words.strip().splitlines()[-1], hint=f"its whole output is in {LOG} of the window"
        )
    return ClientFailed(
        f"{module} ended with exit code {code} in the client container", detail=words
    )
