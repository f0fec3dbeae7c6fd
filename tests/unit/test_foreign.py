"""Results of other load generators: read as they are told, refused where they tell no request."""

from __future__ import annotations

import itertools
import json
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from kit.cli import main
from kit.errors import BadFile
from kit.explain import guard_names
from kit.foreign import read_foreign
from kit.imported import RECORD, Imported, import_result
from kit.imported_report import write_imported_reports
from kit.measure import tpot_s, ttft_s
from kit.raw_lines import SAMPLE, read_lines
from kit.report import LANGUAGES, report_words
from kit.store import changed_files
from kit.value import load_json, parse_value

RECORDED = Path(__file__).parents[1] / "data" / "foreign"


def vllm_bench(**changes: Any) -> dict[str, Any]:
    """Return what `vllm bench serve` 0.32 saves with --save-detailed, two requests of three."""
    return {
        "date": "20260720-123456",
        "backend": "openai",
        "model_id": "stub",
        "num_prompts": 3,
        "request_rate": "inf",
        "burstiness": 1.0,
        "max_concurrency": None,
        "request_throughput": 2.0,
        "start_times": [1000.25, 1000.0, 1000.5],
        "ttfts": [0.125, 0.25, 0.0],
        "itls": [[0.0625, 0.03125], [0.5, 0.25], []],
        "errors": ["", "", "Traceback: connection reset"],
        "input_lens": [8, 8, 8],
        "output_lens": [3, 3, 0],
        "generated_texts": ["a b c", "d e f", ""],
    } | changes


def guidellm(**changes: Any) -> dict[str, Any]:
    """Return what GuideLLM 0.8 saves, in part: one request that was answered, one that was not."""

    def request(name: str, start: float, **told: Any) -> dict[str, Any]:
        timings = {
            "request_start": start,
            "first_token_iteration": start + 0.125,
            "last_token_iteration": start + 1.125,
            "request_end": start + 1.25,
        }
        return {"request_id": name, "response_id": f"cmpl-{name}", "output": "a b c"} | {
            "prompt_tokens": 8,
            "output_tokens": 3,
            "info": {"timings": timings, "error": None},
            **told,
        }

    failed = request("two", 1_780_000_000.5)
    failed["info"]["error"] = "timed out"
    groups = {"successful": [request("one", 1_780_000_000.0)], "errored": [failed]}
    return {
        "metadata": {"guidellm_version": "0.8.1", "python_version": "3.11.7"},
        "benchmarks": [{"requests": groups | {"incomplete": []}}],
    } | changes


def aiperf_lines() -> list[dict[str, Any]]:
    """Return what AIPerf 0.13 writes to profile_export.jsonl: a warm-up, an answer, a failure."""

    def record(name: str, start_ns: int, phase: str = "profiling") -> dict[str, Any]:
        metadata = {"session_num": 0, "x_request_id": name, "request_start_ns": start_ns}
        metadata |= {"request_end_ns": start_ns + 500_000_000, "benchmark_phase": phase}
        metrics = {
            "time_to_first_token": {"value": 125.0, "unit": "ms"},
            "inter_chunk_latency": {"value": [62.5, 250.0], "unit": "ms"},
            "input_sequence_length": {"value": 8, "unit": "tokens"},
            "output_sequence_length": {"value": 3, "unit": "tokens"},
        }
        return {"metadata": metadata, "metrics": metrics, "error": None}

    failed = record("c", 1_780_000_001_000_000_000)
    failed |= {"metrics": {}, "error": {"code": 499, "type": "Cancelled", "message": "late"}}
    return [
        record("a", 1_779_999_999_000_000_000, "warmup"),
        record("b", 1_780_000_000_500_000_000),
        failed,
    ]


def written(folder: Path, name: str, value: Any) -> Path:
    path = folder / name
    lines = value if isinstance(value, list) else [value]
    path.write_text("".join(json.dumps(each) + "\n" for each in lines), "utf-8")
    return path


def test_vllm_bench_gives_each_token_of_each_request(tmp_path: Path) -> None:
    found = read_foreign(written(tmp_path, "result.json", vllm_bench()))
    assert (found.tool, found.clock, found.t0_s, found.asked) == (
        "vllm-bench", "monotonic", 1000.0, 3,
    )  # fmt: skip
    first, second, failed = found.samples
    assert [s["id"] for s in found.samples] == ["r0", "r1", "r2"]
    assert (first["sent_s"], second["sent_s"]) == (0.25, 0.0)
    assert ttft_s(first) == 0.125
    assert [b - a for a, b in itertools.pairwise(second["chunk_s"])] == [0.5, 0.25]
    assert tpot_s(second) == 0.375
    assert failed["error"] == "Traceback: connection reset"
    assert failed["chunk_s"] == []
    assert found.declared["model_id"] == "stub"
    assert "max_concurrency" not in found.declared, "null is nothing that was declared"


def test_guidellm_gives_first_and_last_token_alone(tmp_path: Path) -> None:
    found = read_foreign(written(tmp_path, "benchmarks.json", guidellm()))
    assert (found.tool, found.version, found.per_token) == ("guidellm", "0.8.1", False)
    answered, failed = found.samples
    assert answered["chunk_s"] == [0.125, 1.125]
    assert answered["done_s"] == 1.25
    assert answered["tags"] == {"response_id": "cmpl-one"}
    assert tpot_s(answered) == 0.5
    assert (failed["error"], failed["chunk_s"], failed["sent_s"]) == ("timed out", [], 0.5)


def test_aiperf_gives_gaps_and_its_warm_up_is_no_result(tmp_path: Path) -> None:
    path = written(tmp_path, "profile_export.jsonl", aiperf_lines())
    written(tmp_path, "profile_export_aiperf.json", {"aiperf_version": "0.13.0"})
    found = read_foreign(path)
    assert (found.tool, found.version, found.per_token) == ("aiperf", "0.13.0", True)
    answered, failed = found.samples
    assert (answered["id"], answered["sent_s"]) == ("b", 0.0)
    assert answered["chunk_s"] == [0.125, 0.1875, 0.4375]
    assert '"code": 499' in failed["error"]
    assert failed["sent_s"] == 0.5


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("a.json", {"request_throughput": 2.0}, "no results of single requests"),
        ("a.json", {"anything": 1}, "no results of single requests"),
        ("a.json", vllm_bench(ttfts=[0.1]), "different lengths"),
        ("a.json", vllm_bench(ttfts=["fast", 1, 2]), r"ttfts\[0\]"),
        ("a.json", guidellm(benchmarks=[]), "0 benchmarks are in it"),
        ("a.jsonl", [], "no measured request"),
        ("a.jsonl", [{"metadata": {}}], r"line 1: metadata\.x_request_id"),
    ],
)
def test_what_is_no_result_is_refused(tmp_path: Path, name: str, value: Any, said: str) -> None:
    with pytest.raises(BadFile, match=said):
        read_foreign(written(tmp_path, name, value))


def test_an_import_has_guards_and_measures_but_no_verdict(tmp_path: Path) -> None:
    record, folder = import_result(written(tmp_path, "result.json", vllm_bench()), tmp_path)
    assert load_json(folder / RECORD) == record.model_dump(mode="json")
    assert "verdict" not in Imported.model_fields
    assert (record.state, record.environment) == ("imported", "declared")
    by_name = {guard.name: guard for guard in record.guards}
    assert set(by_name) == {"failed_requests", "lost_samples"}
    assert by_name["lost_samples"].ok
    assert not by_name["failed_requests"].ok
    assert "1 of 3 requests failed" in by_name["failed_requests"].text
    assert set(by_name) | set(record.not_judged) == set(guard_names())
    value = {r.name: r.value for r in record.readings}
    assert value["requests"] == 2
    assert value["tpot_mean_s"] == (0.046875 + 0.375) / 2
    assert value["itl_p99_s"] is None, "four gaps carry no p99"
    assert not changed_files(folder, record.files)
    assert (folder / "source" / "result.json").read_bytes() == (
        tmp_path / "result.json"
    ).read_bytes()
    kept = list(read_lines(folder / "measure" / "samples.jsonl", SAMPLE))
    assert [s["id"] for s in kept] == ["r0", "r1", "r2"]
    parse_value(Imported, load_json(folder / RECORD), RECORD, strict=True)


def test_a_tool_without_single_tokens_gives_no_gaps(tmp_path: Path) -> None:
    record, _ = import_result(written(tmp_path, "benchmarks.json", guidellm()), tmp_path)
    names = {r.name for r in record.readings}
    assert "tpot_mean_s" in names
    assert not {name for name in names if name.startswith("itl")}


def test_the_command_says_what_it_judged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, "result.json", vllm_bench())
    assert main(["import", str(path), "--out", str(tmp_path), "--json"]) == 0
    said = capsys.readouterr()
    told = json.loads(said.out)
    assert told["tool"] == "vllm-bench"
    assert Path(told["folder"]).is_dir()
    assert "not judged: " in said.err
    pages = sorted(Path(told["folder"]).glob("report.*"))
    assert [p.name for p in pages] == [
        "report.en.html", "report.en.md", "report.zh.html", "report.zh.md",
    ]  # fmt: skip
    before = [page.read_text("utf-8") for page in pages]
    assert main(["report", told["folder"]]) == 0
    assert [page.read_text("utf-8") for page in pages] == before
    (Path(told["folder"]) / "measure" / "samples.jsonl").write_text("", "utf-8")
    assert main(["report", told["folder"]]) == 70
    assert main(["import", str(tmp_path / "none.json"), "--out", str(tmp_path)]) == 12


@pytest.mark.parametrize("form", ["md", "html"])
def test_the_report_says_first_what_is_not_known(tmp_path: Path, form: str) -> None:
    said = {}
    for name, value in (("vllm.json", vllm_bench()), ("guide.json", guidellm())):
        record, folder = import_result(written(tmp_path, name, value), tmp_path)
        write_imported_reports(folder, record)
        said[record.tool] = unescape((folder / f"report.en.{form}").read_text("utf-8"))
        for language in LANGUAGES:
            text = (folder / f"report.{language}.{form}").read_text("utf-8")
            assert text.index(report_words()["imported_no_environment"][language]) < text.index(
                report_words()["measures"][language]
            )
            assert all(file.sha256 in text for file in record.files.values())
            assert "supported" not in text.partition("</style>")[2 if form == "html" else 0]
    tokens, asked = (report_words()[f"imported_no_{x}"]["en"] for x in ("tokens", "asked"))
    assert [tokens in said[tool] for tool in ("vllm-bench", "guidellm")] == [False, True]
    assert [asked in said[tool] for tool in ("vllm-bench", "guidellm")] == [False, True]
    assert "no value: " in said["vllm-bench"]


def test_what_a_tool_wrote_is_text_of_the_page_and_no_more(tmp_path: Path) -> None:
    path = written(tmp_path, "result.json", vllm_bench(model_id="<script>alert(1)</script>"))
    record, folder = import_result(path, tmp_path)
    write_imported_reports(folder, record)
    text = (folder / "report.en.html").read_text("utf-8")
    assert "<script" not in text
    assert "&lt;script&gt;alert(1)" in text


RECORDS = {
    "vllm-bench": "vllm-bench-serve/vllm.json",
    "guidellm": "guidellm/guidellm.json",
    "aiperf": "aiperf/profile_export.jsonl",
}


@pytest.mark.parametrize("tool", RECORDS)
def test_what_the_tools_themselves_wrote_is_read(tool: str, tmp_path: Path) -> None:
    """Three requests of five tokens at a stub: the first after 100 ms, then one every 50 ms."""
    found = read_foreign(RECORDED / RECORDS[tool])
    assert (found.tool, len(found.samples)) == (tool, 3)
    assert (found.version is None) == (tool == "vllm-bench")
    for sample in found.samples:
        assert sample["error"] is None
        assert (sample["completion_tokens"], len(sample["chunk_s"])) == (
            5, 5 if found.per_token else 2,
        )  # fmt: skip
        assert ttft_s(sample) == pytest.approx(0.1, abs=0.05)
        assert tpot_s(sample) == pytest.approx(0.05, abs=0.01)
    record, _ = import_result(RECORDED / RECORDS[tool], tmp_path)
    value = {r.name: r.value for r in record.readings}
    assert value["requests"] == 3
    assert value["tpot_mean_s"] == pytest.approx(0.05, abs=0.01)
    assert all(guard.ok for guard in record.guards)
