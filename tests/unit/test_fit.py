"""The calculator against shapes whose sizes are known: parameters, KV, splits, transfers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.errors import BadFile
from kit.fit import (
    LINKS,
    Shape,
    break_even_tokens,
    kv_bytes_per_rank,
    reduce_bytes_per_token,
    shape_of,
    split_refusal,
    splits_of,
    transfer_s,
)
from kit.model import find_model

SMOL = {
    "model_type": "llama",
    "num_hidden_layers": 30,
    "hidden_size": 576,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}
LLAMA_8B = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}
QWEN = find_model("qwen2.5-0.5b").config or {}


def shape(config: dict[str, object]) -> Shape:
    return shape_of(config, "config.json")


@pytest.mark.parametrize(
    ("config", "parameters"),
    [(SMOL, 134_515_008), (QWEN, 494_032_768), (LLAMA_8B, 8_030_261_248)],
    ids=["SmolLM2-135M", "Qwen2.5-0.5B", "Llama-3.1-8B"],
)
def test_parameters_are_those_that_the_models_publish(
    config: dict[str, object], parameters: int
) -> None:
    assert shape(config).parameters == parameters


def test_kv_of_a_token_is_what_was_measured() -> None:
    assert shape(QWEN).kv_bytes(1, 2) == 12_288
    assert shape(SMOL).kv_bytes(1, 4) == 46_080
    assert shape(LLAMA_8B).kv_bytes(8192, 2) == 2**30
    # 258 MB in 6 transfers moved 21,024 tokens of Qwen2.5-0.5B in bfloat16
    assert shape(QWEN).kv_bytes(21_024, 2) == pytest.approx(258e6, rel=0.005)


@pytest.mark.parametrize(
    ("config", "ranks", "why"),
    [
        (SMOL, 1, None),
        (SMOL, 2, "9 attention heads do not divide by 2"),
        (SMOL, 3, None),
        (SMOL, 9, None),
        (QWEN, 2, None),
        (QWEN, 7, "2 KV heads and 7 ranks do not divide"),
        (QWEN, 14, None),
        (LLAMA_8B, 16, None),
    ],
)
def test_which_splits_divide_the_heads(
    config: dict[str, object], ranks: int, why: str | None
) -> None:
    assert split_refusal(shape(config), ranks) == why


def test_ranks_share_the_kv_until_each_has_one_head() -> None:
    whole = shape(QWEN).kv_bytes(10, 2)
    assert kv_bytes_per_rank(shape(QWEN), 10, 2, 2) == whole // 2
    assert kv_bytes_per_rank(shape(QWEN), 10, 2, 14) == whole // 2


def test_one_rank_reduces_nothing_and_more_ranks_send_more() -> None:
    sent = [reduce_bytes_per_token(shape(LLAMA_8B), 2, n) for n in (1, 2, 4, 8)]
    assert sent[0] == 0
    assert sent == sorted(sent)
    assert sent[1] == 2 * 32 * 4096 * 2


def test_what_fits_beside_the_weights() -> None:
    one, two = splits_of(shape(LLAMA_8B), 2, memory_bytes=24e9, element_bytes=2, kv_element_bytes=2)
    assert (one.ranks, one.instances, two.ranks, two.instances) == (1, 2, 2, 1)
    assert one.weight_bytes == 16_060_522_496
    assert one.kv_tokens == int((24e9 - 16_060_522_496) // 131_072)
    assert two.fits
    assert (two.kv_tokens or 0) > 2 * (one.kv_tokens or 0)


def test_what_does_not_fit_is_not_negative() -> None:
    (only,) = splits_of(shape(LLAMA_8B), 1, memory_bytes=8e9, element_bytes=2, kv_element_bytes=2)
    assert only.kv_tokens == 0
    assert not only.fits


@given(st.integers(1, 64), st.integers(1, 10_000))
def test_all_devices_are_used_by_every_split(devices: int, gib: int) -> None:
    found = splits_of(
        shape(SMOL), devices, memory_bytes=gib * 2**30, element_bytes=4, kv_element_bytes=4
    )
    assert all(s.ranks * s.instances == devices for s in found)
    assert found[0].ranks == 1
    assert all((s.refusal is None) == (s.weight_bytes is not None) for s in found)


@given(st.floats(0, 1e15), st.sampled_from(sorted(LINKS)))
def test_a_transfer_takes_its_bytes_over_the_link(size: float, link: str) -> None:
    assert transfer_s(size, LINKS[link]) * LINKS[link] == pytest.approx(size)
    assert transfer_s(size, LINKS[link], latency_s=1.0) >= 1.0


def test_moving_pays_from_the_length_at_which_both_take_as_long() -> None:
    tokens = break_even_tokens(10_000, 1e9, prefill_tok_per_s=1000, latency_s=0.099)
    assert tokens == pytest.approx(100)
    assert pytest.approx(100 / 1000) == 0.099 + 100 * 10_000 / 1e9
    assert break_even_tokens(10_000, 1e6, prefill_tok_per_s=1000, latency_s=0.1) is None


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({**SMOL, "model_type": "mixtral"}, "model_type"),
        ({k: v for k, v in SMOL.items() if k != "hidden_size"}, "hidden_size: missing"),
    ],
)
def test_what_is_not_known_is_refused(config: dict[str, object], says: str) -> None:
    with pytest.raises(BadFile, match=says):
        shape(config)
