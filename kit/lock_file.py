"""Locks: exactly which packages and wheels make an image, and what came out when they did.

`docker/locks/<id>/` holds `inputs.json` and `inputs.requirements.txt` (both hashed into the
image's label `kit.lock.sha256`) and, not hashed, `identity.json`, the outputs, and `sbom.cdx.json`,
the inputs as CycloneDX. Where the last attempt to lock failed, `not_locked.json` says why. All are
written by `nox -s lock` and `nox -s verify_image`, never by hand.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import Field

from kit.errors import BadFile, NotLocked
from kit.image import Identity, ImageRecord
from kit.value import Value, is_empty, parse_value, read_text

INPUTS = "inputs.json"
REQUIREMENTS = "inputs.requirements.txt"
IDENTITY = "identity.json"
NOT_LOCKED = "not_locked.json"
SBOM = "sbom.cdx.json"
SCHEMA_VERSION = 1
L = TypeVar("L", bound=Value)

Origin = Literal["package index", "commit index", "made", "file"]


class DebPackage(Value):
    """One Debian package of the image's base."""

    name: str
    version: str
    file: str
    size_bytes: int
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class Wheel(Value):
    """One wheel of the image; `made` ones are written by `kit.wheels`, the same on any machine."""

    name: str
    version: str
    file: str
    size_bytes: int
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    origin: Origin = "package index"


class Lock(Value):
    """All that goes into an image. Equal locks give equal images."""

    schema_version: Literal[1] = 1
    written_by: str
    image: str
    python: str
    architecture: str = "amd64"
    as_of: str
    source_date_epoch: int
    suite: str
    base: tuple[DebPackage, ...]
    wheels: tuple[Wheel, ...]

    def find_wheel(self, name: str) -> Wheel | None:
        return next((wheel for wheel in self.wheels if wheel.name == name), None)


class InsideFacts(Value):
    """What the image says about itself, asked with its own interpreter and no network."""

    python: str
    vllm_version: str = Field("", exclude_if=is_empty)
    vllm_commit: str | None
    torch_version: str = Field("", exclude_if=is_empty)
    torch_cuda: str | None
    package_version: str = Field("", exclude_if=is_empty)
    """That of the distribution which an image without vLLM is about."""
    cuda_archs: tuple[str, ...] = Field((), exclude_if=is_empty)
    """What torch's GPU code is compiled for: `sm_90` as a binary, `compute_90` as PTX."""


class LockedIdentity(Value):
    """What came out of the lock: two builds from nothing agreed on it."""

    schema_version: Literal[1] = 1
    written_by: str
    config_digest: str
    diff_ids: tuple[str, ...]
    size_bytes: int
    digest: str
    base_sha256: str
    recipe: dict[str, str]
    built_with: dict[str, str | None]
    inside: InsideFacts

    @property
    def identity(self) -> Identity:
        return Identity(
            config_digest=self.config_digest, diff_ids=self.diff_ids, size_bytes=self.size_bytes
        )


class Attempt(Value):
    """Why an image has no lock: the last attempt's outcome."""

    schema_version: Literal[1] = 1
    written_by: str
    at: str
    error: str
    reason: str


def render_requirements(lock: Lock) -> str:
    """Return the hashed requirements in pip's format; no index address, one file a package."""
    lines = [f"# written by `{lock.written_by}`"]
    lines += [f"{w.name}=={w.version} --hash=sha256:{w.sha256}" for w in lock.wheels]
    return "\n".join(lines) + "\n"


def render_json(value: Value) -> str:
    """Return a machine file's text: sorted keys, one trailing newline."""
    return json.dumps(value.model_dump(mode="json"), indent=1, sort_keys=True) + "\n"


def lock_sha256(lock: Lock) -> str:
    """Return the hash of the lock's two input files: the image's label `kit.lock.sha256`."""
    text = render_json(lock) + render_requirements(lock)
    return hashlib.sha256(text.encode()).hexdigest()


def read_lock(record: ImageRecord) -> Lock:
    """Return the record's lock; raise `NotLocked` without one, `BadFile` when it was edited."""
    if record.source == "adopted":
        raise NotLocked(
            f"{record.id} is adopted from the engine, so nothing of it is locked",
            hint="use it as it is; only locked images can be built",
        )
    if not record.locked:
        raise NotLocked(
            f"{record.id} is {lock_state(record)}",
            hint=f"`nox -s lock -- {record.id} --write`, where the wheel's source is reachable",
        )
    lock = _read(Lock, record.lock_dir / INPUTS)
    shown = f"{record.id}/{REQUIREMENTS}"
    if read_text(record.lock_dir / REQUIREMENTS, shown=shown) != render_requirements(lock):
        raise BadFile(
            f"docker/locks/{shown} does not say what {INPUTS} says",
            hint=f"restore both, or run `nox -s lock -- {record.id} --write`",
        )
    return lock


def read_identity_lock(record: ImageRecord) -> LockedIdentity | None:
    """Return the recorded outcome, or None before the first `verify_image --write`."""
    path = record.lock_dir / IDENTITY
    return _read(LockedIdentity, path) if path.is_file() else None


def lock_state(record: ImageRecord) -> str:
    """Return "locked", "adopted", or "not locked" with the reason of the last attempt."""
    if record.source == "adopted":
        return "adopted"
    if record.locked:
        return "locked"
    path = record.lock_dir / NOT_LOCKED
    return f"not locked: {_read(Attempt, path).reason}" if path.is_file() else "not locked"


def _read(cls: type[L], path: Path) -> L:
    shown = f"docker/locks/{path.parent.name}/{path.name}"
    try:
        raw = json.loads(read_text(path, shown=shown))
    except json.JSONDecodeError as error:
        raise BadFile(f"{shown}: line {error.lineno}: {error.msg}", hint="restore it") from None
    except (ValueError, RecursionError) as error:
        raise BadFile(f"{shown}: not JSON: {error}", hint="restore it") from None
    version = raw.get("schema_version") if isinstance(raw, dict) else None
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise BadFile(f"{shown}: written by a newer kit (schema {version})", hint="update the kit")
    return parse_value(cls, raw, shown)
