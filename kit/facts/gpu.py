"""NVIDIA devices by nvidia-ml-py, on the host and inside each container, side by side.

Without a driver the whole group is null with NVML's own reason; a field that one device does
not support is null alone. See `kit/inside/probe_gpu.py` for the calls.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from kit.fact import Fact, Match, Place, from_fields
from kit.inside.probe_field import Field, read_field
from kit.inside.probe_gpu import SYSTEM_FIELDS

GROUP = "gpu"

_MUST = frozenset({
    "driver_version", "cuda_driver_version", "device_count", "topology", "nvlink_pairs", "name",
    "compute_capability", "memory_total_bytes", "power_limit_enforced_w", "ecc", "mig",
    "compute_mode", "nvlink_active_links", "clock_graphics_max_mhz", "clock_sm_max_mhz",
    "clock_memory_max_mhz", "clock_graphics_application_mhz", "clock_sm_application_mhz",
    "clock_memory_application_mhz", "pcie_generation_max", "pcie_width_max",
})  # fmt: skip
_IGNORED = frozenset({
    "memory_used_bytes", "power_draw_w", "temperature_c", "utilization_percent",
    "performance_state", "throttle_reasons", "compute_processes", "clock_graphics_now_mhz",
    "clock_sm_now_mhz", "clock_memory_now_mhz", "pcie_generation_now", "pcie_width_now",
})  # fmt: skip


def match_of(name: str) -> Match:
    """Return how a field is compared; `device3_name` follows `name`."""
    field = re.sub(r"^device\d+_", "", name)
    if field in _MUST:
        return "must"
    return "ignored" if field in _IGNORED else "reported"


def facts_of(fields: Mapping[str, Field], *, service: str | None = None) -> list[Fact]:
    """Turn the probe's fields into facts."""
    matches = {name: match_of(name) for name in fields}
    return from_fields(GROUP, fields, matches, service=service)


def collect(place: Place) -> list[Fact]:
    """Ask NVML at the place; on the host in a process of its own, so that a hang costs a fact."""
    if place.container is not None:
        return facts_of(place.inside("probe_container")["gpu"], service=place.service)
    return facts_of(ask_host(place))


def ask_host(place: Place) -> Mapping[str, Field]:
    """Return the probe's fields; where it hangs or dies, every system field says so."""
    asked = read_field("kit.inside.probe_gpu", lambda: place.inside("probe_gpu"))
    if asked["error"] is None:
        fields: Mapping[str, Field] = asked["value"]
        return fields
    return {name: {**asked, "how": how} for name, (how, _read) in SYSTEM_FIELDS.items()}
