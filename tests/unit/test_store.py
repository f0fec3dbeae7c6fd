"""The run folder: files whole or not at all, hashed, and errors that say what to do."""

import errno
import hashlib
import os
from pathlib import Path

import pytest

from kit.errors import DiskFull, RunFolderLost
from kit.manifest import RawFile
from kit.store import (
    RESERVE,
    RESERVE_BYTES,
    changed_files,
    disk_error,
    hash_files,
    let_read,
    release,
    reserve,
    sha256_file,
    write_bytes,
    write_json,
    write_text,
    writing,
)


def test_a_file_is_written_whole_and_its_folder_made(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b.txt"
    write_text(path, "ünï\n")
    assert path.read_bytes() == "ünï\n".encode()
    assert [p.name for p in path.parent.iterdir()] == ["b.txt"]


def test_a_file_is_replaced_and_readable_by_others(tmp_path: Path) -> None:
    path = tmp_path / "f"
    write_text(path, "old")
    write_text(path, "new")
    assert path.read_text("utf-8") == "new"
    umask = os.umask(0)
    os.umask(umask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask


def test_what_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "f"
    write_text(path, "old")
    with pytest.raises(TypeError):
        write_bytes(path, "no bytes")  # type: ignore[arg-type]
    assert path.read_text("utf-8") == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["f"]


def test_a_folder_that_is_a_file_is_a_lost_run_folder(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("", "utf-8")
    with pytest.raises(RunFolderLost, match=r"cannot write g\.txt"):
        write_text(tmp_path / "f" / "g.txt", "x")


@pytest.mark.parametrize(
    ("number", "error"),
    [(errno.ENOSPC, DiskFull), (errno.EDQUOT, DiskFull), (errno.EACCES, RunFolderLost)],
)
def test_errors_of_the_disk_become_what_the_user_can_do(number: int, error: type) -> None:
    found = disk_error(OSError(number, os.strerror(number)), Path("f"))
    assert type(found) is error
    assert found.hint


def test_json_keeps_order_and_characters(tmp_path: Path) -> None:
    write_json(tmp_path / "f.json", {"b": "中", "a": 1})
    assert (tmp_path / "f.json").read_text("utf-8") == '{\n  "b": "中",\n  "a": 1\n}\n'


def test_every_file_is_hashed_but_the_manifest_the_reports_and_links(tmp_path: Path) -> None:
    beside = ("report.en.md", "report.zh.html", "notes.md")
    for name in ("manifest.json", *beside, "plan.json", "a/b/raw"):
        write_text(tmp_path / name, name)
    (tmp_path / "link").symlink_to(tmp_path / "plan.json")
    found = hash_files(tmp_path)
    assert set(found) == {"plan.json", "a/b/raw"}
    assert found["a/b/raw"] == RawFile(sha256=hashlib.sha256(b"a/b/raw").hexdigest(), bytes=7)
    assert sha256_file(tmp_path / "plan.json") == found["plan.json"].sha256


def test_changed_and_missing_files_are_named_and_others_are_not(tmp_path: Path) -> None:
    for name in ("same", "flipped", "longer", "gone"):
        write_text(tmp_path / name, name)
    files = hash_files(tmp_path)
    write_text(tmp_path / "flipped", "Flipped")
    write_text(tmp_path / "longer", "longer!")
    (tmp_path / "gone").unlink()
    assert changed_files(tmp_path, files) == [
        "flipped: other bytes than the manifest says",
        "gone: missing",
        "longer: other bytes than the manifest says",
    ]


def test_space_is_held_back_and_given_back(tmp_path: Path) -> None:
    reserve(tmp_path)
    assert (tmp_path / RESERVE).stat().st_blocks * 512 >= RESERVE_BYTES
    release(tmp_path)
    release(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("number", "name", "error"),
    [
        (errno.EROFS, "run/a.json", RunFolderLost),
        (errno.EIO, "run/a.json", RunFolderLost),
        (errno.ENOSPC, "elsewhere", DiskFull),
        (errno.ENOSPC, None, DiskFull),
        (errno.EROFS, "elsewhere", OSError),
        (errno.ECONNRESET, None, OSError),
    ],
)
def test_what_goes_wrong_with_a_run_s_files_is_the_kit_s_error_and_nothing_else_is(
    tmp_path: Path, number: int, name: str | None, error: type[Exception]
) -> None:
    path = None if name is None else str(tmp_path / name)
    with pytest.raises(error), writing(tmp_path / "run"):
        raise OSError(number, os.strerror(number), path)


def test_what_containers_read_is_made_readable_and_nothing_more(tmp_path: Path) -> None:
    inside = tmp_path / "inside"
    (inside / "part").mkdir(parents=True, mode=0o700)
    secret = tmp_path / "secret"
    for path in (inside / "part" / "a.py", secret):
        path.touch(mode=0o600)
    inside.chmod(0o700)
    let_read(inside)
    modes = [p.stat().st_mode & 0o777 for p in (inside, inside / "part", inside / "part" / "a.py")]
    assert modes == [0o755, 0o755, 0o644]
    assert secret.stat().st_mode & 0o777 == 0o600
