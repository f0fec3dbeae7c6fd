"""A process beside the load that asks engines for their metrics and keeps every answer.

One file an engine, one line a scrape: `{t_s, utc, took_s, status, text, error}`, `t_s` when it
was asked, in seconds from the window's start (the scrape before the window is negative).
Each line is a gzip member of its own, so that the file is whole whenever a run is cut short.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import select
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

from .parse import short_error

SCRAPE_TIMEOUT_S = 2.0
_KEPT = ("vllm:", "# TYPE vllm:", "kit_proxy_", "# TYPE kit_proxy_")
_IDLE_POLL_S = 0.05
_ACTIVE = re.compile(
    r"^vllm:num_requests_(?:running|waiting)(?:\{[^}]*\})? ([0-9.eE+-]+)$", re.MULTILINE
)


class ScraperLost(Exception):
    """The scraper cannot write: disk full, folder gone. The text is the system's."""


@dataclass(frozen=True)
class Target:
    """An engine's metrics page and the open file that keeps what it answers."""

    url: str
    file: BinaryIO


@dataclass(frozen=True)
class ScrapeReport:
    """What the scraper did. `idle` is null when no engine tells how busy it is."""

    scrapes: int
    failed: int
    idle: bool | None
    idle_wait_s: float
    cpu_s: float


def keep_engine_lines(text: str) -> str:
    """Keep the own samples of an engine or of the kit's proxy, and their types.

    Help texts and other collectors are dropped.
    """
    kept = (line for line in text.splitlines() if line.startswith(_KEPT))
    return "".join(line + "\n" for line in kept)


def active_requests(text: str) -> float | None:
    """Return running plus waiting requests, over all engines; None when neither is told."""
    found = [float(value) for value in _ACTIVE.findall(text)]
    return sum(found) if found else None


def read_scrapes(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the scrapes of a metrics.jsonl.gz, up to where a killed writer left it."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        try:
            for line in lines:
                yield json.loads(line)
        except EOFError:
            return


class Scraper:
    """The parent's end of the scraping process."""

    def __init__(self, urls: Mapping[Path, str], every_s: float | None) -> None:
        """Start the process; `urls` are by the file that keeps their answers.

        Raises `OSError` when such a file cannot be made.
        """
        targets = [Target(url, metrics.open("xb")) for metrics, url in urls.items()]
        their_in, our_out = os.pipe()
        our_in, their_out = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(our_out)
            os.close(our_in)
            _run_child(targets, every_s, their_in, their_out)
        for fd in (their_in, their_out):
            os.close(fd)
        for target in targets:
            target.file.close()
        self._in = os.fdopen(our_in, "rb")
        self._out = our_out

    def wait_first(self) -> None:
        """Wait until the scrape before the window has been answered, or has failed."""
        self._answer()

    def begin(self, t0_ns: int) -> None:
        """Scrape periodically from `t0_ns` on."""
        self._say(f"begin {t0_ns}")

    def finish(self, idle_limit_s: float) -> ScrapeReport:
        """Wait until the engine is idle or the limit is over, scrape once more, and end.

        Raises `ScraperLost` with the reason when it could not write everything.
        """
        self._say(f"finish {idle_limit_s}")
        answer = self._answer()
        self._in.close()
        os.close(self._out)
        os.waitpid(self.pid, 0)
        return ScrapeReport(**answer)

    def _say(self, line: str) -> None:
        try:
            os.write(self._out, line.encode() + b"\n")
        except BrokenPipeError:
            return  # its last answer, read next, says why it ended

    def _answer(self) -> dict[str, Any]:
        line = self._in.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"lost": "the scraper ended early"}
        if "lost" in answer:
            raise ScraperLost(answer["lost"])
        return answer


# -- in the child ------------------------------------------------------------------------------


class _Child:
    def __init__(
        self, targets: Sequence[Target], every_s: float | None, commands: int, answers: int
    ) -> None:
        self._targets = targets
        self._every_s = every_s
        self._commands = commands
        self._answers = answers
        self._pending = b""
        self._t0_s = 0.0
        self._count = self._failed = 0
        import httpx  # here, so that only this process pays for it

        self._client = httpx.Client(timeout=SCRAPE_TIMEOUT_S, trust_env=False)
        self._failures = (httpx.HTTPError, httpx.InvalidURL)

    def run(self) -> None:
        first = [self._ask(target) for target in self._targets]
        self.tell({"first": [answer["status"] for answer in first]})
        if not (command := self._command(None)).startswith("begin "):
            return
        self._t0_s = int(command.split()[1]) / 1e9
        for target, answer in zip(self._targets, first, strict=True):
            self._write(target, answer)
        if not (command := self._scrape_until_told()).startswith("finish "):
            return
        began = time.monotonic()
        idle = self._wait_idle(began + float(command.split()[1]))
        waited_s = time.monotonic() - began
        self._scrape()
        for target in self._targets:
            target.file.close()
        report = ScrapeReport(
            self._count, self._failed, idle, round(waited_s, 3), time.process_time()
        )
        self.tell(asdict(report))

    def tell(self, answer: dict[str, Any]) -> None:
        try:
            os.write(self._answers, json.dumps(answer).encode() + b"\n")
        except BrokenPipeError:
            return  # nobody is left to be told

    def _command(self, until_s: float | None) -> str:
        """Return the parent's next line, `tick` at `until_s`, or nothing when it is gone."""
        while b"\n" not in self._pending:
            left = None if until_s is None else max(0.0, until_s - time.monotonic())
            if not select.select([self._commands], [], [], left)[0]:
                return "tick"
            piece = os.read(self._commands, 4096)
            if not piece:
                return ""
            self._pending += piece
        line, _, self._pending = self._pending.partition(b"\n")
        return line.decode()

    def _scrape_until_told(self) -> str:
        if self._every_s is None:
            return self._command(None)
        tick = 0
        while True:
            due_s = self._t0_s + tick * self._every_s
            if (command := self._command(due_s)) != "tick":
                return command
            self._scrape()
            # On a fixed grid; what a slow answer made us miss is skipped, not caught up.
            tick = max(tick, int((time.monotonic() - self._t0_s) / self._every_s)) + 1

    def _scrape(self) -> None:
        for target in self._targets:
            self._write(target, self._ask(target))

    def _wait_idle(self, until_s: float) -> bool | None:
        """Wait until every engine that tells how busy it is has nothing left to do."""
        busy = list(self._targets)
        told = False
        while True:
            answers = [(target, self._ask(target)) for target in busy]
            active = [active_requests(answer["text"]) for _, answer in answers]
            told = told or any(count == 0 for count in active)
            busy = [
                target
                for (target, answer), count in zip(answers, active, strict=True)
                if count or (count is None and self._may_answer_later(answer))
            ]
            if not busy:
                return True if told else None  # dead, or it does not tell: no use waiting
            if time.monotonic() >= until_s:
                return False
            time.sleep(_IDLE_POLL_S)

    @staticmethod
    def _may_answer_later(answer: dict[str, Any]) -> bool:
        return answer["status"] is None and not str(answer["error"]).startswith("ConnectError")

    def _ask(self, target: Target) -> dict[str, Any]:
        asked_s = time.monotonic()
        utc = datetime.now(UTC).isoformat(timespec="milliseconds")
        status, text, error = None, "", None
        try:
            answer = self._client.get(target.url)
            status, text = answer.status_code, keep_engine_lines(answer.text)
        except self._failures as failure:
            error = short_error(type(failure).__name__, failure)
        took_s = round(time.monotonic() - asked_s, 6)
        return {
            "t_s": asked_s,
            "utc": utc,
            "took_s": took_s,
            "status": status,
            "text": text,
            "error": error,
        }

    def _write(self, target: Target, answer: dict[str, Any]) -> None:
        answer["t_s"] = round(answer["t_s"] - self._t0_s, 6)
        line = json.dumps(answer, ensure_ascii=False) + "\n"
        target.file.write(gzip.compress(line.encode(), mtime=0))
        target.file.flush()
        self._count += 1
        self._failed += answer["status"] != 200


def _run_child(
    targets: Sequence[Target], every_s: float | None, commands: int, answers: int
) -> None:
    """Serve the parent until it says `finish` or is gone, then leave this process for good."""
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, signal.SIG_IGN)  # ends with the parent's pipe
    status = 70
    try:
        child = _Child(targets, every_s, commands, answers)
        child.run()
        status = 0
    except OSError as error:
        child.tell({"lost": short_error(type(error).__name__, error.strerror or error)})
    finally:
        if sys.exc_info()[0] is not None:
            traceback.print_exc()
        os._exit(status)
