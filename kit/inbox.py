"""Runs the code of `kit/inside` in the client container and reads what it prints."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import docker
import docker.errors

from kit.errors import ClientFailed, DiskFull, KitError, ProbeFailed


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

    def window(self, spec: str, progress: Callable[[dict[str, Any]], None]) -> None:
        """Run one measured window from its spec file; hand on its progress events."""
        for line in self._lines("inside.window", spec):
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
            code = self._api.exec_inspect(exec_id)["ExitCode"]
        except docker.errors.APIError as error:
            raise ClientFailed(
                f"the engine would not run {module} in the client container: {error.explanation}"
            ) from None
        if code and not (spoke and code in told_by):
            raise _client_error(module, code, errors.decode("utf-8", "replace"))


def _client_error(module: str, code: int, words: str) -> KitError:
    """Tell a full disk from a fault of the load generator itself."""
    if os.strerror(errno.ENOSPC) in words:
        return DiskFull(
            "no space left while the client container wrote its samples",
            hint="free space, or choose --out elsewhere",
        )
    return ClientFailed(
        f"{module} ended with exit code {code} in the client container", detail=words
    )
