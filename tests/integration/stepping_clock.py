"""A clock for the kit's load that steps: planted through the kit's injected clock, never ours."""

from __future__ import annotations

import socket
import time

from kit.inside.clock import NS, Clock


class SteppingClock(Clock):
    """The real clock, but the wall clock jumps at a time."""

    def __init__(self, step_s: float, after_s: float) -> None:
        self._step_ns = round(step_s * NS)
        self._at_real_ns = time.time_ns() + round(after_s * NS)
        self.realtime_ns = lambda: self._stepped(time.time_ns())  # type: ignore[method-assign]

    def _stepped(self, real_ns: int) -> int:
        return real_ns + self._step_ns if real_ns >= self._at_real_ns else real_ns

    def receive(self, sock: socket.socket) -> tuple[bytes, int | None]:
        data, stamp = super().receive(sock)
        return data, None if stamp is None else self._stepped(stamp)
