"""Pushes images to an OCI registry and pulls them back, always by digest, through the engine.

A registry is a place to keep bits, never a source of truth: what comes back is hashed and must be
the locked image. Logins are the engine's own (`docker login`); the kit reads none.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import docker
import requests

from kit import engine
from kit.build import explain_identity
from kit.errors import (
    EngineUnreachable,
    GoneUpstream,
    IdentityMismatch,
    ImageMissing,
    KitError,
    NotLocked,
    RegistryRefused,
    RegistryUnreachable,
    UsageError,
)
from kit.image import Identity, ImageRecord, read_identity
from kit.lock_file import LockedIdentity, read_identity_lock

Say = Callable[[str], None]
_BY_DIGEST = re.compile(r"(?P<repository>[^@\s]+)@(?P<digest>sha256:[0-9a-f]{64})")
_REFUSED = ("unauthorized", "denied", "no basic auth", "authentication required", "forbidden")
_GONE = ("manifest unknown", "not found", "name unknown")
_LAYERS_TIMEOUT_S = 3600.0


@dataclass(frozen=True)
class Copy:
    """An image in a registry: `REPOSITORY@sha256:…`, and the identity that is there."""

    reference: str
    image_id: str
    identity: Identity


def push(record: ImageRecord, repository: str, say: Say) -> Copy:
    """Push a record's image to `HOST/NAME`; return the digest that others pull it by.

    Raises `UsageError` for a repository with a tag or digest, `ImageMissing`, `RegistryRefused`
    and `RegistryUnreachable`.
    """
    if "@" in repository or ":" in repository.rpartition("/")[2] or "/" not in repository:
        raise UsageError(
            f"`{repository}` is no repository",
            hint="HOST/NAME without tag or digest, as in localhost:5000/vllm-kit",
        )
    client = engine.connect(timeout_s=_LAYERS_TIMEOUT_S)
    tag = f"push-{secrets.token_hex(6)}"  # a name only while it is under way
    try:
        image = client.images.get(record.engine_id or record.tag)
        identity = read_identity(str(image.id))
        image.tag(repository, tag)
        try:
            digest = _digest_of(_events(client.images.push, repository, tag=tag), repository, say)
        finally:
            if image.tags:  # as they were before; without one, this tag is all that holds it
                client.images.remove(f"{repository}:{tag}", noprune=True)
    except docker.errors.ImageNotFound:
        raise ImageMissing(
            f"the image {record.id} is not on this engine", hint=f"`nox -s build -- {record.id}`"
        ) from None
    finally:
        client.close()
    return Copy(f"{repository}@{digest}", str(image.id), identity)


def pull(reference: str, record: ImageRecord, say: Say) -> Copy:
    """Pull `REPOSITORY@sha256:…` and take it as the record's image, if its identity is the locked.

    A digest names bytes of a registry's choosing, so the identity decides. Another image is
    removed again and `IdentityMismatch` raised. Raises `UsageError` for a reference without
    digest, `NotLocked`, `GoneUpstream`, `RegistryRefused` and `RegistryUnreachable`.
    """
    parts = _BY_DIGEST.fullmatch(reference)
    if parts is None:
        raise UsageError(
            f"`{reference}` names no digest", hint="HOST/NAME@sha256:…; a tag can move"
        )
    locked = read_identity_lock(record)
    if locked is None:
        raise NotLocked(
            f"{record.id} has no locked identity to compare with",
            hint=f"`nox -s verify_image -- {record.id}` makes one",
        )
    client = engine.connect(timeout_s=_LAYERS_TIMEOUT_S)
    try:
        known = _has(client, reference)
        for event in _events(client.api.pull, parts["repository"], tag=parts["digest"]):
            _raise_for(event, reference)
        image = client.images.get(reference)
        identity = read_identity(str(image.id))
        if identity.digest != locked.digest:
            if not known:
                client.images.remove(reference)
            raise _mismatch(reference, record, identity, locked)
        image.tag(*record.tag.split(":", 1))
    finally:
        client.close()
    say(f"  {reference}: identity {identity.digest}, as locked; tagged {record.tag}")
    return Copy(reference, str(image.id), identity)


def _has(client: docker.DockerClient, reference: str) -> bool:
    try:
        client.images.get(reference)
    except docker.errors.ImageNotFound:
        return False
    return True


def _mismatch(
    reference: str, record: ImageRecord, found: Identity, locked: LockedIdentity
) -> IdentityMismatch:
    return IdentityMismatch(
        f"{reference} is not the locked {record.id}: {explain_identity(found, locked)}",
        hint=f"it was not taken; `nox -s build -- {record.id}` makes the locked image",
    )


def _events(call: Callable[..., Any], repository: str, *, tag: str) -> Iterable[Mapping[str, Any]]:
    """Yield what the engine tells while it works; its own errors become events too."""
    try:
        yield from call(repository, tag=tag, stream=True, decode=True)
    except docker.errors.APIError as error:
        yield {"error": str(error.explanation or error)}
    except requests.RequestException as error:
        raise EngineUnreachable(
            "the engine stopped answering while it spoke to a registry", detail=str(error)
        ) from None


def _digest_of(events: Iterable[Mapping[str, Any]], repository: str, say: Say) -> str:
    digest = ""
    for event in events:
        _raise_for(event, repository)
        digest = (event.get("aux") or {}).get("Digest") or digest
    if not digest:
        raise RegistryRefused(f"{repository}: the registry took the image but told no digest")
    say(f"  pushed {repository}@{digest}")
    return digest


def _raise_for(event: Mapping[str, Any], reference: str) -> None:
    """Raise what a person can do about the registry's or engine's complaint, if it is one."""
    told = str(event.get("error") or "")
    if told:
        raise registry_error(told, reference)


def registry_error(told: str, reference: str) -> KitError:
    """Return the error for the engine's words about a registry; they carry no code of their own."""
    registry, words = reference.partition("/")[0], told.lower()
    if any(each in words for each in _REFUSED):
        return RegistryRefused(
            f"{registry} refuses {reference}",
            hint=f"`docker login {registry}`, with a login that may use this repository",
            detail=told,
        )
    if any(each in words for each in _GONE) and "no such host" not in words:
        return GoneUpstream(
            f"{reference} is not in the registry",
            hint="take it from a bundle, or build it from its lock",
            detail=told,
        )
    return RegistryUnreachable(
        f"the registry {registry} does not answer as one",
        hint="check its address; the engine speaks plain HTTP only to 127.0.0.1",
        detail=told,
    )
