"""Whole runs in real containers with the stub in vLLM's place: planted effects and faults."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import docker
import pytest
from commands import (
    CACHED,
    checkout,
    objects_of_runs,
    only_manifest,
    quietly,
    run_kit,
    service_of,
    start_kit,
    wait_for,
)
from small_disk import needs_root, small_disk

from kit.errors import DiskFull, ServerDied, ServerLost, ServerNotReady
from kit.paths import ROOT
from kit.secret import find_private, private_names

RUN = ("run", "exp1_prefix_cache", "--platform", "cpu", "--json")

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.mark.timeout(900)
def test_planted_effect_is_supported_and_marked_as_stub(
    tmp_path: Path, stub_file: Callable[..., str]
) -> None:
    stub = stub_file(**CACHED)
    ran, where = quietly(
        lambda folder: run_kit(*RUN, "--out", str(folder), "--stub", stub), tmp_path
    )
    assert ran.code == 0, ran.stderr
    assert ran.result["verdict"]["word"] == "supported"
    manifest, run = only_manifest(where)
    assert manifest.plan.engine == "stub"
    assert "stub_engine" in [n.code for n in manifest.notices]
    assert len(manifest.counted) == 12
    assert "stub stood in for vLLM" in (run / "report.en.md").read_text("utf-8")
    text = (run / "manifest.json").read_text("utf-8")
    assert find_private(text, {*private_names(), str(ROOT)}) == []


def test_prefix_that_changes_cannot_be_judged(
    tmp_path: Path, stub_file: Callable[..., str]
) -> None:
    words = (*RUN, "--quick", "--variant", "changing-prefix", "--stub", stub_file(**CACHED))
    ran, _ = quietly(lambda folder: run_kit(*words, "--out", str(folder)), tmp_path)
    assert ran.code == 0, ran.stderr
    assert ran.result["verdict"]["word"] == "inconclusive"
    assert "not seen to act" in ran.result["verdict"]["reason"]


def test_failed_requests_make_the_run_invalid(
    tmp_path: Path, stub_file: Callable[..., str]
) -> None:
    ran = run_kit(
        *RUN,
        "--quick",
        "--out",
        str(tmp_path / "runs"),
        "--stub",
        stub_file(**CACHED, fail_fraction=0.5),
    )
    assert ran.code == 4, ran.stderr
    assert ran.result["verdict"]["word"] == "invalid"
    assert "requests failed" in ran.result["verdict"]["reason"]


@pytest.mark.parametrize(
    ("planted", "words", "error", "says"),
    [
        ({"die_at_start_s": 0.2, "die_exit_code": 7}, (), ServerDied, "exit code 7"),
        ({"never_ready": True}, ("--ready-timeout", "4"), ServerNotReady, "not healthy after 4 s"),
        ({"die_after_requests": 10}, (), ServerLost, "died under load"),
        ({"die_after_requests": 1, "die_lingers_s": 3.0}, (), ServerLost, "died under load"),
    ],
    ids=["dies at start", "never ready", "dies under load", "its engine dies in the warm-up"],
)
def test_server_faults_end_in_their_own_error(
    tmp_path: Path,
    stub_file: Callable[..., str],
    planted: dict[str, object],
    words: tuple[str, ...],
    error: type[Exception],
    says: str,
) -> None:
    ran = run_kit(
        *RUN,
        "--quick",
        *words,
        "--out",
        str(tmp_path / "runs"),
        "--stub",
        stub_file(**CACHED, **planted),
    )
    assert ran.code == error.exit_code  # type: ignore[attr-defined]
    assert says in ran.stderr
    assert "Traceback" not in ran.stderr
    manifest, _ = only_manifest(tmp_path)
    assert manifest.status == "failed"
    assert manifest.failure is not None
    assert manifest.failure.error == error.__name__


def test_a_split_server_whose_engine_dies_in_the_warm_up_is_lost_and_not_judged(
    tmp_path: Path, stub_file: Callable[..., str]
) -> None:
    """A TP server that dies at its first request answers and refuses for a second before its end"""
    words = ("run", "adv2_tp_scaling", "--platform", "cpu", "--quick", "--json")
    stub = stub_file(**CACHED, die_after_requests=1, die_lingers_s=3.0)
    ran = run_kit(*words, "--out", str(tmp_path / "runs"), "--stub", stub)
    assert ran.code == ServerLost.exit_code, ran.stderr
    assert "`server` died under load" in ran.stderr
    manifest, run = only_manifest(tmp_path)
    assert (manifest.status, manifest.verdict) == ("failed", None)
    assert not list(run.glob("replicates/*/measure"))


def test_each_rank_s_trace_is_kept_after_the_measured_phase(
    tmp_path: Path, stub_file: Callable[..., str]
) -> None:
    words = ("run", "adv2_tp_scaling", "--platform", "cpu", "--quick", "--variant", "profile")
    stub = stub_file(**CACHED)
    ran = run_kit(*words, "--json", "--out", str(tmp_path / "runs"), "--stub", stub)
    assert ran.stdout.startswith("{"), ran.stderr
    manifest, run = only_manifest(tmp_path)
    by_role = {r.role: r for r in manifest.replicates}
    for role, ranks in (("baseline", 1), ("candidate", 2)):
        folder = run / by_role[role].folder / "profile"
        assert len(list(folder.glob("trace-server-rank*.json.gz"))) == ranks
    values = {x.name: x.value for x in by_role["candidate"].readings}
    assert values["rank1_communication_share"] == pytest.approx(0.2, abs=1e-6)


STAGES = {
    "plan": "plan.json",
    "starting": "00-*/compose.json",
    "ready": "00-*/server_info.json",
    "under load": "00-*/measure/window.json",
    "second replicate": "01-*/events.jsonl",
}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM], ids=["INT", "TERM"])
def test_a_signal_ends_a_run_cleanly_in_every_stage(
    tmp_path: Path, stub_file: Callable[..., str], stage: str, signum: signal.Signals
) -> None:
    runs = tmp_path / "runs"
    child = start_kit(*RUN, "--out", str(runs), "--stub", stub_file(**CACHED))
    wait_for(runs, STAGES[stage])
    child.send_signal(signum)
    _, stderr = child.communicate(timeout=90)
    assert child.returncode == 128 + signum, stderr
    assert "Traceback" not in stderr
    manifest, run = only_manifest(runs)
    assert manifest.status == "interrupted"
    me = os.geteuid()
    assert {p.stat().st_uid for p in run.rglob("*")} == {me}


def test_killed_run_is_swept_by_the_next_and_nothing_else_is(
    tmp_path: Path, stub_file: Callable[..., str], client: docker.DockerClient
) -> None:
    runs = tmp_path / "runs"
    witness = client.networks.create("kit-test-witness", labels={"not.kit.run": "x"})
    try:
        child = start_kit(*RUN, "--out", str(runs), "--stub", stub_file(**CACHED))
        wait_for(runs, STAGES["under load"])
        child.kill()
        child.communicate()
        assert objects_of_runs(client, runs)
        swept = run_kit("sweep")
        assert swept.code == 0, swept.stderr
        manifest, _ = only_manifest(runs)
        assert manifest.run_id in swept.stderr
        assert "server" in swept.stderr
        assert manifest.status == "interrupted"
        assert objects_of_runs(client, runs) == []
        witness.reload()
    finally:
        witness.remove()


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGINT], ids=["KILL", "INT"])
def test_an_interrupted_run_goes_on_after_its_last_whole_replicate(
    tmp_path: Path, stub_file: Callable[..., str], signum: signal.Signals
) -> None:
    runs, again = tmp_path / "runs", ("--json",)
    child = start_kit(*RUN, "--quick", "--out", str(runs), "--stub", stub_file(**CACHED))
    wait_for(runs, STAGES["second replicate"])
    child.send_signal(signum)
    _, stderr = child.communicate(timeout=90)
    halted, run = only_manifest(runs)
    if signum == signal.SIGINT:
        assert f"`nox -s resume -- {run}` goes on" in stderr
    first = {p: p.stat().st_mtime_ns for p in (run / "replicates").glob("00-*/**/*")}
    ran = run_kit("resume", str(run), *again)
    assert ran.code in (0, 4), ran.stderr  # 4: other load of the machine
    whole, _ = only_manifest(runs)
    assert whole.status == "complete"
    assert whole.run_id == halted.run_id
    assert [r.after for r in whole.resumed] == [1]
    assert "resumed" in [n.code for n in whole.notices]
    assert whole.replicates[0].facts == halted.replicates[0].facts
    assert {p: p.stat().st_mtime_ns for p in first} == first
    assert [r.status for r in whole.replicates] == ["complete"] * 2
    assert list((run / "interrupted" / "1").glob("01-*/events.jsonl"))
    assert run_kit("analyse", str(run)).code == 0
    refused = run_kit("resume", str(run), *again)
    assert refused.code == 2
    assert "the run is complete" in refused.stderr


ODD = "a$b${HOME}c $$ 'x' \"y\" \\ 1e3 é\t\N{SNOWMAN}"
STRAY = {
    "KIT_IMAGE": "nothing:here",
    "KIT_ACCEL": "cuda-cdi",
    "COMPOSE_PROFILES": "other",
    "COMPOSE_PROJECT_NAME": "other",
    "COMPOSE_FILE": "other.yml",
    "DOCKER_DEFAULT_PLATFORM": "linux/arm64",
    "VLLM_PORT": "1",
    "VLLM_LOGGING_LEVEL": "NONSENSE",
    "PYTHONPATH": "/nowhere",
    "PYTHONSTARTUP": "/nowhere.py",
}
OVERRIDE = "services: {server: {command: [nothing], labels: {stray: '1'}}}\n"


def test_arguments_arrive_byte_for_byte_whatever_surrounds_them(
    tmp_path: Path, stub_file: Callable[..., str], client: docker.DockerClient
) -> None:
    """Stray files and variables change nothing and are named; `$` is no variable.

    By a checkout of its own, whose compose files have overrides and variables beside them.
    """
    root = checkout(tmp_path / "clone")
    for folder in (root, root / "compose"):
        (folder / "docker-compose.override.yml").write_text(OVERRIDE, "utf-8")
        (folder / ".env").write_text("KIT_IMAGE=nothing:here\nKIT_MEMORY=1m\n", "utf-8")
    config = tmp_path / "docker"
    config.mkdir()
    proxies = {"default": {"httpProxy": "http://me:canary@127.0.0.1:9"}}
    (config / "config.json").write_text(json.dumps({"proxies": proxies}), "utf-8")
    told = [{"when": {}, "set": {"scheduler_config.note": ODD}}]
    runs = tmp_path / "runs"
    words = (*RUN, "--quick", "--out", str(runs), "--stub", stub_file(**CACHED, info_when=told))
    child = start_kit(*words, root=root, DOCKER_CONFIG=str(config), **STRAY)
    wait_for(runs, STAGES["under load"])
    found = [service_of(client, runs, name).attrs["Config"] for name in ("server", "client")]
    _, stderr = child.communicate(timeout=120)
    assert child.returncode in (0, 4), stderr  # 4: a busy machine, which is no matter here
    _, run = only_manifest(runs)
    info = json.loads((run / "replicates/00-pair0-baseline/server_info.json").read_text("utf-8"))
    assert info["vllm_config"]["scheduler_config"]["note"] == ODD
    for one in found:
        text = json.dumps(one)
        assert "canary" not in text
        assert "stray" not in text
        values = {pair.partition("=")[0]: pair for pair in one["Env"]}
        assert "VLLM_PORT" not in values
        assert "VLLM_LOGGING_LEVEL" not in values
        assert "nowhere" not in values.get("PYTHONPATH", "")
    (line,) = [line for line in stderr.splitlines() if line.startswith("ignored, ")]
    for name in (*(n for n in STRAY if not n.startswith("PYTHON")), "docker-compose.override.yml"):
        assert name in line


@pytest.mark.full
def test_values_arrive_byte_for_byte_in_a_reproduction(
    tmp_path: Path, stub_file: Callable[..., str]
) -> None:
    told = [{"when": {}, "set": {"scheduler_config.note": ODD}}]
    first, again = tmp_path / "first", tmp_path / "again"
    words = (*RUN, "--quick", "--out", str(first), "--stub", stub_file(**CACHED, info_when=told))
    ran = run_kit(*words)
    assert ran.code in (0, 4), ran.stderr
    _, original = only_manifest(first)
    replayed = run_kit("reproduce", str(original), "--quick", "--json", "--out", str(again))
    assert "Traceback" not in replayed.stderr
    manifest, run = only_manifest(again)
    assert manifest.status == "complete", replayed.stderr
    for each in (original, run):
        for info in each.glob("replicates/*/server_info.json"):
            config = json.loads(info.read_text("utf-8"))["vllm_config"]
            assert config["scheduler_config"]["note"] == ODD


def test_unwritable_output_is_refused_before_anything_starts(tmp_path: Path) -> None:
    target = tmp_path / "file"
    target.write_text("", "utf-8")
    ran = run_kit(*RUN, "--quick", "--out", str(target / "runs"))
    assert ran.code == 71
    assert ran.stderr.count("error:") == 1


@needs_root
def test_too_little_space_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 64) as disk:
        ran = run_kit(*RUN, "--quick", "--out", str(disk / "runs"))
    assert ran.code == DiskFull.exit_code
    assert "MiB are free" in ran.stderr
