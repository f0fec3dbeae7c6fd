"""Python and its distributions inside a container, by the image's own interpreter."""

from __future__ import annotations

from kit.fact import Fact, Match, Place, from_fields

_MATCH: dict[str, Match] = {
    "packages": "must",
    "packages_sha256": "must",
    "python_version": "must",
    "python_implementation": "must",
    "libc": "must",
}


def collect(place: Place) -> list[Fact]:
    """Read names and versions by importlib.metadata; the host gives none."""
    if place.container is None:
        return []
    fields = place.inside("probe_container")["packages"]
    return from_fields("packages", fields, _MATCH, service=place.service)
