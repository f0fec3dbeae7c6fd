"""Prefill and decode apart with real vLLM, by hand as README shows it: did the KV really move?"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docker
import pytest
from commands import Ran, only_manifest, quietly, run_kit, run_nox

from kit import engine
from kit.measure import parse_metrics
from kit.paths import ROOT
from kit.quality import first_divergence
from kit.texts import TEXTS

FILE = "compose/pd.yml"
PROJECT = "vllm-kit-pd"
LENGTHS = tuple(1 + 6 * i for i in range(50))  # words
TOKENS = 12
LANES = 8
NEAR_TIE = 0.05  # between the two likeliest tokens, natural logarithm


def prompts() -> list[str]:
    """Return prompts of different lengths, no two with one beginning."""
    words = list(itertools.islice(itertools.cycle(" ".join(TEXTS).split()), 1000))
    return [" ".join(words[7 * i : 7 * i + length]) for i, length in enumerate(LENGTHS)]


def compose(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [engine.cli_program(), "compose", "-f", FILE, *words],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def ask(url: str, body: dict[str, Any] | None = None) -> str:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return str(answer.read().decode())


@dataclass(frozen=True)
class Answer:
    """One greedy answer; its tokens, and the two likeliest at each place, where it was asked."""

    text: str
    prompt_tokens: int
    tokens: tuple[str, ...] = ()
    told: tuple[dict[str, float], ...] = ()


def complete(
    url: str, prompt: str, *, chat: bool = False, stream: bool = False, salt: str = "none"
) -> Answer:
    """Ask greedily; with another `salt` nothing that was cached for the same prompt is used."""
    body: dict[str, Any] = {
        "model": "smollm2-135m-instruct",
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "cache_salt": salt,
        "stream": stream,
    }
    body |= {"stream_options": {"include_usage": True}} if stream else {}
    if chat:
        path = "/v1/chat/completions"
        body["messages"] = [{"role": "user", "content": prompt}]
    else:
        path = "/v1/completions"
        body |= {"prompt": prompt, "logprobs": 2, "return_tokens_as_token_ids": True}
    answer = ask(f"{url}{path}", body)
    lines = [line.removeprefix("data: ") for line in answer.splitlines()] if stream else [answer]
    frames = [json.loads(line) for line in lines if line.startswith("{")]
    choices = [choice for frame in frames for choice in frame["choices"]]
    texts = [(c.get("delta") or c.get("message") or {}).get("content") or c.get("text", "")
             for c in choices]  # fmt: skip
    scored = [c["logprobs"] for c in choices if not chat and c.get("logprobs")]
    return Answer(
        text="".join(texts),
        prompt_tokens=frames[-1]["usage"]["prompt_tokens"],
        tokens=tuple(token for each in scored for token in each["tokens"]),
        told=tuple(places for each in scored for places in each["top_logprobs"]),
    )


def counter(text: str, name: str, **labels: str) -> float:
    wanted = set(labels.items())
    return sum(v for (n, ls), v in parse_metrics(text).items() if n == name and wanted <= ls)


@pytest.fixture(scope="module")
def stack(built: Ran) -> Iterator[str]:
    """Producer, consumer and proxy, up by plain compose; the proxy's address."""
    try:
        up = compose("up", "--wait", KIT_PORT="18000")
        assert up.returncode == 0, up.stderr
        yield "http://127.0.0.1:18000"
    finally:
        compose("down", "--timeout", "20")


@pytest.mark.full
@pytest.mark.timeout(600)
def test_an_answer_comes_through_the_proxy_and_the_consumer_s_counters_prove_it(
    stack: str,
) -> None:
    before = ask(f"{stack}/metrics/consumer")
    answer = complete(stack, prompts()[-1])
    assert len(answer.tokens) == TOKENS
    after = ask(f"{stack}/metrics/consumer")
    name = "vllm:prompt_tokens_by_source_total"
    moved = [counter(t, name, source="external_kv_transfer") for t in (before, after)]
    assert moved[1] - moved[0] >= answer.prompt_tokens - 1
    sent = [counter(t, "vllm:nixl_bytes_transferred_sum") for t in (before, after)]
    assert sent[1] > sent[0]


@pytest.mark.full
@pytest.mark.timeout(600)
def test_both_legs_are_healthy_and_only_the_proxy_is_published(
    stack: str, client: docker.DockerClient
) -> None:
    assert ask(f"{stack}/health") == ""
    label = f"com.docker.compose.project={PROJECT}"
    containers = client.containers.list(filters={"label": label})
    published = {
        c.labels["com.docker.compose.service"]: [p for p in c.ports.values() if p]
        for c in containers
    }
    assert published["producer"] == published["consumer"] == []
    (bindings,) = published["proxy"]
    assert [b["HostIp"] for b in bindings] == ["127.0.0.1"]


WAYS = {
    "plain": {"chat": False, "stream": False},
    "plain, streamed": {"chat": False, "stream": True},
    "chat": {"chat": True, "stream": False},
    "chat, streamed": {"chat": True, "stream": True},
}


@dataclass(frozen=True)
class Compared:
    """The answers of both stacks to all prompts, and what the first of them left behind."""

    apart: dict[str, list[Answer]]
    loaded: list[Answer]
    whole: dict[str, list[Answer]]
    moved: float
    left: list[str]


@pytest.fixture(scope="module")
def compared(stack: str, client: docker.DockerClient) -> Compared:
    """Ask the pair, one at a time and several at once; end it; ask a single server as well.

    float32 and prefix caching on all engines alike, as the compose files have it on CPU.
    """
    name = "vllm:prompt_tokens_by_source_total"
    before = counter(ask(f"{stack}/metrics/consumer"), name, source="external_kv_transfer")
    apart = {
        way: [complete(stack, prompt, salt=way, **how) for prompt in prompts()]
        for way, how in WAYS.items()
    }
    after = counter(ask(f"{stack}/metrics/consumer"), name, source="external_kv_transfer")
    with ThreadPoolExecutor(LANES) as lanes:
        loaded = list(lanes.map(lambda prompt: complete(stack, prompt, salt="load"), prompts()))
    down = compose("down", "--timeout", "20")
    assert down.returncode == 0, down.stderr
    chosen: dict[str, str | list[str] | bool] = {"label": f"com.docker.compose.project={PROJECT}"}
    left = [
        *client.containers.list(all=True, filters=chosen),
        *client.networks.list(filters=chosen),
        *client.volumes.list(filters=chosen),
    ]
    words = ("--profile", "baseline", "up", "--wait", "baseline")
    try:
        up = compose(*words, KIT_BASELINE_PORT="18300")
        assert up.returncode == 0, up.stderr
        whole = {
            way: [complete("http://127.0.0.1:18300", p, salt=way, **how) for p in prompts()]
            for way, how in WAYS.items()
            if not how["stream"]
        }
    finally:
        compose("--profile", "baseline", "down", "--timeout", "20")
    return Compared(apart, loaded, whole, after - before, [str(each) for each in left])


@pytest.mark.full
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("way", WAYS)
def test_fifty_prompts_have_the_text_of_a_single_server(compared: Compared, way: str) -> None:
    ours, theirs = compared.apart[way], compared.whole[way.removesuffix(", streamed")]
    assert len({each.prompt_tokens for each in ours}) == len(LENGTHS)
    differing = [
        (a.prompt_tokens, a.text, b.text)
        for a, b in zip(ours, theirs, strict=True)
        if (a.text, a.prompt_tokens) != (b.text, b.prompt_tokens)
    ]
    assert differing == []
    assert all(each.text for each in ours)


@pytest.mark.full
def test_every_prompt_s_kv_was_moved_and_nothing_is_left(compared: Compared) -> None:
    asked = [each.prompt_tokens for answers in compared.apart.values() for each in answers]
    assert compared.moved >= sum(asked) - len(asked)
    assert compared.left == []


@pytest.mark.full
def test_under_load_texts_part_only_where_two_tokens_are_nearly_as_likely(
    compared: Compared, record_property: Any
) -> None:
    alone = compared.whole["plain"]
    parted = [
        found
        for a, b in zip(alone, compared.loaded, strict=True)
        if (found := first_divergence(a.tokens, b.tokens, a.told)) is not None
    ]
    record_property("answers that part", f"{len(parted)} of {len(alone)}")
    print(f"answers that part under load: {len(parted)} of {len(alone)}: {parted}")
    assert [each for each in parted if not each.is_near_tie(NEAR_TIE)] == []
    assert all(len(each.tokens) == len(each.told) == TOKENS for each in alone)


@pytest.mark.full
@pytest.mark.timeout(1500)
def test_one_pair_of_adv4_shows_its_evidence(tmp_path: Path) -> None:
    words = ("-s", "adv4_pd_disagg", "--", "--quick", "--platform", "cpu", "--json", "--out")
    ran, where = quietly(lambda folder: run_nox(*words, str(folder)), tmp_path)
    assert ran.code == 0, ran.stderr
    manifest, run = only_manifest(where)
    assert manifest.verdict is not None
    assert "too few replicates" in manifest.verdict.reason
    asked = [g for g in manifest.guards if g.name == "precondition"]
    assert len(asked) == 4
    assert all(g.ok for g in asked)
    assert manifest.confounders == ()
    candidate = next(r for r in manifest.replicates if r.role == "candidate")
    facts = {(f.service, f.group, f.name): f.value for f in candidate.facts}
    assert facts["consumer", "transfer", "transports"] == ["tcp/eth0"]
    values = {x.name: x.value for x in candidate.readings}
    # whole blocks are moved, and the prompts are three of them
    wanted = pytest.approx(values["kv_cache_bytes_per_token"], rel=0.05)
    assert values["kv_bytes_per_token"] == wanted
    for leg in ("producer", "consumer", "proxy"):
        assert (run / candidate.folder / "logs" / f"{leg}.log").is_file()


@pytest.mark.full
@pytest.mark.timeout(1500)
def test_one_pair_of_adv2_tells_its_efficiency(tmp_path: Path) -> None:
    words = ("-s", "adv2_tp_scaling", "--", "--quick", "--platform", "cpu", "--json", "--out")
    ran, where = quietly(lambda folder: run_nox(*words, str(folder)), tmp_path)
    assert ran.code == 0, ran.stderr
    manifest, _ = only_manifest(where)
    assert manifest.confounders == ()
    assert manifest.not_acted == ()
    (one,) = manifest.comparisons
    found = {r.name: r.value for r in one.readings}
    assert 0.1 < (found["scaling_efficiency"] or 0) < 2


def test_too_few_devices_are_unsupported_before_anything_starts(tmp_path: Path) -> None:
    words = ("run", "adv2_tp_scaling", "--quick", "--platform", "cpu", "--json")
    few = ("--variant", "tp-8", "--out", str(tmp_path))
    if len(os.sched_getaffinity(0)) >= 8:
        few = ("--variant", "tp-4", "--model", "smollm2-135m-instruct", "--out", str(tmp_path))
    ran = run_kit(*words, *few)
    assert ran.code == 3, ran.stderr
    manifest, run = only_manifest(tmp_path)
    assert manifest.replicates == ()
    assert not (run / "replicates").exists()
