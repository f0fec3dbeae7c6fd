"""What lm-eval wrote: scores by task. Pure, and never a traceback: a file may come from anybody."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kit.errors import BadFile, NotFound
from kit.value import load_json

FOLDER, RESULTS_FILE, ENDED_FILE = "evaluation", "results.json", "ended.json"
"""In a replicate's folder; `ended.json` says how the container ended and how long it took."""


@dataclass(frozen=True)
class Score:
    """One metric of one task over `n` items; `stderr` is None where lm-eval gives none."""

    value: float
    stderr: float | None
    n: int


@dataclass(frozen=True)
class Scores:
    """The scores of one replicate by (task, metric); `reason` says why there may be none."""

    file: str = ""
    of: Mapping[tuple[str, str], Score] = field(default_factory=dict)
    reason: str = "nothing was evaluated"


def read_scores(replicate: Path, folder: str) -> Scores:
    """Read a replicate's scores; `folder` is its name in the run. What is damaged has a reason."""
    home = replicate / FOLDER
    if not home.is_dir():
        return Scores()
    file = f"{folder}/{FOLDER}/{RESULTS_FILE}"
    try:
        told = load_json(home / RESULTS_FILE, finite=False)
    except NotFound:
        return Scores(file=f"{folder}/{FOLDER}/{ENDED_FILE}", reason=_how_it_ended(home))
    except BadFile as error:
        words = error.message.replace(str(home), FOLDER)
        return Scores(file=file, reason=f"the results cannot be read: {words}")
    return Scores(file=file, of=parse_scores(told), reason="the results hold no such score")


def _how_it_ended(home: Path) -> str:
    try:
        ended = load_json(home / ENDED_FILE)
    except (NotFound, BadFile):
        return "lm-eval left no results"
    if ended.get("timed_out") is True:
        return "lm-eval did not end in time"
    code = ended.get("exit_code")
    shown = code if isinstance(code, int) else "unknown"
    return f"lm-eval left no results (exit code {shown}); see logs/evaluation.log"


def parse_scores(told: Mapping[str, Any]) -> dict[tuple[str, str], Score]:
    """Return every finite score of lm-eval's results that says over how many items it is.

    Its keys are `metric,filter`, beside them `metric_stderr,filter` with a number or "N/A".
    """
    results, counts = told.get("results"), told.get("n-samples")
    if not isinstance(results, dict) or not isinstance(counts, dict):
        return {}
    found = {}
    for task, values in results.items():
        n = _whole(counts.get(task))
        if not isinstance(values, dict) or n is None:
            continue
        for key, value in values.items():
            metric, comma, filtered = key.partition(",")
            number = _number(value)
            if comma and number is not None and not metric.endswith("_stderr"):
                stderr = _number(values.get(f"{metric}_stderr,{filtered}"))
                found[task, metric] = Score(value=number, stderr=stderr, n=n)
    return found


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _whole(counted: object) -> int | None:
    n = counted.get("effective") if isinstance(counted, dict) else None
    return n if isinstance(n, int) and not isinstance(n, bool) and 0 < n < 2**53 else None
