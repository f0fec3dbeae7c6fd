"""Fixtures of the container tier."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import docker
import pytest
from commands import FAST, Ran, objects_of_runs, run_nox
from matrix import Matrix, Trial, Witness, witness_on

from kit import engine


@pytest.fixture(scope="session", autouse=True)
def built() -> Ran:
    """Build image and model once, as README says; the other tests of this tier stand on them."""
    ran = run_nox("-s", "build")
    assert ran.code == 0, ran.stderr
    return ran


@pytest.fixture(scope="session")
def client() -> Iterator[docker.DockerClient]:
    found = engine.connect()
    yield found
    found.close()


@pytest.fixture
def nothing_left(client: docker.DockerClient, tmp_path: Path) -> Iterator[None]:
    """Fail when a run of the test leaves a container, network or volume behind."""
    yield
    assert objects_of_runs(client, tmp_path) == []


@pytest.fixture(scope="session")
def matrix(request: pytest.FixtureRequest) -> Iterator[Matrix]:
    """What faults leave, counted over all tests of this call."""
    found = Matrix()
    yield found
    # a test that failed has not counted what its fault left: such a table would look too good
    if request.config.getoption("--write-matrix") and not request.session.testsfailed:
        found.write()


@pytest.fixture
def witness(client: docker.DockerClient, built: object) -> Iterator[Witness]:
    """Objects of somebody else on the engine, which no run may change."""
    with witness_on(client) as found:
        yield found
        assert found.changed() == []


@pytest.fixture
def trial(
    client: docker.DockerClient, witness: Witness, matrix: Matrix, tmp_path: Path
) -> Callable[[str], Trial]:
    """Begin a trial of the fault of that name."""
    return lambda fault: Trial(fault, tmp_path / "runs", client, witness, matrix)


@pytest.fixture
def stub_file(tmp_path: Path) -> Callable[..., str]:
    """Write a stub's configuration and return its path."""

    def write(**planted: Any) -> str:
        path = tmp_path / "stub.json"
        path.write_text(json.dumps({**FAST, **planted}), "utf-8")
        return str(path)

    return write
