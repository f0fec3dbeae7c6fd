"""What the stub's control plane answers: /metrics, /server_info and the like, shaped as vLLM's."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Iterator, Mapping
from typing import Any

from .stub_config import holds
from .stub_engine import Engine

VERSION = "0.32.0+stub"

_CONFIG_OF = {
    "model_config": (
        "model served_model_name tokenizer dtype seed max_model_len quantization enforce_eager"
    ),
    "cache_config": (
        "enable_prefix_caching block_size gpu_memory_utilization cache_dtype "
        "num_gpu_blocks_override prefix_caching_hash_algo"
    ),
    "scheduler_config": (
        "max_num_batched_tokens max_num_seqs async_scheduling policy enable_chunked_prefill"
    ),
    "parallel_config": "tensor_parallel_size pipeline_parallel_size data_parallel_size",
    "load_config": "load_format",
}
_RENAMED = {"kv_cache_dtype": "cache_dtype", "scheduling_policy": "policy"}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "model_config": {"dtype": "float32", "seed": 0, "max_model_len": 8192, "quantization": None},
    "cache_config": {"cache_dtype": "auto", "num_gpu_blocks_override": None},
    "scheduler_config": {
        "max_num_batched_tokens": 2048,
        "max_num_seqs": 256,
        "async_scheduling": False,
        "policy": "fcfs",
    },
    "parallel_config": {"tensor_parallel_size": 1, "pipeline_parallel_size": 1},
    "load_config": {"load_format": "auto"},
}


def server_info(engine: Engine, model: str) -> dict[str, Any]:
    """Return the resolved configuration as GET /server_info?config_format=json shows it."""
    arguments = {_RENAMED.get(name, name): value for name, value in engine.arguments.items()}
    config: dict[str, Any] = {section: dict(values) for section, values in _DEFAULTS.items()}
    for section, names in _CONFIG_OF.items():
        config[section].update({n: arguments[n] for n in names.split() if n in arguments})
    config["model_config"]["model"] = model
    config["cache_config"]["enable_prefix_caching"] = engine.prefix_caching
    config["cache_config"]["block_size"] = engine.block_tokens
    config["cache_config"]["num_gpu_blocks"] = engine.kv_blocks
    for whole in ("speculative_config", "kv_transfer_config"):
        config[whole] = arguments.get(whole)
    for change in engine.config.info_when:
        if holds(change.get("when", {}), engine.arguments):
            for path, value in change["set"].items():
                section, _, name = path.partition(".")
                config.setdefault(section, {})[name] = value
    return {
        "vllm_config": config,
        "vllm_env": {k: v for k, v in sorted(os.environ.items()) if k.startswith("VLLM_")},
        "system_env": {"python_version": platform.python_version(), "os": platform.system()},
    }


def metrics_text(engine: Engine, model: str) -> str:
    """Return /metrics in Prometheus' text format, with lines of other collectors among them."""
    lines = [
        "# HELP python_info Python platform information",
        "# TYPE python_info gauge",
        f'python_info{{implementation="CPython",version="{platform.python_version()}"}} 1.0',
    ]
    for name, kind, series in _families(engine):
        family = f"vllm:{name}_total" if kind == "counter" else f"vllm:{name}"
        lines += [f"# HELP {family} {name.replace('_', ' ')}.", f"# TYPE {family} {kind}"]
        for labels, value in series:
            told = {"engine": "0", "model_name": model, **labels}
            part = told.pop("part", "")  # of a histogram
            inner = ",".join(f'{key}="{value}"' for key, value in told.items())
            lines.append(f"{family}{part}{{{inner}}} {float(value)}")
    return "\n".join(lines) + "\n"


_Series = list[tuple[Mapping[str, str], float]]


def _families(engine: Engine) -> Iterator[tuple[str, str, _Series]]:
    count = engine.counts

    def one(value: float) -> _Series:
        return [({}, value)]

    yield "num_requests_running", "gauge", one(len(engine.running))
    yield "num_requests_waiting", "gauge", one(engine.waiting)
    yield "kv_cache_usage_perc", "gauge", one(engine.kv_usage)
    yield "prefix_cache_queries", "counter", one(count["prefix_queries"])
    yield "prefix_cache_hits", "counter", one(count["prefix_hits"])
    yield "num_preemptions", "counter", one(math.floor(count["preemptions"]))
    yield "prompt_tokens", "counter", one(count["prompt_tokens"])
    sources = ("local_compute", "local_cache_hit", "external_kv_transfer")
    by_source: _Series = [({"source": source}, count[source]) for source in sources]
    yield "prompt_tokens_by_source", "counter", by_source
    yield "generation_tokens", "counter", one(count["generation_tokens"])
    reasons = ("stop", "length", "abort", "error")
    done: _Series = [({"finished_reason": r}, engine.finished[r]) for r in reasons]
    yield "request_success", "counter", done
    if isinstance(engine.arguments.get("speculative_config"), dict):
        yield "spec_decode_num_drafts", "counter", one(count["drafts"])
        yield "spec_decode_num_draft_tokens", "counter", one(count["draft_tokens"])
        yield "spec_decode_num_accepted_tokens", "counter", one(count["accepted"])
    if engine.transfer.role is not None:
        yield from _transfer_families(engine)
    info = {
        "block_size": str(engine.block_tokens),
        "cache_dtype": str(engine.arguments.get("kv_cache_dtype", "auto")),
        "enable_prefix_caching": str(engine.prefix_caching),
        "num_gpu_blocks": str(engine.kv_blocks),
        "kv_cache_size_tokens": str(engine.kv_blocks * engine.block_tokens),
    }
    yield "cache_config_info", "gauge", [(info, 1)]


def _transfer_families(engine: Engine) -> Iterator[tuple[str, str, _Series]]:
    """Yield what vLLM's NixlConnector counts; a histogram with its last bucket only."""
    engine.transfer.expire()
    count, n = engine.counts, engine.counts["nixl_transfers"]
    sums = {
        "nixl_xfer_time_seconds": count["nixl_seconds"],
        "nixl_post_time_seconds": 0.0,
        "nixl_bytes_transferred": count["nixl_bytes"],
        "nixl_num_descriptors": count["nixl_descriptors"],
    }
    for name, total in sums.items():
        bucket = {"part": "_bucket", "le": "+Inf"}
        yield name, "histogram", [(bucket, n), ({"part": "_sum"}, total), ({"part": "_count"}, n)]
    counters = {
        "nixl_num_failed_transfers": count["nixl_failed"],
        "nixl_num_failed_notifications": 0.0,
        "nixl_num_kv_expired_reqs": count["nixl_expired"],
        "nixl_num_notifications_after_expiry": count["nixl_late"],
        "external_prefix_cache_queries": count["external_queries"],
        "external_prefix_cache_hits": count["external_hits"],
    }
    for name, value in counters.items():
        yield name, "counter", [({}, value)]


def models(model: str, max_model_len: int = 8192) -> dict[str, Any]:
    """Return GET /v1/models."""
    card = {"id": model, "object": "model", "owned_by": "vllm", "max_model_len": max_model_len}
    return {"object": "list", "data": [card]}
