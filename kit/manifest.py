"""The record of a run: what went in, what was seen, what it means, and the hash of every file.

`manifests/schema.json` is generated from these classes (`python -m kit schema`) and a test keeps
the two equal. The verdict and measures can be computed again from the raw files at any time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from kit.errors import BadFile, NotFound
from kit.fact import Fact
from kit.guard import GuardResult
from kit.measure import Reading
from kit.notice import Notice
from kit.plan import Plan, Role
from kit.quality import Compared
from kit.value import Value, is_empty, load_json, one_line, parse_value
from kit.verdict import Effect, Verdict

VERSION = "1.1"
_RUN_HINT = "give a run's folder (below runs/) or a manifest (below manifests/)"

Status = Literal["running", "complete", "failed", "interrupted"]


class KitIdentity(Value):
    """Which kit ran: version, commit (null outside a checkout), sha256 of uncommitted changes."""

    version: str
    commit: str | None
    dirty: bool | None
    diff_sha256: str | None


class RanImage(Value):
    """An image as it was on the engine: engine's id, identity, how it was obtained, its state.

    `manifest_digest` is that of its OCI export here; null where that was not read.
    """

    id: str
    engine_id: str
    config_digest: str
    manifest_digest: str | None
    diff_ids: tuple[str, ...]
    identity: str
    lock_sha256: str | None
    how: str
    state: Literal["verified", "declared", "failed"]


class Replicate(Value):
    """One arm measured on freshly started containers; times in seconds, `folder` in the run.

    `accounted_s` is the time that vLLM and the load needed: container started to first healthy
    answer, first send to last byte, stop asked to removed, from the engine's events and samples.
    """

    replicate: int
    pair: int
    role: Role
    folder: str
    started_utc: str
    status: Literal["complete", "failed", "interrupted"]
    wall_s: float
    accounted_s: float | None = None
    facts: tuple[Fact, ...] = ()
    readings: tuple[Reading, ...] = ()


class Cost(Value):
    """What the kit itself cost: wall time of all replicates against the time accounted for."""

    wall_s: float
    accounted_s: float
    ratio: float


class Failure(Value):
    """What ended a run early: the error's class, exit code and line."""

    error: str
    exit_code: int
    message: str


class RawFile(Value):
    """A file of the run: sha256 and size in bytes."""

    sha256: str
    bytes: int


class Original(Value):
    """The run that this run is to bring back.

    `manifest_sha256` is over the bytes of its manifest file; `plan_sha256` is its plan's hash,
    another than this run's where a difference was accepted.
    """

    run_id: str
    manifest_sha256: str
    plan_sha256: str
    accepted: tuple[str, ...]


class Resumed(Value):
    """One time that an interrupted run went on: when, after how many whole replicates.

    `ended` says what had ended it; null where that left no word (killed, power lost).
    """

    resumed_utc: str
    after: int
    ended: str | None


class Manifest(Value):
    """One run, whole.

    `reproduces` is null unless the run repeats another one. `set_aside` are pairs that other load
    of the machine spoiled and that the plan's spare pairs stand in for; `counted` are the others.
    """

    schema_version: str = VERSION
    run_id: str
    status: Status
    started_utc: str
    finished_utc: str | None
    kit: KitIdentity
    plan: Plan
    plan_sha256: str
    reproduces: Original | None
    images: tuple[RanImage, ...]
    facts: tuple[Fact, ...]
    replicates: tuple[Replicate, ...]
    set_aside: tuple[int, ...]
    guards: tuple[GuardResult, ...]
    confounders: tuple[str, ...]
    not_acted: tuple[str, ...]
    comparisons: tuple[Compared, ...] = ()
    effect: Effect | None
    verdict: Verdict | None
    notices: tuple[Notice, ...]
    cost: Cost | None
    failure: Failure | None
    resumed: tuple[Resumed, ...] = Field(default=(), exclude_if=is_empty)
    files: dict[str, RawFile]

    @property
    def counted(self) -> tuple[Replicate, ...]:
        """The replicates that the verdict rests on."""
        return tuple(r for r in self.replicates if r.pair not in self.set_aside)


def now_utc() -> str:
    """Return the present as `2026-07-20T12:34:56.789Z`."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def load_manifest(path: Path) -> Manifest:
    """Read a manifest.

    Raises `NotFound`, and `BadFile` with the path inside it, or with the version it needs.
    """
    try:
        raw = load_json(path)
    except NotFound as error:
        raise NotFound(error.message, hint=_RUN_HINT) from None
    return parse_manifest(raw, path.name)


def parse_manifest(raw: dict[str, Any], source: str) -> Manifest:
    """Build a manifest from JSON of this or an older version; see `load_manifest`."""
    version = str(raw.get("schema_version", ""))
    if not re.fullmatch(r"[0-9]{1,6}(\.[0-9]{1,6})?", version):
        raise BadFile(f"{source}: schema_version: `{one_line(version)}` is no version")
    given, own = ([int(part) for part in v.split(".", 1)] for v in (version, VERSION))
    if given[0] > own[0]:
        raise BadFile(f"{source}: schema version {version} is newer", hint="upgrade kit")
    while version in _STEPS:
        raw = _STEPS[version](raw)
        version = raw["schema_version"]
    try:
        return parse_value(Manifest, raw, source, strict=True)
    except BadFile as error:
        if given > own:
            raise BadFile(
                f"{error.message} (schema version {version})", hint="upgrade kit"
            ) from None
        raise


def _from_1_0(raw: dict[str, Any]) -> dict[str, Any]:
    """Before 1.1 no run could repeat another one, and no pair was set aside."""
    images = raw.get("images")
    if isinstance(images, list):
        images = [{**i, "manifest_digest": None} if isinstance(i, dict) else i for i in images]
    return {
        **raw,
        "schema_version": "1.1",
        "images": images,
        "reproduces": None,
        "set_aside": [],
    }


_STEPS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {"1.0": _from_1_0}
"""From each older version to the next; pure, and never an invented observation."""


def manifest_json(manifest: Manifest) -> str:
    """Return the text of a manifest: keys in the order of the classes, two spaces, UTF-8."""
    return json.dumps(manifest.model_dump(mode="json"), indent=2, ensure_ascii=False) + "\n"


def schema() -> dict[str, Any]:
    """Return the JSON schema of a manifest."""
    return {
        "$comment": "generated by `python -m kit schema`",
        **Manifest.model_json_schema(mode="serialization"),
    }
