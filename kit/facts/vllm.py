"""vLLM in one container: version, commit, resolved configuration, arguments, environment.

The resolved configuration is the server's own answer to /server_info, handed in by the caller.
Values that differ at every start (ids, a buffer's name) are left out; secrets are masked.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kit.fact import Fact, Match, Place, as_mapping, from_fields, observe
from kit.inside.probe_field import Absent, Field
from kit.inside.probe_vllm import is_listed
from kit.inside.text import MASK, mask_text
from kit.secret import is_secret_variable, mask_address, mask_argv, mask_value

GROUP = "vllm"

_MATCH: dict[str, Match] = {
    "version": "must",
    "build_version": "must",
    "commit": "must",
    "torch_version": "must",
    "torch_cuda": "must",
    "torch_commit": "must",
}
_VOLATILE = frozenset({"instance_id", "engine_id", "VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME"})
"""Keys that every start draws anew; seen to differ between two equal servers of 0.32.0."""

_REVISION = "org.opencontainers.image.revision"


def collect(place: Place) -> list[Fact]:
    """Read what the container's vLLM is and how it was started; the host gives none."""
    container = place.container
    if container is None:
        return []
    sections = place.inside("probe_container")
    attrs = as_mapping(container.attrs)
    service = place.service
    fields = {name: each for name, each in sections["vllm"].items() if name != "environment"}
    facts = from_fields(GROUP, fields, _MATCH, service=service)
    if fields["commit"]["value"] is None:
        facts = [fact for fact in facts if fact.name != "commit"]
        facts.append(_declared_commit(attrs, fields["commit"], service))
    facts.append(_arguments(attrs, sections["container"]["command_line"], service))
    facts.append(_environment(attrs, sections["vllm"]["environment"], service))
    for name in ("vllm_config", "vllm_env"):
        how = f"GET /server_info?config_format=json: {name}"
        facts.append(
            observe(GROUP, name, how, _resolved(place, name), match="must", service=service)
        )
    return facts


def _declared_commit(attrs: Mapping[str, Any], found: Field, service: str | None) -> Fact:
    """Fall back on the image's label: somebody said so, the build does not."""
    label = (attrs["Config"].get("Labels") or {}).get(_REVISION)
    if not label:
        return Fact(
            group=GROUP,
            name="commit",
            value=None,
            how=found["how"],
            state="verified" if found["absent"] else "failed",
            reason=found["error"],
            service=service,
            match="must",
        )
    return Fact(
        group=GROUP,
        name="commit",
        value=label,
        how=f"image label {_REVISION}",
        state="declared",
        reason=found["error"],
        service=service,
        match="must",
    )


def _arguments(attrs: Mapping[str, Any], running: Field, service: str | None) -> Fact:
    """Return the command line, `verified` when process 1 received exactly these words."""
    asked = [str(attrs["Path"]), *map(str, attrs["Args"])]
    received = is_tail(asked, running["value"] or [])
    return Fact(
        group=GROUP,
        name="startup_arguments",
        value=[*mask_argv(asked)],
        how="container inspect: Path and Args" + (", and /proc/1/cmdline" if received else ""),
        state="verified" if received else "declared",
        reason=None if received else running["error"] or "process 1 shows other words",
        service=service,
        match="reported",
    )


def is_tail(asked: Sequence[str], received: Sequence[str]) -> bool:
    """Tell whether a process received the words asked for, an init program before them aside."""
    return bool(asked) and list(received[-len(asked) :]) == list(asked)


def masked_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Mask secrets by name and form, and addresses of machines; sorted by name."""
    return {
        name: MASK if is_secret_variable(name, value) else mask_address(mask_text(value))
        for name, value in sorted(environment.items())
    }


def _environment(attrs: Mapping[str, Any], running: Field, service: str | None) -> Fact:
    """Return the listed variables of process 1, or as declared to the engine where unreadable."""
    value, how = running["value"], running["how"]
    if value is None:
        pairs = [str(pair).partition("=") for pair in attrs["Config"].get("Env") or []]
        value = {name: text for name, _mark, text in pairs if is_listed(name)}
        how = "container inspect: Config.Env, listed names only"
    return Fact(
        group=GROUP,
        name="environment",
        value={**masked_environment(value)},
        how=how,
        state="verified" if running["value"] is not None else "declared",
        reason=running["error"],
        service=service,
        match="must",
    )


def without_volatile(value: Any) -> Any:
    """Drop what every start draws anew, at any depth: keys, and addresses of objects in texts."""
    if isinstance(value, Mapping):
        return {k: without_volatile(each) for k, each in value.items() if k not in _VOLATILE}
    if isinstance(value, str):  # `<… object at 0x7f…>` stands for what has no form of its own
        return re.sub(r" at 0x[0-9a-f]+(?=>)", "", value)
    return [without_volatile(each) for each in value] if isinstance(value, list) else value


def shown_config(server_info: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return one part of /server_info (`vllm_config`, `vllm_env`) fit to be written down.

    The part `system_env` is never kept: it repeats other facts and holds the raw environment.
    Raises `KeyError` or `ValueError` for an answer of another shape.
    """
    part: dict[str, Any] = without_volatile(as_mapping(server_info[name]))
    if name != "vllm_env":
        return {**mask_value(part)}
    # Names are the environment's: judged by the rule for variables.
    words = {key: each for key, each in part.items() if isinstance(each, str)}
    return {**part, **masked_environment(words)}


def _resolved(place: Place, name: str) -> Callable[[], dict[str, Any]]:
    def read() -> dict[str, Any]:
        if place.server_info is None:
            raise Absent("no answer of /server_info was handed in")
        return shown_config(place.server_info, name)

    return read
