"""What was seen of a machine: values that `kit.cli_doctor` fills in and `kit.doctor` judges."""

from __future__ import annotations

from typing import Any

from kit.errors import KitError
from kit.value import Value


class Problem(Value):
    """Why something cannot be used: an error's message, its next step and its exit code."""

    message: str
    hint: str
    exit_code: int


def problem_of(error: KitError) -> Problem:
    """Return what an error says, as a value."""
    return Problem(message=error.message, hint=error.hint, exit_code=error.exit_code)


class SeenDevice(Value):
    """One accelerator that the driver shows."""

    name: str | None
    memory_bytes: int | None


class SeenImage(Value):
    """One image of the matrix. `lock` is its state in words; `built` is null without an engine.

    `inputs_here` says that the cache holds every file that a build needs.
    """

    id: str
    cuda: str
    lock: str
    built: bool | None
    inputs_here: bool


class SeenModel(Value):
    """One model; `source_here`: it can be made without network. `files` are those of its lock."""

    id: str
    weights: str
    present: bool
    source_here: bool
    files: tuple[str, ...] = ()
    config: dict[str, Any] | None = None


class Looked(Value):
    """All that was seen of a machine. Sizes in bytes; null is unknown.

    `engine` and `plugins` are versions, or why there is none; `gpu_refusal` is why no device can be
    passed on, empty where one can. `base_lacks` are programs that making a base needs.
    """

    platform: str
    default_image: str
    default_model: str
    engine: str | Problem
    plugins: dict[str, str] | Problem
    free_bytes: dict[str, int]
    store_free_bytes: int | None
    memory_available_bytes: int | None
    server_cpus: int
    cpu_flags: tuple[str, ...]
    devices: tuple[SeenDevice, ...]
    gpu_refusal: str
    driver: str | None
    driver_cuda: str | None
    images: tuple[SeenImage, ...]
    models: tuple[SeenModel, ...]
    network: bool
    base_lacks: tuple[str, ...]
