"""Puts what an unbundled folder carries in place: images into the engine, the model's files."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import docker
import requests

from kit import engine, oci, store
from kit.errors import (
    BundleDamaged,
    DiskFull,
    EngineUnreachable,
    HashMismatch,
    IdentityMismatch,
    ImageMissing,
    NotFound,
)
from kit.image import REPOSITORY, read_identity
from kit.manifest import Manifest, RanImage
from kit.model import (
    ModelFiles,
    ModelLock,
    ModelRecord,
    check_files,
    find_model,
    model_path,
    read_model_lock,
)
from kit.sampler_tool import wheel_of
from kit.unbundle import Unbundled, read_unbundled
from kit.wheels import store as keep_wheel
from kit.wheels import wheel_path

Say = Callable[[str], None]


def _ran_image(manifest: Manifest, image_id: str) -> RanImage:
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
    wanted = _ran_image(bundle.manifest, image_id)
    image = bundle.images.get(image_id)
    if image is None:
        raise ImageMissing(f"the bundle carries no image {image_id}", hint="build or pull it")
    say(f"  loading {image_id} from the bundle")
    client = engine.connect(timeout_s=600)
    try:
        there = {str(one.id) for one in client.images.list(all=True)}
        archive = oci.docker_archive(bundle.image_folder, image)
        found = client.images.load(archive)  # type: ignore[arg-type] # it sends any iterator
        if not found:
            raise BundleDamaged(f"the engine took no image out of {image_id}")
        loaded = str(found[0].id)
        if read_identity(loaded).digest != wanted.identity:
            if loaded not in there:
                client.images.remove(loaded)
            raise IdentityMismatch(f"what was loaded as {image_id} is not the image that ran")
        client.images.get(loaded).tag(REPOSITORY, tag=image_id)
    except docker.errors.DockerException as error:
        if "no space left" in str(error).lower():
            raise DiskFull("no space left where the engine keeps its images") from None
        raise BundleDamaged(
            f"the engine does not take the image {image_id}", detail=str(error)
        ) from None
    except requests.RequestException as error:
        raise EngineUnreachable(
            "the engine stopped answering while an image was loaded", detail=str(error)
        ) from None
    finally:
        client.close()
    return loaded


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


def install_sampler_from_bundle(bundle: Unbundled) -> bool:
    """Put the sampler's wheel that the plan names into the cache; return whether it is there now.

    Raises `HashMismatch` for other bytes.
    """
    planned = bundle.manifest.plan.sampler
    if planned is None:
        return False
    wheel = wheel_of(planned)
    source = bundle.folder / "tool" / wheel.file
    if not wheel_path(wheel).is_file() and source.is_file():
        home = wheel_path(wheel).parent
        store.make_folder(home.parent)
        with tempfile.TemporaryDirectory(prefix="part-", dir=home.parent) as work:
            copied = Path(work) / wheel.file
            shutil.copyfile(source, copied)
            keep_wheel(copied, wheel)
    return wheel_path(wheel).is_file()


def load_all(bundle: Unbundled, say: Say) -> None:
    """Load every image of an unbundled folder and install its model; say what it lacks."""
    for ran in {one.id: one for one in bundle.manifest.images}.values():
        if ran.id in bundle.images:
            load_image_from_bundle(bundle.folder, ran.id, say)
    install_sampler_from_bundle(bundle)
    planned = bundle.manifest.plan.model.id
    if not bundle.index.lacks("model", planned):
        found = install_model_from_bundle(bundle.folder, find_model(planned))
        say(f"  model {planned}: {len(found.files)} files in place")
