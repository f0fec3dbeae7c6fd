"""The engine of this machine: SDK and CLI are one, and a working engine is left as it is."""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path

import docker
import pytest

from kit import engine
from kit.engine_setup import ensure_engine


def test_sdk_and_cli_speak_to_the_same_engine(client: docker.DockerClient) -> None:
    told = engine.cli("info", "--format", "{{.ID}}")
    assert told.ok
    assert told.stdout.strip() == client.info()["ID"]


def test_a_context_leads_both_to_the_engine_it_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meta = tmp_path / "contexts/meta" / hashlib.sha256(b"here").hexdigest()
    meta.mkdir(parents=True)
    host = engine.endpoint().host
    (meta / "meta.json").write_text(
        json.dumps({"Name": "here", "Endpoints": {"docker": {"Host": host}}})
    )
    (tmp_path / "config.json").write_text('{"currentContext": "here"}')
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    assert engine.endpoint().chosen_by == "context here"
    found = engine.connect()
    assert found.info()["ID"] == engine.cli("info", "--format", "{{.ID}}").stdout.strip()
    found.close()


def test_the_versions_name_what_can_change_a_result() -> None:
    told = engine.versions()
    assert int(str(told["engine"]).split(".")[0]) >= 26
    assert str(told["compose"])[0] in "2345"
    for key in ("buildx", "storage_driver", "cgroup_version", "kernel", "os"):
        assert told[key], key
    assert told["endpoint"] in ("unix socket", "tcp", "ssh")


def test_an_engine_that_works_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    before = engine.versions()
    start = time.monotonic()
    assert ensure_engine(said.append) == before
    assert said == []
    assert time.monotonic() - start < 5
