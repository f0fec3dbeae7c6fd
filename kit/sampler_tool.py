"""The pinned program that samples stacks: from its lock by hash into the cache, for no image.

A plan names its wheel, so a run of that plan takes exactly it; `docker/sampler.lock` only says
which one new plans name.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Callable
from pathlib import Path

from kit.errors import BuildFailed, HashMismatch
from kit.lock_file import Wheel
from kit.paths import DOCKER, cache_dir
from kit.plan import PlannedSampler
from kit.wheels import check_wheels, fetch_wheels, wheel_path

Say = Callable[[str], None]
LOCK = DOCKER / "sampler.lock"
_TAGS = "py2.py3-none-manylinux1_x86_64.manylinux_2_5_x86_64"


def planned_sampler() -> PlannedSampler:
    """Return the sampler that `docker/sampler.lock` pins. Raises `BuildFailed` for no such line."""
    text = LOCK.read_text(encoding="utf-8")
    found = re.search(r"^py-spy==(\S+) --hash=sha256:([0-9a-f]{64})$", text, re.MULTILINE)
    if found is None:
        raise BuildFailed(
            "docker/sampler.lock names no py-spy with its hash", hint="restore the file"
        )
    return PlannedSampler(name="py-spy", version=found[1], wheel_sha256=found[2])


def wheel_of(sampler: PlannedSampler) -> Wheel:
    """Return the wheel that a plan names."""
    return Wheel(
        name=sampler.name,
        version=sampler.version,
        file=f"py_spy-{sampler.version}-{_TAGS}.whl",
        size_bytes=0,
        sha256=sampler.wheel_sha256,
    )


def sampler_program(sampler: PlannedSampler, say: Say) -> Path:
    """Return the program, fetched into the cache the first time and checked every time.

    Raises what fetching a wheel raises: `IndexUnreachable`, `GoneUpstream`, `HashMismatch`.
    """
    wheel = wheel_of(sampler)
    fetch_wheels([wheel], say)
    check_wheels([wheel])
    target = cache_dir() / "tools" / wheel.sha256 / "py-spy"
    try:
        with zipfile.ZipFile(wheel_path(wheel)) as archive:
            program = archive.read(f"py_spy-{wheel.version}.data/scripts/py-spy")
    except (KeyError, zipfile.BadZipFile):
        raise HashMismatch(f"{wheel.file} holds no program", hint="correct the lock") from None
    if not target.is_file() or target.read_bytes() != program:
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_suffix(".part")
        part.write_bytes(program)
        part.chmod(0o755)
        part.replace(target)
    return target
