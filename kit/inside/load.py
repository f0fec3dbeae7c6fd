"""The load: sends requests at exact times and notes when every piece of the answers arrived.

Open loop: `at_s` is the intended time, and a late send does not move it. Closed loop: within a
lane, the intended time is two milliseconds after the arrival of the previous answer's last byte.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from .clock import NS, Alarm, Arrivals
from .flight import Flight, Route, resolve
from .spec import Request, WindowSpec
from .writer import Flown

CONNECT_AHEAD_NS = NS // 4
# Answers of one engine step end together. By the time the next requests of their lanes are due,
# all of those answers are read, so that reading one never delays the send of another.
LANE_PAUSE_NS = NS // 500


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


class Load:
    """Runs all requests of a window through one event loop."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        requests: Sequence[Request],
        *,
        spec: WindowSpec,
        arrivals: Arrivals,
        record: Callable[[Flown], None],
    ) -> None:
        self._loop = loop
        self._route = Route(
            loop=loop,
            host=spec.host,
            port=spec.port,
            address=resolve(spec.host, spec.port),
            deadline_s=spec.deadline_s,
            arrivals=arrivals,
            on_sent=self._on_sent,
            on_ended=self._on_ended,
        )
        self.totals = LoadTotals(of=len(requests))
        self._requests = requests
        self._record = record
        self._limit = spec.concurrency or len(requests)
        self._in_flight = 0
        self._flights: set[Flight] = set()
        self._queue: deque[Flight] = deque()
        self._lanes: dict[str, deque[Flight]] = {}
        self._alarm = Alarm(loop)
        self._finished: asyncio.Future[None] = loop.create_future()
        self._stopping = False

    async def run(self, t0_ns: int) -> LoadTotals:
        """Send everything, from `t0_ns` on, and wait until all of it has ended."""
        for number, request in enumerate(self._requests):
            flight = Flight(self._route, number, request)
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

    def _on_sent(self, flight: Flight) -> None:
        """Count a send; open the connection of the lane's next request meanwhile."""
        self.totals.sent += 1
        self.totals.send_lags_ns.append(flight.sent_ns - flight.intended_ns)
        lane = self._lanes.get(flight.request.lane) if flight.request.lane is not None else None
        if lane:
            self._flights.add(lane[0])
            self._loop.call_soon(lane[0].connect)

    def _on_ended(self, flight: Flight, flown: Flown) -> None:
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
        ended_ns = flown.reads[-1][0] if answered else self._route.now_ns()
        following.intended_ns = ended_ns + LANE_PAUSE_NS
        self._alarm.at(following.intended_ns, lambda: self._on_due(following))
