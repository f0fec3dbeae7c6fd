"""Does prefix caching lower time to first token when requests share a long prefix?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from kit.asked import completion
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
from kit.measure import (
    Measure,
    counter_delta,
    output_throughput,
    quantile_of,
    ratio_of,
    tpot_s,
    ttft_s,
)

SYSTEM = "You are a helpful assistant. " * 170  # about 1,000 tokens
OUTPUT_TOKENS = 16
LANES = 4
REQUESTS = 24


def workload(
    scale: Scale, *, temperature: float = 0.0, prefix: Callable[[int], str] = lambda _: SYSTEM
) -> tuple[Phase, ...]:
    """Build the seed text's workload: one long system prompt, then a different question each.

    The warm-up uses other text of the same length, so it leaves nothing to hit. The cold first
    request fills the cache and is recorded apart: it is slow in both arms.
    """
    ask_for = partial(completion, scale, tokens=OUTPUT_TOKENS, temperature=temperature)

    def ask(i: int, lane: str) -> dict[str, Any]:
        prompt = f"{prefix(i)}User question {i}: what is {i} plus {i + 1}?"
        return ask_for(f"q{i:03d}", prompt, lane=lane)

    warmup = [
        ask_for(f"w{i}", f"Warm-up {i}. " + "Nothing here repeats. " * 200, lane="w")
        for i in range(2)
    ]
    return (
        Phase("warmup", tuple(warmup), concurrency=1, scrape_every_s=None),
        Phase("cold", (ask(0, "cold"),), concurrency=1, scrape_every_s=None),
        Phase(
            "measure",
            tuple(ask(i, f"lane{i % LANES}") for i in range(1, REQUESTS + 1)),
            concurrency=LANES,
        ),
    )


def temperature_07(base: Experiment) -> Experiment:
    """Sample at temperature 0.7: outputs differ, prompts do not, so hits should stay."""
    return replace(base, workload=partial(workload, temperature=0.7))


def changing_prefix(base: Experiment) -> Experiment:
    """Put a different number before the shared text of each request: nothing can be hit."""
    return replace(base, workload=partial(workload, prefix=lambda i: f"{i * 7919} {SYSTEM}"))


_HITS = counter_delta("vllm:prefix_cache_hits_total")
_QUERIES = counter_delta("vllm:prefix_cache_queries_total")


def _by_source(source: str) -> Measure:
    return Measure(
        f"prompt_tokens_{source}",
        "tokens",
        f"prompt tokens from {source.replace('_', ' ')}",
        counter_delta("vllm:prompt_tokens_by_source_total", source=source),
    )


EXPERIMENT = Experiment(
    title=Text(en="Prefix caching and time to first token", zh="前缀缓存与首 token 延迟"),
    goal=Text(
        en="Measure what prefix caching does to TTFT when requests share a system prompt of about "
        "1,000 tokens.",
        zh="测量多个请求共享约 1000 token 的系统提示时，前缀缓存对 TTFT 的影响。",
    ),
    variable=Variable(
        name="prefix_caching",
        what=Text(en="--enable-prefix-caching off or on", zh="--enable-prefix-caching 关或开"),
        baseline=Arm(
            name="off",
            label=Text(en="prefix caching off", zh="关闭前缀缓存"),
            flags={"enable-prefix-caching": False},
        ),
        candidate=Arm(
            name="on",
            label=Text(en="prefix caching on", zh="开启前缀缓存"),
            flags={"enable-prefix-caching": True},
        ),
        consequences=("cache_config.enable_prefix_caching",),
    ),
    hypothesis=Hypothesis(
        text=Text(
            en="With a shared prefix longer than one cache block, turning prefix caching on lowers "
            "the median TTFT of the requests after the first.",
            zh="共享前缀长于一个缓存块时，开启前缀缓存会降低首个请求之后各请求的 TTFT 中位数。",
        ),
        measure="ttft_p50_s",
        direction="decrease",
        margin=0.10,
        # on two shared cores a pair's log ratio has an sd of 0.2: two runs of six pairs that are
        # the same then differ by less than this nearly always, and the effect is -2
        equivalence=0.40,
    ),
    workload=workload,
    measures=(
        Measure("ttft_p50_s", "s", "TTFT, median", quantile_of(ttft_s, 0.50)),
        Measure("ttft_p95_s", "s", "TTFT, 95th percentile", quantile_of(ttft_s, 0.95)),
        Measure("ttft_p99_s", "s", "TTFT, 99th percentile", quantile_of(ttft_s, 0.99)),
        Measure("tpot_p50_s", "s", "TPOT, median", quantile_of(tpot_s, 0.50)),
        Measure("output_tok_per_s", "tok/s", "output throughput", output_throughput()),
        Measure("prefix_queries_tokens", "tokens", "prefix cache queries", _QUERIES),
        Measure("prefix_hits_tokens", "tokens", "prefix cache hits", _HITS),
        Measure(
            "prefix_hits_cold_tokens",
            "tokens",
            "prefix cache hits of the cold first request",
            counter_delta("vllm:prefix_cache_hits_total", phase="cold"),
        ),
        Measure("prefix_hit_ratio", "1", "hits per query", ratio_of(_HITS, _QUERIES)),
        _by_source("local_compute"),
        _by_source("local_cache_hit"),
    ),
    acted=(
        Condition(measure="prefix_hits_tokens", arm="candidate", op=">", value=0),
        Condition(measure="prefix_hit_ratio", arm="candidate", op=">=", value=0.5),
        Condition(measure="prefix_hits_tokens", arm="baseline", op="==", value=0),
        Condition(measure="prefix_hits_cold_tokens", arm="candidate", op="==", value=0),
    ),
    settings={"enforce-eager": True, "max-model-len": 4096, "max-num-seqs": 16},
    variants={"temperature-0.7": temperature_07, "changing-prefix": changing_prefix},
)
