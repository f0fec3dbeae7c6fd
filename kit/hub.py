"""Fetches a model repository from a hub, by 40-hex revision, with the hub's own client."""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kit.errors import GoneUpstream, HubGated, HubUnreachable, KitError, ToolMissing

Say = Callable[[str], None]


def fetch_repository(repository: str, revision: str, out: Path, say: Say) -> None:
    """Download a repository at a revision into `out`.

    The client takes its address and token from its own environment (`HF_ENDPOINT`, `HF_TOKEN`).
    Raises `HubUnreachable`, `HubGated`, `GoneUpstream`, or `ToolMissing` without the client.
    """
    try:
        client: Any = importlib.import_module("huggingface_hub")
        errors: Any = importlib.import_module("huggingface_hub.errors")
    except ImportError:
        raise ToolMissing(
            "the hub's client is not installed", hint="pip install huggingface_hub"
        ) from None
    say(f"  model: fetching {repository} at {revision[:9]}")
    try:
        client.snapshot_download(
            repository, revision=revision, local_dir=out, max_workers=4, etag_timeout=15
        )
    except (errors.HfHubHTTPError, errors.LocalEntryNotFoundError, OSError) as error:
        raise _hub_error(error, errors, repository, revision) from None
    shutil.rmtree(out / ".cache", ignore_errors=True)


def _hub_error(error: Exception, errors: Any, repository: str, revision: str) -> KitError:
    """Tell gated, gone and unreachable apart; the client's own words go below the line."""
    reply = getattr(error, "response", None)
    status = getattr(reply, "status_code", None)
    if isinstance(error, errors.GatedRepoError) or status in (401, 403):
        return HubGated(
            f"the hub refuses {repository} without an accepted licence or a token",
            hint="accept its licence on the hub, then set HF_TOKEN",
        )
    if isinstance(error, errors.RevisionNotFoundError | errors.RepositoryNotFoundError):
        return GoneUpstream(f"the hub has no {repository} at {revision[:9]}", hint="correct it")
    return HubUnreachable(
        f"the hub was not reached for {repository}",
        hint="check the network or HF_ENDPOINT; the default model needs no hub",
        detail=str(error),
    )
