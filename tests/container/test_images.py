"""Images on the real engine: the locked bits, and a culprit's name for every changed input."""

from __future__ import annotations

import io
import os
import shutil
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path

import docker
import pytest

from kit import build, debian, engine, verify_image, wheels
from kit.build import ensure_image
from kit.errors import HashMismatch, IdentityMismatch, ImageMissing
from kit.image import ImageRecord, engine_image_id, find_image, read_identity
from kit.lock_file import lock_sha256, read_identity_lock, read_lock
from kit.paths import DOCKER, cache_dir

RECORD = find_image("v0.32.0-cpu")
_IMPORTS = """
import accelerate, gguf, httptools, httpx, nixl, nixl._api, pynvml, uvloop, vllm
import importlib.metadata, os, pip
print(os.getuid(), importlib.metadata.version("vllm"), os.path.exists("/opt/kit/venv/bin/uv"))
"""


def quiet(line: str) -> None:
    del line


def test_an_image_that_is_there_costs_less_than_a_second() -> None:
    ensure_image(RECORD, quiet)
    start = time.monotonic()
    found = ensure_image(RECORD, quiet)
    assert time.monotonic() - start < 1.0
    assert (found.how, found.state) == ("present", "declared")  # its wheel carries no commit


def test_the_image_on_this_engine_is_the_locked_one(client: docker.DockerClient) -> None:
    found, locked = ensure_image(RECORD, quiet), read_identity_lock(RECORD)
    assert locked is not None
    assert found.identity.digest == locked.digest
    labels = client.images.get(RECORD.tag).labels
    assert labels["kit.lock.sha256"] == lock_sha256(read_lock(RECORD)) == found.lock_sha256


def test_the_identity_is_read_from_the_image_itself_not_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remembered = read_identity(RECORD.tag)
    monkeypatch.setenv("KIT_CACHE", str(tmp_path))
    assert read_identity(RECORD.tag) == remembered


def test_all_that_later_runs_need_can_be_imported_as_an_ordinary_user() -> None:
    done = engine.cli(
        "run", "--rm", "--network=none", "--read-only", "--cap-drop=ALL", "--tmpfs=/tmp",
        "--security-opt=no-new-privileges", "--entrypoint", RECORD.interpreter, RECORD.tag,
        "-c", _IMPORTS, timeout_s=120,
    )  # fmt: skip
    assert done.ok, done.tail
    assert done.stdout.split()[-3:] == ["10001", "0.32.0+cpu", "False"]


@pytest.fixture
def tiny(client: docker.DockerClient) -> Iterator[list[str]]:
    """Two images of one file each that differ in one byte, removed afterwards."""
    made = []
    for content in (b"one", b"two"):
        body = io.BytesIO()
        with tarfile.open(fileobj=body, mode="w") as archive:
            for name in ("etc/same", "etc/changed"):
                member = tarfile.TarInfo(name)
                data = content if name == "etc/changed" else b"same"
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
        done = engine.cli("import", "-", stdin=body.getvalue())
        made.append(done.stdout.strip())
    yield made
    for image_id in made:
        client.images.remove(image_id)


def test_the_file_that_differs_between_two_images_is_named(tiny: list[str]) -> None:
    lines = verify_image.differing_files(tiny[0], tiny[1], ("a", "b"))
    assert lines == ["layer 1: etc/changed: content"]


def test_an_adopted_image_is_taken_by_id_and_only_declared(tiny: list[str]) -> None:
    record = ImageRecord(id="ours", source="adopted", cuda="cu130", engine_id=tiny[0])
    found = ensure_image(record, quiet)
    assert (found.how, found.state, found.lock_sha256) == ("adopted", "declared", None)
    assert found.image_id == tiny[0]
    absent = record.model_copy(update={"engine_id": "sha256:" + "0" * 64})
    with pytest.raises(ImageMissing, match="not on this engine"):
        ensure_image(absent, quiet)


@pytest.fixture
def linked_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own with the same downloads, to be damaged without harm."""
    lock = read_lock(RECORD)
    wheels.fetch_wheels(lock.wheels, quiet)
    debian.fetch_debs(lock.base, quiet)
    own = tmp_path / "cache"
    for folder in ("wheels", "debs"):
        shutil.copytree(cache_dir() / folder, own / folder, copy_function=os.link)
    monkeypatch.setenv("KIT_CACHE", str(own))
    return own


def flip_one_byte(path: Path) -> None:
    body = bytearray(path.read_bytes())
    body[len(body) // 2] ^= 1
    path.unlink()  # the other name of the same bytes stays whole
    path.write_bytes(body)


def test_one_changed_byte_of_a_wheel_fails_with_its_name(linked_cache: Path) -> None:
    wheel = read_lock(RECORD).find_wheel("httptools")
    assert wheel is not None
    flip_one_byte(wheels.wheel_path(wheel))
    with pytest.raises(HashMismatch, match=wheel.file.partition("+")[0]):
        verify_image.verify(RECORD, quiet)


def test_one_changed_byte_of_a_base_package_fails_with_its_name(linked_cache: Path) -> None:
    package = next(p for p in read_lock(RECORD).base if p.name == "tini")
    flip_one_byte(debian.deb_path(package))
    with pytest.raises(HashMismatch, match="the Debian package tini_"):
        verify_image.verify(RECORD, quiet)
    with pytest.raises(HashMismatch, match="the Debian package tini_"):
        debian.make_base(read_lock(RECORD).base, 1, linked_cache / "base.tar")


@pytest.mark.parametrize("name", build.RECIPE)
def test_one_changed_line_of_the_recipe_fails_with_its_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = tmp_path / "docker"
    shutil.copytree(DOCKER, changed)
    (changed / name).write_text((changed / name).read_text() + "# one more line\n")
    monkeypatch.setattr(build, "DOCKER", changed)
    with pytest.raises(IdentityMismatch, match=rf"docker/{name} is not the file"):
        verify_image.verify(RECORD, quiet)


def test_the_base_is_the_same_bytes_from_another_place_and_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, locked = read_lock(RECORD), read_identity_lock(RECORD)
    assert locked is not None
    elsewhere = tmp_path / "else where"
    elsewhere.mkdir()
    elsewhere.chmod(0o755)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    before = os.umask(0o077)
    try:
        debian.make_base(lock.base, lock.source_date_epoch, elsewhere / "base.tar")
    finally:
        os.umask(before)
    assert debian.file_sha256(elsewhere / "base.tar") == locked.base_sha256


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["v0.32.0-cpu", "v0.31.0-cpu"])
def test_two_builds_from_nothing_are_the_locked_image(name: str) -> None:
    result = verify_image.verify(find_image(name), quiet)
    assert result["identity_was_locked"]
    assert result["differing_files"] == 0
    assert engine_image_id(f"vllm-kit-verify:{name}-1") is None


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_a_changed_line_that_changes_the_image_names_the_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recipe's own hash is taken out of the way, so that the bits themselves must tell."""
    ensure_image(RECORD, quiet)
    changed = tmp_path / "docker"
    shutil.copytree(DOCKER, changed)
    recipe = (changed / "Dockerfile").read_text()
    (changed / "Dockerfile").write_text(recipe.replace("HF_HUB_OFFLINE=1", "HF_HUB_OFFLINE=0"))
    monkeypatch.setattr(build, "DOCKER", changed)
    monkeypatch.setattr(build, "recipe_changes", lambda locked: [])
    with pytest.raises(IdentityMismatch, match="its configuration is not"):
        verify_image.verify(RECORD, quiet)
    assert ensure_image(RECORD, quiet).how == "present"
