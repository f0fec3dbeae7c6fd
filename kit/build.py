"""Builds an image from its lock alone, without network, and checks what came out."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kit import console, debian, engine, process, wheels
from kit.errors import BuildFailed, DiskFull, IdentityMismatch, ImageMissing
from kit.image import Identity, ImageRecord, engine_image_id, read_identity, told_identity
from kit.lock_file import (
    InsideFacts,
    Lock,
    LockedIdentity,
    lock_sha256,
    read_identity_lock,
    read_lock,
    render_requirements,
)
from kit.paths import DOCKER, cache_dir
from kit.platform import cuda_version

Say = Callable[[str], None]
How = Literal["present", "built", "adopted"]
State = Literal["verified", "declared", "failed"]
LOCK_LABEL = "kit.lock.sha256"
RECIPE = ("Dockerfile", "dropped.txt", "normalize.py")
_TCMALLOC = "/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4"
_SOURCE = "https://github.com/vllm-project/vllm"
_PROBE = """
import importlib.metadata as m, json, platform, sys
import torch, vllm
print(json.dumps({
    "python": platform.python_version(), "vllm_version": m.version("vllm"),
    "vllm_commit": getattr(vllm, "__commit_id__", None),
    "torch_version": torch.__version__, "torch_cuda": torch.version.cuda,
    "cuda_archs": (torch._C._cuda_getArchFlags() or "").split() if torch.version.cuda else []}))
"""
_PROBE_PACKAGE = """
import importlib.metadata as m, json, platform, sys
import {module}
print(json.dumps({{
    "python": platform.python_version(), "vllm_commit": None, "torch_cuda": None,
    "package_version": m.version("{package}")}}))
"""


@dataclass(frozen=True)
class BuiltImage:
    """An image that is on the engine, and how sure the kit is of what it is.

    `state` is `verified` when the identity is the locked one and the wheel carries the commit that
    the record names; `declared` when the identity is the locked one but nothing inside proves the
    source, or nothing is locked; `failed` never leaves this module except in an error.
    """

    record: ImageRecord
    image_id: str
    identity: Identity
    lock_sha256: str | None
    how: How
    state: State


def ensure_image(record: ImageRecord, say: Say) -> BuiltImage:
    """Return the record's image, building it where this engine does not have the locked bits.

    Raises `ImageMissing` for an adopted image that is not there, `NotLocked`, and what `build`
    raises.
    """
    if record.source == "adopted":
        return _adopt(record)
    lock = read_lock(record)
    locked = read_identity_lock(record)
    image_id = engine_image_id(record.tag)
    if image_id is not None:
        identity = read_identity(image_id)
        if locked is not None and identity.digest == locked.digest:
            return _built(record, lock, image_id, identity, "present")
        if locked is None and _label(image_id, LOCK_LABEL) == lock_sha256(lock):
            return _built(record, lock, image_id, identity, "present")
        say(f"  {record.tag} on this engine is not the locked one: building it")
    return build(record, say=say)


def _adopt(record: ImageRecord) -> BuiltImage:
    image_id = engine_image_id(record.engine_id or "")
    if image_id is None:
        raise ImageMissing(
            f"the adopted image {record.id} is not on this engine",
            hint=f"load or pull it so that its id is {record.engine_id}",
        )
    identity = told_identity(image_id) or read_identity(image_id)
    return BuiltImage(record, image_id, identity, None, "adopted", "declared")


def _built(
    record: ImageRecord, lock: Lock, image_id: str, identity: Identity, how: How
) -> BuiltImage:
    locked = read_identity_lock(record)
    proven = (
        locked is not None
        and record.commit is not None
        and is_commit(locked.inside.vllm_commit, record.commit)
    )
    state: State = "verified" if proven else "declared"
    return BuiltImage(record, image_id, identity, lock_sha256(lock), how, state)


def is_commit(told: str | None, commit: str) -> bool:
    """Say whether what a wheel tells (`g<sha9>`, a prefix or all of it) is this commit."""
    name = (told or "").removeprefix("g")
    return len(name) >= 7 and commit.startswith(name)


def _label(image_id: str, name: str) -> str | None:
    client = engine.connect()
    try:
        labels: dict[str, str] = client.images.get(image_id).labels
        return labels.get(name)
    finally:
        client.close()


def build(record: ImageRecord, *, no_cache: bool = False, say: Say) -> BuiltImage:
    """Build the record's image from its lock, tag it, and compare it with the locked identity.

    Downloads run beside the making of the base. Raises `NotLocked`, the errors of fetching,
    `BuildFailed`, `DiskFull`, and `IdentityMismatch` when other bits came out.
    """
    lock = read_lock(record)
    locked = read_identity_lock(record)
    warn_about_tools(locked)
    start = time.monotonic()
    base = fetch_inputs(record, lock, say)
    say(f"  inputs ready after {time.monotonic() - start:.0f} s; building {record.tag}")
    context = lay_out_context(lock, base, cache_dir() / "build" / record.id)
    try:
        run_build(record, lock, base, context, no_cache=no_cache, tag=record.tag)
    finally:
        shutil.rmtree(context, ignore_errors=True)
    image_id = engine_image_id(record.tag)
    if image_id is None:
        raise BuildFailed(f"the build of {record.tag} ended well but left no image")
    say(f"  built after {time.monotonic() - start:.0f} s; reading its identity")
    with ThreadPoolExecutor(1) as pool:
        inside = pool.submit(ask_inside, record, image_id)
        identity = read_identity(image_id)
        check_identity(record, identity, locked)
        check_inside(record, lock, inside.result())
    return _built(record, lock, image_id, identity, "built")


def fetch_inputs(record: ImageRecord, lock: Lock, say: Say) -> Path:
    """Bring packages and wheels into the cache and make the base meanwhile; return the base."""
    with ThreadPoolExecutor(2) as pool:
        base = pool.submit(ensure_base, lock, say)
        fetched = pool.submit(_fetch_wheels, record, lock, say)
        for job in (fetched, base):
            job.result()
    return base.result()


def _fetch_wheels(record: ImageRecord, lock: Lock, say: Say) -> None:
    wheels.fetch_wheels(lock.wheels, say, record=record)
    wheels.check_wheels(lock.wheels)
    wheels.uv_program(say)


def base_path(lock: Lock) -> Path:
    """Return where the base of these packages is kept; its name is the hash of what goes in."""
    return cache_dir() / "base" / f"{debian.base_key(lock.base, lock.source_date_epoch)}.tar"


def ensure_base(lock: Lock, say: Say) -> Path:
    """Return the base's tar, made from the locked packages unless the cache holds it."""
    debian.fetch_debs(lock.base, say)
    out = base_path(lock)
    if not out.is_file():
        say(f"  base: unpacking {len(lock.base)} Debian packages")
        debian.make_base(lock.base, lock.source_date_epoch, out)
    return out


def lay_out_context(lock: Lock, base: Path, folder: Path) -> Path:
    """Fill a folder with all that the build may see, and nothing else; return it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    wheels.link_or_copy(base, folder / "base.tar")
    wheels.lay_out(lock.wheels, folder / "wheels")
    shutil.copy2(wheels.uv_program(console.say), folder / "uv")
    for name in ("dropped.txt", "normalize.py"):
        shutil.copyfile(DOCKER / name, folder / name)
    (folder / "requirements.txt").write_text(render_requirements(lock), encoding="utf-8")
    return folder


def run_build(
    record: ImageRecord, lock: Lock, base: Path, context: Path, *, no_cache: bool, tag: str
) -> None:
    """Run buildx on a laid-out context; raise `BuildFailed` or `DiskFull`."""
    words = ["--builder", "default", "build", "--network=none", "--provenance=false"]
    words += ["--sbom=false", "--progress=plain", "--load", "--tag", tag]
    words += ["--file", str(DOCKER / "Dockerfile")]
    words += ["--build-arg", f"SOURCE_DATE_EPOCH={lock.source_date_epoch}"]
    preload = _preload(record, lock)
    words += ["--build-arg", f"LD_PRELOAD={preload}"] if preload else []
    for key, value in labels(record, lock, base).items():
        words += ["--label", f"{key}={value}"]
    words += ["--no-cache"] if no_cache else []
    env = {"SOURCE_DATE_EPOCH": str(lock.source_date_epoch), "BUILDX_NO_DEFAULT_ATTESTATIONS": "1"}
    done = engine.cli("buildx", *words, str(context), env=env, timeout_s=3600)
    if done.ok:
        return
    if "no space left" in done.stderr.lower():
        raise DiskFull(
            "no space left while the image was built",
            hint="free some where the engine keeps its data (`docker info`: Docker Root Dir)",
            detail=done.tail,
        )
    raise BuildFailed(f"the build of {tag} failed", detail=done.tail)


def labels(record: ImageRecord, lock: Lock, base: Path) -> dict[str, str]:
    """Return the image's labels: where it comes from, and the hash of its lock."""
    prefix = "org.opencontainers.image"
    own = lock.find_wheel(record.package)
    found = {
        LOCK_LABEL: lock_sha256(lock),
        f"{prefix}.version": own.version if own else "",
        f"{prefix}.source": _SOURCE if record.serves else f"pkg:pypi/{record.package}",
        f"{prefix}.base.name": f"debian:{lock.suite}",
        f"{prefix}.base.digest": f"sha256:{debian.file_sha256(base)}",
    }
    if record.commit is not None:
        found[f"{prefix}.revision"] = record.commit
    return found


def _preload(record: ImageRecord, lock: Lock) -> str:
    """Return what vLLM's own CPU image preloads: a faster allocator and Intel's OpenMP."""
    if record.cuda != "cpu" or not record.serves:
        return ""
    openmp = "/opt/kit/venv/lib/libiomp5.so"
    return f"{_TCMALLOC}:{openmp}" if lock.find_wheel("intel-openmp") else _TCMALLOC


def ask_inside(record: ImageRecord, image_id: str) -> InsideFacts:
    """Ask the image's own interpreter what it holds, in a container without network."""
    module = record.package.replace("-", "_")
    probe = _PROBE_PACKAGE.format(module=module, package=record.package)
    done = engine.cli(
        "run", "--rm", "--network=none", "--read-only", "--cap-drop=ALL", "--tmpfs=/tmp",
        "--security-opt=no-new-privileges", "--label=kit.build=probe",
        "--entrypoint", record.interpreter, image_id,
        "-c", _PROBE if record.serves else probe, timeout_s=300,
    )  # fmt: skip
    lines = done.stdout.strip().splitlines()
    if not done.ok or not lines:
        what = "vLLM" if record.serves else module
        raise BuildFailed(f"{what} cannot be imported inside {record.id}", detail=done.tail)
    try:
        return InsideFacts.model_validate(json.loads(lines[-1]))
    except ValueError:
        raise BuildFailed(
            f"{record.id} tells nothing usable about itself", detail=done.tail
        ) from None


def check_inside(record: ImageRecord, lock: Lock, told: InsideFacts) -> None:
    """Raise `IdentityMismatch` unless variant, version and commit are those of the record."""
    if not record.serves:
        _check_package(record, lock, told)
        return
    vllm = lock.find_wheel("vllm")
    wanted = None if record.cuda == "cpu" else cuda_version(record.cuda)
    complaints = []
    if told.torch_cuda != wanted:
        complaints.append(f"torch is built for CUDA {told.torch_cuda}, not {wanted}")
    if vllm is not None and told.vllm_version != vllm.version:
        complaints.append(f"vLLM says {told.vllm_version}, the lock {vllm.version}")
    if record.commit and told.vllm_commit and not is_commit(told.vllm_commit, record.commit):
        complaints.append(f"vLLM says commit {told.vllm_commit}, the record {record.commit[:9]}")
    if complaints:
        raise IdentityMismatch(
            f"{record.id} is not what its record says: {'; '.join(complaints)}",
            hint=f"lock it again: `nox -s lock -- {record.id}`",
        )


def _check_package(record: ImageRecord, lock: Lock, told: InsideFacts) -> None:
    own = lock.find_wheel(record.package)
    if own is None or told.package_version != own.version:
        raise IdentityMismatch(
            f"{record.id} is not what its record says: {record.package} says "
            f"{told.package_version or 'nothing'}, the lock {own.version if own else 'has none'}",
            hint=f"lock it again: `nox -s lock -- {record.id}`",
        )


def check_identity(record: ImageRecord, found: Identity, locked: LockedIdentity | None) -> None:
    """Raise `IdentityMismatch` that names the first thing that differs from the lock."""
    if locked is None or found.digest == locked.digest:
        return
    raise IdentityMismatch(
        f"{record.tag} was built but is not the locked image: {explain_identity(found, locked)}",
        hint=f"`nox -s verify_image -- {record.id}` names the files that differ",
        detail="\n".join(recipe_changes(locked) + tool_changes(locked)),
    )


def explain_identity(found: Identity, locked: LockedIdentity) -> str:
    """Say in words which part of an identity differs."""
    if len(found.diff_ids) != len(locked.diff_ids):
        return f"{len(found.diff_ids)} layers instead of {len(locked.diff_ids)}"
    names = ("the base", "the Python packages")
    for place, (a, b) in enumerate(zip(found.diff_ids, locked.diff_ids, strict=True)):
        if a != b:
            what = names[place] if place < len(names) else f"layer {place + 1}"
            return f"the layer of {what} is {a[7:19]}, the lock says {b[7:19]}"
    return "its layers are the locked ones, its configuration is not"


def recipe_hashes() -> dict[str, str]:
    """Return the hashes of the files that say how an image is built."""
    return {f"docker/{name}": debian.file_sha256(DOCKER / name) for name in RECIPE}


def recipe_changes(locked: LockedIdentity) -> list[str]:
    """Return one line for each file of the recipe that is not the one the lock was made with."""
    now = recipe_hashes()
    return [
        f"{name} is not the file that the lock was made with"
        for name, sha256 in sorted(locked.recipe.items())
        if now.get(name) != sha256
    ]


def tool_versions() -> dict[str, str | None]:
    """Return the versions of the programs that a build runs."""
    found: dict[str, str | None] = {"uv": wheels.uv_wheel().version}
    for name, argv in (
        ("mmdebstrap", ["mmdebstrap", "--version"]),
        ("apt", ["apt-get", "--version"]),
        ("dpkg", ["dpkg", "--version"]),
    ):
        found[name] = _first_version(argv)
    told = engine.versions()
    return found | {"buildx": told["buildx"], "engine": told["engine"]}


def _first_version(argv: list[str]) -> str | None:
    if shutil.which(argv[0]) is None:
        return None
    words = process.run(argv, timeout_s=30).stdout.split()
    return next((word for word in words if word[:1].isdigit()), None)


def tool_changes(locked: LockedIdentity | None) -> list[str]:
    """Return one line for each program whose version is not the one the lock was made with."""
    if locked is None:
        return []
    now = tool_versions()
    return [
        f"{name} is {now.get(name)}, the lock was made with {version}"
        for name, version in sorted(locked.built_with.items())
        if now.get(name) != version
    ]


def warn_about_tools(locked: LockedIdentity | None) -> None:
    """Warn about other versions of the tools; they decide nothing by themselves."""
    for line in tool_changes(locked):
        console.warn(line)
