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
from kit.errors import Interrupted, KitError, UsageError
from kit.experiment import experiment_docs, find_experiment
from kit.paths import MANIFESTS, RUNS
from kit.verdict import MIN_PAIRS

app = typer.Typer(
    help=__doc__, no_args_is_help=True, add_completion=True, pretty_exceptions_enable=False
)

Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]
VERDICT_EXIT = {"unsupported": 3, "invalid": 4, "confounded": 5}


@app.command("run")
def run_command(
    name: Annotated[str, typer.Argument(help="The experiment, e.g. exp1_prefix_cache.")],
    quick: Annotated[
        bool, typer.Option("--quick", help="One pair: shows the way, never decides.")
    ] = False,
    replicates: Annotated[
        str,
        typer.Option(
            metavar="N|auto",
            help=f"Pairs of fresh containers; {MIN_PAIRS} are the least that can decide. `auto` "
            "looks at 6, 9, 12 and 16 pairs and stops by a rule that is part of the plan.",
        ),
    ] = str(MIN_PAIRS),
    image: Annotated[str | None, typer.Option(help="Image id; see `nox -s images`.")] = None,
    model: Annotated[str | None, typer.Option(help="Model id; see `nox -s models`.")] = None,
    platform: Annotated[
        str | None, typer.Option(help="cpu or cuda; default: what this machine has.")
    ] = None,
    variant: Annotated[
        str | None, typer.Option(help="A named variant; listed at the end of this help.")
    ] = None,
    aa: Annotated[
        bool, typer.Option("--aa", help="Baseline against itself: the noise of this machine.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of workload and order of replicates.")] = 1,
    out: Annotated[Path, typer.Option(help="Where run folders go.", show_default="runs")] = RUNS,
    ready_timeout: Annotated[
        float | None, typer.Option(help="Seconds a server may take to become healthy.")
    ] = None,
    stub: Annotated[
        Path | None,
        typer.Option(help="JSON for the kit's stub, run in place of vLLM: tests the kit itself."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Run an experiment on fresh containers, judge it, write report and manifest."""
    from kit.run import Options, run_experiment
    from kit.sequential import Stopping
    from kit.value import load_json

    options = Options(
        variant=variant,
        image=image,
        model=model,
        platform=platform,
        pairs=1 if quick else _pairs(replicates),
        stopping=Stopping() if replicates == "auto" and not quick else None,
        seed=seed,
        against_itself=aa,
        out=out.expanduser().resolve(),
        ready_timeout_s=ready_timeout,
        stub=None if stub is None else load_json(stub),
    )
    manifest, folder = run_experiment(name, options, console.say)
    verdict = manifest.verdict
    assert verdict is not None
    console.say(f"verdict: {verdict.word}: {verdict.reason}")
    if as_json:
        console.data(
            {
                "run": str(folder),
                "run_id": manifest.run_id,
                "plan_sha256": manifest.plan_sha256,
                "verdict": verdict.model_dump(mode="json"),
                "effect": manifest.effect.model_dump(mode="json") if manifest.effect else None,
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
    """Compute measures and verdict again from a run's raw files, and compare with its manifest."""
    from kit.again import analyse_again

    result = analyse_again(run)
    if as_json:
        console.data(result)
    else:
        console.say(f"verdict: {result['verdict']['word']}: {result['verdict']['reason']}")
        console.say("equal to the manifest" if result["equal"] else "NOT equal to the manifest")
    raise typer.Exit(0 if result["equal"] else 70)


@app.command("report")
def report_command(run: Annotated[Path, typer.Argument(help="A run's folder.")]) -> None:
    """Write a run's reports again; refused when a raw file is not the recorded one."""
    from kit.manifest import load_manifest
    from kit.report import write_reports

    manifest = load_manifest(run / "manifest.json")
    if manifest.verdict is None:
        raise UsageError(f"the run is {manifest.status}: it has no verdict to report")
    write_reports(run, manifest)
    console.say(f"written: {run / 'report.en.md'} and report.zh.md")


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


@app.command("bench")
def bench_command(
    streams: Annotated[
        list[int] | None, typer.Option(help="Concurrent streams; may be given again.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure the load generator's own error against a stub with an exact schedule."""
    from kit.bench import bench, show

    results = bench(tuple(streams or (64, 256)))
    if as_json:
        console.data([r.model_dump(mode="json") for r in results])
    else:
        show(results)


@app.command("engine")
def engine_command(as_json: Json = False) -> None:
    """Make sure that a Docker Engine with compose and buildx answers; install it if need be."""
    found = engine_setup.ensure_engine(console.say)
    if as_json:
        console.data(found)


@app.command("images")
def images_command(as_json: Json = False) -> None:
    """Show the image matrix: id, vLLM, CUDA, locked, built, identical."""
    from kit.image_table import image_rows

    rows = image_rows()
    if as_json:
        console.data(rows)
    else:
        console.table("images", list(rows[0]), [list(r.values()) for r in rows])


@app.command("build")
def build_command(
    ids: Annotated[
        list[str] | None, typer.Argument(help="Image ids; default: this machine's.")
    ] = None,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Build every step anew.")] = False,
    model: Annotated[str | None, typer.Option(help="Model for compose/.env.")] = None,
    platform: Annotated[str | None, typer.Option(help="cpu or cuda.")] = None,
    as_json: Json = False,
) -> None:
    """Build images from their locks, check their identity, and write compose/.env for the first."""
    from kit.build import build, ensure_image
    from kit.image import find_image
    from kit.platform import find_platform
    from kit.use import use

    chosen = ids or [find_platform(platform).default_image]
    records = [find_image(one) for one in chosen]
    built = [
        build(r, no_cache=True, say=console.say) if no_cache else ensure_image(r, console.say)
        for r in records
    ]
    for one in built:
        console.say(f"{one.record.id}: {one.how}, {one.state}, identity {one.identity.digest}")
    if records[0].cuda == "cpu" or find_platform(platform).name == "cuda":
        use(records[0].id, model, platform, console.say)
    if as_json:
        console.data(
            [{"id": b.record.id, "how": b.how, "identity": b.identity.digest} for b in built]
        )


@app.command("lock")
def lock_command(
    image: Annotated[str, typer.Argument(help="Image id.")],
    write: Annotated[bool, typer.Option("--write", help="Write docker/locks/ID/.")] = False,
) -> None:
    """Resolve what an image is made of and show what changed; writes only with --write."""
    from kit import lock
    from kit.image import find_image

    record = find_image(image)
    old = lock.read_lock(record) if record.locked else None
    try:
        with console.step(f"resolve {image}", waits_for="the package indexes"):
            new = lock.resolve(record)
    except KitError as error:
        if write:
            lock.write_attempt(record, error)
        raise
    for line in lock.diff(old, new) or ["nothing changed"]:
        console.say(line)
    if write:
        lock.write(record, new)
        console.say(f"written: docker/locks/{image}/")


@app.command("verify-image")
def verify_image_command(
    image: Annotated[str, typer.Argument(help="Image id.")], as_json: Json = False
) -> None:
    """Build an image twice from nothing and compare: with itself, layer by layer, and its lock."""
    from kit.image import find_image
    from kit.verify_image import verify

    result = verify(find_image(image), console.say)
    if as_json:
        console.data(result)


@app.command("models")
def models_command(
    name: Annotated[str | None, typer.Argument(help="Fetch or make this one.")] = None,
    image: Annotated[str | None, typer.Option(help="Image whose tools convert it.")] = None,
    as_json: Json = False,
) -> None:
    """Show the models; with an id, make sure that it is here and check every file."""
    from kit.build import ensure_image
    from kit.image import find_image
    from kit.model import ensure_model, find_model, load_models
    from kit.platform import find_platform

    if name is None:
        rows = [
            {"id": m.id, "kind": m.kind, "weights": m.weights, "licence": m.licence}
            for m in load_models().values()
        ]
        if as_json:
            console.data(rows)
        else:
            columns = ["id", "kind", "weights", "licence"]
            console.table("models", columns, [[str(r[c]) for c in columns] for r in rows])
        return
    built = ensure_image(find_image(image or find_platform(None).default_image), console.say)
    files = ensure_model(find_model(name), built, console.say)
    console.say(f"{name}: {len(files.files)} files, {files.bytes} bytes, all as locked")
    if as_json:
        console.data({"id": name, "files": files.files, "bytes": files.bytes})


@app.command("use")
def use_command(
    image: Annotated[str | None, typer.Argument(help="Image id; default: this machine's.")] = None,
    model: Annotated[str | None, typer.Option(help="Model id.")] = None,
    platform: Annotated[str | None, typer.Option(help="cpu or cuda.")] = None,
    as_json: Json = False,
) -> None:
    """Write compose/.env for plain `docker compose`."""
    from kit.use import use

    values = use(image, model, platform, console.say)
    if as_json:
        console.data(values)


@app.command("adopt")
def adopt_command(
    reference: Annotated[str, typer.Argument(help="Tag or id of an image on this engine.")],
    image: Annotated[str, typer.Option("--id", help="The id it gets here.")],
    cuda: Annotated[str, typer.Option(help="cpu, cu129 or cu130.")] = "cu130",
    interpreter: Annotated[str, typer.Option(help="Python inside, with its full path.")] = (
        "/usr/bin/python3"
    ),
    entrypoint: Annotated[str, typer.Option(help="Words that start vLLM, before `serve`.")] = (
        "vllm"
    ),
    user: Annotated[str, typer.Option(help="UID:GID to run as.")] = "10001:0",
    as_json: Json = False,
) -> None:
    """Let this machine measure an image that the kit did not build; every manifest says so."""
    from kit.adopt import adopt

    record = adopt(
        reference,
        image,
        cuda=cuda,
        interpreter=interpreter,
        entrypoint=shlex.split(entrypoint),
        user=user,
        say=console.say,
    )
    if as_json:
        console.data(record.model_dump(mode="json", exclude_defaults=True))


@app.command("sweep")
def sweep_command() -> None:
    """Remove what runs that died had left (only theirs) and mark their manifests interrupted."""
    from kit.run import sweep_leftovers

    sweep_leftovers(engine.connect(), console.say)


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
        with owner.interruptible():
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
    except Exception as error:
        usage = _usage(error)
        if usage is None:
            raise
        console.show_error(usage)
        return usage.exit_code
    return result if isinstance(result, int) else 0


def _usage(error: Exception) -> KitError | None:
    """Translate the argument parser's complaint; None for anything else."""
    message = getattr(error, "format_message", None)
    if message is None:
        return None
    return UsageError(str(message()).splitlines()[0], hint="see --help")


if __name__ == "__main__":
    sys.exit(main())
