"""What one Slurm job does on its node: `kit run`, then the result into the shared output.

A case is published by one rename, so it is there whole or not at all, and once: where two attempts
both come to an end (a node that was thought lost had gone on), the first one stays. An attempt that
follows another on the same node goes on with its run (`kit resume`, if nothing has changed); on
another node it starts anew, so that all pairs of a run are of one node.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from kit import process, store
from kit.errors import BadFile, KitError, StaleNumber
from kit.fleet_plan import Case
from kit.manifest import Manifest, load_manifest, now_utc
from kit.paths import ROOT, cache_dir
from kit.value import Value, load_json, parse_value

RUNS = "runs"
WORK = "work"
RECORD = "fleet.json"
RUN = "run"

VERDICTS = (0, 3, 4, 5)  # what `kit run` ends with once a run is whole


class Attempt(Value):
    """One start of a case's job: where, when, under which Slurm id, and on which run.

    `went_on` says that it resumed an earlier attempt's run.
    """

    node: str
    job: str
    restart: int
    started_utc: str
    went_on: bool = False


class Finished(Value):
    """A finished case: its plan's hash, where it ran, every attempt, its manifest's hash.

    `node` is the name that Slurm gives the machine; the manifest itself names none.
    """

    schema_version: Literal["1.0"] = "1.0"
    case: str
    plan_sha256: str
    node_class: str
    node: str
    run_id: str
    manifest_sha256: str
    finished_utc: str
    attempts: tuple[Attempt, ...]


class Job(Value):
    """A case with all that its node must know; what submitit keeps and starts."""

    case: Case
    out: Path
    scratch: Path | None
    env: dict[str, str]
    bring: dict[str, str]

    def __call__(self) -> str:
        """Carry the case out; return the folder of its result. Raises `KitError`."""
        os.environ.update(self.env)
        return str(carry_out(self))

    def checkpoint(self, *_: object) -> object:
        """Before a time limit or preemption: the same once more; the run's folder has the rest."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


def final_folder(out: Path, case: Case) -> Path:
    return out / RUNS / case.key


def read_finished(out: Path, case: Case) -> Finished | None:
    """Return the record of a case that is finished, or None. Raises `BadFile` for another plan's"""
    path = final_folder(out, case) / RECORD
    if not path.is_file():
        return None
    found = parse_value(Finished, load_json(path), RECORD, strict=True)
    if found.plan_sha256 != case.plan_sha256:
        raise BadFile(f"{path.parent.name}/{RECORD}: plan_sha256: not this case's plan")
    return found


def carry_out(job: Job) -> Path:
    """Run a case on this node and publish it; at once where it is finished already."""
    target = final_folder(job.out, job.case)
    if read_finished(job.out, job.case):
        return target
    notes = job.out / WORK / job.case.key
    work = notes if job.scratch is None else job.scratch / job.case.key
    for folder in (notes, work):
        folder.mkdir(parents=True, exist_ok=True)
    for image, source in job.bring.items():
        bring(image, source)
    earlier = attempts_of(notes)
    before = unfinished(work) if earlier and earlier[-1].node == here() else None
    number = len(earlier)
    _note(notes, number, went_on=before is not None)
    if before is None or _kit("resume", str(before)) not in VERDICTS:
        _note(notes, number, went_on=False)
        code = _kit(*job.case.words, "--out", str(work / RUN))
    else:
        code = 0
    if read_finished(job.out, job.case):
        return target  # another attempt was first
    if code not in VERDICTS:
        raise KitError(f"`kit {' '.join(job.case.words)}` ended with exit code {code}")
    publish(job, whole(work, job.case), attempts_of(notes))
    for folder in (notes, work):
        shutil.rmtree(folder, ignore_errors=True)
    return target


def unfinished(work: Path) -> Path | None:
    """Return the newest run below a folder that has whole replicates and no end, or None."""
    found = []
    for path in work.glob(f"{RUN}/**/manifest.json"):
        with contextlib.suppress(KitError):
            manifest = load_manifest(path)
            if manifest.status != "complete" and manifest.replicates:
                found.append((manifest.started_utc, path.parent))
    return max(found)[1] if found else None


def whole(work: Path, case: Case) -> Path:
    """Return the complete run of the case's plan below a folder; raise `StaleNumber` otherwise."""
    others = []
    for path in sorted(work.glob(f"{RUN}/**/manifest.json")):
        manifest = load_manifest(path)
        if manifest.status != "complete":
            continue
        if manifest.plan_sha256 == case.plan_sha256:
            return path.parent
        others.append(manifest.plan_sha256[:12])
    raise StaleNumber(
        f"the fleet's plan is {case.plan_sha256[:12]}, the run's {', '.join(others) or 'none'}",
        hint="the kit or a file of the plan changed since it was submitted: submit it again",
    )


def publish(job: Job, run: Path, attempts: tuple[Attempt, ...]) -> None:
    """Copy a run to the shared output, check every file's hash there, then name it finished."""
    manifest = load_manifest(run / "manifest.json")
    target = final_folder(job.out, job.case)
    coming = target.parent / f".{target.name}.{attempts[-1].job}.{attempts[-1].restart}"
    shutil.rmtree(coming, ignore_errors=True)
    shutil.copytree(run, coming / RUN)
    if wrong := store.changed_files(coming / RUN, manifest.files):
        raise StaleNumber(f"the copy of the run is not whole: {wrong[0]}", hint="run it again")
    done = Finished(
        case=job.case.name,
        plan_sha256=manifest.plan_sha256,
        node_class=job.case.node_class,
        node=attempts[-1].node,
        run_id=manifest.run_id,
        manifest_sha256=store.sha256_file(coming / RUN / "manifest.json"),
        finished_utc=now_utc(),
        attempts=attempts,
    )
    store.write_json(coming / RECORD, done.model_dump(mode="json"))
    try:
        coming.rename(target)
    except OSError:
        if not target.is_dir():
            raise
        shutil.rmtree(coming)  # another attempt was first


def is_blocked_by_node(manifest: Manifest, done: Finished) -> bool:
    """Say whether every pair of a run was measured on one node.

    `carry_out` goes on with a run on its own node alone; the records must show it nevertheless.
    """
    nodes = [each.node for each in done.attempts]
    first = len(nodes) - 1
    while first > 0 and done.attempts[first].went_on:
        first -= 1
    went_on = sum(each.went_on for each in done.attempts[first:])
    return len(set(nodes[first:])) == 1 and went_on >= len(manifest.resumed)


def attempts_of(notes: Path) -> tuple[Attempt, ...]:
    """Return the attempts that a case's notes tell of, oldest first; kept on the shared output."""
    files = sorted(notes.glob("attempt-*.json"))
    return tuple(parse_value(Attempt, load_json(f), f.name, strict=True) for f in files)


def here() -> str:
    """Return the name that Slurm gives this node."""
    return os.environ.get("SLURMD_NODENAME", "this machine")


def _note(notes: Path, number: int, *, went_on: bool) -> None:
    noted = Attempt(
        node=here(),
        job=os.environ.get("SLURM_JOB_ID", "none"),
        restart=int(os.environ.get("SLURM_RESTART_COUNT", "0")),
        started_utc=now_utc(),
        went_on=went_on,
    )
    store.write_json(notes / f"attempt-{number:03d}.json", noted.model_dump(mode="json"))


def bring(image: str, source: str) -> None:
    """Take an image from a registry or bundle where this node's engine has not got it.

    One job of a node at a time; the kit checks the image's identity, here and before each run.
    """
    from kit.image import engine_image_id, find_image

    with _alone(cache_dir() / "bring.lock"):
        if engine_image_id(find_image(image).tag) is not None:
            return
        if "@sha256:" in source:
            code = _kit("pull", source, image)
        else:
            unpacked = cache_dir() / "bring"
            shutil.rmtree(unpacked, ignore_errors=True)
            code = _kit("unbundle", source, "--to", str(unpacked), "--load")
            shutil.rmtree(unpacked, ignore_errors=True)
        if code:
            raise KitError(f"the image {image} could not be taken from where `bring` says")


@contextlib.contextmanager
def _alone(lock: Path) -> Iterator[None]:
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield


def _kit(*words: str) -> int:
    """Run a command of the kit; what it says goes into the job's log. Return its exit code.

    USR2 is how submitit hears of a job's near end; Slurm sends it to every process of the job, and
    a run must not end by it.
    """
    argv = ["env", "--ignore-signal=USR2", sys.executable, "-m", "kit", *words]
    done = process.run(argv, cwd=ROOT)
    sys.stdout.write(done.stdout)
    sys.stderr.write(done.stderr)
    sys.stdout.flush()
    return done.returncode
