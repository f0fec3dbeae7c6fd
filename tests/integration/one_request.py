"""One request to a proxy on a raw socket, and how it ended, however it ended."""

from __future__ import annotations

import json
import socket
from contextlib import suppress
from typing import Any

PLAIN = "/v1/completions"


class Told:
    """How a request ended: its text, whether the answer was whole, and the error in it.

    `error` is (status, type, leg): the leg that the proxy named in the error or, for a refusal of
    a leg's own, in the header. A leg's own error within a stream names none.
    """

    def __init__(self, received: bytes) -> None:
        head, _, rest = received.decode().partition("\r\n\r\n")
        self.text = ""
        self.error: tuple[int, str, str | None] | None = None
        self.whole = rest.endswith(("}", "0\r\n\r\n"))
        own = next((w for w in ("producer", "consumer") if f"x-kit-leg: {w}" in head), None)
        for line in rest.splitlines():
            frame = json.loads(line.removeprefix("data: ")) if "{" in line else {}
            self.text += "".join(choice["text"] for choice in frame.get("choices", ()))
            if error := frame.get("error"):
                self.error = (error["code"], error["type"], error.get("leg", own))


def send(port: int, **asked: Any) -> socket.socket:
    """Send a completions request; the proxy closes after its answer."""
    content = json.dumps(asked).encode()
    head = f"POST {PLAIN} HTTP/1.1\r\nHost: x\r\nX-Request-Id: one\r\nConnection: close\r\n"
    head += "Content-Type: application/json\r\n"
    sock = socket.create_connection(("127.0.0.1", port), 20)
    sock.sendall(head.encode() + b"Content-Length: %d\r\n\r\n" % len(content) + content)
    return sock


def finish(sock: socket.socket) -> Told:
    """Read to the end, or as far as it comes."""
    received = b""
    with sock, suppress(ConnectionResetError):
        while piece := sock.recv(65536):
            received += piece
    return Told(received)
