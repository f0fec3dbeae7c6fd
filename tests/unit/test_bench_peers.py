"""The table of other load generators: what is compared with what, and what is claimed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_foreign import guidellm, vllm_bench, written

from kit.bench_peers import PeerResult, advantages, cells_of, matched, told
from kit.cli import main
from kit.foreign import read_foreign
from kit.peers import Cell, aiperf_words, guidellm_words, vllm_words
from kit.peers_document import DOCUMENT, write_document


def result(tool: str, ttft_s: float, itl_s: float | None, **changes: Any) -> PeerResult:
    fields: dict[str, Any] = {
        "tool": tool, "version": "" if tool == "kit" else "1.2", "streams": 256,
        "mode": "staggered", "requests": 256, "lost": 0, "tokens": 25_600,
        "ttft_error_p50_s": ttft_s / 2, "ttft_error_p99_s": ttft_s,
        "itl_error_p50_s": itl_s, "itl_error_p99_s": itl_s, "ttft_read_p50_s": 0.1,
        "cpu_s_per_1k_tokens": 0.02, "startup_s": 1.0, "other_share": 0.01,
        "per_token": itl_s is not None,
    }  # fmt: skip
    return PeerResult.model_validate(fields | changes)


OURS = result("kit", 0.00004, 0.00002)


def test_the_advantage_is_over_the_best_other_tool_of_each_number() -> None:
    others = [
        result("slow", 0.008, 0.0005),
        result("quick", 0.002, 0.001),
        result("means", 0.02, None),
    ]
    (found,) = advantages([OURS, *others])
    assert (found.ttft_peer, found.itl_peer) == ("quick", "slow")
    assert found.ttft == pytest.approx(50)
    assert found.itl == pytest.approx(25)
    assert found.ok
    (found,) = advantages([OURS, *others, result("better", 0.0015, 0.001)])
    assert found.ttft == pytest.approx(37.5)
    assert not found.ok


def test_loads_are_compared_apart_and_alone_there_is_nothing_to_compare() -> None:
    burst = OURS.model_copy(update={"mode": "burst"})
    found = advantages([OURS, result("quick", 0.002, 0.001), burst])
    assert [a.ttft is None for a in found] == [False, True]
    assert told(found[1]) == "256 streams, burst: p99 error of nothing to compare"


def test_a_tool_without_token_times_says_so() -> None:
    assert cells_of(result("means", 0.02, None))[3:5] == ["10.000 / 20.000", "means only"]


def test_requests_meet_in_the_id_that_was_sent(tmp_path: Path) -> None:
    found = read_foreign(written(tmp_path, "result.json", vllm_bench()))
    truth = {
        "r1": {"arrived_s": 5.0, "chunk_s": [5.25, 5.75, 6.0]},
        "r0": {"arrived_s": 5.25, "chunk_s": [5.4, 5.5]},  # a token more was read than sent
        "r2": {"arrived_s": 5.5, "chunk_s": [5.6]},  # failed in the tool's record
    }
    assert [(s["id"], t["arrived_s"]) for s, t in matched(found, truth)] == [("r1", 5.0)]


def test_requests_meet_in_the_id_of_the_answer(tmp_path: Path) -> None:
    found = read_foreign(written(tmp_path, "benchmarks.json", guidellm()))
    truth = {"one": {"arrived_s": 5.0, "chunk_s": [5.125, 5.6, 6.125]}}
    assert [s["id"] for s, _ in matched(found, truth)] == ["one"]


def test_a_load_that_was_too_much_is_a_row_and_a_sentence(tmp_path: Path) -> None:
    lost = PeerResult(
        tool="slow", version="1", streams=256, mode="staggered", lost=256,
        failed="slow did not end within 240 s",
    )  # fmt: skip
    assert cells_of(lost)[3:] == [
        "none / none",
        "none / none",
        "none",
        "none",
        "none",
        "all",
        "none",
    ]
    (found,) = advantages([OURS, lost, result("quick", 0.002, 0.001)])
    assert (found.ttft_peer, found.itl_peer) == ("quick", "quick")
    path = tmp_path / "peers.md"
    path.write_text(DOCUMENT.read_text("utf-8"), "utf-8")
    write_document([OURS, lost], day="2026-01-02", machine="a CPU", path=path)
    assert "- 256 streams, staggered: slow did not end within 240 s." in path.read_text("utf-8")


@pytest.mark.parametrize("mode", ["staggered", "burst"])
def test_every_tool_is_asked_for_the_same_load(mode: str) -> None:
    cell = Cell(streams=64, mode=mode, tokens=100, port=8123)
    rate = {"staggered": "64", "burst": "inf"}[mode]
    vllm = vllm_words(cell, "/model", "/out")
    assert vllm[vllm.index("--request-rate") + 1] == rate
    assert vllm[vllm.index("--num-prompts") + 1] == "64"
    guide = guidellm_words(cell, "/model", "/out")
    profile = json.loads(guide[guide.index("--profile") + 1])
    load = {"staggered": {"kind": "constant", "rate": 64}}
    assert profile == load.get(mode, {"kind": "concurrent", "streams": 64})
    aiperf = aiperf_words(cell, "/model", "/out")
    assert ("--request-rate" in aiperf) == cell.staggered
    assert ("--concurrency" in aiperf) != cell.staggered
    for words in (vllm, guide, aiperf):
        assert any("127.0.0.1:8123" in word for word in words)


@pytest.mark.parametrize(("best_s", "holds"), [(0.002, "It holds"), (0.001, "It does not hold")])
def test_the_document_gets_the_table_and_the_claim(
    tmp_path: Path, best_s: float, holds: str
) -> None:
    path = tmp_path / "peers.md"
    before = DOCUMENT.read_text("utf-8")
    path.write_text(before, "utf-8")
    write_document(
        [OURS, result("quick", best_s, 0.001)], day="2026-01-02", machine="a CPU", path=path
    )
    text = path.read_text("utf-8")
    assert text.startswith(before.partition("<!-- peers: begin")[0])
    assert "Measured on 2026-01-02 on a CPU: quick 1.2." in text
    assert "| 256 | staggered | quick |" in text
    assert holds in text


def test_one_bench_at_a_time_and_known_starts_alone() -> None:
    assert main(["bench", "--proxy", "--peers"]) == 2
    assert main(["bench", "--start", "sideways"]) == 10
