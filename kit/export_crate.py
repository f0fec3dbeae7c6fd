"""A run as an RO-Crate of the profile Process Run Crate 0.5.

Each replicate is an action: the kit and the image's vLLM are its instruments; plan, workload and
model go in, the replicate's raw files come out. One more action concludes: manifest and reports.
Nobody is named as agent and no licence is claimed, because a manifest holds neither.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any
from urllib.parse import quote

from kit.errors import BadFile
from kit.export_llmd import fact_value
from kit.manifest import Failure, Manifest, RanImage, RawFile, Replicate
from kit.plan import PlannedArm
from kit.value import one_line

METADATA = "ro-crate-metadata.json"
PROFILE = "https://w3id.org/ro/wfrun/process/0.5"
_CRATE = "https://w3id.org/ro/crate/1.1"
_TERMS = "https://w3id.org/ro/terms/workflow-run"
_STATUS = "http://schema.org/{}ActionStatus"
_ENCODINGS = {
    ".json": "application/json",
    ".jsonl": "application/jsonl",
    ".gz": "application/gzip",
    ".log": "text/plain",
    ".html": "text/html",
    ".md": "text/markdown",
}
_KIT, _LICENCE = "#kit", "#licence"

Entity = dict[str, Any]


def ro_crate(manifest: Manifest, written: Mapping[str, RawFile]) -> Entity:
    """Return the metadata document of a run's folder.

    `written` are the files that the manifest cannot hold the hash of, by name: itself and the
    reports.
    """
    files = {**manifest.files, **written}
    actions = [_measured(manifest, replicate) for replicate in manifest.replicates]
    actions.append(_concluded(manifest, written))
    entities = [
        {
            "@id": METADATA,
            "@type": "CreativeWork",
            "conformsTo": {"@id": _CRATE},
            "about": {"@id": "./"},
        },
        _root(manifest, files, actions),
        {"@id": PROFILE, "@type": "CreativeWork", "name": "Process Run Crate", "version": "0.5"},
        {
            "@id": _LICENCE,
            "@type": "CreativeWork",
            "name": "Licence not stated",
            "description": "The run's manifest states no licence for its data.",
        },
        _kit(manifest),
        _model(manifest),
        *(each for image in manifest.images for each in _image(manifest, image)),
        *(each for arm in manifest.plan.arms for each in _environment(arm)),
        *actions,
        *(_file(name, raw) for name, raw in sorted(files.items())),
    ]
    return {"@context": [f"{_CRATE}/context", f"{_TERMS}/context"], "@graph": entities}


def _root(manifest: Manifest, files: Iterable[str], actions: Iterable[Entity]) -> Entity:
    plan, verdict = manifest.plan, manifest.verdict
    outcome = f"{verdict.word}: {verdict.reason}" if verdict else manifest.status
    return {
        "@id": "./",
        "@type": "Dataset",
        "name": f"{plan.title.en}, run {manifest.run_id}",
        "description": f"{plan.goal.en} Outcome: {outcome}.",
        "datePublished": _time(manifest.finished_utc or manifest.started_utc),
        "license": {"@id": _LICENCE},
        "conformsTo": {"@id": PROFILE},
        "identifier": manifest.run_id,
        "hasPart": _refs(_path(name) for name in sorted(files)),
        "mentions": _refs(action["@id"] for action in actions),
    }


def _kit(manifest: Manifest) -> Entity:
    kit = manifest.kit
    version = kit.version if kit.commit is None else f"{kit.version}+{kit.commit}"
    if kit.diff_sha256:
        version += f" with changes of sha256 {kit.diff_sha256}"
    return {
        "@id": _KIT,
        "@type": "SoftwareApplication",
        "name": "vllm-kit",
        "softwareVersion": version,
    }


def _image(manifest: Manifest, image: RanImage) -> list[Entity]:
    """Return the container image and the vLLM inside it."""
    plan = manifest.plan
    arms = [arm.role for arm in plan.arms if arm.image.id == image.id]
    facts = [f for r in manifest.replicates if r.role in arms for f in r.facts]
    version = fact_value(facts, "vllm", "version")
    application: Entity = {
        "@id": f"#server-{quote(image.id)}",
        "@type": "SoftwareApplication",
        "name": "vLLM" if plan.engine == "vllm" else "the kit's stub in place of vLLM",
        "description": f"as it is in the image {image.id} ({image.state})",
    }
    if version is not None:
        application["softwareVersion"] = version
    container = {
        "@id": _image_id(image.id),
        "@type": "ContainerImage",
        "additionalType": {"@id": f"{_TERMS}#DockerImage"},
        "name": image.id,
        "sha256": image.identity.removeprefix("sha256:"),
        "description": "sha256 is over the OCI configuration's digest and the layers' diff ids; "
        f"obtained: {image.how}; lock: {image.lock_sha256 or 'none'}",
    }
    return [application, container]


def _model(manifest: Manifest) -> Entity:
    model = manifest.plan.model
    return {
        "@id": _model_id(manifest),
        "@type": "CreativeWork",
        "name": model.id,
        "description": f"{model.weights} weights; not part of this crate; sha256 of each file: "
        + ", ".join(f"{name} {sha256}" for name, sha256 in sorted(model.files.items())),
    }


def _environment(arm: PlannedArm) -> list[Entity]:
    return [
        {"@id": _variable_id(arm, name), "@type": "PropertyValue", "name": name, "value": value}
        for name, value in sorted(arm.env.items())
    ]


def _measured(manifest: Manifest, replicate: Replicate) -> Entity:
    """Return the action of one replicate; its end is its start plus its wall time."""
    arm = manifest.plan.arm(replicate.role)
    own = [name for name in manifest.files if name.startswith(f"{replicate.folder}/")]
    given = [n for n in manifest.files if n == "plan.json" or n.startswith("workload/")]
    end = _moment(replicate.started_utc) + timedelta(seconds=replicate.wall_s)
    action = {
        "@id": f"#replicate-{replicate.replicate}",
        "@type": "CreateAction",
        "name": f"Replicate {replicate.replicate}, pair {replicate.pair}, {replicate.role}",
        "description": f"{arm.label.en}: {' '.join((*arm.entrypoint, *arm.args))}",
        "instrument": _refs((_KIT, f"#server-{quote(arm.image.id)}")),
        "containerImage": {"@id": _image_id(arm.image.id)},
        "startTime": _time(replicate.started_utc),
        "endTime": _time(end.isoformat()),
        "object": _refs((*(_path(n) for n in sorted(given)), _model_id(manifest))),
        "result": _refs(_path(name) for name in sorted(own)),
        "environment": _refs(_variable_id(arm, name) for name in sorted(arm.env)),
    }
    failure = None if replicate.status == "complete" else manifest.failure
    return action | _outcome(replicate.status == "complete", failure)


def _concluded(manifest: Manifest, written: Iterable[str]) -> Entity:
    raw = [name for name in manifest.files if name.startswith("replicates/")]
    action = {
        "@id": "#conclusion",
        "@type": "CreateAction",
        "name": f"Run {manifest.run_id}",
        "description": "Measures, guards, verdict, manifest and reports from the raw files",
        "instrument": {"@id": _KIT},
        "startTime": _time(manifest.started_utc),
        "endTime": _time(manifest.finished_utc or manifest.started_utc),
        "object": _refs(_path(name) for name in sorted(raw)),
        "result": _refs(_path(name) for name in sorted(written)),
    }
    return action | _outcome(manifest.status == "complete", manifest.failure)


def _outcome(complete: bool, failure: Failure | None) -> Entity:
    if complete:
        return {"actionStatus": _STATUS.format("Completed")}
    failed = {"actionStatus": _STATUS.format("Failed")}
    return failed if failure is None else failed | {"error": failure.message}


def _file(name: str, raw: RawFile) -> Entity:
    suffix = name[name.rfind(".") :]
    return {
        "@id": _path(name),
        "@type": "File",
        "name": name,
        "contentSize": str(raw.bytes),
        "sha256": raw.sha256,
        **({"encodingFormat": _ENCODINGS[suffix]} if suffix in _ENCODINGS else {}),
    }


def _refs(ids: Iterable[str]) -> Entity | list[Entity]:
    """Return references; a single one stands alone, as RO-Crate recommends."""
    found = [{"@id": each} for each in ids]
    return found[0] if len(found) == 1 else found


def _path(name: str) -> str:
    return quote(name)


def _image_id(image: str) -> str:
    return f"#image-{quote(image)}"


def _model_id(manifest: Manifest) -> str:
    return f"#model-{quote(manifest.plan.model.id)}"


def _variable_id(arm: PlannedArm, name: str) -> str:
    return f"#env-{arm.role}-{quote(name)}"


def _time(utc: str) -> str:
    """Return a time in the one form that the profile's rules take: with milliseconds and offset."""
    return _moment(utc).isoformat(timespec="milliseconds")


def _moment(utc: str) -> datetime:
    try:
        return datetime.fromisoformat(utc)
    except ValueError:
        raise BadFile(f"manifest.json: `{one_line(utc)}` is no time") from None
