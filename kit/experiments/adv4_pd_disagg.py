"""Do separate prefill and decode servers beat two whole servers on the same devices?"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from kit.asked import completion, random_ids
from kit.experiment import (
    Arm,
    Condition,
    Experiment,
    Flag,
    Hypothesis,
    Leg,
    Phase,
    Precondition,
    QualityLimit,
    Scale,
    Text,
    Variable,
)
from kit.experiments.adv2_tp_scaling import SPLIT
from kit.measure import (
    Comparison,
    Measure,
    Raw,
    Reading,
    counter_delta,
    max_itl_s,
    output_throughput,
    quantile_of,
    ratio_of,
    tpot_s,
    ttft_s,
)
from kit.metrics import PROXY_COST, device_count, gauge_of, info_label
from kit.quality import agreement
from kit.texts import TEXTS

SIDE_CHANNEL_PORT = "5600"
PROMPT_TOKENS = {"cpu": {"short": 32, "long": 384}, "cuda": {"short": 128, "long": 4096}}
OUTPUT_TOKENS = {"cpu": {"short": 8, "long": 48}, "cuda": {"short": 16, "long": 256}}
REQUESTS = {"cpu": 16, "cuda": 128}
LANES = {"cpu": 4, "cuda": 32}
QUALITY_WORDS = (1, 2, 3, 5, 8, 13, 21, 34, 45, 55, 62, 70)
QUALITY_TOKENS = 24
SHARED = 0.75  # of a prompt, where requests share a prefix


def workload(
    scale: Scale, *, prompt: str = "long", output: str = "long", shared: float = 0.0
) -> tuple[Phase, ...]:
    """Build texts of many lengths, asked one at a time, and a load of equal requests.

    `shared` is the part of each measured prompt that is the same in all of them.
    """
    length = PROMPT_TOKENS[scale.platform][prompt]
    tokens = OUTPUT_TOKENS[scale.platform][output]
    lanes, count = LANES[scale.platform], REQUESTS[scale.platform]
    common = random_ids(scale, "common", int(length * shared))

    def ask(name: str, lane: str) -> Any:
        own = random_ids(scale, name, length - len(common))
        return completion(scale, name, [*common, *own], tokens, lane=lane)

    words = " ".join(TEXTS).split()
    quality = [
        completion(scale, f"t{n:02d}", " ".join(words[n : 2 * n]), QUALITY_TOKENS, lane="one")
        for n in QUALITY_WORDS
    ]
    warmup = [
        completion(scale, name, random_ids(scale, name, length), 4, lane=name)
        for name in ("w0", "w1", "w2", "w3")
    ]
    return (
        Phase("warmup", tuple(warmup), concurrency=4, scrape_every_s=None),
        Phase("quality", tuple(quality), concurrency=1, scrape_every_s=None),
        Phase(
            "measure",
            tuple(ask(f"r{i:03d}", f"lane{i % lanes}") for i in range(count)),
            concurrency=lanes,
        ),
    )


# -- arms --------------------------------------------------------------------------------------


def _leg(name: str, connector: str, **more: Any) -> Leg:
    told = {"kv_connector": connector, "kv_role": f"kv_{name}", **more}
    return Leg(
        flags={"kv-transfer-config": json.dumps(told, separators=(",", ":"))},
        env={
            "VLLM_NIXL_SIDE_CHANNEL_HOST": name,
            "VLLM_NIXL_SIDE_CHANNEL_PORT": SIDE_CHANNEL_PORT,
            "UCX_PROTO_INFO": "y",
        },
    )


def _legs(connector: str = "NixlConnector", **more: Any) -> dict[str, Leg]:
    return {name: _leg(name, connector, **more) for name in ("producer", "consumer")}


def _arm(name: str, en: str, zh: str, topology: str, **more: Any) -> Arm:
    return Arm(name=name, label=Text(en=en, zh=zh), topology=topology, **more)


REPLICAS = _arm("replicas", "two whole servers", "两个完整服务", "replicas")
PD = _arm("p1d1", "one prefill, one decode", "一个预填充、一个解码", "pd", legs=_legs())


def _variable(baseline: Arm, candidate: Arm) -> Variable:
    return Variable(
        name="disaggregation",
        what=Text(
            en=f"{baseline.label.en}, or {candidate.label.en}: the same devices, the same proxy",
            zh=f"{baseline.label.zh}，或{candidate.label.zh}：设备相同，代理相同",
        ),
        baseline=baseline,
        candidate=candidate,
        consequences=(
            "kv_transfer_config",
            "vllm_env.VLLM_SSM_CONV_STATE_LAYOUT",  # which the connector sets
            "scheduler_config.disable_hybrid_kv_cache_manager",  # which some connectors need
        ),
    )


# -- measures ----------------------------------------------------------------------------------


def _of(leg: str, name: str, **labels: str) -> Callable[[Raw], Reading]:
    return counter_delta(f"vllm:{name}", leg=leg, **labels)


def _from(source: str) -> Callable[[Raw], Reading]:
    return _of("consumer", "prompt_tokens_by_source_total", source=source)


_BYTES = _of("consumer", "nixl_bytes_transferred_sum")
_TRANSFERS = _of("consumer", "nixl_bytes_transferred_count")
_TRANSFER_S = _of("consumer", "nixl_xfer_time_seconds_sum")
_MOVED, _COMPUTED = _from("external_kv_transfer"), _from("local_compute")


def computed_per_moved(raw: Raw) -> Reading:
    """Measure prompt tokens that the consumer computed itself for each one that was moved to it."""
    return ratio_of(_COMPUTED, _MOVED)(raw)


def _waiting(leg: str) -> Measure:
    return Measure(
        f"{leg}_waiting_max",
        "requests",
        f"waiting at the {leg}, most",
        gauge_of("vllm:num_requests_waiting", max, leg=leg),
    )


_CACHE = ratio_of(
    info_label("kv_cache_memory_bytes", leg="consumer"),
    info_label("kv_cache_size_tokens", leg="consumer"),
)

MEASURES = (
    Measure("stall_p50_s", "s", "longest gap in an answer, median", quantile_of(max_itl_s, 0.50)),
    Measure("ttft_p50_s", "s", "TTFT, median", quantile_of(ttft_s, 0.50)),
    Measure("tpot_p50_s", "s", "TPOT, median", quantile_of(tpot_s, 0.50)),
    Measure("output_tok_per_s", "tok/s", "output throughput", output_throughput()),
    Measure("devices", "devices", "devices of all engines", device_count),
    Measure("kv_bytes", "bytes", "KV moved to the consumer", _BYTES),
    Measure("kv_tokens", "tokens", "prompt tokens moved to the consumer", _MOVED),
    Measure("kv_bytes_per_token", "bytes", "KV moved for a token", ratio_of(_BYTES, _MOVED)),
    Measure("kv_cache_bytes_per_token", "bytes", "KV of a token in the consumer's cache", _CACHE),
    Measure("kv_transfers", "1", "transfers", _TRANSFERS),
    Measure("kv_transfer_mean_s", "s", "a transfer, mean", ratio_of(_TRANSFER_S, _TRANSFERS)),
    Measure("kv_bytes_per_s", "bytes/s", "rate of a transfer", ratio_of(_BYTES, _TRANSFER_S)),
    Measure("computed_per_moved", "1", "computed again per token moved", computed_per_moved),
    Measure(
        "kv_failed_transfers",
        "1",
        "failed transfers, handshakes and notifications",
        _of("consumer", "nixl_num_failed_transfers_total"),
    ),
    Measure(
        "kv_expired_requests",
        "requests",
        "requests whose KV nobody fetched in time",
        _of("producer", "nixl_num_kv_expired_reqs_total"),
    ),
    _waiting("producer"),
    _waiting("consumer"),
    PROXY_COST,
)


def _evidence(*measures: str) -> tuple[Precondition, ...]:
    return tuple(
        Precondition(
            otherwise="no transfer evidence",
            holds=Condition(measure=name, arm="candidate", op=">", value=0),
        )
        for name in measures
    )


IN_TIME = Precondition(  # the producer alone notices; the answer is a 200 with another text
    otherwise="KV was fetched after its lease",
    holds=Condition(measure="kv_expired_requests", arm="candidate", op="==", value=0),
)
SAME_TEXT = Precondition(
    otherwise="the text is not a single server's",
    holds=QualityLimit(comparison="greedy_agreement", op=">=", value=1.0),
)


# -- variants ----------------------------------------------------------------------------------


def long_short(base: Experiment) -> Experiment:
    """Ask with long prompts for short answers: nearly all work is prefill."""
    return replace(base, workload=partial(workload, output="short"))


def short_long(base: Experiment) -> Experiment:
    """Ask with short prompts for long answers: nearly all work is decode."""
    return replace(base, workload=partial(workload, prompt="short"))


def short_short(base: Experiment) -> Experiment:
    """Ask with short prompts for short answers: what the second hop costs shows most."""
    return replace(base, workload=partial(workload, prompt="short", output="short"))


def prefix_hit(base: Experiment) -> Experiment:
    """Share three quarters of each prompt: less to compute in one arm, less to move in one."""
    return replace(base, workload=partial(workload, shared=SHARED))


def tp2_baseline(base: Experiment) -> Experiment:
    """Compare with one server split over both devices; the heads must divide by 2."""
    flags: dict[str, Flag] = {"tensor-parallel-size": 2}
    split = _arm("tp2", "one server, TP 2", "一个 TP 2 服务", "tp-proxied", flags=flags)
    one = PD.model_copy(update={"flags": {"tensor-parallel-size": 1}})
    variable = _variable(split, one)
    return replace(
        base,
        variable=variable.model_copy(update={"consequences": (*variable.consequences, *SPLIT)}),
        # random weights are drawn for each rank, so another split is another model's text
        preconditions=(*_evidence("kv_bytes", "kv_tokens"), IN_TIME),
        comparisons=(),
        quality=(),
        # a split embedding is compiled on first use, which images without a compiler cannot
        env={"TORCHDYNAMO_DISABLE": "1"},
        model="qwen2.5-0.5b",
    )


def shared_ipc(base: Experiment) -> Experiment:
    """Let the legs share IPC and process namespaces, as CUDA IPC and shared memory need."""
    arm = PD.model_copy(update={"topology": "pd-shared-ipc"})
    return replace(base, variable=_variable(REPLICAS, arm))


def shared_storage(base: Experiment) -> Experiment:
    """Move the KV through files in shared memory instead of NIXL: the fallback connector."""
    told = {"kv_connector_extra_config": {"shared_storage_path": "/dev/shm/kv"}}  # noqa: S108
    legs = _legs("ExampleConnector", **told)
    # it hands no transfer parameters over: the consumer finds the files by the prompt's tokens
    legs["proxy"] = Leg(flags={"allow-recompute": True})
    arm = PD.model_copy(update={"topology": "pd-shared-ipc", "legs": legs})
    return replace(
        base, variable=_variable(REPLICAS, arm), preconditions=(*_evidence("kv_tokens"), SAME_TEXT)
    )


EXPERIMENT = Experiment(
    title=Text(en="Prefill and decode apart", zh="预填充与解码分离"),
    goal=Text(
        en="Measure what separating prefill from decode does to the stalls in an answer, to TTFT "
        "and to throughput, against two whole servers on the same devices; with proof that the KV "
        "really moved and that the text is a single server's.",
        zh="在设备相同的前提下，对照两个完整服务，测量预填充与解码分离对回答停顿、TTFT 与吞吐的"
        "影响；并证明 KV 确已传输、文本与单服务一致。",
    ),
    variable=_variable(REPLICAS, PD),
    hypothesis=Hypothesis(
        text=Text(
            en="A decode server that never computes a prompt does not stall its streams: the "
            "median of each answer's longest gap falls by more than a fifth. TTFT and throughput "
            "pay for it.",
            zh="解码服务不再计算提示，其数据流不会停顿：各回答最长间隔的中位数下降超过五分之一；"
            "代价由 TTFT 与吞吐承担。",
        ),
        measure="stall_p50_s",
        direction="decrease",
        margin=0.20,
        equivalence=0.30,
    ),
    workload=workload,
    measures=MEASURES,
    acted=(Condition(measure="computed_per_moved", arm="candidate", op="<=", value=0.5),),
    settings={
        "enforce-eager": True,
        "enable-prefix-caching": True,
        "max-model-len": 5120,
        "max-num-batched-tokens": 2048,
        "max-num-seqs": 64,
    },
    topology="pd",
    comparisons=(
        Comparison(
            "greedy_agreement", "1", "share of greedy answers that is equal", agreement("quality")
        ),
    ),
    quality=(QualityLimit(comparison="greedy_agreement", op=">=", value=1.0),),
    preconditions=(*_evidence("kv_bytes", "kv_tokens"), IN_TIME, SAME_TEXT),
    variants={
        "long-short": long_short,
        "short-long": short_long,
        "short-short": short_short,
        "prefix-hit": prefix_hit,
        "tp2-baseline": tp2_baseline,
        "shared-ipc": shared_ipc,
        "shared-storage": shared_storage,
    },
)
