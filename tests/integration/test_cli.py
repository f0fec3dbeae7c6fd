"""The command line as a script sees it: exit codes, one clear line, data on stdout alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kit.errors import (
    BadFile,
    EngineUnreachable,
    KitError,
    NotFound,
    UnknownName,
    UsageError,
)
from kit.experiment import experiment_docs, find_experiment
from kit.paths import ROOT


def kit(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kit", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=120,
        check=False,
    )


def is_one_clear_line(stderr: str) -> bool:
    lines = [line for line in stderr.splitlines() if line.startswith("error: ")]
    return len(lines) == 1 and "Traceback" not in stderr


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["run", "exp1_prefix_cach"], UnknownName),
        (["run", "exp1_prefix_cache", "--variant", "temprature-0.7"], UnknownName),
        (["run", "exp1_prefix_cache", "--image", "v0.32.0-cp"], UnknownName),
        (["run", "exp1_prefix_cache", "--platform", "cpu", "--model", "smollm"], UnknownName),
        (["run", "exp1_prefix_cache", "--replicates", "0"], UsageError),
        (["run", "exp1_prefix_cache", "--replicates", "many"], UsageError),
        (["run"], UsageError),
        (["run", "exp1_prefix_cache", "--no-such-option"], UsageError),
        (["no-such-command"], UsageError),
        (["report", "/nonexistent"], NotFound),
        (["analyse", "/nonexistent"], NotFound),
        (["build", "no-such-image"], UnknownName),
        (["models", "no-such-model"], UnknownName),
        (["models", "--lock"], UsageError),
        (["fit", "qwen2.5-0.5b", "2", "--prefill-tok-per-s", "0"], UsageError),
        (["use", "no-such-image"], UnknownName),
        (["use", "--model", "no-such-model"], UnknownName),
        (["build", "--model", "no-such-model"], UnknownName),
        (["run", "exp1_prefix_cache", "--model", "no-such-model"], UnknownName),
        (["reproduce", "/nonexistent"], NotFound),
        (["compare", "/nonexistent"], NotFound),
        (["compare", "/nonexistent", "/nonexistent"], NotFound),
        (["lock", "no-such-image"], UnknownName),
        (["verify-image", "no-such-image"], UnknownName),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_words_end_in_one_line_and_their_own_code(
    words: list[str], error: type[KitError], tmp_path: Path
) -> None:
    """The engine cannot be asked here: a wrong name is told before anything is built or started."""
    done = kit(*words, DOCKER_HOST=f"unix://{tmp_path}/nothing.sock", KIT_CACHE=str(tmp_path))
    assert done.returncode == error.exit_code, done.stderr
    assert is_one_clear_line(done.stderr), done.stderr
    assert done.stdout == ""


def test_unknown_experiment_names_the_nearest() -> None:
    assert "did you mean `exp1_prefix_cache`" in kit("run", "exp1_prefix_cach").stderr


def test_wrong_docker_host_is_named_and_nothing_is_tried(tmp_path: Path) -> None:
    done = kit("run", "exp1_prefix_cache", "--quick", DOCKER_HOST=f"unix://{tmp_path}/nothing.sock")
    assert done.returncode == EngineUnreachable.exit_code, done.stderr
    assert is_one_clear_line(done.stderr)
    assert "DOCKER_HOST" in done.stderr


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"schema_version": "1.0"}', '{"schema_version": "x"}', "\0", "\xff\xfe"],
)
def test_damaged_manifest_is_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "manifest.json").write_bytes(text.encode("latin-1"))
    done = kit("report", str(tmp_path))
    assert done.returncode == BadFile.exit_code, done.stderr
    assert is_one_clear_line(done.stderr)
    assert "manifest.json" in done.stderr


def test_newer_manifest_says_upgrade(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"schema_version": "2.0"}', "utf-8")
    done = kit("report", str(tmp_path))
    assert done.returncode == BadFile.exit_code
    assert "upgrade kit" in done.stderr


def test_list_is_json_for_scripts_and_text_for_pipes() -> None:
    rows = json.loads(kit("list", "--json").stdout)
    assert [r["experiment"] for r in rows] == list(experiment_docs())
    assert kit("list").stdout.splitlines()[0].split("\t") == ["experiment", "question", "variants"]


def test_help_of_an_experiment_teaches_its_variants() -> None:
    text = kit("run", "exp1_prefix_cache", "--help").stdout
    for variant in find_experiment("exp1_prefix_cache").variants:
        assert variant in text


def test_every_session_of_the_menu_has_a_sentence() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "nox", "-l"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = [line[2:] for line in done.stdout.splitlines() if line[:2] in ("* ", "- ")]
    menu = dict(line.split(" -> ") for line in lines)
    assert set(experiment_docs()) <= set(menu)
    assert all(menu.values())


def test_fit_tells_from_which_length_moving_kv_is_faster() -> None:
    """A token has 12,288 bytes: K and V, 24 layers, 2 heads of 64, 2 bytes each."""
    words = ("fit", "qwen2.5-0.5b", "2", "--json", "--latency-ms", "10")
    told = json.loads(kit(*words, "--prefill-tok-per-s", "5000").stdout)
    from_tokens = told["transfer_pays_from_tokens"]["TCP 10 Gbit/s"]
    assert from_tokens == pytest.approx(0.010 / (1 / 5000 - 12_288 / 1.25e9))
    assert json.loads(kit(*words).stdout)["transfer_pays_from_tokens"] == {}
