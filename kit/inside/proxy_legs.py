"""The proxy's upstream side: the servers behind it, and one request to one of them."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import httptools

from .proxy_wire import Failure

CONNECT_S = 5.0
_ERROR_EVENT = b'data: {"error"'
"""How an event begins that tells an error; within a text its quotes would be escaped."""


@dataclass(eq=False)
class Leg:
    """A server behind the proxy. `outstanding` counts the generations that it is serving now."""

    name: str
    host: str
    port: int
    outstanding: int = 0
    turn: int = 0
    _address: str | None = None

    @property
    def authority(self) -> str:
        """The value of the Host header."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    async def connect(self, protocol: asyncio.Protocol) -> None:
        """Connect. Raises `OSError`.

        The name is looked up once: asking the resolver costs more than all else that the proxy
        does. A failed connection looks it up anew, as a container that restarts may move.
        """
        loop = asyncio.get_running_loop()
        if self._address is None:
            found = await loop.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
            self._address = str(found[0][4][0])
        try:
            await loop.create_connection(lambda: protocol, self._address, self.port)
        except OSError:
            self._address = None
            raise


def least_busy(legs: Sequence[Leg]) -> Leg:
    """Return the leg with the fewest outstanding generations; among equals the longest unused."""
    chosen = min(legs, key=lambda leg: (leg.outstanding, leg.turn))
    chosen.turn = max(leg.turn for leg in legs) + 1
    return chosen


class Exchange(asyncio.Protocol):
    """One request to one leg on a connection of its own, which ends with it.

    A successful stream of events is handed to `pass_on` piece by piece as it comes; any other
    answer is kept whole, so that a leg that dies in the middle of it can still be told in words.
    `patient` exchanges may take any time as long as bytes keep coming; others must be whole
    within the deadline.
    """

    def __init__(
        self,
        leg: Leg,
        request: bytes,
        *,
        deadline_s: float,
        pass_on: Callable[[bytes], None] | None = None,
        patient: bool = False,
    ) -> None:
        self.leg = leg
        self.status = 0
        self.body = bytearray()
        self.streams = False
        self.between_events = False
        """Whether what was passed on so far ends with a whole event in a whole chunk."""
        self.keeps = True
        """Whether the answer's end can be told without the end of the connection."""
        self.told_error = False
        """Whether the leg broke its own stream off with an error of its own."""
        self.sent_s: float | None = None
        self.first_s: float | None = None
        self._loop = asyncio.get_running_loop()
        self._request = request
        self._deadline_s = deadline_s
        self._pass_on = pass_on
        self._patient = patient
        self._pieces: list[bytes] = []
        self._tail = b""
        self._is_events = self._framed = self._whole = self._paused = False
        self._heard_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._done: asyncio.Future[None] = self._loop.create_future()

    @property
    def raw(self) -> bytes:
        """The bytes of an answer that was kept whole."""
        return b"".join(self._pieces)

    async def run(self) -> None:
        """Send the request and wait until the answer is whole. Raises `Failure`.

        However it ends, cancelled included, the connection is closed at once.
        """
        try:
            await self._connect()
            await self._done
        finally:
            if self._timer is not None:
                self._timer.cancel()
            if self._transport is not None:
                self._transport.abort()

    async def _connect(self) -> None:
        limit_s = min(CONNECT_S, self._deadline_s)
        try:
            async with asyncio.timeout(limit_s):
                await self.leg.connect(self)
        except TimeoutError:
            text = f"no connection to {self.leg.authority} within {limit_s:g} s"
            raise self._failure(504, "deadline_connect", text) from None
        except OSError as error:
            reason = error.strerror or str(error)
            if error.errno and error.errno > 0:
                reason = os.strerror(error.errno)
            text = f"no connection to {self.leg.authority}: {reason}"
            raise self._failure(502, "connect", text) from None

    def _failure(self, status: int, kind: str, message: str) -> Failure:
        return Failure(status, kind, f"{self.leg.name}: {message}", self.leg.name)

    def _fail(self, status: int, kind: str, message: str) -> None:
        if not self._done.done():
            self._done.set_exception(self._failure(status, kind, message))

    def pause(self) -> None:
        """Read no more for now: the client does not keep up."""
        self._paused = True
        if self._transport is not None:
            self._transport.pause_reading()

    def resume(self) -> None:
        """Read on."""
        self._paused = False
        self._heard_s = time.monotonic()
        if self._transport is not None:
            self._transport.resume_reading()

    def _check_deadline(self) -> None:
        """Fail when it is over; bytes of a patient exchange only move it, without a timer each."""
        now_s = time.monotonic()
        since_s = self._heard_s if self._patient else (self.sent_s or now_s)
        left_s = self._deadline_s if self._paused else since_s + self._deadline_s - now_s
        if left_s > 0:
            self._timer = self._loop.call_later(left_s, self._check_deadline)
        elif self.first_s is None:
            self._fail(504, "deadline_answer", f"no answer within {self._deadline_s:g} s")
        elif self._patient:
            self._fail(504, "deadline_silence", f"silent for {self._deadline_s:g} s")
        else:
            self._fail(504, "deadline_answer", f"no whole answer within {self._deadline_s:g} s")

    # -- called by the loop ------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(self._request)
        self.sent_s = self._heard_s = time.monotonic()
        self._timer = self._loop.call_later(self._deadline_s, self._check_deadline)

    def data_received(self, data: bytes) -> None:
        self._heard_s = time.monotonic()
        if self.first_s is None:
            self.first_s = self._heard_s
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(502, "bad_http", f"broken HTTP: {error}")
            return
        self._pieces.append(data)
        if self.streams and self._pass_on is not None:
            self._pass_on(self.raw)
            self._pieces.clear()
        if self._whole and not self._done.done():
            self._done.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._done.done():
            return
        if self.status and not self._framed:  # RFC 9112, 6.3: such a body ends with the connection
            self.keeps = False
            self._done.set_result(None)
            return
        how = "in the middle of its answer" if self.first_s is not None else "without an answer"
        self._fail(502, "closed", f"closed the connection {how}")

    # -- called by httptools -----------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        key = name.lower()
        if key == b"content-type":
            self._is_events = value.lower().startswith(b"text/event-stream")
        elif key == b"content-length" or (key == b"transfer-encoding" and b"chunked" in value):
            self._framed = True

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        if self.status < 200:
            raise ValueError("an interim answer, which nobody asked for")
        self.streams = self._is_events and self.status == 200 and self._pass_on is not None
        self.between_events = True

    def on_body(self, body: bytes) -> None:
        self.between_events = False
        if self.streams:
            self._tail = (self._tail + body)[-2:]
            self.told_error = self.told_error or _ERROR_EVENT in body
        else:
            self.body += body

    def on_chunk_complete(self) -> None:
        self.between_events = self._tail == b"\n\n"

    def on_message_complete(self) -> None:
        self._whole = True
        self.keeps = self._parser.should_keep_alive()
