"""Other load generators in the kit's place: what they can be asked, and in which words.

A tool sends the measured window of a plan; every other window stays the kit's own. What it cannot
send as the plan says is refused here, before anything is started.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from kit.errors import UsageError
from kit.experiment import unknown

LoadTool = Literal["kit", "vllm-bench"]
TOOL_NAMES: Mapping[LoadTool, str] = {"vllm-bench": "vllm bench serve"}
CLIENT_MEMORY_BYTES = 4 * 2**30
"""The tool imports vLLM and PyTorch, which the kit's own generator does not."""

_PATH = "/v1/completions"
_OWN = frozenset(("model", "prompt", "max_tokens", "stream", "stream_options"))
_EVEN_S = 1e-6
_HINT = "leave --load-tool out to let the kit send it"


def find_load_tool(name: str) -> LoadTool:
    """Return the load generator of that name; raise `UnknownName` where there is none."""
    known: Sequence[LoadTool] = ("kit", *TOOL_NAMES)
    for tool in known:
        if tool == name:
            return tool
    raise unknown("load tool", name, list(known))


def tool_words(requests: Sequence[Mapping[str, Any]], tool: LoadTool) -> tuple[str, ...]:
    """Return the words by which a tool is asked for the measured window; none for the kit itself.

    Address, files and the requests' own texts are told where it runs. Lanes become the tool's limit
    of requests at once; moments must be evenly spaced, or one and the same. Raises `UsageError` for
    what it cannot send so.
    """
    if tool == "kit":
        return ()
    shared = _shared_body(requests)
    words = ["--backend", "openai", "--endpoint", _PATH, "--num-prompts", str(len(requests))]
    words += ["--extra-body", json.dumps(shared, sort_keys=True), "--seed", "1"]
    return (*words, *_arrivals(requests))


def _shared_body(requests: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what all bodies hold alike beside prompt and length: a tool has one set for all."""
    bodies = [request["body"] for request in requests]
    for request, body in zip(requests, bodies, strict=True):
        if request["path"] != _PATH or body.get("stream") is not True or "max_tokens" not in body:
            raise UsageError(
                f"vllm bench serve cannot send {request['id']}: it is no streamed completion of a "
                "given length",
                hint=_HINT,
            )
    found = [{k: v for k, v in body.items() if k not in _OWN} for body in bodies]
    if different := next((i for i, each in enumerate(found) if each != found[0]), None):
        raise UsageError(
            f"vllm bench serve cannot send {requests[different]['id']}: it has one set of sampling "
            f"parameters for all requests, and those of {requests[0]['id']} differ",
            hint=_HINT,
        )
    return found[0]


def _arrivals(requests: Sequence[Mapping[str, Any]]) -> list[str]:
    lanes = {str(request["lane"]) for request in requests if request.get("lane")}
    moments = [float(request["at_s"]) for request in requests if request.get("at_s") is not None]
    late = [request["id"] for request in requests if request.get("start_s")]
    if (lanes and moments) or late:
        raise UsageError(
            "vllm bench serve sends either at a rate or so many at once, and this load is both",
            hint=_HINT,
        )
    if lanes:
        return ["--request-rate", "inf", "--max-concurrency", str(len(lanes))]
    gaps_s = [b - a for a, b in itertools.pairwise(sorted(moments))] or [0.0]
    if max(gaps_s) - min(gaps_s) > _EVEN_S:
        raise UsageError(
            "vllm bench serve cannot keep this load's moments: it sends evenly, or draws its own",
            hint=_HINT,
        )
    rate = 1 / gaps_s[0] if gaps_s[0] > 0 else math.inf
    return ["--request-rate", f"{rate:.6g}", "--burstiness", "inf"]
