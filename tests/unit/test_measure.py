"""Measures: what a request took, and null with a reason rather than a guess."""

import gzip
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.errors import BadFile
from kit.measure import (
    SERVED,
    Measure,
    Raw,
    Reading,
    Scrape,
    Window,
    counter_delta,
    load_raw,
    max_itl_s,
    mean_of,
    output_throughput,
    parse_metrics,
    quantile,
    quantile_of,
    ratio_of,
    start_s,
    tpot_s,
    ttft_s,
)


def sample(**fields: Any) -> dict[str, Any]:
    return {
        "id": "q",
        "lane": "a",
        "intended_s": 0.0,
        "sent_s": 0.0,
        "chunk_s": [0.5, 0.6],
        "done_s": 0.7,
        "status": 200,
        "prompt_tokens": 4,
        "completion_tokens": 2,
        "error": None,
        **fields,
    }


def scrape(t_s: float, **values: float) -> Scrape:
    return Scrape(t_s=t_s, values={(n, frozenset()): v for n, v in values.items()})


def raw_of(samples: list[dict[str, Any]], scrapes: list[Scrape] | None = None) -> Raw:
    window = Window("r/measure", tuple(samples), tuple(scrapes or ()), {})
    return Raw(windows={"measure": window})


def timed(*seconds: float) -> Raw:
    return raw_of([sample(id=f"q{i}", chunk_s=[s, s + 1]) for i, s in enumerate(seconds)])


# -- one request -------------------------------------------------------------------------------


def test_open_loop_counts_from_the_intended_time_so_a_stall_shows() -> None:
    late = sample(lane=None, intended_s=1.0, sent_s=3.0, chunk_s=[3.5, 3.6])
    assert start_s(late) == 1.0
    assert ttft_s(late) == 2.5


def test_closed_loop_counts_from_the_send() -> None:
    late = sample(lane="a", intended_s=1.0, sent_s=3.0, chunk_s=[3.5, 3.6])
    assert ttft_s(late) == 0.5


def test_an_answer_that_was_no_stream_has_no_token_times() -> None:
    whole = sample(chunk_s=[])
    assert (ttft_s(whole), tpot_s(whole), max_itl_s(whole)) == (None, None, None)


def test_tpot_divides_by_the_servers_count_and_not_by_chunks() -> None:
    assert tpot_s(sample(chunk_s=[1.0, 2.0, 3.0], completion_tokens=5)) == 0.5
    assert tpot_s(sample(chunk_s=[1.0, 2.0], completion_tokens=None)) is None
    assert tpot_s(sample(chunk_s=[1.0], completion_tokens=5)) is None


def test_max_itl_is_the_longest_stall() -> None:
    assert max_itl_s(sample(chunk_s=[0.0, 0.1, 0.9, 1.0])) == pytest.approx(0.8)


# -- quantiles ---------------------------------------------------------------------------------


@given(
    st.lists(st.floats(0, 1e3, allow_nan=False), min_size=1, max_size=40),
    st.floats(0, 1, allow_nan=False),
)
def test_quantile_is_that_of_numpy(values: list[float], q: float) -> None:
    assert quantile(sorted(values), q) == pytest.approx(float(np.quantile(values, q)), abs=1e-9)


@pytest.mark.parametrize(
    ("count", "q", "given_"),
    [(9, 0.5, False), (10, 0.5, True), (99, 0.95, False), (100, 0.95, True),
     (499, 0.99, False), (500, 0.99, True), (499, 0.01, False), (500, 0.01, True)],
)  # fmt: skip
def test_a_quantile_needs_five_values_beyond_it(count: int, q: float, given_: bool) -> None:
    found = quantile_of(ttft_s, q)(timed(*(0.1 * i for i in range(count))))
    assert (found.value is not None) == given_
    assert given_ or "5 needed" in str(found.reason)
    assert found.n == count
    assert found.sources == ("r/measure/samples.jsonl",)


def test_failed_requests_are_in_no_quantile() -> None:
    raw = raw_of([sample(id=f"q{i}") for i in range(10)] + [sample(error="HTTP 500")] * 5)
    assert quantile_of(ttft_s, 0.5)(raw).n == 10


def test_mean_of_nothing_is_null() -> None:
    found = mean_of(ttft_s)(raw_of([sample(error="x")]))
    assert (found.value, found.reason) == (None, "no request has this value")
    assert mean_of(ttft_s)(timed(1.0, 2.0)).value == 1.5


# -- throughput --------------------------------------------------------------------------------


def test_throughput_is_tokens_from_first_send_to_last_byte() -> None:
    raw = raw_of([sample(sent_s=1.0, done_s=2.0), sample(sent_s=1.5, done_s=3.0)])
    assert output_throughput()(raw).value == 2.0


def test_throughput_without_a_token_count_is_null_and_not_too_low() -> None:
    raw = raw_of([sample(), sample(completion_tokens=None)])
    assert output_throughput()(raw).value is None
    assert output_throughput()(raw_of([sample(error="x")])).value is None
    assert output_throughput()(raw_of([sample(sent_s=0.7)])).value is None


# -- counters ----------------------------------------------------------------------------------


def test_counter_rises_from_first_to_last_scrape() -> None:
    raw = raw_of([], [scrape(0, c_total=5), scrape(1, c_total=6), scrape(2, c_total=9)])
    assert counter_delta("c_total")(raw).value == 4
    assert counter_delta("c_total")(raw).sources == ("r/measure/metrics.jsonl.gz",)


def test_counter_that_fell_is_null_even_when_it_ends_higher() -> None:
    raw = raw_of([], [scrape(0, c_total=5), scrape(1, c_total=1), scrape(2, c_total=9)])
    found = counter_delta("c_total")(raw)
    assert found.value is None
    assert "reset" in str(found.reason)


def test_absent_counter_is_null_and_never_zero() -> None:
    found = counter_delta("c_total")(raw_of([], [scrape(0), scrape(1)]))
    assert found.value is None
    assert "c_total was not in two scrapes" in str(found.reason)


def test_labels_choose_series_and_others_are_summed() -> None:
    text = 'c_total{source="a",engine="0"} 1\nc_total{source="a",engine="1"} 2\n'
    text += 'c_total{source="b"} 4\n'
    one = Scrape(t_s=0, values=parse_metrics(text))
    assert one.total("c_total") == 7
    assert one.total("c_total", source="a") == 3
    assert one.total("c_total", source="z") is None


def test_ratio_is_null_over_zero_and_over_null() -> None:
    raw = raw_of([], [scrape(0, a_total=0, b_total=0), scrape(1, a_total=3, b_total=0)])
    a, b = counter_delta("a_total"), counter_delta("b_total")
    assert ratio_of(a, b)(raw).reason == "the divisor is zero"
    assert ratio_of(b, a)(raw).value == 0
    assert ratio_of(a, counter_delta("z_total"))(raw).value is None


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_no_number_is_null(value: float) -> None:
    raw = raw_of([], [scrape(0, c_total=0), scrape(1, c_total=value)])
    found = counter_delta("c_total")(raw)
    assert found.value is None
    assert "no number" in str(found.reason)


def test_a_measure_names_its_reading() -> None:
    raw = timed(1.0, 2.0)
    found = Measure("ttft_mean_s", "s", "TTFT, mean", mean_of(ttft_s)).read(raw)
    assert found == Reading(
        name="ttft_mean_s", unit="s", value=1.5, n=2, sources=("r/measure/samples.jsonl",)
    )


def test_served_lengths_are_those_of_the_server() -> None:
    raw = raw_of([sample(prompt_tokens=3), sample(prompt_tokens=9, completion_tokens=7)])
    found = {m.name: m.read(raw).value for m in SERVED}
    assert found == {
        "input_tokens_min": 3,
        "input_tokens_max": 9,
        "output_tokens_min": 2,
        "output_tokens_max": 7,
    }


# -- raw files ---------------------------------------------------------------------------------


LINE = '{"id": "q", "intended_s": 0, "sent_s": 0.5, "chunk_s": [], "of a later kit": 1}\n'


def write_window(run: Path, samples: str = LINE, load: str = "{}") -> None:
    folder = run / "r" / "measure"
    folder.mkdir(parents=True)
    (folder / "samples.jsonl").write_text(samples, "utf-8")
    (folder / "load.json").write_text(load, "utf-8")
    lines = [{"t_s": 0.0, "status": 200, "text": "c_total 1\n"}, {"t_s": 1.0, "status": None}]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl.gz").write_bytes(gzip.compress(text.encode()))


def test_load_raw_reads_a_replicate_and_leaves_out_failed_scrapes(tmp_path: Path) -> None:
    write_window(tmp_path)
    raw = load_raw(tmp_path, "r", ["measure"])
    (sample,) = raw.measured.samples
    assert {**sample, "chunk_s": [*sample["chunk_s"]]} == json.loads(LINE)
    assert [s.total("c_total") for s in raw.measured.scrapes] == [1.0]
    assert raw.server_info == {}
    assert (raw.start_logs, raw.model) == ({}, {})


def test_a_server_log_is_read_up_to_the_moment_when_it_served(tmp_path: Path) -> None:
    write_window(tmp_path)
    (tmp_path / "r" / "logs").mkdir()
    lines = b"loaded \xff\nINFO: Application startup complete.\nPOST /v1/completions\n"
    (tmp_path / "r" / "logs" / "server.log").write_bytes(lines)
    (tmp_path / "model.json").write_text('{"files": {"config.json": 7}}', "utf-8")
    raw = load_raw(tmp_path, "r", ["measure"])
    assert raw.start_logs == {"server": "loaded \ufffd\n"}
    assert raw.model["files"] == {"config.json": 7}


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        ({"samples": LINE + '{"id"'}, "samples.jsonl in .*, line 2"),
        ({"samples": LINE.replace("0.5", "NaN")}, "line 1: sent_s: .* finite number"),
        ({"samples": LINE.replace("0.5", '"0.5"')}, "line 1: sent_s: .* valid number"),
        ({"samples": LINE.replace("[]", "[null]")}, r"line 1: chunk_s\[0\]: "),
        ({"load": "[]"}, "load.json"),
        ({"load": '{"clock_step_s": "no"}'}, "load.json in r/measure: clock_step_s: "),
    ],
)
def test_a_broken_raw_file_is_named_with_its_line(
    tmp_path: Path, broken: dict[str, str], says: str
) -> None:
    write_window(tmp_path, **broken)
    with pytest.raises(BadFile, match=says):
        load_raw(tmp_path, "r", ["measure"])


def test_a_missing_raw_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadFile, match=r"samples\.jsonl .* is not there"):
        load_raw(tmp_path, "r", ["measure"])
