"""The command line. The only place that catches the kit's errors and turns them into exit codes.

stdout carries data (tables, JSON), stderr everything meant for a person.
"""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from kit import console, engine, engine_setup, owner
from kit.cli_again import Out, Quick, add_again_commands
from kit.cli_bench import bench_command
from kit.cli_check import check_command
from kit.cli_doctor import doctor_command
from kit.cli_fit import fit_command
from kit.cli_fleet import fleet_command
from kit.cli_images import Json, add_image_commands
from kit.cli_report import add_report_commands
from kit.cli_share import add_share_commands
from kit.errors import BadFile, Interrupted, KitError, UsageError
from kit.experiment import experiment_docs, find_experiment
from kit.load_tool import find_load_tool
from kit.manifest import Manifest
from kit.paths import MANIFESTS, RUNS
from kit.prepare import Options
from kit.sequential import Stopping
from kit.value import load_json
from kit.verdict import MIN_PAIRS

app = typer.Typer(
    help="Run vLLM experiments, and let others run them again exactly.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
)

SPARE_PAIRS = 3
VERDICT_EXIT = {"unsupported": 3, "invalid": 4, "confounded": 5}


Replicates = Annotated[
    str,
    typer.Option(
        metavar="N|auto",
        help=f"Pairs of fresh containers; {MIN_PAIRS} are the least that can decide. `auto` "
        "looks at 6, 9, 12 and 16 pairs and stops by a rule that is part of the plan.",
    ),
]
Spare = Annotated[
    int,
    typer.Option(
        "--spare",
        help="Pairs held in reserve, part of the plan: they stand in for pairs that the machine's "
        "other load spoiled. None under 6 pairs and with `auto`.",
    ),
]
Equivalence = Annotated[
    float | None,
    typer.Option(
        help="How close a reproduction must come to count as the same, as a log ratio (0.1: within "
        "a factor of 1.105); part of the plan. Default: the experiment's. Narrow it where the "
        "machine is quiet.",
    ),
]
Model = Annotated[str | None, typer.Option(help="Model id; see `nox -s models`.")]
Platform = Annotated[str | None, typer.Option(help="cpu or cuda; default: what this machine has.")]
Variant = Annotated[str | None, typer.Option(help="A named variant; listed at the end of --help.")]
Seed = Annotated[int, typer.Option(help="Seed of workload and order of replicates.")]
ReadyTimeout = Annotated[
    float | None, typer.Option(help="Seconds a server may take to become healthy.")
]
SendBy = Annotated[
    str,
    typer.Option(
        "--load-tool",
        help="What sends the measured load: kit, or vllm-bench (`vllm bench serve` in the client "
        "container; its clock, its arrivals).",
    ),
]
Stub = Annotated[
    Path | None,
    typer.Option(help="JSON for the kit's stub, run in place of vLLM: tests the kit itself."),
]


@app.command("run")
def run_command(
    name: Annotated[str, typer.Argument(help="The experiment, e.g. exp1_prefix_cache.")],
    quick: Quick = False,
    replicates: Replicates = str(MIN_PAIRS),
    spare: Spare = SPARE_PAIRS,
    equivalence: Equivalence = None,
    image: Annotated[str | None, typer.Option(help="Image id; see `nox -s images`.")] = None,
    model: Model = None,
    platform: Platform = None,
    variant: Variant = None,
    aa: Annotated[
        bool, typer.Option("--aa", help="Baseline against itself: the noise of this machine.")
    ] = False,
    shared_device: Annotated[
        bool, typer.Option("--shared-device", help="All engines on one device: no verdict.")
    ] = False,
    seed: Seed = 1,
    out: Out = RUNS,
    ready_timeout: ReadyTimeout = None,
    load_tool: SendBy = "kit",
    stub: Stub = None,
    as_json: Json = False,
) -> None:
    """Run an experiment on fresh containers, judge it, write report and manifest."""
    options = Options(
        variant=variant,
        image=image,
        model=model,
        platform=platform,
        pairs=1 if quick else _pairs(replicates),
        stopping=Stopping() if replicates == "auto" and not quick else None,
        spare_pairs=0 if quick else _spare(replicates, spare),
        equivalence=equivalence,
        seed=seed,
        against_itself=aa,
        shared_device=shared_device,
        out=out.expanduser().resolve(),
        ready_timeout_s=ready_timeout,
        load_tool=find_load_tool(load_tool),
        stub=None if stub is None else load_json(stub),
    )
    _carry_out(name, options, as_json=as_json)


@app.command("compare-versions")
def compare_versions_command(
    name: Annotated[str, typer.Argument(help="The experiment; both sides run its candidate arm.")],
    old: Annotated[str, typer.Argument(help="Image id of the old version.")],
    new: Annotated[str, typer.Argument(help="Image id of the new version.")],
    quick: Quick = False,
    replicates: Replicates = str(MIN_PAIRS),
    spare: Spare = SPARE_PAIRS,
    equivalence: Equivalence = None,
    model: Model = None,
    platform: Platform = None,
    variant: Variant = None,
    seed: Seed = 1,
    out: Out = RUNS,
    ready_timeout: ReadyTimeout = None,
    load_tool: SendBy = "kit",
    stub: Stub = None,
    as_json: Json = False,
) -> None:
    """Run an experiment between two images, all else equal; writes a block for a pull request."""
    options = Options(
        variant=variant,
        versions=(old, new),
        model=model,
        platform=platform,
        pairs=1 if quick else _pairs(replicates),
        stopping=Stopping() if replicates == "auto" and not quick else None,
        spare_pairs=0 if quick else _spare(replicates, spare),
        equivalence=equivalence,
        seed=seed,
        out=out.expanduser().resolve(),
        ready_timeout_s=ready_timeout,
        load_tool=find_load_tool(load_tool),
        stub=None if stub is None else load_json(stub),
    )
    _carry_out(name, options, as_json=as_json)


@app.command("resume")
def resume_command(
    run: Annotated[Path, typer.Argument(help="The folder of a run that was interrupted.")],
    as_json: Json = False,
) -> None:
    """Go on with an interrupted run after its last whole replicate, if nothing has changed."""
    from kit.resume import resume_run

    folder = run.expanduser().resolve()
    _end(resume_run(folder, console.say), folder, as_json=as_json)


def _carry_out(name: str, options: Options, *, as_json: bool) -> None:
    from kit.run import run_experiment

    manifest, folder = run_experiment(name, options, console.say)
    _end(manifest, folder, as_json=as_json)


def _end(manifest: Manifest, folder: Path, *, as_json: bool) -> None:
    """Say the verdict, and leave with its exit code."""
    verdict, effect = manifest.verdict, manifest.effect
    assert verdict is not None
    console.say(f"verdict: {verdict.word}: {verdict.reason}")
    console.say(f"  next: nox -s show -- {shlex.quote(str(folder))}")
    if as_json:
        console.data(
            {
                "run": str(folder),
                "run_id": manifest.run_id,
                "plan_sha256": manifest.plan_sha256,
                "verdict": verdict.model_dump(mode="json"),
                "effect": effect.model_dump(mode="json") if effect else None,
            }
        )
    raise typer.Exit(VERDICT_EXIT.get(verdict.word, 0))


def _pairs(text: str) -> int:
    """Return the number of pairs of `--replicates`; `auto` needs none."""
    if text == "auto":
        return MIN_PAIRS
    if not text.isdigit() or int(text) < 1:
        raise UsageError(
            f"--replicates is `{text}`, not a number of pairs", hint="1 or more, or `auto`"
        )
    return int(text)


def _spare(replicates: str, spare: int) -> int:
    """Return the spare pairs; a run that cannot decide anyway needs none."""
    return 0 if replicates == "auto" or _pairs(replicates) < MIN_PAIRS else spare


@app.command("list")
def list_command(as_json: Json = False) -> None:
    """List the experiments and their variants."""
    docs = experiment_docs()
    variants = {name: sorted(find_experiment(name).variants) for name in docs}
    if as_json:
        console.data(
            [{"experiment": n, "question": docs[n], "variants": variants[n]} for n in docs]
        )
    else:
        console.table(
            "experiments",
            ["experiment", "question", "variants"],
            [[name, docs[name], ", ".join(variants[name])] for name in docs],
        )


@app.command("analyse")
def analyse_command(
    run: Annotated[Path, typer.Argument(help="A run's folder.")],
    as_json: Json = False,
) -> None:
    """Compute measures and verdict again from a run's raw files, and compare with its manifest.

    Exit code 70: the numbers, or the bytes of a raw file, are not those of the manifest.
    """
    from kit.again import analyse_again
    from kit.manifest import load_manifest

    if load_manifest(run / "manifest.json").status == "running":
        raise BadFile("manifest.json: the run has not ended", hint="wait for its end, or resume it")
    result = analyse_again(run)
    changed, differs = result["changed_files"], ", ".join(result["differs"])
    if as_json:
        console.data(result)
    else:
        console.say(f"verdict: {result['verdict']['word']}: {result['verdict']['reason']}")
        for line in changed:
            console.say(f"changed: {line}")
        console.say(f"NOT equal to the manifest: {differs}" if differs else "equal to the manifest")
        if changed and not differs:
            console.say("no number differs, yet the changed bytes are not those that were measured")
    raise typer.Exit(70 if differs or changed else 0)


@app.command("reference")
def reference_command(
    run: Annotated[Path, typer.Argument(help="A run's folder, or a reference's manifest.")],
    unpack: Annotated[
        Path | None, typer.Option(help="Lay the reference out as a run folder here instead.")
    ] = None,
) -> None:
    """Conclude a run again by today's rules and keep it under manifests/ with its raw files."""
    from kit.reference import keep_reference, unpack_reference

    if unpack is not None:
        console.say(f"unpacked: {unpack_reference(run, unpack)}")
        return
    console.say(f"kept: {keep_reference(run)}")


@app.command("export")
def export_command(
    run: Annotated[Path, typer.Argument(help="A run's folder.")],
    form: Annotated[str, typer.Option("--format", help="ro-crate, llm-d, mlperf, csv or parquet.")],
    as_json: Json = False,
) -> None:
    """Write a run as RO-Crate, llm-d reports or MLPerf description, its samples as tables."""
    from kit.export import export

    written = export(run, form)
    for path in written:
        console.say(f"written: {path}")
    if as_json:
        console.data([str(path) for path in written])


@app.command("schema")
def schema_command(
    write: Annotated[bool, typer.Option("--write", help="Write manifests/schema.json.")] = False,
) -> None:
    """Print the JSON schema of a manifest."""
    from kit.manifest import schema
    from kit.store import write_text

    text = json.dumps(schema(), indent=2, sort_keys=True) + "\n"
    if write:
        write_text(MANIFESTS / "schema.json", text)
    else:
        print(text, end="")  # noqa: T201 - this is the data


@app.command("docs")
def docs_command() -> None:
    """Make README's generated tables anew."""
    from kit.docs import write_readme

    write_readme()


@app.command("attack")
def attack_command(
    runs: Annotated[int, typer.Option(help="Virtual runs a cell.")] = 2000,
    seed: Annotated[int, typer.Option(help="Seed of all draws.")] = 1,
    again: Annotated[
        bool, typer.Option("--again", help="Attack the judgement of reproductions instead.")
    ] = False,
    write: Annotated[bool, typer.Option("--write", help="Write the table below docs/.")] = False,
) -> None:
    """Attack the verdicts with planted effects and faults; prints the confusion table."""
    if again:
        _attack_again(runs, seed, write=write)
    from kit.attack import attack, broken_promises, render_table, write_document

    table = attack(runs, seed, console.say)
    print(render_table(table))  # noqa: T201 - this is the data
    if write:
        write_document(table)
    broken = broken_promises(table)
    for line in broken:
        console.warn(line)
    raise typer.Exit(1 if broken else 0)


def _attack_again(runs: int, seed: int, *, write: bool) -> None:
    from kit import attack_again

    table = attack_again.attack_again(runs, seed, console.say)
    print(attack_again.render_table(table, runs, seed))  # noqa: T201 - this is the data
    if write:
        attack_again.write_document(table, runs, seed)
    broken = attack_again.broken_promises(table)
    for line in broken:
        console.warn(line)
    raise typer.Exit(1 if broken else 0)


@app.command("engine")
def engine_command(as_json: Json = False) -> None:
    """Make sure that a Docker Engine with compose and buildx answers; install it if need be."""
    found = engine_setup.ensure_engine(console.say)
    if as_json:
        console.data(found)


@app.command("sweep")
def sweep_command() -> None:
    """Remove what runs that died had left (only theirs) and mark their manifests interrupted."""
    from kit.run import sweep_leftovers

    sweep_leftovers(engine.connect(), console.say)


add_image_commands(app)
add_share_commands(app)
add_again_commands(app)
add_report_commands(app)
app.command("bench")(bench_command)
app.command("fit")(fit_command)
app.command("check")(check_command)
app.command("doctor")(doctor_command)
app.command("fleet")(fleet_command)


def _show_variants(words: list[str]) -> None:
    """After `run NAME --help`: the question of that experiment and its variants."""
    name = next((w for w in words[1:] if not w.startswith("-")), None)
    if words[:1] != ["run"] or "--help" not in words or name not in experiment_docs():
        return
    experiment = find_experiment(name)
    print(f"{name}: {experiment_docs()[name]}\n\nVariants (--variant NAME):")  # noqa: T201
    for variant, change in experiment.variants.items():
        doc = (change.__doc__ or "").partition("\n")[0]
        print(f"  {variant:<18} {doc}")  # noqa: T201


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    words = sys.argv[1:] if argv is None else argv
    try:
        with owner.interruptible(), engine.answering():
            result: Any = app(args=words, standalone_mode=False)
            _show_variants(words)
    except KitError as error:
        console.show_error(error)
        return error.exit_code
    except Interrupted as stop:
        console.say(f"stopped by {stop}; nothing was left running")
        return stop.exit_code
    except typer.Abort:
        return 130
    except typer.Exit as done:
        return done.exit_code
    except Exception as error:  # noqa: BLE001 - the last resort: never a bare traceback
        usage = _usage(error)
        if usage is None:
            console.show_fault(error)
            return 1
        console.show_error(usage)
        return usage.exit_code
    return result if isinstance(result, int) else 0


def _usage(error: Exception) -> KitError | None:
    """Translate the argument parser's complaint; None for anything else."""
    message = getattr(error, "format_message", None)
    if message is None:
        return None
    return UsageError(str(message()).splitlines()[0], hint="see --help")
