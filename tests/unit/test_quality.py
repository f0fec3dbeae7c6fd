"""Quality between the arms: agreement, perplexity, limits; and the engine's own refusal."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.experiment import QualityLimit, find_refusal
from kit.inside.parse import ReplyParser
from kit.measure import Comparison, Raw, Window
from kit.quality import (
    Divergence,
    agreement,
    check_quality,
    compare_pairs,
    first_divergence,
    perplexity,
    ratio_between,
)


def raw(*samples: dict[str, Any]) -> Raw:
    return Raw(windows={"quality": Window("r/quality", samples, (), {})})


def answer(name: str, text: str) -> dict[str, Any]:
    return {"id": name, "text": text, "prompt_logprobs": None}


def scored(*logs: float) -> dict[str, Any]:
    return {"id": "t0", "text": "x", "prompt_logprobs": list(logs)}


def test_agreement_counts_the_share_before_the_first_difference() -> None:
    a = raw(answer("q0", " Paris."), answer("q1", "abcd"), scored(-1.0))
    b = raw(answer("q1", "abXd"), answer("q0", " Paris."), scored(-9.0))
    reading = agreement("quality")(a, b)
    assert (reading.value, reading.n) == (0.75, 2)
    assert reading.sources == ("r/quality/samples.jsonl", "r/quality/samples.jsonl")


def test_agreement_of_one_task_leaves_the_others_out() -> None:
    a = raw(answer("q0", "same"), answer("math-0", "5"), answer("math-1", "7"))
    b = raw(answer("q0", "other"), answer("math-0", "5"), answer("math-1", "8"))
    assert agreement("quality", task="math")(a, b).value == 0.5
    assert agreement("quality", task="code")(a, b).reason == "no prompt was answered in both arms"


@pytest.mark.parametrize(
    ("a", "b", "share"), [("", "", 1.0), ("abc", "", 0.0), ("ab", "abcd", 0.5), ("x", "y", 0.0)]
)
def test_agreement_of_odd_answers(a: str, b: str, share: float) -> None:
    assert agreement("quality")(raw(answer("q", a)), raw(answer("q", b))).value == share


def test_agreement_is_null_when_nothing_can_be_compared() -> None:
    reading = agreement("quality")(raw(answer("q0", "a")), raw(answer("q1", "a")))
    assert (reading.value, reading.reason) == (None, "no prompt was answered in both arms")


TOLD = [{"a": -0.1, "b": -2.4}, {"b": -0.70, "c": -0.73}, {"d": -0.2, "e": -1.8}]


@pytest.mark.parametrize(
    ("others", "at", "gap"),
    [("abX", 2, None), ("acX", 1, 0.03), ("bbd", 0, 2.3), ("ab", 2, None), ("abdd", 3, None)],
)
def test_two_answers_part_where_their_first_tokens_differ(
    others: str, at: int, gap: float | None
) -> None:
    found = first_divergence("abd", others, TOLD)
    assert found is not None
    assert (found.at, found.gap) == (at, gap if gap is None else pytest.approx(gap))
    assert found.is_near_tie(0.05) == (gap == 0.03)


@given(st.text("ab", max_size=8), st.text("ab", max_size=8))
def test_a_divergence_is_none_of_equal_answers_and_after_an_equal_part(a: str, b: str) -> None:
    found = first_divergence(a, b, [{"a": -0.5, "b": -1.0}] * len(a))
    if a == b:
        assert found is None
        return
    assert found is not None
    assert a[: found.at] == b[: found.at]
    assert a[found.at : found.at + 1] != b[found.at : found.at + 1]
    assert (found.gap is None) == (found.at == min(len(a), len(b)))


def test_a_token_without_candidates_is_no_near_tie() -> None:
    assert first_divergence(["a"], ["b"], []) == Divergence(at=0, gap=None)


def test_perplexity_of_a_uniform_choice_is_the_number_of_choices() -> None:
    logs = [math.log(1 / 8)] * 5
    assert perplexity("quality")(raw(scored(*logs))).value == pytest.approx(8.0)


def test_perplexity_is_null_without_log_probabilities_and_beyond_floats() -> None:
    assert perplexity("quality")(raw(answer("q", "a"))).value is None
    assert perplexity("quality")(raw(scored(-1e4))).value is None


def test_ratio_between_the_arms() -> None:
    compute = ratio_between(perplexity("quality"))
    reading = compute(raw(scored(0.0)), raw(scored(math.log(1 / 3))))
    assert reading.value == pytest.approx(3.0)
    assert compute(raw(scored(0.0)), raw(answer("q", "a"))).value is None


LIMIT = QualityLimit(comparison="agree", op=">=", value=0.75)
AGREE = Comparison("agree", "1", "", agreement("quality"))


def test_quality_holds_and_breaks_pair_by_pair() -> None:
    good = (raw(answer("q", "abcd")), raw(answer("q", "abcX")))
    bad = (raw(answer("q", "abcd")), raw(answer("q", "aXXX")))
    compared = compare_pairs([AGREE], {0: good, 1: bad})
    assert check_quality([LIMIT], compared) == ["agree >= 0.75 fails in pair 1: 0.25"]
    assert check_quality([LIMIT], compared[:1]) == []


def test_unknown_quality_does_not_hold() -> None:
    compared = compare_pairs([AGREE], {0: (raw(), raw())})
    assert check_quality([LIMIT], compared) == [
        "agree >= 0.75 is unknown in pair 0: no prompt was answered in both arms"
    ]
    other = QualityLimit(comparison="other", op="<=", value=1)
    assert check_quality([other], compared) == ["other <= 1 was not read in pair 0"]


LOG = """2026-12-01T05:00:00Z (Worker pid=7) ERROR attention.py:541] Traceback
2026-12-01T05:00:00Z (Worker pid=7) NotImplementedError: FP8 KV cache needs AVX-512.
2026-12-01T05:00:01Z (APIServer pid=1) RuntimeError: Engine core initialization failed."""


def test_a_refusal_is_the_engines_own_line() -> None:
    found = find_refusal(LOG, ["NotImplementedError: .*FP8"])
    assert found == "NotImplementedError: FP8 KV cache needs AVX-512."
    assert find_refusal(LOG, ["ValueError: .*"]) is None
    assert find_refusal(LOG, []) is None


def parse(body: bytes) -> Any:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    parser = ReplyParser(asked_stream=False)
    parser.feed(head % len(body) + body, 1)
    return parser.finish(eof=False).prompt_logprobs


def test_the_prompts_own_log_probabilities_are_kept() -> None:
    scores = b'[null, {"7": {"logprob": -1.5, "rank": 2}}, {"9": {"logprob": -2, "rank": 1}}]'
    assert parse(b'{"choices": [{"text": "x", "prompt_logprobs": %s}]}' % scores) == [-1.5, -2.0]


@pytest.mark.parametrize(
    "scores",
    [
        b'[null, {"7": {"logprob": -1}, "8": {"logprob": -2}}]',
        b"[null, null]",
        b'[null, {"7": {"rank": 1}}]',
        b'[null, {"7": 3}]',
        b"null",
    ],
)
def test_log_probabilities_that_are_unclear_are_left_out(scores: bytes) -> None:
    assert parse(b'{"choices": [{"text": "x", "prompt_logprobs": %s}]}' % scores) is None
