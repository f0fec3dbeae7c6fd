"""Which engine is meant, by the Docker CLI's own rules, and what is said when it is not there."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import stat
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import docker
import docker.errors
import pytest
import requests
import urllib3

from kit import engine
from kit.errors import (
    DiskFull,
    EngineForbidden,
    EngineLost,
    EngineMissing,
    EngineTooOld,
    EngineUnreachable,
)


@pytest.fixture(autouse=True)
def _bare_surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DOCKER_HOST", "DOCKER_CONTEXT", "DOCKER_CERT_PATH", "DOCKER_TLS_VERIFY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "config"))


def write_context(folder: Path, name: str, host: str, *, current: bool = False) -> None:
    digest = hashlib.sha256(name.encode()).hexdigest()
    meta = folder / "config" / "contexts" / "meta" / digest
    meta.mkdir(parents=True)
    (meta / "meta.json").write_text(
        json.dumps({"Name": name, "Endpoints": {"docker": {"Host": host}}})
    )
    if current:
        (folder / "config" / "config.json").write_text(json.dumps({"currentContext": name}))


def test_without_any_setting_it_is_the_default_socket() -> None:
    found = engine.endpoint()
    assert (found.host, found.chosen_by) == ("unix:///var/run/docker.sock", "default")


def test_docker_host_wins_over_contexts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_context(tmp_path, "lab", "tcp://10.0.0.1:2375", current=True)
    monkeypatch.setenv("DOCKER_HOST", "ssh://someone@somewhere")
    assert engine.endpoint().chosen_by == "DOCKER_HOST"
    assert engine.endpoint_kind() == "ssh"


def test_the_named_context_wins_over_the_current_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_context(tmp_path, "lab", "tcp://10.0.0.1:2375", current=True)
    write_context(tmp_path, "desk", "unix:///tmp/desk.sock")
    assert engine.endpoint().host == "tcp://10.0.0.1:2375"
    monkeypatch.setenv("DOCKER_CONTEXT", "desk")
    assert engine.endpoint().host == "unix:///tmp/desk.sock"
    monkeypatch.setenv("DOCKER_CONTEXT", "default")
    assert engine.endpoint().chosen_by == "default"


def test_the_cli_gets_the_endpoint_of_the_sdk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_context(tmp_path, "lab", "tcp://10.0.0.1:2375", current=True)
    certs = tmp_path / "config/contexts/tls" / hashlib.sha256(b"lab").hexdigest() / "docker"
    certs.mkdir(parents=True)
    monkeypatch.setenv("BUILDX_BUILDER", "another")
    env = engine.cli_env()
    assert env["DOCKER_HOST"] == "tcp://10.0.0.1:2375"
    assert env["DOCKER_CERT_PATH"] == str(certs)
    assert "DOCKER_CONTEXT" not in env
    assert "BUILDX_BUILDER" not in env


@pytest.mark.parametrize("broken", ["", "{", '{"Endpoints": {}}'])
def test_a_context_that_names_no_engine_is_said_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    if broken:
        write_context(tmp_path, "lab", "x")
        next((tmp_path / "config").rglob("meta.json")).write_text(broken)
    monkeypatch.setenv("DOCKER_CONTEXT", "lab")
    with pytest.raises(EngineUnreachable, match="context `lab`") as caught:
        engine.connect()
    assert "docker context ls" in caught.value.hint


def test_a_configuration_that_is_no_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "config.json").write_text("{")
    with pytest.raises(EngineUnreachable, match=r"config\.json is not JSON"):
        engine.endpoint()


@pytest.mark.parametrize(
    "host",
    ["unix:///nowhere/docker.sock", "tcp://127.0.0.1:1", "localhost:2375", "foo://x", "tcp://x:y"],
)
def test_a_wrong_docker_host_is_unreachable_and_its_address_is_not_shown(
    monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    monkeypatch.setenv("DOCKER_HOST", host)
    with pytest.raises(EngineUnreachable) as caught:
        engine.connect()
    assert "DOCKER_HOST" in caught.value.message
    assert host not in caught.value.message
    assert caught.value.hint


def test_no_socket_at_the_default_place_means_no_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "DEFAULT_SOCKET", f"unix://{tmp_path}/docker.sock")
    with pytest.raises(EngineMissing) as caught:
        engine.connect()
    assert "nox -s engine" in caught.value.hint


def test_a_socket_that_nobody_serves_is_unreachable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(tmp_path / "docker.sock"))
    monkeypatch.setattr(engine, "DEFAULT_SOCKET", f"unix://{tmp_path}/docker.sock")
    with pytest.raises(EngineUnreachable) as caught:
        engine.connect()
    assert "start the daemon" in caught.value.hint


@pytest.mark.skipif(os.geteuid() != 0, reason="drops root's rights to be refused")
def test_a_socket_without_permission_is_forbidden(tmp_path: Path) -> None:
    path = tmp_path / "docker.sock"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        path.chmod(stat.S_IRUSR | stat.S_IWUSR)
        for folder in tmp_path.parents:
            if str(folder).startswith("/tmp/pytest"):
                folder.chmod(0o755)
        tmp_path.chmod(0o755)
        os.seteuid(65534)
        try:
            with pytest.raises(EngineForbidden) as caught:
                engine._check_reachable(engine.Endpoint(f"unix://{path}"))
        finally:
            os.seteuid(0)
    assert "docker" in caught.value.hint


class OldEngine(BaseHTTPRequestHandler):
    told: Mapping[str, Any]

    def do_GET(self) -> None:
        body = json.dumps({"ApiVersion": "1.41", "MinAPIVersion": "1.12", **self.told})
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass


@pytest.fixture
def old_engine() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), OldEngine)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"tcp://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({"Version": "20.10.24"}, r"^Docker Engine 20\.10\.24 is too old, Docker Engine 26 is"),
        (
            {"Version": "4.3.1", "Components": [{"Name": "Podman Engine", "Version": "4.3.1"}]},
            r"^Podman 4\.3\.1 answers, Docker Engine 26 is needed",
        ),
    ],
)
def test_an_engine_of_yesterday_or_of_another_make_is_refused(
    told: dict[str, Any], said: str, old_engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OldEngine, "told", told, raising=False)
    monkeypatch.setenv("DOCKER_HOST", old_engine)
    with pytest.raises(EngineTooOld, match=said):
        engine.connect()


def write_cli(folder: Path, plugins: dict[str, str]) -> Path:
    folder.mkdir(exist_ok=True)
    cases = "".join(f'  {name}) echo "{text}";;\n' for name, text in plugins.items())
    path = folder / "docker"
    path.write_text(f'#!/bin/sh\ncase "$1" in\n{cases}  *) exit 1;;\nesac\n')
    path.chmod(0o755)
    return path


GOOD = {"compose": "Docker Compose version v2.26.1", "buildx": "github.com/docker/buildx 0.13.1"}


def test_a_bare_client_earlier_in_path_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_cli(tmp_path / "bare", {})
    whole = write_cli(tmp_path / "whole", GOOD)
    monkeypatch.setattr(engine, "SYSTEM_CLI", str(tmp_path / "absent"))
    monkeypatch.setenv("PATH", f"{tmp_path}/bare:{tmp_path}/whole:/usr/bin:/bin")
    assert engine.cli_program() == str(whole)


@pytest.mark.parametrize(
    ("plugins", "lacking"),
    [
        ({}, "no compose and no buildx"),
        ({"compose": GOOD["compose"]}, "no buildx"),
        ({"compose": "docker-compose version 1.29.2", "buildx": GOOD["buildx"]}, "no compose"),
    ],
)
def test_a_cli_without_its_plugins_says_which(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plugins: dict[str, str], lacking: str
) -> None:
    write_cli(tmp_path / "only", plugins)
    monkeypatch.setattr(engine, "SYSTEM_CLI", str(tmp_path / "absent"))
    monkeypatch.setenv("PATH", f"{tmp_path}/only")
    with pytest.raises(EngineMissing, match=lacking):
        engine.cli_program()


def test_without_a_cli_it_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "SYSTEM_CLI", str(tmp_path / "absent"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EngineMissing, match="CLI is not installed"):
        engine.cli_program()


@pytest.mark.parametrize(
    "error",
    [
        requests.ConnectionError("refused"),
        requests.exceptions.ChunkedEncodingError("cut"),
        urllib3.exceptions.ProtocolError("cut"),
        ConnectionResetError(),
    ],
)
def test_an_engine_that_goes_away_is_lost(error: Exception) -> None:
    with pytest.raises(EngineLost, match="stopped answering"), engine.answering():
        raise error


def test_an_answer_that_refuses_is_not_a_lost_engine_but_its_full_disk_is_told() -> None:
    with pytest.raises(docker.errors.NotFound), engine.answering():
        raise docker.errors.NotFound("no such container")
    words = "write /var/lib/docker/x: no space left on device"
    with pytest.raises(DiskFull, match="the engine has no space left"), engine.answering():
        raise docker.errors.APIError("500", explanation=words)


class Pinged:
    """An engine that is away for the first so many pings."""

    def __init__(self, away: int) -> None:
        self._away = away

    def ping(self) -> None:
        self._away -= 1
        if self._away >= 0:
            raise requests.ConnectionError("refused")


def test_an_engine_that_comes_back_is_waited_for_and_one_that_does_not_is_lost() -> None:
    said: list[str] = []
    assert not engine.wait_until_back(Pinged(0), said.append)  # type: ignore[arg-type]
    assert said == []
    assert engine.wait_until_back(Pinged(1), said.append)  # type: ignore[arg-type]
    assert len(said) == 1
    with pytest.raises(EngineLost):
        engine.wait_until_back(Pinged(9), said.append, patience_s=0.1)  # type: ignore[arg-type]
