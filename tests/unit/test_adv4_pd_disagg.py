"""adv4: without proof that KV moved and that the text is a single server's there is no verdict."""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kit.analyse import Analysis, check_preconditions, conclude
from kit.experiment import Condition, Scale, against_itself, apply_variant, find_experiment
from kit.experiments.adv4_pd_disagg import PROMPT_TOKENS, QUALITY_WORDS, workload
from kit.fact import Fact
from kit.measure import Raw, Reading, Scrape, Window, parse_metrics
from kit.virtual import World, draw_run, frame

NAME = "adv4_pd_disagg"
EXPERIMENT = find_experiment(NAME)

COUNTERS = {
    "vllm:nixl_bytes_transferred_sum": 46_080 * 384,
    "vllm:nixl_bytes_transferred_count": 1,
    "vllm:nixl_xfer_time_seconds_sum": 0.02,
    'vllm:prompt_tokens_by_source_total{source="external_kv_transfer"}': 384,
    'vllm:prompt_tokens_by_source_total{source="local_compute"}': 4,
    "vllm:nixl_num_failed_transfers_total": 0,
    "vllm:num_requests_waiting": 2,
}


def scrapes(counters: Mapping[str, float]) -> tuple[Scrape, ...]:
    def at(t_s: float, share: float) -> Scrape:
        text = "".join(f"{name} {value * share}\n" for name, value in counters.items())
        return Scrape(t_s, parse_metrics(text))

    return (at(-0.1, 0.0), at(9.0, 1.0))


EXPIRED = "vllm:nixl_num_kv_expired_reqs_total"


def legs(expired: float = 0, **changed: float) -> dict[str, tuple[Scrape, ...]]:
    consumer = scrapes({**COUNTERS, **changed})
    return {"producer": scrapes({EXPIRED: expired}), "consumer": consumer}


def read(raw: Raw, name: str) -> Reading:
    return next(m for m in EXPERIMENT.measures if m.name == name).read(raw)


def raw_of(counters: dict[str, tuple[Scrape, ...]]) -> Raw:
    return Raw(windows={"measure": Window("r/measure", (), (), {}, counters)})


def test_what_moved_is_read_from_the_consumer() -> None:
    raw = raw_of(legs())
    assert read(raw, "kv_bytes").value == 46_080 * 384
    assert read(raw, "kv_bytes").sources == ("r/measure/metrics-consumer.jsonl.gz",)
    assert read(raw, "kv_bytes_per_token").value == 46_080
    assert read(raw, "kv_transfer_mean_s").value == pytest.approx(0.02)
    assert read(raw, "computed_per_moved").value == pytest.approx(4 / 384)
    assert read(raw, "consumer_waiting_max").value == 2
    assert read(raw, "kv_expired_requests").value == 0


NOTHING = dict.fromkeys(COUNTERS, 0.0)


def concluded(counters: dict[str, tuple[Scrape, ...]], text: str = "same") -> Analysis:
    """Conclude a virtual run whose candidate left these counters and this text."""
    shared = frame(NAME, EXPERIMENT, pairs=6)
    run = draw_run(shared, World(effect=-0.5), np.random.default_rng(1))
    config = {"vllm_config": {"parallel_config": {"tensor_parallel_size": 1}}, "vllm_env": {}}
    for r in run.replicates:
        raw = run.raws[r.replicate]
        names = run.plan.topology_of(r.role).engines
        own = counters if r.role == "candidate" else {name: scrapes({}) for name in names}
        said = text if r.role == "candidate" else "same"
        windows = {
            phase: replace(
                window,
                legs=own,
                scrapes=(),
                samples=tuple({**s, "text": said} for s in window.samples),
            )
            for phase, window in raw.windows.items()
        }
        run.raws[r.replicate] = replace(
            raw, windows=windows, server_info={}, legs=dict.fromkeys(names, config)
        )
    return conclude(run.plan, EXPERIMENT, run.replicates, run.raws, run.requests, run.telemetry)


def test_a_run_without_a_transfer_is_invalid_whatever_it_answered() -> None:
    verdict = concluded(legs(**NOTHING)).verdict
    assert verdict.word == "invalid"
    assert verdict.reason.startswith("no transfer evidence: kv_bytes of candidate > 0")


def test_hits_without_bytes_are_no_evidence() -> None:
    verdict = concluded(legs(**{"vllm:nixl_bytes_transferred_sum": 0.0})).verdict
    assert (verdict.word, verdict.reason[:20]) == ("invalid", "no transfer evidence")


def test_a_leg_that_told_nothing_is_no_evidence() -> None:
    verdict = concluded({"producer": (), "consumer": ()}).verdict
    assert verdict.word == "invalid"
    assert "was not in two scrapes" in verdict.reason


def test_a_lease_that_ended_before_the_fetch_is_invalid() -> None:
    verdict = concluded(legs(expired=1)).verdict
    assert verdict.word == "invalid"
    assert verdict.reason.startswith("KV was fetched after its lease: kv_expired_requests")
    silent = concluded({**legs(), "producer": scrapes({})}).verdict
    assert silent.reason.startswith("KV was fetched after its lease")  # unknown is not zero


def test_another_text_is_invalid() -> None:
    verdict = concluded(legs(), text="sane").verdict
    assert verdict.word == "invalid"
    assert verdict.reason.startswith("the text is not a single server's")


def test_with_evidence_the_preconditions_hold() -> None:
    found = concluded(legs())
    asked = [g for g in found.guards if g.name == "precondition"]
    assert len(asked) == 4 * 6
    assert all(g.ok for g in asked)
    assert found.confounders == ()


def test_a_baseline_against_itself_needs_no_transfer() -> None:
    twin = against_itself(EXPERIMENT)
    assert [p.otherwise for p in twin.preconditions] == ["the text is not a single server's"]
    assert check_preconditions(twin.preconditions, (), ()) == []


# -- legs compared -----------------------------------------------------------------------------


def compared(change: Any) -> tuple[str, ...]:
    shared = frame(NAME, EXPERIMENT, pairs=6)
    run = draw_run(shared, World(), np.random.default_rng(1))
    for number, r in enumerate(run.replicates):
        names = run.plan.topology_of(r.role).engines
        told = {name: {"vllm_config": {"a": 1, "kv_transfer_config": None}} for name in names}
        facts = tuple(
            Fact(
                group="vllm",
                name="torch_version",
                value="2.9.0",
                how="planted",
                state="verified",
                service=name,
                match="must",
            )
            for name in names
        )
        told, facts = change(r.role, told, facts)
        run.raws[r.replicate] = replace(run.raws[r.replicate], server_info={}, legs=told)
        run.replicates[number] = r.model_copy(update={"facts": facts})
    textless = replace(EXPERIMENT, comparisons=())
    found = conclude(run.plan, textless, run.replicates, run.raws, run.requests, run.telemetry)
    return found.confounders


def test_legs_are_compared_in_their_order_and_the_transfer_is_declared() -> None:
    def transfer(role: str, told: dict[str, Any], facts: Any) -> Any:
        if role == "candidate":
            told["producer"] = {"vllm_config": {"a": 1, "kv_transfer_config": {"kv_role": "p"}}}
        return told, facts

    assert compared(transfer) == ()


def test_one_leg_that_differs_is_named_with_what_it_was_compared_with() -> None:
    def other(role: str, told: dict[str, Any], facts: Any) -> Any:
        if role == "candidate":
            told["consumer"] = {"vllm_config": {"a": 2, "kv_transfer_config": None}}
        return told, facts

    assert compared(other) == ("replica-2 / consumer: a: 1 / 2",)


def test_a_fact_of_one_leg_that_differs_is_found() -> None:
    def other(role: str, told: dict[str, Any], facts: Any) -> Any:
        return told, tuple(
            f.model_copy(update={"value": "2.8.0"}) if f.service == "consumer" else f for f in facts
        )

    assert compared(other) == (
        "replica-2 / consumer: facts.replica-2.vllm.torch_version: '2.9.0' / '2.8.0'",
    )


def test_a_leg_that_told_no_configuration_is_named() -> None:
    def lost(role: str, told: dict[str, Any], facts: Any) -> Any:
        told.pop("consumer", None)
        return told, facts

    found = compared(lost)
    assert any("of `consumer` of replicate" in line for line in found)


# -- workload ----------------------------------------------------------------------------------


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_lengths_are_those_of_the_variant(platform: str) -> None:
    for variant, prompt in ((None, "long"), ("short-long", "short"), ("short-short", "short")):
        phases = apply_variant(EXPERIMENT, NAME, variant).workload(Scale("m", 1, platform))
        asked = {len(r["body"]["prompt"]) for r in phases[-1].requests}
        assert asked == {PROMPT_TOKENS[platform][prompt]}


def test_prompts_share_a_prefix_only_where_that_is_asked() -> None:
    def prefixes(phases: Any) -> set[tuple[int, ...]]:
        return {tuple(r["body"]["prompt"][:32]) for r in phases[-1].requests}

    assert len(prefixes(workload(Scale("m", 1)))) == 16
    hit = apply_variant(EXPERIMENT, NAME, "prefix-hit").workload(Scale("m", 1))
    assert len(prefixes(hit)) == 1
    assert len({tuple(r["body"]["prompt"]) for r in hit[-1].requests}) == 16


def test_texts_have_many_lengths_and_are_asked_one_at_a_time() -> None:
    quality = workload(Scale("m", 1))[1]
    assert quality.concurrency == 1
    assert len({len(r["body"]["prompt"].split()) for r in quality.requests}) == len(QUALITY_WORDS)
    assert len({r["lane"] for r in quality.requests}) == 1


def test_the_fallback_connector_is_told_where_and_judged_by_tokens() -> None:
    fallback = apply_variant(EXPERIMENT, NAME, "shared-storage")
    legs_of = fallback.variable.candidate.legs
    told = json.loads(str(legs_of["consumer"].flags["kv-transfer-config"]))
    assert told["kv_connector_extra_config"]["shared_storage_path"].startswith("/dev/shm/")
    asked = [p.holds.measure for p in fallback.preconditions if isinstance(p.holds, Condition)]
    assert asked == ["kv_tokens"]


def test_a_split_baseline_is_judged_without_its_text() -> None:
    split = apply_variant(EXPERIMENT, NAME, "tp2-baseline")
    assert "the text is not a single server's" not in {p.otherwise for p in split.preconditions}
    assert len(split.preconditions) == 3
    assert (split.quality, split.comparisons) == ((), ())
