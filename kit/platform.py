"""Platforms: what vLLM computes on here, found by looking, with the reason said.

`cpu` runs everywhere. `cuda` needs a device that the driver shows and a way for the engine to
pass it on: a CDI description, or the NVIDIA container runtime.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from kit import engine
from kit.errors import BadFile, DeviceMissing, DeviceTooOld, DriverTooOld, UnknownName
from kit.fact import HostPlace
from kit.facts.gpu import ask_host
from kit.inside.probe_field import Field, read_text
from kit.inside.probe_gpu import format_cpus
from kit.value import Value, load_yaml

NAMES = ("cpu", "cuda")
DEFAULT_IMAGES = {"cpu": "v0.32.0-cpu", "cuda": "v0.33.0-cu130"}
CDI_KIND = "nvidia.com/gpu"
CDI_FOLDERS = (Path("/etc/cdi"), Path("/var/run/cdi"))
CORES_FOR_TWO = 3  # below, server and client must share

Accel = Literal["cpu", "cuda-cdi", "cuda-runtime"]


class Device(Value):
    """One accelerator: what the driver calls it and the name by which the engine passes it.

    `capability` is the compute capability, `9.0`, null where the driver does not tell it.
    """

    index: int
    uuid: str
    name: str | None
    passed_as: str
    capability: str | None = None


class Share(Value):
    """One device of a run. On CPU a device is a part of the server's CPUs, `passed_as` is null."""

    cpus: str
    passed_as: str | None = None


class Platform(Value):
    """Where a run computes. CPU sets are in the kernel's notation (`0-2,5`).

    `accel` names the file in compose/accel; `devices` are empty on `cpu`; `why` is the reason in
    words; `driver` and the newest CUDA that it serves are null on `cpu`.
    """

    name: Literal["cpu", "cuda"]
    why: str
    accel: Accel
    devices: tuple[Device, ...] = ()
    server_cpuset: str
    client_cpuset: str
    shared_cores: bool
    default_image: str
    driver: str | None = None
    driver_cuda: str | None = None

    def shares(self, count: int, *, shared: bool = False) -> tuple[Share, ...]:
        """Return that many devices, or fewer where this machine has no more.

        One device of the platform `cpu` is all CPUs of the server; more are equal parts of them.
        With `shared` it is the first device every time.
        """
        if shared:
            return self.shares(1) * count
        if self.name == "cuda":
            return tuple(
                Share(cpus=self.server_cpuset, passed_as=each.passed_as)
                for each in self.devices[:count]
            )
        if count == 1:
            return (Share(cpus=self.server_cpuset),)
        mine = set(parse_cpus(self.server_cpuset))
        cores = [[cpu for cpu in core if cpu in mine] for core in usable_cores()]
        return tuple(Share(cpus=format_cpus(part)) for part in cut([c for c in cores if c], count))


def cut(cores: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """Cut cores (each a list of its hardware threads) into `count` parts of equal size.

    Whole cores where there are enough, else hardware threads, else as many as there are.
    """
    if len(cores) < count:
        cores = [[cpu] for core in cores for cpu in core]
    count = min(count, len(cores))
    size = len(cores) // count if count else 0
    return [
        [cpu for core in cores[i * size : (i + 1) * size] for cpu in core] for i in range(count)
    ]


def parse_cpus(text: str) -> list[int]:
    """Parse the kernel's notation of a CPU set; raise `ValueError` for anything else."""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        low, mark, high = part.partition("-")
        first, last = int(low), int(high if mark else low)
        if last < first:
            raise ValueError(f"range {part!r} runs backwards")
        cpus.update(range(first, last + 1))
    return sorted(cpus)


def split_cores(cores: Sequence[Sequence[int]]) -> tuple[list[int], list[int], bool]:
    """Share cores (each a list of its hardware threads) between server and client.

    Returns both CPU lists and whether they are shared. The client gets the last whole core, so
    that no hardware thread of the server's cores is busy with measuring.
    """
    everything = [cpu for core in cores for cpu in core]
    if len(cores) < CORES_FOR_TWO:
        return everything, everything, True
    last = list(cores[-1])
    return [cpu for cpu in everything if cpu not in last], last, False


def usable_cores() -> list[list[int]]:
    """Return the cores this process may use, each as the list of its hardware threads."""
    allowed = os.sched_getaffinity(0)
    cores: dict[tuple[int, ...], list[int]] = {}
    for cpu in sorted(allowed):
        path = f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        try:
            siblings = tuple(parse_cpus(read_text(path)))
        except (OSError, ValueError):
            siblings = (cpu,)  # a kernel that does not say: each thread counts as a core
        cores.setdefault(siblings, []).append(cpu)
    return list(cores.values())


def cdi_names(folders: Iterable[Path] = CDI_FOLDERS) -> list[str]:
    """Return the CDI device names of NVIDIA devices (`nvidia.com/gpu=0`), files in order.

    A description that cannot be read is an error: the engine would refuse it as well.
    """
    names: list[str] = []
    for folder in folders:
        for path in sorted([*folder.glob("*.yaml"), *folder.glob("*.json")]):
            spec = load_yaml(path)  # JSON is YAML
            if not isinstance(spec, dict) or spec.get("kind") != CDI_KIND:
                continue
            try:
                names += [f"{CDI_KIND}={each['name']}" for each in spec["devices"]]
            except (KeyError, TypeError):
                raise BadFile(
                    f"{path}: devices: not a list of mappings with a name",
                    hint="write the file again: `nvidia-ctk cdi generate`",
                ) from None
    return list(dict.fromkeys(names))


def _devices(gpu: Mapping[str, Field]) -> list[Device]:
    """Return the devices whose UUID could be read, passed by it."""
    count = gpu.get("device_count", {}).get("value") or 0
    found = []
    for index in range(count):
        uuid = gpu[f"device{index}_uuid"]["value"]
        if uuid is not None:
            name = gpu[f"device{index}_name"]["value"]
            told = gpu.get(f"device{index}_compute_capability", {}).get("value")
            found.append(Device(index=index, uuid=uuid, name=name, passed_as=uuid, capability=told))
    return found


def _by_cdi(devices: Sequence[Device], names: Sequence[str]) -> tuple[Device, ...]:
    """Match devices to CDI names, by UUID where the description has them, else by index."""
    matched = []
    for device in devices:
        for candidate in (f"{CDI_KIND}={device.uuid}", f"{CDI_KIND}={device.index}"):
            if candidate in names:
                matched.append(device.model_copy(update={"passed_as": candidate}))
                break
    return tuple(matched)


_DRIVER = {"driver": "driver_version", "driver_cuda": "cuda_driver_version"}


class Look(Value):
    """What was found when looking for accelerators; `refusal` says why there is none to use."""

    accel: Accel = "cpu"
    devices: tuple[Device, ...] = ()
    refusal: str = ""
    driver: str | None = None
    driver_cuda: str | None = None


def judge(
    gpu: Mapping[str, Field], info: Mapping[str, Any], names: Sequence[str] | None = None
) -> Look:
    """Decide from NVML's fields and the engine's `info` whether and how a GPU can be passed.

    `names` are the CDI names of the engine's folders (default: read them here). CDI is taken
    before the runtime: it needs no hook in the engine and passes exactly what it lists.
    """
    devices = _devices(gpu)
    if not devices:
        count = gpu.get("device_count", {})
        reason = count.get("error") or next(
            (f["error"] for n, f in gpu.items() if n.endswith("_uuid") and f["error"]), "no device"
        )
        return Look(refusal=f"no NVIDIA device answers ({reason})")
    driver = {key: gpu.get(name, {}).get("value") for key, name in _DRIVER.items()}
    folders = [Path(folder) for folder in info.get("CDISpecDirs") or []]
    listed = list(names) if names is not None else cdi_names(folders)
    matched = _by_cdi(devices, listed) if folders else ()
    if matched:
        return Look(accel="cuda-cdi", devices=matched, **driver)
    if "nvidia" in (info.get("Runtimes") or {}):
        return Look(accel="cuda-runtime", devices=tuple(devices), **driver)
    cdi = "CDI lists none of them" if folders else "CDI is off"
    return Look(
        refusal=f"{len(devices)} NVIDIA device(s) are there, but the engine cannot pass them on: "
        f"{cdi}, and it has no runtime `nvidia`"
    )


def _look() -> Look:
    """Ask NVML first: where it has no device the engine need not be asked."""
    gpu = ask_host(HostPlace())
    if not _devices(gpu):
        return judge(gpu, {})
    client = engine.connect()
    try:
        return judge(gpu, client.info())
    finally:
        client.close()


def _platform(name: Literal["cpu", "cuda"], why: str, look: Look) -> Platform:
    server, client, shared = split_cores(usable_cores())
    return Platform(
        name=name,
        why=why,
        accel=look.accel if name == "cuda" else "cpu",
        devices=look.devices if name == "cuda" else (),
        server_cpuset=format_cpus(server),
        client_cpuset=format_cpus(client),
        shared_cores=shared,
        default_image=DEFAULT_IMAGES[name],
        driver=look.driver if name == "cuda" else None,
        driver_cuda=look.driver_cuda if name == "cuda" else None,
    )


def detect() -> Platform:
    """Return `cuda` where a device can be passed into containers, else `cpu`, and say why."""
    look = _look()
    if look.refusal:
        return _platform("cpu", look.refusal, look)
    way = "by CDI name" if look.accel == "cuda-cdi" else "by the NVIDIA runtime"
    first = look.devices[0]
    count = len(look.devices)
    return _platform("cuda", f"{first.name or first.uuid}, {count} device(s), {way}", look)


def find_platform(name: str | None = None) -> Platform:
    """Return the named platform, or what `detect` finds for None.

    Raises `UnknownName`, and `DeviceMissing` when `cuda` is asked for and cannot be had.
    """
    if name is None:
        return detect()
    if name == "cpu":
        return _platform("cpu", "asked for", Look())
    if name != "cuda":
        raise UnknownName(f"no platform is called {name!r}", hint=f"there are: {', '.join(NAMES)}")
    found = detect()
    if found.name != "cuda":
        raise DeviceMissing(
            f"platform cuda cannot be used: {found.why}",
            hint="install the NVIDIA driver and a CDI description (`nvidia-ctk cdi generate`), "
            "or use --platform cpu",
        )
    return found


# -- what of an image a machine's driver and devices can run -----------------------------------


def cuda_version(variant: str) -> str:
    """Return the CUDA runtime of an image's variant: `cu129` is 12.9."""
    digits = variant.removeprefix("cu")
    return f"{digits[:-1]}.{digits[-1]}"


def driver_serves(driver_cuda: str | None, variant: str) -> bool:
    """Tell whether a driver's CUDA version serves an image: of the same major version or newer.

    Within a major version every driver runs every runtime. What is unknown does not serve.
    """
    if driver_cuda is None:
        return False
    served, needed = (int(each.partition(".")[0]) for each in (driver_cuda, cuda_version(variant)))
    return served >= needed


def runs_on(capability: str, archs: Sequence[str]) -> bool:
    """Tell whether code compiled for these architectures runs on a device of this capability.

    `sm_80` runs on 8.0 and on newer minors of 8, `sm_90a` on 9.0 alone; `compute_90` is compiled
    by the driver for 9.0 and all that is newer (CUDA's programming guide, "Application
    Compatibility").
    """
    major, minor = map(int, capability.split("."))
    for arch in archs:
        kind, _, number = arch.partition("_")
        exact = not number[-1:].isdigit()
        digits = number.rstrip("af")
        its = int(digits[:-1]), int(digits[-1])
        if kind == "compute":
            fits = its == (major, minor) if exact else its <= (major, minor)
        else:
            fits = its == (major, minor) if exact else its[0] == major and its[1] <= minor
        if fits:
            return True
    return False


def check_device(platform: Platform, image: str, variant: str, archs: Sequence[str]) -> None:
    """Raise `DriverTooOld` or `DeviceTooOld` where this machine cannot run an image.

    `archs` are what its code was compiled for; where none are known, or a device does not tell
    its capability, only the driver is checked.
    """
    if platform.name != "cuda" or variant == "cpu":
        return
    if not driver_serves(platform.driver_cuda, variant):
        raise DriverTooOld(
            f"driver {platform.driver or 'unknown'} serves CUDA {platform.driver_cuda or 'unknown'}"
            f", and {image} is built for CUDA {cuda_version(variant)}",
            hint="update the driver, or take an image of an older CUDA; see `nox -s images`",
        )
    for device in platform.devices:
        if archs and device.capability and not runs_on(device.capability, archs):
            raise DeviceTooOld(
                f"{device.name or device.uuid} has compute capability {device.capability}, and "
                f"{image} is compiled for {', '.join(archs)}",
                hint="take an image that has code for this device; see `nox -s images`",
            )
