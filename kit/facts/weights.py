"""How quantised weights really run: kernels, fallbacks and memory, from the engine's start log.

Asked for and used are two things: a format that the engine accepts may be served by another kernel
or not at all. Other engines give no such facts.
"""

from __future__ import annotations

from kit.fact import Fact, Place, observe
from kit.inside.probe_field import Absent
from kit.startlog import fallbacks_of, kernels_of, weight_gib_of

GROUP = "weights"


def collect(place: Place) -> list[Fact]:
    """Read the log of a container whose engine resolved a quantization; others give none."""
    container = place.container
    if container is None or not _is_quantised(place):
        return []
    log = container.logs().decode("utf-8", "replace")

    def memory() -> list[float]:
        found = weight_gib_of(log)
        if not found:
            raise Absent("the start log names no memory of weights")
        return found

    return [
        observe(GROUP, name, f"container log: {what}", read, service=place.service)
        for name, what, read in (
            ("kernels", "`Selected … for`, `Using … for`", lambda: kernels_of(log)),
            ("fallbacks", "sentences about another kernel", lambda: fallbacks_of(log)),
            ("memory_gib", "`Model loading took`, each rank", memory),
        )
    ]


def _is_quantised(place: Place) -> bool:
    config = (place.server_info or {}).get("vllm_config") or {}
    return bool((config.get("model_config") or {}).get("quantization"))
