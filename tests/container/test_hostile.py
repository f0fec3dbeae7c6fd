"""A run in a hostile world, with the stub in vLLM's place: what ends, and what is left of it.

After every fault the manifest says what happened, every sample written up to it can be read, the
run has left nothing on the engine, and what belongs to others is as it was.
"""

from __future__ import annotations

import gzip
import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import docker
import pytest
from commands import (
    CACHED,
    kit_words,
    objects_of_runs,
    only_manifest,
    run_kit,
    service_of,
    wait_for,
)

from kit.errors import RunFolderLost
from kit.manifest import load_manifest
from kit.paths import ROOT

RUN = ("run", "exp1_prefix_cache", "--platform", "cpu", "--json", "--quick")
UNDER_LOAD = "00-*/measure/window.json"
DONE = (0, 4)  # 4: the machine's other load made the run invalid, which is no fault of the kit
WHOLE_RUN_S = 25.0  # about what a pair takes; a kill may also come before it begins or after it
TRIALS = 100
SHORT = 2


@pytest.fixture
def witness(client: docker.DockerClient, built: object) -> Iterator[None]:
    """Objects of somebody else: a container, a network and a volume, which must not change."""
    image = client.images.list(filters={"label": "kit.image"}) or client.images.list("vllm-kit")
    network = client.networks.create("somebody-else", labels={"com.docker.compose.project": "x"})
    volume = client.volumes.create("somebody-else")
    container = client.containers.create(
        image[0].id, ["sleep", "600"], entrypoint=[], name="somebody-else", init=True
    )
    try:
        container.start()
        since = client.api.inspect_container(container.id)["State"]["StartedAt"]
        yield
        state = client.api.inspect_container(container.id)["State"]
        assert (state["Running"], state["StartedAt"]) == (True, since)
        client.images.get(image[0].id)
        network.reload()
        volume.reload()
    finally:
        container.remove(force=True)
        volume.remove()
        network.remove()


def start(out: Path, stub: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        kit_words(*RUN, "--out", str(out), "--stub", stub),
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def under_slow_load(out: Path, stub_file: Callable[..., str]) -> subprocess.Popen[str]:
    """Start a run whose answers take seconds, and return in the middle of its first load."""
    child = start(out, stub_file(**{**CACHED, "itl_s": 0.1}))
    wait_for(out, UNDER_LOAD)
    time.sleep(2)
    return child


def asked_of(run: Path) -> int:
    """Return how many requests one replicate sends."""
    return sum(len(p.read_text("utf-8").splitlines()) for p in run.glob("workload/*.jsonl"))


def check_samples(run: Path) -> int:
    """Every written line of samples is whole, but for one that the fault may have cut."""
    count = 0
    for path in run.rglob("samples.jsonl"):
        lines = path.read_text("utf-8").split("\n")
        for line in lines[:-1]:
            json.loads(line)
        count += len(lines) - 1
    return count


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("nothing_left", "witness")
@pytest.mark.parametrize(
    "trial",
    [pytest.param(n, marks=[] if n < SHORT else [pytest.mark.full]) for n in range(TRIALS)],
)
def test_a_run_ended_at_any_moment_tells_the_truth_and_goes_on(
    tmp_path: Path, stub_file: Callable[..., str], client: docker.DockerClient, trial: int
) -> None:
    draw = random.Random(f"kill {trial}")
    signum = draw.choice([signal.SIGKILL, signal.SIGTERM])
    runs = tmp_path / "runs"
    child = start(runs, stub_file(**CACHED))
    with_luck_over = None
    try:
        child.wait(draw.uniform(0.3, WHOLE_RUN_S))
        with_luck_over = child.returncode
    except subprocess.TimeoutExpired:
        child.send_signal(signum)
    _, stderr = child.communicate(timeout=90)
    assert "Traceback" not in stderr
    if with_luck_over is None and signum == signal.SIGTERM:
        assert child.returncode in (128 + signum, *DONE), stderr
        assert objects_of_runs(client, runs) == []  # before anybody sweeps
    swept = run_kit("sweep")
    assert swept.code == 0, swept.stderr
    assert objects_of_runs(client, runs) == []
    if not list(runs.rglob("manifest.json")):
        return  # before the run had a folder
    manifest, run = only_manifest(runs)
    assert manifest.status == ("complete" if child.returncode in DONE else "interrupted")
    written = check_samples(run)
    assert written >= asked_of(run) * len(manifest.replicates)
    if manifest.status == "interrupted" and manifest.replicates:
        ran = run_kit("resume", str(run), "--json")
        assert ran.code in DONE, ran.stderr
        assert only_manifest(runs)[0].status == "complete"


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("nothing_left", "witness")
def test_two_runs_at_once_do_not_meet(tmp_path: Path, stub_file: Callable[..., str]) -> None:
    """From one clone, into folders of equal names: each ends whole, with its own samples."""
    stub = stub_file(**CACHED)
    outs = [tmp_path / which / "runs" for which in ("one", "two")]
    children = [start(out, stub) for out in outs]
    for child, out in zip(children, outs, strict=True):
        _, stderr = child.communicate(timeout=200)
        assert child.returncode in DONE, stderr
        manifest, run = only_manifest(out)
        assert manifest.status == "complete"
        assert len(manifest.replicates) == 2
        assert check_samples(run) == 2 * asked_of(run)


@pytest.mark.usefixtures("witness")
def test_a_run_folder_that_is_removed_ends_the_run(
    tmp_path: Path, stub_file: Callable[..., str], client: docker.DockerClient
) -> None:
    runs = tmp_path / "runs"
    child = start(runs, stub_file(**CACHED))
    wait_for(runs, UNDER_LOAD)
    manifest, run = only_manifest(runs)
    while run.exists():  # the load writes into it meanwhile
        shutil.rmtree(run, ignore_errors=True)
    _, stderr = child.communicate(timeout=90)
    assert child.returncode == RunFolderLost.exit_code, stderr
    assert "Traceback" not in stderr
    labels = {"label": f"kit.run={manifest.run_id}"}
    assert client.containers.list(all=True, filters=labels) == []
    assert client.networks.list(filters=labels) == []


@pytest.mark.usefixtures("nothing_left", "witness")
def test_a_server_that_stood_still_shows_it_in_the_samples(
    tmp_path: Path, stub_file: Callable[..., str], client: docker.DockerClient
) -> None:
    runs = tmp_path / "runs"
    child = under_slow_load(runs, stub_file)
    server = service_of(client, runs, "server")
    server.pause()
    time.sleep(3)
    server.unpause()
    _, stderr = child.communicate(timeout=120)
    assert child.returncode in DONE, stderr
    manifest, run = only_manifest(runs)
    assert manifest.status == "complete"
    longest = [
        max(
            (b - a for a, b in zip(s["chunk_s"], s["chunk_s"][1:], strict=False)),
            default=0.0,
        )
        for s in map(json.loads, next(run.glob("replicates/00-*/measure/samples.jsonl")).open())
    ]
    assert 2.5 < max(longest) < 5


CANARIES = {
    "HF_TOKEN": "hf_canaryCANARY0123456789abcdef",
    "VLLM_API_KEY": "canary-api-0123",
    "AWS_SECRET_ACCESS_KEY": "canary-aws-0123",
    "DB_PASSWORD": "canary-db-0123",
    "NO_SUCH_PROXY": "http://me:canary-proxy-0123@127.0.0.1:9",
}


@pytest.mark.usefixtures("nothing_left", "witness")
def test_what_is_secret_here_reaches_no_file_no_label_and_no_terminal(
    tmp_path: Path, stub_file: Callable[..., str], client: docker.DockerClient
) -> None:
    runs = tmp_path / "runs"
    child = start(runs, stub_file(**CACHED), **CANARIES)
    wait_for(runs, UNDER_LOAD)
    found = [service_of(client, runs, name) for name in ("server", "client")]
    images = [client.api.inspect_image(one.image.id) for one in found]
    inspected = json.dumps([one.attrs for one in found] + images)
    for one in found:  # what the process there could tell, whatever was asked for
        inspected += one.exec_run(["cat", "/proc/1/environ"]).output.decode("utf-8", "replace")
    stdout, stderr = child.communicate(timeout=120)
    assert child.returncode in DONE, stderr
    written = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    for canary in ("canary", "CANARY"):
        assert canary not in inspected
        assert canary not in stdout + stderr
        assert [p.name for p, content in written.items() if canary.encode() in content] == []
        packed = [p for p in written if p.suffix == ".gz"]
        assert packed
        assert all(canary.encode() not in gzip.decompress(written[p]) for p in packed)


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("nothing_left", "witness")
def test_a_client_whose_network_is_cut_makes_the_run_invalid(
    tmp_path: Path, stub_file: Callable[..., str], client: docker.DockerClient
) -> None:
    runs = tmp_path / "runs"
    child = under_slow_load(runs, stub_file)
    load = service_of(client, runs, "client")
    names = [*load.attrs["NetworkSettings"]["Networks"]]
    for name in names:
        client.networks.get(name).disconnect(load, force=True)
    time.sleep(2)
    for name in names:
        client.networks.get(name).connect(load)
    stdout, stderr = child.communicate(timeout=500)
    assert child.returncode == 4, stderr
    assert json.loads(stdout)["verdict"]["word"] == "invalid"
    assert load_manifest(next(runs.rglob("manifest.json"))).status == "complete"
