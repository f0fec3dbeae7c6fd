"""Many runs over a cluster: hands cases to Slurm through submitit, and gathers what comes back.

No scheduler of our own: Slurm places, queues, requeues and cancels; the kit only says what a case
needs. What is finished is read from the shared output, what is on its way from `squeue` (submitit
itself asks `sacct`, which many a cluster does not keep).
"""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import json
import math
import shlex
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from kit import compare, fleet_job, process, report_index, store
from kit.errors import BadFile, ToolMissing, UsageError
from kit.export_llmd import fact_value
from kit.fleet_job import Finished, Job, final_folder, is_blocked_by_node, read_finished
from kit.fleet_nodes import NodeLevel, judge_nodes
from kit.fleet_plan import Case, Fleet, NodeClass
from kit.manifest import Manifest, load_manifest
from kit.paths import ROOT
from kit.value import Value, load_json

Say = Callable[[str], None]

JOBS = "jobs.json"
INDEX = "index.json"
SLURM = "slurm"
POLL_S = 5.0
SLURM_HINT = "run this where `sbatch` works; one machine alone needs `nox -s EXPERIMENT` only"

Queue = dict[str, tuple[str, str, str]]
State = Literal["finished", "queued", "running", "submitted", "lost", "to do"]


class CaseState(Value):
    """Where a case stands: `lost` was submitted, left the queue, and has no result.

    `submitted` is all that can be said where no Slurm is here to ask.
    """

    case: Case
    state: State
    job: str | None = None
    node: str | None = None
    verdict: str | None = None
    said: str = ""


class NodeRow(Value):
    """One node of the index: its class, hardware as its runs' manifests have it, its cases."""

    node: str
    node_class: str
    hardware: dict[str, Any]
    marks: tuple[str, ...]
    cases: int


class ClassLevels(Value):
    """The nodes of one class beside each other, in one plan's primary measure."""

    node_class: str
    plan_sha256: str
    experiment: str
    measure: str
    nodes: tuple[NodeLevel, ...]


class Index(Value):
    """All finished cases of a fleet, its nodes, and how far nodes of one class are apart.

    `split` names runs whose records do not show that all pairs were measured on one node.
    """

    schema_version: Literal["1.0"] = "1.0"
    cases: tuple[dict[str, Any], ...]
    nodes: tuple[NodeRow, ...]
    levels: tuple[ClassLevels, ...]
    split: tuple[str, ...]


def states(fleet: Fleet) -> list[CaseState]:
    """Return where every case stands."""
    jobs, queue = _jobs(fleet.file.out), _queue()
    return [_state(fleet, case, jobs.get(case.key), queue) for case in fleet.cases]


def _state(fleet: Fleet, case: Case, job: str | None, queue: Queue | None) -> CaseState:
    done = read_finished(fleet.file.out, case)
    if done:
        manifest = load_manifest(final_folder(fleet.file.out, case) / "run" / "manifest.json")
        word = manifest.verdict.word if manifest.verdict else manifest.status
        return CaseState(case=case, state="finished", job=job, node=done.node, verdict=word)
    if job is None:
        return CaseState(case=case, state="to do")
    if queue is None:
        return CaseState(case=case, state="submitted", job=job, said="no squeue is here to ask")
    if job not in queue:
        log = fleet.file.out / SLURM / f"{job}_0_log.err"
        return CaseState(case=case, state="lost", job=job, said=str(log))
    state, node, reason = queue[job]
    running = state in ("RUNNING", "COMPLETING")
    where = node if running and node else None
    said = state.lower() if running else f"{state.lower()}: {reason}"
    return CaseState(
        case=case, state="running" if running else "queued", job=job, node=where, said=said
    )


def submit(fleet: Fleet, say: Say) -> int:
    """Hand every case to Slurm that is neither finished nor on its way; return how many.

    Cases that ask for the same go as one array. Raises `ToolMissing` without Slurm or submitit.
    """
    out = fleet.file.out
    out.mkdir(parents=True, exist_ok=True)
    with _alone(out):
        known = states(fleet)
        todo = [each.case for each in known if each.state in ("to do", "lost")]
        finished = sum(each.state == "finished" for each in known)
        say(f"{len(known)} cases: {finished} finished, {len(todo)} to submit")
        if not todo:
            return 0
        jobs = _jobs(out)
        for request, cases in _alike(fleet, todo):
            found = _hand_over(out, request, [job_of(fleet, case) for case in cases])
            jobs |= {case.key: job for case, job in zip(cases, found, strict=True)}
            store.write_json(out / JOBS, jobs)
            say(f"  {len(cases)} cases as {found[0].partition('_')[0]}: {_told(request)}")
    return len(todo)


def job_of(fleet: Fleet, case: Case) -> Job:
    """Return what submitit carries to the node."""
    nodes = fleet.file.nodes[case.node_class]
    return Job(
        case=case,
        out=fleet.file.out,
        scratch=nodes.scratch,
        env=nodes.env,
        bring=fleet.file.bring,
    )


def request_of(case: Case, nodes: NodeClass) -> dict[str, Any]:
    """Return what a case asks of Slurm, in submitit's words."""
    gpus = case.devices if nodes.gpus is None and nodes.platform == "cuda" else nodes.gpus
    words = {
        "slurm_time": nodes.time_min,
        "slurm_partition": nodes.partition,
        "slurm_constraint": nodes.constraint,
        "slurm_nodelist": case.node,
        "slurm_exclusive": nodes.exclusive or None,
        "slurm_gpus_per_node": gpus or None,
        "slurm_cpus_per_task": nodes.cpus,
        "slurm_mem": None if nodes.memory_gib is None else f"{nodes.memory_gib}G",
        "slurm_array_parallelism": nodes.at_once,
    }
    return {key: value for key, value in words.items() if value is not None}


def _told(request: dict[str, Any]) -> str:
    return ", ".join(f"{k.removeprefix('slurm_')}={v}" for k, v in request.items())


def _alike(fleet: Fleet, cases: Sequence[Case]) -> Iterator[tuple[dict[str, Any], list[Case]]]:
    groups: dict[str, list[Case]] = {}
    for case in cases:
        request = request_of(case, fleet.file.nodes[case.node_class])
        groups.setdefault(json.dumps(request, sort_keys=True), []).append(case)
    for text, members in groups.items():
        yield json.loads(text), members


def _hand_over(out: Path, request: dict[str, Any], jobs: Sequence[Job]) -> list[str]:
    """Submit jobs that ask for the same, as one array; return Slurm's ids."""
    try:
        from submitit import AutoExecutor
    except ModuleNotFoundError:
        raise ToolMissing(
            "submitit is not installed in this environment", hint="start it as `nox -s fleet`"
        ) from None
    process.require("sbatch", hint=SLURM_HINT)
    executor = AutoExecutor(folder=out / SLURM, cluster="slurm")
    executor.update_parameters(
        name="kit",
        slurm_setup=[f"cd {shlex.quote(str(ROOT))}"],
        slurm_additional_parameters={"requeue": True},
        **request,
    )
    with executor.batch():
        made = [executor.submit(job) for job in jobs]
    return [each.job_id for each in made]


def wait(fleet: Fleet, say: Say) -> None:
    """Wait until no case is on its way; says each change. Ctrl-C leaves the jobs to Slurm."""
    before = ""
    while True:
        now = states(fleet)
        words = ("finished", "running", "queued", "lost")
        told = ", ".join(f"{sum(s.state == word for s in now)} {word}" for word in words)
        if told != before:
            say(told)
            before = told
        if not any(each.state in ("queued", "running") for each in now):
            return
        time.sleep(POLL_S)


def cancel(fleet: Fleet, say: Say) -> int:
    """Cancel every job of this fleet that is on its way; return how many."""
    going = [s for s in states(fleet) if s.state in ("queued", "running")]
    if going:
        program = process.require("scancel", hint=SLURM_HINT)
        done = process.run([program, *(s.job for s in going if s.job)], timeout_s=120)
        if not done.ok:
            raise UsageError("Slurm would not cancel", detail=done.tail)
    say(f"{len(going)} jobs cancelled; what they had measured stays below {fleet.file.out}")
    return len(going)


def gather(fleet: Fleet) -> Index:
    """Write the index over all finished cases, as index.json and index.html; return it.

    Raises `BadFile` where a manifest is not the one that was published.
    """
    found = list(_finished(fleet))
    index = Index(
        cases=tuple(_row(case, done, manifest) for case, done, manifest in found),
        nodes=tuple(_nodes(found)),
        levels=tuple(_levels(found)),
        split=tuple(c.name for c, d, m in found if not is_blocked_by_node(m, d)),
    )
    store.write_json(fleet.file.out / INDEX, index.model_dump(mode="json"))
    if found:
        report_index.write_index(fleet.file.out / fleet_job.RUNS)
    return index


Result = tuple[Case, Finished, Manifest]


def _finished(fleet: Fleet) -> Iterator[Result]:
    for case in fleet.cases:
        done = read_finished(fleet.file.out, case)
        if done is None:
            continue
        path = final_folder(fleet.file.out, case) / fleet_job.RUN / "manifest.json"
        if store.sha256_file(path) != done.manifest_sha256:
            raise BadFile(f"{case.name}: manifest.json is not the one that was published")
        yield case, done, load_manifest(path)


def _row(case: Case, done: Finished, manifest: Manifest) -> dict[str, Any]:
    return {
        "case": case.name,
        "plan_sha256": case.plan_sha256,
        "node": done.node,
        "node_class": done.node_class,
        "attempts": len(done.attempts),
        "run": f"{fleet_job.RUNS}/{case.key}/{fleet_job.RUN}",
        "verdict": manifest.verdict.word if manifest.verdict else manifest.status,
        "effect": manifest.effect.ratio if manifest.effect else None,
    }


HARDWARE = (
    ("host", "cpu_model"),
    ("host", "cpu_threads"),
    ("host", "memory_total_bytes"),
    ("host", "kernel_release"),
    ("gpu", "device0_name"),
    ("engine", "version"),
)


def _nodes(found: Sequence[Result]) -> Iterator[NodeRow]:
    by_node: dict[tuple[str, str], list[Manifest]] = {}
    for _, done, manifest in found:
        by_node.setdefault((done.node_class, done.node), []).append(manifest)
    for (label, node), manifests in sorted(by_node.items()):
        facts = manifests[-1].facts
        seen = {f"{g}.{n}": fact_value(facts, g, n) for g, n in HARDWARE}
        marks = {fact_value(m.facts, "host", "machine_mark") for m in manifests}
        yield NodeRow(
            node=node,
            node_class=label,
            hardware={key: value for key, value in seen.items() if value is not None},
            marks=tuple(sorted(str(mark)[:12] for mark in marks if mark)),
            cases=len(manifests),
        )


def _levels(found: Sequence[Result]) -> Iterator[ClassLevels]:
    """Compare the nodes of each class in runs of one plan; in A/A both arms are the baseline."""
    groups: dict[tuple[str, str], list[Result]] = {}
    for result in found:
        groups.setdefault((result[1].node_class, result[1].plan_sha256), []).append(result)
    for (label, digest), results in groups.items():
        values: dict[str, list[float]] = {}
        for _, done, manifest in results:
            roles = ("baseline", "candidate") if manifest.plan.against_itself else ("baseline",)
            for role in roles:
                values.setdefault(done.node, []).extend(compare.levels(manifest, role))
        if judged := judge_nodes(values):
            plan = results[0][2].plan
            yield ClassLevels(
                node_class=label,
                plan_sha256=digest,
                experiment=plan.experiment,
                measure=plan.hypothesis.measure,
                nodes=judged,
            )


def sick(index: Index) -> list[str]:
    """Return a line for every node that differs from the others of its class."""
    return [
        f"node {n.node} of {each.node_class}: {each.measure} of {each.experiment} is "
        f"{n.ratio:.3f} times the other nodes', beyond {_bounds(n.limit)}"
        for each in index.levels
        for n in each.nodes
        if n.says == "differs"
    ]


def _bounds(limit: float | None) -> str:
    return f"{math.exp(-math.log(limit or 1)):.3f} to {limit or 1:.3f}"


def _jobs(out: Path) -> dict[str, str]:
    path = out / JOBS
    return {key: str(job) for key, job in load_json(path).items()} if path.is_file() else {}


def _queue() -> Queue | None:
    """Return this user's jobs that have not ended: id -> state, node, reason; None without Slurm.

    Raises `ToolMissing` where Slurm is installed and does not answer.
    """
    program = shutil.which("squeue")
    if program is None:
        return None
    words = ["--noheader", "--array", f"--user={getpass.getuser()}", "--format=%i|%T|%N|%r"]
    done = process.run([program, *words], timeout_s=60)
    if not done.ok:
        raise ToolMissing("Slurm does not answer", hint=SLURM_HINT, detail=done.tail)
    rows = [line.split("|") for line in done.stdout.splitlines() if line.count("|") == 3]
    return {job: (state, node, reason) for job, state, node, reason in rows}


@contextlib.contextmanager
def _alone(out: Path) -> Iterator[None]:
    """Let one submission of a fleet be under way at a time."""
    with (out / ".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield
