"""One request from its connection to its end, on a raw socket in the load's event loop.

The loop does as little as it can. A request's bytes are ready and its connection is open before
its time; what arrives is kept as (arrival, wait, bytes) and handed to the writer unread. Only the
end of an HTTP message is looked for here, by httptools, without any callback on the way.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass

import httptools

from .clock import Arrivals
from .parse import short_error
from .spec import Request
from .writer import Flown

Address = tuple[socket.AddressFamily, tuple[str, int]]


def resolve(host: str, port: int) -> Address | str:
    """Return the server's address, or why the name has none (a dead container loses its name)."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        return short_error("resolve", f"{host}: {error.strerror}")
    family, _, _, _, address = found[0]
    return family, (str(address[0]), int(address[1]))


@dataclass(frozen=True)
class Route:
    """What all requests of a load share: where they go, by which loop, and whom they tell."""

    loop: asyncio.AbstractEventLoop
    host: str
    port: int
    address: Address | str
    deadline_s: float
    arrivals: Arrivals
    on_sent: Callable[[Flight], None]
    on_ended: Callable[[Flight, Flown], None]

    def now_ns(self) -> int:
        return self.arrivals.clock.monotonic_ns()


class _MessageEnd:
    """The least an httptools parser can call: it only tells that the answer is complete."""

    __slots__ = ("seen",)

    def __init__(self) -> None:
        self.seen = False

    def on_message_complete(self) -> None:
        self.seen = True


class Flight:
    """One request from its connection to its end."""

    __slots__ = (
        "_connecting",
        "_due",
        "_end",
        "_opened_ns",
        "_parser",
        "_route",
        "_sock",
        "_timeout",
        "_unsent",
        "connect_ns",
        "ended",
        "intended_ns",
        "launched",
        "number",
        "reads",
        "request",
        "sent_ns",
    )

    def __init__(self, route: Route, number: int, request: Request) -> None:
        self.number = number
        self.request = request
        self.intended_ns = -1
        self.connect_ns = -1
        self.sent_ns = -1
        self.reads: list[tuple[int, int, bytes]] = []
        self.launched = False
        self.ended = False
        self._route = route
        self._sock: socket.socket | None = None
        self._connecting = False
        self._due = False
        self._opened_ns = 0
        self._unsent = memoryview(b"")
        self._end = _MessageEnd()
        self._parser: httptools.HttpResponseParser | None = None
        self._timeout: asyncio.TimerHandle | None = None

    # -- connecting --------------------------------------------------------------------------

    def connect(self) -> None:
        """Open the connection and make the bytes ready, ahead of time."""
        route = self._route
        if self.ended or self._sock is not None:
            return
        head = self.request.head(route.host, route.port)
        self._unsent = memoryview(head + self.request.body)
        self._parser = httptools.HttpResponseParser(self._end)
        if isinstance(route.address, str):
            self._refused(route.address)
            return
        family, address = route.address
        self._opened_ns = route.now_ns()
        try:
            sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        except OSError as error:  # out of file descriptors
            self._refused(short_error("connect", error.strerror))
            return
        self._sock = sock
        route.arrivals.watch(sock)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        code = sock.connect_ex(address)
        if code == errno.EINPROGRESS:
            self._connecting = True
            route.loop.add_writer(sock.fileno(), self._on_connected)
        else:
            self._connected(code)

    def _on_connected(self) -> None:
        sock = self._sock
        if sock is None:
            return
        self._route.loop.remove_writer(sock.fileno())
        self._connecting = False
        self._connected(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))

    def _connected(self, code: int) -> None:
        if code:
            self._drop()
            self._refused(short_error("connect", os.strerror(code)))
            return
        self.connect_ns = self._route.now_ns() - self._opened_ns
        if self._sock is not None:
            self._route.loop.add_reader(self._sock.fileno(), self._on_readable)
        if self._due:
            self._send()

    def _refused(self, error: str) -> None:
        if self._due:  # refused ahead of time is tried again at its time
            # Not at once: one end launches the next request, which must not recurse.
            self._route.loop.call_soon(self.finish, error)

    # -- sending -----------------------------------------------------------------------------

    def launch(self) -> None:
        """Send now, or as soon as the connection is there."""
        self.launched = True
        self._due = True
        route = self._route
        self._timeout = route.loop.call_later(route.deadline_s, self._on_deadline)
        if self._sock is None:
            self.connect()
        elif not self._connecting:
            self._send()

    def _send(self) -> None:
        sock = self._sock
        if sock is None:
            return
        self._due = False
        self.sent_ns = self._route.now_ns()
        try:
            count = sock.send(self._unsent)
        except BlockingIOError:
            count = 0
        except OSError as error:
            self.sent_ns = -1
            self.finish(short_error("reset", error.strerror))
            return
        self._route.on_sent(self)
        self._unsent = self._unsent[count:]
        if self._unsent:
            self._route.loop.add_writer(sock.fileno(), self._send_rest)

    def _send_rest(self) -> None:
        sock = self._sock
        if sock is None:
            return
        try:
            self._unsent = self._unsent[sock.send(self._unsent) :]
        except BlockingIOError:
            return
        except OSError as error:
            self.finish(short_error("reset", error.strerror))
            return
        if not self._unsent:
            self._route.loop.remove_writer(sock.fileno())

    # -- receiving ---------------------------------------------------------------------------

    def _on_readable(self) -> None:
        sock, parser = self._sock, self._parser
        if sock is None or parser is None:
            return
        if self.sent_ns < 0:  # closed by the server while it waited: `launch` opens another
            self._drop()
            return
        try:
            data, arrived_ns, waited_ns = self._route.arrivals.receive(sock)
        except BlockingIOError:
            return
        except OSError as error:
            self.finish(short_error("reset", error.strerror))
            return
        if not data:
            self.finish(None, eof=True)
            return
        self.reads.append((arrived_ns, waited_ns, data))
        try:
            parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self.finish(None, eof=True)  # the writer meets the same bytes and says what is wrong
            return
        if self._end.seen:
            self._end.seen = False
            if parser.get_status_code() >= 200:
                self.finish(None)

    def _on_deadline(self) -> None:
        self.finish(short_error("deadline", f"not complete within {self._route.deadline_s:g} s"))

    # -- the end -----------------------------------------------------------------------------

    def finish(self, error: str | None, *, eof: bool = False) -> None:
        """Close, and hand over what there is. Only the first call counts."""
        if self.ended:
            return
        self.ended = True
        self._drop()
        if self._timeout is not None:
            self._timeout.cancel()
            self._timeout = None
        self._route.on_ended(
            self,
            Flown(
                self.number,
                self.intended_ns,
                self.connect_ns,
                self.sent_ns,
                self.reads,
                eof,
                error,
            ),
        )
        self.reads = []

    def abandon(self) -> None:
        """Close without a word: this request was never sent."""
        self.ended = True
        self._drop()

    def _drop(self) -> None:
        sock, self._sock = self._sock, None
        if sock is None:
            return
        loop = self._route.loop
        loop.remove_reader(sock.fileno())
        loop.remove_writer(sock.fileno())
        self._connecting = False
        sock.close()
