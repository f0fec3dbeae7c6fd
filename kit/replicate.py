"""One replicate: fresh containers up, facts, load, facts again, logs, down. Effects only.

Everything lands in the replicate's folder as it happens; what it means is computed later from
these files alone.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import docker
import docker.errors

from kit import clash, compose, engine, evaluate, facts, owner, watch
from kit.compose import SAMPLER, Placement, Runtime, Stack, sampler_of
from kit.errors import EngineLost, KitError, ProbeFailed
from kit.fact import ContainerPlace, Fact
from kit.facts.vllm import shown_config
from kit.inbox import ClientBox
from kit.manifest import RanImage, Replicate, now_utc
from kit.plan import Plan, PlannedPhase, Slot
from kit.platform import Share, parse_cpus
from kit.profiler import profiled
from kit.ready import check_alive, check_serving, service_container, wait_healthy
from kit.sampler import command, sampled, sampler_user
from kit.scores import ENDED_FILE, FOLDER
from kit.secret import masked
from kit.store import disk_error, give_to_caller, write_json, write_text
from kit.telemetry_gpu import EVERY_S, Devices
from kit.topology import PORT, Topology
from kit.value import load_json

Say = Callable[[str], None]

AFTERWARDS = ("transfer",)  # groups of facts that only a served load can tell


@dataclass(frozen=True)
class Bench:
    """What all replicates of a run share."""

    client: docker.DockerClient
    plan: Plan
    run_id: str
    run: Path
    runtimes: Mapping[str, Runtime]  # by image id of the plan
    images: Mapping[str, RanImage]
    model: Path
    accel: str
    shares: tuple[Share, ...]
    server_cpuset: str
    client_cpuset: str
    say: Say
    device_indices: tuple[int, ...] = ()
    sampler: Path | None = None
    devices: Devices | None = None  # open while a replicate runs

    def folder(self, slot: Slot) -> str:
        return f"replicates/{slot.replicate:02d}-pair{slot.pair}-{slot.role}"


def measure_slot(bench: Bench, slot: Slot) -> Replicate:
    """Measure one arm on fresh containers; always leaves none of them behind."""
    folder = bench.folder(slot)
    started, begin = now_utc(), time.monotonic()
    out = bench.run / folder
    log = watch.EventLog(bench.run_id, out / "events.jsonl")
    try:
        _make_out(out, evaluated=bench.plan.evaluation is not None)
        stack = _render(bench, slot, out)
        with log, _watched(bench, out) as watching, _stopped_after(bench, stack, out):
            found = _measure(watching, slot, stack, out)
    finally:
        give_to_caller(out)
    wall_s = time.monotonic() - begin
    load_s = _load_s(out, bench.plan.phases)
    return Replicate(
        replicate=slot.replicate,
        pair=slot.pair,
        role=slot.role,
        folder=folder,
        started_utc=started,
        status="complete",
        wall_s=round(wall_s, 3),
        accounted_s=watch.accounted_s(log.lines, stack.topology.services, load_s),
        facts=tuple(found),
    )


def _make_out(out: Path, *, evaluated: bool) -> None:
    try:
        out.mkdir(parents=True)
        if os.geteuid() == 0:
            os.chown(out, 10001, 0)  # the client's user; given back to the caller afterwards
        if evaluated:
            evaluate.make_folder(out)
    except OSError as error:
        raise disk_error(error, out) from None


def _render(bench: Bench, slot: Slot, out: Path) -> Stack:
    arm, topology = bench.plan.arm(slot.role), bench.plan.topology_of(slot.role)
    root = os.geteuid() == 0
    place = Placement(
        accel=bench.accel,
        shares=bench.shares,
        client_cpuset=bench.client_cpuset,
        model=bench.model,
        workload=bench.run / "workload",
        out=out,
        client_user="10001:0" if root else f"{os.geteuid()}:{os.getegid()}",
        sampler=bench.sampler,
        sampler_user=sampler_user(),
        sampler_words=tuple(command(SAMPLER, max(p.sample_hz for p in bench.plan.phases))),
    )
    project = f"kit-{bench.run_id}-{slot.replicate:02d}"
    document = compose.render(
        topology,
        arm,
        bench.runtimes[arm.image.id],
        bench.runtimes[bench.plan.client_image.id],
        place,
        bench.plan.resources,
        project=project,
        run_id=bench.run_id,
    )
    if bench.plan.evaluation is not None:
        tool = bench.runtimes[bench.plan.evaluation.image.id]
        compose.add_evaluation(document, bench.plan.evaluation, tool, place)
    clash.check_services(document, topology.file.name, shared_device=bench.plan.shared_device)
    write_text(out / "compose.json", compose.without_paths(document, place))
    file = owner.scratch(bench.run_id) / f"{slot.replicate:02d}.json"
    write_json(file, document)
    return Stack(project=project, file=file, topology=topology)


@contextlib.contextmanager
def _stopped_after(bench: Bench, stack: Stack, out: Path) -> Iterator[None]:
    """Afterwards save the logs, stop the stack, and make sure that nothing of it is left.

    What ended the block is what is told, not what cleaning up after it ran into; except that the
    engine was away, which is then why it ended, or that something may be left.
    """
    try:
        yield
    except BaseException as error:
        with owner.shielded(bench.say):
            away = _clean_up(bench, stack, out, after=error)
        if away and isinstance(error, KitError):
            raise engine.lost(error.message) from error
        raise
    with owner.shielded(bench.say, then_stop=True):
        _clean_up(bench, stack, out)


def _clean_up(bench: Bench, stack: Stack, out: Path, *, after: BaseException | None = None) -> bool:
    """Save the logs and remove the stack; return whether the engine had to be waited for."""
    try:
        away = engine.wait_until_back(bench.client, bench.say)
        with engine.answering(), contextlib.ExitStack() as last:
            # each of these happens whatever the others run into, in reverse order
            last.callback(owner.remove_objects, bench.client, bench.run_id)
            last.callback(compose.down, stack, grace_s=bench.plan.resources.stop_grace_s)
            last.callback(_save_logs, bench, stack, out)
    except KitError as error:
        if after is None or isinstance(error, EngineLost):
            raise
        bench.say(f"  cleaning up: {error.message}")
        return False
    return away


@contextlib.contextmanager
def _watched(bench: Bench, out: Path) -> Iterator[Bench]:
    """Open the run's devices, and record what was on them before the stack and after it."""
    if not bench.device_indices:
        yield bench
        return
    with (
        Devices(bench.device_indices) as devices,
        devices.given_back(lambda seen: write_json(out / "devices.json", seen)),
    ):
        yield replace(bench, devices=devices)


def _save_logs(bench: Bench, stack: Stack, out: Path) -> None:
    for service in (*stack.topology.services, compose.EVALUATION):
        for container in bench.client.containers.list(
            all=True,
            filters={
                "label": [
                    f"com.docker.compose.project={stack.project}",
                    f"com.docker.compose.service={service}",
                ]
            },
        ):
            with contextlib.suppress(docker.errors.APIError):
                text = container.logs(timestamps=True).decode("utf-8", "replace")
                write_text(out / "logs" / f"{service}.log", masked(text))


def _start(bench: Bench, stack: Stack) -> dict[str, Any]:
    """Start the services one after the other, each when the one before it is healthy.

    Two servers that start at the same moment on one device spoil each other's memory profile.
    """
    found: dict[str, Any] = {}
    for service in stack.topology.services:
        compose.up(stack, [service] if found else [service, "client"])
        found[service] = service_container(bench.client, stack.project, service)
        timeout_s = bench.plan.resources.ready_timeout_s
        wait_healthy(found[service], service, timeout_s=timeout_s, say=bench.say)
        for before, container in found.items():
            check_alive(container, before)
    return found


def _measure(bench: Bench, slot: Slot, stack: Stack, out: Path) -> list[Fact]:
    plan, topology = bench.plan, stack.topology
    servers = _start(bench, stack)
    container = service_container(bench.client, stack.project, "client")
    runtime = bench.runtimes[plan.client_image.id]
    box = ClientBox(bench.client, container, runtime.interpreter, runtime.python_path)
    infos = {service: _server_info(box, service) for service in topology.engines}
    for service, info in infos.items():
        shown = {part: shown_config(info, part) for part in ("vllm_config", "vllm_env")}
        write_json(out / of_leg("server_info.json", topology, service), shown)
    before = [name for name in facts.groups() if name not in AFTERWARDS]
    found = _facts(bench, slot, {**servers, "client": container}, infos, before)
    write_json(out / "facts.json", [f.model_dump(mode="json") for f in found])
    for phase in plan.phases:
        with (
            _profiled(bench, slot, box, servers, infos, phase, out),
            _sampled(bench, stack, phase, out),
        ):
            _run_phase(bench, box, servers, topology, phase, out)
    if plan.evaluation is not None:
        check = partial(_check_all, servers)
        evaluate.evaluate(bench.client, stack, plan.evaluation, out, bench.say, check)
    found += _facts(bench, slot, {name: servers[name] for name in infos}, infos, AFTERWARDS)
    write_json(out / "facts.json", [f.model_dump(mode="json") for f in found])
    return found


def of_leg(name: str, topology: Topology, service: str) -> str:
    """Return a file's name with its engine in it, where the topology has several engines."""
    stem, _, suffix = name.partition(".")
    return f"{stem}-{service}.{suffix}" if len(topology.engines) > 1 else name


def _server_info(box: ClientBox, service: str) -> dict[str, Any]:
    """Return an engine's resolved configuration, as it tells it itself."""
    answer = box.ask("GET", f"http://{service}:{PORT}/server_info?config_format=json")
    if answer.get("status") != 200 or not isinstance(answer.get("body"), dict):
        raise ProbeFailed(
            f"`{service}` answered {answer.get('status')} to /server_info",
            hint="the arms cannot be compared without the resolved configuration",
        )
    return dict(answer["body"])


def _facts(
    bench: Bench,
    slot: Slot,
    containers: Mapping[str, Any],
    infos: Mapping[str, dict[str, Any]],
    of_engines: Sequence[str],
) -> list[Fact]:
    """Collect groups of facts of the engines, and of other services what a container is."""
    found: list[Fact] = []
    for service, container in containers.items():
        place = _place(bench, slot, service, container, infos)
        groups = of_engines if service in infos else ["container"]
        found += facts.collect(place, groups)
    return found


def _place(
    bench: Bench, slot: Slot, service: str, container: Any, infos: Mapping[str, dict[str, Any]]
) -> ContainerPlace:
    """Return where to look at a service; `infos` are by the engines among them."""
    plan = bench.plan
    image = plan.arm(slot.role).image if service in infos else plan.client_image
    runtime = bench.runtimes[image.id]
    return ContainerPlace(
        client=bench.client,
        container=container,
        service=service,
        interpreter=runtime.interpreter,
        python_path=runtime.python_path,
        image=bench.images[image.id].model_dump(mode="json"),
        server_info=infos.get(service),
    )


@contextlib.contextmanager
def _profiled(
    bench: Bench,
    slot: Slot,
    box: ClientBox,
    servers: Mapping[str, Any],
    infos: Mapping[str, dict[str, Any]],
    phase: PlannedPhase,
    out: Path,
) -> Iterator[None]:
    """Run the block under the engines' profilers where the phase asks for it."""
    if not phase.profile:
        yield
        return
    places = {name: _place(bench, slot, name, servers[name], infos) for name in infos}
    timeout_s = bench.plan.resources.request_deadline_s
    with profiled(box, places, out / phase.name, timeout_s=timeout_s):
        yield


@contextlib.contextmanager
def _sampled(bench: Bench, stack: Stack, phase: PlannedPhase, out: Path) -> Iterator[None]:
    """Sample the engines' stacks during the block where the phase asks for it."""
    if not phase.sample_hz:
        yield
        return
    engines = stack.topology.engines
    runtime = bench.runtimes[bench.plan.client_image.id]

    def start() -> dict[str, ContainerPlace]:
        compose.up(stack, [sampler_of(name) for name in engines])
        return {
            name: ContainerPlace(
                client=bench.client,
                container=service_container(bench.client, stack.project, sampler_of(name)),
                service=sampler_of(name),
                interpreter=runtime.interpreter,
                python_path=runtime.python_path,
            )
            for name in engines
        }

    with sampled(start, tuple(engines), out / phase.name, rate_hz=phase.sample_hz):
        yield


def _run_phase(
    bench: Bench,
    box: ClientBox,
    servers: Mapping[str, Any],
    topology: Topology,
    phase: PlannedPhase,
    out: Path,
) -> None:
    folder = out / phase.name
    folder.mkdir()
    if os.geteuid() == 0:
        os.chown(folder, 10001, 0)
    spec = {
        "version": 1,
        "host": topology.entry,
        "port": PORT,
        "requests": f"/workload/{phase.name}.jsonl",
        "out": f"/out/{phase.name}",
        "scrape_every_s": phase.scrape_every_s,
        "metrics_path": "/metrics",
        "legs": {} if topology.proxy is None else {s: f"{s}:{PORT}" for s in topology.engines},
        "deadline_s": bench.plan.resources.request_deadline_s,
        "stamps": "auto",
        "concurrency": None,
        "tool": list(phase.tool),
    }
    write_json(folder / "window.json", spec)
    (folder / "window.json").chmod(0o644)

    check = partial(_check_all, servers)
    with _telemetry(bench, servers, out) if phase.name == "measure" else contextlib.nullcontext():
        module = "inside.tool_window" if phase.tool else "inside.window"
        told = progress(bench.say, phase.name, check)
        box.window(f"/out/{phase.name}/window.json", told, module=module)
    check()
    if load_json(folder / "load.json")["failed"]:
        for service in topology.engines:
            check_serving(servers[service], service, partial(_health, box, service))


def _check_all(servers: Mapping[str, Any]) -> None:
    for service, server in servers.items():
        check_alive(server, service)


def _health(box: ClientBox, service: str) -> int | None:
    """Return the status of an engine's /health, None where it gives no answer."""
    try:
        answer = box.ask("GET", f"http://{service}:{PORT}/health")
    except ProbeFailed:
        return None
    return int(answer["status"])


def progress(
    say: Say, phase: str, check: Callable[[], None]
) -> Callable[[Mapping[str, Any]], None]:
    """Return what hears a window's events: it tells how far it is every 10 s.

    When more requests have failed it checks the services, so that a window does not wait for the
    deadline of each request to a server that is gone. While all is well it asks the engine nothing.
    """
    told, failed = time.monotonic(), 0

    def tell(event: Mapping[str, Any]) -> None:
        nonlocal told, failed
        if event.get("failed", 0) > failed:
            failed = event["failed"]
            check()
        if event.get("event") == "progress" and time.monotonic() - told >= 10:
            told = time.monotonic()
            say(f"  {phase}: {event.get('done')} of {event.get('of')} requests answered")

    return tell


def _telemetry(bench: Bench, servers: Mapping[str, Any], out: Path) -> watch.Telemetry:
    """Watch the server's CPUs; the client's time counts as ours where it shares them."""
    cpus = parse_cpus(bench.server_cpuset)
    ours = [c.id for c in servers.values()]
    if set(parse_cpus(bench.client_cpuset)) & set(cpus):
        ours += [
            c.id
            for c in bench.client.containers.list(
                filters={"label": f"{owner.LABEL}={bench.run_id}"}
            )
            if c.id not in ours
        ]
    path = out / "telemetry.jsonl"
    if bench.devices is None:
        return watch.Telemetry(ours, cpus, path)
    return watch.Telemetry(ours, cpus, path, every_s=EVERY_S, devices=bench.devices.sample)


def _load_s(out: Path, phases: tuple[PlannedPhase, ...]) -> float:
    """Return the sum over the windows of first send to last byte, and how long lm-eval took."""
    ended = out / FOLDER / ENDED_FILE
    total = float(load_json(ended)["wall_s"]) if ended.is_file() else 0.0
    for phase in phases:
        first, last = math.inf, -math.inf
        with (out / phase.name / "samples.jsonl").open("rb") as lines:
            for sample in map(json.loads, lines):
                if sample.get("sent_s") is not None:
                    first = min(first, sample["sent_s"])
                if sample.get("done_s") is not None:
                    last = max(last, sample["done_s"])
        total += last - first if math.isfinite(last - first) else 0.0
    return total
