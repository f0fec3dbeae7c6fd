"""The verdict: its test against brute force, its order, its margin, its exact counts."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from kit.experiment import Condition, Hypothesis, Text
from kit.guard import GuardResult
from kit.measure import Reading
from kit.sequential import Stopping
from kit.verdict import (
    ALPHA,
    EXACT_PAIRS,
    MIN_PAIRS,
    Effect,
    Pair,
    Verdict,
    check_acted,
    effect_of,
    find_confounders,
    find_pairs,
    judge,
    margin_log,
    may_stop,
    sign_flip_p,
)

finite = st.floats(-10, 10, allow_nan=False)


def claim(direction: str = "decrease", margin: float = 0.10, kind: str = "ratio") -> Hypothesis:
    return Hypothesis.model_validate(
        {
            "text": Text(en="", zh=""),
            "measure": "m",
            "direction": direction,
            "margin": margin,
            "equivalence": 0.15,
            "kind": kind,
        }
    )


def decide(hypothesis: Hypothesis, pairs: list[Pair], **findings: object) -> Verdict:
    given_findings = {
        "unsupported": None,
        "guards": (),
        "confounders": (),
        "not_acted": (),
        "pairs_planned": len(pairs),
        **findings,
    }
    return judge(hypothesis, effect=effect_of(hypothesis, pairs), **given_findings)  # type: ignore[arg-type]


def by_listing(values: list[float]) -> float:
    """Count the sign patterns one by one."""
    patterns = list(itertools.product((1, -1), repeat=len(values)))
    sizes = [abs(v) for v in values]
    sums = [math.fsum(s * v for s, v in zip(p, sizes, strict=True)) for p in patterns]
    least = math.fsum(values) - 1e-12 * math.fsum(sizes)
    return sum(s >= least for s in sums) / len(patterns)


@given(st.lists(finite, min_size=1, max_size=9))
def test_sign_flip_p_counts_what_listing_counts(values: list[float]) -> None:
    assert sign_flip_p(values) == by_listing(values)


@given(st.lists(st.integers(-3, 3).map(float), min_size=1, max_size=9))
def test_sign_flip_p_counts_ties_as_at_least(values: list[float]) -> None:
    assert sign_flip_p(values) == by_listing(values)


@pytest.mark.parametrize(
    ("values", "p"),
    [
        ([1, 2, 3, 4, 5, 6], 1 / 64),
        ([-1, 2, 3, 4, 5, 6], 2 / 64),  # turning the smallest one is the only better pattern
        ([1, 1, 1, 1, 1, -1], 7 / 64),
        ([0, 0, 0], 1.0),
        ([-1, -2, -3], 1.0),
        ([1] * 8, 1 / 256),
        ([1] * EXACT_PAIRS, 2.0**-EXACT_PAIRS),
    ],
)
def test_sign_flip_p_of_known_cases(values: list[float], p: float) -> None:
    assert sign_flip_p(values) == pytest.approx(p, rel=1e-12)


@given(st.lists(finite, min_size=1, max_size=8), st.floats(0.01, 100))
def test_sign_flip_p_knows_no_unit(values: list[float], scale: float) -> None:
    rounded = [round(v, 6) for v in values]
    assert sign_flip_p(rounded) == pytest.approx(sign_flip_p([v * scale for v in rounded]))


def test_five_pairs_can_never_decide_and_six_can() -> None:
    assert sign_flip_p([1.0] * (MIN_PAIRS - 1)) > ALPHA
    assert sign_flip_p([1.0] * MIN_PAIRS) <= ALPHA


@pytest.mark.parametrize("values", [[], [1.0, math.nan], [math.inf]])
def test_sign_flip_p_refuses_what_is_no_data(values: list[float]) -> None:
    with pytest.raises(ValueError, match="finite values"):
        sign_flip_p(values)


def test_beyond_the_exact_range_a_t_test_stands_in_and_differs_little() -> None:
    draw = np.random.default_rng(1)
    for _ in range(20):
        x = draw.normal(0.3, 1, EXACT_PAIRS)
        t = stats.ttest_1samp(x, 0.0, alternative="greater").pvalue
        assert sign_flip_p(x) == pytest.approx(t, abs=0.01)
    longer = draw.normal(0.3, 1, EXACT_PAIRS + 1)
    expected = stats.ttest_1samp(longer, 0.0, alternative="greater").pvalue
    assert sign_flip_p(longer) == pytest.approx(expected)


# -- margin and direction ----------------------------------------------------------------------


def test_margin_is_relative_in_the_claimed_direction() -> None:
    assert margin_log(claim("decrease", 0.10)) == pytest.approx(-math.log(0.9))
    assert margin_log(claim("increase", 0.10)) == pytest.approx(math.log(1.1))


STEADY = [1.00, 1.01, 0.99, 1.02, 0.98, 1.005, 0.995, 1.0]


@pytest.mark.parametrize(
    ("direction", "ratio", "word", "is_reversed"),
    [
        ("decrease", 0.70, "supported", False),
        ("decrease", 0.90, "inconclusive", False),
        ("decrease", 1.00, "not supported", False),
        ("decrease", 1.30, "not supported", True),
        ("increase", 1.30, "supported", False),
        ("increase", 1.10, "inconclusive", False),
        ("increase", 1.00, "not supported", False),
        ("increase", 0.70, "not supported", True),
    ],
)
def test_direction_and_margin_decide_the_word(
    direction: str, ratio: float, word: str, is_reversed: bool
) -> None:
    pairs = [(1.0, ratio * s) for s in STEADY]
    found = decide(claim(direction), pairs)
    assert (found.word, found.reversed) == (word, is_reversed)


def test_effect_is_the_geometric_mean_with_its_t_interval() -> None:
    pairs = [(2.0, 1.0), (1.0, 0.25), (4.0, 1.0)]
    effect = effect_of(claim(), pairs)
    logs = np.log([0.5, 0.25, 0.25])
    low, high = stats.t.interval(0.95, 2, logs.mean(), stats.sem(logs))
    assert effect.ratio == pytest.approx(math.exp(logs.mean()))
    assert effect.low == pytest.approx(math.exp(low))
    assert effect.high == pytest.approx(math.exp(high))
    assert effect.pairs == pytest.approx((0.5, 0.25, 0.25))


def test_one_pair_has_a_ratio_and_no_interval() -> None:
    effect = effect_of(claim(), [(2.0, 1.0)])
    assert (effect.ratio, effect.low, effect.high) == (0.5, None, None)


# -- the order of the words --------------------------------------------------------------------

BROKEN = GuardResult(name="g", replicate=0, ok=False, seen=1, limit=0, text="broke", source="f")
FINDINGS = {
    "unsupported": ("cannot", None),
    "guards": ((BROKEN,), ()),
    "confounders": (("x: 1 / 2",), ()),
    "not_acted": (("no hits",), ()),
}
ORDER = ["unsupported", "invalid", "confounded", "inconclusive", "supported"]


@pytest.mark.parametrize("clean", range(len(ORDER)))
def test_an_earlier_finding_is_lifted_by_nothing_later(clean: int) -> None:
    """With the first `clean` findings absent and all later ones there, the next one decides."""
    findings = {key: pair[i < clean] for i, (key, pair) in enumerate(FINDINGS.items())}
    found = decide(claim(), [(1.0, 0.5)] * 8, **findings)
    assert found.word == ORDER[clean]


def test_too_few_pairs_never_decide_not_even_counts() -> None:
    for kind in ("ratio", "exact"):
        found = decide(claim(kind=kind), [(100.0, 1.0)] * 5)
        assert found.word == "inconclusive"
        assert "too few replicates: 5 pairs" in found.reason


def test_a_missing_pair_never_decides() -> None:
    found = decide(claim(), [(1.0, 0.5)] * 7, pairs_planned=8)
    assert (found.word, found.reason) == ("inconclusive", "only 7 of 8 pairs have a value")


def test_broken_quality_turns_supported_into_not_supported_and_nothing_else() -> None:
    assert decide(claim(), [(1.0, 0.5)] * 8, quality=["text broke"]) == Verdict(
        word="not supported", reason="quality: text broke"
    )
    assert decide(claim(), [(1.0, 0.9)] * 8, quality=["text broke"]).word == "inconclusive"


def test_an_effect_without_p_values_decides_nothing() -> None:
    empty = Effect(measure="m", values=((1.0, 0.1),) * 8)
    found = judge(
        claim(), effect=empty, unsupported=None, guards=(), confounders=(), not_acted=(),
        pairs_planned=8,
    )  # fmt: skip
    assert found.word == "inconclusive"


# -- exact counts ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("direction", "pair", "word"),
    [
        ("decrease", (100, 90), "not supported"),  # exactly the margin is not beyond it
        ("decrease", (100, 89), "supported"),
        ("decrease", (5, 0), "supported"),
        ("decrease", (0, 0), "not supported"),
        ("decrease", (0, 5), "not supported"),
        ("increase", (100, 110), "not supported"),
        ("increase", (100, 111), "supported"),
        ("increase", (0, 1), "supported"),
        ("increase", (0, 0), "not supported"),
        ("increase", (3, 0), "not supported"),
    ],
)
def test_counts_are_compared_exactly(direction: str, pair: Pair, word: str) -> None:
    assert decide(claim(direction, kind="exact"), [pair] * 6).word == word


def test_counts_that_disagree_decide_nothing() -> None:
    pairs: list[Pair] = [(100, 50)] * 5 + [(100, 95)]
    assert decide(claim(kind="exact"), pairs).word == "inconclusive"


def test_counts_the_other_way_are_reversed() -> None:
    assert decide(claim(kind="exact"), [(100, 120)] * 6).reversed
    assert not decide(claim(kind="exact"), [(100, 105)] * 6).reversed


# -- pairs -------------------------------------------------------------------------------------


def reading(value: float | None, reason: str | None = None) -> Reading:
    return Reading(name="m", unit="s", value=value, n=1, reason=reason)


def test_pairs_need_both_replicates_and_two_usable_values() -> None:
    readings = {
        (0, "baseline"): reading(2.0),
        (0, "candidate"): reading(1.0),
        (1, "baseline"): reading(2.0),
        (2, "baseline"): reading(2.0),
        (2, "candidate"): reading(None, "too few values"),
        (3, "baseline"): reading(0.0),
        (3, "candidate"): reading(1.0),
        (4, "baseline"): reading(1.0),
        (4, "candidate"): reading(math.nan),
        (5, "baseline"): reading(-1.0),
        (5, "candidate"): reading(1.0),
    }
    found, missing = find_pairs(readings, range(6))
    assert found == [(2.0, 1.0)]
    assert missing == [
        "pair 1: a replicate is missing",
        "pair 2: too few values",
        "pair 3: value 0",
        "pair 4: value nan",
        "pair 5: value -1",
    ]


def test_counts_may_be_zero() -> None:
    readings = {(0, "baseline"): reading(5.0), (0, "candidate"): reading(0.0)}
    assert find_pairs(readings, [0], "exact") == ([(5.0, 0.0)], [])


# -- the variable acted ------------------------------------------------------------------------

HIT = Condition(measure="hits", arm="candidate", op=">", value=0)


def test_acted_needs_every_replicate_of_the_arm() -> None:
    seen = {("candidate", "hits", 1): reading(5.0), ("baseline", "hits", 0): reading(0.0)}
    assert check_acted([HIT], seen) == []
    assert check_acted([HIT], {**seen, ("candidate", "hits", 2): reading(0.0)}) == [
        "hits of candidate > 0 fails in replicate 2: 0"
    ]
    unknown = {**seen, ("candidate", "hits", 2): reading(None, "reset")}
    assert check_acted([HIT], unknown) == ["hits of candidate > 0 is unknown in replicate 2: reset"]


def test_a_condition_that_was_never_read_did_not_hold() -> None:
    assert check_acted([HIT], {("baseline", "hits", 0): reading(1.0)}) == [
        "hits of candidate > 0 was never read"
    ]


# -- confounders -------------------------------------------------------------------------------


def test_only_declared_paths_and_what_is_under_them_may_differ() -> None:
    resolved = {
        "baseline": [{"cache": {"on": False, "size": 1}, "cached": 1}],
        "candidate": [{"cache": {"on": True, "size": 2}, "cached": 2}],
    }
    assert find_confounders(resolved, ["cache", "cached"]) == []
    assert find_confounders(resolved, ["cache"]) == ["cached: 1 / 2"]
    assert find_confounders(resolved, ["cache.on", "cached"]) == ["cache.size: 1 / 2"]


def test_a_path_that_one_arm_lacks_is_a_difference() -> None:
    assert find_confounders({"baseline": [{"a": 1}], "candidate": [{}]}, []) == ["a: 1 / None"]


def test_a_declared_path_must_still_be_one_value_within_an_arm() -> None:
    resolved = {"baseline": [{"a": 1}, {"a": 1}], "candidate": [{"a": 2}, {"a": 3}]}
    assert find_confounders(resolved, ["a"]) == ["a changed within candidate: 2 / 3"]


# -- stopping ----------------------------------------------------------------------------------


def test_a_rule_decides_only_at_its_looks() -> None:
    rule = Stopping()
    for pairs in range(1, rule.pairs + 1):
        found = decide(claim(), [(1.0, 0.5)] * pairs, stopping=rule)
        assert (found.word == "supported") == (pairs in rule.looks)
        assert may_stop(claim(), [(1.0, 0.5)] * pairs, rule) == (pairs in rule.looks)


def test_a_rule_also_stops_for_no_effect_and_at_its_last_look() -> None:
    rule = Stopping()
    assert decide(claim(), [(1.0, 1.0)] * 6, stopping=rule).word == "not supported"
    undecided = [(1.0, 0.9 * (1.2 if i % 2 else 1 / 1.2)) for i in range(16)]
    assert [may_stop(claim(), undecided[:n], rule) for n in rule.looks] == [
        False, False, False, True,
    ]  # fmt: skip
    assert decide(claim(), undecided, stopping=rule).word == "inconclusive"
