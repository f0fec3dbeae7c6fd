"""From lm-eval's scores to readings: a task's score, its standard error, and what the arms differ.

A score that is not there is null with the reason; a limit on it then does not hold.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from kit.measure import Raw, Reading, null_reading, reading_of
from kit.scores import Score


def _score(raw: Raw, task: str, metric: str) -> Score | str:
    """Return a score, or why there is none."""
    scores = raw.scores
    return scores.of.get((task, metric)) or f"{task}, {metric}: {scores.reason}"


def _files(*raws: Raw) -> tuple[str, ...]:
    return tuple(dict.fromkeys(raw.scores.file for raw in raws if raw.scores.file))


def score_of(task: str, metric: str) -> Callable[[Raw], Reading]:
    """Measure a task's score; `n` is the number of its items."""

    def compute(raw: Raw) -> Reading:
        found = _score(raw, task, metric)
        if isinstance(found, str):
            return null_reading(found, 0, *_files(raw))
        return reading_of(found.value, found.n, *_files(raw))

    return compute


def stderr_of(task: str, metric: str) -> Callable[[Raw], Reading]:
    """Measure the standard error that lm-eval gives for a task's score."""

    def compute(raw: Raw) -> Reading:
        found = _score(raw, task, metric)
        if isinstance(found, str):
            return null_reading(found, 0, *_files(raw))
        if found.stderr is None:
            return null_reading("lm-eval gives no standard error", found.n, *_files(raw))
        return reading_of(found.stderr, found.n, *_files(raw))

    return compute


def difference_of(tasks: Mapping[str, str]) -> Callable[[Raw, Raw], Reading]:
    """Compare scores of tasks (task -> metric): candidate less baseline, over all items alike.

    Both arms must have been asked the same number of items.
    """

    def compute(baseline: Raw, candidate: Raw) -> Reading:
        files, lost, items = _files(baseline, candidate), [], 0
        for task, metric in tasks.items():
            a, b = _score(baseline, task, metric), _score(candidate, task, metric)
            if isinstance(a, str) or isinstance(b, str):
                return null_reading(a if isinstance(a, str) else str(b), 0, *files)
            if a.n != b.n:
                return null_reading(f"{task}: {a.n} and {b.n} items", 0, *files)
            lost.append((b.value - a.value) * a.n)
            items += a.n
        if not items:
            return null_reading("no task is compared", 0, *files)
        return reading_of(math.fsum(lost) / items, items, *files)

    return compute
