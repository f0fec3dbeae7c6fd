"""What surrounds a run and is not listened to is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kit import engine, surroundings
from kit.paths import COMPOSE

STRAY = {
    "COMPOSE_FILE": "other.yml",
    "KIT_IMAGE": "nothing:here",
    "VLLM_PORT": "1",
    "DOCKER_DEFAULT_PLATFORM": "linux/arm64",
    "BUILDX_BUILDER": "other",
}
HEARD = {"KIT_CACHE": "/c", "DOCKER_HOST": "unix:///x.sock", "HOME": "/root", "PATH": "/usr/bin"}


def test_stray_variables_are_named_and_those_that_are_heard_are_not() -> None:
    assert surroundings.ignored({**STRAY, **HEARD}, ()) == sorted(STRAY)


def test_stray_files_are_named_but_not_the_one_that_the_kit_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "docker-compose.override.yml").touch()
    (tmp_path / ".env").touch()
    monkeypatch.chdir(tmp_path)
    assert surroundings.ignored({}, [COMPOSE]) == [
        str(tmp_path / name) for name in ("docker-compose.override.yml", ".env")
    ]


def test_the_cli_s_environment_holds_none_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in STRAY.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("DOCKER_HOST", HEARD["DOCKER_HOST"])
    env = engine.cli_env()
    assert env["DOCKER_HOST"] == HEARD["DOCKER_HOST"]
    assert not {"DOCKER_DEFAULT_PLATFORM", "BUILDX_BUILDER"} & env.keys()


def test_compose_sees_the_caller_s_plugins_and_no_more_of_their_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KIT_CACHE", str(tmp_path / "cache"))
    own = tmp_path / "own"
    own.mkdir()
    (own / "config.json").write_text('{"proxies": {"default": {"httpProxy": "http://u:p@h"}}}')
    folder = surroundings.plain_docker_config(own)
    assert [p.name for p in folder.iterdir()] == ["config.json"]
    told = json.loads((folder / "config.json").read_text("utf-8"))
    assert told == {"cliPluginsExtraDirs": [str(own / "cli-plugins")]}
