"""One container: which image it is, and what it may do and use as seen from inside.

Identity comes from the engine, limits and rights from the kernel inside (cgroup files, /proc/1,
statvfs). Paths of the host, names and addresses are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from kit.fact import Fact, Match, Place, as_mapping, from_fields, observe
from kit.inside.probe_field import Absent, Field, read_text

GROUP = "container"

_MATCH: dict[str, Match] = {
    "shm_bytes": "must",
    "cgroup_memory_limit_bytes": "must",
    "cgroup_cpu_limit_cores": "must",
    "cgroup_pids_limit": "must",
    "capabilities": "must",
    "root_read_only": "must",
    "engine_sockets": "must",
    "has_default_route": "must",
}
_LABELS = {
    "lock_sha256": "kit.lock.sha256",
    "image_revision": "org.opencontainers.image.revision",
    "image_version": "org.opencontainers.image.version",
}
_PRIVATE = ("boot_id", "command_line")  # compared here and in `vllm`, never written down


def collect(place: Place) -> list[Fact]:
    """Read identity and limits of the place's container; the host gives none."""
    container = place.container
    if container is None:
        return []
    fields: Mapping[str, Field] = place.inside("probe_container")["container"]
    shown = {name: field for name, field in fields.items() if name not in _PRIVATE}
    same = observe(
        GROUP,
        "same_kernel_as_kit",
        "boot_id inside and on the host, compared",
        lambda: _same_kernel(fields["boot_id"]),
        service=place.service,
    )
    inside = from_fields(GROUP, shown, _MATCH, service=place.service)
    attrs = as_mapping(container.attrs)
    return [*_identity(place, attrs), *_declared(place, attrs), *inside, same]


def _same_kernel(inside: Field) -> bool:
    """Tell whether the container runs on the kernel that the kit runs on (no VM, no remote)."""
    if inside["value"] is None:
        raise ValueError(inside["error"])
    return bool(inside["value"] == read_text("/proc/sys/kernel/random/boot_id"))


def _identity(place: Place, attrs: Mapping[str, Any]) -> list[Fact]:
    image_id = str(attrs["Image"])
    asked = observe(GROUP, "image", "GET /images/{id}/json", lambda: _inspect(place, image_id))

    def of_image(pick: Any) -> Any:
        if asked.value is None:
            raise ValueError(asked.reason)
        return pick(as_mapping(asked.value))

    rows: tuple[tuple[str, str, Any, Match], ...] = (
        ("image_id", "container inspect: Image", lambda: image_id, "reported"),
        ("layer_diff_ids", "image inspect: RootFS.Layers", lambda: of_image(_layers), "must"),
        ("registry_digest", "image inspect: RepoDigests", lambda: of_image(_registry), "reported"),
        ("image_created", "image inspect: Created", lambda: of_image(_created), "reported"),
        (
            "layers_as_locked",
            "RootFS.Layers compared with the lock",
            lambda: of_image(lambda image: _as_locked(place, image)),
            "must",
        ),
    )
    return [
        observe(GROUP, name, how, read, match=match, service=place.service)
        for name, how, read, match in rows
    ]


def _declared(place: Place, attrs: Mapping[str, Any]) -> list[Fact]:
    """Return what the image's labels say about themselves."""
    labels: Mapping[str, str] = attrs["Config"].get("Labels") or {}
    return [
        observe(
            GROUP,
            name,
            f"image label {label}",
            partial(_label, labels, label),
            service=place.service,
            state="declared",
        )
        for name, label in _LABELS.items()
    ]


def _inspect(place: Place, image_id: str) -> Mapping[str, Any]:
    if place.client is None:
        raise Absent("no engine was asked")
    return as_mapping(place.client.images.get(image_id).attrs)


def _layers(image: Mapping[str, Any]) -> list[str]:
    return list(image["RootFS"]["Layers"])


def _created(image: Mapping[str, Any]) -> str:
    return str(image["Created"])


def _registry(image: Mapping[str, Any]) -> list[str]:
    """Return manifest digests under which registries know the image, without their addresses."""
    digests = sorted({each.rpartition("@")[2] for each in image.get("RepoDigests") or []})
    if not digests:
        raise Absent("built or loaded here: no registry has given it a digest")
    return digests


def _as_locked(place: Place, image: Mapping[str, Any]) -> bool:
    if place.image is None or not place.image.get("diff_ids"):
        raise Absent("no locked identity was given to compare with")
    return _layers(image) == list(place.image["diff_ids"])


def _label(labels: Mapping[str, str], name: str) -> str:
    if not labels.get(name):
        raise Absent("the image has no such label")
    return labels[name]
