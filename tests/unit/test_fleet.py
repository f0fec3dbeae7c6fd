"""A fleet's plan file, its cases, what is recognised as finished, and the nodes beside each other.

All without Slurm and engine; tests/container/test_fleet.py has a real Slurm.
"""

from __future__ import annotations

import json
import math
import os
import random
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from kit import cli, fleet, fleet_job, store
from kit.errors import BadFile, KitError, StaleNumber, ToolMissing
from kit.fleet_job import Attempt, Finished, Job, final_folder, is_blocked_by_node, read_finished
from kit.fleet_nodes import judge_nodes
from kit.fleet_plan import Case, FleetFile, NodeClass, read_fleet
from kit.manifest import Manifest, Resumed, load_manifest
from kit.paths import MANIFESTS, ROOT
from kit.prepare import Options, plan_ahead
from kit.reference import unpack_reference

REFERENCE = MANIFESTS / "exp1_prefix_cache" / "v0.32.0-cpu--smollm2-135m-instruct--cpu.json"
SMALL: dict[str, Any] = {
    "out": "out",
    "experiments": ["exp1_prefix_cache"],
    "nodes": {"small": {"platform": "cpu"}},
}


def plan_file(folder: Path, **changes: Any) -> Path:
    path = folder / "plan.yaml"
    path.write_text(yaml.safe_dump({**SMALL, **changes}), "utf-8")
    return path


def finish(job: Job, source: Path) -> None:
    """Publish a reference's run as a case's result, as its job would."""
    work = job.out / "work" / job.case.key
    (work / "run").mkdir(parents=True)
    run = unpack_reference(source, work / "run" / "one")
    fleet_job._note(work, 0, went_on=False)
    fleet_job.publish(job, run, fleet_job.attempts_of(work))


def reference_case(folder: Path, **changes: Any) -> tuple[fleet.Fleet, Case]:
    """Return a fleet of one case that says it has the reference's plan."""
    found = read_fleet(plan_file(folder, **changes))
    digest = load_manifest(REFERENCE).plan_sha256
    cases = tuple(c.model_copy(update={"plan_sha256": digest}) for c in found.cases)
    return found.model_copy(update={"cases": cases}), cases[0]


@pytest.fixture(autouse=True)
def _no_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "_queue", dict)


def test_the_matrix_is_the_product_of_its_axes(tmp_path: Path) -> None:
    path = plan_file(
        tmp_path,
        experiments=["exp1_prefix_cache", "exp2_batched_tokens"],
        images=["v0.31.0-cpu", "v0.32.0-cpu", "v0.31.0-cpu..v0.32.0-cpu"],
        seeds=[1, 2],
    )
    cases = read_fleet(path).cases
    assert len(cases) == 12
    assert len({c.key for c in cases}) == len({c.plan_sha256 for c in cases}) == 12
    between = [c for c in cases if c.words[0] == "compare-versions"]
    assert [c.words[1:4] for c in between[::2]] == [
        ("exp1_prefix_cache", "v0.31.0-cpu", "v0.32.0-cpu"),
        ("exp2_batched_tokens", "v0.31.0-cpu", "v0.32.0-cpu"),
    ]


def test_the_plan_known_beforehand_is_the_one_that_ran() -> None:
    """The hash that a machine with an engine froze comes from the locks alone."""
    ran = load_manifest(REFERENCE).plan
    options = Options(platform="cpu", seed=ran.seed, spare_pairs=ran.spare_pairs)
    ahead = plan_ahead("exp1_prefix_cache", options)
    assert ahead.arms[0].image == ran.arms[0].image
    assert ahead.model == ran.model
    assert ahead.phases == ran.phases


def test_each_node_gets_every_case_by_name(tmp_path: Path) -> None:
    nodes = {"small": {"platform": "cpu", "each": ["n1", "n2", "n3"], "constraint": "small"}}
    found = read_fleet(plan_file(tmp_path, nodes=nodes, aa=True, quick=True))
    assert [c.node for c in found.cases] == ["n1", "n2", "n3"]
    assert len({c.plan_sha256 for c in found.cases}) == 1
    assert len({c.key for c in found.cases}) == 3
    asked = fleet.request_of(found.cases[1], found.file.nodes["small"])
    assert asked["slurm_nodelist"] == "n2"
    assert asked["slurm_constraint"] == "small"
    assert asked["slurm_exclusive"] is True
    assert "slurm_gpus_per_node" not in asked


def test_jobs_ask_for_the_devices_of_their_experiment(tmp_path: Path) -> None:
    found = read_fleet(plan_file(tmp_path, experiments=["adv2_tp_scaling"]))
    (case,) = found.cases
    assert case.devices == 2
    nodes = found.file.nodes["small"].model_copy(update={"platform": "cuda", "exclusive": False})
    asked = fleet.request_of(case, nodes)
    assert asked["slurm_gpus_per_node"] == 2
    assert "slurm_exclusive" not in asked


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"nodes": {"small": {"platform": "tpu"}}}, "plan.yaml: nodes.small.platform:"),
        ({"nodes": {"small": {"platform": "cpu", "gpu": 1}}}, "plan.yaml: nodes.small.gpu:"),
        ({"nodes": {}}, "plan.yaml: nodes:"),
        ({"experiments": []}, "plan.yaml: experiments:"),
        ({"experimets": ["x"]}, "plan.yaml: experimets:"),
        ({"seeds": [1, 1]}, "plan.yaml: seeds[1]: `1` stands there twice"),
        ({"seeds": ["a"]}, "plan.yaml: seeds[0]:"),
        ({"experiments": ["exp1_prefix_cash"]}, "there is no experiment `exp1_prefix_cash`"),
        ({"variants": ["nope"]}, "variant nope"),
        ({"images": ["v0.32.0-cpy"]}, "no image `v0.32.0-cpy`"),
        ({"images": ["v0.26.0-cu130"]}, "no locked identity"),
        ({"images": ["v0.31.0-cpu..v0.32.0-cpu"], "aa": True}, "exclude each other"),
    ],
)
def test_a_bad_plan_file_is_one_clear_line(
    tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(BadFile) as caught:
        read_fleet(plan_file(tmp_path, **changes))
    assert says in caught.value.message
    assert "\n" not in caught.value.message


def test_a_list_is_no_plan_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text("- a\n", "utf-8")
    with pytest.raises(BadFile, match=r"plan\.yaml: \(top\)"):
        read_fleet(path)


def test_a_dry_run_prints_the_jobs_and_starts_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = plan_file(tmp_path, seeds=[1, 2], quick=True)
    assert cli.main(["fleet", str(path), "--dry-run", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [each["finished"] for each in told] == [False, False]
    assert told[1]["command"].startswith("kit run exp1_prefix_cache --platform cpu --seed 2")
    assert told[0]["slurm"]["time"] == 240
    assert cli.main(["fleet", str(path), "--dry-run"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3
    assert not (tmp_path / "out").exists()


def test_two_ways_at_once_are_refused(tmp_path: Path) -> None:
    assert cli.main(["fleet", str(plan_file(tmp_path)), "--dry-run", "--status"]) == 2


def test_without_submitit_or_slurm_the_error_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ToolMissing) as caught:
        fleet.submit(read_fleet(plan_file(tmp_path)), lambda _: None)
    assert "nox -s" in caught.value.hint


def test_a_finished_case_is_recognised_and_not_submitted_again(tmp_path: Path) -> None:
    found, case = reference_case(tmp_path)
    finish(fleet.job_of(found, case), REFERENCE)
    (state,) = fleet.states(found)
    assert (state.state, state.verdict) == ("finished", "supported")
    assert fleet.submit(found, lambda _: None) == 0
    other = case.model_copy(update={"plan_sha256": "0" * 64})
    assert read_finished(found.file.out, other) is None


def test_a_submitted_case_that_left_the_queue_is_lost_and_one_in_it_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = read_fleet(plan_file(tmp_path, seeds=[1, 2, 3]))
    keys = [case.key for case in found.cases]
    store.write_json(tmp_path / "out" / "jobs.json", {keys[0]: "7_0", keys[1]: "7_1"})
    monkeypatch.setattr(fleet, "_queue", lambda: {"7_1": ("RUNNING", "n2", "None")})
    assert [(s.state, s.node) for s in fleet.states(found)] == [
        ("lost", None),
        ("running", "n2"),
        ("to do", None),
    ]
    monkeypatch.setattr(fleet, "_queue", lambda: None)
    assert [s.state for s in fleet.states(found)] == ["submitted", "submitted", "to do"]


def test_two_attempts_that_both_end_publish_one_result(tmp_path: Path) -> None:
    found, case = reference_case(tmp_path)
    job = fleet.job_of(found, case)
    finish(job, REFERENCE)
    before = (final_folder(job.out, case) / "fleet.json").read_bytes()
    shutil.rmtree(job.out / "work")
    finish(job, REFERENCE)
    assert (final_folder(job.out, case) / "fleet.json").read_bytes() == before
    assert [p.name for p in (job.out / "runs").iterdir()] == [case.key]


def test_a_run_of_another_plan_is_not_published(tmp_path: Path) -> None:
    found = read_fleet(plan_file(tmp_path))
    (case,) = found.cases
    work = found.file.out / "work"
    unpack_reference(REFERENCE, work / "run" / "one")
    with pytest.raises(StaleNumber, match="the fleet's plan is"):
        fleet_job.whole(work, case.model_copy(update={"plan_sha256": "0" * 64}))


def test_a_damaged_copy_is_not_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, case = reference_case(tmp_path)

    def copy(source: Path, target: Path) -> None:
        shutil.copy2(source / "manifest.json", _made(target) / "manifest.json")

    monkeypatch.setattr(fleet_job.shutil, "copytree", copy)
    with pytest.raises(StaleNumber, match="the copy of the run is not whole"):
        finish(fleet.job_of(found, case), REFERENCE)
    assert not final_folder(found.file.out, case).exists()


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


def test_an_attempt_goes_on_only_on_its_own_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, case = reference_case(tmp_path)
    job = fleet.job_of(found, case)
    work = job.out / "work" / case.key
    run = unpack_reference(REFERENCE, work / "run" / "one")
    ended = load_manifest(run / "manifest.json").model_copy(update={"status": "interrupted"})
    store.write_json(run / "manifest.json", ended.model_dump(mode="json"))
    asked: list[str] = []
    monkeypatch.setattr(fleet_job, "_kit", lambda *words: asked.append(words[0]) or 70)
    for node in ("n1", "n2", "n2"):
        monkeypatch.setenv("SLURMD_NODENAME", node)
        with pytest.raises(KitError, match="exit code 70"):
            fleet_job.carry_out(job)
    assert asked == ["run", "run", "resume", "run"]
    assert [a.node for a in fleet_job.attempts_of(work)] == ["n1", "n2", "n2"]


def test_a_run_on_the_nodes_own_disk_is_copied_to_the_shared_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = {"small": {"platform": "cpu", "scratch": str(tmp_path / "disk")}}
    found, case = reference_case(tmp_path, nodes=nodes)

    def run(*words: str) -> int:
        unpack_reference(REFERENCE, Path(words[-1]) / "one")
        return 0

    monkeypatch.setattr(fleet_job, "_kit", run)
    target = fleet_job.carry_out(fleet.job_of(found, case))
    manifest = load_manifest(target / "run" / "manifest.json")
    assert store.changed_files(target / "run", manifest.files) == []
    assert list((tmp_path / "disk").iterdir()) == list((tmp_path / "out/work").iterdir()) == []


def manifest_with(resumed: int) -> Manifest:
    told = Resumed(resumed_utc="2026-01-01T00:00:00.000Z", after=1, ended=None)
    return load_manifest(REFERENCE).model_copy(update={"resumed": (told,) * resumed})


def attempts(*nodes: str) -> tuple[Attempt, ...]:
    """Attempts on these nodes; `+n1` went on with the one before."""
    return tuple(
        Attempt(node=n.strip("+"), job="1", restart=i, started_utc="", went_on=n[0] == "+")
        for i, n in enumerate(nodes)
    )


@pytest.mark.parametrize(
    ("nodes", "resumed", "blocked"),
    [
        (("n1",), 0, True),
        (("n1", "n2"), 0, True),
        (("n1", "n2", "+n2"), 1, True),
        (("n1", "+n2"), 1, False),
        (("n1",), 1, False),
    ],
)
def test_pairs_of_one_run_are_shown_to_be_of_one_node(
    nodes: tuple[str, ...], resumed: int, blocked: bool
) -> None:
    done = Finished(
        case="c",
        plan_sha256="",
        node_class="small",
        node=nodes[-1],
        run_id="r",
        manifest_sha256="",
        finished_utc="",
        attempts=attempts(*nodes),
    )
    assert is_blocked_by_node(manifest_with(resumed), done) is blocked


def test_the_index_has_each_node_with_its_hardware(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = {"small": {"platform": "cpu", "each": ["n1", "n2", "n3"]}}
    found, _ = reference_case(tmp_path, nodes=nodes)
    for case in found.cases:
        monkeypatch.setenv("SLURMD_NODENAME", str(case.node))
        finish(fleet.job_of(found, case), REFERENCE)
    index = fleet.gather(found)
    assert [n.node for n in index.nodes] == ["n1", "n2", "n3"]
    assert all(n.hardware["host.cpu_threads"] and n.cases == 1 for n in index.nodes)
    (level,) = index.levels
    assert level.measure == "ttft_p50_s"
    assert {n.says for n in level.nodes} == {"like the others"}
    assert index.split == ()
    assert json.loads((tmp_path / "out" / "index.json").read_text("utf-8"))["schema_version"]
    page = (tmp_path / "out" / "runs" / "index.html").read_text("utf-8")
    assert "(n2)" in page
    os.truncate(final_folder(found.file.out, found.cases[0]) / "run" / "manifest.json", 10)
    with pytest.raises(BadFile, match="not the one that was published"):
        fleet.gather(found)


def drawn(seed: int, factors: dict[str, float], *, n: int = 12, sd: float = 0.02) -> Any:
    rng = random.Random(seed)
    return {k: [f * math.exp(rng.gauss(0, sd)) for _ in range(n)] for k, f in factors.items()}


def test_the_sick_node_is_named_and_the_others_are_not() -> None:
    found = judge_nodes(drawn(1, {"n1": 1.0, "n2": 1.2, "n3": 1.0, "n4": 1.0}))
    assert {n.node for n in found if n.says == "differs"} == {"n2"}
    sick = next(n for n in found if n.node == "n2")
    assert 1.17 < sick.ratio < 1.23


def test_healthy_nodes_are_seldom_accused() -> None:
    accused = sum(
        any(n.says == "differs" for n in judge_nodes(drawn(s, dict.fromkeys("abcd", 1.0), sd=0.2)))
        for s in range(400)
    )
    assert accused / 400 <= 0.05


@pytest.mark.parametrize(
    "values",
    [{"n1": [1.0, 1.0], "n2": [2.0, 2.0]}, {"n1": [1.0], "n2": [1.0], "n3": [2.0]}],
    ids=["two nodes", "one replicate each"],
)
def test_too_little_to_tell_names_nobody(values: dict[str, list[float]]) -> None:
    assert {n.says for n in judge_nodes(values)} == {"cannot tell"}
    assert judge_nodes({"n1": [1.0]}) == ()


def test_counts_that_never_vary_are_judged_by_the_least_difference() -> None:
    found = judge_nodes({"n1": [100.0] * 2, "n2": [100.0] * 2, "n3": [110.0] * 2})
    assert {n.node for n in found if n.says == "differs"} == {"n3"}


def page() -> str:
    return (ROOT / "docs" / "cluster.md").read_text("utf-8")


def test_the_plan_that_the_page_shows_can_be_run(tmp_path: Path) -> None:
    found = re.search(r"<!-- plan: begin[^\n]*\n```yaml\n(.*?)```", page(), re.S)
    assert found
    path = tmp_path / "plan.yaml"
    path.write_text(found[1], "utf-8")
    assert len(read_fleet(path).cases) == 8


def test_every_command_of_the_page_is_one_that_works_or_needs_slurm(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those that start nothing are run; the others are in tests/container/test_fleet.py."""
    path = plan_file(tmp_path)
    shown = re.findall(r"^\| `nox -s fleet -- plan\.yaml ?(\S*)` ", page(), re.M)
    assert set(shown) == {"", "--dry-run", "--no-wait", "--status", "--cancel", "--collect"}
    for word in ("--dry-run", "--status", "--cancel", "--collect"):
        assert cli.main(["fleet", str(path), word]) == 0, word
    assert "to do" in capsys.readouterr().out


def test_every_key_of_a_plan_file_stands_in_the_page() -> None:
    for key in {*FleetFile.model_fields, *NodeClass.model_fields}:
        assert f"{key}" in page(), key
