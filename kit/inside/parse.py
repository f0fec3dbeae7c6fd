"""From the raw bytes of one answer, in any pieces, to its text, token counts and token times.

HTTP is parsed by httptools; server-sent events as the WHATWG living standard's section
"Server-sent events" says. Never runs beside the sockets: time is taken before anything is parsed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import httptools

from .text import mask_text

_MESSAGE_CHARS = 300


def short_error(kind: str, message: object) -> str:
    """Return `kind: message` on one line, cut to a readable length; it may be written down."""
    text = mask_text(" ".join(str(message).split()))
    return f"{kind}: {text}"[:_MESSAGE_CHARS] if text else kind


@dataclass
class Reply:
    """What one answer said. Times are ns on CLOCK_MONOTONIC, the arrival of a chunk's last byte.

    `error` is null or `class: message`; `shared` counts content chunks that came in one read with
    a later event, whose own arrival therefore cannot be told from that event's.
    `prompt_logprobs` are those of the prompt's own tokens after the first, natural logarithms,
    when the request asked for them and the answer came whole.
    """

    status: int | None = None
    chunk_ns: list[int] = field(default_factory=list)
    chunk_chars: list[int] = field(default_factory=list)
    text: str = ""
    done_ns: int | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    finish_reason: str | None = None
    prompt_logprobs: list[float] | None = None
    error: str | None = None
    shared: int = 0


class EventLines:
    """Splits a byte stream, in any pieces, into the data of its server-sent events."""

    def __init__(self) -> None:
        self._tail: list[bytes] = []  # of a line that has not ended; joined once, when it has
        self._data: list[bytes] = []
        self._after_cr = False

    def feed(self, piece: bytes) -> list[bytes]:
        """Return the data of every event that this piece completes."""
        if self._after_cr and piece.startswith(b"\n"):
            piece = piece[1:]
            self._after_cr = False
        if not piece:
            return []
        self._after_cr = piece.endswith(b"\r")
        if b"\r" in piece:
            piece = piece.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        if b"\n" not in piece:
            self._tail.append(piece)
            return []
        lines = b"".join((*self._tail, piece)).split(b"\n")
        self._tail = [lines.pop()]
        events = []
        for line in lines:
            if not line:
                if self._data:
                    events.append(b"\n".join(self._data))
                    self._data = []
            elif line.startswith(b"data:"):
                self._data.append(line[6:] if line.startswith(b"data: ") else line[5:])
            elif line == b"data":
                self._data.append(b"")
        return events


class ReplyParser:
    """Parses one HTTP answer of a completions endpoint, streamed or whole.

    Feed it every read with its arrival, then call `finish` once. Never raises for what a server
    sent: that becomes `Reply.error`.
    """

    def __init__(self, *, asked_stream: bool) -> None:
        self._asked_stream = asked_stream
        self._http = httptools.HttpResponseParser(self)
        self._events = EventLines()
        self._is_events = False
        self._framed = False
        self._complete = False
        self._ended_well = False
        self._whole: list[bytes] = []
        self._texts: list[str] = []
        self._reply = Reply()
        self._now_ns = 0
        self._last_read_ns: int | None = None
        self._unshared = 0  # content chunks of this read that no later event has joined
        self._events_in_read = 0

    # -- called by httptools ---------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        key = name.lower()
        if key == b"content-type":
            self._is_events = value.lower().startswith(b"text/event-stream")
        elif key == b"content-length" or (key == b"transfer-encoding" and b"chunked" in value):
            self._framed = True

    def on_headers_complete(self) -> None:
        self._reply.status = self._http.get_status_code()

    def on_body(self, body: bytes) -> None:
        if not self._is_events or self._reply.status != 200:
            self._whole.append(body)
            return
        for event in self._events.feed(body):
            self._on_event(event)

    def on_message_complete(self) -> None:
        if (self._reply.status or 0) >= 200:  # an interim answer (1xx) is followed by the real one
            self._complete = True
            self._reply.done_ns = self._now_ns

    # -- events ----------------------------------------------------------------------------

    def _on_event(self, event: bytes) -> None:
        self._reply.shared += self._unshared
        self._unshared = 0
        if event == b"[DONE]":
            self._ended_well = True
            return
        try:
            frame = json.loads(event)
        except (ValueError, RecursionError) as error:
            self._fail("bad_json", f"{error} in {_start_of(event)}")
            return
        if isinstance(frame, dict):
            self._on_frame(frame)
        else:
            self._fail("bad_json", f"an event is no object: {_start_of(event)}")

    def _on_frame(self, frame: dict[str, Any]) -> None:
        self._take_usage(frame)
        if frame.get("error"):
            self._fail("server_error", _message_of(frame["error"]))
            return
        text = self._take_choices(frame, "delta")
        if text:
            self._reply.chunk_ns.append(self._now_ns)
            self._reply.chunk_chars.append(len(text))
            self._unshared += 1

    def _take_choices(self, frame: dict[str, Any], holder: str) -> str:
        """Add the choices' text to the reply's and return it; keep the finish reason."""
        found = ""
        for choice in _list(frame.get("choices")):
            if not isinstance(choice, dict):
                continue
            inner = choice.get(holder)
            text = inner.get("content") if isinstance(inner, dict) else choice.get("text")
            if isinstance(text, str):
                found += text
            reason = choice.get("finish_reason")
            if isinstance(reason, str):
                self._reply.finish_reason = reason
            scored = choice.get("prompt_logprobs")
            if isinstance(scored, list):
                self._reply.prompt_logprobs = _own_logprobs(scored)
        if found:
            self._texts.append(found)
        return found

    def _take_usage(self, frame: dict[str, Any]) -> None:
        usage = frame.get("usage")
        if not isinstance(usage, dict):
            return
        reply = self._reply
        reply.prompt_tokens = _count(usage, "prompt_tokens")
        reply.completion_tokens = _count(usage, "completion_tokens")
        details = usage.get("prompt_tokens_details")
        if isinstance(details, dict):
            reply.cached_tokens = _count(details, "cached_tokens")

    def _fail(self, kind: str, message: object) -> None:
        if self._reply.error is None:
            self._reply.error = short_error(kind, message)

    # -- called by the reader --------------------------------------------------------------

    def feed(self, data: bytes, arrived_ns: int) -> None:
        """Parse one read that arrived at `arrived_ns`.

        Where our own stamp, taken after a read, is followed by the kernel's, the two may cross
        by microseconds: a byte never arrives before the one in front of it.
        """
        self._now_ns = self._last_read_ns = max(self._now_ns, arrived_ns)
        self._unshared = 0
        try:
            self._http.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail("bad_http", error)

    def finish(self, *, eof: bool, error: str | None = None) -> Reply:
        """Return the reply. `eof`: the server closed; `error`: why reading stopped, if so."""
        reply = self._reply
        if eof and not self._framed and reply.status is not None and not self._complete:
            self._complete = True  # a body without length ends with the connection (RFC 9112, 6.3)
            reply.done_ns = self._last_read_ns
        if error is not None:
            reply.error = error
        elif not self._complete:
            self._fail("early_eof", self._how_far())
        elif reply.status != 200:
            reply.error = short_error(f"http_{reply.status}", self._refusal())
        elif self._is_events:
            if not self._ended_well:
                self._fail("early_eof", "the stream ended without [DONE]")
        else:
            self._take_whole()
        reply.text = "".join(self._texts)
        return reply

    def _how_far(self) -> str:
        if self._reply.status is None:
            return "closed before an answer"
        return f"closed after {len(self._reply.chunk_ns)} content chunks"

    def _refusal(self) -> str:
        body = b"".join(self._whole)
        try:
            parsed = json.loads(body)
        except (ValueError, RecursionError):
            return body.decode("utf-8", "replace")
        if not isinstance(parsed, dict):
            return str(parsed)
        return _message_of(parsed.get("error") or parsed.get("detail") or parsed)

    def _take_whole(self) -> None:
        body = b"".join(self._whole)
        try:
            frame = json.loads(body)
        except (ValueError, RecursionError) as error:
            self._fail("bad_json", f"{error} in {_start_of(body)}")
            return
        if not isinstance(frame, dict):
            self._fail("bad_json", f"the answer is no object: {_start_of(body)}")
            return
        self._take_usage(frame)
        self._take_choices(frame, "message")
        if frame.get("error"):
            self._fail("server_error", _message_of(frame["error"]))
        elif self._asked_stream:
            self._fail("not_streamed", "a stream was asked for, the answer came whole")


def _start_of(body: bytes) -> str:
    """Return how something that is no JSON begins; masked before a cut could shorten a secret."""
    return ascii(mask_text(body[:_MESSAGE_CHARS].decode("utf-8", "replace"))[:60])


def _message_of(error: object) -> str:
    if isinstance(error, dict) and isinstance(error.get("message"), str):
        return str(error["message"])
    return str(error)


def _own_logprobs(scored: list[Any]) -> list[float] | None:
    """Return each position's only log probability (asked for with `"prompt_logprobs": 0`).

    None when a position after the first has none, or several, so that it is unclear whose it is.
    """
    found = []
    for position in scored[1:]:
        tokens = list(position.values()) if isinstance(position, dict) else []
        only = tokens[0] if len(tokens) == 1 else None
        value = only.get("logprob") if isinstance(only, dict) else None
        if not isinstance(value, int | float) or isinstance(value, bool):
            return None
        found.append(float(value))
    return found


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _count(holder: dict[str, Any], key: str) -> int | None:
    value = holder.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else None
