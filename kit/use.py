"""Writes compose/.env, so that plain `docker compose -f compose/….yml up` works by hand."""

from __future__ import annotations

from collections.abc import Callable

from kit import model
from kit.build import ensure_image
from kit.image import find_image
from kit.model import find_model
from kit.paths import COMPOSE
from kit.platform import find_platform
from kit.store import write_text


def use(
    image: str | None, model_id: str | None, platform_name: str | None, say: Callable[[str], None]
) -> dict[str, str]:
    """Make image and model ready and write compose/.env; return what was written."""
    platform = find_platform(platform_name)
    record = find_image(image or platform.default_image)
    chosen = find_model(model_id or model.DEFAULT)
    built = ensure_image(record, say)
    files = model.ensure_model(chosen, built, say)
    values = {
        "KIT_IMAGE": record.tag if record.source != "adopted" else built.image_id,
        "KIT_PYTHON": record.interpreter,
        "KIT_ACCEL": platform.accel,
        "KIT_MODEL": str(files.path),
        "KIT_MODEL_NAME": chosen.id,
    }
    flags = chosen.flags(platform.name)
    for flag, key in (("dtype", "KIT_DTYPE"), ("load-format", "KIT_LOAD_FORMAT")):
        if flag in flags:
            values[key] = str(flags[flag])
    if platform.device:
        values["KIT_DEVICE"] = platform.device
    lines = [f"{key}='{value}'" for key, value in values.items()]
    header = "# written by `nox -s use`; for docker compose by hand, the kit itself ignores it\n"
    write_text(COMPOSE / ".env", header + "\n".join(lines) + "\n")
    say(f"compose/.env: image {record.id}, model {chosen.id}, {platform.name}")
    return values
