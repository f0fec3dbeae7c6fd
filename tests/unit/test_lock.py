"""Locks as values and files: round trips, differences, tampering, reasons."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit import image, lock, lock_file
from kit.errors import BadFile, IndexUnreachable, NotLocked
from kit.image import ImageRecord, find_image, load_images
from kit.lock_file import DebPackage, Lock, Wheel, lock_sha256, lock_state, read_lock

NAMES = st.from_regex(r"[a-z][a-z0-9-]{0,12}", fullmatch=True)


def make_wheel(name: str = "torch", version: str = "1.0", sha: str = "a") -> Wheel:
    return Wheel(
        name=name, version=version, file=f"{name}-{version}-py3-none-any.whl", size_bytes=1,
        sha256=sha * 64,
    )  # fmt: skip


def make_lock(*wheels: Wheel, base_version: str = "1.2.11") -> Lock:
    package = DebPackage(
        name="zlib1g", version=base_version, file="z.deb", size_bytes=1, sha256="b" * 64
    )
    return Lock(
        written_by="a test", image="x-cpu", python="3.11", as_of="2026-01-01T00:00:00Z",
        source_date_epoch=1, suite="bookworm", base=(package,), wheels=wheels or (make_wheel(),),
    )  # fmt: skip


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ImageRecord:
    monkeypatch.setattr(image, "LOCKS", tmp_path)
    return ImageRecord(id="x-cpu", source="release", cuda="cpu", release="1", as_of="2026-01-01")


def test_a_lock_comes_back_from_its_files_as_it_was(record: ImageRecord) -> None:
    written = make_lock(make_wheel(), make_wheel("vllm", "1+cpu", "c"))
    lock.write(record, written)
    assert read_lock(record) == written
    assert lock_state(record) == "locked"


@pytest.mark.parametrize("name", ["inputs.json", "inputs.requirements.txt"])
def test_an_edited_lock_is_refused(record: ImageRecord, name: str) -> None:
    lock.write(record, make_lock())
    path = record.lock_dir / name
    path.write_text(path.read_text().replace("a" * 64, "d" * 64))
    with pytest.raises(BadFile, match=r"inputs\.requirements\.txt does not say"):
        read_lock(record)


def test_a_lock_that_is_no_json_is_named_with_its_line(record: ImageRecord) -> None:
    lock.write(record, make_lock())
    (record.lock_dir / "inputs.json").write_text("{\n,")
    with pytest.raises(BadFile, match=r"docker/locks/x-cpu/inputs\.json: line 2"):
        read_lock(record)


def test_a_lock_of_a_newer_kit_says_so(record: ImageRecord) -> None:
    lock.write(record, make_lock())
    path = record.lock_dir / "inputs.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"schema_version": 2}))
    with pytest.raises(BadFile, match="newer kit"):
        read_lock(record)


def test_the_hash_of_a_lock_changes_with_every_input() -> None:
    locks = [
        make_lock(), make_lock(make_wheel(version="1.1")), make_lock(make_wheel(sha="c")),
        make_lock(base_version="2"),
    ]  # fmt: skip
    assert len({lock_sha256(one) for one in locks}) == len(locks)
    assert lock_sha256(make_lock()) == lock_sha256(make_lock())


@given(st.dictionaries(NAMES, st.sampled_from(["1", "2"])), st.dictionaries(NAMES, st.just("1")))
def test_a_difference_names_every_changed_package_once(
    before: dict[str, str], after: dict[str, str]
) -> None:
    old = make_lock(make_wheel("same"), *(make_wheel(n, v) for n, v in before.items()))
    new = make_lock(make_wheel("same"), *(make_wheel(n, v) for n, v in after.items()))
    changed = {n for n in before.keys() | after.keys() if before.get(n) != after.get(n)}
    assert len(lock.diff(old, new)) == len(changed - {"same"})


def test_a_difference_says_what_happened() -> None:
    old = make_lock(make_wheel("gone"), make_wheel("kept", sha="a"), make_wheel("up"))
    new = make_lock(make_wheel("kept", sha="c"), make_wheel("new"), make_wheel("up", "2.0"))
    assert lock.diff(old, new) == [
        "- wheels: gone 1.0",
        "! wheels: kept 1.0: other bytes of the same version",
        "+ wheels: new 1.0",
        "  wheels: up 1.0 -> 2.0",
    ]


def test_other_inputs_take_the_recorded_identity_away(record: ImageRecord) -> None:
    lock.write(record, make_lock())
    identity = record.lock_dir / lock_file.IDENTITY
    identity.write_text("{}")
    lock.write(record, make_lock())
    assert identity.is_file()
    lock.write(record, make_lock(make_wheel(version="2.0")))
    assert not identity.exists()


def test_a_failed_attempt_is_shown_until_there_is_a_lock(record: ImageRecord) -> None:
    assert lock_state(record) == "not locked"
    lock.write_attempt(record, IndexUnreachable("the wheel index was not reached"))
    assert lock_state(record) == "not locked: the wheel index was not reached"
    with pytest.raises(NotLocked, match="the wheel index was not reached"):
        read_lock(record)
    lock.write(record, make_lock())
    assert lock_state(record) == "locked"
    lock.write_attempt(record, IndexUnreachable("again"))
    assert lock_state(record) == "locked"


def test_an_adopted_image_has_no_lock() -> None:
    adopted = ImageRecord(id="x", source="adopted", cuda="cu130", engine_id="sha256:" + "a" * 64)
    with pytest.raises(NotLocked, match="adopted"):
        read_lock(adopted)
    with pytest.raises(NotLocked):
        lock.resolve(adopted)


def test_a_time_that_is_none_is_refused() -> None:
    assert lock.epoch_of("2026-01-01T00:00:00Z") == 1767225600
    with pytest.raises(BadFile, match="as_of"):
        lock.epoch_of("yesterday")


@pytest.mark.parametrize("name", [n for n, r in load_images().items() if r.locked])
def test_every_committed_lock_is_whole(name: str) -> None:
    record = find_image(name)
    found = read_lock(record)
    names = [wheel.name for wheel in found.wheels]
    assert names == sorted(set(names))
    for_client = {"torch", "httpx", "httptools", "uvloop", "nvidia-ml-py"}
    assert {record.package, *(for_client if record.serves else ())} <= set(names)
    assert {"python3.11", "tini", "libc6"} <= {package.name for package in found.base}
    text = (find_image(name).lock_dir / "inputs.requirements.txt").read_text()
    assert "://" not in text
    assert "index" not in text


def test_the_two_cpu_images_share_what_both_allow() -> None:
    older, newer = (
        {w.name: w.sha256 for w in read_lock(find_image(name)).wheels}
        for name in ("v0.31.0-cpu", "v0.32.0-cpu")
    )
    shared = {name for name in older if newer.get(name) == older[name]}
    assert older["torch"] == newer["torch"]
    assert len(shared) >= 0.9 * len(older)
