"""The per-commit wheel index against a real HTTP server on the loopback address."""

from __future__ import annotations

import hashlib
import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from kit.errors import BadFile, GoneUpstream, HashMismatch, IndexUnreachable, VariantMissing
from kit.wheel_index import fetch_wheel

COMMIT = "b23bd73f540175f9e117eaee5029cd7d8df63964"
WHEEL = b"not really a wheel"
NAME = "vllm-0.23.1rc1.dev9+gb23bd73f5.cu130-cp38-abi3-manylinux_2_31_x86_64.whl"
LISTING = f"/{COMMIT}/cu130/vllm/metadata.json"
ITEM = {
    "package_name": "vllm", "version": "0.23.1rc1.dev9+gb23bd73f5.cu130", "variant": "cu130",
    "platform_tag": "manylinux_2_31_x86_64", "filename": NAME,
    "path": "../../" + NAME.replace("+", "%2B"),
}  # fmt: skip
Pages = dict[str, tuple[int, bytes]]


class Index(ThreadingHTTPServer):
    """Serves `pages`; anything else is 404. Remembers what was asked."""

    def __init__(self, pages: Pages) -> None:
        self.pages = pages
        self.asked: list[str] = []
        super().__init__(("127.0.0.1", 0), Answer)


class Answer(BaseHTTPRequestHandler):
    server: Index

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        status, body = self.server.pages.get(self.path, (404, b"no"))
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    server = Index({})
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setenv("KIT_WHEEL_INDEX", f"http://127.0.0.1:{server.server_port}/")
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def listing(*items: dict[str, str]) -> tuple[int, bytes]:
    return 200, json.dumps(items).encode()


def wheel_page() -> str:
    return f"/{COMMIT}/{NAME.replace('+', '%2B')}"


def test_the_wheel_of_commit_and_variant_is_fetched(index: Index, tmp_path: Path) -> None:
    arm = ITEM | {"platform_tag": "manylinux_2_31_aarch64", "filename": "arm.whl"}
    index.pages = {LISTING: listing(arm, ITEM), wheel_page(): (200, WHEEL)}
    found = fetch_wheel(COMMIT, "cu130", tmp_path, sha256=hashlib.sha256(WHEEL).hexdigest())
    assert found.name == NAME
    assert found.read_bytes() == WHEEL


def test_an_index_that_nobody_serves_is_unreachable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    monkeypatch.setenv("KIT_WHEEL_INDEX", f"http://127.0.0.1:{port}")
    with pytest.raises(IndexUnreachable) as caught:
        fetch_wheel(COMMIT, "cu130", tmp_path)
    assert caught.value.message == "the wheel index was not reached"
    assert str(port) not in caught.value.message


@pytest.mark.parametrize("status", [500, 503, 403])
def test_an_index_in_trouble_is_unreachable_not_empty(
    index: Index, tmp_path: Path, status: int
) -> None:
    index.pages = {LISTING: (status, b"")}
    with pytest.raises(IndexUnreachable, match=str(status)):
        fetch_wheel(COMMIT, "cu130", tmp_path)


def test_a_missing_variant_is_no_reason_to_take_another(index: Index, tmp_path: Path) -> None:
    index.pages = {f"/{COMMIT}/vllm/metadata.json": listing(ITEM), wheel_page(): (200, WHEEL)}
    with pytest.raises(VariantMissing, match="no cu129 wheel"):
        fetch_wheel(COMMIT, "cu129", tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert wheel_page() not in index.asked


def test_a_listing_of_another_variant_is_refused(index: Index, tmp_path: Path) -> None:
    index.pages = {f"/{COMMIT}/cu129/vllm/metadata.json": listing(ITEM)}
    with pytest.raises(VariantMissing, match="cu129"):
        fetch_wheel(COMMIT, "cu129", tmp_path)


def test_a_commit_that_was_deleted_is_gone(index: Index, tmp_path: Path) -> None:
    with pytest.raises(GoneUpstream, match="nothing of commit b23bd73f5"):
        fetch_wheel(COMMIT, "cu130", tmp_path)
    index.pages = {LISTING: (410, b""), f"/{COMMIT}/vllm/metadata.json": (410, b"")}
    with pytest.raises(GoneUpstream):
        fetch_wheel(COMMIT, "cu130", tmp_path)


def test_a_listed_wheel_that_is_not_served_is_gone(index: Index, tmp_path: Path) -> None:
    index.pages = {LISTING: listing(ITEM)}
    with pytest.raises(GoneUpstream, match="no longer serves"):
        fetch_wheel(COMMIT, "cu130", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_other_bytes_than_locked_are_refused_and_not_kept(index: Index, tmp_path: Path) -> None:
    index.pages = {LISTING: listing(ITEM), wheel_page(): (200, WHEEL + b"!")}
    with pytest.raises(HashMismatch, match="gb23bd73f5"):
        fetch_wheel(COMMIT, "cu130", tmp_path, sha256=hashlib.sha256(WHEEL).hexdigest())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("body", [b"<html>", b"{}", b"[1]"])
def test_a_page_that_is_no_listing_is_named(index: Index, tmp_path: Path, body: bytes) -> None:
    index.pages = {LISTING: (200, body)}
    with pytest.raises(BadFile, match="listing"):
        fetch_wheel(COMMIT, "cu130", tmp_path)


def test_a_name_with_a_path_in_it_stays_in_the_folder(index: Index, tmp_path: Path) -> None:
    index.pages = {LISTING: listing(ITEM | {"filename": "../../evil.whl"})}
    with pytest.raises(BadFile, match="file name"):
        fetch_wheel(COMMIT, "cu130", tmp_path)
