"""Writes compose/.env, so that plain `docker compose -f compose/….yml up` works by hand."""

from __future__ import annotations

from collections.abc import Callable

from kit import model
from kit.build import ensure_image
from kit.image import find_server
from kit.model import find_model
from kit.paths import COMPOSE, INSIDE
from kit.platform import Platform, find_platform
from kit.store import let_read, write_text


def device_values(platform: Platform) -> dict[str, str]:
    """Return the devices for compose/: the first, the second, and both together."""
    shares = platform.shares(2)
    if platform.name == "cpu":
        if len(shares) < 2:
            return {}
        first, second = (each.cpus for each in shares)
        return {"KIT_CPUS": first, "KIT_CPUS_2": second, "KIT_TP_CPUS": f"{first}|{second}"}
    names = [str(each.passed_as) for each in shares]
    values = dict(zip(("KIT_DEVICE", "KIT_DEVICE_2"), names, strict=False))
    if platform.accel == "cuda-runtime":  # one string may hold several; a CDI name may not
        values["KIT_DEVICES"] = ",".join(names)
    return values


def use(
    image: str | None, model_id: str | None, platform_name: str | None, say: Callable[[str], None]
) -> dict[str, str]:
    """Make image and model ready and write compose/.env; return what was written."""
    platform = find_platform(platform_name)
    record = find_server(image or platform.default_image)
    chosen = find_model(model_id or model.DEFAULT)
    built = ensure_image(record, say)
    files = model.ensure_model(chosen, built, say)
    let_read(INSIDE)
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
    values |= device_values(platform)
    lines = [f"{key}='{value}'" for key, value in values.items()]
    header = "# written by `nox -s use`; for docker compose by hand, the kit itself ignores it\n"
    write_text(COMPOSE / ".env", header + "\n".join(lines) + "\n")
    say(f"compose/.env: image {record.id}, model {chosen.id}, {platform.name}")
    return values
