"""The image matrix as rows for `nox -s images`."""

from __future__ import annotations

from kit import engine
from kit.errors import KitError
from kit.image import ImageRecord, engine_image_id, load_images, read_identity
from kit.lock import lock_state, read_identity_lock


def image_rows() -> list[dict[str, str]]:
    """Return a row for each image: id, vllm, cuda, locked, built, identical.

    `built` and `identical` are `?` where no engine answers.
    """
    reachable = True
    try:
        engine.connect().close()
    except KitError:
        reachable = False
    return [_row(record, reachable) for record in load_images().values()]


def _row(record: ImageRecord, reachable: bool) -> dict[str, str]:
    built, identical = "?", "?"
    if reachable:
        reference = record.tag if record.source != "adopted" else record.engine_id or ""
        found = engine_image_id(reference)
        built, identical = ("yes", _identical(record, found)) if found else ("no", "-")
    return {
        "id": record.id,
        "vllm": record.commit or record.release or record.source,
        "cuda": record.cuda,
        "locked": lock_state(record),
        "built": built,
        "identical": identical,
    }


def _identical(record: ImageRecord, image_id: str) -> str:
    if record.source == "adopted":
        return "adopted"
    locked = read_identity_lock(record)
    if locked is None:
        return "no identity locked"
    return "yes" if read_identity(image_id).digest == locked.digest else "NO"
