"""Wheels: which one is taken, made the same everywhere, never two for one path."""

from __future__ import annotations

import csv
import hashlib
import io
import zipfile
from pathlib import Path

import pytest

from kit import lock_wheels, wheels
from kit.errors import (
    DiskFull,
    GoneUpstream,
    HashMismatch,
    IndexUnreachable,
    LockConflict,
    VariantMissing,
)
from kit.image import ImageRecord, find_image
from kit.lock_file import Wheel, read_lock
from kit.process import Completed


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KIT_CACHE", str(tmp_path / "cache"))


def add_wheel(name: str, files: dict[str, str]) -> Wheel:
    """Write a wheel with a RECORD into the cache and return its lock entry."""
    info = f"{name}-1.dist-info"
    body = io.BytesIO()
    rows = [[path, f"sha256={hashlib.sha256(t.encode()).hexdigest()}", len(t)]
            for path, t in files.items()]  # fmt: skip
    text = io.StringIO()
    csv.writer(text).writerows([*rows, [f"{info}/RECORD", "", ""]])
    with zipfile.ZipFile(body, "w") as archive:
        for path, content in files.items():
            archive.writestr(path, content)
        archive.writestr(f"{info}/RECORD", text.getvalue())
    wheel = Wheel(
        name=name, version="1", file=f"{name}-1-py3-none-any.whl", size_bytes=1,
        sha256=hashlib.sha256(body.getvalue()).hexdigest(),
    )  # fmt: skip
    path = wheels.wheel_path(wheel)
    path.parent.mkdir(parents=True)
    path.write_bytes(body.getvalue())
    return wheel


def test_the_alias_is_the_locked_one_byte_for_byte(tmp_path: Path) -> None:
    locked = read_lock(find_image("v0.32.0-cpu")).find_wheel("vllm")
    assert locked is not None
    made = wheels.write_alias(tmp_path, "vllm", locked.version)
    assert made.name == locked.file
    assert hashlib.sha256(made.read_bytes()).hexdigest() == locked.sha256


def test_two_wheels_with_one_path_and_other_content_are_refused() -> None:
    first = add_wheel("first", {"shared/x.py": "1", "first.py": ""})
    second = add_wheel("second", {"shared/x.py": "2"})
    with pytest.raises(LockConflict) as caught:
        wheels.check_conflicts([second, first])
    assert "shared/x.py by first-1-py3-none-any.whl and second-1" in caught.value.message


def test_two_wheels_may_own_one_path_with_the_same_content() -> None:
    both = [add_wheel(name, {"shared/__init__.py": ""}) for name in ("one", "two")]
    wheels.check_conflicts(both)
    records = {wheel.file: wheels.read_record(wheels.wheel_path(wheel)) for wheel in both}
    assert wheels.find_conflicts(records) == []


def test_a_script_meets_a_script_where_it_gets_installed() -> None:
    first = add_wheel("first", {"first-1.data/scripts/run": "1"})
    second = add_wheel("second", {"second-1.data/scripts/run": "2"})
    with pytest.raises(LockConflict, match=r"bin/run"):
        wheels.check_conflicts([first, second])


def test_purelib_and_the_root_are_one_place() -> None:
    first = add_wheel("first", {"first-1.data/purelib/m.py": "1"})
    second = add_wheel("second", {"m.py": "2"})
    with pytest.raises(LockConflict, match=r"m\.py"):
        wheels.check_conflicts([first, second])


def test_one_changed_byte_of_a_wheel_is_named() -> None:
    wheel = add_wheel("torch", {"torch.py": "x"})
    wheels.check_wheels([wheel])
    path = wheels.wheel_path(wheel)
    body = bytearray(path.read_bytes())
    body[40] ^= 1
    path.write_bytes(body)
    with pytest.raises(HashMismatch, match=r"torch-1-py3-none-any\.whl"):
        wheels.check_wheels([wheel])


def test_what_is_in_the_cache_is_not_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = add_wheel("torch", {"torch.py": "x"})
    monkeypatch.setenv("PATH", "")
    said: list[str] = []
    wheels.fetch_wheels([wheel], said.append)
    assert said == []


def test_a_local_wheel_that_is_gone_everywhere_is_said_to_be(tmp_path: Path) -> None:
    wheel = Wheel(
        name="vllm", version="1", file="vllm-1-py3-none-any.whl", size_bytes=1, sha256="a" * 64,
        origin="file",
    )  # fmt: skip
    record = ImageRecord(
        id="x", source="file", cuda="cu130", wheel=str(tmp_path / "no.whl"), as_of="2026-01-01"
    )
    with pytest.raises(GoneUpstream, match=r"vllm-1-py3-none-any\.whl is not in the cache"):
        wheels.fetch_wheels([wheel], lambda line: None, record=record)


def test_wheels_are_shared_out_evenly_and_completely() -> None:
    many = [add_wheel(f"w{i}", {}).model_copy(update={"size_bytes": i}) for i in range(1, 20)]
    shares = wheels._shares(many)
    assert sorted(w.name for share in shares for w in share) == sorted(w.name for w in many)
    sums = [sum(w.size_bytes for w in share) for share in shares]
    assert max(sums) - min(sums) <= 19


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("WARNING: Retrying ... NewConnectionError('...')\nERROR: No matching distribution found"
         " for torch==1", IndexUnreachable),
        ("Max retries exceeded with url: Temporary failure in name resolution", IndexUnreachable),
        ("ERROR: Could not find a version that satisfies torch==1\nERROR: No matching distribution"
         " found for torch==1", GoneUpstream),
        ("ERROR: HTTP error 404 while getting it", GoneUpstream),
        ("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE.\n"
         "    torch==1 from somewhere", HashMismatch),
        ("ERROR: [Errno 28] No space left on device", DiskFull),
    ],
)  # fmt: skip
def test_what_pip_says_becomes_the_error_it_is(words: str, wanted: type[Exception]) -> None:
    error = wheels.download_error(Completed(("pip",), 1, "", words))
    assert type(error) is wanted
    assert error.hint


def test_the_taken_wheel_is_the_one_pip_would_take() -> None:
    rank = {tag: place for place, tag in enumerate(lock_wheels.supported_tags("3.11"))}

    def entry(file: str) -> dict[str, object]:
        return {"name": file, "url": f"https://x/{file}", "size": 1, "hashes": {"sha256": "a" * 64}}

    package = {
        "name": "p", "version": "1",
        "wheels": [
            entry("p-1-py3-none-any.whl"), entry("p-1-cp310-cp310-manylinux_2_17_x86_64.whl"),
            entry("p-1-cp311-cp311-manylinux_2_17_x86_64.whl"),
            entry("p-1-cp311-cp311-manylinux_2_28_x86_64.whl"),
            entry("p-1-cp311-cp311-manylinux_2_39_x86_64.whl"),
            entry("p-1-cp311-cp311-manylinux_2_28_aarch64.whl"),
        ],
    }  # fmt: skip
    taken = lock_wheels._choose_wheel(package, rank, {})
    assert taken.file == "p-1-cp311-cp311-manylinux_2_28_x86_64.whl"


def test_a_package_without_a_fitting_wheel_is_refused() -> None:
    package = {"name": "p", "version": "1", "wheels": []}
    with pytest.raises(LockConflict, match="p 1 has no wheel"):
        lock_wheels._choose_wheel(package, {}, {})


@pytest.mark.parametrize(
    ("cuda", "torch", "companion"),
    [("cu130", "2.1+cpu", "numpy"), ("cu129", "2.1", "nvidia-cudnn-cu13"), ("cpu", "2.1", "numpy")],
)
def test_another_variant_than_asked_for_is_refused(cuda: str, torch: str, companion: str) -> None:
    record = ImageRecord.model_validate(
        {"id": "x", "source": "release", "cuda": cuda, "release": "1", "as_of": "2026-01-01"}
    )
    found = [
        Wheel(name=name, version=version, file="f", size_bytes=1, sha256="a" * 64)
        for name, version in (("torch", torch), (companion, "1"))
    ]
    with pytest.raises(VariantMissing, match=cuda):
        lock_wheels._check_variant(record, found)


def test_the_resolver_is_pinned_by_hash() -> None:
    wheel = wheels.uv_wheel()
    assert wheel.file.startswith(f"uv-{wheel.version}-")
    assert len(wheel.sha256) == 64
