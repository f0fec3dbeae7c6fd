"""Models made in a container of the image: the locked bytes, whoever makes them."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import docker
import pytest

from kit import model
from kit.build import ensure_image
from kit.errors import ModelDamaged
from kit.image import KEPT_IDENTITIES, find_image
from kit.model import ensure_model, find_model, make_model, read_model_lock
from kit.paths import cache_dir

SHAPE = find_model("qwen2.5-0.5b")


def quiet(line: str) -> None:
    del line


@pytest.fixture
def own_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with the same wheels and remembered identities, and no model yet."""
    own = tmp_path / "cache"
    ensure_image(find_image("v0.32.0-cpu"), quiet)
    for folder in ("wheels", KEPT_IDENTITIES):
        shutil.copytree(cache_dir() / folder, own / folder, copy_function=os.link)
    monkeypatch.setenv("KIT_CACHE", str(own))
    return own


def test_a_model_is_made_once_and_its_files_are_the_callers(
    own_models: Path, client: docker.DockerClient
) -> None:
    image = ensure_image(find_image("v0.32.0-cpu"), quiet)
    said: list[str] = []
    found = ensure_model(SHAPE, image, said.append)
    assert found.files == read_model_lock(SHAPE).files
    assert found.path == own_models / "models" / SHAPE.id
    for path in found.path.iterdir():
        assert path.stat().st_uid == os.geteuid()
        assert path.stat().st_mode & 0o777 == 0o644
    assert any("making its files" in line for line in said)
    again: list[str] = []
    assert ensure_model(SHAPE, image, again.append) == found
    assert again == []
    left = client.containers.list(all=True, filters={"label": f"kit.model={SHAPE.id}"})
    assert left == []


def test_a_flipped_byte_is_found_at_the_next_start(own_models: Path) -> None:
    image = ensure_image(find_image("v0.32.0-cpu"), quiet)
    path = ensure_model(SHAPE, image, quiet).path / "tokenizer.json"
    body = bytearray(path.read_bytes())
    body[len(body) // 2] ^= 1
    path.write_bytes(body)
    with pytest.raises(ModelDamaged, match=r"tokenizer\.json") as caught:
        ensure_model(SHAPE, image, quiet)
    assert str(path.parent) in caught.value.hint
    shutil.rmtree(path.parent)
    assert ensure_model(SHAPE, image, quiet).files == read_model_lock(SHAPE).files


@pytest.mark.timeout(600)
def test_a_user_whom_the_image_does_not_know_makes_the_same_bytes(tmp_path: Path) -> None:
    """Adopted images know no user 10001; torch asks for the name."""
    image = ensure_image(find_image("v0.32.0-cpu"), quiet)
    stranger = image.record.model_copy(update={"user": "23456:0"})
    record = find_model(model.DEFAULT)
    made = make_model(record, replace(image, record=stranger), tmp_path, quiet)
    model.check_files(record, made, read_model_lock(record))


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("image_id", ["v0.32.0-cpu", "v0.31.0-cpu"])
@pytest.mark.parametrize("model_id", [model.DEFAULT, SHAPE.id])
def test_either_image_makes_the_same_bytes(image_id: str, model_id: str, tmp_path: Path) -> None:
    record = find_model(model_id)
    made = make_model(record, ensure_image(find_image(image_id), quiet), tmp_path, quiet)
    model.check_files(record, made, read_model_lock(record))
    assert sorted(p.name for p in made.iterdir()) == sorted(read_model_lock(record).files)
