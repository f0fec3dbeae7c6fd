"""An image as OCI layout: the same bytes from any image store, and back into any engine."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from small_run import saved_image

from kit import oci
from kit.errors import BadFile
from kit.image import identity_of_stream


def tree(folder: Path) -> dict[str, bytes]:
    return {
        p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()
    }


@pytest.fixture
def layout(tmp_path: Path) -> Path:
    oci.write_layout(tmp_path / "image", {"a": [saved_image()]})
    return tmp_path / "image"


def test_the_layout_does_not_depend_on_how_the_engine_keeps_its_layers(
    layout: Path, tmp_path: Path
) -> None:
    oci.write_layout(tmp_path / "other", {"a": [saved_image(packed=True)]})
    assert tree(tmp_path / "other") == tree(layout)


def test_every_blob_is_named_by_its_bytes_and_none_is_idle(layout: Path) -> None:
    found = tree(layout)
    blobs = {n: c for n, c in found.items() if n.startswith(oci.BLOBS)}
    assert {n: f"{oci.BLOBS}/{hashlib.sha256(c).hexdigest()}" for n, c in blobs.items()} == {
        n: n for n in blobs
    }
    image = oci.read_layout(layout)["a"]
    assert oci.blobs_of(layout, image) == set(blobs)
    assert len(blobs) == 4


def test_the_identity_survives_the_way_through_the_layout(layout: Path) -> None:
    image = oci.read_layout(layout)["a"]
    assert image.identity == identity_of_stream([saved_image()])
    assert identity_of_stream(oci.docker_archive(layout, image)) == image.identity


def test_two_images_share_what_they_have_in_common(tmp_path: Path) -> None:
    both = {"a": [saved_image()], "b": [saved_image(note="b")]}
    oci.write_layout(tmp_path / "image", both)
    found = oci.read_layout(tmp_path / "image")
    assert found["a"].identity.diff_ids == found["b"].identity.diff_ids
    assert found["a"].identity.digest != found["b"].identity.digest
    assert len(list((tmp_path / "image" / oci.BLOBS).iterdir())) == 6


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", '{"manifests": [{}]}', '{"manifests": 3}', "[" * 100_000,
     '{"manifests": [{"digest": "sha256:../../x", "annotations": {}}]}'],
)  # fmt: skip
def test_another_index_is_refused(layout: Path, content: str) -> None:
    (layout / "index.json").write_text(content, "utf-8")
    with pytest.raises(BadFile, match="image"):
        oci.read_layout(layout)


def test_a_manifest_that_was_written_otherwise_is_refused(layout: Path) -> None:
    image = oci.read_layout(layout)["a"]
    path = layout / oci.BLOBS / image.manifest_digest[7:]
    path.write_bytes(path.read_bytes() + b"\n")
    with pytest.raises(BadFile, match="not the manifest"):
        oci.read_layout(layout)
