"""The stub as half of a prefill/decode pair."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kit.inside.proxy_wire import producer_body, read_params
from kit.inside.stub_config import parse_config
from kit.inside.stub_engine import Engine, Service
from kit.inside.stub_frames import Frames
from kit.inside.stub_pages import metrics_text
from kit.inside.stub_transfer import Transfer

BODY: dict[str, Any] = {"prompt": " ".join(f"t{i}" for i in range(20)), "max_tokens": 4}


def engine(role: str | None, **config: Any) -> Engine:
    own = {"kv_transfer_config": {"kv_connector": "NixlConnector", "kv_role": role}}
    return Engine(parse_config(config), own if role else {})


def answer(one: Engine, body: dict[str, Any]) -> dict[str, Any] | None:
    number, service = one.admit(body)
    one.start(number, service)
    one.end(number, service, service.finish_reason)
    return one.transfer.handed_over(body, service.prompt_tokens, "id", service.finish_reason)


def counted(one: Engine) -> dict[str, float]:
    return {
        ":".join([s.name, *filter(None, [s.labels.get("source")])]): s.value
        for family in text_string_to_metric_families(metrics_text(one, "m"))
        for s in family.samples
    }


def test_a_producer_hands_over_what_a_consumer_then_fetches() -> None:
    params = answer(engine("kv_producer"), producer_body(BODY, is_chat=False))
    assert read_params(json.dumps({"kv_transfer_params": params}).encode()) == params
    assert params is not None
    assert params["remote_block_ids"] == [[1, 2]]
    consumer = engine("kv_consumer", ttft_s=0.0, ttft_per_token_s=0.01)
    body = {**BODY, "kv_transfer_params": params}
    _, service = consumer.admit(body)
    assert (service.external_tokens, service.offsets_ns[0], service.fault) == (20, 0, None)
    assert counted(consumer)["vllm:nixl_bytes_transferred_sum"] == 0
    assert consumer.fetched(service, "whole") == service
    seen = counted(consumer)
    assert seen["vllm:prompt_tokens_by_source_total:external_kv_transfer"] == 20
    assert seen["vllm:prompt_tokens_by_source_total:local_compute"] == 0
    assert seen["vllm:nixl_bytes_transferred_sum"] == 20 * 1024
    assert seen["vllm:nixl_bytes_transferred_count"] == 1
    assert seen["vllm:nixl_num_kv_expired_reqs_total"] == 0


@pytest.mark.parametrize("role", [None, "kv_consumer"])
def test_only_a_producer_hands_over(role: str | None) -> None:
    assert answer(engine(role), producer_body(BODY, is_chat=False)) is None


def test_a_producer_hands_over_only_when_asked_and_ended_by_length() -> None:
    one = engine("kv_producer")
    assert answer(one, BODY) is None
    asked = producer_body(BODY, is_chat=False)
    assert one.transfer.handed_over(asked, 20, "id", "stop") is None


def test_a_plain_server_counts_no_transfer() -> None:
    assert not any("nixl" in name for name in counted(engine(None)))


def test_a_short_prompt_has_no_full_block() -> None:
    asked = producer_body({"prompt": "a b"}, is_chat=False)
    params = answer(engine("kv_producer", kv_full_blocks_only=True), asked)
    assert params is not None
    assert params["remote_block_ids"] == [[]]


def consumer_of(params: dict[str, Any] | None, **told: Any) -> tuple[Engine, Service]:
    own = {"kv_connector": "NixlConnector", "kv_role": "kv_consumer", **told}
    one = Engine(parse_config({"ttft_per_token_s": 0.01}), {"kv_transfer_config": own})
    return one, one.admit({**BODY, "kv_transfer_params": params})[1]


def test_a_lease_that_ended_shows_on_the_producer_alone() -> None:
    at = [0.0]
    counts: defaultdict[str, float] = defaultdict(float)
    told = {"kv_transfer_config": {"kv_role": "kv_producer"}}
    one = Transfer(parse_config({"kv_lease_s": 2.0}), told, 16, counts, lambda: at[0])
    asked = producer_body(BODY, is_chat=False)
    ids = [one.handed_over(asked, 20, name, "length") for name in ("a", "b")]
    assert one.release("cmpl-a-0")
    at[0] = 2.5
    assert not one.release("cmpl-b-0")
    assert (counts["nixl_expired"], counts["nixl_late"]) == (1, 1)
    consumer, service = consumer_of(ids[1])
    wrong = consumer.fetched(service, "wrong")
    assert wrong.texts == (" x0", " x1", " x2", " x3")
    assert counted(consumer)["vllm:prompt_tokens_by_source_total:external_kv_transfer"] == 20


def test_a_failed_fetch_is_refused_or_computed_as_the_server_was_told() -> None:
    params = answer(engine("kv_producer"), producer_body(BODY, is_chat=False))
    consumer, service = consumer_of(params)
    assert consumer.fetched(service, "failed").fault == "load"
    assert counted(consumer)["vllm:prompt_tokens_total"] == 0
    assert counted(consumer)["vllm:nixl_num_failed_transfers_total"] == 1
    other, service = consumer_of(params, kv_load_failure_policy="recompute")
    again = other.fetched(service, "failed")
    assert again.fault is None
    assert again.offsets_ns[0] - service.offsets_ns[0] == 20 * 10_000_000
    assert counted(other)["vllm:prompt_tokens_by_source_total:local_compute"] == 20
    assert counted(other)["vllm:nixl_bytes_transferred_sum"] == 0


def test_a_disabled_transfer_moves_nothing_but_looks_like_hits() -> None:
    consumer = engine("kv_consumer", kv_transfer_disabled=True)
    params = answer(engine("kv_producer"), producer_body(BODY, is_chat=False))
    consumer.admit({**BODY, "kv_transfer_params": params})
    seen = counted(consumer)
    assert seen["vllm:external_prefix_cache_hits_total"] == 20
    assert seen["vllm:nixl_bytes_transferred_sum"] == 0
    assert seen["vllm:prompt_tokens_by_source_total:local_compute"] == 20


@pytest.mark.parametrize(
    ("params", "fault"),
    [
        ({"do_remote_prefill": True}, "die"),
        ({"do_remote_prefill": True, "remote_block_ids": [[1]]}, "stuck"),
        ({"do_remote_prefill": False}, None),
        (None, None),
    ],
)
def test_incomplete_parameters_harm_a_consumer_as_they_harm_vllm(
    params: dict[str, Any] | None, fault: str | None
) -> None:
    assert engine("kv_consumer").admit({**BODY, "kv_transfer_params": params})[1].fault == fault


def test_a_server_with_a_connector_tells_its_parameters() -> None:
    _, service = engine(None).admit(BODY)
    frames = Frames("id", "m", is_chat=False)
    assert "kv_transfer_params" not in frames.whole(service, None, has_params=False)
    assert frames.whole(service, None, has_params=True)["kv_transfer_params"] is None
