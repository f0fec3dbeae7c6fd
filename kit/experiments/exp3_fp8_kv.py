"""Does an FP8 KV cache hold more blocks in the same memory, with text that is still good?"""

from __future__ import annotations

from dataclasses import replace

from kit.experiment import (
    CAPACITY,
    Arm,
    Condition,
    Experiment,
    Hypothesis,
    Needs,
    Phase,
    QualityLimit,
    Scale,
    Text,
    Variable,
)
from kit.measure import (
    Comparison,
    Measure,
    mean_of,
    output_throughput,
    ratio_of,
    tpot_s,
)
from kit.metrics import info_label, info_label_is
from kit.quality import agreement, perplexity, ratio_between
from kit.texts import PROMPTS, plain_request, quality_phase


def workload(scale: Scale) -> tuple[Phase, ...]:
    """Build the quality phase (greedy answers, texts to score) and a small decoding load."""
    lanes = 8
    count, tokens = (16, 32) if scale.platform == "cpu" else (128, 128)
    stream = {
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    load = [
        plain_request(scale, f"d{i:03d}", PROMPTS[i % len(PROMPTS)], f"lane{i % lanes}", **stream)
        for i in range(count)
    ]
    warmup = (plain_request(scale, "w0", "Hello there.", "w", max_tokens=4),)
    return (
        Phase("warmup", warmup, concurrency=1, scrape_every_s=None),
        quality_phase(scale),
        Phase("measure", tuple(load), concurrency=lanes),
    )


_MEMORY = info_label("kv_cache_memory_bytes")
_TOKENS = info_label("kv_cache_size_tokens")

MEASURES = (
    Measure("num_gpu_blocks", "blocks", "blocks in the KV cache", info_label("num_gpu_blocks")),
    Measure("block_tokens", "tokens", "tokens in a block", info_label("block_size")),
    Measure("kv_cache_size_tokens", "tokens", "tokens that the KV cache holds", _TOKENS),
    Measure("kv_cache_memory_bytes", "bytes", "memory of the KV cache", _MEMORY),
    Measure("kv_bytes_per_token", "bytes", "KV bytes of one token", ratio_of(_MEMORY, _TOKENS)),
    Measure("perplexity", "1", "perplexity of three bundled texts", perplexity("quality")),
    Measure("tpot_mean_s", "s", "TPOT, mean", mean_of(tpot_s)),
    Measure("output_tok_per_s", "tok/s", "output throughput", output_throughput()),
)


def kv_dtype_is(prefix: str) -> Measure:
    """Return the measure of whether the KV cache has a type of that kind."""
    return Measure(
        f"kv_dtype_is_{prefix}",
        "1",
        f"whether the engine names a KV type that begins with {prefix}",
        info_label_is("cache_dtype", prefix),
    )


KV_TYPE = ("cache_config.cache_dtype", *CAPACITY)
"""What follows from another KV type."""


def _dtype_variable(dtype: str) -> Variable:
    return Variable(
        name="kv_cache_dtype",
        what=Text(en=f"--kv-cache-dtype auto or {dtype}", zh=f"--kv-cache-dtype auto 或 {dtype}"),
        baseline=Arm(
            name="auto",
            label=Text(en="KV in the model's type", zh="KV 与模型同类型"),
            flags={"kv-cache-dtype": "auto"},
        ),
        candidate=Arm(
            name=dtype,
            label=Text(en=f"KV in {dtype}", zh=f"KV 为 {dtype}"),
            flags={"kv-cache-dtype": dtype},
        ),
        consequences=KV_TYPE,
    )


def bf16_kv(base: Experiment) -> Experiment:
    """Keep the model in float32 and the KV cache in bfloat16: more blocks, and is the text good?"""
    return replace(
        base,
        variable=_dtype_variable("bfloat16"),
        settings={**base.settings, "dtype": "float32"},
        needs=Needs(),
        measures=(*MEASURES, kv_dtype_is("bfloat16")),
        acted=(Condition(measure="kv_dtype_is_bfloat16", arm="candidate", op="==", value=1),),
    )


def memory_05_09(base: Experiment) -> Experiment:
    """Give the engine 0.9 of the memory instead of 0.5 (CPU: 2 GiB of KV instead of 1)."""

    def arm(name: str, share: float, gib: int) -> Arm:
        return Arm(
            name=name,
            label=Text(en=f"memory {share} (CPU: {gib} GiB)", zh=f"显存 {share}（CPU：{gib} GiB）"),
            flags={"gpu-memory-utilization": share},
            env={"VLLM_CPU_KVCACHE_SPACE": str(gib)},
        )

    return replace(
        base,
        goal=Text(
            en="Find out whether the number of KV blocks grows in proportion to the memory share.",
            zh="考察 KV 块数是否随显存比例线性增长。",
        ),
        variable=Variable(
            name="kv_memory",
            what=Text(
                en="--gpu-memory-utilization 0.5 or 0.9; on CPU, KV space of 1 or 2 GiB",
                zh="--gpu-memory-utilization 0.5 或 0.9；CPU 上 KV 空间为 1 或 2 GiB",
            ),
            baseline=arm("half", 0.5, 1),
            candidate=arm("most", 0.9, 2),
            consequences=(*CAPACITY, "cache_config.gpu_memory_utilization"),
        ),
        hypothesis=Hypothesis(
            text=Text(
                en="Weights and activations take a fixed share, so blocks grow at least in "
                "proportion to the memory: 0.9 against 0.5 gives at least 1.8 times as many.",
                zh="权重与激活占用固定，块数至少按比例增长：0.9 对 0.5 至少为 1.8 倍。",
            ),
            measure="num_gpu_blocks",
            direction="increase",
            margin=0.79,
            equivalence=0.02,
            kind="exact",
        ),
        measures=MEASURES,
        acted=(),
        needs=Needs(),
        settings={k: v for k, v in base.settings.items() if k != "gpu-memory-utilization"},
    )


EXPERIMENT = Experiment(
    title=Text(en="FP8 KV cache: capacity and quality", zh="FP8 KV 缓存：容量与质量"),
    goal=Text(
        en="Measure how many more KV blocks fit into the same memory in FP8, and whether the "
        "text stays as good. The ratio is reported; exactly 2 is not promised.",
        zh="测量同样内存下 FP8 KV 能多容纳多少块，以及文本质量是否保持。"
        "报告比值，不承诺恰好 2 倍。",
    ),
    variable=_dtype_variable("fp8"),
    hypothesis=Hypothesis(
        text=Text(
            en="On a platform with FP8 KV the bytes of a block shrink, so more than one and a "
            "half times as many blocks fit, at the same quality.",
            zh="在支持 FP8 KV 的平台上，单块字节数下降，质量不变时块数超过 1.5 倍。",
        ),
        measure="num_gpu_blocks",
        direction="increase",
        margin=0.50,
        equivalence=0.02,
        kind="exact",
    ),
    workload=workload,
    measures=(*MEASURES, kv_dtype_is("fp8")),
    acted=(Condition(measure="kv_dtype_is_fp8", arm="candidate", op="==", value=1),),
    settings={
        "enforce-eager": True,
        "enable-prefix-caching": False,
        "gpu-memory-utilization": 0.5,
        "max-model-len": 2048,
        "max-num-seqs": 16,
    },
    # ranking log probabilities is compiled on first use, which images without a compiler cannot
    env={"TORCHDYNAMO_DISABLE": "1"},
    needs=Needs(cpu_flags=("avx512f", "amx_bf16")),
    comparisons=(
        Comparison(
            "greedy_agreement", "1", "share of greedy answers that is equal", agreement("quality")
        ),
        Comparison(
            "perplexity_ratio",
            "1",
            "perplexity, candidate over baseline",
            ratio_between(perplexity("quality")),
        ),
    ),
    quality=(
        QualityLimit(comparison="greedy_agreement", op=">=", value=0.75),
        QualityLimit(comparison="perplexity_ratio", op="<=", value=1.10),
    ),
    refusals=(
        r"NotImplementedError: .*(?i:fp8|kv.?cache).*",
        r"ValueError: .*(?i:fp8|kv.?cache.?dtype).*",
        r"RuntimeError: .*FP8 KV cache is only supported.*",
    ),
    variants={"bf16-kv": bf16_kv, "memory-0.5-0.9": memory_05_09},
)
