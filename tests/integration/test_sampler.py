"""The pinned sampler on a real process: what it writes is what is read."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kit.errors import NotLocked
from kit.inside import sample_stacks
from kit.inside.probe_stacks import handed
from kit.inside.sample_stacks import Sampled, chosen, role_of, titles_of
from kit.sampler import keep, sampler_user
from kit.sampler_tool import planned_sampler, sampler_program, wheel_of
from kit.stacks import read_phase

SCHEDULER = """
def schedule():
    return sum(i for i in range(200_000))  # 10 ms, beside 2 ms of sleep: most samples are of it
"""
CORE = """
import time
from vllm.v1.core.sched.scheduler import schedule
print("ready", flush=True)
while True:
    schedule()
    time.sleep(0.002)
"""


@pytest.fixture
def core(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Run a process that is on a CPU in a scheduler's method and sleeps in between."""
    home = tmp_path / "site/vllm/v1/core/sched"
    home.mkdir(parents=True)
    (home / "scheduler.py").write_text(SCHEDULER, "utf-8")
    script = tmp_path / "site/EngineCore.py"
    script.write_text(CORE, "utf-8")
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        yield child
        child.kill()


def sample(pid: int, out: Path, seconds: float) -> dict[str, object]:
    out.mkdir()
    program = sampler_program(planned_sampler(), print)
    child = Sampled(str(program), 100, out, pid, "engine-core", "EngineCore")
    child.wait_started(sample_stacks.ATTACH_S)
    time.sleep(seconds)
    child.ask_to_end()
    return child.report(sample_stacks.END_S)


def test_the_scheduler_of_a_real_process_is_found(
    core: subprocess.Popen[str], tmp_path: Path
) -> None:
    told = sample(core.pid, tmp_path / "stacks", 2.0)
    if told["file"] is None:
        pytest.skip(f"this host lets no process be sampled: {told['said']}")
    content = (tmp_path / "stacks" / str(told["file"])).read_bytes()
    (tmp_path / "stacks/done.json").write_text("{}", "utf-8")
    given = handed(tmp_path / "stacks", "done.json", 1)
    assert given is not None
    out = tmp_path / "phase"
    out.mkdir()
    keep({"processes": [told], "files": given["files"]}, None, "server", out, rate_hz=100)
    found = read_phase(out)
    process = found.engines["server"].core
    assert process is not None
    assert process.file is not None
    assert gzip.decompress((out / process.file).read_bytes()) == content
    folded = found.files[process.file]
    assert process.ticks is not None
    assert process.window_s == pytest.approx(2.0, abs=1.0)
    assert 0 < folded.scheduling["schedule"] <= folded.samples <= process.ticks
    assert folded.skipped == 0
    assert found.problem is None


def test_a_process_that_is_gone_is_told_in_the_sampler_s_words(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        gone.wait()
    told = sample(gone.pid, tmp_path / "stacks", 0.0)
    assert told["file"] is None
    assert told["window_s"] is None
    out = tmp_path / "phase"
    out.mkdir()
    keep({"processes": [told]}, None, "server", out, rate_hz=100)
    assert read_phase(out).problem


@pytest.mark.parametrize(
    ("text", "user"), [(None, ""), ("0\n", ""), ("1\n", "0:0"), ("2\n", "0:0"), ("?", "")]
)
def test_root_is_taken_only_where_the_host_asks_for_it(
    tmp_path: Path, text: str | None, user: str
) -> None:
    if text is not None:
        (tmp_path / "scope").write_text(text, "ascii")
    assert sampler_user(tmp_path / "scope") == user


def test_the_engine_s_own_processes_are_chosen() -> None:
    titles = {1: "vllm serve", 7: "VLLM::EngineCore", 8: "VLLM::Worker_TP0", 9: "python x.py"}
    assert chosen(titles) == {7: "engine-core", 8: "worker"}
    assert chosen({1: "python -m inside.stub"}) == {1: "other"}
    assert role_of("NetworkWorkers are none") == "other"


def test_processes_of_the_sampler_s_own_container_are_left_out() -> None:
    assert os.getpid() not in titles_of(Path("/proc"), os.getpid())


def test_a_sampler_that_the_lock_does_not_name_is_never_run() -> None:
    other = planned_sampler().model_copy(update={"wheel_sha256": "0" * 64})
    with pytest.raises(NotLocked, match=r"not in docker/sampler\.lock"):
        sampler_program(other, print)


def test_the_program_is_the_one_of_the_pinned_wheel(tmp_path: Path) -> None:
    sampler = planned_sampler()
    assert wheel_of(sampler).sha256 == sampler.wheel_sha256
    program = sampler_program(sampler, print)
    content = program.read_bytes()
    program.write_bytes(b"changed")
    assert sampler_program(sampler, print).read_bytes() == content
