"""Push and pull against a real registry on this machine: Debian's docker-registry."""

from __future__ import annotations

import io
import os
import shutil
import socket
import subprocess
import tarfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import docker
import pytest

from kit import engine, image, lock, registry
from kit.build import ensure_image
from kit.errors import (
    GoneUpstream,
    IdentityMismatch,
    ImageMissing,
    RegistryRefused,
    RegistryUnreachable,
)
from kit.image import ImageRecord, engine_image_id, find_image, read_identity
from kit.lock_file import InsideFacts, LockedIdentity, read_identity_lock

PROGRAM = "docker-registry"
# user `kit`, a password nobody needs: the tests want to be refused
HTPASSWD = "kit:$2y$05$abcdefghijklmnopqrstuuB9cGBdGzY1Q0uXp6S0cV8mYx0jYy2Zi\n"


def quiet(line: str) -> None:
    del line


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="session")
def program() -> str:
    if shutil.which(PROGRAM) is None and os.geteuid() == 0:
        quietly = {"DEBIAN_FRONTEND": "noninteractive", **os.environ}
        for words in (["update"], ["install", "-y", "--no-install-recommends", PROGRAM]):
            subprocess.run(["apt-get", "-qq", *words], env=quietly, check=True, timeout=300)
    found = shutil.which(PROGRAM)
    if found is None:
        pytest.skip(f"Debian's package {PROGRAM} is not installed: apt-get install {PROGRAM}")
    return found


def serve(program: str, home: Path, extra: str = "") -> Iterator[str]:
    """Run a registry until the test is over; yield its address."""
    port = free_port()
    home.mkdir()
    (home / "config.yml").write_text(
        f"version: 0.1\nlog: {{level: error}}\nhttp: {{addr: '127.0.0.1:{port}'}}\n"
        f"storage: {{filesystem: {{rootdirectory: '{home}/data'}}, delete: {{enabled: true}}}}\n"
        + extra
    )
    with (home / "log").open("wb") as log:
        child = subprocess.Popen([program, "serve", home / "config.yml"], stdout=log, stderr=log)
    try:
        wait_for(f"http://127.0.0.1:{port}/v2/", child, home / "log")
        yield f"127.0.0.1:{port}"
    finally:
        child.terminate()
        child.wait(20)


def wait_for(address: str, child: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + 30
    while time.monotonic() < end:
        assert child.poll() is None, log.read_text()
        try:
            urllib.request.urlopen(address, timeout=2)
            return
        except urllib.error.HTTPError:
            return  # it answers, if only to refuse
        except OSError:
            time.sleep(0.1)
    raise AssertionError(log.read_text())


@pytest.fixture
def address(program: str, tmp_path: Path) -> Iterator[str]:
    yield from serve(program, tmp_path / "registry")


@pytest.fixture
def guarded(program: str, tmp_path: Path) -> Iterator[str]:
    users = tmp_path / "users"
    users.write_text(HTPASSWD)
    yield from serve(
        program, tmp_path / "guarded", f"auth: {{htpasswd: {{realm: kit, path: '{users}'}}}}\n"
    )


def import_image(content: bytes, tag: str) -> str:
    body = io.BytesIO()
    with tarfile.open(fileobj=body, mode="w") as archive:
        member = tarfile.TarInfo("etc/one")
        member.size = len(content)
        archive.addfile(member, io.BytesIO(content))
    done = engine.cli("import", "-", tag, stdin=body.getvalue())
    assert done.ok, done.tail
    return done.stdout.strip()


def lock_identity(record: ImageRecord) -> None:
    """Lock what is on the engine under the record's tag, as `verify_image` would."""
    found = read_identity(record.tag)
    inside = InsideFacts(
        python="3", vllm_version="1", vllm_commit=None, torch_version="1", torch_cuda=None
    )
    record.lock_dir.mkdir(parents=True, exist_ok=True)
    lock.write_identity(
        record,
        LockedIdentity(
            written_by="a test", base_sha256="", recipe={}, built_with={}, inside=inside,
            digest=found.digest, **found.model_dump(exclude={"manifest_digest"}),
        ),
    )  # fmt: skip


@pytest.fixture
def tiny(
    client: docker.DockerClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ImageRecord]:
    """A record whose image is one file, on the engine and locked; removed afterwards."""
    monkeypatch.setattr(image, "LOCKS", tmp_path / "locks")
    record = ImageRecord(
        id="tiny-registry-test", source="release", cuda="cpu", release="1", as_of="2026-01-01"
    )
    import_image(os.urandom(1000), record.tag)
    lock_identity(record)
    yield record
    left = engine_image_id(record.tag)
    if left is not None:
        client.images.remove(left, force=True)  # with every name that a registry gave it


def names_of(client: docker.DockerClient, host: str) -> list[str]:
    found = client.images.list(all=True)
    return [n for i in found for n in i.tags + i.attrs.get("RepoDigests", []) if host in n]


def test_pushed_removed_and_pulled_by_digest_it_is_the_same_image(
    client: docker.DockerClient, address: str, tiny: ImageRecord
) -> None:
    locked = read_identity_lock(tiny)
    assert locked is not None
    pushed = registry.push(tiny, f"{address}/some/kit", quiet)
    assert pushed.reference.startswith(f"{address}/some/kit@sha256:")
    assert engine_image_id(tiny.tag) == pushed.image_id
    assert not any(t.startswith(address) for i in client.images.list() for t in i.tags)
    client.images.remove(pushed.image_id, force=True)
    assert engine_image_id(tiny.tag) is None
    pulled = registry.pull(pushed.reference, tiny, quiet)
    assert pulled.identity.digest == locked.digest == pushed.identity.digest
    assert engine_image_id(tiny.tag) == pulled.image_id


def test_another_image_is_refused_and_not_left_here(
    client: docker.DockerClient, address: str, tiny: ImageRecord
) -> None:
    kept = engine_image_id(tiny.tag)
    other = import_image(b"another", f"{address}/kit:other")
    done = engine.cli("push", f"{address}/kit:other")
    assert done.ok, done.tail
    digest = next(w for w in done.stdout.split() if w.startswith("sha256:"))
    client.images.remove(other, force=True)
    with pytest.raises(IdentityMismatch, match="is not the locked tiny-registry-test"):
        registry.pull(f"{address}/kit@{digest}", tiny, quiet)
    assert names_of(client, address) == []
    assert engine_image_id(tiny.tag) == kept


def test_a_digest_that_is_gone_is_named(address: str, tiny: ImageRecord) -> None:
    pushed = registry.push(tiny, f"{address}/kit", quiet)
    repository, digest = pushed.reference.split("@")
    request = urllib.request.Request(f"http://{address}/v2/kit/manifests/{digest}", method="DELETE")
    urllib.request.urlopen(request, timeout=10)
    engine.cli("rmi", tiny.tag)
    with pytest.raises(GoneUpstream, match=f"{repository}@{digest} is not in the registry"):
        registry.pull(pushed.reference, tiny, quiet)


def test_a_registry_that_wants_a_login_is_named(guarded: str, tiny: ImageRecord) -> None:
    with pytest.raises(RegistryRefused, match=f"{guarded} refuses"):
        registry.push(tiny, f"{guarded}/kit", quiet)
    with pytest.raises(RegistryRefused, match=f"{guarded} refuses"):
        registry.pull(f"{guarded}/kit@sha256:{'0' * 64}", tiny, quiet)
    assert engine_image_id(tiny.tag) is not None


def test_no_registry_is_named_and_nothing_is_left(
    client: docker.DockerClient, tiny: ImageRecord
) -> None:
    nobody = f"127.0.0.1:{free_port()}"
    with pytest.raises(RegistryUnreachable, match=f"{nobody} does not answer"):
        registry.push(tiny, f"{nobody}/kit", quiet)
    with pytest.raises(RegistryUnreachable, match=f"{nobody} does not answer"):
        registry.pull(f"{nobody}/kit@sha256:{'0' * 64}", tiny, quiet)
    assert names_of(client, nobody) == []


def test_an_image_that_is_not_here_is_not_pushed(address: str, tiny: ImageRecord) -> None:
    absent = tiny.model_copy(update={"id": "tiny-absent"})
    with pytest.raises(ImageMissing, match="tiny-absent is not on this engine"):
        registry.push(absent, f"{address}/kit", quiet)


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_the_real_image_comes_back_from_a_registry_as_locked(
    client: docker.DockerClient, address: str
) -> None:
    record = find_image("v0.32.0-cpu")
    built = ensure_image(record, quiet)
    pushed = registry.push(record, f"{address}/vllm-kit", quiet)
    client.images.remove(built.image_id, force=True)
    assert engine_image_id(record.tag) is None
    pulled = registry.pull(pushed.reference, record, quiet)
    assert pulled.identity.digest == built.identity.digest
    assert ensure_image(record, quiet).how == "present"
    client.images.remove(pushed.reference)
