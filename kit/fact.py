"""Facts: what was observed about the environment, each with the source that gave it.

Groups of facts are files in `kit/facts`; a `Place` says where they look (this host, or one
container). Reading is one field at a time: what fails becomes null with the error's name.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from subprocess import TimeoutExpired
from typing import Annotated, Any, Literal, Protocol, cast

import docker
from docker.errors import DockerException
from docker.models.containers import Container
from pydantic import JsonValue, StringConstraints, model_validator

from kit import process
from kit.errors import ProbeFailed
from kit.inside.probe_field import READ_ERRORS, Field, read_field
from kit.paths import ROOT
from kit.value import Value

State = Literal["verified", "declared", "failed"]
Match = Literal["must", "reported", "ignored"]
Name = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]*$")]

FIELD_ERRORS: tuple[type[Exception], ...] = (*READ_ERRORS, DockerException)
"""What `observe` turns into a null value; any other error is a mistake and stays one."""


class Fact(Value):
    """One thing observed.

    `state`: `verified` was read where it takes effect, `declared` is what somebody wrote down,
    `failed` could not be read. `match`: whether two environments must agree on it (`must`), a
    difference is only shown (`reported`), or it is expected to move (`ignored`).
    """

    group: Name
    name: Name
    value: JsonValue
    how: str
    state: State
    reason: str | None = None
    service: str | None = None
    match: Match = "reported"

    @model_validator(mode="after")
    def _null_has_a_reason(self) -> Fact:
        if self.value is None and not self.reason:
            raise ValueError("a fact without a value needs a reason")
        if self.state == "failed" and self.value is not None:
            raise ValueError("a failed fact has no value")
        return self


def observe(
    group: str,
    name: str,
    how: str,
    read: Callable[[], Any],
    *,
    match: Match = "reported",
    service: str | None = None,
    state: State = "verified",
    errors: tuple[type[Exception], ...] = FIELD_ERRORS,
) -> Fact:
    """Read one value and return it as a fact; an expected error gives null and its name.

    `read` raises `Absent` where it looked and there is no such thing: null, but not failed.
    """
    return from_field(
        group, name, read_field(how, read, errors), match=match, service=service, state=state
    )


def from_field(
    group: str,
    name: str,
    raw: Field,
    *,
    match: Match = "reported",
    service: str | None = None,
    state: State = "verified",
) -> Fact:
    """Turn a field that a probe read into a fact."""
    failed = raw["error"] is not None and not raw["absent"]
    value, reason = raw["value"], raw["error"]
    if value is None and reason is None:
        reason = "the source holds null"
    return Fact(
        group=group,
        name=name,
        value=value,
        how=raw["how"],
        state="failed" if failed else state,
        reason=reason,
        service=service,
        match=match,
    )


def from_fields(
    group: str,
    raw: Mapping[str, Field],
    matches: Mapping[str, Match],
    *,
    service: str | None = None,
) -> list[Fact]:
    """Turn all fields of a probe's section into facts; names without an entry are `reported`."""
    return [
        from_field(group, name, each, match=matches.get(name, "reported"), service=service)
        for name, each in raw.items()
    ]


class Place(Protocol):
    """Where a group of facts looks: this host (`container` is None) or one container."""

    @property
    def client(self) -> docker.DockerClient | None: ...
    @property
    def endpoint_kind(self) -> str | None: ...
    @property
    def container(self) -> Container | None: ...
    @property
    def service(self) -> str | None: ...
    @property
    def interpreter(self) -> str: ...
    @property
    def image(self) -> Mapping[str, Any] | None: ...
    @property
    def server_info(self) -> Mapping[str, Any] | None: ...

    def inside(self, module: str, *args: str) -> Any:
        """Run `inside.<module>` there and return the JSON it prints; once per place."""


_Answers = dict[tuple[str, ...], Any]


@dataclass(frozen=True)
class HostPlace:
    """This machine, and the engine that `client` speaks to (None: no engine at hand)."""

    client: docker.DockerClient | None = None
    endpoint_kind: str | None = None
    timeout_s: float = 20.0
    container: None = None
    service: None = None
    interpreter: str = sys.executable
    image: None = None
    server_info: None = None
    _answers: _Answers = field(default_factory=dict, repr=False, compare=False)

    def inside(self, module: str, *args: str) -> Any:
        """Run a probe in a process of its own: a driver that hangs costs only `timeout_s`.

        Raises `TimeoutError`, `ValueError` (no JSON), `OSError` (ended with an error).
        """
        key = (module, *args)
        if key not in self._answers:
            argv = [self.interpreter, "-X", "utf8", "-m", f"kit.inside.{module}", *args]
            try:
                done = process.run(argv, cwd=ROOT, timeout_s=self.timeout_s)
            except TimeoutExpired:
                raise TimeoutError(f"no answer within {self.timeout_s:g} s") from None
            if not done.ok:
                last = (done.tail.splitlines() or [""])[-1]
                raise OSError(f"{module} ended with {done.returncode}: {last}")
            self._answers[key] = json.loads(done.stdout)
        return self._answers[key]


@dataclass(frozen=True)
class ContainerPlace:
    """One running container, looked at once: answers of probes are kept for all groups.

    `interpreter` and `image` come from the image record (`image`: `config_digest` and
    `diff_ids` as locked); `server_info` is the server's answer to GET
    /server_info?config_format=json, None where nobody asked. `python_path` are the folders in
    which Python looks for modules; `kit/inside` must be mounted in the first of them. Make a new
    place to look again.
    """

    client: docker.DockerClient
    container: Container
    service: str
    interpreter: str = "python3"
    image: Mapping[str, Any] | None = None
    server_info: Mapping[str, Any] | None = None
    python_path: str = "/kit"
    endpoint_kind: None = None
    _answers: _Answers = field(default_factory=dict, repr=False, compare=False)

    def inside(self, module: str, *args: str) -> Any:
        """Run a probe by `docker exec` and return its JSON; raise `ProbeFailed` with its words."""
        key = (module, *args)
        if key not in self._answers:
            self._answers[key] = self._exec(module, args)
        return self._answers[key]

    def _exec(self, module: str, args: Iterable[str]) -> Any:
        argv = [self.interpreter, "-X", "utf8", "-m", f"inside.{module}", *args]
        environment = {"PYTHONPATH": self.python_path, "PYTHONDONTWRITEBYTECODE": "1"}
        try:
            done = self.container.exec_run(argv, demux=True, environment=environment)
        except DockerException as error:
            raise self._failure(module, str(error)) from None
        # With demux the second part is the pair (stdout, stderr), each None when empty.
        out, err = cast(tuple[bytes | None, bytes | None], done[1])
        if done[0] != 0:
            raise self._failure(module, (err or out or b"").decode("utf-8", "replace"))
        try:
            return json.loads(out or b"")
        except (ValueError, RecursionError):
            raise self._failure(module, (out or b"").decode("utf-8", "replace")) from None

    def _failure(self, module: str, words: str) -> ProbeFailed:
        return ProbeFailed(
            f"the probe {module} gave no answer in service {self.service}",
            hint=f"is {self.interpreter} in the image, kit/inside mounted, the container up?",
            detail="\n".join(words.strip().splitlines()[-15:]),
        )


def as_mapping(value: Any) -> Mapping[str, Any]:
    """Return the value if it is a mapping, else raise `ValueError`."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{type(value).__name__} instead of a mapping")
    return cast(Mapping[str, Any], value)
