"""Every file and stream that a person or a network hands us, damaged at random: one line, no crash.

`--full` runs 100,000 cases over all readers; without it there are 150 of each.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import random
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from virtual_run import exp1_run, write_run

from kit import again, image, lock_file, model, reference, report_files, sign
from kit.bundle_index import parse_index
from kit.errors import KitError
from kit.facts.host import parse_cpuinfo
from kit.facts.transfer import read_transports
from kit.inside.parse import ReplyParser
from kit.inside.probe_limits import parse_mountinfo
from kit.inside.proxy_wire import Failure, check_servable, parse_body, read_params
from kit.inside.spec import BadSpec, load_requests, load_spec
from kit.inside.stub_config import parse_config_text
from kit.manifest import load_manifest
from kit.measure import load_window
from kit.paths import DOCKER, MANIFESTS
from kit.scores import FOLDER, RESULTS_FILE, Scores, read_scores
from kit.trace import read_trace

CASES, FULL = 150, 6_000
REFUSED = (KitError, BadSpec, Failure)
MOST_S = 5.0

ODD = [
    b"\0", b"\xff\xfe", b"\xc3", b"\x1b[2J\x1b]0;x\x07", b"\r", b"\n\n", b"\xe2\x80\xa8", b"{",
    b"}", b"[", b"]", b'"', b":", b",", b"-", b"null", b"NaN", b"Infinity", b"1e999", b"-1",
    b"9" * 400, b"true", b'"a"', b"[]", b"{}", b"\\ud800", b"../../etc/passwd", b"x" * 60_000,
    b"[" * 3_000, b"&a [*a]", b"!!python/object:os.system", b"<<: *x", b"\t", b"data: ", b"0.0",
    b"\xf0\x9f\x98\x80",
]  # fmt: skip


def damaged(seed: bytes, draw: random.Random) -> bytes:
    """Return the bytes with one to four things done to them."""
    out = bytearray(seed)
    for _ in range(draw.randint(1, 4)):
        at, length = draw.randrange(len(out) + 1), draw.choice((1, 1, 4, 40, 400))
        what = draw.randrange(7)
        if what == 0:
            out[at : at + 1] = bytes([draw.randrange(256)])
        elif what == 1:
            del out[at : at + length]
        elif what == 2:
            out[at:at] = draw.choice(ODD)
        elif what == 3:
            out[at : at + length] = draw.choice(ODD)
        elif what == 4:
            out[at:at] = out[at : at + length]
        elif what == 5:
            del out[at:]
        else:  # a whole value of a document, where there is one
            end = min(
                (e for e in (out.find(b",", at), out.find(b"\n", at)) if e > 0), default=len(out)
            )
            begin = max(out.rfind(b":", 0, at), out.rfind(b" ", 0, at)) + 1
            if begin < end:
                out[begin:end] = draw.choice(ODD)
    return bytes(out)


# -- the readers: a seed that is well, and what reads it -----------------------------------------

IMAGE, MODEL = "v0.32.0-cpu", "smollm2-135m-instruct"
REFERENCE = MANIFESTS / "exp1_prefix_cache" / f"{IMAGE}--{MODEL}--cpu.json"
SSE = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    + b"".join(
        b"%x\r\n%s\r\n" % (len(event), event)
        for event in (
            b'data: {"choices": [{"text": "one"}], "usage": null}\n\n',
            b'data: {"choices": [{"text": " two", "finish_reason": "length"}]}\n\n',
            b'data: {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}\n\n',
            b"data: [DONE]\n\n",
        )
    )
    + b"0\r\n\r\n"
)
METRICS = b"""# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:prefix_cache_hits_total{engine="0"} 1.5e+03
vllm:cache_config_info{block_size="16",cache_dtype="auto",num_gpu_blocks="364"} 1.0
vllm:time_to_first_token_seconds_bucket{le="+Inf"} 7
"""
SPEC = json.dumps(
    {"version": 1, "host": "server", "port": 8000, "requests": "r.jsonl", "out": "out",
     "scrape_every_s": 0.5, "deadline_s": 60, "concurrency": 4, "legs": {"producer": "p:8000"}}
).encode()  # fmt: skip
REQUESTS = b"\n".join(
    json.dumps(
        {"id": f"r{i}", "path": "/v1/completions", "lane": "a", "start_s": 0.5, "tags": {"k": i},
         "body": {"model": "m", "prompt": [1, 2], "max_tokens": 4, "stream": True}}
    ).encode()
    for i in range(3)
)  # fmt: skip
PARAMS = json.dumps(
    {"choices": [{"text": "a", "finish_reason": "length"}],
     "kv_transfer_params": {"do_remote_prefill": True, "remote_block_ids": [[1, 2]],
                            "remote_engine_id": "e", "remote_host": "h", "remote_port": 5600}}
).encode()  # fmt: skip
TRACE = json.dumps(
    {"schemaVersion": 1, "traceEvents": [
        {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 1.5, "dur": 20.25, "pid": 0, "tid": 7},
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 30, "dur": 4, "pid": 1, "tid": 1},
        {"ph": "X", "cat": "user_annotation", "name": "execute", "ts": 40, "dur": 4, "tid": 1}]}
).encode()  # fmt: skip
UCX = b"""[1] | example self cfg#0 | ucp_get inter-node |
[1] | 0..inf | zero-copy | 100% on tcp/eth0 |
"""
CPUINFO = b"processor\t: 0\nmodel name\t: A CPU\nphysical id\t: 0\ncore id\t: 0\n\n"
MOUNTS = b"36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw,errors=continue\n"


def by_file(name: str, read: Callable[[Path], object]) -> Callable[[bytes, Path], None]:
    def one(content: bytes, folder: Path) -> None:
        path = folder / name
        path.write_bytes(content)
        read(path)

    return one


def by_text(read: Callable[[str], object]) -> Callable[[bytes, Path], None]:
    return lambda content, _: void(read(content.decode("utf-8", "replace")))


def by_bytes(read: Callable[[bytes], object]) -> Callable[[bytes, Path], None]:
    return lambda content, _: void(read(content))


def void(_: object) -> None:
    return None


def answer(content: bytes) -> None:
    parser, size = ReplyParser(asked_stream=True), 97 if len(content) < 1 << 20 else 1 << 16
    for at in range(0, len(content), size):
        parser.feed(content[at : at + size], at)
    parser.finish(eof=True)


def mounts(text: str) -> None:
    with contextlib.suppress(ValueError):  # which a probe makes the reason of its null
        parse_mountinfo(text)


def servable(content: bytes) -> None:
    check_servable(parse_body(content))


def in_window(name: str) -> Callable[[bytes, Path], None]:
    """Read a window of a run of which one file is damaged."""

    def one(content: bytes, folder: Path) -> None:
        window = folder / "window"
        if not window.exists():
            window.mkdir()
            for other, text in WINDOW.items():
                (window / other).write_bytes(text)
        (window / name).write_bytes(content)
        load_window(folder, "window")

    return one


SAMPLE = json.dumps(
    {"id": "q", "tags": {}, "lane": "a", "intended_s": 0.0, "connect_s": 0.001, "sent_s": 0.01,
     "chunk_s": [0.1, 0.2], "chunk_chars": [2, 3], "text": "abcde", "done_s": 0.3, "status": 200,
     "prompt_tokens": 3, "completion_tokens": 2, "cached_tokens": None, "finish_reason": "length",
     "prompt_logprobs": None, "error": None}
).encode()  # fmt: skip
SCRAPE = json.dumps({"t_s": 0.5, "status": 200, "text": METRICS.decode()}).encode() + b"\n"
WINDOW = {
    "samples.jsonl": SAMPLE + b"\n" + SAMPLE.replace(b'"q"', b'"r"') + b"\n",
    "metrics.jsonl.gz": gzip.compress(SCRAPE * 2, mtime=0),
    "load.json": b'{"version": 1, "wall_s": 1.5, "send_lag_s": {"p99": 0.001}, "clock_step_s": 0}',
}


@dataclass(frozen=True)
class Reader:
    """A good input, what reads it, and whether it ever refuses one rather than say what it can."""

    seed: bytes
    read: Callable[[bytes, Path], None]
    refuses: bool = True


SCORES = json.dumps(
    {"results": {"kit_code": {"alias": "kit_code", "acc,none": 0.75, "acc_stderr,none": 0.1},
                 "kit_prose": {"word_perplexity,none": 42.5, "word_perplexity_stderr,none": "N/A"}},
     "n-samples": {"kit_code": {"original": 16, "effective": 16},
                   "kit_prose": {"original": 12, "effective": 12}}}
).encode()  # fmt: skip


def scores(content: bytes, folder: Path) -> Scores:
    home = folder / FOLDER
    home.mkdir(exist_ok=True)
    (home / RESULTS_FILE).write_bytes(content)
    return read_scores(folder, "r0")


def identity_of(path: Path) -> None:
    lock_file._read(lock_file.LockedIdentity, path)


READERS = {
    "images.yaml": Reader((DOCKER / "images.yaml").read_bytes(), by_file("i", image.load_images)),
    "models.yaml": Reader((DOCKER / "models.yaml").read_bytes(), by_file("m", model.load_models)),
    "an image's identity": Reader(
        (DOCKER / "locks" / IMAGE / lock_file.IDENTITY).read_bytes(), by_file("l", identity_of)
    ),
    "a bundle's index": Reader(b'{"version": 1, "members": {}}', by_bytes(parse_index)),
    "samples": Reader(WINDOW["samples.jsonl"], in_window("samples.jsonl")),
    "scrapes": Reader(WINDOW["metrics.jsonl.gz"], in_window("metrics.jsonl.gz")),
    "scraped text": Reader(
        SCRAPE,
        lambda content, folder: in_window("metrics.jsonl.gz")(gzip.compress(content), folder),
    ),
    "load.json": Reader(WINDOW["load.json"], in_window("load.json")),
    "an evaluation's scores": Reader(SCORES, lambda c, f: void(scores(c, f)), refuses=False),
    "an answer": Reader(SSE, by_bytes(answer), refuses=False),
    "a request at the proxy": Reader(
        b'{"model": "m", "prompt": "a", "n": 1, "stream": true, "logprobs": null}',
        by_bytes(servable),
    ),
    "a producer's answer": Reader(PARAMS, by_bytes(read_params), refuses=False),
    "a window's spec": Reader(SPEC, by_file("spec.json", load_spec)),
    "a load file": Reader(REQUESTS, by_file("r.jsonl", load_requests)),
    "a stub's configuration": Reader(
        b'{"ttft_s": 0.1, "itl_s": 0.02, "fail_fraction": 0.5, "info_when": []}',
        by_text(lambda text: parse_config_text(text, "stub")),
    ),
    "a trace": Reader(TRACE, by_file("trace.json", read_trace)),
    "a packed trace": Reader(gzip.compress(TRACE, mtime=0), by_file("t.json.gz", read_trace)),
    "transports of a log": Reader(UCX, by_text(read_transports), refuses=False),
    "cpuinfo": Reader(CPUINFO * 3, by_text(parse_cpuinfo), refuses=False),
    "mountinfo": Reader(MOUNTS * 3, by_text(mounts), refuses=False),
    "a public key": Reader(
        b"-----BEGIN PUBLIC KEY-----\n"
        b"MCowBQYDK2VwAyEAGb9ECWmEzf6FQbrBZ9w7lshQhqowtrbLDFw4rXAxZuE=\n"
        b"-----END PUBLIC KEY-----\n",
        by_file("k.pub", sign.read_public_key),
    ),
}


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", READERS)
def test_a_damaged_input_is_read_or_refused_in_one_line(
    name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    reader = READERS[name]
    draw = random.Random(name)
    cases = FULL if request.config.getoption("--full") else CASES
    read_well = 0
    reader_ok(reader, tmp_path, name)
    for number in range(cases):
        content = damaged(reader.seed, draw)
        begin = time.monotonic()
        try:
            reader.read(content, tmp_path)
            read_well += 1
        except REFUSED as error:
            check_line(error)
        except Exception as error:
            error.add_note(f"case {number} of `{name}`: {content[:3000]!r}")
            raise
        assert time.monotonic() - begin < MOST_S, (number, content[:3000])
    assert (read_well < cases) == reader.refuses


def check_line(error: Exception) -> None:
    assert str(error).isprintable(), ascii(error)
    assert len(str(error)) < 2_000


def reader_ok(reader: Reader, folder: Path, name: str) -> None:
    if name != "a bundle's index":  # which carries its own hash
        reader.read(reader.seed, folder)


@pytest.mark.parametrize("name", ["samples", "an answer", "a load file", "a trace"])
def test_a_line_of_50_megabytes_is_bounded(name: str, tmp_path: Path) -> None:
    reader = READERS[name]
    huge = reader.seed[:60] + b"x" * 50_000_000 + reader.seed[60:]
    tracemalloc.start()
    try:
        try:
            reader.read(huge, tmp_path)
        except REFUSED as error:
            check_line(error)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8 * len(huge)


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fuzz") / "run"
    write_run(folder, exp1_run())
    return folder


def test_a_run_with_a_damaged_raw_file_is_analysed_or_refused(
    whole_run: Path, request: pytest.FixtureRequest
) -> None:
    draw = random.Random("run")
    files = sorted(p for p in whole_run.rglob("*") if p.is_file() and "report" not in p.name)
    for number in range(2_000 if request.config.getoption("--full") else 60):
        path = draw.choice(files)
        before = path.read_bytes()
        path.write_bytes(damaged(before, draw))
        try:
            again.analyse_again(whole_run)
        except REFUSED as error:
            check_line(error)
        except Exception as error:
            error.add_note(f"case {number}: {path.name}: {path.read_bytes()[:2000]!r}")
            raise
        finally:
            path.write_bytes(before)


def test_notes_of_any_kind_are_shown_and_do_not_break_a_report(tmp_path: Path) -> None:
    run = reference.unpack_reference(REFERENCE, tmp_path / "run")
    manifest = load_manifest(run / "manifest.json")
    draw = random.Random("notes")
    for _ in range(6):
        (run / "notes.md").write_bytes(
            damaged(b"# Note\n\nI saw <script>alert(1)</script>\n", draw)
        )
        report_files.write_reports(run, manifest)
        page = (run / "report.en.html").read_text("utf-8")
        assert "<script>alert(1)" not in page
