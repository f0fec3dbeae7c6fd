"""The stub's rules: what it reads from a vLLM command line, its cache, what is planted in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from kit.inside.stub_config import BadStub, StubConfig, parse_config, parse_serve
from kit.inside.stub_engine import Engine, PrefixCache, prompt_tokens_of
from kit.inside.stub_pages import metrics_text, server_info

BODY = {"prompt": " ".join(f"t{i}" for i in range(100)), "max_tokens": 10}


def engine(config: dict[str, Any] | None = None, **arguments: Any) -> Engine:
    return Engine(parse_config(config or {}), arguments)


def ttfts(config: dict[str, Any], n: int = 400, **arguments: Any) -> list[float]:
    one = engine({"ttft_s": 0.1, **config}, **arguments)
    return [one.admit({"prompt": f"p{i}"})[1].offsets_ns[0] / 1e9 for i in range(n)]


def metrics(one: Engine) -> dict[str, float]:
    return {
        s.name: s.value
        for family in text_string_to_metric_families(metrics_text(one, "m"))
        for s in family.samples
        if not s.labels.get("source") and not s.labels.get("finished_reason")
    }


def test_a_vllm_command_line_is_read() -> None:
    words = ["/model", "--port", "8000", "--no-enable-prefix-caching", "--block-size=32"]
    words += ["--enforce-eager"]
    words += ["--speculative-config", '{"method": "ngram"}', "--dtype", "float32"]
    assert parse_serve(words) == (
        "/model",
        {
            "port": 8000,
            "enable_prefix_caching": False,
            "block_size": 32,
            "enforce_eager": True,
            "speculative_config": {"method": "ngram"},
            "dtype": "float32",
        },
    )


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ({"ttft": 1}, "ttft: unknown"),
        ({"ttft_s": "1"}, "ttft_s: float is needed"),
        ({"seed": 1.5}, "seed: int is needed"),
        ({"arms": {}}, "arms: tuple is needed"),
        ({"never_ready": 1}, "never_ready: bool is needed"),
        ({"ttft_s": float("nan")}, "ttft_s: not a number"),
    ],
)
def test_a_wrong_config_is_named(raw: dict[str, Any], said: str) -> None:
    with pytest.raises(BadStub, match=said):
        parse_config(raw)


def test_prompts_are_counted_in_words_or_given_ids() -> None:
    assert len(prompt_tokens_of({"prompt": "a b  c"})) == 3
    assert len(prompt_tokens_of({"prompt": [5, 6, 7, 8]})) == 4
    assert len(prompt_tokens_of({"messages": [{"content": "a b"}, {"content": "c"}]})) == 3


@given(st.integers(1, 8), st.lists(st.integers(0, 3), max_size=40), st.integers(0, 40))
def test_what_is_cached_is_the_shared_prefix_in_whole_blocks(
    block: int, tokens: list[int], shared: int
) -> None:
    cache = PrefixCache(block)
    first = [str(t) for t in tokens]
    assert cache.take(first) == 0
    fresh = PrefixCache(block)
    fresh.take([*first, "end"])
    second = [*first[:shared], "other", *["x"] * 20]
    wanted = min(shared, len(first)) // block * block
    assert fresh.take(second) == wanted


def test_the_last_token_is_always_computed() -> None:
    cache = PrefixCache(4)
    tokens = [str(i) for i in range(8)]
    assert (cache.take(tokens), cache.take(tokens)) == (0, 4)


def test_prefix_caching_changes_the_time_and_the_counters() -> None:
    config = {"ttft_per_token_s": 0.001, "ttft_s": 0.01}
    on, off = engine(config), engine(config, enable_prefix_caching=False)
    for one in (on, off):
        first, second = (one.admit(BODY)[1].offsets_ns[0] for _ in range(2))
        assert first == pytest.approx(0.11e9)
        assert second == pytest.approx((0.01 + 0.004 if one is on else 0.11) * 1e9)
    assert metrics(on)["vllm:prefix_cache_queries_total"] == 200
    assert metrics(on)["vllm:prefix_cache_hits_total"] == 96
    assert metrics(off)["vllm:prefix_cache_queries_total"] == 0


def test_an_arm_has_its_planted_factor_and_no_other() -> None:
    config = {"arms": [{"when": {"enable_prefix_caching": False}, "ttft_factor": 1.5}]}
    assert ttfts(config, 1, enable_prefix_caching=False) == [pytest.approx(0.15)]
    assert ttfts(config, 1, enable_prefix_caching=True) == [pytest.approx(0.1)]


def test_noise_is_drawn_by_seed() -> None:
    assert ttfts({"noise_sd": 0.1, "seed": 3}) == ttfts({"noise_sd": 0.1, "seed": 3})
    assert ttfts({"noise_sd": 0.1, "seed": 3}) != ttfts({"noise_sd": 0.1, "seed": 4})


def test_bimodal_and_drift_are_as_planted() -> None:
    slow = [t for t in ttfts({"bimodal_fraction": 0.25, "bimodal_factor": 3.0}) if t > 0.2]
    assert slow == [pytest.approx(0.3)] * len(slow)
    assert 60 < len(slow) < 140
    drifting = ttfts({"drift_per_request": 0.01}, 101)
    assert drifting[100] == pytest.approx(0.2)


def test_each_process_has_its_own_draw() -> None:
    planted = {"process_sd": 0.2}
    assert ttfts(planted, 1) != ttfts(planted, 1)
    assert ttfts({**planted, "process_seed": 1}, 1) == ttfts({**planted, "process_seed": 1}, 1)


def test_wrong_token_counts_are_as_planted() -> None:
    served = engine({"served_fraction": 0.5}).admit(BODY)[1]
    assert (served.tokens, served.finish_reason, served.reported_tokens) == (5, "stop", 5)
    told = engine({"usage_factor": 2.0}).admit(BODY)[1]
    assert (told.tokens, told.reported_tokens) == (10, 20)


def test_counters_go_back_when_told_to() -> None:
    one = engine({"counters_reset_after": 2})
    for _ in range(2):
        one.admit(BODY)
    assert metrics(one)["vllm:prompt_tokens_total"] == 200
    one.admit(BODY)
    assert metrics(one)["vllm:prompt_tokens_total"] == 100


def test_arguments_show_in_the_resolved_configuration() -> None:
    one = engine(max_num_batched_tokens=256, kv_cache_dtype="fp8", scheduling_policy="priority")
    config = server_info(one, "/model")["vllm_config"]
    assert config["scheduler_config"]["max_num_batched_tokens"] == 256
    assert config["scheduler_config"]["policy"] == "priority"
    assert config["cache_config"]["cache_dtype"] == "fp8"
    assert config["model_config"]["model"] == "/model"


def test_a_second_setting_changes_in_silence_where_planted() -> None:
    change = {"when": {"enable_prefix_caching": True}, "set": {"scheduler_config.policy": "x"}}
    on = engine({"info_when": [change]}, enable_prefix_caching=True)
    off = engine({"info_when": [change]}, enable_prefix_caching=False)
    assert server_info(on, "m")["vllm_config"]["scheduler_config"]["policy"] == "x"
    assert server_info(off, "m")["vllm_config"]["scheduler_config"]["policy"] == "fcfs"


def test_drafts_are_counted_only_with_a_speculative_config() -> None:
    with_drafts = engine(speculative_config={"num_speculative_tokens": 3})
    for one in (with_drafts, engine()):
        number, service = one.admit(BODY)
        one.start(number, service)
        one.end(number, service, "length")
    seen = metrics(with_drafts)
    assert seen["vllm:spec_decode_num_draft_tokens_total"] == 12
    assert seen["vllm:spec_decode_num_accepted_tokens_total"] == 6
    assert "vllm:spec_decode_num_drafts_total" not in metrics(one)


def test_every_field_of_the_config_has_a_default() -> None:
    assert parse_config({}) == StubConfig()


def test_a_file_in_sight_makes_a_server_slower(tmp_path: Path) -> None:
    hidden = tmp_path / "slow"
    config = StubConfig(ttft_s=0.1, slow_file=str(hidden), slow_factor=1.5)
    body = {"prompt": "a b c", "max_tokens": 2}
    _, quick = Engine(config, {}).admit(body)
    hidden.touch()
    _, late = Engine(config, {}).admit(body)
    assert quick.offsets_ns[0] == 100_000_000
    assert late.offsets_ns[0] == 150_000_000
