"""Tiers: unit (pure), integration (processes), container (real engine, real vLLM), gpu (opt-in).

`--full` adds the long tests; `--gpu` the ones that need an NVIDIA device. A test of a tier that
should run here and skips instead is a failure under CI.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from pathlib import Path

import pytest
import summary
from _pytest.terminal import TerminalReporter

TIERS = ("unit", "integration", "container", "gpu")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="also run the long tests")
    parser.addoption(
        "--write-matrix", action="store_true", help="write what faults left to docs/hostile.md"
    )
    parser.addoption(
        "--write-summary", action="store_true", help="write what each file said to docs/tests.md"
    )
    parser.addoption("--gpu", action="store_true", help="also run the tests that need a GPU")


def tier_of(item: pytest.Item) -> str:
    parts = Path(str(item.path)).parts
    return next((t for t in TIERS if t in parts), "unit")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = []
    for item in items:
        tier = tier_of(item)
        if tier in ("container", "gpu"):
            item.add_marker(getattr(pytest.mark, tier))
        wanted = config.getoption("--gpu") if tier == "gpu" else True
        if item.get_closest_marker("full") and not config.getoption("--full"):
            wanted = False
        if not wanted:
            left_out.append(item)
    config.hook.pytest_deselected(items=left_out)
    items[:] = sorted(
        (i for i in items if i not in left_out), key=lambda i: TIERS.index(tier_of(i))
    )


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):  # type: ignore[no-untyped-def]
    outcome = yield
    report = outcome.get_result()
    if report.skipped and os.environ.get("CI") and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped under CI: {report.longrepr}"


def pytest_terminal_summary(terminalreporter: TerminalReporter, config: pytest.Config) -> None:
    if not config.getoption("--write-summary"):
        return
    outcomes: dict[str, Counter[str]] = defaultdict(Counter)
    seconds: dict[str, float] = defaultdict(float)
    for end, name in (("passed", "passed"), ("failed", "failed"), ("error", "failed"),
                      ("skipped", "skipped")):  # fmt: skip
        for report in terminalreporter.stats.get(end, ()):
            outcomes[report.nodeid.partition("::")[0]][name] += 1
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid.partition("::")[0]] += report.duration
    summary.write(summary.rows(outcomes, seconds, config.option.keyword, summary.commit()))
