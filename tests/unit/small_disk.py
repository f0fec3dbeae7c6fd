"""File systems that are small or cannot be written, for tests; they need root."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")


def mount(*words: str | Path) -> None:
    subprocess.run(["mount", *words], check=True)


def unmount(target: Path) -> None:
    """Unmount now, or as soon as nobody holds a file there."""
    subprocess.run(["umount", "--lazy", target], check=False)


@contextlib.contextmanager
def small_disk(target: Path, mib: int) -> Iterator[Path]:
    """Have a file system of so many MiB at `target` while the block runs."""
    target.mkdir(parents=True, exist_ok=True)
    mount("-t", "tmpfs", "-o", f"size={mib}m,mode=0755", "kit-test", target)
    try:
        yield target
    finally:
        unmount(target)


@contextlib.contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Let nobody who opens a file below a folder by its path write it while the block runs."""
    mount("--bind", folder, folder)
    try:
        mount("-o", "remount,bind,ro", folder)
        yield
    finally:
        unmount(folder)


def fill(folder: Path) -> None:
    """Write until nothing more fits; the file is called `filler`."""
    with (folder / "filler").open("wb", buffering=0) as filler, contextlib.suppress(OSError):
        while True:
            filler.write(bytes(1 << 20))
    with (folder / "filler").open("ab", buffering=0) as filler, contextlib.suppress(OSError):
        while True:
            filler.write(bytes(512))
