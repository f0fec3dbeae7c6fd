"""exp3: capacity from the engine's own labels, and a capacity with broken text is no gain."""

from typing import Any

import pytest

from kit.experiment import Experiment, Scale, apply_variant, find_experiment, find_refusal
from kit.experiments.exp3_fp8_kv import workload
from kit.measure import Raw, Scrape, Window, parse_metrics
from kit.prepare import Options, choose
from kit.quality import check_quality, compare_pairs
from kit.texts import PROMPTS, TEXTS
from kit.verdict import Verdict, effect_of, judge

NAME = "exp3_fp8_kv"
EXPERIMENT = find_experiment(NAME)
GOOD = [-2.0] * 50


def raw(blocks: int, dtype: str, texts: list[str], logs: list[float]) -> Raw:
    info = (
        "# TYPE vllm:cache_config_info gauge\n"
        f'vllm:cache_config_info{{num_gpu_blocks="{blocks}",block_size="128",'
        f'cache_dtype="{dtype}",kv_cache_size_tokens="{blocks * 128}",'
        f'kv_cache_memory_bytes="2147483648"}} 1\n'
    )
    answers: list[dict[str, Any]] = [
        {"id": f"q{i}", "text": text, "prompt_logprobs": None} for i, text in enumerate(texts)
    ]
    answers.append({"id": "t0", "text": "", "prompt_logprobs": logs})
    return Raw(
        windows={
            "quality": Window("r/quality", tuple(answers), (), {}),
            "measure": Window("r/measure", (), (Scrape(1.0, parse_metrics(info)),), {}),
        }
    )


def verdict(experiment: Experiment, baseline: Raw, candidate: Raw) -> Verdict:
    primary = next(m for m in experiment.measures if m.name == experiment.hypothesis.measure)
    a, b = primary.read(baseline).value, primary.read(candidate).value
    assert a is not None
    assert b is not None
    pairs = dict.fromkeys(range(6), (baseline, candidate))
    return judge(
        experiment.hypothesis,
        effect=effect_of(experiment.hypothesis, [(a, b)] * 6),
        unsupported=None,
        guards=(),
        confounders=(),
        not_acted=(),
        pairs_planned=6,
        quality=check_quality(experiment.quality, compare_pairs(experiment.comparisons, pairs)),
    )


def test_twice_the_blocks_with_the_same_text_is_supported() -> None:
    base = raw(364, "auto", [" Paris.", " Rome."], GOOD)
    fp8 = raw(1456, "fp8", [" Paris.", " Rome."], GOOD)
    assert verdict(EXPERIMENT, base, fp8).word == "supported"


def test_twice_the_blocks_with_other_answers_is_not() -> None:
    base = raw(364, "auto", [" Paris.", " Rome."], GOOD)
    broken = raw(728, "bfloat16", ["!!!!!!", "??????"], GOOD)
    found = verdict(EXPERIMENT, base, broken)
    assert found.word == "not supported"
    assert found.reason == "quality: greedy_agreement >= 0.75 fails in pair 0: 0"


def test_twice_the_blocks_with_a_worse_perplexity_is_not() -> None:
    base = raw(364, "auto", [" Paris."], GOOD)
    worse = raw(728, "fp8", [" Paris."], [-2.2] * 50)
    found = verdict(EXPERIMENT, base, worse)
    assert (found.word, found.reason[:35]) == (
        "not supported",
        "quality: perplexity_ratio <= 1.1 fa",
    )


def test_broken_text_does_not_rescue_a_capacity_that_did_not_grow() -> None:
    base = raw(364, "auto", [" Paris."], GOOD)
    same = raw(364, "fp8", ["!!!"], GOOD)
    found = verdict(EXPERIMENT, base, same)
    assert found.word == "not supported"
    assert "rule out" in found.reason


def test_capacity_is_read_from_labels() -> None:
    seen = raw(364, "fp8_e4m3", ["x"], GOOD)
    values = {m.name: m.read(seen).value for m in EXPERIMENT.measures if "tpot" not in m.name}
    assert values["num_gpu_blocks"] == 364
    assert values["kv_cache_size_tokens"] == 46_592
    assert values["kv_bytes_per_token"] == pytest.approx(2**31 / 46_592)
    assert values["kv_dtype_is_fp8"] == 1
    assert values["perplexity"] == pytest.approx(7.389, abs=0.001)


def test_the_quality_phase_is_greedy_and_scores_every_text() -> None:
    quality = workload(Scale(model="m", seed=1))[1].requests
    assert len(quality) == len(PROMPTS) + len(TEXTS)
    assert {r["body"]["temperature"] for r in quality} == {0.0}
    scored = [r["body"] for r in quality if "prompt_logprobs" in r["body"]]
    assert [b["prompt"] for b in scored] == list(TEXTS)
    assert not any(b.get("stream") for b in scored)


def test_a_cpu_without_fp8_is_refused_in_the_engines_words() -> None:
    line = "NotImplementedError: FP8 KV cache on CPU requires x86 with AVX-512 or AMX."
    log = f"2026-12-01T05:00:00Z (Worker pid=7) ERROR {line}\nRuntimeError: Engine core failed"
    assert find_refusal(log, EXPERIMENT.refusals) == line
    assert find_refusal("MemoryError: KV cache does not fit", EXPERIMENT.refusals) is None


def test_memory_variant_asks_for_at_least_the_proportion() -> None:
    memory = apply_variant(EXPERIMENT, NAME, "memory-0.5-0.9")
    assert verdict(memory, raw(182, "auto", ["x"], GOOD), raw(364, "auto", ["x"], GOOD)).word == (
        "supported"
    )
    assert verdict(memory, raw(182, "auto", ["x"], GOOD), raw(300, "auto", ["x"], GOOD)).word == (
        "not supported"
    )


def test_random_weights_have_a_capacity_but_no_quality() -> None:
    chosen = choose(NAME, Options(model="qwen2.5-0.5b"))
    assert [p.name for p in chosen.workload(Scale("m", 1))] == ["warmup", "measure"]
    assert (chosen.quality, chosen.answers_judged) == ((), False)
    assert chosen.hypothesis.measure == "num_gpu_blocks"
    measured = Raw(windows={"measure": raw(182, "auto", [], []).windows["measure"]})
    (perplexity,) = [m for m in chosen.all_measures if m.name == "perplexity"]
    found = perplexity.read(measured)
    assert (found.value, found.reason) == (None, "no phase `quality` was run")
