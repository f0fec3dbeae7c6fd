"""The bill of materials beside a lock says what the lock says, in bytes that never move."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from packageurl import PackageURL
from test_lock import make_lock, make_wheel

from kit import image, lock
from kit.image import ImageRecord, find_image, load_images
from kit.lock_file import lock_sha256, read_lock
from kit.sbom import render_sbom

LOCKED = [name for name, record in load_images().items() if record.locked]


@pytest.mark.parametrize("name", LOCKED)
def test_the_file_on_disk_is_the_one_of_the_lock(name: str) -> None:
    record = find_image(name)
    text = (record.lock_dir / lock.SBOM).read_text("utf-8")
    assert text == render_sbom(read_lock(record)), f"run `nox -s sbom -- {name}`"


@pytest.mark.parametrize("name", LOCKED)
def test_every_input_is_a_component_with_its_hash_and_a_purl_of_its_own(name: str) -> None:
    found = read_lock(find_image(name))
    parts = json.loads(render_sbom(found))["components"]
    told = {(p["name"], p["version"], p["hashes"][0]["content"]) for p in parts}
    assert told == {(i.name, i.version, i.sha256) for i in (*found.base, *found.wheels)}
    purls = [PackageURL.from_string(p["purl"]) for p in parts]
    assert len(set(purls)) == len(parts)
    assert {p.type for p in purls} <= {"deb", "pypi", "generic"}


def test_nothing_in_it_depends_on_time_or_chance() -> None:
    document = json.loads(render_sbom(make_lock()))
    assert "serialNumber" not in document
    assert "timestamp" not in document["metadata"]
    assert "dependencies" not in document, "a lock does not say who needs whom"
    assert document["metadata"]["component"]["properties"][0]["value"] == lock_sha256(make_lock())
    assert render_sbom(make_lock()) == render_sbom(make_lock())
    assert render_sbom(make_lock(make_wheel(sha="c"))) != render_sbom(make_lock())


def test_only_what_the_package_index_has_is_named_after_it() -> None:
    made = make_wheel("vllm").model_copy(update={"origin": "made"})
    text = render_sbom(make_lock(make_wheel("torch", "1.0+cpu"), made))
    purls = [p["purl"] for p in json.loads(text)["components"]]
    assert "pkg:pypi/torch@1.0%2Bcpu?file_name=torch-1.0%2Bcpu-py3-none-any.whl" in purls
    assert any(purl.startswith("pkg:generic/vllm@1.0?checksum=sha256:") for purl in purls)
    assert "pkg:deb/debian/zlib1g@1.2.11?arch=z&distro=bookworm" in purls


def test_writing_a_lock_writes_it_and_leaves_the_lock_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image, "LOCKS", tmp_path)
    record = ImageRecord(id="x-cpu", source="release", cuda="cpu", release="1", as_of="2026-01-01")
    lock.write(record, make_lock())
    before = lock_sha256(read_lock(record))
    (record.lock_dir / lock.SBOM).unlink()
    lock.write_sbom(record, read_lock(record))
    assert (record.lock_dir / lock.SBOM).read_text("utf-8") == render_sbom(make_lock())
    assert lock_sha256(read_lock(record)) == before
