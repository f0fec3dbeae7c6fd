"""exp5: acceptance from the engine's counters, one variable, and drafts that exist."""

import json
from typing import Any

import pytest

from kit.experiment import Experiment, Scale, apply_variant, find_experiment
from kit.experiments.exp5_ngram_spec import KINDS, NGRAM, workload
from kit.measure import Raw, Scrape, Window, parse_metrics, tpot_s
from kit.verdict import check_acted

NAME = "exp5_ngram_spec"
EXPERIMENT = find_experiment(NAME)


def scrape(drafts: int, accepted: tuple[int, int, int]) -> Scrape:
    counters = {
        "num_drafts_total": drafts,
        "num_draft_tokens_total": drafts * 3,
        "num_accepted_tokens_total": sum(accepted),
    }
    text = "".join(
        f"# TYPE vllm:spec_decode_{n} counter\nvllm:spec_decode_{n}{{}} {v}\n"
        for n, v in counters.items()
    )
    name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    text += f"# TYPE {name} counter\n"
    text += "".join(f'{name}{{position="{i}"}} {v}\n' for i, v in enumerate(accepted))
    return Scrape(0.0, parse_metrics(text))


def raw(*scrapes: Scrape) -> Raw:
    return Raw(windows={"measure": Window("r/measure", (), scrapes, {})})


def values(seen: Raw) -> dict[str, float | None]:
    return {m.name: m.read(seen).value for m in EXPERIMENT.measures}


def test_acceptance_in_all_and_by_place() -> None:
    got = values(raw(scrape(0, (0, 0, 0)), scrape(31, (30, 25, 16))))
    assert got["acceptance"] == pytest.approx(71 / 93)
    assert got["accepted_per_draft"] == pytest.approx(71 / 31)
    assert [got[f"accepted_at_{i}"] for i in (1, 2, 3)] == [
        pytest.approx(n / 31) for n in (30, 25, 16)
    ]


def test_without_speculation_there_are_no_numbers_of_it() -> None:
    got = values(raw(Scrape(0.0, {}), Scrape(1.0, {})))
    assert got["drafts"] is None
    assert got["acceptance"] is None


def acted(seen: Raw) -> list[str]:
    drafts = next(m for m in EXPERIMENT.measures if m.name == "drafts")
    return check_acted(EXPERIMENT.acted, {("candidate", "drafts", 1): drafts.read(seen)})


def test_a_text_without_drafts_is_no_test_of_speculation() -> None:
    assert acted(raw(scrape(0, (0, 0, 0)), scrape(5, (1, 0, 0)))) == []
    assert acted(raw(scrape(0, (0, 0, 0)), scrape(0, (0, 0, 0)))) == [
        "drafts of candidate > 0 fails in replicate 1: 0"
    ]


def test_tpot_counts_tokens_and_not_chunks() -> None:
    sample: dict[str, Any] = {"chunk_s": [1.0, 1.2, 1.4], "completion_tokens": 9}
    assert tpot_s(sample) == pytest.approx(0.05)


def test_both_arms_run_without_async_scheduling_and_with_the_same_runner() -> None:
    assert EXPERIMENT.settings["async-scheduling"] is False
    assert EXPERIMENT.env == {"VLLM_USE_V2_MODEL_RUNNER": "0"}
    baseline, candidate = EXPERIMENT.variable.arms
    assert baseline.flags == {"speculative-config": None}
    assert json.loads(str(candidate.flags["speculative-config"])) == NGRAM
    assert EXPERIMENT.needs.real_weights


@pytest.mark.parametrize("kind", KINDS)
def test_every_request_of_a_kind_is_another_text(kind: str) -> None:
    requests = workload(Scale(model="m", seed=1), kind=kind, batch=8)[-1].requests
    texts = {json.dumps(r["body"].get("prompt") or r["body"]["messages"]) for r in requests}
    assert len(texts) >= len(requests) // 2
    chats = {r["path"].endswith("chat/completions") for r in requests}
    assert chats == {kind in ("chat", "creative")}


@pytest.mark.parametrize(("variant", "lanes"), [(None, 1), ("batch-8", 8), ("batch-32", 32)])
def test_batch_sizes_are_lanes(variant: str | None, lanes: int) -> None:
    experiment: Experiment = apply_variant(EXPERIMENT, NAME, variant)
    phase = experiment.workload(Scale(model="m", seed=1))[-1]
    assert phase.concurrency == len({r["lane"] for r in phase.requests}) == lanes


def test_eagle_needs_a_draft_model_in_the_models_folder() -> None:
    eagle = apply_variant(EXPERIMENT, NAME, "eagle")
    assert eagle.needs.missing_files(["config.json"]) == ["draft/config.json"]
    assert eagle.needs.missing_files(["config.json", "draft/config.json"]) == []
    assert EXPERIMENT.needs.missing_files([]) == []


def test_only_greedy_texts_are_compared() -> None:
    assert apply_variant(EXPERIMENT, NAME, "code").comparisons
    assert not apply_variant(EXPERIMENT, NAME, "creative").comparisons
