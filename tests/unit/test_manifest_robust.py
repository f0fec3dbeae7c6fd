"""Manifests from anywhere: broken, hostile or huge ones end in one line, good ones come back."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import rfc8785
from hypothesis import given
from hypothesis import strategies as st
from references import EACH, REFERENCES
from virtual_run import exp1_run, write_run

from kit import value
from kit.errors import BadFile, KitError, NotFound
from kit.manifest import Manifest, load_manifest, manifest_json
from kit.plan import canonical_sha256
from kit.secret import find_private, private_names
from kit.value import MAX_JSON_BYTES, MAX_JSON_DEPTH

NESTED: Any = "end"
for _ in range(MAX_JSON_DEPTH - 10):
    NESTED = [NESTED]
ODD = [
    None, True, -1, 0, 2**53 + 1, 2**64, 10**400, 1e308, -1e-320, float("nan"), float("inf"), "",
    "\0", "a\nb\u2028c", "\ud800", "9" * 5000, "²", "../../etc/passwd", "😀" * 300, [], {}, [[]],
    {"": ""}, NESTED, {"__class__": "os.system"},
]  # fmt: skip


def shortened(raw: dict[str, Any]) -> dict[str, Any]:
    """Keep every kind of thing of a reference, but few of each: the mutants are read quickly."""

    def facts(found: list[Any]) -> list[Any]:
        plain = [f for f in found if isinstance(f["value"], str | int)]
        return plain[:2] + [f for f in found if f["name"] == "environment"][:1]

    one = raw["replicates"][0]
    one = one | {"facts": facts(one["facts"]), "readings": one["readings"][:2]}
    return raw | {
        "facts": facts(raw["facts"]),
        "replicates": [one],
        "guards": raw["guards"][:2],
        "files": dict(list(raw["files"].items())[:3]),
    }


def places(node: Any) -> Iterator[tuple[Any, Any]]:
    """Yield (container, key) of everything inside a JSON value."""
    if isinstance(node, dict | list):
        for key in list(node) if isinstance(node, dict) else range(len(node)):
            yield node, key
            yield from places(node[key])


def mutant(raw: dict[str, Any], draw: random.Random) -> bytes:
    """Return a manifest changed in one to three places, as JSON or as bytes."""
    if draw.random() < 0.6:
        changed = copy.deepcopy(raw)
        for _ in range(draw.randint(1, 3)):
            inside, key = draw.choice(list(places(changed)))
            odd = copy.deepcopy(draw.choice(ODD))
            match draw.randrange(4):
                case 0:
                    del inside[key]
                case 1:
                    inside[key] = odd
                case 2 if isinstance(inside, dict):
                    inside[draw.choice(["new", "a\nb", "", "\ud800", "x" * 999])] = odd
                case _:
                    inside[key] = [inside[key], odd]
        return json.dumps(changed, ensure_ascii=draw.random() < 0.5).encode(
            "utf-8", "surrogatepass"
        )
    text = bytearray(json.dumps(raw, ensure_ascii=False).encode())
    for _ in range(draw.randint(1, 3)):
        at, size = draw.randrange(len(text)), draw.choice([1, 1, 2, 50, 5000])
        match draw.randrange(5):
            case 0:
                text[at] ^= 1 << draw.randrange(8)
            case 1:
                del text[at : at + size]
            case 2:
                text[at:at] = draw.randbytes(size)
            case 3:
                text[at:at] = text[at : at + size]
            case _:
                text[at:at] = draw.choice([b"1e999", b"[" * 3000, b'{"a":' * 500, b"NaN", b"\0"])
        text = text or bytearray(b" ")
    return bytes(text)


def outcome(path: Path) -> Manifest | None:
    """Load a manifest; None where it was refused in one line. Any other end fails the test."""
    try:
        return load_manifest(path)
    except KitError as error:
        told = error.message
    assert len(told.splitlines()) == 1, told
    assert 0 < len(told) < 2000
    return None


@pytest.mark.parametrize("mutants", [2_000, pytest.param(10_000, marks=pytest.mark.full)])
def test_a_mutant_is_read_or_refused_in_one_line(tmp_path: Path, mutants: int) -> None:
    bases = [shortened(json.loads(path.read_bytes())) for path in REFERENCES]
    path, draw, read = tmp_path / "manifest.json", random.Random(5), 0
    for number in range(mutants):
        path.write_bytes(mutant(bases[number % len(bases)], draw))
        found = outcome(path)
        if found is not None:
            read += 1
            path.write_text(manifest_json(found), "utf-8")
            assert load_manifest(path) == found, f"mutant {number}"
    assert 0.02 * mutants < read < 0.8 * mutants, "the mutants test too little"


@pytest.mark.parametrize("path", EACH)
def test_a_reference_comes_back_from_its_text_as_it_was(path: Path, tmp_path: Path) -> None:
    manifest = load_manifest(path)
    again = tmp_path / "manifest.json"
    again.write_text(manifest_json(manifest), "utf-8")
    assert load_manifest(again) == manifest
    assert manifest.plan.sha256 == manifest.plan_sha256


TEXT = st.text(st.characters(exclude_categories=("Cs",)))
NUMBER = st.floats(allow_nan=False, allow_infinity=False)


def inside(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.lists(inner, max_size=3) | st.dictionaries(st.text("ab\n"), inner, max_size=3)


@given(
    text=TEXT,
    number=NUMBER,
    nested=st.recursive(
        st.none() | st.booleans() | st.integers() | NUMBER | TEXT, inside, max_leaves=10
    ),
)
def test_any_text_number_and_fact_comes_back(text: str, number: float, nested: Any) -> None:
    base = load_manifest(REFERENCES[0])
    fact = base.facts[0].model_copy(update={"value": nested, "reason": text or "none"})
    first = base.replicates[0].model_copy(update={"wall_s": number, "facts": (fact,)})
    manifest = base.model_copy(update={"run_id": text, "facts": (), "replicates": (first,)})
    assert Manifest.model_validate(json.loads(manifest_json(manifest))) == manifest


def written(tmp_path: Path, content: bytes) -> Path:
    path = tmp_path / "manifest.json"
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"[" * 1_000_000, "levels deep"),
        (b'{"a":' * 100_000, "levels deep"),
        (b'{"a":' * 100 + b"1" + b"}" * 100, "levels deep"),
        (b'{"schema_version": "1.0", "schema_version": "1.0"}', "stands twice"),
        (b'{"schema_version": NaN}', "no finite number"),
        (b'{"schema_version": -1e999}', "no finite number"),
        (b'{"schema_version": ' + b"9" * 5000 + b"}", "no finite number"),
        (b'{"schema_version": "' + b"9" * 5000 + b'"}', "is no version"),
        ('{"schema_version": "²"}'.encode(), "is no version"),
        (b'{"schema_version": "1\\n2"}', "is no version"),
        (b'{"a\xff": 1}', "not UTF-8 at byte 3"),
        (rb'{"schema_version": "1.0", "run_id": "\ud83d"}', "half of a character"),
        (b"", "not JSON"),
        (b"[]", "not an object"),
    ],
)
def test_what_no_manifest_may_hold_is_named(tmp_path: Path, content: bytes, says: str) -> None:
    path = written(tmp_path, content)
    assert outcome(path) is None
    with pytest.raises(BadFile) as caught:
        load_manifest(path)
    assert says in caught.value.message


def test_one_line_of_fifty_megabytes_is_refused_soon(tmp_path: Path) -> None:
    path = written(tmp_path, b'{"schema_version": "1.0", "' + b"k" * 50_000_000 + b'": 1}')
    begin = time.monotonic()
    assert outcome(path) is None
    assert time.monotonic() - begin < 30


def test_a_file_beyond_the_bound_is_refused_unread(tmp_path: Path) -> None:
    path = written(tmp_path, b"{")
    os.truncate(path, MAX_JSON_BYTES + 1)
    with pytest.raises(BadFile, match="larger than 256 MiB"):
        load_manifest(path)


def test_a_path_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="cannot be read"):
        load_manifest(tmp_path / ("x" * 300))
    with pytest.raises(NotFound, match="is a folder"):
        load_manifest(tmp_path)


def test_an_unknown_key_is_shown_on_one_line(tmp_path: Path) -> None:
    raw = json.loads(REFERENCES[0].read_bytes()) | {"a\nb": 1}
    path = written(tmp_path, json.dumps(raw).encode())
    with pytest.raises(BadFile, match=r"manifest\.json: a\\nb: Extra inputs"):
        load_manifest(path)


@pytest.mark.parametrize("text", ["1", "inf", "9" * 500])
def test_a_text_is_never_taken_for_a_number(tmp_path: Path, text: str) -> None:
    raw = json.loads(REFERENCES[0].read_bytes())
    raw["replicates"][0]["wall_s"] = text
    with pytest.raises(BadFile, match=r"replicates\[0\]\.wall_s: Input should be a valid number"):
        load_manifest(written(tmp_path, json.dumps(raw).encode()))


def test_text_from_a_file_is_shown_on_one_line() -> None:
    assert value.one_line("a\nb\u2028\0c名") == "a\\nb\\u2028\\x00c名"
    assert len(value.one_line("x" * 10_000)) == 121


CANONICAL = """
import hashlib, json, rfc8785, sys
print(json.dumps([hashlib.sha256(rfc8785.dumps(v)).hexdigest() for v in json.load(sys.stdin)]))
"""
TRICKY: list[Any] = [
    1e21, 1e20, 1e-6, 1e-7, 5e-324, 1.7976931348623157e308, -0.0, 0.1 + 0.2, 333333333.33333329,
    2**53 - 1, -(2**53) + 1, 100.0, "\u20ac$\u000f\nA'B\"\\/", "名前", "\x7f\u0080",
    {"\U0001f600": 1, "\ufb33": 2, "1": 3, "": 4, "a": {"b": [], "a": None}},
]  # fmt: skip


def interpreters() -> dict[str, str]:
    """Return the Pythons 3.11 to 3.13 of this machine by version, the running one among them."""
    found = {f"{sys.version_info[0]}.{sys.version_info[1]}": sys.executable}
    folders = [Path(p) for p in os.get_exec_path()]
    folders += Path.home().glob(".pyenv/versions/*/bin")
    for minor in (11, 12, 13):
        for folder in folders:
            program = folder / f"python3.{minor}"
            if program.is_file() and "shims" not in folder.parts:
                found.setdefault(f"3.{minor}", str(program))
    return found


@pytest.mark.parametrize("version", sorted(interpreters()))
def test_the_canonical_form_is_the_same_under_every_python(version: str) -> None:
    plans = [json.loads(path.read_bytes())["plan"] for path in REFERENCES]
    values = [*plans, *TRICKY]
    done = subprocess.run(
        [interpreters()[version], "-c", CANONICAL],
        input=json.dumps(values),
        env={"PYTHONPATH": str(Path(rfc8785.__file__).parents[1])},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert json.loads(done.stdout) == [canonical_sha256(each) for each in values]


def test_the_canonical_form_is_that_of_the_standard() -> None:
    """RFC 8785, 3.2.2 and 3.2.3: numbers as ECMAScript writes them, keys by UTF-16 units."""
    numbers = {"numbers": [333333333.33333329, 1e30, 4.50, 2e-3, 1e-27]}
    text = '{"numbers":[333333333.3333333,1e+30,4.5,0.002,1e-27]}'
    assert canonical_sha256(numbers) == hashlib.sha256(text.encode()).hexdigest()
    keys = '{"1":0,"\u20ac":0,"\U0001f600":0,"\ufb33":0}'
    unordered = {"\ufb33": 0, "\U0001f600": 0, "1": 0, "\u20ac": 0}
    assert canonical_sha256(unordered) == hashlib.sha256(keys.encode()).hexdigest()


def test_a_number_without_canonical_form_is_refused() -> None:
    for odd in (2**60, float("nan")):
        with pytest.raises(BadFile, match="no canonical form"):
            canonical_sha256({"a": odd})


@pytest.mark.parametrize("path", EACH)
def test_a_reference_holds_no_name_of_a_user_or_machine(path: Path) -> None:
    assert find_private(path.read_text("utf-8")) == []


def test_a_written_manifest_holds_no_name_of_a_user_or_machine(tmp_path: Path) -> None:
    assert find_private(manifest_json(write_run(tmp_path, exp1_run(pairs=1)))) == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('"a": "/home/ann/x"', ["line 1: a home path"]),
        ('"a": "/Users/ann"', ["line 1: a home path"]),
        ('ok\n"a": "/root/.cache"', ["line 2: a home path"]),
        ('"on bobs-laptop.example"', ["line 1: the name of this user or machine"]),
        ('"/tmp/home/.cache", "bobbin", "rootfs", "/rootfs"', []),
    ],
)
def test_private_words_are_found_and_never_repeated(text: str, found: list[str]) -> None:
    assert find_private(text, ["bob", "bobs-laptop"]) == found


def test_names_that_all_machines_have_are_not_looked_for() -> None:
    assert not {"root", "localhost", ""} & private_names()
    assert all(re.search(r"\S", name) for name in private_names())
