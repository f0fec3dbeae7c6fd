"""A clock for the kit's load that steps: planted through the kit's injected clock, never ours."""

from __future__ import annotations

import socket
import time

from kit.inside.clock import NS, Clock


class SteppingClock(Clock):
    """The real clock, but the wall clock jumps some time after the first byte was received."""

    def __init__(self, step_s: float, after_s: float) -> None:
        self._step_ns = round(step_s * NS)
        self._after_ns = round(after_s * NS)
        self._at_real_ns: int | None = None
        self.realtime_ns = lambda: self._stepped(time.time_ns())  # type: ignore[method-assign]

    def _stepped(self, real_ns: int) -> int:
        at_ns = self._at_real_ns
        return real_ns if at_ns is None or real_ns < at_ns else real_ns + self._step_ns

    def receive(self, sock: socket.socket) -> tuple[bytes, int | None]:
        if self._at_real_ns is None:
            self._at_real_ns = time.time_ns() + self._after_ns
        data, stamp = super().receive(sock)
        return data, None if stamp is None else self._stepped(stamp)
