"""What an engine's start log tells of its weights: their memory, their kernels, what fell back.

No metric carries these. Releases word them differently; the patterns were read in the sources of
0.26.0, 0.32.0 and 0.33.0, and a log in which they find nothing gives null, never 0 bytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from kit.errors import BadFile
from kit.fit import shape_of
from kit.measure import MODEL_FILE, Raw, Reading, null_reading, reading_of

_MEMORY = re.compile(r"Model loading took ([\d.]+) GiB(?: memory)? and")
_KERNEL = re.compile(r"(?:Selected|Using) (\w*Kernel) for (\w[\w -]*)")
_MESSAGE = re.compile(r"\[\w+\.py:\d+\] (.*)")
_FELL_BACK = re.compile(r"(?i)fall(?:ing|s)? ?back|does not have native support")
_OF_WEIGHTS = re.compile(r"(?i)quant|awq|gptq|marlin|fp8|linear|weight")

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".gguf")


def kernels_of(log: str) -> list[str]:
    """Return `kernel for layer` of each kernel that was chosen for quantised weights."""
    found = (f"{kernel} for {layer.strip()}" for kernel, layer in _KERNEL.findall(log))
    return list(dict.fromkeys(found))


def fallbacks_of(log: str) -> list[str]:
    """Return the engine's sentences about weights that got another kernel than the best one."""
    told = (found[1].strip() for line in log.splitlines() if (found := _MESSAGE.search(line)))
    return list(dict.fromkeys(t for t in told if _FELL_BACK.search(t) and _OF_WEIGHTS.search(t)))


def weight_gib_of(log: str) -> list[float]:
    """Return the memory of the weights of each rank, in GiB as printed (two decimals)."""
    return [float(each) for each in _MEMORY.findall(log)]


def weight_memory(raw: Raw) -> Reading:
    """Measure the bytes of the loaded weights, all ranks together; known to 0.005 GiB."""
    files = _log_files(raw)
    found = weight_gib_of(_text(raw))
    if not found:
        return null_reading("the start log names no memory of weights", 0, *files)
    return reading_of(sum(found) * 2**30, len(found), *files)


def weight_bits(raw: Raw) -> Reading:
    """Measure the bits of a weight: 16 where nothing is quantised, embeddings always among them."""
    memory = weight_memory(raw)
    files = (*memory.sources, MODEL_FILE)
    if memory.value is None:
        return memory
    try:
        parameters = shape_of(raw.model.get("config", {}), "config.json").parameters
    except BadFile as error:
        return null_reading(error.message, 0, *files)
    return reading_of(memory.value * 8 / parameters, memory.n, *files)


def checkpoint_bytes(raw: Raw) -> Reading:
    """Measure the bytes of the weights on disk."""
    sizes = raw.model.get("files", {})
    found = [size for name, size in sizes.items() if name.endswith(WEIGHT_SUFFIXES)]
    if not found:
        return null_reading("there are no weights on disk: the server makes them", 0, MODEL_FILE)
    return reading_of(sum(found), len(found), MODEL_FILE)


def lines_of(*finders: Callable[[str], Sequence[str]]) -> Callable[[Raw], Reading]:
    """Measure how many different things these finders find in the start log."""

    def compute(raw: Raw) -> Reading:
        if not raw.start_logs:
            return null_reading("there is no start log", 0)
        found = [each for finder in finders for each in finder(_text(raw))]
        return reading_of(len(found), len(found), *_log_files(raw))

    return compute


def _text(raw: Raw) -> str:
    return "\n".join(raw.start_logs.values())


def _log_files(raw: Raw) -> tuple[str, ...]:
    return tuple(f"{raw.folder}/logs/{service}.log" for service in raw.start_logs)
