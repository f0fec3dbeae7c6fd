"""What this container may do and use, as the kernel shows it from inside.

About process 1 where the kernel lets one look: that is the service, while this probe is only
a visitor. Standard library only.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from .probe_cgroup import cgroup_fields
from .probe_egress import egress_fields
from .probe_field import Absent, Field, key_lines, read_fields, read_text

SERVICE = Path("/proc/1")
SOCKETS = ("docker.sock", "containerd.sock", "podman.sock", "crio.sock")
_SECCOMP = {"0": "off", "1": "strict", "2": "filter"}
# Kernel file systems that every container has; their mounts say nothing about this one.
_KERNEL_TYPES = frozenset({"proc", "sysfs", "cgroup", "cgroup2", "devpts", "mqueue"})
CAPABILITIES = (
    "chown", "dac_override", "dac_read_search", "fowner", "fsetid", "kill", "setgid", "setuid",
    "setpcap", "linux_immutable", "net_bind_service", "net_broadcast", "net_admin", "net_raw",
    "ipc_lock", "ipc_owner", "sys_module", "sys_rawio", "sys_chroot", "sys_ptrace", "sys_pacct",
    "sys_admin", "sys_boot", "sys_nice", "sys_resource", "sys_time", "sys_tty_config", "mknod",
    "lease", "audit_write", "audit_control", "setfcap", "mac_override", "mac_admin", "syslog",
    "wake_alarm", "block_suspend", "audit_read", "perfmon", "bpf", "checkpoint_restore",
)  # fmt: skip
"""Names by bit number, from linux/capability.h."""


def capability_names(mask_hex: str) -> list[str]:
    """Return the names of the bits in a CapEff line; an unknown bit is `bit<N>`."""
    mask = int(mask_hex, 16)
    return [
        CAPABILITIES[bit] if bit < len(CAPABILITIES) else f"bit{bit}"
        for bit in range(mask.bit_length())
        if mask >> bit & 1
    ]


def parse_mountinfo(text: str) -> list[dict[str, Any]]:
    """Parse mountinfo into target, type and read-only flag; sources on the host are left out.

    Raises `ValueError` for a line that is none of the kernel's.
    """
    mounts = []
    for line in text.splitlines():
        own, _, behind = line.partition(" - ")
        fields, kind = own.split(), behind.split()[:1]
        if len(fields) < 6 or not kind:
            raise ValueError(f"no line of mountinfo: {line[:80]!r}")
        target = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), fields[4])
        mounts.append(
            {"target": target, "type": kind[0], "read_only": "ro" in fields[5].split(",")}
        )
    return mounts


def _mounts() -> list[dict[str, Any]]:
    return parse_mountinfo(read_text(SERVICE / "mountinfo"))


def _root_read_only() -> bool:
    # The last mount of a target is the one in effect.
    roots = [mount for mount in _mounts() if mount["target"] == "/"]
    return bool(roots[-1]["read_only"])


def _own_mounts() -> list[dict[str, Any]]:
    """Return mounts that this container was given; masks over /proc and /sys are left out."""
    kept = [
        mount
        for mount in _mounts()
        if mount["type"] not in _KERNEL_TYPES
        and not mount["target"].startswith(("/proc/", "/sys/"))
    ]
    return sorted(kept, key=lambda mount: str(mount["target"]))


def _engine_sockets() -> list[str]:
    """Return engine sockets that are visible here; an empty list is what must be."""
    places = [Path(folder) / name for folder in ("/run", "/var/run") for name in SOCKETS]
    mounted = [Path(mount["target"]) for mount in _mounts()]
    found = {str(path) for path in places if path.exists()}
    found |= {str(path) for path in mounted if path.name in SOCKETS}
    return sorted(found)


def _status(key: str) -> str:
    return key_lines(read_text(SERVICE / "status"))[key]


def _ids(key: str) -> int:
    """Return the effective id of the four that the kernel lists."""
    return int(_status(key).split()[1])


def _limit(name: str) -> int:
    """Return the soft limit of process 1 from /proc/1/limits."""
    for line in read_text(SERVICE / "limits").splitlines():
        if line.startswith(name):
            soft = line[len(name) :].split()[0]
            if soft == "unlimited":
                raise Absent("no limit")
            return int(soft)
    raise Absent(f"no line {name!r}")


def _shm_bytes() -> int:
    stat = os.statvfs("/dev/shm")  # noqa: S108 - the file system itself is the question
    return stat.f_frsize * stat.f_blocks


def _init_process() -> str:
    """Return the program that is process 1: it must reap children and pass signals on."""
    return Path(_command_line()[0]).name


def _command_line() -> list[str]:
    raw = (SERVICE / "cmdline").read_bytes()
    return [word.decode("utf-8", "backslashreplace") for word in raw.split(b"\0")[:-1]]


def _clock_offsets() -> list[str]:
    if not Path("/proc/self/timens_offsets").exists():
        raise Absent("no time namespaces in this kernel")
    return [" ".join(line.split()) for line in read_text("/proc/self/timens_offsets").splitlines()]


def limits_section() -> dict[str, Field]:
    """Return limits, identity, rights and mounts of the container."""
    own = read_fields(
        {
            "shm_bytes": ("statvfs /dev/shm", _shm_bytes),
            "open_files_limit": ("/proc/1/limits", lambda: _limit("Max open files")),
            "locked_memory_limit_bytes": ("/proc/1/limits", lambda: _limit("Max locked memory")),
            "core_file_limit_bytes": ("/proc/1/limits", lambda: _limit("Max core file size")),
            "uid": ("/proc/1/status: Uid", lambda: _ids("Uid")),
            "gid": ("/proc/1/status: Gid", lambda: _ids("Gid")),
            "groups": (
                "/proc/1/status: Groups",
                lambda: [int(each) for each in _status("Groups").split()],
            ),
            "capabilities": (
                "/proc/1/status: CapEff",
                lambda: capability_names(_status("CapEff")),
            ),
            "capabilities_bounding": (
                "/proc/1/status: CapBnd",
                lambda: capability_names(_status("CapBnd")),
            ),
            "no_new_privileges": (
                "/proc/1/status: NoNewPrivs",
                lambda: _status("NoNewPrivs") == "1",
            ),
            "seccomp": ("/proc/1/status: Seccomp", lambda: _SECCOMP[_status("Seccomp")]),
            "cpus_allowed": (
                "/proc/1/status: Cpus_allowed_list",
                lambda: _status("Cpus_allowed_list"),
            ),
            "root_read_only": ("/proc/1/mountinfo", _root_read_only),
            "mounts": ("/proc/1/mountinfo, without sources", _own_mounts),
            "engine_sockets": ("/run and /proc/1/mountinfo", _engine_sockets),
            "init_process": ("/proc/1/cmdline", _init_process),
            "time_offsets": ("/proc/self/timens_offsets", _clock_offsets),
            # Both are compared by the kit and never written down.
            "command_line": ("/proc/1/cmdline", _command_line),
            "boot_id": (
                "/proc/sys/kernel/random/boot_id",
                lambda: read_text("/proc/sys/kernel/random/boot_id"),
            ),
        }
    )
    return {**own, **cgroup_fields(), **egress_fields()}
