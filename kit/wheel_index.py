"""vLLM's per-commit wheel index: one wheel a commit and CUDA variant, without any fallback.

Layout, as vLLM publishes it: `<index>/<40 hex>/<variant>/vllm/metadata.json` lists items with
`variant`, `platform_tag`, `filename` and `path`, the wheel's place relative to the listing.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import httpx

from kit.errors import BadFile, GoneUpstream, HashMismatch, IndexUnreachable, VariantMissing

DEFAULT_INDEX = "https://wheels.vllm.ai"
_TIMEOUT = httpx.Timeout(30.0, connect=10.0)
_GONE = (404, 410)


def index_address() -> str:
    """Return the index's address: `KIT_WHEEL_INDEX`, else vLLM's own."""
    return (os.environ.get("KIT_WHEEL_INDEX") or DEFAULT_INDEX).rstrip("/")


def fetch_wheel(commit: str, cuda: str, folder: Path, *, sha256: str | None = None) -> Path:
    """Download the wheel of a commit and a CUDA variant; return its path in `folder`.

    Raises `IndexUnreachable` when the index does not answer, `GoneUpstream` when it has nothing of
    the commit or the wheel is gone, `VariantMissing` when it has other variants only, and
    `HashMismatch` when `sha256` is given and the bytes are others. Never takes another variant.
    """
    with httpx.Client(timeout=_TIMEOUT, follow_redirects=True) as client:
        listing = f"{index_address()}/{commit}/{cuda}/vllm/metadata.json"
        reply = _get(client, listing)
        if reply.status_code in _GONE:
            raise _absent(client, commit, cuda)
        _check_status(reply, "the listing")
        item = _pick(reply, cuda, commit)
        name = str(item["filename"])
        if Path(name).name != name:
            raise BadFile(f"the wheel index lists `{name}`, which is no file name")
        url = urljoin(listing, str(item.get("path") or name))
        return _download(client, url, folder / name, sha256)


def _get(client: httpx.Client, url: str) -> httpx.Response:
    try:
        return client.get(url)
    except httpx.HTTPError as error:
        raise _unreachable(error) from None


def _unreachable(error: Exception) -> IndexUnreachable:
    return IndexUnreachable(
        "the wheel index was not reached",
        hint="check the network, or name a mirror in KIT_WHEEL_INDEX",
        detail=f"{type(error).__name__}: {error}",
    )


def _check_status(reply: httpx.Response, what: str) -> None:
    if reply.status_code != httpx.codes.OK:
        raise IndexUnreachable(
            f"the wheel index answers {reply.status_code} for {what}", hint="try again later"
        )


def _absent(client: httpx.Client, commit: str, cuda: str) -> GoneUpstream | VariantMissing:
    """Tell a variant that was never built from a commit that is gone altogether."""
    reply = _get(client, f"{index_address()}/{commit}/vllm/metadata.json")
    if reply.status_code == httpx.codes.OK:
        return VariantMissing(
            f"the wheel index has commit {commit[:9]} but no {cuda} wheel of it",
            hint="choose a variant that was built; the kit never falls back to another",
        )
    if reply.status_code in _GONE:
        return GoneUpstream(
            f"the wheel index has nothing of commit {commit[:9]}",
            hint="per-commit wheels are deleted after a while: take the wheel from a bundle",
        )
    raise IndexUnreachable(
        f"the wheel index answers {reply.status_code} for commit {commit[:9]}",
        hint="try again later",
    )


def _pick(reply: httpx.Response, cuda: str, commit: str) -> dict[str, Any]:
    try:
        items: Any = reply.json()
    except (ValueError, RecursionError):
        raise BadFile("the wheel index's listing is not JSON", hint="is it a mirror?") from None
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise BadFile("the wheel index's listing is no list of wheels", hint="is it a mirror?")
    found: list[dict[str, Any]] = items
    for item in found:
        fits = "x86_64" in str(item.get("platform_tag")) and item.get("package_name") == "vllm"
        if fits and _variant_of(item) in (cuda, None) and item.get("filename"):
            return item
    raise VariantMissing(
        f"the wheel index lists no {cuda} wheel of commit {commit[:9]} for x86_64",
        hint="choose a variant that was built; the kit never falls back to another",
    )


def _variant_of(item: dict[str, Any]) -> str | None:
    """Return the variant an item claims; without a claim the listing's own folder stands for it."""
    return str(item["variant"]) if item.get("variant") else None


def _check_served(reply: httpx.Response, name: str) -> None:
    if reply.status_code in _GONE:
        raise GoneUpstream(
            f"the wheel index lists {name} but no longer serves it",
            hint="take the wheel from a bundle",
        )
    _check_status(reply, name)


def _download(client: httpx.Client, url: str, target: Path, sha256: str | None) -> Path:
    digest = hashlib.sha256()
    try:
        with client.stream("GET", url) as reply:
            _check_served(reply, target.name)
            with target.open("wb") as sink:
                for chunk in reply.iter_bytes(1 << 20):
                    digest.update(chunk)
                    sink.write(chunk)
    except httpx.HTTPError as error:
        target.unlink(missing_ok=True)
        raise _unreachable(error) from None
    if sha256 is not None and digest.hexdigest() != sha256:
        target.unlink()
        raise HashMismatch(
            f"the wheel index serves {target.name} with sha256 {digest.hexdigest()[:16]}…, "
            f"the lock says {sha256[:16]}…",
            hint="the wheel was replaced upstream: lock it under a new id",
        )
    return target
