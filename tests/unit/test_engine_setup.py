"""What apt is told when the release's own engine is too old, and where nothing can be done."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from kit import engine, engine_setup
from kit.engine_setup import AptSource, add_newer_suite, read_sources
from kit.errors import EngineMissing, EngineSetupFailed, EngineUnreachable

DEB822 = """# a comment
Types: deb
# where the packages were taken from
URIs: http://mirror.example/debian
Suites: bookworm bookworm-updates
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg

Types: deb
URIs: http://mirror.example/debian-security
Suites: bookworm-security
Components: main

Types: deb-src
URIs: http://mirror.example/source
Suites: bookworm
Components: main

Enabled: no
Types: deb
URIs: http://off.example/debian
Suites: bookworm
Components: main
"""
ONE_LINE = """deb [arch=amd64 signed-by=/k.gpg] https://mirror.example/debian bookworm main contrib
deb-src https://mirror.example/debian bookworm main
# deb https://commented.example/debian bookworm main
deb http://third.example/x ./
"""
PACKAGES = ("docker.io", "docker-cli")


def write_sources(root: Path, name: str, text: str) -> None:
    path = root / "etc/apt" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_both_formats_of_apt_are_read(tmp_path: Path) -> None:
    write_sources(tmp_path, "sources.list", ONE_LINE)
    write_sources(tmp_path, "sources.list.d/debian.sources", DEB822)
    assert read_sources(tmp_path) == [
        AptSource("https://mirror.example/debian", ("bookworm",), ("main", "contrib"), "/k.gpg"),
        AptSource("http://third.example/x", ("./",), (), ""),
        AptSource(
            "http://mirror.example/debian", ("bookworm", "bookworm-updates"), ("main",),
            "/usr/share/keyrings/debian-archive-keyring.gpg",
        ),
        AptSource("http://mirror.example/debian-security", ("bookworm-security",), ("main",), ""),
    ]  # fmt: skip


def test_the_newer_suite_comes_from_the_hosts_own_archive(tmp_path: Path) -> None:
    write_sources(tmp_path, "sources.list.d/debian.sources", DEB822)
    add_newer_suite(tmp_path, "bookworm", "trixie", PACKAGES)
    added = (tmp_path / "etc/apt/sources.list.d/vllm-kit-trixie.sources").read_text()
    assert added == (
        "Types: deb\nURIs: http://mirror.example/debian\nSuites: trixie\nComponents: main\n"
        "Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg\n"
    )


def test_nothing_else_may_come_from_the_newer_suite(tmp_path: Path) -> None:
    write_sources(tmp_path, "sources.list", ONE_LINE)
    add_newer_suite(tmp_path, "bookworm", "trixie", PACKAGES)
    rules = (tmp_path / "etc/apt/preferences.d/vllm-kit-trixie").read_text().split("\n\n")
    assert rules[0] == "Package: *\nPin: release n=trixie\nPin-Priority: -10"
    assert rules[1].startswith("Package: docker.io docker-cli\n")


def test_a_host_without_a_debian_source_is_told_so(tmp_path: Path) -> None:
    write_sources(tmp_path, "sources.list", "deb http://third.example/x stable main\n")
    with pytest.raises(EngineSetupFailed, match="no entry for bookworm main"):
        add_newer_suite(tmp_path, "bookworm", "trixie", PACKAGES)
    assert not (tmp_path / "etc/apt/preferences.d").exists()


def test_an_engine_elsewhere_is_never_installed_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "tcp://127.0.0.1:1")
    said: list[str] = []
    with pytest.raises(EngineUnreachable):
        engine_setup.ensure_engine(said.append)
    assert said == []


@pytest.mark.parametrize(
    ("family", "uid", "told"),
    [(None, 0, "install Docker Engine >= 26"), ("debian", 1000, "sudo nox -s engine")],
)
def test_where_nothing_can_be_done_one_line_says_what_to_type(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    family: str | None,
    uid: int,
    told: str,
) -> None:
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    monkeypatch.setenv("DOCKER_CONTEXT", "default")
    monkeypatch.setattr(engine, "DEFAULT_SOCKET", f"unix://{tmp_path}/none.sock")
    monkeypatch.setattr(engine_setup, "_family", lambda: family)
    monkeypatch.setattr("os.geteuid", lambda: uid)
    said: list[str] = []
    with pytest.raises(EngineMissing) as caught:
        engine_setup.ensure_engine(said.append)
    assert told in caught.value.hint
    assert said == []


def test_the_family_is_read_from_os_release(tmp_path: Path) -> None:
    write_sources(tmp_path, "../os-release", 'ID=debian\nVERSION_CODENAME="bookworm"\n')
    assert engine_setup._os_release(tmp_path)["VERSION_CODENAME"] == "bookworm"
    assert engine_setup._os_release(tmp_path / "nowhere") == {}


@pytest.fixture
def daemon(tmp_path: Path) -> Path:
    """A program that stands where dockerd would: says what it got, then stays."""
    path = tmp_path / "daemon"
    path.write_text("#!/bin/sh\necho started; env; exec sleep 60\n")
    path.chmod(0o755)
    return path


def test_the_daemon_outlives_its_starter_and_takes_no_secrets_along(
    tmp_path: Path, daemon: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret-of-the-caller")
    pid, log = engine_setup._start_detached(str(daemon), tmp_path / "log")
    try:
        deadline = time.monotonic() + 10
        while "LC_ALL" not in (log.read_text() if log.exists() else ""):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert os.getsid(pid) != os.getsid(0)
        assert os.readlink(f"/proc/{pid}/fd/0") == "/dev/null"
        assert "secret-of-the-caller" not in log.read_text()
    finally:
        os.kill(pid, signal.SIGKILL)


def test_a_daemon_that_ends_at_once_is_reported_with_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "daemon"
    program.write_text("#!/bin/sh\necho the reason why\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("DOCKER_HOST", "tcp://127.0.0.1:1")
    with pytest.raises(EngineSetupFailed, match="ended right after its start") as caught:
        engine_setup._wait_until_it_answers(
            *engine_setup._start_detached(str(program), tmp_path / "log")
        )
    assert caught.value.detail == "the reason why"
