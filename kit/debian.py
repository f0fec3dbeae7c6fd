"""The image's base: Debian packages, locked by hash, unpacked without network into one tar.

Packages come from the stable main suite alone: it is frozen after its last point release, so
that what a lock names stays fetchable. apt itself fetches, from the host's own archive address.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from kit import process
from kit.engine_setup import AptSource, read_sources
from kit.errors import BuildFailed, DiskFull, GoneUpstream, HashMismatch, IndexUnreachable
from kit.lock_file import DebPackage
from kit.paths import cache_dir

Say = Callable[[str], None]
SUITE = "bookworm"
WANTED = (
    "usr-is-merged", "python3.11", "tini", "ca-certificates", "libgomp1", "libnuma1",
    "libtcmalloc-minimal4", "procps",
)  # fmt: skip
# apt counts itself as essential; the image does not need it.
_ESSENTIAL = "?and(?essential,?not(?exact-name(apt)))"
_TOOLS_HINT = "as root: apt-get install mmdebstrap uidmap (`nox -s engine` does it)"
_NO_NETWORK = re.compile(
    r"Temporary failure|Could not resolve|Could not connect|Connection (refused|timed out|failed)"
    r"|Network is unreachable|Unable to connect|Cannot initiate the connection",
)
_URI_LINE = re.compile(r"^'[^']*' (\S+) (\d+) SHA256:([0-9a-f]{64})$", re.MULTILINE)
# mmdebstrap copies the host's name and resolver; an essential system has no useradd; /opt/kit must
# exist, else the later COPY stamps /opt with the time of the build.
_CUSTOMIZE = (
    'echo kit > "$1/etc/hostname"; : > "$1/etc/resolv.conf"; rm -f "$1/etc/apt/sources.list"'
    ' "$1"/etc/apt/sources.list.d/* "$1"/etc/apt/apt.conf.d/99mmdebstrap',
    'printf "kit:x:10001:0:kit:/tmp/home:/usr/sbin/nologin\\n" >> "$1/etc/passwd";'
    ' rm -f "$1"/etc/passwd- "$1"/etc/group- "$1"/etc/shadow- "$1"/etc/gshadow-',
    'mkdir -p "$1/opt/kit"',
    'rm -rf "$1"/var/cache/debconf/*-old "$1"/var/cache/ldconfig/* "$1"/var/log/*'
    ' "$1"/var/lib/apt/lists/* "$1"/var/lib/dpkg/*-old',
)
_LEFT_OUT = (
    "path-exclude=/usr/share/doc/*",
    "path-include=/usr/share/doc/*/copyright",
    "path-exclude=/usr/share/man/*",
    "path-exclude=/usr/share/locale/*",
    "path-exclude=/usr/share/info/*",
)


def deb_dir() -> Path:
    """Return the folder of downloaded packages, each in a folder named by its sha256."""
    return cache_dir() / "debs"


def deb_path(package: DebPackage) -> Path:
    return deb_dir() / package.sha256 / package.file


def resolve_base() -> tuple[DebPackage, ...]:
    """Resolve the base's packages in an empty apt root; needs the archive.

    The list is exactly what gets installed, sorted by name.
    """
    with tempfile.TemporaryDirectory(prefix="kit-apt-") as folder:
        apt = AptRoot(Path(folder))
        apt.update()
        done = apt.get("install", "-y", "--print-uris", _ESSENTIAL, *WANTED)
        if not done.ok:
            raise BuildFailed("apt cannot resolve the image's base", detail=done.tail)
        return tuple(sorted(map(_package_of, _URI_LINE.findall(done.stdout)), key=_by_name))


def _by_name(package: DebPackage) -> str:
    return package.name


def _package_of(row: tuple[str, str, str]) -> DebPackage:
    file, size, sha256 = row
    name, version, _ = file.split("_")
    return DebPackage(
        name=name,
        version=version.replace("%3a", ":"),
        file=file,
        size_bytes=int(size),
        sha256=sha256,
    )


class AptRoot:
    """apt with a configuration, lists and state of its own: the host's are read, never touched."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for name in (
            "etc/apt/apt.conf.d", "etc/apt/preferences.d", "etc/apt/sources.list.d",
            "var/lib/apt/lists/partial", "var/cache/apt/archives/partial", "var/lib/dpkg",
        ):  # fmt: skip
            (root / name).mkdir(parents=True)
        (root / "var/lib/dpkg/status").touch()
        source = _archive()
        signed = f"Signed-By: {source.signed_by}\n" if source.signed_by else ""
        (root / "etc/apt/sources.list.d/base.sources").write_text(
            f"Types: deb\nURIs: {source.uris}\nSuites: {SUITE}\nComponents: main\n{signed}",
            encoding="utf-8",
        )

    def get(self, *args: str, cwd: Path | None = None) -> process.Completed:
        root = self.root
        options = [
            f"Dir={root}", f"Dir::State::status={root}/var/lib/dpkg/status",
            "APT::Architecture=amd64", "APT::Architectures=amd64", "APT::Install-Recommends=false",
            "Acquire::Languages=none", "Acquire::ForceHash=SHA256", "Acquire::Retries=2",
            "APT::Sandbox::User=",
        ]  # fmt: skip
        if not signed_by_host(root):
            options.append("Dir::Etc::TrustedParts=/etc/apt/trusted.gpg.d")
        words = [word for option in options for word in ("-o", option)]
        env = os.environ | {"LC_ALL": "C.UTF-8"}
        process.require("apt-get", hint="the base can be made on Debian and Ubuntu only")
        return process.run(["apt-get", "-q", *words, *args], env=env, cwd=cwd, timeout_s=900)

    def update(self) -> None:
        done = self.get("update", "--error-on=any")
        if not done.ok:
            raise _fetch_error(done, "the Debian archive's package lists")


def signed_by_host(root: Path) -> bool:
    """Say whether the derived entry names its key; without one apt's trusted folder is used."""
    return "Signed-By" in (root / "etc/apt/sources.list.d/base.sources").read_text("utf-8")


def _archive() -> AptSource:
    """Return a source of the Debian archive: the host's entry for the suite, or for a sibling."""
    sources = [source for source in read_sources() if "main" in source.components]
    exact = [source for source in sources if SUITE in source.suites]
    sibling = [s for s in sources if any("debian" in uri for uri in s.uris.split())]
    for source in [*exact, *sibling]:
        return source
    raise GoneUpstream(
        "this host's apt knows no Debian archive, so the base's packages cannot be fetched",
        hint="add a Debian source to /etc/apt, or bring the kit's cache from another machine",
    )


def _fetch_error(done: process.Completed, what: str) -> Exception:
    text = done.stdout + done.stderr
    if "No space left" in text:
        return DiskFull("no space left while packages were fetched", hint="free some space")
    if "Hash Sum mismatch" in text:
        return HashMismatch(f"{what}: the archive served other bytes", detail=done.tail)
    if _NO_NETWORK.search(text):
        return IndexUnreachable(
            f"{what} cannot be fetched: the archive does not answer",
            hint="check the network; nothing is needed from it once the cache is filled",
            detail=done.tail,
        )
    return GoneUpstream(
        f"{what} cannot be fetched: the archive has it no longer",
        hint="take it from a bundle, or lock the image again",
        detail=done.tail,
    )


def fetch_debs(packages: Sequence[DebPackage], say: Say) -> None:
    """Bring every locked package into the cache; no apt call when all are there."""
    missing = [package for package in packages if not deb_path(package).is_file()]
    if not missing:
        return
    total = sum(package.size_bytes for package in missing)
    say(f"  base: fetching {len(missing)} Debian packages, {total / 1e6:.0f} MB")
    deb_dir().mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="kit-apt-") as folder,
        tempfile.TemporaryDirectory(prefix="part-", dir=deb_dir()) as part,
    ):
        apt = AptRoot(Path(folder))
        apt.update()
        done = apt.get("download", *(f"{p.name}={p.version}" for p in missing), cwd=Path(part))
        for package in missing:
            found = Path(part) / package.file
            if not found.is_file():
                raise _fetch_error(done, f"{package.name} {package.version}")
            check_sha256(found, package.sha256, f"the Debian package {package.file}")
            deb_path(package).parent.mkdir(exist_ok=True)
            found.replace(deb_path(package))


def file_sha256(path: Path) -> str:
    """Return a file's sha256 in hex."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def base_key(packages: Sequence[DebPackage], epoch: int) -> str:
    """Return the hash of all that goes into a base: packages, time and mmdebstrap's arguments."""
    lines = [f"{p.file} {p.sha256}" for p in packages]
    lines += [str(epoch), *_arguments(packages, Path("repository"), Path("out"))[1:]]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def check_sha256(path: Path, wanted: str, what: str) -> None:
    """Raise `HashMismatch` naming the file unless its bytes are the locked ones."""
    found = file_sha256(path)
    if found != wanted:
        raise HashMismatch(
            f"{what} has sha256 {found[:16]}…, the lock says {wanted[:16]}…",
            hint=f"remove {path} and run it again to fetch it anew",
        )


def base_programs() -> tuple[str, ...]:
    """Return the programs that making a base needs here.

    A user without root maps a range of user ids, which takes a program that root has set up.
    """
    return ("mmdebstrap",) if os.geteuid() == 0 else ("mmdebstrap", "newuidmap")


def missing_base_programs() -> tuple[str, ...]:
    return tuple(each for each in base_programs() if shutil.which(each) is None)


def make_base(packages: Sequence[DebPackage], epoch: int, out: Path) -> None:
    """Unpack exactly these packages into a tar: same bytes on every machine, no network.

    Raises `HashMismatch` naming a package with other bytes, `ToolMissing`, `BuildFailed`.
    """
    tool, *_ = [process.require(each, hint=_TOOLS_HINT) for each in base_programs()]
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="kit-base-", dir=_scratch()) as folder:
        house = Path(folder)
        house.chmod(0o755)
        _fill_repository(packages, house)
        for path in house.iterdir():  # whatever the caller's umask is
            path.chmod(0o644)
        part = out.with_suffix(".part")
        env = {
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "SOURCE_DATE_EPOCH": str(epoch), "LC_ALL": "C.UTF-8", "TZ": "UTC",
            "HOME": "/nonexistent", "TMPDIR": _scratch(),
        }  # fmt: skip
        # the caller's umask would otherwise decide the modes of folders
        shell = ["sh", "-c", 'umask 022; exec "$0" "$@"', tool]
        done = process.run([*shell, *_arguments(packages, house, part)], env=env, timeout_s=900)
        if not done.ok:
            part.unlink(missing_ok=True)
            if "No space left" in done.stderr:
                raise DiskFull("no space left while the base was made", hint="free some space")
            raise BuildFailed("mmdebstrap could not make the image's base", detail=done.tail)
        part.replace(out)


def _scratch() -> str:
    """Return where a base is put together.

    Without root it is done by user ids of a range of the caller's, which cannot enter a private
    folder of the caller's own.
    """
    own = os.environ.get("TMPDIR") if os.geteuid() == 0 else None
    return own or "/var/tmp"  # noqa: S108 - each makes a folder of its own there


def _arguments(packages: Sequence[DebPackage], house: Path, out: Path) -> list[str]:
    names = ",".join(package.name for package in packages)
    arguments = [
        "--mode=" + ("root" if os.geteuid() == 0 else "unshare"),
        "--variant=essential", "--format=tar", "--architectures=amd64", "--quiet",
        "--hook-dir=/usr/share/mmdebstrap/hooks/merged-usr", f"--include={names}",
        '--aptopt=APT::Install-Recommends "false"', '--aptopt=Acquire::Languages "none"',
        # apt's own user cannot read below a private TMPDIR
        '--aptopt=APT::Sandbox::User "root"',
        "--dpkgopt=force-unsafe-io", *(f"--dpkgopt={rule}" for rule in _LEFT_OUT),
        *(f"--customize-hook={hook}" for hook in _CUSTOMIZE),
    ]  # fmt: skip
    return [*arguments, SUITE, str(out), f"deb [trusted=yes] copy://{house} ./"]


def _fill_repository(packages: Sequence[DebPackage], house: Path) -> None:
    """Lay out a local repository of the locked packages, each checked, and its two index files."""
    stanzas = []
    for package in packages:
        source = deb_path(package)
        check_sha256(source, package.sha256, f"the Debian package {package.file}")
        shutil.copyfile(source, house / package.file)
        stanzas.append(_stanza(source, package))
    index = ("\n".join(stanzas) + "\n").encode()
    (house / "Packages").write_bytes(index)
    (house / "Release").write_text(
        f"Suite: {SUITE}\nCodename: {SUITE}\nArchitectures: amd64\nSHA256:\n"
        f" {hashlib.sha256(index).hexdigest()} {len(index)} Packages\n",
        encoding="utf-8",
    )


def _stanza(source: Path, package: DebPackage) -> str:
    control = _control(source)
    return (
        f"{control.rstrip()}\nFilename: ./{package.file}\n"
        f"Size: {package.size_bytes}\nSHA256: {package.sha256}\n"
    )


@functools.lru_cache(maxsize=512)
def _control(source: Path) -> str:
    done = process.run(["dpkg-deb", "-f", source])
    if not done.ok:
        raise BuildFailed(f"{source.name} is no Debian package", detail=done.tail)
    return done.stdout
