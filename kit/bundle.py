"""Puts a run into one file that needs no network: manifest, raw files, locks, model, images.

The same content gives the same bytes whenever and wherever the bundle is made. Layers are stored
uncompressed, as the images' own identities are defined; see `kit.archive` and `kit.oci`.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from kit import oci, store
from kit.archive import archive_chunks, fault_of_name, fault_of_names, file_chunks
from kit.bundle_index import NAME, SUFFIX, Index, LeftOut, Member, render_index
from kit.errors import BadFile, ImageMissing, ModelDamaged, NotFound, StaleNumber, UnknownName
from kit.image import REPOSITORY, engine_image_id, load_images, read_identity, save_stream
from kit.lock_file import lock_sha256, read_lock
from kit.manifest import Manifest, RanImage, load_manifest
from kit.model import ModelLock, check_files, find_model, model_path
from kit.sampler_tool import wheel_of
from kit.wheels import check_wheels, wheel_path

Say = Callable[[str], None]
Save = Callable[[RanImage], Iterable[bytes]]


@dataclass
class Content:
    """What goes into a bundle so far: files by their name in it, and what does not."""

    files: dict[str, Path] = field(default_factory=dict)
    left_out: list[LeftOut] = field(default_factory=list)


def is_beside(name: str) -> bool:
    """Say whether a file of a run folder belongs to the run though its manifest does not list it.

    Reports, the signature and the record of a reproduction are made from the manifest, after it.
    """
    return name in store.NOT_HASHED


def make_bundle(
    run: Path,
    out: Path | None = None,
    say: Say = print,
    *,
    with_image: bool = True,
    with_model: bool = True,
    save: Save | None = None,
) -> tuple[Path, Index]:
    """Write a finished run as one file, `<run id>.kitbundle` beside its folder; return path, index.

    `save` gives the bytes of `docker save` for an image; by default this engine does. Raises
    `StaleNumber` for a changed raw file, `ImageMissing` and `ModelDamaged` where the bits are not
    on this machine, `DiskFull`.
    """
    manifest = load_manifest(run / "manifest.json")
    if manifest.status == "running":
        raise BadFile("manifest.json: the run has not ended", hint="wait for its end")
    if fault_of_name(manifest.run_id) or "/" in manifest.run_id:
        raise BadFile("manifest.json: run_id: cannot be a file's name")
    if wrong := store.changed_files(run, manifest.files):
        raise StaleNumber(
            f"a raw file is not as the manifest says: {wrong[0]}", hint=store.CHANGED_HINT
        )
    target = out or run.resolve().parent / f"{manifest.run_id}{SUFFIX}"
    content = Content()
    _add_run(content, run, manifest)
    _add_locks(content, manifest)
    _add_model(content, manifest, wanted=with_model)
    _add_sampler(content, manifest)
    store.make_folder(target.parent)
    try:
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".bundle-") as work:
            _add_images(content, manifest, Path(work), save or _saved, say, wanted=with_image)
            index = _write(Path(work) / "out", content, manifest.run_id)
            (Path(work) / "out").replace(target)
    except OSError as error:
        raise store.disk_error(error, target) from None
    return target, index


def _add_run(content: Content, run: Path, manifest: Manifest) -> None:
    beside = sorted(p.name for p in run.iterdir() if is_beside(p.name) and p.is_file())
    for name in (*manifest.files, *beside):
        content.files[f"run/{name}"] = run / name


def _add_locks(content: Content, manifest: Manifest) -> None:
    records = load_images()
    for ran in manifest.images:
        if ran.lock_sha256 is None:
            continue
        record = records.get(ran.id)
        if record is None or not record.locked or lock_sha256(read_lock(record)) != ran.lock_sha256:
            content.left_out.append(
                LeftOut(
                    what="lock",
                    id=ran.id,
                    why="this checkout has no such lock",
                    digests={"lock_sha256": ran.lock_sha256},
                    source=f"kit {manifest.kit.commit or manifest.kit.version}",
                )
            )
            continue
        for path in sorted(p for p in record.lock_dir.rglob("*") if p.is_file()):
            name = path.relative_to(record.lock_dir).as_posix()
            content.files[f"lock/{ran.id}/{name}"] = path


def _add_model(content: Content, manifest: Manifest, *, wanted: bool) -> None:
    planned = manifest.plan.model
    try:
        record = find_model(planned.id)
    except UnknownName:
        record = None
    why = "left out by choice"
    if record is None:
        why = "docker/models.yaml of this checkout does not know it"
    elif not record.redistributable:
        why = f"its record does not say that others may be given it (licence: {record.licence})"
    if record is None or not wanted or not record.redistributable:
        content.left_out.append(
            LeftOut(
                what="model",
                id=planned.id,
                why=why,
                digests=planned.files,
                source=record.source if record else "unknown",
            )
        )
        return
    home = model_path(record)
    hint = f"`nox -s models -- {record.id}` makes it; --without-model leaves it out"
    if not home.is_dir():
        raise ModelDamaged(f"the model {record.id} is not on this machine", hint=hint)
    check_files(record, home, ModelLock(written_by="the plan", files=planned.files))
    for name in planned.files:
        content.files[f"model/{planned.id}/{name}"] = home / name


def _add_sampler(content: Content, manifest: Manifest) -> None:
    """Add the wheel that the plan samples stacks with, so that no network is needed again."""
    if manifest.plan.sampler is None:
        return
    wheel = wheel_of(manifest.plan.sampler)
    path = wheel_path(wheel)
    if path.is_file():
        check_wheels([wheel])
        content.files[f"tool/{wheel.file}"] = path
        return
    content.left_out.append(
        LeftOut(
            what="tool",
            id=wheel.name,
            why="this machine's cache does not hold it",
            digests={"sha256": wheel.sha256},
            source="package index",
        )
    )


def _add_images(
    content: Content, manifest: Manifest, work: Path, save: Save, say: Say, *, wanted: bool
) -> None:
    images = {ran.id: ran for ran in manifest.images}
    if not wanted:
        content.left_out += [
            LeftOut(
                what="image",
                id=ran.id,
                why="left out by choice",
                digests={"identity": ran.identity, "config_digest": ran.config_digest},
                source=f"lock/{ran.id}" if ran.lock_sha256 else "the engine that ran it",
            )
            for ran in images.values()
        ]
        return
    layout = work / "image"
    for name in images:
        say(f"  reading the image {name} from the engine")
    found = oci.write_layout(layout, {name: save(ran) for name, ran in images.items()})
    for name, ran in images.items():
        if found[name].identity.digest != ran.identity:
            raise ImageMissing(f"the image {name} is not the one that ran")
    for path in sorted(p for p in layout.rglob("*") if p.is_file()):
        content.files[f"image/{path.relative_to(layout).as_posix()}"] = path


def _saved(ran: RanImage) -> Iterator[bytes]:
    """Yield an image from the engine, found by its id or its tag and checked by its identity."""
    for reference in (ran.engine_id, f"{REPOSITORY}:{ran.id}"):
        image_id = engine_image_id(reference)
        if image_id is not None and read_identity(image_id).digest == ran.identity:
            yield from save_stream(image_id)
            return
    raise ImageMissing(
        f"the image {ran.id} that ran is not on this engine",
        hint=f"`nox -s build -- {ran.id}` makes it; --without-image leaves it out",
    )


def _write(path: Path, content: Content, run_id: str) -> Index:
    """Write the archive: the index first, then every file in the order of its name."""
    files = dict(sorted(content.files.items()))
    fault = fault_of_names(files)
    if fault:
        raise BadFile(f"cannot be bundled: {fault}", hint="rename it")
    members = {name: _member(name, source) for name, source in files.items()}
    left_out = tuple(sorted(content.left_out, key=lambda one: (one.what, one.id)))
    index = Index(run_id=run_id, members=members, left_out=left_out)
    head = render_index(index)
    rest = ((n, members[n].bytes, _same(n, f, members[n])) for n, f in files.items())
    with path.open("wb") as out:
        for chunk in archive_chunks([(NAME, len(head), [head]), *rest]):
            out.write(chunk)
        out.flush()
        os.fsync(out.fileno())
    return index


def _member(name: str, path: Path) -> Member:
    if not path.is_file():
        raise NotFound(f"{name} is not there")
    return Member(sha256=store.sha256_file(path), bytes=path.stat().st_size)


def _same(name: str, path: Path, wanted: Member) -> Iterator[bytes]:
    """Yield a file's bytes; raise `StaleNumber` when they are no longer those of the index."""
    seen = hashlib.sha256()
    for chunk in file_chunks(path):
        seen.update(chunk)
        yield chunk
    if seen.hexdigest() != wanted.sha256:
        raise StaleNumber(f"{name} was changed while it was bundled")


def digests(index: Index, place: str) -> dict[str, Member]:
    """Return the members below a place, e.g. `model/x`, by their name inside it."""
    start = f"{place}/"
    return {n.removeprefix(start): m for n, m in index.members.items() if n.startswith(start)}
