"""One kind of tar: its bytes depend on names and contents alone, and its reader takes no other.

A member's header is a function of its name and size, so the reader knows each header before it
reads it. Links, devices, owners, times, sparse files and hidden extensions are all one case: a
header that is not the expected one. Nothing is compressed: no byte depends on the version of a
library, and no more bytes come out than the file has.
"""

from __future__ import annotations

import re
import tarfile
import unicodedata
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import IO

from kit.errors import BundleDamaged, BundleRefused, KitError

BLOCK = 512
PIECE = 1 << 20
NAME_BYTES = 100  # what a header holds; a longer name would need an extension
END = bytes(2 * BLOCK)
_PLAIN = re.compile(r"[A-Za-z0-9._+=@,~-]+")
_KINDS = {
    tarfile.SYMTYPE: "a symbolic link",
    tarfile.LNKTYPE: "a hard link",
    tarfile.CHRTYPE: "a device",
    tarfile.BLKTYPE: "a device",
    tarfile.FIFOTYPE: "a pipe",
    tarfile.DIRTYPE: "a folder",
    tarfile.GNUTYPE_SPARSE: "a sparse file",
}


def shown(text: str, limit: int = 120) -> str:
    """Return a text from a file that nobody trusts, safe to print: ASCII, one line, cut."""
    safe = ascii(text)[1:-1]
    return safe if len(safe) <= limit else safe[:limit] + "..."


def fault_of_name(name: str) -> str | None:
    """Return what is wrong with a member's name, or None."""
    if name.startswith("/"):
        return "an absolute path"
    parts = name.split("/")
    if ".." in parts:
        return "a path that leaves the folder"
    if not all(part != "." and _PLAIN.fullmatch(part) for part in parts):
        return "not a plain path of ASCII letters, digits and ._+=@,~-"
    if len(name) > NAME_BYTES:
        return f"a path longer than {NAME_BYTES} bytes"
    return None


def fault_of_names(names: Iterable[str]) -> str | None:
    """Return `name: why` for the first name that cannot be laid out beside the others, or None.

    Two names may be one file where a file system folds case or normalises.
    """
    files: dict[str, str] = {}
    folders: dict[str, str] = {}
    for name in names:
        fault = fault_of_name(name)
        if fault:
            return f"{shown(name)}: {fault}"
        key = unicodedata.normalize("NFKC", name).casefold()
        if key in files:
            what = "there twice" if files[key] == name else f"the same file as {files[key]}"
            return f"{name}: {what} where case does not count"
        files[key] = name
        parts = key.split("/")
        folders |= {"/".join(parts[:depth]): name for depth in range(1, len(parts))}
    both = sorted(files.keys() & folders.keys())
    return f"{files[both[0]]}: a file, and a folder of {folders[both[0]]}" if both else None


def header(name: str, size: int) -> bytes:
    """Return the 512 bytes before a member: no owner, no time, mode 644."""
    member = tarfile.TarInfo(name)
    member.size, member.mode = size, 0o644
    return member.tobuf(tarfile.GNU_FORMAT, "ascii", "strict")


def padding(size: int) -> bytes:
    """Return the zero bytes that fill a member's last block."""
    return bytes(-size % BLOCK)


def archive_bytes(sizes: Iterable[int]) -> int:
    """Return how long an archive with members of these sizes is, to the byte."""
    return sum(BLOCK + size + -size % BLOCK for size in sizes) + len(END)


def archive_chunks(members: Iterable[tuple[str, int, Iterable[bytes]]]) -> Iterator[bytes]:
    """Yield an archive: name, size and content of each member in the order given."""
    for name, size, content in members:
        yield header(name, size)
        yield from content
        yield padding(size)
    yield END


def file_chunks(path: Path) -> Iterator[bytes]:
    """Yield a file's bytes in pieces."""
    with path.open("rb") as data:
        while piece := data.read(PIECE):
            yield piece


def read_first(source: IO[bytes], name: str, limit: int) -> bytes:
    """Return the first member, whose name is known but not its size, in bytes.

    Raises `BundleRefused` where the file is none of ours or the member is larger than `limit`,
    `BundleDamaged` where it is broken.
    """
    block = source.read(BLOCK)
    size = _size_in(block)
    start = name.encode().ljust(NAME_BYTES, b"\0")[: len(block)]
    if block[:NAME_BYTES] != start and block[257:262] != b"ustar":
        raise BundleRefused(
            "not a bundle: no archive of this kind",
            hint="take the `.kitbundle` that `nox -s bundle` wrote",
        )
    if len(block) < BLOCK:
        raise BundleDamaged(f"{name}: the file ends inside its header", hint="copy it again")
    if size is None or block != header(name, size):
        raise _wrong_header(block, name, size or 0, (), ())
    if not 0 <= size <= limit:
        raise BundleRefused(f"{name}: {size} bytes, at most {limit} are read")
    return b"".join(_content(source, name, size))


def read_member(
    source: IO[bytes], name: str, size: int, *, before: Collection[str], after: Collection[str]
) -> Iterator[bytes]:
    """Yield a member's content, its header and padding checked.

    `before` and `after` are the names of the other members, to tell what stands in its place.
    """
    block = source.read(BLOCK)
    if len(block) < BLOCK:
        raise BundleDamaged(f"{name}: the file ends before it", hint="copy it again")
    if block != header(name, size):
        raise _wrong_header(block, name, size, before, after)
    yield from _content(source, name, size)


def read_end(source: IO[bytes]) -> None:
    """Check that the archive ends here; raise for anything that follows."""
    block = source.read(BLOCK)
    rest = source.read(BLOCK + 1)
    if block + rest == END:
        return
    if len(block) == BLOCK and any(block):
        raise _wrong_header(block, "the end of the archive", 0, (), ())
    raise BundleDamaged("the end of the archive: not two empty blocks", hint="copy it again")


def _content(source: IO[bytes], name: str, size: int) -> Iterator[bytes]:
    left = size
    while left:
        piece = source.read(min(left, PIECE))
        if not piece:
            raise BundleDamaged(
                f"{name}: the file ends inside it, {left} bytes too early", hint="copy it again"
            )
        left -= len(piece)
        yield piece
    if source.read(len(padding(size))) != padding(size):
        raise BundleDamaged(f"{name}: the bytes after it are not empty", hint="copy it again")


def _size_in(block: bytes) -> int | None:
    try:
        return tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape").size
    except (tarfile.HeaderError, ValueError):
        return None


def _wrong_header(
    block: bytes, name: str, size: int, before: Collection[str], after: Collection[str]
) -> KitError:
    """Return the error that says what stands where `name` should."""
    if not any(block):
        return BundleDamaged(f"{name}: missing, the archive ends before it", hint="copy it again")
    try:
        found = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except (tarfile.HeaderError, ValueError):
        return BundleDamaged(f"{name}: its header is damaged", hint="copy it again")
    said = shown(found.name)
    if found.type not in (tarfile.REGTYPE, tarfile.AREGTYPE):
        kind = _KINDS.get(found.type, "an extension of the format")
        return BundleRefused(f"{said}: {kind}; a bundle holds plain files alone")
    fault = fault_of_name(found.name)
    if fault:
        return BundleRefused(f"{said}: {fault}")
    if found.name == name and found.size != size:
        return BundleDamaged(f"{name}: {found.size} bytes by its header, {size} declared")
    if found.name == name:
        return BundleRefused(f"{name}: its header carries an owner, a mode, a time or more")
    if found.name in before:
        return BundleRefused(f"{said}: there twice")
    if found.name in after:
        return BundleDamaged(f"{name}: missing, {said} stands in its place")
    return BundleRefused(f"{said}: bundle.json does not declare it")
