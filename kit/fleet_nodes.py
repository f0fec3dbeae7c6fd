"""How far the nodes of one class are apart, and which of them is sick. Pure.

A node's level is the mean of the log of the primary measure over the replicates of its runs of one
plan. A node is named when it differs from the median of the other nodes by more than both the
registered least difference and what the replicates' own scatter explains (Student's t, two-sided
5 % over all nodes together). The other nodes' median counts as one node's worth of data, so the
rule is slow to accuse. With two nodes nobody can say which one is sick.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Literal

from scipy import stats

from kit.value import Value

LEAST = math.log(1.05)  # a node within five percent is as good as the others
ALPHA = 0.05
MIN_NODES = 3
MIN_VALUES = 2

Says = Literal["like the others", "differs", "cannot tell"]


class NodeLevel(Value):
    """One node beside the others of its class.

    `median` is of the primary measure in its own unit, `n` its replicates, `ratio` how many times
    the others' median it is, `limit` the ratio up to which that is no finding.
    """

    node: str
    n: int
    median: float
    ratio: float
    limit: float | None
    says: Says


def judge_nodes(values: Mapping[str, Sequence[float]]) -> tuple[NodeLevel, ...]:
    """Judge the nodes of a class from their levels (node -> positive values of one measure)."""
    logs = {node: [math.log(v) for v in each if v > 0] for node, each in values.items()}
    logs = {node: each for node, each in sorted(logs.items()) if each}
    if len(logs) < 2:
        return ()
    means = {node: statistics.fmean(each) for node, each in logs.items()}
    enough = len(logs) >= MIN_NODES and min(map(len, logs.values())) >= MIN_VALUES
    return tuple(_judge(node, logs, means, enough=enough) for node in logs)


def _judge(
    node: str, logs: Mapping[str, Sequence[float]], means: Mapping[str, float], *, enough: bool
) -> NodeLevel:
    others = statistics.median(mean for name, mean in means.items() if name != node)
    apart = means[node] - others
    limit = _limit(node, logs) if enough else None
    says: Says = "cannot tell"
    if limit is not None:
        says = "differs" if abs(apart) > limit else "like the others"
    return NodeLevel(
        node=node,
        n=len(logs[node]),
        median=math.exp(statistics.median(logs[node])),
        ratio=math.exp(apart),
        limit=None if limit is None else math.exp(limit),
        says=says,
    )


def _limit(node: str, logs: Mapping[str, Sequence[float]]) -> float:
    """Return the log ratio up to which a node's distance is no finding."""
    degrees = sum(len(each) - 1 for each in logs.values())
    squares = sum((value - statistics.fmean(each)) ** 2 for each in logs.values() for value in each)
    fewest = min(len(each) for name, each in logs.items() if name != node)
    error = math.sqrt(squares / degrees * (1 / len(logs[node]) + 1 / fewest))
    wide = float(stats.t.ppf(1 - ALPHA / (2 * len(logs)), degrees))
    return max(LEAST, wide * error)
