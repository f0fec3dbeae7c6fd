"""Watches NVIDIA devices from outside the containers, through the driver's library.

Beside a measured window: clocks, power, temperature, load, memory, reasons for a lower clock.
Around a replicate: whose memory is on the device before it starts, and whether all of it came back.
"""

from __future__ import annotations

import contextlib
import importlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kit.guard import Limits, kept_bytes
from kit.inside.probe_field import read_field
from kit.inside.probe_gpu import DEVICE_FIELDS, Nvml, nvml_errors

EVERY_S = 0.2
"""How often devices are asked beside a window."""

SLOWED = frozenset(
    {
        "sw_power_cap",
        "hw_slowdown",
        "sw_thermal_slowdown",
        "hw_thermal_slowdown",
        "hw_power_brake_slowdown",
    }
)
"""Reasons that make a window's numbers those of a slower device; idle and set clocks do not.

`sw_power_cap` only where the limit is below the device's own: a whole device meets its own limit
under any full load, and what it then does is what it can do.
"""

MEMORY_WAIT_S = 20.0

_SAMPLED = {
    "sm_mhz": "clock_sm_now_mhz",
    "memory_mhz": "clock_memory_now_mhz",
    "power_w": "power_draw_w",
    "power_limit_w": "power_limit_enforced_w",
    "power_limit_default_w": "power_limit_default_w",
    "temperature_c": "temperature_c",
    "utilization_percent": "utilization_percent",
    "memory_used_bytes": "memory_used_bytes",
    "reasons": "throttle_reasons",
}


def _slowed(device: Mapping[str, Any]) -> set[str]:
    """Return a device's reasons that count: not that it met the power limit it was made with."""
    limit, own = device["power_limit_w"], device["power_limit_default_w"]
    is_own = limit is not None and own is not None and limit >= own
    return set(device["reasons"]) & (SLOWED - {"sw_power_cap"} if is_own else SLOWED)


class Devices:
    """The devices of a run, by their index in NVML; open it as a context."""

    def __init__(self, indices: Sequence[int], nvml: Nvml | None = None) -> None:
        self._indices = tuple(indices)
        self._nvml: Nvml = nvml or importlib.import_module("pynvml")
        self._errors = nvml_errors(self._nvml)

    def __enter__(self) -> Devices:
        with contextlib.suppress(*self._errors):  # every field then says why it is null
            self._nvml.nvmlInit()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(*self._errors):
            self._nvml.nvmlShutdown()

    def sample(self) -> dict[str, Any]:
        """Return a telemetry line's part: `devices` and what asking took; of all of them together

        `throttled`, the reasons as one string, false when there is none, and `power_limited`,
        whether one met its own power limit; null when a device does not tell.
        """
        begin = time.monotonic()
        told = [self._sample(index) for index in self._indices]
        throttled: str | bool | None = None
        limited: bool | None = None
        if all(device["reasons"] is not None for device in told):
            slowed = {name for device in told for name in _slowed(device)}
            throttled = ", ".join(sorted(slowed)) or False
            limited = any("sw_power_cap" in set(d["reasons"]) - _slowed(d) for d in told)
        took_s = round(time.monotonic() - begin, 6)
        return {
            "devices": told,
            "throttled": throttled,
            "power_limited": limited,
            "devices_took_s": took_s,
        }

    def _sample(self, index: int) -> dict[str, Any]:
        values = {name: self._read(index, field) for name, field in _SAMPLED.items()}
        return {"index": index, **values}

    def _read(self, index: int, field: str) -> Any:
        how, read = DEVICE_FIELDS[field]
        nvml = self._nvml
        handle = nvml.nvmlDeviceGetHandleByIndex
        return read_field(how, lambda: read(nvml, handle(index)), self._errors)["value"]

    def holders(self) -> list[dict[str, Any]]:
        """Return per device the memory in use and the processes that compute on it, by name."""
        return [
            {
                "index": index,
                "memory_used_bytes": self._read(index, "memory_used_bytes"),
                "processes": self._processes(index),
            }
            for index in self._indices
        ]

    def _processes(self, index: int) -> list[dict[str, Any]] | None:
        """Return the compute processes: program name and bytes; None when NVML does not tell."""
        nvml = self._nvml

        def read() -> list[dict[str, Any]]:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            found = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
            return [
                {"name": program_name(each.pid), "memory_bytes": each.usedGpuMemory}
                for each in found
            ]

        field = read_field("nvmlDeviceGetComputeRunningProcesses", read, self._errors)
        value: list[dict[str, Any]] | None = field["value"]
        return value

    @contextlib.contextmanager
    def given_back(self, tell: Callable[[dict[str, Any]], None]) -> Iterator[None]:
        """Look at the devices before and after the block, and `tell` both at its end.

        Afterwards waits until the memory is back at what it was; a process that keeps it is then
        among the holders. What is told: `before`, `after` (as `holders`), `waited_s`.
        """
        before = self.holders()
        try:
            yield
        finally:
            begin = time.monotonic()
            after = self.holders()
            while time.monotonic() - begin < MEMORY_WAIT_S:
                kept = kept_bytes({"before": before, "after": after})
                if kept is None or kept <= Limits().device_memory_bytes:
                    break
                time.sleep(EVERY_S)
                after = self.holders()
            waited_s = round(time.monotonic() - begin, 3)
            tell({"before": before, "after": after, "waited_s": waited_s})


def program_name(pid: int) -> str:
    """Return a process's program name without folders or arguments, or `unknown`."""
    try:
        return Path(f"/proc/{pid}/comm").read_text("utf-8", "replace").strip()
    except OSError:
        return "unknown"  # of another pid namespace, or gone
