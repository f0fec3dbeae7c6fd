"""One door for one or several servers: `python -m inside.proxy --port N (legs)`.

`--producer HOST:PORT --consumer HOST:PORT`: prefill on one server, decode on the other, by the
routing protocol of vLLM's NixlConnector; `--baseline HOST:PORT` (repeatable) is then served under
/baseline/. `--replica HOST:PORT` (repeatable): each request to the least busy server as it is.
Every arm of an experiment goes through the same proxy, so its cost is in each of them.

Bytes are relayed as they come. Every hop has a deadline, and a leg that fails is named in the
error, whose JSON body is `{"error": {"message", "type", "leg", "code"}}`; once a stream has
begun, the error is its last event and the connection closes without the stream's end. A leg's own
error in a stream is handed on as it is: log and /metrics name the leg.
A producer's answer without usable transfer parameters is the error 502 `transfer_params_missing`:
the consumer would compute the prompt itself, with a correct text and a meaningless latency.
With `--allow-recompute` it may, and the answer has the header `X-Kit-Recomputed: 1`.
A client that leaves closes the connections to both legs. Blocks that the producer holds for an
answer that no consumer came to fetch stay until its lease ends.

/metrics are the proxy's own, /metrics/LEG a leg's; /health is 200 when all legs are healthy.
/v1/models, /tokenize, /detokenize, /version and /server_info come from the consumer or the first
replica, with `?leg=NAME` from another leg. Legs are named producer, consumer, replica0, baseline0.

Prints `{"event": "listening", "port": n}`, then one JSON line a request, without its text.
SIGTERM ends it when all answers are whole, or after `--grace-s`; status 0.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import parse_qsl, urlencode

import uvloop

from .proxy_client import Client, Clients, Trace
from .proxy_legs import Exchange, Leg, least_busy
from .proxy_wire import (
    Counters,
    Failure,
    Headers,
    Request,
    answer_bytes,
    check_servable,
    consumer_body,
    parse_body,
    producer_body,
    read_params,
    request_bytes,
    with_headers,
)

DEADLINE_S = 300.0
GRACE_S = 10.0
_BACKLOG = 4096
_CONTROL_S = 10.0
"""Deadline of what is passed on but is no generation."""
_HEALTH_S = 2.0
"""Deadline of a leg's /health: shorter than the patience of the probe that asks us."""
_GENERATES = ("/v1/completions", "/v1/chat/completions")
_PASSED = {
    "/v1/models": "GET",
    "/version": "GET",
    "/server_info": "GET",
    "/tokenize": "POST",
    "/detokenize": "POST",
}
_METHODS = {**_PASSED, **dict.fromkeys(_GENERATES, "POST"), "/metrics": "GET", "/health": "GET"}
_RECOMPUTED: Headers = ((b"x-kit-recomputed", b"1"),)


class Proxy:
    """The legs and how requests are spread over them."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.counters = Counters()
        self._deadline_s: float = options.deadline_s
        self._may_recompute: bool = options.allow_recompute
        self._producer = Leg("producer", *options.producer) if options.producer else None
        if options.consumer:
            self._main = [Leg("consumer", *options.consumer)]
        else:
            self._main = [Leg(f"replica{i}", *at) for i, at in enumerate(options.replica)]
        self._baselines = [Leg(f"baseline{i}", *at) for i, at in enumerate(options.baseline)]
        answering = [*self._main, *self._baselines]
        self.counters.requests.update({leg.name: 0 for leg in answering})
        legs = [*answering, self._producer] if self._producer else answering
        self._legs = {leg.name: leg for leg in legs}

    async def answer(self, client: Client, request: Request, trace: Trace) -> None:
        """Answer one request. Raises `Failure`."""
        legs, producer = self._main, self._producer
        if self._baselines and request.path.startswith("/baseline/"):
            request = replace(request, path=request.path.removeprefix("/baseline"))
            legs, producer = self._baselines, None
        path = request.path
        method = _METHODS.get("/metrics" if path.startswith("/metrics/") else path)
        if method is None:
            raise Failure(404, "not_found", f"no such path: {path}")
        if request.method != method:
            raise Failure(405, "bad_method", f"{path} needs {method}")
        if path in _GENERATES:
            await self._generate(client, request, trace, legs, producer)
        elif path in _PASSED:
            await self._pass(client, request, trace, legs[0])
        elif path.startswith("/metrics/"):
            leg = self._leg(path.removeprefix("/metrics/"))
            await self._pass(client, replace(request, path="/metrics"), trace, leg)
        elif path == "/metrics":
            busy = [(leg.name, leg.outstanding) for leg in self._legs.values()]
            client.send(answer_bytes(200, self.counters.text(busy)), 200)
        else:
            await self._check_health(request)
            client.send(answer_bytes(200, ""), 200)

    def _leg(self, name: str) -> Leg:
        if name not in self._legs:
            raise Failure(404, "not_found", f"no leg {name!r}: there are {', '.join(self._legs)}")
        return self._legs[name]

    async def _pass(self, client: Client, request: Request, trace: Trace, leg: Leg) -> None:
        """Hand on what is no generation; `leg=NAME` in the query chooses who answers."""
        query = parse_qsl(request.query, keep_blank_values=True)
        chosen = next((value for name, value in query if name == "leg"), None)
        if chosen is not None:
            leg = self._leg(chosen)
            rest = urlencode([pair for pair in query if pair[0] != "leg"])
            request = replace(request, query=rest)
        trace.leg = leg.name
        sent = request_bytes(request, leg.authority, request.body)
        exchange = Exchange(leg, sent, deadline_s=min(_CONTROL_S, self._deadline_s))
        await exchange.run()
        self._hand_on(client, exchange)

    async def _check_health(self, request: Request) -> None:
        """Raise `Failure` 503 unless every leg is healthy."""
        asked = replace(request, query="", headers=(), body=b"")

        async def check(leg: Leg) -> Failure | None:
            sent = request_bytes(asked, leg.authority, b"")
            exchange = Exchange(leg, sent, deadline_s=min(_HEALTH_S, self._deadline_s))
            try:
                await exchange.run()
            except Failure as failure:
                return failure
            if exchange.status == 200:
                return None
            told = f"{leg.name}: /health has status {exchange.status}"
            return Failure(503, "unhealthy", told, leg.name)

        found = await asyncio.gather(*(check(leg) for leg in self._legs.values()))
        ill = [failure for failure in found if failure is not None]
        if ill:
            raise Failure(503, "unhealthy", "; ".join(f.message for f in ill), ill[0].leg)

    # -- generations ---------------------------------------------------------------------------

    async def _generate(
        self,
        client: Client,
        request: Request,
        trace: Trace,
        legs: Sequence[Leg],
        producer: Leg | None,
    ) -> None:
        """Relay a generation, through the producer first where there is one."""
        self.counters.in_flight += 1
        try:
            body: bytes | None = request.body
            if producer is not None:
                with _busy(producer):
                    body = await self._prefill(client, request, trace, producer)
            if body is not None:
                leg = least_busy(legs)
                with _busy(leg):
                    await self._relay(client, request, trace, leg, body)
        except asyncio.CancelledError:
            self.counters.aborted += 1
            raise
        finally:
            self.counters.in_flight -= 1

    async def _prefill(
        self, client: Client, request: Request, trace: Trace, leg: Leg
    ) -> bytes | None:
        """Let the producer compute the prompt; return the consumer's body.

        None when the producer refused the request and the client has that answer.
        """
        body = parse_body(request.body)
        check_servable(body)
        trace.leg = leg.name
        asked = producer_body(body, is_chat=request.path.endswith("chat/completions"))
        sent = request_bytes(request, leg.authority, json.dumps(asked).encode())
        began_s = time.monotonic()
        exchange = Exchange(leg, sent, deadline_s=self._deadline_s)
        try:
            await exchange.run()
        finally:
            trace.producer_s = time.monotonic() - began_s
        if 400 <= exchange.status < 500:
            self._hand_on(client, exchange)
            return None
        if exchange.status != 200:
            told = f"{leg.name}: answered with status {exchange.status}"
            raise Failure(502, f"status_{exchange.status}", told, leg.name)
        params = read_params(exchange.body)
        if isinstance(params, dict):
            return json.dumps(consumer_body(body, params)).encode()
        if not self._may_recompute:
            told = f"{leg.name}: {params}"
            raise Failure(502, "transfer_params_missing", told, leg.name)
        trace.recomputed = True
        self.counters.recomputed += 1
        return request.body

    async def _relay(
        self, client: Client, request: Request, trace: Trace, leg: Leg, body: bytes
    ) -> None:
        """Hand a leg's answer on as it comes."""
        self.counters.requests[leg.name] += 1
        trace.leg = leg.name
        headers = _RECOMPUTED if trace.recomputed else ()

        def pass_on(piece: bytes) -> None:
            client.write(piece if client.begun else with_headers(piece, headers))

        sent = request_bytes(request, leg.authority, body)
        exchange = Exchange(leg, sent, deadline_s=self._deadline_s, pass_on=pass_on, patient=True)
        client.exchange = exchange
        try:
            await exchange.run()
        finally:
            if exchange.sent_s is not None:
                trace.sent_s = exchange.sent_s - request.whole_s
                self.counters.observe_overhead(trace.sent_s - (trace.producer_s or 0.0))
            if exchange.first_s is not None:
                trace.first_byte_s = exchange.first_s - request.whole_s
        if exchange.told_error:
            self.counters.errors[leg.name, "error_event"] += 1
            trace.error = f"error_event: {leg.name}: told an error in its stream"
        self._hand_on(client, exchange, headers)

    def _hand_on(self, client: Client, exchange: Exchange, headers: Headers = ()) -> None:
        """Give the client an answer that was kept whole; end one that was streamed."""
        if exchange.status >= 400:
            headers = (*headers, (b"x-kit-leg", exchange.leg.name.encode()))
            self.counters.errors[exchange.leg.name, f"status_{exchange.status}"] += 1
        answer = b"" if exchange.streams else with_headers(exchange.raw, headers)
        client.send(answer, exchange.status, keep=exchange.keeps)


@contextlib.contextmanager
def _busy(leg: Leg) -> Iterator[None]:
    leg.outstanding += 1
    try:
        yield
    finally:
        leg.outstanding -= 1


async def serve(options: argparse.Namespace) -> None:
    """Serve until SIGTERM or SIGINT, then let the answers in flight end."""
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stopped.set)
    proxy = Proxy(options)
    clients = Clients(proxy.answer, proxy.counters)
    server = await loop.create_server(
        lambda: Client(clients), options.host, options.port, backlog=_BACKLOG
    )
    gc.freeze()
    port = server.sockets[0].getsockname()[1]
    print(json.dumps({"event": "listening", "port": port}), flush=True)
    await stopped.wait()
    server.close()
    await clients.drain(options.grace_s)


def parse_address(text: str) -> tuple[str, int]:
    """Read HOST:PORT, an IPv6 host in brackets. Raises `ArgumentTypeError`."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise argparse.ArgumentTypeError(f"HOST:PORT is needed, not {text!r}")
    return host.removeprefix("[").removesuffix("]"), int(port)


def read_command(words: Sequence[str]) -> argparse.Namespace:
    """Read the command line; wrong arguments end the process with status 2."""
    parser = argparse.ArgumentParser(prog="inside.proxy", description=__doc__)
    address: Any = {"type": parse_address, "metavar": "HOST:PORT"}
    parser.add_argument("--host", default="0.0.0.0")  # noqa: S104 - a container's own network
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--producer", **address)
    parser.add_argument("--consumer", **address)
    parser.add_argument("--baseline", action="append", default=[], **address)
    parser.add_argument("--replica", action="append", default=[], **address)
    parser.add_argument("--allow-recompute", action="store_true")
    parser.add_argument("--deadline-s", type=float, default=DEADLINE_S, metavar="S")
    parser.add_argument("--grace-s", type=float, default=GRACE_S, metavar="S")
    options = parser.parse_args(words)
    if (options.producer is None) != (options.consumer is None):
        parser.error("--producer and --consumer belong together")
    if (options.producer is None) == (not options.replica):
        parser.error("either --producer and --consumer, or --replica")
    if options.baseline and options.replica:
        parser.error("--baseline belongs to --producer and --consumer")
    if not options.deadline_s > 0:
        parser.error("--deadline-s must be above 0")
    return options


def main(words: Sequence[str]) -> int:
    """Run the command; return its exit status."""
    options = read_command(words)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(options))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
