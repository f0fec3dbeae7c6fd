"""The pinned program that samples stacks: from its lock by hash into the cache, for no image.

A plan names its wheel, and a run takes exactly that one, if `docker/sampler.lock` has it too:
what a manifest of somebody else names is not run for that alone. New plans name the lock's first.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Callable
from pathlib import Path

from kit.errors import BuildFailed, HashMismatch, NotLocked
from kit.lock_file import Wheel
from kit.paths import DOCKER, cache_dir
from kit.plan import PlannedSampler
from kit.wheels import check_wheels, fetch_wheels, wheel_path

Say = Callable[[str], None]
LOCK = DOCKER / "sampler.lock"
_TAGS = "py2.py3-none-manylinux1_x86_64.manylinux_2_5_x86_64"


def known_samplers() -> tuple[PlannedSampler, ...]:
    """Return the samplers that `docker/sampler.lock` pins. Raises `BuildFailed` for none."""
    lines = re.findall(
        r"^py-spy==(\S+) --hash=sha256:([0-9a-f]{64})$", LOCK.read_text("utf-8"), re.MULTILINE
    )
    if not lines:
        raise BuildFailed(
            "docker/sampler.lock names no py-spy with its hash", hint="restore the file"
        )
    return tuple(PlannedSampler(version=v, wheel_sha256=sha256) for v, sha256 in lines)


def planned_sampler() -> PlannedSampler:
    """Return the sampler that new plans name."""
    return known_samplers()[0]


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

    Raises `NotLocked` for one that this checkout does not pin, and what fetching a wheel raises:
    `IndexUnreachable`, `GoneUpstream`, `HashMismatch`.
    """
    if sampler not in known_samplers():
        raise NotLocked(
            f"the plan's {sampler.name} {sampler.version} is not in docker/sampler.lock",
            hint="use the commit of the kit that the manifest names",
        )
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
