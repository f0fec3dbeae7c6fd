"""Takes an image that is already on the engine into this machine's own list of images.

For a GPU host that was brought up from its own user space, or a site's own image: the kit did not
build it, so nothing about it is verified, and every manifest of a run on it says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import yaml

from kit import image as images
from kit.errors import ImageMissing, UsageError
from kit.image import ImageRecord, engine_image_id, load_images
from kit.store import write_text
from kit.value import parse_value

Say = Callable[[str], None]

_HEADER = (
    "# Images of this machine alone, written by `kit adopt`; the kit reads them after\n"
    "# docker/images.yaml. Not under version control: an engine's id means nothing elsewhere.\n"
)


def adopt(
    reference: str,
    image_id: str,
    *,
    cuda: str,
    interpreter: str,
    entrypoint: Sequence[str],
    user: str,
    say: Say,
) -> ImageRecord:
    """Write a record for an image on this engine into `docker/images.local.yaml`; return it.

    `reference` is a tag or the engine's id; the id that it has now is what is kept, since a tag
    can move. Adopting under the same id again replaces the record. Raises `ImageMissing`,
    `UsageError` for an id of `docker/images.yaml`, `BadFile` for a value that no record can have.
    """
    if image_id in load_images(images.IMAGES_FILE):
        raise UsageError(
            f"docker/images.yaml already has an image `{image_id}`", hint="choose another --id"
        )
    engine_id = engine_image_id(reference)
    if engine_id is None:
        raise ImageMissing(
            f"the image {reference} is not on this engine", hint="`docker images` lists them"
        )
    fields: dict[str, Any] = {
        "source": "adopted",
        "cuda": cuda,
        "engine_id": engine_id,
        "interpreter": interpreter,
        "entrypoint": list(entrypoint),
        "user": user,
    }
    record = parse_value(ImageRecord, {"id": image_id, **fields}, f"the image {image_id}")
    _add(image_id, fields)
    say(f"adopted {reference} as {image_id}: {engine_id}; its identity is declared, not verified")
    return record


def _add(image_id: str, fields: dict[str, Any]) -> None:
    path = images.LOCAL_FILE
    known = load_images(path) if path.exists() else {}
    table = {
        name: record.model_dump(mode="json", exclude={"id"}, exclude_defaults=True)
        for name, record in known.items()
    }
    table[image_id] = fields
    text = yaml.safe_dump({"images": table}, sort_keys=False, allow_unicode=True)
    write_text(path, _HEADER + text)
