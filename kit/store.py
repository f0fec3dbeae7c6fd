"""The run folder: written step by step, whole at every moment, owned by the caller."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kit.errors import BadFile, DiskFull, KitError, RunFolderLost
from kit.manifest import RawFile

SIGNATURE = "manifest.dsse.json"
NOT_HASHED = frozenset(
    {
        "manifest.json",
        SIGNATURE,
        "report.en.md",
        "report.zh.md",
        "report.en.html",
        "report.zh.html",
        "notes.md",
        "pull-request.md",
        "reproduction.json",
        "reproduction.en.md",
        "reproduction.zh.md",
        "reproduction.svg",
        "ro-crate-metadata.json",
    }
)
EXPORTS = "export/"  # made from the manifest, by `nox -s export`
RESERVE = ".reserve"
RESERVE_BYTES = 8 << 20  # room for the last manifest when the disk is full


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file whole or not at all. Raises `DiskFull` or `RunFolderLost`."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as out:
                out.write(content)
                out.flush()
                os.fsync(out.fileno())
            Path(name).chmod(0o666 & ~_umask())
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise disk_error(error, path) from None


def make_folder(path: Path) -> None:
    """Make a folder and its parents. Raises `DiskFull` or `RunFolderLost`."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise disk_error(error, path) from None


def reserve(run: Path) -> None:
    """Hold space back in the run folder, so that its end can be written on a full disk."""
    try:
        with (run / RESERVE).open("wb") as held:
            os.posix_fallocate(held.fileno(), 0, RESERVE_BYTES)
    except OSError as error:
        raise disk_error(error, run / RESERVE) from None


def release(run: Path) -> None:
    """Give the reserved space back. Raises `RunFolderLost` where nothing can be changed."""
    with writing(run):
        (run / RESERVE).unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 file whole or not at all."""
    write_bytes(path, text.encode())


def write_json(path: Path, value: Any) -> None:
    """Write JSON for people: two spaces, UTF-8, keys in given order."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def disk_error(error: OSError, path: Path) -> KitError:
    """Translate an OSError on a run's file into what the user can do about it."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFull(
            f"no space left while writing {path.name}", hint="free space, or choose --out elsewhere"
        )
    return RunFolderLost(
        f"cannot write {path.name}: {error.strerror}", hint="check the folder given to --out"
    )


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turn what goes wrong inside the block with files below a folder into the kit's error."""
    try:
        yield
    except OSError as error:
        path = Path(os.fsdecode(error.filename)) if error.filename else folder
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        if full or (error.filename and path.is_relative_to(folder)):
            raise disk_error(error, path) from error
        raise


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current


def sha256_file(path: Path) -> str:
    """Return the sha256 of a file, read in pieces."""
    with path.open("rb") as data:
        return hashlib.file_digest(data, "sha256").hexdigest()


def hash_files(run: Path) -> dict[str, RawFile]:
    """Return sha256 and size of every file of a run, by path; the manifest and reports excepted."""
    found = {}
    for path in sorted(p for p in run.rglob("*") if p.is_file() and not p.is_symlink()):
        name = path.relative_to(run).as_posix()
        if name not in NOT_HASHED and not name.startswith(EXPORTS):
            found[name] = RawFile(sha256=sha256_file(path), bytes=path.stat().st_size)
    return found


CHANGED_HINT = "take the run's folder as it was; `nox -s analyse -- RUNDIR` names each changed file"


def changed_files(run: Path, files: dict[str, RawFile]) -> list[str]:
    """Return `name: what is wrong` for each file that is not as the manifest says."""
    wrong = []
    for name, expected in files.items():
        path = run / name
        if not path.is_file():
            wrong.append(f"{name}: missing")
        elif path.stat().st_size != expected.bytes or sha256_file(path) != expected.sha256:
            wrong.append(f"{name}: other bytes than the manifest says")
    return wrong


def let_read(folder: Path) -> None:
    """Let everybody read a folder's files: containers run as users of their own.

    What was checked out under a tight umask is its owner's alone. Raises `BadFile`.
    """
    for path in (folder, *folder.rglob("*")):
        mode = path.stat().st_mode
        wanted = mode | (0o055 if path.is_dir() else 0o044)
        if mode == wanted or "__pycache__" in path.parts:
            continue
        try:
            path.chmod(wanted)
        except OSError as error:
            raise BadFile(
                f"containers cannot read {path}: {error.strerror}", hint=f"chmod -R go+rX {folder}"
            ) from None


def give_to_caller(folder: Path) -> None:
    """Make every file below a folder the caller's: containers wrote some under their own user."""
    if os.geteuid() != 0:
        return  # then the containers ran under the caller's own user
    with writing(folder):
        if folder.is_dir():
            os.chown(folder, os.geteuid(), os.getegid())
        for root, folders, files in os.walk(folder):
            for name in folders + files:
                os.chown(Path(root) / name, os.geteuid(), os.getegid(), follow_symlinks=False)
