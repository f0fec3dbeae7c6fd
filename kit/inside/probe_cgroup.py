"""Limits of the control group that this process lives in, for cgroup v2 and v1.

In a container the group's own folder is the mount's root; on a host it lies below, and the
tightest limit on the way up counts. Standard library only.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from .probe_field import Absent, Field, read_fields, read_text

MOUNT = Path("/sys/fs/cgroup")
_V1_NO_LIMIT = 1 << 60  # v1 writes "no limit" as the largest page-aligned 63-bit number


def cgroup_version() -> int:
    """Return 2 for the unified hierarchy, 1 for the older one (hybrid included)."""
    if (MOUNT / "cgroup.controllers").exists():
        return 2
    if (MOUNT / "memory").exists() or (MOUNT / "cpu").exists():
        return 1
    raise Absent("no cgroup file system is mounted")


def own_folders(controller: str) -> list[Path]:
    """Return the folders of the process's group, its own first, the mount's root last."""
    unified = cgroup_version() == 2
    root = MOUNT if unified else MOUNT / controller
    own = "/"
    for line in read_text("/proc/self/cgroup").splitlines():
        _number, names, path = line.split(":", 2)
        if (unified and not names) or (not unified and controller in names.split(",")):
            own = path
    folder = root / own.lstrip("/")
    # With the host's cgroup namespace the path names a folder that is not mounted here.
    if ".." in own.split("/") or not folder.is_dir():
        folder = root
    return [folder, *(parent for parent in folder.parents if parent.is_relative_to(root))]


def _tightest(controller: str, file: str, limit_in: Callable[[str], float | None]) -> float:
    limits: list[float] = []
    read_any = False
    for folder in own_folders(controller):
        path = folder / file
        if not path.exists():  # the root group has no limit files
            continue
        read_any = True
        limit = limit_in(read_text(path))
        if limit is not None:
            limits.append(limit)
    if limits:
        return min(limits)
    raise Absent("no limit" if read_any else f"no limit: the group has no {file}")


def _count(text: str) -> float | None:
    if text == "max" or int(text) >= _V1_NO_LIMIT:
        return None
    return int(text)


def _quota_v2(text: str) -> float | None:
    quota, _, period = text.partition(" ")
    return None if quota == "max" else int(quota) / int(period)


def memory_limit_bytes() -> int:
    """Return the memory limit; raise `Absent` when there is none."""
    file = "memory.max" if cgroup_version() == 2 else "memory.limit_in_bytes"
    return int(_tightest("memory", file, _count))


def swap_limit_bytes() -> int:
    """Return how much swap the group may use on top of memory; raise `Absent` for no limit."""
    if cgroup_version() == 2:
        return int(_tightest("memory", "memory.swap.max", _count))
    both = int(_tightest("memory", "memory.memsw.limit_in_bytes", _count))
    return max(0, both - memory_limit_bytes())


def pids_limit() -> int:
    """Return the limit on processes and threads; raise `Absent` when there is none."""
    return int(_tightest("pids", "pids.max", _count))


def cpu_limit_cores() -> float:
    """Return the CPU quota in cores (1.5 = one and a half); raise `Absent` when there is none."""
    if cgroup_version() == 2:
        return _tightest("cpu", "cpu.max", _quota_v2)
    limits = []
    for folder in own_folders("cpu"):
        quota_file = folder / "cpu.cfs_quota_us"
        if quota_file.exists() and int(read_text(quota_file)) > 0:
            period_us = int(read_text(folder / "cpu.cfs_period_us"))
            limits.append(int(read_text(quota_file)) / period_us)
    if not limits:
        raise Absent("no limit")
    return min(limits)


def cpuset_cpus() -> str:
    """Return the cores that the group may use, as the kernel writes them (`0-2,5`)."""
    files = (
        ("cpuset.cpus.effective",)
        if cgroup_version() == 2
        else ("cpuset.effective_cpus", "cpuset.cpus")
    )
    for folder in own_folders("cpuset"):
        for file in files:
            if (folder / file).exists() and (text := read_text(folder / file)):
                return text
    raise Absent("the group has no cpuset")


def cgroup_fields() -> dict[str, Field]:
    """Return version and limits as fields; the names carry units."""
    place = "/sys/fs/cgroup, own group and those above"
    return read_fields(
        {
            "cgroup_version": ("/sys/fs/cgroup", cgroup_version),
            "cgroup_memory_limit_bytes": (f"{place}: memory limit", memory_limit_bytes),
            "cgroup_swap_limit_bytes": (f"{place}: swap limit", swap_limit_bytes),
            "cgroup_pids_limit": (f"{place}: pids.max", pids_limit),
            "cgroup_cpu_limit_cores": (f"{place}: CPU quota / period", cpu_limit_cores),
            "cgroup_cpuset_cpus": (f"{place}: cpuset", cpuset_cpus),
        }
    )
