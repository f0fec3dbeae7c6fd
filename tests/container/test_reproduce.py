"""A run again, through the command line and real containers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from commands import Ran, only_manifest, quietly, run_kit, run_nox

from kit import store
from kit.paths import INSIDE, MANIFESTS

REFERENCE = MANIFESTS / "exp1_prefix_cache" / "v0.32.0-cpu--smollm2-135m-instruct--cpu.json"
SLOW = INSIDE / "__pycache__" / "kit-slow"  # git-ignored, and in every server's sight
# servers differ by 1 %, a hit saves 0.4 s
STUB = {
    "ttft_s": 0.1,
    "ttft_per_token_s": 0.0004,
    "itl_s": 0.02,
    "block_tokens": 16,
    "slow_file": f"/kit/inside/{SLOW.parent.name}/{SLOW.name}",
    "slow_factor": 1.3,
}

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.mark.timeout(900)
def test_the_reference_is_repeated_on_the_same_bits(tmp_path: Path) -> None:
    """One pair: the image is rebuilt or found equal to the lock, and nothing may be claimed."""
    words = ("-s", "reproduce", "--", str(REFERENCE), "--quick", "--json", "--out")
    ran, where = quietly(lambda folder: run_nox(*words, str(folder)), tmp_path)
    told = ran.result
    assert told["outcome"]["word"] == "inconclusive", ran.stderr
    assert ran.code == 1  # nox knows only success and failure; the kit's own code was 7
    assert "exit code 7" in ran.stderr
    assert told["checked"] == "raw files"
    manifest, run = only_manifest(where)
    assert manifest.reproduces is not None
    assert manifest.reproduces.manifest_sha256 == store.sha256_file(REFERENCE)
    assert [i.identity for i in manifest.images] == [manifest.plan.client_image.identity]
    assert told["again_sha256"] == store.sha256_file(run / "manifest.json")
    assert "**inconclusive.**" in (run / "reproduction.en.md").read_text("utf-8")


@pytest.fixture
def slow() -> Iterator[Callable[[], None]]:
    """Make every stub that starts from then on slower, by what is in no plan and no fact."""

    def make() -> None:
        SLOW.parent.mkdir(exist_ok=True)
        SLOW.touch()
        SLOW.chmod(0o644)

    yield make
    SLOW.unlink(missing_ok=True)


@pytest.mark.full
@pytest.mark.timeout(2400)
def test_a_stub_run_comes_back_and_a_hidden_slow_down_is_seen(
    tmp_path: Path, stub_file: Callable[..., str], slow: Callable[[], None]
) -> None:
    words = ("run", "exp1_prefix_cache", "--platform", "cpu", "--json", "--stub", stub_file(**STUB))
    words += ("--equivalence", "0.1")  # a stub is as quiet as an idle GPU host
    first, where = quietly(
        lambda folder: run_kit(*words, "--out", str(folder)), tmp_path / "original"
    )
    assert first.result["verdict"]["word"] == "supported", first.stderr
    _, original = only_manifest(where)

    def again(folder: Path) -> Ran:
        return run_kit("reproduce", str(original), "--out", str(folder), "--json")

    same = again(tmp_path / "same")
    assert same.result["outcome"]["word"] == "reproduced", same.stderr
    assert same.result["outcome"]["distance"] == "same machine"
    assert same.code == 0
    slow()
    late = again(tmp_path / "late")
    assert late.result["outcome"]["word"] == "not reproduced", late.stderr
    assert late.code == 6
