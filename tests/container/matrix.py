"""The matrix of faults: what each left of a run and of what belongs to others, counted and written.

`--write-matrix` puts what the tests of this call counted into docs/hostile.md.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import docker
import docker.errors
from commands import Ran, objects_of_runs, run_kit

from kit.docs import with_table
from kit.manifest import Manifest, load_manifest, now_utc
from kit.paths import ROOT
from kit.proxy_document import this_machine
from kit.store import write_text

DOCUMENT = ROOT / "docs" / "hostile.md"
COLUMNS = ("Fault", "Runs", "Ended", "Samples then", "Lost", "Left", "Foreign", "Day")
PLACES = ("Where a secret may come to be", "Searched", "With one", "Day")
SCALES = ("What", "Peak memory", "Time", "Day")
ALL = "**all**"
MACHINE = re.compile(r"(?<=They were run )on [^\n]*hardware threads\.")


@dataclass(frozen=True)
class Ending:
    """What one fault left.

    `samples` were there at the fault or in whole replicates, `lost` of them are not there any
    more; `left` objects of the run are on the engine; `touched` objects of others were changed.
    """

    fault: str
    ended: str
    samples: int
    lost: int
    left: int
    touched: int


@dataclass(frozen=True)
class Scaled:
    """What some amount of samples took: peak memory in bytes, and a time in s and what it is."""

    what: str
    samples: int
    memory_bytes: int
    time_s: float
    of: str


class Matrix:
    """What one call of the tests counted and measured."""

    def __init__(self) -> None:
        self.endings: list[Ending] = []
        self.scaled: list[Scaled] = []
        self.secrets: list[tuple[str, int, int]] = []
        """Kind of place, how many were searched, in how many a planted secret was found."""

    def write(self) -> None:
        """Put what there is into the document, each row with its day.

        Rows of what this call did not run stay, so that it may be run in parts.
        """
        text, day = DOCUMENT.read_text("utf-8"), now_utc()[:10]
        by_fault: dict[str, list[Ending]] = {}
        for one in self.endings:
            by_fault.setdefault(one.fault, []).append(one)
        rows = rows_of(text, "matrix") | {f: [*_row(f, each), day] for f, each in by_fault.items()}
        rows = {fault: rows[fault] for fault in sorted(rows) if fault != ALL}
        rows[ALL] = [ALL, _sum(rows, 1), "", *(_sum(rows, place) for place in range(3, 7)), ""]
        text = with_table(text, "matrix", table_of(COLUMNS, rows))
        places = {k: [k, str(searched), str(found), day] for k, searched, found in self.secrets}
        text = with_table(text, "secrets", table_of(PLACES, rows_of(text, "secrets") | places))
        scaled = {
            name: [
                name,
                f"{one.memory_bytes / 1e6:.0f} MB",
                f"{one.time_s:.3g} s ({one.of})",
                day,
            ]
            for one in self.scaled
            for name in [f"{one.what}, {one.samples:,} samples"]
        }
        text = with_table(text, "load", table_of(SCALES, rows_of(text, "load") | scaled))
        write_text(DOCUMENT, text.replace(MACHINE.search(text)[0], f"on {this_machine()}."))  # type: ignore[index]


def rows_of(text: str, name: str) -> dict[str, list[str]]:
    """Return the rows of a document's table by their first cell."""
    part = text.partition(f"<!-- {name}: begin")[2].partition(f"<!-- {name}: end")[0]
    lines = [line for line in part.splitlines() if line.startswith("| ")][2:]
    rows = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines]
    return {row[0]: row for row in rows}


def table_of(columns: Sequence[str], rows: Mapping[str, Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows.values()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _sum(rows: Mapping[str, Sequence[str]], place: int) -> str:
    return f"{sum(int(row[place].replace(',', '')) for row in rows.values()):,}"


def _row(fault: str, each: Sequence[Ending]) -> list[str]:
    words = Counter(one.ended for one in each)
    ended = "; ".join(word if len(each) == 1 else f"{n} {word}" for word, n in words.items())
    sums = (sum(getattr(one, n) for one in each) for n in ("samples", "lost", "left", "touched"))
    return [fault, str(len(each)), ended, *(f"{n:,}" for n in sums)]


@dataclass(frozen=True)
class Witness:
    """Objects of somebody else on an engine: a container, a network, a volume and an image."""

    client: docker.DockerClient
    name: str
    image: str
    container: str
    since: str
    network: str

    def changed(self, *, restarted: bool = False) -> list[str]:
        """Return what is not as it was; `restarted`: the whole engine was, and them with it."""
        found = []
        try:
            state = self.client.api.inspect_container(self.container)["State"]
            if not state["Running"] or (state["StartedAt"] != self.since) != restarted:
                found.append("container")
        except docker.errors.NotFound:
            found.append("container")
        for kind, get, its_id in (
            ("network", self.client.networks.get, self.network),
            ("image", self.client.images.get, self.image),
        ):
            try:
                if get(self.name).id != its_id:
                    found.append(kind)
            except docker.errors.NotFound:
                found.append(kind)
        try:
            self.client.volumes.get(self.name)
        except docker.errors.NotFound:
            found.append("volume")
        return found


@contextlib.contextmanager
def witness_on(client: docker.DockerClient) -> Iterator[Witness]:
    """Make objects that belong to nobody's run, and remove them after the block."""
    name = f"somebody-else-{secrets.token_hex(3)}"
    image = client.images.list("vllm-kit")[0]
    image.tag(name)
    network = client.networks.create(name, labels={"com.docker.compose.project": "x"})
    volume = client.volumes.create(name)
    container = client.containers.create(
        image.id,
        ["sleep", "infinity"],
        entrypoint=[],
        name=name,
        init=True,
        restart_policy={"Name": "always"},
    )
    try:
        container.start()
        since = client.api.inspect_container(container.id)["State"]["StartedAt"]
        yield Witness(client, name, str(image.id), str(container.id), since, str(network.id))
    finally:
        container.remove(force=True)
        volume.remove()
        network.remove()
        client.images.remove(name, noprune=True)


def whole_lines(path: Path) -> list[bytes]:
    """Return a file's lines, but for one that is not ended; each must be whole JSON."""
    lines = path.read_bytes().split(b"\n")[:-1]
    for line in lines:
        json.loads(line)
    return lines


def asked_of(run: Path) -> int:
    """Return how many requests one replicate sends."""
    return sum(len(p.read_text("utf-8").splitlines()) for p in run.glob("workload/*.jsonl"))


def samples_in(folder: Path) -> dict[Path, list[bytes]]:
    return {path: whole_lines(path) for path in sorted(folder.rglob("samples.jsonl"))}


@dataclass
class Trial:
    """One fault on one run below `runs`."""

    fault: str
    runs: Path
    client: docker.DockerClient
    witness: Witness
    matrix: Matrix
    environment: dict[str, str] = field(default_factory=dict)
    before: dict[Path, list[bytes]] = field(default_factory=dict)

    def strike(self) -> None:
        """Keep what the sample files hold; the fault follows."""
        self.before = samples_in(self.runs)

    def sweep(self) -> Ran:
        """Do what the next run does first."""
        ran = run_kit("sweep", **self.environment)
        assert ran.code == 0, ran.stderr
        assert "Traceback" not in ran.stderr
        return ran

    def close(
        self, *statuses: str, then: str = "", restarted: bool = False
    ) -> tuple[Manifest | None, Path]:
        """Count what the fault left, and insist on the truth; return manifest and run folder.

        `then` is what became of it afterwards, for the table.
        """
        found = next(self.runs.rglob("manifest.json"), None)
        manifest = None if found is None else load_manifest(found)
        run = self.runs if found is None else found.parent
        after = samples_in(self.runs)
        lost = sum(
            line not in after.get(path, ()) for path, lines in self.before.items() for line in lines
        )
        whole = () if manifest is None else manifest.replicates
        kept = sum(len(lines) for path in whole for lines in samples_in(run / path.folder).values())
        due = asked_of(run) * len(whole)
        left = [] if found is None else objects_of_runs(self.client, self.runs)
        touched = self.witness.changed(restarted=restarted)
        ending = Ending(
            fault=self.fault,
            ended=_words(manifest) + then,
            samples=max(sum(map(len, self.before.values())), due),
            lost=lost + max(0, due - kept),
            left=len(left),
            touched=len(touched),
        )
        self.matrix.endings.append(ending)
        assert (ending.lost, left, touched) == (0, [], [])
        if manifest is not None:
            assert manifest.status in statuses
        return manifest, run


def _words(manifest: Manifest | None) -> str:
    if manifest is None:
        return "before it began"
    if manifest.status == "failed" and manifest.failure is not None:
        return f"`{manifest.failure.error}`"
    if manifest.status == "complete" and manifest.verdict is not None:
        return "invalid" if manifest.verdict.word == "invalid" else "complete"
    return manifest.status
