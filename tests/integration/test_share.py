"""Bundles and signatures from the command line: exit codes, one clear line, data on stdout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kit.errors import BundleDamaged, BundleRefused, NotFound, SignatureWrong, UsageError
from kit.paths import MANIFESTS, ROOT
from kit.reference import unpack_reference

REFERENCE = next((MANIFESTS / "exp1_prefix_cache").glob("*.json"))


def kit(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kit", *map(str, words)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "DOCKER_HOST": "unix:///nonexistent.sock"},
        timeout=120,
        check=False,
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack_reference(REFERENCE, tmp_path_factory.mktemp("runs") / "run")


def test_a_run_goes_by_mail_signed_and_is_verified_on_the_other_side(
    run: Path, tmp_path: Path
) -> None:
    """keygen, sign, bundle, unbundle, verify, report: without engine and network."""
    key = tmp_path / "key"
    made = kit("keygen", "--out", key)
    assert made.returncode == 0, made.stderr
    assert key.read_text("utf-8").splitlines()[1] not in made.stderr + made.stdout
    signed = kit("sign", run, "--key", key)
    assert signed.returncode == 0, signed.stderr
    mail = ("--without-image", "--without-model")
    bundled = kit("bundle", run, *mail, "--out", tmp_path / "b.kitbundle", "--json")
    assert bundled.returncode == 0, bundled.stderr
    told = json.loads(bundled.stdout)
    assert {one["what"] for one in told["left_out"]} == {"image", "model"}
    assert (tmp_path / "b.kitbundle").stat().st_size == told["bytes"] < 2 << 20
    laid = kit("unbundle", tmp_path / "b.kitbundle", "--to", tmp_path / "out", "--json")
    assert laid.returncode == 0, laid.stderr
    there = Path(json.loads(laid.stdout)["run"])
    verified = kit("verify", there, "--public-key", f"{key}.pub", "--json")
    assert verified.returncode == 0, verified.stderr
    assert [one["state"] for one in json.loads(verified.stdout)] == ["verified"]
    declared = kit("verify", there)
    assert "not checked" in declared.stderr
    assert kit("report", there).returncode == 0


def test_the_default_place_is_beside_the_run(run: Path) -> None:
    done = kit("bundle", run, "--without-image", "--without-model", "--json")
    path = Path(json.loads(done.stdout)["bundle"])
    run_id = json.loads((run / "manifest.json").read_bytes())["run_id"]
    assert path == run.parent / f"{run_id}.kitbundle"
    again = path.read_bytes()
    kit("bundle", run, "--without-image", "--without-model")
    assert path.read_bytes() == again


@pytest.mark.parametrize(
    ("content", "words", "error"),
    [
        (b"", ("unbundle", "FILE", "--to", "DIR"), BundleDamaged),
        (b"x" * 2000, ("unbundle", "FILE", "--to", "DIR"), BundleRefused),
        (b"", ("unbundle", "/nonexistent", "--to", "DIR"), NotFound),
        (b"", ("unbundle", "FILE"), UsageError),
        (b"", ("bundle", "/nonexistent"), NotFound),
        (b"", ("sign", "/nonexistent", "--key", "FILE"), NotFound),
        (b"", ("verify", "/nonexistent"), NotFound),
        (b"", ("keygen", "--out", "FILE"), UsageError),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_wrong_words_and_files_end_in_one_line(
    content: bytes, words: tuple[str, ...], error: type[Exception], tmp_path: Path
) -> None:
    (tmp_path / "file").write_bytes(content)
    places = {"FILE": tmp_path / "file", "DIR": tmp_path / "dir"}
    done = kit(*(places.get(word, word) for word in words))
    assert done.returncode == error.exit_code, done.stderr  # type: ignore[attr-defined]
    assert done.stderr.count("error: ") == 1
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_changed_sample_ends_in_its_own_code(run: Path, tmp_path: Path) -> None:
    copy = unpack_reference(REFERENCE, tmp_path / "run")
    kit("keygen", "--out", tmp_path / "key")
    assert kit("sign", copy, "--key", tmp_path / "key").returncode == 0
    samples = next(copy.rglob("samples.jsonl"))
    samples.write_bytes(samples.read_bytes() + b" ")
    done = kit("verify", copy, "--public-key", tmp_path / "key.pub")
    assert done.returncode == SignatureWrong.exit_code
    assert "samples.jsonl" in done.stderr
