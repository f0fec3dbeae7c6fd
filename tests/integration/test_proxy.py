"""The proxy as a process in front of real stubs: what it relays, refuses, counts and survives."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from proxy_process import metrics, role, running_pair, running_proxy, wait_until
from stub_process import PROMPT, Stub, completion, run_window, running_stub

from kit.inside.proxy_wire import MAX_BODY_BYTES
from kit.measure import load_raw
from kit.metrics import PROXY_COST
from kit.paths import ROOT

PLAIN, CHAT = "/v1/completions", "/v1/chat/completions"


def body(path: str = PLAIN, **fields: Any) -> dict[str, Any]:
    asked = {"messages": [{"role": "user", "content": PROMPT}]} if path == CHAT else {}
    asked = asked or {"prompt": PROMPT}
    return {"model": "stub", **asked, "max_tokens": 5, **fields}


STREAMED = {"stream": True, "stream_options": {"include_usage": True}}


def post(url: str, path: str = PLAIN, **fields: Any) -> httpx.Response:
    headers = {"X-Request-Id": "one"}
    return httpx.post(
        url + path, json=body(path, **fields), headers=headers, trust_env=False, timeout=30
    )


def raw(port: int, path: str, **fields: Any) -> bytes:
    """Return every byte of one answer."""
    return exchange(port, request(path, **fields))


def request(path: str = PLAIN, **fields: Any) -> bytes:
    content = json.dumps(body(path, **fields)).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nX-Request-Id: one\r\nConnection: close\r\n"
    return head.encode() + b"Content-Length: %d\r\n\r\n" % len(content) + content


def exchange(port: int, sent: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), 10) as sock:
        sock.sendall(sent)
        received = b""
        while piece := sock.recv(65536):
            received += piece
    return received


def error_of(answer: httpx.Response) -> dict[str, Any]:
    found: dict[str, Any] = answer.json()["error"]
    assert set(found) == {"message", "type", "leg", "code"}
    assert found["code"] == answer.status_code
    return found


@pytest.mark.parametrize("path", [PLAIN, CHAT])
@pytest.mark.parametrize("streamed", [False, True])
def test_what_the_consumer_says_arrives_byte_for_byte(
    tmp_path: Path, path: str, streamed: bool
) -> None:
    fields = STREAMED if streamed else {}
    cold = {"prefix_caching": False}
    with running_pair(tmp_path, producer=cold, consumer=cold) as pair:
        through = raw(pair.proxy.port, path, **fields)
        direct = raw(pair.consumer.port, path, **fields)
        assert pair.producer.logged().keys() == pair.consumer.logged().keys() == {"one"}
        producer, consumer = metrics(f"{pair.producer.url}/metrics"), pair.consumer
        counted = metrics(f"{consumer.url}/metrics")
        own = metrics(f"{pair.proxy.url}/metrics")
    assert through == direct
    assert b" w4" in through
    assert b'"completion_tokens": 5' in through
    assert producer["vllm:generation_tokens_total"] == 1
    assert counted["vllm:prompt_tokens_by_source_total:external_kv_transfer"] == 8
    assert counted["vllm:nixl_bytes_transferred_sum"] == 8 * 1024
    assert own["kit_proxy_requests_total:consumer"] == 1
    assert own["kit_proxy_relayed_bytes_total"] == len(through)
    assert own["kit_proxy_overhead_seconds_count"] == 1
    assert own["kit_proxy_in_flight"] == 0


def test_a_run_reads_the_proxy_s_own_cost_from_what_the_proxy_counts(tmp_path: Path) -> None:
    """Only of the measured window: what was asked before it does not count."""
    out = tmp_path / "replicate/measure"
    requests = [completion(f"r{i}", at_s=i * 0.02) for i in range(10)]
    with running_stub(tmp_path) as stub:
        address = f"127.0.0.1:{stub.port}"
        with running_proxy(tmp_path, "--replica", address) as proxy:
            assert post(proxy.url).status_code == 200
            legs = {"replica-1": address}
            got = run_window(tmp_path, proxy.port, requests, legs=legs, out=str(out))
            counted = metrics(f"{proxy.url}/metrics")
    assert got.status == 0, got.stderr
    found = PROXY_COST.read(load_raw(tmp_path, "replicate", ["measure"]))
    assert found.sources == ("replicate/measure/metrics.jsonl.gz",)
    assert found.value is not None, found.reason
    assert counted["kit_proxy_overhead_seconds_count"] == 11
    assert 0 < found.value * 10 < counted["kit_proxy_overhead_seconds_sum"]


def test_a_replica_gets_the_request_as_it_is(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        stub = stack.enter_context(running_stub(tmp_path, prefix_caching=False))
        words = ("--replica", f"127.0.0.1:{stub.port}")
        proxy = stack.enter_context(running_proxy(tmp_path, *words))
        for path in (PLAIN, CHAT):
            for fields in ({}, STREAMED, {"n": 2}):
                assert raw(proxy.port, path, **fields) == raw(stub.port, path, **fields)
        line = proxy.requests()[0]
    assert (line["leg"], line["status"], line["id"]) == ("replica0", 200, "one")
    assert 0 < line["sent_s"] < line["first_byte_s"] < line["total_s"]


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 2}, {"best_of": 2}, {"use_beam_search": True}, {"prompt": ["a", "b"]},
        {"prompt": [[1, 2], [3]]}, {"prompt_logprobs": 0}, {"echo": True, "logprobs": 1},
        {"kv_transfer_params": {"do_remote_prefill": True}},
    ],
)  # fmt: skip
def test_what_two_servers_cannot_serve_is_refused(tmp_path: Path, fields: dict[str, Any]) -> None:
    with running_pair(tmp_path) as pair:
        answer = post(pair.proxy.url, **fields)
        assert (answer.status_code, error_of(answer)["type"]) == (400, "not_servable")
        assert error_of(answer)["leg"] is None
        assert post(pair.proxy.url, prompt=["one prompt"], n=1).status_code == 200
        assert len(pair.producer.logged()) == 1


@pytest.mark.parametrize(
    ("sent", "status", "kind"),
    [
        (b"nonsense\r\n\r\n", 400, "bad_request"),
        (b"GET /health HTTP/1.0\r\n\r\n", 505, "bad_request"),
        (b"GET /health HTTP/1.1\r\nX: " + b"x" * 70_000, 431, "too_large"),
        (b"GET /health HTTP/1.1\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n", 200, ""),
        (b"POST /v1/completions HTTP/1.1\r\nContent-Length: 99999999\r\n\r\n", 413, "too_large"),
        (b"POST /v1/completions HTTP/1.1\r\nContent-Length: 1\r\n\r\n{", 400, "bad_request"),
        (b"POST /v1/completions HTTP/1.1\r\nContent-Length: 2\r\n\r\n[]", 400, "bad_request"),
        (b"GET /v1/completions HTTP/1.1\r\nConnection: close\r\n\r\n", 405, "bad_method"),
        (b"POST /v1/embeddings HTTP/1.1\r\nContent-Length: 0\r\n\r\n", 404, "not_found"),
    ],
)
def test_a_bad_request_is_refused(tmp_path: Path, sent: bytes, status: int, kind: str) -> None:
    with running_pair(tmp_path) as pair:
        with socket.create_connection(("127.0.0.1", pair.proxy.port), 10) as sock:
            sock.sendall(sent)
            answer = sock.recv(65536)
        assert int(answer.split()[1]) == status
        assert kind.encode() in answer
        assert post(pair.proxy.url).status_code == 200


def test_a_body_that_grows_too_large_is_refused_while_it_is_sent(tmp_path: Path) -> None:
    def pieces() -> Iterator[bytes]:
        for _ in range(40):
            yield b" " * 2**20

    assert MAX_BODY_BYTES < 40 * 2**20
    with running_pair(tmp_path) as pair:
        answer = httpx.post(pair.proxy.url + PLAIN, content=pieces(), trust_env=False)
        assert (answer.status_code, error_of(answer)["type"]) == (413, "too_large")


def test_one_connection_serves_many_requests(tmp_path: Path) -> None:
    with running_pair(tmp_path) as pair, httpx.Client(trust_env=False) as client:
        for fields in ({}, STREAMED, {"n": 2}, STREAMED, {}):
            status = client.post(pair.proxy.url + PLAIN, json=body(**fields)).status_code
            assert status == (400 if "n" in fields else 200)
        assert client.get(f"{pair.proxy.url}/health").status_code == 200
        wait_until(lambda: len({line["id"] for line in pair.proxy.requests()}) == 6)
    assert not any(PROMPT in line for line in pair.proxy.log.read_text().splitlines())


def test_a_second_request_on_a_busy_connection_is_not_lost_in_silence(tmp_path: Path) -> None:
    with running_pair(tmp_path) as pair:
        one = request().replace(b"Connection: close\r\n", b"")
        received = exchange(pair.proxy.port, one + one)
        assert received.count(b"HTTP/1.1 200 OK") == 1
        assert len(pair.proxy.requests()) == 1


def test_a_large_body_is_asked_for(tmp_path: Path) -> None:
    sent = request().replace(b"Connection: close", b"Expect: 100-continue")
    head, _, content = sent.partition(b"\r\n\r\n")
    with (
        running_pair(tmp_path) as pair,
        socket.create_connection(("127.0.0.1", pair.proxy.port), 10) as sock,
    ):
        sock.sendall(head + b"\r\n\r\n")
        assert sock.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        sock.sendall(content)
        assert sock.recv(100).startswith(b"HTTP/1.1 200 OK")


# -- what fails ------------------------------------------------------------------------------------

DEADLINE = ("--deadline-s", "0.5")


@pytest.mark.parametrize(
    ("planted", "status", "kind", "said"),
    [
        ({"kv_drop": "all"}, 502, "transfer_params_missing", "no kv_transfer_params"),
        ({"kv_drop": "remote_block_ids"}, 502, "transfer_params_missing", "remote_block_ids"),
        ({"kv_drop": "remote_engine_id"}, 502, "transfer_params_missing", "remote_engine_id"),
        ({"kv_drop": "remote_request_id"}, 502, "transfer_params_missing", "remote_request_id"),
        ({"kv_drop": "remote_host"}, 502, "transfer_params_missing", "remote_host"),
        ({"kv_drop": "remote_port"}, 502, "transfer_params_missing", "remote_port"),
        ({"kv_drop": "do_remote_prefill"}, 502, "transfer_params_missing", "do_remote_prefill"),
        ({"bad_json_fraction": 1.0}, 502, "transfer_params_missing", "not JSON"),
        ({"ttft_s": 5.0}, 504, "deadline_answer", "no answer within 0.5 s"),
        ({"hang_fraction": 1.0}, 504, "deadline_answer", "no answer within 0.5 s"),
        ({"early_eof_fraction": 1.0}, 502, "closed", "in the middle"),
        ({"reset_fraction": 1.0}, 502, "closed", "closed the connection"),
        ({"die_after_requests": 1}, 502, "closed", "closed the connection"),
        ({"fail_fraction": 1.0}, 502, "status_500", "status 500"),
    ],
)
def test_a_failing_producer_is_named_and_never_recomputed(
    tmp_path: Path, planted: dict[str, Any], status: int, kind: str, said: str
) -> None:
    with running_pair(tmp_path, *DEADLINE, producer=planted) as pair:
        began = time.monotonic()
        answer = post(pair.proxy.url, **STREAMED)
        assert time.monotonic() - began < 1.5
        error = error_of(answer)
        assert (answer.status_code, error["type"], error["leg"]) == (status, kind, "producer")
        assert said in error["message"]
        assert pair.consumer.logged() == {}
        counted = metrics(f"{pair.proxy.url}/metrics")
        (line,) = [line for line in pair.proxy.requests() if line["path"] == PLAIN]
    assert counted[f"kit_proxy_errors_total:producer:{kind}"] == 1
    assert line["error"].startswith(f"{kind}: producer: ")
    assert line["leg"] == "producer"


def test_a_short_prompt_without_a_block_is_an_error_that_says_so(tmp_path: Path) -> None:
    with running_pair(tmp_path, producer={"kv_full_blocks_only": True}) as pair:
        error = error_of(post(pair.proxy.url, prompt="a b"))
        assert error["type"] == "transfer_params_missing"
        assert "the prompt filled no block" in error["message"]
        assert post(pair.proxy.url).status_code == 200


@pytest.mark.parametrize("fields", [{}, STREAMED])
def test_recomputing_is_allowed_only_when_told_and_marked(
    tmp_path: Path, fields: dict[str, Any]
) -> None:
    planted = {"kv_drop": "remote_engine_id"}
    with running_pair(tmp_path, "--allow-recompute", producer=planted) as pair:
        answer = post(pair.proxy.url, **fields)
        assert (answer.status_code, answer.headers["X-Kit-Recomputed"]) == (200, "1")
        assert " w0" in answer.text
        counted = metrics(f"{pair.consumer.url}/metrics")
        own = metrics(f"{pair.proxy.url}/metrics")
        assert pair.proxy.requests()[0]["recomputed"] is True
    assert counted["vllm:prompt_tokens_by_source_total:external_kv_transfer"] == 0
    assert own["kit_proxy_recomputed_total"] == 1
    assert "x-kit-recomputed" not in str(own)


@pytest.mark.parametrize(
    ("planted", "kind", "said"),
    [
        ({"hang_fraction": 1.0}, "deadline_silence", "silent for 0.5 s"),
        ({"early_eof_fraction": 1.0}, "closed", "in the middle"),
        ({"reset_fraction": 1.0}, "closed", "in the middle"),
        ({"die_after_requests": 1}, "closed", "in the middle"),
        ({"bad_json_fraction": 1.0}, None, ""),
    ],
)
def test_a_stream_that_breaks_ends_with_the_consumers_name(
    tmp_path: Path, planted: dict[str, Any], kind: str | None, said: str
) -> None:
    with running_pair(tmp_path, *DEADLINE, consumer=planted) as pair:
        began = time.monotonic()
        answer = raw(pair.proxy.port, PLAIN, **STREAMED)
        assert time.monotonic() - began < 1.5
        if kind is None:  # what the consumer says is its own affair
            assert answer.endswith(b"0\r\n\r\n")
            return
        assert not answer.endswith(b"0\r\n\r\n")
        last = answer.rpartition(b"data: ")[2].partition(b"\n")[0]
        error = json.loads(last)["error"]
        assert (error["type"], error["leg"]) == (kind, "consumer")
        assert said in error["message"]
        assert pair.proxy.requests()[0]["status"] == 200
        assert pair.proxy.requests()[0]["error"].startswith(f"{kind}: consumer: ")


@pytest.mark.parametrize(
    ("planted", "status", "kind"),
    [
        ({"hang_fraction": 1.0}, 504, "deadline_answer"),
        ({"early_eof_fraction": 1.0}, 502, "closed"),
        ({"die_after_requests": 1}, 502, "closed"),
    ],
)
def test_a_whole_answer_that_breaks_is_an_error(
    tmp_path: Path, planted: dict[str, Any], status: int, kind: str
) -> None:
    with running_pair(tmp_path, *DEADLINE, consumer=planted) as pair:
        answer = post(pair.proxy.url)
        error = error_of(answer)
    assert (answer.status_code, error["type"], error["leg"]) == (status, kind, "consumer")


def test_refusals_of_a_leg_are_handed_on_with_its_name(tmp_path: Path) -> None:
    with running_pair(tmp_path, consumer={"fail_fraction": 1.0, "fail_status": 503}) as pair:
        answer = post(pair.proxy.url, **STREAMED)
        assert (answer.status_code, answer.headers["X-Kit-Leg"]) == (503, "consumer")
        assert answer.json()["error"]["message"] == "planted failure"
    with running_pair(
        _fresh(tmp_path), producer={"fail_fraction": 1.0, "fail_status": 404}
    ) as pair:
        answer = post(pair.proxy.url, **STREAMED)
        assert (answer.status_code, answer.headers["X-Kit-Leg"]) == (404, "producer")
        assert pair.consumer.logged() == {}


def _fresh(folder: Path) -> Path:
    again = folder / "again"
    again.mkdir()
    return again


@contextlib.contextmanager
def silent_port() -> Iterator[int]:
    """Listen, take connections, and never answer."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield int(listener.getsockname()[1])


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        (b"nonsense\r\n\r\n", "bad_http"),
        (b"HTTP/1.1 100 Continue\r\n\r\n", "bad_http"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "bad_http"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nab", "closed"),
        (b"", "closed"),
    ],
)
def test_a_leg_that_speaks_no_http_is_named(tmp_path: Path, said: bytes, kind: str) -> None:
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        words = ("--replica", f"127.0.0.1:{listener.getsockname()[1]}")
        proxy = stack.enter_context(running_proxy(tmp_path, *words))
        client = stack.enter_context(socket.create_connection(("127.0.0.1", proxy.port), 10))
        client.sendall(request())
        leg, _ = listener.accept()
        leg.recv(65536)
        leg.sendall(said)
        leg.close()
        answer = client.recv(65536)
    assert answer.startswith(b"HTTP/1.1 502 ")
    error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
    assert (error["type"], error["leg"]) == (kind, "replica0")


def test_an_answer_that_ends_with_its_connection_is_whole(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        words = ("--replica", f"127.0.0.1:{listener.getsockname()[1]}")
        proxy = stack.enter_context(running_proxy(tmp_path, *words))
        client = stack.enter_context(socket.create_connection(("127.0.0.1", proxy.port), 10))
        client.sendall(request().replace(b"Connection: close\r\n", b""))
        leg, _ = listener.accept()
        leg.recv(65536)
        leg.sendall(b"HTTP/1.1 200 OK\r\n\r\nall there is")
        leg.close()
        received = b""
        while piece := client.recv(65536):
            received += piece
    assert received == b"HTTP/1.1 200 OK\r\n\r\nall there is"


@pytest.mark.parametrize("name", ["producer", "consumer"])
@pytest.mark.parametrize(
    ("alive", "status", "kind"), [(True, 504, "deadline_answer"), (False, 502, "connect")]
)
def test_a_leg_that_does_not_answer_is_named(
    tmp_path: Path, name: str, alive: bool, status: int, kind: str
) -> None:
    other = "consumer" if name == "producer" else "producer"
    with contextlib.ExitStack() as stack:
        stub = stack.enter_context(running_stub(tmp_path, "--port", "0", *role(other)))
        port = stack.enter_context(silent_port())
        if not alive:
            stack.close()
            stub = stack.enter_context(running_stub(tmp_path, "--port", "0", *role(other)))
        words = (f"--{name}", f"127.0.0.1:{port}", f"--{other}", f"127.0.0.1:{stub.port}")
        proxy = stack.enter_context(running_proxy(tmp_path, *words, *DEADLINE))
        began = time.monotonic()
        answer = post(proxy.url, **STREAMED)
        ill = httpx.get(f"{proxy.url}/health", trust_env=False)
        assert time.monotonic() - began < 2.5
    assert (answer.status_code, error_of(answer)["type"]) == (status, kind)
    assert error_of(answer)["leg"] == name
    assert (ill.status_code, error_of(ill)["leg"]) == (503, name)


def test_a_name_that_no_resolver_knows_is_named(tmp_path: Path) -> None:
    words = ("--replica", "no-such-host.invalid:8000", *DEADLINE)
    with running_proxy(tmp_path, *words) as proxy:
        error = error_of(post(proxy.url))
    assert error["leg"] == "replica0"
    assert error["type"] in ("connect", "deadline_connect")


def test_health_names_the_leg_that_died_and_comes_back(tmp_path: Path) -> None:
    with running_pair(tmp_path) as pair:
        assert httpx.get(f"{pair.proxy.url}/health", trust_env=False).status_code == 200
        pair.consumer.process.kill()
        pair.consumer.process.wait()
        ill = httpx.get(f"{pair.proxy.url}/health", trust_env=False)
        assert (ill.status_code, error_of(ill)["leg"]) == (503, "consumer")
        place = _fresh(tmp_path)
        port = str(pair.consumer.port)
        with running_stub(place, "--port", port, *role("consumer")):
            assert httpx.get(f"{pair.proxy.url}/health", trust_env=False).status_code == 200
            assert post(pair.proxy.url).status_code == 200


def test_a_consumer_that_fetches_nothing_shows_in_its_counters(tmp_path: Path) -> None:
    with running_pair(tmp_path, consumer={"kv_transfer_disabled": True}) as pair:
        assert post(pair.proxy.url).status_code == 200
        counted = metrics(f"{pair.proxy.url}/metrics/consumer")
    assert counted["vllm:nixl_bytes_transferred_sum"] == 0
    assert counted["vllm:prompt_tokens_by_source_total:external_kv_transfer"] == 0
    assert counted["vllm:external_prefix_cache_hits_total"] == 8


# -- clients that leave ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("producer", "consumer"),
    [({"ttft_s": 60.0}, {}), ({}, {"ttft_s": 60.0}), ({"kv_transfer_s": 60.0}, {}), ({}, {})],
)
def test_clients_that_leave_free_both_legs_at_once(
    tmp_path: Path, producer: dict[str, Any], consumer: dict[str, Any]
) -> None:
    running = "vllm:num_requests_running"
    with running_pair(tmp_path, producer=producer, consumer=consumer) as pair:
        legs = f"{pair.producer.url}/metrics", f"{pair.consumer.url}/metrics"
        sent = request(**STREAMED, max_tokens=5000)
        socks = [socket.create_connection(("127.0.0.1", pair.proxy.port)) for _ in range(20)]
        for sock in socks:
            sock.sendall(sent)
        wait_until(lambda: sum(metrics(leg)[running] for leg in legs) == 20)
        assert metrics(f"{pair.proxy.url}/metrics")["kit_proxy_in_flight"] == 20
        for sock in socks:
            sock.close()
        took_s = wait_until(lambda: sum(metrics(leg)[running] for leg in legs) == 0)
        own = metrics(f"{pair.proxy.url}/metrics")
        aborted = sum(metrics(leg)["vllm:request_success_total:abort"] for leg in legs)
        errors = [line["error"] for line in pair.proxy.requests() if line["path"] == PLAIN]
    assert errors == ["aborted: the client has gone"] * 20
    assert took_s < 2
    assert aborted == 20
    assert own["kit_proxy_aborted_total"] == 20
    assert own["kit_proxy_in_flight"] == 0
    assert own["kit_proxy_outstanding:producer"] == own["kit_proxy_outstanding:consumer"] == 0


def test_a_slow_client_slows_the_leg_down_and_gets_everything(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        stub = stack.enter_context(running_stub(tmp_path, ttft_s=0.0, itl_s=0.0))
        words = ("--replica", f"127.0.0.1:{stub.port}", "--deadline-s", "1")
        proxy = stack.enter_context(running_proxy(tmp_path, *words))
        sock = stack.enter_context(socket.socket())
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", proxy.port))
        sock.sendall(request(**STREAMED, max_tokens=20_000))
        time.sleep(2.5)  # more than the deadline: our slowness is not the leg's silence
        assert metrics(f"{proxy.url}/metrics")["kit_proxy_in_flight"] == 1
        received = []
        while piece := sock.recv(2**20):
            received.append(piece)
    assert b"".join(received).endswith(b"0\r\n\r\n")
    assert b"".join(received).count(b"data: ") == 20_000 + 2


# -- the other pages -------------------------------------------------------------------------------


def test_the_pages_that_tools_ask_for_come_from_a_leg(tmp_path: Path) -> None:
    with running_pair(tmp_path) as pair, httpx.Client(trust_env=False) as client:
        url = pair.proxy.url
        assert client.get(f"{url}/v1/models").json()["data"][0]["id"] == "/model"
        assert "version" in client.get(f"{url}/version").json()
        assert client.post(f"{url}/tokenize", json={"prompt": "a b"}).json()["count"] == 2
        assert client.post(f"{url}/detokenize", json={"tokens": [1]}).json()["prompt"] == "w1"
        for leg, words in (("consumer", ""), ("producer", "&leg=producer")):
            info = client.get(f"{url}/server_info?config_format=json{words}").json()
            assert info["vllm_config"]["kv_transfer_config"]["kv_role"] == f"kv_{leg}"
            assert "vllm:prompt_tokens_total" in metrics(f"{url}/metrics/{leg}")
        for page in ("/metrics/nobody", "/version?leg=nobody", "/nothing"):
            assert client.get(url + page).status_code == 404
        assert "vllm:prompt_tokens_total" not in metrics(f"{url}/metrics")


def test_a_baseline_is_served_beside_the_pair(tmp_path: Path) -> None:
    place = _fresh(tmp_path)
    with running_stub(place) as alone:
        with running_pair(tmp_path, "--baseline", f"127.0.0.1:{alone.port}") as pair:
            url = f"{pair.proxy.url}/baseline"
            answer = post(url, n=2, **STREAMED)
            assert answer.status_code == 200
            assert httpx.get(f"{url}/v1/models", trust_env=False).json()["data"][0]["id"] == "stub"
            assert pair.producer.logged() == pair.consumer.logged() == {}
            own = metrics(f"{pair.proxy.url}/metrics")
        assert list(alone.logged()) == ["one"]
    assert own["kit_proxy_requests_total:baseline0"] == 1
    assert own["kit_proxy_requests_total:consumer"] == 0


def test_replicas_are_used_evenly_and_the_busy_one_least(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        stubs: list[Stub] = []
        for i, itl_s in enumerate((0.001, 0.001, 0.5)):
            place = tmp_path / str(i)
            place.mkdir()
            stubs.append(stack.enter_context(running_stub(place, ttft_s=0.0, itl_s=itl_s)))
        words = [w for stub in stubs for w in ("--replica", f"127.0.0.1:{stub.port}")]
        proxy = stack.enter_context(running_proxy(tmp_path, *words))
        client = stack.enter_context(httpx.Client(trust_env=False))
        for _ in range(31):  # one after the other, but the slow replica's answers are left open
            answer = stack.enter_context(
                client.stream("POST", proxy.url + PLAIN, json=body(**STREAMED, max_tokens=20))
            )
            if metrics(f"{proxy.url}/metrics")["kit_proxy_outstanding:replica2"] == 0:
                answer.read()
            else:
                wait_until(lambda: metrics(f"{proxy.url}/metrics")["kit_proxy_in_flight"] == 1)
        served = [metrics(f"{stub.url}/metrics")["vllm:prompt_tokens_total"] / 8 for stub in stubs]
    assert served == [15, 15, 1]


# -- its life --------------------------------------------------------------------------------------


def test_sigterm_lets_answers_end_and_takes_no_more(tmp_path: Path) -> None:
    with running_pair(tmp_path, consumer={"itl_s": 0.1}) as pair:
        with socket.create_connection(("127.0.0.1", pair.proxy.port)) as sock:
            sock.sendall(request(**STREAMED, max_tokens=8).replace(b"Connection: close\r\n", b""))
            received = sock.recv(10)
            pair.proxy.process.send_signal(signal.SIGTERM)
            time.sleep(0.2)
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", pair.proxy.port))
            while piece := sock.recv(65536):
                received += piece
        assert received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        assert pair.proxy.process.wait(5) == 0


def test_sigterm_does_not_wait_longer_than_the_grace(tmp_path: Path) -> None:
    words = ("--grace-s", "0.3")
    with running_pair(tmp_path, *words, consumer={"hang_fraction": 1.0}) as pair:
        with socket.create_connection(("127.0.0.1", pair.proxy.port)) as sock:
            sock.sendall(request(**STREAMED))
            sock.recv(10)
            began = time.monotonic()
            pair.proxy.process.send_signal(signal.SIGTERM)
            assert pair.proxy.process.wait(5) == 0
            assert 0.3 <= time.monotonic() - began < 1.5
        assert pair.proxy.requests()[0]["error"].startswith("aborted: ")


def test_a_wrong_command_line_says_what_is_missing() -> None:
    words = [sys.executable, "-m", "kit.inside.proxy", "--producer", "a:1"]
    left = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert left.returncode == 2
    assert "--producer and --consumer belong together" in left.stderr
