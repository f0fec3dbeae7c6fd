"""Two runs side by side: what differs, how far apart the machines are, what may be said."""

from __future__ import annotations

from typing import Any

import pytest
from virtual_run import drawn

from kit import compare
from kit.attack_again import attack_again, broken_promises, cells, manifest_of
from kit.compare import Difference, judge_again
from kit.fact import Fact, Match
from kit.manifest import Manifest, load_manifest
from kit.paths import MANIFESTS
from kit.verdict import Verdict


def fact(
    name: str, value: Any, match: Match = "must", group: str = "host", service: str | None = None
) -> Fact:
    reason = None if value is not None else "not read"
    return Fact(
        group=group,
        name=name,
        value=value,
        how="planted",
        state="verified",
        reason=reason,
        match=match,
        service=service,
    )


HERE = (
    fact("architecture", "x86_64"),
    fact("cpu_model", "Virtual CPU"),
    fact("machine_mark", "a" * 64, "reported"),
    fact("load_1m", 0.3, "ignored"),
)


def changed(name: str, value: Any) -> tuple[Fact, ...]:
    return tuple(f.model_copy(update={"value": value}) if f.name == name else f for f in HERE)


@pytest.fixture(scope="module")
def run() -> Manifest:
    return manifest_of(drawn(0.30)).model_copy(update={"facts": HERE})


@pytest.fixture(scope="module")
def other() -> Manifest:
    return manifest_of(drawn(0.30, seed=2)).model_copy(update={"facts": HERE})


@pytest.mark.parametrize(
    ("facts", "far"),
    [
        (HERE, "same machine"),
        (changed("load_1m", 9.0), "same machine"),
        (changed("machine_mark", "b" * 64), "same class"),
        (changed("cpu_model", "Another CPU"), "different"),
        (changed("architecture", "aarch64"), "incomparable"),
    ],
)
def test_distance_between_machines(facts: tuple[Fact, ...], far: str) -> None:
    assert compare.distance(HERE, facts, {"cpu"}) == far


def test_another_platform_is_incomparable() -> None:
    assert compare.distance(HERE, HERE, {"cpu", "cuda"}) == "incomparable"


def test_each_kind_of_match_is_treated_as_declared() -> None:
    first = {"a": (1, "must"), "b": (1, "reported"), "c": (1, "ignored"), "d": (1, "must")}
    second = {"a": (2, "must"), "b": (2, "reported"), "c": (2, "ignored")}
    found = {d.where: d.match for d in compare.differences(first, second)}  # type: ignore[arg-type]
    assert found == {"a": "must", "b": "reported", "d": "reported"}


def test_a_plan_differs_leaf_by_leaf(run: Manifest) -> None:
    plan = run.plan.model_copy(update={"seed": 9})
    assert [d.where for d in compare.plan_differences(run.plan, plan)] == ["plan.seed"]
    arm = run.plan.arms[1].model_copy(update={"env": {"X": "1"}})
    plan = run.plan.model_copy(update={"arms": (run.plan.arms[0], arm)})
    assert [d.where for d in compare.plan_differences(run.plan, plan)] == ["plan.arms.1.env.X"]


def test_equal_environments_have_equal_hashes_and_load_does_not_count(run: Manifest) -> None:
    busy = run.model_copy(update={"facts": changed("load_1m", 9.0)})
    other_cpu = run.model_copy(update={"facts": changed("cpu_model", "Another CPU")})
    assert compare.environment_sha256(run) == compare.environment_sha256(busy)
    assert compare.environment_sha256(run) != compare.environment_sha256(other_cpu)


def test_a_run_is_reproduced_by_another_with_the_same_truth(run: Manifest, other: Manifest) -> None:
    outcome = judge_again(run, other)
    assert (outcome.word, outcome.distance) == ("reproduced", "same machine")
    assert [c.what for c in outcome.closeness] == ["effect", "baseline", "candidate"]


def test_on_different_hardware_only_the_effect_is_judged(run: Manifest, other: Manifest) -> None:
    away = other.model_copy(update={"facts": changed("cpu_model", "Another CPU")})
    outcome = judge_again(run, away)
    assert outcome.word == "reproduced"
    assert "different hardware" in outcome.reason
    assert [c.what for c in outcome.closeness] == ["effect"]


def test_a_difference_that_must_not_be_is_named_and_can_be_accepted(
    run: Manifest, other: Manifest
) -> None:
    found = [Difference(where="image.x", first="a", second="b", match="must")]
    outcome = judge_again(run, other, found=found)
    assert outcome.word == "incomparable"
    assert "image.x" in outcome.reason
    assert judge_again(run, other, found=found, accepted=["image.x"]).word == "reproduced"


@pytest.mark.parametrize(
    ("word", "outcome"),
    [("invalid", "inconclusive"), ("confounded", "inconclusive"), ("unsupported", "incomparable")],
)
def test_a_run_without_a_sound_verdict_brings_nothing_back(
    run: Manifest, other: Manifest, word: str, outcome: str
) -> None:
    verdict = Verdict.model_validate({"word": word, "reason": "as planted"})
    broken = other.model_copy(update={"verdict": verdict})
    found = judge_again(run, broken)
    assert found.word == outcome
    assert "as planted" in found.reason


def test_what_can_only_end_inconclusive_is_known_before(run: Manifest) -> None:
    assert compare.only_inconclusive(run, quick=False) is None
    assert compare.only_inconclusive(run, quick=True) == "--quick runs one pair"
    invalid = run.model_copy(update={"verdict": Verdict(word="invalid", reason="late")})
    assert compare.only_inconclusive(invalid, quick=False) == "the original is invalid: late"
    assert run.effect is not None
    two = run.effect.model_copy(update={"values": run.effect.values[:2]})
    few = run.model_copy(update={"effect": two})
    assert compare.only_inconclusive(few, quick=False) == "the original has 2 of at least 6 pairs"


def test_two_refusals_of_the_engine_are_the_same_result(run: Manifest, other: Manifest) -> None:
    verdict = Verdict(word="unsupported", reason="no fp8 on this processor")
    both = [m.model_copy(update={"verdict": verdict}) for m in (run, other)]
    assert judge_again(*both).word == "reproduced"


def test_a_variable_that_did_not_act_brings_nothing_back(run: Manifest, other: Manifest) -> None:
    idle = other.model_copy(update={"not_acted": ("hits == 0",)})
    assert judge_again(run, idle).word == "inconclusive"


def test_contradicting_verdicts_are_never_called_reproduced(run: Manifest, other: Manifest) -> None:
    against = other.model_copy(
        update={"verdict": Verdict(word="not supported", reason="as planted")}
    )
    assert judge_again(run, against).word == "inconclusive"


def test_the_judgement_keeps_its_promises_on_planted_truth() -> None:
    table = attack_again(60, 3, lambda _: None)
    assert len(table) == len(cells())
    assert broken_promises(table, false_reproduced=0.15, power=0.65) == []


REFERENCE = MANIFESTS / "exp1_prefix_cache" / "v0.32.0-cpu--smollm2-135m-instruct--cpu.json"


def test_every_fact_of_a_run_that_differs_is_told_as_it_declares() -> None:
    manifest = load_manifest(REFERENCE)
    seen = {**compare.machine_of(manifest.facts), **compare.inside_of(manifest)}
    assert len(seen) > 500
    for where, (value, match) in seen.items():
        if value is None:
            continue
        other = {**seen, where: ("changed", match)}
        found = compare.differences(seen, other)
        told = [(d.where, d.match) for d in found]
        assert told == ([] if match == "ignored" else [(where, match)])
