"""Runs without containers or a clock: raw data as a server with a planted effect would leave them.

What is planted is known, so what `kit.analyse.conclude` makes of it can be counted. A virtual run
follows its plan's own requests; only the answers and their times are drawn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from kit.experiment import (
    Arm,
    Condition,
    Experiment,
    Hypothesis,
    Phase,
    Scale,
    Text,
    Variable,
)
from kit.fact import Fact
from kit.manifest import Replicate
from kit.measure import (
    Measure,
    Raw,
    Scrape,
    Window,
    counter_delta,
    output_throughput,
    quantile_of,
    ttft_s,
)
from kit.plan import Plan, PlannedImage, PlannedModel, make_plan
from kit.sequential import Stopping

MARGIN = 0.05
REQUESTS = 12  # enough for a median
OUTPUT_TOKENS = 16
PROMPT_TOKENS = 64
TTFT_S = 0.1
ITL_S = 0.01
BORN_S = 1_700_000_000.0  # the virtual counters' time of creation

Drift = Literal["none", "linear", "warming", "step"]


@dataclass(frozen=True)
class World:
    """What is planted. Sds are of log-normal factors, shares are of 1.

    `effect`: the candidate's TTFT over the baseline's, less 1. `bimodal`: how much slower half of
    the containers are, drawn for each; `rare`: the same for a quarter of the candidate's alone.
    `spoiled`: how likely other load takes 20 % of a replicate's CPUs and makes it 25 % slower.
    `drift`: the machine slows down by 1 % a replicate, or recovers from being 20 % slow, or is
    15 % slower from some replicate on.
    """

    effect: float = 0.0
    between_sd: float = 0.05
    within_sd: float = 0.10
    bimodal: float = 0.0
    rare: float = 0.0
    drift: Drift = "none"
    spoiled: float = 0.0


@dataclass
class VirtualRun:
    """A run's raw data, to be changed by a fault before they are concluded from."""

    plan: Plan
    experiment: Experiment
    requests: Mapping[str, Sequence[Mapping[str, Any]]]
    files: Mapping[str, bytes]
    replicates: list[Replicate]
    raws: dict[int, Raw]
    telemetry: dict[int, list[dict[str, Any]]]

    def of(self, role: str) -> list[int]:
        """Return the replicates of an arm."""
        return [r.replicate for r in self.replicates if r.role == role]


def _workload(scale: Scale) -> tuple[Phase, ...]:
    def ask(name: str, lane: str) -> dict[str, Any]:
        body = {"model": scale.model, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True}
        return {"id": name, "path": "/v1/completions", "body": body, "lane": lane, "tags": {}}

    measured = tuple(ask(f"q{i:02d}", f"lane{i % 2}") for i in range(REQUESTS))
    return (
        Phase("cold", (ask("c0", "cold"),), concurrency=1, scrape_every_s=None),
        Phase("measure", measured, concurrency=2),
    )


def _arm(name: str, value: bool) -> Arm:
    return Arm(name=name, label=Text(en=name, zh=name), flags={"enable-prefix-caching": value})


def virtual_experiment() -> Experiment:
    """Return the experiment of the attack bench: does the candidate raise the median TTFT?"""
    hits = "vllm:prefix_cache_hits_total"
    return Experiment(
        title=Text(en="A planted effect", zh="植入的效应"),
        goal=Text(en="Find what was planted.", zh="找出植入的效应。"),
        variable=Variable(
            name="knob",
            what=Text(en="the knob off or on", zh="开关关或开"),
            baseline=_arm("off", False),
            candidate=_arm("on", True),
            consequences=("cache_config.enable_prefix_caching",),
        ),
        hypothesis=Hypothesis(
            text=Text(en="The knob raises the median TTFT.", zh="开关提高 TTFT 中位数。"),
            measure="ttft_p50_s",
            direction="increase",
            margin=MARGIN,
            equivalence=0.15,
        ),
        workload=_workload,
        measures=(
            Measure("ttft_p50_s", "s", "TTFT, median", quantile_of(ttft_s, 0.50)),
            Measure("output_tok_per_s", "tok/s", "output throughput", output_throughput()),
            Measure("hits_tokens", "tokens", "hits", counter_delta(hits)),
            Measure("cold_hits_tokens", "tokens", "cold hits", counter_delta(hits, phase="cold")),
        ),
        acted=(
            Condition(measure="hits_tokens", arm="candidate", op=">", value=0),
            Condition(measure="hits_tokens", arm="baseline", op="==", value=0),
            Condition(measure="cold_hits_tokens", arm="candidate", op="==", value=0),
            Condition(measure="cold_hits_tokens", arm="baseline", op="==", value=0),
        ),
        settings={"max-num-seqs": 16},
    )


def virtual_plan(
    name: str,
    experiment: Experiment,
    *,
    pairs: int = 8,
    seed: int = 1,
    stopping: Stopping | None = None,
    spare: int = 0,
) -> tuple[Plan, dict[str, bytes]]:
    """Plan an experiment with images and a model that do not exist."""
    image = PlannedImage(id="virtual", identity=f"sha256:{'0' * 64}", lock_sha256=None)
    return make_plan(
        name,
        experiment,
        variant=None,
        against_itself=False,
        images={"baseline": image, "candidate": image},
        entrypoints={"baseline": ["vllm"], "candidate": ["vllm"]},
        client_image=image,
        model=PlannedModel(id="virtual", weights="real", files={}),
        model_flags={},
        platform="cpu",
        platform_flags={},
        platform_env={},
        pairs=pairs,
        seed=seed,
        stopping=stopping,
        spare_pairs=spare,
    )


@dataclass(frozen=True)
class Frame:
    """What all virtual runs of a plan share."""

    plan: Plan
    experiment: Experiment
    requests: Mapping[str, Sequence[Mapping[str, Any]]]
    files: Mapping[str, bytes]
    replicates: tuple[Replicate, ...]


def frame(
    name: str,
    experiment: Experiment,
    *,
    pairs: int = 8,
    seed: int = 1,
    stopping: Stopping | None = None,
    spare: int = 0,
) -> Frame:
    """Prepare what does not depend on what is drawn."""
    plan, files = virtual_plan(
        name, experiment, pairs=pairs, seed=seed, stopping=stopping, spare=spare
    )
    phases = experiment.workload(Scale(model=plan.model.id, seed=seed))
    replicates = tuple(
        Replicate(
            replicate=slot.replicate,
            pair=slot.pair,
            role=slot.role,
            folder=f"replicates/{slot.replicate:02d}-pair{slot.pair}-{slot.role}",
            started_utc="2026-01-01T00:00:00.000Z",
            status="complete",
            wall_s=1.0,
            facts=(_fact("torch_version", "2.9.0"),),
        )
        for slot in plan.slots
    )
    return Frame(plan, experiment, {p.name: p.requests for p in phases}, files, replicates)


@lru_cache
def bench_frame(seed: int, pairs: int, stopping: Stopping | None, spare: int = 0) -> Frame:
    """Return the attack bench's frame; seeds differ in which arm begins."""
    return frame(
        "virtual", virtual_experiment(), pairs=pairs, seed=seed, stopping=stopping, spare=spare
    )


def _fact(name: str, value: str) -> Fact:
    return Fact(
        group="vllm",
        name=name,
        value=value,
        how="planted",
        state="verified",
        service="server",
        match="must",
    )


def draw_run(shared: Frame, world: World, draw: np.random.Generator) -> VirtualRun:
    """Draw the raw data of one run."""
    factors = replicate_factors(shared, world, draw)
    raws, telemetry = {}, {}
    for r, factor in zip(shared.replicates, factors, strict=True):
        spoiled = bool(world.spoiled) and draw.random() < world.spoiled
        slower = float(factor) * (1.25 if spoiled else 1.0)
        raws[r.replicate] = _draw_raw(shared, r, slower, world.within_sd, draw)
        telemetry[r.replicate] = _telemetry(0.20 if spoiled else 0.03)
    return VirtualRun(
        plan=shared.plan,
        experiment=shared.experiment,
        requests=shared.requests,
        files=shared.files,
        replicates=list(shared.replicates),
        raws=raws,
        telemetry=telemetry,
    )


def replicate_factors(
    shared: Frame, world: World, draw: np.random.Generator
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return by how much each replicate's times are longer than the baseline's nominal ones."""
    count = len(shared.replicates)
    on = np.array([r.role == "candidate" for r in shared.replicates])
    factors = np.exp(draw.normal(0.0, world.between_sd, count)) * (1 + world.effect * on)
    if world.bimodal:
        factors *= 1 + world.bimodal * (draw.random(count) < 0.5)
    if world.rare:  # the mean log ratio of the arms stays where `effect` puts it
        log = np.log1p(world.rare)
        factors *= np.exp(on * (log * (draw.random(count) < 0.25) - 0.25 * log))
    place = np.arange(count)
    if world.drift == "linear":
        factors *= 1 + 0.01 * place
    elif world.drift == "warming":
        factors *= 1 + 0.2 * np.exp(-place / 4)
    elif world.drift == "step":
        factors *= 1 + 0.15 * (place >= draw.integers(count))
    return factors


def _draw_raw(
    shared: Frame, r: Replicate, factor: float, within_sd: float, draw: np.random.Generator
) -> Raw:
    on = r.role == "candidate"
    windows, counts = {}, dict.fromkeys(COUNTED, 0.0)
    for phase, requests in shared.requests.items():
        noise = np.exp(draw.normal(0.0, within_sd, len(requests))) * (TTFT_S * factor)
        samples = _samples(requests, noise.tolist())
        before = dict(counts)
        _count(counts, requests, hits=on and phase == "measure")
        end_s = max(s["done_s"] for s in samples)
        middle = {name: (before[name] + counts[name]) // 2 for name in counts}
        windows[phase] = Window(
            folder=f"{r.folder}/{phase}",
            samples=tuple(samples),
            scrapes=(
                _scrape(-0.1, before),
                _scrape(end_s / 2, middle),
                _scrape(end_s + 0.01, counts),
            ),
            load={"version": 1, "stamps": "kernel", "clock_step_s": None},
        )
    cache = {"enable_prefix_caching": on, "block_size": 16}
    config = {"cache_config": cache, "scheduler_config": {"max_num_seqs": 16}}
    return Raw(windows=windows, server_info={"vllm_config": config, "vllm_env": {}})


def _samples(requests: Sequence[Mapping[str, Any]], ttfts: Sequence[float]) -> list[dict[str, Any]]:
    """Return the samples of requests that have their times, or are sent one by one in a lane."""
    free: dict[str, float] = {}
    found = []
    for request, ttft in zip(requests, ttfts, strict=True):
        tokens = int(request["body"]["max_tokens"])
        lane = request.get("lane")
        sent = request["at_s"] if lane is None else free.get(lane, 0.0)
        first = sent + ttft
        done = first + ITL_S * (tokens - 1)
        if lane is not None:
            free[lane] = done
        found.append(
            {
                "id": request["id"],
                "tags": request["tags"],
                "lane": lane,
                "intended_s": sent,
                "sent_s": sent,
                "chunk_s": [first, done],
                "done_s": done,
                "status": 200,
                "prompt_tokens": PROMPT_TOKENS,
                "completion_tokens": tokens,
                "cached_tokens": None,
                "error": None,
            }
        )
    return found


COUNTED = (
    "vllm:request_success_total",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
)


def _count(counts: dict[str, float], requests: Sequence[Mapping[str, Any]], *, hits: bool) -> None:
    asked = float(PROMPT_TOKENS * len(requests))
    counts["vllm:request_success_total"] += len(requests)
    counts["vllm:prompt_tokens_total"] += asked
    counts["vllm:generation_tokens_total"] += sum(r["body"]["max_tokens"] for r in requests)
    counts["vllm:prefix_cache_queries_total"] += asked
    counts["vllm:prefix_cache_hits_total"] += 0.75 * asked * hits


_NO_LABELS: frozenset[tuple[str, str]] = frozenset()


def _scrape(t_s: float, counts: Mapping[str, float]) -> Scrape:
    values = {(name, _NO_LABELS): value for name, value in counts.items()}
    values["vllm:prompt_tokens_created", _NO_LABELS] = BORN_S
    return Scrape(t_s=t_s, values=values)


def _telemetry(others: float) -> list[dict[str, Any]]:
    """Return 20 samples, two seconds apart: a share of the CPUs used by others, no throttling."""
    return [
        {
            "t_s": 2.0 * i,
            "cpuset": [0, 1],
            "busy_s": 4.0 * i * 0.9,
            "ours_s": 4.0 * i * (0.9 - others),
            "load_1m": 1.0,
            "throttled": False,
        }
        for i in range(20)
    ]


def truncated(run: VirtualRun, pairs: int) -> VirtualRun:
    """Return the run as it is after so many pairs."""
    kept = [r for r in run.replicates if r.pair < pairs]
    return replace(
        run,
        replicates=kept,
        raws={r.replicate: run.raws[r.replicate] for r in kept},
        telemetry={r.replicate: run.telemetry[r.replicate] for r in kept},
    )
