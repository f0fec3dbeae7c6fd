"""The container engine: versions, storage, runtimes, and how it is reached.

From `GET /version` and `GET /info`. The engine's name, id, address, proxies and registry
mirrors are never read: they name machines.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from kit import engine
from kit.errors import KitError
from kit.fact import FIELD_ERRORS, Fact, Match, Place, as_mapping, observe
from kit.inside.probe_field import Absent

GROUP = "engine"


def _components(version: Mapping[str, Any]) -> dict[str, str]:
    """Return name -> version of what the engine is made of (containerd, runc, docker-init)."""
    return {part["Name"]: part["Version"] for part in version["Components"]}


def _image_store(info: Mapping[str, Any]) -> str:
    """Return `containerd` or `graphdriver`: image ids of one build differ between the two."""
    status = dict(info.get("DriverStatus") or [])
    kind = str(status.get("driver-type", ""))
    return "containerd" if kind.startswith("io.containerd.snapshotter") else "graphdriver"


def _security(info: Mapping[str, Any]) -> list[str]:
    """Return the names of the security options (seccomp, apparmor, rootless, cgroupns)."""
    return sorted(each.split(",")[0].removeprefix("name=") for each in info["SecurityOptions"])


def _cdi(info: Mapping[str, Any]) -> list[str]:
    """Return the folders with device descriptions; without any, CDI is off or too new."""
    folders = info.get("CDISpecDirs")
    if not folders:
        raise Absent("CDI is off on this engine, or the engine is older than CDI")
    return sorted(folders)


# name, where in the answer, how to read it there, how two environments are compared
_FROM_VERSION: tuple[tuple[str, str, Callable[[Mapping[str, Any]], Any], Match], ...] = (
    ("version", "Version", lambda version: version["Version"], "reported"),
    ("api_version", "ApiVersion", lambda version: version["ApiVersion"], "reported"),
    ("min_api_version", "MinAPIVersion", lambda version: version["MinAPIVersion"], "ignored"),
    ("components", "Components", _components, "reported"),
)
_FROM_INFO: tuple[tuple[str, str, Callable[[Mapping[str, Any]], Any], Match], ...] = (
    ("architecture", "Architecture", lambda info: info["Architecture"], "must"),
    ("cdi_folders", "CDISpecDirs", _cdi, "reported"),
    ("cgroup_driver", "CgroupDriver", lambda info: info["CgroupDriver"], "reported"),
    ("cgroup_version", "CgroupVersion", lambda info: int(info["CgroupVersion"]), "reported"),
    ("cpus", "NCPU", lambda info: info["NCPU"], "must"),
    ("default_runtime", "DefaultRuntime", lambda info: info["DefaultRuntime"], "reported"),
    ("image_store", "DriverStatus", _image_store, "reported"),
    ("kernel_release", "KernelVersion", lambda info: info["KernelVersion"], "reported"),
    ("live_restore", "LiveRestoreEnabled", lambda info: info["LiveRestoreEnabled"], "ignored"),
    ("memory_total_bytes", "MemTotal", lambda info: info["MemTotal"], "reported"),
    ("os_pretty_name", "OperatingSystem", lambda info: info["OperatingSystem"], "reported"),
    ("running_containers", "ContainersRunning", lambda info: info["ContainersRunning"], "ignored"),
    ("runtimes", "Runtimes", lambda info: sorted(info["Runtimes"]), "reported"),
    ("security_options", "SecurityOptions", _security, "reported"),
    ("storage_driver", "Driver", lambda info: info["Driver"], "reported"),
)


def _endpoint_kind(place: Place) -> str:
    if place.endpoint_kind is None:
        raise Absent("the caller did not say how it reached the engine")
    return place.endpoint_kind


def collect(place: Place) -> list[Fact]:
    """Read the engine's facts once for the whole host; a container place gives none."""
    if place.container is not None:
        return []
    client = place.client
    if client is None:
        return [observe(GROUP, "version", "GET /version", _no_engine)]
    answers = {
        "GET /version": observe(GROUP, "answer", "GET /version", client.version),
        "GET /info": observe(GROUP, "answer", "GET /info", client.info),
    }

    def read(source: str, pick: Callable[[Mapping[str, Any]], Any]) -> Callable[[], Any]:
        def value() -> Any:
            answer = answers[source]
            if answer.value is None:
                raise ValueError(answer.reason)
            return pick(as_mapping(answer.value))

        return value

    facts = [
        observe(GROUP, name, f"{source}: {key}", read(source, pick), match=match)
        for source, rows in (("GET /version", _FROM_VERSION), ("GET /info", _FROM_INFO))
        for name, key, pick, match in rows
    ]
    kind = observe(GROUP, "endpoint_kind", "kit.engine", lambda: _endpoint_kind(place))
    return [*facts, kind, *_plugins()]


def _plugins() -> list[Fact]:
    """Read the versions of the CLI's plugins that build images and start stacks."""
    errors = (*FIELD_ERRORS, KitError)
    told = observe(GROUP, "plugins", "docker CLI", engine.versions, errors=errors)

    def version(name: str) -> str:
        if told.value is None:
            raise ValueError(told.reason)
        found = as_mapping(told.value)[name]
        if not found:
            raise Absent(f"the CLI has no {name}")
        return str(found)

    return [
        observe(GROUP, f"{name}_version", f"docker {name} version", partial(version, name))
        for name in ("compose", "buildx")
    ]


def _no_engine() -> None:
    raise Absent("no engine was asked")
