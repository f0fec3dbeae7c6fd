"""Virtual runs on disk: the files that a real run leaves, with what is planted known."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kit import store
from kit.analyse import analyse
from kit.experiment import find_experiment
from kit.fact import Fact
from kit.manifest import Cost, KitIdentity, Manifest, RanImage, load_manifest, manifest_json
from kit.measure import Scrape
from kit.virtual import VirtualRun, World, bench_frame, draw_run, frame

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def drawn(effect: float = 0.30, *, pairs: int = 8, seed: int = 1, **planted: Any) -> VirtualRun:
    """Draw one run of the attack bench."""
    world = World(effect=effect, **planted)
    return draw_run(bench_frame(1, pairs, None), world, np.random.default_rng(seed))


def exp1_run(effect: float = -0.30, *, pairs: int = 6, seed: int = 1) -> VirtualRun:
    """Draw one run of exp1_prefix_cache with the facts that a report shows."""
    shared = frame("exp1_prefix_cache", find_experiment("exp1_prefix_cache"), pairs=pairs)
    run = draw_run(shared, World(effect=effect), np.random.default_rng(seed))
    seen = (_fact("vllm", "commit", COMMIT, "server"), _fact("vllm", "version", "0.32.0", "server"))
    run.replicates = [r.model_copy(update={"facts": (*r.facts, *seen)}) for r in run.replicates]
    return run


def _fact(group: str, name: str, value: Any, service: str | None = None) -> Fact:
    return Fact(
        group=group, name=name, value=value, how="planted", state="verified", service=service
    )


HOST_FACTS = (
    _fact("host", "cpu_model", "Virtual CPU"),
    _fact("host", "memory_total_bytes", 8 * 2**30),
    _fact("gpu", "driver_version", "580.1.2"),
)


def metrics_text(scrape: Scrape) -> str:
    """Write a scrape as the engine would."""
    lines = []
    for (name, labels), value in scrape.values.items():
        inner = ",".join(f'{k}="{v}"' for k, v in sorted(labels))
        lines.append(f"{name}{{{inner}}} {value!r}" if inner else f"{name} {value!r}")
    return "\n".join(lines) + "\n"


def write_raw(folder: Path, run: VirtualRun) -> None:
    """Write what a run leaves before anything is concluded."""
    for phase, lines in run.files.items():
        store.write_bytes(folder / "workload" / f"{phase}.jsonl", lines)
    store.write_json(folder / "plan.json", run.plan.model_dump(mode="json"))
    for replicate in run.replicates:
        if replicate.replicate not in run.raws:
            continue
        raw, home = run.raws[replicate.replicate], folder / replicate.folder
        for window in raw.windows.values():
            place = folder / window.folder
            samples = "".join(json.dumps(s, ensure_ascii=False) + "\n" for s in window.samples)
            store.write_text(place / "samples.jsonl", samples)
            store.write_json(place / "load.json", dict(window.load))
            scrapes = "".join(
                json.dumps({"t_s": s.t_s, "status": 200, "text": metrics_text(s)}) + "\n"
                for s in window.scrapes
            )
            store.write_bytes(place / "metrics.jsonl.gz", gzip.compress(scrapes.encode()))
        store.write_json(home / "server_info.json", dict(raw.server_info))
        told = "".join(json.dumps(t) + "\n" for t in run.telemetry[replicate.replicate])
        store.write_text(home / "telemetry.jsonl", told)
        store.write_text(home / "events.jsonl", "{}\n")
        write_facts(home, replicate.facts)
    write_facts(folder, HOST_FACTS)


def write_facts(folder: Path, found: Sequence[Fact]) -> None:
    """Write facts.json as a run does."""
    store.write_json(folder / "facts.json", [f.model_dump(mode="json") for f in found])


def write_run(folder: Path, run: VirtualRun) -> Manifest:
    """Write a whole run: raw files, then the manifest computed from them."""
    write_raw(folder, run)
    found = analyse(folder, run.plan, run.experiment, run.replicates)
    image = run.plan.client_image
    manifest = Manifest(
        run_id="20260101t000000abcdef",
        status="complete",
        started_utc="2026-01-01T00:00:00.000Z",
        finished_utc="2026-01-01T00:10:00.000Z",
        kit=KitIdentity(version="0", commit=COMMIT, dirty=False, diff_sha256=None),
        plan=run.plan,
        plan_sha256=run.plan.sha256,
        reproduces=None,
        images=(
            RanImage(
                id=image.id,
                engine_id="sha256:1",
                config_digest="sha256:2",
                manifest_digest=None,
                diff_ids=(),
                identity=image.identity,
                lock_sha256=None,
                how="planted",
                state="verified",
            ),
        ),
        facts=HOST_FACTS,
        replicates=found.replicates,
        set_aside=found.set_aside,
        guards=found.guards,
        confounders=found.confounders,
        not_acted=found.not_acted,
        comparisons=found.comparisons,
        effect=found.effect,
        verdict=found.verdict,
        notices=found.notices,
        cost=Cost(wall_s=12.0, accounted_s=11.5, ratio=12 / 11.5),
        failure=None,
        files=store.hash_files(folder),
    )
    store.write_text(folder / "manifest.json", manifest_json(manifest))
    return manifest


def write_long_run(folder: Path, samples: int) -> Manifest:
    """Write a run whose measured windows hold so many samples together, over ten minutes each."""
    write_run(folder, exp1_run(pairs=2))
    windows = sorted(folder.glob("replicates/*/measure"))
    draw, each = np.random.default_rng(1), samples // len(windows)
    for window in windows:
        one = json.loads((window / "samples.jsonl").read_text("utf-8").splitlines()[0])
        starts = np.sort(draw.uniform(0, 600, each)).round(6)
        lines = []
        for start, ttft in zip(starts, draw.lognormal(-2, 0.5, each), strict=True):
            chunks = [round(start + ttft + 0.01 * i * ttft, 6) for i in range(4)]
            sample = one | {"sent_s": start, "chunk_s": chunks, "done_s": chunks[-1]}
            lines.append(json.dumps(sample))
        store.write_text(window / "samples.jsonl", "\n".join(lines) + "\n")
    manifest = load_manifest(folder / "manifest.json")
    manifest = manifest.model_copy(update={"files": store.hash_files(folder)})
    store.write_text(folder / "manifest.json", manifest_json(manifest))
    return manifest


def any_run(name: str, *, pairs: int = 2, seed: int = 1) -> VirtualRun:
    """Draw a run of any experiment; what a virtual server does not tell is missing in it."""
    shared = frame(name, find_experiment(name), pairs=pairs)
    return draw_run(shared, World(effect=-0.3), np.random.default_rng(seed))
