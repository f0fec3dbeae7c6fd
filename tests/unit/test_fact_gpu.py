"""The GPU group against a fake NVML: whatever breaks costs one field, never the rest."""

from __future__ import annotations

import hashlib
from typing import Any

import pynvml
import pytest
from fake_nvml import UUIDS, FakeNvml

from kit.facts.gpu import facts_of, match_of
from kit.inside.probe_gpu import DEVICE_FIELDS, SYSTEM_FIELDS, event_names, format_cpus, probe


def values(nvml: FakeNvml) -> dict[str, Any]:
    return {fact.name: fact.value for fact in facts_of(probe(nvml))}


def failures(nvml: FakeNvml) -> dict[str, str | None]:
    return {fact.name: fact.reason for fact in facts_of(probe(nvml)) if fact.state == "failed"}


HEALTHY_FAILURES = {"device0_numa_node", "device1_numa_node"}  # sysfs has no such fake device


def test_a_healthy_pair_of_devices_is_read_completely() -> None:
    found = values(FakeNvml())
    assert len(found) == len(SYSTEM_FIELDS) + 2 * len(DEVICE_FIELDS)
    assert set(failures(FakeNvml())) == HEALTHY_FAILURES
    expected = {
        "driver_version": "580.159.04",
        "cuda_driver_version": "13.0",
        "device_count": 2,
        "topology": {"0-1": "NODE"},
        "nvlink_pairs": {"0-1": True},
        "device0_uuid": UUIDS[0],
        "device1_uuid": UUIDS[1],
        "device1_uuid_sha256": hashlib.sha256(UUIDS[1].encode()).hexdigest(),
        "device0_compute_capability": "9.0",
        "device0_memory_total_bytes": 150_754_820_096,
        "device0_power_draw_w": 76.543,
        "device0_power_limit_enforced_w": 700.0,
        "device0_throttle_reasons": ["sw_power_cap", "hw_power_brake_slowdown"],
        "device0_ecc": True,
        "device0_ecc_pending": False,
        "device0_mig": False,
        "device0_mig_devices": [],
        "device0_compute_mode": "default",
        "device0_nvlink_active_links": 4,
        "device0_cpu_affinity": "0-3",
        "device0_clock_sm_max_mhz": 1980,
        "device0_clock_memory_now_mhz": 345,
        "device0_pcie_generation_max": 5,
        "device0_pcie_width_now": 16,
    }
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("error", "word"),
    [
        (pynvml.NVMLError_LibraryNotFound(), "NVMLError_LibraryNotFound"),
        (pynvml.NVMLError_DriverNotLoaded(), "NVMLError_DriverNotLoaded"),
        (pynvml.NVMLError_NoPermission(), "NVMLError_NoPermission"),
        (pynvml.NVMLError_LibRmVersionMismatch(), "NVMLError_LibRmVersionMismatch"),
        (OSError("libnvidia-ml.so.1: wrong ELF class"), "OSError"),
    ],
)
def test_without_a_usable_driver_the_whole_group_is_null_with_that_reason(
    error: Exception, word: str
) -> None:
    facts = facts_of(probe(FakeNvml(nvmlInit=error)))
    assert {fact.name for fact in facts} == set(SYSTEM_FIELDS)
    assert all(fact.value is None and fact.state == "failed" for fact in facts)
    assert all(fact.reason is not None and fact.reason.startswith(word) for fact in facts)


@pytest.mark.parametrize(
    ("function", "error", "field"),
    [
        ("nvmlDeviceGetEccMode", pynvml.NVMLError_NotSupported(), "ecc"),
        (
            "nvmlDeviceGetApplicationsClock",
            pynvml.NVMLError_NotSupported(),
            "clock_sm_application_mhz",
        ),
        ("nvmlDeviceGetVbiosVersion", pynvml.NVMLError_NoPermission(), "vbios"),
        ("nvmlDeviceGetPowerUsage", pynvml.NVMLError_Timeout(), "power_draw_w"),
        ("nvmlDeviceGetGspFirmwareVersion", pynvml.NVMLError_FunctionNotFound(), "gsp_firmware"),
        ("nvmlDeviceGetMigMode", pynvml.NVMLError_NotSupported(), "mig"),
        ("nvmlDeviceGetName", UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid"), "name"),
        ("nvmlDeviceGetTemperature", pynvml.NVMLError_Unknown(), "temperature_c"),
    ],
)
def test_one_failing_field_is_null_alone(function: str, error: Exception, field: str) -> None:
    found = failures(FakeNvml(**{function: error}))
    own = {name for name in found if name not in HEALTHY_FAILURES}
    assert {f"device0_{field}", f"device1_{field}"} <= own
    assert len(own) <= 6  # one function feeds at most three fields of a device
    assert str(found[f"device0_{field}"]).startswith(type(error).__name__)


def test_a_function_that_the_binding_lacks_is_null_and_named() -> None:
    found = failures(FakeNvml(nvmlDeviceGetMemoryInfo=None))
    assert "nvmlDeviceGetMemoryInfo" in str(found["device0_memory_total_bytes"])
    assert "device0_name" not in found


def test_names_given_as_bytes_become_text() -> None:
    found = values(FakeNvml(nvmlDeviceGetName=b"NVIDIA H200", nvmlDeviceGetUUID=b"GPU-1"))
    assert found["device0_name"] == "NVIDIA H200"
    assert found["device0_uuid"] == "GPU-1"


def test_bytes_that_are_no_utf8_are_null_with_the_decoder_s_name() -> None:
    found = failures(FakeNvml(nvmlDeviceGetName=b"NVIDIA \xc3\x28"))
    assert str(found["device1_name"]).startswith("UnicodeDecodeError")


def test_a_lost_device_names_itself_in_every_field_and_spares_the_other() -> None:
    def handle(index: int) -> int:
        if index == 1:
            raise pynvml.NVMLError_GpuIsLost()
        return index

    nvml = FakeNvml(nvmlDeviceGetHandleByIndex=handle)
    found = failures(nvml)
    lost = {f"device1_{name}" for name in DEVICE_FIELDS}
    assert lost <= set(found)
    assert all("NVMLError_GpuIsLost" in str(found[name]) for name in lost)
    assert {name for name in found if name.startswith("device0_")} == {"device0_numa_node"}
    assert values(nvml)["driver_version"] == "580.159.04"


def test_an_old_driver_answers_throttle_reasons_by_the_old_symbol() -> None:
    old = FakeNvml(nvmlDeviceGetCurrentClocksEventReasons=pynvml.NVMLError_FunctionNotFound())
    assert values(old)["device0_throttle_reasons"] == ["hw_thermal_slowdown"]
    older_binding = FakeNvml(nvmlDeviceGetCurrentClocksEventReasons=None)
    assert values(older_binding)["device0_throttle_reasons"] == ["hw_thermal_slowdown"]


def test_mig_parts_are_listed_by_uuid_with_gaps_skipped() -> None:
    def part(_handle: int, index: int) -> str:
        if index == 1:
            raise pynvml.NVMLError_NotFound()
        return f"MIG-{index}"

    nvml = FakeNvml(
        nvmlDeviceGetMigMode=[1, 1],
        nvmlDeviceGetMaxMigDeviceCount=3,
        nvmlDeviceGetMigDeviceHandleByIndex=part,
    )
    assert values(nvml)["device0_mig_devices"] == ["MIG-0", "MIG-2"]
    assert values(nvml)["device0_mig"] is True


def test_a_module_that_shadows_nvidia_ml_py_is_no_crash() -> None:
    class Shadow:
        """A module called pynvml without any of the functions."""

    facts = facts_of(probe(Shadow()))
    assert facts
    assert all("nvmlInit" in str(fact.reason) for fact in facts)


def test_a_count_that_fails_leaves_the_driver_s_version() -> None:
    found = values(FakeNvml(nvmlDeviceGetCount=pynvml.NVMLError_Unknown()))
    assert found["driver_version"] == "580.159.04"
    assert not any(name.startswith("device0_") for name in found)


def test_a_single_device_has_no_topology_and_that_is_no_failure() -> None:
    facts = {fact.name: fact for fact in facts_of(probe(FakeNvml(nvmlDeviceGetCount=1)))}
    assert facts["topology"].value is None
    assert facts["topology"].state == "verified"


def test_the_library_is_shut_down_even_when_that_fails() -> None:
    nvml = FakeNvml(nvmlShutdown=pynvml.NVMLError_Uninitialized())
    assert values(nvml)["device_count"] == 2
    assert nvml.calls[-1] == "nvmlShutdown"


def test_a_mistake_of_ours_is_not_swallowed() -> None:
    with pytest.raises(ZeroDivisionError):
        probe(FakeNvml(nvmlDeviceGetName=lambda _handle: 1 // 0))


def test_no_serial_number_is_ever_asked_for() -> None:
    nvml = FakeNvml()
    probe(nvml)
    assert not any("Serial" in call for call in nvml.calls)


def test_unknown_throttle_bits_stay_visible() -> None:
    assert event_names(0x20 | 0x4000) == ["sw_thermal_slowdown", "bit_0x4000"]
    assert event_names(0) == []


@pytest.mark.parametrize(
    ("cpus", "text"), [([0, 1, 2, 5], "0-2,5"), ([7], "7"), ([], ""), ([3, 1, 2, 2], "1-3")]
)
def test_cpu_sets_are_written_as_the_kernel_writes_them(cpus: list[int], text: str) -> None:
    assert format_cpus(cpus) == text


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("driver_version", "must"),
        ("device3_name", "must"),
        ("device0_clock_sm_now_mhz", "ignored"),
        ("device12_throttle_reasons", "ignored"),
        ("device0_uuid", "reported"),
        ("binding", "reported"),
    ],
)
def test_each_field_says_how_it_is_compared(name: str, match: str) -> None:
    assert match_of(name) == match
