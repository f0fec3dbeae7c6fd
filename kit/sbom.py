"""An image's bill of materials in CycloneDX 1.6, made from its lock alone.

The same lock gives the same bytes: no serial number, no time. It lists what goes into the image;
the lock says nothing of who needs whom, so no dependencies are claimed.
"""

from __future__ import annotations

import json
import warnings
from typing import Any

from cyclonedx.model import HashAlgorithm, HashType, Property
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL

from kit.image import REPOSITORY
from kit.lock_file import DebPackage, Lock, Wheel, lock_sha256

_MOVES = ("serialNumber", "dependencies")  # random, and not known


def render_sbom(lock: Lock) -> str:
    """Return the text of `docker/locks/<id>/sbom.cdx.json`: sorted keys, one trailing newline."""
    packages = [_package(package, lock) for package in lock.base]
    bom = Bom(components=[*packages, *(_wheel(wheel) for wheel in lock.wheels)])
    bom.metadata.component = Component(
        type=ComponentType.CONTAINER,
        name=REPOSITORY,
        version=lock.image,
        bom_ref=f"image:{lock.image}",
        properties=[
            Property(name="kit:lock:sha256", value=lock_sha256(lock)),
            Property(name="kit:python", value=lock.python),
        ],
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that the dependencies are not given
        document: dict[str, Any] = json.loads(JsonV1Dot6(bom).output_as_string())
    document = {key: value for key, value in document.items() if key not in _MOVES}
    del document["metadata"]["timestamp"]
    return json.dumps(document, indent=1, sort_keys=True) + "\n"


def _package(package: DebPackage, lock: Lock) -> Component:
    architecture = package.file.removesuffix(".deb").rpartition("_")[2]
    where = {"arch": architecture, "distro": lock.suite}
    purl = PackageURL("deb", "debian", package.name, package.version, where)
    return _component(package, purl)


def _wheel(wheel: Wheel) -> Component:
    """Return a wheel; only one of the package index is named as a package of that index."""
    if wheel.origin == "package index":
        purl = PackageURL("pypi", None, wheel.name, wheel.version, {"file_name": wheel.file})
    else:
        sha256 = {"checksum": f"sha256:{wheel.sha256}"}
        purl = PackageURL("generic", None, wheel.name, wheel.version, sha256)
    return _component(wheel, purl, Property(name="kit:origin", value=wheel.origin))


def _component(item: DebPackage | Wheel, purl: PackageURL, *properties: Property) -> Component:
    return Component(
        type=ComponentType.LIBRARY,
        name=item.name,
        version=item.version,
        purl=purl,
        bom_ref=purl.to_string(),
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=item.sha256)],
        properties=[
            *properties,
            Property(name="kit:file", value=item.file),
            Property(name="kit:size_bytes", value=str(item.size_bytes)),
        ],
    )
