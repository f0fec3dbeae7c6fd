"""Images the kit can measure: the records of `docker/images.yaml`, and what an image's bits are."""

from __future__ import annotations

import difflib
import hashlib
import json
import re
import tarfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any, Literal

import docker
import requests
from pydantic import Field, field_validator, model_validator

from kit import engine
from kit.errors import BadFile, EngineUnreachable, ImageMissing, UnknownName, UsageError
from kit.paths import DOCKER, LOCKS, cache_dir
from kit.value import Value, load_yaml, parse_value

IMAGES_FILE = DOCKER / "images.yaml"
LOCAL_FILE = DOCKER / "images.local.yaml"  # by `kit adopt`, git-ignored: this machine's own images
REPOSITORY = "vllm-kit"
KEPT_IDENTITIES = "identity-2"  # below the cache; the number follows the shape of Identity
_ID = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
_SMALL_BLOB_BYTES = 4 << 20

Cuda = Literal["cpu", "cu129", "cu130"]
SourceKind = Literal["index", "release", "file", "adopted"]


class ImageRecord(Value):
    """One cell of the matrix: which vLLM, which CUDA variant, from where; immutable by id.

    `package` is the distribution that the image is about, at the version `release`: another one
    than vLLM makes an image of tools, which no arm can run.
    """

    id: str
    source: SourceKind
    cuda: Cuda
    commit: str | None = None
    release: str | None = None
    package: str = Field(default="vllm", pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$")
    python: str = "3.11"
    revision: int = Field(default=1, ge=1)
    as_of: str | None = None
    wheel: str | None = None
    engine_id: str | None = None
    requirements: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    share_with: str | None = None
    interpreter: str = "/opt/kit/venv/bin/python"
    entrypoint: tuple[str, ...] = ("/usr/bin/tini", "--", "vllm")
    user: str = "10001:0"

    @field_validator("id")
    @classmethod
    def _check_id(cls, value: str) -> str:
        if not _ID.fullmatch(value):
            raise ValueError("must be lower-case letters, digits, dots and dashes")
        return value

    @field_validator("commit")
    @classmethod
    def _check_commit(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"[0-9a-f]{40}", value):
            raise ValueError("must be 40 hex digits: shorter names can come to mean another commit")
        return value

    @field_validator("engine_id")
    @classmethod
    def _check_engine_id(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"sha256:[0-9a-f]{64}", value):
            raise ValueError("must be the engine's id, sha256: and 64 hex digits; a tag can move")
        return value

    @model_validator(mode="after")
    def _check_source(self) -> ImageRecord:
        needed = {
            "index": "commit",
            "release": "release",
            "file": "wheel",
            "adopted": "engine_id",
        }[self.source]
        if getattr(self, needed) is None:
            raise ValueError(f"source `{self.source}` needs the key `{needed}`")
        if self.source in ("index", "release", "file") and self.as_of is None:
            raise ValueError("needs `as_of`, the UTC time up to which uploads are considered")
        if not self.serves and (self.source, self.cuda) != ("release", "cpu"):
            raise ValueError(f"{self.package} is taken from a release, for `cpu`")
        return self

    @property
    def serves(self) -> bool:
        """Whether it is an image of vLLM, which an arm can run."""
        return self.package == "vllm"

    @property
    def tag(self) -> str:
        return f"{REPOSITORY}:{self.id}"

    @property
    def lock_dir(self) -> Path:
        return LOCKS / self.id

    @property
    def locked(self) -> bool:
        return (self.lock_dir / "inputs.json").is_file()


class Identity(Value):
    """What makes two images the same: their OCI configuration and their layers, in order.

    `manifest_digest` is that of the OCI export, which also depends on the engine that wrote it;
    null where the export held none or was not read.
    """

    config_digest: str
    diff_ids: tuple[str, ...]
    size_bytes: int
    manifest_digest: str | None = None

    @property
    def digest(self) -> str:
        """sha256 over the configuration's digest and the ordered diff ids, one a line."""
        text = "\n".join([self.config_digest, *self.diff_ids])
        return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


class LayerBlob(Value):
    """One blob of a saved image: its digest, and size and digest once uncompressed."""

    digest: str
    diff_id: str
    size_bytes: int


def load_images(path: Path | None = None) -> dict[str, ImageRecord]:
    """Return the records of `docker/images.yaml` by id; raise `BadFile` with the place in it.

    Without a path, this machine's own images (`docker/images.local.yaml`) come after them.
    """
    if path is None:
        own = load_images(LOCAL_FILE) if LOCAL_FILE.exists() else {}
        shared = load_images(IMAGES_FILE)
        if twice := sorted(own.keys() & shared.keys()):
            raise BadFile(
                f"docker/{LOCAL_FILE.name}: images.{twice[0]}: docker/images.yaml has this id too",
                hint="adopt the image again under another id",
            )
        return shared | own
    shown = f"{path.parent.name}/{path.name}"
    raw = load_yaml(path, shown=shown)
    table = raw.get("images") if isinstance(raw, dict) else None
    if not isinstance(table, dict) or set(raw) != {"images"}:
        raise BadFile(f"{shown}: (top): must hold one key, `images`, with a record for each id")
    records = {}
    for name, fields in table.items():
        where = f"{shown}: images.{name}"
        if not isinstance(fields, dict):
            raise BadFile(f"{where}: must be a record of keys and values")
        if "id" in fields:
            raise BadFile(f"{where}.id: the id is the record's own key")
        records[str(name)] = parse_value(ImageRecord, {"id": str(name), **fields}, where)
    return records


def find_image(name: str) -> ImageRecord:
    """Return the record with this id; raise `UnknownName` with the known and the closest ones."""
    records = load_images()
    if name in records:
        return records[name]
    near = difflib.get_close_matches(name, records, n=1, cutoff=0.4)
    raise UnknownName(
        f"no image `{name}`; known: {', '.join(records)}",
        hint=f"did you mean `{near[0]}`?"
        if near
        else "an image of your own is described in docker/images.yaml",
    )


def find_server(name: str) -> ImageRecord:
    """Return the record with this id; raise `UsageError` where it is no image of vLLM."""
    record = find_image(name)
    if not record.serves:
        raise UsageError(
            f"{name} is an image of {record.package}, which serves no model",
            hint="give an image of vLLM; `nox -s images` shows them",
        )
    return record


def engine_image_id(reference: str) -> str | None:
    """Return the engine's own id of a tag or id, or None where the engine does not have it."""
    client = engine.connect()
    try:
        return str(client.images.get(reference).id)
    except docker.errors.ImageNotFound:
        return None
    finally:
        client.close()


def read_identity(reference: str) -> Identity:
    """Return an image's identity, computed from its `docker save` stream and then remembered.

    Every layer is hashed while it passes by; nothing is written but the result, which is kept by
    the engine's content-addressed id. Raises `ImageMissing`.
    """
    image_id = engine_image_id(reference)
    if image_id is None:
        raise ImageMissing(
            f"the image {reference} is not on this engine", hint="`nox -s build -- <id>` makes it"
        )
    kept = cache_dir() / KEPT_IDENTITIES / f"{image_id.removeprefix('sha256:')}.json"
    if kept.is_file():
        try:
            return Identity.model_validate_json(kept.read_bytes())
        except ValueError:
            kept.unlink()
    identity = identity_of_stream(save_stream(image_id))
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(identity.model_dump_json(indent=2) + "\n", encoding="utf-8")
    return identity


def told_identity(image_id: str) -> Identity | None:
    """Return an image's identity as the engine tells it, or None where its store cannot.

    No byte is read: fit for an image that nobody can verify anyway. The graph-driver store names
    an image by the digest of its configuration, the containerd store by that of a manifest.
    """
    client = engine.connect()
    try:
        status = dict(client.info().get("DriverStatus") or [])
        attrs = client.images.get(image_id).attrs
    finally:
        client.close()
    if "driver-type" in status:
        return None
    return Identity(
        config_digest=str(attrs["Id"]),
        diff_ids=tuple(attrs["RootFS"]["Layers"]),
        size_bytes=int(attrs["Size"]),
    )


def save_stream(image_id: str) -> Iterator[bytes]:
    """Yield the bytes of `docker save`; the engine makes them as they are read."""
    client = engine.connect(timeout_s=600)
    try:
        yield from client.images.get(image_id).save(chunk_size=1 << 20)
    except requests.RequestException as error:
        raise EngineUnreachable(
            "the engine stopped answering while an image was read", detail=str(error)
        ) from None
    finally:
        client.close()


def identity_of_stream(chunks: Iterable[bytes]) -> Identity:
    """Compute an identity from the bytes of a saved image; raise `BadFile` when they disagree."""
    blobs, small = read_blobs(chunks)
    manifest = json.loads(small["manifest.json"])[0]
    config = small[manifest["Config"]]
    diff_ids = tuple(json.loads(config)["rootfs"]["diff_ids"])
    layers = [blobs[name] for name in manifest["Layers"]]
    for wanted, layer in zip(diff_ids, layers, strict=True):
        if wanted != layer.diff_id:
            raise BadFile(f"a layer of the image hashes to {layer.diff_id}, not {wanted}")
    return Identity(
        config_digest="sha256:" + hashlib.sha256(config).hexdigest(),
        diff_ids=diff_ids,
        size_bytes=sum(layer.size_bytes for layer in layers),
        manifest_digest=_manifest_digest(small.get("index.json")),
    )


def _manifest_digest(index: bytes | None) -> str | None:
    """Return the digest of the one image that an OCI layout's index names."""
    listed = json.loads(index)["manifests"] if index else []
    return str(listed[0]["digest"]) if len(listed) == 1 else None


def read_blobs(chunks: Iterable[bytes]) -> tuple[dict[str, LayerBlob], dict[str, bytes]]:
    """Hash every member of a saved image; return the hashes, and the bytes of the small ones."""
    blobs: dict[str, LayerBlob] = {}
    small: dict[str, bytes] = {}
    links: dict[str, str] = {}
    with tarfile.open(fileobj=ChunkReader(chunks), mode="r|") as archive:  # type: ignore[call-overload]
        for member in archive:
            if member.issym() or member.islnk():
                links[member.name] = str(Path(member.name).parent / member.linkname)
            body = archive.extractfile(member) if member.isfile() else None
            if body is None:
                continue
            if member.size <= _SMALL_BLOB_BYTES:
                content = body.read()
                small[member.name] = content
                blobs[member.name] = hash_layer(iter([content]))
            else:
                blobs[member.name] = hash_layer(_chunks_of(body))
    for name, target in links.items():
        found = blobs.get(target) or blobs.get(str(Path(target)))
        if found is not None:
            blobs[name] = found
    return blobs, small


def _chunks_of(stream: IO[bytes]) -> Iterator[bytes]:
    while chunk := stream.read(1 << 20):
        yield chunk


def hash_layer(chunks: Iterator[bytes]) -> LayerBlob:
    """Hash a layer as stored and as uncompressed (image stores differ in which they keep)."""
    raw, plain = hashlib.sha256(), hashlib.sha256()
    size = 0
    inflate: Any = None
    for number, chunk in enumerate(chunks):
        if number == 0 and chunk[:2] == b"\x1f\x8b":
            inflate = zlib.decompressobj(31)
        raw.update(chunk)
        if inflate is not None:
            chunk = inflate.decompress(chunk)
            plain.update(chunk)
        size += len(chunk)
    diff_id = plain if inflate is not None else raw
    return LayerBlob(
        digest="sha256:" + raw.hexdigest(), diff_id="sha256:" + diff_id.hexdigest(), size_bytes=size
    )


class ChunkReader:
    """Lets `tarfile` read an iterator of chunks as a file, holding no more than it asks for."""

    def __init__(self, chunks: Iterable[bytes]) -> None:
        self._chunks = iter(chunks)
        self._rest = b""

    def read(self, size: int) -> bytes:
        parts, have = [self._rest], len(self._rest)
        while have < size:
            chunk = next(self._chunks, b"")
            if not chunk:
                break
            parts.append(chunk)
            have += len(chunk)
        data = b"".join(parts)
        self._rest = data[size:]
        return data[:size]


def as_file(chunks: Iterable[bytes]) -> IO[bytes]:
    """Return the chunks as a readable object for `tarfile.open(mode="r|")`."""
    return ChunkReader(chunks)  # type: ignore[return-value]
