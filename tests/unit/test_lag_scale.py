"""What a late send is held against when the primary measure is a time, a count or a rate."""

from typing import Any

from kit.analyse import lag_scale_s
from kit.measure import Raw, Reading, Window


def raw(*spans: float) -> Raw:
    samples: list[dict[str, Any]] = [{"sent_s": 1.0, "done_s": 1.0 + s} for s in spans]
    samples.append({"sent_s": 1.0, "done_s": None})
    return Raw(windows={"measure": Window("r/measure", tuple(samples), (), {})})


def reading(unit: str, value: float | None) -> Reading:
    return Reading(name="primary", unit=unit, value=value, n=1)


def test_a_time_is_its_own_scale() -> None:
    assert lag_scale_s(reading("s", 0.25), raw(9.0)) == 0.25
    assert lag_scale_s(reading("s", None), raw(9.0)) is None


def test_a_rate_or_a_count_is_held_against_the_median_request() -> None:
    assert lag_scale_s(reading("tok/s", 90.0), raw(1.0, 2.0, 9.0)) == 2.0
    assert lag_scale_s(reading("blocks", 364), raw(1.0, 3.0)) == 2.0


def test_without_an_answer_there_is_no_scale() -> None:
    assert lag_scale_s(reading("1", 1.0), raw()) is None
    assert lag_scale_s(None, raw()) is None
