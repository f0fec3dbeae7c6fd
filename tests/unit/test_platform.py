"""Platforms: what is picked, how a device is passed, who gets which cores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pynvml
import pytest
from fake_nvml import UUIDS, FakeNvml
from hypothesis import given
from hypothesis import strategies as st

from kit.errors import BadFile, DeviceMissing, DeviceTooOld, DriverTooOld, UnknownName
from kit.inside.probe_gpu import format_cpus, probe
from kit.platform import (
    Device,
    Platform,
    cdi_names,
    check_device,
    cuda_version,
    driver_serves,
    find_platform,
    judge,
    parse_cpus,
    runs_on,
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
    assert {device.capability for device in look.devices} == {"9.0"}
    assert (look.driver, look.driver_cuda) == ("580.159.04", "13.0")


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


@pytest.mark.parametrize(
    ("driver", "variant", "serves"),
    [
        ("13.0", "cu130", True),
        ("12.8", "cu130", False),
        ("12.4", "cu129", True),
        ("13.1", "cu129", True),
        (None, "cu130", False),
    ],
)
def test_a_driver_serves_its_own_major_version_and_older_ones(
    driver: str | None, variant: str, serves: bool
) -> None:
    assert driver_serves(driver, variant) is serves
    assert cuda_version("cu129") == "12.9"


@pytest.mark.parametrize(
    ("capability", "archs", "runs"),
    [
        ("9.0", "sm_80 sm_90", True),
        ("8.6", "sm_80", True),
        ("8.0", "sm_86", False),
        ("7.0", "sm_75 sm_80 sm_90", False),
        ("10.3", "sm_90 compute_90", True),
        ("8.9", "sm_90 compute_90", False),
        ("9.0", "sm_90a", True),
        ("10.0", "sm_90a compute_90a", False),
        ("12.1", "sm_120", True),
    ],
)
def test_code_runs_on_its_major_version_and_ptx_on_all_that_is_newer(
    capability: str, archs: str, runs: bool
) -> None:
    assert runs_on(capability, archs.split()) is runs


def on(driver_cuda: str | None, capability: str | None = "7.0") -> Platform:
    device = Device(index=0, uuid="GPU-1", name="V100", passed_as="x", capability=capability)
    cpu = find_platform("cpu")
    told = {"name": "cuda", "devices": (device,), "driver": "570.1", "driver_cuda": driver_cuda}
    return cpu.model_copy(update=told)


def test_an_image_that_this_machine_cannot_run_is_refused_with_the_reason() -> None:
    with pytest.raises(DriverTooOld, match=r"570\.1 serves CUDA 12\.8, and g is built for.* 13\.0"):
        check_device(on("12.8"), "g", "cu130", ())
    with pytest.raises(DeviceTooOld, match=r"V100 has compute capability 7\.0.*sm_75, sm_90"):
        check_device(on("13.0"), "g", "cu130", ("sm_75", "sm_90"))
    check_device(on("13.0"), "g", "cu130", ())  # an adopted image tells nothing
    check_device(on("13.0", None), "g", "cu130", ("sm_90",))
    check_device(on("12.8"), "g", "cpu", ())
    check_device(find_platform("cpu"), "g", "cu130", ())
