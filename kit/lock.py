"""Makes locks: resolves an image record, shows what changed, writes the files."""

from __future__ import annotations

import datetime

from kit import debian, lock_wheels
from kit.errors import BadFile, KitError, NotLocked
from kit.image import ImageRecord
from kit.lock_file import (
    IDENTITY,
    INPUTS,
    NOT_LOCKED,
    REQUIREMENTS,
    SBOM,
    Attempt,
    Lock,
    LockedIdentity,
    lock_sha256,
    lock_state,
    read_identity_lock,
    read_lock,
    render_json,
    render_requirements,
)

__all__ = [
    "SBOM",
    "Lock",
    "LockedIdentity",
    "diff",
    "lock_sha256",
    "lock_state",
    "read_identity_lock",
    "read_lock",
    "resolve",
    "write",
    "write_attempt",
    "write_identity",
    "write_sbom",
]


def resolve(record: ImageRecord) -> Lock:
    """Resolve a record to exact packages and wheels, checked not to overwrite one another.

    Needs the Debian archive and the record's wheel source. Raises `IndexUnreachable`,
    `VariantMissing`, `GoneUpstream`, `LockConflict`, or `NotLocked` for adopted images.
    """
    if record.source == "adopted" or record.as_of is None:
        raise NotLocked(f"{record.id} is adopted from the engine: there is nothing to lock")
    return Lock(
        written_by=f"nox -s lock -- {record.id} --write",
        image=record.id,
        python=record.python,
        as_of=record.as_of,
        source_date_epoch=epoch_of(record.as_of),
        suite=debian.SUITE,
        base=debian.resolve_base(),
        wheels=lock_wheels.resolve_wheels(record),
    )


def epoch_of(as_of: str) -> int:
    """Return a UTC time like 2026-11-30T00:00:00Z in seconds since 1970; raise `BadFile`."""
    try:
        return int(datetime.datetime.fromisoformat(as_of).timestamp())
    except ValueError:
        raise BadFile(
            f"docker/images.yaml: as_of `{as_of}` is no time like 2026-11-30T00:00:00Z"
        ) from None


def diff(old: Lock | None, new: Lock) -> list[str]:
    """Return what changed, one line each: `+ name version`, `- name version`, `name old -> new`."""
    lines: list[str] = []
    for kind in ("base", "wheels"):
        before = {p.name: p for p in (getattr(old, kind) if old else ())}
        after = {p.name: p for p in getattr(new, kind)}
        for name in sorted(before.keys() | after.keys()):
            a, b = before.get(name), after.get(name)
            if a is None and b is not None:
                lines.append(f"+ {kind}: {name} {b.version}")
            elif b is None and a is not None:
                lines.append(f"- {kind}: {name} {a.version}")
            elif a is not None and b is not None and a.version != b.version:
                lines.append(f"  {kind}: {name} {a.version} -> {b.version}")
            elif a is not None and b is not None and a.sha256 != b.sha256:
                lines.append(f"! {kind}: {name} {a.version}: other bytes of the same version")
    for key in ("python", "as_of", "suite", "source_date_epoch"):
        a, b = getattr(old, key, None), getattr(new, key)
        if a != b:
            lines.append(f"  {key}: {a} -> {b}")
    return lines


def write(record: ImageRecord, lock: Lock) -> None:
    """Write the lock's input files and SBOM; an identity that belongs to other inputs goes."""
    folder = record.lock_dir
    folder.mkdir(parents=True, exist_ok=True)
    changed = not record.locked or lock_sha256(read_lock(record)) != lock_sha256(lock)
    (folder / INPUTS).write_text(render_json(lock), encoding="utf-8")
    (folder / REQUIREMENTS).write_text(render_requirements(lock), encoding="utf-8")
    write_sbom(record, lock)
    (folder / NOT_LOCKED).unlink(missing_ok=True)
    if changed:
        (folder / IDENTITY).unlink(missing_ok=True)


def write_sbom(record: ImageRecord, lock: Lock) -> None:
    """Write the bill of materials of a lock beside it; it is no part of the lock's hash."""
    from kit.sbom import render_sbom  # its library takes long to import

    (record.lock_dir / SBOM).write_text(render_sbom(lock), encoding="utf-8")


def write_identity(record: ImageRecord, found: LockedIdentity) -> None:
    """Write the outcome that two builds from nothing agreed on."""
    (record.lock_dir / IDENTITY).write_text(render_json(found), encoding="utf-8")


def write_attempt(record: ImageRecord, error: KitError) -> None:
    """Record why an image could not be locked, unless an earlier lock is there."""
    if record.locked:
        return
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    record.lock_dir.mkdir(parents=True, exist_ok=True)
    attempt = Attempt(
        written_by=f"nox -s lock -- {record.id} --write",
        at=now,
        error=type(error).__name__,
        reason=error.message,
    )
    (record.lock_dir / NOT_LOCKED).write_text(render_json(attempt), encoding="utf-8")
