"""The token clock and the proxy keep their promises, with room for a busy machine."""

from __future__ import annotations

import os
import platform
import socket
from pathlib import Path

import pytest

from kit.bench import BenchResult, bench, show
from kit.bench_proxy import ProxyCost, bench_proxy, show_proxy
from kit.cli import main
from kit.errors import PortTaken, UsageError
from kit.proxy_document import DOCUMENT, this_machine, write_document


def check(result: BenchResult, tokens: int) -> None:
    assert result.tokens == tokens
    assert result.stamps == "kernel"
    assert result.ttft_error_p99_s <= 0.001
    assert result.itl_error_p99_s <= 0.0005
    assert result.cpu_s_per_1k_tokens <= 0.1


@pytest.mark.parametrize("mode", ["staggered", "burst"])
def test_the_clock_is_exact_at_64_streams(mode: str) -> None:
    for attempt in range(3):  # other programs on these cores show in the client's readings
        (result,) = bench((64,), modes=(mode,), tokens=60)
        if result.ok or attempt == 2:
            break
    check(result, 64 * 60)


@pytest.mark.full
@pytest.mark.parametrize("streams", [256, 1000])
def test_the_clock_is_exact_at_many_streams(streams: int) -> None:
    for result in bench((streams,), tokens=60):
        check(result, streams * 60)


def test_the_table_says_what_was_measured(capsys: pytest.CaptureFixture[str]) -> None:
    result = BenchResult(
        streams=8, mode="burst", tokens=80, ttft_error_p50_s=0.00001, ttft_error_p99_s=0.0003,
        itl_error_p50_s=0.0, itl_error_p99_s=0.00005, cpu_s_per_1k_tokens=0.02, startup_s=0.3,
        send_lag_p99_s=0.0001, recv_lag_p99_s=None, shared_stamps=0, stamps="kernel",
    )  # fmt: skip
    show([result])
    shown = capsys.readouterr().out.splitlines()[-1].split("\t")
    assert shown[:4] == ["8", "burst", "0.010 / 0.300", "0.000 / 0.050"]
    assert shown[-1] == "no"
    assert result.model_copy(update={"ttft_error_p99_s": 0.0002}).ok


COST = ProxyCost(
    streams=64, mode="burst", tokens=6400, direct_ttft_p50_s=0.0001, direct_ttft_p99_s=0.0002,
    direct_token_p50_s=0.0001, direct_token_p99_s=0.0003, proxy_ttft_p50_s=0.0002,
    proxy_ttft_p99_s=0.0006, proxy_token_p50_s=0.0002, proxy_token_p99_s=0.0009,
    separate_cores=False, noise_p99_s=0.00005,
)  # fmt: skip


def test_the_document_gets_the_table_and_keeps_its_text(tmp_path: Path) -> None:
    before = DOCUMENT.read_text("utf-8")
    path = tmp_path / "proxy.md"
    path.write_text(before, "utf-8")
    for machine in ("a small one", "Large CPU, 8 hardware threads"):  # the second replaces
        write_document([COST], day="2026-01-02", machine=machine, path=path)
    text = path.read_text("utf-8")
    head, mark, rest = text.partition("<!-- proxy: begin")
    assert before.startswith(head + mark)
    assert text.endswith("<!-- proxy: end -->\n")
    assert "Measured on 2026-01-02 on Large CPU, 8 hardware threads." in rest
    assert "| 64 | burst | 0.100 / 0.200 | 0.200 / 0.600 |" in rest
    assert "| 0.400 / 0.600 | 0.050 | no | no |" in rest
    assert rest.count("\n| ---") == 1
    assert "a small one" not in text


def test_this_machine_is_named_without_its_name() -> None:
    assert this_machine().endswith(f", {len(os.sched_getaffinity(0))} hardware threads")
    assert platform.node() not in this_machine()


def test_the_table_goes_into_a_document_only_with_what_it_is_about() -> None:
    assert main(["bench", "--write"]) == UsageError.exit_code


def test_the_proxy_adds_little() -> None:
    for attempt in range(3):
        (cost,) = bench_proxy((64,), modes=("staggered",), tokens=60, rounds=1)
        show_proxy([cost])
        if cost.ok or attempt == 2:
            break
    assert cost.tokens == 64 * 60
    assert 0 < cost.proxy_token_p50_s <= 0.003 + cost.noise_p99_s
    assert cost.proxy_ttft_p50_s <= 0.003 + 4 * cost.noise_p99_s
    if cost.noise_p99_s <= 0.0005:  # else the tail is that of the other programs on the core
        # the slowest of 64: 5 to 14 ms were seen where the stub and the client share a core
        assert cost.added_ttft_p99_s <= (0.003 if cost.separate_cores else 0.02)
        assert cost.added_token_p99_s <= 0.003


def test_a_port_that_was_stolen_after_it_was_free_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as thief:
        monkeypatch.setattr("kit.bench.free_port", lambda: thief.getsockname()[1])
        with pytest.raises(PortTaken, match=rf"by .+ \({os.getpid()}\) meanwhile"):
            bench((1,), tokens=2)
