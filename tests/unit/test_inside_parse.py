"""The reader of answers: any split of the bytes, any damage, one result and never an exception."""

from __future__ import annotations

import dataclasses
import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.inside.parse import EventLines, Reply, ReplyParser

ENDS = st.sampled_from(["\n", "\r\n", "\r"])
KINDS = {"", "early_eof", "bad_json", "bad_http", "server_error", "not_streamed"}
TEXTS = st.lists(st.text(min_size=1, max_size=8), max_size=6)


def event(frame: object, end: str = "\n") -> bytes:
    return f"data: {json.dumps(frame, ensure_ascii=False)}{end}{end}".encode()


def completion(text: str, reason: str | None = None, usage: Any = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": reason}], "usage": usage}


def usage_only(prompt: int, served: int) -> dict[str, Any]:
    counts = {"prompt_tokens": prompt, "completion_tokens": served}
    return {"choices": [], "usage": {**counts, "prompt_tokens_details": {"cached_tokens": 3}}}


def http(body: list[bytes], *, kind: str = "text/event-stream", status: int = 200) -> bytes:
    head = f"HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in body)
    return head.encode() + chunks + b"0\r\n\r\n"


def whole(body: bytes, *, status: int = 200, kind: str = "application/json") -> bytes:
    head = f"HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def parse(
    *reads: bytes, asked_stream: bool = True, eof: bool = False, error: str | None = None
) -> Reply:
    parser = ReplyParser(asked_stream=asked_stream)
    for number, data in enumerate(reads):
        parser.feed(data, number)
    return parser.finish(eof=eof, error=error)


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted({p % (len(data) + 1) for p in places}), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(edges) if a < b]


def said(reply: Reply) -> dict[str, Any]:
    """What a reply says, without what depends on how it was cut."""
    fields = dataclasses.asdict(reply)
    return {k: v for k, v in fields.items() if k not in ("chunk_ns", "done_ns", "shared")}


@given(TEXTS, ENDS, st.booleans(), st.lists(st.integers(0, 5000), max_size=30))
def test_any_split_of_a_stream_gives_the_same_reply(
    texts: list[str], end: str, one_frame_each: bool, places: list[int]
) -> None:
    frames = [completion(t) for t in texts] + [completion("", "stop"), usage_only(7, len(texts))]
    events = [event(f, end) for f in frames] + [f"data: [DONE]{end}{end}".encode()]
    data = http(events if one_frame_each else [b"".join(events)])
    reads = cut(data, places)
    reply = parse(*reads)
    assert said(reply) == said(parse(data))
    assert (reply.error, reply.text) == (None, "".join(texts))
    assert reply.chunk_chars == [len(t) for t in texts]
    assert (reply.completion_tokens, reply.prompt_tokens) == (len(texts), 7)
    assert (reply.cached_tokens, reply.finish_reason) == (3, "stop")
    assert reply.chunk_ns == sorted(reply.chunk_ns)
    assert reply.done_ns == len(reads) - 1


@given(st.integers(0, 10_000), st.lists(st.integers(0, 5000), max_size=8))
def test_a_stream_cut_off_anywhere_is_an_error_and_keeps_what_came(
    length: int, places: list[int]
) -> None:
    data = http([event(completion("one")), event(completion("two")), b"data: [DONE]\n\n"])
    part = data[: length % len(data)]
    reply = parse(*cut(part, places), eof=True)
    assert reply.error is not None
    assert reply.error.startswith("early_eof: ")
    assert "onetwo".startswith(reply.text)


@given(st.binary(max_size=300), st.lists(st.integers(0, 300), max_size=5), st.booleans())
def test_no_bytes_make_it_raise(junk: bytes, places: list[int], asked_stream: bool) -> None:
    for data in (junk, http([junk]), whole(junk), http([b"data: " + junk + b"\n\n"])):
        reply = parse(*cut(data, places), asked_stream=asked_stream, eof=True)
        kind = (reply.error or "").partition(":")[0]
        assert kind in KINDS or kind.startswith("http_")
        assert reply.error is None or len(reply.error) <= 300


@given(st.lists(st.sampled_from([b"a", b"data: x", b"\n", b"\r", b"\r\n", b": c"]), max_size=40))
def test_lines_end_as_the_standard_says_however_they_are_cut(parts: list[bytes]) -> None:
    data = b"".join(parts)
    one = EventLines().feed(data)
    lines = EventLines()
    bytewise = [e for i in range(len(data)) for e in lines.feed(data[i : i + 1])]
    assert one == bytewise
    normal = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    blocks = [b.split(b"\n") for b in normal.split(b"\n\n")[:-1]]
    wanted = [b"\n".join(x[6:] for x in b if x[:5] == b"data:") for b in blocks]
    assert one == [w for w in wanted if w]


def test_a_chunk_arrives_with_its_last_byte() -> None:
    data = http([event(completion("x"))])
    end = data.index(b"\n\n") + 2
    reply = parse(data[: end - 1], data[end - 1 : end], data[end:])
    assert reply.chunk_ns == [1]


def test_times_never_run_backwards_where_two_kinds_of_stamps_meet() -> None:
    data = http([event(completion("x")), event(completion("y")), b"data: [DONE]\n\n"])
    middle = data.index(b"data", data.index(b"data") + 1)
    parser = ReplyParser(asked_stream=True)
    parser.feed(data[:middle], 1_000)
    parser.feed(data[middle:], 990)
    reply = parser.finish(eof=False)
    assert (reply.chunk_ns, reply.done_ns) == ([1_000, 1_000], 1_000)


def test_role_only_and_usage_only_frames_are_no_content() -> None:
    role = {"choices": [{"delta": {"role": "assistant", "content": ""}}]}
    null = {"choices": [{"delta": {"content": None}}]}
    word = {"choices": [{"delta": {"content": "hi"}, "finish_reason": "stop"}]}
    frames = [role, null, word, usage_only(1, 1)]
    reply = parse(*[http([event(f) for f in frames] + [b"data: [DONE]\n\n"])])
    assert (reply.chunk_chars, reply.text, reply.error) == ([2], "hi", None)


def test_events_are_not_tokens() -> None:
    body = [event(completion("a b c")), event(completion(" d")), event(usage_only(2, 4))]
    reply = parse(http([*body, b"data: [DONE]\n\n"]))
    assert (len(reply.chunk_ns), reply.completion_tokens) == (2, 4)


def test_without_usage_no_count_is_made_up() -> None:
    reply = parse(http([event(completion("a")), b"data: [DONE]\n\n"]))
    assert (reply.prompt_tokens, reply.completion_tokens, reply.cached_tokens) == (None,) * 3


def test_chunks_that_share_a_read_with_a_later_event_are_counted() -> None:
    a, b, done = event(completion("a")), event(completion("b")), b"data: [DONE]\n\n"
    data = http([a, b, done])
    apart = data.index(b"data", data.index(b"data") + 1)
    assert parse(data).shared == 2
    assert parse(data[:apart], data[apart:]).shared == 1
    last = data.index(b"data: [DONE]")
    assert parse(data[:apart], data[apart:last], data[last:]).shared == 0


def test_a_whole_answer_has_text_and_counts_but_no_token_times() -> None:
    frame = {"choices": [{"message": {"content": "hello"}, "finish_reason": "stop"}]}
    body = json.dumps(frame | {"usage": {"completion_tokens": 5}}).encode()
    reply = parse(whole(body), asked_stream=False)
    assert (reply.text, reply.completion_tokens, reply.chunk_ns) == ("hello", 5, [])
    assert (reply.error, reply.finish_reason) == (None, "stop")


def test_an_interim_answer_is_not_the_answer() -> None:
    real = http([event(completion("a")), b"data: [DONE]\n\n"])
    reply = parse(b"HTTP/1.1 100 Continue\r\n\r\n", real)
    assert (reply.status, reply.text, reply.error, reply.done_ns) == (200, "a", None, 1)


def test_a_body_without_length_ends_with_the_connection() -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
    data = head + event(completion("a")) + b"data: [DONE]\n\n"
    assert parse(data, eof=True).error is None


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"", "early_eof: closed before an answer"),
        (http([event(completion("a"))]), "early_eof: the stream ended without [DONE]"),
        (http([b'data: {"choices": [\n\n', b"data: [DONE]\n\n"]), "bad_json: "),
        (http([b"data: 3\n\n", b"data: [DONE]\n\n"]), "bad_json: an event is no object"),
        (http([event({"error": {"message": "out of blocks"}})]), "server_error: out of blocks"),
        (whole(b"{", status=200), "bad_json: "),
        (whole(b"[]"), "bad_json: the answer is no object"),
        (whole(b'{"choices": []}'), "not_streamed: "),
        (whole(b'{"error": {"message": "too long"}}', status=400), "http_400: too long"),
        (whole(b'{"detail": "Not Found"}', status=404), "http_404: Not Found"),
        (whole(b"Internal Server Error", status=500, kind="text/plain"), "http_500: Internal"),
        (whole(b"", status=503), "http_503"),
        (b"SSH-2.0-OpenSSH\r\n", "bad_http: "),
    ],
)
def test_what_a_server_does_wrong_is_named(data: bytes, error: str) -> None:
    reply = parse(data, eof=True)
    assert reply.error is not None
    assert reply.error.startswith(error)


def test_why_reading_stopped_wins_over_what_was_read() -> None:
    reply = parse(http([event(completion("a"))])[:-7], error="deadline: 3 s")
    assert (reply.error, reply.text) == ("deadline: 3 s", "a")
