"""Much load: a thousand streams at once, a million samples. Nothing is lost, memory is bounded.

With `--write-matrix` what was measured goes into docs/hostile.md.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docker
import pytest
from commands import checkout, only_manifest, service_of, start_kit, wait_for
from matrix import Matrix, Scaled
from stub_process import running_stub, start_window, write_window
from virtual_run import exp1_run, write_run

from kit.measure import quantile
from kit.paths import ROOT

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]

MOST_BYTES = 500 * 10**6
STREAMS = 1000
EXPERIMENT = f'''"""Do {STREAMS} streams at once reach one client whole?"""

from dataclasses import replace

from kit.asked import completion
from kit.experiment import Phase
from kit.experiments import exp1_prefix_cache

BASE = exp1_prefix_cache.EXPERIMENT


def workload(scale):
    warmup, cold, _ = exp1_prefix_cache.workload(scale)
    at_once = [completion(scale, f"s{{i:04d}}", f"stream {{i}}", 16, at_s=0.0) for i in range({STREAMS})]
    return warmup, cold, Phase("measure", tuple(at_once), concurrency={STREAMS})


EXPERIMENT = replace(
    BASE, workload=workload, settings={{**BASE.settings, "max-num-seqs": {STREAMS}}}, variants={{}}
)
'''  # noqa: E501


# -- how much memory processes took --------------------------------------------------------------


def peak_bytes(pids: Iterable[int]) -> int:
    """Return the sum of the most that each of these processes has had in memory so far."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/status").read_text("ascii", "replace").splitlines():
                if line.startswith("VmHWM:"):
                    total += int(line.split()[1]) * 1024
    return total


def family(pid: int) -> list[int]:
    """Return a process and all that descend from it."""
    found = [pid]
    for each in found:
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{each}/task").iterdir():
                found += map(int, (task / "children").read_text("ascii").split())
    return found


@dataclass
class Peak:
    """The most memory that was seen, in bytes."""

    seen: int = 0


@contextlib.contextmanager
def watching(pids: Callable[[], Iterable[int]]) -> Iterator[Peak]:
    """Watch what processes take while the block runs."""
    peak, stop = Peak(), threading.Event()

    def watch() -> None:
        while not stop.wait(0.2):
            with contextlib.suppress(OSError, docker.errors.APIError):
                peak.seen = max(peak.seen, peak_bytes(pids()))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peak
    finally:
        stop.set()
        thread.join()


# -- a thousand streams at once ------------------------------------------------------------------


@pytest.mark.usefixtures("nothing_left")
def test_a_thousand_streams_of_one_client_are_whole_and_the_lag_gate_speaks(
    client: docker.DockerClient, stub_file: Callable[..., str], tmp_path: Path, matrix: Matrix
) -> None:
    """All are sent at one moment, which no client can: how late it was must be told."""
    root, runs = checkout(tmp_path / "clone"), tmp_path / "runs"
    (root / "kit" / "experiments" / "many_streams.py").write_text(EXPERIMENT, "utf-8")
    words = ("run", "many_streams", "--platform", "cpu", "--quick", "--json", "--out", str(runs))
    child = start_kit(*words, "--stub", stub_file(ttft_s=0.5, itl_s=0.2), root=root)
    wait_for(runs, "00-*/measure/window.json", 180)
    load = service_of(client, runs, "client")
    with watching(lambda: [int(p[1]) for p in load.top()["Processes"]]) as peak:
        wait_for(runs, "00-*/measure/load.json", 180)
    stdout, stderr = child.communicate(timeout=300)
    assert child.returncode == 4, stderr
    assert "sent" in json.loads(stdout)["verdict"]["reason"]
    manifest, run = only_manifest(runs)
    assert manifest.status == "complete"
    for replicate in manifest.replicates:
        path = run / replicate.folder / "measure" / "samples.jsonl"
        samples = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
        assert len({s["id"] for s in samples}) == STREAMS
        assert [s["error"] for s in samples if s["error"]] == []
        assert {s["completion_tokens"] for s in samples} == {16}
        assert {len(s["chunk_s"]) for s in samples} == {16}
        assert max(s["sent_s"] for s in samples) < min(s["done_s"] for s in samples)  # at once
        guards = {g.name: g for g in manifest.guards if g.replicate == replicate.replicate}
        late = quantile(sorted(s["sent_s"] - s["intended_s"] for s in samples), 0.99)
        assert guards["send_lag"].seen == pytest.approx(late)
        assert not guards["send_lag"].ok
        (lost,) = (
            g.seen
            for g in manifest.guards
            if (g.name, g.replicate) == ("lost_samples", replicate.replicate)
            and g.source.endswith("measure/samples.jsonl")
        )
        assert lost == 0
    assert 0 < peak.seen < MOST_BYTES
    matrix.scaled.append(
        Scaled("client container, 1,000 streams at once", STREAMS, peak.seen, late, "send lag p99")
    )


# -- many samples --------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [10_000, 100_000])
def test_a_client_s_memory_is_bounded(count: int, tmp_path: Path, matrix: Matrix) -> None:
    """One window in 64 lanes; a run of 10^6 samples has 12 windows of 83,334."""
    requests = [
        {
            "id": f"q{i}",
            "path": "/v1/completions",
            "body": {"model": "stub", "prompt": "one two", "max_tokens": 4, "stream": True},
            "tags": {},
            "lane": f"lane{i % 64}",
        }
        for i in range(count)
    ]
    with running_stub(tmp_path, ttft_s=0.0, itl_s=0.0) as stub:
        begin = time.monotonic()
        window = start_window(write_window(tmp_path, stub.port, requests, deadline_s=600))
        with watching(lambda: family(window.pid)) as peak:
            stdout, stderr = window.communicate(timeout=1500)
        took_s = time.monotonic() - begin
    assert window.returncode == 0, stderr
    with (tmp_path / "out" / "samples.jsonl").open("rb") as lines:
        assert len({json.loads(line)["id"] for line in lines}) == count
    assert json.loads(stdout.splitlines()[-1])["failed"] == 0
    assert peak.seen < MOST_BYTES
    matrix.scaled.append(Scaled("client, one window", count, peak.seen, took_s, "whole window"))


def enlarge(run: Path, count: int) -> None:
    """Make of a small run one of at least so many samples, in the same replicates."""
    folders = sorted((run / "replicates").iterdir())
    each = -(-count // len(folders))
    load = (run / "workload" / "measure.jsonl").read_text("utf-8").splitlines()
    bodies = [json.loads(line) for line in load]
    with (run / "workload" / "measure.jsonl").open("w", encoding="utf-8") as out:
        for i in range(each):
            out.write(json.dumps({**bodies[i % len(bodies)], "id": f"m{i}"}) + "\n")
    for folder in folders:
        path = folder / "measure" / "samples.jsonl"
        samples = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
        span = max(s["done_s"] for s in samples)
        with path.open("w", encoding="utf-8") as out:
            for i in range(each):
                later = span * (i // len(samples))
                out.write(json.dumps(moved(samples[i % len(samples)], f"m{i}", later)) + "\n")


def moved(sample: dict[str, Any], name: str, later_s: float) -> dict[str, Any]:
    """Return a sample as another request's, that much later."""
    times = {
        k: round(sample[k] + later_s, 6)
        for k in ("intended_s", "sent_s", "done_s")
        if sample.get(k) is not None
    }
    chunks = [round(at + later_s, 6) for at in sample["chunk_s"]]
    return {**sample, **times, "id": name, "chunk_s": chunks}


def test_analysing_a_million_samples_takes_bounded_memory_and_linear_time(
    tmp_path: Path, matrix: Matrix
) -> None:
    took: dict[int, float] = {}
    for count in (10_000, 100_000, 1_000_000):
        run = tmp_path / str(count)
        write_run(run, exp1_run())
        enlarge(run, count)
        begin = time.monotonic()
        child = subprocess.Popen(
            [sys.executable, "-m", "kit", "analyse", str(run), "--json"],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        with watching(lambda child=child: family(child.pid)) as peak:  # type: ignore[misc]
            stdout, stderr = child.communicate(timeout=1200)
        took[count] = time.monotonic() - begin
        told = json.loads(stdout)
        assert child.returncode == 70, stderr  # its numbers are no longer the manifest's
        seen = sum(r["n"] for each in told["readings"] for r in each if r["name"] == "ttft_p50_s")
        assert count <= seen < count + 12
        assert peak.seen < MOST_BYTES
        matrix.scaled.append(Scaled("analysis of a run", count, peak.seen, took[count], "in all"))
    for fewer, more in itertools.pairwise(took):
        assert took[more] / took[fewer] < 1.5 * more / fewer
