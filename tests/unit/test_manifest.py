"""The manifest: its schema is generated, it survives a file, and a wrong one is named."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from virtual_run import exp1_run, write_run

from kit.errors import BadFile, NotFound, all_errors
from kit.manifest import VERSION, load_manifest, manifest_json, now_utc, schema
from kit.paths import MANIFESTS


def test_the_schema_on_disk_is_the_one_of_the_classes() -> None:
    recorded = json.loads((MANIFESTS / "schema.json").read_text("utf-8"))
    assert recorded == schema(), "run `python -m kit schema --write`"


def test_the_schema_allows_no_unknown_field() -> None:
    objects = [schema(), *schema()["$defs"].values()]
    assert all(o["additionalProperties"] is False for o in objects if o.get("properties"))


def test_a_manifest_survives_its_file(tmp_path: Path) -> None:
    manifest = write_run(tmp_path, exp1_run())
    assert load_manifest(tmp_path / "manifest.json") == manifest
    text = (tmp_path / "manifest.json").read_text("utf-8")
    assert text == manifest_json(manifest)
    assert set(json.loads(text)) == set(schema()["properties"]) - {"resumed"}  # it was not


def changed(run: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    path = run / "manifest.json"
    raw = json.loads(path.read_text("utf-8"))
    change(raw)
    path.write_text(json.dumps(raw), "utf-8")
    return path


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda raw: raw.update(schema_version="2.0"), "schema version 2.0 is newer"),
        (lambda raw: raw.update(schema_version="x"), "`x` is no version"),
        (lambda raw: raw.update(extra=1), "manifest.json: extra: "),
        (lambda raw: raw.pop("run_id"), "manifest.json: run_id: "),
        (lambda raw: raw["plan"]["hypothesis"].pop("margin"), "plan.hypothesis.margin: "),
        (lambda raw: raw["verdict"].update(word="great"), "verdict.word: "),
    ],
    ids=["newer", "no version", "unknown field", "missing", "missing inside", "unknown word"],
)
def test_a_wrong_manifest_is_named_with_the_place(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], says: str
) -> None:
    write_run(tmp_path, exp1_run(pairs=1))
    with pytest.raises(BadFile) as caught:
        load_manifest(changed(tmp_path, change))
    assert says in caught.value.message


def test_a_newer_minor_version_is_read(tmp_path: Path) -> None:
    write_run(tmp_path, exp1_run(pairs=1))
    path = changed(tmp_path, lambda raw: raw.update(schema_version="1.9"))
    assert load_manifest(path).schema_version == "1.9"


def test_a_missing_or_broken_manifest_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"manifest\.json is not there"):
        load_manifest(tmp_path / "manifest.json")
    (tmp_path / "manifest.json").write_text("{", "utf-8")
    with pytest.raises(BadFile, match="not JSON"):
        load_manifest(tmp_path / "manifest.json")


def test_times_are_utc_to_the_millisecond() -> None:
    assert len(now_utc()) == len("2026-07-20T12:34:56.789Z")
    assert now_utc().endswith("Z")


def test_every_error_has_an_exit_code_of_its_own() -> None:
    codes = [cls.exit_code for cls in all_errors()]
    assert len(codes) == len(set(codes))
    assert not {0, 3, 4, 5, 130, 143} & set(codes), "taken by verdicts and signals"
    assert all(cls.__doc__ for cls in all_errors())


RELEASED = sorted((Path(__file__).parent.parent / "data" / "manifests").glob("*.json"))


@pytest.mark.parametrize("path", RELEASED, ids=lambda p: p.stem)
def test_every_released_version_is_still_read(path: Path) -> None:
    """Files as the kit of that version wrote them; the plan keeps the hash it had."""
    raw = json.loads(path.read_text("utf-8"))
    assert raw["schema_version"] == path.stem
    manifest = load_manifest(path)
    assert manifest.schema_version == VERSION
    assert manifest.plan.sha256 == raw["plan_sha256"]
    assert manifest.effect is not None


def test_the_present_version_is_among_the_released_ones() -> None:
    assert VERSION in [path.stem for path in RELEASED]
