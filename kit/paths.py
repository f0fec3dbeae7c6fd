"""Where things are: the checkout, the cache, the runs. Nothing else computes a location."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCKER = ROOT / "docker"
LOCKS = DOCKER / "locks"
COMPOSE = ROOT / "compose"
INSIDE = ROOT / "kit" / "inside"
TEMPLATES = ROOT / "kit" / "templates"
MANIFESTS = ROOT / "manifests"
RUNS = ROOT / "runs"


def cache_dir() -> Path:
    """Return the folder for wheels, base packages and models; every byte in it is hash-checked.

    `KIT_CACHE` overrides `$XDG_CACHE_HOME/vllm-kit` (default `~/.cache/vllm-kit`).
    """
    chosen = os.environ.get("KIT_CACHE")
    if chosen:
        return Path(chosen).expanduser().resolve()
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "vllm-kit"
