"""`vllm bench serve` sends the measured load, in the client container, beside the stub."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import CACHED, FAST, only_manifest, run_kit

from kit.errors import ClientFailed, UsageError

RUN = ("run", "exp1_prefix_cache", "--platform", "cpu", "--quick", "--load-tool", "vllm-bench")

pytestmark = [pytest.mark.usefixtures("nothing_left"), pytest.mark.full]


@pytest.mark.timeout(900)
def test_its_result_becomes_samples_that_the_same_guards_judge(
    tmp_path: Path, stub_file: Callable[..., str]
) -> None:
    ran = run_kit(*RUN, "--json", "--out", str(tmp_path / "runs"), "--stub", stub_file(**CACHED))
    assert ran.stdout.startswith("{"), ran.stderr
    manifest, run = only_manifest(tmp_path)
    assert manifest.plan.load_tool == "vllm-bench"
    assert "load_tool" in [n.code for n in manifest.notices]
    # a busy machine may spoil a pair; everything else is sound
    assert {g.name for g in manifest.guards if not g.ok} <= {"foreign_cpu"}
    assert "token_counts" in {g.name for g in manifest.guards}
    for replicate in manifest.replicates:
        folder = run / replicate.folder / "measure"
        asked = (run / "workload/measure.jsonl").read_text("utf-8").splitlines()
        samples = [
            json.loads(s) for s in (folder / "samples.jsonl").read_text("utf-8").splitlines()
        ]
        assert {s["id"] for s in samples} == {json.loads(a)["id"] for a in asked}
        told = json.loads((folder / "vllm-bench.json").read_text("utf-8"))
        by_start = sorted(samples, key=lambda s: s["sent_s"])
        first = [s["chunk_s"][0] - s["sent_s"] for s in by_start]
        order = sorted(range(len(asked)), key=lambda i: told["start_times"][i])
        assert first == pytest.approx([told["ttfts"][i] for i in order], abs=2e-6)
        kept = {f"{replicate.folder}/measure/{n}" for n in ("vllm-bench.json", "load-tool.log")}
        assert kept <= set(manifest.files)
    baseline, candidate = (
        next(x.value for x in r.readings if x.name == manifest.plan.hypothesis.measure)
        for r in sorted(manifest.replicates, key=lambda r: r.role)
    )
    assert baseline is not None
    assert candidate is not None
    assert candidate < baseline  # what the stub plants is seen by this clock too


@pytest.mark.timeout(600)
def test_a_server_that_dies_ends_the_run_in_the_tool_s_words(
    tmp_path: Path, stub_file: Callable[..., str]
) -> None:
    stub = stub_file(**FAST, die_after_requests=4)
    ran = run_kit(*RUN, "--json", "--out", str(tmp_path / "runs"), "--stub", stub)
    assert ran.code not in (0, ClientFailed.exit_code), ran.stderr
    assert "Traceback" not in ran.stderr
    manifest, _ = only_manifest(tmp_path)
    assert manifest.status == "failed"


def test_a_load_that_it_cannot_send_is_refused_before_anything_starts(tmp_path: Path) -> None:
    words = ("run", "exp5_ngram_spec", "--platform", "cpu", "--variant", "chat", "--load-tool")
    ran = run_kit(*words, "vllm-bench", "--out", str(tmp_path / "runs"))
    assert ran.code == UsageError.exit_code, ran.stderr
    assert "vllm bench serve cannot send lane0-000" in ran.stderr
    assert not list((tmp_path / "runs").rglob("manifest.json"))
