"""Metrics beside the load: before, during, after; nothing dropped but what is not the engine's."""

from __future__ import annotations

import gzip
import itertools
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from stub_process import completion, run_window, running_stub

from kit.inside.scrape import active_requests, keep_engine_lines, read_scrapes
from kit.measure import parse_metrics


def total(text: str, name: str) -> float:
    return sum(value for (series, _), value in parse_metrics(text).items() if series == name)


def test_the_first_scrape_is_before_and_the_last_after_the_load(tmp_path: Path) -> None:
    requests = [completion(f"r{i}", tokens=20, at_s=i * 0.1) for i in range(8)]
    with running_stub(tmp_path) as stub:
        got = run_window(tmp_path, stub.port, requests, scrape_every_s=0.1)
    first, *during, last = got.scrapes
    assert first["t_s"] < 0 <= during[0]["t_s"]
    assert last["t_s"] >= max(s["done_s"] for s in got.samples.values())
    assert total(first["text"], "vllm:request_success_total") == 0
    assert total(last["text"], "vllm:request_success_total") == 8
    assert total(last["text"], "vllm:generation_tokens_total") == 160
    assert total(last["text"], "vllm:num_requests_running") == 0
    assert max(total(s["text"], "vllm:num_requests_running") for s in during) >= 1
    assert got.load["scrapes"] == len(got.scrapes)
    assert got.load["idle"] is True
    times = [s["t_s"] for s in got.scrapes]
    assert times == sorted(times)
    assert 7 <= len(during) <= 14
    for number, scrape in enumerate(during):
        assert scrape["t_s"] >= number * 0.1 - 0.001


def test_without_a_period_there_are_two_scrapes(tmp_path: Path) -> None:
    with running_stub(tmp_path) as stub:
        got = run_window(tmp_path, stub.port, [completion("r")], scrape_every_s=None)
    assert [s["t_s"] < 0 for s in got.scrapes] == [True, False]


def test_only_the_engines_lines_are_kept_and_a_real_parser_reads_them(tmp_path: Path) -> None:
    with running_stub(tmp_path) as stub:
        got = run_window(tmp_path, stub.port, [completion("r")])
    text = got.scrapes[-1]["text"]
    lines = text.splitlines()
    assert all(line.startswith(("vllm:", "# TYPE vllm:")) for line in lines)
    kinds = {f.name: f.type for f in text_string_to_metric_families(text)}
    assert kinds["vllm:prefix_cache_hits"] == "counter"
    assert kinds["vllm:kv_cache_usage_perc"] == "gauge"


def test_it_waits_for_an_engine_that_is_still_busy_but_not_forever(tmp_path: Path) -> None:
    with running_stub(tmp_path, hang_fraction=1.0) as stub:
        got = run_window(tmp_path, stub.port, [completion("r")], deadline_s=0.3)
        assert got.load["idle"] is True  # the stub notices that the client has gone
    assert got.load["idle_wait_s"] < 5


def test_an_engine_that_stays_busy_is_said_so(tmp_path: Path) -> None:
    busy = completion("busy", tokens=900)["body"]
    with running_stub(tmp_path) as stub:
        url = f"{stub.url}/v1/completions"
        with httpx.stream("POST", url, json=busy, trust_env=False):
            got = run_window(tmp_path, stub.port, [completion("r")])
    assert got.load["idle"] is False
    assert got.load["idle_wait_s"] == pytest.approx(5, abs=0.5)


def test_a_server_without_metrics_is_recorded_not_fatal(tmp_path: Path) -> None:
    with running_stub(tmp_path) as stub:
        got = run_window(tmp_path, stub.port, [completion("r")], metrics_path="/nothing")
    assert got.status == 0
    assert {s["status"] for s in got.scrapes} == {404}
    assert got.load["scrapes_failed"] == len(got.scrapes)
    assert got.load["idle"] is None
    assert got.samples["r"]["error"] is None


def test_a_server_that_dies_leaves_scrapes_with_the_reason(tmp_path: Path) -> None:
    requests = [completion("a"), completion("b", at_s=0.5)]
    with running_stub(tmp_path, die_after_requests=1) as stub:
        got = run_window(tmp_path, stub.port, requests, scrape_every_s=0.1)
    assert got.status == 0
    assert got.scrapes[0]["status"] == 200
    assert got.scrapes[-1]["status"] is None
    assert got.scrapes[-1]["error"].startswith("ConnectError: ")
    assert got.load["idle_wait_s"] < 1


def test_a_reset_of_counters_is_seen_in_the_scrapes(tmp_path: Path) -> None:
    requests = [completion(f"r{i}", at_s=i * 0.2) for i in range(6)]
    with running_stub(tmp_path, counters_reset_after=4) as stub:
        got = run_window(tmp_path, stub.port, requests, scrape_every_s=0.1)
    prompt = [total(s["text"], "vllm:prompt_tokens_total") for s in got.scrapes]
    assert any(b < a for a, b in itertools.pairwise(prompt))


def test_engines_behind_the_entry_are_kept_in_files_of_their_own(tmp_path: Path) -> None:
    """Two stubs: one is asked, the other stands behind it and is busy when the load has ended."""
    folder = tmp_path / "behind"
    folder.mkdir()
    busy = completion("busy", tokens=100)["body"]
    with running_stub(tmp_path) as entry, running_stub(folder) as behind:
        legs = {"consumer": f"127.0.0.1:{behind.port}"}
        with httpx.stream("POST", f"{behind.url}/v1/completions", json=busy, trust_env=False):
            got = run_window(tmp_path, entry.port, [completion("r", tokens=7)], legs=legs)
    scrapes = list(read_scrapes(tmp_path / "out/metrics-consumer.jsonl.gz"))
    assert total(got.scrapes[-1]["text"], "vllm:generation_tokens_total") == 7
    assert total(scrapes[0]["text"], "vllm:num_requests_running") == 1
    assert total(scrapes[-1]["text"], "vllm:num_requests_running") == 0  # it was waited for
    assert total(scrapes[-1]["text"], "vllm:generation_tokens_total") == 100
    assert got.load["idle"] is True
    assert got.load["scrapes"] == len(got.scrapes) + len(scrapes)
    assert [s["t_s"] < 0 for s in scrapes][:2] == [True, False]


@pytest.mark.parametrize(
    ("legs", "says"),
    [
        ({"a/b": "host:1"}, "'a/b' is no name of a leg"),
        ({"consumer": "host"}, "consumer: host:port is needed"),
        (["consumer"], "an object is needed"),
    ],
)
def test_a_leg_that_cannot_be_asked_is_refused(tmp_path: Path, legs: object, says: str) -> None:
    got = run_window(tmp_path, 9, [completion("r")], legs=legs)
    assert got.status == 2
    assert says in got.stderr


def test_a_file_cut_short_is_read_up_to_there(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl.gz"
    whole = gzip.compress(b'{"n": 1}\n') + gzip.compress(b'{"n": 2}\n')
    path.write_bytes(whole + gzip.compress(b'{"n": 3}\n')[:12])
    assert [scrape["n"] for scrape in read_scrapes(path)] == [1, 2]


def test_active_requests_are_summed_over_engines_or_unknown() -> None:
    text = (
        'vllm:num_requests_running{engine="0"} 2.0\nvllm:num_requests_running{engine="1"} 1.0\n'
        'vllm:num_requests_waiting{engine="0"} 4\n'
    )
    assert active_requests(text) == 7
    assert active_requests("vllm:other 3\n") is None
    assert keep_engine_lines("# HELP vllm:x y\n# TYPE a b\na 1\n") == ""
    proxy = "# TYPE kit_proxy_aborted_total counter\nkit_proxy_aborted_total 0\n"
    assert keep_engine_lines(proxy) == proxy
