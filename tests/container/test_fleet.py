"""A matrix of runs over a real Slurm: three nodes of one machine, real `kit run`, the stub or vLLM.

Nodes of one machine disturb each other's measurements, so nothing here looks at a verdict's word.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import FAST, kit_words
from slurm import Cluster, cluster, is_installed

from kit import store
from kit.fleet_job import is_blocked_by_node, read_finished
from kit.fleet_plan import read_fleet
from kit.manifest import load_manifest
from kit.paths import ROOT

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not is_installed(), reason="needs Slurm and munge"),
    pytest.mark.timeout(3600),
]

NODES = ("n1", "n2", "n3")


@pytest.fixture
def three(tmp_path: Path) -> Iterator[Cluster]:
    with cluster(tmp_path / "slurm", NODES) as made:
        yield made


def plan(folder: Path, seeds: int, **changes: Any) -> Path:
    """Write a plan of stub cases; return its path."""
    folder.mkdir(exist_ok=True)
    store.write_json(folder / "stub.json", FAST)
    said = {
        "out": "out",
        "experiments": ["exp1_prefix_cache"],
        "seeds": list(range(1, seeds + 1)),
        "quick": True,
        "stub": "stub.json",
        "nodes": {"small": {"platform": "cpu", "time_min": 60}},
    }
    kept = {key: value for key, value in {**said, **changes}.items() if value is not None}
    (folder / "plan.yaml").write_text(yaml.safe_dump(kept), "utf-8")
    return folder / "plan.yaml"


def start(made: Cluster, path: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        kit_words("fleet", str(path), *words),
        cwd=ROOT,
        env={**os.environ, **made.environment},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def fleet(made: Cluster, path: Path, *words: str, code: int = 0) -> tuple[str, str]:
    child = start(made, path, *words)
    out, err = child.communicate(timeout=3000)
    assert child.returncode == code, err
    return out, err


def check_all_finished_once(path: Path, nodes: Sequence[str] = NODES) -> None:
    """Every case has one result, whole to the last byte, of its own plan and of one node."""
    found = read_fleet(path)
    runs = found.file.out / "runs"
    there = [path.parent.name for path in runs.glob("*/fleet.json")]
    assert sorted(there) == sorted(case.key for case in found.cases)
    for case in found.cases:
        done = read_finished(found.file.out, case)
        assert done is not None
        assert done.node in nodes
        manifest = load_manifest(runs / case.key / "run" / "manifest.json")
        assert (manifest.status, manifest.plan_sha256) == ("complete", case.plan_sha256)
        assert store.changed_files(runs / case.key / "run", manifest.files) == []
        assert is_blocked_by_node(manifest, done)
    assert list((found.file.out / "work").iterdir()) == []


def test_twelve_cases_lose_a_node_and_are_recognised_when_submitted_again(
    three: Cluster, tmp_path: Path
) -> None:
    path = plan(tmp_path / "plan", 12)
    run_and_lose_a_node(three, path)
    before = {p: p.stat().st_mtime_ns for p in path.parent.rglob("runs/*/fleet.json")}
    _, err = fleet(three, path)
    assert "12 finished, 0 to submit" in err
    assert {p: p.stat().st_mtime_ns for p in path.parent.rglob("runs/*/fleet.json")} == before


def run_and_lose_a_node(made: Cluster, path: Path) -> None:
    """Run a plan by one command, kill n2 while it measures: its cases finish elsewhere."""
    child = start(made, path)
    at_work = wait_for_attempt(path, "n2")
    made.lose("n2")
    _, err = child.communicate(timeout=10_000)
    assert child.returncode == 0, err
    check_all_finished_once(path)
    records = [json.loads(p.read_text("utf-8")) for p in path.parent.rglob("runs/*/fleet.json")]
    moved = {r["case"]: r for r in records if len(r["attempts"]) > 1}
    assert set(moved) >= {at_work}
    assert all(r["node"] != "n2" for r in moved.values())


def wait_for_attempt(path: Path, node: str) -> str:
    """Wait until a job of the node measures; return its case's name."""
    cases = {case.key: case.name for case in read_fleet(path).cases}
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        for found in (path.parent / "out" / "work").glob("*/attempt-000.json"):
            begun = list(found.parent.rglob("manifest.json"))
            if begun and json.loads(found.read_text("utf-8"))["node"] == node:
                return cases[found.parent.name]
        time.sleep(0.2)
    raise AssertionError(f"no job of {node} began to measure")


def test_a_requeued_job_goes_on_with_its_run_on_its_node(tmp_path: Path) -> None:
    with cluster(tmp_path / "slurm", ["n1"]) as made:
        path = plan(tmp_path / "plan", 1, quick=None, replicates=3)
        fleet(made, path, "--no-wait")
        deadline = time.monotonic() + 300
        while not whole_replicates(path):
            assert time.monotonic() < deadline
            time.sleep(0.2)
        (state,) = json.loads(fleet(made, path, "--status", "--json")[0])
        assert (state["state"], state["node"]) == ("running", "n1")
        made.ask("scontrol", "requeue", state["job"])
        fleet(made, path)
        check_all_finished_once(path, ["n1"])
    (record,) = path.parent.rglob("fleet.json")
    attempts = json.loads(record.read_text("utf-8"))["attempts"]
    assert [each["went_on"] for each in attempts] == [False, True]
    manifest = load_manifest(record.parent / "run" / "manifest.json")
    assert len(manifest.resumed) == 1
    assert len(manifest.replicates) == 6


def whole_replicates(path: Path) -> int:
    found = list((path.parent / "out" / "work").rglob("manifest.json"))
    return len(load_manifest(found[0]).replicates) if found else 0


def test_cancelled_jobs_leave_the_queue_and_are_submitted_again(
    three: Cluster, tmp_path: Path
) -> None:
    path = plan(tmp_path / "plan", 3)
    fleet(three, path, "--no-wait")
    _, err = fleet(three, path, "--no-wait")
    assert "0 to submit" in err, "what is on its way is not submitted twice"
    fleet(three, path, "--cancel")
    deadline = time.monotonic() + 120
    while three.ask("squeue", "-h").strip():
        assert time.monotonic() < deadline
        time.sleep(0.5)
    states = json.loads(fleet(three, path, "--status", "--json")[0])
    assert {each["state"] for each in states} == {"lost"}
    fleet(three, path)
    check_all_finished_once(path)


def test_each_node_is_beside_the_others_in_one_index(three: Cluster, tmp_path: Path) -> None:
    nodes = {"small": {"platform": "cpu", "time_min": 60, "each": list(NODES)}}
    path = plan(tmp_path / "plan", 1, aa=True, nodes=nodes)
    index = json.loads(fleet(three, path, "--json")[0])
    assert [each["node"] for each in index["nodes"]] == list(NODES)
    assert all(each["hardware"]["host.cpu_threads"] for each in index["nodes"])
    (levels,) = index["levels"]
    assert [each["node"] for each in levels["nodes"]] == list(NODES)
    assert all(each["n"] == 2 for each in levels["nodes"])
    assert index["split"] == []


@pytest.mark.timeout(12_000)
def test_twelve_cases_of_real_vllm_lose_a_node(three: Cluster, tmp_path: Path) -> None:
    """By hand mostly: some forty minutes on two cores. Two at once for the sake of memory."""
    nodes = {"small": {"platform": "cpu", "time_min": 120, "at_once": 2}}
    changes = {"stub": None, "experiments": ["exp3_fp8_kv"], "ready_timeout_s": 900.0}
    path = plan(tmp_path / "plan", 12, nodes=nodes, **changes)
    run_and_lose_a_node(three, path)
    _, err = fleet(three, path)
    assert "12 finished, 0 to submit" in err


def test_more_nodes_shorten_the_wall_time(tmp_path: Path) -> None:
    """Cases that mostly wait, on 1, 2 and 4 nodes; `KIT_FLEET_CASES=200` for the long table.

    The nodes share this machine's cores, so less than linear is expected, and the table says how
    much less.
    """
    count = int(os.environ.get("KIT_FLEET_CASES", "8"))
    walls = {}
    for nodes in (1, 2, 4):
        names = [f"n{i + 1}" for i in range(nodes)]
        with cluster(tmp_path / f"slurm-{nodes}", names) as made:
            path = plan(tmp_path / f"plan-{nodes}", count)
            store.write_json(path.parent / "stub.json", {**FAST, "ready_after_s": 10.0})
            begin = time.monotonic()
            fleet(made, path)
            walls[nodes] = time.monotonic() - begin
            check_all_finished_once(path, names)
        print(f"{count} cases, {nodes} nodes: {walls[nodes]:.0f} s", flush=True)
    assert walls[2] < walls[1] / 1.5
    assert walls[4] < walls[2] / 1.3
