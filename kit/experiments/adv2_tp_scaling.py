"""What does splitting a model over more devices give, and what does each device still do?"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

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
    output_throughput,
    quantile_of,
    ratio_of,
    tpot_s,
    ttft_s,
)
from kit.metrics import device_count
from kit.quality import ratio_between

PROMPT_TOKENS = {"cpu": 32, "cuda": 512}
OUTPUT_TOKENS = {"cpu": 32, "cuda": 256}
BATCH = 8


def workload(scale: Scale, *, batch: int = BATCH) -> tuple[Phase, ...]:
    """Build `batch` lanes that each always have one request under way."""
    length, tokens = PROMPT_TOKENS[scale.platform], OUTPUT_TOKENS[scale.platform]
    count = max(2 * batch, 8) if batch < 64 else batch

    def ask(name: str, lane: str) -> dict[str, Any]:
        draw = random.Random(f"{scale.seed}:{name}")  # noqa: S311 - text, not a secret
        body = {
            "model": scale.model,
            "prompt": [draw.randrange(1000, 20_000) for _ in range(length)],
            "max_tokens": tokens,
            "ignore_eos": True,
            "temperature": 0.0,
            "seed": scale.seed,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return {"id": name, "path": "/v1/completions", "body": body, "lane": lane, "tags": {}}

    return (
        Phase("warmup", (ask("w0", "w"), ask("w1", "v")), concurrency=2, scrape_every_s=None),
        Phase(
            "measure",
            tuple(ask(f"r{i:03d}", f"lane{i % batch}") for i in range(count)),
            concurrency=batch,
        ),
    )


_THROUGHPUT = output_throughput()
_EACH = ratio_of(_THROUGHPUT, device_count)


def _median(name: str, what: str, of: Callable[[Any], float | None]) -> Measure:
    return Measure(name, "s", what, quantile_of(of, 0.50))


MEASURES = (
    Measure("output_tok_per_s", "tok/s", "output throughput", _THROUGHPUT),
    Measure("tok_per_s_per_device", "tok/s", "output throughput of a device", _EACH),
    Measure("devices", "devices", "devices of all engines", device_count),
    _median("ttft_p50_s", "TTFT, median", ttft_s),
    _median("tpot_p50_s", "TPOT, median", tpot_s),
)


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
        "tp-4": tp_4,
        "tp-8": tp_8,
    },
)
