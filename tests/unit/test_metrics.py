"""Gauges and info labels of /metrics; pooled gaps and counts of samples."""

from typing import Any

from kit.measure import Raw, Scrape, Window, parse_metrics, pooled_gap_quantile, request_count
from kit.metrics import gauge_of, info_label, info_label_is, resolved


def scrape(t_s: float, text: str) -> Scrape:
    return Scrape(t_s, parse_metrics(text))


def raw(*scrapes: Scrape, samples: tuple[dict[str, Any], ...] = ()) -> Raw:
    return Raw(windows={"measure": Window("r/measure", samples, scrapes, {})})


def running(value: float) -> str:
    return f'# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{{e="0"}} {value}\n'


def test_a_gauge_is_read_only_beside_the_load() -> None:
    seen = raw(scrape(-0.1, running(9)), scrape(0.0, running(2)), scrape(0.5, running(4)))
    assert gauge_of("vllm:num_requests_running", max)(seen).value == 4
    assert gauge_of("vllm:num_requests_running", min)(seen).n == 2
    missing = gauge_of("vllm:none", max)(seen)
    assert (missing.value, missing.reason) == (None, "vllm:none was in no scrape")


INFO = (
    "# TYPE vllm:cache_config_info gauge\n"
    'vllm:cache_config_info{num_gpu_blocks="364",cache_dtype="fp8_e4m3",block_size="None"} 1\n'
)


def test_info_labels_are_numbers_or_null_with_the_reason() -> None:
    seen = raw(scrape(0.0, INFO))
    assert info_label("num_gpu_blocks")(seen).value == 364
    assert info_label("block_size")(seen).reason == "block_size is 'None', not a number"
    assert "has no label other" in str(info_label("other")(seen).reason)
    assert "has no label" in str(info_label("num_gpu_blocks")(raw()).reason)
    assert info_label_is("cache_dtype", "fp8")(seen).value == 1
    assert info_label_is("cache_dtype", "auto")(seen).value == 0
    assert info_label_is("other", "fp8")(seen).value is None


def stream(*times: float, error: str | None = None) -> dict[str, Any]:
    return {"chunk_s": list(times), "error": error}


def test_pooled_gaps_hide_a_stall_that_is_rare() -> None:
    smooth = [i / 100 for i in range(1000)]
    stalled = [*smooth[:500], *(t + 5.0 for t in smooth[500:])]
    seen = raw(samples=(stream(*stalled),))
    reading = pooled_gap_quantile(0.99)(seen)
    assert reading.value is not None
    assert reading.value < 0.02
    assert pooled_gap_quantile(0.999)(seen).value is None


def test_requests_are_counted_without_failures() -> None:
    seen = raw(samples=(stream(1.0), stream(error="reset"), stream(2.0)))
    assert request_count()(seen).value == 2


def test_the_resolved_configuration_is_read_by_its_path() -> None:
    one = {"vllm_config": {"scheduler_config": {"async_scheduling": True, "policy": "fcfs"}}}
    two = {"vllm_config": {"scheduler_config": {"async_scheduling": False}}}
    alone = Raw(windows=raw().windows, server_info=one)
    reading = resolved("scheduler_config.async_scheduling")(alone)
    assert (reading.value, reading.sources) == (1, ("r/server_info.json",))
    legs = Raw(windows=raw().windows, legs={"a": one, "b": two})
    assert resolved("scheduler_config.async_scheduling")(legs).value == 0
    assert resolved("scheduler_config.policy")(alone).reason == (
        "scheduler_config.policy is 'fcfs', not a number"
    )
    assert resolved("scheduler_config.none")(alone).reason == "the configuration has no none"
