"""The load: sends requests at exact times and notes when every piece of the answers arrived.

The loop does as little as it can. A request's bytes are ready and its connection is open before
its time; what arrives is kept as (arrival, wait, bytes) and handed to the writer unread. Only the
end of an HTTP message is looked for here, by httptools, without any callback on the way.

Open loop: `at_s` is the intended time, and a late send does not move it. Closed loop: within a
lane, the intended time is the arrival of the previous answer's last byte.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import httptools

from .clock import NS, Alarm, Arrivals
from .parse import short_error
from .spec import Request
from .writer import Flown

CONNECT_AHEAD_NS = NS // 4
_STALE_NS = NS
"""A connection that has waited this long is looked at before it is used."""

Address = tuple[socket.AddressFamily, tuple[str, int]]


@dataclass
class LoadTotals:
    """What the load did: counts, and how late it sent, in ns."""

    of: int
    sent: int = 0
    ended: int = 0
    send_lags_ns: list[int] = field(default_factory=list)

    @property
    def unsent(self) -> int:
        return self.of - self.ended


def resolve(host: str, port: int) -> Address | str:
    """Return the server's address, or why the name has none (a dead container loses its name)."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        return short_error("resolve", f"{host}: {error.strerror}")
    family, _, _, _, address = found[0]
    return family, (str(address[0]), int(address[1]))


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
        "_load",
        "_opened_ns",
        "_parser",
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

    def __init__(self, load: Load, number: int, request: Request) -> None:
        self.number = number
        self.request = request
        self.intended_ns = -1
        self.connect_ns = -1
        self.sent_ns = -1
        self.reads: list[tuple[int, int, bytes]] = []
        self.launched = False
        self.ended = False
        self._load = load
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
        load = self._load
        if self.ended or self._sock is not None:
            return
        head = self.request.head(load.host, load.port)
        self._unsent = memoryview(head + self.request.body)
        self._parser = httptools.HttpResponseParser(self._end)
        if isinstance(load.address, str):
            self._refused(load.address)
            return
        family, address = load.address
        self._opened_ns = load.now_ns()
        try:
            sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        except OSError as error:  # out of file descriptors
            self._refused(short_error("connect", error.strerror))
            return
        self._sock = sock
        load.arrivals.watch(sock)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        code = sock.connect_ex(address)
        if code == errno.EINPROGRESS:
            self._connecting = True
            load.loop.add_writer(sock.fileno(), self._on_connected)
        else:
            self._connected(code)

    def _on_connected(self) -> None:
        sock = self._sock
        if sock is None:
            return
        self._load.loop.remove_writer(sock.fileno())
        self._connecting = False
        self._connected(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))

    def _connected(self, code: int) -> None:
        if code:
            self._drop()
            self._refused(
                short_error("connect", OSError(code, "").strerror or errno.errorcode[code])
            )
            return
        self.connect_ns = self._load.now_ns() - self._opened_ns
        if self._due:
            self._send()

    def _refused(self, error: str) -> None:
        if self._due:  # refused ahead of time is tried again at its time
            # Not at once: one end launches the next request, which must not recurse.
            self._load.loop.call_soon(self.finish, error)

    # -- sending -----------------------------------------------------------------------------

    def launch(self) -> None:
        """Send now, or as soon as the connection is there."""
        self.launched = True
        self._due = True
        load = self._load
        self._timeout = load.loop.call_later(load.deadline_s, self._on_deadline)
        if self._sock is not None and not self._connecting and self._is_stale():
            self._drop()
        if self._sock is None:
            self.connect()
        elif not self._connecting:
            self._send()

    def _is_stale(self) -> bool:
        """Whether the server closed a connection that waited long."""
        if self._sock is None or self._load.now_ns() - self._opened_ns < _STALE_NS:
            return False
        try:
            self._sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    def _send(self) -> None:
        sock = self._sock
        if sock is None:
            return
        self._due = False
        self.sent_ns = self._load.now_ns()
        try:
            count = sock.send(self._unsent)
        except BlockingIOError:
            count = 0
        except OSError as error:
            self.finish(short_error("reset", error.strerror))
            return
        self._load.on_sent(self)
        self._unsent = self._unsent[count:]
        if self._unsent:
            self._load.loop.add_writer(sock.fileno(), self._send_rest)
        self._load.loop.add_reader(sock.fileno(), self._on_readable)

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
            self._load.loop.remove_writer(sock.fileno())

    # -- receiving ---------------------------------------------------------------------------

    def _on_readable(self) -> None:
        sock, parser = self._sock, self._parser
        if sock is None or parser is None:
            return
        try:
            data, arrived_ns, waited_ns = self._load.arrivals.receive(sock)
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
        self.finish(short_error("deadline", f"not complete within {self._load.deadline_s:g} s"))

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
        self._load.on_ended(
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
        loop = self._load.loop
        loop.remove_reader(sock.fileno())
        loop.remove_writer(sock.fileno())
        self._connecting = False
        sock.close()


class Load:
    """Runs all requests of a window through one event loop."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        requests: Sequence[Request],
        *,
        host: str,
        port: int,
        deadline_s: float,
        concurrency: int | None,
        arrivals: Arrivals,
        record: Callable[[Flown], None],
    ) -> None:
        self.loop = loop
        self.host = host
        self.port = port
        self.deadline_s = deadline_s
        self.arrivals = arrivals
        self.now_ns = arrivals.clock.monotonic_ns
        self.address = resolve(host, port)
        self.totals = LoadTotals(of=len(requests))
        self._requests = requests
        self._record = record
        self._limit = concurrency or len(requests)
        self._in_flight = 0
        self._flights: set[Flight] = set()
        self._queue: deque[Flight] = deque()
        self._lanes: dict[str, deque[Flight]] = {}
        self._alarm = Alarm(loop)
        self._finished: asyncio.Future[None] = loop.create_future()
        self._stopping = False

    async def run(self, t0_ns: int) -> LoadTotals:
        """Send everything, from `t0_ns` on, and wait until all of it has ended."""
        for index, request in enumerate(self._requests):
            flight = Flight(self, index, request)
            if request.lane is not None:
                self._lanes.setdefault(request.lane, deque()).append(flight)
            else:
                self._schedule(flight, t0_ns + round((request.at_s or 0.0) * NS))
        for lane in self._lanes.values():
            first = lane.popleft()
            self._schedule(first, t0_ns + round(first.request.start_s * NS))
        try:
            await self._finished
        finally:
            self._alarm.close()
        return self.totals

    def stop(self, error: str) -> None:
        """Send nothing more and end what is in flight with this error."""
        self._stopping = True
        self._alarm.clear()
        for flight in list(self._flights):
            if flight.launched:
                flight.finish(error)
            else:
                flight.abandon()
        if not self._finished.done():
            self._finished.set_result(None)

    def _schedule(self, flight: Flight, due_ns: int) -> None:
        self._flights.add(flight)
        flight.intended_ns = due_ns
        self._alarm.at(due_ns - CONNECT_AHEAD_NS, flight.connect)
        self._alarm.at(due_ns, lambda: self._on_due(flight))

    def _on_due(self, flight: Flight) -> None:
        if self._stopping or flight.ended:
            return
        if self._in_flight >= self._limit:
            self._queue.append(flight)
            return
        self._in_flight += 1
        flight.launch()

    def on_sent(self, flight: Flight) -> None:
        """Count a send; open the connection of the lane's next request meanwhile."""
        self.totals.sent += 1
        self.totals.send_lags_ns.append(flight.sent_ns - flight.intended_ns)
        lane = self._lanes.get(flight.request.lane) if flight.request.lane is not None else None
        if lane:
            self._flights.add(lane[0])
            self.loop.call_soon(lane[0].connect)

    def on_ended(self, flight: Flight, flown: Flown) -> None:
        """Hand over what ended and let the next one go."""
        self.totals.ended += 1
        self._in_flight -= flight.launched
        self._flights.discard(flight)
        self._record(flown)
        if self._stopping:
            return
        if flight.request.lane is not None and self._lanes[flight.request.lane]:
            self._next_of_lane(flight, flown)
        while self._queue and self._in_flight < self._limit:
            self._on_due(self._queue.popleft())
        if self.totals.ended == self.totals.of and not self._finished.done():
            self._finished.set_result(None)

    def _next_of_lane(self, flight: Flight, flown: Flown) -> None:
        following = self._lanes[str(flight.request.lane)].popleft()
        self._flights.add(following)
        answered = flown.reads and flown.error is None and not flown.eof
        following.intended_ns = flown.reads[-1][0] if answered else self.now_ns()
        self.loop.call_soon(self._on_due, following)
