"""Lays a bundle out, trusting nothing in it, and puts its image and model in place; no network.

Every byte of the file is accounted for: header, content, padding and end. Then the parts are held
against the manifest, so that a bundle whose index was rewritten to fit is found as well. Nothing
is written outside a new folder, which gets its name only when all is well.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import docker
import requests

from kit import engine, oci, store
from kit.archive import archive_bytes, read_end, read_first, read_member
from kit.bundle import digests, is_beside
from kit.bundle_index import INDEX_BYTES, NAME, Index, Member, parse_index
from kit.errors import (
    BadFile,
    BundleDamaged,
    BundleRefused,
    DiskFull,
    EngineUnreachable,
    HashMismatch,
    IdentityMismatch,
    ImageMissing,
    NotFound,
    UsageError,
)
from kit.image import REPOSITORY, engine_image_id, read_identity
from kit.lock_file import INPUTS, REQUIREMENTS, Lock, lock_sha256, render_requirements
from kit.manifest import Manifest, RanImage, load_manifest
from kit.model import (
    ModelFiles,
    ModelLock,
    ModelRecord,
    check_files,
    find_model,
    model_path,
    read_model_lock,
)
from kit.value import load_json, parse_value, read_text

Say = Callable[[str], None]


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
                _check_content(out, index)
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


def _check_content(folder: Path, index: Index) -> None:
    """Hold the parts against the manifest; each is what the run used, or declared as left out."""
    if "run/manifest.json" not in index.members:
        raise BundleDamaged("run/manifest.json: missing")
    manifest = load_manifest(folder / "run" / "manifest.json")
    if manifest.run_id != index.run_id:
        raise BundleDamaged(f"{NAME}: run_id: not the manifest's")
    _check_run(index, manifest)
    _check_model(index, manifest)
    _check_locks(folder, index, manifest)
    _check_images(folder, index, manifest)


def _check_run(index: Index, manifest: Manifest) -> None:
    run = digests(index, "run")
    for name, wanted in manifest.files.items():
        found = run.get(name)
        if found is None:
            raise BundleDamaged(f"run/{name}: missing, the manifest names it")
        if (found.sha256, found.bytes) != (wanted.sha256, wanted.bytes):
            raise BundleDamaged(f"run/{name}: other bytes than the manifest says")
    for name in run.keys() - manifest.files.keys():
        if not is_beside(name):
            raise BundleRefused(f"run/{name}: no file of this run")
    for phase in manifest.plan.phases:
        load = run.get(f"workload/{phase.name}.jsonl")
        if load is not None and load.sha256 != phase.requests_sha256:
            raise BundleDamaged(f"run/workload/{phase.name}.jsonl: not the plan's workload")


def _check_model(index: Index, manifest: Manifest) -> None:
    planned = manifest.plan.model
    found = {name: m.sha256 for name, m in digests(index, f"model/{planned.id}").items()}
    _refuse_others(digests(index, "model"), {planned.id}, "model")
    if not found and index.lacks("model", planned.id):
        return
    for name in sorted({*found, *planned.files}):
        if name not in planned.files:
            raise BundleRefused(f"model/{planned.id}/{name}: no file of the plan's model")
        if found.get(name) != planned.files[name]:
            what = "other bytes than the plan says" if name in found else "missing"
            raise BundleDamaged(f"model/{planned.id}/{name}: {what}")


def _check_locks(folder: Path, index: Index, manifest: Manifest) -> None:
    locked = {ran.id: ran.lock_sha256 for ran in manifest.images if ran.lock_sha256}
    _refuse_others(digests(index, "lock"), set(locked), "lock")
    for name, wanted in locked.items():
        home = folder / "lock" / name
        if not home.is_dir() and index.lacks("lock", name):
            continue
        for file in (INPUTS, REQUIREMENTS):
            if f"lock/{name}/{file}" not in index.members:
                raise BundleDamaged(f"lock/{name}/{file}: missing")
        try:
            lock = parse_value(Lock, load_json(home / INPUTS), f"lock/{name}/{INPUTS}")
            text = read_text(home / REQUIREMENTS, shown=REQUIREMENTS)
        except BadFile:
            raise BundleDamaged(f"lock/{name}/{INPUTS}: not a lock") from None
        if lock_sha256(lock) != wanted:
            raise BundleDamaged(f"lock/{name}/{INPUTS}: not the lock of the image that ran")
        if text != render_requirements(lock):
            raise BundleDamaged(f"lock/{name}/{REQUIREMENTS}: does not say what {INPUTS} says")


def _check_images(folder: Path, index: Index, manifest: Manifest) -> None:
    ran = {one.id: one for one in manifest.images}
    members = digests(index, "image")
    if not members and all(index.lacks("image", name) for name in ran):
        return
    for name, member in members.items():
        if name.startswith(f"{oci.BLOBS}/") and name != f"{oci.BLOBS}/{member.sha256}":
            raise BundleDamaged(f"image/{name}: other bytes than its name says")
    try:
        found = oci.read_layout(folder / "image")
    except BadFile as error:
        raise BundleDamaged(error.message) from None
    if found.keys() != ran.keys():
        raise BundleDamaged("image/index.json: other images than those that ran")
    for name, image in found.items():
        if image.identity.digest != ran[name].identity:
            raise BundleDamaged(f"image/index.json: {name} is not the image that ran")
    wanted = {"index.json", "oci-layout"}.union(
        *(oci.blobs_of(folder / "image", image) for image in found.values())
    )
    for name in sorted(members.keys() - wanted):
        raise BundleRefused(f"image/{name}: no part of an image that ran")


def _refuse_others(members: dict[str, Member], known: set[str], place: str) -> None:
    for name in members:
        if name.split("/")[0] not in known:
            raise BundleRefused(f"{place}/{name}: the run used no such {place}")


def ran_image(manifest: Manifest, image_id: str) -> RanImage:
    """Return an image of a run by its id; raise `ImageMissing`."""
    for ran in manifest.images:
        if ran.id == image_id:
            return ran
    raise ImageMissing(f"the run used no image {image_id}")


def load_image_from_bundle(folder: Path, image_id: str, say: Say = print) -> str:
    """Load an image of an unbundled folder into the engine; return the engine's id of it.

    It gets the record's tag only when its identity, computed from what the engine then holds, is
    the manifest's. Raises `ImageMissing` where the bundle has none, `IdentityMismatch`.
    """
    bundle = read_unbundled(folder)
    wanted = ran_image(bundle.manifest, image_id)
    image = bundle.images.get(image_id)
    if image is None:
        raise ImageMissing(f"the bundle carries no image {image_id}", hint="build or pull it")
    say(f"  loading {image_id} from the bundle")
    client = engine.connect(timeout_s=600)
    try:
        there = {str(one.id) for one in client.images.list(all=True)}
        archive = oci.docker_archive(bundle.image_folder, image)
        found = client.images.load(archive)  # type: ignore[arg-type] # it sends any iterator
        loaded = str(found[0].id)
        if read_identity(loaded).digest != wanted.identity:
            if loaded not in there:
                client.images.remove(loaded)
            raise IdentityMismatch(f"what was loaded as {image_id} is not the image that ran")
        client.images.get(loaded).tag(REPOSITORY, tag=image_id)
    except docker.errors.DockerException as error:
        raise BundleDamaged(
            f"the engine does not take the image {image_id}", detail=str(error)
        ) from None
    except requests.RequestException as error:
        raise EngineUnreachable(
            "the engine stopped answering while an image was loaded", detail=str(error)
        ) from None
    finally:
        client.close()
    return engine_image_id(f"{REPOSITORY}:{image_id}") or loaded


def install_model_from_bundle(folder: Path, record: ModelRecord) -> ModelFiles:
    """Put an unbundled model where a run finds it; return its folder, every file hashed.

    Raises `NotFound` where the bundle carries no files of it, `HashMismatch` where this checkout's
    lock asks for others, `ModelDamaged` naming the file.
    """
    planned = read_unbundled(folder).manifest.plan.model
    source = folder / "model" / planned.id
    if record.id != planned.id or not source.is_dir():
        raise NotFound(f"the bundle carries no files of the model {record.id}")
    lock = read_model_lock(record)
    if lock.files != planned.files:
        raise HashMismatch(
            f"the run's {record.id} has other files than this checkout's lock",
            hint="check out the kit's commit that the manifest names",
        )
    target = model_path(record)
    if not target.is_dir():
        store.make_folder(target.parent)
        with tempfile.TemporaryDirectory(prefix="part-", dir=target.parent) as work:
            made = Path(work) / "out"
            shutil.copytree(source, made, copy_function=shutil.copyfile)
            check_files(record, made, ModelLock(written_by=lock.written_by, files=planned.files))
            for path in [made, *made.rglob("*")]:
                path.chmod(0o755 if path.is_dir() else 0o644)
            made.rename(target)
    return check_files(record, target, lock)


def load_all(bundle: Unbundled, say: Say) -> None:
    """Load every image of an unbundled folder and install its model; say what it lacks."""
    for ran in {one.id: one for one in bundle.manifest.images}.values():
        if ran.id in bundle.images:
            load_image_from_bundle(bundle.folder, ran.id, say)
    planned = bundle.manifest.plan.model.id
    if not bundle.index.lacks("model", planned):
        found = install_model_from_bundle(bundle.folder, find_model(planned))
        say(f"  model {planned}: {len(found.files)} files in place")
