"""The commands that look at recorded runs together; `kit.cli` adds them to the command line."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kit import console
from kit.cli_images import Json
from kit.errors import UsageError
from kit.paths import RUNS, cache_dir

if TYPE_CHECKING:
    from kit.obtain import Source
    from kit.reproduce import Checkup

Quick = Annotated[bool, typer.Option("--quick", help="One pair: shows the way, never decides.")]
Out = Annotated[Path, typer.Option(help="Where run folders go.", show_default="runs")]


def reproduce_command(
    file: Annotated[Path, typer.Argument(help="A manifest, a run's folder, or a bundle.")],
    only_check: Annotated[
        bool, typer.Option("--only-check", help="Show what differs; build and start nothing.")
    ] = False,
    accept: Annotated[
        list[str] | None,
        typer.Option(help="A difference, by its name, that shall not stand in the way."),
    ] = None,
    quick: Quick = False,
    registry: Annotated[
        str | None, typer.Option(help="HOST/NAME from which to pull the image by its digest.")
    ] = None,
    out: Out = RUNS,
    as_json: Json = False,
) -> None:
    """Run a recorded run's plan again on the same bits, and say whether the result came back.

    Ends in reproduced (exit 0), not reproduced (6), inconclusive (7) or incomparable (8).
    """
    from kit import compare, reproduce, store
    from kit.obtain import Source
    from kit.reproduction_report import show_preflight
    from kit.unbundle import is_bundle, unbundle

    accepted = accept or []
    store.make_folder(cache_dir())
    with tempfile.TemporaryDirectory(prefix="bundle-", dir=cache_dir()) as folder:
        bundle = unbundle(file, Path(folder) / "out") if is_bundle(file) else None
        recorded = reproduce.read_recorded(bundle.run if bundle else file)
        found = reproduce.check(recorded, accepted, reproduce.host_facts())
        blocking = found.preflight.blocking
        if not as_json:
            show_preflight(found.preflight)
        if why := compare.only_inconclusive(recorded.manifest, quick=quick):
            console.warn(f"this can only end inconclusive: {why}")
        if not blocking and not only_check:
            word, told = _run_again(
                found, accepted, out, quick=quick, source=Source(bundle, registry)
            )
        else:
            word = "incomparable" if blocking else "comparable"
            told = {"word": word, "preflight": found.preflight.model_dump(mode="json")}
            said = ", ".join(blocking) or "nothing stands in the way of running it again here"
            console.say(f"{word}: {said}")
    if as_json:
        console.data(told)
    raise typer.Exit(reproduce.EXIT.get(word, 0))


def _run_again(
    found: Checkup, accepted: Sequence[str], out: Path, *, quick: bool, source: Source
) -> tuple[str, dict[str, Any]]:
    """Run, write the report, say the outcome; return its word and the record as JSON."""
    from kit import reproduce, reproduction_report

    result, folder = reproduce.reproduce(
        found, accepted, out.expanduser().resolve(), console.say, quick=quick, source=source
    )
    reproduction_report.write(folder, found.recorded.manifest, result)
    outcome = result.outcome
    console.say(f"report: {folder / 'reproduction.en.md'}")
    console.say(f"{outcome.word}: {outcome.reason} ({outcome.distance})")
    return outcome.word, {"run": str(folder), **result.model_dump(mode="json")}


def compare_command(
    runs: Annotated[
        list[Path], typer.Argument(help="Two manifests or run folders; or one folder of many.")
    ],
    experiment: Annotated[str | None, typer.Option(help="Only this experiment.")] = None,
    image: Annotated[str | None, typer.Option(help="Only runs with this image id.")] = None,
    verdict: Annotated[str | None, typer.Option(help="Only this verdict.")] = None,
    page: Annotated[
        Path | None, typer.Option("--html", help="Two runs: write the table to this page instead.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show two runs side by side with everything in which they differ, or a table of many."""
    from kit import compare_table

    if len(runs) == 2:
        result = compare_table.two(*runs)
    elif len(runs) == 1:
        result = compare_table.many(runs[0], experiment, image, verdict)
    else:
        raise UsageError("compare takes two runs, or one folder of many")
    if page is not None and len(runs) == 2:
        from kit.report_index import write_comparison

        write_comparison(page, runs[0], runs[1], result)
        console.say(f"written: {page}")
    elif as_json:
        console.data(result.data)
    else:
        console.table(result.title, result.columns, result.rows)


def add_again_commands(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command("reproduce")(reproduce_command)
    app.command("compare")(compare_command)
