"""Folded stacks: what is inside the scheduler, and any input at all is read or refused."""

from __future__ import annotations

import gzip
from collections import Counter
from pathlib import Path

import pytest

from kit.errors import BadFile
from kit.flame_graph import boxes, draw, grown
from kit.stacks import (
    LINE_BYTES,
    Folded,
    SampledEngine,
    SampledProcess,
    read_folded,
    read_phase,
    read_stacks,
)

CORE = "thread (7);run_busy_loop (vllm/v1/engine/core.py:900);step (vllm/v1/engine/core.py:300)"
SCHEDULE = "schedule (vllm/v1/core/sched/scheduler.py:210)"
ASYNC = "AsyncScheduler.schedule (/opt/x/vllm/v1/core/sched/async_scheduler.py:20)"
UPDATE = "update_from_output (vllm/v1/core/sched/scheduler.py:900)"


def folded_file(folder: Path, content: bytes) -> Path:
    path = folder / "stacks-server-engine-core-7.txt.gz"
    path.write_bytes(gzip.compress(content))
    return path


def test_samples_inside_the_scheduler_are_counted_once(tmp_path: Path) -> None:
    lines = [
        f"{CORE};execute_model (vllm/v1/executor/abstract.py:1) 70",
        f"{CORE};{ASYNC};{SCHEDULE};allocate_slots (vllm/v1/core/kv_cache_manager.py:5) 20",
        f"{CORE};{UPDATE} 9",
        "thread (7);schedule (somewhere/else.py:3) 1",
    ]
    found = read_folded(folded_file(tmp_path, "\n".join(lines).encode()))
    assert found == Folded(
        samples=100, skipped=0, scheduling={"schedule": 20, "update_from_output": 9}
    )
    assert found.schedule_share == 0.2


def test_what_is_no_folded_line_is_counted_and_left_out(tmp_path: Path) -> None:
    content = b"\n".join(
        [
            b"a;b 2",
            b"no count",
            b"a;b -1",
            b"a;b 1e3",
            b"\xff\xfe;b 3",
            b"a " + b"9" * 400,
            b"",
            b" ",
        ]
    )
    counts, skipped = read_stacks(folded_file(tmp_path, content))
    assert counts == Counter({("a", "b"): 2, ("\ufffd\ufffd", "b"): 3})
    assert skipped == 4


@pytest.mark.parametrize("end", [b"", b"\n", b"\na;b 1"])
def test_a_line_of_50_mb_is_left_out_and_the_next_one_read(tmp_path: Path, end: bytes) -> None:
    counts, skipped = read_stacks(folded_file(tmp_path, b"x" * 50_000_000 + b" 5" + end))
    assert counts.total() == end.count(b"a;b")
    assert skipped == 1


@pytest.mark.parametrize("length", [LINE_BYTES - 1, LINE_BYTES, LINE_BYTES + 1])
def test_the_longest_line_is_a_limit_and_not_a_seam(tmp_path: Path, length: int) -> None:
    line = b"x" * (length - 3) + b" 5\n"
    counts, skipped = read_stacks(folded_file(tmp_path, line + b"a 1\n"))
    assert counts.total() == (6 if length <= LINE_BYTES else 1)
    assert skipped == (length > LINE_BYTES)


def test_what_is_no_gzip_is_refused_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "stacks-server-engine-core-7.txt.gz"
    for content in (b"a;b 1\n", b"", gzip.compress(b"a;b 1\n" * 999)[:-9]):
        path.write_bytes(content)
        if content:
            with pytest.raises(BadFile, match=r"stacks-server-engine-core-7\.txt\.gz"):
                read_stacks(path)
        else:
            assert not read_stacks(path)[0]


def test_a_record_that_is_none_is_refused(tmp_path: Path) -> None:
    for text in ("[]", '{"version": 2}', '{"version": 1, "rate_hz": 0, "processes": []}', "{"):
        (tmp_path / "stacks-server.json").write_text(text, "utf-8")
        with pytest.raises(BadFile, match=r"stacks-server\.json"):
            read_phase(tmp_path)


def process(*said: str) -> SampledProcess:
    return SampledProcess(
        pid=7, role="engine-core", title="VLLM::EngineCore", file=None, status=0, said=said
    )


def test_the_sampler_s_own_words_give_looks_errors_and_delay() -> None:
    told = process(
        "py-spy> 1.20s behind in sampling, results may be inaccurate.",
        "py-spy> 1.05s behind in sampling, results may be inaccurate.",
        "py-spy> Wrote raw flamegraph data to 'x'. Samples: 99 Errors: 3",
    )
    assert (told.ticks, told.errors, told.behind_s) == (99, 3, 1.2)
    assert (process().ticks, process().errors, process().behind_s) == (None, None, 0.0)
    assert process("", "Error: Permission Denied").refusal == "Error: Permission Denied"
    assert "status 0" in process().refusal


def test_a_phase_without_any_sample_says_why(tmp_path: Path) -> None:
    told = SampledEngine(version=1, rate_hz=100, processes=(process("Error: Permission Denied"),))
    (tmp_path / "stacks-server.json").write_text(told.model_dump_json(), "utf-8")
    assert read_phase(tmp_path).problem == "Error: Permission Denied"
    folded_file(tmp_path, b"a 1\n")
    assert read_phase(tmp_path).problem is None
    assert read_phase(tmp_path / "other").problem is None


def test_a_flame_graph_is_as_wide_as_its_samples_and_names_no_address() -> None:
    stacks = Counter({("main", SCHEDULE, "<genexpr>"): 30, ("main", "forward"): 70})
    found = {each.name: each for each in boxes(grown(stacks))}
    assert found["main"].width == 1
    assert found[SCHEDULE].width == pytest.approx(0.3)
    assert found[SCHEDULE].left == pytest.approx(0.7)
    assert [each.name for each in found.values() if each.scheduling] == [SCHEDULE, "<genexpr>"]
    svg = draw([("a & b", stacks)])
    assert "&lt;genexpr&gt;: 30 (30.0%)" in svg
    assert "a &amp; b" in svg
    assert svg == draw([("a & b", stacks)])
    assert "http" not in svg
    assert "<script" not in svg
    assert draw([("nothing", Counter())]) == ""
