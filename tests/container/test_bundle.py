"""A bundle with the real image: away from the engine and back, bit for bit, without network."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import docker
import pytest
from commands import kit_words, only_manifest, run_kit

from kit.image import REPOSITORY, read_identity
from kit.paths import ROOT
from kit.unbundle import read_unbundled

RUN = ("run", "exp1_prefix_cache", "--platform", "cpu", "--json", "--quick")


@pytest.fixture
def run(tmp_path: Path, stub_file: Callable[..., str]) -> Path:
    ran = run_kit(*RUN, "--out", str(tmp_path / "runs"), "--stub", stub_file())
    assert ran.code in (0, 4), ran.stderr  # 4: a busy machine, which is no matter here
    return only_manifest(tmp_path / "runs")[1]


@pytest.fixture
def untagged(client: docker.DockerClient) -> Iterator[Callable[[str], None]]:
    """Take an image's tag away; whatever happens, it is there again afterwards."""
    taken: dict[str, str] = {}

    def take(name: str) -> None:
        tag = f"{REPOSITORY}:{name}"
        image = client.images.get(tag)
        taken[name] = str(image.id)
        image.tag(REPOSITORY, tag="test-kept")  # or the engine would remove its layers
        client.images.remove(tag)

    yield take
    for name, image_id in taken.items():
        client.images.get(image_id).tag(REPOSITORY, tag=name)
        client.images.remove(f"{REPOSITORY}:test-kept")


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_the_image_comes_back_from_the_bundle_with_equal_identity(
    run: Path,
    tmp_path: Path,
    client: docker.DockerClient,
    untagged: Callable[[str], None],
) -> None:
    file, out = tmp_path / "b.kitbundle", tmp_path / "out"
    made = run_kit("bundle", str(run), "--out", str(file), timeout_s=900)
    assert made.code == 0, made.stderr
    manifest, _ = only_manifest(tmp_path / "runs")
    ran = manifest.images[0]
    untagged(ran.id)
    offline = {**os.environ, "KIT_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(
        kit_words("unbundle", str(file), "--to", str(out), "--load"),
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=offline,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    tag = f"{REPOSITORY}:{ran.id}"
    assert read_identity(tag).digest == ran.identity
    assert read_unbundled(out).images[ran.id].identity.digest == ran.identity
    model = tmp_path / "cache" / "models" / manifest.plan.model.id
    assert {p.name for p in model.iterdir()} == set(manifest.plan.model.files)
