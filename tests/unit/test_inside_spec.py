"""Spec and requests files: what is wrong is named with its place; bodies are kept as written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.inside.spec import BadSpec, load_requests, load_spec, member_text

SPEC = {"version": 1, "host": "h", "port": 8000, "out": "out"}
REQUEST = {"id": "r", "path": "/v1/completions", "body": {}, "tags": {}, "at_s": 0}
JSON = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


def spec_of(folder: Path, **changes: Any) -> Path:
    path = folder / "spec.json"
    path.write_text(json.dumps({**SPEC, **changes}))
    return path


def requests_of(folder: Path, *lines: str) -> Path:
    path = folder / "requests.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_paths_are_relative_to_the_spec(tmp_path: Path) -> None:
    spec = load_spec(spec_of(tmp_path, requests="in/r.jsonl"))
    assert (spec.requests, spec.out) == (tmp_path / "in/r.jsonl", tmp_path / "out")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"version": 2}, "version: 1 is what this reads, not 2"),
        ({"port": 0}, "port: a whole number from 1 to 65535 is needed, not 0"),
        ({"port": "8000"}, "port: a whole number"),
        ({"host": None}, "host: a text is needed"),
        ({"deadline_s": -1}, "deadline_s: a number from 0.001 to"),
        ({"concurrency": 0}, "concurrency: a whole number from 1"),
        ({"concurrency": True}, "concurrency: a whole number"),
        ({"stamps": "gps"}, "stamps: one of auto, kernel, user, not 'gps'"),
        ({"scrape_every": 1}, "scrape_every: unknown"),
    ],
)
def test_a_wrong_spec_is_named(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(BadSpec, match=f"^spec.json: {said}"):
        load_spec(spec_of(tmp_path, **changes))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"id": "a b"}, "id: 'a b' does not match"),
        ({"id": "a\r\nHost: evil"}, "id: "),
        ({"path": "v1"}, "path: 'v1' does not match"),
        ({"body": []}, "body: an object is needed"),
        ({"tags": 1}, "tags: an object is needed"),
        ({"at_s": -0.1}, "at_s: a number from 0 to 1e\\+09 is needed, not -0.1"),
        ({"at_s": 10**400}, "at_s: a number from 0"),
        ({"at_s": None}, "exactly one of at_s and lane"),
        ({"lane": "x"}, "exactly one of at_s and lane"),
        ({"start_s": 1.0}, "start_s: only a lane has one"),
        ({"when": 1}, "when: unknown"),
    ],
)
def test_a_wrong_request_is_named_with_its_line(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    good = json.dumps({**REQUEST, "id": "first"})
    path = requests_of(tmp_path, good, json.dumps({**REQUEST, **changes}))
    with pytest.raises(BadSpec, match=f"^requests.jsonl, line 2: {said}"):
        load_requests(path)


@pytest.mark.parametrize(
    ("text", "said"),
    [("{", "line 1: not JSON"), ("3", "line 1: an object"), ("", "no request in it")],
)
def test_a_file_that_is_no_list_of_requests_is_named(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(BadSpec, match=said):
        load_requests(requests_of(tmp_path, text))


def test_an_id_that_comes_twice_is_refused(tmp_path: Path) -> None:
    line = json.dumps(REQUEST)
    with pytest.raises(BadSpec, match="line 2: id: 'r' was there before"):
        load_requests(requests_of(tmp_path, line, line))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadSpec, match=r"spec\.json: No such file"):
        load_spec(tmp_path / "spec.json")


def test_the_body_goes_out_as_it_is_written(tmp_path: Path) -> None:
    body = '{ "temperature": 0.70, "prompt": "\\u4f60好" , "n":1e0}'
    line = f'{{"id": "r", "at_s": 0, "body": {body}, "tags": {{"body": 1}}, "path": "/x"}}'
    (request,) = load_requests(requests_of(tmp_path, line))
    assert request.body == body.encode()
    assert f"Content-Length: {len(body.encode())}\r\n".encode() in request.head("h", 1)


@given(
    st.dictionaries(st.text(max_size=6), JSON, max_size=5),
    JSON,
    st.booleans(),
    st.sampled_from([(",", ":"), (", ", ": "), (" ,\t", " : ")]),
)
def test_a_member_is_found_wherever_it_stands(
    others: dict[str, Any], value: Any, ascii_only: bool, separators: tuple[str, str]
) -> None:
    text = json.dumps({**others, "body": value}, ensure_ascii=ascii_only, separators=separators)
    inner = json.dumps(value, ensure_ascii=ascii_only, separators=separators)
    assert member_text(text, "body") == inner
