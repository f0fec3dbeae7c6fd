"""The proxy's pure parts: what each leg is asked, what is usable, how answers are built."""

from __future__ import annotations

import argparse
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.inside.proxy import parse_address, read_command
from kit.inside.proxy_legs import Leg, least_busy
from kit.inside.proxy_wire import (
    Counters,
    Failure,
    Request,
    answer_bytes,
    check_servable,
    consumer_body,
    error_event,
    parse_body,
    producer_body,
    read_params,
    request_bytes,
    with_headers,
)

PARAMS = {
    "do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [[0, 1]],
    "remote_engine_id": "e", "remote_request_id": "r", "remote_host": "h", "remote_port": 5600,
    "tp_size": 1,
}  # fmt: skip
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
BODIES = st.dictionaries(st.text(max_size=8), VALUES, max_size=6)


def answered(**changes: Any) -> bytes:
    params = {k: v for k, v in {**PARAMS, **changes}.items() if v != "left out"}
    return json.dumps({"choices": [], "kv_transfer_params": params}).encode()


def test_the_producer_is_asked_for_one_token_and_where_its_blocks_are() -> None:
    body = {
        "model": "m", "prompt": "p", "max_tokens": 9, "stream": True, "temperature": 0,
        "stream_options": {"include_usage": True}, "min_tokens": 4, "stop": ["x"],
        "stop_token_ids": [7], "ignore_eos": False,
    }  # fmt: skip
    asked = producer_body(body, is_chat=False)
    params = asked.pop("kv_transfer_params")
    assert asked == {
        "model": "m", "prompt": "p", "temperature": 0,
        "max_tokens": 1, "stream": False, "ignore_eos": True,
    }  # fmt: skip
    assert params == {
        "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None,
        "remote_block_ids": None, "remote_host": None, "remote_port": None,
    }  # fmt: skip
    assert producer_body({}, is_chat=True)["max_completion_tokens"] == 1
    assert "max_completion_tokens" not in asked


@given(BODIES)
def test_the_consumer_gets_the_clients_body_and_the_parameters(body: dict[str, Any]) -> None:
    parsed = parse_body(json.dumps(body).encode())
    sent = json.loads(json.dumps(consumer_body(parsed, PARAMS)))
    assert sent.pop("kv_transfer_params") == PARAMS
    assert sent == {k: v for k, v in body.items() if k != "kv_transfer_params"}


@given(st.binary(max_size=60) | VALUES.map(lambda value: json.dumps(value).encode()))
def test_any_body_is_an_object_or_refused(raw: bytes) -> None:
    try:
        is_object = isinstance(json.loads(raw), dict)
    except ValueError:
        is_object = False
    if is_object:
        assert parse_body(raw) == json.loads(raw)
    else:
        with pytest.raises(Failure, match="the body is") as refused:
            parse_body(raw)
        assert (refused.value.status, refused.value.leg) == (400, None)


@pytest.mark.parametrize("blocks", [[[0, 1]], [0], [[], [4]], [[1], []]])
def test_usable_parameters_are_handed_on_unchanged(blocks: list[Any]) -> None:
    assert read_params(answered(remote_block_ids=blocks)) == {**PARAMS, "remote_block_ids": blocks}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"remote_block_ids": "left out"}, "remote_block_ids is missing"),
        ({"remote_block_ids": None}, "remote_block_ids is missing"),
        ({"remote_block_ids": []}, "remote_block_ids is empty"),
        ({"remote_block_ids": [[]]}, "remote_block_ids is empty"),
        ({"remote_engine_id": None}, "remote_engine_id is missing"),
        ({"remote_engine_id": ""}, "remote_engine_id is missing"),
        ({"remote_request_id": "left out"}, "remote_request_id is missing"),
        ({"remote_host": None}, "remote_host is missing"),
        ({"remote_port": 0}, "remote_port is missing"),
        ({"remote_port": True}, "remote_port is missing"),
        ({"do_remote_prefill": False}, "do_remote_prefill is not true"),
    ],
)
def test_unusable_parameters_say_what_is_wrong(changes: dict[str, Any], said: str) -> None:
    found = read_params(answered(**changes))
    assert isinstance(found, str)
    assert found.startswith(said)


def test_an_answer_without_parameters_says_how_it_ended() -> None:
    answer = json.dumps({"choices": [{"finish_reason": "stop"}], "kv_transfer_params": None})
    assert read_params(answer.encode()) == (
        "the answer has no kv_transfer_params (finish_reason stop)"
    )
    assert read_params(b"[]") == "the answer has no kv_transfer_params"
    assert read_params(b"{") == "the answer is not JSON"


@given(VALUES)
def test_no_answer_makes_reading_fail(value: object) -> None:
    for holder in (value, {"kv_transfer_params": value}, {"choices": value}):
        assert isinstance(read_params(json.dumps(holder).encode()), str)


@pytest.mark.parametrize(
    "body",
    [{}, {"n": 1, "best_of": None}, {"prompt": [1, 2, 3]}, {"prompt": ["a"]}, {"echo": True}],
)
def test_ordinary_requests_can_be_served(body: dict[str, Any]) -> None:
    check_servable(body)


def test_a_leg_gets_the_clients_headers_but_those_of_its_connection() -> None:
    headers = [
        (b"Authorization", b"Bearer x"), (b"Connection", b"keep-alive"), (b"Host", b"proxy"),
        (b"Content-Length", b"99"), (b"Transfer-Encoding", b"chunked"), (b"X-Request-Id", b"old"),
        (b"X-Own", b"caf\xe9"),
    ]  # fmt: skip
    one = Request("id", "POST", "/tokenize", "a=1", headers, b"body", 0.0)
    assert request_bytes(one, "leg:1", b"body") == (
        b"POST /tokenize?a=1 HTTP/1.1\r\nHost: leg:1\r\nX-Request-Id: id\r\n"
        b"Authorization: Bearer x\r\nX-Own: caf\xe9\r\nContent-Length: 4\r\n\r\nbody"
    )
    assert b"Content-Length" not in request_bytes(
        Request("id", "GET", "/", "", (), b"", 0.0), "h", b""
    )


def test_answers_and_added_headers() -> None:
    answer = answer_bytes(502, {"a": 1})
    assert answer.startswith(b"HTTP/1.1 502 Bad Gateway\r\ncontent-type: application/json\r\n")
    assert answer.endswith(b'content-length: 8\r\n\r\n{"a": 1}')
    marked = with_headers(answer, [(b"x-kit-leg", b"consumer")])
    assert marked.replace(b"x-kit-leg: consumer\r\n", b"", 1) == answer
    assert with_headers(answer, ()) == answer


def test_a_broken_stream_ends_with_an_event_in_a_chunk() -> None:
    chunk = error_event(Failure(502, "closed", "consumer: é", "consumer"))
    size, _, rest = chunk.partition(b"\r\n")
    assert len(rest) == int(size, 16) + 2
    assert json.loads(rest.removeprefix(b"data: "))["error"]["leg"] == "consumer"


@given(st.lists(st.floats(min_value=0, max_value=1), max_size=20))
def test_the_overhead_histogram_is_cumulative(seen: list[float]) -> None:
    counters = Counters()
    for seconds in seen:
        counters.observe_overhead(seconds)
    lines = [line for line in counters.text([]).splitlines() if "overhead_seconds_bucket" in line]
    counts = [int(line.rpartition(" ")[2]) for line in lines]
    assert counts == sorted(counts)
    assert counts[-1] == len(seen)
    for line, count in zip(lines[:-1], counts, strict=False):
        assert count == sum(s <= float(line.split('"')[1]) for s in seen)


def test_the_least_busy_leg_is_chosen_and_equals_take_turns() -> None:
    legs = [Leg(str(i), "h", 1) for i in range(3)]
    assert [least_busy(legs).name for _ in range(6)] == ["0", "1", "2", "0", "1", "2"]
    legs[0].outstanding = legs[2].outstanding = 1
    assert [least_busy(legs).name for _ in range(2)] == ["1", "1"]


@pytest.mark.parametrize("text", ["h", "h:", ":1", "h:0", "h:70000", "h:x"])
def test_a_bad_address_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        parse_address(text)


def test_addresses_are_read() -> None:
    assert parse_address("producer:8000") == ("producer", 8000)
    assert parse_address("[::1]:8000") == ("::1", 8000)
    assert Leg("x", "::1", 8000).authority == "[::1]:8000"


@pytest.mark.parametrize(
    "words",
    [
        "", "--producer a:1", "--consumer a:1", "--producer a:1 --consumer b:1 --replica c:1",
        "--replica a:1 --baseline b:1", "--replica a:1 --deadline-s 0",
    ],
)  # fmt: skip
def test_a_command_line_that_makes_no_sense_is_refused(words: str) -> None:
    with pytest.raises(SystemExit) as refused:
        read_command(words.split())
    assert refused.value.code == 2
