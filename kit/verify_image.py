"""Proves that an image is a pure function of its lock: two builds from nothing, compared."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kit import build, debian, engine, wheels
from kit.errors import BuildFailed, IdentityMismatch
from kit.image import Identity, ImageRecord, engine_image_id, read_identity, save_stream
from kit.layers import compare_layers, read_layers
from kit.lock import write_identity
from kit.lock_file import (
    InsideFacts,
    Lock,
    LockedIdentity,
    lock_sha256,
    read_identity_lock,
    read_lock,
)
from kit.paths import cache_dir

Say = Callable[[str], None]
# Steps of docker/Dockerfile as the builder describes them; nobody else's cache has these words.
_OWN_CACHE = re.compile(r"ADD base\.tar /|/context/uv venv|COPY --from=build /opt/kit /opt/kit")
_LOCAL_SOURCE = "local source for "
_SHOWN_DIFFERENCES = 30


@dataclass(frozen=True)
class FreshBuild:
    """One build from nothing."""

    image_id: str
    base_sha256: str
    identity: Identity


def verify(record: ImageRecord, say: Say) -> dict[str, Any]:
    """Build the record's image twice from nothing and compare: both, and both with the lock.

    Nothing is reused but the hash-checked downloads. The builds differ in all that must not
    matter: folder, file times, builder cache. Where no identity is locked yet and both agree, it
    is written. Raises `HashMismatch` or `IdentityMismatch` naming what differs.
    """
    lock = read_lock(record)
    locked = read_identity_lock(record)
    _check_inputs(record, lock, locked, say)
    before = {cache_id for cache_id, _ in _cache_records()}
    tags = (f"vllm-kit-verify:{record.id}-1", f"vllm-kit-verify:{record.id}-2")
    try:
        builds = [_build_from_nothing(record, lock, tag, say) for tag in tags]
        _compare(record, builds[0], builds[1], say)
        inside = build.ask_inside(record, builds[0].image_id)
        build.check_inside(record, lock, inside)
        found = _outcome(record, builds[0], inside)
        _compare_with_lock(record, builds[0], locked, say)
        if locked is None:
            write_identity(record, found)
            say(f"  written: docker/locks/{record.id}/identity.json")
        if engine_image_id(record.tag) != builds[0].image_id:
            engine.cli("tag", builds[0].image_id, record.tag)
    finally:
        for tag in tags:
            engine.cli("rmi", "--no-prune", tag)
        drop_build_cache(before)
    return {
        "id": record.id,
        "identity": found.digest,
        "config_digest": found.config_digest,
        "diff_ids": list(found.diff_ids),
        "lock_sha256": lock_sha256(lock),
        "identity_was_locked": locked is not None,
        "differing_files": 0,
        "tool_changes": build.tool_changes(locked),
    }


def _check_inputs(record: ImageRecord, lock: Lock, locked: LockedIdentity | None, say: Say) -> None:
    """Check every input before any building: a changed one is named at once."""
    say("  checking every input against the lock")
    changed = build.recipe_changes(locked) if locked is not None else []
    if changed:
        raise IdentityMismatch(
            f"{record.id}: {'; '.join(changed)}",
            hint="restore it; or, to lock what comes out now, remove "
            f"docker/locks/{record.id}/identity.json and verify again",
        )
    debian.fetch_debs(lock.base, say)
    for package in lock.base:
        debian.check_sha256(
            debian.deb_path(package), package.sha256, f"the Debian package {package.file}"
        )
    wheels.fetch_wheels(lock.wheels, say, record=record)
    wheels.check_wheels(lock.wheels)
    build.warn_about_tools(locked)


def _build_from_nothing(record: ImageRecord, lock: Lock, tag: str, say: Say) -> FreshBuild:
    """Make base and image anew, in a folder and with file times that no other build has."""
    say(f"  building {tag} from nothing")
    drop_build_cache(None)
    home = cache_dir() / "build"
    home.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="verify-", dir=home) as folder:
        base = Path(folder) / "made.tar"
        debian.make_base(lock.base, lock.source_date_epoch, base)
        base_sha256 = debian.file_sha256(base)
        context = build.lay_out_context(lock, base, Path(folder) / "context")
        _change_times(context)
        build.run_build(record, lock, base, context, no_cache=True, tag=tag)
        shutil.rmtree(context)
    image_id = engine_image_id(tag)
    if image_id is None:
        raise BuildFailed(f"the build of {tag} left no image")
    return FreshBuild(image_id, base_sha256, read_identity(image_id))


def _change_times(context: Path) -> None:
    """Give every file another time; linked files become copies first, the cache keeps its own."""
    for number, path in enumerate(sorted(context.rglob("*"))):
        if path.is_file() and path.stat().st_nlink > 1:
            copy = path.with_name(path.name + ".copy")
            shutil.copyfile(path, copy)
            copy.replace(path)
        os.utime(path, (1_000_000_000 + number, 1_000_000_000 + number))


def _cache_records() -> list[tuple[str, str]]:
    """Return (id, description) of each record in the builder's cache."""
    done = engine.cli("buildx", "--builder", "default", "du", "--verbose", timeout_s=120)
    ids = re.findall(r"^ID:\s+(\S+)", done.stdout, re.MULTILINE)
    texts = re.findall(r"^Description:\s+(.*)$", done.stdout, re.MULTILINE)
    return list(zip(ids, texts, strict=False))


def drop_build_cache(before: set[str] | None) -> None:
    """Drop the builder's records of the kit's own recipe, nobody else's.

    A build without cache still reuses layers of equal content that a former build left, which
    hides differences in times. With `before`, also the local sources that came since then.
    """
    for cache_id, text in _cache_records():
        new_source = before is not None and cache_id not in before and _LOCAL_SOURCE in text
        if _OWN_CACHE.search(text) or new_source:
            engine.cli("builder", "prune", "--all", "--force", "--filter", f"id={cache_id}")


def _compare(record: ImageRecord, first: FreshBuild, second: FreshBuild, say: Say) -> None:
    if first.base_sha256 != second.base_sha256:
        say("  the two bases differ")
    if first.identity.digest == second.identity.digest:
        say(f"  both builds have the identity {first.identity.digest}")
        return
    lines = differing_files(first.image_id, second.image_id, ("build 1", "build 2"))
    raise IdentityMismatch(
        f"two builds of {record.id} from the same lock differ in {len(lines)} files: {lines[0]}",
        hint="the recipe must remove what differs (docker/normalize.py, kit/debian.py)",
        detail="\n".join(lines[:_SHOWN_DIFFERENCES]),
    )


def differing_files(first_id: str, second_id: str, names: tuple[str, str]) -> list[str]:
    """Return one line for each file that differs between two images of this engine."""
    first, second = read_layers(save_stream(first_id)), read_layers(save_stream(second_id))
    lines = compare_layers(first, second, names=names)
    return lines or ["no file: only the configuration differs"]


def _compare_with_lock(
    record: ImageRecord, found: FreshBuild, locked: LockedIdentity | None, say: Say
) -> None:
    """Raise `IdentityMismatch` where the builds agree with each other but not with the lock."""
    if locked is None or found.identity.digest == locked.digest:
        return
    lines = build.recipe_changes(locked) + build.tool_changes(locked)
    if found.base_sha256 != locked.base_sha256:
        lines.append("the base differs: see mmdebstrap's, apt's and dpkg's versions")
    kept = engine_image_id(record.tag)
    if kept is not None and read_identity(kept).digest == locked.digest:
        say("  naming the files that differ from the locked image")
        lines += differing_files(kept, found.image_id, ("the lock", "the build"))
    raise IdentityMismatch(
        f"{record.id}: both builds agree, but not with the lock: "
        + build.explain_identity(found.identity, locked),
        hint="find what changed below; the lock is right until you decide otherwise",
        detail="\n".join(lines[:_SHOWN_DIFFERENCES]),
    )


def _outcome(record: ImageRecord, found: FreshBuild, inside: InsideFacts) -> LockedIdentity:
    return LockedIdentity(
        written_by=f"nox -s verify_image -- {record.id}",
        config_digest=found.identity.config_digest,
        diff_ids=found.identity.diff_ids,
        size_bytes=found.identity.size_bytes,
        digest=found.identity.digest,
        base_sha256=found.base_sha256,
        recipe=build.recipe_hashes(),
        built_with=build.tool_versions(),
        inside=inside,
    )
