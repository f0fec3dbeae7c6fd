"""The sampler in a container of its own, beside the stub and beside real vLLM."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import FAST, only_manifest, run_kit

from kit.experiments.adv3_async_scheduling import OF_STACKS
from kit.stacks import read_phase

RUN = ("run", "adv3_async_scheduling", "--platform", "cpu", "--quick", "--variant", "sampled")

pytestmark = [pytest.mark.usefixtures("nothing_left"), pytest.mark.full]


def check_isolation(folder: Path) -> None:
    """Check what the samplers were given, and that nothing else was given it."""
    document = json.loads((folder / "compose.json").read_text("utf-8"))
    for name, service in document["services"].items():
        capable = name.startswith("sampler-")
        assert service.get("cap_add", []) == (["SYS_PTRACE"] if capable else [])
        assert service["cap_drop"] == ["ALL"]
        assert service["read_only"]
        assert "no-new-privileges:true" in service["security_opt"]
        assert ("pid" in service) == capable
    sampler = document["services"]["sampler-server"]
    assert sampler["network_mode"] == "none"
    assert [v["target"] for v in sampler["volumes"]] == ["/kit/inside", "/opt/kit-sampler"]
    assert all(v["read_only"] for v in sampler["volumes"])
    assert not {"ports", "networks", "privileged"} & sampler.keys()


@pytest.mark.timeout(900)
def test_the_stub_is_sampled_after_the_measured_phase(
    tmp_path: Path, stub_file: Callable[..., str]
) -> None:
    stub = stub_file(**FAST)
    ran = run_kit(*RUN, "--json", "--out", str(tmp_path / "runs"), "--stub", stub)
    assert ran.stdout.startswith("{"), ran.stderr
    manifest, run = only_manifest(tmp_path)
    assert manifest.plan.sampler is not None
    for replicate in manifest.replicates:
        folder = run / replicate.folder
        check_isolation(folder)
        stacks = read_phase(folder / "sampled")
        assert stacks.problem is None
        assert sum(each.samples for each in stacks.files.values()) > 0
        assert not list((folder / "measure").glob("stacks-*"))
        assert {f"{replicate.folder}/sampled/{name}" for name in stacks.files} <= set(
            manifest.files
        )
        readings = {x.name: x for x in replicate.readings}
        for measure in OF_STACKS:  # the stub has no process of the name EngineCore
            assert readings[measure.name].value is None
            assert "EngineCore" in str(readings[measure.name].reason)
    assert 'id="figure-flame"' in (run / "report.zh.html").read_text("utf-8")


@pytest.mark.timeout(1800)
def test_scheduling_of_real_vllm_is_found_in_its_engine_core(tmp_path: Path) -> None:
    ran = run_kit(*RUN, "--json", "--out", str(tmp_path / "runs"), timeout_s=1500)
    assert ran.stdout.startswith("{"), ran.stderr
    manifest, run = only_manifest(tmp_path)
    # a CPU engine switches the feature off, so the run may end after the first candidate
    assert manifest.replicates
    for replicate in manifest.replicates:
        check_isolation(run / replicate.folder)
        readings = {x.name: x for x in replicate.readings}
        share = readings["sampled_schedule_share"]
        assert share.value is not None, share.reason
        assert 0 < share.value < 1
        seconds, window = readings["sampled_schedule_s"].value, readings["sampled_window_s"].value
        assert seconds is not None
        assert window is not None
        assert 0 < seconds < window
