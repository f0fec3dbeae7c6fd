"""Each fault between two legs, with real processes: how it ends, whose it is called, and when.

Stubs stand for the engines and fail as vLLM 0.32.0 does. What is not killed here must answer
afterwards and hold no request.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from one_request import Told, finish, send
from proxy_process import Pair, metrics, running_pair, wait_until
from stub_process import PROMPT

RIGHT, WRONG = " w0 w1 w2 w3 w4", " x0 x1 x2 x3 x4"
DEADLINE_S = 1.0
LATE_S = 0.6  # the consumer fetches so much later than the producer answered
LOAD_FAILED = (500, "InternalServerError", "consumer")  # vLLM's own words
FAILED = "vllm:nixl_num_failed_transfers_total"
BYTES = "vllm:nixl_bytes_transferred_sum"
MOVED = "vllm:prompt_tokens_by_source_total:external_kv_transfer"

streamed = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


def dtype(name: str) -> dict[str, Any]:
    return {"info_when": [{"set": {"model_config.dtype": name}}]}


def revision(digit: str) -> dict[str, Any]:
    return {"info_when": [{"set": {"model_config.revision": digit * 40}}]}


@pytest.fixture
def start(tmp_path: Path) -> Any:
    """Start both legs with what is planted in them, and the proxy."""
    with ExitStack() as stack:
        words = ("--deadline-s", str(DEADLINE_S))
        yield lambda **planted: stack.enter_context(running_pair(tmp_path, *words, **planted))


def body(*, stream: bool) -> dict[str, Any]:
    return {"model": "stub", "prompt": PROMPT, "max_tokens": 5, "stream": stream}


def ask(pair: Pair, *, stream: bool, meanwhile: Callable[[], object] = lambda: None) -> Told:
    """Send a request, do something meanwhile, and return how it ended: within the deadline."""
    sock = send(pair.proxy.port, **body(stream=stream))
    began = time.monotonic()
    meanwhile()
    told = finish(sock)
    assert time.monotonic() - began < 2 * DEADLINE_S + 1
    return told


def running(pair: Pair, leg: str) -> float:
    return metrics(f"{getattr(pair, leg).url}/metrics")["vllm:num_requests_running"]


def handed_over(pair: Pair) -> None:
    """Wait until the producer has answered."""
    wait_until(lambda: pair.producer.logged())


def fetching(pair: Pair) -> None:
    """Wait until the consumer is in the middle of a transfer."""
    handed_over(pair)
    wait_until(lambda: running(pair, "consumer") == 1)
    time.sleep(0.2)


def kill(pair: Pair, name: str) -> None:
    process = getattr(pair, name).process
    process.kill()
    process.wait()


def named_in_log(pair: Pair, stream: bool) -> bool:
    """Whether the proxy's log and counters name the consumer, whose error it handed on."""
    kind = "error_event" if stream else "status_500"
    wait_until(lambda: any(r["leg"] == "consumer" for r in pair.proxy.requests()))
    counted = metrics(f"{pair.proxy.url}/metrics")
    return counted[f"kit_proxy_errors_total:consumer:{kind}"] == 1


# -- a leg is killed ---------------------------------------------------------------------------


@streamed
def test_a_producer_killed_before_the_transfer_is_named(start: Any, stream: bool) -> None:
    pair = start(producer={"ttft_s": 5.0})

    def computes_then_dies() -> None:
        wait_until(lambda: running(pair, "producer") == 1)
        kill(pair, "producer")

    told = ask(pair, stream=stream, meanwhile=computes_then_dies)
    assert told.error == (502, "closed", "producer")
    assert ask(pair, stream=stream).error == (502, "connect", "producer")
    assert running(pair, "consumer") == metrics(f"{pair.consumer.url}/metrics")[MOVED] == 0


@streamed
@pytest.mark.parametrize("moment", ["after its answer", "during the transfer"])
def test_a_producer_killed_with_the_blocks_fails_the_request_at_the_consumer(
    start: Any, moment: str, stream: bool
) -> None:
    during = moment == "during the transfer"
    pair = start(
        producer={"kv_transfer_s": 5.0}, consumer={"kv_fetch_after_s": 0.0 if during else LATE_S}
    )

    def dies() -> None:
        (fetching if during else handed_over)(pair)
        kill(pair, "producer")

    told = ask(pair, stream=stream, meanwhile=dies)
    assert (told.error, told.text) == ((*LOAD_FAILED[:2], None) if stream else LOAD_FAILED, "")
    assert named_in_log(pair, stream)
    counted = metrics(f"{pair.consumer.url}/metrics")
    assert (counted[FAILED], counted[BYTES], counted[MOVED]) == (1, 0, 0)
    assert running(pair, "consumer") == 0


def test_a_producer_killed_after_the_transfer_is_no_longer_needed(start: Any) -> None:
    pair = start(consumer={"ttft_s": 0.5})

    def dies() -> None:
        wait_until(lambda: metrics(f"{pair.consumer.url}/metrics")[MOVED] == 8)
        kill(pair, "producer")

    told = ask(pair, stream=True, meanwhile=dies)
    assert (told.text, told.error, told.whole) == (RIGHT, None, True)


@streamed
def test_a_consumer_killed_while_it_decodes_is_named(start: Any, stream: bool) -> None:
    pair = start(consumer={"itl_s": 0.3})

    def dies() -> None:
        wait_until(lambda: metrics(f"{pair.consumer.url}/metrics")[MOVED] == 8)
        time.sleep(0.4)
        kill(pair, "consumer")

    told = ask(pair, stream=stream, meanwhile=dies)
    assert told.error == (502, "closed", "consumer")
    assert RIGHT.startswith(told.text)
    assert bool(told.text) == stream
    assert ask(pair, stream=stream).error == (502, "connect", "consumer")
    assert running(pair, "producer") == 0


@pytest.mark.parametrize("leg", ["producer", "consumer"])
def test_a_killed_proxy_leaves_no_request_on_either_leg(start: Any, leg: str) -> None:
    pair = start(**{leg: {"ttft_s": 60.0}})
    sock = send(pair.proxy.port, **body(stream=True))
    wait_until(lambda: running(pair, leg) == 1)
    kill(pair, "proxy")
    told = finish(sock)
    assert not told.whole
    assert wait_until(lambda: running(pair, "producer") + running(pair, "consumer") == 0) < 2
    assert metrics(f"{getattr(pair, leg).url}/metrics")["vllm:request_success_total:abort"] == 1


# -- what is fetched is not there, or not the same -----------------------------------------------


@streamed
def test_blocks_fetched_after_their_lease_are_told_by_the_producer_alone(
    start: Any, stream: bool
) -> None:
    pair = start(producer={"kv_lease_s": 0.1}, consumer={"kv_fetch_after_s": LATE_S})
    told = ask(pair, stream=stream)
    assert (told.text, told.error, told.whole) == (WRONG, None, True)
    theirs, ours = (metrics(f"{leg.url}/metrics") for leg in (pair.producer, pair.consumer))
    assert theirs["vllm:nixl_num_kv_expired_reqs_total"] == 1
    assert theirs["vllm:nixl_num_notifications_after_expiry_total"] == 1
    assert (ours[FAILED], ours[MOVED]) == (0, 8)


@streamed
def test_legs_of_unequal_dtype_refuse_each_other(start: Any, stream: bool) -> None:
    pair = start(producer=dtype("float32"), consumer=dtype("bfloat16"))
    told = ask(pair, stream=stream)
    assert told.error == ((*LOAD_FAILED[:2], None) if stream else LOAD_FAILED)
    assert named_in_log(pair, stream)
    assert metrics(f"{pair.consumer.url}/metrics")[FAILED] == 1
    assert httpx.get(f"{pair.proxy.url}/health", trust_env=False).status_code == 200


def test_legs_of_unequal_revision_do_not_notice(start: Any) -> None:
    pair = start(producer=revision("a"), consumer=revision("b"))
    told = ask(pair, stream=True)
    assert (told.text, told.error) == (WRONG, None)
    assert metrics(f"{pair.consumer.url}/metrics")[FAILED] == 0


def test_a_consumer_told_to_recompute_answers_right_without_a_transfer(start: Any) -> None:
    late = {"kv_fetch_after_s": LATE_S, "prefix_caching": False}
    pair = start(consumer=late, policy="recompute")

    def dies() -> None:
        handed_over(pair)
        kill(pair, "producer")

    told = ask(pair, stream=True, meanwhile=dies)
    assert (told.text, told.error) == (RIGHT, None)
    counted = metrics(f"{pair.consumer.url}/metrics")
    assert counted["vllm:prompt_tokens_by_source_total:local_compute"] == 8
    assert (counted[FAILED], counted[MOVED]) == (1, 0)


# -- a leg or the way to it is silent ------------------------------------------------------------


@streamed
@pytest.mark.parametrize("moment", ["before the handshake", "during the transfer"])
def test_a_blocked_side_channel_ends_at_the_consumer(start: Any, moment: str, stream: bool) -> None:
    """Between processes a stopped producer stands for a cut: it takes connections, and no more."""
    during = moment == "during the transfer"
    pair = start(
        producer={"kv_transfer_s": 5.0 if during else 0.001},
        consumer={"kv_fetch_after_s": 0.0 if during else LATE_S, "kv_handshake_s": 0.2},
    )

    def stops() -> None:
        (fetching if during else handed_over)(pair)
        pair.producer.process.send_signal(signal.SIGSTOP)

    told = ask(pair, stream=stream, meanwhile=stops)
    silent = (504, "deadline_silence" if stream else "deadline_answer", "consumer")
    refused = (*LOAD_FAILED[:2], None) if stream else LOAD_FAILED
    assert told.error == (silent if during else refused)
    pair.producer.process.send_signal(signal.SIGCONT)
    assert wait_until(lambda: running(pair, "consumer") == 0) < 2
    if not during:
        assert ask(pair, stream=stream).text == RIGHT


@pytest.mark.parametrize(
    ("leg", "kind"), [("producer", "deadline_answer"), ("consumer", "deadline_silence")]
)
def test_a_leg_slower_than_the_deadline_is_named_and_served_again_later(
    start: Any, leg: str, kind: str
) -> None:
    pair = start(**{leg: {"ttft_s": 0.3}})
    slow = getattr(pair, leg).process

    def stops() -> None:
        wait_until(lambda: running(pair, leg) == 1)
        slow.send_signal(signal.SIGSTOP)

    told = ask(pair, stream=True, meanwhile=stops)
    assert told.error == (504, kind, leg)
    slow.send_signal(signal.SIGCONT)
    assert wait_until(lambda: running(pair, "producer") + running(pair, "consumer") == 0) < 2
    assert ask(pair, stream=True).text == RIGHT
