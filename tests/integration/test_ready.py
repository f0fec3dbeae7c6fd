"""A server whose engine dies under load, as the real stub acts it out: it is lost, not slow."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from stub_process import Stub, completion, run_window, running_stub

from kit.errors import ServerLost
from kit.inside.ask import ask
from kit.ready import check_alive, check_serving


class Container:
    """What the engine would tell of a container that holds the stub's process."""

    def __init__(self, stub: Stub) -> None:
        self._process = stub.process
        self.attrs: dict[str, Any] = {}

    def reload(self) -> None:
        code = self._process.poll()
        self.attrs["State"] = {"Running": code is None, "ExitCode": code}

    def logs(self, tail: int) -> bytes:
        return b"the last lines"


def health(stub: Stub) -> Callable[[], int | None]:
    return lambda: ask("GET", f"{stub.url}/health", timeout_s=2)["status"]


def test_one_that_dies_slowly_in_the_warm_up_is_lost_with_its_exit_code(tmp_path: Path) -> None:
    requests = [completion("w0", lane="w"), completion("w1", lane="v")]
    planted = {"die_after_requests": 1, "die_lingers_s": 3.0, "die_exit_code": 9}
    with running_stub(tmp_path, **planted) as stub:
        got = run_window(tmp_path, stub.port, requests, scrape_every_s=None)
        container = Container(stub)
        check_alive(container, "server")  # which is why that was not enough
        assert got.load["failed"] == 2
        with pytest.raises(ServerLost, match="`server` died under load with exit code 9") as caught:
            check_serving(container, "server", health(stub))
    assert caught.value.detail == "the last lines"


def test_one_that_never_ends_is_lost_in_time(tmp_path: Path) -> None:
    planted = {"die_after_requests": 1, "die_lingers_s": 60.0}
    with running_stub(tmp_path, **planted) as stub:
        run_window(tmp_path, stub.port, [completion("w0")], scrape_every_s=None)
        began_s = time.monotonic()
        with pytest.raises(ServerLost, match="serves no more: its /health has status 503"):
            check_serving(Container(stub), "server", health(stub), timeout_s=0.5)
    assert time.monotonic() - began_s < 5


def test_one_that_listens_no_more_is_lost_in_time(tmp_path: Path) -> None:
    with running_stub(tmp_path) as stub:
        nowhere = replace(stub, port=9)
        with pytest.raises(ServerLost, match="serves no more: its /health gives no answer"):
            check_serving(Container(stub), "server", health(nowhere), timeout_s=0.5)


def test_failed_requests_of_a_server_that_goes_on_are_no_loss(tmp_path: Path) -> None:
    with running_stub(tmp_path, fail_fraction=1.0) as stub:
        got = run_window(tmp_path, stub.port, [completion("w0")], scrape_every_s=None)
        check_serving(Container(stub), "server", health(stub))
    assert got.load["failed"] == 1
