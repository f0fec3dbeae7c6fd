"""`inside.ask`: one control request, one JSON line, whatever the server does."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from stub_process import running_stub

from kit.paths import ROOT


def ask(*words: str) -> tuple[int, dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "kit.inside.ask", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout or done.returncode == 2, done.stderr
    return done.returncode, json.loads(done.stdout) if done.stdout else {}


def test_an_answer_is_parsed_where_it_is_json(tmp_path: Path) -> None:
    with running_stub(tmp_path) as stub:
        status, said = ask("GET", f"{stub.url}/version")
        assert (status, said["status"], said["error"]) == (0, 200, None)
        assert "version" in said["body"]
        _, said = ask("GET", f"{stub.url}/metrics")
        assert "vllm:num_requests_running" in said["body"]


def test_a_body_is_sent_and_an_error_status_is_an_answer(tmp_path: Path) -> None:
    with running_stub(tmp_path) as stub:
        _, said = ask("POST", f"{stub.url}/tokenize", "--json", '{"prompt": "a b"}')
        assert said["body"]["count"] == 2
        status, said = ask("GET", f"{stub.url}/nothing")
        assert (status, said["status"], said["error"]) == (0, 404, None)


@pytest.mark.parametrize(
    ("url", "error"),
    [
        ("http://127.0.0.1:9/x", "ConnectError: "),
        ("http://no-such-host.invalid/", "ConnectError: "),
        ("nonsense", "UnsupportedProtocol: "),
    ],
)
def test_no_answer_is_an_error(url: str, error: str) -> None:
    status, said = ask("GET", url)
    assert (status, said["status"], said["body"]) == (1, None, None)
    assert said["error"].startswith(error)


def test_wrong_arguments_are_refused() -> None:
    assert ask("GET")[0] == 2
    assert ask("GET", "http://x/", "--wait-healthy", "http://x/")[0] == 2


def test_it_waits_until_healthy(tmp_path: Path) -> None:
    with running_stub(tmp_path) as stub:
        status, said = ask("--wait-healthy", f"{stub.url}/health", "--timeout", "5")
    assert (status, said["status"]) == (0, 200)
    assert said["waited_s"] < 2


def test_it_gives_up_in_time_and_says_why(tmp_path: Path) -> None:
    began = time.monotonic()
    status, said = ask("--wait-healthy", "http://127.0.0.1:9/health", "--timeout", "0.5")
    assert status == 1
    assert said["error"].startswith("ConnectError: ")
    assert time.monotonic() - began < 3
    with running_stub(tmp_path) as stub:
        status, said = ask("--wait-healthy", f"{stub.url}/nothing", "--timeout", "0.3")
    assert (status, said["status"]) == (1, 404)
    assert said["error"].startswith("not_healthy: status 404")
