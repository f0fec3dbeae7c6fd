"""Holds the parts of a bundle against its manifest: who rewrites the index to fit is found here."""

from __future__ import annotations

from pathlib import Path

from kit import oci
from kit.bundle import digests, is_beside
from kit.bundle_index import NAME, Index, Member
from kit.errors import BadFile, BundleDamaged, BundleRefused
from kit.lock_file import INPUTS, REQUIREMENTS, Lock, lock_sha256, render_requirements
from kit.manifest import Manifest, load_manifest
from kit.sampler_tool import wheel_of
from kit.value import load_json, parse_value, read_text


def check_content(folder: Path, index: Index) -> None:
    """Raise `BundleDamaged` or `BundleRefused` unless the parts are what the run used.

    A part may be absent only where the index declares it as left out. The files' hashes are those
    of the index: whether they are right is for the caller to check.
    """
    if "run/manifest.json" not in index.members:
        raise BundleDamaged("run/manifest.json: missing")
    manifest = load_manifest(folder / "run" / "manifest.json")
    if manifest.run_id != index.run_id:
        raise BundleDamaged(f"{NAME}: run_id: not the manifest's")
    _check_run(index, manifest)
    _check_model(index, manifest)
    _check_tool(index, manifest)
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


def _check_tool(index: Index, manifest: Manifest) -> None:
    """Hold the sampler's wheel against the plan, which is what may be run."""
    found = digests(index, "tool")
    if manifest.plan.sampler is None:
        wanted = {}
    else:
        wheel = wheel_of(manifest.plan.sampler)
        wanted = {wheel.file: wheel.sha256}
        if not found and index.lacks("tool", wheel.name):
            return
    for name in sorted({*found, *wanted}):
        if name not in wanted:
            raise BundleRefused(f"tool/{name}: no tool of the plan")
        if name not in found:
            raise BundleDamaged(f"tool/{name}: missing")
        if found[name].sha256 != wanted[name]:
            raise BundleDamaged(f"tool/{name}: other bytes than the plan says")


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
