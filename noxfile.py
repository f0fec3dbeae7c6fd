"""The front door: thin sessions, each one a call of `python -m kit`.

Sessions share two environments under .nox/, made once from the hashed lock files in
requirements/ and made again only when these change; afterwards everything works offline.
"""

from __future__ import annotations

import ast
import hashlib
import shutil
import sys
from pathlib import Path

import nox

ROOT = Path(__file__).resolve().parent
EXPERIMENTS = sorted(
    p for p in (ROOT / "kit" / "experiments").glob("*.py") if not p.name.startswith("_")
)
IMAGES = [  # the keys of docker/images.yaml, read without a YAML parser
    line.rstrip().removesuffix(":").strip()
    for line in (ROOT / "docker" / "images.yaml").read_text("utf-8").splitlines()
    if line.startswith("  ") and line[2] not in " #-" and line.rstrip().endswith(":")
]

GROUPS = ("dev", "fleet", "parquet")  # each a lock of its own beside the kit's

nox.needs_version = ">=2024.10.9"
nox.options.sessions = ["list"]
nox.options.default_venv_backend = "none"


def environment(session: nox.Session, name: str) -> str:
    """Return the interpreter of a shared environment, made from its lock when that changed."""
    if sys.version_info < (3, 11):
        session.error("the kit needs Python 3.11 or newer: start nox with it")
    lock = ROOT / "requirements" / f"{name}.lock"
    wanted = f"{sys.version} {hashlib.sha256(lock.read_bytes()).hexdigest()}"
    folder = ROOT / ".nox" / f"kit-{name}"
    stamp = folder / "made-from"
    python = str(folder / "bin" / "python")
    if not stamp.exists() or stamp.read_text("utf-8") != wanted:
        shutil.rmtree(folder, ignore_errors=True)
        session.run(sys.executable, "-m", "virtualenv", "-q", str(folder), external=True)
        pip = [python, "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
        session.run(*pip, "--require-hashes", "--no-deps", "-r", str(lock), external=True)
        stamp.write_text(wanted, "utf-8")
    return python


def kit(session: nox.Session, *words: str, env: str = "kit") -> None:
    """Run `python -m kit` and give it time to clean up after Ctrl-C."""
    python = environment(session, env)
    session.run(
        *(python, "-E", "-m", "kit", *words),  # a stray PYTHONPATH would bring other modules
        external=True,
        stderr=sys.stderr,  # stdout is for data alone
        interrupt_timeout=180,
        terminate_timeout=60,
    )


def docline(path: Path) -> str:
    """Return the first line of a file's docstring."""
    return (ast.get_docstring(ast.parse(path.read_text("utf-8"))) or "").partition("\n")[0]


def _experiment(path: Path) -> None:
    def run(session: nox.Session) -> None:
        kit(session, "run", path.stem, *session.posargs)

    run.__doc__ = docline(path)
    nox.session(name=path.stem)(run)


for _path in EXPERIMENTS:
    _experiment(_path)


@nox.session(name="list")
def list_(session: nox.Session) -> None:
    """List the experiments and their variants."""
    kit(session, "list", *session.posargs)


@nox.session
def compare_versions(session: nox.Session) -> None:
    """Run an experiment between two images: compare_versions -- EXPERIMENT OLD NEW."""
    kit(session, "compare-versions", *session.posargs)


@nox.session
def analyse(session: nox.Session) -> None:
    """Compute a run's numbers again from its raw files and compare: analyse -- RUNDIR."""
    kit(session, "analyse", *session.posargs)


@nox.session
def report(session: nox.Session) -> None:
    """Write a run's reports again, or an index over many: report -- RUNDIR, report -- runs/."""
    kit(session, "report", *session.posargs)


@nox.session
def show(session: nox.Session) -> None:
    """Show a run on one screen: verdict, effect, arms, image, machine: show -- RUNDIR."""
    kit(session, "show", *session.posargs)


@nox.session(name="import")
def import_(session: nox.Session) -> None:
    """Take a result of vllm bench serve, GuideLLM or AIPerf as raw data: import -- FILE."""
    kit(session, "import", *session.posargs)


@nox.session
def explain(session: nox.Session) -> None:
    """Say what a verdict, guard or warning means and what to do next: explain -- WORD."""
    kit(session, "explain", *session.posargs)


@nox.session
def resume(session: nox.Session) -> None:
    """Go on with an interrupted run after its last whole replicate: resume -- RUNDIR."""
    kit(session, "resume", *session.posargs)


@nox.session
def reproduce(session: nox.Session) -> None:
    """Run a recorded run again, exactly, and say whether it came back: reproduce -- FILE."""
    kit(session, "reproduce", *session.posargs)


@nox.session
def compare(session: nox.Session) -> None:
    """Show two runs side by side, or a table of a folder: compare -- A B, compare -- DIR."""
    kit(session, "compare", *session.posargs)


@nox.session
def reference(session: nox.Session) -> None:
    """Keep a run below manifests/: reference -- RUNDIR; lay one out: -- FILE --unpack DIR."""
    kit(session, "reference", *session.posargs)


@nox.session
def bundle(session: nox.Session) -> None:
    """Put a run into one file that needs no network: bundle -- RUNDIR [--without-image]."""
    kit(session, "bundle", *session.posargs)


@nox.session
def unbundle(session: nox.Session) -> None:
    """Check every byte of a bundle and lay it out: unbundle -- FILE --to DIR."""
    kit(session, "unbundle", *session.posargs)


@nox.session
def keygen(session: nox.Session) -> None:
    """Make a key to sign with: keygen -- --out FILE."""
    kit(session, "keygen", *session.posargs)


@nox.session
def sign(session: nox.Session) -> None:
    """Sign a run's manifest: sign -- RUNDIR|MANIFEST --key FILE."""
    kit(session, "sign", *session.posargs)


@nox.session
def verify(session: nox.Session) -> None:
    """Check who signed a run, and every file of it: verify -- MANIFEST [--public-key FILE]."""
    kit(session, "verify", *session.posargs)


@nox.session
def export(session: nox.Session) -> None:
    """Write a run in another format: export -- RUNDIR --format csv (or another; see --help)."""
    wants_parquet = any(word.endswith("parquet") for word in session.posargs)
    kit(session, "export", *session.posargs, env="parquet" if wants_parquet else "kit")


@nox.session
def engine(session: nox.Session) -> None:
    """Make sure that a Docker Engine answers; install and start one if need be."""
    kit(session, "engine")  # posargs belong to the session named after it


@nox.session
def doctor(session: nox.Session) -> None:
    """Say what this machine can run, per experiment and topology, and why not."""
    kit(session, "doctor", *session.posargs)


@nox.session
def images(session: nox.Session) -> None:
    """Show the image matrix: id, vLLM, CUDA, locked, built, identical."""
    kit(session, "images", *session.posargs)


@nox.session
def build(session: nox.Session) -> None:
    """Build images from their locks: build -- ID …; alone, this machine's default image."""
    kit(session, "build", *session.posargs)


def _build_one(image: str) -> None:
    def run(session: nox.Session) -> None:
        kit(session, "build", image, *session.posargs)

    run.__doc__ = f"Build {image} from its lock."
    nox.session(name=f"build({image})")(run)


for _image in IMAGES:
    _build_one(_image)


@nox.session
def lock(session: nox.Session) -> None:
    """Resolve an image's lock and show what changed: lock -- ID [--write]."""
    kit(session, "lock", *session.posargs)


@nox.session
def verify_image(session: nox.Session) -> None:
    """Build an image twice from nothing, compare it byte for byte with itself and its lock."""
    kit(session, "verify-image", *session.posargs)


@nox.session
def models(session: nox.Session) -> None:
    """Show the models; with an id, fetch or make it and check every file."""
    kit(session, "models", *session.posargs)


@nox.session
def fit(session: nox.Session) -> None:
    """Say whether a model fits on devices and how it may be split: fit -- MODEL DEVICES."""
    kit(session, "fit", *session.posargs)


@nox.session
def check(session: nox.Session) -> None:
    """Check a stack of compose/ before it starts: ports, devices, side channels: check -- pd."""
    kit(session, "check", *session.posargs)


@nox.session
def use(session: nox.Session) -> None:
    """Write compose/.env for plain `docker compose`: use -- IMAGE [--model ID]."""
    kit(session, "use", *session.posargs)


@nox.session
def adopt(session: nox.Session) -> None:
    """Take an image that is already on the engine: adopt -- IMAGE --id ID."""
    kit(session, "adopt", *session.posargs)


@nox.session
def sbom(session: nox.Session) -> None:
    """Write an image's bill of materials anew from its lock: sbom -- ID."""
    kit(session, "sbom", *session.posargs)


@nox.session
def push(session: nox.Session) -> None:
    """Push an image to an OCI registry: push -- ID HOST/NAME."""
    kit(session, "push", *session.posargs)


@nox.session
def pull(session: nox.Session) -> None:
    """Pull an image by digest, if it is the locked one: pull -- HOST/NAME@sha256:… ID."""
    kit(session, "pull", *session.posargs)


@nox.session
def fleet(session: nox.Session) -> None:
    """Run a matrix of experiments over a Slurm cluster: fleet -- PLAN.yaml [--dry-run]."""
    kit(session, "fleet", *session.posargs, env="fleet")


@nox.session
def attack(session: nox.Session) -> None:
    """Attack the verdicts with planted effects and faults; prints the confusion table."""
    kit(session, "attack", *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """Measure the load generator's own error; -- --proxy: the proxy's; -- --peers: others'."""
    if "--peers" in session.posargs:
        for lock in sorted((ROOT / "requirements").glob("peer-*.lock")):
            environment(session, lock.stem)
    kit(session, "bench", *session.posargs)


@nox.session
def tests(session: nox.Session) -> None:
    """Run unit, integration and the short container tier; -- --full runs everything."""
    python = environment(session, "dev")
    session.run(
        python,
        "-m",
        "pytest",
        *session.posargs,
        external=True,
        interrupt_timeout=180,
        terminate_timeout=60,
    )


@nox.session
def lint(session: nox.Session) -> None:
    """Check style and types."""
    python = environment(session, "dev")
    for words in (["ruff", "check"], ["ruff", "format", "--check"], ["mypy"]):
        session.run(python, "-m", *words, external=True)


@nox.session
def requirements(session: nox.Session) -> None:
    """Resolve the kit's own requirements again, with hashes: writes requirements/*.lock."""
    python = environment(session, "dev")
    compile_ = [python, "-m", "uv", "pip", "compile", "-q", "--universal", "--generate-hashes"]
    compile_ += ["--python-version", "3.11", "--no-header", "--no-annotate"]
    wanted = {"kit": ["pyproject.toml"]}
    wanted |= {each: ["pyproject.toml", "--group", each] for each in GROUPS}
    wanted |= {p.stem: [str(p)] for p in sorted((ROOT / "requirements").glob("*.in"))}
    for name, words in wanted.items():
        session.run(*compile_, *words, "-o", f"requirements/{name}.lock", external=True)
