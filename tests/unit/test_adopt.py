"""Images of this machine alone: how they get their id, and what they may not take."""

from __future__ import annotations

from pathlib import Path

import pytest

from kit import adopt as module
from kit import image
from kit.adopt import adopt
from kit.errors import BadFile, ImageMissing, UsageError
from kit.image import ImageRecord, find_image, load_images

ENGINE_ID = "sha256:" + "a" * 64


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(image, "LOCAL_FILE", tmp_path / "images.local.yaml")
    monkeypatch.setattr(
        module, "engine_image_id", lambda ref: ENGINE_ID if ref == "site:1" else None
    )
    return tmp_path


def take(
    image_id: str = "site-image", *, reference: str = "site:1", cuda: str = "cu130"
) -> ImageRecord:
    return adopt(
        reference,
        image_id,
        cuda=cuda,
        interpreter="/opt/python3",
        entrypoint=["python3", "-m", "vllm.entrypoints.cli.main"],
        user="10001:0",
        say=lambda _: None,
    )


def test_an_adopted_image_is_found_by_its_id_and_pinned_by_the_engines() -> None:
    record = take()
    assert find_image("site-image") == record
    assert record.engine_id == ENGINE_ID
    assert record.source == "adopted"
    assert record.entrypoint == ("python3", "-m", "vllm.entrypoints.cli.main")
    assert list(load_images())[-1] == "site-image"


def test_adopting_again_replaces_one_record_and_keeps_the_others() -> None:
    take("first")
    take("second")
    take("first", cuda="cu129")
    assert find_image("first").cuda == "cu129"
    assert find_image("second").cuda == "cu130"


def test_an_id_of_the_shared_list_is_refused() -> None:
    with pytest.raises(UsageError, match=r"v0\.32\.0-cpu"):
        take("v0.32.0-cpu")


def test_an_id_that_the_shared_list_gets_later_is_one_clear_error(machine: Path) -> None:
    take()
    path = machine / "images.local.yaml"
    path.write_text(path.read_text().replace("site-image:", "v0.32.0-cpu:"))
    with pytest.raises(BadFile, match=r"images\.v0\.32\.0-cpu"):
        load_images()


def test_an_image_that_is_not_there_or_a_value_no_record_has_writes_nothing(machine: Path) -> None:
    with pytest.raises(ImageMissing, match="site:2"):
        take(reference="site:2")
    with pytest.raises(BadFile, match="cuda"):
        take(cuda="cu12")
    assert not (machine / "images.local.yaml").exists()
