"""Results of others' load generators, read as the kit's own sample lines.

Each tool tells its own start and gaps of every request; nothing is computed that it did not tell.
Times become seconds from the first send. Where a tool gives no times of single tokens, `chunk_s`
holds the first and the last one alone and `per_token` is false.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from kit.errors import BadFile
from kit.measure import Sample
from kit.value import explain, load_json, parse_value, read_text

Tool = Literal["vllm-bench", "guidellm", "aiperf"]
Clock = Literal["monotonic", "utc"]

AIPERF_RECORDS = "profile_export.jsonl"
_DECLARED = 300  # characters of a value that is kept


@dataclass(frozen=True)
class Foreign:
    """One result file: the requests, and what the file says of how they were made.

    `t0_s` is the first send on `clock`, in seconds; `asked` how many requests were to be sent, if
    the tool says so. `declared` is the tool's own word and was not checked by anyone.
    """

    tool: Tool
    version: str | None
    t0_s: float
    clock: Clock
    per_token: bool
    asked: int | None
    declared: Mapping[str, str]
    samples: tuple[Sample, ...]


class _Told(BaseModel):
    """A part of a file of others: what is read has its type, the rest may be anything."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True, allow_inf_nan=False)


def read_foreign(path: Path) -> Foreign:
    """Read a result of any tool that is known here; raise `BadFile` where it is none, or broken.

    `vllm bench serve --save-result --save-detailed`, GuideLLM's JSON, or AIPerf's
    `profile_export.jsonl`.
    """
    if path.suffix == ".jsonl":
        return _aiperf(path)
    raw = load_json(path, finite=False)
    if "benchmarks" in raw:
        return _guidellm(raw, path.name)
    if "ttfts" in raw and "itls" in raw:
        return _vllm_bench(raw, path.name)
    if "request_throughput" in raw:
        hint = "`vllm bench serve` writes single requests only with --save-detailed"
    else:
        hint = f"known: vllm bench serve, GuideLLM's JSON, AIPerf's {AIPERF_RECORDS}"
    raise BadFile(f"{path.name}: no results of single requests in it", hint=hint)


# -- vllm bench serve --------------------------------------------------------------------------


class _VllmBench(_Told):
    """Its lists have one entry for each request, in the order of sending; times in seconds."""

    start_times: tuple[float, ...]
    ttfts: tuple[float, ...]
    itls: tuple[tuple[float, ...], ...]
    errors: tuple[str, ...]
    input_lens: tuple[int, ...]
    output_lens: tuple[int, ...]
    generated_texts: tuple[str, ...] | None = None


def _vllm_bench(raw: dict[str, Any], source: str) -> Foreign:
    told = parse_value(_VllmBench, raw, source, strict=True)
    lists = (told.ttfts, told.itls, told.errors, told.input_lens, told.output_lens)
    if any(len(each) != len(told.start_times) for each in lists) or not told.start_times:
        raise BadFile(f"{source}: its lists are of different lengths, or empty")
    t0_s = min(told.start_times)
    samples = [
        _sample(
            f"r{i}",
            sent_s=told.start_times[i] - t0_s,
            gaps_s=() if told.errors[i] else (told.ttfts[i], *told.itls[i]),
            prompt_tokens=told.input_lens[i],
            completion_tokens=told.output_lens[i],
            error=told.errors[i] or None,
            text=told.generated_texts[i] if told.generated_texts else "",
        )
        for i in range(len(told.start_times))
    ]
    return Foreign(
        tool="vllm-bench",
        version=None,  # the file does not say it
        t0_s=t0_s,
        clock="monotonic",
        per_token=True,
        asked=raw["num_prompts"] if isinstance(raw.get("num_prompts"), int) else None,
        declared=_plain(raw, "date backend model_id tokenizer_id request_rate burstiness "
                             "max_concurrency"),
        samples=tuple(samples),
    )  # fmt: skip


# -- GuideLLM ----------------------------------------------------------------------------------


class _GuideTimings(_Told):
    """UTC seconds."""

    request_start: float | None = None
    first_token_iteration: float | None = None
    last_token_iteration: float | None = None
    request_end: float | None = None


class _GuideInfo(_Told):
    timings: _GuideTimings
    error: str | None = None


class _GuideRequest(_Told):
    request_id: str
    response_id: str | None = None
    info: _GuideInfo
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    output: str | None = None


class _GuideRequests(_Told):
    successful: tuple[_GuideRequest, ...] = ()
    incomplete: tuple[_GuideRequest, ...] = ()
    errored: tuple[_GuideRequest, ...] = ()


class _GuideBenchmark(_Told):
    requests: _GuideRequests


class _GuideReport(_Told):
    benchmarks: tuple[_GuideBenchmark, ...]


def _guidellm(raw: dict[str, Any], source: str) -> Foreign:
    told = parse_value(_GuideReport, raw, source, strict=True)
    if len(told.benchmarks) != 1:
        raise BadFile(
            f"{source}: {len(told.benchmarks)} benchmarks are in it, one is needed",
            hint="a sweep is many loads: run one profile with one rate",
        )
    groups = told.benchmarks[0].requests
    sent = [r for r in (*groups.successful, *groups.incomplete, *groups.errored)
            if r.info.timings.request_start is not None]  # fmt: skip
    if not sent:
        raise BadFile(f"{source}: no request of it was sent")
    t0_s = min(r.info.timings.request_start or 0.0 for r in sent)
    failed = {id(r): "incomplete" for r in groups.incomplete} | {
        id(r): r.info.error or "errored" for r in groups.errored
    }
    metadata = raw.get("metadata") if isinstance(raw.get("metadata"), dict) else {}
    return Foreign(
        tool="guidellm",
        version=_text((metadata or {}).get("guidellm_version")),
        t0_s=t0_s,
        clock="utc",
        per_token=False,
        asked=None,
        declared=_plain(metadata or {}, "python_version platform"),
        samples=tuple(_guide_sample(r, t0_s, failed.get(id(r))) for r in sent),
    )


def _guide_sample(request: _GuideRequest, t0_s: float, error: str | None) -> Sample:
    told = request.info.timings
    sent_s = (told.request_start or 0.0) - t0_s
    tokens = [told.first_token_iteration, told.last_token_iteration]
    chunks = [at - t0_s for at in tokens if at is not None] if error is None else []
    if request.output_tokens == 1:
        chunks = chunks[:1]
    sample = _sample(
        request.request_id,
        sent_s=sent_s,
        gaps_s=(),
        prompt_tokens=request.prompt_tokens,
        completion_tokens=request.output_tokens,
        error=error,
        text=request.output or "",
    )
    done = told.request_end
    return {
        **sample,
        "chunk_s": chunks,
        "done_s": None if done is None else done - t0_s,
        "tags": {"response_id": request.response_id} if request.response_id else {},
    }


# -- AIPerf ------------------------------------------------------------------------------------


class _Number(_Told):
    value: float


class _Numbers(_Told):
    value: tuple[float, ...]


class _AiperfMetadata(_Told):
    """UTC nanoseconds."""

    x_request_id: str
    request_start_ns: int
    request_end_ns: int | None = None
    benchmark_phase: str = "profiling"


class _AiperfMetrics(_Told):
    """Times in ms."""

    time_to_first_token: _Number | None = None
    inter_chunk_latency: _Numbers | None = None
    input_sequence_length: _Number | None = None
    output_sequence_length: _Number | None = None


class _AiperfRecord(_Told):
    metadata: _AiperfMetadata
    metrics: _AiperfMetrics | None = None
    error: dict[str, Any] | None = None


_RECORD: TypeAdapter[_AiperfRecord] = TypeAdapter(_AiperfRecord)


def _aiperf(path: Path) -> Foreign:
    records = []
    for number, line in enumerate(read_text(path, shown=path.name).splitlines(), 1):
        try:
            records.append(_RECORD.validate_json(line))
        except ValidationError as error:
            raise BadFile(f"{path.name}, line {number}: {explain(error)}") from None
    measured = [r for r in records if r.metadata.benchmark_phase == "profiling"]
    if not measured:
        raise BadFile(f"{path.name}: no measured request is in it")
    t0_ns = min(r.metadata.request_start_ns for r in measured)
    about = next((load_json(each, finite=False) for each in beside(path)), {})
    return Foreign(
        tool="aiperf",
        version=_text(about.get("aiperf_version")),
        t0_s=t0_ns / 1e9,
        clock="utc",
        per_token=True,
        asked=None,
        declared=_plain(about, "benchmark_id start_time"),
        samples=tuple(_aiperf_sample(r, t0_ns) for r in measured),
    )


def beside(path: Path) -> list[Path]:
    """Return what belongs to a result file and lies beside it: AIPerf's own summary."""
    summary = path.with_name("profile_export_aiperf.json")
    return [summary] if path.name == AIPERF_RECORDS and summary.is_file() else []


def _aiperf_sample(record: _AiperfRecord, t0_ns: int) -> Sample:
    told, metrics = record.metadata, record.metrics or _AiperfMetrics()
    gaps_ms: list[float] = []
    if metrics.time_to_first_token and not record.error:
        gaps_ms.append(metrics.time_to_first_token.value)
        gaps_ms += metrics.inter_chunk_latency.value if metrics.inter_chunk_latency else ()
    sample = _sample(
        told.x_request_id,
        sent_s=(told.request_start_ns - t0_ns) / 1e9,
        gaps_s=[gap / 1e3 for gap in gaps_ms],
        prompt_tokens=_whole(metrics.input_sequence_length),
        completion_tokens=_whole(metrics.output_sequence_length),
        error=None if not record.error else _cut(json.dumps(record.error, sort_keys=True)),
        text="",
    )
    done = told.request_end_ns
    return {**sample, "done_s": None if done is None else (done - t0_ns) / 1e9}


def _whole(number: _Number | None) -> int | None:
    return None if number is None else round(number.value)


# -- what all of them share --------------------------------------------------------------------


def _sample(
    name: str,
    *,
    sent_s: float,
    gaps_s: Sequence[float],
    prompt_tokens: int | None,
    completion_tokens: int | None,
    error: str | None,
    text: str,
) -> Sample:
    """Return a line of samples.jsonl; `gaps_s` are the TTFT and the gaps that follow it.

    The schedule is not told, so latency starts at the send: the request is one of a lane.
    """
    chunks = [sent_s + passed for passed in itertools.accumulate(gaps_s)]
    return {
        "id": name,
        "tags": {},
        "lane": name,
        "intended_s": None,
        "connect_s": None,
        "sent_s": sent_s,
        "chunk_s": chunks,
        "text": text,
        "done_s": chunks[-1] if chunks else None,
        "status": None if error else 200,
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "cached_tokens": None,
        "finish_reason": None,
        "error": error and _cut(error),
        "stamps": "user",
    }


def _plain(raw: Mapping[str, Any], keys: str) -> dict[str, str]:
    """Return these keys' values as text, where they are there and plain."""
    found = {key: raw.get(key) for key in keys.split()}
    return {k: _cut(str(v)) for k, v in found.items() if isinstance(v, str | int | float)}


def _text(value: object) -> str | None:
    return _cut(value) if isinstance(value, str) else None


def _cut(text: str) -> str:
    return text if len(text) <= _DECLARED else text[:_DECLARED] + "…"
