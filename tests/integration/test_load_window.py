"""The real window against the real stub: times, every fault, every way to be stopped."""

from __future__ import annotations

import itertools
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from stepping_clock import SteppingClock
from stub_process import (
    Measured,
    completion,
    finish_window,
    read_window,
    run_window,
    running_stub,
    start_window,
    write_window,
)

from kit.inside import window
from kit.paths import INSIDE

SAMPLE_KEYS = {
    *("id", "tags", "lane", "intended_s", "connect_s", "sent_s", "chunk_s", "chunk_chars"),
    *("text", "done_s", "status", "prompt_tokens", "completion_tokens", "cached_tokens"),
    *("finish_reason", "prompt_logprobs", "error", "stamps", "shared_stamps", "recv_lag_max_s"),
}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def test_samples_tell_the_truth_of_the_stub(tmp_path: Path) -> None:
    requests = [completion(f"r{i}", tokens=8, at_s=i * 0.02, tags={"i": i}) for i in range(10)]
    with running_stub(tmp_path, ttft_s=0.05, itl_s=0.03) as stub:
        got = run_window(tmp_path, stub.port, requests)
        truth = stub.logged()
    assert (got.status, got.stderr) == (0, "")
    assert set(got.samples) == {f"r{i}" for i in range(10)}
    t0_s = got.load["t0_monotonic_s"]
    for i in range(10):
        sample, true = got.samples[f"r{i}"], truth[f"r{i}"]
        assert set(sample) == SAMPLE_KEYS
        assert (sample["error"], sample["status"], sample["tags"]) == (None, 200, {"i": i})
        assert (sample["completion_tokens"], sample["finish_reason"]) == (8, "length")
        assert sample["text"] == "".join(f" w{n}" for n in range(8))
        assert sample["intended_s"] == pytest.approx(i * 0.02)
        assert sample["sent_s"] >= sample["intended_s"]
        assert t0_s + sample["sent_s"] == pytest.approx(true["arrived_s"], abs=0.005)
        read = [t0_s + at for at in sample["chunk_s"]]
        assert read == pytest.approx(true["chunk_s"], abs=0.005)
        assert sample["done_s"] >= sample["chunk_s"][-1]
    assert got.load["stamps"] == "kernel"
    assert got.load["connect_in_ttft"] is False
    assert (got.load["requests"], got.load["failed"], got.load["unsent"]) == (10, 0, 0)
    assert got.load["send_lag_s"]["max"] < 0.1
    assert got.load["clock_step_s"] is None
    assert got.events[-1] == {"event": "end", "done": 10, "of": 10, "failed": 0}


def test_the_body_arrives_byte_for_byte(tmp_path: Path) -> None:
    body = '{"prompt":  "\\u4f60 好", "temperature": 0.70, "stream": true}'
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        spec = write_window(tmp_path, port, [], scrape_every_s=None, deadline_s=0.5)
        line = f'{{"id": "r", "path": "/v1/completions", "at_s": 0, "body": {body}}}\n'
        (tmp_path / "requests.jsonl").write_text(line)
        process = start_window(spec)
        received = b""
        while body.encode() not in received:
            peer, _ = server.accept()
            peer.settimeout(3)
            with peer:
                received = peer.recv(65_536)
                if received.startswith(b"GET"):
                    peer.send(b"HTTP/1.1 404 X\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        server.close()
        finish_window(process, spec)
    assert received.endswith(b"\r\n\r\n" + body.encode())


def test_a_whole_answer_has_no_token_times(tmp_path: Path) -> None:
    request = completion("r", body={"stream": False, "stream_options": None})
    with running_stub(tmp_path) as stub:
        sample = run_window(tmp_path, stub.port, [request]).samples["r"]
    assert (sample["error"], sample["chunk_s"], sample["completion_tokens"]) == (None, [], 5)
    assert sample["done_s"] > 0


def test_chat_does_not_count_the_role_as_the_first_token(tmp_path: Path) -> None:
    body = {"messages": [{"role": "user", "content": "hi there"}], "prompt": None}
    request = completion("r", body=body) | {"path": "/v1/chat/completions"}
    with running_stub(tmp_path, ttft_s=0.2) as stub:
        sample = run_window(tmp_path, stub.port, [request]).samples["r"]
    assert (sample["error"], len(sample["chunk_s"]), sample["prompt_tokens"]) == (None, 5, 2)
    assert sample["chunk_s"][0] - sample["sent_s"] >= 0.199


def test_chunks_of_several_tokens_are_counted_by_usage(tmp_path: Path) -> None:
    with running_stub(tmp_path, tokens_per_chunk=4) as stub:
        sample = run_window(tmp_path, stub.port, [completion("r", tokens=10)]).samples["r"]
    assert (len(sample["chunk_s"]), sample["completion_tokens"]) == (3, 10)


@pytest.mark.parametrize(
    ("config", "error", "status"),
    [
        ({"fail_fraction": 1.0}, "http_500: planted failure", 500),
        ({"fail_fraction": 1.0, "fail_status": 503}, "http_503: planted failure", 503),
        ({"reset_fraction": 1.0}, "reset: Connection reset by peer", 200),
        ({"early_eof_fraction": 1.0}, "early_eof: closed after 3 content chunks", 200),
        ({"bad_json_fraction": 1.0}, "bad_json: ", 200),
        ({"hang_fraction": 1.0}, "deadline: not complete within 1 s", 200),
        ({"die_after_requests": 2}, "early_eof: ", 200),
    ],
)
def test_every_fault_becomes_an_error_and_no_request_is_lost(
    tmp_path: Path, config: dict[str, Any], error: str, status: int
) -> None:
    requests = [completion("a"), completion("b"), completion("c", at_s=0.3)]
    with running_stub(tmp_path, **config) as stub:
        got = run_window(tmp_path, stub.port, requests, deadline_s=1)
    assert (got.status, got.stderr) == (0, "")
    assert sorted(got.samples) == ["a", "b", "c"]
    assert got.samples["a"]["error"].startswith(error)
    assert got.samples["a"]["status"] == status
    assert got.load["failed"] == 3
    assert got.events[-1]["failed"] == 3
    if "die_after_requests" in config:
        assert got.samples["c"]["error"] == "connect: Connection refused"
        assert got.samples["c"]["sent_s"] is None


def test_some_failures_leave_the_others_whole(tmp_path: Path) -> None:
    requests = [completion(f"r{i}", at_s=i * 0.005) for i in range(60)]
    with running_stub(tmp_path, fail_fraction=0.2, reset_fraction=0.2) as stub:
        got = run_window(tmp_path, stub.port, requests)
        faulty = {i for i, t in stub.logged().items() if t["fault"]}
    assert {i for i, s in got.samples.items() if s["error"]} == faulty
    assert 5 < len(faulty) < 40


def test_a_server_that_is_not_there_is_data(tmp_path: Path) -> None:
    lane = [completion(f"l{i}", lane="a") for i in range(1500)]
    began = time.monotonic()
    got = run_window(tmp_path, free_port(), [completion("r"), *lane], concurrency=1)
    assert got.status == 0
    assert {s["error"] for s in got.samples.values()} == {"connect: Connection refused"}
    assert len(got.samples) == 1501
    assert got.load["scrapes_failed"] == got.load["scrapes"] > 0
    assert time.monotonic() - began < 10


def test_a_name_without_address_is_data(tmp_path: Path) -> None:
    got = run_window(tmp_path, 80, [completion("r")], host="no-such-host.invalid")
    assert got.status == 0
    assert got.samples["r"]["error"].startswith("resolve: no-such-host.invalid: ")


def test_a_lane_sends_two_milliseconds_after_its_last_answer(tmp_path: Path) -> None:
    lanes = [
        completion(f"{lane}{i}", lane=lane, **({"start_s": start} if i == 0 else {}))
        for lane, start in (("a", 0.0), ("b", 0.1))
        for i in range(3)
    ]
    with running_stub(tmp_path) as stub:
        got = run_window(tmp_path, stub.port, [*lanes, completion("open", at_s=0.05)])
    for lane, start in (("a", 0.0), ("b", 0.1)):
        samples = [got.samples[f"{lane}{i}"] for i in range(3)]
        assert samples[0]["intended_s"] == pytest.approx(start)
        assert [s["lane"] for s in samples] == [lane] * 3
        for before, after in itertools.pairwise(samples):
            assert after["intended_s"] == pytest.approx(before["done_s"] + 0.002, abs=2e-6)
            assert after["intended_s"] <= after["sent_s"] < before["done_s"] + 0.05
    assert got.samples["open"]["intended_s"] == pytest.approx(0.05)


def test_a_lane_goes_on_after_a_failure(tmp_path: Path) -> None:
    lane = [completion(f"r{i}", lane="a") for i in range(3)]
    with running_stub(tmp_path, hang_fraction=1.0) as stub:
        got = run_window(tmp_path, stub.port, lane, deadline_s=0.3)
    assert [got.samples[f"r{i}"]["error"].partition(":")[0] for i in range(3)] == ["deadline"] * 3
    assert got.samples["r1"]["sent_s"] - got.samples["r1"]["intended_s"] < 0.05


def test_a_limit_of_concurrency_does_not_move_the_intended_time(tmp_path: Path) -> None:
    requests = [completion(f"r{i}", tokens=10) for i in range(3)]
    with running_stub(tmp_path) as stub:
        got = run_window(tmp_path, stub.port, requests, concurrency=1)
    samples = sorted(got.samples.values(), key=lambda s: s["sent_s"])
    assert [s["intended_s"] for s in samples] == [0.0] * 3
    for before, after in itertools.pairwise(samples):
        assert after["sent_s"] >= before["done_s"]


def test_connections_are_open_before_their_time(tmp_path: Path) -> None:
    with running_stub(tmp_path) as stub:
        got = run_window(tmp_path, stub.port, [completion("r", at_s=0.3)])
    sample = got.samples["r"]
    assert 0 < sample["connect_s"] < 0.2
    assert sample["sent_s"] - sample["intended_s"] < 0.05


def test_user_stamps_are_told_apart(tmp_path: Path) -> None:
    with running_stub(tmp_path) as stub:
        got = run_window(tmp_path, stub.port, [completion("r")], stamps="user")
    assert (got.load["stamps"], got.samples["r"]["stamps"]) == ("user", "user")
    assert got.samples["r"]["recv_lag_max_s"] is None
    assert got.load["recv_lag_s"]["p99"] is None


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_it_with_everything_written(
    tmp_path: Path, signum: signal.Signals, status: int
) -> None:
    requests = [completion("done"), completion("flying", tokens=2000), completion("later", at_s=90)]
    with running_stub(tmp_path) as stub:
        spec = write_window(tmp_path, stub.port, requests)
        process = start_window(spec)
        assert process.stdout is not None
        first = process.stdout.readline()
        process.send_signal(signum)
        began = time.monotonic()
        got = finish_window(process, spec)
        assert time.monotonic() - began < 3
    assert '"progress"' in first
    assert got.status == status
    assert sorted(got.samples) == ["done", "flying"]
    assert got.samples["done"]["error"] is None
    assert got.samples["flying"]["error"].startswith("terminated: ")
    assert len(got.samples["flying"]["chunk_s"]) > 10
    assert (got.load["stopped_by"], got.load["unsent"]) == (signum.name, 1)
    assert got.scrapes[-1]["status"] == 200


def test_killed_without_mercy_it_leaves_what_had_ended_and_no_process(tmp_path: Path) -> None:
    requests = [completion("done"), completion("flying", tokens=2000)]
    with running_stub(tmp_path) as stub:
        spec = write_window(tmp_path, stub.port, requests, scrape_every_s=0.1)
        process = start_window(spec, start_new_session=True)
        assert process.stdout is not None
        process.stdout.readline()
        process.kill()
        got = finish_window(process, spec)
        until = time.monotonic() + 5
        while alive_in_group(process.pid) and time.monotonic() < until:
            time.sleep(0.05)
    assert not alive_in_group(process.pid)
    assert list(got.samples) == ["done"]
    assert len(got.scrapes) >= 5


def alive_in_group(group: int) -> bool:
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # ended while we looked
            continue
        if int(fields[2]) == group and fields[0] != "Z":
            return True
    return False


@pytest.mark.parametrize("limit_bytes", [100, 4_000])
def test_a_full_disk_ends_it_early_with_its_own_status(tmp_path: Path, limit_bytes: int) -> None:
    requests = [completion(f"r{i}", tokens=50, at_s=i * 0.1) for i in range(300)]

    def fill() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))

    with running_stub(tmp_path) as stub:
        spec = write_window(tmp_path, stub.port, requests, scrape_every_s=None)
        began = time.monotonic()
        got = finish_window(start_window(spec, preexec_fn=fill), spec)
    assert got.status == 70
    assert got.stderr == "cannot write: OSError: File too large\n"
    assert len(got.samples) == (0 if limit_bytes == 100 else 3)
    assert time.monotonic() - began < 15


def test_more_requests_under_way_than_the_soft_limit_of_open_files(tmp_path: Path) -> None:
    """A saturated server holds thousands; engines start containers with a soft limit of 1024."""
    requests = [completion(f"r{i}", at_s=i * 0.002) for i in range(100)]
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)

    def few() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, most))

    with running_stub(tmp_path, ttft_s=0.5) as stub:
        spec = write_window(tmp_path, stub.port, requests)
        got = finish_window(start_window(spec, preexec_fn=few), spec)
    assert [s["error"] for s in got.samples.values()] == [None] * 100


def test_raw_data_is_never_overwritten(tmp_path: Path) -> None:
    with running_stub(tmp_path) as stub:
        run_window(tmp_path, stub.port, [completion("first")])
        again = run_window(tmp_path, stub.port, [completion("second")])
    assert again.status == 2
    assert again.stderr.startswith("bad spec: out: ")
    assert len(again.stderr.splitlines()) == 1
    assert list(again.samples) == ["first"]


def test_a_bad_spec_is_one_line(tmp_path: Path) -> None:
    got = run_window(tmp_path, 0, [completion("r")])
    assert got.status == 2
    assert got.stderr.startswith("bad spec: spec.json: port: ")
    assert len(got.stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_it_runs_as_in_a_container_without_the_rest_of_the_kit(tmp_path: Path) -> None:
    (tmp_path / "mount").mkdir()
    (tmp_path / "mount" / "inside").symlink_to(INSIDE)
    with running_stub(tmp_path) as stub:
        spec = write_window(tmp_path, stub.port, [completion("r")])
        done = subprocess.run(
            [sys.executable, "-m", "inside.window", str(spec)],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(tmp_path / "mount")},
            capture_output=True,
            text=True,
            check=False,
        )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("step_s", [2.0, -2.0])
def test_a_step_of_the_wall_clock_is_recorded_and_moves_no_time(
    tmp_path: Path, step_s: float
) -> None:
    requests = [completion(f"r{i}", tokens=150, at_s=i * 0.01) for i in range(10)]
    with running_stub(tmp_path) as stub:
        spec = write_window(tmp_path, stub.port, requests)
        status = window.main([str(spec)], SteppingClock(step_s, after_s=0.5))
        got = read_window(spec, Measured(status, [], ""))
        truth = stub.logged()
    assert status == 0
    assert got.load["clock_step_s"] == pytest.approx(step_s, abs=0.001)
    assert got.load["stamps"] == "mixed"
    t0_s = got.load["t0_monotonic_s"]
    for name, sample in got.samples.items():
        read = [t0_s + at for at in sample["chunk_s"]]
        assert read == pytest.approx(truth[name]["chunk_s"], abs=0.02)
