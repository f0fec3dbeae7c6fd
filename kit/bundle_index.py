"""`bundle.json`: what a bundle holds, member by member, and what was left out of it and why."""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import Field, ValidationError

from kit.archive import fault_of_names, shown
from kit.errors import BundleDamaged, BundleRefused
from kit.plan import canonical_sha256
from kit.value import Value, explain

NAME = "bundle.json"
VERSION = 1
SUFFIX = ".kitbundle"
PLACES = ("image", "lock", "model", "run", "tool")
MEMBERS = 20_000
MEMBER_BYTES = 64 * 2**30
TOTAL_BYTES = 256 * 2**30
INDEX_BYTES = 8 * 2**20
SMALL_BYTES = 64 * 2**20  # what is read into memory: the manifest and the locks
_SHA256 = r"^[0-9a-f]{64}$"


class Member(Value):
    """A file of the bundle: sha256 and size in bytes."""

    sha256: str = Field(pattern=_SHA256)
    bytes: int = Field(ge=0, le=MEMBER_BYTES)


class LeftOut(Value):
    """Something of the run that the bundle does not carry: its hashes, and where to get it."""

    what: Literal["image", "lock", "model", "tool"]
    id: str
    why: str
    digests: dict[str, str]
    source: str


class Index(Value):
    """The first member of a bundle. Its own sha256 is over the canonical JSON of all the rest."""

    version: Literal[1] = 1
    written_by: str = "nox -s bundle"
    run_id: str
    members: dict[str, Member]
    left_out: tuple[LeftOut, ...]

    def lacks(self, what: str, name: str) -> bool:
        """Say whether the bundle declares that it does not carry this."""
        return any((one.what, one.id) == (what, name) for one in self.left_out)


def render_index(index: Index) -> bytes:
    """Return the bytes of `bundle.json`: sorted keys, ASCII, its own hash among them."""
    body = index.model_dump(mode="json")
    whole = {**body, "sha256": canonical_sha256(body)}
    return (json.dumps(whole, indent=1, sort_keys=True) + "\n").encode()


def parse_index(content: bytes) -> Index:
    """Return a checked index. Raises `BundleDamaged` or `BundleRefused` with what is wrong."""
    try:
        raw: Any = json.loads(content)
    except (ValueError, RecursionError):
        raise BundleDamaged(f"{NAME}: not JSON", hint="copy the bundle again") from None
    if not isinstance(raw, dict):
        raise BundleDamaged(f"{NAME}: not an object")
    version = raw.get("version")
    if isinstance(version, int) and version > VERSION:
        raise BundleRefused(f"{NAME}: version {version} is newer", hint="upgrade kit")
    raw.pop("sha256", None)
    try:
        index = Index.model_validate(raw)
    except ValidationError as error:
        raise BundleDamaged(f"{NAME}: {shown(explain(error), 300)}") from None
    if render_index(index) != content:
        raise BundleDamaged(
            f"{NAME}: changed after it was written: its own sha256 does not fit",
            hint="copy the bundle again",
        )
    check_index(index)
    return index


def check_index(index: Index) -> None:
    """Raise `BundleRefused` for names or sizes that no bundle may have."""
    members = index.members
    if len(members) > MEMBERS:
        raise BundleRefused(f"{NAME}: {len(members)} members, at most {MEMBERS} are taken")
    fault = fault_of_names([NAME, *members])
    if fault:
        raise BundleRefused(f"{NAME}: {fault}")
    for name, member in members.items():
        place = name.split("/")[0]
        if place not in PLACES:
            raise BundleRefused(f"{NAME}: {name}: below none of {', '.join(PLACES)}")
        small = place == "lock" or name in ("run/manifest.json", "image/index.json")
        if small and member.bytes > SMALL_BYTES:
            raise BundleRefused(f"{NAME}: {name}: {member.bytes} bytes, {SMALL_BYTES} allowed")
    total = sum(member.bytes for member in members.values())
    if total > TOTAL_BYTES:
        raise BundleRefused(f"{NAME}: {total} bytes declared, at most {TOTAL_BYTES} are taken")
