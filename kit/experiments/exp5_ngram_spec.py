"""What does ngram speculation accept, and does it raise output throughput?"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from kit.experiment import (
    CAPACITY,
    Arm,
    Condition,
    Experiment,
    Hypothesis,
    Needs,
    Phase,
    Scale,
    Text,
    Variable,
)
from kit.measure import (
    Comparison,
    Measure,
    counter_delta,
    mean_of,
    output_throughput,
    quantile_of,
    ratio_of,
    tpot_s,
    ttft_s,
)
from kit.quality import agreement

WIDTH = 3
NGRAM = {"method": "ngram", "num_speculative_tokens": WIDTH, "prompt_lookup_max": 4}
EAGLE = {"method": "eagle", "model": "/model/draft", "num_speculative_tokens": WIDTH}

NAMES = ("Ada", "Ben", "Cleo", "Dora", "Emil", "Fay", "Gus", "Hana", "Ivo", "June")
THINGS = ("lantern", "river", "clock", "garden", "violin", "harbour", "mirror", "kite")


@dataclass(frozen=True)
class Kind:
    """A kind of text: how request `i` reads, and the temperature at which it is continued."""

    text: Callable[[int], str]
    is_chat: bool = False
    temperature: float = 0.0


def _json_text(i: int) -> str:
    rows = [
        {"id": i * 100 + k, "type": "sensor", "unit": "celsius", "status": "ok", "value": 20 + k}
        for k in range(5)
    ]
    return "\n".join(json.dumps(row) for row in rows) + "\n"


def _code_text(i: int) -> str:
    fields = [f"{thing}_{i}" for thing in THINGS[:5]]
    methods = "".join(
        f"    def get_{f}(self) -> int:\n        return self._{f}\n\n"
        f"    def set_{f}(self, value: int) -> None:\n        self._{f} = value\n\n"
        for f in fields
    )
    return f"class Store{i}:\n{methods}"


def _templated_text(i: int) -> str:
    return "".join(
        f"Dear {name},\nyour order number {i * 100 + k} has left our house today and will reach "
        "you within three working days. Thank you for your trust.\nYour service team\n\n"
        for k, name in enumerate(NAMES[:4])
    )


def _chat_text(i: int) -> str:
    return f"I saw an old {THINGS[i % len(THINGS)]} today. Why do people care about such things?"


def _creative_text(i: int) -> str:
    return f"Write a strange short story about a {THINGS[i % len(THINGS)]} and {NAMES[i % 10]}."


KINDS = {
    "json": Kind(_json_text),
    "code": Kind(_code_text),
    "templated": Kind(_templated_text),
    "chat": Kind(_chat_text, is_chat=True, temperature=0.7),
    "creative": Kind(_creative_text, is_chat=True, temperature=1.0),
}


def _request(scale: Scale, kind: Kind, i: int, lane: str, tokens: int) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": scale.model,
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": kind.temperature,
        "seed": scale.seed + i,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if kind.is_chat:
        body["messages"] = [{"role": "user", "content": kind.text(i)}]
    else:
        body["prompt"] = kind.text(i)
    path = "/v1/chat/completions" if kind.is_chat else "/v1/completions"
    return {"id": f"{lane}-{i:03d}", "path": path, "body": body, "lane": lane, "tags": {}}


def workload(scale: Scale, *, kind: str = "json", batch: int = 1) -> tuple[Phase, ...]:
    """Build `batch` closed-loop lanes of continuations of one kind of text."""
    chosen = KINDS[kind]
    on_cpu = scale.platform == "cpu"
    count, tokens = (max(12, 2 * batch), 64) if on_cpu else (max(16, 8 * batch), 256)
    load = tuple(_request(scale, chosen, i, f"lane{i % batch}", tokens) for i in range(count))
    return (
        Phase(
            "warmup",
            (_request(scale, chosen, 900, "w", 16),),
            concurrency=1,
            scrape_every_s=None,
        ),
        Phase("measure", load, concurrency=batch),
    )


def _of_kind(kind: str, doc: str) -> Callable[[Experiment], Experiment]:
    def variant(base: Experiment) -> Experiment:
        is_greedy = KINDS[kind].temperature == 0  # only then are the arms' texts comparable
        return replace(
            base,
            workload=partial(workload, kind=kind),
            comparisons=base.comparisons if is_greedy else (),
        )

    variant.__doc__ = doc
    return variant


def _of_batch(batch: int, doc: str) -> Callable[[Experiment], Experiment]:
    def variant(base: Experiment) -> Experiment:
        return replace(base, workload=partial(workload, batch=batch))

    variant.__doc__ = doc
    return variant


def _variable(method: str, config: dict[str, Any]) -> Variable:
    words = json.dumps(config, separators=(",", ":"))
    return Variable(
        name="speculation",
        what=Text(
            en=f"--speculative-config {words} or none", zh=f"--speculative-config {words} 或无"
        ),
        baseline=Arm(
            name="none",
            label=Text(en="no speculation", zh="无投机解码"),
            flags={"speculative-config": None},
        ),
        candidate=Arm(
            name=method,
            label=Text(en=f"{method}, {WIDTH} tokens ahead", zh=f"{method}，预测 {WIDTH} 个 token"),
            flags={"speculative-config": words},
        ),
        consequences=(
            "speculative_config",
            # a limit of its own, which resolves to the budget that both arms have
            "scheduler_config.max_num_scheduled_tokens",
            *CAPACITY,  # drafting takes device memory of its own
        ),
    )


def eagle(base: Experiment) -> Experiment:
    """Speculate with an EAGLE draft model, which must be in the model's folder as draft/."""
    return replace(
        base,
        variable=_variable("eagle", EAGLE),
        needs=base.needs.model_copy(update={"model_files": ("draft/config.json",)}),
    )


_DRAFTS = counter_delta("vllm:spec_decode_num_drafts_total")
_PROPOSED = counter_delta("vllm:spec_decode_num_draft_tokens_total")
_ACCEPTED = counter_delta("vllm:spec_decode_num_accepted_tokens_total")

SPECULATION = (
    Measure("drafts", "1", "drafts", _DRAFTS),
    Measure("draft_tokens", "tokens", "tokens proposed", _PROPOSED),
    Measure("accepted_tokens", "tokens", "tokens accepted", _ACCEPTED),
    Measure("acceptance", "1", "tokens accepted of those proposed", ratio_of(_ACCEPTED, _PROPOSED)),
    Measure("accepted_per_draft", "tokens", "accepted of a draft", ratio_of(_ACCEPTED, _DRAFTS)),
    *(
        Measure(
            f"accepted_at_{place + 1}",
            "1",
            f"drafts accepted at least up to token {place + 1}",
            ratio_of(
                counter_delta(
                    "vllm:spec_decode_num_accepted_tokens_per_pos_total", position=str(place)
                ),
                _DRAFTS,
            ),
        )
        for place in range(WIDTH)
    ),
)

EXPERIMENT = Experiment(
    title=Text(
        en="ngram speculation: acceptance and throughput", zh="ngram 投机解码：接受率与吞吐"
    ),
    goal=Text(
        en="Measure what speculation by looking up the last tokens in the text so far does to "
        "output throughput, beside its acceptance, TTFT and TPOT. Speculation switches "
        "asynchronous scheduling and, on CUDA, the newer model runner off; both arms run without "
        "them, so that speculation is all that differs.",
        zh="测量从已有文本中查找后续 token 的投机解码对输出吞吐的影响，并报告接受率、TTFT 与 TPOT。"
        "投机解码会关闭异步调度，在 CUDA 上还会关闭新的 model runner；"
        "两臂均不使用它们，只差投机解码。",
    ),
    variable=_variable("ngram", NGRAM),
    hypothesis=Hypothesis(
        text=Text(
            en="Where the text repeats itself (JSON records, one request at a time), ngram "
            "speculation raises output throughput.",
            zh="文本自我重复时（JSON 记录，逐个请求），ngram 投机解码提高输出吞吐。",
        ),
        measure="output_tok_per_s",
        direction="increase",
        margin=0.10,
        equivalence=0.15,
    ),
    workload=workload,
    measures=(
        Measure("output_tok_per_s", "tok/s", "output throughput", output_throughput()),
        Measure("ttft_p50_s", "s", "TTFT, median", quantile_of(ttft_s, 0.50)),
        Measure("tpot_p50_s", "s", "TPOT, median", quantile_of(tpot_s, 0.50)),
        Measure("tpot_mean_s", "s", "TPOT, mean", mean_of(tpot_s)),
        *SPECULATION,
    ),
    acted=(Condition(measure="drafts", arm="candidate", op=">", value=0),),
    settings={
        "async-scheduling": False,
        "enable-prefix-caching": False,
        "enforce-eager": True,
        "max-model-len": 2048,
        "max-num-batched-tokens": 2048,
        "max-num-seqs": 32,
    },
    env={"VLLM_USE_V2_MODEL_RUNNER": "0"},
    needs=Needs(real_weights=True),
    comparisons=(
        Comparison("text_agreement", "1", "share of answers that is equal", agreement("measure")),
    ),
    variants={
        "code": _of_kind("code", "Continue Python code with repeating accessors."),
        "templated": _of_kind("templated", "Continue letters made from one template."),
        "chat": _of_kind("chat", "Answer chat questions in prose, at temperature 0.7."),
        "creative": _of_kind("creative", "Write stories at temperature 1: little to look up."),
        "batch-8": _of_batch(8, "JSON with 8 requests at a time."),
        "batch-32": _of_batch(32, "JSON with 32 requests at a time: is there gain left?"),
        "eagle": eagle,
    },
)
