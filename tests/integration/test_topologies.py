"""Topologies as compose reads them; `config` needs the docker program, and no engine."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kit import engine
from kit.clash import check_services
from kit.compose import Placement, Runtime, render
from kit.errors import PortTaken, ServicesClash
from kit.experiment import find_experiment
from kit.paths import ROOT
from kit.plan import Plan, Resources, Role
from kit.platform import Share
from kit.topology import TOPOLOGIES
from kit.virtual import virtual_plan

FILES = ("single", "tp", "pd")
HARDENED = ("cap_drop", "security_opt", "read_only", "pids_limit", "mem_limit", "user")


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh clone: nothing built, no compose/.env."""
    target = tmp_path_factory.mktemp("fresh") / "clone"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(target)], check=True)
    return target


@pytest.mark.parametrize("isolation", ["strict", "shared-ipc"])
@pytest.mark.parametrize("accel", ["cpu", "cuda-cdi", "cuda-runtime"])
def test_every_file_renders_on_a_fresh_clone(clone: Path, accel: str, isolation: str) -> None:
    own = {k: v for k, v in os.environ.items() if not k.startswith(("KIT_", "COMPOSE_"))}
    for file in FILES:
        words = ["compose", "-f", f"compose/{file}.yml", "--profile", "*", "config", "--quiet"]
        done = subprocess.run(
            [engine.cli_program(), *words],
            cwd=clone,
            env={**own, "KIT_ACCEL": accel, "KIT_ISOLATION": isolation},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, (file, done.stderr)


def planned(topology: str, ranks: int = 1) -> Plan:
    """Return adv4's plan with its candidate on that topology."""
    experiment = find_experiment("adv4_pd_disagg")
    plan, _ = virtual_plan("adv4_pd_disagg", experiment)
    arm = plan.arm("candidate")
    services = arm.services if topology.startswith("pd") else ()
    args = (*arm.args, "--tensor-parallel-size", str(ranks))
    changed = arm.model_copy(update={"topology": topology, "services": services, "args": args})
    return plan.model_copy(update={"arms": (plan.arms[0], changed)})


def rendered(plan: Plan, role: Role, accel: str = "cpu", folder: Path = ROOT) -> dict[str, Any]:
    shares = tuple(Share(cpus=str(i), passed_as=f"nvidia.com/gpu={i}") for i in range(2))
    return render(
        plan.topology_of(role),
        plan.arm(role),
        Runtime("sha256:server", "/python", "10001:0"),
        Runtime("sha256:client", "/python", "10001:0"),
        Placement(accel, shares, "3", folder, folder, folder, "10001:0"),
        Resources(),
        project="kit-test",
        run_id="test",
    )


@pytest.mark.parametrize("name", sorted(TOPOLOGIES))
def test_a_run_starts_the_topology_s_services_and_nothing_else(name: str) -> None:
    ranks = 2 if name.startswith("tp") else 1
    plan = planned(name, ranks)
    document = rendered(plan, "candidate")
    services = document["services"]
    check_services(document, name)  # as a run does before it starts them
    topology = plan.topology_of("candidate")
    assert set(services) == {*topology.services, "client"}
    for each in services.values():
        assert not {"ports", "profiles", "depends_on"} & set(each)
        assert each["networks"] == {"inside": None}
        assert each["labels"] == {"kit.run": "test"}
        assert all(each.get(key) for key in HARDENED)


def test_legs_get_their_own_words_devices_and_side_channels() -> None:
    services = rendered(planned("pd"), "candidate")["services"]
    for place, name in enumerate(("producer", "consumer")):
        leg = services[name]
        word = leg["command"][leg["command"].index("--kv-transfer-config") + 1]
        assert f'"kv_role":"kv_{name}"' in word
        assert leg["environment"]["VLLM_NIXL_SIDE_CHANNEL_HOST"] == name
        assert leg["environment"]["UCX_TLS"] == "tcp,shm"
        assert leg["environment"]["VLLM_CPU_OMP_THREADS_BIND"] == leg["cpuset"] == str(place)
        assert "ipc" not in leg
    proxy = services["proxy"]
    assert proxy["entrypoint"] == ["/python", "-X", "utf8", "-m", "inside.proxy"]
    assert proxy["command"][-2:] == ["--deadline-s", "180"]
    assert proxy["image"] == services["client"]["image"]
    assert proxy["cpuset"] == "3"
    assert proxy["healthcheck"]["test"][1] == "/python"


def test_two_whole_servers_are_told_nothing_about_a_transfer() -> None:
    services = rendered(planned("pd"), "baseline")["services"]
    assert set(services) == {"replica-1", "replica-2", "baseline", "client"}
    for name in ("replica-1", "replica-2"):
        assert "--kv-transfer-config" not in services[name]["command"]
        assert "VLLM_NIXL_SIDE_CHANNEL_HOST" not in services[name]["environment"]
    assert services["baseline"]["command"].count("--replica") == 2


@pytest.mark.parametrize(
    ("name", "seen"),
    [("pd", [["nvidia.com/gpu=0"], ["nvidia.com/gpu=1"]]),
     ("pd-shared-ipc", [["nvidia.com/gpu=0", "nvidia.com/gpu=1"]] * 2)],
)  # fmt: skip
def test_isolation_decides_which_devices_a_leg_sees(name: str, seen: list[list[str]]) -> None:
    services = rendered(planned(name), "candidate", "cuda-cdi")["services"]
    legs = [services[leg] for leg in ("producer", "consumer")]
    found = [leg["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"] for leg in legs]
    assert found == seen
    assert [leg.get("ipc") for leg in legs] == (
        ["shareable", "service:producer"] if name == "pd-shared-ipc" else [None, None]
    )


def test_a_split_server_gets_all_devices_and_a_list_of_cpus_for_each_rank() -> None:
    on_cpu = rendered(planned("tp", 2), "candidate")["services"]["server"]
    assert on_cpu["environment"]["VLLM_CPU_OMP_THREADS_BIND"] == "0|1"
    assert on_cpu["cpuset"] == "0-1"
    on_gpu = rendered(planned("tp", 2), "candidate", "cuda-cdi")["services"]["server"]
    (reservation,) = on_gpu["deploy"]["resources"]["reservations"]["devices"]
    assert reservation["device_ids"] == ["nvidia.com/gpu=0", "nvidia.com/gpu=1"]


@pytest.mark.parametrize("name", FILES)
def test_the_stacks_as_they_are_do_not_clash(name: str) -> None:
    """Raises what `kit check` would."""
    own = {k: v for k, v in os.environ.items() if not k.startswith(("KIT_", "COMPOSE_"))}
    words = ["compose", "-f", f"compose/{name}.yml", "--env-file", os.devnull]
    for isolation in ("strict", "shared-ipc"):
        done = subprocess.run(
            [engine.cli_program(), *words, "config", "--format", "json"],
            cwd=ROOT,
            env={**own, "KIT_ACCEL": "cuda-cdi", "KIT_ISOLATION": isolation},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        check_services(json.loads(done.stdout), name)


def test_check_names_the_holder_of_a_port_before_anything_starts() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        done = subprocess.run(
            [sys.executable, "-m", "kit", "check", "pd"],
            cwd=ROOT,
            env={**os.environ, "KIT_PORT": str(port)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == PortTaken.exit_code, done.stderr
    assert f"port {port} of `proxy` is taken by" in done.stderr
    assert f"({os.getpid()})" in done.stderr


def test_check_refuses_two_services_on_one_port() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kit", "check", "pd", "--profile", "debug"],
        cwd=ROOT,
        env={**os.environ, "KIT_PRODUCER_PORT": "18123", "KIT_CONSUMER_PORT": "18123"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == ServicesClash.exit_code, done.stderr
    assert "`consumer-port` and `producer-port`" in done.stderr
