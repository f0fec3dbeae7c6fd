"""The plan: everything that goes in, hashed; the order of replicates; words and load files."""

import copy
import hashlib
import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit import compose
from kit.experiment import Phase
from kit.plan import (
    Plan,
    canonical_sha256,
    describe_difference,
    flag_words,
    make_slots,
    request_lines,
)
from kit.sequential import Stopping
from kit.virtual import virtual_experiment, virtual_plan

PLANNED = "179b4a850a89f706f27606ac43d712f523f7c9770c031c8a48cad358fd84d015"
"""The hash of a fixed plan. When it moves, every plan's hash has moved: is that meant?"""


def plan() -> Plan:
    return virtual_plan("virtual", virtual_experiment())[0]


def test_the_hash_of_a_fixed_plan_is_fixed() -> None:
    assert plan().sha256 == PLANNED
    assert plan().sha256 == plan().sha256


def test_the_hash_survives_a_file() -> None:
    text = json.dumps(plan().model_dump(mode="json"))
    assert Plan.model_validate_json(text).sha256 == PLANNED


@given(st.randoms())
def test_the_order_of_keys_does_not_matter(random: Any) -> None:
    def shuffled(value: Any) -> Any:
        if isinstance(value, list):
            return [shuffled(v) for v in value]
        if not isinstance(value, dict):
            return value
        keys = list(value)
        random.shuffle(keys)
        return {k: shuffled(value[k]) for k in keys}

    assert canonical_sha256(shuffled(plan().model_dump(mode="json"))) == PLANNED


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    for key, one in inner:
        if isinstance(one, dict | list) and one:
            yield from leaves(one, (*path, key))
        else:
            yield (*path, key)


def test_every_leaf_is_in_the_hash() -> None:
    whole = plan().model_dump(mode="json")
    # left out where empty
    empty = {
        "spare_pairs",
        "preconditions",
        "offered",
        "shared_device",
        "sampler",
        "evaluation",
    }
    assert set(whole) == set(Plan.model_fields) - empty
    seen = {PLANNED}
    paths = list(leaves(whole))
    for path in paths:
        changed = copy.deepcopy(whole)
        place = changed
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = "changed"
        seen.add(canonical_sha256(changed))
    assert len(seen) == len(paths) + 1
    assert len(paths) > 100


@pytest.mark.parametrize(
    "changed",
    [{"pairs": 9}, {"seed": 2}, {"stopping": Stopping()}, {"spare": 3}],
    ids=["pairs", "seed", "stopping", "spare"],
)
def test_what_a_person_chooses_changes_the_hash(changed: dict[str, Any]) -> None:
    assert virtual_plan("virtual", virtual_experiment(), **changed)[0].sha256 != PLANNED


def test_the_claim_cannot_change_without_the_hash() -> None:
    experiment = virtual_experiment()
    for change in ({"margin": 0.01}, {"direction": "decrease"}, {"measure": "hits_tokens"}):
        other = experiment.hypothesis.model_copy(update=change)
        found, _ = virtual_plan("virtual", replace(experiment, hypothesis=other))
        assert found.sha256 != PLANNED


def test_a_plan_says_nothing_about_the_machine() -> None:
    text = json.dumps(plan().model_dump(mode="json"))
    for word in ("/home", "/work", "/root", "/tmp"):
        assert word not in text


# -- order -------------------------------------------------------------------------------------


@given(st.integers(1, 40), st.integers(0, 10_000))
def test_pairs_are_adjacent_and_alternate(pairs: int, seed: int) -> None:
    slots = make_slots(pairs, seed)
    assert [s.replicate for s in slots] == list(range(2 * pairs))
    assert [s.pair for s in slots] == [i // 2 for i in range(2 * pairs)]
    first = [slots[2 * i].role for i in range(pairs)]
    assert all({slots[2 * i].role, slots[2 * i + 1].role} == {"baseline", "candidate"}
               for i in range(pairs))  # fmt: skip
    assert all(a != b for a, b in itertools.pairwise(first))


def test_four_replicates_run_as_a_b_b_a() -> None:
    letters = {
        "".join("AB"[s.role == "candidate"] for s in make_slots(2, seed)) for seed in range(20)
    }
    assert letters == {"ABBA", "BAAB"}


@given(st.integers(1, 20).map(lambda n: 2 * n), st.integers(0, 99))
def test_a_linear_drift_cancels_over_an_even_number_of_pairs(pairs: int, seed: int) -> None:
    slots = make_slots(pairs, seed)
    assert sum(s.replicate * (1 if s.role == "candidate" else -1) for s in slots) == 0


def test_a_stopping_rule_says_how_many_pairs_there_may_be() -> None:
    found, _ = virtual_plan("virtual", virtual_experiment(), pairs=6, stopping=Stopping())
    assert found.pairs == 16
    assert found.stopping == Stopping()


# -- words and files ---------------------------------------------------------------------------


def test_flag_words_are_sorted_and_spell_true_false_and_none() -> None:
    flags = {"c": 5, "b": False, "a": True, "d": None, "e": "x y", "f": 0.9}
    assert flag_words(flags) == ["--a", "--no-b", "--c", "5", "--e", "x y", "--f", "0.9"]


@given(st.text())
def test_escape_gives_compose_exactly_the_word_back(word: str) -> None:
    escaped = compose.escape(word)
    assert escaped.replace("$$", "$") == word
    assert escaped.count("$") == 2 * word.count("$")


def test_escape_leaves_no_variable() -> None:
    assert compose.escape("a$b${HOME}c$$") == "a$$b$${HOME}c$$$$"


def test_request_lines_are_stable_and_counted_in_the_plan() -> None:
    requests = ({"id": "a", "body": {"z": "ü", "a": 1}}, {"body": {"a": 1, "z": "ü"}, "id": "a"})
    lines = request_lines(Phase("measure", requests, concurrency=1)).splitlines()
    assert lines[0] == lines[1] == '{"body":{"a":1,"z":"ü"},"id":"a"}'.encode()
    found, files = virtual_plan("virtual", virtual_experiment())
    for phase in found.phases:
        assert phase.requests == len(files[phase.name].splitlines())
        assert phase.requests_sha256 == hashlib.sha256(files[phase.name]).hexdigest()


def test_arms_differ_in_their_variable_alone() -> None:
    baseline, candidate = plan().arms
    assert set(baseline.args) ^ set(candidate.args) == {
        "--enable-prefix-caching",
        "--no-enable-prefix-caching",
    }


def test_a_difference_is_named_with_its_path() -> None:
    a = plan().model_dump(mode="json")
    b = {**a, "seed": 2, "hypothesis": {**a["hypothesis"], "margin": 0.2}}
    assert describe_difference(a, b) == ["hypothesis.margin: 0.05 / 0.2", "seed: 1 / 2"]
    assert describe_difference(a, a) == []
