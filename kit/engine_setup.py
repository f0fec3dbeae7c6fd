"""Brings up a Docker Engine on a bare Debian or Ubuntu machine; elsewhere says what to type."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kit import engine, process
from kit.errors import (
    EngineForbidden,
    EngineMissing,
    EngineSetupFailed,
    EngineTooOld,
    EngineUnreachable,
    KitError,
)

Say = Callable[[str], None]
_ROOT = Path("/")
_LOG = Path("/var/log/dockerd.log")
_START_TIMEOUT_S = 90.0
_BASE_TOOLS = {"mmdebstrap": "mmdebstrap", "newuidmap": "uidmap"}
"""Programs that build an image's base, and their packages; the second is for users without root."""
# Debian: the packages taken from a newer suite, and that suite, where the release's are too old.
_ENGINE_PACKAGES = {
    "debian": ("docker.io", "docker-cli", "docker-compose", "docker-buildx", "containerd"),
    "ubuntu": ("docker.io", "docker-compose-v2", "docker-buildx"),
}
_NEWER_SUITE = {"bookworm": "trixie"}


@dataclass(frozen=True)
class AptSource:
    """One entry of the host's own apt sources: enough to name another suite of the same archive."""

    uris: str
    suites: tuple[str, ...]
    components: tuple[str, ...]
    signed_by: str


def ensure_engine(say: Say) -> dict[str, str | None]:
    """Return the versions of a working engine, installing and starting one where it can.

    An engine that already works is never reconfigured. Raises `EngineMissing` and the other
    engine errors where nothing can be done here, `EngineSetupFailed` where the doing failed.
    """
    problem = _problem()
    if problem is None:
        _install_base_tools(say)
        return engine.versions()
    if engine.endpoint().chosen_by != "default" or isinstance(problem, EngineForbidden):
        raise problem
    family = _family()
    if family is None or os.geteuid() != 0:
        raise EngineMissing(problem.message, hint=_manual_hint(family)) from None
    if not _installed("dockerd") or isinstance(problem, EngineTooOld) or _lacks_plugins():
        _install_engine(family, say)
    _install_base_tools(say)
    _start(say)
    problem = _problem()
    if problem is not None:
        raise EngineSetupFailed(problem.message, hint=problem.hint, detail=problem.detail)
    return engine.versions()


def _problem() -> KitError | None:
    try:
        engine.connect().close()
        engine.cli_program()
    except (EngineMissing, EngineTooOld, EngineForbidden, EngineUnreachable) as error:
        return error
    return None


def _lacks_plugins() -> bool:
    try:
        engine.cli_program()
    except EngineMissing:
        return True
    return False


def _installed(program: str) -> bool:
    path = os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin"
    return shutil.which(program, path=path) is not None


def _os_release(root: Path = _ROOT) -> dict[str, str]:
    try:
        text = (root / "etc/os-release").read_text(encoding="utf-8")
    except OSError:
        return {}
    pairs = (line.split("=", 1) for line in text.splitlines() if "=" in line)
    return {key: value.strip().strip('"') for key, value in pairs}


def _family() -> str | None:
    told = _os_release()
    names = [told.get("ID", ""), *told.get("ID_LIKE", "").split()]
    known = next((name for name in names if name in _ENGINE_PACKAGES), None)
    return known if known and _installed("apt-get") else None


def _manual_hint(family: str | None) -> str:
    if family is None:
        return "install Docker Engine >= 26 with its compose and buildx plugins and start it"
    return "run `sudo nox -s engine`, or as root: apt-get install " + " ".join(
        _ENGINE_PACKAGES[family]
    )


def _apt(*args: str, say: Say, what: str) -> None:
    env = os.environ | {"DEBIAN_FRONTEND": "noninteractive", "NEEDRESTART_MODE": "l"}
    say(f"  apt-get {' '.join(args)}")
    done = process.run(
        ["apt-get", "-q", "-o", "DPkg::Lock::Timeout=120", *args], env=env, timeout_s=900
    )
    if not done.ok:
        raise EngineSetupFailed(
            f"apt-get could not {what}",
            hint="check the network and the apt sources, then run it again",
            detail=done.tail,
        )


def _install_base_tools(say: Say) -> None:
    """Install what builds the base, where this user may; else `kit.debian` says what lacks."""
    missing = [package for tool, package in _BASE_TOOLS.items() if not _installed(tool)]
    if not missing or _family() is None or os.geteuid() != 0:
        return
    _apt("update", say=say, what="refresh its lists")
    what = f"install {' '.join(missing)}"
    _apt("install", "-y", "--no-install-recommends", *missing, say=say, what=what)


def _install_engine(family: str, say: Say) -> None:
    tools = (package for tool, package in _BASE_TOOLS.items() if not _installed(tool))
    packages = [*_ENGINE_PACKAGES[family], *tools]
    codename = _os_release().get("VERSION_CODENAME", "")
    if family == "debian" and codename in _NEWER_SUITE:
        add_newer_suite(_ROOT, codename, _NEWER_SUITE[codename], _ENGINE_PACKAGES[family])
    _apt("update", say=say, what="refresh its lists")
    # Installing must not start the daemon with defaults that this host cannot run.
    _apt(
        "install", "-y", "--no-install-recommends", "iptables", "ca-certificates", *packages,
        say=say, what="install the engine",
    )  # fmt: skip


def add_newer_suite(root: Path, codename: str, suite: str, packages: tuple[str, ...]) -> None:
    """Let apt take these packages, and nothing else, from a newer suite of the host's own archive.

    Writes one sources entry and one preferences file below `root`; the address and the key are
    those of the host's entry for its own release. Raises `EngineSetupFailed` without one.
    """
    own = next(
        (s for s in read_sources(root) if codename in s.suites and "main" in s.components), None
    )
    if own is None:
        raise EngineSetupFailed(
            f"apt's sources have no entry for {codename} main, so none for {suite} can be derived",
            hint="add the distribution's sources to /etc/apt, or install Docker Engine >= 26",
        )
    text = f"Types: deb\nURIs: {own.uris}\nSuites: {suite}\nComponents: main\n"
    if own.signed_by:
        text += f"Signed-By: {own.signed_by}\n"
    pin = f"Pin: release n={suite}\nPin-Priority:"
    _write(root / f"etc/apt/sources.list.d/vllm-kit-{suite}.sources", text)
    _write(
        root / f"etc/apt/preferences.d/vllm-kit-{suite}",
        f"Package: *\n{pin} -10\n\nPackage: {' '.join(packages)}\n{pin} 990\n",
    )


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    path.chmod(0o644)


def read_sources(root: Path = _ROOT) -> list[AptSource]:
    """Read the host's binary-package sources, both of apt's formats, in apt's order."""
    folder = root / "etc/apt"
    lists = [folder / "sources.list", *sorted((folder / "sources.list.d").glob("*.list"))]
    found = [source for path in lists for source in _parse_list(_text(path))]
    for path in sorted((folder / "sources.list.d").glob("*.sources")):
        found += _parse_deb822(_text(path))
    return found


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def _parse_list(text: str) -> list[AptSource]:
    found = []
    for line in text.splitlines():
        words = line.split("#", 1)[0].strip()
        if not words.startswith("deb ") and not words.startswith("deb\t"):
            continue
        rest, signed_by = words[3:].strip(), ""
        if rest.startswith("["):
            options, _, rest = rest[1:].partition("]")
            pairs = dict(o.split("=", 1) for o in options.split() if "=" in o)
            signed_by = pairs.get("signed-by", "")
        uri, suite, *components = [*rest.split(), "", ""][: max(2, len(rest.split()))]
        found.append(AptSource(uri, (suite,), tuple(components), signed_by))
    return found


def _parse_deb822(text: str) -> list[AptSource]:
    found = []
    for block in text.replace("\r", "").split("\n\n"):
        fields: dict[str, str] = {}
        key = ""
        for line in block.splitlines():
            if line.startswith("#"):
                continue
            if line[:1] in (" ", "\t"):
                fields[key] = f"{fields.get(key, '')}\n{line}"
            elif ":" in line:
                key, _, value = line.partition(":")
                key = key.strip().lower()
                fields[key] = value.strip()
        if "deb" in fields.get("types", "").split() and fields.get("enabled", "yes") != "no":
            found.append(
                AptSource(
                    " ".join(fields.get("uris", "").split()),
                    tuple(fields.get("suites", "").split()),
                    tuple(fields.get("components", "").split()),
                    fields.get("signed-by", ""),
                )
            )
    return found


def _start(say: Say) -> None:
    if _problem() is None:
        return
    systemd = Path("/run/systemd/system").is_dir()
    say("  starting the daemon" + (" with systemd" if systemd else ""))
    if systemd:
        done = process.run(["systemctl", "enable", "--now", "docker"], timeout_s=120)
        if not done.ok:
            raise EngineSetupFailed(
                "systemd could not start docker",
                hint="see `journalctl -u docker`",
                detail=done.tail,
            )
        _wait_until_it_answers(None, None)
        return
    _wait_until_it_answers(*_start_detached())


def _start_detached(program: str = "dockerd", log: Path = _LOG) -> tuple[int, Path]:
    """Start the daemon so that it outlives the caller; return its process id and its log."""
    script = 'echo $$; exec "$1" >>"$0" 2>&1 </dev/null'
    words = ["setsid", "--fork", "sh", "-c", script, str(log), program]
    done = process.run(words, env=_daemon_env(), cwd=_ROOT, timeout_s=30)
    if not done.ok or not done.stdout.strip().isdigit():
        raise EngineSetupFailed("the daemon could not be started", detail=done.tail)
    return int(done.stdout), log


def _daemon_env() -> dict[str, str]:
    """Keep only what a daemon needs, so that it does not live on with the caller's environment."""
    kept = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy")
    env = {key: os.environ[key] for key in kept if key in os.environ}
    path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    return env | {"PATH": path, "HOME": "/root", "LC_ALL": "C.UTF-8"}


def _wait_until_it_answers(pid: int | None, log: Path | None) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while (problem := _problem()) is not None:
        ended = pid is not None and not Path(f"/proc/{pid}").exists()
        if ended or time.monotonic() > deadline:
            tail = _text(log).splitlines()[-20:] if log is not None else []
            raise EngineSetupFailed(
                "the daemon ended right after its start" if ended else problem.message,
                hint=f"see {log}" if log is not None else "see `journalctl -u docker`",
                detail="\n".join(tail),
            )
        time.sleep(0.2)
