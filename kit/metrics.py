"""Measures read from /metrics beyond counters: gauges and info labels, and the proxy's own cost.

A gauge is a sample of a moment, so only its largest, smallest or mean value over the window is
given, with how many scrapes it comes from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kit.measure import (
    Measure,
    Raw,
    Reading,
    counter_delta,
    null_reading,
    ratio_of,
    reading_of,
)

CACHE_INFO = "vllm:cache_config_info"


def gauge_of(
    name: str,
    pick: Callable[[Sequence[float]], float],
    *,
    phase: str = "measure",
    leg: str | None = None,
) -> Callable[[Raw], Reading]:
    """Measure the `pick` (max, min, mean) of a gauge over the scrapes beside the load."""

    def compute(raw: Raw) -> Reading:
        file, scrapes = raw.windows[phase].of(leg)
        seen = [v for s in scrapes if s.t_s >= 0 and (v := s.total(name)) is not None]
        if not seen:
            return null_reading(f"{name} was in no scrape", 0, file)
        return reading_of(pick(seen), len(seen), file)

    return compute


def info_label(
    label: str, *, name: str = CACHE_INFO, leg: str | None = None
) -> Callable[[Raw], Reading]:
    """Measure a number that the engine tells as a label of an info metric, in the last scrape."""

    def compute(raw: Raw) -> Reading:
        file, scrapes = raw.measured.of(leg)
        found = next((v for s in reversed(scrapes) if (v := s.label(name, label))), None)
        if found is None:
            return null_reading(f"{name} has no label {label}", 0, file)
        try:
            return reading_of(float(found), 1, file)
        except ValueError:
            return null_reading(f"{label} is {found!r}, not a number", 1, file)

    return compute


def info_label_is(label: str, prefix: str, *, name: str = CACHE_INFO) -> Callable[[Raw], Reading]:
    """Measure 1 when a label of an info metric begins with `prefix`, else 0."""

    def compute(raw: Raw) -> Reading:
        window = raw.measured
        found = next((v for s in reversed(window.scrapes) if (v := s.label(name, label))), None)
        if found is None:
            return null_reading(f"{name} has no label {label}", 0, window.metrics_file)
        return reading_of(float(found.startswith(prefix)), 1, window.metrics_file)

    return compute


PROXY_COST = Measure(
    "proxy_handing_on_mean_s",
    "s",
    "the proxy's own time until a request is handed on, mean",
    ratio_of(
        counter_delta("kit_proxy_overhead_seconds_sum"),
        counter_delta("kit_proxy_overhead_seconds_count"),
    ),
)
"""What every arm behind the proxy reports: connecting to the engine included, prefill left out."""


def device_count(raw: Raw) -> Reading:
    """Measure how many devices the engines compute on, by their resolved configurations."""
    return _over_engines(raw, "parallel_config.tensor_parallel_size", sum)


def resolved(path: str) -> Callable[[Raw], Reading]:
    """Measure a number or switch of the configuration that the engine resolved; on is 1.

    `path` is the place in it, `scheduler_config.async_scheduling`; of several engines, the least.
    """
    return lambda raw: _over_engines(raw, path, min)


def _over_engines(raw: Raw, path: str, pick: Callable[[Sequence[float]], float]) -> Reading:
    infos = list(raw.legs.values()) if raw.legs else [raw.server_info]
    names = [f"server_info-{leg}.json" for leg in raw.legs] or ["server_info.json"]
    files = tuple(f"{raw.folder}/{name}" for name in names)
    found = []
    for info in infos:
        value: Any = info.get("vllm_config", {})
        for part in path.split("."):
            if not isinstance(value, Mapping) or part not in value:
                return null_reading(f"the configuration has no {part}", len(infos), *files)
            value = value[part]
        if not isinstance(value, int | float):
            return null_reading(f"{path} is {value!r}, not a number", len(infos), *files)
        found.append(float(value))
    return reading_of(pick(found), len(infos), *files)
