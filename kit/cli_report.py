"""The commands that show what came out: reports, one screen of a run, and what words mean."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kit import console
from kit.cli_images import Json
from kit.errors import UnknownName, UsageError
from kit.paths import RUNS

if TYPE_CHECKING:
    from kit.explain import Explanation

Lang = Annotated[str, typer.Option("--lang", help="en or zh.")]


def report_command(
    run: Annotated[Path, typer.Argument(help="A run's folder, or a folder of runs.")],
) -> None:
    """Write a run's reports again, or an index.html over all runs below a folder.

    Refused when raw files or numbers are not the recorded ones.
    """
    from kit.again import check_numbers
    from kit.imported import RECORD, load_imported
    from kit.imported_report import write_imported_reports
    from kit.manifest import load_manifest
    from kit.report_files import write_reports
    from kit.report_index import write_index

    if (run / RECORD).exists():
        for path in write_imported_reports(run, load_imported(run)):
            console.say(f"written: {path}")
        return
    if run.is_dir() and not (run / "manifest.json").exists():
        console.say(f"written: {write_index(run)}")
        return
    manifest = load_manifest(run / "manifest.json")
    if manifest.verdict is None:
        raise UsageError(f"the run is {manifest.status}: it has no verdict to report")
    check_numbers(run)
    for path in write_reports(run, manifest):
        console.say(f"written: {path}")


def show_command(
    run: Annotated[Path, typer.Argument(help="A run's folder, or a manifest.")],
    as_json: Json = False,
) -> None:
    """Show a run on one screen: verdict, effect, arms, image, machine, and where what is."""
    from kit.show import lines, summarise

    summary = summarise(run)
    if as_json:
        console.data(summary)
        return
    for name, value in lines(summary):
        console.text(f"{name:<10} {value}")


def import_command(
    file: Annotated[
        Path,
        typer.Argument(
            help="`vllm bench serve --save-detailed` JSON, GuideLLM's JSON, or AIPerf's "
            "profile_export.jsonl."
        ),
    ],
    out: Annotated[Path, typer.Option(help="The folder of runs.")] = RUNS,
    as_json: Json = False,
) -> None:
    """Take another tool's result as raw data: samples, measures, the guards that can be judged.

    It never has a verdict: there is no plan, no second arm, and the environment is only declared.
    """
    from kit.imported import import_result
    from kit.imported_report import write_imported_reports

    record, folder = import_result(file, out.expanduser().resolve())
    write_imported_reports(folder, record)
    console.say(f"imported: {folder} ({record.tool}; its environment is declared, no verdict)")
    for guard in record.guards:
        console.say(f"  {'held' if guard.ok else 'BROKEN'}: {guard.text}")
    console.say(f"  not judged: {', '.join(record.not_judged)}")
    if as_json:
        console.data({"folder": str(folder), **record.model_dump(mode="json")})
        return
    rows = [[r.name, r.unit, r.reason if r.value is None else f"{r.value:.6g}", str(r.n)]
            for r in record.readings]  # fmt: skip
    console.table("imported", ["measure", "unit", "value", "n"], [list(map(str, r)) for r in rows])


def explain_command(
    word: Annotated[
        str | None, typer.Argument(help="A verdict, outcome, guard, warning or state.")
    ] = None,
    language: Lang = "en",
    as_json: Json = False,
) -> None:
    """Say what a word of a result means and what to do next; without a word, list them all."""
    from kit.explain import explain, explanations

    if language not in ("en", "zh"):
        raise UnknownName(f"no language `{language}`", hint="known: en, zh")
    found = list(explanations()) if word is None else explain(word)
    if as_json:
        console.data([each.model_dump(mode="json") for each in found])
    elif word is None:
        rows = [[each.kind, each.word, _said(each, language)[0]] for each in found]
        console.table("words of a result", ["kind", "word", "meaning"], rows)
    else:
        for each in found:
            what, then = _said(each, language)
            console.text(f"{each.word} ({each.kind})\n  {what}\n  next: {then}")


def _said(each: Explanation, language: str) -> tuple[str, str]:
    """Return meaning and next step in that language."""
    if language == "zh":
        return each.what.zh, each.next.zh
    return each.what.en, each.next.en


def add_report_commands(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command("report")(report_command)
    app.command("show")(show_command)
    app.command("import")(import_command)
    app.command("explain")(explain_command)
