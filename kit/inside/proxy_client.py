"""The proxy's downstream side: its clients' connections, one request at a time on each."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import cast

import httptools

from .proxy_legs import Exchange
from .proxy_wire import (
    MAX_BODY_BYTES,
    MAX_HEAD_BYTES,
    Counters,
    Failure,
    Request,
    answer_bytes,
    error_event,
)

_LINGER_S = 1.0


@dataclass
class Trace:
    """One request's line in the log. Times in seconds from the whole request."""

    event: str
    id: str
    method: str
    path: str
    leg: str | None = None
    status: int | None = None
    error: str | None = None
    producer_s: float | None = None
    sent_s: float | None = None
    first_byte_s: float | None = None
    total_s: float = 0.0
    bytes: int = 0
    recomputed: bool = False


class Clients:
    """All open connections, and how their requests are answered."""

    def __init__(
        self, answer: Callable[[Client, Request, Trace], Awaitable[None]], counters: Counters
    ) -> None:
        self.answer = answer
        self.counters = counters
        self.present: set[Client] = set()
        self.draining = False

    async def drain(self, grace_s: float) -> None:
        """Let the answers in flight end, then close what is left."""
        self.draining = True
        until_s = time.monotonic() + grace_s
        for client in list(self.present):
            client.close_when_idle()
        while self.present and time.monotonic() < until_s:
            await asyncio.sleep(0.02)
        for client in list(self.present):
            client.abort()
        while self.present:
            await asyncio.sleep(0)


class Client(asyncio.Protocol):
    """One client's connection: reads requests, one at a time, and writes their answers.

    A request that begins before the last one's answer has ended is not answered: the connection
    closes after that answer, and the client asks again on another one.
    """

    def __init__(self, clients: Clients) -> None:
        self.begun = False
        """Whether a part of the present answer was written."""
        self.exchange: Exchange | None = None
        """The exchange whose stream comes here."""
        self._clients = clients
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self._parser = httptools.HttpRequestParser(self)
        self._task: asyncio.Task[None] | None = None
        self._deaf = False
        self._reset()

    def _reset(self) -> None:
        self.begun = False
        self.exchange = None
        self._status: int | None = None
        self._keep = self._ended = self._head_done = False
        self._head_bytes = self._written = self._body_bytes = 0
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._body: list[bytes] = []
        self._failure: Failure | None = None

    # -- called by the loop --------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._clients.present.add(self)
        if self._clients.draining:
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._deaf = True  # the request is answered, what follows in another protocol is not
        except httptools.HttpParserError as error:
            self._failure = Failure(400, "bad_request", f"broken HTTP: {error}")
        if not self._head_done and self._task is None:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._failure = Failure(431, "too_large", "the request's head is too large")
        if self._failure is not None:
            self._deaf = True
            if self._task is None:
                self._refuse(self._failure)

    def connection_lost(self, exc: Exception | None) -> None:
        self._clients.present.discard(self)
        if self._task is not None:
            self._task.cancel()

    def pause_writing(self) -> None:
        if self.exchange is not None:
            self.exchange.pause()

    def resume_writing(self) -> None:
        if self.exchange is not None:
            self.exchange.resume()

    # -- called by httptools -------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._deaf = self._deaf or self._task is not None

    def on_url(self, url: bytes) -> None:
        if not self._deaf:
            self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._deaf:
            self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        if self._deaf:
            return
        self._head_done = True
        length = self._header(b"content-length") or b"0"
        if self._parser.get_http_version() != "1.1":
            self._failure = Failure(505, "bad_request", "HTTP/1.1 is needed")
        elif int(length) > MAX_BODY_BYTES:
            self._failure = _too_large()
        elif self._header(b"expect").lower() == b"100-continue":
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        if self._deaf or self._failure is not None:
            return
        self._body_bytes += len(body)
        self._body.append(body)
        if self._body_bytes > MAX_BODY_BYTES:
            self._failure = _too_large()

    def on_message_complete(self) -> None:
        if self._deaf or self._failure is not None:
            return
        method = self._parser.get_method().decode()
        self._keep = self._parser.should_keep_alive() and method != "HEAD"
        path, _, query = self._url.decode("latin-1").partition("?")
        request = Request(
            id=self._header(b"x-request-id").decode("latin-1") or secrets.token_hex(16),
            method=method,
            path=path,
            query=query,
            headers=tuple(self._headers),
            body=b"".join(self._body),
            whole_s=time.monotonic(),
        )
        self._task = self._loop.create_task(self._serve(request))

    def _header(self, name: bytes) -> bytes:
        return next((value for key, value in self._headers if key.lower() == name), b"")

    # -- answers -------------------------------------------------------------------------------

    def write(self, piece: bytes) -> None:
        """Write a part of the answer."""
        self.begun = True
        self._written += len(piece)
        self._transport.write(piece)

    def send(self, rest: bytes, status: int, *, keep: bool = True) -> None:
        """Write the end of the answer; `keep` when the connection may be used again."""
        self.write(rest)
        self._status = status
        self._keep = self._keep and keep
        self._ended = True

    async def _serve(self, request: Request) -> None:
        trace = Trace("request", request.id[:200], request.method, request.path[:200])
        try:
            await self._clients.answer(self, request, trace)
        except Failure as failure:
            trace.error = f"{failure.kind}: {failure.message}"
            self._tell(failure)
        except asyncio.CancelledError:
            trace.error = "aborted: the client has gone"
            raise
        finally:
            self._finish(request, trace)

    def _tell(self, failure: Failure) -> None:
        self._clients.counters.errors[failure.leg or "client", failure.kind] += 1
        if not self.begun:
            self.send(answer_bytes(failure.status, failure.content()), failure.status)
            return
        if self.exchange is not None and self.exchange.between_events:
            self._transport.write(error_event(failure))
        self.send(b"", 200, keep=False)  # without the last chunk: the stream is seen to be broken

    def _finish(self, request: Request, trace: Trace) -> None:
        """Log the request and make ready for the next one, or close."""
        self._clients.counters.relayed_bytes += self._written
        trace.total_s = time.monotonic() - request.whole_s
        trace.bytes, trace.status = self._written, self._status
        _log(trace)
        self._task = None
        if not self._ended:
            self._transport.abort()
        elif self._keep and not self._deaf and not self._clients.draining:
            self._reset()
        else:
            self._transport.close()

    def _refuse(self, failure: Failure) -> None:
        """Answer what is no request, and close; a client that is still sending can read why."""
        self._clients.counters.errors["client", failure.kind] += 1
        self._transport.write(answer_bytes(failure.status, failure.content()))
        self._transport.write_eof()
        self._loop.call_later(_LINGER_S, self._transport.abort)
        error = f"{failure.kind}: {failure.message}"
        _log(Trace("request", "", "", "", status=failure.status, error=error))

    def close_when_idle(self) -> None:
        """Close now, or after the answer in flight, as `_finish` does while the proxy drains."""
        if self._task is None:
            self._transport.close()

    def abort(self) -> None:
        """Close without waiting for anything."""
        self._transport.abort()


def _too_large() -> Failure:
    return Failure(413, "too_large", f"the body is larger than {MAX_BODY_BYTES} bytes")


def _log(trace: Trace) -> None:
    told = {k: round(v, 6) if isinstance(v, float) else v for k, v in vars(trace).items()}
    print(json.dumps(told), flush=True)
