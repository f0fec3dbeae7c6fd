"""adv2: efficiency is per device, and a machine or model that cannot is told so beforehand."""

import json
from pathlib import Path
from typing import Any

import pytest

from kit.experiment import Scale, apply_variant, find_experiment
from kit.experiments.adv2_tp_scaling import efficiency
from kit.measure import Raw, Window
from kit.model import find_model
from kit.run import too_little
from kit.trace import Split, Trace, trace_file
from kit.virtual import virtual_plan

NAME = "adv2_tp_scaling"
EXPERIMENT = find_experiment(NAME)


def raw(tokens: int, span_s: float, *ranks: int) -> Raw:
    sample: dict[str, Any] = {
        "id": "a",
        "sent_s": 0.0,
        "done_s": span_s,
        "completion_tokens": tokens,
        "error": None,
    }
    infos = [{"vllm_config": {"parallel_config": {"tensor_parallel_size": n}}} for n in ranks]
    windows = {"measure": Window("r/measure", (sample,), (), {})}
    if len(infos) == 1:
        return Raw(windows, server_info=infos[0])
    return Raw(windows, legs={f"replica-{i}": info for i, info in enumerate(infos)})


@pytest.mark.parametrize(
    ("candidate", "wanted"),
    [(raw(200, 1.0, 2), 1.0), (raw(150, 1.0, 2), 0.75), (raw(180, 1.0, 1, 1), 0.9)],
    ids=["linear", "three quarters", "two servers"],
)
def test_efficiency_is_throughput_n_over_n_times_throughput_1(
    candidate: Raw, wanted: float
) -> None:
    assert efficiency(raw(100, 1.0, 1), candidate).value == pytest.approx(wanted)


def test_efficiency_without_a_configuration_is_null() -> None:
    lost = Raw({"measure": raw(1, 1.0, 1).measured}, server_info={"vllm_config": {}})
    reading = efficiency(lost, raw(1, 1.0, 2))
    assert (reading.value, reading.reason) == (None, "the configuration has no parallel_config")


def folder(tmp_path: Path, **config: Any) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(config), "utf-8")
    return tmp_path


QWEN = find_model("qwen2.5-0.5b").config or {}


def test_too_few_devices_and_heads_that_do_not_divide_are_told(tmp_path: Path) -> None:
    plan, _ = virtual_plan(NAME, EXPERIMENT)
    four, _ = virtual_plan(NAME, apply_variant(EXPERIMENT, NAME, "tp-4"))
    model = folder(tmp_path, **QWEN)
    assert too_little(plan, 2, model) is None
    assert too_little(plan, 1, model) == "needs 2 devices, this machine has 1"
    assert too_little(four, 2, model) == "needs 4 devices, this machine has 2"
    assert too_little(four, 4, model) == "14 attention heads do not divide by 4"


def test_a_model_of_another_family_is_left_to_the_engine(tmp_path: Path) -> None:
    plan, _ = virtual_plan(NAME, EXPERIMENT)
    assert too_little(plan, 2, folder(tmp_path, model_type="mamba")) is None


def test_one_server_needs_one_device_and_no_configuration(tmp_path: Path) -> None:
    plan, _ = virtual_plan("exp1_prefix_cache", find_experiment("exp1_prefix_cache"))
    assert plan.devices == 1
    assert too_little(plan, 1, tmp_path) is None


@pytest.mark.parametrize(("variant", "lanes"), [(None, 8), ("batch-1", 1), ("batch-64", 64)])
def test_as_many_lanes_as_the_batch(variant: str | None, lanes: int) -> None:
    measured = apply_variant(EXPERIMENT, NAME, variant).workload(Scale("m", 1))[-1]
    assert measured.concurrency == len({r["lane"] for r in measured.requests}) == lanes
    assert len(measured.requests) >= max(8, lanes)


# -- under the profiler ------------------------------------------------------------------------

PROFILE = apply_variant(EXPERIMENT, NAME, "profile")


def traced(**traces: Split | None) -> Raw:
    names = {
        trace_file("server", int(rank[-1])): Trace(split=split, overlap=None)
        for rank, split in traces.items()
    }
    window = Window("r/profile", (), (), {}, traces=names)
    return Raw({**raw(1, 1.0, 2).windows, "profile": window})


def shares(replicate: Raw) -> dict[str, Any]:
    return {m.name: m.read(replicate) for m in PROFILE.measures if m.name.startswith("rank")}


def test_each_rank_s_parts_are_shares_of_its_own_window() -> None:
    split = Split(
        on="cpu",
        window_s=2,
        gemm_s=1,
        attention_s=0.2,
        communication_s=0.5,
        other_s=0.1,
        gaps_s=0.2,
    )
    found = shares(traced(rank0=split, rank1=split.model_copy(update={"communication_s": 0.4})))
    assert found["rank0_traced_s"].value == 2
    assert found["rank0_communication_share"].value == 0.25
    assert found["rank1_communication_share"].value == 0.2
    assert found["rank1_communication_share"].sources == ("r/profile/trace-server-rank1.json.gz",)
    parts = ("gemm", "attention", "communication", "other", "gaps")
    assert sum(found[f"rank0_{part}_share"].value for part in parts) == pytest.approx(1)


def test_a_rank_that_is_not_there_or_did_nothing_has_no_shares() -> None:
    found = shares(traced(rank0=None))
    assert found["rank0_gemm_share"].reason == "the trace has no op and no kernel"
    assert found["rank1_gemm_share"].reason == "there is no rank 1"


def test_nothing_is_profiled_before_the_measured_phase_has_ended() -> None:
    plan, _ = virtual_plan(NAME, PROFILE)
    assert [(p.name, p.profile) for p in plan.phases] == [
        ("warmup", False), ("measure", False), ("profile", True)
    ]  # fmt: skip
    told = json.loads(plan.arms[1].args[plan.arms[1].args.index("--profiler-config") + 1])
    assert told["torch_profiler_dir"].startswith("/tmp/")  # where a read-only container may write


def test_a_plan_without_a_profiled_phase_says_nothing_of_it() -> None:
    plan, _ = virtual_plan(NAME, EXPERIMENT)
    assert "profile" not in plan.phases[0].model_dump()


def test_two_servers_take_as_many_devices_as_the_split_one() -> None:
    plan, _ = virtual_plan(NAME, apply_variant(EXPERIMENT, NAME, "instances"))
    used = [a.ranks * len(plan.topology_of(a.role).engines) for a in plan.arms]
    assert used == [2, 2]
