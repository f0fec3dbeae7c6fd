"""The engine's words about a registry become the error a person can act on."""

from __future__ import annotations

from pathlib import Path

import pytest

from kit import image, registry
from kit.errors import GoneUpstream, KitError, NotLocked, RegistryRefused, UsageError
from kit.errors import RegistryUnreachable as Unreachable
from kit.image import ImageRecord

DIGEST = "sha256:" + "a" * 64


def quiet(line: str) -> None:
    del line


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ImageRecord:
    monkeypatch.setattr(image, "LOCKS", tmp_path)
    return ImageRecord(id="x-cpu", source="release", cuda="cpu", release="1", as_of="2026-01-01")


@pytest.mark.parametrize(
    ("told", "error"),
    [
        ("unauthorized: authentication required", RegistryRefused),
        ("no basic auth credentials", RegistryRefused),
        ("denied: requested access to the resource is denied", RegistryRefused),
        ("pull access denied for r/x, repository does not exist", RegistryRefused),
        ("manifest for r/x@sha256:aa not found: manifest unknown", GoneUpstream),
        ("name unknown: repository name not known to registry", GoneUpstream),
        ('Get "http://127.0.0.1:1/v2/": dial tcp 127.0.0.1:1: connect: refused', Unreachable),
        ("dial tcp: lookup r.invalid: no such host", Unreachable),
        ("http: server gave HTTP response to HTTPS client", Unreachable),
        ("net/http: TLS handshake timeout", Unreachable),
    ],
)
def test_each_complaint_has_its_error(told: str, error: type[KitError]) -> None:
    found = registry.registry_error(told, "r:5000/x")
    assert type(found) is error
    assert "r:5000" in found.message
    assert found.detail == told
    assert found.hint


@pytest.mark.parametrize("repository", ["x", "r/x:tag", "r:5000/x:tag", f"r/x@{DIGEST}", ""])
def test_what_names_no_repository_is_not_pushed_to(repository: str, record: ImageRecord) -> None:
    with pytest.raises(UsageError, match="no repository"):
        registry.push(record, repository, quiet)


@pytest.mark.parametrize("reference", ["r/x", "r/x:latest", "r/x@sha256:abc", f"@{DIGEST}"])
def test_what_names_no_digest_is_not_pulled(reference: str, record: ImageRecord) -> None:
    with pytest.raises(UsageError, match="names no digest"):
        registry.pull(reference, record, quiet)


def test_an_image_without_locked_identity_is_not_pulled(record: ImageRecord) -> None:
    with pytest.raises(NotLocked, match="no locked identity"):
        registry.pull(f"r:5000/x@{DIGEST}", record, quiet)
