"""A process beside the load that parses finished answers and writes samples.jsonl.

The load only pushes raw buffers into a pipe; HTTP, JSON and the disk stay out of its loop.
"""

from __future__ import annotations

import asyncio
import json
import marshal
import os
import signal
import socket
import struct
import sys
import time
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from .clock import NS
from .parse import Reply, ReplyParser, short_error
from .spec import Request

_LENGTH = struct.Struct("!Q")
_PIPE_BYTES = 1 << 20
NICENESS = 10
_TELL_EVERY_S = 0.25  # seldom: the parent reads once a second and must never make us wait


class Flown(NamedTuple):
    """What the load knows of one ended request, the `number`-th of its file, from 0.

    Times are ns on CLOCK_MONOTONIC, -1 for none. `reads` are (arrival, wait or -1, bytes);
    `error` is why the load stopped reading, if it did.
    """

    number: int
    intended_ns: int
    connect_ns: int
    sent_ns: int
    reads: list[tuple[int, int, bytes]]
    eof: bool
    error: str | None


@dataclass(frozen=True)
class WriterReport:
    """What the writer saw over the whole window; lags in seconds, `stamps` as in a sample."""

    written: int
    failed: int
    cpu_s: float
    stamps: str | None
    shared_stamps: int
    chunks: int
    recv_lag_s: dict[str, float | None]


class WriterLost(Exception):
    """The writer cannot write: disk full, folder gone. The text is the system's."""


def quantile(ordered: Sequence[int], q: float) -> float | None:
    """Return the nearest-rank quantile of sorted ns, in seconds; the largest when few.

    A gauge of our own lateness: with few values it must err on the late side.
    """
    if not ordered:
        return None
    rank = min(len(ordered) - 1, int(q * len(ordered)))
    return ordered[rank] / NS


def lag_summary(lags_ns: list[int]) -> dict[str, float | None]:
    """Return p50, p99 and max of lags, in seconds."""
    lags_ns.sort()
    return {
        "p50": quantile(lags_ns, 0.5),
        "p99": quantile(lags_ns, 0.99),
        "max": lags_ns[-1] / NS if lags_ns else None,
    }


class Lags:
    """Counts lags by whole microseconds, rounded up: however many there are, it stays small."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}

    def add(self, lag_ns: int) -> None:
        """Take one lag in."""
        lag_us = -(-lag_ns // 1000)
        self._counts[lag_us] = self._counts.get(lag_us, 0) + 1

    def summary(self) -> dict[str, float | None]:
        """Return p50, p99 and max in seconds, as `lag_summary` does."""
        total, seen = sum(self._counts.values()), 0
        ordered = sorted(self._counts)
        found: dict[str, float | None] = {"p50": None, "p99": None, "max": None}
        for lag_us in ordered:
            seen += self._counts[lag_us]
            for name, q in (("p50", 0.5), ("p99", 0.99)):
                if found[name] is None and seen > min(total - 1, int(q * total)):
                    found[name] = lag_us * 1000 / NS
        if ordered:
            found["max"] = ordered[-1] * 1000 / NS
        return found


def sample_of(request: Request, flown: Flown, reply: Reply, t0_ns: int) -> dict[str, Any]:
    """Return the line of samples.jsonl: times in seconds from `t0_ns`, to the microsecond.

    `intended_s` is the schedule's time, `sent_s` just before the first byte was sent, `chunk_s`
    when each content chunk arrived, `done_s` when the answer's last byte did. `connect_s` is how
    long opening the connection took, ahead of time. `chunk_chars` are the chunks' lengths in
    `text`. `shared_stamps` counts chunks that came in one read with a later event; `stamps` says
    whose times they are (kernel, user, mixed) and `recv_lag_max_s` how late the client was to
    read. Null is what was not told or did not happen.
    """

    def since(at_ns: int | None) -> float | None:
        return None if at_ns is None or at_ns < 0 else round((at_ns - t0_ns) / NS, 6)

    waits = [wait for _, wait, _ in flown.reads]
    return {
        "id": request.id,
        "tags": request.tags,
        "lane": request.lane,
        "intended_s": since(flown.intended_ns),
        "connect_s": None if flown.connect_ns < 0 else round(flown.connect_ns / NS, 6),
        "sent_s": since(flown.sent_ns),
        "chunk_s": [since(at) for at in reply.chunk_ns],
        "chunk_chars": reply.chunk_chars,
        "text": reply.text,
        "done_s": since(reply.done_ns),
        "status": reply.status,
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": reply.completion_tokens,
        "cached_tokens": reply.cached_tokens,
        "finish_reason": reply.finish_reason,
        "prompt_logprobs": reply.prompt_logprobs,
        "error": reply.error,
        "stamps": stamps_of(waits),
        "shared_stamps": reply.shared,
        "recv_lag_max_s": round(max(waits) / NS, 6) if max(waits, default=-1) >= 0 else None,
    }


def stamps_of(waits: list[int]) -> str | None:
    """Say whose stamps the reads carry: `kernel`, `user`, `mixed`, or None without a read."""
    if not waits:
        return None
    user = sum(wait < 0 for wait in waits)
    return "kernel" if not user else "user" if user == len(waits) else "mixed"


def parse_flown(request: Request, flown: Flown) -> Reply:
    """Parse what one request received."""
    parser = ReplyParser(asked_stream=request.streamed)
    for arrived_ns, _, data in flown.reads:
        parser.feed(data, arrived_ns)
    return parser.finish(eof=flown.eof, error=flown.error)


class Writer:
    """The parent's end: push what ended, poll how many failed, finish for the report."""

    def __init__(self, requests: list[Request], samples: Path) -> None:
        """Start the process. Raises `OSError` when samples.jsonl cannot be made."""
        out = samples.open("xb", buffering=0)
        self._feed, theirs = socket.socketpair()
        for end in (self._feed, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _PIPE_BYTES)
        self.pid = os.fork()
        if self.pid == 0:
            self._feed.close()
            _run_child(requests, theirs, out)
        theirs.close()
        out.close()
        self._feed.setblocking(False)
        self._backlog: deque[memoryview] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._answers = b""
        self._last = b""
        self.written = 0
        self.failed = 0
        self.lost = False

    def attach(self, loop: asyncio.AbstractEventLoop, t0_ns: int) -> None:
        """Push through this loop from now on; tell the writer when the window starts."""
        self._loop = loop
        self._push(marshal.dumps(t0_ns))

    def push(self, flown: Flown) -> None:
        """Hand over one ended request; never blocks, never raises."""
        self._push(marshal.dumps(tuple(flown)))

    def detach(self) -> None:
        """Leave the loop; what is still in the backlog goes out in `finish`."""
        if self._loop is not None:
            self._loop.remove_writer(self._feed.fileno())
            self._loop = None

    def _push(self, payload: bytes) -> None:
        view = memoryview(_LENGTH.pack(len(payload)) + payload)
        if not self._backlog:
            view = view[self._send(view) :]
        if view:
            if not self._backlog and self._loop is not None:
                self._loop.add_writer(self._feed.fileno(), self._drain)
            self._backlog.append(view)

    def _send(self, view: memoryview) -> int:
        try:
            return self._feed.send(view)
        except BlockingIOError:
            return 0
        except OSError:  # it is gone; `finish` says so
            return len(view)

    def _drain(self) -> None:
        while self._backlog:
            view = self._backlog[0]
            sent = self._send(view)
            if sent < len(view):
                self._backlog[0] = view[sent:]
                return
            self._backlog.popleft()
        if self._loop is not None:
            self._loop.remove_writer(self._feed.fileno())

    def poll(self) -> None:
        """Take in how many samples were written and failed so far; never blocks."""
        try:
            answer = self._feed.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            answer = b""
        self.lost = not answer or self.lost
        self._take(answer)

    def _take(self, answer: bytes) -> None:
        self._answers += answer
        *lines, self._answers = self._answers.split(b"\n")
        for line in lines:
            if line.startswith(b"{"):
                self._last = line
            else:
                self.written, self.failed = map(int, line.split())

    def finish(self) -> WriterReport:
        """Send what is left, wait for the writer's end and return its report.

        Raises `WriterLost` with the reason when it could not write everything.
        """
        self._feed.setblocking(True)
        try:
            while self._backlog:
                self._feed.sendall(self._backlog.popleft())
            self._feed.shutdown(socket.SHUT_WR)
            while not self._last and (answer := self._feed.recv(1 << 16)):
                self._take(answer)
        except OSError:
            pass  # it is gone: no report, said below
        self._feed.close()
        os.waitpid(self.pid, 0)
        report = json.loads(self._last) if self._last else {"lost": "the writer ended early"}
        if "lost" in report:
            raise WriterLost(report["lost"])
        return WriterReport(**report)


# -- in the child ------------------------------------------------------------------------------


def _run_child(requests: list[Request], feed: socket.socket, out: FileIO) -> None:
    """Serve the parent until it closes its end, then leave this process without a way back."""
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, signal.SIG_IGN)  # the parent decides when we have had everything
    os.nice(NICENESS)  # on a shared core the load goes first
    status = 70
    try:
        report = _write_all(requests, feed, out)
        feed.sendall(json.dumps(report).encode() + b"\n")
        status = 0
    except OSError as error:
        _tell(feed, {"lost": short_error(type(error).__name__, error.strerror or error)})
    finally:
        if sys.exc_info()[0] is not None:
            traceback.print_exc()
        os._exit(status)


def _tell(feed: socket.socket, answer: dict[str, Any]) -> None:
    try:
        feed.sendall(json.dumps(answer).encode() + b"\n")
    except OSError:
        return  # nobody is left to be told


def _frames(source: BinaryIO) -> Iterator[Any]:
    while len(head := source.read(_LENGTH.size)) == _LENGTH.size:
        payload = source.read(_LENGTH.unpack(head)[0])
        if len(payload) < _LENGTH.unpack(head)[0]:
            return  # the parent was killed in the middle of a frame
        yield marshal.loads(payload)  # noqa: S302 - our own parent wrote it


def encode_line(sample: dict[str, Any]) -> bytes:
    """Return a sample as one line; half a surrogate pair, which UTF-8 has not, stays escaped."""
    return json.dumps(sample, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"


def append_line(out: FileIO, line: bytes) -> None:
    """Append a line whole or not at all: what a full disk took of it is taken back."""
    whole = out.tell()
    try:
        while line:
            line = line[out.write(line) :]
    except OSError:
        out.truncate(whole)
        raise


def _write_all(requests: list[Request], feed: socket.socket, out: FileIO) -> dict[str, Any]:
    frames = _frames(feed.makefile("rb"))
    t0_ns = next(frames, 0)
    lags = Lags()
    kinds: set[str] = set()
    written = failed = shared = chunks = 0
    tell_at = 0.0
    for frame in frames:
        flown = Flown(*frame)
        request = requests[flown.number]
        reply = parse_flown(request, flown)
        sample = sample_of(request, flown, reply, t0_ns)
        append_line(out, encode_line(sample))
        written += 1
        failed += reply.error is not None
        shared += reply.shared
        chunks += len(reply.chunk_ns)
        for _, wait, _ in flown.reads:
            if wait >= 0:
                lags.add(wait)
        if sample["stamps"]:
            kinds.add(sample["stamps"])
        if time.monotonic() >= tell_at:
            feed.sendall(b"%d %d\n" % (written, failed))
            tell_at = time.monotonic() + _TELL_EVERY_S
    out.close()
    return {
        "written": written,
        "failed": failed,
        "cpu_s": time.process_time(),
        "stamps": kinds.pop() if len(kinds) == 1 else "mixed" if kinds else None,
        "shared_stamps": shared,
        "chunks": chunks,
        "recv_lag_s": lags.summary(),
    }
