"""What is read from devices beside a window, and when it makes a run invalid."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
from fake_nvml import FakeNvml

from kit import telemetry_gpu
from kit.guard import Limits, check_replicate, kept_bytes, limited_share
from kit.measure import Raw, Window
from kit.telemetry_gpu import Devices

MIB = 2**20


def sample(**broken: Any) -> dict[str, Any]:
    with Devices([0], FakeNvml(**broken)) as devices:
        return devices.sample()


def guards(telemetry: list[dict[str, Any]], seen: dict[str, Any] | None = None) -> dict[str, Any]:
    host = {"cpuset": [0], "busy_s": 0.0, "ours_s": 0.0, "load_1m": 0.0}
    lines = [{"t_s": float(i), **host, **each} for i, each in enumerate(telemetry)]
    raw = Raw(windows={"measure": Window("r/measure", (), (), {})}, devices=seen or {})
    found = check_replicate(
        raw,
        replicate=0,
        requests={"measure": []},
        primary_s=None,
        telemetry=lines,
        telemetry_file="replicates/00/telemetry.jsonl",
        limits=Limits(),
    )
    return {guard.name: guard for guard in found}


def test_a_line_tells_clock_power_temperature_load_memory_and_reasons() -> None:
    line = sample()
    assert line["devices"] == [
        {
            "index": 0,
            "sm_mhz": 345,
            "memory_mhz": 345,
            "power_w": 76.543,
            "power_limit_w": 700.0,
            "power_limit_default_w": 700.0,
            "temperature_c": 31,
            "utilization_percent": 7,
            "memory_used_bytes": 1_000_000,
            "reasons": ["sw_power_cap", "hw_power_brake_slowdown"],
        }
    ]
    assert line["devices_took_s"] >= 0


@pytest.mark.parametrize(
    ("mask", "throttled"),
    [
        (0x0, False),
        (0x1 | 0x2, False),  # idle, and clocks that somebody set
        (0x4, False),  # at its own limit
        (0x20 | 0x1, "sw_thermal_slowdown"),
        (0x40 | 0x80, "hw_power_brake_slowdown, hw_thermal_slowdown"),
    ],
)
def test_only_heat_and_power_count_as_throttled(mask: int, throttled: str | bool) -> None:
    assert sample(nvmlDeviceGetCurrentClocksEventReasons=mask)["throttled"] == throttled


@pytest.mark.parametrize(
    "broken",
    [
        {"nvmlDeviceGetHandleByIndex": pynvml.NVMLError_GpuIsLost()},
        {"nvmlInit": pynvml.NVMLError_LibraryNotFound(), "nvmlDeviceGetHandleByIndex": OSError()},
        {
            "nvmlDeviceGetCurrentClocksEventReasons": None,
            "nvmlDeviceGetCurrentClocksThrottleReasons": pynvml.NVMLError_NotSupported(),
        },
    ],
)
def test_a_device_that_does_not_tell_gives_null_and_never_false(broken: dict[str, Any]) -> None:
    assert sample(**broken)["throttled"] is None


def test_a_planted_power_cap_makes_the_window_invalid_with_its_reason() -> None:
    capped = sample(
        nvmlDeviceGetCurrentClocksEventReasons=0x4, nvmlDeviceGetEnforcedPowerLimit=400_000
    )
    assert capped["power_limited"] is False
    free = sample(nvmlDeviceGetCurrentClocksEventReasons=0x1)
    assert guards([free] * 100)["throttled"].ok
    assert guards([free] * 199 + [capped])["throttled"].ok  # 0.5 %
    bad = guards([free] * 9 + [capped])["throttled"]
    assert not bad.ok
    assert "sw_power_cap" in bad.text


def test_a_whole_device_at_its_own_power_limit_is_told_and_not_invalid() -> None:
    full = sample(nvmlDeviceGetCurrentClocksEventReasons=0x4)
    assert (full["throttled"], full["power_limited"]) == (False, True)
    free = sample(nvmlDeviceGetCurrentClocksEventReasons=0x1)
    assert guards([free] + [full] * 3)["throttled"].ok
    assert limited_share([free] + [full] * 3) == 0.75
    assert limited_share([]) == 0


@pytest.mark.parametrize(
    "unknown", ["nvmlDeviceGetEnforcedPowerLimit", "nvmlDeviceGetPowerManagementDefaultLimit"]
)
def test_a_power_cap_under_an_unknown_limit_counts(unknown: str) -> None:
    broken = {unknown: pynvml.NVMLError_NotSupported()}
    assert sample(nvmlDeviceGetCurrentClocksEventReasons=0x4, **broken)["throttled"] == (
        "sw_power_cap"
    )


def test_memory_that_comes_back_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry_gpu, "EVERY_S", 0.0)
    used = iter([100 * MIB, 900 * MIB, 700 * MIB, 110 * MIB])
    told: list[dict[str, Any]] = []
    nvml = FakeNvml(
        nvmlDeviceGetMemoryInfo=lambda _: SimpleNamespace(used=next(used), total=1, free=0)
    )
    with Devices([0], nvml) as devices, devices.given_back(told.append):
        pass
    assert kept_bytes(told[0]) == 10 * MIB
    assert guards([{}, {}], told[0])["device_memory"].ok


def test_memory_that_stays_and_strangers_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry_gpu, "MEMORY_WAIT_S", 0.0)
    monkeypatch.setattr(telemetry_gpu, "program_name", lambda pid: f"program-{pid}")
    used = iter([100 * MIB, 900 * MIB])
    told: list[dict[str, Any]] = []
    nvml = FakeNvml(
        nvmlDeviceGetMemoryInfo=lambda _: SimpleNamespace(used=next(used), total=1, free=0),
        nvmlDeviceGetComputeRunningProcesses=[SimpleNamespace(pid=7, usedGpuMemory=5)],
    )
    with Devices([0], nvml) as devices, devices.given_back(told.append):
        pass
    found = guards([{}, {}], told[0])
    assert not found["device_memory"].ok
    assert "800 MiB" in found["device_memory"].text
    assert found["device_memory"].source == "replicates/00/devices.json"
    assert not found["device_shared"].ok
    assert "program-7" in found["device_shared"].text


def test_a_run_without_devices_has_no_such_guards() -> None:
    assert not {"device_memory", "device_shared", "throttled"} & guards([{}, {}]).keys()
