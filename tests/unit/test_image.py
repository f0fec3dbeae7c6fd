"""The image records, and what makes two images the same."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kit import image
from kit.errors import BadFile, UnknownName
from kit.image import ChunkReader, Identity, find_image, identity_of_stream, load_images

COMMIT = "b23bd73f540175f9e117eaee5029cd7d8df63964"


def write_yaml(folder: Path, text: str) -> Path:
    path = folder / "docker" / "images.yaml"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def one_record(fields: str) -> str:
    return f"images:\n  a-cpu: {{{fields}}}\n"


def test_the_first_landing_has_its_six_ids() -> None:
    records = load_images()
    first = {"v0.32.0-cpu", "v0.31.0-cpu", "v0.33.0-cu130", "v0.26.0-cu130"}
    assert first | {"b23bd73f5-cu130", "b23bd73f5-cu129"} <= set(records)
    assert records["b23bd73f5-cu129"].commit == COMMIT
    assert records["v0.32.0-cpu"].tag == "vllm-kit:v0.32.0-cpu"


def test_an_unknown_id_names_the_known_and_the_closest() -> None:
    with pytest.raises(UnknownName) as caught:
        find_image("v0.32.0-cp")
    assert "v0.32.0-cpu" in caught.value.message
    assert caught.value.hint == "did you mean `v0.32.0-cpu`?"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("images: [1, 2", "docker/images.yaml: line "),
        ("other: {}\n", "(top)"),
        ("images:\n  a: 3\n", "images.a"),
        (one_record("source: release, cuda: cpu, as_of: now"), "needs the key `release`"),
        (one_record("source: index, cuda: cu130, commit: b23bd73f5, as_of: now"), "40 hex"),
        (
            one_record("source: release, cuda: cu131, release: '1', as_of: now"),
            "images.a-cpu: cuda: ",
        ),
        (one_record("source: adopted, cuda: cu130, engine_id: 'vllm:latest'"), "a tag can move"),
        (
            one_record("source: release, cuda: cpu, release: '1', as_of: x, pyton: 3"),
            "images.a-cpu: pyton: ",
        ),
        (one_record("source: release, cuda: cpu, release: '1'"), "as_of"),
        (one_record("id: b, source: release, cuda: cpu, release: '1'"), "images.a-cpu.id"),
    ],
)
def test_a_malformed_file_is_named_with_the_place_inside(
    tmp_path: Path, text: str, said: str
) -> None:
    with pytest.raises(BadFile) as caught:
        load_images(write_yaml(tmp_path, text))
    assert caught.value.message.startswith("docker/images.yaml")
    assert said in caught.value.message


def test_an_adopted_image_brings_its_own_interpreter_and_user(tmp_path: Path) -> None:
    fields = (
        f"source: adopted, cuda: cu130, engine_id: 'sha256:{'a' * 64}', "
        "interpreter: /usr/bin/python3, entrypoint: [vllm], user: '0:0'"
    )
    record = load_images(write_yaml(tmp_path, one_record(fields)))["a-cpu"]
    assert (record.interpreter, record.entrypoint, record.user) == (
        "/usr/bin/python3", ("vllm",), "0:0",
    )  # fmt: skip
    assert not record.locked


def test_the_identity_depends_on_configuration_and_on_the_order_of_layers() -> None:
    one = Identity(config_digest="sha256:c", diff_ids=("sha256:a", "sha256:b"), size_bytes=1)
    same = Identity(config_digest="sha256:c", diff_ids=("sha256:a", "sha256:b"), size_bytes=9)
    swapped = Identity(config_digest="sha256:c", diff_ids=("sha256:b", "sha256:a"), size_bytes=1)
    other = Identity(config_digest="sha256:d", diff_ids=("sha256:a", "sha256:b"), size_bytes=1)
    assert one.digest == same.digest
    assert len({one.digest, swapped.digest, other.digest}) == 3
    assert one.digest == "sha256:" + hashlib.sha256(b"sha256:c\nsha256:a\nsha256:b").hexdigest()


def layer_bytes(content: bytes) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        member = tarfile.TarInfo("file")
        member.size = len(content)
        archive.addfile(member, io.BytesIO(content))
    return out.getvalue()


EXPORTED = "sha256:" + "e" * 64


def saved_image(layers: list[bytes], *, packed: bool, claim: str | None = None) -> bytes:
    diff_ids = [claim or "sha256:" + hashlib.sha256(layer).hexdigest() for layer in layers]
    config = json.dumps({"rootfs": {"diff_ids": diff_ids}}).encode()
    blobs = [gzip.compress(layer, mtime=0) if packed else layer for layer in layers]
    names = [f"blobs/sha256/{hashlib.sha256(blob).hexdigest()}" for blob in blobs]
    config_name = f"blobs/sha256/{hashlib.sha256(config).hexdigest()}"
    manifest = json.dumps([{"Config": config_name, "Layers": names}]).encode()
    index = json.dumps({"manifests": [{"digest": EXPORTED}]}).encode()
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, body in [
            *zip(names, blobs, strict=True), (config_name, config), ("manifest.json", manifest),
            ("index.json", index),
        ]:  # fmt: skip
            member = tarfile.TarInfo(name)
            member.size = len(body)
            archive.addfile(member, io.BytesIO(body))
    return out.getvalue()


def in_chunks(content: bytes, size: int) -> Iterator[bytes]:
    for start in range(0, len(content), size):
        yield content[start : start + size]


@pytest.mark.parametrize("size", [1, 511, 512, 4096, 1 << 20])
@pytest.mark.parametrize("large", [False, True])
def test_the_identity_is_the_same_from_either_image_store(
    size: int, large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if large:  # the streaming path for members that are not kept in memory
        monkeypatch.setattr(image, "_SMALL_BLOB_BYTES", 1024)
    layers = [layer_bytes(b"one" * 999), layer_bytes(b"two" * 999)]
    plain = identity_of_stream(in_chunks(saved_image(layers, packed=False), size))
    packed = identity_of_stream(in_chunks(saved_image(layers, packed=True), size))
    assert plain == packed
    assert plain.size_bytes == sum(map(len, layers))
    assert plain.manifest_digest == EXPORTED


def test_a_layer_that_is_not_what_the_configuration_says_is_refused() -> None:
    content = saved_image([layer_bytes(b"x")], packed=False, claim="sha256:" + "0" * 64)
    with pytest.raises(BadFile, match="hashes to"):
        identity_of_stream([content])


def test_the_chunk_reader_gives_every_byte_once() -> None:
    reader = ChunkReader([b"ab", b"", b"cdefg"])
    # an empty chunk ends the stream, as a socket's does
    assert reader.read(2) + reader.read(10) == b"ab"
    reader = ChunkReader([b"ab", b"cdefg"])
    assert [reader.read(3), reader.read(3), reader.read(3)] == [b"abc", b"def", b"g"]
