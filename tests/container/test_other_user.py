"""README's commands for somebody else: no root, odd names, a bare locale, a tight umask."""

from __future__ import annotations

import grp
import json
import os
import pwd
import secrets
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import docker
import pytest
from commands import CACHED, checkout, objects_of_runs, only_manifest

from kit import debian
from kit.image import find_image
from kit.lock_file import read_identity_lock
from kit.paths import cache_dir

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(900),
    pytest.mark.skipif(os.geteuid() != 0, reason="makes a user"),
]

SOCKET = Path("/var/run/docker.sock")


def python_for_all() -> tuple[str, dict[str, str]]:
    """Return a Python that every user may start, and what it needs to have our packages."""
    real = Path(sys.executable).resolve()
    if all(folder.stat().st_mode & 0o001 for folder in (real, *real.parents)):
        return sys.executable, {}
    minor = f"python{sys.version_info.major}.{sys.version_info.minor}"
    found = shutil.which(minor, path="/usr/bin:/usr/local/bin")
    assert found is not None, f"{sys.executable} is root's alone, and there is no other {minor}"
    return found, {"PYTHONPATH": sysconfig.get_path("purelib")}


@dataclass(frozen=True)
class Somebody:
    """A user of the group that may use the engine; `clone` is a checkout of theirs."""

    name: str
    home: Path
    clone: Path

    def run(self, *words: str, timeout_s: float = 400) -> subprocess.CompletedProcess[str]:
        """Run Python in the clone as this user, in a surrounding of nothing but this."""
        program, own = python_for_all()
        return subprocess.run(
            [program, *words],
            cwd=self.clone,
            env={
                **own,
                "HOME": str(self.home),
                "LC_ALL": "C",
                "TZ": "Asia/Kathmandu",
                "PATH": "/usr/local/bin:/usr/bin:/bin",
            },
            user=self.name,
            group=pwd.getpwnam(self.name).pw_gid,
            extra_groups=[SOCKET.stat().st_gid],
            umask=0o077,
            capture_output=True,
            encoding="utf-8",
            timeout=timeout_s,
            check=False,
        )


@pytest.fixture
def somebody(built: object) -> Iterator[Somebody]:
    """Make a user whose home is not ASCII, with a clone in a folder whose name has spaces.

    The model is taken from our own cache, so that the test downloads nothing.
    """
    name = f"kit-{secrets.token_hex(3)}"
    home = Path(f"/tmp/{name}") / "hömé 家"
    home.parent.mkdir(mode=0o755)
    home.parent.chmod(0o755)
    group = grp.getgrgid(SOCKET.stat().st_gid).gr_name
    subprocess.run(
        ["useradd", "--create-home", "--home-dir", home, "--groups", group, name], check=True
    )
    try:
        clone = checkout(home / "päth with spaces" / "vllm kit")
        own = home / ".cache" / "vllm-kit"
        for part in ("models", "identity-2"):
            shutil.copytree(cache_dir() / part, own / part)
        subprocess.run(["chown", "-R", f"{name}:", home], check=True)
        subprocess.run(["chmod", "-R", "go=", home], check=True)  # as under its umask
        yield Somebody(name, home, clone)
    finally:
        subprocess.run(["userdel", name], check=True)
        shutil.rmtree(home.parent)


def test_readme_s_commands_work_for_a_user_without_root(
    somebody: Somebody, client: docker.DockerClient, stub_file: Callable[..., str], tmp_path: Path
) -> None:
    """The first: an engine is found, an experiment runs. The second: tests run."""
    found = somebody.run("-m", "kit", "engine")
    assert found.returncode == 0, found.stderr
    stub = somebody.clone / "stüb.json"
    stub.write_text(Path(stub_file(**CACHED)).read_text("utf-8"), "utf-8")
    stub.chmod(0o644)
    words = ("run", "exp1_prefix_cache", "--platform", "cpu", "--quick", "--json")
    ran = somebody.run("-m", "kit", *words, "--stub", "stüb.json")
    assert "Traceback" not in ran.stderr
    assert ran.returncode in (0, 4), ran.stderr  # 4: a busy machine, which is no matter here
    runs = somebody.clone / "runs"
    manifest, run = only_manifest(runs)
    assert manifest.status == "complete"
    assert manifest.started_utc.endswith("Z")
    assert objects_of_runs(client, runs) == []
    uid = pwd.getpwnam(somebody.name).pw_uid
    assert {p.stat().st_uid for p in run.rglob("*")} == {uid}
    assert json.loads(ran.stdout)["run"] == str(run)
    again = somebody.run("-m", "kit", "analyse", str(run))
    assert again.returncode == 0, again.stderr
    tests = ("tests/unit/test_docs.py", "tests/unit/test_manifest_robust.py")
    tested = somebody.run("-m", "pytest", "-q", "-p", "no:cacheprovider", *tests)
    assert tested.returncode == 0, tested.stdout + tested.stderr


BASE = """
import sys
from pathlib import Path
from kit import debian
from kit.image import find_image
from kit.lock_file import read_lock

lock = read_lock(find_image("v0.32.0-cpu"))
out = Path(sys.argv[1])
debian.make_base(lock.base, lock.source_date_epoch, out)
print(debian.file_sha256(out))
"""


def test_the_base_is_the_locked_one_without_root(somebody: Somebody) -> None:
    """Other user ids of theirs make it, which enter neither their home nor what they wrote."""
    debs = somebody.home / ".cache" / "vllm-kit" / "debs"
    shutil.copytree(debian.deb_dir(), debs)
    subprocess.run(["chown", "-R", f"{somebody.name}:", debs], check=True)
    locked = read_identity_lock(find_image("v0.32.0-cpu"))
    assert locked is not None
    made = somebody.run("-c", BASE, str(somebody.home / "base.tar"))
    assert made.returncode == 0, made.stderr
    assert made.stdout.split() == [locked.base_sha256]
