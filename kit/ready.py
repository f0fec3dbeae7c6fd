"""Waits until a stack can be measured, and says which of four things went wrong if it cannot.

Slow, crashed, probe missing and wrong address end in four different errors, each with the last
lines of the container's log.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import docker
import docker.errors

from kit.errors import KitError, ProbeFailed, ServerDied, ServerLost, ServerNotReady

LOG_LINES = 15
_REMOVAL_S = 2.0


def service_container(client: docker.DockerClient, project: str, service: str) -> Any:
    """Return the container of a compose service; raise `ServerDied` when it is gone."""
    labels = [f"com.docker.compose.project={project}", f"com.docker.compose.service={service}"]
    found = client.containers.list(all=True, filters={"label": labels})
    if not found:
        raise ServerDied(f"the container of `{service}` is gone")
    return found[0]


def log_tail(container: Any, lines: int = LOG_LINES) -> str:
    """Return the last lines of a container's log as text."""
    try:
        raw: bytes = container.logs(tail=lines)
    except docker.errors.APIError as error:
        return f"(no log: {error.explanation})"
    return raw.decode("utf-8", "replace")


def wait_healthy(
    container: Any,
    service: str,
    *,
    timeout_s: float,
    say: Callable[[str], None],
    every_s: float = 0.2,
) -> None:
    """Wait until the engine calls a container healthy.

    Raises `ServerDied` (it ended), `ProbeFailed` (its probe cannot run) or `ServerNotReady` (time
    is up), each with the last log lines.
    """
    start = time.monotonic()
    told = start
    while True:
        state = _state(container, service)
        if not state["Running"]:
            raise ServerDied(
                f"`{service}` ended with {how_it_ended(state)} before it was ready",
                hint="the lines above are the end of its log; logs/ in the run folder has it all",
                detail=log_tail(container),
            )
        health = state.get("Health") or {}
        if health.get("Status") == "healthy":
            return
        _check_probe(health, service, container)
        waited = time.monotonic() - start
        if waited > timeout_s:
            raise ServerNotReady(
                f"`{service}` was not healthy after {timeout_s:.0f} s",
                hint="a larger model needs --ready-timeout; the log's last lines are above",
                detail=f"{log_tail(container)}\nlast probe: {_last_probe(health)}",
            )
        if time.monotonic() - told >= 15:
            told = time.monotonic()
            say(f"  {service}: {waited:.0f} of {timeout_s:.0f} s, {_last_log_line(container)}")
        time.sleep(every_s)


def _state(container: Any, service: str, error: type[KitError] = ServerDied) -> dict[str, Any]:
    state = state_of(container)
    if state is None:
        raise error(f"the container of `{service}` was removed by somebody else")
    return state


def state_of(container: Any, *, killed: bool = False) -> dict[str, Any] | None:
    """Return a container's state as the engine tells it now, None when it was removed.

    A forced removal kills first: one that has ended is looked at for a moment longer, and so is
    one in which a process was `killed`, as the engine may not know yet that all of it was.
    """
    until_s = time.monotonic() + _REMOVAL_S
    while True:
        try:
            container.reload()
        except docker.errors.NotFound:
            return None
        state: dict[str, Any] = container.attrs["State"]
        if (state["Running"] and not killed) or time.monotonic() > until_s:
            return state
        time.sleep(0.1)


def how_it_ended(state: Mapping[str, Any]) -> str:
    """Return the words for a container's end, from its state: exit code, and whether for memory."""
    killed = ", killed for memory" if state.get("OOMKilled") else ""
    return f"exit code {state['ExitCode']}{killed}"


def _last_probe(health: dict[str, Any]) -> str:
    """Return the exit status and last line of what the engine's last health probe printed."""
    entries = health.get("Log") or []
    if not entries:
        return "none was made"
    lines = str(entries[-1].get("Output", "")).strip().splitlines()
    return f"exit status {entries[-1].get('ExitCode')}, {lines[-1] if lines else 'no output'}"


def _check_probe(health: dict[str, Any], service: str, container: Any) -> None:
    """Raise when the probe itself cannot run; failing answers of a loading server are normal."""
    for entry in (health.get("Log") or [])[-1:]:
        output = str(entry.get("Output", ""))
        if "executable file not found" in output or "no such file or directory" in output:
            raise ProbeFailed(
                f"the health probe of `{service}` cannot run: {output.strip()[:200]}",
                hint="give the image's interpreter in docker/images.yaml",
                detail=log_tail(container),
            )


def _last_log_line(container: Any) -> str:
    lines = [line for line in log_tail(container, 1).splitlines() if line.strip()]
    return f"last log line: {lines[-1].strip()[:110]}" if lines else "nothing logged yet"


def check_alive(container: Any, service: str) -> None:
    """Raise `ServerLost` when a container ended while it was being measured."""
    state = _state(container, service, ServerLost)
    if not state["Running"]:
        raise ServerLost(
            f"`{service}` died under load with {how_it_ended(state)}",
            hint="the lines above are the end of its log; logs/ in the run folder has it all",
            detail=log_tail(container),
        )
    if state.get("Paused"):
        raise ServerLost(f"`{service}` was paused while it was being measured")


def check_serving(
    container: Any,
    service: str,
    health: Callable[[], int | None],
    *,
    timeout_s: float = 20.0,
    every_s: float = 0.2,
) -> None:
    """Raise `ServerLost` when a server that is asked after failed requests serves no more.

    `health` returns the status of /health, None without an answer. A server whose engine has died
    refuses for a second or more before its container ends; that end is waited for, as it tells
    the exit code.
    """
    start = time.monotonic()
    while (status := health()) != 200:
        check_alive(container, service)
        if time.monotonic() - start > timeout_s:
            told = "gives no answer" if status is None else f"has status {status}"
            raise ServerLost(
                f"`{service}` serves no more: its /health {told}",
                hint="the lines above are the end of its log; logs/ in the run folder has it all",
                detail=log_tail(container),
            )
        time.sleep(every_s)
