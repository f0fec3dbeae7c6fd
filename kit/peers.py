"""Others' load generators: how each one is asked for a load, and where it leaves its records.

GuideLLM and AIPerf live in locked environments of their own, which `nox -s bench -- --peers` makes
(`requirements/peer-NAME.lock`); `vllm bench serve` is the one inside the kit's own CPU image.
"""

from __future__ import annotations

import json
import os
import resource
import secrets
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docker
import docker.errors
import docker.types

from kit import engine, model, owner, process
from kit.build import ensure_image
from kit.errors import ClientFailed, ToolMissing
from kit.image import ImageRecord, find_image
from kit.model import find_model
from kit.paths import ROOT
from kit.platform import find_platform

Say = Callable[[str], None]

PROMPT_TOKENS = 8
LIMIT_S = 600.0
_OUT, _MODEL = "/out", "/model"
_CACHED = "kit/tokenizer"


@dataclass(frozen=True)
class Cell:
    """One load: so many streams, all at once (`burst`) or evenly over a second, on a port."""

    streams: int
    mode: str
    tokens: int
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def staggered(self) -> bool:
        return self.mode == "staggered"


@dataclass(frozen=True)
class Peer:
    """One tool: `words` is its command line for a load, a tokenizer and a folder for its records.

    `records` is the file of single requests below that folder.
    """

    name: str
    version: str
    words: Callable[[Cell, str, str], list[str]]
    records: str
    start: Callable[[Sequence[str], Path, int, Watch], None]
    tokenizer: str


Watch = Callable[[Sequence[int] | None], None]
"""Told the processes of the tool as soon as they run; None: those that this one has started."""


def peers(say: Say) -> list[Peer]:
    """Return all peers, ready to run; raises `ToolMissing` naming what was not made yet."""
    image = find_image(find_platform("cpu").default_image)
    built = ensure_image(image, say)
    folder = model.ensure_model(find_model(model.DEFAULT), built, say).path
    inside = _Container(image, built.image_id, folder)
    found = [
        Peer(
            name="vllm bench serve",
            version=image.release or image.id,
            words=vllm_words,
            records="vllm.json",
            start=inside.run,
            tokenizer=_MODEL,
        )
    ]
    for name, words, records in (
        ("guidellm", guidellm_words, "guidellm.json"),
        ("aiperf", aiperf_words, "profile_export.jsonl"),
    ):
        program = _program(name)
        found.append(
            Peer(
                name=name,
                version=_version(program, name),
                words=words,
                records=records,
                start=_Local(program, folder).run,
                tokenizer=_CACHED,
            )
        )
    return found


# -- what each one is told ---------------------------------------------------------------------


def vllm_words(cell: Cell, tokenizer: str, out: str) -> list[str]:
    """Return the words after `vllm`."""
    rate = str(cell.streams) if cell.staggered else "inf"
    return [
        *("bench", "serve", "--backend", "openai", "--base-url", cell.url),
        *("--endpoint", "/v1/completions", "--model", "stub", "--tokenizer", tokenizer),
        *("--dataset-name", "random", "--random-input-len", str(PROMPT_TOKENS)),
        *("--random-output-len", str(cell.tokens), "--num-prompts", str(cell.streams)),
        *("--request-rate", rate, "--burstiness", "inf", "--request-id-prefix", "r"),
        *("--ready-check-timeout-sec", "0", "--save-result", "--save-detailed"),
        *("--result-dir", out, "--result-filename", "vllm.json"),
    ]


def guidellm_words(cell: Cell, tokenizer: str, out: str) -> list[str]:
    """Return the words after `guidellm`."""
    backend = {"kind": "openai_http", "target": cell.url, "model": "stub"}
    backend |= {"request_format": "/v1/completions"}
    data = {"kind": "synthetic_text", "prompt_tokens": PROMPT_TOKENS}
    data |= {"output_tokens": cell.tokens}
    if cell.staggered:
        profile: dict[str, Any] = {"kind": "constant", "rate": cell.streams}
    else:
        profile = {"kind": "concurrent", "streams": cell.streams}
    told: dict[str, Mapping[str, Any]] = {
        "--backend": backend,
        "--data": data,
        "--profile": profile,
        "--tokenizer": {"kind": "huggingface_auto", "model": tokenizer},
        "--constraint": {"kind": "max_requests", "count": cell.streams},
        "--output": {"kind": "json", "path": f"{out}/guidellm.json"},
    }
    return ["run", *(w for k, v in told.items() for w in (k, json.dumps(v))), "--disable-console"]


def aiperf_words(cell: Cell, tokenizer: str, out: str) -> list[str]:
    """Return the words after `aiperf`; it is spared the counting of tokens, which costs CPU."""
    if cell.staggered:
        load = ["--request-rate", str(cell.streams), "--arrival-pattern", "constant"]
    else:
        load = ["--concurrency", str(cell.streams)]
    return [
        *("profile", "--model", "stub", "--url", cell.url, "--endpoint-type", "completions"),
        *("--streaming", "--tokenizer", tokenizer, "--use-server-token-count", *load),
        *("--request-count", str(cell.streams), "--random-seed", "1"),
        *("--synthetic-input-tokens-mean", str(PROMPT_TOKENS)),
        *("--output-tokens-mean", str(cell.tokens), "--output-tokens-stddev", "0"),
        *("--extra-inputs", "ignore_eos:true", "--output-artifact-dir", out, "--ui", "none"),
        *("--no-gpu-telemetry", "--no-server-metrics"),
    ]


# -- how each one is started -------------------------------------------------------------------


def _program(name: str) -> Path:
    program = ROOT / ".nox" / f"kit-peer-{name}" / "bin" / name
    if not program.is_file():
        raise ToolMissing(
            f"{name} is not installed for the kit", hint="`nox -s bench -- --peers` makes it"
        )
    return program


def _version(program: Path, name: str) -> str:
    code = f"import importlib.metadata as m; print(m.version({name!r}))"
    return process.run([program.with_name("python"), "-c", code], timeout_s=60).stdout.strip()


@dataclass(frozen=True)
class _Local:
    """A tool of a locked environment, with a home of its own and nothing from the caller's."""

    program: Path
    tokenizer: Path

    def run(self, words: Sequence[str], out: Path, core: int, watch: Watch) -> None:
        home = out / "home"
        _lay_out_cache(home, self.tokenizer)
        path = f"{self.program.parent}:/usr/bin:/bin"
        env = {"PATH": path, "HOME": str(home), "HF_HUB_OFFLINE": "1", "LC_ALL": "C.UTF-8"}
        watch(None)
        argv = ["taskset", "--cpu-list", str(core), str(self.program), *words]
        try:
            left = process.run(argv, env=env, cwd=out, timeout_s=LIMIT_S)
        except subprocess.TimeoutExpired:
            raise ClientFailed(f"{self.program.name} did not end within {LIMIT_S:g} s") from None
        if not left.ok:
            raise ClientFailed(f"{self.program.name} ended with an error", detail=left.tail)


def _lay_out_cache(home: Path, model: Path) -> None:
    """Offer a model's folder as `_CACHED` to what looks for one offline: AIPerf takes no path."""
    cached = home / ".cache" / "huggingface" / "hub" / f"models--{_CACHED.replace('/', '--')}"
    (cached / "snapshots").mkdir(parents=True)
    (cached / "snapshots" / "local").symlink_to(model)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("local", "ascii")


@dataclass(frozen=True)
class _Container:
    """The image's own `vllm`, on the host's network: what another one costs is not its fault."""

    image: ImageRecord
    image_id: str
    tokenizer: Path

    def run(self, words: Sequence[str], out: Path, core: int, watch: Watch) -> None:
        run_id = f"bench{secrets.token_hex(6)}"
        out.chmod(0o777)  # written to by the image's own user
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        client = engine.connect()
        with owner.claim(run_id, Path()):
            try:
                container = client.containers.run(
                    self.image_id,
                    list(words),
                    entrypoint=list(self.image.entrypoint),
                    user=self.image.user,
                    detach=True,
                    labels={owner.LABEL: run_id},
                    network_mode="host",
                    cpuset_cpus=str(core),
                    read_only=True,
                    cap_drop=["ALL"],
                    security_opt=["no-new-privileges"],
                    ulimits=[docker.types.Ulimit(name="nofile", soft=files, hard=files)],
                    tmpfs={"/tmp": ""},  # noqa: S108 - inside the container
                    environment={"HOME": "/tmp", "HF_HUB_OFFLINE": "1"},  # noqa: S108
                    volumes={
                        str(out): {"bind": _OUT, "mode": "rw"},
                        str(self.tokenizer): {"bind": _MODEL, "mode": "ro"},
                    },
                )
                container.reload()
                watch([int(container.attrs["State"]["Pid"])])
                status = container.wait(timeout=LIMIT_S)["StatusCode"]
                if status:
                    tail = container.logs(tail=30).decode("utf-8", "replace")
                    raise ClientFailed("vllm bench serve ended with an error", detail=tail)
            except docker.errors.DockerException as error:
                raise ClientFailed(f"vllm bench serve could not be run: {error}") from None
            finally:
                owner.remove_objects(client, run_id)
                client.close()


def out_of(peer: Peer, folder: Path) -> str:
    """Return how a peer names the folder for its records."""
    return _OUT if peer.tokenizer == _MODEL else os.fspath(folder)
