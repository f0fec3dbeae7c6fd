"""Two versions: the image is the one variable, and the block for a pull request says so."""

from __future__ import annotations

import pytest

from kit.errors import UnknownName
from kit.experiment import ANYTHING, between_images, find_experiment
from kit.prepare import Options, choose
from kit.verdict import find_confounders

OLD, NEW = "v0.31.0-cpu", "v0.32.0-cpu"


def test_arms_differ_in_the_image_alone() -> None:
    experiment = between_images(find_experiment("exp1_prefix_cache"), OLD, NEW)
    old, new = experiment.variable.arms
    assert (old.image, new.image) == (OLD, NEW)
    assert old.flags == new.flags
    assert old.env == new.env


def test_what_shows_that_the_feature_acts_must_hold_in_both_arms() -> None:
    original = find_experiment("exp1_prefix_cache")
    experiment = between_images(original, OLD, NEW)
    per_arm = [c.measure for c in original.acted if c.arm == "candidate"]
    for arm in ("baseline", "candidate"):
        assert [c.measure for c in experiment.acted if c.arm == arm] == per_arm


def test_what_the_image_brings_along_is_part_of_the_variable() -> None:
    resolved = {"baseline": [{"cache_config.new": 1}], "candidate": [{"cache_config.new": 2}]}
    assert find_confounders(resolved, (ANYTHING,)) == []
    assert find_confounders(resolved, ()) == ["cache_config.new: 1 / 2"]


def test_replicates_of_one_image_must_still_agree() -> None:
    resolved = {"baseline": [{"a": 1}, {"a": 2}], "candidate": [{"a": 1}, {"a": 1}]}
    assert find_confounders(resolved, (ANYTHING,)) == ["a changed within baseline: 1 / 2"]


def test_an_unknown_image_is_refused_by_name() -> None:
    with pytest.raises(UnknownName, match=r"v0\.31\.0-cp"):
        choose("exp1_prefix_cache", Options(versions=("v0.31.0-cp", NEW)))
