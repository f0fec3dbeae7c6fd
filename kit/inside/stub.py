"""A stand-in for vLLM with planted behaviour and a true log of what it sent when.

`python -m inside.stub CONFIG.json`, or, in place of `vllm serve`,
`python -m inside.stub serve MODEL --any-argument …` with the config as JSON in KIT_STUB.
Prints `{"event": "listening", "port": n}` once it answers. SIGTERM ends it at once, status 0.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
import socket
import sys
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

import httptools
import uvloop

from .clock import NS, Alarm, Arrivals, Clock
from .stub_answer import Answer
from .stub_channel import SideChannel, identity_of
from .stub_config import BadStub, StubConfig, parse_config_text, parse_serve
from .stub_engine import Engine, prompt_tokens_of
from .stub_pages import VERSION, metrics_text, models, server_info
from .stub_trace import write_traces
from .stub_wire import Wire, json_answer

_BACKLOG = 4096
_GENERATES = ("/v1/completions", "/v1/chat/completions")


class Stub:
    """The listening server, its engine and its log."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, config: StubConfig, arguments: dict[str, Any]
    ) -> None:
        self.loop = loop
        self.config = config
        self.engine = Engine(config, arguments)
        shown = server_info(self.engine, config.model)["vllm_config"]
        self.channel = SideChannel(self.engine.transfer, identity_of(VERSION, shown))
        self.alarm = Alarm(loop)
        self.arrivals = Arrivals(Clock())
        self.now_ns = self.arrivals.clock.monotonic_ns
        self._times: TextIO | None = None
        if config.times_out is not None:
            self._times = Path(config.times_out).open("w", encoding="utf-8")  # noqa: SIM115
        self._queue: deque[Answer] = deque()
        self.engine_is_dead = False

    def die(self) -> None:
        """End at once, or refuse everything for a while before."""
        lingers_s, code = self.config.die_lingers_s, self.config.die_exit_code
        if not lingers_s:
            os._exit(code)
        if not self.engine_is_dead:
            self.engine_is_dead = True
            self.loop.call_later(lingers_s, os._exit, code)

    def listen(self) -> int:
        """Open the port and return its number."""
        family = socket.AF_INET6 if ":" in self.config.host else socket.AF_INET
        listener = socket.create_server(
            (self.config.host, self.config.port), family=family, backlog=_BACKLOG
        )
        listener.setblocking(False)
        self.loop.add_reader(listener.fileno(), self._accept, listener)
        return int(listener.getsockname()[1])

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except BlockingIOError:
                return
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.arrivals.watch(sock)
            Connection(self, Wire(self.loop, sock))

    def submit(self, answer: Answer) -> None:
        """Run an answer now, or when there is room."""
        if self.engine.has_room():
            answer.start(answer.arrived_ns)
        else:
            self.engine.waiting += 1
            self._queue.append(answer)

    def on_ended(self, answer: Answer, reason: str) -> None:
        """Free the answer's place, log its times, and let the next one run."""
        generated = answer.service if reason in ("stop", "length") else None
        self.engine.end(answer.number, generated, reason)
        self._log(answer)
        while self._queue and self.engine.has_room():
            self.engine.waiting -= 1
            waiting = self._queue.popleft()
            if not waiting.ended:
                waiting.start(self.now_ns())

    def _log(self, answer: Answer) -> None:
        if self._times is None:
            return
        record = {
            "id": answer.name,
            "arrived_s": answer.arrived_ns / NS,
            "chunk_s": [at / NS for at in answer.sent_ns],
            "cached_tokens": answer.service.cached_tokens,
            "fault": answer.service.fault,
        }
        self._times.write(json.dumps(record) + "\n")
        self._times.flush()

    def page(self, method: str, path: str, body: bytes) -> tuple[int, object]:
        """Return status and content of a page that is no generation."""
        engine, name = self.engine, self.config.model
        if self.engine_is_dead and path == "/health":
            return 503, ""
        pages: dict[tuple[str, str], Callable[[], object]] = {
            ("GET", "/health"): lambda: "",
            ("GET", "/version"): lambda: {"version": VERSION},
            ("GET", "/v1/models"): lambda: models(name),
            ("GET", "/metrics"): lambda: metrics_text(engine, name),
            ("GET", "/server_info"): lambda: server_info(engine, name),
            ("POST", "/reset_prefix_cache"): lambda: engine.reset_cache(),
            ("POST", "/tokenize"): lambda: _tokenize(body),
            ("POST", "/detokenize"): lambda: _detokenize(body),
        }
        told = engine.arguments.get("profiler_config")
        if isinstance(told, dict):
            folder = Path(told["torch_profiler_dir"])
            ranks = int(engine.arguments.get("tensor_parallel_size", 1))
            pages["POST", "/start_profile"] = lambda: ""
            pages["POST", "/stop_profile"] = lambda: write_traces(folder, ranks)
        found = pages.get((method, path))
        if found is None:
            return 404, {"detail": "Not Found"}
        return 200, found()


def _tokenize(body: bytes) -> dict[str, Any]:
    tokens = prompt_tokens_of(json.loads(body))
    return {"count": len(tokens), "tokens": list(range(len(tokens))), "max_model_len": 8192}


def _detokenize(body: bytes) -> dict[str, Any]:
    return {"prompt": " ".join(f"w{token}" for token in json.loads(body)["tokens"])}


class Connection:
    """One client's connection: parses requests, answers pages, starts generations."""

    def __init__(self, stub: Stub, wire: Wire) -> None:
        self._stub = stub
        self._wire = wire
        self._parser = httptools.HttpRequestParser(self)
        self._answer: Answer | None = None
        self._arrived_ns = 0
        self._reset()
        stub.loop.add_reader(wire.fileno(), self._on_readable)

    def _reset(self) -> None:
        self._url = b""
        self._body = b""
        self._request_id = ""

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"x-request-id":
            self._request_id = value.decode("latin-1")

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        self._wire.keep_alive = self._parser.should_keep_alive()
        method = self._parser.get_method().decode()
        path = self._url.partition(b"?")[0].decode("latin-1")
        if method == "POST" and path in _GENERATES:
            self._generate(path)
        else:
            self._wire.send_last(json_answer(*self._stub.page(method, path, self._body)))
        self._reset()

    def _generate(self, path: str) -> None:
        try:
            body = json.loads(self._body)
        except (ValueError, RecursionError) as error:
            refusal = {"error": {"message": str(error), "type": "BadRequestError", "code": 400}}
            self._wire.send_last(json_answer(400, refusal))
            return
        number, service = self._stub.engine.admit(body)
        self._answer = Answer(
            self._stub, self._wire, number, service, body, path.endswith("chat/completions")
        )
        self._answer.request_id = self._request_id
        self._answer.arrived_ns = self._arrived_ns
        self._stub.submit(self._answer)

    def _on_readable(self) -> None:
        try:
            data, self._arrived_ns, _ = self._stub.arrivals.receive(self._wire.sock)
            if data:
                self._parser.feed_data(data)
        except BlockingIOError:
            return
        except (OSError, httptools.HttpParserError):
            data = b""
        if not data:
            self._wire.close()
            if self._answer is not None:
                self._answer.abort()


async def serve(config: StubConfig, arguments: dict[str, Any]) -> None:
    """Serve until SIGTERM or SIGINT; or die as planned."""
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        ignores = config.ignore_sigterm and signum == signal.SIGTERM
        loop.add_signal_handler(signum, (lambda: None) if ignores else stopped.set)
    if config.die_at_start_s is not None:
        await asyncio.sleep(config.die_at_start_s)
        print("stub: planted death at start", file=sys.stderr, flush=True)
        os._exit(config.die_exit_code)
    stub = Stub(loop, config, arguments)
    if config.ready_after_s:
        await asyncio.wait([asyncio.create_task(stopped.wait())], timeout=config.ready_after_s)
    if stub.engine.transfer.role == "kv_producer":
        await stub.channel.open()
    if not config.never_ready and not stopped.is_set():
        print(json.dumps({"event": "listening", "port": stub.listen()}), flush=True)
    await stopped.wait()


def read_command(words: Sequence[str]) -> tuple[StubConfig, dict[str, Any]]:
    """Return the config and the server arguments of a command line. Raises `BadStub`."""
    if words[:1] == ["serve"]:
        model, arguments = parse_serve(words[1:])
        config = parse_config_text(os.environ.get("KIT_STUB", "{}"), "KIT_STUB")
        name = arguments.get("served_model_name") or model or config.model
        host = arguments.get("host") or ("0.0.0.0" if config.host == "127.0.0.1" else config.host)  # noqa: S104
        port = int(arguments.get("port", config.port))
        return dataclasses.replace(config, host=host, port=port, model=str(name)), arguments
    if len(words) != 1:
        raise BadStub("usage: python -m inside.stub CONFIG.json | serve MODEL [arguments]")
    try:
        text = Path(words[0]).read_text("utf-8")
    except OSError as error:
        raise BadStub(f"{words[0]}: {error.strerror}") from None
    return parse_config_text(text, words[0]), {}


def main(words: Sequence[str]) -> int:
    """Run the command; return its exit status."""
    try:
        config, arguments = read_command(list(words))
    except BadStub as error:
        print(f"stub: {error}", file=sys.stderr)
        return 2
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(config, arguments))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
