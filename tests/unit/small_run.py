"""A small real run: a reference whose image and model are replaced by ones that fit into a test."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
from pathlib import Path

import pytest

from kit import bundle, model, store
from kit.bundle_index import Index
from kit.image import Identity, find_image, identity_of_stream
from kit.lock_file import lock_sha256, read_lock
from kit.manifest import RanImage, load_manifest, manifest_json
from kit.model import ModelLock, find_model
from kit.paths import MANIFESTS
from kit.plan import PlannedModel, PlannedSampler
from kit.reference import unpack_reference

IMAGE = "v0.32.0-cpu"
REFERENCE = MANIFESTS / "exp1_prefix_cache" / "host-v0.26.0-cu130--qwen2.5-0.5b--cuda.json"
MODEL = "qwen2.5-0.5b"
MODEL_FILES = {"config.json": b"{}\n", "model.safetensors": b"weights " * 5000}


def layer(content: bytes) -> bytes:
    """Return a layer that holds one file."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        member = tarfile.TarInfo("file")
        member.size = len(content)
        archive.addfile(member, io.BytesIO(content))
    return out.getvalue()


def saved_image(*, packed: bool = False, note: str = "") -> bytes:
    """Return what `docker save` gives for an image of two layers, packed or not as a store may."""
    layers = [layer(b"one " * 9999), layer(b"two " * 9999)]
    diff_ids = ["sha256:" + hashlib.sha256(one).hexdigest() for one in layers]
    config = json.dumps({"note": note, "rootfs": {"type": "layers", "diff_ids": diff_ids}}).encode()
    blobs = [gzip.compress(one, mtime=0) if packed else one for one in layers]
    names = [f"blobs/sha256/{hashlib.sha256(blob).hexdigest()}" for blob in (*blobs, config)]
    entry = [{"Config": names[-1], "RepoTags": ["any:tag"], "Layers": names[:-1]}]
    files = [
        *zip(names, (*blobs, config), strict=True),
        ("manifest.json", json.dumps(entry).encode()),
    ]
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, content in files:
            member = tarfile.TarInfo(name)
            member.size, member.mtime = len(content), 1 if packed else 2
            archive.addfile(member, io.BytesIO(content))
    return out.getvalue()


def ran_image() -> RanImage:
    """Return the record of the small image, under the id and lock of a real one."""
    identity: Identity = identity_of_stream([saved_image()])
    return RanImage(
        id=IMAGE,
        engine_id=identity.config_digest,
        config_digest=identity.config_digest,
        manifest_digest=None,
        diff_ids=identity.diff_ids,
        identity=identity.digest,
        lock_sha256=lock_sha256(read_lock(find_image(IMAGE))),
        how="present",
        state="verified",
    )


def make_run(folder: Path, *, sampler: PlannedSampler | None = None) -> Path:
    """Lay a reference out as a run folder whose image and model are the small ones."""
    run = unpack_reference(REFERENCE, folder)
    manifest = load_manifest(run / "manifest.json")
    files = {name: hashlib.sha256(content).hexdigest() for name, content in MODEL_FILES.items()}
    plan = manifest.plan.model_copy(
        update={
            "model": PlannedModel(id=MODEL, weights="dummy", files=files),
            "sampler": sampler,
        }
    )
    changes = {"images": (ran_image(),), "plan": plan, "plan_sha256": plan.sha256}
    store.write_text(run / "manifest.json", manifest_json(manifest.model_copy(update=changes)))
    store.write_text(run / "report.en.md", "# A report\n")
    return run


def use_home(home: Path, patch: pytest.MonkeyPatch) -> None:
    """Let the cache and the model's lock be below a folder of the test."""
    patch.setenv("KIT_CACHE", str(home / "cache"))
    patch.setattr(model, "LOCKS", home / "locks")
    files = {name: hashlib.sha256(content).hexdigest() for name, content in MODEL_FILES.items()}
    lock = ModelLock(written_by="a test", files=files)
    store.write_json(model.lock_path(find_model(MODEL)), lock.model_dump(mode="json"))


def put_model() -> Path:
    """Put the small model where `use_home` lets the kit look for it; return its folder."""
    folder = model.model_path(find_model(MODEL))
    for name, content in MODEL_FILES.items():
        store.write_bytes(folder / name, content)
    return folder


def make_bundle(run: Path, out: Path, *, packed: bool = False, **options: bool) -> Index:
    """Bundle a small run; the image's bytes come from here in place of an engine."""
    return bundle.make_bundle(
        run, out, lambda _: None, save=lambda _: [saved_image(packed=packed)], **options
    )[1]
