"""What two services would take from each other is named before anything starts."""

import os
import socket
from typing import Any

import pytest

from kit.clash import check_services, clashes, holder_of, is_taken, published, unequal
from kit.errors import BadFile, ServicesClash


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


@pytest.mark.parametrize(
    "words",
    [["--tensor-parallel-size=2"], ["--tensor-parallel-size", "2"], ["-tp", "2"], ["-dp=2"]],
)
def test_side_channels_of_several_ranks_overlap(words: list[str]) -> None:
    other = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "host", "VLLM_NIXL_SIDE_CHANNEL_PORT": "5601"}
    both = found(producer=leg("host", command=["serve", *words]), consumer={"environment": other})
    assert both == ["side channel host:5601 is used by `producer` and `consumer`"]


def test_a_connector_without_an_address_is_at_vllm_s_default() -> None:
    told = ["serve", '--kv-transfer-config={"kv_connector":"NixlConnector"}']
    (sentence,) = found(producer={"command": told})
    assert sentence.startswith("the side channel of `producer` is at localhost:5600")


def test_a_side_channel_on_the_server_s_own_port_is_named() -> None:
    own = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "a", "VLLM_NIXL_SIDE_CHANNEL_PORT": "7999"}
    (sentence,) = found(a={"environment": own, "command": ["--port", "8000", "-tp", "2"]})
    assert sentence == "the side channel of `a` is at port 8000, where it answers requests"


@pytest.mark.parametrize(
    ("one", "other", "held"),
    [(device("gpu=all"), device("gpu=1"), "gpu=1"), (device("0,1"), device("1"), "1"),
     ({"resources": {"reservations": {"devices": [{"count": -1}]}}}, device("0"), "0"),
     (device("all"), device("gpu=all"), "all")],
)  # fmt: skip
def test_a_device_among_several_is_found(one: Any, other: Any, held: str) -> None:
    both = found(first={"deploy": one}, second={"deploy": other})
    assert both == [f"device {held} is given to `first` and `second`"]


def cpu(cpus: str) -> dict[str, Any]:
    return {"environment": {"VLLM_CPU_OMP_THREADS_BIND": cpus}, "cpuset": cpus}


def test_on_cpu_the_devices_are_the_engines_cpus() -> None:
    both = {"first": cpu("0-1"), "second": cpu("1-2"), "proxy": {"cpuset": "0-2"}}
    assert found(**both) == ["CPU 1 is given to `first` and `second`"]
    assert found(first=cpu("0-1"), second=cpu("2-3")) == []
    assert list(clashes({"services": both}, shared_device=True)) == []


PAIR = '--kv-transfer-config={"kv_connector":"NixlConnector"}'


def half(name: str, *words: str, **changed: Any) -> dict[str, Any]:
    mounts = [{"target": "/model", "source": "/models/m"}, {"target": "/kit", "source": name}]
    own = {"image": "i", "volumes": mounts, "command": ["serve", "/model", *words, PAIR]}
    return leg(name, **{**own, **changed})


@pytest.mark.parametrize(
    ("changed", "said"),
    [({"image": "j"}, "image: i / j"),
     ({"volumes": [{"target": "/model", "source": "/models/n"}]}, "model: /models/m / /models/n"),
     ({"command": ["--dtype", "bfloat16", PAIR]}, "--dtype: float32 / bfloat16"),
     ({"command": ["--dtype=float32", "--revision=b", PAIR]}, "--revision: None / b"),
     ({"command": ["--dtype=a", "--dtype=float32", PAIR]}, None)],
)  # fmt: skip
def test_legs_that_cannot_be_a_pair_are_named(changed: dict[str, Any], said: str | None) -> None:
    consumer = half("consumer", "--dtype=float32", **changed)
    services = {"producer": half("producer", "--dtype=float32"), "consumer": consumer, "c": {}}
    sentences = list(unequal({"services": services}))
    assert sentences == ([f"`producer` and `consumer` have different {said}"] if said else [])


def test_the_first_of_them_is_an_error_of_its_own_class() -> None:
    services = {"a": half("a"), "b": half("b", "--dtype=half")}
    with pytest.raises(BadFile, match=r"pd.yml: `a` and `b` have different --dtype: None / half"):
        check_services({"services": services}, "pd.yml")
    services = {"a": half("x"), "b": half("x")}
    with pytest.raises(ServicesClash, match="side channel x:5600"):
        check_services({"services": services}, "pd.yml")


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
    chosen_by_the_engine = [{"target": 1}, {"target": 1, "published": "8000-8009"}]
    services = {"a": {"ports": ports(1, 2)}, "b": {}, "c": {"ports": chosen_by_the_engine}}
    assert published({"services": services}) == {"a": [1, 2], "b": [], "c": []}
