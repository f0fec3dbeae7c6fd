"""Another load generator in the kit's place: what it is asked, and how its result is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kit.errors import UnknownName, UsageError
from kit.experiment import MEASURED, Scale, find_experiment
from kit.inside.spec import Request, WindowSpec
from kit.inside.tool_window import NoResult, longest_s, samples_of
from kit.inside.vllm_bench import in_order, words_of
from kit.load_tool import find_load_tool, tool_words

SCALE = Scale(model="m", seed=1)
BODY = {"model": "m", "prompt": [1, 2], "max_tokens": 4, "stream": True, "temperature": 0.0}


def line(name: str, *, path: str = "/v1/completions", **more: Any) -> dict[str, Any]:
    body = {**BODY, **more.pop("body", {})}
    return {"id": name, "path": path, "body": body, "tags": {}, **more}


def value_of(words: tuple[str, ...], name: str) -> str:
    return words[words.index(name) + 1]


def test_the_kit_itself_needs_no_words() -> None:
    assert tool_words([line("a", lane="x", path="/odd")], "kit") == ()


def test_lanes_become_so_many_at_once_and_shared_parameters_are_told_once() -> None:
    asked = [line(f"r{i}", lane=f"lane{i % 3}", body={"max_tokens": 4 + i}) for i in range(7)]
    words = tool_words(asked, "vllm-bench")
    assert value_of(words, "--max-concurrency") == "3"
    assert value_of(words, "--request-rate") == "inf"
    assert value_of(words, "--num-prompts") == "7"
    assert json.loads(value_of(words, "--extra-body")) == {"temperature": 0.0}


@pytest.mark.parametrize(
    ("moments", "rate"), [([0.0, 2.0, 4.0, 6.0], "0.5"), ([0.5, 0.5], "inf"), ([3.0], "inf")]
)
def test_even_moments_become_a_rate(moments: list[float], rate: str) -> None:
    asked = [line(f"r{i}", at_s=at) for i, at in enumerate(moments)]
    words = tool_words(asked, "vllm-bench")
    assert value_of(words, "--request-rate") == rate
    assert value_of(words, "--burstiness") == "inf"
    assert "--max-concurrency" not in words


def test_moments_that_it_would_draw_anew_are_refused() -> None:
    asked = [line(f"r{i}", at_s=at) for i, at in enumerate((0.0, 1.0, 1.5))]
    with pytest.raises(UsageError, match="cannot keep this load's moments"):
        tool_words(asked, "vllm-bench")


@pytest.mark.parametrize(
    ("odd", "says"),
    [
        (line("odd", lane="x", path="/v1/chat/completions"), "no streamed completion"),
        (line("odd", lane="x", body={"stream": False}), "no streamed completion"),
        (line("odd", lane="x", body={"temperature": 0.5}), "those of r0 differ"),
        (line("odd", at_s=1.0), "this load is both"),
        (line("odd", lane="y", start_s=2.0), "this load is both"),
    ],
)
def test_what_it_cannot_send_is_refused_by_name(odd: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says) as told:
        tool_words([line("r0", lane="x"), odd], "vllm-bench")
    assert "--load-tool" in str(told.value.hint)


def test_an_unknown_tool_is_named_with_those_there_are() -> None:
    assert find_load_tool("vllm-bench") == "vllm-bench"
    with pytest.raises(UnknownName, match="guidelm"):
        find_load_tool("guidelm")


@pytest.mark.parametrize(
    "name", ["exp1_prefix_cache", "exp2_batched_tokens", "exp3_fp8_kv", "exp4_preempt"]
)
def test_the_experiments_measured_windows_can_be_sent(name: str) -> None:
    phases = {phase.name: phase for phase in find_experiment(name).workload(SCALE)}
    assert "--request-rate" in tool_words(phases[MEASURED].requests, "vllm-bench")


def request(name: str, *, at_s: float | None = None, lane: str | None = None) -> Request:
    return Request(
        id=name, path="/v1/completions", body=b"{}", streamed=True, tags={"kind": name},
        at_s=at_s, lane=lane, start_s=0.0,
    )  # fmt: skip


TOLD: dict[str, list[Any]] = {
    "start_times": [100.5, 101.0],
    "ttfts": [0.25, 0.0],
    "itls": [[0.5, 0.125], []],
    "errors": ["", "Traceback\n  File x\nClientOSError: gone"],
    "input_lens": [7, 1],
    "output_lens": [3, 0],
    "generated_texts": ["abc", ""],
}


def test_its_lists_become_samples_in_the_order_of_sending() -> None:
    asked = in_order([request("late", at_s=2.0), request("soon", at_s=1.0)])
    answered, failed = samples_of(TOLD, asked, 100.0)
    assert (answered["id"], answered["tags"]) == ("soon", {"kind": "soon"})
    assert answered["sent_s"] == 0.5
    assert answered["chunk_s"] == [0.75, 1.25, 1.375]
    assert answered["done_s"] == 1.375
    assert (answered["prompt_tokens"], answered["completion_tokens"]) == (7, 3)
    assert answered["lane"] == "soon"  # it tells no schedule: latency counts from the send
    assert (failed["id"], failed["error"]) == ("late", "ClientOSError: gone")
    assert (failed["chunk_s"], failed["completion_tokens"], failed["status"]) == ([], None, None)


@pytest.mark.parametrize(
    "told", [{**TOLD, "ttfts": [0.25]}, {k: v for k, v in TOLD.items() if k != "errors"}, {}]
)
def test_a_result_of_other_requests_is_none(told: dict[str, Any]) -> None:
    with pytest.raises(NoResult, match="does not hold 2 requests"):
        samples_of(told, [request("a", lane="x"), request("b", lane="x")], 0.0)


def test_a_value_of_another_kind_is_no_result() -> None:
    with pytest.raises(NoResult, match="another kind"):
        samples_of({**TOLD, "ttfts": [None, 0.0]}, [request("a", lane="x"), request("b")], 0.0)


def test_it_may_take_as_long_as_its_requests_in_turn() -> None:
    spec = WindowSpec(
        host="h", port=1, requests=Path(), out=Path(), scrape_every_s=None, metrics_path="/",
        deadline_s=10.0, stamps="auto", concurrency=None, legs={},
    )  # fmt: skip
    lanes = [request(str(i), lane=str(i % 2)) for i in range(6)]
    assert longest_s(spec, lanes) == longest_s(spec, lanes[:2]) + 20.0
    assert longest_s(spec, [request("a", at_s=7.0)]) == longest_s(spec, lanes[:2]) + 14.0


def test_the_words_of_a_window_name_server_model_and_result(tmp_path: Path) -> None:
    (tmp_path / "r.jsonl").write_text(json.dumps(line("a", lane="x")) + "\n", "utf-8")
    spec = {"version": 1, "host": "server", "port": 8000, "requests": "r.jsonl", "out": "out"}
    path = tmp_path / "spec.json"
    path.write_text(json.dumps({**spec, "tool": ["--request-rate", "inf"]}), "utf-8")
    words = tuple(words_of(path))
    assert words[:2] == ("--request-rate", "inf")
    assert value_of(words, "--host") == "server"
    assert value_of(words, "--model") == "m"
    assert value_of(words, "--result-dir") == str(tmp_path / "out")
