"""Bundles: the same bytes anywhere; whole, or refused with the culprit named and nothing left."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import random
import shutil
import tarfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from small_run import (
    IMAGE,
    MODEL,
    MODEL_FILES,
    make_bundle,
    make_run,
    put_model,
    saved_image,
    use_home,
)

from kit import bundle_index, oci, store
from kit.archive import END, archive_chunks, header, padding
from kit.bundle_index import Index, Member, parse_index, render_index
from kit.bundle_load import install_model_from_bundle, install_sampler_from_bundle
from kit.errors import (
    BadFile,
    BundleDamaged,
    BundleRefused,
    DiskFull,
    HashMismatch,
    KitError,
    ModelDamaged,
    NotFound,
    StaleNumber,
    UsageError,
)
from kit.image import identity_of_stream
from kit.manifest import load_manifest
from kit.model import find_model
from kit.plan import PlannedSampler
from kit.sampler_tool import wheel_of
from kit.unbundle import is_bundle, read_unbundled, unbundle
from kit.wheels import wheel_path

Files = dict[str, bytes]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        use_home(folder, patch)
        put_model()
        yield folder


@pytest.fixture(scope="module")
def run(home: Path) -> Path:
    return make_run(home / "run")


@pytest.fixture(scope="module")
def whole(run: Path, home: Path) -> bytes:
    make_bundle(run, home / "whole.kitbundle")
    return (home / "whole.kitbundle").read_bytes()


@pytest.fixture
def attempt(tmp_path: Path) -> Callable[[bytes], KitError]:
    """Unbundle bytes that must be refused; return the error, nothing but the file being left."""
    place = tmp_path / "place"
    place.mkdir()
    file = place / "x.kitbundle"

    def run_it(content: bytes) -> KitError:
        file.write_bytes(content)
        with pytest.raises((BundleDamaged, BundleRefused, BadFile)) as caught:
            unbundle(file, place / "out")
        assert [p.name for p in place.iterdir()] == [file.name]
        assert [p.name for p in tmp_path.iterdir()] == ["place"]
        assert caught.value.message.isprintable()
        assert "\n" not in caught.value.message
        return caught.value

    return run_it


def split(content: bytes) -> Files:
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        return {m.name: archive.extractfile(m).read() for m in archive}  # type: ignore[union-attr]


def join(files: Mapping[str, bytes], index: Index | bytes | None = None) -> bytes:
    """Put a bundle together again; its index declares what is in it unless another is given."""
    rest = {name: c for name, c in sorted(files.items()) if name != bundle_index.NAME}
    if index is None:
        index = declare(files)
    head = index if isinstance(index, bytes) else render_index(index)
    members = [(bundle_index.NAME, head), *rest.items()]
    return b"".join(archive_chunks((n, len(c), [c]) for n, c in members))


def declare(files: Mapping[str, bytes], **changes: Any) -> Index:
    """Return an index that fits these files."""
    old = parse_index(files[bundle_index.NAME])
    members = {
        name: Member(sha256=hashlib.sha256(c).hexdigest(), bytes=len(c))
        for name, c in sorted(files.items())
        if name != bundle_index.NAME
    }
    return old.model_copy(update={"members": members, **changes})


def test_a_bundle_holds_all_that_a_machine_without_network_needs(whole: bytes, run: Path) -> None:
    files = split(whole)
    manifest = load_manifest(run / "manifest.json")
    wanted = {f"run/{name}" for name in (*manifest.files, "manifest.json", "report.en.md")}
    wanted |= {f"model/{MODEL}/{name}" for name in MODEL_FILES}
    wanted |= {f"lock/{IMAGE}/{n}" for n in ("inputs.json", "inputs.requirements.txt")}
    assert wanted <= files.keys()
    assert next(iter(files)) == bundle_index.NAME
    assert list(files) == sorted(files)
    index = parse_index(files[bundle_index.NAME])
    assert index.left_out == ()
    assert {n: (m.sha256, m.bytes) for n, m in index.members.items()} == {
        n: (hashlib.sha256(c).hexdigest(), len(c))
        for n, c in files.items()
        if n != bundle_index.NAME
    }


def test_the_same_content_gives_the_same_bytes(
    whole: bytes, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another folder, other times, another umask, another working folder, another image store."""
    copy = Path(shutil.copytree(run, tmp_path / "elsewhere" / "copy"))
    for path in copy.rglob("*"):
        os.utime(path, (1, 1))
        path.chmod(0o777 if path.is_dir() else 0o600)
    monkeypatch.chdir(copy.parent)
    before = os.umask(0o077)
    try:
        make_bundle(Path("copy"), tmp_path / "b.kitbundle", packed=True)
    finally:
        os.umask(before)
    assert (tmp_path / "b.kitbundle").read_bytes() == whole


def test_unbundled_is_what_was_bundled(whole: bytes, run: Path, tmp_path: Path) -> None:
    (tmp_path / "b").write_bytes(whole)
    assert is_bundle(tmp_path / "b")
    found = unbundle(tmp_path / "b", tmp_path / "out")
    assert not is_bundle(tmp_path / "out")
    assert not is_bundle(found.run / "manifest.json")
    assert split(whole) == {
        p.relative_to(tmp_path / "out").as_posix(): p.read_bytes()
        for p in (tmp_path / "out").rglob("*")
        if p.is_file()
    }
    assert not store.changed_files(found.run, found.manifest.files)
    image = found.images[IMAGE]
    assert image.identity.digest == found.manifest.images[0].identity
    loaded = identity_of_stream(oci.docker_archive(found.image_folder, image))
    assert loaded.digest == found.manifest.images[0].identity
    umask = os.umask(0)
    os.umask(umask)
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o777 & ~umask
    make_bundle(found.run, tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == whole


def test_what_is_left_out_is_named_with_hash_and_source(run: Path, tmp_path: Path) -> None:
    index = make_bundle(run, tmp_path / "b", with_image=False, with_model=False)
    image, model = index.left_out
    manifest = load_manifest(run / "manifest.json")
    assert (image.what, image.id, image.source) == ("image", IMAGE, f"lock/{IMAGE}")
    assert image.digests["identity"] == manifest.images[0].identity
    assert (model.what, model.digests) == ("model", manifest.plan.model.files)
    assert "dashscope-2.0.2" in model.source
    assert (tmp_path / "b").stat().st_size < 2 << 20
    found = unbundle(tmp_path / "b", tmp_path / "out")
    assert found.images == {}
    with pytest.raises(NotFound, match="carries no files"):
        install_model_from_bundle(tmp_path / "out", find_model(MODEL))


def test_a_model_that_nobody_may_pass_on_stays_out(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = find_model(MODEL).model_copy(update={"redistributable": False, "licence": "Closed"})
    monkeypatch.setattr("kit.bundle.find_model", lambda _: closed)
    index = make_bundle(run, tmp_path / "b")
    assert [(one.what, one.id) for one in index.left_out] == [("model", MODEL)]
    assert "licence: Closed" in index.left_out[0].why
    assert not [n for n in index.members if n.startswith("model/")]


def test_the_model_comes_back_file_by_file(
    whole: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "b").write_bytes(whole)
    unbundle(tmp_path / "b", tmp_path / "out")
    monkeypatch.setenv("KIT_CACHE", str(tmp_path / "cache"))
    found = install_model_from_bundle(tmp_path / "out", find_model(MODEL))
    assert {p.name: p.read_bytes() for p in found.path.iterdir()} == MODEL_FILES
    assert [p.name for p in found.path.parent.iterdir()] == [MODEL]
    assert install_model_from_bundle(tmp_path / "out", find_model(MODEL)) == found


def test_a_model_changed_after_unbundling_is_not_installed(
    whole: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "b").write_bytes(whole)
    unbundle(tmp_path / "b", tmp_path / "out")
    (tmp_path / "out" / "model" / MODEL / "config.json").write_bytes(b"{ }")
    monkeypatch.setenv("KIT_CACHE", str(tmp_path / "cache"))
    with pytest.raises(ModelDamaged, match=r"config\.json"):
        install_model_from_bundle(tmp_path / "out", find_model(MODEL))
    assert list((tmp_path / "cache" / "models").iterdir()) == []


def test_a_checkout_with_another_model_lock_refuses_it(
    whole: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "b").write_bytes(whole)
    unbundle(tmp_path / "b", tmp_path / "out")
    monkeypatch.undo()
    with pytest.raises((HashMismatch, NotFound)):
        install_model_from_bundle(tmp_path / "out", find_model("smollm2-135m-instruct"))
    monkeypatch.setattr("kit.model.LOCKS", Path("docker/locks").absolute())
    with pytest.raises(HashMismatch, match="other files"):
        install_model_from_bundle(tmp_path / "out", find_model(MODEL))


def test_a_run_that_is_not_as_recorded_is_never_bundled(run: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    samples = next(copy.rglob("samples.jsonl"))
    samples.write_bytes(samples.read_bytes() + b"\n")
    with pytest.raises(StaleNumber, match=r"samples\.jsonl"):
        make_bundle(copy, tmp_path / "b")
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def test_a_model_that_is_not_here_is_one_clear_error(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KIT_CACHE", str(tmp_path / "empty"))
    with pytest.raises(ModelDamaged) as caught:
        make_bundle(run, tmp_path / "b")
    assert "--without-model" in caught.value.hint


def test_a_hostile_run_id_names_no_file_elsewhere(run: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    raw = json.loads((copy / "manifest.json").read_bytes())
    (copy / "manifest.json").write_text(json.dumps({**raw, "run_id": "../../x"}), "utf-8")
    with pytest.raises(BadFile, match="run_id"):
        make_bundle(copy, tmp_path / "b")


# Every byte


def owner_of(offset: int, head: int, index: Index) -> str:
    """Return the member, header and padding included, that an offset of the bundle lies in."""
    start = 0
    sizes = {bundle_index.NAME: head} | {n: index.members[n].bytes for n in sorted(index.members)}
    for name, size in sizes.items():
        start += 512 + size + len(padding(size))
        if offset < start:
            return name
    return "the end of the archive"


def places(whole: bytes, rng: random.Random) -> Iterator[int]:
    """Draw 200 places: 25 inside each kind of content, the rest anywhere in the file."""
    files = split(whole)
    layers = sorted((n for n in files if oci.BLOBS in n), key=lambda n: -len(files[n]))
    kinds = ["bundle.json", "run/manifest.json", f"lock/{IMAGE}/inputs.json", layers[0]]
    kinds += [f"model/{MODEL}/model.safetensors"]
    kinds += [next(n for n in files if n.endswith("measure/samples.jsonl"))]
    with tarfile.open(fileobj=io.BytesIO(whole)) as archive:
        starts = {m.name: m.offset_data for m in archive}
    for kind in kinds:
        for _ in range(25):
            yield starts[kind] + rng.randrange(len(files[kind]))
    for _ in range(50):
        yield rng.randrange(len(whole))


def test_a_flipped_byte_anywhere_is_found_and_named(
    whole: bytes, attempt: Callable[[bytes], KitError]
) -> None:
    rng = random.Random(5)
    files = split(whole)
    index = parse_index(files[bundle_index.NAME])
    found = 0
    for place in places(whole, rng):
        broken = bytearray(whole)
        broken[place] ^= rng.randrange(1, 256)
        error = attempt(bytes(broken))
        culprit = owner_of(place, len(files[bundle_index.NAME]), index)
        assert error.message.startswith(culprit), (place, culprit, error.message)
        found += 1
    assert found == 200


def test_a_bundle_cut_anywhere_is_found_and_named(
    whole: bytes, attempt: Callable[[bytes], KitError]
) -> None:
    rng = random.Random(6)
    head = len(split(whole)[bundle_index.NAME])
    index = parse_index(split(whole)[bundle_index.NAME])
    lengths = [0, 1, 511, 512, 513, len(whole) - 1, len(whole) - 1024]
    for length in [*lengths, *(rng.randrange(len(whole)) for _ in range(40))]:
        error = attempt(whole[:length])
        assert isinstance(error, BundleDamaged)
        assert error.message.startswith(owner_of(length, head, index)), (length, error.message)


def test_bytes_changed_with_the_index_are_held_against_the_manifest(
    whole: bytes, attempt: Callable[[bytes], KitError]
) -> None:
    """Who rewrites the index to fit is found by what the manifest says of the part."""
    files = split(whole)
    sample = next(n for n in files if n.endswith("measure/samples.jsonl"))
    names = [sample, f"model/{MODEL}/config.json", f"lock/{IMAGE}/inputs.json", "run/plan.json"]
    names += [f"lock/{IMAGE}/inputs.requirements.txt", "run/workload/measure.jsonl"]
    names += [next(n for n in files if oci.BLOBS in n), "image/index.json", "image/oci-layout"]
    for name in names:
        error = attempt(join({**files, name: files[name].replace(b"0", b"1", 1) + b" "}))
        assert isinstance(error, BundleDamaged)
        assert error.message.startswith(name), error.message


@pytest.mark.parametrize(
    "name",
    ["run/replicates/00-pair0-baseline/events.jsonl", f"model/{MODEL}/config.json",
     f"lock/{IMAGE}/inputs.json", "run/manifest.json", "image/index.json"],
)  # fmt: skip
def test_a_part_that_is_neither_there_nor_declared_left_out_is_missing(
    name: str, whole: bytes, attempt: Callable[[bytes], KitError]
) -> None:
    files = split(whole)
    del files[name]
    error = attempt(join(files))
    assert isinstance(error, BundleDamaged)
    assert name.rsplit("/", 1)[-1] in error.message


@pytest.mark.parametrize(
    "name",
    ["run/extra.json", "run/replicates/reproduction.json", f"model/{MODEL}/extra.bin",
     "model/other/config.json", "lock/other/inputs.json", "image/extra",
     "image/blobs/sha256/" + hashlib.sha256(b"x").hexdigest()],
)  # fmt: skip
def test_a_part_that_the_run_did_not_use_is_refused(
    name: str, whole: bytes, attempt: Callable[[bytes], KitError]
) -> None:
    error = attempt(join({**split(whole), name: b"x"}))
    assert isinstance(error, BundleRefused)
    assert error.message.startswith(name)


def test_another_image_under_the_runs_name_is_found(
    whole: bytes, attempt: Callable[[bytes], KitError], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("other") / "image"
    oci.write_layout(folder, {IMAGE: [saved_image(note="other")]})
    other = {
        f"image/{p.relative_to(folder).as_posix()}": p.read_bytes()
        for p in folder.rglob("*")
        if p.is_file()
    }
    rest = {n: c for n, c in split(whole).items() if not n.startswith("image/")}
    error = attempt(join({**rest, **other}))
    assert f"{IMAGE} is not the image that ran" in error.message


# Hostile on purpose


def member(name: str, content: bytes = b"", **fields: Any) -> bytes:
    """Return one member as any tar may hold it."""
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(content), 0o644
    for key, value in fields.items():
        setattr(info, key, value)
    return info.tobuf(tarfile.GNU_FORMAT) + content + padding(len(content))


def in_place_of_the_last(whole: bytes, instead: bytes) -> bytes:
    """Put something else where the last member's header is."""
    files = split(whole)
    last = max(n for n in files)
    start = whole.rindex(header(last, len(files[last])))
    return (whole[:start] + instead).ljust(len(whole), b"\0")


PAX = tarfile.TarInfo("x").create_pax_header(tarfile.TarInfo("ü" * 200).get_info(), "utf-8")
HOSTILE = {
    "traversal": (member("run/../../evil", b"x"), "run/../../evil: a path that leaves"),
    "absolute": (member("/etc/evil", b"x"), "/etc/evil: an absolute path"),
    "symbolic link": (member("run/l", type=tarfile.SYMTYPE, linkname="/etc"), "run/l: a symbolic"),
    "hard link": (member("run/l", type=tarfile.LNKTYPE, linkname="/etc/passwd"), "a hard link"),
    "device": (member("run/d", type=tarfile.CHRTYPE, devmajor=1, devminor=3), "a device"),
    "block device": (member("run/d", type=tarfile.BLKTYPE), "a device"),
    "pipe": (member("run/p", type=tarfile.FIFOTYPE), "a pipe"),
    "folder": (member("run/f", type=tarfile.DIRTYPE), "a folder"),
    "sparse": (member("run/s", type=tarfile.GNUTYPE_SPARSE), "a sparse file"),
    "long name": (member("run/" + "x" * 300, b"x"), "an extension of the format"),
    "pax header": (PAX, "an extension of the format"),
    "unknown type": (member("run/u", type=b"Z"), "an extension of the format"),
    "undeclared": (member("run/undeclared", b"x"), "run/undeclared: bundle.json does not declare"),
    "twice": (member("run/facts.json", b"x"), "run/facts.json: there twice"),
    "escapes": (member("run/\x1b[2J\u202e", b"x"), "not a plain path"),
    "case": (member("run/FACTS.json", b"x"), "bundle.json does not declare it"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_member_is_refused_by_name(
    case: str, whole: bytes, attempt: Callable[[bytes], KitError]
) -> None:
    instead, said = HOSTILE[case]
    error = attempt(in_place_of_the_last(whole, instead))
    assert isinstance(error, BundleRefused), error.message
    assert said in error.message


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_member_after_the_end_is_refused_too(
    case: str, whole: bytes, attempt: Callable[[bytes], KitError]
) -> None:
    error = attempt(whole[: -len(END)] + HOSTILE[case][0] + END)
    assert isinstance(error, BundleRefused), error.message


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"uid": 1}, "an owner"),
        ({"mode": 0o4755}, "an owner, a mode"),
        ({"mtime": 1}, "a time"),
        ({"uname": "x"}, "an owner"),
    ],
)
def test_a_member_with_an_owner_mode_or_time_is_refused(
    fields: dict[str, Any], said: str, whole: bytes, attempt: Callable[[bytes], KitError]
) -> None:
    files = split(whole)
    last = max(files)
    error = attempt(in_place_of_the_last(whole, member(last, files[last], **fields)))
    assert isinstance(error, BundleRefused)
    assert error.message.startswith(last)
    assert said in error.message


@pytest.mark.parametrize("change", [-1, 1, 1 << 40])
def test_a_size_other_than_declared_is_refused_before_it_is_read(
    change: int, whole: bytes, attempt: Callable[[bytes], KitError]
) -> None:
    files = split(whole)
    last = max(files)
    error = attempt(in_place_of_the_last(whole, header(last, len(files[last]) + change)))
    assert isinstance(error, BundleDamaged)
    assert "declared" in error.message


def test_members_in_another_order_or_gone_are_named(
    whole: bytes, attempt: Callable[[bytes], KitError]
) -> None:
    files = split(whole)
    names = [n for n in sorted(files) if n != bundle_index.NAME]
    head = files[bundle_index.NAME]
    swapped = [names[1], names[0], *names[2:]]
    chunks = [(bundle_index.NAME, len(head), [head])]
    chunks += [(n, len(files[n]), [files[n]]) for n in swapped]
    error = attempt(b"".join(archive_chunks(chunks)))
    assert error.message == f"{names[0]}: missing, {names[1]} stands in its place"
    whole_but_one = [(n, len(files[n]), [files[n]]) for n in sorted(files)[:-1]]
    short = b"".join(archive_chunks(whole_but_one))
    error = attempt(short.ljust(len(whole), b"\0"))
    assert "missing, the archive ends before it" in error.message


def raw_index(whole: bytes, **changes: Any) -> bytes:
    """Return an index that its own class would refuse, with the hash that fits it."""
    body = {**parse_index(split(whole)[bundle_index.NAME]).model_dump(mode="json"), **changes}
    try:
        digest = bundle_index.canonical_sha256(body)
    except BadFile:
        digest = "0" * 64
    return (json.dumps({**body, "sha256": digest}, indent=1, sort_keys=True) + "\n").encode()


def entry(size: int) -> dict[str, Any]:
    return {"sha256": "0" * 64, "bytes": size}


def names(*given: str) -> dict[str, Any]:
    return {"members": {name: entry(1) for name in given}}


INDEXES: dict[str, tuple[dict[str, Any], type[KitError], str]] = {
    "traversal": (names("run/../../x"), BundleRefused, "leaves the folder"),
    "absolute": (names("/etc/x"), BundleRefused, "absolute"),
    "drive": (names("C:\\x"), BundleRefused, "not a plain path"),
    "case": (names("run/A", "run/a"), BundleRefused, "the same file"),
    "file and folder": (names("run/a", "run/a/b"), BundleRefused, "a folder of"),
    "normalised": (names("run/e\u0301", "run/\u00e9"), BundleRefused, "not a plain path"),
    "itself": (names("bundle.json"), BundleRefused, "twice"),
    "elsewhere": (names("etc/x"), BundleRefused, "below none of"),
    "count": (names(*(f"run/{n}" for n in range(20_001))), BundleRefused, "20001 members"),
    "member": ({"members": {"run/x": entry(1 << 50)}}, BundleDamaged, "run/x"),
    "negative": ({"members": {"run/x": entry(-1)}}, BundleDamaged, "run/x"),
    "huge": ({"members": {"run/x": entry(10**400)}}, BundleDamaged, "bundle.json"),
    "total": (
        {"members": {f"run/{n}": entry(60 << 30) for n in range(5)}}, BundleRefused, "at most"
    ),
    "small": ({"members": {"run/manifest.json": entry(1 << 30)}}, BundleRefused, "allowed"),
    "hash": ({"members": {"run/x": {"sha256": "../x", "bytes": 1}}}, BundleDamaged, "sha256"),
    "newer": ({"version": 2}, BundleRefused, "version 2 is newer"),
    "no version": ({"version": None}, BundleDamaged, "version"),
    "unknown key": ({"more": 1}, BundleDamaged, "more"),
    "other run": ({"run_id": "another"}, BundleDamaged, "run_id"),
}  # fmt: skip


@pytest.mark.parametrize("case", INDEXES)
def test_a_hostile_index_is_refused_before_anything_is_read(
    case: str, whole: bytes, attempt: Callable[[bytes], KitError]
) -> None:
    changes, error, said = INDEXES[case]
    caught = attempt(join(split(whole), raw_index(whole, **changes)))
    assert isinstance(caught, error), caught.message
    assert caught.message.startswith("bundle.json")
    assert said in caught.message


@pytest.mark.parametrize(
    "head", [b"", b"[]", b"3", b"\xff\xfe", b"[" * 100_000, b'{"version": 1}', b"{}" * 9]
)
def test_an_index_that_is_none_is_damaged(
    head: bytes, whole: bytes, attempt: Callable[[bytes], KitError]
) -> None:
    error = attempt(join(split(whole), head))
    assert isinstance(error, BundleDamaged)
    assert error.message.startswith("bundle.json")


def test_an_index_written_otherwise_is_damaged(
    whole: bytes, attempt: Callable[[bytes], KitError]
) -> None:
    files = split(whole)
    compact = json.dumps(json.loads(files[bundle_index.NAME])).encode()
    assert "sha256" in attempt(join(files, compact)).message


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"", BundleDamaged),
        (b"#!/bin/sh\n" * 200, BundleRefused),
        (gzip.compress(b"x" * 9999), BundleRefused),
        (b"PK\x03\x04" + bytes(9999), BundleRefused),
        (bytes(10240), BundleRefused),
        (member("etc/x", b"x") + END, BundleRefused),
        (header("bundle.json", 9 << 20) + bytes(9999), BundleRefused),
        (header("bundle.json", 1 << 60) + bytes(9999), BundleRefused),
        (member("bundle.json", type=tarfile.SYMTYPE, linkname="/etc/passwd") + END, BundleRefused),
    ],
    ids=["empty", "text", "gzip", "zip", "zeros", "tar", "9 MiB index", "EiB index", "link index"],
)
def test_what_is_no_bundle_is_refused(
    content: bytes, error: type[KitError], attempt: Callable[[bytes], KitError]
) -> None:
    assert isinstance(attempt(content), error)


@pytest.mark.parametrize("tail", [b"\0", b"x", bytes(10240), b"x" * 512])
def test_bytes_after_the_end_are_found(
    tail: bytes, whole: bytes, attempt: Callable[[bytes], KitError]
) -> None:
    assert "the end of the archive" in attempt(whole + tail).message


def test_pieces_moved_removed_or_repeated_never_pass(
    whole: bytes, attempt: Callable[[bytes], KitError]
) -> None:
    rng = random.Random(8)
    blocks = len(whole) // 512
    for _ in range(60):
        a, b, c = sorted(rng.randrange(blocks + 1) * 512 for _ in range(3))
        mixed = rng.choice(
            [whole[:a] + whole[b:], whole[:b] + whole[a:], whole[:a] + whole[b:c] + whole[a:b]]
        )
        mixed += whole[len(mixed) :] if len(mixed) < len(whole) else b""
        if mixed != whole:
            assert attempt(mixed).message


def test_a_disk_that_is_too_small_is_said_before_anything_is_written(
    whole: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "b").write_bytes(whole)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr("kit.unbundle.shutil.disk_usage", lambda _: usage._replace(free=1 << 10))
    with pytest.raises(DiskFull, match="MiB are free"):
        unbundle(tmp_path / "b", tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["b"]


def test_a_target_that_holds_something_is_left_alone(whole: bytes, tmp_path: Path) -> None:
    (tmp_path / "b").write_bytes(whole)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("", "utf-8")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("full", "link", "b"):
        with pytest.raises(UsageError, match="there already"):
            unbundle(tmp_path / "b", tmp_path / name)
    assert [p.name for p in (tmp_path / "full").iterdir()] == ["mine"]
    (tmp_path / "empty").mkdir()
    assert unbundle(tmp_path / "b", tmp_path / "empty").run.is_dir()


@pytest.mark.parametrize("kind", ["missing", "folder", "pipe"])
def test_a_file_that_is_none_is_one_clear_error(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "b"
    if kind == "folder":
        path.mkdir()
    if kind == "pipe":
        os.mkfifo(path)
    with pytest.raises(NotFound):
        unbundle(path, tmp_path / "out")


def test_a_folder_that_is_no_unbundled_one_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"bundle\.json"):
        read_unbundled(tmp_path)


SAMPLER_WHEEL = b"a wheel"
SAMPLER = PlannedSampler(version="9.9", wheel_sha256=hashlib.sha256(SAMPLER_WHEEL).hexdigest())
TOOL = f"tool/{wheel_of(SAMPLER).file}"


@pytest.fixture
def sampled(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return a run that sampled stacks; the cache holds the sampler's wheel meanwhile."""
    kept = wheel_path(wheel_of(SAMPLER))
    store.write_bytes(kept, SAMPLER_WHEEL)
    yield make_run(tmp_path_factory.mktemp("sampled") / "run", sampler=SAMPLER)
    kept.unlink(missing_ok=True)


def test_the_sampler_travels_with_the_run(
    sampled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_bundle(sampled, tmp_path / "x.kitbundle")
    assert split((tmp_path / "x.kitbundle").read_bytes())[TOOL] == SAMPLER_WHEEL
    unbundle(tmp_path / "x.kitbundle", tmp_path / "out")
    monkeypatch.setenv("KIT_CACHE", str(tmp_path / "bare"))
    assert install_sampler_from_bundle(read_unbundled(tmp_path / "out"))
    assert wheel_path(wheel_of(SAMPLER)).read_bytes() == SAMPLER_WHEEL


def test_a_sampler_that_is_not_here_is_left_out_and_said_so(sampled: Path, tmp_path: Path) -> None:
    wheel_path(wheel_of(SAMPLER)).unlink()
    index = make_bundle(sampled, tmp_path / "x.kitbundle")
    assert [(one.what, one.digests) for one in index.left_out] == [
        ("tool", {"sha256": SAMPLER.wheel_sha256})
    ]
    unbundle(tmp_path / "x.kitbundle", tmp_path / "out")
    assert not install_sampler_from_bundle(read_unbundled(tmp_path / "out"))


def test_another_sampler_than_the_plan_s_is_refused(
    sampled: Path, whole: bytes, attempt: Callable[[bytes], KitError]
) -> None:
    make_bundle(sampled, sampled.with_suffix(".kitbundle"))
    files = split(sampled.with_suffix(".kitbundle").read_bytes())
    changed = attempt(join({**files, TOOL: b"another"}))
    assert "other bytes than the plan says" in changed.message
    gone = attempt(join({name: c for name, c in files.items() if name != TOOL}))
    assert f"{TOOL}: missing" in gone.message
    strange = attempt(join({**split(whole), "tool/any.whl": b"x"}))
    assert "tool/any.whl: no tool of the plan" in strange.message
