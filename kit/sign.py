"""Signs manifests and checks signatures, offline: ed25519, a DSSE envelope beside the manifest.

A private key is a file of its own (PEM, PKCS #8, mode 0600) and goes nowhere else: it is refused
inside a run folder, and no message shows any of it.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import lzma
import os
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_pem_public_key,
)
from pydantic import ValidationError
from securesystemslib.dsse import Envelope
from securesystemslib.exceptions import Error as SigningError
from securesystemslib.signer import CryptoSigner, SSlibKey

from kit import store
from kit.archive import shown
from kit.errors import BadFile, NotFound, SignatureWrong, UsageError
from kit.manifest import Manifest, RawFile, load_manifest
from kit.plan import describe_difference
from kit.reference import archive_of
from kit.statement import Statement, make_statement, render_statement
from kit.value import Value, explain, load_json, parse_value

PAYLOAD_TYPE = "application/vnd.in-toto+json"
_KEY_BYTES = 64 << 10
_ENVELOPE_BYTES = 16 << 20

State = Literal["verified", "declared"]
Raw = Literal["all as recorded", "not at hand"]


class _Signature(Value):
    keyid: str
    sig: str


class _Envelope(Value):
    payload: str
    payloadType: str  # noqa: N815 - the name that DSSE gives it
    signatures: tuple[_Signature, ...]


@dataclass(frozen=True)
class Signed:
    """A checked signature. `state` is `declared` where no public key was given to check it with.

    `raw` says whether the raw files were at hand; where they were, each has its recorded hash.
    """

    manifest: Path
    key_ids: tuple[str, ...]
    state: State
    raw: Raw
    statement: Statement


def make_key(out: Path) -> tuple[Path, str]:
    """Write a new private key to `out` and its public key to `<out>.pub`; return that and its id.

    Raises `UsageError` where one is there already or the folder belongs to a run.
    """
    public = out.with_name(f"{out.name}.pub")
    for path in (out, public):
        if path.exists() or path.is_symlink():
            raise UsageError(f"{path} is there already", hint="choose another --out")
    if any((folder / "manifest.json").exists() for folder in out.absolute().parents):
        raise UsageError("a private key has no place in a run folder", hint="choose another --out")
    key = Ed25519PrivateKey.generate()
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    store.make_folder(out.parent)
    try:
        handle = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(private)
    except OSError as error:
        raise store.disk_error(error, out) from None
    pem = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    store.write_bytes(public, pem)
    return public, SSlibKey.from_crypto(key.public_key()).keyid


def manifest_of(path: Path) -> Path:
    """Return the manifest that a run folder or a manifest's own path means."""
    return path / "manifest.json" if path.is_dir() else path


def signature_of(manifest: Path) -> Path:
    """Return where a manifest's signature lies: `case.dsse.json` beside `case.json`."""
    return manifest.with_suffix(".dsse.json")


def sign(path: Path, key: Path) -> tuple[Path, str]:
    """Sign a run folder's manifest, or a manifest; return the envelope's path and the key's id.

    Raises `BadFile` for a key that is none or that others can read, `SignatureWrong` when a raw
    file is not as recorded: what is not true is not signed.
    """
    manifest = manifest_of(path)
    statement = make_statement(manifest)
    if key.resolve().is_relative_to(manifest.parent.resolve()):
        raise UsageError("the private key lies in the run's folder", hint="move it elsewhere")
    signer = CryptoSigner(_private_key(key))
    _check_raw(manifest, load_manifest(manifest))
    envelope = Envelope(render_statement(statement), PAYLOAD_TYPE, {})
    envelope.sign(signer)
    out = signature_of(manifest)
    store.write_bytes(out, _render(envelope))
    return out, signer.public_key.keyid


def verify(path: Path, public_key: Path | None = None) -> Signed:
    """Check a manifest's signature, its bytes and its raw files.

    The statement is made again from the files and must be the signed one. Raises `NotFound` where
    there is no signature, `SignatureWrong` saying what does not fit.
    """
    return verify_with(path, [] if public_key is None else [public_key])


def verify_with(path: Path, public_keys: Sequence[Path]) -> Signed:
    """Like `verify`, with any of several keys."""
    return _verify(path, [read_public_key(one) for one in public_keys])


def verify_chain(paths: Sequence[Path], public_keys: Sequence[Path]) -> tuple[Signed, ...]:
    """Check an original and its reproductions, each of the one before, and that they hang together.

    Every signature must be by one of the keys. Raises `SignatureWrong` naming the broken link.
    """
    keys = [read_public_key(path) for path in public_keys]
    if not keys:
        raise UsageError("a chain can be checked only with keys", hint="--public-key FILE")
    chain = tuple(_verify(path, keys) for path in paths)
    for first, again in itertools.pairwise(chain):
        told = again.statement.predicate.reproduces
        if told is None:
            raise SignatureWrong(f"{again.manifest}: signed as a run, not as a reproduction")
        if told.outcome is None:
            raise SignatureWrong(f"{again.manifest}: signed without its outcome")
        if told.manifest_sha256 != first.statement.manifest_sha256:
            raise SignatureWrong(f"{again.manifest}: repeats another run than {first.manifest}")
    return chain


def _verify(path: Path, keys: list[SSlibKey]) -> Signed:
    manifest = manifest_of(path)
    if not manifest.is_file():
        raise NotFound(f"{manifest} is not there")
    envelope, signature = _read_envelope(manifest)
    if keys:
        try:
            accepted = tuple(envelope.verify(list(keys), 1))
        except SigningError:
            raise SignatureWrong(
                f"{signature.name}: no signature by this key fits",
                hint=f"it says it is by {', '.join(k[:16] for k in envelope.signatures)}",
            ) from None
    else:
        accepted = tuple(envelope.signatures)
    signed = _read_statement(envelope, signature)
    found = make_statement(manifest)
    if found.manifest_sha256 != signed.manifest_sha256:
        raise SignatureWrong(f"{manifest.name}: other bytes than were signed")
    if differing := describe_difference(signed.as_json(), found.as_json()):
        raise SignatureWrong(f"{manifest.name}: signed / found: {differing[0]}")
    raw = _check_raw(manifest, load_manifest(manifest))
    return Signed(manifest, accepted, "verified" if keys else "declared", raw, signed)


def _render(envelope: Envelope) -> bytes:
    return (json.dumps(envelope.to_dict(), indent=1, sort_keys=True) + "\n").encode()


def _read_envelope(manifest: Path) -> tuple[Envelope, Path]:
    path = signature_of(manifest)
    if not path.is_file():
        raise NotFound(f"{manifest.name} is not signed: there is no {path.name} beside it")
    if path.stat().st_size > _ENVELOPE_BYTES:
        raise BadFile(f"{path.name}: larger than {_ENVELOPE_BYTES} bytes")
    whole = parse_value(_Envelope, load_json(path), path.name)
    try:
        envelope = Envelope.from_dict(whole.model_dump(mode="json"))
    except (ValueError, SigningError):
        raise BadFile(f"{path.name}: no DSSE envelope", hint="sign again") from None
    if _render(envelope) != path.read_bytes() or envelope.payload_type != PAYLOAD_TYPE:
        raise SignatureWrong(f"{path.name}: changed after it was written")
    return envelope, path


def _read_statement(envelope: Envelope, path: Path) -> Statement:
    try:
        return Statement.model_validate(json.loads(envelope.payload))
    except ValidationError as error:
        raise SignatureWrong(f"{path.name}: payload: {shown(explain(error))}") from None
    except (ValueError, RecursionError):
        raise SignatureWrong(f"{path.name}: payload: not JSON") from None


def _check_raw(path: Path, manifest: Manifest) -> Raw:
    """Check the raw files in the run's folder, or in the archive beside a reference manifest."""
    if path.name == "manifest.json":
        wrong = store.changed_files(path.parent, manifest.files)
    elif archive_of(path).is_file():
        wrong = _changed_in_archive(archive_of(path), manifest.files)
    else:
        return "not at hand"
    if wrong:
        raise SignatureWrong(wrong[0], hint=store.CHANGED_HINT)
    return "all as recorded"


def _changed_in_archive(archive: Path, files: dict[str, RawFile]) -> list[str]:
    """Like `store.changed_files`; reads on only as long as members are those recorded."""
    found = {}
    try:
        with tarfile.open(archive, "r|xz") as members:
            for member in members:
                wanted = files.get(member.name)
                if wanted is None or not member.isfile() or member.size != wanted.bytes:
                    return [f"{member.name}: not as the manifest says"]
                body = members.extractfile(member)
                assert body is not None
                found[member.name] = hashlib.file_digest(body, "sha256").hexdigest()  # type: ignore[arg-type]
    except (tarfile.TarError, lzma.LZMAError, EOFError):
        raise BadFile(f"{archive.name}: damaged") from None
    return [f"{n}: not as the manifest says" for n, w in files.items() if found.get(n) != w.sha256]


def _read_key(path: Path) -> bytes:
    try:
        if not path.is_file():
            raise NotFound(f"{path.name} is not there", hint="`python -m kit keygen --out FILE`")
        with path.open("rb") as file:
            return file.read(_KEY_BYTES)
    except OSError as error:
        raise BadFile(f"{path.name}: cannot be read: {error.strerror}") from None


def _private_key(path: Path) -> Ed25519PrivateKey:
    content = _read_key(path)
    if path.stat().st_mode & 0o077:
        raise BadFile(f"{path.name}: others can read this private key", hint="chmod 600 it")
    try:
        key = load_pem_private_key(content, None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise BadFile(f"{path.name}: no unencrypted private key in PEM") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise BadFile(f"{path.name}: not an ed25519 key")
    return key


def read_public_key(path: Path) -> SSlibKey:
    """Return a public key; raise `NotFound` or `BadFile`."""
    try:
        key = load_pem_public_key(_read_key(path))
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise BadFile(f"{path.name}: no public key in PEM") from None
    if not isinstance(key, Ed25519PublicKey):
        raise BadFile(f"{path.name}: not an ed25519 key")
    return SSlibKey.from_crypto(key)
