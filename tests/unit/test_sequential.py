"""The stopping rule keeps its error rate exactly, whatever the sizes of the effects."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from kit.sequential import Stopping, signed_sums, stopping_patterns, stops_at

RULE = Stopping()
sizes = st.lists(st.floats(0, 5, allow_nan=False), min_size=16, max_size=16)
tied = st.lists(st.integers(0, 2).map(float), min_size=16, max_size=16)


@settings(max_examples=25, deadline=None)
@given(st.one_of(sizes, tied))
def test_at_most_the_spent_share_of_patterns_has_stopped_at_each_look(values: list[float]) -> None:
    stopped = 0.0
    for patterns, spent in zip(stopping_patterns(RULE, values), RULE.spent, strict=True):
        stopped += float(patterns.mean())
        assert stopped <= spent + 1e-12


def test_with_sizes_that_all_differ_the_rate_is_nearly_used_up() -> None:
    values = np.random.default_rng(1).exponential(size=16)
    stopped = sum(p.mean() for p in stopping_patterns(RULE, values.tolist()))
    assert 0.0249 < stopped <= 0.025


@settings(max_examples=25, deadline=None)
@given(sizes, st.integers(0, 2**16 - 1))
def test_stops_at_agrees_with_the_patterns(values: list[float], pattern: int) -> None:
    gains = [-v if pattern >> i & 1 else v for i, v in enumerate(values)]
    pattern = sum(1 << i for i, g in enumerate(gains) if g < 0)  # a zero has no sign
    listed = stopping_patterns(RULE, values)
    due = [n for n, p in zip(RULE.looks, listed, strict=True) if p[pattern % 2**n]]
    assert stops_at(RULE, gains) == (due[0] if due else None)
    assert len(due) <= 1


def test_six_of_six_beyond_the_margin_stop_at_the_first_look() -> None:
    assert stops_at(RULE, [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]) == 6
    assert stops_at(RULE, [0.1, 0.2, 0.3, 0.4, 0.5, -0.01]) is None
    assert stops_at(RULE, [0.1] * 5) is None


def test_signed_sums_number_their_patterns_by_bits() -> None:
    assert signed_sums(np.array([1.0, 10.0])).tolist() == [11.0, 9.0, -9.0, -11.0]


@pytest.mark.parametrize(
    ("looks", "spent"),
    [((), ()), ((6,), (0.01, 0.02)), ((9, 6), (0.01, 0.02)), ((6, 9), (0.02, 0.01)),
     ((6, 40), (0.01, 0.02)), ((6,), (0.0,)), ((0,), (0.01,))],
)  # fmt: skip
def test_a_rule_that_cannot_be_followed_is_refused(
    looks: tuple[int, ...], spent: tuple[float, ...]
) -> None:
    with pytest.raises(ValidationError):
        Stopping(looks=looks, spent=spent)
