"""What a signature says of a run: an in-toto Statement v1 about the bytes of its manifest.

Nothing in it is told by the signer: all follows from the manifest and, for a reproduction, from
the record beside it, so that a reader can make the same statement again and compare.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Literal

import rfc8785
from pydantic import ConfigDict, Field

from kit.errors import BadFile
from kit.manifest import Manifest, Original, RanImage, Status, load_manifest
from kit.value import Value, load_json, parse_value

StatementType = Literal["https://in-toto.io/Statement/v1"]
STATEMENT_TYPE: StatementType = "https://in-toto.io/Statement/v1"
PredicateType = Literal["urn:uuid:6f0d8a52-3b1e-4c57-9a44-1de2c0b7f3a9"]
PREDICATE_TYPE: PredicateType = "urn:uuid:6f0d8a52-3b1e-4c57-9a44-1de2c0b7f3a9"
"""A TypeURI need not resolve; this one names no host. It stands for version 1.0 of `Predicate`,
and a predicate that old readers would misread gets another one."""
RECORD = "reproduction.json"
_RECORD_BYTES = 64 << 20


class Material(Value):
    """Something that went in (an in-toto ResourceDescriptor): its name, hashes and what else."""

    name: str
    digest: dict[str, str]
    annotations: dict[str, str | bool | None] = Field(default_factory=dict)


class Said(Value):
    """The run's verdict: word and reason."""

    word: str
    reason: str


class Reproduces(Value):
    """What a reproduction says: the manifest it repeats, and from its record how it ended.

    Outcome and the record's sha256 are null where the record is not beside the manifest.
    """

    run_id: str
    manifest_sha256: str
    outcome: str | None
    record_sha256: str | None


class Predicate(Value):
    """A run in short: what it concluded, by which plan, from which materials."""

    schema_version: Literal["1.0"] = "1.0"
    experiment: str
    case: str
    status: Status
    verdict: Said | None
    plan_sha256: str
    materials: tuple[Material, ...]
    reproduces: Reproduces | None


class Subject(Value):
    """The manifest: the run's id and the sha256 of the file."""

    name: str
    digest: dict[Literal["sha256"], str]


class Statement(Value):
    """An in-toto Statement v1 with one subject."""

    type: StatementType = Field(STATEMENT_TYPE, alias="_type")
    subject: tuple[Subject]
    predicateType: PredicateType = PREDICATE_TYPE  # noqa: N815 - in-toto's name
    predicate: Predicate

    @property
    def manifest_sha256(self) -> str:
        return self.subject[0].digest["sha256"]

    def as_json(self) -> dict[str, Any]:
        return self.model_dump(mode="json", by_alias=True)


def make_statement(path: Path) -> Statement:
    """Return the statement about a manifest file; raise `BadFile` when it or its record is none."""
    manifest = load_manifest(path)
    verdict = manifest.verdict
    subject = Subject(name=manifest.run_id, digest={"sha256": _sha256(path)})
    return Statement(
        subject=(subject,),
        predicate=Predicate(
            experiment=manifest.plan.experiment,
            case=manifest.plan.case,
            status=manifest.status,
            verdict=Said(word=verdict.word, reason=verdict.reason) if verdict else None,
            plan_sha256=manifest.plan_sha256,
            materials=materials(manifest),
            reproduces=_reproduces(manifest, path.with_name(RECORD), subject.digest["sha256"]),
        ),
    )


def render_statement(statement: Statement) -> bytes:
    """Return the bytes that are signed: canonical JSON (RFC 8785)."""
    return rfc8785.dumps(statement.as_json())


def materials(manifest: Manifest) -> tuple[Material, ...]:
    """Return what went into a run: images, model files, workload and kit, each by its hash."""
    plan = manifest.plan
    images = {ran.id: ran for ran in manifest.images}
    return (
        *(_image(ran) for _, ran in sorted(images.items())),
        *(
            Material(name=f"model/{plan.model.id}/{name}", digest={"sha256": sha256})
            for name, sha256 in sorted(plan.model.files.items())
        ),
        *(
            Material(name=f"workload/{p.name}.jsonl", digest={"sha256": p.requests_sha256})
            for p in plan.phases
        ),
        Material(
            name="kit",
            digest={"gitCommit": manifest.kit.commit} if manifest.kit.commit else {},
            annotations={
                "version": manifest.kit.version,
                "dirty": manifest.kit.dirty,
                "diff_sha256": manifest.kit.diff_sha256,
            },
        ),
    )


def _image(ran: RanImage) -> Material:
    """Describe an image; the sha256 is the kit's identity over configuration and layers."""
    return Material(
        name=f"image/{ran.id}",
        digest={"sha256": ran.identity.removeprefix("sha256:")},
        annotations={
            "config_digest": ran.config_digest,
            "lock_sha256": ran.lock_sha256,
            "state": ran.state,
        },
    )


def _reproduces(manifest: Manifest, record: Path, manifest_sha256: str) -> Reproduces | None:
    """Return what a manifest and the record beside it say, or None for a run of its own."""
    original = manifest.reproduces
    told, digest = None, None
    if record.is_file():
        if record.stat().st_size > _RECORD_BYTES:
            raise BadFile(f"{RECORD}: larger than {_RECORD_BYTES} bytes")
        told, digest = parse_value(_Record, load_json(record), RECORD), _sha256(record)
        if (told.original, told.again_sha256) != (original, manifest_sha256):
            raise BadFile(f"{RECORD}: not the record of the manifest beside it")
    if original is None:
        return None
    return Reproduces(
        run_id=original.run_id,
        manifest_sha256=original.manifest_sha256,
        outcome=told.outcome.word if told else None,
        record_sha256=digest,
    )


class _Outcome(Value):
    model_config = ConfigDict(frozen=True, extra="ignore")

    word: Literal["reproduced", "not reproduced", "inconclusive", "incomparable"]


class _Record(Value):
    """A reproduction's record; what the statement does not need is passed over."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    original: Original
    again_sha256: str
    outcome: _Outcome


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
