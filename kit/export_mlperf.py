"""A run's machine as an MLPerf Inference system description.

Its submission checker wants every key below; what no fact tells is left empty, for the person who
submits. A description alone makes no MLPerf result, and `sw_notes` says where this one is from.
"""

from __future__ import annotations

from typing import Any

from kit.export_llmd import fact_value
from kit.manifest import Manifest

FIELDS = (
    "division", "submitter", "status", "system_name", "number_of_nodes",
    "host_processor_model_name", "host_processors_per_node", "host_processor_core_count",
    "host_memory_capacity", "host_storage_capacity", "host_storage_type", "accelerators_per_node",
    "accelerator_model_name", "accelerator_memory_capacity", "framework", "operating_system",
    "system_type", "other_software_stack", "host_processor_frequency", "host_processor_caches",
    "host_memory_configuration", "host_processor_interconnect", "host_networking",
    "host_networking_topology", "accelerator_frequency", "accelerator_host_interconnect",
    "accelerator_interconnect", "accelerator_interconnect_topology",
    "accelerator_memory_configuration", "accelerator_on-chip_memories", "cooling", "hw_notes",
    "sw_notes", "host_network_card_count", "system_type_detail",
)  # fmt: skip


def mlperf_system(manifest: Manifest) -> dict[str, str]:
    """Return the description: every key of the checker, in its order, all values text."""
    known = {**_host(manifest), **_accelerator(manifest), **_software(manifest)}
    return {key: "" if known.get(key) is None else str(known[key]) for key in FIELDS}


def _host(manifest: Manifest) -> dict[str, Any]:
    def host(name: str) -> Any:
        return fact_value(manifest.facts, "host", name)

    sockets, cores = host("cpu_sockets"), host("cpu_cores")
    return {
        "number_of_nodes": 1,  # one engine holds all containers of a run
        "host_processor_model_name": host("cpu_model"),
        "host_processors_per_node": sockets,
        "host_processor_core_count": cores // sockets if cores and sockets else None,
        "host_processor_caches": _text("L3 {} B", host("cpu_l3_bytes")),
        "host_memory_capacity": _text("{} B", host("memory_total_bytes")),
        "operating_system": ", Linux ".join(
            part for part in (host("os_pretty_name"), host("kernel_release")) if part
        ),
        "hw_notes": _text("hypervisor: {}", host("hypervisor")),
    }


def _accelerator(manifest: Manifest) -> dict[str, Any]:
    def gpu(name: str) -> Any:
        return fact_value(manifest.facts, "gpu", name)

    width = gpu("device0_pcie_width_max")
    return {
        "accelerators_per_node": gpu("device_count"),
        "accelerator_model_name": gpu("device0_name"),
        "accelerator_memory_capacity": _text("{} B", gpu("device0_memory_total_bytes")),
        "accelerator_frequency": _text("{} MHz", gpu("device0_clock_sm_max_mhz")),
        "accelerator_host_interconnect": _text(
            f"PCIe generation {{}} x{width}", gpu("device0_pcie_generation_max") if width else None
        ),
    }


def _software(manifest: Manifest) -> dict[str, Any]:
    served = [fact for replicate in manifest.replicates for fact in replicate.facts]
    parts = (
        _text("Docker Engine {}", fact_value(manifest.facts, "engine", "version")),
        _text("torch {}", fact_value(served, "vllm", "torch_version")),
        _text("NVIDIA driver {}", fact_value(manifest.facts, "gpu", "driver_version")),
    )
    version = fact_value(served, "vllm", "version")
    return {
        "framework": _text("vLLM {}", version if manifest.plan.engine == "vllm" else None),
        "other_software_stack": ", ".join(part for part in parts if part) or None,
        "sw_notes": f"no MLPerf result; vllm-kit run {manifest.run_id}, images "
        + ", ".join(f"{image.id} {image.identity}" for image in manifest.images),
    }


def _text(form: str, value: Any) -> str | None:
    return None if value is None else form.format(value)
