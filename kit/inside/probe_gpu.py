"""NVIDIA devices as the driver's management library (NVML) tells, field by field.

Runs on the host and inside containers, on the standard library and nvidia-ml-py. Prints one
JSON object of fields when started by itself. Never reads serial numbers.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib
import json
import os
import sys
from collections.abc import Callable, Iterable
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from .probe_field import READ_ERRORS, Absent, Field, read_field, read_text

Nvml = Any
"""The module `pynvml` of nvidia-ml-py, or a fake with the same functions."""

_EVENTS = (
    (0x1, "gpu_idle"),
    (0x2, "applications_clocks_setting"),
    (0x4, "sw_power_cap"),
    (0x8, "hw_slowdown"),
    (0x10, "sync_boost"),
    (0x20, "sw_thermal_slowdown"),
    (0x40, "hw_thermal_slowdown"),
    (0x80, "hw_power_brake_slowdown"),
    (0x100, "display_clock_setting"),
)
"""Clock event (throttle) reasons, nvml.h: nvmlClocksEventReason*."""

_PATHS = {0: "same board", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
"""nvmlGpuTopologyLevel_t, with the names that nvidia-smi prints."""

_COMPUTE_MODES = {0: "default", 1: "exclusive_thread", 2: "prohibited", 3: "exclusive_process"}
_GRAPHICS, _SM, _MEMORY = 0, 1, 2  # nvmlClockType_t
_MAX_LINKS = 18  # NVML_NVLINK_MAX_LINKS
_P2P_NVLINK = 2  # NVML_P2P_CAPS_INDEX_NVLINK
_WORD_BITS = 64


def as_text(value: str | bytes) -> str:
    """Return text; older bindings give bytes. Raises `UnicodeDecodeError` for other encodings."""
    return value.decode("utf-8") if isinstance(value, bytes) else value


def event_names(mask: int) -> list[str]:
    """Return the names of the clock event reasons in a bit mask; unknown bits as `bit_0x…`."""
    known = [name for bit, name in _EVENTS if mask & bit]
    rest = mask & ~sum(bit for bit, _name in _EVENTS)
    return [*known, f"bit_0x{rest:x}"] if rest else known


def format_cpus(cpus: Iterable[int]) -> str:
    """Write a set of CPUs in the kernel's notation, ranges joined: `0-3,8`."""
    ranges: list[list[int]] = []
    for cpu in sorted(set(cpus)):
        if ranges and ranges[-1][1] == cpu - 1:
            ranges[-1][1] = cpu
        else:
            ranges.append([cpu, cpu])
    return ",".join(f"{low}" if low == high else f"{low}-{high}" for low, high in ranges)


def _events(nvml: Nvml, handle: Any) -> list[str]:
    """Ask by the new name first; drivers before 535 know only the older one."""
    try:
        return event_names(nvml.nvmlDeviceGetCurrentClocksEventReasons(handle))
    except (AttributeError, nvml.NVMLError):
        return event_names(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))


def _uuid(nvml: Nvml, handle: Any) -> str:
    return as_text(nvml.nvmlDeviceGetUUID(handle))


def _capability(nvml: Nvml, handle: Any) -> str:
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    return f"{major}.{minor}"


def _bus_id(nvml: Nvml, handle: Any) -> str:
    return as_text(nvml.nvmlDeviceGetPciInfo(handle).busId)


def _numa_node(nvml: Nvml, handle: Any) -> int:
    domain, rest = _bus_id(nvml, handle).lower().split(":", 1)
    node = int(read_text(f"/sys/bus/pci/devices/{domain[-4:]}:{rest}/numa_node"))
    if node < 0:
        raise Absent("the kernel assigns no NUMA node")
    return node


def _cpu_affinity(nvml: Nvml, handle: Any) -> str:
    size = -(-(os.cpu_count() or 1) // _WORD_BITS)
    words = [int(word) for word in nvml.nvmlDeviceGetCpuAffinity(handle, size)]
    return format_cpus(
        index * _WORD_BITS + bit
        for index, word in enumerate(words)
        for bit in range(_WORD_BITS)
        if word >> bit & 1
    )


def _mig_devices(nvml: Nvml, handle: Any) -> list[str]:
    found = []
    for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            part = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
        except nvml.NVMLError_NotFound:
            continue  # slots need not be filled in order
        found.append(as_text(nvml.nvmlDeviceGetUUID(part)))
    return found


def _active_links(nvml: Nvml, handle: Any) -> int:
    active = 0
    for link in range(_MAX_LINKS):
        try:
            active += int(nvml.nvmlDeviceGetNvLinkState(handle, link) == 1)
        except nvml.NVMLError_InvalidArgument:
            break  # this device has fewer links
    return active


def _watts(milliwatts: int) -> float:
    return float(milliwatts) / 1000


Reader = Callable[[Nvml, Any], Any]

DEVICE_FIELDS: dict[str, tuple[str, Reader]] = {
    "name": ("nvmlDeviceGetName", lambda n, h: as_text(n.nvmlDeviceGetName(h))),
    "uuid": ("nvmlDeviceGetUUID", _uuid),
    "uuid_sha256": (
        "sha256 of nvmlDeviceGetUUID",
        lambda n, h: hashlib.sha256(_uuid(n, h).encode()).hexdigest(),
    ),
    "compute_capability": ("nvmlDeviceGetCudaComputeCapability", _capability),
    "memory_total_bytes": ("nvmlDeviceGetMemoryInfo", lambda n, h: _memory(n, h).total),
    "memory_used_bytes": ("nvmlDeviceGetMemoryInfo", lambda n, h: _memory(n, h).used),
    "vbios": ("nvmlDeviceGetVbiosVersion", lambda n, h: as_text(n.nvmlDeviceGetVbiosVersion(h))),
    "gsp_firmware": (
        "nvmlDeviceGetGspFirmwareVersion",
        lambda n, h: as_text(n.nvmlDeviceGetGspFirmwareVersion(h)),
    ),
    "pci_bus_id": ("nvmlDeviceGetPciInfo", _bus_id),
    "power_draw_w": ("nvmlDeviceGetPowerUsage", lambda n, h: _watts(n.nvmlDeviceGetPowerUsage(h))),
    "power_limit_enforced_w": (
        "nvmlDeviceGetEnforcedPowerLimit",
        lambda n, h: _watts(n.nvmlDeviceGetEnforcedPowerLimit(h)),
    ),
    "power_limit_default_w": (
        "nvmlDeviceGetPowerManagementDefaultLimit",
        lambda n, h: _watts(n.nvmlDeviceGetPowerManagementDefaultLimit(h)),
    ),
    "temperature_c": ("nvmlDeviceGetTemperature", lambda n, h: n.nvmlDeviceGetTemperature(h, 0)),
    "utilization_percent": (
        "nvmlDeviceGetUtilizationRates",
        lambda n, h: n.nvmlDeviceGetUtilizationRates(h).gpu,
    ),
    "performance_state": (
        "nvmlDeviceGetPerformanceState",
        lambda n, h: n.nvmlDeviceGetPerformanceState(h),
    ),
    "throttle_reasons": ("nvmlDeviceGetCurrentClocksEventReasons", _events),
    "persistence": (
        "nvmlDeviceGetPersistenceMode",
        lambda n, h: n.nvmlDeviceGetPersistenceMode(h) == 1,
    ),
    "ecc": ("nvmlDeviceGetEccMode: current", lambda n, h: n.nvmlDeviceGetEccMode(h)[0] == 1),
    "ecc_pending": (
        "nvmlDeviceGetEccMode: pending",
        lambda n, h: n.nvmlDeviceGetEccMode(h)[1] == 1,
    ),
    "mig": ("nvmlDeviceGetMigMode: current", lambda n, h: n.nvmlDeviceGetMigMode(h)[0] == 1),
    "mig_devices": ("nvmlDeviceGetMigDeviceHandleByIndex", _mig_devices),
    "compute_mode": (
        "nvmlDeviceGetComputeMode",
        lambda n, h: _COMPUTE_MODES[n.nvmlDeviceGetComputeMode(h)],
    ),
    "compute_processes": (
        "nvmlDeviceGetComputeRunningProcesses",
        lambda n, h: len(n.nvmlDeviceGetComputeRunningProcesses(h)),
    ),
    "nvlink_active_links": ("nvmlDeviceGetNvLinkState", _active_links),
    "numa_node": ("/sys/bus/pci/devices/*/numa_node", _numa_node),
    "cpu_affinity": ("nvmlDeviceGetCpuAffinity", _cpu_affinity),
}
"""Field -> (how, reader); clocks and PCIe links are added below, as they come in families."""


def _memory(nvml: Nvml, handle: Any) -> Any:
    return nvml.nvmlDeviceGetMemoryInfo(handle)


def _call(function: str, *args: int) -> Reader:
    return lambda nvml, handle: getattr(nvml, function)(handle, *args)


for _label, _clock in (("graphics", _GRAPHICS), ("sm", _SM), ("memory", _MEMORY)):
    for _when, _function in (
        ("now", "nvmlDeviceGetClockInfo"),
        ("max", "nvmlDeviceGetMaxClockInfo"),
        ("application", "nvmlDeviceGetApplicationsClock"),
    ):
        DEVICE_FIELDS[f"clock_{_label}_{_when}_mhz"] = (_function, _call(_function, _clock))
for _when, _prefix in (("now", "Curr"), ("max", "Max")):
    for _label, _what in (("generation", "Generation"), ("width", "Width")):
        _function = f"nvmlDeviceGet{_prefix}PcieLink{_what}"
        DEVICE_FIELDS[f"pcie_{_label}_{_when}"] = (_function, _call(_function))


def _cuda_version(nvml: Nvml) -> str:
    number = int(nvml.nvmlSystemGetCudaDriverVersion())
    return f"{number // 1000}.{number % 1000 // 10}"


def _pairs(nvml: Nvml, ask: Callable[[Any, Any], Any]) -> dict[str, Any]:
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    if len(handles) < 2:
        raise Absent("fewer than two devices")
    return {
        f"{first}-{second}": ask(handles[first], handles[second])
        for first in range(len(handles))
        for second in range(first + 1, len(handles))
    }


def _topology(nvml: Nvml) -> dict[str, str]:
    common = nvml.nvmlDeviceGetTopologyCommonAncestor
    return _pairs(nvml, lambda one, other: _PATHS[common(one, other)])


def _nvlink_pairs(nvml: Nvml) -> dict[str, bool]:
    status = nvml.nvmlDeviceGetP2PStatus
    return _pairs(nvml, lambda one, other: status(one, other, _P2P_NVLINK) == 0)


SYSTEM_FIELDS: dict[str, tuple[str, Callable[[Nvml], Any]]] = {
    "driver_version": (
        "nvmlSystemGetDriverVersion",
        lambda n: as_text(n.nvmlSystemGetDriverVersion()),
    ),
    "cuda_driver_version": ("nvmlSystemGetCudaDriverVersion", _cuda_version),
    "nvml_version": ("nvmlSystemGetNVMLVersion", lambda n: as_text(n.nvmlSystemGetNVMLVersion())),
    "device_count": ("nvmlDeviceGetCount", lambda n: n.nvmlDeviceGetCount()),
    "topology": ("nvmlDeviceGetTopologyCommonAncestor", _topology),
    "nvlink_pairs": ("nvmlDeviceGetP2PStatus, NVLink", _nvlink_pairs),
}


def nvml_errors(nvml: Nvml) -> tuple[type[Exception], ...]:
    """Return what a call through this module may raise: NVML's own error and plain ones."""
    own = getattr(nvml, "NVMLError", None)  # a module that shadows nvidia-ml-py may lack it
    return (*READ_ERRORS, own) if own is not None else READ_ERRORS


def probe(nvml: Nvml) -> dict[str, Field]:
    """Read everything through a module that offers NVML; a driver that is not there is fine.

    Without a usable library every system field is null with that one reason and there are no
    devices. Names of device fields start with `device<index>_`.
    """
    errors = nvml_errors(nvml)
    start = read_field("nvmlInit", lambda: nvml.nvmlInit(), errors)
    if start["error"] is not None:
        return {name: {**start, "how": how} for name, (how, _read) in SYSTEM_FIELDS.items()}
    try:
        fields = {
            name: read_field(how, partial(read, nvml), errors)
            for name, (how, read) in SYSTEM_FIELDS.items()
        }
        for index in range(fields["device_count"]["value"] or 0):
            fields.update(_device(nvml, index, errors))
    finally:
        with contextlib.suppress(*errors):
            nvml.nvmlShutdown()
    return fields


def _device(nvml: Nvml, index: int, errors: tuple[type[Exception], ...]) -> dict[str, Field]:
    def reading(read: Reader) -> Callable[[], Any]:
        # The handle is asked for each time: a lost device then names itself in every field.
        return lambda: read(nvml, nvml.nvmlDeviceGetHandleByIndex(index))

    return {
        f"device{index}_{name}": read_field(how, reading(read), errors)
        for name, (how, read) in DEVICE_FIELDS.items()
    }


def _binding() -> str:
    """Return which distribution gives the module: a package `pynvml` shadows nvidia-ml-py."""
    try:
        return f"nvidia-ml-py {metadata.version('nvidia-ml-py')}"
    except metadata.PackageNotFoundError:
        raise Absent("nvidia-ml-py is not installed") from None


def load_driver_library(environ: Path = Path("/proc/1/environ")) -> bool:
    """Load libnvidia-ml from the library path of process 1; return whether it was there.

    A CDI description may name the driver's folder only in the environment that it gives to
    process 1; a probe that the engine starts by `exec` does not get that environment. Once
    loaded under its own name, NVML's binding finds it.
    """
    with contextlib.suppress(OSError):
        for word in environ.read_bytes().split(b"\0"):
            name, _, value = word.decode("utf-8", "replace").partition("=")
            for folder in value.split(":") if name == "LD_LIBRARY_PATH" else ():
                if folder:
                    with contextlib.suppress(OSError):
                        ctypes.CDLL(str(Path(folder) / "libnvidia-ml.so.1"))
                        return True
    return False


def gpu_section() -> dict[str, Field]:
    """Return all fields, with the binding that was used."""
    binding = read_field("importlib.metadata", _binding)
    load_driver_library()
    try:
        nvml: Nvml = importlib.import_module("pynvml")
    except ImportError as error:
        reason = f"{type(error).__name__}: {error}"
        nothing = {"value": None, "error": reason, "absent": False}
        fields = {name: {**nothing, "how": how} for name, (how, _read) in SYSTEM_FIELDS.items()}
        return {"binding": binding, **fields}
    return {"binding": binding, **probe(nvml)}


if __name__ == "__main__":
    json.dump(gpu_section(), sys.stdout)
