"""Fetches a model repository from a hub, by 40-hex revision, with the hub's own client."""

from __future__ import annotations

import errno
import importlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kit.errors import DiskFull, GoneUpstream, HubGated, HubUnreachable, KitError, ToolMissing

Say = Callable[[str], None]
_TIMEOUT_S = 15


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
    importlib.import_module("huggingface_hub.utils.logging").set_verbosity_error()
    lost, place = _transport_error(), os.environ.get("HF_ENDPOINT") or None
    try:
        # asked first, because the download itself repeats for half a minute where nobody answers
        client.HfApi(endpoint=place).model_info(repository, revision=revision, timeout=_TIMEOUT_S)
        client.snapshot_download(
            repository,
            revision=revision,
            local_dir=out,
            endpoint=place,
            max_workers=4,
            etag_timeout=_TIMEOUT_S,
        )
    except (errors.HfHubHTTPError, errors.LocalEntryNotFoundError, lost, OSError) as error:
        raise _hub_error(error, errors, repository, revision) from None
    shutil.rmtree(out / ".cache", ignore_errors=True)


def _transport_error() -> type[Exception]:
    """Return what the client's HTTP library raises; which library it is differs by version."""
    session = importlib.import_module("huggingface_hub.utils").get_session()
    library = importlib.import_module(type(session).__module__.partition(".")[0])
    found: type[Exception] = library.HTTPError
    return found


def _hub_error(error: Exception, errors: Any, repository: str, revision: str) -> KitError:
    """Tell gated, gone and unreachable apart; the client's own words go below the line."""
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return DiskFull("no space left while a model was fetched", hint="free some space")
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
