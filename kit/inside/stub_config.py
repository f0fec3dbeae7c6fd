"""What a stub is told to do, and how it reads a command line made for `vllm serve`."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .spec import BadSpec


class BadStub(BadSpec):
    """The stub's configuration cannot be used."""


@dataclass(frozen=True)
class StubConfig:
    """A server's planted behaviour. Times in seconds; fractions are shares of requests, 0 to 1.

    Timing: the first token leaves `ttft_s` (+ `ttft_per_token_s` for each prompt token that is not
    cached) after the request's arrival, each next chunk `itl_s` later, on an absolute schedule.
    Both are multiplied by the arm's factors, by one draw for this process (`process_sd`) and one
    for this request (`noise_sd`); sds are of log-normal draws around 1.
    `arms` and `info_when` are lists of `{"when": {argument: value}, ...}`: with `ttft_factor`,
    `itl_factor`; or with `set: {"scheduler_config.max_num_seqs": value}` to change in silence what
    /server_info says.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    model: str = "stub"
    seed: int = 0
    times_out: str | None = None
    """Write here when each request arrived and when each of its chunks was sent."""

    ttft_s: float = 0.1
    ttft_per_token_s: float = 0.0
    itl_s: float = 0.05
    tokens_per_chunk: int = 1
    arms: tuple[dict[str, Any], ...] = ()
    noise_sd: float = 0.0
    process_sd: float = 0.0
    process_seed: int | None = None
    bimodal_fraction: float = 0.0
    bimodal_factor: float = 1.0
    slow_file: str | None = None
    """A server that finds this file takes `slow_factor` times as long: what no plan tells it."""
    slow_factor: float = 1.3
    drift_per_request: float = 0.0
    """Each request's TTFT is longer than the last by this share of `ttft_s`."""

    prefix_caching: bool = True
    """Unless the command line says otherwise."""
    block_tokens: int = 16
    kv_blocks: int = 10_000
    max_num_seqs: int | None = None
    preemptions_per_request: float = 0.0
    spec_acceptance: float = 0.5
    info_when: tuple[dict[str, Any], ...] = ()

    served_fraction: float = 1.0
    """Serve only this share of the tokens asked for."""
    usage_factor: float = 1.0
    """Report this many times the tokens served."""
    role_only_first: bool = True
    fail_fraction: float = 0.0
    fail_status: int = 500
    reset_fraction: float = 0.0
    early_eof_fraction: float = 0.0
    bad_json_fraction: float = 0.0
    hang_fraction: float = 0.0
    counters_reset_after: int | None = None
    kv_drop: str = ""
    """As a producer: this field is missing in kv_transfer_params; `all`: there are none."""
    kv_full_blocks_only: bool = False
    """As a producer: hand over only full blocks, as old releases do: none of a short prompt."""
    kv_lease_s: float = 30.0
    """As a producer: how long blocks are kept for a consumer; vLLM's default."""
    kv_transfer_s: float = 0.001
    """How long a transfer takes."""
    kv_fetch_after_s: float = 0.0
    """As a consumer: fetch so late, without the heartbeats that make vLLM's leases longer."""
    kv_handshake_s: float = 5.0
    """As a consumer: wait so long for a producer's answer; vLLM's own limit."""
    kv_transfer_disabled: bool = False
    """As a consumer: compute the prompt without a word instead of fetching its blocks."""
    kv_bytes_per_token: int = 1024
    die_at_start_s: float | None = None
    die_after_requests: int | None = None
    die_exit_code: int = 1
    die_lingers_s: float = 0.0
    """Go on for so long after the planned death, as an API server does whose engine has died."""
    ready_after_s: float = 0.0
    never_ready: bool = False
    ignore_sigterm: bool = False


def parse_config(raw: Mapping[str, Any]) -> StubConfig:
    """Build a config from parsed JSON. Raises `BadStub` for an unknown key or a wrong type."""
    fields = {field.name: field for field in dataclasses.fields(StubConfig)}
    values = {}
    for key, value in raw.items():
        if key not in fields:
            raise BadStub(f"{key}: unknown")
        default = fields[key].default
        if isinstance(default, tuple):
            value = tuple(value) if isinstance(value, list) else value
        elif isinstance(default, float) and isinstance(value, int):
            try:
                value = float(value)
            except OverflowError:
                raise BadStub(f"{key}: too large: {str(value)[:20]}…") from None
        if default is not None and type(value) is not type(default):
            raise BadStub(f"{key}: {type(default).__name__} is needed, not {value!r}")
        if isinstance(value, float) and not math.isfinite(value):
            raise BadStub(f"{key}: not a number: {value!r}")
        values[key] = value
    return StubConfig(**values)


def parse_config_text(text: str, source: str) -> StubConfig:
    """Build a config from JSON text; `source` names it in errors. Raises `BadStub`."""
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadStub(f"{source}: not JSON: {error}") from None
    if not isinstance(raw, dict):
        raise BadStub(f"{source}: an object is needed")
    return parse_config(raw)


def parse_serve(words: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """Read what follows `vllm serve`: the model and the arguments, by name with underscores.

    Accepts `--name value`, `--name=value`, `--name` and `--no-name`; values are JSON where they
    parse as such, else text. Unknown names are kept: a stub ignores what it does not know.
    """
    model = ""
    found: dict[str, Any] = {}
    words = list(words)
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            model = model or word
            continue
        name, equals, value = word[2:].partition("=")
        name = name.replace("-", "_")
        if equals:
            found[name] = _literal(value)
        elif words and not words[0].startswith("--"):
            found[name] = _literal(words.pop(0))
        elif name.startswith("no_"):
            found[name[3:]] = False
        else:
            found[name] = True
    return model, found


def _literal(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def holds(when: Mapping[str, Any], arguments: Mapping[str, Any]) -> bool:
    """Whether the server was started with all of these arguments."""
    return all(arguments.get(name) == value for name, value in when.items())
