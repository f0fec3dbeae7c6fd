"""Make an installed virtual environment a pure function of its locked wheels.

Runs inside the build: `normalize.py VENV EPOCH DROPPED`. Drops what the installer wrote about this
host and the files listed in DROPPED, compiles byte code in a fixed way, and sets every
modification time to EPOCH.
"""

import csv
import io
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# Split one level down, so that all cores stay busy to the end.
LARGE = ("torch", "transformers", "sympy", "vllm")


def read_dropped(path: Path) -> set[str]:
    """Return the paths that DROPPED lists."""
    lines = (line.strip() for line in path.read_text(encoding="utf-8").splitlines())
    return {line for line in lines if line and not line.startswith("#")}


def drop_files(venv: Path, packages: Path, dropped: set[str]) -> None:
    """Remove the installer's notes (file times, local paths, its cache marks) and `dropped`."""
    for name in dropped:
        (packages / name).unlink(missing_ok=True)
    for info in sorted(packages.glob("*.dist-info")):
        gone = set(dropped)
        for name in ("uv_cache.json", "direct_url.json"):
            path = info / name
            if path.exists() and (name == "uv_cache.json" or '"file://' in path.read_text()):
                path.unlink()
                gone.add(f"{info.name}/{name}")
        record = info / "RECORD"
        rows = list(csv.reader(io.StringIO(record.read_text()))) if record.exists() else []
        kept = sorted(row for row in rows if row and row[0] not in gone)
        if len(kept) < len(rows):
            text = io.StringIO()
            csv.writer(text, lineterminator="\n").writerows(kept)
            record.write_text(text.getvalue())
    for name in (".lock", ".gitignore", "CACHEDIR.TAG"):
        (venv / name).unlink(missing_ok=True)
    for folder in list(packages.rglob("__pycache__")):
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()


def compile_jobs(packages: Path) -> list[list[str]]:
    """Return the arguments of each compileall run, those with the most files first."""
    jobs = []
    for top in sorted(packages.iterdir()):
        if top.name in LARGE:
            jobs.append(["-l", str(top)])
            jobs += [[str(sub)] for sub in sorted(top.iterdir()) if sub.is_dir()]
        elif top.suffix == ".py" or (
            top.is_dir() and not top.name.endswith((".dist-info", ".libs"))
        ):
            jobs.append([str(top)])
    return sorted(jobs, key=lambda job: -sum(1 for _ in Path(job[-1]).rglob("*.py")))


def compile_byte_code(packages: Path) -> None:
    """Write byte code that is never checked against file times.

    One process per package: within one process the order is fixed, while `compileall -j2` lets
    the order of interned constants vary. Files of other languages' syntax are left uncompiled.
    """
    flags = ["-q", "-j1", "--invalidation-mode", "unchecked-hash"]

    def run(job: list[str]) -> None:
        subprocess.run(
            [sys.executable, "-m", "compileall", *flags, *job],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=False,
        )

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(run, compile_jobs(packages)))


def stamp(venv: Path, epoch: int) -> None:
    """Set every modification time, that of the parent folder included."""
    for folder, folders, files in os.walk(venv, topdown=False):
        for name in folders + files:
            os.utime(os.path.join(folder, name), (epoch, epoch), follow_symlinks=False)
    os.utime(venv, (epoch, epoch))
    os.utime(venv.parent, (epoch, epoch))


if __name__ == "__main__":
    VENV, EPOCH = Path(sys.argv[1]), int(sys.argv[2])
    PACKAGES = next((VENV / "lib").glob("python3.*/site-packages"))
    drop_files(VENV, PACKAGES, read_dropped(Path(sys.argv[3])))
    compile_byte_code(PACKAGES)
    stamp(VENV, EPOCH)
