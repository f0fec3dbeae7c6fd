"""Does a small token budget keep long prompts from stalling the streams that are decoding?"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from kit.asked import completion, random_ids
from kit.experiment import (
    CAPACITY,
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
    Of,
    Raw,
    Reading,
    Sample,
    counter_delta,
    max_itl_s,
    mean_of,
    null_reading,
    output_throughput,
    pooled_gap_quantile,
    quantile_of,
    reading_of,
    tpot_s,
    ttft_s,
)

SMALL, LARGE = 512, 8192
LANES = 5
SAME_STEP_S = 0.002  # answers of one step leave the server within this time
MOMENT_S = 0.010


@dataclass(frozen=True)
class Size:
    """How much load: streams a lane, tokens of a stream, long prompts, tokens of a long prompt.

    In a cycle of the large budget (one stall, then the long answer's ten tokens) a stream gets
    11 tokens: 16 tokens meet at least one stall, and the long prompts outlast the streams.
    """

    streams: int
    stream_tokens: int
    longs: int
    long_tokens: int


SIZES = {
    "cpu": Size(streams=4, stream_tokens=16, longs=6, long_tokens=2048),
    "cuda": Size(streams=100, stream_tokens=16, longs=150, long_tokens=7000),
}


def _ask(
    scale: Scale, name: str, prompt: str | Sequence[int], tokens: int, lane: str
) -> dict[str, Any]:
    kind = "long" if lane == "long" else "short"
    return completion(scale, name, prompt, tokens, tags={"kind": kind}, lane=lane)


def workload(scale: Scale, *, long_tokens: int | None = None) -> tuple[Phase, ...]:
    """Build five lanes of short streams beside one lane of long prompts, back to back.

    Closed loop: whatever the speed of the machine, every stream meets long prompts.
    """
    size = SIZES[scale.platform]
    length = long_tokens or size.long_tokens

    def long(name: str, tokens: int) -> dict[str, Any]:
        return _ask(scale, name, random_ids(scale, name, tokens), 10, "long")

    streams = [
        _ask(scale, f"s{lane}-{i:03d}", "Hi, how are you?", size.stream_tokens, f"stream{lane}")
        for lane in range(LANES)
        for i in range(size.streams)
    ]
    longs = [long(f"l{i:03d}", length) for i in range(size.longs)]
    warmup = (_ask(scale, "w0", "Hello there.", 8, "w"), long("w1", length // 4))
    return (
        Phase("warmup", warmup, concurrency=1, scrape_every_s=None),
        Phase("measure", (*streams, *longs), concurrency=LANES + 1),
    )


def batch_workload(scale: Scale) -> tuple[Phase, ...]:
    """Build a batch that nobody watches: all prompts are there at once."""
    count, tokens = (16, 600) if scale.platform == "cpu" else (400, 2000)

    def ask(name: str, lane: str) -> dict[str, Any]:
        return _ask(scale, name, random_ids(scale, name, tokens), 16, lane)

    return (
        Phase("warmup", (ask("w0", "w"),), concurrency=1, scrape_every_s=None),
        Phase(
            "measure", tuple(ask(f"b{i:03d}", f"b{i:03d}") for i in range(count)), concurrency=count
        ),
    )


def _is_stream(sample: Sample) -> bool:
    return bool(sample["tags"]["kind"] == "short")


def _is_long(sample: Sample) -> bool:
    return bool(sample["tags"]["kind"] == "long")


def _of_streams(name: str, what: str, q: float, of: Of) -> Measure:
    return Measure(name, "s", f"streams: {what}", quantile_of(of, q, where=_is_stream))


PRIMARY = _of_streams("stream_max_itl_p50_s", "longest gap of each, median", 0.50, max_itl_s)
STREAMS = (
    PRIMARY,
    _of_streams("stream_max_itl_p75_s", "longest gap of each, 75th percentile", 0.75, max_itl_s),
    _of_streams("stream_tpot_p50_s", "TPOT, median", 0.50, tpot_s),
    _of_streams("stream_tpot_p75_s", "TPOT, 75th percentile", 0.75, tpot_s),
    _of_streams("stream_tpot_p99_s", "TPOT, 99th percentile", 0.99, tpot_s),
    Measure(
        "stream_gaps_p99_s",
        "s",
        "streams: all gaps pooled, 99th percentile (hides stalls rarer than 1 %)",
        pooled_gap_quantile(0.99, where=_is_stream),
    ),
    _of_streams("stream_ttft_p50_s", "TTFT, median", 0.50, ttft_s),
    Measure("long_ttft_mean_s", "s", "long prompts: TTFT, mean", mean_of(ttft_s, where=_is_long)),
)
THROUGHPUT = Measure("output_tok_per_s", "tok/s", "output throughput", output_throughput())


STEPS = Measure(
    "steps",
    "1",
    "engine steps that gave tokens",
    counter_delta("vllm:iteration_tokens_total_count"),
)


def tokens_during_prefill(raw: Raw) -> Reading:
    """Measure how many tokens a stream gets while a long prompt is being read, median.

    The engine counts no chunks (its histogram of step sizes gives a whole prompt to the step
    that ends it), but a stream gets a token with every step. Of each long prompt from its send
    to its first token, the stream that got most counts; prompts that met no stream are left out.
    """
    window = raw.measured
    good = [s for s in window.samples if not s.get("error")]
    streams = [s["chunk_s"] for s in good if _is_stream(s)]
    counts = [
        max(_within(chunks, s["sent_s"], s["chunk_s"][0] - SAME_STEP_S) for chunks in streams)
        for s in good
        if _is_long(s) and s["chunk_s"] and streams
    ]
    met = [c for c in counts if c]
    if not met:
        return null_reading("no stream was beside a long prompt", 0, window.samples_file)
    return reading_of(statistics.median(met), len(met), window.samples_file)


def _within(times: Sequence[float], begin: float, end: float) -> int:
    return sum(begin < t < end for t in times)


def prompts_per_moment(raw: Raw) -> Reading:
    """Measure how many requests get their first token at one moment: more than fit a budget?

    Moments are 10 ms apart or more.
    """
    window = raw.measured
    firsts = sorted(s["chunk_s"][0] for s in window.samples if s["chunk_s"])
    if not firsts:
        return null_reading("no request was answered", 0, window.samples_file)
    moments = 1 + sum(b - a >= MOMENT_S for a, b in itertools.pairwise(firsts))
    return reading_of(len(firsts) / moments, len(firsts), window.samples_file)


DURING = Measure(
    "tokens_during_prefill",
    "tokens",
    "tokens of a stream while a long prompt is read, median",
    tokens_during_prefill,
)
TOGETHER = Measure(
    "prompts_per_moment", "1", "first tokens at one moment, mean", prompts_per_moment
)


def _arm(name: str, tokens: int) -> Arm:
    return Arm(
        name=name,
        label=Text(en=f"budget {tokens:,} tokens", zh=f"预算 {tokens} token"),
        flags={"max-num-batched-tokens": tokens},
    )


def _variable(large: int, small: int) -> Variable:
    return Variable(
        name="max_num_batched_tokens",
        what=Text(
            en=f"--max-num-batched-tokens {large} or {small}",
            zh=f"--max-num-batched-tokens {large} 或 {small}",
        ),
        baseline=_arm("large", large),
        candidate=_arm("small", small),
        consequences=(
            "scheduler_config.max_num_batched_tokens",
            "scheduler_config.max_num_encoder_input_tokens",
            "scheduler_config.encoder_cache_size",
            "compilation_config.compile_ranges_endpoints",
            *CAPACITY,  # profiling a smaller step leaves more device memory for the cache
        ),
    )


def batch_only(base: Experiment) -> Experiment:
    """Ask for throughput: a batch of prompts and no streams; does the large budget help?"""
    variable = _variable(LARGE, SMALL)
    return replace(
        base,
        goal=Text(
            en="Measure what the token budget does to the throughput of a batch that nobody "
            "watches.",
            zh="测量 token 预算对无人等待的批量任务吞吐的影响。",
        ),
        variable=variable.model_copy(
            update={"baseline": variable.candidate, "candidate": variable.baseline}
        ),
        hypothesis=Hypothesis(
            text=Text(
                en="In a batch without streams the large budget raises output throughput: fewer "
                "steps, each with its fixed cost.",
                zh="在没有流式请求的批量任务中，大预算提高输出吞吐：步数更少，每步固定开销更低。",
            ),
            measure="output_tok_per_s",
            direction="increase",
            margin=0.05,
            equivalence=0.10,
        ),
        workload=batch_workload,
        measures=(THROUGHPUT, STEPS, TOGETHER),
        # of 600 tokens a small step ends one prompt, a large one a dozen
        acted=(
            Condition(measure=TOGETHER.name, arm="baseline", op="<=", value=1.5),
            Condition(measure=TOGETHER.name, arm="candidate", op=">=", value=2),
        ),
    )


def budgets_1024_16384(base: Experiment) -> Experiment:
    """Compare 16,384 with 1,024 tokens, on prompts of 6,000."""
    return replace(
        base,
        variable=_variable(16_384, 1024),
        workload=partial(workload, long_tokens=6000),
    )


EXPERIMENT = Experiment(
    title=Text(en="Token budget and stalls of short streams", zh="token 预算与短流式请求的停顿"),
    goal=Text(
        en="Measure what --max-num-batched-tokens does to streams that are decoding while long "
        "prompts arrive. The statistic is the longest gap of each stream, its median over the "
        "streams: a large budget makes few but long stalls, fewer than one gap in a hundred when "
        "answers are long, so that the 99th percentile of all gaps pooled can even point the "
        "other way; one gap a stream cannot be diluted.",
        zh="测量长 prompt 到达时，--max-num-batched-tokens 对正在解码的流的影响。"
        "统计量取每个流最长的相邻 token 间隔，再取各流的中位数：大预算造成次数少但时间长的停顿，"
        "回答较长时不到全部间隔的百分之一，此时把所有间隔混在一起的 p99 甚至会指向相反方向；"
        "每个流只取一个最长间隔则不会被稀释。",
    ),
    variable=_variable(LARGE, SMALL),
    hypothesis=Hypothesis(
        text=Text(
            en="A small budget cuts a long prompt into several steps, so the longest gap in a "
            "short stream beside it gets shorter; the long prompt's own TTFT and the number of "
            "steps may grow.",
            zh="小预算把长 prompt 切成多步，与其同时解码的短流的最长间隔变短；"
            "长 prompt 自身的 TTFT 和总步数可能增加。",
        ),
        measure=PRIMARY.name,
        direction="decrease",
        margin=0.10,
        equivalence=0.15,
    ),
    workload=workload,
    measures=(*STREAMS, THROUGHPUT, STEPS, DURING),
    # in one step: the step under way, and its end; in four or more: as many more
    acted=(
        Condition(measure=DURING.name, arm="baseline", op="<=", value=3),
        Condition(measure=DURING.name, arm="candidate", op=">=", value=5),
    ),
    settings={
        "enforce-eager": True,
        "enable-prefix-caching": False,
        "max-model-len": 8192,
        "max-num-seqs": 16,
    },
    variants={"batch-only": batch_only, "budgets-1024-16384": budgets_1024_16384},
)
