"""Facts as values, and the rules by which a field that fails stays alone."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from docker.errors import APIError
from pydantic import ValidationError

from kit import facts
from kit.errors import ProbeFailed, UnknownName
from kit.fact import ContainerPlace, Fact, HostPlace, observe
from kit.inside.probe_field import Absent, kib_to_bytes, read_field


def raising(error: Exception) -> Any:
    def read() -> None:
        raise error

    return read


def test_a_value_is_verified_and_keeps_its_source() -> None:
    fact = observe("host", "cpu_threads", "/proc/cpuinfo", lambda: 2, match="must")
    assert fact == Fact(
        group="host", name="cpu_threads", value=2, how="/proc/cpuinfo", state="verified",
        match="must",
    )  # fmt: skip


@pytest.mark.parametrize(
    "error",
    [OSError("gone"), ValueError("no number"), KeyError("key"), IndexError(), APIError("engine")],
)
def test_an_expected_error_is_null_with_the_error_s_name(error: Exception) -> None:
    fact = observe("host", "field", "somewhere", raising(error))
    assert (fact.value, fact.state) == (None, "failed")
    assert str(fact.reason).startswith(type(error).__name__)


def test_an_unexpected_error_is_a_mistake_and_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        observe("host", "field", "somewhere", raising(ZeroDivisionError()))


def test_absent_is_an_answer_and_not_a_failure() -> None:
    fact = observe("container", "registry_digest", "inspect", raising(Absent("built here")))
    assert (fact.value, fact.state, fact.reason) == (None, "verified", "built here")


def test_a_source_that_holds_null_says_so() -> None:
    assert observe("host", "field", "somewhere", lambda: None).reason == "the source holds null"


@pytest.mark.parametrize(
    "wrong",
    [
        {"value": None},  # no reason
        {"value": 1, "state": "failed", "reason": "x"},
        {"value": 1, "name": "CpuModel"},
        {"value": 1, "name": "cpu-model"},
        {"value": 1, "match": "maybe"},
        {"value": 1, "surplus": True},
    ],
)
def test_a_fact_that_says_too_little_is_refused(wrong: dict[str, Any]) -> None:
    base = {"group": "host", "name": "field", "how": "somewhere", "state": "verified"}
    with pytest.raises(ValidationError):
        Fact.model_validate({**base, **wrong})


def test_a_fact_survives_json() -> None:
    fact = observe("gpu", "device0_name", "NVML", lambda: {"名": ["H200", 1.5, None, True]})
    assert Fact.model_validate_json(fact.model_dump_json()) == fact


def test_a_reason_is_one_short_line() -> None:
    reason = read_field("x", raising(ValueError("line one\n  line two " + "y" * 500)))["error"]
    assert "\n" not in reason
    assert len(reason) <= 200


def test_meminfo_units_are_checked() -> None:
    assert kib_to_bytes("16 kB") == 16384
    with pytest.raises(ValueError, match="MB"):
        kib_to_bytes("16 MB")


def test_groups_are_the_files_of_the_folder() -> None:
    folder = Path(facts.__file__).parent
    files = sorted(path.stem for path in folder.glob("[!_]*.py"))
    assert facts.groups() == files
    assert {"host", "engine", "container", "packages", "vllm", "gpu"} <= set(files)


def test_an_unknown_group_is_one_clear_error() -> None:
    with pytest.raises(UnknownName, match="no group of facts is called 'hosts'"):
        facts.collect(HostPlace(), ["hosts"])


def test_every_group_has_a_docstring() -> None:
    for name in facts.groups():
        text = (Path(facts.__file__).parent / f"{name}.py").read_text(encoding="utf-8")
        assert text.startswith('"""'), name


def exec_place(code: int, out: bytes | None, err: bytes | None, calls: list[Any]) -> ContainerPlace:
    def exec_run(argv: list[str], **options: Any) -> tuple[int, tuple[bytes | None, bytes | None]]:
        calls.append((argv, options))
        return code, (out, err)

    container = cast(Any, SimpleNamespace(exec_run=exec_run, attrs={}))
    return ContainerPlace(cast(Any, None), container, "server", interpreter="/venv/bin/python")


def test_a_container_is_visited_once_for_all_groups() -> None:
    calls: list[Any] = []
    place = exec_place(0, json.dumps({"packages": {}}).encode(), None, calls)
    assert place.inside("probe_container") == {"packages": {}}
    assert place.inside("probe_container") == {"packages": {}}
    assert len(calls) == 1
    argv, options = calls[0]
    assert argv[0] == "/venv/bin/python"
    assert argv[-2:] == ["-m", "inside.probe_container"]
    assert options["environment"]["PYTHONPATH"] == "/kit"


@pytest.mark.parametrize(
    ("code", "out", "err", "words"),
    [
        (127, None, b"exec: no such file", "no such file"),
        (1, None, b"Traceback\nModuleNotFoundError: No module named 'inside'", "ModuleNotFound"),
        (0, b"not JSON", None, "not JSON"),
        (0, None, None, ""),
    ],
)
def test_a_container_that_does_not_answer_is_one_clear_error(
    code: int, out: bytes | None, err: bytes | None, words: str
) -> None:
    with pytest.raises(ProbeFailed) as caught:
        exec_place(code, out, err, []).inside("probe_container")
    assert "service server" in caught.value.message
    assert words in caught.value.detail
    assert caught.value.hint


def test_probes_import_nothing_that_an_image_may_lack() -> None:
    allowed = {
        "__future__", "ast", "base64", "collections.abc", "contextlib", "ctypes", "errno",
        "functools", "gzip", "hashlib", "importlib", "importlib.util", "json", "os", "pathlib",
        "platform", "random", "re", "socket", "struct", "sys", "time", "typing",
    }  # fmt: skip
    folder = Path(facts.__file__).parent.parent / "inside"
    for path in folder.glob("probe_*.py"):
        for line in path.read_text(encoding="utf-8").splitlines():
            found = re.match(r"(?:from (\S+) import|import (\S+))", line)
            if found:
                module = found[1] or found[2]
                assert module.startswith(".") or module in allowed, f"{path.name}: {line}"
