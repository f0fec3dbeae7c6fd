"""What stands around a run that compose, Docker or vLLM would listen to, and a run does not."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from kit.paths import COMPOSE, ROOT, cache_dir
from kit.store import write_json

_PREFIXES = ("BUILDKIT_", "BUILDX_", "COMPOSE_", "DOCKER_", "KIT_", "VLLM_")
_HEARD = frozenset(
    {
        *("KIT_CACHE", "KIT_WHEEL_INDEX"),
        *("DOCKER_CERT_PATH", "DOCKER_CONFIG", "DOCKER_CONTEXT", "DOCKER_HOST"),
        *("DOCKER_TLS", "DOCKER_TLS_VERIFY"),
    }
)
_FILES = tuple(
    f"{stem}.{suffix}"
    for stem in ("docker-compose", "docker-compose.override", "compose", "compose.override")
    for suffix in ("yml", "yaml")
)


def ignored(environment: Mapping[str, str], folders: Iterable[Path] = (ROOT, COMPOSE)) -> list[str]:
    """Return the names of variables and files that a run ignores though another tool would not."""
    prefixes = (*_PREFIXES, "PYTHON") if sys.flags.ignore_environment else _PREFIXES
    return [
        *sorted(n for n in environment if n.startswith(prefixes) and n not in _HEARD),
        *_stray_files({*folders, Path.cwd()}),
    ]


def _stray_files(folders: Iterable[Path]) -> Iterator[str]:
    for folder in sorted(folders):
        names = (*_FILES, ".env") if folder != COMPOSE else _FILES  # whose .env `kit use` writes
        yield from (str(folder / name) for name in names if (folder / name).is_file())


def plain_docker_config(own: Path) -> Path:
    """Return a Docker configuration folder that holds nothing but where `own` has plugins.

    A proxy in the caller's configuration would reach every container, its password with it.
    """
    folder = cache_dir() / "docker"
    write_json(folder / "config.json", {"cliPluginsExtraDirs": [os.fspath(own / "cli-plugins")]})
    return folder
