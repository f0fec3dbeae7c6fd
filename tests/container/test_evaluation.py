"""lm-eval asks real vLLM, from its own image, without a network: scores are there and traceable."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import only_manifest, quietly, run_nox

from kit.again import analyse_again
from kit.experiments.adv1_quantization import PROSE, SCORES
from kit.image import find_image
from kit.lock import read_identity_lock
from kit.manifest import Manifest
from kit.store import changed_files

pytestmark = pytest.mark.full
Evaluated = tuple[Manifest, Path]


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> Evaluated:
    """Run the baseline against itself: CPUs of this kind refuse FP8 weights."""
    out = tmp_path_factory.mktemp("evaluation")
    words = ("--variant", "lm-eval", "--aa", "--quick", "--platform", "cpu", "--json", "--out")
    ran, where = quietly(
        lambda folder: run_nox("-s", "adv1_quantization", "--", *words, str(folder)), out
    )
    assert ran.code == 0, ran.stderr
    return only_manifest(where)


@pytest.mark.timeout(2400)
def test_every_task_has_a_score_over_all_of_its_items(evaluated: Evaluated) -> None:
    manifest, _ = evaluated
    for replicate in manifest.replicates:
        found = {r.name: r for r in replicate.readings}
        for task in SCORES:
            reading = found[f"eval_{task}"]
            assert reading.value is not None, reading.reason
            assert 0 <= reading.value <= 1
            assert reading.n == 16
        prose = found[f"eval_{PROSE}"]
        assert prose.value is not None, prose.reason
        assert 1 < prose.value < 10_000


def test_a_small_model_that_works_is_better_than_a_guess(evaluated: Evaluated) -> None:
    """Log probabilities that were read at the wrong place would give what a guess gives."""
    for replicate in evaluated[0].replicates:
        found = {r.name: r.value for r in replicate.readings}
        assert (found["eval_kit_code"] or 0) >= 0.5
        assert (found["eval_kit_chat"] or 0) >= 0.5


def test_the_same_server_twice_gives_nearly_the_same_scores(evaluated: Evaluated) -> None:
    (pair,) = evaluated[0].comparisons
    found = {r.name: r.value for r in pair.readings}
    assert abs(found["eval_score_difference"] or 0) <= 0.05
    assert found[f"eval_{PROSE}_ratio"] == pytest.approx(1, abs=0.01)


def test_results_and_every_answer_are_raw_files(evaluated: Evaluated) -> None:
    manifest, run = evaluated
    names = {f"samples-{task}.jsonl" for task in (*SCORES, PROSE)} | {"results.json", "ended.json"}
    for replicate in manifest.replicates:
        kept = {n for n in manifest.files if n.startswith(f"{replicate.folder}/evaluation/")}
        assert kept == {f"{replicate.folder}/evaluation/{name}" for name in names}
        assert f"{replicate.folder}/logs/evaluation.log" in manifest.files
    assert changed_files(run, manifest.files) == []
    assert analyse_again(run)["equal"] is True


def test_the_image_of_lm_eval_is_the_locked_one(evaluated: Evaluated) -> None:
    locked = read_identity_lock(find_image("lm-eval-0.4.13"))
    assert locked is not None
    ran = {image.id: image.identity for image in evaluated[0].images}
    assert ran["lm-eval-0.4.13"] == locked.digest
