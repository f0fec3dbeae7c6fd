"""What two services would take from each other is named before anything starts."""

import os
import socket
from typing import Any

import pytest

from kit.clash import clashes, holder_of, is_taken, published


def leg(name: str, **changed: Any) -> dict[str, Any]:
    environment = {"VLLM_NIXL_SIDE_CHANNEL_HOST": name, "VLLM_NIXL_SIDE_CHANNEL_PORT": "5600"}
    return {"environment": environment, "command": ["serve"], **changed}


def ports(*numbers: int) -> list[dict[str, Any]]:
    return [{"host_ip": "127.0.0.1", "target": 8000, "published": str(n)} for n in numbers]


def device(*names: str) -> dict[str, Any]:
    return {"resources": {"reservations": {"devices": [{"device_ids": list(names)}]}}}


def found(**services: dict[str, Any]) -> list[str]:
    return list(clashes({"services": services}))


def test_legs_on_their_own_do_not_clash() -> None:
    own = found(
        producer=leg("producer", ports=ports(8100), deploy=device("gpu=0")),
        consumer=leg("consumer", ports=ports(8200), deploy=device("gpu=1")),
        client={"environment": None},
    )
    assert own == []


def test_a_port_a_device_and_a_side_channel_of_two_are_named_with_both() -> None:
    twice = found(
        producer=leg("host", ports=ports(8100), deploy=device("gpu=0")),
        consumer=leg("host", ports=ports(8100), deploy=device("gpu=0")),
    )
    assert twice == [
        "port 8100 is published by `producer` and `consumer`",
        "device gpu=0 is given to `producer` and `consumer`",
        "side channel host:5600 is used by `producer` and `consumer`",
    ]


def test_side_channels_of_several_ranks_overlap() -> None:
    ranks = ["serve", "--tensor-parallel-size=2"]
    other = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "host", "VLLM_NIXL_SIDE_CHANNEL_PORT": "5601"}
    both = found(producer=leg("host", command=ranks), consumer={"environment": other})
    assert both == ["side channel host:5601 is used by `producer` and `consumer`"]


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_a_side_channel_that_nobody_can_reach_is_named(host: str) -> None:
    (sentence,) = found(producer=leg(host))
    assert sentence.startswith(f"the side channel of `producer` is at {host}:5600")


def test_legs_that_are_meant_to_see_all_devices_do_not_clash() -> None:
    def sharing(name: str, number: str) -> dict[str, Any]:
        one = leg(name, deploy=device("gpu=all"))
        one["environment"]["CUDA_VISIBLE_DEVICES"] = number
        return one

    assert found(producer=sharing("producer", "0"), consumer=sharing("consumer", "1")) == []


def test_a_taken_port_is_told_with_its_holder() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert is_taken(port)
        holder = holder_of(port) or ""
        assert holder.endswith(f"({os.getpid()})")
    assert not is_taken(port)
    assert holder_of(port) is None


def test_unpublished_services_publish_nothing() -> None:
    services = {"a": {"ports": ports(1, 2)}, "b": {}, "c": {"ports": [{"target": 1}]}}
    assert published({"services": services}) == {"a": [1, 2], "b": [], "c": []}
