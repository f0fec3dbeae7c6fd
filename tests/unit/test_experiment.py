"""Experiments: found by file name, whole, and each variant a change that can be carried out."""

import math

import pytest

from kit.errors import UnknownName
from kit.experiment import (
    Condition,
    Experiment,
    Phase,
    Scale,
    against_itself,
    apply_variant,
    experiment_docs,
    experiment_names,
    find_experiment,
)
from kit.plan import request_lines
from kit.virtual import virtual_plan

EVERY = experiment_names()


def every_form() -> list[tuple[str, str | None]]:
    return [(n, v) for n in EVERY for v in (None, *find_experiment(n).variants)]


def form(name: str, variant: str | None) -> Experiment:
    return apply_variant(find_experiment(name), name, variant)


def test_there_are_experiments_and_each_says_its_question() -> None:
    assert "exp1_prefix_cache" in EVERY
    assert all(experiment_docs()[name].endswith("?") for name in EVERY)


@pytest.mark.parametrize(("name", "variant"), every_form())
def test_every_form_is_whole(name: str, variant: str | None) -> None:
    found = form(name, variant)
    names = [m.name for m in found.all_measures]
    assert len(names) == len(set(names))
    assert found.hypothesis.measure in names
    assert {c.measure for c in found.acted} <= set(names)
    assert {q.comparison for q in found.quality} <= {c.name for c in found.comparisons}
    claim = found.hypothesis
    assert 0 < claim.margin < (1 if claim.direction == "decrease" else math.inf)
    # A count that the engine itself resolves shows by its own value whether the variable acted.
    assert found.acted or claim.kind == "exact", "no check that the variable acted"
    for text in (found.title, found.goal, found.variable.what, found.hypothesis.text):
        assert text.en
        assert text.zh


@pytest.mark.parametrize(("name", "variant"), every_form())
def test_every_form_can_be_planned_and_its_workload_is_the_same_each_time(
    name: str, variant: str | None
) -> None:
    found = form(name, variant)
    plan, files = virtual_plan(name, found)
    again, same = virtual_plan(name, found)
    assert (plan.sha256, files) == (again.sha256, same)
    assert "measure" in files


@pytest.mark.parametrize(("name", "variant"), every_form())
def test_arms_differ_and_an_image_differs_alone(name: str, variant: str | None) -> None:
    baseline, candidate = form(name, variant).variable.arms
    settings = [
        getattr(baseline, n) != getattr(candidate, n) for n in ("flags", "env", "topology", "legs")
    ]
    image = baseline.image != candidate.image
    assert any(settings) != image


@pytest.mark.parametrize(("name", "variant"), every_form())
def test_ids_are_unique_within_a_phase(name: str, variant: str | None) -> None:
    phases: tuple[Phase, ...] = form(name, variant).workload(Scale(model="m", seed=1))
    for phase in phases:
        ids = [r["id"] for r in phase.requests]
        assert len(ids) == len(set(ids))
        assert request_lines(phase).endswith(b"\n")


def test_against_itself_has_one_arm_twice_and_nothing_that_must_act() -> None:
    experiment = find_experiment("exp1_prefix_cache")
    twin = against_itself(experiment)
    baseline, candidate = twin.variable.arms
    assert candidate.flags == baseline.flags
    assert candidate.name == "off-again"
    assert twin.acted == ()
    assert experiment.acted


def test_an_unknown_name_is_answered_with_the_nearest_one() -> None:
    with pytest.raises(UnknownName) as caught:
        find_experiment("exp1_prefix_cach")
    assert "did you mean `exp1_prefix_cache`?" in caught.value.hint
    with pytest.raises(UnknownName, match="no variant of exp1_prefix_cache `cold`"):
        apply_variant(find_experiment("exp1_prefix_cache"), "exp1_prefix_cache", "cold")


@pytest.mark.parametrize(
    ("op", "below", "at", "above"),
    [(">=", 0, 1, 1), (">", 0, 0, 1), ("<=", 1, 1, 0), ("<", 1, 0, 0), ("==", 0, 1, 0)],
)
def test_conditions_hold_as_they_read(op: str, below: int, at: int, above: int) -> None:
    condition = Condition.model_validate({"measure": "m", "arm": "baseline", "op": op, "value": 5})
    assert [condition.holds(v) for v in (4, 5, 6)] == [bool(below), bool(at), bool(above)]
    assert str(condition) == f"m of baseline {op} 5"
