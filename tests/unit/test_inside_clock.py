"""Receive stamps through steps of the wall clock, and alarms that ring on time."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable

import pytest
import uvloop

from kit.inside.clock import NS, Alarm, Arrivals, Clock, sample_offset_ns

MS = 1_000_000
OFFSET = 1_700_000_000 * NS


class PlantedClock(Clock):
    """A clock moved by hand; `stamp` is what the kernel says of the next read."""

    def __init__(self) -> None:
        self.mono = 5 * NS
        self.offset = OFFSET
        self.late_realtime = 0
        self.stamp: int | None = None
        self.monotonic_ns = lambda: self.mono  # type: ignore[method-assign]
        self.realtime_ns = self._realtime  # type: ignore[method-assign]

    def _realtime(self) -> int:
        late, self.late_realtime = self.late_realtime, 0
        return self.mono + self.offset + late

    def receive(self, sock: socket.socket) -> tuple[bytes, int | None]:
        return b"x", self.stamp

    def arrive(self, waited_ns: int) -> None:
        """Let a segment have arrived `waited_ns` ago, stamped by the wall clock as it is."""
        self.stamp = self.mono + self.offset - waited_ns


@pytest.fixture
def clock() -> PlantedClock:
    return PlantedClock()


SOCK = socket.socket()


def test_a_stamp_is_moved_to_the_monotonic_clock(clock: PlantedClock) -> None:
    arrivals = Arrivals(clock)
    clock.arrive(7 * MS)
    assert arrivals.receive(SOCK) == (b"x", clock.mono - 7 * MS, 7 * MS)


def test_without_a_stamp_our_own_reading_counts_and_is_marked(clock: PlantedClock) -> None:
    assert Arrivals(clock).receive(SOCK) == (b"x", clock.mono, -1)


def test_user_stamps_when_asked_for(clock: PlantedClock) -> None:
    clock.arrive(7 * MS)
    assert Arrivals(clock, use_kernel=False).receive(SOCK) == (b"x", clock.mono, -1)


@pytest.mark.parametrize("step", [3 * NS, -3 * NS, 2 * MS, -2 * MS])
def test_a_step_of_the_wall_clock_moves_no_arrival(clock: PlantedClock, step: int) -> None:
    arrivals = Arrivals(clock)
    clock.arrive(1000)  # stamped before the step, read after it
    clock.offset += step
    _, at, wait = arrivals.receive(SOCK)
    assert (at, wait) == (clock.mono, -1)
    clock.mono += NS
    clock.arrive(1000)
    assert arrivals.receive(SOCK) == (b"x", clock.mono - 1000, 1000)
    assert arrivals.report().clock_step_s == pytest.approx(step / NS)


def test_a_step_that_is_taken_back_is_still_reported(clock: PlantedClock) -> None:
    arrivals = Arrivals(clock)
    clock.offset += 5 * NS
    clock.arrive(0)
    arrivals.receive(SOCK)
    clock.offset -= 5 * NS
    report = arrivals.report()
    assert report.drift_s == 0
    assert report.clock_step_s is not None
    assert abs(report.clock_step_s) == pytest.approx(5)


def test_a_step_is_noticed_without_a_read(clock: PlantedClock) -> None:
    arrivals = Arrivals(clock)
    clock.offset += 2 * NS
    assert arrivals.report().clock_step_s == pytest.approx(2)


def test_being_preempted_between_two_readings_is_no_step(clock: PlantedClock) -> None:
    arrivals = Arrivals(clock)
    clock.arrive(1000)
    clock.late_realtime = 4 * MS
    assert arrivals.receive(SOCK) == (b"x", clock.mono - 1000, 1000)
    assert arrivals.report().clock_step_s is None


def test_a_stamp_from_the_future_is_not_believed(clock: PlantedClock) -> None:
    arrivals = Arrivals(clock)
    clock.arrive(-MS)
    assert arrivals.receive(SOCK) == (b"x", clock.mono, -1)


def test_the_real_offset_is_steady_to_a_few_microseconds() -> None:
    clock = Clock()
    assert abs(sample_offset_ns(clock) - sample_offset_ns(clock)) < 20_000


def receive_late() -> tuple[int, bytes, int, int]:
    """Send over loopback, read 50 ms later; when it was sent (ns), and what `receive` said."""
    arrivals = Arrivals(Clock())
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as ours:
        arrivals.watch(ours)
        ours.connect(server.getsockname())
        theirs, _ = server.accept()
        with theirs:
            before = time.monotonic_ns()
            theirs.send(b"now")
            time.sleep(0.05)
            return before, *arrivals.receive(ours)


def test_the_kernel_stamps_what_tcp_receives() -> None:
    for _ in range(5):
        before, data, at, wait = receive_late()
        if wait >= 0:
            break  # else this machine's wall clock was stepped just then: the stamp is refused
    assert data == b"now"
    assert before - 20_000 <= at < before + 500 * MS  # a busy machine sends late
    assert wait > 20 * MS


def ring(plan: Callable[[Alarm, list[tuple[str, int]]], None], for_s: float) -> list[str]:
    rung: list[tuple[str, int]] = []

    async def run() -> None:
        alarm = Alarm(asyncio.get_running_loop())
        plan(alarm, rung)
        await asyncio.sleep(for_s)
        alarm.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())
    for name, late_ns in rung:
        assert late_ns >= 0, f"{name} rang early"
    return [name for name, _ in rung]


def at(alarm: Alarm, rung: list[tuple[str, int]], name: str, due_ns: int) -> None:
    alarm.at(due_ns, lambda: rung.append((name, time.monotonic_ns() - due_ns)))


def test_alarms_ring_in_the_order_of_their_times_never_early() -> None:
    now = time.monotonic_ns()

    def plan(alarm: Alarm, rung: list[tuple[str, int]]) -> None:
        for name, after in (("c", 30), ("a", 10), ("past", -50), ("b", 20)):
            at(alarm, rung, name, now + after * MS)

    assert ring(plan, 0.1) == ["past", "a", "b", "c"]


def test_a_cleared_alarm_is_silent() -> None:
    def plan(alarm: Alarm, rung: list[tuple[str, int]]) -> None:
        at(alarm, rung, "x", time.monotonic_ns() + 10 * MS)
        alarm.clear()

    assert ring(plan, 0.05) == []
