"""Does scheduling the next step while this one computes raise output throughput?"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from kit.asked import completion, random_ids
from kit.experiment import (
    Arm,
    Condition,
    Experiment,
    Hypothesis,
    Needs,
    Phase,
    Precondition,
    Scale,
    Text,
    Variable,
)
from kit.measure import (
    Measure,
    Raw,
    Reading,
    counter_delta,
    null_reading,
    output_throughput,
    quantile_of,
    reading_of,
    tpot_s,
    ttft_s,
)
from kit.metrics import gauge_of, resolved
from kit.overlap import Overlap
from kit.stacks import Folded, SampledProcess, index_file
from kit.trace import PROFILER_CONFIG, trace_file

LOW, MIDDLE, HIGH = 8, 64, 256
"""Requests under way at a time, on a GPU: a step schedules that many."""
REQUESTS = {"cpu": 16, "cuda": 512}  # 512 carry a 99th percentile
TRACED_TOKENS = 16  # a step is thousands of events
SAMPLE_HZ = 200
"""Samples a second of each process; a sampler that cannot keep up with it says so."""
TOKENS = {"cpu": (32, 8), "cuda": (128, 64)}  # in, out


def workload(scale: Scale, *, lanes: int = MIDDLE) -> tuple[Phase, ...]:
    """Build lanes that each always have one request under way, of random text of one length."""
    length, tokens = TOKENS[scale.platform]
    if scale.platform == "cpu":
        lanes = max(1, lanes // 16)
    count = max(REQUESTS[scale.platform], 16 * lanes)

    def ask(name: str, lane: str) -> dict[str, Any]:
        return completion(scale, name, random_ids(scale, name, length), tokens, lane=lane)

    return (
        Phase("warmup", (ask("w0", "w"), ask("w1", "v")), concurrency=2, scrape_every_s=None),
        Phase(
            "measure",
            tuple(ask(f"r{i:04d}", f"lane{i % lanes}") for i in range(count)),
            concurrency=lanes,
        ),
    )


def _under_load(lanes: int, doc: str) -> Callable[[Experiment], Experiment]:
    def variant(base: Experiment) -> Experiment:
        return replace(base, workload=partial(workload, lanes=lanes))

    variant.__doc__ = doc
    return variant


def traced_workload(scale: Scale) -> tuple[Phase, ...]:
    """Build the middle load, and after it one short request a lane under the profiler."""
    *before, measure = workload(scale)
    asked = tuple(
        {**r, "id": f"p{i:04d}", "body": {**r["body"], "max_tokens": TRACED_TOKENS}}
        for i, r in enumerate(measure.requests[: measure.concurrency])
    )
    last = Phase(
        "profile", asked, concurrency=measure.concurrency, scrape_every_s=None, profile=True
    )
    return (*before, measure, last)


def _traced(of: Callable[[Overlap], float | None]) -> Callable[[Raw], Reading]:
    """Measure a number of the trace that the profiled phase left."""

    def compute(raw: Raw) -> Reading:
        window, name = raw.windows["profile"], trace_file("server", 0)
        overlap = window.traces[name].overlap if name in window.traces else None
        file = f"{window.folder}/{name}"
        value = None if overlap is None else of(overlap)
        if value is None:
            return null_reading("the trace marks no scheduling beside a forward pass", 0, file)
        return reading_of(value, 1, file)

    return compute


OF_TRACE = (
    Measure(
        "traced_schedule_s",
        "s",
        "scheduling in the traced steps, as slow as profiled",
        _traced(lambda overlap: overlap.schedule_s),
    ),
    Measure(
        "traced_forward_s",
        "s",
        "forward passes on the device in the traced steps, as slow as profiled",
        _traced(lambda overlap: overlap.forward_s),
    ),
    Measure(
        "schedule_hidden_share",
        "1",
        "share of the scheduling during which a forward pass ran",
        _traced(lambda overlap: overlap.hidden_share),
    ),
)


def profile(base: Experiment) -> Experiment:
    """Trace some steps after the middle load: how much of the scheduling is hidden?"""
    return replace(
        base,
        workload=traced_workload,
        measures=(*base.measures, *OF_TRACE),
        settings={**base.settings, "profiler-config": PROFILER_CONFIG},
        env={**base.env, "VLLM_CUSTOM_SCOPES_FOR_PROFILING": "1"},
    )


def sampled_workload(scale: Scale) -> tuple[Phase, ...]:
    """Build the middle load, and after it the same once more while the stacks are sampled."""
    *before, measure = workload(scale)
    asked = tuple({**r, "id": f"s{i:04d}"} for i, r in enumerate(measure.requests))
    last = Phase(
        "sampled",
        asked,
        concurrency=measure.concurrency,
        scrape_every_s=None,
        sample_hz=SAMPLE_HZ,
    )
    return (*before, measure, last)


def _sampled(of: Callable[[SampledProcess, Folded], float | None]) -> Callable[[Raw], Reading]:
    """Measure a number of the stacks that were sampled of the engine's core."""

    def compute(raw: Raw) -> Reading:
        window = raw.windows["sampled"]
        index = f"{window.folder}/{index_file('server')}"
        engine = window.stacks.engines.get("server")
        if engine is None:
            return null_reading("nothing tells of the sampling", 0, index)
        if engine.problem:
            return null_reading(f"the sampler: {engine.problem}", 0, index)
        core = engine.core
        if core is None:
            return null_reading("no process of the name EngineCore was there to sample", 0, index)
        folded = window.stacks.files.get(core.file or "")
        if folded is None or not folded.samples:
            return null_reading(f"nothing was sampled of it: {core.refusal}", 0, index)
        value = of(core, folded)
        if value is None:
            return null_reading("the sampler did not say how often it looked", 0, index)
        return reading_of(value, folded.samples, index, f"{window.folder}/{core.file}")

    return compute


def _seconds(method: str) -> Callable[[SampledProcess, Folded], float | None]:
    """Return the CPU seconds inside a method: its share of the looks, times the sampled window."""

    def of(core: SampledProcess, folded: Folded) -> float | None:
        if not core.ticks or core.window_s is None:
            return None
        return folded.scheduling.get(method, 0) / core.ticks * core.window_s

    return of


def _count(value: int | None) -> float | None:
    return None if value is None else float(value)


OF_STACKS = (
    Measure(
        "sampled_schedule_share",
        "1",
        "share of the engine core's samples running Python that are inside Scheduler.schedule",
        _sampled(lambda _, folded: folded.schedule_share),
    ),
    Measure(
        "sampled_schedule_s",
        "s",
        "time inside Scheduler.schedule in the sampled window, as slow as sampled",
        _sampled(_seconds("schedule")),
    ),
    Measure(
        "sampled_update_s",
        "s",
        "time inside Scheduler.update_from_output in the sampled window, as slow as sampled",
        _sampled(_seconds("update_from_output")),
    ),
    Measure(
        "sampled_window_s",
        "s",
        "how long the engine core was sampled",
        _sampled(lambda core, _: core.window_s),
    ),
    Measure(
        "sampled_stacks",
        "1",
        "samples of the engine core running Python (it held the interpreter's lock)",
        _sampled(lambda _, folded: float(folded.samples)),
    ),
    Measure(
        "sampling_errors",
        "1",
        "stacks of the engine core that could not be read",
        _sampled(lambda core, _: _count(core.errors)),
    ),
)


def sampled(base: Experiment) -> Experiment:
    """Sample the engine's stacks after the middle load: which CPU time is scheduling?"""
    return replace(base, workload=sampled_workload, measures=(*base.measures, *OF_STACKS))


def _quantile(name: str, what: str, of: Callable[[Any], float | None], q: float) -> Measure:
    return Measure(name, "s", what, quantile_of(of, q))


MEASURES = (
    Measure("output_tok_per_s", "tok/s", "output throughput", output_throughput()),
    _quantile("ttft_p50_s", "TTFT, median", ttft_s, 0.50),
    _quantile("ttft_p99_s", "TTFT, 99th percentile", ttft_s, 0.99),
    _quantile("tpot_p50_s", "TPOT, median", tpot_s, 0.50),
    _quantile("tpot_p99_s", "TPOT, 99th percentile", tpot_s, 0.99),
    Measure(
        "running_mean",
        "requests",
        "requests that a step computes, mean of the scrapes",
        gauge_of("vllm:num_requests_running", statistics.fmean),
    ),
    Measure(
        "preemptions", "1", "preemptions in the window", counter_delta("vllm:num_preemptions_total")
    ),
    Measure(
        "async_scheduling",
        "1",
        "whether the engine resolved asynchronous scheduling to on",
        resolved("scheduler_config.async_scheduling"),
    ),
)


def _arm(name: str, en: str, zh: str, value: bool) -> Arm:
    return Arm(name=name, label=Text(en=en, zh=zh), flags={"async-scheduling": value})


EXPERIMENT = Experiment(
    title=Text(en="Asynchronous scheduling", zh="异步调度"),
    goal=Text(
        en="Measure what scheduling step n + 1 while step n computes does to output throughput, "
        "TTFT and TPOT. It shortens the critical path; the scheduler's work stays the same. Batch "
        "size, request length and sampling change that work, so a low, a middle and a high load "
        "are measured.",
        zh="测量在第 n 步计算的同时调度第 n+1 步对输出吞吐、TTFT 与 TPOT 的影响。"
        "异步调度缩短关键路径，并不减少调度的工作量。"
        "批大小、请求长度与采样都会改变该工作量，因此测量低、中、高三个负载点。",
    ),
    variable=Variable(
        name="async_scheduling",
        what=Text(
            en="--no-async-scheduling or --async-scheduling",
            zh="--no-async-scheduling 或 --async-scheduling",
        ),
        baseline=_arm("sync", "scheduling between the steps", "步间调度", False),
        candidate=_arm("async", "scheduling during the step", "步内异步调度", True),
        consequences=(
            "scheduler_config.async_scheduling",
            # follows from it, and matters to several data-parallel ranks alone
            "parallel_config.disable_nccl_for_dp_synchronization",
        ),
    ),
    hypothesis=Hypothesis(
        text=Text(
            en="Where a step is short, scheduling takes a share of it that can be hidden: "
            "asynchronous scheduling raises output throughput by more than 5 %.",
            zh="单步较短时，调度占比可被隐藏：异步调度使输出吞吐提高超过 5%。",
        ),
        measure="output_tok_per_s",
        direction="increase",
        margin=0.05,
        equivalence=0.15,
    ),
    workload=workload,
    measures=MEASURES,
    acted=(
        Condition(
            measure="async_scheduling",
            arm="baseline",
            op="==",
            value=0,
            otherwise="no comparable baseline, so the numbers describe and claim nothing",
        ),
        Condition(measure="async_scheduling", arm="candidate", op="==", value=1),
    ),
    offered=(
        Precondition(
            otherwise="the engine was told --async-scheduling and switched it off in silence, so "
            "this platform does not offer it",
            holds=Condition(measure="async_scheduling", arm="candidate", op="==", value=1),
        ),
    ),
    settings={
        "enable-prefix-caching": False,
        "enforce-eager": True,
        "kv-cache-memory-bytes": 4 * 2**30,  # equal in both arms, and no load fills it
        "max-model-len": 1024,
        "max-num-batched-tokens": 8192,
        "max-num-seqs": HIGH,
    },
    needs=Needs(platforms=("cuda",)),
    model="qwen2.5-0.5b",
    variants={
        "low": _under_load(LOW, f"Keep {LOW} requests under way: little to schedule in a step."),
        "profile": profile,
        "sampled": sampled,
        "high": _under_load(HIGH, f"Keep {HIGH} requests under way: a step schedules the most."),
    },
)
