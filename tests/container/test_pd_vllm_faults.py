"""The faults between two legs with real vLLM: what the stub claims of it, and that engines live.

A paused consumer holds a request between the producer's answer and the fetch.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from typing import Any

import docker
import pytest
import yaml
from commands import Ran
from pd_stack import EXPIRED, LEGS, LOAD_FAILED, MOVED, Stack
from proxy_process import metrics, wait_until

from kit.paths import COMPOSE

LEASE_S = 6
READY_S = 240.0
FAILED = "vllm:nixl_num_failed_transfers_total"
GENERATED = "vllm:generation_tokens_total"
TOKENS = 1000
LATE = "vllm:nixl_num_notifications_after_expiry_total"
BODY = {
    "model": "smollm2-135m-instruct",
    "prompt": "It is a truth universally acknowledged, that a single man in possession of a good "
    "fortune, must be in want of a wife.",
    "max_tokens": 16,
    "temperature": 0,
    "ignore_eos": True,
}

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]


def legs(**dtypes: str) -> dict[str, dict[str, Any]]:
    """Return both legs as compose/pd.yml has them, with a short lease, or another dtype."""
    services = yaml.safe_load((COMPOSE / "pd.yml").read_text("utf-8"))["services"]
    found = {}
    for leg in LEGS:
        *words, transfer = services[leg]["command"]
        name, _, told = transfer.partition("=")
        config = {**json.loads(told), "kv_connector_extra_config": {"kv_lease_duration": LEASE_S}}
        words += [f"{name}={json.dumps(config)}"]
        words += [f"--dtype={dtypes[leg]}"] if leg in dtypes else []
        found[leg] = {"command": words}
    return found


@pytest.fixture(scope="module")
def up(
    built: Ran, client: docker.DockerClient, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stack]:
    file = tmp_path_factory.mktemp("pd") / "override.json"
    one = Stack(client, file, "kit-test-pd-vllm-faults", 18_200, 60.0, BODY)
    try:
        one.up(legs())
        yield one
    finally:
        one.down()


@pytest.fixture
def stack(up: Stack) -> Iterator[Stack]:
    """The stack, healthy; engines that the test did not kill must have lived through it."""
    before = up.since()
    yield up
    assert up.since() == {leg: at for leg, at in before.items() if leg not in up.killed}
    up.heal(READY_S)


@contextlib.contextmanager
def held_back(stack: Stack) -> Iterator[Any]:
    """Give a request whose blocks the producer has and the consumer does not fetch yet."""
    busy = "kit_proxy_outstanding:consumer"
    consumer = stack.container("consumer")
    consumer.pause()
    try:
        sock = stack.send()
        wait_until(lambda: metrics(f"http://127.0.0.1:{stack.port}/metrics")[busy] == 1, 30)
        yield sock
    finally:
        consumer.unpause()


def test_blocks_fetched_after_their_lease_are_told_by_the_producer_alone(stack: Stack) -> None:
    before = stack.metrics("producer")
    failed = stack.metrics("consumer")[FAILED]
    with held_back(stack) as sock:
        time.sleep(LEASE_S + 2)
    told = stack.finish(sock)
    assert (told.error, told.whole) == (None, True)
    wait_until(lambda: stack.metrics("producer")[EXPIRED] == before[EXPIRED] + 1, 30)
    assert stack.ask().whole  # an idle producer reads no notification
    wait_until(lambda: stack.metrics("producer")[LATE] == before[LATE] + 1, 30)
    assert stack.metrics("consumer")[FAILED] == failed


def test_a_producer_killed_with_the_blocks_fails_the_request_at_the_consumer(stack: Stack) -> None:
    assert stack.ask().whole  # the legs know each other now
    failed = stack.metrics("consumer")[FAILED]
    with held_back(stack) as sock:
        stack.kill("producer")
    told = stack.finish(sock)
    assert (told.error, told.text) == (LOAD_FAILED, "")
    assert stack.metrics("consumer")[FAILED] > failed
    assert stack.running("consumer") == 0
    again = stack.ask()
    assert again.error is not None
    assert again.error[1:] in (("connect", "producer"), ("deadline_connect", "producer"))


def test_a_consumer_is_killed_while_it_decodes(stack: Stack) -> None:
    def dies() -> None:
        stack.decodes()
        time.sleep(1)
        stack.kill("consumer")

    told = stack.ask(dies, max_tokens=300)
    assert told.error == (502, "closed", "consumer")
    assert told.text
    assert wait_until(lambda: stack.running("producer") == 0, 30) < 10


def test_twenty_clients_that_leave_hold_no_request_on_either_leg(stack: Stack) -> None:
    before = stack.metrics("consumer")[GENERATED]
    socks = [stack.send(max_tokens=TOKENS, cache_salt=f"client {i}") for i in range(20)]
    wait_until(lambda: stack.running(*LEGS) >= 15, 60)
    for sock in socks:
        sock.close()
    assert wait_until(lambda: stack.running(*LEGS) == 0, 30) < 10
    assert stack.metrics("consumer")[GENERATED] - before < 20 * TOKENS / 2  # not that they ended
    assert stack.ask().whole


def test_a_side_channel_cut_before_the_handshake_fails_the_request(stack: Stack) -> None:
    stack.kill("producer")  # the one that starts instead is a stranger to the consumer
    stack.heal(READY_S)
    stack.cut("side", "producer")
    told = stack.ask()
    assert (told.error, told.text) == (LOAD_FAILED, "")
    assert stack.running(*LEGS) == 0
    stack.join("side", "producer")


def test_legs_of_unequal_dtype_refuse_each_other_and_live(up: Stack) -> None:
    moved = "vllm:nixl_bytes_transferred_sum"
    up.up(legs(consumer="bfloat16"))
    try:
        began = up.since()
        told = up.ask()
        assert (told.error, told.text) == (LOAD_FAILED, "")
        after = up.metrics("consumer")
        assert (after[FAILED], after[moved], after[MOVED]) == (1, 0, 0)
        assert up.since() == began
        assert up.health() == 200
    finally:
        up.up(legs())
