"""A rank's time: parts with known answers, parts that always sum, and files that are no trace."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit import trace
from kit.errors import BadFile
from kit.trace import COUNTED, Split, part_of, rank_of, read_trace

Raw = dict[str, Any]


def event(name: str, begin: float, end: float, cat: str = "cpu_op", tid: Any = 1) -> Raw:
    """Return an event from `begin` to `end`, in microseconds."""
    times = {"ts": 5_316_265_019_020.687 + begin, "dur": end - begin}
    return {"ph": "X", "cat": cat, "name": name, "pid": 7, "tid": tid, **times, "args": {}}


def write(path: Path, *events: Any, zipped: bool = True) -> Path:
    """Write a trace as torch does: header fields, events of all kinds, the name at the end."""
    others = [
        {"ph": "M", "name": "process_name", "ts": 1.5, "pid": 7, "tid": 0, "args": {"name": "x"}},
        event("execute_context_1(8)_generation_0(0)", -50, 900, "user_annotation"),
        {**event("PyTorch Profiler (0)", -100, 1000, "Trace"), "pid": "Spans"},
        {"ph": "i", "s": "g", "name": "Record Window End", "pid": "", "tid": "", "ts": 2.5},
    ]
    text = json.dumps(
        {
            "schemaVersion": 1,
            "deviceProperties": [],
            "distributedInfo": {"backend": "gloo", "rank": 0, "world_size": 2},
            "traceEvents": [*others, *events],
            "traceName": "/tmp/x.json",
        },
        indent=2,
    )
    path.write_bytes(gzip.compress(text.encode()) if zipped else text.encode())
    return path


def split_trace(path: Path) -> Split | None:
    return read_trace(path).split


def parts_us(split: Split | None) -> dict[str, float]:
    assert split is not None
    told = split.model_dump()
    return {name: round(told[f"{name}_s"] * 1e6, 2) for name in (*trace.PARTS, "gaps", "window")}


# -- known answers -----------------------------------------------------------------------------


def kernel(name: str, begin: float, end: float, stream: int = 7) -> Raw:
    return event(name, begin, end, "kernel", f"stream {stream}")


@pytest.mark.parametrize("zipped", [True, False])
def test_kernels_of_all_streams_are_laid_over_each_other(tmp_path: Path, zipped: bool) -> None:
    found = split_trace(
        write(
            tmp_path / "t",
            event("aten::linear", -20, -10),  # what the host does does not count
            kernel("nvjet_tst_64x8", 0, 10),
            kernel("void flash::flash_fwd_splitkv_kernel<>", 10, 14),
            kernel("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 12, 20, stream=20),
            event("Memcpy DtoD", 25, 26, "gpu_memcpy", "stream 7"),
            zipped=zipped,
        )
    )
    assert found is not None
    assert found.on == "cuda"
    wanted = {"gemm": 10, "attention": 4, "communication": 6, "other": 1, "gaps": 5, "window": 26}
    assert parts_us(found) == wanted


def test_on_a_cpu_time_is_the_innermost_op_s_and_gloo_works_while_the_worker_waits(
    tmp_path: Path,
) -> None:
    found = split_trace(
        write(
            tmp_path / "t",
            event("aten::linear", 0, 100),
            event("aten::addmm", 10, 90),
            event("aten::expand", 12, 14),
            event("aten::copy_", 14, 20),
            event("c10d::allreduce_", 120, 125),
            event("gloo:all_reduce", 122, 160, "user_annotation", tid=2),
            event("aten::relu", 150, 155),
            event("vllm::unified_attention_with_output", 160, 170),
            event("aten::mm", 0, 500, tid=3),  # another thread, which is no worker
        )
    )
    assert found is not None
    assert found.on == "cpu"
    wanted = {
        "gemm": 20 + 72,  # linear around addmm, addmm around what it calls
        "attention": 10,
        "communication": 25 + 10,
        "other": 8 + 5,
        "gaps": 20,
        "window": 170,
    }
    assert parts_us(found) == wanted


def test_ops_that_only_overlap_are_the_later_one_s(tmp_path: Path) -> None:
    ops = (event("aten::mm", 0, 10), event("aten::relu", 5, 15))
    found = parts_us(split_trace(write(tmp_path / "t", *ops)))
    assert (found["gemm"], found["other"], found["gaps"]) == (5, 10, 0)


@pytest.mark.parametrize(
    "events",
    [
        (),
        (event("gloo:all_reduce", 0, 9, "user_annotation"),),
        (event("aten::mm", 5, 5),),
    ],
)
def test_a_rank_that_did_nothing_has_no_split(tmp_path: Path, events: tuple[Raw, ...]) -> None:
    assert split_trace(write(tmp_path / "t", *events)) is None


def test_scheduling_is_laid_beside_the_forward_passes(tmp_path: Path) -> None:
    def step(at: float) -> list[Raw]:
        """A step's scheduling of 30 us, of which two scopes are marked, then its pass of 60 us."""
        cpu = "user_annotation"
        return [
            event("schedule: allocate_slots", at, at + 2, cpu),
            event("schedule: update_after_schedule", at + 25, at + 30, cpu),
            event("execute_context_0(0)_generation_8(8)", at + 30, at + 50, cpu),
            event("execute_context_0(0)_generation_8(8)", at + 40, at + 100, "gpu_user_annotation"),
            kernel("gemm", at + 40, at + 60),
        ]

    between = [*step(0), *step(100)]
    during = [*step(0), *step(50)]  # the second is scheduled from 50 to 80, in the pass to 100
    shares = []
    for events in (between, during):
        found = read_trace(write(tmp_path / "t", *events)).overlap
        assert found is not None
        assert found.schedule_s == pytest.approx(60e-6, rel=1e-3)
        shares.append(found.hidden_share)
    assert shares == pytest.approx([0, 0.5], abs=1e-3)


def test_without_marks_there_is_no_overlap(tmp_path: Path) -> None:
    assert read_trace(write(tmp_path / "t", kernel("gemm", 0, 10))).overlap is None


@pytest.mark.parametrize(
    ("part", "names"),
    [
        (
            "communication",
            "ncclDevKernel_AllReduce_Sum_f16_RING_LL vllm::cross_device_reduce_1stage<half> "
            "c10d::allreduce_ gloo:all_reduce vllm::all_reduce _C::shm_allreduce "
            "_c10d_functional::all_gather_into_tensor trtllm_allreduce_fusion",
        ),
        (
            "attention",
            "cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<>> "
            "_C::cpu_attention_with_kv_cache aten::scaled_dot_product_attention "
            "vllm::reshape_and_cache_flash_kernel BatchPrefillWithPagedKVCacheKernel",
        ),
        (
            "gemm",
            "aten::mm aten::addmm aten::bmm aten::linear aten::mv nvjet_tst_64x8 gemv2T_kernel_val "
            "cublasLt::splitKreduce_kernel marlin::Marlin<> triton_tem_fused_addmm_3 _C::onednn_mm",
        ),
        (
            "other",
            "aten::add aten::mul aten::norm aten::all at::native::reduce_kernel<512> "
            "_C::rms_norm flashinfer::norm::RMSNormKernel aten::broadcast_tensors Memcpy_DtoD",
        ),
    ],
)
def test_names_tell_the_part(part: str, names: str) -> None:
    assert {name: part_of(name) for name in names.split()} == dict.fromkeys(names.split(), part)


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("dp0_pp0_tp1_dcp0_ep0_rank1.1796173291109743557.pt.trace.json.gz", 1),
        ("a1b2-rank-12.17.pt.trace.json.gz", 12),
        ("host_155.async_llm.179.pt.trace.json.gz", None),
    ],
)
def test_a_trace_s_name_tells_its_rank(name: str, rank: int | None) -> None:
    assert rank_of(name) == rank


# -- whatever the events -----------------------------------------------------------------------

NAMES = ("aten::mm", "aten::add", "vllm::unified_attention", "gloo:all_reduce", "ncclDevKernel")
EVENTS = st.lists(
    st.builds(
        lambda name, begin, length, cat, tid: event(name, begin, begin + length, cat, tid),
        st.sampled_from(NAMES),
        st.floats(0, 1e6),
        st.floats(0, 1e5),
        st.sampled_from((*COUNTED, "python_function", "ac2g")),
        st.integers(0, 3),
    ),
    max_size=30,
)


@given(EVENTS)
def test_parts_sum_to_the_window_and_none_is_negative(
    tmp_path_factory: pytest.TempPathFactory, events: list[Raw]
) -> None:
    found = split_trace(write(tmp_path_factory.mktemp("t") / "t", *events))
    if found is None:
        return
    told = found.model_dump(exclude={"on", "window_s"})
    assert min(told.values()) >= 0
    assert sum(told.values()) == pytest.approx(found.window_s, abs=1e-9)


@given(EVENTS, st.integers(1, 40))
def test_how_the_text_is_cut_changes_nothing(
    tmp_path_factory: pytest.TempPathFactory, events: list[Raw], chars: int
) -> None:
    path = write(tmp_path_factory.mktemp("t") / "t", *events[:3])
    whole = split_trace(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trace, "_PIECE_CHARS", chars)
        assert split_trace(path) == whole


# -- what is no trace --------------------------------------------------------------------------

GOOD = event("aten::mm", 0, 1)


def changed(**fields: Any) -> Callable[[Path], object]:
    return lambda path: write(path, GOOD, {**GOOD, **fields})


def text(content: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(content, "utf-8")


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (changed(ts=None), "traceEvents[5].ts: a number is needed, not None"),
        (changed(dur="3"), "traceEvents[5].dur: a number is needed, not '3'"),
        (changed(dur=True), "traceEvents[5].dur: a number is needed, not True"),
        (changed(dur=-1.0), "traceEvents[5].dur: -1.0 is no time"),
        (changed(ts=10**400), "traceEvents[5].ts: 1000000000"),
        (changed(name=5), "traceEvents[5].name: a text is needed"),
        (changed(ts=float("nan")), "NaN is no number"),
        (lambda path: write(path, [1]), "traceEvents[4]: an object is needed"),
        (text(""), "'{' is needed, not 'the end'"),
        (text("[]"), "'{' is needed, not '['"),
        (text('{"a": 1}'), "it has no traceEvents"),
        (text('{"traceEvents": {}}'), "'[' is needed, not '{'"),
        (text('{"traceEvents": [{}'), "',]' is needed, not 'the end'"),
        (text('{"traceEvents": []} x'), "text after its end"),
        (text('{"traceEvents": [' + '{"a":' * 100_000), "recursion"),
        (text('{"traceEvents": [' + "9" * 5_000 + "]}"), "digits"),
        (lambda path: path.write_bytes(b'{"a\xff": 1}'), "can't decode byte 0xff"),
        (lambda path: path.write_bytes(b"\x1f\x8bhello"), "no trace"),
        (lambda path: path.write_bytes(gzip.compress(b'{"traceEvents": []}')[:-6]), "ended before"),
        (lambda path: path.mkdir(), "Is a directory"),
    ],
)
def test_what_is_no_trace_is_named(
    tmp_path: Path, spoil: Callable[[Path], object], says: str
) -> None:
    path = tmp_path / "trace-server-rank0.json.gz"
    spoil(path)
    with pytest.raises(BadFile) as caught:
        read_trace(path)
    assert caught.value.message.startswith("trace-server-rank0.json.gz: no trace")
    assert says in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("limit", "content", "says"),
    [
        ("TEXT_CHARS", '{"traceEvents": [' + " " * 5_000 + "]}", "longer than 1,000 characters"),
        ("VALUE_CHARS", '{"a": "' + "x" * 5_000, "Unterminated string"),
        ("EVENTS", '{"traceEvents": [' + "{}," * 2_000 + "{}]}", "more than 1,000 events"),
    ],
)
def test_a_trace_cannot_take_all_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, content: str, says: str
) -> None:
    monkeypatch.setattr(trace, limit, 1_000)
    monkeypatch.setattr(trace, "_PIECE_CHARS", 500)
    (tmp_path / "t").write_bytes(gzip.compress(content.encode()))
    with pytest.raises(BadFile, match=says):
        read_trace(tmp_path / "t")
