"""Gets a plan's image bits: those on the engine, else a bundle's, else a registry's.

What none of them has is built from the lock afterwards, as for any run.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from kit import registry
from kit.bundle_load import (
    install_model_from_bundle,
    install_sampler_from_bundle,
    load_image_from_bundle,
)
from kit.errors import NotFound
from kit.image import engine_image_id, find_image, read_identity
from kit.manifest import Manifest
from kit.model import find_model
from kit.plan import Plan, PlannedImage
from kit.unbundle import Unbundled

Say = Callable[[str], None]


@dataclass(frozen=True)
class Source:
    """Where bits may come from: an unbundled folder, a repository `HOST/NAME` of a registry."""

    bundle: Unbundled | None = None
    repository: str | None = None


def obtain(manifest: Manifest, plan: Plan, source: Source, say: Say) -> dict[str, str]:
    """Bring in images and model that this machine lacks; return image id -> how, for those.

    Raises what loading and pulling raise; an image whose identity is not the plan's is refused.
    """
    how = {}
    for wanted in plan.distinct_images:
        if _is_here(wanted):
            continue
        digest = registry_digest(manifest, wanted.id)
        if source.bundle is not None and wanted.id in source.bundle.images:
            load_image_from_bundle(source.bundle.folder, wanted.id, say)
            how[wanted.id] = "bundle"
        elif source.repository and digest:
            registry.pull(f"{source.repository}@{digest}", find_image(wanted.id), say)
            how[wanted.id] = "registry"
    if source.bundle is not None:
        install_sampler_from_bundle(source.bundle)
        with suppress(NotFound):  # left out of the bundle: made as for any run
            install_model_from_bundle(source.bundle.folder, find_model(plan.model.id))
    return how


def _is_here(wanted: PlannedImage) -> bool:
    image_id = engine_image_id(find_image(wanted.id).tag)
    return image_id is not None and read_identity(image_id).digest == wanted.identity


def registry_digest(manifest: Manifest, image_id: str) -> str | None:
    """Return the digest by which a registry knew the image where it ran, or None."""
    plan = manifest.plan
    roles = {arm.role for arm in plan.arms if arm.image.id == image_id}
    for replicate in manifest.replicates:
        for fact in replicate.facts if replicate.role in roles else ():
            named = (fact.group, fact.name) == ("container", "registry_digest")
            if named and fact.service != "client" and isinstance(fact.value, list) and fact.value:
                return str(fact.value[0])
    return None
