"""Does the scheduler preempt requests when the KV cache is too small for the load?"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from kit.asked import completion, random_ids
from kit.experiment import (
    Arm,
    Condition,
    Experiment,
    Flag,
    Hypothesis,
    Phase,
    Scale,
    Text,
    Variable,
)
from kit.measure import (
    Measure,
    Raw,
    Reading,
    Sample,
    counter_delta,
    output_throughput,
    quantile_of,
    ratio_of,
    request_count,
    tpot_s,
    ttft_s,
)
from kit.metrics import gauge_of

BLOCK_TOKENS = 32
AMPLE, SCARCE, HALF = 1024, 40, 20  # blocks; a request grows to five
PROMPT_TOKENS, OUTPUT_TOKENS = 64, 96
REQUESTS = {"cpu": 32, "cuda": 200}
APART_S = 0.005  # a burst that the load generator can send on time
URGENT_AFTER_S = {"cpu": 1.0, "cuda": 0.1}


def _request(scale: Scale, name: str, kind: str, at_s: float, output_tokens: int) -> dict[str, Any]:
    prompt = random_ids(scale, name, PROMPT_TOKENS)
    asked = completion(scale, name, prompt, output_tokens, tags={"kind": kind}, at_s=at_s)
    if kind != "plain":
        asked["body"]["priority"] = 0 if kind == "urgent" else 10  # lower is sooner
    return asked


def workload(scale: Scale, *, mixed: bool = False) -> tuple[Phase, ...]:
    """Build a burst of requests; `mixed`: half of them urgent and a moment later."""
    count = REQUESTS[scale.platform]

    def ask(i: int) -> dict[str, Any]:
        kind = ("urgent" if i % 2 else "rest") if mixed else "plain"
        after_s = URGENT_AFTER_S[scale.platform] if kind == "urgent" else 0.0
        return _request(scale, f"r{i:03d}", kind, after_s + i * APART_S, OUTPUT_TOKENS)

    warmup = _request(scale, "w0", "plain", 0.0, 4)
    return (
        Phase("warmup", (warmup,), concurrency=1, scrape_every_s=None),
        Phase("measure", tuple(ask(i) for i in range(count)), concurrency=count),
    )


_PREEMPTIONS = counter_delta("vllm:num_preemptions_total")
_PER_REQUEST = ratio_of(_PREEMPTIONS, request_count())


def starts_per_request(raw: Raw) -> Reading:
    """Measure how often a request was started on average: 1, plus its preemptions.

    A count of preemptions is 0 without pressure, and nothing can be divided by it; starts are
    at least 1, so that the arms have a ratio, an interval and a margin.
    """
    reading = _PER_REQUEST(raw)
    if reading.value is None:
        return reading
    return reading.model_copy(update={"value": 1 + reading.value})


def _kind(kind: str) -> Callable[[Sample], bool]:
    return lambda sample: bool(sample["tags"]["kind"] == kind)


PRESSURE = (
    Measure("running_max", "requests", "running, most", gauge_of("vllm:num_requests_running", max)),
    Measure("waiting_max", "requests", "waiting, most", gauge_of("vllm:num_requests_waiting", max)),
    Measure("kv_usage_max", "1", "KV usage, highest", gauge_of("vllm:kv_cache_usage_perc", max)),
    Measure(
        "kv_usage_mean",
        "1",
        "KV usage, mean of two scrapes a second",
        gauge_of("vllm:kv_cache_usage_perc", statistics.fmean),
    ),
)
MEASURES = (
    Measure("starts_per_request", "1", "starts of a request, mean", starts_per_request),
    Measure("preemptions", "1", "preemptions", _PREEMPTIONS),
    Measure("preemptions_per_request", "1", "preemptions of a request, mean", _PER_REQUEST),
    *PRESSURE,
    Measure("output_tok_per_s", "tok/s", "output throughput", output_throughput()),
    Measure("ttft_p50_s", "s", "TTFT, median", quantile_of(ttft_s, 0.50)),
    Measure("tpot_p50_s", "s", "TPOT, median", quantile_of(tpot_s, 0.50)),
)


def _pressed(arm: Literal["baseline", "candidate"]) -> tuple[Condition, ...]:
    """The cache was full and requests waited: only then can a preemption be expected."""
    return (
        Condition(measure="kv_usage_max", arm=arm, op=">=", value=0.9),
        Condition(measure="waiting_max", arm=arm, op=">", value=0),
    )


def _arm(name: str, blocks: int) -> Arm:
    return Arm(
        name=name,
        label=Text(en=f"{blocks} KV blocks", zh=f"{blocks} 个 KV 块"),
        flags={"num-gpu-blocks-override": blocks},
    )


def _blocks_variable(baseline: Arm, candidate: Arm) -> Variable:
    a, b = (arm.flags["num-gpu-blocks-override"] for arm in (baseline, candidate))
    return Variable(
        name="kv_blocks",
        what=Text(
            en=f"--num-gpu-blocks-override {a} or {b}", zh=f"--num-gpu-blocks-override {a} 或 {b}"
        ),
        baseline=baseline,
        candidate=candidate,
        consequences=(
            "cache_config.num_gpu_blocks_override",
            "cache_config.num_gpu_blocks",
            "cache_config.kv_cache_size_tokens",
            "cache_config.kv_cache_max_concurrency",
        ),
    )


def kv_halved(base: Experiment) -> Experiment:
    """Halve a cache that is already too small: do preemptions more than double?"""
    return replace(
        base,
        variable=_blocks_variable(_arm("scarce", SCARCE), _arm("half", HALF)),
        hypothesis=Hypothesis(
            text=Text(
                en="Under pressure preemptions grow faster than the cache shrinks: with half the "
                "blocks a request is preempted more than twice as often.",
                zh="在压力下，抢占的增长快于缓存的缩小：块数减半时，每个请求的抢占次数超过两倍。",
            ),
            measure="preemptions_per_request",
            direction="increase",
            margin=1.0,
            equivalence=0.30,
        ),
        acted=(*_pressed("baseline"), *_pressed("candidate")),
    )


def priority(base: Experiment) -> Experiment:
    """Schedule by priority instead of arrival, half of the requests urgent and a moment later."""

    def arm(policy: str, zh: str) -> Arm:
        flags: dict[str, Flag] = {"scheduling-policy": policy}
        return Arm(name=policy, label=Text(en=f"policy {policy}", zh=zh), flags=flags)

    urgent, rest = (
        Measure(
            f"ttft_{kind}_p50_s",
            "s",
            f"TTFT of {kind}, median",
            quantile_of(ttft_s, 0.50, where=_kind(kind)),
        )
        for kind in ("urgent", "rest")
    )
    return replace(
        base,
        goal=Text(
            en="Measure what --scheduling-policy priority does to the TTFT of urgent requests, and "
            "of the others, when the cache is too small for all.",
            zh="测量缓存不足时，--scheduling-policy priority 对紧急请求及其余请求 TTFT 的影响。",
        ),
        variable=Variable(
            name="scheduling_policy",
            what=Text(
                en="--scheduling-policy fcfs or priority", zh="--scheduling-policy fcfs 或 priority"
            ),
            baseline=arm("fcfs", "先来先服务"),
            candidate=arm("priority", "按优先级"),
            consequences=("scheduler_config.policy",),
        ),
        hypothesis=Hypothesis(
            text=Text(
                en="Under pressure, scheduling by priority lowers the median TTFT of the urgent "
                "half; the other half pays for it.",
                zh="在压力下，按优先级调度会降低紧急一半请求的 TTFT 中位数，代价由另一半承担。",
            ),
            measure=urgent.name,
            direction="decrease",
            margin=0.10,
            equivalence=0.30,
        ),
        workload=partial(workload, mixed=True),
        measures=(urgent, rest, *MEASURES),
        acted=(*_pressed("baseline"), *_pressed("candidate")),
        settings={**base.settings, "num-gpu-blocks-override": SCARCE},
    )


EXPERIMENT = Experiment(
    title=Text(en="KV pressure and preemption", zh="KV 压力与抢占"),
    goal=Text(
        en="Put more requests on the engine than its KV cache can hold and count how often "
        "requests are preempted and started again. Pressure is proven first: without a full cache "
        "and waiting requests, the absence of preemptions says nothing.",
        zh="让请求所需的 KV 超过缓存容量，统计请求被抢占并重新开始的次数。"
        "先证明确有压力：若缓存未满、无请求等待，没有抢占说明不了任何问题。",
    ),
    variable=_blocks_variable(_arm("ample", AMPLE), _arm("scarce", SCARCE)),
    hypothesis=Hypothesis(
        text=Text(
            en="When the KV cache is too small for the running requests, the scheduler preempts: "
            "a request is started more than 1.1 times on average, against once with ample cache.",
            zh="KV 缓存容不下运行中的请求时，调度器会抢占：平均每个请求启动超过 1.1 次，"
            "缓存充足时为 1 次。",
        ),
        measure="starts_per_request",
        direction="increase",
        margin=0.10,
        equivalence=0.30,
    ),
    workload=workload,
    measures=MEASURES,
    acted=(
        *_pressed("candidate"),
        Condition(measure="kv_usage_max", arm="baseline", op="<", value=0.9),
    ),
    settings={
        "block-size": BLOCK_TOKENS,
        "enforce-eager": True,
        "enable-prefix-caching": False,
        "max-model-len": 512,
        "max-num-batched-tokens": 2048,
        "max-num-seqs": 128,
    },
    variants={"priority": priority, "kv-halved": kv_halved},
)
