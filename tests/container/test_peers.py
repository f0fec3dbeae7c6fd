"""Others' load generators for real: measured beside ours, and what they write is imported.

With KIT_PEER_RECORDS=DIR the files are left there; those of tests/data/foreign were made so.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from commands import Ran, run_kit, run_nox
from test_readme import commands

from kit import store
from kit.bench import free_port, json_lines, running_stub
from kit.bench_peers import matched
from kit.foreign import Foreign, beside, read_foreign
from kit.peers import Cell, out_of, peers

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]

STREAMS, TOKENS = 3, 5  # bounds below are wide: a busy core delays a tool by seconds
TOOLS = ("vllm bench serve", "guidellm", "aiperf")


@pytest.fixture(scope="module")
def measured(built: Ran) -> dict[str, dict[str, Any]]:
    """Run the documented command on one small load; it makes the tools' environments first."""
    (line,) = commands("docs/peers.md")
    program, *words = line.split()
    assert program == ".venv/bin/nox"
    ran = run_nox(*words, "--streams", "16", "--start", "staggered", "--json", timeout_s=1700)
    assert ran.code == 0, ran.stderr
    return {each["tool"]: each for each in json.loads(ran.stdout)}


def test_every_tool_reads_the_stub_beside_ours(measured: dict[str, dict[str, Any]]) -> None:
    assert set(measured) == {"kit", *TOOLS}
    for tool, found in measured.items():
        assert found["requests"] + found["lost"] == 16, tool
        assert found["tokens"] == found["requests"] * 100
        assert found["lost"] <= (0 if tool == "kit" else 3), "a busy core makes GuideLLM lose some"
        assert 0.1 <= found["ttft_read_p50_s"] < 5, f"{tool}: the truth is 100 ms"
        assert 0 < found["ttft_error_p50_s"] <= found["ttft_error_p99_s"]
        assert found["per_token"] == (found["itl_error_p99_s"] is not None) == (tool != "guidellm")
        assert found["cpu_s_per_1k_tokens"] > 0
    best = min(measured[tool]["ttft_error_p50_s"] for tool in TOOLS)
    assert measured["kit"]["ttft_error_p50_s"] < best


@pytest.fixture(scope="module")
def records(
    measured: object, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Path, Mapping[str, Any]]]:
    """Let each tool write a small result; return its file and the stub's log of its requests."""
    kept = os.environ.get("KIT_PEER_RECORDS")
    below = tmp_path_factory.mktemp("records")
    found = {}
    for peer in peers(print):
        folder = below / peer.name.replace(" ", "-")
        out = folder / "out"
        out.mkdir(parents=True)
        cell = Cell(streams=STREAMS, mode="staggered", tokens=TOKENS, port=free_port())
        core = min(os.sched_getaffinity(0))
        with running_stub(folder, cell.port, max(os.sched_getaffinity(0))):
            words = peer.words(cell, peer.tokenizer, out_of(peer, out))
            peer.start(words, out, core, lambda roots: None)
        path = out / peer.records
        truth = {t["id"]: t for t in json_lines(folder / "stub_times.jsonl")}
        found[peer.name] = (path, truth)
        if kept:
            for one in (path, *beside(path)):
                store.make_folder(Path(kept) / folder.name)
                shutil.copyfile(one, Path(kept) / folder.name / one.name)
    return found


@pytest.mark.parametrize("tool", TOOLS)
def test_what_a_tool_wrote_is_imported(
    records: dict[str, tuple[Path, Mapping[str, Any]]], tool: str, tmp_path: Path
) -> None:
    path, truth = records[tool]
    found: Foreign = read_foreign(path)
    pairs = list(matched(found, truth))
    assert len(found.samples) == len(pairs) == STREAMS
    for sample, true in pairs:
        told = sample["chunk_s"][0] - sample["sent_s"]
        assert told == pytest.approx(true["chunk_s"][0] - true["arrived_s"], abs=2)
        assert sample["completion_tokens"] == TOKENS
    ran = run_kit("import", str(path), "--out", str(tmp_path), "--json")
    assert ran.code == 0, ran.stderr
    assert {guard["ok"] for guard in ran.result["guards"]} == {True}
    assert (Path(ran.result["folder"]) / "report.zh.html").is_file()
