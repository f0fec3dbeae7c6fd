"""What does splitting a model over more devices give, and what does each device still do?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from kit.asked import completion, random_ids
from kit.curve import at_knee, is_of_stair, served_in, staircase
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
    Comparison,
    Measure,
    Raw,
    Reading,
    null_reading,
    output_throughput,
    quantile_of,
    ratio_of,
    reading_of,
    tpot_s,
    ttft_s,
)
from kit.metrics import PROXY_COST, device_count
from kit.quality import ratio_between
from kit.trace import PARTS, PROFILER_CONFIG, Split, trace_file

PROMPT_TOKENS = {"cpu": 32, "cuda": 512}
OUTPUT_TOKENS = {"cpu": 32, "cuda": 256}
BATCH = 8
RATES = {"cpu": (0.25, 0.5, 1.0, 1.5, 2.0), "cuda": (5.0, 10.0, 20.0, 50.0, 100.0)}  # requests/s
PROFILED_TOKENS = 16  # a step is thousands of events
STAIR_S = 16.0  # each rate gives whole requests in the part of a stair that is counted


def _request(scale: Scale, name: str, *, tokens: int | None = None, **when: Any) -> dict[str, Any]:
    prompt = random_ids(scale, name, PROMPT_TOKENS[scale.platform])
    return completion(scale, name, prompt, tokens or OUTPUT_TOKENS[scale.platform], **when)


def _warmup(scale: Scale) -> Phase:
    asked = (_request(scale, "w0", lane="w"), _request(scale, "w1", lane="v"))
    return Phase("warmup", asked, concurrency=2, scrape_every_s=None)


def workload(scale: Scale, *, batch: int = BATCH) -> tuple[Phase, ...]:
    """Build `batch` lanes that each always have one request under way."""
    count = max(2 * batch, 8) if batch < 64 else batch
    asked = tuple(_request(scale, f"r{i:03d}", lane=f"lane{i % batch}") for i in range(count))
    return (_warmup(scale), Phase("measure", asked, concurrency=batch))


def staircase_workload(scale: Scale) -> tuple[Phase, ...]:
    """Build requests that come evenly spaced at a rate that rises from stair to stair."""
    asked = tuple(
        _request(scale, f"r{i:04d}", at_s=arrival.at_s, tags=arrival.tags)
        for i, arrival in enumerate(staircase(RATES[scale.platform], STAIR_S))
    )
    return (_warmup(scale), Phase("measure", asked, concurrency=len(asked)))


def profiled_workload(scale: Scale) -> tuple[Phase, ...]:
    """Build the lanes, and after them one short request each under the profiler."""
    asked = tuple(
        _request(scale, f"p{i:03d}", tokens=PROFILED_TOKENS, lane=f"lane{i}") for i in range(BATCH)
    )
    last = Phase("profile", asked, concurrency=BATCH, scrape_every_s=None, profile=True)
    return (*workload(scale), last)


_THROUGHPUT = output_throughput()
_EACH = ratio_of(_THROUGHPUT, device_count)


def _median(name: str, what: str, of: Callable[[Any], float | None]) -> Measure:
    return Measure(name, "s", what, quantile_of(of, 0.50))


_EACH_AT_KNEE = ratio_of(at_knee(lambda stair: stair.served_tok_per_s), device_count)


def _stair(number: int) -> tuple[Measure, ...]:
    own = is_of_stair(number)
    return (
        Measure(
            f"stair{number}_tok_per_s",
            "tok/s",
            f"output throughput in stair {number}",
            served_in(number),
        ),
        *(
            Measure(
                f"stair{number}_ttft_{word}_s",
                "s",
                f"TTFT in stair {number}, {word}",
                quantile_of(ttft_s, q, where=own),
            )
            for word, q in (("p50", 0.50), ("p99", 0.99))
        ),
    )


CURVE = (
    Measure(
        "knee_req_per_s",
        "requests/s",
        "request rate at the knee",
        at_knee(lambda stair: stair.served_req_per_s),
    ),
    Measure(
        "tok_per_s_per_device_at_knee",
        "tok/s",
        "output throughput of a device at the knee",
        _EACH_AT_KNEE,
    ),
    Measure("devices", "devices", "devices of all engines", device_count),
    *(each for number in range(1, 6) for each in _stair(number)),
)
MEASURES = (
    Measure("output_tok_per_s", "tok/s", "output throughput", _THROUGHPUT),
    Measure("tok_per_s_per_device", "tok/s", "output throughput of a device", _EACH),
    Measure("devices", "devices", "devices of all engines", device_count),
    _median("ttft_p50_s", "TTFT, median", ttft_s),
    _median("tpot_p50_s", "TPOT, median", tpot_s),
)


def _traced(rank: int, of: Callable[[Split], float]) -> Callable[[Raw], Reading]:
    """Measure a number of the profiled phase's trace of one rank."""

    def compute(raw: Raw) -> Reading:
        window, name = raw.windows["profile"], trace_file("server", rank)
        if name not in window.traces:
            return null_reading(f"there is no rank {rank}", 0, window.samples_file)
        split, file = window.traces[name].split, f"{window.folder}/{name}"
        if split is None:
            return null_reading("the trace has no op and no kernel", 0, file)
        return reading_of(of(split), 1, file)

    return compute


def _of_rank(rank: int) -> Iterator[Measure]:
    """Yield a rank's traced window and the shares of its parts; all of it as slow as profiled."""

    def share(part: str) -> Callable[[Split], float]:
        return lambda split: float(getattr(split, f"{part}_s")) / split.window_s

    yield Measure(
        f"rank{rank}_traced_s",
        "s",
        f"traced window of rank {rank}",
        _traced(rank, lambda split: split.window_s),
    )
    for part in (*PARTS, "gaps"):
        what = f"share of {part} in the traced window of rank {rank}"
        yield Measure(f"rank{rank}_{part}_share", "1", what, _traced(rank, share(part)))


def efficiency(baseline: Raw, candidate: Raw) -> Reading:
    """Compare a device's throughput: 1 where more devices lose nothing by working together."""
    return ratio_between(_EACH)(baseline, candidate)


def _arm(ranks: int) -> Arm:
    return Arm(
        name=f"tp{ranks}",
        label=Text(en=f"TP {ranks}", zh=f"TP {ranks}"),
        flags={"tensor-parallel-size": ranks},
    )


SPLIT = (
    "parallel_config",
    "compilation_config.pass_config",
    "cache_config.num_gpu_blocks",
    "cache_config.kv_cache_size_tokens",
    "cache_config.kv_cache_max_concurrency",
    "cache_config.kv_cache_memory_bytes",
    # on CPU a rank is a list of cores
    "vllm_env.VLLM_CPU_OMP_THREADS_BIND",
    "facts.server.vllm.environment.VLLM_CPU_OMP_THREADS_BIND",
    "facts.server.gpu",
)
"""What follows from another number of ranks."""


def _variable(ranks: int) -> Variable:
    return Variable(
        name="tensor_parallel_size",
        what=Text(
            en=f"--tensor-parallel-size 1 or {ranks}, on as many devices",
            zh=f"--tensor-parallel-size 1 或 {ranks}，设备数相同",
        ),
        baseline=_arm(1),
        candidate=_arm(ranks),
        consequences=SPLIT,
    )


def _on(ranks: int) -> tuple[Condition, ...]:
    return (
        Condition(measure="devices", arm="baseline", op="==", value=1),
        Condition(measure="devices", arm="candidate", op="==", value=ranks),
    )


def tp_4(base: Experiment) -> Experiment:
    """Split over four devices instead of two."""
    return replace(base, variable=_variable(4), acted=_on(4))


def tp_8(base: Experiment) -> Experiment:
    """Split over eight devices instead of two."""
    return replace(base, variable=_variable(8), acted=_on(8))


def batch_1(base: Experiment) -> Experiment:
    """Send one request at a time: latency, where splitting helps most."""
    return replace(base, workload=partial(workload, batch=1))


def batch_64(base: Experiment) -> Experiment:
    """Keep 64 requests under way: throughput, where splitting helps least."""
    return replace(base, workload=partial(workload, batch=64))


def profile(base: Experiment) -> Experiment:
    """Trace each rank after the measured phase: what share of its time is communication?"""
    return replace(
        base,
        workload=profiled_workload,
        measures=(*MEASURES, *_of_rank(0), *_of_rank(1)),
        settings={**base.settings, "profiler-config": PROFILER_CONFIG},
    )


def load_curve(base: Experiment) -> Experiment:
    """Raise the request rate stair by stair: up to which does the server keep up?"""
    return replace(
        base,
        goal=Text(
            en="Find the request rate up to which one device, and two that share a model, keep up "
            "with what comes, and what each stair of rates does to TTFT.",
            zh="找出单个设备与共同承载一个模型的两个设备各能跟上的最高请求速率，"
            "并测量每级速率下的 TTFT。",
        ),
        hypothesis=Hypothesis(
            text=Text(
                en="Two devices keep up with more requests than one: the rate at the knee of the "
                "load curve is more than 1.2 times as high.",
                zh="两个设备能跟上的请求多于一个设备：负载曲线拐点处的请求速率超过 1.2 倍。",
            ),
            measure="knee_req_per_s",
            direction="increase",
            margin=0.20,
            equivalence=0.30,
        ),
        workload=staircase_workload,
        measures=CURVE,
        comparisons=(
            Comparison(
                "scaling_efficiency",
                "1",
                "a device's throughput at the knee, candidate over baseline",
                ratio_between(_EACH_AT_KNEE),
            ),
        ),
    )


def instances(base: Experiment) -> Experiment:
    """Use two devices for two whole servers instead of one split one, behind the same proxy."""
    split = _arm(2).model_copy(update={"topology": "tp-proxied"})
    whole = _arm(1).model_copy(
        update={
            "name": "dp2",
            "label": Text(en="two servers", zh="两个服务"),
            "topology": "replicas",
        }
    )
    return replace(
        base,
        variable=Variable(
            name="split",
            what=Text(
                en="two devices: one server with TP 2, or two servers",
                zh="两个设备：一个 TP 2 服务，或两个服务",
            ),
            baseline=split,
            candidate=whole,
            consequences=SPLIT,
        ),
        hypothesis=Hypothesis(
            text=Text(
                en="Where the model fits on one device, two servers give more output throughput "
                "than one that is split: they have nothing to tell each other.",
                zh="模型能放入单个设备时，两个服务的输出吞吐高于一个拆分的服务：它们无需通信。",
            ),
            measure="output_tok_per_s",
            direction="increase",
            margin=0.10,
            equivalence=0.30,
        ),
        measures=(*MEASURES, PROXY_COST),
        acted=tuple(
            Condition(measure="devices", arm=arm, op="==", value=2)
            for arm in ("baseline", "candidate")
        ),
    )


EXPERIMENT = Experiment(
    title=Text(en="Tensor parallel scaling", zh="张量并行扩展"),
    goal=Text(
        en="Measure the output throughput and latency of one model on one device and split over "
        "two, and how much of a device is left for work when it must talk to another.",
        zh="测量同一模型在单个设备与拆分到两个设备时的输出吞吐与延迟，以及通信之后每个设备还剩多少效率。",
    ),
    variable=_variable(2),
    hypothesis=Hypothesis(
        text=Text(
            en="Two devices give more output throughput than one: more than 1.2 times as much. The "
            "efficiency, throughput(n) over n times throughput(1), is reported beside it.",
            zh="两个设备的输出吞吐高于一个设备，超过 1.2 倍；同时报告效率，"
            "即 n 设备吞吐除以 n 倍单设备吞吐。",
        ),
        measure="output_tok_per_s",
        direction="increase",
        margin=0.20,
        equivalence=0.30,
    ),
    workload=workload,
    measures=MEASURES,
    acted=_on(2),
    settings={
        "enforce-eager": True,
        "enable-prefix-caching": False,
        "max-model-len": 1024,
        "max-num-batched-tokens": 2048,  # its default depends on the number of ranks
        "max-num-seqs": 64,
    },
    # a split embedding is compiled on first use, which images without a compiler cannot
    env={"TORCHDYNAMO_DISABLE": "1"},
    topology="tp",
    comparisons=(
        Comparison(
            "scaling_efficiency", "1", "a device's throughput, candidate over baseline", efficiency
        ),
    ),
    refusals=(
        r"ValueError: .*must be divisible by tensor parallel size.*",
        r"ValueError: .*world size.*is larger than.*available.*",
    ),
    model="qwen2.5-0.5b",
    variants={
        "batch-1": batch_1,
        "batch-64": batch_64,
        "instances": instances,
        "load-curve": load_curve,
        "profile": profile,
        "tp-4": tp_4,
        "tp-8": tp_8,
    },
)
