"""The clocks of a measured window: kernel receive stamps on CLOCK_MONOTONIC, and an exact alarm.

The kernel stamps each received segment on CLOCK_REALTIME before this process even wakes up, so
what else runs on the core does not show in the numbers. REALTIME minus MONOTONIC is constant
but for steps of the wall clock; `Arrivals` notices a step at the next read and goes on.
"""

from __future__ import annotations

import asyncio
import ctypes
import heapq
import itertools
import os
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass

NS = 1_000_000_000
READ_BYTES = 32_768
_SO_TIMESTAMPNS = 35  # asm-generic/socket.h; the same number names the ancillary message
_ANCILLARY_BYTES = socket.CMSG_SPACE(16)
_TIMESPEC = struct.Struct("@qq")

_SUSPECT_NS = 200_000
"""A wall clock this far off may have stepped (or we were preempted between two readings)."""
_STEP_NS = 20_000
"""A careful second look that differs by this much is a step."""
_DISTRUST_NS = 50_000_000
"""After a step, segments that were stamped before it may still be waiting for this long."""

REPORTED_STEP_S = 0.001


class Clock:
    """Where time comes from. Tests replace it to plant steps of the wall clock."""

    monotonic_ns: Callable[[], int] = staticmethod(time.monotonic_ns)
    realtime_ns: Callable[[], int] = staticmethod(time.time_ns)

    def ask_stamps(self, sock: socket.socket) -> bool:
        """Ask the kernel to stamp what this socket receives; False where it refuses."""
        try:
            sock.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
        except OSError:
            return False
        return True

    def receive(self, sock: socket.socket) -> tuple[bytes, int | None]:
        """Read once; return the bytes and the last segment's CLOCK_REALTIME stamp in ns, if any.

        Raises `BlockingIOError` when nothing is there, other `OSError` when the peer reset.
        """
        data, ancillary, _flags, _address = sock.recvmsg(READ_BYTES, _ANCILLARY_BYTES)
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == _SO_TIMESTAMPNS:
                seconds, nanoseconds = _TIMESPEC.unpack(payload)
                return data, seconds * NS + nanoseconds
        return data, None


def sample_offset_ns(clock: Clock, tries: int = 9) -> int:
    """Return CLOCK_REALTIME minus CLOCK_MONOTONIC in ns, from the tightest of a few brackets."""
    best_width, best = NS, 0
    for _ in range(tries):
        before = clock.monotonic_ns()
        real = clock.realtime_ns()
        after = clock.monotonic_ns()
        if after - before < best_width:
            best_width, best = after - before, real - (before + after) // 2
    return best


@dataclass(frozen=True)
class ClockReport:
    """The two offsets of a window and what happened to the wall clock between them, seconds."""

    offset_start_s: float
    offset_end_s: float
    drift_s: float
    clock_step_s: float | None


class Arrivals:
    """Reads sockets and says when what it read arrived, in ns on CLOCK_MONOTONIC."""

    def __init__(self, clock: Clock, *, use_kernel: bool = True) -> None:
        self.clock = clock
        self.use_kernel = use_kernel
        self._start_offset = self._offset = sample_offset_ns(clock)
        self._largest_step = 0
        self._distrust_until = 0

    def watch(self, sock: socket.socket) -> None:
        """Prepare a socket before it receives anything."""
        if self.use_kernel and not self.clock.ask_stamps(sock):
            self.use_kernel = False

    def receive(self, sock: socket.socket) -> tuple[bytes, int, int]:
        """Read once: the bytes, their arrival in ns, and how long they waited for us in ns.

        The wait is -1 where the arrival is our own reading, for want of a usable kernel stamp.
        """
        clock = self.clock
        data, stamp = clock.receive(sock)
        now = clock.monotonic_ns()
        if stamp is None or not self.use_kernel:
            return data, now, -1
        if not -_SUSPECT_NS < clock.realtime_ns() - now - self._offset < _SUSPECT_NS:
            self.look_for_step()
        waited = now - (stamp - self._offset)
        if now < self._distrust_until or waited < -_STEP_NS:
            return data, now, -1
        if waited < 0:
            waited = 0
        return data, now - waited, waited

    def look_for_step(self) -> None:
        """Compare the wall clock with the offset in use; take the new one after a step."""
        offset = sample_offset_ns(self.clock)
        step = offset - self._offset
        if abs(step) < _STEP_NS:
            return
        self._offset = offset
        self._distrust_until = self.clock.monotonic_ns() + _DISTRUST_NS
        if abs(step) > abs(self._largest_step):
            self._largest_step = step

    def report(self) -> ClockReport:
        """Sample the offset once more and say what happened since the start."""
        self.look_for_step()
        end = sample_offset_ns(self.clock)
        drift = (end - self._start_offset) / NS
        step = max(drift, self._largest_step / NS, key=abs)
        return ClockReport(
            offset_start_s=self._start_offset / NS,
            offset_end_s=end / NS,
            drift_s=drift,
            clock_step_s=step if abs(step) > REPORTED_STEP_S else None,
        )


class _Itimerspec(ctypes.Structure):
    _fields_ = [(name, ctypes.c_long) for name in ("every_s", "every_ns", "at_s", "at_ns")]


class Alarm:
    """Calls back at absolute times on CLOCK_MONOTONIC, by a timerfd in the event loop.

    The loop's own timers count in milliseconds, which is more than what is measured here.
    """

    _CLOCK_MONOTONIC = 1
    _ABSOLUTE = 1

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._due: list[tuple[int, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = self._libc.timerfd_create(self._CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        loop.add_reader(self._fd, self._ring)

    def at(self, due_ns: int, callback: Callable[[], None]) -> None:
        """Call back at `due_ns`, or as soon as the loop turns when that has passed."""
        entry = (due_ns, next(self._order), callback)
        heapq.heappush(self._due, entry)
        if self._due[0] is entry:
            self._set()

    def _set(self) -> None:
        due = max(self._due[0][0], 1)  # zero would disarm it
        spec = _Itimerspec(0, 0, due // NS, due % NS)
        if self._libc.timerfd_settime(self._fd, self._ABSOLUTE, ctypes.byref(spec), None):
            raise OSError(ctypes.get_errno(), "timerfd_settime")

    def _ring(self) -> None:
        try:
            os.read(self._fd, 8)
        except BlockingIOError:  # armed anew between the wake-up and here
            return
        # Only what was due when it rang: the loop reads sockets between two rounds.
        now = time.monotonic_ns()
        while self._due and self._due[0][0] <= now:
            heapq.heappop(self._due)[2]()
        if self._due:
            self._set()

    def clear(self) -> None:
        """Forget everything that is still due."""
        self._due.clear()

    def close(self) -> None:
        """Forget everything and give the timer back."""
        self.clear()
        self._loop.remove_reader(self._fd)
        os.close(self._fd)
