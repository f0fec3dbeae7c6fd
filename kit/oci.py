"""Images as an OCI image layout whose bytes depend on the images alone.

`docker save` gives a configuration and layers; how they are packed and indexed differs between
engines and their stores. Here layers lie uncompressed, under the digests that the configuration
names, and manifests and index are written anew in canonical JSON.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import tarfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import rfc8785

from kit.archive import PIECE, archive_chunks, file_chunks
from kit.errors import BadFile
from kit.image import Identity, as_file

LAYOUT = b'{"imageLayoutVersion":"1.0.0"}'
REF_NAME = "org.opencontainers.image.ref.name"
BLOBS = "blobs/sha256"
_INDEX = "application/vnd.oci.image.index.v1+json"
_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
_CONFIG = "application/vnd.oci.image.config.v1+json"
_LAYER = "application/vnd.oci.image.layer.v1.tar"
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_JSON_BYTES = 8 << 20


@dataclass(frozen=True)
class OciImage:
    """An image of a layout: its manifest's digest, and what makes it the same anywhere."""

    manifest_digest: str
    identity: Identity


def write_layout(folder: Path, images: Mapping[str, Iterable[bytes]]) -> dict[str, OciImage]:
    """Write images, each the bytes of `docker save`, as one layout; return them by id.

    Raises `BadFile` when a saved image disagrees with itself.
    """
    blobs = folder / BLOBS
    blobs.mkdir(parents=True)
    found: dict[str, OciImage] = {}
    kept: set[str] = set()
    for name, chunks in sorted(images.items()):
        config, layers = _unpack(chunks, blobs)
        manifest = _manifest(blobs, config, layers)
        digest = "sha256:" + _store([manifest], blobs)
        kept |= {digest, config, *layers}
        found[name] = OciImage(digest, _identity(blobs, config, layers))
    for path in blobs.iterdir():
        if f"sha256:{path.name}" not in kept:
            path.unlink()
    (folder / "index.json").write_bytes(_index(blobs, found))
    (folder / "oci-layout").write_bytes(LAYOUT)
    return found


def _unpack(chunks: Iterable[bytes], blobs: Path) -> tuple[str, list[str]]:
    """Store every member of a saved image; return the digests of configuration and layers."""
    digests: dict[str, str] = {}
    links: dict[str, str] = {}
    with tarfile.open(fileobj=as_file(chunks), mode="r|") as archive:
        for member in archive:
            if member.issym() or member.islnk():
                home = os.path.dirname(member.name) if member.issym() else ""
                links[member.name] = os.path.normpath(os.path.join(home, member.linkname))
            body = archive.extractfile(member) if member.isfile() else None
            if body is not None:
                digests[member.name] = _store(_plain(body), blobs)
    digests |= {name: digests[target] for name, target in links.items() if target in digests}
    try:
        entry = json.loads((blobs / digests["manifest.json"]).read_bytes())[0]
        config = digests[entry["Config"]]
        layers = [digests[name] for name in entry["Layers"]]
        wanted = json.loads((blobs / config).read_bytes())["rootfs"]["diff_ids"]
    except (KeyError, IndexError, TypeError, ValueError):
        raise BadFile("the engine's saved image has no usable manifest.json") from None
    found = [f"sha256:{layer}" for layer in layers]
    if found != wanted:
        raise BadFile("a layer of the saved image is not the one its configuration names")
    return f"sha256:{config}", found


def _plain(stream: IO[bytes]) -> Iterator[bytes]:
    """Yield a blob's bytes, uncompressed: image stores differ in which they keep."""
    chunk = stream.read(PIECE)
    inflate: Any = zlib.decompressobj(31) if chunk[:2] == b"\x1f\x8b" else None
    while chunk:
        yield inflate.decompress(chunk) if inflate else chunk
        chunk = stream.read(PIECE)


def _store(chunks: Iterable[bytes], blobs: Path) -> str:
    """Write a blob under its sha256 and return that."""
    sha256 = hashlib.sha256()
    part = blobs / "part"
    with part.open("wb") as out:
        for chunk in chunks:
            sha256.update(chunk)
            out.write(chunk)
    part.rename(blobs / sha256.hexdigest())
    return sha256.hexdigest()


def _blob(blobs: Path, digest: str) -> Path:
    return blobs / digest.removeprefix("sha256:")


def _descriptor(blobs: Path, kind: str, digest: str) -> dict[str, Any]:
    return {"mediaType": kind, "digest": digest, "size": _blob(blobs, digest).stat().st_size}


def _manifest(blobs: Path, config: str, layers: Iterable[str]) -> bytes:
    return rfc8785.dumps(
        {
            "schemaVersion": 2,
            "mediaType": _MANIFEST,
            "config": _descriptor(blobs, _CONFIG, config),
            "layers": [_descriptor(blobs, _LAYER, layer) for layer in layers],
        }
    )


def _index(blobs: Path, images: Mapping[str, OciImage]) -> bytes:
    manifests = [
        {**_descriptor(blobs, _MANIFEST, image.manifest_digest), "annotations": {REF_NAME: name}}
        for name, image in sorted(images.items())
    ]
    return rfc8785.dumps({"schemaVersion": 2, "mediaType": _INDEX, "manifests": manifests})


def _identity(blobs: Path, config: str, layers: Iterable[str]) -> Identity:
    sizes = [_blob(blobs, layer).stat().st_size for layer in layers]
    return Identity(config_digest=config, diff_ids=tuple(layers), size_bytes=sum(sizes))


def read_layout(folder: Path) -> dict[str, OciImage]:
    """Return the images of a layout that `write_layout` made; raise `BadFile` for any other.

    Index and manifests must be, byte for byte, what this module writes for the blobs they name.
    Whether a blob has the digest it is named by is for the caller to check.
    """
    blobs = folder / BLOBS
    found: dict[str, OciImage] = {}
    entries = _json(folder / "index.json").get("manifests")
    for entry in entries if isinstance(entries, list) else ():
        with _shape("index.json"):
            digest, name = _checked(entry["digest"]), str(entry["annotations"][REF_NAME])
        raw = _json(_blob(blobs, digest))
        with _shape(digest):
            config = _checked(raw["config"]["digest"])
            layers = [_checked(layer["digest"]) for layer in raw["layers"]]
            same = _manifest(blobs, config, layers) == _blob(blobs, digest).read_bytes()
        with _shape(config):
            wanted = _json(_blob(blobs, config))["rootfs"]["diff_ids"]
        if not same or wanted != layers:
            raise BadFile(f"image/{BLOBS}/{digest[7:]}: not the manifest of its blobs")
        found[name] = OciImage(digest, _identity(blobs, config, layers))
    if not found or _index(blobs, found) != (folder / "index.json").read_bytes():
        raise BadFile("image/index.json: not the index of its images")
    if not (folder / "oci-layout").is_file() or (folder / "oci-layout").read_bytes() != LAYOUT:
        raise BadFile("image/oci-layout: not version 1.0.0")
    return found


def blobs_of(folder: Path, image: OciImage) -> set[str]:
    """Return the names, in the layout, of all blobs that an image needs."""
    identity = image.identity
    digests = (image.manifest_digest, identity.config_digest, *identity.diff_ids)
    return {f"{BLOBS}/{digest.removeprefix('sha256:')}" for digest in digests}


@contextlib.contextmanager
def _shape(what: str) -> Iterator[None]:
    try:
        yield
    except (KeyError, TypeError, AttributeError, ValueError, OSError):
        raise BadFile(f"image: {what} does not say what it must") from None


def _checked(digest: Any) -> str:
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise ValueError("no digest")
    return digest


def _json(path: Path) -> dict[str, Any]:
    shown = f"image/{path.name}"
    try:
        if path.stat().st_size > _JSON_BYTES:
            raise BadFile(f"{shown}: larger than {_JSON_BYTES} bytes")
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        raise BadFile(f"{shown}: missing, or not JSON") from None
    if not isinstance(value, dict):
        raise BadFile(f"{shown}: not an object")
    return value


def docker_archive(folder: Path, image: OciImage) -> Iterator[bytes]:
    """Yield what `docker load` reads, on any engine and image store: the image without a name."""
    identity = image.identity
    names = [f"{BLOBS}/{d[7:]}" for d in (identity.config_digest, *identity.diff_ids)]
    entry = [{"Config": names[0], "RepoTags": None, "Layers": names[1:]}]
    content = rfc8785.dumps(entry)
    files = [(n, (folder / n).stat().st_size, file_chunks(folder / n)) for n in sorted({*names})]
    yield from archive_chunks([*files, ("manifest.json", len(content), [content])])
