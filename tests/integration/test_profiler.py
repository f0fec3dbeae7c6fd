"""The traces that the real stub leaves, from its control plane to the numbers of a rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from stub_process import Stub, running_stub

from kit import profiler
from kit.errors import ProbeFailed
from kit.fact import HostPlace
from kit.inbox import ClientBox
from kit.inside.ask import ask
from kit.measure import load_raw
from kit.trace import read_trace


class Box(ClientBox):
    """The client, in this process instead of a container: services are the stub's port."""

    def __init__(self, stub: Stub) -> None:
        self._stub = stub

    def ask(self, method: str, url: str, *, timeout_s: float = 10.0) -> dict[str, Any]:
        return ask(method, self._stub.url + httpx.URL(url).path, timeout_s=timeout_s)


def serve_words(folder: Path, ranks: int) -> list[str]:
    told = json.dumps({"profiler": "torch", "torch_profiler_dir": str(folder / "traces")})
    return ["--port", "0", "--tensor-parallel-size", str(ranks), "--profiler-config", told]


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_rank_s_trace_is_kept_and_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    monkeypatch.setattr(profiler, "FOLDER", str(tmp_path / "traces"))
    out = tmp_path / "replicate/profile"
    out.mkdir(parents=True)
    with (
        running_stub(tmp_path, *serve_words(tmp_path, ranks)) as stub,
        profiler.profiled(Box(stub), {"server": HostPlace()}, out, timeout_s=20),
    ):
        assert not (tmp_path / "traces").exists()
    names = [f"trace-server-rank{rank}.json.gz" for rank in range(ranks)]
    assert sorted(p.name for p in out.iterdir()) == names
    for name in ("samples.jsonl", "load.json"):
        (out / name).write_text("{}" if name == "load.json" else "", "utf-8")
    traces = load_raw(tmp_path, "replicate", ["profile"]).windows["profile"].traces
    assert list(traces) == names
    for name in names:
        assert traces[name] == read_trace(out / name)
        split = traces[name].split
        assert split is not None
        share = split.communication_s / split.window_s
        assert share == pytest.approx(0.2 if ranks == 2 else 0.0, abs=1e-6)


def test_a_server_without_a_profiler_is_named(tmp_path: Path) -> None:
    with (
        running_stub(tmp_path) as stub,
        pytest.raises(ProbeFailed, match="404 to /start_profile"),
        profiler.profiled(Box(stub), {"server": HostPlace()}, tmp_path, timeout_s=20),
    ):
        raise AssertionError


def test_an_engine_that_left_no_trace_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiler, "FOLDER", str(tmp_path / "nothing"))
    with pytest.raises(ProbeFailed, match="`server` left no trace for each rank: none at all"):
        profiler.keep_traces(HostPlace(), "server", tmp_path)
