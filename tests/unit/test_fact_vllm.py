"""The vLLM group: what is verified, what is only declared, and what is compared."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kit.fact import Fact
from kit.facts import vllm
from kit.inside.probe_field import read_fields
from kit.inside.text import MASK


def absent(reason: str) -> dict[str, Any]:
    return {"value": None, "how": "file", "error": reason, "absent": True}


def given(value: Any) -> dict[str, Any]:
    return read_fields({"x": ("file", lambda: value)})["x"]


def place(
    *,
    commit: dict[str, Any],
    running: dict[str, Any],
    environment: dict[str, Any],
    labels: dict[str, str] | None = None,
    server_info: dict[str, Any] | None = None,
) -> Any:
    sections = {
        "container": {"command_line": running},
        "vllm": {"version": given("0.32.0+cpu"), "commit": commit, "environment": environment},
    }
    attrs = {
        "Path": "vllm",
        "Args": ["serve", "/model", "--api-key", "s3cret"],
        "Config": {"Labels": labels, "Env": ["VLLM_X=1", "HF_TOKEN=abc", "USER=me"]},
    }
    return SimpleNamespace(
        container=SimpleNamespace(attrs=attrs),
        service="server",
        server_info=server_info,
        inside=lambda _module: sections,
    )


def facts(**options: Any) -> dict[str, Fact]:
    defaults: dict[str, Any] = {
        "commit": given("gffd46bfab"),
        "running": given(["docker-init", "--", "vllm", "serve", "/model", "--api-key", "s3cret"]),
        "environment": given({"VLLM_API_KEY": "s3cret", "OMP_NUM_THREADS": "2"}),
    }
    return {fact.name: fact for fact in vllm.collect(place(**{**defaults, **options}))}


def test_a_commit_in_the_build_is_verified() -> None:
    assert (facts()["commit"].value, facts()["commit"].state) == ("gffd46bfab", "verified")


def test_a_commit_only_on_the_label_is_declared_with_the_reason() -> None:
    labels = {"org.opencontainers.image.revision": "ab" * 20}
    commit = facts(commit=absent("this build carries no commit id"), labels=labels)["commit"]
    assert (commit.value, commit.state) == ("ab" * 20, "declared")
    assert commit.reason == "this build carries no commit id"


def test_no_commit_anywhere_is_null_with_the_reason() -> None:
    commit = facts(commit=absent("this build carries no commit id"))["commit"]
    assert (commit.value, commit.reason) == (None, "this build carries no commit id")


def test_arguments_are_verified_when_process_1_received_exactly_them() -> None:
    fact = facts()["startup_arguments"]
    assert fact.value == ["vllm", "serve", "/model", "--api-key", MASK]
    assert fact.state == "verified"


def test_arguments_that_process_1_does_not_show_are_only_declared() -> None:
    fact = facts(running=given(["vllm", "serve", "/other"]))["startup_arguments"]
    assert fact.state == "declared"
    assert fact.reason == "process 1 shows other words"


def test_the_environment_is_filtered_masked_and_falls_back_on_what_was_declared() -> None:
    assert facts()["environment"].value == {"OMP_NUM_THREADS": "2", "VLLM_API_KEY": MASK}
    unreadable = {"value": None, "how": "x", "error": "PermissionError", "absent": False}
    fact = facts(environment=unreadable)["environment"]
    assert fact.value == {"VLLM_X": "1"}
    assert (fact.state, fact.reason) == ("declared", "PermissionError")


def test_the_resolved_configuration_is_kept_without_ids_and_secrets() -> None:
    info = {
        "vllm_config": {"instance_id": "zz", "model_config": {"dtype": "float32", "hf_token": "t"}},
        "vllm_env": {"VLLM_X": 1, "VLLM_HOST_IP": "10.0.0.1", "VLLM_LOG": "INFO"},
        "system_env": {"pip": "not kept"},
    }
    found = facts(server_info=info)
    assert found["vllm_config"].value == {"model_config": {"dtype": "float32", "hf_token": MASK}}
    assert found["vllm_env"].value == {
        "VLLM_X": 1, "VLLM_HOST_IP": "<address>", "VLLM_LOG": "INFO",
    }  # fmt: skip
    assert found["vllm_config"].match == "must"
    assert "not kept" not in str(found)


def test_without_an_answer_the_configuration_is_null_with_the_reason() -> None:
    fact = facts()["vllm_config"]
    assert (fact.value, fact.reason) == (None, "no answer of /server_info was handed in")


def test_an_answer_of_another_shape_is_a_failed_fact() -> None:
    fact = facts(server_info={"vllm_config": "a text"})["vllm_config"]
    assert fact.state == "failed"
    assert "str instead of a mapping" in str(fact.reason)


def test_no_secret_and_no_unlisted_variable_is_in_any_fact() -> None:
    for options in ({}, {"environment": {**given(None), "error": "PermissionError"}}):
        text = "".join(fact.model_dump_json() for fact in facts(**options).values())
        assert "s3cret" not in text
        assert "USER" not in text
