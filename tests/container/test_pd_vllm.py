"""Prefill and decode apart with real vLLM, by hand as README shows it: did the KV really move?"""

from __future__ import annotations

import json
import os
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import docker
import pytest
from commands import Ran, only_manifest, quietly, run_kit, run_nox

from kit import engine
from kit.measure import parse_metrics
from kit.paths import ROOT

FILE = "compose/pd.yml"
PROJECT = "vllm-kit-pd"
PROMPTS = [
    "The capital of France is",
    "One, two, three, four, five, six, seven,",
    "It is a truth universally acknowledged, that a single man in possession of a good fortune, "
    "must be in want of a wife. However little known the feelings or views of such a man may be",
]


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


def complete(url: str, prompt: str) -> dict[str, Any]:
    body = {"model": "smollm2-135m-instruct", "prompt": prompt, "max_tokens": 16}
    answer = ask(f"{url}/v1/completions", {**body, "temperature": 0, "ignore_eos": True})
    return dict(json.loads(answer))


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
    answer = complete(stack, PROMPTS[-1])
    assert answer["usage"]["completion_tokens"] == 16
    after = ask(f"{stack}/metrics/consumer")
    name = "vllm:prompt_tokens_by_source_total"
    moved = [counter(t, name, source="external_kv_transfer") for t in (before, after)]
    assert moved[1] - moved[0] >= answer["usage"]["prompt_tokens"] - 1
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


@pytest.mark.full
@pytest.mark.timeout(900)
def test_text_is_a_single_server_s_and_down_leaves_nothing(
    stack: str, client: docker.DockerClient
) -> None:
    apart = [complete(stack, prompt)["choices"][0]["text"] for prompt in PROMPTS]
    down = compose("down", "--timeout", "20")
    assert down.returncode == 0, down.stderr
    chosen: dict[str, str | list[str] | bool] = {"label": f"com.docker.compose.project={PROJECT}"}
    assert client.containers.list(all=True, filters=chosen) == []
    assert client.networks.list(filters=chosen) == []
    assert client.volumes.list(filters=chosen) == []
    words = ("--profile", "baseline", "up", "--wait", "baseline")
    try:
        up = compose(*words, KIT_BASELINE_PORT="18300")
        assert up.returncode == 0, up.stderr
        whole = [
            complete("http://127.0.0.1:18300", prompt)["choices"][0]["text"] for prompt in PROMPTS
        ]
    finally:
        compose("--profile", "baseline", "down", "--timeout", "20")
    assert apart == whole


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
    assert len(asked) == 3
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
