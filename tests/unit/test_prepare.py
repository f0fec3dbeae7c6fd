"""What a person may choose about a run, checked before anything is fetched or started."""

from __future__ import annotations

import math

import pytest

from kit.errors import UsageError
from kit.experiment import find_experiment
from kit.prepare import Options, choose

EXP1 = "exp1_prefix_cache"


def test_the_experiment_registers_its_own_equivalence_unless_another_is_asked_for() -> None:
    own = find_experiment(EXP1).hypothesis
    assert choose(EXP1, Options()).hypothesis == own
    narrow = choose(EXP1, Options(equivalence=0.1)).hypothesis
    assert narrow.equivalence == 0.1
    assert narrow.model_copy(update={"equivalence": own.equivalence}) == own


@pytest.mark.parametrize("value", [0.0, -0.1, math.inf, math.nan])
def test_an_equivalence_that_bounds_nothing_is_refused(value: float) -> None:
    with pytest.raises(UsageError, match="--equivalence must be above 0"):
        choose(EXP1, Options(equivalence=value))
