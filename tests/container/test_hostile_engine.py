"""Faults of the engine under a run: it is restarted, it is gone, its disk is full.

On an engine of its own (own_engine.py), since others may use the machine's.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import docker
import pytest
from commands import CACHED, only_manifest, run_kit, start_kit, wait_for
from matrix import Matrix, Trial, Witness, witness_on
from own_engine import OwnEngine, own_engine
from test_hostile import DONE, RUN, UNDER_LOAD, finish

from kit.errors import DiskFull, EngineLost
from kit.platform import find_platform

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(600),
    pytest.mark.skipif(os.geteuid() != 0, reason="starts an engine and mounts its disk"),
]


@pytest.fixture(scope="module")
def own(built: object, client: docker.DockerClient) -> Iterator[OwnEngine]:
    with own_engine(f"vllm-kit:{find_platform('cpu').default_image}") as found:
        yield found
    with witness_on(client) as witness:  # the machine's engine, its own bridge too, still serves
        assert witness.changed() == []


@pytest.fixture
def own_client(own: OwnEngine) -> Iterator[docker.DockerClient]:
    client = own.client()
    yield client
    client.close()


@pytest.fixture
def own_witness(own_client: docker.DockerClient) -> Iterator[Witness]:
    with witness_on(own_client) as found:
        yield found


@pytest.fixture
def under_load(
    own: OwnEngine,
    own_client: docker.DockerClient,
    own_witness: Witness,
    matrix: Matrix,
    tmp_path: Path,
    stub_file: Callable[..., str],
) -> Callable[[str], tuple[Trial, object]]:
    """Start a run on that engine, and return in the middle of its first load."""

    def begin(fault: str) -> tuple[Trial, object]:
        environment = {"DOCKER_HOST": own.host}
        runs = tmp_path / "runs"
        one = Trial(fault, runs, own_client, own_witness, matrix, environment)
        stub = stub_file(**{**CACHED, "itl_s": 0.1})
        child = start_kit(*RUN, "--out", str(runs), "--stub", stub, **environment)
        wait_for(runs, UNDER_LOAD, child=child)
        time.sleep(2)
        one.strike()
        return one, child

    return begin


def test_an_engine_that_is_restarted_under_a_run_is_what_is_told(
    own: OwnEngine, under_load: Callable[[str], tuple[Trial, object]]
) -> None:
    one, child = under_load("engine restarted")
    own.end(signal.SIGTERM)
    own.start()
    _, stderr = finish(child)  # type: ignore[arg-type]
    assert child.returncode == EngineLost.exit_code, stderr  # type: ignore[attr-defined]
    one.close("failed", restarted=True)


def test_what_is_left_on_an_engine_that_stays_away_is_removed_when_it_is_back(
    own: OwnEngine, under_load: Callable[[str], tuple[Trial, object]]
) -> None:
    """It was killed, so its containers ran on; no other engine's sweep forgets the run."""
    one, child = under_load("engine killed, started after the run")
    own.end(signal.SIGKILL)
    _, stderr = finish(child)  # type: ignore[arg-type]
    assert child.returncode == EngineLost.exit_code, stderr  # type: ignore[attr-defined]
    assert run_kit("sweep").code == 0
    own.start()
    manifest, _ = only_manifest(one.runs)
    assert manifest.run_id in one.sweep().stderr
    one.close("failed", restarted=True)


def test_a_full_data_root_is_named_and_the_run_goes_on_when_there_is_room(
    own: OwnEngine, under_load: Callable[[str], tuple[Trial, object]]
) -> None:
    one, child = under_load("engine's disk full")
    with own.full():
        _, stderr = finish(child, 400)  # type: ignore[arg-type]
    assert child.returncode == DiskFull.exit_code, stderr  # type: ignore[attr-defined]
    assert "the engine has no space left" in stderr
    _, run = one.close("failed", then=", then resumed to its end")
    resumed = run_kit("resume", str(run), "--json", **one.environment)
    assert resumed.code in DONE, resumed.stderr
