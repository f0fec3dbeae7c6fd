"""A second Docker Engine with everything of its own: it may be restarted and its disk filled.

Its data root is a small ext4 in a file, and it has a network of its own, so that it never meets
the other engine's firewall. Needs root.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import docker
import requests
from small_disk import mount, unmount

from kit import engine

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
DISK_GIB = 9  # an image and once more what loading it takes


@dataclass
class OwnEngine:
    """An engine whose files are all below `folder`; `disk` is its file system."""

    folder: Path
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def host(self) -> str:
        return f"unix://{self.folder}/docker.sock"

    @property
    def disk(self) -> Path:
        return self.folder / "disk"

    def client(self) -> docker.DockerClient:
        return docker.DockerClient(base_url=self.host, timeout=120)

    def start(self) -> None:
        """Start it and wait until it answers."""
        config = {
            "data-root": str(self.disk / "data"),
            "exec-root": str(self.folder / "exec"),
            "pidfile": str(self.folder / "pid"),
            "hosts": [self.host],
            "bridge": "none",
            "storage-driver": "overlay2",
            "default-address-pools": [{"base": "10.213.0.0/16", "size": 24}],
            "containerd-namespace": "kit-test",
            "containerd-plugins-namespace": "kit-test-plugins",
        }
        path = self.folder / "daemon.json"
        path.write_text(json.dumps(config), "utf-8")
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    "unshare",
                    "--net",
                    "sh",
                    "-c",
                    'ip link set lo up; exec dockerd --config-file "$0"',
                    path,
                ],
                cwd="/",
                env={"PATH": PATH, "HOME": "/root", "LC_ALL": "C.UTF-8"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._wait_until_it_answers()

    def _wait_until_it_answers(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + 90
        while True:
            with contextlib.suppress(requests.RequestException, docker.errors.DockerException):
                client = self.client()
                client.ping()
                client.close()
                return
            told = (self.folder / "log").read_text("utf-8", errors="replace")[-3000:]
            assert self._process.poll() is None, told
            assert time.monotonic() < deadline, told
            time.sleep(0.2)

    def end(self, signum: signal.Signals = signal.SIGTERM) -> None:
        """End it: TERM stops its containers first, KILL leaves them as they are."""
        if self._process is not None:
            self._process.send_signal(signum)
            self._process.wait(120)
            self._process = None

    @contextlib.contextmanager
    def full(self) -> Iterator[None]:
        """Let nothing be free on its disk while the block runs, whatever is removed there."""
        filler, stop = self.disk / "filler", threading.Event()

        def fill() -> None:
            size = 0
            with filler.open("wb") as out:
                while True:
                    size = _take_all(out.fileno(), size)
                    if stop.wait(0.05):
                        return

        thread = threading.Thread(target=fill)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
            filler.unlink()


def _take_all(file: int, size: int) -> int:
    """Let a file of that size grow until nothing more fits; return its size then."""
    piece = 1 << 30
    while piece >= 4096:
        try:
            os.posix_fallocate(file, size, piece)
            size += piece
        except OSError:
            piece //= 2
    return size


def load_image(own: OwnEngine, reference: str) -> None:
    """Bring an image from the machine's engine to this one."""
    program = engine.cli_program()
    saved = subprocess.Popen(
        [program, "save", reference], stdout=subprocess.PIPE, env=engine.cli_env()
    )
    loaded = subprocess.run(
        [program, "load"],
        stdin=saved.stdout,
        env={**os.environ, "DOCKER_HOST": own.host},
        capture_output=True,
        check=False,
    )
    assert saved.wait() == 0
    assert loaded.returncode == 0, loaded.stderr


@contextlib.contextmanager
def own_engine(*references: str) -> Iterator[OwnEngine]:
    """Run a second engine that has these images; nothing of it is there after the block."""
    folder = Path(tempfile.mkdtemp(prefix="kit-engine-"))  # short: a socket's path has 108 bytes
    own = OwnEngine(folder)
    disk = folder / "disk.ext4"
    try:
        own.disk.mkdir()
        with disk.open("wb") as out:
            out.truncate(DISK_GIB << 30)
        subprocess.run(["mkfs.ext4", "-q", "-m", "0", disk], check=True)
        mount("-o", "loop", disk, own.disk)
        own.start()
        for reference in references:
            load_image(own, reference)
        yield own
    finally:
        own.end()
        _end_containerd(folder)
        unmount(own.disk)
        shutil.rmtree(folder, ignore_errors=True)


def _end_containerd(folder: Path) -> None:
    """End the containerd of an engine that was killed: it outlives it."""
    pid = folder / "exec" / "containerd" / "containerd.pid"
    with contextlib.suppress(OSError, ValueError):
        number = int(pid.read_text("ascii"))
        if str(folder) in Path(f"/proc/{number}/cmdline").read_text("utf-8"):
            os.kill(number, signal.SIGTERM)
