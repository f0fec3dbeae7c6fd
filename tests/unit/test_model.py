"""Model records, and the check of a model's files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kit import model
from kit.debian import file_sha256
from kit.errors import BadFile, ModelDamaged, NotLocked, UnknownName
from kit.model import ModelLock, ModelRecord, check_files, find_model, load_models, read_model_lock

RECORD = find_model(model.DEFAULT)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes(name.encode() * 1000)
    return tmp_path


def lock_of(folder: Path) -> ModelLock:
    return ModelLock(written_by="a test", files={p.name: file_sha256(p) for p in folder.iterdir()})


def test_whole_files_are_found_whole(folder: Path) -> None:
    lock = lock_of(folder)
    found = check_files(RECORD, folder, lock)
    assert found.files == lock.files
    assert found.bytes == sum(p.stat().st_size for p in folder.iterdir())
    assert found.weights == "real"


def test_one_flipped_bit_is_found_and_its_file_named(folder: Path) -> None:
    lock = lock_of(folder)
    path = folder / "model.safetensors"
    before = path.stat()
    body = bytearray(path.read_bytes())
    body[len(body) // 2] ^= 1
    path.write_bytes(body)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # size and time stay as they were
    with pytest.raises(ModelDamaged, match=r"model\.safetensors has sha256") as caught:
        check_files(RECORD, folder, lock)
    assert str(folder) in caught.value.hint


def test_a_missing_file_is_named(folder: Path) -> None:
    lock = lock_of(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ModelDamaged, match=r"config\.json is missing"):
        check_files(RECORD, folder, lock)


def test_a_file_that_does_not_belong_is_named(folder: Path) -> None:
    lock = lock_of(folder)
    (folder / "extra.safetensors").touch()
    with pytest.raises(ModelDamaged, match=r"extra\.safetensors is not a file of this model"):
        check_files(RECORD, folder, lock)


def test_an_unknown_model_names_the_known_and_the_closest() -> None:
    with pytest.raises(UnknownName) as caught:
        find_model("smollm-135m")
    assert model.DEFAULT in caught.value.message
    assert caught.value.hint == f"did you mean `{model.DEFAULT}`?"


@pytest.mark.parametrize("name", list(load_models()))
def test_every_model_has_a_lock_and_says_how_it_is_served(name: str) -> None:
    record = find_model(name)
    assert "config.json" in read_model_lock(record).files
    assert record.flags("cpu")["dtype"] == "float32"
    assert (record.flags("cuda").get("load-format") == "dummy") == (record.weights == "dummy")
    assert record.flags("tpu") == {}


def test_a_model_without_a_lock_says_how_to_get_one() -> None:
    other = RECORD.model_copy(update={"id": "nothing"})
    with pytest.raises(NotLocked, match="the model nothing has no lock"):
        read_model_lock(other)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ("kind: hub, weights: real, licence: x, repository: a/b, revision: main", "40 hex"),
        ("kind: hub, weights: real, licence: x, repository: a/b", "needs the key `revision`"),
        ("kind: wheel, weights: real, licence: x", "needs the key `wheel`"),
        ("kind: tar, weights: real, licence: x", "models.m: kind"),
        ("kind: hub, weights: unreal, licence: x", "models.m: weights"),
        ("kind: hub, weights: real", "models.m: licence"),
    ],
)
def test_a_malformed_record_is_named_with_the_place_inside(
    tmp_path: Path, fields: str, said: str
) -> None:
    path = tmp_path / "docker" / "models.yaml"
    path.parent.mkdir()
    path.write_text(f"models:\n  m: {{{fields}}}\n")
    with pytest.raises(BadFile) as caught:
        load_models(path)
    assert caught.value.message.startswith("docker/models.yaml: models.m")
    assert said in caught.value.message


def test_the_shape_is_exactly_qwens() -> None:
    record = find_model("qwen2.5-0.5b")
    config = record.config or {}
    assert record.weights == "dummy"
    heads, size = config["num_attention_heads"], config["hidden_size"]
    layer = 2 * size * size + 2 * size * (size // heads) * config["num_key_value_heads"]
    layer += 3 * size * config["intermediate_size"]
    weights = config["num_hidden_layers"] * layer + config["vocab_size"] * size
    assert weights / 1e9 == pytest.approx(0.494, abs=0.001)  # the 0.49 B of its name
    assert isinstance(record, ModelRecord)
