"""Python and the distributions that this interpreter sees. Standard library only."""

from __future__ import annotations

import hashlib
import platform
import re
import sys
from importlib import metadata

from .probe_field import Field, read_fields


def normal_name(name: str) -> str:
    """Return a distribution's name as indexes write it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def installed() -> dict[str, str]:
    """Return name -> version of all distributions; of several copies the first on the path."""
    found: dict[str, str] = {}
    for each in metadata.distributions():
        if "Name" in each.metadata and "Version" in each.metadata:  # else a damaged folder
            found.setdefault(normal_name(each.metadata["Name"]), each.metadata["Version"])
    return dict(sorted(found.items()))


def list_sha256(packages: dict[str, str]) -> str:
    """Hash the sorted lines `name==version`, each with a line feed."""
    lines = "".join(f"{name}=={version}\n" for name, version in sorted(packages.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


def packages_section() -> dict[str, Field]:
    """Return interpreter and distributions as fields."""
    how = "importlib.metadata.distributions()"
    fields = read_fields(
        {
            "python_version": ("platform.python_version()", platform.python_version),
            "python_implementation": ("sys.implementation", lambda: sys.implementation.name),
            "libc": ("platform.libc_ver()", lambda: " ".join(platform.libc_ver())),
            "packages": (how, installed),
        }
    )
    packages = fields["packages"]["value"]
    return {
        **fields,
        **read_fields(
            {
                "packages_count": (how, lambda: len(packages)),
                "packages_sha256": (
                    "sha256 of sorted name==version",
                    lambda: list_sha256(packages),
                ),
            }
        ),
    }
