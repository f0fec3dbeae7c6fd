"""Facts about quantised weights: what an engine that resolved a format says of them."""

from types import SimpleNamespace
from typing import Any, cast

from kit.fact import Place
from kit.facts.weights import collect

LOG = "\n".join(
    f"2026-12-01T06:04:12Z (EngineCore pid=322) INFO 12-01 06:04:12 {line}"
    for line in (
        "[__init__.py:605] Selected CutlassFP8ScaledMMLinearKernel for Fp8LinearMethod",
        "[model_runner.py:305] Model loading took 8.17 GiB and 1.441037 seconds",
    )
)


def place(quantization: str | None, log: str = LOG) -> Place:
    info = {"vllm_config": {"model_config": {"quantization": quantization}}}
    container = SimpleNamespace(logs=lambda: log.encode())
    return cast(Place, SimpleNamespace(container=container, service="server", server_info=info))


def seen(*words: Any) -> dict[str, tuple[Any, str | None]]:
    return {fact.name: (fact.value, fact.reason) for fact in collect(place(*words))}


def test_kernel_and_memory_that_the_engine_names() -> None:
    assert seen("fp8_per_tensor") == {
        "kernels": (["CutlassFP8ScaledMMLinearKernel for Fp8LinearMethod"], None),
        "fallbacks": ([], None),
        "memory_gib": ([8.17], None),
    }


def test_a_format_that_leaves_no_trace_is_told_so() -> None:
    found = seen("auto_gptq", "serving\n")
    assert found["kernels"] == ([], None)
    assert found["memory_gib"] == (None, "the start log names no memory of weights")


def test_other_engines_the_host_and_an_engine_that_was_not_asked_say_nothing() -> None:
    assert seen(None) == {}
    assert collect(cast(Place, SimpleNamespace(container=None))) == []
    unasked = SimpleNamespace(container=SimpleNamespace(), service="client", server_info=None)
    assert collect(cast(Place, unasked)) == []
