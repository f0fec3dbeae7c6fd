"""The stub's sending side: HTTP/1.1 framing, and writes that never wait."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from http import HTTPStatus

_EVENT_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)


def chunked(data: bytes) -> bytes:
    """Frame data as one chunk of a chunked body."""
    return b"%x\r\n%s\r\n" % (len(data), data)


def json_answer(status: int, content: object) -> bytes:
    """Return a whole answer: text as it is, anything else as JSON."""
    is_text = isinstance(content, str)
    body = (content if isinstance(content, str) else json.dumps(content)).encode()
    kind = "text/plain; version=0.0.4; charset=utf-8" if is_text else "application/json"
    head = (
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: {kind}\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


class Wire:
    """A connected socket to write to; what does not fit at once follows by itself."""

    def __init__(self, loop: asyncio.AbstractEventLoop, sock: socket.socket) -> None:
        self.sock = sock
        self.keep_alive = True
        self._loop = loop
        self._left = b""
        self._closing = False
        self._closed = False

    def fileno(self) -> int:
        return self.sock.fileno()

    def event_stream_head(self) -> bytes:
        """Return the head of a streamed answer."""
        return _EVENT_STREAM_HEAD

    def send(self, data: bytes) -> None:
        """Write now what fits; a client that has gone is noticed by its reader."""
        if self._closed:
            return
        if self._left:
            self._left += data
            return
        try:
            count = self.sock.send(data)
        except BlockingIOError:
            count = 0
        except OSError:
            return
        if count < len(data):
            self._left = data[count:]
            self._loop.add_writer(self.sock.fileno(), self._drain)

    def send_last(self, data: bytes) -> None:
        """Write the end of an answer; then close unless the client keeps the connection."""
        self.send(data)
        if not self.keep_alive:
            self._closing = True
            if not self._left:
                self.close()

    def _drain(self) -> None:
        try:
            self._left = self._left[self.sock.send(self._left) :]
        except BlockingIOError:
            return
        except OSError:
            self._left = b""
        if not self._left:
            self._loop.remove_writer(self.sock.fileno())
            if self._closing:
                self.close()

    def reset(self) -> None:
        """Close with a TCP reset."""
        if not self._closed:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close()

    def close(self) -> None:
        """Close; a second time does nothing."""
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self.sock.fileno())
        self._loop.remove_writer(self.sock.fileno())
        self.sock.close()
