"""adv1: one format a run, proven by memory and kernel; accuracy only where there are weights."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kit.again import experiment_of
from kit.analyse import Analysis, conclude
from kit.errors import UsageError
from kit.experiment import Experiment, Scale, apply_variant, find_experiment, find_refusal
from kit.experiments.adv1_quantization import GPTQ, ONE, SATURATED
from kit.model import find_model
from kit.plan import PlannedModel
from kit.platform import Platform
from kit.prepare import Options, choose, prepare
from kit.texts import TASKS
from kit.virtual import VirtualRun, World, draw_run, frame, virtual_experiment, virtual_plan

NAME = "adv1_quantization"
EXPERIMENT = find_experiment(NAME)
SHAPE = find_model("qwen2.5-7b").config
HEAD = "2026-12-01T06:04:13Z (EngineCore pid=322) INFO 12-01 06:04:13 "
KERNEL = f"{HEAD}[x.py:1] Using MacheteLinearKernel for AutoAWQMarlinLinearMethod\n"
VARIANTS = [None, *EXPERIMENT.variants]
RESOLVED: tuple[dict[str, Any], dict[str, Any]] = (
    {
        "model_config": {"quantization": None, "quantization_config": None, "hf_overrides": {}},
        "quant_config": None,
        "cache_config": {"num_gpu_blocks": 100},
    },
    {
        "model_config": {
            "quantization": "auto_awq",
            "quantization_config": {"linear": {"weight": "f8e4m3"}},
            "hf_overrides": {"quantization_config": {"bits": 4}},
        },
        "quant_config": "AutoAWQConfig(quant_type=uint4)",
        "cache_config": {"num_gpu_blocks": 200},
    },
)
"""What the engine resolves differently for another format."""


def form(variant: str | None) -> Experiment:
    return apply_variant(EXPERIMENT, NAME, variant)


def log(gib: float | None, *, kernel: bool) -> str:
    loaded = "" if gib is None else f"{HEAD}[m.py:1] Model loading took {gib} GiB and 1.4 seconds\n"
    return loaded + (KERNEL if kernel else "")


def concluded(
    variant: str | None,
    baseline: str,
    candidate: str,
    *,
    config: dict[str, Any] | None = SHAPE,
    effect: float = 0.5,
) -> Analysis:
    """Conclude a drawn run whose engines wrote these start logs; the answers are left out."""
    of_speed = replace(
        form(variant), workload=virtual_experiment().workload, quality=(), comparisons=()
    )
    of_speed = replace(of_speed, of_answers=())
    world = World(effect=effect)
    run: VirtualRun = draw_run(frame(NAME, of_speed, pairs=6), world, np.random.default_rng(1))
    logs = {"baseline": baseline, "candidate": candidate}
    resolved = {"baseline": RESOLVED[0], "candidate": RESOLVED[1]}
    for r in run.replicates:
        run.raws[r.replicate] = replace(
            run.raws[r.replicate],
            server_info={"vllm_config": resolved[r.role]},
            start_logs={"server": logs[r.role]},
            model={"config": config, "files": {}},
        )
    return conclude(run.plan, of_speed, run.replicates, run.raws, run.requests, run.telemetry)


def test_a_format_that_shows_in_memory_and_kernel_is_judged() -> None:
    found = concluded("awq", log(14.29, kernel=False), log(5.38, kernel=True))
    assert found.confounders == ()
    assert found.not_acted == ()
    assert "output_tok_per_s" in found.verdict.reason


@pytest.mark.parametrize(
    ("candidate", "why"),
    [
        (log(14.29, kernel=False), "weight_bits of candidate <= 9 fails in replicate"),
        (log(5.38, kernel=False), "weight_kernels of candidate >= 1 fails in replicate"),
        (log(14.29, kernel=True), "weight_bits of candidate <= 9 fails in replicate"),
    ],
    ids=["a configuration that did nothing", "no kernel", "no memory saved"],
)
def test_a_format_that_was_asked_for_and_did_not_act_is_not_quantised(
    candidate: str, why: str
) -> None:
    found = concluded("gptq", log(14.29, kernel=False), candidate)
    assert found.verdict.word == "inconclusive"
    assert "not quantised: " in found.verdict.reason
    assert any(why in each for each in found.not_acted)


def test_memory_that_nobody_tells_is_unknown_and_not_a_proof_of_bfloat16() -> None:
    found = concluded("awq", log(14.29, kernel=False), log(None, kernel=True))
    assert found.verdict.word == "inconclusive"
    assert "not quantised" not in found.verdict.reason
    assert "the start log names no memory of weights" in found.verdict.reason


def test_a_baseline_that_is_quantised_itself_is_no_baseline() -> None:
    found = concluded(None, log(8.17, kernel=True), log(8.17, kernel=True))
    assert "the baseline is quantised itself" in found.verdict.reason


def test_fp8_needs_less_than_int4_to_count_as_quantised() -> None:
    fp8 = log(8.17, kernel=True)
    assert concluded(None, log(14.29, kernel=False), fp8).not_acted == ()
    assert concluded("awq", log(14.29, kernel=False), fp8).not_acted


@pytest.mark.parametrize("variant", VARIANTS)
def test_weights_and_kv_never_change_together(variant: str | None) -> None:
    experiment = form(variant)
    baseline, candidate = experiment.variable.arms
    changed = {k for k in baseline.flags if baseline.flags[k] != candidate.flags[k]}
    assert len(changed) == 1
    both = {**experiment.settings, **baseline.flags, **candidate.flags}
    assert "kv-cache-dtype" in both
    assert changed <= {"quantization", "hf-overrides", "kv-cache-dtype"}
    assert experiment.settings["dtype"] == "bfloat16"


def test_the_two_by_two_has_each_side_once() -> None:
    weights, kv = form("2x2-weights"), form("2x2-kv")
    assert weights.settings["kv-cache-dtype"] == "fp8"
    assert weights.variable == EXPERIMENT.variable
    assert kv.settings["quantization"] == EXPERIMENT.variable.candidate.flags["quantization"]
    assert kv.variable.candidate.flags == {"kv-cache-dtype": "fp8"}
    assert {c.arm for c in kv.acted if c.measure == "weight_bits"} == {"baseline", "candidate"}


def test_gptq_names_its_layers_since_there_is_no_checkpoint_to_look_into() -> None:
    flag = form("gptq").variable.candidate.flags["hf-overrides"]
    told = json.loads(str(flag))["quantization_config"]
    assert told == GPTQ
    assert [name for names in told["modules_in_block_to_quantize"] for name in names] == [
        "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
        "mlp.up_proj", "mlp.gate_proj", "mlp.down_proj",
    ]  # fmt: skip
    assert SHAPE is not None
    assert {SHAPE["hidden_size"] % 128, SHAPE["intermediate_size"] % 128} == {0}


@pytest.mark.parametrize(
    ("variant", "lanes"), [(None, SATURATED), ("batch-1", ONE), ("awq-batch-1", ONE)]
)
def test_one_and_many_requests_both_carry_a_99th_percentile(
    variant: str | None, lanes: int
) -> None:
    measured = form(variant).workload(Scale("m", 1, "cuda"))[-1]
    assert measured.concurrency == len({r["lane"] for r in measured.requests}) == lanes
    assert len(measured.requests) * 0.01 >= 5
    assert lanes <= int(str(EXPERIMENT.settings["max-num-seqs"]))


def test_tasks_are_compared_one_by_one() -> None:
    quality = EXPERIMENT.workload(Scale("m", 1))[1]
    assert quality.name == "quality"
    for task, prompts in TASKS.items():
        ids = [r["id"] for r in quality.requests if r["id"].startswith(task)]
        assert len(ids) == len(prompts)
        assert f"agreement_{task}" in [c.name for c in EXPERIMENT.comparisons]


# -- accuracy ----------------------------------------------------------------------------------


def test_random_weights_are_judged_for_speed_and_not_for_accuracy() -> None:
    real, dummy = choose(NAME, Options()), choose(NAME, Options(model="qwen2.5-7b"))
    assert real.quality
    assert [p.name for p in real.workload(Scale("m", 1))] == ["warmup", "quality", "measure"]
    assert (dummy.quality, dummy.comparisons, dummy.of_answers) == ((), (), ())
    assert [p.name for p in dummy.workload(Scale("m", 1))] == ["warmup", "measure"]
    assert "perplexity" not in [m.name for m in dummy.all_measures]


def test_the_same_is_made_of_the_plan_later() -> None:
    chosen = choose(NAME, Options(variant="awq"))
    plan, _ = virtual_plan(NAME, chosen)
    model = PlannedModel(id="qwen2.5-7b", weights="dummy", files={})
    again = experiment_of(plan.model_copy(update={"variant": "awq", "model": model}))
    assert [m.name for m in again.all_measures] == list(plan.measures)
    assert not again.answers_judged


def test_a_report_says_that_accuracy_was_not_judged() -> None:
    run = draw_run(
        frame(NAME, replace(virtual_experiment(), answers_judged=False), pairs=6),
        World(effect=0.0),
        np.random.default_rng(1),
    )
    found = conclude(
        run.plan, run.experiment, run.replicates, run.raws, run.requests, run.telemetry
    )
    assert "answers_not_judged" in [n.code for n in found.notices]


def test_what_was_not_judged_is_not_supported() -> None:
    """The limits on the answers are registered too: speed alone is not all of it."""
    found = {}
    for judged in (True, False):
        run = draw_run(
            frame(NAME, replace(virtual_experiment(), answers_judged=judged), pairs=6),
            World(effect=0.5),
            np.random.default_rng(1),
        )
        found[judged] = conclude(
            run.plan, run.experiment, run.replicates, run.raws, run.requests, run.telemetry
        ).verdict
    assert found[True].word == "supported"
    assert (found[False].word, found[False].reason) == ("inconclusive", "quality not judged")


def test_int4_of_a_checkpoint_that_is_none_is_refused() -> None:
    options = Options(variant="gptq", model="smollm2-135m-instruct")
    platform = Platform(
        name="cpu",
        why="planted",
        accel="cpu",
        server_cpuset="0",
        client_cpuset="0",
        shared_cores=True,
        default_image="v0.32.0-cpu",
    )
    with pytest.raises(UsageError, match="a shape with random weights"):
        prepare(NAME, choose(NAME, options), platform, options, lambda _: None)


@pytest.mark.parametrize(
    "line",
    [
        "ValueError: torch.float32 is not supported for quantization method fp8_per_tensor. "
        "Supported dtypes: [torch.bfloat16, torch.float16]",
        "  Value error, fp8_per_tensor quantization is currently not supported in cpu. [type=...]",
        "ValueError: Failed to find a kernel that can implement the ScaledMM linear layer. ",
        "NotImplementedError: Could not run '_C::dynamic_scaled_fp8_quant' with arguments",
        "RuntimeError: expected mat1 of _scaled_mm to be row major",
        "AttributeError: '_OpNamespace' '_C' object has no attribute 'dynamic_scaled_fp8_quant'",
    ],
)
def test_an_engine_that_cannot_is_quoted(line: str) -> None:
    logged = f"2026-12-01T05:00:00Z (Worker pid=7) ERROR {line}\nRuntimeError: Engine core failed"
    found = find_refusal(logged, EXPERIMENT.refusals)
    assert found
    assert found in line


def test_running_out_of_memory_is_no_refusal() -> None:
    assert find_refusal("RuntimeError: Engine core failed", EXPERIMENT.refusals) is None
    words = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
    assert find_refusal(words, EXPERIMENT.refusals) is None
