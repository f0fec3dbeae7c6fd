"""The model hub's client against a real HTTP server on the loopback address."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from kit.errors import GoneUpstream, HubGated, HubUnreachable, KitError, ToolMissing
from kit.hub import fetch_repository

HAS_CLIENT = importlib.util.find_spec("huggingface_hub") is not None
REVISION = "a" * 40


class Hub(ThreadingHTTPServer):
    """Answers every request with one status and one error code of the hub."""

    status = 200
    code = ""


class Answer(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        self.send_response(self.server.status)
        if self.server.code:
            self.send_header("X-Error-Code", self.server.code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    server = Hub(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def refusal(out: Path) -> KitError:
    with pytest.raises(KitError) as caught:
        fetch_repository("a/b", REVISION, out / "model", lambda line: None)
    return caught.value


@pytest.mark.parametrize(
    ("status", "code", "wanted"),
    [
        (403, "GatedRepo", HubGated),
        (401, "", HubGated),
        (404, "RepoNotFound", GoneUpstream),
        (404, "RevisionNotFound", GoneUpstream),
        (500, "", HubUnreachable),
    ],
)
def test_gated_gone_and_out_of_order_are_told_apart(
    hub: Hub, tmp_path: Path, status: int, code: str, wanted: type[KitError]
) -> None:
    hub.status, hub.code = status, code
    error = refusal(tmp_path)
    assert type(error) is (wanted if HAS_CLIENT else ToolMissing)
    assert error.hint


def test_a_hub_that_nobody_serves_is_unreachable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    error = refusal(tmp_path)
    assert type(error) is (HubUnreachable if HAS_CLIENT else ToolMissing)
    assert "127.0.0.1" not in error.message
