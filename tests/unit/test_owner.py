"""Whose containers are whose: the lock lives as long as its run, and signals end a run once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from small_disk import needs_root, read_only
from virtual_run import exp1_run, write_run

from kit import owner, store
from kit.errors import EngineLost, EngineUnreachable, Interrupted, KitError, RunFolderLost
from kit.manifest import load_manifest, manifest_json
from kit.paths import ROOT


class Thing:
    """A container, network or volume of an engine that is only in memory."""

    def __init__(self, shelf: list[Thing], name: str, *, stays: bool = False) -> None:
        self.name = name
        self._shelf = shelf
        self._stays = stays

    def remove(self) -> None:
        if not self._stays:
            self._shelf.remove(self)


class Shelf:
    """Answers `list` for one run's label and refuses to be asked about anything else."""

    def __init__(self, run_id: str) -> None:
        self.things: list[Thing] = []
        self._label = f"kit.run={run_id}"

    def list(self, *, filters: dict[str, Any], **more: bool) -> list[Thing]:
        assert set(more) <= {"all", "ignore_removed"}
        assert set(filters) == {"label"}
        return list(self.things) if filters["label"] == self._label else []


class Engine:
    """As much of a Docker client as clearing up asks."""

    def __init__(self, run_id: str) -> None:
        self.containers, self.networks, self.volumes = (Shelf(run_id) for _ in range(3))

    def info(self) -> dict[str, str]:
        return {"ID": "this engine"}

    def add(self, *names: str, stays: bool = False) -> None:
        for name in names:
            self.networks.things.append(Thing(self.networks.things, name, stays=stays))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KIT_CACHE", str(tmp_path / "cache"))


def active() -> list[str]:
    return sorted(p.name for p in owner._folder().iterdir())


def sweep(engine: Engine) -> list[owner.Leftover]:
    return owner.sweep(engine)  # type: ignore[arg-type]


def running(tmp_path: Path) -> Path:
    """Write a run that says it is still running."""
    run = tmp_path / "run"
    manifest = write_run(run, exp1_run(pairs=1))
    store.write_text(
        run / "manifest.json", manifest_json(manifest.model_copy(update={"status": "running"}))
    )
    return run


def test_a_live_run_is_left_alone_and_leaves_nothing_behind(tmp_path: Path) -> None:
    engine = Engine("live")
    engine.add("net")
    with owner.claim("live", tmp_path):
        owner.scratch("live")
        assert sweep(engine) == []
        assert active() == ["live", "live.json"]
    assert active() == []
    assert len(engine.networks.things) == 1


def test_the_claim_is_dropped_by_an_error_too(tmp_path: Path) -> None:
    with pytest.raises(KitError), owner.claim("live", tmp_path):
        raise KitError("broke")
    assert active() == []


def test_a_killed_run_is_swept_by_its_label_and_marked(tmp_path: Path) -> None:
    run = running(tmp_path)
    code = (
        "import os, signal; from pathlib import Path; from kit import owner\n"
        f"with owner.claim('dead', Path({str(run)!r})): os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False)
    assert done.returncode == -signal.SIGKILL
    assert active() == ["dead.json"]
    engine = Engine("dead")
    engine.add("net-a", "net-b")
    assert sweep(engine) == [owner.Leftover("dead", ("net-a", "net-b"), run)]
    assert engine.networks.things == []
    assert load_manifest(run / "manifest.json").status == "interrupted"
    assert active() == []
    assert sweep(engine) == []


@pytest.mark.parametrize("error", [EngineLost, EngineUnreachable])
def test_a_run_whose_engine_went_away_is_swept_where_it_ran(
    tmp_path: Path, error: type[KitError]
) -> None:
    with pytest.raises(error), owner.claim("dead", tmp_path, "another engine"):
        raise error("gone")
    here = Engine("dead")
    here.add("not ours")
    assert sweep(here) == []
    assert len(here.networks.things) == 1
    assert active() == ["dead.json"]
    here.info = lambda: {"ID": "another engine"}  # type: ignore[method-assign]
    assert [one.removed for one in sweep(here)] == [("not ours",)]
    assert active() == []


@needs_root
def test_a_run_whose_folder_cannot_be_written_is_marked_when_it_can(tmp_path: Path) -> None:
    run = running(tmp_path)
    engine = Engine("dead")
    with read_only(run):
        with pytest.raises(RunFolderLost), owner.claim("dead", run):
            store.release(run)
        (found,) = sweep(engine)
        assert "Read-only file system" in str(found.unwritable)
        assert active() == ["dead.json"]
    assert [one.unwritable for one in sweep(engine)] == [None]
    assert load_manifest(run / "manifest.json").status == "interrupted"
    assert active() == []


def test_a_run_that_died_before_it_said_where_it_is_is_swept(tmp_path: Path) -> None:
    (owner._folder() / "early.json").write_text("", "utf-8")
    found = sweep(Engine("early"))
    assert [(one.run_id, one.removed) for one in found] == [("early", ())]
    assert active() == []


def test_what_cannot_be_removed_is_named_with_its_label() -> None:
    engine = Engine("stuck")
    engine.add("net", stays=True)
    with pytest.raises(KitError, match="left: net") as caught:
        owner.remove_objects(engine, "stuck", patience_s=0.05)  # type: ignore[arg-type]
    assert "kit.run=stuck" in caught.value.hint


def test_only_a_running_manifest_is_marked(tmp_path: Path) -> None:
    write_run(tmp_path, exp1_run(pairs=1))
    before = (tmp_path / "manifest.json").read_bytes()
    owner.mark_interrupted(tmp_path)
    assert (tmp_path / "manifest.json").read_bytes() == before
    (tmp_path / "manifest.json").write_text("{", "utf-8")
    owner.mark_interrupted(tmp_path)
    assert (tmp_path / "manifest.json").read_text("utf-8") == "{"
    owner.mark_interrupted(tmp_path / "nowhere")


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_interrupts_with_its_own_exit_code(signum: signal.Signals) -> None:
    before = signal.getsignal(signum)
    with pytest.raises(Interrupted) as caught, owner.interruptible():
        signal.raise_signal(signum)
    assert caught.value.exit_code == 128 + signum
    assert signal.getsignal(signum) is before


def test_clearing_up_is_not_interrupted_but_answers() -> None:
    said: list[str] = []
    with owner.interruptible():
        with owner.shielded(said.append):
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGINT)
        assert said == ["cleaning up, a moment please"] * 2
        with pytest.raises(Interrupted):
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_signal_while_clearing_up_between_two_replicates_ends_the_run_afterwards() -> None:
    done: list[str] = []

    def clear_up() -> None:
        with owner.shielded(done.append, then_stop=True):
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGINT)
            done.append("cleared up")

    with pytest.raises(Interrupted) as caught:
        clear_up()
    assert done[-1] == "cleared up"
    assert caught.value.exit_code == 128 + signal.SIGTERM
