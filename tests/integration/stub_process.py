"""Starts the real stub and the real window as processes, and reads what they leave."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kit.inside.scrape import read_scrapes
from kit.paths import ROOT

PROMPT = "one two three four five six seven eight"


@dataclass
class Stub:
    """A running stub; `port` is where it listens."""

    process: subprocess.Popen[str]
    port: int
    times: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def logged(self) -> dict[str, dict[str, Any]]:
        """Return what it logged so far, by request id; times are CLOCK_MONOTONIC seconds."""
        return {record["id"]: record for record in json_lines(self.times)}


@contextlib.contextmanager
def running_stub(folder: Path, *arguments: str, **config: Any) -> Iterator[Stub]:
    """Run a stub on a free port, with `vllm serve` arguments when given, until the block ends."""
    times = folder / "stub_times.jsonl"
    text = json.dumps({"port": 0, "ttft_s": 0.02, "itl_s": 0.01, "times_out": str(times)} | config)
    if arguments:
        words = ["serve", "/model", "--host", "127.0.0.1", *arguments]
    else:
        (folder / "stub.json").write_text(text)
        words = [str(folder / "stub.json")]
    process = subprocess.Popen(
        [sys.executable, "-m", "kit.inside.stub", *words],
        cwd=ROOT,
        env={**os.environ, "KIT_STUB": text, "VLLM_NIXL_SIDE_CHANNEL_PORT": "0"},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        yield Stub(process, json.loads(line)["port"] if line else 0, times)
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def completion(name: str, *, tokens: int = 5, **fields: Any) -> dict[str, Any]:
    """Return a streamed completions request; `fields` go beside the body (at_s, lane, tags)."""
    body: dict[str, Any] = {"model": "stub", "prompt": PROMPT, "max_tokens": tokens}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    body |= fields.pop("body", {})
    if "lane" not in fields:
        fields.setdefault("at_s", 0.0)
    return {"id": name, "path": "/v1/completions", "body": body, "tags": {}, **fields}


@dataclass
class Measured:
    """What a window left: exit status, what it printed, its files."""

    status: int
    events: list[dict[str, Any]]
    stderr: str
    samples: dict[str, dict[str, Any]] = field(default_factory=dict)
    scrapes: list[dict[str, Any]] = field(default_factory=list)
    load: dict[str, Any] = field(default_factory=dict)


def write_window(
    folder: Path, port: int, requests: Sequence[dict[str, Any]], **changes: Any
) -> Path:
    """Write a spec and its requests; return the spec."""
    lines = "".join(json.dumps(request) + "\n" for request in requests)
    (folder / "requests.jsonl").write_text(lines)
    spec = {"version": 1, "host": "127.0.0.1", "port": port, "out": "out", "deadline_s": 20}
    path = folder / "spec.json"
    path.write_text(json.dumps({**spec, **changes}))
    return path


def start_window(spec: Path, **options: Any) -> subprocess.Popen[str]:
    """Start the window's process without waiting for it."""
    return subprocess.Popen(
        [sys.executable, "-m", "kit.inside.window", str(spec)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def finish_window(process: subprocess.Popen[str], spec: Path) -> Measured:
    """Wait for a window's end and read what it left."""
    try:
        stdout, stderr = process.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        raise
    events = [json.loads(line) for line in stdout.splitlines()]
    return read_window(spec, Measured(process.returncode, events, stderr))


def read_window(spec: Path, left: Measured) -> Measured:
    """Read the files of a window, those that are there."""
    out = spec.parent / "out"
    if (out / "samples.jsonl").exists():
        left.samples = {s["id"]: s for s in json_lines(out / "samples.jsonl")}
    if (out / "metrics.jsonl.gz").exists():
        left.scrapes = list(read_scrapes(out / "metrics.jsonl.gz"))
    if (out / "load.json").exists():
        left.load = json.loads((out / "load.json").read_text())
    return left


def run_window(
    folder: Path, port: int, requests: Sequence[dict[str, Any]], **changes: Any
) -> Measured:
    """Run one window to its end."""
    spec = write_window(folder, port, requests, **changes)
    return finish_window(start_window(spec), spec)


def json_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]
