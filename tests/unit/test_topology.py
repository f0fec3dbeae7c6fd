"""Topologies: what compose/ can start by hand is what the kit plans, without reading it twice."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from kit.compose import Placement, _set_devices
from kit.errors import UnknownName
from kit.experiment import Arm, Leg, Text, find_experiment
from kit.paths import COMPOSE
from kit.plan import Plan
from kit.platform import Platform, Share, cut
from kit.topology import TOPOLOGIES, Topology, find_topology
from kit.use import device_values
from kit.virtual import virtual_plan

PD = find_experiment("adv4_pd_disagg")


def services(name: str) -> dict[str, Any]:
    found = yaml.safe_load((COMPOSE / f"{name}.yml").read_text("utf-8"))["services"]
    assert isinstance(found, dict)
    return found


def planned() -> Plan:
    return virtual_plan("adv4_pd_disagg", PD)[0]


@pytest.mark.parametrize("name", sorted(TOPOLOGIES))
def test_every_service_of_a_topology_is_in_its_file(name: str) -> None:
    topology = find_topology(name)
    there = services(topology.compose)
    assert {*topology.services, "client"} <= set(there)
    assert set(topology.parts) == (set(topology.engines) if topology.proxy else set())
    if topology.proxy:
        assert there[topology.proxy]["command"] == [*topology.proxy_words]


def test_an_unknown_topology_is_named_with_those_there_are() -> None:
    with pytest.raises(UnknownName, match="pdd") as caught:
        find_topology("pdd")
    assert "did you mean `pd`" in caught.value.hint


@pytest.mark.parametrize(
    ("file", "service"), [("pd", "producer"), ("pd", "consumer"), ("tp", "server")]
)
def test_a_command_by_hand_is_the_shared_one_and_one_word_more(file: str, service: str) -> None:
    *words, own = services(file)[service]["command"]
    assert words == services("shared")["engine"]["command"]
    assert own.startswith(("--kv-transfer-config=", "--tensor-parallel-size="))


def test_legs_by_hand_are_told_what_the_experiment_tells_them() -> None:
    arm = planned().arm("candidate")
    for name in ("producer", "consumer"):
        by_hand, own = services("pd")[name], arm.service(name)
        word = by_hand["command"][-1].removeprefix("--kv-transfer-config=")
        assert own.args == ("--kv-transfer-config", word)
        assert json.loads(word)["kv_role"] == f"kv_{name}"
        assert own.env == by_hand["environment"]


def test_legs_have_one_network_and_one_address() -> None:
    """A name on two networks has two addresses, and the side channel could listen on either."""
    for name in ("producer", "consumer", "replica-1", "replica-2"):
        assert services("pd")[name]["networks"] == ["inside"]
        assert "ports" not in services("pd")[name]


def test_published_ports_are_loopback_and_different() -> None:
    for file in ("single", "tp", "pd"):
        ports = [port for each in services(file).values() for port in each.get("ports", [])]
        assert ports
        assert all(port.startswith("127.0.0.1:${KIT_") for port in ports)
        assert len({port.split(":-")[1] for port in ports}) == len(ports)


# -- plans -------------------------------------------------------------------------------------


def test_a_leg_gets_its_own_words_after_the_arms() -> None:
    plan = planned()
    assert plan.topology_of("baseline").name == "replicas"
    assert plan.topology_of("candidate").name == "pd"
    assert "--kv-transfer-config" not in plan.arm("candidate").args
    proxy = plan.arm("candidate").service("proxy").args
    assert proxy[:6] == (
        "--port",
        "8000",
        "--producer",
        "producer:8000",
        "--consumer",
        "consumer:8000",
    )
    assert proxy[-2:] == ("--deadline-s", "180")
    assert plan.devices == 2


def test_a_leg_that_the_topology_lacks_is_refused() -> None:
    lost = PD.variable.candidate.model_copy(update={"legs": {"prodcer": Leg()}})
    variable = PD.variable.model_copy(update={"candidate": lost})
    with pytest.raises(UnknownName, match="prodcer"):
        virtual_plan("adv4_pd_disagg", replace(PD, variable=variable))


def test_plans_survive_a_file() -> None:
    plan = planned()
    text = json.dumps(plan.model_dump(mode="json"))
    assert Plan.model_validate_json(text) == plan
    assert Plan.model_validate_json(text).sha256 == plan.sha256


def test_an_arm_without_legs_says_nothing_about_them() -> None:
    plan, _ = virtual_plan("exp1_prefix_cache", find_experiment("exp1_prefix_cache"))
    assert not {"topology", "services"} & set(plan.model_dump(mode="json")["arms"][0])
    arm = Arm(name="a", label=Text(en="a", zh="a"))
    assert (arm.topology, arm.legs) == (None, {})


# -- devices -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cores", "count", "parts"),
    [
        ([[0], [1]], 2, [[0], [1]]),
        ([[0, 2], [1, 3]], 2, [[0, 2], [1, 3]]),
        ([[0, 1]], 2, [[0], [1]]),  # threads of one core, where there is no other way
        ([[0], [1], [2]], 2, [[0], [1]]),  # equal parts: one is left over
        ([[0]], 2, [[0]]),
        ([], 2, []),
    ],
)
def test_cores_are_cut_into_equal_parts(
    cores: list[list[int]], count: int, parts: list[list[int]]
) -> None:
    assert cut(cores, count) == parts


def placement(accel: str, *shares: Share) -> Placement:
    nowhere = Path("/nowhere")
    return Placement(accel, shares, "0", nowhere, nowhere, nowhere, "1:0")


def with_devices(topology: Topology, place: Placement, mine: slice) -> dict[str, Any]:
    reservation = {"driver": "cdi", "device_ids": ["x"]}
    service: dict[str, Any] = {
        "environment": {},
        "deploy": {"resources": {"reservations": {"devices": [reservation]}}},
    }
    _set_devices(service, topology, place, mine)
    return {**service, "device_ids": reservation["device_ids"]}


def test_ranks_get_a_list_of_cpus_each() -> None:
    place = placement("cpu", Share(cpus="0-1"), Share(cpus="2-3"))
    both = with_devices(find_topology("tp"), place, slice(0, 2))
    assert both["cpuset"] == "0-3"
    assert both["environment"]["VLLM_CPU_OMP_THREADS_BIND"] == "0-1|2-3"
    second = with_devices(find_topology("pd"), place, slice(1, 2))
    assert second["cpuset"] == second["environment"]["VLLM_CPU_OMP_THREADS_BIND"] == "2-3"


def test_isolated_legs_see_their_own_device_and_sharing_ones_compute_on_it() -> None:
    place = placement("cuda-cdi", Share(cpus="0", passed_as="a"), Share(cpus="0", passed_as="b"))
    strict = with_devices(find_topology("pd"), place, slice(1, 2))
    assert (strict["device_ids"], strict["environment"]) == (["b"], {})
    shared = with_devices(find_topology("pd-shared-ipc"), place, slice(1, 2))
    assert shared["device_ids"] == ["a", "b"]
    assert shared["environment"] == {"CUDA_VISIBLE_DEVICES": "1"}


def test_a_shared_device_is_given_to_every_engine_once() -> None:
    both = placement("cuda-cdi", *[Share(cpus="0", passed_as="a")] * 2)
    shared = with_devices(find_topology("pd-shared-ipc"), both, slice(1, 2))
    assert shared["device_ids"] == ["a"]
    assert shared["environment"] == {}  # as in an arm whose engines share nothing else
    plan = planned().model_copy(update={"shared_device": True})
    assert plan.sha256 != planned().sha256
    assert plan.case.endswith("--shared-device")


def test_devices_by_hand_are_written_for_two_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kit.platform.usable_cores", lambda: [[0], [1], [2]])
    platform = Platform(
        name="cpu",
        why="",
        accel="cpu",
        server_cpuset="0-2",
        client_cpuset="2",
        shared_cores=False,
        default_image="x",
    )
    assert device_values(platform) == {"KIT_CPUS": "0", "KIT_CPUS_2": "1", "KIT_TP_CPUS": "0|1"}
    assert platform.shares(1) == (Share(cpus="0-2"),)
    assert platform.shares(2, shared=True) == (Share(cpus="0-2"), Share(cpus="0-2"))
    assert len(platform.shares(4)) == 3
