"""Platforms: what is picked, how a device is passed, who gets which cores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pynvml
import pytest
from fake_nvml import UUIDS, FakeNvml
from hypothesis import given
from hypothesis import strategies as st

from kit.errors import BadFile, DeviceMissing, UnknownName
from kit.inside.probe_gpu import format_cpus, probe
from kit.platform import (
    cdi_names,
    find_platform,
    judge,
    parse_cpus,
    split_cores,
    usable_cores,
)

CDI_ON = {"CDISpecDirs": ["/etc/cdi"], "Runtimes": {"runc": {}}}
RUNTIME = {"CDISpecDirs": [], "Runtimes": {"runc": {}, "nvidia": {}}}
BARE = {"CDISpecDirs": None, "Runtimes": {"runc": {}}}


@given(st.sets(st.integers(0, 300), min_size=1))
def test_cpu_sets_survive_being_written_and_read(cpus: set[int]) -> None:
    assert parse_cpus(format_cpus(cpus)) == sorted(cpus)


@pytest.mark.parametrize("text", ["", "a", "1-", "3-1", "0,,1"])
def test_a_malformed_cpu_set_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        parse_cpus(text)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=16))
def test_server_and_client_share_everything_or_nothing(threads: list[int]) -> None:
    cores, cpu = [], 0
    for count in threads:
        cores.append(list(range(cpu, cpu + count)))
        cpu += count
    server, client, shared = split_cores(cores)
    assert shared == (len(cores) < 3)
    assert set(server) | set(client) == set(range(cpu))
    if shared:
        assert server == client
    else:
        assert not set(server) & set(client)
        assert client == cores[-1]


def test_the_cores_of_this_machine_are_found() -> None:
    cores = usable_cores()
    assert cores
    cpus = [cpu for core in cores for cpu in core]
    assert len(cpus) == len(set(cpus))


def test_a_device_is_passed_by_uuid_where_the_description_has_it() -> None:
    names = [f"nvidia.com/gpu={UUIDS[1]}", "nvidia.com/gpu=0", "nvidia.com/gpu=all"]
    look = judge(probe(FakeNvml()), CDI_ON, names)
    assert look.accel == "cuda-cdi"
    assert [device.passed_as for device in look.devices] == [
        "nvidia.com/gpu=0",
        f"nvidia.com/gpu={UUIDS[1]}",
    ]
    assert [device.uuid for device in look.devices] == list(UUIDS)


def test_without_cdi_the_runtime_gets_the_uuids() -> None:
    look = judge(probe(FakeNvml()), RUNTIME, [])
    assert look.accel == "cuda-runtime"
    assert [device.passed_as for device in look.devices] == list(UUIDS)


def test_cdi_that_the_engine_has_switched_off_is_not_used() -> None:
    look = judge(probe(FakeNvml()), BARE, ["nvidia.com/gpu=0", "nvidia.com/gpu=1"])
    assert look.devices == ()
    assert "2 NVIDIA device(s) are there, but the engine cannot pass them on" in look.refusal
    assert "CDI is off" in look.refusal


def test_cdi_without_these_devices_says_so() -> None:
    assert "CDI lists none of them" in judge(probe(FakeNvml()), CDI_ON, []).refusal


@pytest.mark.parametrize(
    ("broken", "word"),
    [
        ({"nvmlInit": pynvml.NVMLError_LibraryNotFound()}, "NVMLError_LibraryNotFound"),
        ({"nvmlDeviceGetCount": 0}, "no device"),
        ({"nvmlDeviceGetHandleByIndex": pynvml.NVMLError_GpuIsLost()}, "NVMLError_GpuIsLost"),
    ],
)
def test_no_device_that_answers_is_refused_in_nvml_s_words(
    broken: dict[str, Any], word: str
) -> None:
    assert word in judge(probe(FakeNvml(**broken)), RUNTIME, []).refusal


def test_cdi_descriptions_are_read_in_both_formats(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(
        'cdiVersion: "0.6.0"\nkind: nvidia.com/gpu\ndevices:\n- name: "0"\n- name: all\n'
    )
    (tmp_path / "b.json").write_text('{"kind": "nvidia.com/gpu", "devices": [{"name": "GPU-1"}]}')
    (tmp_path / "c.yaml").write_text("kind: vendor.com/net\ndevices: [{name: x}]\n")
    names = cdi_names([tmp_path, tmp_path / "missing"])
    assert names == ["nvidia.com/gpu=0", "nvidia.com/gpu=all", "nvidia.com/gpu=GPU-1"]


@pytest.mark.parametrize(
    "text", ["kind: nvidia.com/gpu\n", "kind: nvidia.com/gpu\ndevices: 3\n", "{"]
)
def test_a_malformed_description_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "nvidia.yaml").write_text(text)
    with pytest.raises(BadFile, match=r"nvidia\.yaml"):
        cdi_names([tmp_path])


def test_cpu_can_always_be_asked_for() -> None:
    platform = find_platform("cpu")
    assert (platform.name, platform.accel, platform.devices) == ("cpu", "cpu", ())
    assert platform.why
    assert parse_cpus(platform.server_cpuset)


def test_an_unknown_platform_is_one_clear_error() -> None:
    with pytest.raises(UnknownName, match="no platform is called 'tpu'") as caught:
        find_platform("tpu")
    assert "cpu, cuda" in caught.value.hint


def test_cuda_without_a_driver_is_refused_and_cpu_picked(monkeypatch: pytest.MonkeyPatch) -> None:
    none = probe(FakeNvml(nvmlInit=pynvml.NVMLError_LibraryNotFound()))
    monkeypatch.setattr("kit.platform.ask_host", lambda _place: none)
    picked = find_platform()
    assert picked.name == "cpu"
    assert "NVMLError_LibraryNotFound" in picked.why
    with pytest.raises(DeviceMissing, match="NVMLError_LibraryNotFound") as caught:
        find_platform("cuda")
    assert caught.value.hint
