"""Nothing that is secret or names a machine gets into a record."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.facts.vllm import masked_environment, without_volatile
from kit.inside.text import MASK, mask_text
from kit.secret import (
    ADDRESS,
    is_secret_option,
    mask_address,
    mask_argv,
    mask_known,
    mask_value,
    secret_values,
)


@pytest.mark.parametrize(
    "name", ["HF_TOKEN", "VLLM_API_KEY", "AWS_SECRET_ACCESS_KEY", "db_password", "MY_CREDENTIALS"]
)
def test_variables_with_a_secret_name_are_masked(name: str) -> None:
    assert masked_environment({name: "hunter2"}) == {name: MASK}


def test_a_count_of_tokens_is_no_secret() -> None:
    shown = masked_environment({"VLLM_MAX_TOKENS": "4096", "VLLM_TOKENS": "s3cret"})
    assert shown == {"VLLM_MAX_TOKENS": "4096", "VLLM_TOKENS": MASK}


def test_addresses_of_machines_are_masked_and_loopback_is_not() -> None:
    shown = masked_environment(
        {"VLLM_HOST_IP": "10.1.2.3", "NCCL_SOCKET": "fe80::1", "VLLM_HOST": "127.0.0.1"}
    )
    assert shown == {"VLLM_HOST_IP": ADDRESS, "NCCL_SOCKET": ADDRESS, "VLLM_HOST": "127.0.0.1"}
    assert mask_address("0.0.0.0") == "0.0.0.0"
    assert mask_address("server") == "server"


@pytest.mark.parametrize(
    ("argv", "shown"),
    [
        (["serve", "--api-key", "abc", "--port", "1"], ["serve", "--api-key", MASK, "--port", "1"]),
        (["--api-key", "a", "b", "--x"], ["--api-key", MASK, MASK, "--x"]),
        (["--hf-token=abc"], [f"--hf-token={MASK}"]),
        (["--max-num-batched-tokens", "4096"], ["--max-num-batched-tokens", "4096"]),
        (["--tokenizer", "/model"], ["--tokenizer", "/model"]),
        (["--ssl-keyfile", "/k.pem"], ["--ssl-keyfile", "/k.pem"]),
        (["--url=http://u:p@h/x"], [f"--url=http://{MASK}@h/x"]),
        (
            ["--kv-transfer-config", '{"a": 1, "api_key": "s"}'],
            ["--kv-transfer-config", '{"a": 1, "api_key": "<masked>"}'],
        ),
        (["--speculative-config", '{"n":3}'], ["--speculative-config", '{"n":3}']),
        (["--x={broken"], ["--x={broken"]),
    ],
)
def test_command_lines_are_masked_and_otherwise_untouched(
    argv: list[str], shown: list[str]
) -> None:
    assert mask_argv(argv) == shown


def test_nested_configuration_is_masked_by_key_at_any_depth() -> None:
    value = {"model_config": {"hf_token": "s", "tokenizer": "/m", "list": [{"api_key": "t"}]}}
    assert mask_value(value) == {
        "model_config": {"hf_token": MASK, "tokenizer": "/m", "list": [{"api_key": MASK}]}
    }


def test_ids_drawn_at_every_start_are_left_out() -> None:
    value = {
        "instance_id": "a",
        "VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME": "vllm_mm_x",
        "kv": [{"engine_id": "b", "rank": 0}],
    }
    assert without_volatile(value) == {"kv": [{"rank": 0}]}


def test_an_objects_address_is_left_out_and_the_object_stays() -> None:
    shown = "<vllm.online.base.OnlineQuantizationConfig object at 0x7f12ab34cd50>"
    value = {"quant_config": shown, "note": "the file lies at 0x7f12"}
    assert without_volatile(value) == {
        "quant_config": "<vllm.online.base.OnlineQuantizationConfig object>",
        "note": "the file lies at 0x7f12",
    }


@pytest.mark.parametrize(
    "text",
    [
        "curl -H 'Authorization: Bearer abcdefgh12345678'",
        "postgres://user:hunter2hunter2@db/x",
        "token hf_abcdefghijklmnopqrstuvwx",
        "pushed to user:hunter2hunter2@registry.example:5000/vllm",
    ],
)
def test_what_looks_like_a_credential_is_masked_in_text(text: str) -> None:
    shown = mask_text(text)
    assert MASK in shown
    for secret in ("abcdefgh12345678", "hunter2hunter2", "hf_abcdefghijklmnopqrstuvwx"):
        assert secret not in shown


@pytest.mark.parametrize(
    "text", ["vllm-kit:v0.32.0-cpu@sha256:0123", "localhost:5000/vllm@sha256:01", "a:b @ c/d"]
)
def test_an_image_s_name_is_no_credential(text: str) -> None:
    assert mask_text(text) == text


secret_text = st.text(st.characters(codec="ascii", categories=("L", "N")), min_size=6)


@given(secret=secret_text, before=st.text(), after=st.text())
def test_a_known_secret_never_stays_in_a_text(secret: str, before: str, after: str) -> None:
    known = secret_values({"HF_TOKEN": secret, "PATH": "/usr/bin"})
    assert known == {secret}
    if secret not in MASK:
        assert secret not in mask_known(before + secret + after, known).replace(MASK, "\0")


@given(value=st.text(min_size=1), name=st.sampled_from(["--api-key", "--hf-token", "--x-secret"]))
def test_an_option_s_secret_never_stays_in_a_command_line(value: str, name: str) -> None:
    assert mask_argv([f"{name}={value}"]) == [f"{name}={MASK}"]


@given(st.text())
def test_options_are_judged_without_crashing(name: str) -> None:
    assert is_secret_option(name) in (True, False)
