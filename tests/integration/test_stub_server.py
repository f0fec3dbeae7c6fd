"""The stub as a process: it stands in for `vllm serve`, dies as planned and ends when told."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from stub_process import completion, running_stub

from kit.paths import ROOT


def post(url: str, **body: Any) -> httpx.Response:
    request = completion("x", body=body)
    return httpx.post(f"{url}/v1/completions", json=request["body"], trust_env=False)


def get(url: str) -> httpx.Response:
    return httpx.get(url, trust_env=False)


def test_it_answers_what_the_kit_asks_of_vllm(tmp_path: Path) -> None:
    with running_stub(tmp_path, model="m") as stub:
        assert get(f"{stub.url}/health").status_code == 200
        assert "version" in get(f"{stub.url}/version").json()
        assert get(f"{stub.url}/v1/models").json()["data"][0]["id"] == "m"
        info = get(f"{stub.url}/server_info?config_format=json").json()
        assert set(info) == {"vllm_config", "vllm_env", "system_env"}
        answer = httpx.post(f"{stub.url}/tokenize", json={"prompt": "a b c"}, trust_env=False)
        assert answer.json()["count"] == 3
        assert get(f"{stub.url}/nothing").status_code == 404
        bad = httpx.post(f"{stub.url}/v1/completions", content=b"{", trust_env=False)
        assert (bad.status_code, bad.json()["error"]["code"]) == (400, 400)


def test_a_kept_connection_serves_several_requests(tmp_path: Path) -> None:
    with running_stub(tmp_path) as stub, httpx.Client(trust_env=False) as client:
        for _ in range(3):
            body = completion("x", body={"stream": False})["body"]
            answer = client.post(f"{stub.url}/v1/completions", json=body)
            assert answer.json()["usage"]["completion_tokens"] == 5


def test_metrics_follow_what_was_served(tmp_path: Path) -> None:
    with running_stub(tmp_path) as stub:
        for _ in range(3):
            assert post(stub.url, prompt=" ".join("abcdefghijklmnopqrst")).status_code == 200
        text = get(f"{stub.url}/metrics").text
    seen = {
        (s.name, s.labels.get("source") or s.labels.get("finished_reason")): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
    }
    assert seen["vllm:request_success_total", "length"] == 3
    assert seen["vllm:prompt_tokens_total", None] == 60
    assert seen["vllm:generation_tokens_total", None] == 15
    assert seen["vllm:prefix_cache_hits_total", None] == 32
    assert seen["vllm:prompt_tokens_by_source_total", "local_cache_hit"] == 32
    assert seen["vllm:num_requests_running", None] == 0
    assert seen["vllm:cache_config_info", None] == 1


def test_a_reset_cache_is_cold_again(tmp_path: Path) -> None:
    prompt = " ".join("abcdefghijklmnopqrst")
    with running_stub(tmp_path) as stub:
        for _ in range(2):
            post(stub.url, prompt=prompt)
            httpx.post(f"{stub.url}/reset_prefix_cache", trust_env=False)
        text = get(f"{stub.url}/metrics").text
    assert 'vllm:prefix_cache_hits_total{engine="0",model_name="stub"} 0.0' in text


@pytest.mark.parametrize(("flag", "cached"), [("--no-enable-prefix-caching", 0), ("--x", 16)])
def test_it_takes_vllms_command_line(tmp_path: Path, flag: str, cached: int) -> None:
    arguments = ["--port", "0", flag, "--max-num-seqs", "4", "--unknown-thing", "7"]
    with running_stub(tmp_path, *arguments) as stub:
        for _ in range(2):
            post(stub.url, prompt=" ".join("abcdefghijklmnopqrst"))
        info = get(f"{stub.url}/server_info?config_format=json").json()["vllm_config"]
    assert info["cache_config"]["enable_prefix_caching"] is (cached > 0)
    assert info["scheduler_config"]["max_num_seqs"] == 4
    assert info["model_config"]["model"] == "/model"
    logged = [json.loads(line) for line in stub.times.read_text().splitlines()]
    assert [record["cached_tokens"] for record in logged] == [0, cached]


def test_no_more_run_at_once_than_allowed(tmp_path: Path) -> None:
    with running_stub(tmp_path, max_num_seqs=1, ttft_s=0.3) as stub:
        began = time.monotonic()
        with httpx.Client(trust_env=False) as client:
            body = completion("x", tokens=1)["body"]
            first = client.stream("POST", f"{stub.url}/v1/completions", json=body)
            with first as one:
                second = post(stub.url, max_tokens=1)
                assert one.status_code == second.status_code == 200
        assert time.monotonic() - began >= 0.6


def test_a_client_that_goes_away_frees_its_place(tmp_path: Path) -> None:
    with running_stub(tmp_path) as stub:
        body = completion("x", tokens=5000)["body"]
        with httpx.stream("POST", f"{stub.url}/v1/completions", json=body, trust_env=False):
            running = get(f"{stub.url}/metrics").text
        time.sleep(0.1)
        after = get(f"{stub.url}/metrics").text
    labels = '{engine="0",model_name="stub"}'
    assert f"vllm:num_requests_running{labels} 1.0" in running
    assert f"vllm:num_requests_running{labels} 0.0" in after
    assert 'finished_reason="abort"} 1.0' in after


def test_sigterm_ends_it_at_once(tmp_path: Path) -> None:
    with running_stub(tmp_path) as stub:
        body = completion("x", tokens=5000)["body"]
        with httpx.stream("POST", f"{stub.url}/v1/completions", json=body, trust_env=False):
            began = time.monotonic()
            stub.process.send_signal(signal.SIGTERM)
            assert stub.process.wait(5) == 0
            assert time.monotonic() - began < 0.5  # 0.2 s, with room for a busy machine


def test_it_can_ignore_sigterm(tmp_path: Path) -> None:
    with running_stub(tmp_path, ignore_sigterm=True) as stub:
        stub.process.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            stub.process.wait(0.3)


def test_it_dies_at_start_as_planted(tmp_path: Path) -> None:
    with running_stub(tmp_path, die_at_start_s=0.1, die_exit_code=7) as stub:
        assert stub.process.wait(5) == 7
        assert stub.port == 0


def test_it_never_gets_ready_as_planted_and_still_ends(tmp_path: Path) -> None:
    (tmp_path / "stub.json").write_text('{"port": 18999, "never_ready": true}')
    process = start(tmp_path / "stub.json")
    with pytest.raises(subprocess.TimeoutExpired):
        process.communicate(timeout=0.7)
    process.terminate()
    assert process.communicate(timeout=5) == ("", "")
    assert process.returncode == 0


def test_it_is_ready_late_as_planted(tmp_path: Path) -> None:
    began = time.monotonic()
    with running_stub(tmp_path, ready_after_s=0.5):
        assert time.monotonic() - began >= 0.5


@pytest.mark.parametrize("text", ["{", '{"nope": 1}', "[]"])
def test_a_bad_config_is_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "stub.json").write_text(text)
    process = start(tmp_path / "stub.json")
    stdout, stderr = process.communicate(timeout=10)
    assert (process.returncode, stdout) == (2, "")
    assert stderr.startswith("stub: ")
    assert len(stderr.splitlines()) == 1


def start(config: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "kit.inside.stub", str(config)],
        cwd=ROOT,
        env=dict(os.environ),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
