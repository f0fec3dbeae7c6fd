"""Every command that README shows is run by a test, and runs."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import time
from pathlib import Path

import pytest
from commands import Ran, run_nox

from kit import engine
from kit.paths import ROOT

TESTED_ELSEWHERE = {
    "python3 -m venv .venv && .venv/bin/pip install -qq nox && .venv/bin/nox -s engine "
    "exp1_prefix_cache": "the parts here and in test_run_vllm; .ci/run has the first half",
    ".venv/bin/nox -s tests": ".ci/run",
    ".venv/bin/nox -s reproduce -- manifests/exp1_prefix_cache/"
    "v0.32.0-cpu--smollm2-135m-instruct--cpu.json": "test_reproduce, one pair of it",
}


def commands(page: str = "README.md") -> list[str]:
    """Return the lines of a page's code blocks."""
    blocks = re.findall(r"^```\n(.*?)^```", (ROOT / page).read_text("utf-8"), re.M | re.S)
    return [line for block in blocks for line in block.splitlines() if line.strip()]


def by_hand() -> list[str]:
    return [line for line in commands() if line not in TESTED_ELSEWHERE]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def shell(line: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a line as typed, with the docker program that the kit found first in the PATH."""
    path = f"{Path(engine.cli_program()).parent}:{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "-c", line],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "PATH": path, **environment},
        check=False,
    )


@pytest.mark.timeout(400)
def test_the_stack_by_hand(built: Ran) -> None:
    """The lines under "By hand" in order, on a free port, with the venv's nox replaced by ours."""
    port = str(free_port())
    lines = by_hand()[:4]
    assert [line.split()[0] for line in lines] == [".venv/bin/nox", "docker", "curl", "docker"]
    up, curl, down = lines[1:]
    try:
        begin = time.monotonic()
        started = shell(up, KIT_PORT=port)
        assert started.returncode == 0, started.stderr
        assert time.monotonic() - begin < 180
        answer = shell(curl.replace("8000", port))
        assert "smollm2-135m-instruct" in answer.stdout
        listening = shell("docker compose -f compose/single.yml port server 8000", KIT_PORT=port)
        assert listening.stdout.strip() == f"127.0.0.1:{port}"
        taken = shell(f"KIT_PORT={port} docker compose -p other -f compose/single.yml up --wait")
        assert taken.returncode != 0
        shell("docker compose -p other -f compose/single.yml down")
    finally:
        stopped = shell(down, KIT_PORT=port)
    assert stopped.returncode == 0, stopped.stderr
    left = shell("docker ps -aq --filter label=com.docker.compose.project=vllm-kit-single")
    assert left.stdout == ""


@pytest.mark.timeout(900)
def test_prefill_and_decode_by_hand(built: Ran) -> None:
    """The lines after them: an answer, the consumer's count of moved bytes, and nothing left."""
    port = str(free_port())
    lines = by_hand()[4:]
    assert [line.split()[0] for line in lines] == ["docker", "curl", "curl", "docker"]
    up, curl, count, down = lines
    try:
        started = shell(up, KIT_PORT=port)
        assert started.returncode == 0, started.stderr
        answer = shell(curl.replace(":8000", f":{port}"))
        assert json.loads(answer.stdout)["usage"]["completion_tokens"] == 8
        counted = shell(count.replace(":8000", f":{port}")).stdout.splitlines()
        assert sum(float(line.split()[-1]) for line in counted) > 0
    finally:
        stopped = shell(down, KIT_PORT=port)
    assert stopped.returncode == 0, stopped.stderr
    for kind in ("ps -aq", "network ls -q", "volume ls -q"):
        left = shell(f"docker {kind} --filter label=com.docker.compose.project=vllm-kit-pd")
        assert left.stdout == "", kind


def test_engine_session_finds_a_working_engine_at_once(built: Ran) -> None:
    ran = run_nox("-s", "engine")
    assert ran.code == 0, ran.stderr
    assert ran.wall_s < 30


@pytest.mark.parametrize("session", ["list", "images", "models"])
def test_tables_of_the_menu(built: Ran, session: str) -> None:
    ran = run_nox("-s", session)
    assert ran.code == 0, ran.stderr
    assert len(ran.stdout.splitlines()) >= 2


def test_the_tutorial_step_by_step(built: Ran) -> None:
    """Each line as typed, with our nox; the reproduction itself is in test_reproduce."""
    lines = commands("docs/tutorial.md")
    assert len(lines) == 8
    folder = ROOT / "runs" / "tutorial"
    shutil.rmtree(folder, ignore_errors=True)
    said = {}
    try:
        for line in lines:
            program, *words = line.split()
            assert program == ".venv/bin/nox"
            if not line.endswith("--quick"):
                ran = run_nox(*words)
                assert ran.code == 0, ran.stderr
                said[line] = ran.stdout + ran.stderr
        assert (folder / "report.en.html").is_file()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    assert "supported: the data show a decrease" in said[lines[0]]
    assert "equal to the manifest" in said[lines[3]]
    assert "NOT equal" not in said[lines[3]]
