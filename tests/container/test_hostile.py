"""A run in a hostile world, with the stub in vLLM's place: what ends, and what is left of it.

After every fault the manifest says what happened, every sample that was there can be read, the run
has left nothing on the engine, and what belongs to others is as it was. Faults of the engine itself
are in test_hostile_engine.py; with `--write-matrix` the counts go into docs/hostile.md.
"""

from __future__ import annotations

import gzip
import json
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import docker
import pytest
import stepping_clock
from commands import (
    CACHED,
    checkout,
    only_manifest,
    run_kit,
    service_of,
    start_kit,
    wait_for,
)
from matrix import Matrix, Trial, asked_of, samples_in
from small_disk import fill, needs_root, read_only, small_disk

from kit import engine
from kit.errors import ClientFailed, DiskFull, KitError, PortTaken, RunFolderLost, ServerLost
from kit.measure import max_itl_s
from kit.paths import COMPOSE

RUN = ("run", "exp1_prefix_cache", "--platform", "cpu", "--json", "--quick")
UNDER_LOAD = "00-*/measure/window.json"
DONE = (0, 4)  # 4: the machine's other load made the run invalid, which is no fault of the kit
WHOLE_RUN_S = 25.0  # about what a pair takes; a kill may also come before it begins or after it
TRIALS = 100
SHORT = 2

Begin = Callable[[str], Trial]
StubFile = Callable[..., str]


def start(out: Path, stub: str, **environment: str) -> subprocess.Popen[str]:
    return start_kit(*RUN, "--out", str(out), "--stub", stub, **environment)


def finish(child: subprocess.Popen[str], timeout_s: float = 200) -> tuple[str, str]:
    """Return what a run printed; it never ends in a traceback."""
    try:
        stdout, stderr = child.communicate(timeout=timeout_s)
    except BaseException:
        child.kill()
        child.communicate()
        raise
    assert "Traceback" not in stderr, stderr
    return stdout, stderr


def under_slow_load(out: Path, stub_file: StubFile) -> subprocess.Popen[str]:
    """Start a run whose answers take seconds, and return in the middle of its first load."""
    child = start(out, stub_file(**{**CACHED, "itl_s": 0.1}))
    wait_for(out, UNDER_LOAD, child=child)
    time.sleep(2)
    return child


# -- the kit itself is ended ---------------------------------------------------------------------


def ended(trial: Trial, child: subprocess.Popen[str], signum: signal.Signals) -> str:
    """Check what a run left that was sent a signal, or was over before; return its stderr."""
    _, stderr = finish(child)
    if signum == signal.SIGTERM and child.returncode not in DONE:
        assert child.returncode in (128 + signum, -signum), stderr
        if list(trial.runs.rglob("manifest.json")):
            manifest, _ = only_manifest(trial.runs)  # before anybody sweeps
            # nobody answers a signal as the interpreter ends; a verdict that is written stays
            over = child.returncode < 0 or manifest.verdict is not None
            assert manifest.status == ("complete" if over else "interrupted")
    trial.sweep()
    return stderr


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "number",
    [pytest.param(n, marks=[] if n < SHORT else [pytest.mark.full]) for n in range(TRIALS)],
)
def test_a_run_ended_at_any_moment_tells_the_truth_and_goes_on(
    trial: Begin, stub_file: StubFile, number: int
) -> None:
    draw = random.Random(f"kill {number}")
    signum = draw.choice([signal.SIGKILL, signal.SIGTERM])
    one = trial(f"{signum.name} at a random moment")
    child = start(one.runs, stub_file(**CACHED))
    try:
        child.wait(draw.uniform(0.3, WHOLE_RUN_S))
    except subprocess.TimeoutExpired:
        one.strike()
        child.send_signal(signum)
    ended(one, child, signum)
    at_fault = next(one.runs.rglob("manifest.json"), None)
    then = ""
    if at_fault is not None:
        manifest, run = only_manifest(one.runs)
        if manifest.status == "interrupted" and manifest.replicates:
            then = ", then resumed to its end"
    manifest, run = one.close("interrupted", "complete", then=then)  # type: ignore[assignment]
    if then:
        ran = run_kit("resume", str(run), "--json")
        assert ran.code in DONE, ran.stderr
        assert only_manifest(one.runs)[0].status == "complete"


BOUNDARIES = {
    "the run has a folder": "manifest.json",
    "the plan is written": "plan.json",
    "the machine is looked at": "facts.json",
    "a replicate is rendered": "00-*/compose.json",
    "its containers start": "00-*/events.jsonl",
    "its server is ready": "00-*/server_info.json",
    "its facts are written": "00-*/facts.json",
    "its warm-up begins": "00-*/warmup/window.json",
    "its load begins": UNDER_LOAD,
    "its load is over": "00-*/measure/load.json",
    "its logs are saved": "00-*/logs/server.log",
    "the next one is rendered": "01-*/compose.json",
    "the last load is over": "01-*/measure/load.json",
    "the first report is written": "report.en.md",
}
LAST = "the first report is written"


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("boundary", BOUNDARIES)
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM], ids=["KILL", "TERM"])
def test_a_run_ended_at_a_stage_s_end(
    trial: Begin, stub_file: StubFile, boundary: str, signum: signal.Signals
) -> None:
    one = trial(f"{signum.name} when {boundary}")
    child = start(one.runs, stub_file(**CACHED))
    wait_for(one.runs, BOUNDARIES[boundary], child=child)
    one.strike()
    child.send_signal(signum)
    ended(one, child, signum)
    if signum == signal.SIGTERM and boundary != LAST:  # nothing goes on after a signal
        assert child.returncode == 128 + signum
    one.close("interrupted", "complete")


# -- its containers are ------------------------------------------------------------------------


def exhaust(container: Any) -> None:
    """Take all the memory that a container may have: its largest process is killed for it."""
    container.update(mem_limit="160m")
    container.exec_run(["dd", "if=/dev/zero", "of=/tmp/filler", "bs=1M", "count=220"])


def kill(container: Any) -> None:
    container.kill()


def remove(container: Any) -> None:
    container.remove(force=True)


FAULTS: list[tuple[str, str, Callable[[Any], None], type[KitError], str]] = [
    ("server out of memory", "server", exhaust, ServerLost, "killed for memory"),
    ("client out of memory", "client", exhaust, ClientFailed, "for memory"),
    ("server killed", "server", kill, ServerLost, "died under load with exit code 137"),
    ("client killed", "client", kill, ClientFailed, "client container died with exit code 137"),
    ("server removed", "server", remove, ServerLost, "removed by somebody else"),
    ("client removed", "client", remove, ClientFailed, "removed by somebody else"),
]


@pytest.mark.parametrize(
    ("fault", "service", "do", "error", "says"),
    [
        pytest.param(*f, id=f[0], marks=[pytest.mark.full] if i else [])
        for i, f in enumerate(FAULTS)
    ],
)
def test_a_container_that_is_lost_is_named_with_the_reason(
    trial: Begin,
    stub_file: StubFile,
    client: docker.DockerClient,
    fault: str,
    service: str,
    do: Callable[[Any], None],
    error: type[KitError],
    says: str,
) -> None:
    one = trial(fault)
    child = under_slow_load(one.runs, stub_file)
    container = service_of(client, one.runs, service)
    one.strike()
    do(container)
    _, stderr = finish(child)
    assert child.returncode == error.exit_code, stderr
    assert says in stderr
    one.close("failed")


def test_a_server_that_stood_still_shows_it_in_the_samples(
    trial: Begin, stub_file: StubFile, client: docker.DockerClient
) -> None:
    one = trial("server paused for 3 s")
    child = under_slow_load(one.runs, stub_file)
    server = service_of(client, one.runs, "server")
    one.strike()
    server.pause()
    time.sleep(3)
    server.unpause()
    _, stderr = finish(child)
    assert child.returncode in DONE, stderr
    _, run = one.close("complete")
    assert 2.5 < longest_pause(run) < 5


def longest_pause(run: Path) -> float:
    """Return the longest wait between two chunks of an answer in the first load, in seconds."""
    samples = next(run.glob("replicates/00-*/measure/samples.jsonl"))
    return max(max_itl_s(sample) or 0.0 for sample in map(json.loads, samples.open()))


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_client_whose_network_is_cut_makes_the_run_invalid_or_shows_in_the_samples(
    trial: Begin, stub_file: StubFile, client: docker.DockerClient
) -> None:
    one = trial("client's network cut for 2 s")
    child = under_slow_load(one.runs, stub_file)
    load = service_of(client, one.runs, "client")
    names = [*load.attrs["NetworkSettings"]["Networks"]]
    one.strike()
    for name in names:
        client.networks.get(name).disconnect(load, force=True)
    time.sleep(2)
    for name in names:
        client.networks.get(name).connect(load)
    stdout, stderr = finish(child, 500)
    _, run = one.close("complete")
    if child.returncode == 4:
        assert json.loads(stdout)["verdict"]["word"] == "invalid"
    else:  # no request began meanwhile, and the streams were taken up again: nothing is lost
        assert child.returncode == 0, stderr
        assert longest_pause(run) > 1.5


@pytest.mark.full
def test_a_clock_that_steps_makes_the_run_invalid(
    trial: Begin, stub_file: StubFile, tmp_path: Path
) -> None:
    """In a checkout whose load is handed a stepping clock."""
    one = trial("wall clock steps by 2 s")
    root = checkout(tmp_path / "clone")
    source = Path(stepping_clock.__file__).read_text("utf-8")
    inside = root / "kit" / "inside"
    (inside / "planted.py").write_text(source.replace("kit.inside.clock", ".clock"), "utf-8")
    window = (inside / "window.py").read_text("utf-8")
    last = "    sys.exit(main(sys.argv[1:]))\n"
    planted = "    from .planted import SteppingClock\n" + last.replace(
        "[1:]", "[1:], SteppingClock(2.0, after_s=1.5)"
    )
    assert window.count(last) == 1
    (inside / "window.py").write_text(window.replace(last, planted), "utf-8")
    words = (*RUN, "--out", str(one.runs), "--stub", stub_file(**CACHED))
    ran = run_kit(*words, root=root)
    assert ran.code == 4, ran.stderr
    manifest, _ = one.close("complete")
    assert manifest is not None
    stepped = [g for g in manifest.guards if g.name == "clock" and not g.ok]
    assert "the clock stepped by 2000." in stepped[0].text
    assert all("0 answers run backwards" in g.text for g in stepped)


# -- its folder, its disk, its port are ---------------------------------------------------------


def test_a_run_folder_that_is_removed_ends_the_run(
    trial: Begin, stub_file: StubFile, client: docker.DockerClient
) -> None:
    one = trial("run folder removed")
    child = start(one.runs, stub_file(**CACHED))
    wait_for(one.runs, UNDER_LOAD, child=child)
    manifest, run = only_manifest(one.runs)
    while run.exists():  # the load writes into it meanwhile
        shutil.rmtree(run, ignore_errors=True)
    _, stderr = finish(child)
    assert child.returncode == RunFolderLost.exit_code, stderr
    labels = {"label": f"kit.run={manifest.run_id}"}
    assert client.containers.list(all=True, filters=labels) == []
    assert client.networks.list(filters=labels) == []
    one.close()


@needs_root
def test_a_run_folder_that_turns_read_only_ends_the_run(trial: Begin, stub_file: StubFile) -> None:
    one = trial("run folder turned read-only")
    child = start(one.runs, stub_file(**CACHED))
    wait_for(one.runs, UNDER_LOAD, child=child)
    _, run = only_manifest(one.runs)
    one.strike()
    with read_only(run):
        _, stderr = finish(child)
        assert child.returncode == RunFolderLost.exit_code, stderr
        assert "Read-only file system" in stderr
        assert "Read-only file system" in one.sweep().stderr  # another run is not kept from its own
    one.sweep()
    one.close("interrupted")


@needs_root
@pytest.mark.timeout(300)
def test_an_output_disk_that_fills_under_load_is_named(
    trial: Begin, stub_file: StubFile, tmp_path: Path
) -> None:
    one = trial("output disk full")
    with small_disk(tmp_path / "disk", 2100) as disk:
        one.runs = disk / "runs"
        child = under_slow_load(one.runs, stub_file)
        one.strike()
        fill(disk)
        _, stderr = finish(child)
        assert child.returncode == DiskFull.exit_code, stderr
        one.close("failed")


@pytest.fixture
def thief() -> Iterator[socket.socket]:
    """Hold a port of the loopback address that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as held:
        yield held


@pytest.mark.full
def test_a_port_that_was_stolen_is_named_and_a_run_needs_none(
    trial: Begin, stub_file: StubFile
) -> None:
    """Between `kit check`, which finds it free, and compose, which wants it; by hand."""
    one = trial("port stolen between check and bind")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    free = run_kit("check", "single", KIT_PORT=str(port))
    assert free.code == 0, free.stderr
    up = [engine.cli_program(), "compose", "-p", "kit-stolen", "-f", COMPOSE / "single.yml"]
    with socket.create_server(("127.0.0.1", port)):
        environment = {**engine.cli_env(), "KIT_PORT": str(port)}
        try:
            told = subprocess.run(
                [*up, "up", "--detach"],
                env=environment,
                capture_output=True,
                text=True,
                check=False,
            )
        finally:
            subprocess.run([*up, "down"], env=environment, capture_output=True, check=True)
        assert told.returncode != 0
        assert "address already in use" in told.stderr
        taken = run_kit("check", "single", KIT_PORT=str(port))
        assert taken.code == PortTaken.exit_code
        assert f"port {port} of `server` is taken by python" in taken.stderr
        ran = run_kit(
            *RUN, "--out", str(one.runs), "--stub", stub_file(**CACHED), KIT_PORT=str(port)
        )
        assert ran.code in DONE, ran.stderr
    one.close("complete")


# -- others run the kit, too ---------------------------------------------------------------------


@pytest.mark.timeout(300)
def test_two_runs_at_once_do_not_meet(trial: Begin, stub_file: StubFile) -> None:
    """From one clone, into folders of equal names: each ends whole, with its own samples."""
    side_by_side(trial, stub_file, "two runs at once", roots=None)


@pytest.mark.full
@pytest.mark.timeout(300)
def test_two_clones_of_one_name_do_not_meet(
    trial: Begin, stub_file: StubFile, tmp_path: Path
) -> None:
    roots = [checkout(tmp_path / which / "vllm-kit") for which in ("one", "two")]
    side_by_side(trial, stub_file, "two clones with equal folder names", roots=roots)


def side_by_side(trial: Begin, stub_file: StubFile, fault: str, roots: list[Path] | None) -> None:
    stub, both = stub_file(**CACHED), [trial(fault), trial(fault)]
    children = []
    for at, one in enumerate(both):
        one.runs = roots[at] / "runs" if roots else one.runs.parent / str(at) / "runs"
        where = {"root": roots[at]} if roots else {}
        words = () if roots else ("--out", str(one.runs))
        children.append(start_kit(*RUN, *words, "--stub", stub, **where))  # type: ignore[arg-type]
    for child in children:
        _, stderr = finish(child)
        assert child.returncode in DONE, stderr
    for one in both:
        manifest, run = one.close("complete")
        assert manifest is not None
        assert len(manifest.replicates) == 2
        assert sum(map(len, samples_in(run).values())) == 2 * asked_of(run)


# -- secrets -------------------------------------------------------------------------------------

CANARIES = {
    "HF_TOKEN": "hf_canaryCANARY0123456789abcdef",
    "VLLM_API_KEY": "canary-api-0123",
    "AWS_SECRET_ACCESS_KEY": "canary-aws-0123",
    "DB_PASSWORD": "canary-db-0123",
    "NO_SUCH_PROXY": "http://me:canary-proxy-0123@127.0.0.1:9",
}


def test_what_is_secret_here_reaches_no_file_no_label_and_no_terminal(
    trial: Begin, stub_file: StubFile, client: docker.DockerClient, matrix: Matrix, tmp_path: Path
) -> None:
    one = trial("secrets in the caller's environment")
    child = start(one.runs, stub_file(**CACHED), **CANARIES)
    wait_for(one.runs, UNDER_LOAD, child=child)
    found = [service_of(client, one.runs, name) for name in ("server", "client")]
    told = {f"{c.name}, inspected": json.dumps(c.attrs).encode() for c in found}
    told |= {
        f"{c.name}, its image": json.dumps(client.api.inspect_image(c.image.id)).encode()
        for c in found
    }
    # what the process there could tell, whatever was asked for
    told |= {
        f"{c.name}, its environment": c.exec_run(["cat", "/proc/1/environ"]).output for c in found
    }
    stdout, stderr = finish(child)
    assert child.returncode in DONE, stderr
    one.close("complete")
    searched = {
        "files of the run": written_below(tmp_path),
        "answers of the engine and of processes inside": told,
        "streams of the terminal": {"stdout": stdout.encode(), "stderr": stderr.encode()},
    }
    assert leaks_in(searched, matrix) == []


def written_below(folder: Path) -> dict[str, bytes]:
    """Return all files below a folder, and what is in those that are packed."""
    written = {str(p): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    packed = {p: gzip.decompress(content) for p, content in written.items() if p.endswith(".gz")}
    assert packed
    return written | {f"{name}, unpacked": content for name, content in packed.items()}


def leaks_in(searched: dict[str, dict[str, bytes]], matrix: Matrix) -> list[str]:
    """Return the places with a canary in them, and count all for the table."""
    found = []
    for kind, places in searched.items():
        leaking = [name for name, content in places.items() if b"canary" in content.lower()]
        matrix.secrets.append((kind, len(places), len(leaking)))
        found += leaking
    return found


SAID = (  # by a server, in its log and in what it answers
    "Authorization: Bearer canarybearer0123456789",
    "a hub token hf_canaryCANARY0123456789abcdef",
    "fetched from http://me:canary-url-0123@hub.example/x",
    f"Traceback (most recent call last): KeyError: {CANARIES['DB_PASSWORD']}",
)


def planted(root: Path, where: str, old: str, new: str) -> None:
    """Change a checkout's code in one place."""
    path = root / where
    text = path.read_text("utf-8")
    assert text.count(old) == 1, where
    path.write_text(text.replace(old, new), "utf-8")


def test_what_a_server_or_a_fault_tells_of_secrets_is_masked(
    trial: Begin, stub_file: StubFile, matrix: Matrix, tmp_path: Path
) -> None:
    """In a checkout whose stub tells secrets in its log, its configuration and its refusals."""
    one = trial("secrets in the server's words")
    root = checkout(tmp_path / "clone")
    heard = '        print(json.dumps({"event": "listening"'
    planted(root, "kit/inside/stub.py", heard, f"        print(*{SAID}, sep='\\n')\n{heard}")
    refusal = " ".join(SAID[:3])  # the fourth is known here by its value alone
    planted(root, "kit/inside/stub_answer.py", "planted failure", refusal)
    defaults = '"quantization": None}'
    configured = f'"quantization": None, "hf_token": "canary-config-0123", "from": "{SAID[2]}"}}'
    planted(root, "kit/inside/stub_pages.py", defaults, configured)
    stub = stub_file(**CACHED, fail_fraction=0.3)
    told = run_kit(*RUN, "--out", str(one.runs), "--stub", stub, root=root, **CANARIES)
    assert told.code in DONE, told.stderr
    _, run = one.close("complete")
    assert "<masked>" in next(run.glob("replicates/00-*/logs/server.log")).read_text("utf-8")
    errors = next(run.glob("replicates/00-*/measure/samples.jsonl")).read_text("utf-8")
    assert "http_500: Authorization: Bearer <masked> a hub token <masked>" in errors
    searched = {"files of a run whose server tells secrets": written_below(one.runs)}

    body = "    platform = find_platform(platform_name)\n"
    fault = f"    raise RuntimeError({SAID[1:]!r})\n"
    planted(root, "kit/use.py", body, fault + body)
    address = "me:canary-argument-0123@host.example/x"
    digest = f"sha256:{'0' * 64}"
    calls: list[tuple[tuple[str, ...], dict[str, str]]] = [
        (("use",), {}),
        (("run", "exp1_prefix_cache", "--model", f"http://{address}"), {}),
        (("run", "exp1_prefix_cache", "--image", f"http://{address}"), {}),
        (("push", "v0.32.0-cpu", address), {}),
        (("pull", f"{address}@{digest}", "v0.32.0-cpu"), {}),
        (("show", f"/nowhere/{SAID[1]}"), {}),
        (("run", "exp1_prefix_cache"), {"DOCKER_HOST": "tcp://me:canary-host-0123@127.0.0.1:9"}),
    ]
    said = {}
    for words, environment in calls:
        ran = run_kit(*words, root=root, **{**CANARIES, **environment})
        assert ran.code != 0, words
        said[" ".join(words)] = (ran.stdout + ran.stderr).encode()
    assert b"a fault of the kit itself" in said["use"]
    searched["what failing calls say (secrets in arguments, addresses, faults)"] = said
    assert leaks_in(searched, matrix) == []
