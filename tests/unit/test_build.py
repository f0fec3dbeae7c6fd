"""What a build is given, and how it says what differs."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from kit import build, debian
from kit.errors import IdentityMismatch, NotLocked, ToolMissing
from kit.image import Identity, ImageRecord, find_image
from kit.layers import compare_layers, read_layers
from kit.lock_file import InsideFacts, LockedIdentity, lock_sha256, read_lock

COMMIT = "b23bd73f540175f9e117eaee5029cd7d8df63964"


def inside(**changes: str | None) -> InsideFacts:
    told: dict[str, str | None] = {
        "python": "3.11.2", "vllm_version": "0.32.0+cpu", "vllm_commit": None,
        "torch_version": "2.13.0+cpu", "torch_cuda": None,
    }  # fmt: skip
    return InsideFacts.model_validate(told | changes)


def locked(*, recipe: dict[str, str] | None = None, layers: tuple[str, ...] = ()) -> LockedIdentity:
    identity = Identity(config_digest="sha256:c", diff_ids=layers, size_bytes=1)
    return LockedIdentity(
        written_by="a test", config_digest="sha256:c", diff_ids=layers, size_bytes=1,
        digest=identity.digest, base_sha256="b",
        recipe=build.recipe_hashes() if recipe is None else recipe,
        built_with={}, inside=inside(),
    )  # fmt: skip


def test_what_is_inside_must_be_what_the_record_says() -> None:
    record = find_image("v0.32.0-cpu")
    build.check_inside(record, read_lock(record), inside())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"torch_cuda": "13.0"}, "torch is built for CUDA 13.0, not None"),
        ({"vllm_version": "0.31.0+cpu"}, "vLLM says 0.31.0"),
    ],
)
def test_another_variant_or_version_inside_is_refused(changes: dict[str, str], said: str) -> None:
    record = find_image("v0.32.0-cpu")
    with pytest.raises(IdentityMismatch, match=said):
        build.check_inside(record, read_lock(record), inside(**changes))


def test_another_commit_inside_is_refused() -> None:
    record = find_image("v0.32.0-cpu").model_copy(update={"commit": COMMIT})
    lock = read_lock(record)
    build.check_inside(record, lock, inside(vllm_commit="gb23bd73f5"))
    with pytest.raises(IdentityMismatch, match="commit gffd46bfab"):
        build.check_inside(record, lock, inside(vllm_commit="gffd46bfab"))


@pytest.mark.parametrize(
    ("told", "same"),
    [("gb23bd73f5", True), (COMMIT, True), ("b23bd73", True), ("gffd46bfab", False),
     (None, False), ("", False), ("b23", False)],
)  # fmt: skip
def test_a_commit_is_proven_only_by_enough_digits(told: str | None, same: bool) -> None:
    assert build.is_commit(told, COMMIT) is same


def test_a_changed_file_of_the_recipe_is_named() -> None:
    now = build.recipe_hashes()
    assert set(now) == {f"docker/{name}" for name in build.RECIPE}
    assert build.recipe_changes(locked()) == []
    changed = locked(recipe=now | {"docker/Dockerfile": "0"})
    assert build.recipe_changes(changed) == [
        "docker/Dockerfile is not the file that the lock was made with"
    ]


def test_the_differing_layer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "tool_changes", lambda _: [])  # those ask the engine
    record = find_image("v0.32.0-cpu")
    wanted = locked(layers=("sha256:base", "sha256:packages"))

    def found(config: str, *layers: str) -> Identity:
        return Identity(config_digest=config, diff_ids=layers, size_bytes=1)

    build.check_identity(record, found("sha256:c", "sha256:base", "sha256:packages"), wanted)
    build.check_identity(record, found("sha256:other"), None)
    for identity, said in (
        (found("sha256:c", "sha256:x", "sha256:packages"), "the base"),
        (found("sha256:c", "sha256:base", "sha256:x"), "the Python packages"),
        (found("sha256:x", "sha256:base", "sha256:packages"), "configuration"),
        (found("sha256:c", "sha256:base"), "1 layers instead of 2"),
    ):
        with pytest.raises(IdentityMismatch, match=said):
            build.check_identity(record, identity, wanted)


def test_the_labels_name_lock_and_base(tmp_path: Path) -> None:
    record = find_image("v0.32.0-cpu")
    base = tmp_path / "base.tar"
    base.write_bytes(b"base")
    found = build.labels(record, read_lock(record), base)
    assert found["kit.lock.sha256"] == lock_sha256(read_lock(record))
    assert found["org.opencontainers.image.version"] == "0.32.0+cpu"
    assert found["org.opencontainers.image.base.digest"].startswith("sha256:")
    assert "org.opencontainers.image.revision" not in found
    with_commit = record.model_copy(update={"commit": COMMIT})
    labels = build.labels(with_commit, read_lock(record), base)
    assert labels["org.opencontainers.image.revision"] == COMMIT


def test_an_image_without_a_lock_is_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    record = ImageRecord(id="nothing", source="release", cuda="cpu", release="1", as_of="2026")
    with pytest.raises(NotLocked, match="nothing is not locked"):
        build.ensure_image(record, lambda line: None)


Change = Callable[[tarfile.TarInfo], None]


def saved(files: dict[str, bytes], change: Change | None = None) -> bytes:
    layer, out = io.BytesIO(), io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            if change is not None:
                change(member)
            archive.addfile(member, io.BytesIO(content))
    manifest = b'[{"Layers": ["one/layer.tar"]}]'
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, body in (("one/layer.tar", layer.getvalue()), ("manifest.json", manifest)):
            member = tarfile.TarInfo(name)
            member.size = len(body)
            archive.addfile(member, io.BytesIO(body))
    return out.getvalue()


def set_time(member: tarfile.TarInfo) -> None:
    member.mtime = 7


def set_owner(member: tarfile.TarInfo) -> None:
    member.uid = 1


@pytest.mark.parametrize(
    ("second", "lines"),
    [
        (saved({"a": b"1", "b": b"2"}), []),
        (saved({"a": b"1", "b": b"3"}), ["layer 1: b: content"]),
        (saved({"a": b"1"}), ["layer 1: b: only in first"]),
        (saved({"a": b"1", "b": b"22"}), ["layer 1: b: size, content"]),
        (saved({"b": b"2", "a": b"1"}), ["layer 1: the same members in another order"]),
        (saved({"a": b"1", "b": b"2"}, set_time), ["layer 1: a: time", "layer 1: b: time"]),
        (saved({"a": b"1", "b": b"2"}, set_owner), ["layer 1: a: owner", "layer 1: b: owner"]),
    ],
)
def test_every_difference_between_two_layers_is_named(second: bytes, lines: list[str]) -> None:
    first = saved({"a": b"1", "b": b"2"})
    found = compare_layers(read_layers([first]), read_layers([second]), names=("first", "second"))
    assert found == lines


@pytest.mark.parametrize(
    ("uid", "lacking", "named"),
    [(0, "newuidmap", None), (1000, "newuidmap", "newuidmap"), (0, "mmdebstrap", "mmdebstrap")],
)
def test_a_program_that_making_a_base_lacks_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, uid: int, lacking: str, named: str | None
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: uid)
    monkeypatch.setattr("shutil.which", lambda name: None if name == lacking else f"/bin/{name}")
    assert debian.missing_base_programs() == (() if named is None else (named,))
    if named is not None:
        with pytest.raises(ToolMissing, match=named) as told:
            debian.make_base((), 0, tmp_path / "base.tar")
        assert "uidmap" in str(told.value.hint)
