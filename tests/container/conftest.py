"""Fixtures of the container tier."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import docker
import pytest
from commands import FAST, Ran, objects_of_runs, run_nox

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


@pytest.fixture
def stub_file(tmp_path: Path) -> Callable[..., str]:
    """Write a stub's configuration and return its path."""

    def write(**planted: Any) -> str:
        path = tmp_path / "stub.json"
        path.write_text(json.dumps({**FAST, **planted}), "utf-8")
        return str(path)

    return write
