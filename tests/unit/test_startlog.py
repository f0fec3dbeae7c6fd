"""Weights in a start log: memory and kernels as three releases word them, else null."""

from pathlib import Path
from typing import Any

import pytest

from kit.measure import Raw, Window
from kit.model import find_model
from kit.run import told_of_model
from kit.startlog import (
    checkpoint_bytes,
    fallbacks_of,
    kernels_of,
    lines_of,
    weight_bits,
    weight_gib_of,
    weight_memory,
)

HEAD = "2026-12-01T06:04:13.298228415Z (EngineCore pid=322) INFO 12-01 06:04:13 "
OF_026 = HEAD + "[model_runner.py:305] Model loading took 0.26 GiB and 1.441037 seconds"
OF_033 = HEAD + "[gpu_model_runner.py:5089] Model loading took 8.17 GiB memory and 3.5 seconds"
FP8 = HEAD + (
    "[__init__.py:605] Selected CutlassFP8ScaledMMLinearKernel for Fp8PerTensorOnlineLinearMethod"
)
AWQ = [
    HEAD + "[__init__.py:945] Using MacheteLinearKernel for mixed-precision linear",
    HEAD + "[auto_awq.py:473] Using MacheteLinearKernel for AutoAWQMarlinLinearMethod",
]
OTHER = [
    HEAD + "[cuda.py:482] Using FLASH_ATTN attention backend out of potential backends: []",
    HEAD + "[flash_attn.py:776] Using FlashAttention version 3",
    HEAD + "[tokenizer.py:1] Falling back to the slow tokenizer.",
]
FELL = "Layer 'model.layers.0' is not supported by AutoAWQMarlin. Falling back to unoptimized AWQ"
NOT_NATIVE = (
    "Your GPU does not have native support for FP8 computation but FP8 quantization is being used."
)


def raw(
    *lines: str, config: dict[str, Any] | None = None, files: dict[str, int] | None = None
) -> Raw:
    return Raw(
        windows={"measure": Window("replicates/00/measure", (), (), {})},
        start_logs={"server": "\n".join(lines)} if lines else {},
        model={"config": config or {}, "files": files or {}},
    )


@pytest.mark.parametrize(("line", "gib"), [(OF_026, 0.26), (OF_033, 8.17)])
def test_the_memory_of_the_weights_in_both_wordings(line: str, gib: float) -> None:
    reading = weight_memory(raw(*OTHER, line))
    assert reading.value == gib * 2**30
    assert reading.sources == ("replicates/00/logs/server.log",)


def test_the_ranks_of_a_split_model_are_summed() -> None:
    assert weight_gib_of(f"{OF_033}\n{OF_033}") == [8.17, 8.17]
    assert weight_memory(raw(OF_033, OF_033)).value == pytest.approx(16.34 * 2**30)


def test_a_log_that_names_none_gives_null_and_never_zero() -> None:
    reading = weight_memory(raw(*OTHER))
    assert (reading.value, reading.reason) == (None, "the start log names no memory of weights")
    assert weight_bits(raw(*OTHER)).reason == reading.reason
    assert lines_of(kernels_of)(raw()).reason == "there is no start log"


@pytest.mark.parametrize(
    ("gib", "bits"), [(14.29, 16.1), (8.17, 9.2), (5.38, 6.1)], ids=["bf16", "fp8", "awq"]
)
def test_bits_of_a_weight_of_the_shape_that_was_measured(gib: float, bits: float) -> None:
    line = OF_033.replace("8.17", str(gib))
    reading = weight_bits(raw(line, config=find_model("qwen2.5-7b").config))
    assert reading.value == pytest.approx(bits, abs=0.05)
    assert reading.sources[-1] == "model.json"


def test_a_family_whose_tensors_are_not_known_has_no_bits() -> None:
    assert "mamba" in str(weight_bits(raw(OF_033, config={"model_type": "mamba"})).reason)


def test_kernels_of_weights_alone_are_named() -> None:
    assert kernels_of("\n".join([*OTHER, FP8, FP8])) == [
        "CutlassFP8ScaledMMLinearKernel for Fp8PerTensorOnlineLinearMethod"
    ]
    assert kernels_of("\n".join(AWQ)) == [
        "MacheteLinearKernel for mixed-precision linear",
        "MacheteLinearKernel for AutoAWQMarlinLinearMethod",
    ]


def test_a_fallback_of_weights_is_a_sentence_of_the_engine() -> None:
    lines = [*OTHER, f"{HEAD}[auto_awq.py:327] {FELL}", f"{HEAD}[marlin.py:113] {NOT_NATIVE}"]
    assert fallbacks_of("\n".join(lines)) == [FELL, NOT_NATIVE]
    assert lines_of(kernels_of, fallbacks_of)(raw(*lines, FP8)).value == 3


def test_weights_on_disk_are_those_files_alone() -> None:
    sizes = {"model-1.safetensors": 5, "model-2.safetensors": 7, "tokenizer.json": 99}
    assert checkpoint_bytes(raw(files=sizes)).value == 12
    nothing = checkpoint_bytes(raw(files={"config.json": 9}))
    assert nothing.reason == "there are no weights on disk: the server makes them"


def test_a_run_keeps_the_configuration_and_sizes_of_its_model(tmp_path: Path) -> None:
    assert told_of_model(tmp_path) == {"config": {}, "files": {}}
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}', "utf-8")
    (tmp_path / "draft").mkdir()
    (tmp_path / "draft" / "model.safetensors").write_bytes(b"12345")
    told = told_of_model(tmp_path)
    assert told["config"] == {"model_type": "qwen2"}
    assert told["files"] == {"config.json": 23, "draft/model.safetensors": 5}
