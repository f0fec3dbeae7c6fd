"""Overlap of schedule and forward: what a plain count over small time slots gives."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.overlap import Interval, common, length_s, merged, overlap_of

SLOTS = 40
INTERVALS = st.lists(
    st.tuples(st.integers(0, SLOTS), st.integers(0, SLOTS)).map(
        lambda pair: (float(min(pair)), float(max(pair)))
    ),
    max_size=12,
)


def slots(intervals: list[Interval]) -> set[int]:
    """Return the whole seconds that the intervals cover."""
    return {slot for begin, end in intervals for slot in range(int(begin), int(end))}


@given(INTERVALS)
def test_merged_intervals_are_disjoint_ordered_and_cover_the_same_time(
    intervals: list[Interval],
) -> None:
    found = merged(intervals)
    assert slots(found) == slots(intervals)
    assert all(a[1] < b[0] for a, b in itertools.pairwise(found))
    assert length_s(intervals) == len(slots(intervals))


@given(INTERVALS, INTERVALS)
def test_what_is_common_is_what_both_cover(a: list[Interval], b: list[Interval]) -> None:
    assert slots(common(a, b)) == slots(a) & slots(b)
    assert common(a, b) == common(b, a)
    assert length_s(common(a, b)) <= min(length_s(a), length_s(b))


@given(INTERVALS)
def test_all_of_it_is_hidden_by_itself_and_none_by_nothing(intervals: list[Interval]) -> None:
    alone, covered = overlap_of(intervals, []), overlap_of(intervals, intervals)
    assert alone.both_s == 0
    assert covered.both_s == covered.schedule_s == covered.forward_s
    assert covered.hidden_share == (1 if covered.schedule_s else None)


@given(INTERVALS, INTERVALS, st.integers(-1000, 1000))
def test_no_clock_offset_matters(a: list[Interval], b: list[Interval], offset: int) -> None:
    moved = [[(begin + offset, end + offset) for begin, end in each] for each in (a, b)]
    assert overlap_of(*moved) == overlap_of(a, b)


def test_a_known_timeline() -> None:
    schedule = [(0.0, 1.0), (2.0, 3.0), (4.0, 5.0)]
    forward = [(1.0, 2.5), (2.25, 4.0)]
    found = overlap_of(schedule, forward)
    assert (found.schedule_s, found.forward_s, found.both_s) == (3.0, 3.0, 1.0)
    assert found.hidden_share == pytest.approx(1 / 3)


@pytest.mark.parametrize("wrong", [(2.0, 1.0), (0.0, math.inf), (math.nan, 1.0)])
def test_what_is_no_interval_is_refused(wrong: Interval) -> None:
    with pytest.raises(ValueError, match="no interval"):
        overlap_of([wrong], [(0.0, 1.0)])
