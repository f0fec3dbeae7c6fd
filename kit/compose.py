"""Renders a topology for one replicate and starts and stops it. The only caller of compose.

`docker compose config` renders the checked-in file in an empty environment; the kit then sets
what the plan says on the parsed result and starts exactly that. Nothing in the caller's
surroundings (compose/.env, variables, profiles) can change it.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kit import engine, process
from kit.errors import BadFile, DeviceMissing, EngineLost, KitError, PortTaken
from kit.inside.probe_gpu import format_cpus
from kit.owner import LABEL
from kit.paths import ROOT
from kit.plan import PlannedArm, PlannedEvaluation, PlannedService, Resources
from kit.platform import Share, parse_cpus
from kit.scores import FOLDER
from kit.surroundings import plain_docker_config
from kit.tasks import MODEL, RESULTS, SEEN_AS, TASKS
from kit.topology import Topology

MOUNT = "/kit"  # kit/inside is mounted below it
SAMPLER = "/opt/kit-sampler"  # a program, in the sampler's container alone
EVALUATION = "evaluation"
"""The service that runs lm-eval, once, when the load is over."""
HIDDEN = ("KIT_", "COMPOSE_")  # what compose would take from the caller's surroundings


@dataclass(frozen=True)
class Stack:
    """One rendered topology: its project name, its file, and the path the client writes to."""

    project: str
    file: Path
    topology: Topology


@dataclass(frozen=True)
class Runtime:
    """How an image is used, from its record: the engine's id of it, interpreter, user.

    `python_path` is what the kit's own modules need inside: the mount, then the image's own path.
    """

    engine_id: str
    interpreter: str
    user: str
    python_path: str = MOUNT


def runtime_of(engine_id: str, *, interpreter: str, user: str) -> Runtime:
    """Return how an image on this engine is used; an image's own PYTHONPATH is kept after ours."""
    client = engine.connect()
    try:
        config: Mapping[str, Any] = client.images.get(engine_id).attrs["Config"]
    finally:
        client.close()
    own = [
        folder
        for word in config.get("Env") or []
        if word.startswith("PYTHONPATH=")
        for folder in word.removeprefix("PYTHONPATH=").split(":")
        if folder
    ]
    return Runtime(engine_id, interpreter, user, ":".join([MOUNT, *own]))


@dataclass(frozen=True)
class Placement:
    """What depends on this machine: accelerator file, devices, CPU sets, folders, client user.

    `shares` are the devices of all engines together, in the engines' order. `sampler` is the
    program that samples stacks, where a phase is sampled; it runs as `sampler_user`, the engine's
    own user where that is empty.
    """

    accel: str
    shares: tuple[Share, ...]
    client_cpuset: str
    model: Path
    workload: Path
    out: Path
    client_user: str
    sampler: Path | None = None
    sampler_user: str = ""
    sampler_words: tuple[str, ...] = ()


def _compose(
    *words: str, timeout_s: float, variables: Mapping[str, str] | None = None
) -> process.Completed:
    """Run compose with these variables and none of the caller's that it would listen to."""
    kept = {k: v for k, v in engine.cli_env().items() if not k.startswith(HIDDEN)}
    kept["DOCKER_CONFIG"] = str(plain_docker_config(engine.config_dir()))
    try:
        return process.run(
            [engine.cli_program(), "compose", "--env-file", os.devnull, *words],
            env={**kept, "COMPOSE_DISABLE_ENV_FILE": "1", **(variables or {})},
            timeout_s=timeout_s,
        )
    except subprocess.TimeoutExpired:
        raise engine.lost(f"compose had no answer after {timeout_s:.0f} s") from None


def render(
    topology: Topology,
    arm: PlannedArm,
    server: Runtime,
    client: Runtime,
    place: Placement,
    resources: Resources,
    *,
    project: str,
    run_id: str,
) -> dict[str, Any]:
    """Return the compose document of one replicate, every value set and nothing published."""
    variables = {"KIT_ACCEL": place.accel, "KIT_MODEL": str(place.model), **topology.settings}
    words = ["--file", str(topology.file), "--profile", "*", "--project-name", project]
    answer = _compose(*words, "config", "--format", "json", variables=variables, timeout_s=60)
    if not answer.ok:
        raise BadFile(
            f"{topology.file.name}: compose cannot read it: {_last_line(answer.stderr)}",
            hint="correct the file in compose/",
        )
    document: dict[str, Any] = json.loads(answer.stdout)
    labels = {LABEL: run_id}
    wanted = (*topology.services, "client")
    document["services"] = {name: document["services"][name] for name in wanted}
    for name, service in document["services"].items():
        for key in ("ports", "profiles", "depends_on"):  # the kit starts them one after the other
            service.pop(key, None)
        service["networks"] = {"inside": None}
        service["labels"] = labels
        if name in topology.engines:
            _set_engine(service, arm, arm.service(name), server, place, resources)
            first = topology.engines.index(name) * arm.ranks
            _set_devices(service, topology, place, slice(first, first + arm.ranks))
        elif name == topology.proxy:
            _set_proxy(service, arm.service(name), client, place)
        else:
            _set_client(service, client, place, resources)
    if place.sampler is not None:
        for name in topology.engines:
            document["services"][sampler_of(name)] = _sampler(
                document["services"], name, client, place
            )
    document["networks"] = {"inside": {**document["networks"]["inside"], "labels": labels}}
    return document


def add_evaluation(
    document: dict[str, Any], planned: PlannedEvaluation, runtime: Runtime, place: Placement
) -> None:
    """Add the service that runs lm-eval beside the client: same user, network and limits.

    It sees tasks and model read-only and writes only below its own folder of the replicate.
    """
    service = copy.deepcopy(document["services"]["client"])
    service["image"] = runtime.engine_id
    words = (runtime.interpreter, "-m", "lm_eval", *planned.args)
    service["entrypoint"] = [escape(word) for word in words]
    service["command"] = []
    service["restart"] = "no"
    service["environment"] = {
        "LC_ALL": "C.UTF-8",
        "TZ": "UTC",
        "HOME": "/tmp/home",  # noqa: S108 - a tmpfs of the container
        "USER": "kit",
        "HF_HOME": "/tmp/hf",  # noqa: S108
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    service["volumes"] = [
        {"type": "bind", "source": str(source), "target": target, "read_only": read_only}
        for source, target, read_only in (
            (TASKS, SEEN_AS, True),
            (place.model, MODEL, True),
            (place.out / FOLDER, RESULTS, False),
        )
    ]
    document["services"][EVALUATION] = service


def _set_engine(
    service: dict[str, Any],
    arm: PlannedArm,
    own: PlannedService,
    runtime: Runtime,
    place: Placement,
    resources: Resources,
) -> None:
    service["image"] = runtime.engine_id
    service["entrypoint"] = [escape(word) for word in arm.entrypoint]
    service["command"] = [escape(word) for word in (*arm.args, *own.args)]
    service["init"] = "tini" not in arm.entrypoint[0]
    service["user"] = runtime.user
    service["environment"].update({k: escape(v) for k, v in {**arm.env, **own.env}.items()})
    service["healthcheck"]["test"][1] = runtime.interpreter
    service["mem_limit"] = str(resources.server_memory_bytes)
    service["shm_size"] = str(resources.shm_bytes)
    service["pids_limit"] = resources.pids
    service["stop_grace_period"] = f"{resources.stop_grace_s}s"


def _set_devices(
    service: dict[str, Any], topology: Topology, place: Placement, mine: slice
) -> None:
    """Give an engine its devices: CPUs, one list a rank, or accelerators by name."""
    shares = place.shares[mine]
    cpus = {cpu for share in shares for cpu in parse_cpus(share.cpus)}
    service["cpuset"] = format_cpus(sorted(cpus))
    if place.accel == "cpu":
        lists = "|".join(share.cpus for share in shares)
        service["environment"]["VLLM_CPU_OMP_THREADS_BIND"] = lists
        return
    seen = place.shares if topology.devices_are_shared else shares
    (reservation,) = service["deploy"]["resources"]["reservations"]["devices"]
    names = list(dict.fromkeys(str(share.passed_as) for share in seen))
    reservation["device_ids"] = names
    if topology.devices_are_shared and len(names) > 1:  # of one, there is none to choose
        numbers = [str(names.index(str(share.passed_as))) for share in shares]
        service["environment"]["CUDA_VISIBLE_DEVICES"] = ",".join(numbers)


def _set_proxy(
    service: dict[str, Any], own: PlannedService, runtime: Runtime, place: Placement
) -> None:
    """Run the kit's proxy in the client's image, beside the client: it is no engine's work."""
    service["image"] = runtime.engine_id
    service["entrypoint"][0] = runtime.interpreter
    service["command"] = [escape(word) for word in own.args]
    service["environment"]["PYTHONPATH"] = escape(runtime.python_path)
    service["healthcheck"]["test"][1] = runtime.interpreter
    service["user"] = runtime.user
    service["cpuset"] = place.client_cpuset


def _set_client(
    service: dict[str, Any], runtime: Runtime, place: Placement, resources: Resources
) -> None:
    service["image"] = runtime.engine_id
    service["environment"]["PYTHONPATH"] = escape(runtime.python_path)
    service["user"] = place.client_user
    service["cpuset"] = place.client_cpuset
    service["mem_limit"] = str(resources.client_memory_bytes)
    service["volumes"] += [
        {"type": "bind", "source": str(place.workload), "target": "/workload", "read_only": True},
        {"type": "bind", "source": str(place.out), "target": "/out"},
    ]


def sampler_of(engine_service: str) -> str:
    """Return the name of the service that samples an engine's stacks."""
    return f"sampler-{engine_service}"


def _sampler(
    services: Mapping[str, Any], engine_service: str, runtime: Runtime, place: Placement
) -> dict[str, Any]:
    """Return the container that samples an engine: the client's limits, and no network at all.

    It alone sees another container's processes, and alone has a capability. It reads nothing but
    its own two mounts, and what it writes stays in its memory until it is asked for.
    """
    client = services["client"]
    kept = ("image", "read_only", "cap_drop", "security_opt", "pids_limit", "mem_limit", "labels")
    return {
        **{key: client[key] for key in kept if key in client},
        "pull_policy": "never",
        "entrypoint": [runtime.interpreter, "-X", "utf8", "-m", "inside.sample_stacks"],
        "command": list(place.sampler_words),
        "user": place.sampler_user or services[engine_service]["user"],
        "cap_add": ["SYS_PTRACE"],
        "pid": f"service:{engine_service}",
        "network_mode": "none",
        "cpuset": place.client_cpuset,
        "stop_grace_period": "2s",
        "tmpfs": ["/tmp:rw,noexec,nosuid,nodev,mode=1777,size=256m"],  # noqa: S108 - in it
        "environment": {
            "LC_ALL": "C.UTF-8",
            "PYTHONPATH": escape(runtime.python_path),
            "PYTHONDONTWRITEBYTECODE": "1",
        },
        "volumes": [
            next(v for v in client["volumes"] if v["target"] == f"{MOUNT}/inside"),
            {
                "type": "bind",
                "source": str(place.sampler),
                "target": SAMPLER,
                "read_only": True,
                "bind": {"create_host_path": False},
            },
        ],
    }


def escape(word: str) -> str:
    """Write a value so that compose's interpolation gives back exactly that value."""
    return word.replace("$", "$$")


def without_paths(document: Mapping[str, Any], place: Placement) -> str:
    """Return the document as JSON for the record, this machine's folders replaced by their role."""
    text = json.dumps(document, indent=2, ensure_ascii=False, sort_keys=True) + "\n"
    roles = {
        str(place.out): "<out>",
        str(place.workload): "<workload>",
        str(place.model): "<model>",
        str(ROOT): "<kit>",
    }
    if place.sampler is not None:
        roles[str(place.sampler)] = "<sampler>"
    for path in sorted(roles, key=len, reverse=True):
        text = text.replace(path, roles[path])
    return text


def up(stack: Stack, services: Sequence[str]) -> None:
    """Create and start services of the stack; return as soon as their containers were started."""
    answer = _compose(
        *_words(stack),
        *("up", "--detach", "--no-build", "--quiet-pull", "--no-color", *services),
        timeout_s=120,
    )
    if not answer.ok:
        raise _start_error(answer.stderr, answer.tail)


def down(stack: Stack, *, grace_s: int) -> None:
    """Stop and remove the stack's containers and networks."""
    answer = _compose(
        *_words(stack),
        *("down", "--volumes", "--remove-orphans", "--timeout", str(grace_s)),
        timeout_s=grace_s + 60,
    )
    if not answer.ok:
        raise _lost(answer.stderr) or KitError(
            "compose could not stop the containers", detail=answer.tail
        )


def _words(stack: Stack) -> list[str]:
    return ["--file", str(stack.file), "--project-name", stack.project]


def _start_error(text: str, tail: str) -> KitError:
    """Tell apart why the engine would not start the containers, in its own words."""
    line = _last_line(text)
    if "port is already allocated" in text or "address already in use" in text:
        return PortTaken(f"a port is taken: {line}", hint="stop its holder, or set KIT_PORT")
    if "could not select device driver" in text or "CDI device injection failed" in text:
        return DeviceMissing(
            f"the engine cannot pass the device through: {line}",
            hint="install the NVIDIA container toolkit, or run with --platform cpu",
        )
    if "unknown or invalid runtime name" in text:
        return DeviceMissing(f"the engine lacks a runtime: {line}", hint="see README, GPUs")
    if engine.NO_SPACE in text:
        return engine.disk_full(line)
    return _lost(text) or KitError(f"compose could not start the containers: {line}", detail=tail)


def _lost(text: str) -> EngineLost | None:
    """Return `EngineLost` where these words of compose mean that no engine answers."""
    told = ("Cannot connect to the Docker daemon", "error during connect", "unexpected EOF")
    return engine.lost(_last_line(text)) if any(words in text for words in told) else None


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no message"
