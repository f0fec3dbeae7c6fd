"""The proxy's pure parts: the routing protocol of vLLM's NixlConnector, HTTP bytes, its counters.

To the producer goes the request with one token to generate; it answers with `kv_transfer_params`
that say where the prompt's cache blocks lie. The consumer gets the client's own request with
those parameters, unchanged, and fetches the blocks instead of computing the prompt.
"""

from __future__ import annotations

import bisect
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

MAX_BODY_BYTES = 16 * 2**20
MAX_HEAD_BYTES = 64 * 2**10

_NOT_FORWARDED = frozenset(
    b"connection content-length expect host keep-alive proxy-authenticate proxy-authorization "
    b"proxy-connection te trailer transfer-encoding upgrade x-request-id".split()
)
_NOT_FOR_PRODUCER = frozenset(
    ("stream_options", "min_tokens", "stop", "stop_token_ids", "include_stop_str_in_output")
)
_ASK_FOR_PARAMS = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
OVERHEAD_BOUNDS_S = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.25)

Headers = Sequence[tuple[bytes, bytes]]


class Failure(Exception):
    """Why a request gets no answer: `kind` names it, `leg` the server that failed, if one did."""

    def __init__(self, status: int, kind: str, message: str, leg: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.message = message
        self.leg = leg

    def content(self) -> dict[str, Any]:
        """Return the JSON body that a client gets, in the shape of vLLM's own errors."""
        told = {"message": self.message, "type": self.kind, "leg": self.leg, "code": self.status}
        return {"error": told}


@dataclass(frozen=True)
class Request:
    """A client's request. `id` is its X-Request-Id, or a new one.

    `whole_s` is when its last byte came, on CLOCK_MONOTONIC: uvloop's own time has only ms.
    """

    id: str
    method: str
    path: str
    query: str
    headers: Headers
    body: bytes
    whole_s: float


# -- the protocol ------------------------------------------------------------------------------


def parse_body(raw: bytes) -> dict[str, Any]:
    """Return the body of a generation request. Raises `Failure` 400 when it is no JSON object."""
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise Failure(400, "bad_request", f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise Failure(400, "bad_request", "the body is no JSON object")
    return body


def check_servable(body: Mapping[str, Any]) -> None:
    """Raise `Failure` 400 for what one transfer of one prompt's blocks cannot serve.

    Log probabilities of the prompt are among it: the consumer fetches the prompt's blocks and
    never computes its tokens.
    """
    fanned = next((name for name in ("n", "best_of") if body.get(name) not in (None, 1)), None)
    prompt = body.get("prompt")
    if fanned is not None:
        refused = f"{fanned} other than 1: one transfer of the prompt's cache serves one answer"
    elif body.get("use_beam_search"):
        refused = "beam search: one transfer of the prompt's cache serves one answer"
    elif isinstance(prompt, list) and len(prompt) > 1 and not all(map(_is_integer, prompt)):
        refused = "several prompts in one request: one transfer carries one prompt's cache"
    elif body.get("prompt_logprobs") is not None or (
        body.get("echo") and body.get("logprobs") is not None
    ):
        refused = "log probabilities of the prompt: the consumer does not compute the prompt"
    elif body.get("kv_transfer_params") is not None:
        refused = "kv_transfer_params of the client's own: the proxy sets them"
    else:
        return
    raise Failure(400, "not_servable", f"prefill and decode on two servers cannot serve {refused}")


def producer_body(body: Mapping[str, Any], *, is_chat: bool) -> dict[str, Any]:
    """Return what the producer is asked: the same prompt, one token, and where its blocks are.

    vLLM keeps the blocks only when the one token ends the answer by length. It is thrown away, so
    no end-of-text or stop word may end it instead: else each prompt whose answer is empty, or
    begins with a stop word, would fail.
    """
    asked = {key: value for key, value in body.items() if key not in _NOT_FOR_PRODUCER}
    asked |= {"max_tokens": 1, "stream": False, "ignore_eos": True}
    if is_chat:
        asked["max_completion_tokens"] = 1
    return {**asked, "kv_transfer_params": _ASK_FOR_PARAMS}


def consumer_body(body: Mapping[str, Any], params: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the consumer is asked: the client's body and the producer's parameters."""
    return {**body, "kv_transfer_params": dict(params)}


def read_params(answer: bytes | bytearray) -> dict[str, Any] | str:
    """Return the usable transfer parameters of a producer's answer, or why there are none.

    vLLM's decoder dies without block ids and waits for ever without an engine id, so nothing
    incomplete may reach it. Block ids come as one list, or as one list for each group of layers.
    Releases that hand over only full blocks give an empty list for a prompt shorter than a block.
    """
    try:
        parsed = json.loads(answer)
    except (ValueError, RecursionError):
        return "the answer is not JSON"
    params = parsed.get("kv_transfer_params") if isinstance(parsed, dict) else None
    if not isinstance(params, dict):
        return f"the answer has no kv_transfer_params{_finish_reason(parsed)}"
    if params.get("do_remote_prefill") is not True:
        return "do_remote_prefill is not true"
    for name in ("remote_engine_id", "remote_request_id", "remote_host"):
        if not isinstance(params.get(name), str) or not params[name]:
            return f"{name} is missing"
    if not _is_integer(port := params.get("remote_port", 0)) or not 0 < port < 65536:
        return "remote_port is missing"
    blocks = params.get("remote_block_ids")
    if not isinstance(blocks, list):
        return "remote_block_ids is missing"
    if not any(_is_integer(item) or (isinstance(item, list) and item) for item in blocks):
        return "remote_block_ids is empty: the prompt filled no block that can be handed over"
    return params


def _is_integer(item: object) -> bool:
    return isinstance(item, int) and not isinstance(item, bool)


def _finish_reason(parsed: object) -> str:
    choices = parsed.get("choices") if isinstance(parsed, dict) else None
    first = choices[0] if isinstance(choices, list) and choices else None
    reason = first.get("finish_reason") if isinstance(first, dict) else None
    return f" (finish_reason {reason})" if isinstance(reason, str) else ""


# -- HTTP --------------------------------------------------------------------------------------


def request_bytes(request: Request, host: str, body: bytes) -> bytes:
    """Return a request as it goes to a leg: the client's headers but those of one connection.

    Without `Connection: close`, so that the answer's head can be handed on as it is.
    """
    target = f"{request.path}?{request.query}" if request.query else request.path
    head = f"{request.method} {target} HTTP/1.1\r\nHost: {host}\r\nX-Request-Id: {request.id}\r\n"
    lines = [b"%s: %s\r\n" % h for h in request.headers if h[0].lower() not in _NOT_FORWARDED]
    if body or request.method == "POST":
        lines.append(b"Content-Length: %d\r\n" % len(body))
    return b"".join([head.encode("latin-1"), *lines, b"\r\n", body])


def answer_bytes(status: int, content: object, headers: Headers = ()) -> bytes:
    """Return a whole answer: text as it is, anything else as JSON."""
    body = (content if isinstance(content, str) else json.dumps(content)).encode()
    kind = b"text/plain; version=0.0.4; charset=utf-8"
    if not isinstance(content, str):
        kind = b"application/json"
    head = b"HTTP/1.1 %d %s\r\n" % (status, HTTPStatus(status).phrase.encode())
    own = [(b"content-type", kind), (b"content-length", b"%d" % len(body)), *headers]
    return head + b"".join(b"%s: %s\r\n" % pair for pair in own) + b"\r\n" + body


def with_headers(answer: bytes, headers: Headers) -> bytes:
    """Return an answer's bytes with these headers put in front of its own."""
    line, newline, rest = answer.partition(b"\r\n")
    return line + newline + b"".join(b"%s: %s\r\n" % pair for pair in headers) + rest


def error_event(failure: Failure) -> bytes:
    """Return a chunk with one server-sent event that says why a stream breaks off."""
    data = b"data: " + json.dumps(failure.content()).encode() + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(data), data)


# -- counters ----------------------------------------------------------------------------------


@dataclass
class Counters:
    """What the proxy counts about generations, and errors of all requests. Times in seconds.

    Overhead is the proxy's own time before the first token: from the whole request to its last
    send to a leg, connecting included, without the time that the producer took.
    """

    requests: Counter[str] = field(default_factory=Counter)
    """By the leg that answers."""
    errors: Counter[tuple[str, str]] = field(default_factory=Counter)
    """By leg (`client` where the request itself is at fault) and kind."""
    in_flight: int = 0
    aborted: int = 0
    recomputed: int = 0
    relayed_bytes: int = 0
    overhead: list[int] = field(default_factory=lambda: [0] * (len(OVERHEAD_BOUNDS_S) + 1))
    overhead_sum_s: float = 0.0

    def observe_overhead(self, seconds: float) -> None:
        self.overhead[bisect.bisect_left(OVERHEAD_BOUNDS_S, seconds)] += 1
        self.overhead_sum_s += seconds

    def text(self, outstanding: Iterable[tuple[str, int]]) -> str:
        """Return them in Prometheus' text format; `outstanding` is each leg's requests now."""
        by_error = {f'leg="{leg}",kind="{kind}"': n for (leg, kind), n in self.errors.items()}
        lines = [
            *_family("requests_total", "counter", _by_leg(self.requests.items())),
            *_family("errors_total", "counter", by_error),
            *_family("aborted_total", "counter", {"": self.aborted}),
            *_family("recomputed_total", "counter", {"": self.recomputed}),
            *_family("relayed_bytes_total", "counter", {"": self.relayed_bytes}),
            *_family("in_flight", "gauge", {"": self.in_flight}),
            *_family("outstanding", "gauge", _by_leg(outstanding)),
            "# TYPE kit_proxy_overhead_seconds histogram",
        ]
        below = 0
        for bound, n in zip((*OVERHEAD_BOUNDS_S, "+Inf"), self.overhead, strict=True):
            below += n
            lines.append(f'kit_proxy_overhead_seconds_bucket{{le="{bound}"}} {below}')
        lines.append(f"kit_proxy_overhead_seconds_sum {self.overhead_sum_s}")
        lines.append(f"kit_proxy_overhead_seconds_count {below}")
        return "\n".join(lines) + "\n"


def _by_leg(pairs: Iterable[tuple[str, int]]) -> dict[str, int]:
    return {f'leg="{leg}"': n for leg, n in pairs}


def _family(name: str, kind: str, series: Mapping[str, int]) -> list[str]:
    samples = [f"kit_proxy_{name}{{{labels}}} {n}" for labels, n in series.items()]
    return [f"# TYPE kit_proxy_{name} {kind}", *(line.replace("{}", "") for line in samples)]
