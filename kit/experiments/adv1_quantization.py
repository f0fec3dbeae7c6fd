"""What does a smaller weight format give in throughput and latency, and is the text still good?"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from kit.accuracy import difference_of, score_of, stderr_of
from kit.asked import completion, random_ids
from kit.experiment import (
    CAPACITY,
    Arm,
    Condition,
    Evaluation,
    Experiment,
    Flag,
    Hypothesis,
    Needs,
    Phase,
    QualityLimit,
    Scale,
    Text,
    Variable,
)
from kit.experiments.exp3_fp8_kv import KV_TYPE, kv_dtype_is
from kit.measure import Comparison, Measure, output_throughput, quantile_of, tpot_s, ttft_s
from kit.metrics import gauge_of, info_label
from kit.quality import agreement, perplexity, ratio_between
from kit.startlog import (
    checkpoint_bytes,
    fallbacks_of,
    kernels_of,
    lines_of,
    weight_bits,
    weight_memory,
)
from kit.texts import TASKS, quality_phase

SATURATED, ONE = 256, 1
"""Requests under way at a time, on a GPU. Only together do they tell the reasons apart: one request
has the gain of the kernel alone, many also that of a larger batch and cache."""

FP8 = "fp8_per_tensor"
"""The word of all locked releases for FP8 made from the same weights while they are loaded; `fp8`
alone is its deprecated name since 0.32."""

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
GPTQ = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": 128,
    "desc_act": False,
    "sym": True,
    # without a checkpoint to look into, 0.26 takes no layer for quantised unless it is named
    "modules_in_block_to_quantize": [
        ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
        ["self_attn.o_proj"],
        ["mlp.up_proj", "mlp.gate_proj"],
        ["mlp.down_proj"],
    ],
}
MOST_BITS = {"fp8": 12.0, "int4": 9.0}
"""Bits of a weight on average, embeddings at 16 among them; above, nothing was quantised."""

GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}


def workload(scale: Scale, *, lanes: int = SATURATED) -> tuple[Phase, ...]:
    """Build the quality phase, then lanes that each always have one request under way."""
    if scale.platform == "cpu":
        lanes, count, length, tokens = min(lanes, 4), 8, 16, 16
    elif lanes == ONE:
        count, length, tokens = 512, 128, 32  # one after the other, and enough for a p99
    else:
        count, length, tokens = 3 * lanes, 256, 128

    def ask(name: str, lane: str) -> dict[str, Any]:
        return completion(scale, name, random_ids(scale, name, length), tokens, lane=lane)

    return (
        Phase("warmup", (ask("w0", "w"), ask("w1", "v")), concurrency=2, scrape_every_s=None),
        quality_phase(scale, TASKS),
        Phase(
            "measure",
            tuple(ask(f"r{i:04d}", f"lane{i % lanes}") for i in range(count)),
            concurrency=lanes,
        ),
    )


def _quantile(name: str, what: str, of: Callable[[Any], float | None], q: float) -> Measure:
    return Measure(name, "s", what, quantile_of(of, q))


MEASURES = (
    Measure("output_tok_per_s", "tok/s", "output throughput", output_throughput()),
    _quantile("ttft_p50_s", "TTFT, median", ttft_s, 0.50),
    _quantile("ttft_p99_s", "TTFT, 99th percentile", ttft_s, 0.99),
    _quantile("tpot_p50_s", "TPOT, median", tpot_s, 0.50),
    _quantile("tpot_p99_s", "TPOT, 99th percentile", tpot_s, 0.99),
    Measure("weight_memory_bytes", "bytes", "memory of the loaded weights", weight_memory),
    Measure("weight_bits", "bits", "bits of a weight, embeddings among them", weight_bits),
    Measure("checkpoint_bytes", "bytes", "weights on disk", checkpoint_bytes),
    Measure(
        "weight_kernels",
        "1",
        "kernels for quantised weights that the start log names, fallbacks among them",
        lines_of(kernels_of, fallbacks_of),
    ),
    Measure("weight_fallbacks", "1", "fallbacks that the start log names", lines_of(fallbacks_of)),
    Measure(
        "kv_cache_size_tokens",
        "tokens",
        "tokens that the KV cache holds",
        info_label("kv_cache_size_tokens"),
    ),
    Measure(
        "running_mean",
        "requests",
        "requests that a step computes, mean of the scrapes",
        gauge_of("vllm:num_requests_running", statistics.fmean),
    ),
)
OF_ANSWERS = (
    Measure("perplexity", "1", "perplexity of three bundled texts", perplexity("quality")),
)

NOT_QUANTISED = "not quantised"
NO_BASELINE = "the baseline is quantised itself"


def _is_quantised(
    arm: Literal["baseline", "candidate"], most_bits: float
) -> tuple[Condition, Condition]:
    return (
        Condition(
            measure="weight_bits", arm=arm, op="<=", value=most_bits, otherwise=NOT_QUANTISED
        ),
        Condition(measure="weight_kernels", arm=arm, op=">=", value=1, otherwise=NOT_QUANTISED),
    )


def _acted(most_bits: float) -> tuple[Condition, ...]:
    return (
        *_is_quantised("candidate", most_bits),
        Condition(measure="weight_bits", arm="baseline", op=">=", value=15, otherwise=NO_BASELINE),
        Condition(
            measure="weight_kernels", arm="baseline", op="==", value=0, otherwise=NO_BASELINE
        ),
    )


def _variable(name: str, en: str, zh: str, flags: Mapping[str, Flag]) -> Variable:
    shown = " ".join(f"--{flag} {value}" for flag, value in flags.items())
    return Variable(
        name="weight_format",
        what=Text(en=f"weights in bfloat16, or {shown}", zh=f"权重为 bfloat16，或 {shown}"),
        baseline=Arm(
            name="bf16",
            label=Text(en="weights in bfloat16", zh="权重为 bfloat16"),
            flags=dict.fromkeys(flags),
        ),
        candidate=Arm(name=name, label=Text(en=en, zh=zh), flags=dict(flags)),
        consequences=(
            "model_config.quantization",
            "model_config.quantization_config",
            "model_config.hf_overrides",
            "quant_config",
            *CAPACITY,  # smaller weights leave more memory
        ),
    )


def _hypothesis(name: str) -> Hypothesis:
    return Hypothesis(
        text=Text(
            en=f"Fewer bytes of weights are read for a step, so {name} weights raise output "
            "throughput by more than 10 %.",
            zh=f"每步读取的权重字节更少，因此 {name} 权重使输出吞吐提高超过 10%。",
        ),
        measure="output_tok_per_s",
        direction="increase",
        margin=0.10,
        equivalence=0.20,
    )


def _int4(name: str, config: Mapping[str, Any]) -> Callable[[Experiment], Experiment]:
    def variant(base: Experiment) -> Experiment:
        words = json.dumps({"quantization_config": config}, separators=(",", ":"))
        return replace(
            base,
            variable=_variable(
                name.lower(),
                f"weights in {name} INT4, random",
                f"{name} INT4 权重（随机）",
                {"hf-overrides": words},
            ),
            hypothesis=_hypothesis(f"{name} INT4"),
            acted=_acted(MOST_BITS["int4"]),
            needs=Needs(random_weights=True),
            model="qwen2.5-7b",
        )

    variant.__doc__ = (
        f"Weights in {name} INT4, of an exact shape with random weights: speed, not accuracy."
    )
    return variant


def batch_1(base: Experiment) -> Experiment:
    """Send one request at a time: is there a gain without a larger batch?"""
    return replace(base, workload=partial(workload, lanes=ONE))


def batch_1_graphs(base: Experiment) -> Experiment:
    """One request at a time with CUDA graphs: launching kernels hides nothing of the gain."""
    settings = {name: value for name, value in base.settings.items() if name != "enforce-eager"}
    words = json.dumps(GRAPHS, separators=(",", ":"))
    return replace(batch_1(base), settings={**settings, "compilation-config": words})


def _one_at_a_time(of: Callable[[Experiment], Experiment]) -> Callable[[Experiment], Experiment]:
    def variant(base: Experiment) -> Experiment:
        return batch_1(of(base))

    variant.__doc__ = f"{(of.__doc__ or '').split(',')[0]}, one request at a time."
    return variant


def two_by_two_weights(base: Experiment) -> Experiment:
    """Of FP8 weights x FP8 KV: the weights' format where the KV is FP8 in both arms."""
    return replace(base, settings={**base.settings, "kv-cache-dtype": "fp8"})


def two_by_two_kv(base: Experiment) -> Experiment:
    """Of FP8 weights x FP8 KV: the KV's type where the weights are FP8 in both arms."""

    def arm(dtype: str, en: str, zh: str) -> Arm:
        return Arm(name=dtype, label=Text(en=en, zh=zh), flags={"kv-cache-dtype": dtype})

    settings = {name: value for name, value in base.settings.items() if name != "kv-cache-dtype"}
    bits = MOST_BITS["fp8"]
    return replace(
        base,
        variable=Variable(
            name="kv_cache_dtype",
            what=Text(
                en=f"--kv-cache-dtype auto or fp8, both with --quantization {FP8}",
                zh=f"--kv-cache-dtype auto 或 fp8，两臂均为 --quantization {FP8}",
            ),
            baseline=arm("auto", "FP8 weights, KV in bfloat16", "FP8 权重，KV 为 bfloat16"),
            candidate=arm("fp8", "FP8 weights, KV in FP8", "FP8 权重，KV 为 FP8"),
            consequences=KV_TYPE,
        ),
        hypothesis=_hypothesis("FP8").model_copy(
            update={
                "text": Text(
                    en="With FP8 weights, an FP8 KV cache raises output throughput by more than "
                    "10 %.",
                    zh="在 FP8 权重下，FP8 KV 缓存使输出吞吐提高超过 10%。",
                )
            }
        ),
        measures=(*MEASURES, kv_dtype_is("fp8")),
        acted=(
            *_is_quantised("baseline", bits),
            *_is_quantised("candidate", bits),
            Condition(measure="kv_dtype_is_fp8", arm="baseline", op="==", value=0),
            Condition(measure="kv_dtype_is_fp8", arm="candidate", op="==", value=1),
        ),
        settings={**settings, "quantization": FP8},
    )


SCORES = {"kit_code": "acc", "kit_math": "exact_match", "kit_chat": "acc"}
"""Tasks that lm-eval scores right or wrong, and by what."""
PROSE, PROSE_METRIC = "kit_prose", "word_perplexity"
MOST_ITEMS = 64
HUB = ("EleutherAI/wikitext_document_level", "allenai/ai2_arc", "Rowan/hellaswag")


def _evaluated() -> tuple[Measure, ...]:
    each = [
        Measure(f"eval_{task}", "1", f"lm-eval's {metric} of {task}", score_of(task, metric))
        for task, metric in (*SCORES.items(), (PROSE, PROSE_METRIC))
    ]
    errors = [
        Measure(
            f"eval_{task}_stderr",
            "1",
            f"standard error of lm-eval's {metric} of {task}",
            stderr_of(task, metric),
        )
        for task, metric in SCORES.items()
    ]
    return (*each, *errors)


OF_EVALUATION = (
    Comparison(
        "eval_score_difference",
        "1",
        "share of lm-eval's items that is right, candidate less baseline",
        difference_of(SCORES),
    ),
    *(
        Comparison(
            f"eval_{task}_difference",
            "1",
            f"lm-eval's {metric} of {task}, candidate less baseline",
            difference_of({task: metric}),
        )
        for task, metric in SCORES.items()
    ),
    Comparison(
        f"eval_{PROSE}_ratio",
        "1",
        f"lm-eval's {PROSE_METRIC} of {PROSE}, candidate over baseline",
        ratio_between(score_of(PROSE, PROSE_METRIC)),
    ),
)


def lm_eval(base: Experiment) -> Experiment:
    """FP8 weights, and lm-eval on the kit's own code, arithmetic, chat and prose: real weights."""
    return replace(
        base,
        needs=Needs(real_weights=True),
        of_answers=(*base.of_answers, *_evaluated()),
        comparisons=(*base.comparisons, *OF_EVALUATION),
        quality=(
            *base.quality,
            # of 48 items; five lost ones are more than rounding turns
            QualityLimit(comparison="eval_score_difference", op=">=", value=-0.10),
            QualityLimit(comparison=f"eval_{PROSE}_ratio", op="<=", value=1.05),
        ),
        evaluation=Evaluation(image="lm-eval-0.4.13", tasks=(*SCORES, PROSE), limit=MOST_ITEMS),
    )


def lm_eval_hub(base: Experiment) -> Experiment:
    """WikiText, ARC-Easy and HellaSwag by lm-eval: refused, their data are not pinned yet."""
    return replace(lm_eval(base), needs=Needs(real_weights=True, data=HUB))


_awq, _gptq = _int4("AWQ", AWQ), _int4("GPTQ", GPTQ)

EXPERIMENT = Experiment(
    title=Text(en="Weight formats: speed, memory and quality", zh="权重格式：速度、显存与质量"),
    goal=Text(
        en="Measure what a smaller weight format does to output throughput, TTFT and TPOT, to the "
        "memory of the weights and to the text. The type of the KV cache stays the same in both "
        "arms. Many requests at a time show what a larger batch and cache add; `batch-1` shows "
        "the kernel alone. That the format acted is proven by the weights' memory and the kernel "
        "that the engine names; a fallback is recorded. Perplexity does not replace an evaluation "
        "of one's own tasks: agreement on code, arithmetic and chat is reported beside it.",
        zh="测量更小的权重格式对输出吞吐、TTFT、TPOT、权重显存与文本质量的影响；两臂 KV 类型相同。"
        "饱和负载包含更大批与更大缓存的作用，`batch-1` 只反映 kernel。"
        "以权重显存与引擎所报 kernel 证明格式起作用，回退会被记录。"
        "困惑度不能替代业务评估：同时报告代码、算术与对话任务的一致率。",
    ),
    variable=_variable("fp8", "weights in FP8", "FP8 权重", {"quantization": FP8}),
    hypothesis=_hypothesis("FP8"),
    workload=workload,
    measures=MEASURES,
    of_answers=OF_ANSWERS,
    acted=_acted(MOST_BITS["fp8"]),
    settings={
        "dtype": "bfloat16",  # of what is computed; the formats refuse float32
        "enforce-eager": True,
        "enable-prefix-caching": False,
        "kv-cache-dtype": "auto",
        "max-model-len": 2048,
        "max-num-batched-tokens": 8192,
        "max-num-seqs": SATURATED,
    },
    # ranking log probabilities is compiled on first use, which images without a compiler cannot
    env={"TORCHDYNAMO_DISABLE": "1"},
    comparisons=(
        Comparison(
            "greedy_agreement", "1", "share of greedy answers that is equal", agreement("quality")
        ),
        *(
            Comparison(
                f"agreement_{task}",
                "1",
                f"share of greedy answers that is equal, {task}",
                agreement("quality", task=task),
            )
            for task in TASKS
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
        QualityLimit(comparison="perplexity_ratio", op="<=", value=1.05),
    ),
    refusals=(
        r"torch\.\w+ is not supported for quantization method .*",
        r"[\w-]+ quantization is currently not supported in .*",
        r"The quantization method \S+ is not supported for the current GPU.*",
        r"Unknown quantization method: .*",
        r"argument --quantization/-q: invalid choice: .*",
        r"Failed to find a kernel that can implement the .*",
        r"Marlin does not support .*",
        r"NotImplementedError: .*(?i:fp8|float8|quant|scaled_mm).*",
        r"RuntimeError: .*(?i:fp8|float8|scaled_mm).*",
        r"AttributeError: '_OpNamespace' '\w+' object has no attribute '\w+'",
    ),
    variants={
        "batch-1": batch_1,
        "batch-1-graphs": batch_1_graphs,
        "awq": _awq,
        "awq-batch-1": _one_at_a_time(_awq),
        "gptq": _gptq,
        "gptq-batch-1": _one_at_a_time(_gptq),
        "2x2-weights": two_by_two_weights,
        "2x2-kv": two_by_two_kv,
        "lm-eval": lm_eval,
        "lm-eval-hub": lm_eval_hub,
    },
)
