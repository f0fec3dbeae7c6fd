"""Lays a bundle out, trusting nothing in it; no network.

Every byte of the file is accounted for: header, content, padding and end; then the parts are held
against the manifest. Nothing is written outside a new folder, which gets its name only when all
is well. `kit.bundle_load` puts image and model in place.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from kit import oci, store
from kit.archive import NAME_BYTES, archive_bytes, read_end, read_first, read_member
from kit.bundle_check import check_content
from kit.bundle_index import INDEX_BYTES, NAME, Index, parse_index
from kit.errors import BundleDamaged, DiskFull, NotFound, UsageError
from kit.manifest import Manifest, load_manifest


@dataclass(frozen=True)
class Unbundled:
    """A bundle laid out in a folder: its index, the run's manifest and the images it carries."""

    folder: Path
    index: Index
    manifest: Manifest
    images: dict[str, oci.OciImage]

    @property
    def run(self) -> Path:
        return self.folder / "run"

    @property
    def image_folder(self) -> Path:
        return self.folder / "image"


def is_bundle(file: Path) -> bool:
    """Say whether a file begins as a bundle does; whether it is one, `unbundle` finds out."""
    if not file.is_file():
        return False
    with file.open("rb") as source:
        return source.read(NAME_BYTES).rstrip(b"\0") == NAME.encode()


def unbundle(file: Path, to: Path) -> Unbundled:
    """Check a bundle and lay it out as the folder `to`, which must be new or empty.

    Raises `BundleDamaged` or `BundleRefused` naming the member, `DiskFull`, `UsageError`; then
    nothing is left behind.
    """
    to = Path(os.path.abspath(to))
    if to.is_symlink() or (to.exists() and not (to.is_dir() and not any(to.iterdir()))):
        raise UsageError(f"{to} is there already", hint="choose a new folder")
    store.make_folder(to.parent)
    with _open(file) as source:
        index = _read_index(source)
        _check_room(index, to.parent)
        try:
            with tempfile.TemporaryDirectory(dir=to.parent, prefix=".unbundle-") as work:
                out = Path(work) / "out"
                _lay_out(source, index, out)
                check_content(out, index)
                out.replace(to)
        except OSError as error:
            raise store.disk_error(error, to) from None
    return read_unbundled(to)


def read_unbundled(folder: Path) -> Unbundled:
    """Return what a folder that `unbundle` made holds; files are not hashed again.

    Raises `NotFound` where the folder is none.
    """
    path = folder / NAME
    if not path.is_file():
        raise NotFound(f"{folder} holds no {NAME}", hint="`nox -s unbundle -- FILE --to DIR`")
    index = parse_index(path.read_bytes())
    images = oci.read_layout(folder / "image") if (folder / "image").is_dir() else {}
    return Unbundled(folder, index, load_manifest(folder / "run" / "manifest.json"), images)


def _open(file: Path) -> IO[bytes]:
    try:
        mode = file.stat().st_mode
        if not stat.S_ISREG(mode):
            raise NotFound(f"{file} is no file")
        return file.open("rb")
    except OSError as error:
        raise NotFound(f"{file} cannot be read: {error.strerror}") from None


def _read_index(source: IO[bytes]) -> Index:
    """Read and check the index, and that the file is exactly as long as it says."""
    head = read_first(source, NAME, INDEX_BYTES)
    index = parse_index(head)
    sizes = {name: member.bytes for name, member in index.members.items()}
    wanted = archive_bytes([len(head), *sizes.values()])
    found = os.fstat(source.fileno()).st_size
    if found < wanted:
        raise BundleDamaged(
            f"{_cut_at(found, len(head), sizes)}: the file ends {wanted - found} bytes too early",
            hint="it was not copied whole",
        )
    return index


def _cut_at(length: int, head: int, sizes: dict[str, int]) -> str:
    """Return the first member that a file of this length does not hold whole."""
    seen = [head]
    for name in sorted(sizes):
        seen.append(sizes[name])
        if archive_bytes(seen) - archive_bytes([]) > length:
            return name
    return "the end of the archive"


def _check_room(index: Index, parent: Path) -> None:
    total = sum(member.bytes for member in index.members.values())
    free = shutil.disk_usage(parent).free
    if total > free:
        raise DiskFull(
            f"{free / 2**20:.0f} MiB are free, the bundle needs {total / 2**20:.0f}",
            hint="choose another --to",
        )


def _lay_out(source: IO[bytes], index: Index, out: Path) -> None:
    """Write every member that the index declares, in order, and check its hash."""
    out.mkdir()
    source.seek(0)
    (out / NAME).write_bytes(read_first(source, NAME, INDEX_BYTES))
    names = sorted(index.members)
    before: set[str] = {NAME}
    after = set(names)
    for name in names:
        after.discard(name)
        path = out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        seen = hashlib.sha256()
        with path.open("xb") as target:
            for piece in read_member(
                source, name, index.members[name].bytes, before=before, after=after
            ):
                seen.update(piece)
                target.write(piece)
        if seen.hexdigest() != index.members[name].sha256:
            raise BundleDamaged(
                f"{name}: has sha256 {seen.hexdigest()[:16]}…, "
                f"{NAME} says {index.members[name].sha256[:16]}…",
                hint="copy the bundle again",
            )
        before.add(name)
    read_end(source)
