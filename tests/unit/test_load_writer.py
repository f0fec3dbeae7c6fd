"""The process that writes samples: nothing lost under pressure, and only whole lines."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvloop

from kit.inside.clock import NS
from kit.inside.spec import Request
from kit.inside.writer import (
    Flown,
    Lags,
    Writer,
    WriterReport,
    append_line,
    encode_line,
    lag_summary,
    parse_flown,
    sample_of,
    stamps_of,
)

T0 = 100 * NS


def request(name: str) -> Request:
    return Request(
        id=name, path="/x", body=b"{}", streamed=False, tags={}, at_s=0.0, lane=None, start_s=0.0
    )


def flown(number: int, text: str = "ok", *, error: str | None = None) -> Flown:
    body = json.dumps({"choices": [{"text": text}]}).encode()
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    reads = [(T0 + NS, 5_000, head % len(body) + body)]
    return Flown(number, T0, 1000, T0 + 2000, reads, eof=False, error=error)


def write(path: Path, ended: list[Flown]) -> WriterReport:
    writer = Writer([request(f"r{i}") for i in range(len(ended))], path)

    async def run() -> None:
        writer.attach(asyncio.get_running_loop(), T0)
        for one in ended:
            writer.push(one)
        await asyncio.sleep(0.05)
        writer.detach()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())
    return writer.finish()


def test_a_burst_larger_than_the_pipe_arrives_whole_and_in_order(tmp_path: Path) -> None:
    ended = [flown(i, "x" * 20_000, error=None if i % 3 else "reset") for i in range(300)]
    report = write(tmp_path / "samples.jsonl", ended)
    lines = (tmp_path / "samples.jsonl").read_text().splitlines()
    assert [json.loads(line)["id"] for line in lines] == [f"r{i}" for i in range(300)]
    assert (report.written, report.failed) == (300, 100)
    assert report.recv_lag_s == {"p50": 5e-6, "p99": 5e-6, "max": 5e-6}


def test_times_are_seconds_from_the_windows_start(tmp_path: Path) -> None:
    one = flown(0)
    sample = sample_of(request("r"), one, parse_flown(request("r"), one), T0)
    assert (sample["intended_s"], sample["sent_s"], sample["connect_s"]) == (0.0, 2e-6, 1e-6)
    assert (sample["done_s"], sample["recv_lag_max_s"]) == (1.0, 5e-6)


def test_a_request_that_was_never_connected_has_no_times() -> None:
    one = Flown(0, T0, -1, -1, [], eof=False, error="connect: Connection refused")
    sample = sample_of(request("r"), one, parse_flown(request("r"), one), T0)
    assert [sample[k] for k in ("connect_s", "sent_s", "done_s", "stamps")] == [None] * 4
    assert sample["error"] == "connect: Connection refused"


def test_half_a_surrogate_pair_is_kept_and_the_line_is_utf8(tmp_path: Path) -> None:
    write(tmp_path / "samples.jsonl", [flown(0, "a\ud83d")])
    assert json.loads((tmp_path / "samples.jsonl").read_text("utf-8"))["text"] == "a\ud83d"
    assert encode_line({"t": "你"}) == '{"t": "你"}\n'.encode()


def test_a_line_that_does_not_fit_is_taken_back(tmp_path: Path) -> None:
    path = tmp_path / "f"
    with path.open("xb", buffering=0) as out:
        append_line(out, b"whole\n")
        with pytest.raises(OSError, match="too large"), file_size_limited_to(8):
            append_line(out, b"does not fit\n")
    assert path.read_bytes() == b"whole\n"


@contextlib.contextmanager
def file_size_limited_to(limit_bytes: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(
    ("waits", "stamps"),
    [([], None), ([3, 0], "kernel"), ([-1], "user"), ([4, -1], "mixed")],
)
def test_whose_stamps_they_are(waits: list[int], stamps: str | None) -> None:
    assert stamps_of(waits) == stamps


def test_with_few_values_p99_is_the_largest() -> None:
    assert lag_summary([3 * NS, NS, 2 * NS]) == {"p50": 2.0, "p99": 3.0, "max": 3.0}
    assert lag_summary([]) == {"p50": None, "p99": None, "max": None}


def test_counted_lags_are_summed_up_as_listed_ones_are() -> None:
    draw = random.Random(3)
    for count in (0, 1, 2, 99, 100, 101, 5000):
        listed = [draw.choice((0, 999, 40_000)) + draw.randrange(3_000_000) for _ in range(count)]
        counted = Lags()
        for lag_ns in listed:
            counted.add(lag_ns)
        seen, true = counted.summary(), lag_summary(listed)
        for name, value in true.items():
            if value is None:
                assert seen[name] is None
            else:
                assert 0 <= float(seen[name] or 0) - value < 1.001e-6
