"""Each fault between two legs in real containers on real networks, the stub as both engines.

By hand: compose/pd.yml with a network of its own for the side channel, so that it can be cut while
the legs still answer. In runs: the error or verdict that a fault ends in. Engines that nobody
killed must still run, as the same processes; nothing may be left.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import docker
import pytest
from commands import Ran, kit_words, service_of
from pd_stack import ABORTED, EXPIRED, LEGS, LOAD_FAILED, Stack
from proxy_process import wait_until

from kit.errors import PortTaken, ServerLost
from kit.paths import ROOT

FETCH_AFTER_S, TRANSFER_S = 0.8, 1.0
RIGHT, WRONG = " w0 w1 w2 w3 w4", " x0 x1 x2 x3 x4"
UNREACHED = [(502, "connect", "producer"), (504, "deadline_connect", "producer")]
"""Nobody has its address any more: the network says so, or says nothing."""
PLANTED: dict[str, Any] = {
    "ttft_s": 0.6,
    "itl_s": 0.2,
    "kv_transfer_s": TRANSFER_S,
    "kv_fetch_after_s": FETCH_AFTER_S,
    "kv_handshake_s": 1.0,
}
CONSUMER = {"kv_transfer_config": {"kv_connector": "NixlConnector", "kv_role": "kv_consumer"}}


def told_otherwise(name: str, value: str) -> dict[str, Any]:
    """Let the consumer have another value in its model's resolved configuration."""
    return {"info_when": [{"when": CONSUMER, "set": {f"model_config.{name}": value}}]}


def stubs(**planted: Any) -> dict[str, dict[str, Any]]:
    """Return what makes a stub of each leg."""
    words = ["env", "-C", "/kit", "${KIT_PYTHON:-/opt/kit/venv/bin/python}", "-m", "inside.stub"]
    told = {"KIT_STUB": json.dumps({**PLANTED, **planted})}
    return {leg: {"entrypoint": words, "environment": told.copy()} for leg in LEGS}


@pytest.fixture(scope="module")
def up(
    built: Ran, client: docker.DockerClient, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stack]:
    file = tmp_path_factory.mktemp("pd") / "override.json"
    body = {"model": "stub", "prompt": "one two three", "max_tokens": 5}
    one = Stack(client, file, "kit-test-pd-faults", 18_100, 4.0, body)
    try:
        one.up(stubs())
        yield one
    finally:
        one.down()


@pytest.fixture
def stack(up: Stack) -> Iterator[Stack]:
    """The stack, healthy; engines that the test did not kill must have lived through it."""
    before = up.since()
    yield up
    assert up.since() == {leg: at for leg, at in before.items() if leg not in up.killed}
    up.heal()


def transfers(stack: Stack) -> None:
    """Wait until a transfer is under way."""
    stack.handed_over()
    time.sleep(FETCH_AFTER_S + TRANSFER_S / 3)


# -- by hand -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("moment", "errors"),
    [
        pytest.param(None, UNREACHED, marks=pytest.mark.full),
        pytest.param(Stack.computes, [(502, "closed", "producer")], marks=pytest.mark.full),
        pytest.param(Stack.handed_over, [LOAD_FAILED], marks=pytest.mark.full),
        (transfers, [LOAD_FAILED]),
        pytest.param(Stack.decodes, [None], marks=pytest.mark.full),
    ],
    ids=["before", "while it computes", "after its answer", "during the transfer", "afterwards"],
)
def test_a_producer_is_killed(
    stack: Stack,
    moment: Callable[[Stack], None] | None,
    errors: Sequence[tuple[int, str, str] | None],
) -> None:
    def dies() -> None:
        if moment is not None:
            moment(stack)
            stack.kill("producer")

    if moment is None:
        stack.kill("producer")
    told = stack.ask(dies)
    assert told.error in errors
    assert told.text == ("" if told.error else RIGHT)
    assert stack.running("consumer") == 0


def test_a_consumer_is_killed_while_it_decodes(stack: Stack) -> None:
    def dies() -> None:
        stack.decodes()
        time.sleep(0.8)
        stack.kill("consumer")

    told = stack.ask(dies)
    assert told.error == (502, "closed", "consumer")
    assert RIGHT.startswith(told.text)
    again = stack.ask()
    assert again.error is not None
    assert again.error[1:] in (("connect", "consumer"), ("deadline_connect", "consumer"))


@pytest.mark.full
def test_a_proxy_is_killed_and_both_legs_let_go(stack: Stack) -> None:
    def dies() -> None:
        stack.decodes()
        stack.kill("proxy")

    before = stack.metrics("consumer")[ABORTED]
    assert not stack.ask(dies).whole
    stack.heal()
    assert stack.running(*LEGS) == 0
    assert stack.metrics("consumer")[ABORTED] == before + 1
    assert stack.ask().text == RIGHT


@pytest.mark.parametrize(
    ("moment", "error"),
    [
        (Stack.handed_over, LOAD_FAILED),
        pytest.param(transfers, (504, "deadline_silence", "consumer"), marks=pytest.mark.full),
    ],
    ids=["before the handshake", "during the transfer"],
)
def test_the_side_channel_is_cut(
    stack: Stack, moment: Callable[[Stack], None], error: tuple[int, str, str]
) -> None:
    def goes() -> None:
        moment(stack)
        stack.cut("side", "producer")

    told = stack.ask(goes)
    assert (told.text, told.error) == ("", error)
    assert wait_until(lambda: stack.running(*LEGS) == 0) < 2
    stack.join("side", "producer")


@pytest.mark.full
@pytest.mark.parametrize("leg", LEGS)
def test_a_leg_is_cut_off(stack: Stack, leg: str) -> None:
    stack.cut("inside", leg)
    told = stack.ask()
    assert told.error is not None
    assert told.error[1:] in (("connect", leg), ("deadline_connect", leg))
    stack.join("inside", leg)


@pytest.mark.full
@pytest.mark.parametrize(
    ("leg", "moment", "kind"),
    [
        ("producer", Stack.computes, "deadline_answer"),
        ("consumer", Stack.decodes, "deadline_silence"),
    ],
    ids=LEGS,
)
def test_a_leg_is_slower_than_the_deadline(
    stack: Stack, leg: str, moment: Callable[[Stack], None], kind: str
) -> None:
    def stops() -> None:
        moment(stack)
        stack.container(leg).pause()

    try:
        told = stack.ask(stops)
    finally:
        stack.container(leg).unpause()
    assert told.error == (504, kind, leg)
    assert wait_until(lambda: stack.running(*LEGS) == 0) < 2
    assert stack.ask().text == RIGHT


def test_twenty_clients_that_leave_hold_no_request_on_either_leg(stack: Stack) -> None:
    before = sum(stack.metrics(leg)[ABORTED] for leg in LEGS)
    socks = [stack.send(max_tokens=500) for _ in range(20)]
    wait_until(lambda: stack.running(*LEGS) == 20)
    for sock in socks[:10]:
        sock.close()
    wait_until(lambda: stack.running("consumer") == 10)
    for sock in socks[10:]:
        sock.close()
    assert wait_until(lambda: stack.running(*LEGS) == 0) < 2
    assert sum(stack.metrics(leg)[ABORTED] for leg in LEGS) == before + 20


def test_check_names_the_container_that_holds_the_port(stack: Stack) -> None:
    done = subprocess.run(
        kit_words("check", "pd"),
        cwd=ROOT,
        env={**os.environ, "KIT_PORT": str(stack.port)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == PortTaken.exit_code, done.stderr
    holder = stack.container("proxy").name
    assert f"port {stack.port} of `proxy` is taken by the container {holder}" in done.stderr


@pytest.fixture
def plant(up: Stack) -> Iterator[Callable[..., None]]:
    """Plant something else in both legs until the test ends; they must live through it."""

    def change(**planted: Any) -> None:
        nonlocal before
        up.up(stubs(**planted))
        before = up.since()

    before: dict[str, str] = {}
    yield change
    assert up.since() == before
    assert up.health() == 200
    up.up(stubs())


@pytest.mark.full
def test_the_lease_ends_before_the_fetch(up: Stack, plant: Callable[..., None]) -> None:
    plant(kv_lease_s=0.2)
    told = up.ask()
    assert (told.text, told.error) == (WRONG, None)  # vLLM's consumer does not notice either
    assert up.metrics("producer")[EXPIRED] == 1


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "value", "text", "error"),
    [("dtype", "bfloat16", "", LOAD_FAILED), ("revision", "f" * 40, WRONG, None)],
    ids=["dtype", "revision"],
)
def test_the_legs_are_told_unequal_things(
    up: Stack,
    plant: Callable[..., None],
    name: str,
    value: str,
    text: str,
    error: tuple[int, str, str] | None,
) -> None:
    plant(**told_otherwise(name, value))
    told = up.ask()
    assert (told.text, told.error) == (text, error)


# -- in runs -------------------------------------------------------------------------------------

RUN = ("run", "adv4_pd_disagg", "--platform", "cpu", "--quick", "--json")
IN_RUN = {"ttft_s": 0.1, "itl_s": 0.02}


def finish_run(
    out: Path, stub: str, meanwhile: Callable[[Path], object] = lambda _: None
) -> tuple[int, str, str]:
    """Run one pair, do something meanwhile; return exit code, the verdict's reason and stderr."""
    child = subprocess.Popen(
        kit_words(*RUN, "--out", str(out), "--stub", stub),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        meanwhile(out)
        stdout, stderr = child.communicate(timeout=240)
    except BaseException:
        child.terminate()
        child.communicate(timeout=90)
        raise
    assert "Traceback" not in stderr
    reason = json.loads(stdout)["verdict"]["reason"] if stdout.startswith("{") else ""
    return child.returncode, reason, stderr


def under_load(client: docker.DockerClient, out: Path, service: str) -> Any:
    """Wait until the candidate is being measured; return the container of one of its services."""
    wait_until(lambda: any(out.rglob("*-candidate/measure/window.json")), 150)
    return service_of(client, out, service)


@pytest.mark.full
@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("service", ["producer", "consumer", "proxy"])
def test_a_run_names_the_service_that_was_killed(
    tmp_path: Path, stub_file: Callable[..., str], client: docker.DockerClient, service: str
) -> None:
    def kill(out: Path) -> None:
        under_load(client, out, service).kill()

    code, _, said = finish_run(tmp_path / "runs", stub_file(**IN_RUN), kill)
    assert code == ServerLost.exit_code, said
    assert f"`{service}` died under load" in said


@pytest.mark.full
@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize(
    ("planted", "reason"),
    [
        ({"kv_lease_s": 0.01, "kv_fetch_after_s": 0.1}, "KV was fetched after its lease"),
        (told_otherwise("dtype", "bfloat16"), "no transfer evidence"),
        (told_otherwise("revision", "f" * 40), "the text is not a single server's"),
    ],
    ids=["lease", "dtype", "revision"],
)
def test_a_run_whose_transfers_are_not_what_they_seem_is_invalid(
    tmp_path: Path, stub_file: Callable[..., str], planted: dict[str, Any], reason: str
) -> None:
    code, told, said = finish_run(tmp_path / "runs", stub_file(**IN_RUN, **planted))
    assert code == 4, said
    assert told.startswith(reason)


@pytest.mark.full
@pytest.mark.usefixtures("nothing_left")
def test_a_run_names_the_leg_that_is_cut_off(
    tmp_path: Path, stub_file: Callable[..., str], client: docker.DockerClient
) -> None:
    def cut_off(out: Path) -> None:
        consumer = under_load(client, out, "consumer")
        (network,) = consumer.attrs["NetworkSettings"]["Networks"]
        client.networks.get(network).disconnect(consumer)

    code, _, said = finish_run(tmp_path / "runs", stub_file(**IN_RUN), cut_off)
    assert code == ServerLost.exit_code, said
    assert "`consumer` serves no more" in said
