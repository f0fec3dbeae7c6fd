"""A real Slurm of the test's own on this machine: a controller and several `slurmd -N`.

Own ports, folders, munge key and socket; nothing outside the given folder is read or written, and
`stop` ends everything that was started, jobs included.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scancel", "srun")
READY_S = 40.0

CONFIG = """
ClusterName={name}
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
SlurmdTimeout=10
SlurmctldTimeout=10
KillWait=15
MinJobAge=2
JobRequeue=1
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdSpoolDir={folder}/spool.%n
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
SchedulerParameters=batch_sched_delay=1,sched_interval=2,bf_interval=2
SlurmctldParameters=idle_on_node_suspend
{nodes}
PartitionName=all Nodes={names} Default=YES MaxTime=INFINITE State=UP
"""


def is_installed() -> bool:
    return all(shutil.which(program, path=_path()) for program in PROGRAMS)


def _path() -> str:
    return f"{os.environ['PATH']}:/usr/sbin"


@dataclass
class Cluster:
    """What runs, by name: munged, slurmctld and one slurmd a node."""

    folder: Path
    names: Sequence[str]
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        """What a command needs in order to speak to this cluster."""
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def start(self) -> None:
        """Start everything and wait until every node is idle."""
        for name in ("state", "munge"):
            (self.folder / name).mkdir(parents=True)
        self._write_config()
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)
        self.folder.chmod(0o755)
        munge = ["munged", "--foreground", "--force", f"--key-file={key}", "--num-threads=2"]
        munge += [f"--{kind}-file={self.folder}/munge.{kind}" for kind in ("pid", "log", "seed")]
        self._start("munged", [*munge, f"--socket={self.folder}/munge.socket"])
        _until(lambda: (self.folder / "munge.socket").exists(), "munged opens its socket")
        self._start("slurmctld", ["slurmctld", "-D", "-c"])
        for name in self.names:
            self.start_node(name)
        _until(lambda: self.idle() == set(self.names), "every node is idle")

    def start_node(self, name: str) -> None:
        (self.folder / f"spool.{name}").mkdir(exist_ok=True)
        self._start(name, ["slurmd", "-D", "-N", name])

    def idle(self) -> set[str]:
        told = self.ask("sinfo", "-h", "-N", "-o", "%N %T").splitlines()
        return {line.split()[0] for line in told if line.endswith(" idle")}

    def ask(self, *words: str) -> str:
        """Return what a Slurm command prints."""
        done = subprocess.run(
            words, env=self._env(), capture_output=True, text=True, check=False, timeout=30
        )
        return done.stdout

    def lose(self, name: str) -> None:
        """Kill a node as a power cut does: its daemon, its steps, and all that they had started.

        All at one moment, so stopped first: a step daemon that outlives its job by a millisecond
        tells the controller that the job failed, which no node without power does.
        """
        for signum in (signal.SIGSTOP, signal.SIGKILL):
            for _ in range(3):  # a process may just have been starting another
                for pid in self._of_node(name):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signum)
        self.running.pop(name).wait(10)

    def stop(self) -> None:
        """End everything, jobs first."""
        for name in self.names:
            for pid in self._of_node(name):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for child in reversed(self.running.values()):
            child.terminate()
            try:
                child.wait(10)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait(10)

    def _of_node(self, name: str) -> list[int]:
        """Return the processes of one node: the daemon, its steps, and what runs in its jobs."""
        found = []
        mine = f"SLURM_CONF={self.folder}/slurm.conf".encode()
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            with contextlib.suppress(OSError):
                words = (entry / "cmdline").read_bytes().split(b"\0")
                seen = (entry / "environ").read_bytes().split(b"\0")
                daemon = words[:1] == [b"slurmd"] and name.encode() in words
                inside = f"SLURMD_NODENAME={name}".encode() in seen
                if mine in seen and (daemon or inside):
                    found.append(int(entry.name))
        daemons = [child.pid for key, child in self.running.items() if key == name]
        return [*daemons, *(pid for pid in found if pid not in daemons), *self._steps(name)]

    def _steps(self, name: str) -> list[int]:
        """Return the step daemons of a node, which carry its spool folder among their open files"""
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            with contextlib.suppress(OSError):
                if not (entry / "cmdline").read_bytes().startswith(b"slurmstepd"):
                    continue
                opened = [os.readlink(each) for each in (entry / "fd").iterdir()]
                spool = f"{self.folder}/spool.{name}"
                log = f"{self.folder}/slurmd.{name}.log"
                if any(each.startswith((spool, log)) for each in opened):
                    found.append(int(entry.name))
        return found

    def _start(self, name: str, words: list[str]) -> None:
        with (self.folder / f"{name}.out").open("ab") as out:
            self.running[name] = subprocess.Popen(
                words, env=self._env(), stdout=out, stderr=out, cwd=self.folder
            )

    def _env(self) -> dict[str, str]:
        return {**os.environ, **self.environment, "PATH": _path()}

    def _write_config(self) -> None:
        ports = _free_ports(len(self.names) + 1)
        host = socket.gethostname()
        nodes = [
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2 "
            "RealMemory=4000 Feature=small State=UNKNOWN"
            for name, port in zip(self.names, ports[1:], strict=True)
        ]
        text = CONFIG.format(
            name=f"kit{os.getpid()}",
            host=host,
            port=ports[0],
            folder=self.folder,
            nodes="\n".join(nodes),
            names=",".join(self.names),
        )
        (self.folder / "slurm.conf").write_text(text, "utf-8")
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n", "utf-8")


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as held:
        probes = [held.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]


def _until(holds: object, what: str) -> None:
    deadline = time.monotonic() + READY_S
    while not holds():  # type: ignore[operator]
        assert time.monotonic() < deadline, f"not within {READY_S:.0f} s: {what}"
        time.sleep(0.2)


@contextlib.contextmanager
def cluster(folder: Path, names: Sequence[str]) -> Iterator[Cluster]:
    """Run a cluster with these nodes while the block runs."""
    made = Cluster(folder, names)
    try:
        made.start()
        yield made
    finally:
        made.stop()
