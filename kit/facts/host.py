"""The machine that the kit runs on: processor, memory, kernel, limits, noise.

All from /proc, /sys and /etc/os-release. No host name, user, address or serial number.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import platform
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kit.fact import Fact, Match, Place, from_fields, observe
from kit.inside.probe_cgroup import cgroup_fields
from kit.inside.probe_field import Absent, key_lines, kib_to_bytes, read_text

CPU = Path("/sys/devices/system/cpu")
NODES = Path("/sys/devices/system/node")
MARK_KEY = b"vllm-kit machine mark 1"

# What decides which kernels of torch and vLLM can run, x86-64 and aarch64.
RELEVANT_FLAGS = frozenset((
    "sse4_2", "avx", "avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512bw", "avx512cd",
    "avx512dq", "avx512vl", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16",
    "amx_int8", "amx_fp16", "asimd", "asimdhp", "asimddp", "bf16", "i8mm", "sve", "sve2",
    "svebf16", "svei8mm",
))  # fmt: skip


def parse_cpuinfo(text: str) -> list[dict[str, str]]:
    """Parse /proc/cpuinfo into one mapping per logical CPU."""
    blocks = [key_lines(block) for block in text.split("\n\n")]
    return [block for block in blocks if "processor" in block]


def _cpus() -> list[dict[str, str]]:
    return parse_cpuinfo(read_text("/proc/cpuinfo"))


def cpu_model_of(cpu: dict[str, str]) -> str:
    """Return the model name; Arm kernels give only numbers, which name the design as well."""
    if name := cpu.get("model name"):
        return name
    return f"implementer {cpu['CPU implementer']} part {cpu['CPU part']} r{cpu['CPU variant']}"


def _topology(file: str) -> list[str]:
    """Return one entry per logical CPU that is online."""
    paths = sorted(CPU.glob(f"cpu[0-9]*/topology/{file}"))
    if not paths:
        raise Absent(f"no cpu*/topology/{file}")
    return [read_text(path) for path in paths]


def _cores() -> int:
    return len(set(zip(_topology("physical_package_id"), _topology("core_id"), strict=True)))


def _flags() -> list[str]:
    first = _cpus()[0]
    flags = first.get("flags") or first["Features"]
    return sorted(RELEVANT_FLAGS.intersection(flags.split()))


def _l3_bytes() -> int:
    """Return the size of the last-level cache that CPU 0 sees."""
    for folder in sorted((CPU / "cpu0" / "cache").glob("index*")):
        if read_text(folder / "level") == "3":
            return int(read_text(folder / "size").removesuffix("K")) * 1024
    raise Absent("no level 3 cache is listed")


def _hypervisor() -> str:
    """Return what the machine calls itself (vendor and product of its board), no serial."""
    if "hypervisor" not in (_cpus()[0].get("flags") or "").split():
        raise Absent("the processor shows no hypervisor")
    kind = Path("/sys/hypervisor/type")
    if kind.exists():
        return read_text(kind)
    vendor = Path("/sys/class/dmi/id/sys_vendor")
    return read_text(vendor) if vendor.exists() else "unnamed"


def _meminfo(key: str) -> Callable[[], int]:
    return lambda: kib_to_bytes(key_lines(read_text("/proc/meminfo"))[key])


def _numa_cpus() -> dict[str, str]:
    nodes = sorted(NODES.glob("node[0-9]*"), key=lambda path: int(path.name[4:]))
    if not nodes:
        raise Absent("the kernel lists no NUMA nodes")
    return {node.name: read_text(node / "cpulist") for node in nodes}


def _numa_memory_bytes() -> dict[str, int]:
    sizes = {}
    for node in sorted(NODES.glob("node[0-9]*")):
        match = re.search(r"MemTotal:\s+(\d+ kB)", read_text(node / "meminfo"))
        if match is None:
            raise ValueError(f"{node.name}/meminfo has no MemTotal")
        sizes[node.name] = kib_to_bytes(match[1])
    return sizes


def _governors() -> list[str]:
    paths = sorted(CPU.glob("cpu[0-9]*/cpufreq/scaling_governor"))
    if not paths:
        raise Absent("no frequency scaling is exposed")
    return sorted({read_text(path) for path in paths})


def _turbo() -> bool:
    """Return whether the processor may clock above its base frequency."""
    intel, generic = CPU / "intel_pstate" / "no_turbo", CPU / "cpufreq" / "boost"
    if intel.exists():
        return read_text(intel) == "0"
    if generic.exists():
        return read_text(generic) == "1"
    raise Absent("no turbo switch is exposed")


def _chosen(path: str) -> str:
    """Return the choice in brackets of a file like `always [madvise] never`."""
    match = re.search(r"\[([\w+-]+)\]", read_text(path))
    if match is None:
        raise ValueError(f"{path} marks no choice")
    return match[1]


def _os_pretty_name() -> str:
    for place in ("/etc/os-release", "/usr/lib/os-release"):
        if Path(place).exists():
            return key_lines(read_text(place), "=")["PRETTY_NAME"].strip('"')
    raise Absent("no os-release file")


def _machine_mark() -> str:
    """Return a mark of this installation that tells nothing about it.

    A keyed hash of the machine id, as machine-id(5) asks of programs that show it to others.
    """
    return hmac.new(MARK_KEY, read_text("/etc/machine-id").encode(), hashlib.sha256).hexdigest()


def _stall_percent(resource: str) -> float:
    match = re.search(r"some avg10=([\d.]+)", read_text(f"/proc/pressure/{resource}"))
    if match is None:
        raise ValueError("no avg10")
    return float(match[1])


def _load(index: int) -> Callable[[], float]:
    return lambda: float(read_text("/proc/loadavg").split()[index])


def _steal_ticks() -> int:
    """Return the time that the hypervisor gave to others, summed over cores since boot."""
    return int(read_text("/proc/stat").splitlines()[0].split()[8])


def _sys(path: str) -> Callable[[], str]:
    return lambda: read_text(path)


def _number(path: str) -> Callable[[], int]:
    return lambda: int(read_text(path))


Row = tuple[str, str, Callable[[], Any], Match]

ROWS: tuple[Row, ...] = (
    ("architecture", "uname -m", platform.machine, "must"),
    ("machine_mark", "/etc/machine-id, hashed with a key of the kit", _machine_mark, "reported"),
    ("cpu_model", "/proc/cpuinfo: model name", lambda: cpu_model_of(_cpus()[0]), "must"),
    ("cpu_flags", "/proc/cpuinfo: flags, those that pick kernels", _flags, "must"),
    ("cpu_microcode", "/proc/cpuinfo: microcode", lambda: _cpus()[0]["microcode"], "reported"),
    (
        "cpu_sockets",
        f"{CPU}/cpu*/topology/physical_package_id",
        lambda: len(set(_topology("physical_package_id"))),
        "must",
    ),
    ("cpu_cores", f"{CPU}/cpu*/topology: package and core ids", _cores, "must"),
    ("cpu_threads", "/proc/cpuinfo: processors", lambda: len(_cpus()), "must"),
    (
        "cpu_allowed",
        "sched_getaffinity of the kit",
        lambda: sorted(os.sched_getaffinity(0)),
        "reported",
    ),
    ("cpu_isolated", f"{CPU}/isolated", lambda: read_text(CPU / "isolated") or "none", "must"),
    ("cpu_l3_bytes", f"{CPU}/cpu0/cache", _l3_bytes, "reported"),
    ("cpu_governors", f"{CPU}/cpu*/cpufreq/scaling_governor", _governors, "must"),
    ("cpu_turbo", f"{CPU}/intel_pstate/no_turbo or cpufreq/boost", _turbo, "must"),
    ("cpu_mhz_now", "/proc/cpuinfo: cpu MHz", lambda: float(_cpus()[0]["cpu MHz"]), "ignored"),
    ("cpu_steal_ticks", "/proc/stat: steal", _steal_ticks, "ignored"),
    ("cpu_stall_percent_10s", "/proc/pressure/cpu", lambda: _stall_percent("cpu"), "ignored"),
    ("hypervisor", "/proc/cpuinfo and DMI vendor", _hypervisor, "must"),
    ("memory_total_bytes", "/proc/meminfo: MemTotal", _meminfo("MemTotal"), "reported"),
    ("memory_available_bytes", "/proc/meminfo: MemAvailable", _meminfo("MemAvailable"), "ignored"),
    (
        "memory_stall_percent_10s",
        "/proc/pressure/memory",
        lambda: _stall_percent("memory"),
        "ignored",
    ),
    ("swap_total_bytes", "/proc/meminfo: SwapTotal", _meminfo("SwapTotal"), "reported"),
    ("swap_free_bytes", "/proc/meminfo: SwapFree", _meminfo("SwapFree"), "ignored"),
    ("swappiness", "/proc/sys/vm/swappiness", _number("/proc/sys/vm/swappiness"), "reported"),
    (
        "transparent_hugepages",
        "/sys/kernel/mm/transparent_hugepage/enabled",
        lambda: _chosen("/sys/kernel/mm/transparent_hugepage/enabled"),
        "must",
    ),
    (
        "transparent_hugepages_defrag",
        "/sys/kernel/mm/transparent_hugepage/defrag",
        lambda: _chosen("/sys/kernel/mm/transparent_hugepage/defrag"),
        "reported",
    ),
    ("numa_cpus", f"{NODES}/node*/cpulist", _numa_cpus, "must"),
    ("numa_memory_bytes", f"{NODES}/node*/meminfo", _numa_memory_bytes, "reported"),
    (
        "numa_balancing",
        "/proc/sys/kernel/numa_balancing",
        _number("/proc/sys/kernel/numa_balancing"),
        "reported",
    ),
    ("kernel_release", "uname -r", platform.release, "reported"),
    (
        "clock_source",
        "clocksource0/current_clocksource",
        _sys("/sys/devices/system/clocksource/clocksource0/current_clocksource"),
        "reported",
    ),
    ("os_pretty_name", "/etc/os-release: PRETTY_NAME", _os_pretty_name, "reported"),
    ("utc_offset_s", "time.localtime().tm_gmtoff", lambda: time.localtime().tm_gmtoff, "ignored"),
    ("python_version", "platform.python_version()", platform.python_version, "reported"),
    ("load_1m", "/proc/loadavg", _load(0), "ignored"),
    ("load_5m", "/proc/loadavg", _load(1), "ignored"),
    ("load_15m", "/proc/loadavg", _load(2), "ignored"),
    ("uptime_s", "/proc/uptime", lambda: float(read_text("/proc/uptime").split()[0]), "ignored"),
)


def collect(place: Place) -> list[Fact]:
    """Read the host's facts; a container place gives none (its limits are in `container`)."""
    if place.container is not None:
        return []
    facts = [observe("host", name, how, read, match=match) for name, how, read, match in ROWS]
    return facts + from_fields("host", cgroup_fields(), {})
