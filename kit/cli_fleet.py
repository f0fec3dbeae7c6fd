"""The command that hands a matrix of runs to a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kit import console
from kit.cli_images import Json
from kit.errors import UsageError

if TYPE_CHECKING:
    from kit.fleet import CaseState, Index
    from kit.fleet_plan import Fleet

LOST_EXIT = 9  # at least one case left the queue without a result


def fleet_command(
    plan: Annotated[Path, typer.Argument(help="The plan file; see docs/cluster.md.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the jobs only.")] = False,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Submit, and leave.")] = False,
    status: Annotated[bool, typer.Option("--status", help="Show where each case is.")] = False,
    cancel: Annotated[bool, typer.Option("--cancel", help="Cancel what is on its way.")] = False,
    collect: Annotated[
        bool, typer.Option("--collect", help="Write the index over what is finished.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Run a matrix of experiments over a Slurm cluster: one job a case, results in one index.

    Submits what is neither finished nor on its way, waits, and gathers. Ctrl-C stops the waiting
    alone. Exit code 9: a case left the queue without a result.
    """
    from kit import fleet as use
    from kit.fleet_plan import read_fleet

    if sum((dry_run, no_wait, status, cancel, collect)) > 1:
        raise UsageError(
            "choose one of --dry-run, --no-wait, --status, --cancel, --collect", hint="see --help"
        )
    fleet = read_fleet(plan)
    if dry_run:
        _show_jobs(fleet, as_json=as_json)
    elif cancel:
        use.cancel(fleet, console.say)
    elif status:
        _show_states(use.states(fleet), as_json=as_json)
    elif collect:
        _show_index(use.gather(fleet), as_json=as_json)
    else:
        use.submit(fleet, console.say)
        if no_wait:
            return
        use.wait(fleet, console.say)
        _show_index(use.gather(fleet), as_json=as_json)
        lost = [each for each in use.states(fleet) if each.state == "lost"]
        for each in lost:
            console.warn(f"no result: {each.case.name}; its log: {each.said}")
        if lost:
            raise typer.Exit(LOST_EXIT)


def _show_jobs(fleet: Fleet, *, as_json: bool) -> None:
    from kit.fleet import request_of
    from kit.fleet_job import read_finished

    asked = [
        {
            "case": case.name,
            "plan_sha256": case.plan_sha256,
            "command": " ".join(("kit", *case.words)),
            "slurm": {
                key.removeprefix("slurm_"): value
                for key, value in request_of(case, fleet.file.nodes[case.node_class]).items()
            },
            "finished": read_finished(fleet.file.out, case) is not None,
        }
        for case in fleet.cases
    ]
    if as_json:
        console.data(asked)
        return
    rows = [
        [
            str(each["case"]),
            str(each["plan_sha256"])[:12],
            " ".join(f"{k}={v}" for k, v in dict(each["slurm"]).items()),  # type: ignore[call-overload]
            "finished" if each["finished"] else "to do",
        ]
        for each in asked
    ]
    console.table(f"{len(rows)} jobs", ["case", "plan", "slurm", "state"], rows)


def _show_states(states: list[CaseState], *, as_json: bool) -> None:
    if as_json:
        console.data([each.model_dump(mode="json") for each in states])
        return
    rows = [[s.case.name, s.state, s.job or "", s.node or "", s.verdict or s.said] for s in states]
    console.table(f"{len(rows)} cases", ["case", "state", "job", "node", "verdict"], rows)


def _show_index(index: Index, *, as_json: bool) -> None:
    from kit.fleet import sick

    if as_json:
        console.data(index.model_dump(mode="json"))
    else:
        rows = [
            [str(c["case"]), str(c["node"]), str(c["attempts"]), str(c["verdict"])]
            for c in index.cases
        ]
        console.table(f"{len(rows)} finished cases", ["case", "node", "attempts", "verdict"], rows)
        levels = [
            [each.node_class, each.measure, n.node, str(n.n), f"{n.ratio:.3f}", n.says]
            for each in index.levels
            for n in each.nodes
        ]
        if levels:
            columns = ["class", "measure", "node", "n", "ratio to the others", "says"]
            console.table("nodes beside each other", columns, levels)
    for line in sick(index):
        console.warn(line)
    for name in index.split:
        console.warn(f"not all pairs of {name} are shown to be of one node")
