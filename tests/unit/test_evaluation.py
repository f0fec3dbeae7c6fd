"""lm-eval beside a server: its plan, its container, what it wrote and what is made of that."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from kit import evaluate, prepare, reproduce
from kit.accuracy import difference_of, score_of, stderr_of
from kit.compose import EVALUATION, Placement, Runtime, add_evaluation
from kit.errors import EnvironmentChanged, UsageError
from kit.experiment import Experiment, apply_variant, find_experiment
from kit.experiments.adv1_quantization import HUB, PROSE, SCORES
from kit.image import find_image
from kit.measure import Raw, Window
from kit.plan import Plan, PlannedImage, PlannedModel, make_plan
from kit.prepare import Options, choose
from kit.scores import ENDED_FILE, FOLDER, RESULTS_FILE, parse_scores, read_scores
from kit.tasks import TASKS, check_tasks, task_files
from kit.value import load_yaml

NAME = "adv1_quantization"
ARMS = PlannedImage(id="v0.32.0-cpu", identity="sha256:a", lock_sha256="a")
TOOL = PlannedImage(id="lm-eval-0.4.13", identity="sha256:b", lock_sha256="b")
TOLD: dict[str, Any] = {
    "results": {
        "kit_code": {"alias": "kit_code", "acc,none": 0.75, "acc_stderr,none": 0.11},
        "kit_math": {"exact_match,number": 0.5, "exact_match_stderr,number": "N/A"},
        "kit_chat": {"acc,none": 1.0, "acc_stderr,none": 0.0},
        "kit_prose": {"word_perplexity,none": 42.5, "word_perplexity_stderr,none": "N/A"},
    },
    "n-samples": {
        "kit_code": {"original": 16, "effective": 16},
        "kit_math": {"original": 16, "effective": 16},
        "kit_chat": {"original": 16, "effective": 16},
        "kit_prose": {"original": 12, "effective": 12},
    },
}


def plan_of(experiment: Experiment, variant: str | None) -> Plan:
    return make_plan(
        NAME,
        experiment,
        variant=variant,
        against_itself=False,
        images={"baseline": ARMS, "candidate": ARMS},
        entrypoints={"baseline": ("vllm",), "candidate": ("vllm",)},
        client_image=ARMS,
        model=PlannedModel(id="smollm2-135m-instruct", weights="real", files={}),
        model_flags={},
        platform="cpu",
        platform_flags={},
        platform_env={},
        pairs=6,
        seed=7,
        evaluation_image=TOOL if experiment.evaluation else None,
    )[0]


def written(run: Path, name: str, told: dict[str, Any] | str | None) -> Raw:
    """Return the raw data of a replicate whose evaluation left these results."""
    home = run / name / FOLDER
    home.mkdir(parents=True)
    if told is not None:
        text = told if isinstance(told, str) else json.dumps(told)
        (home / RESULTS_FILE).write_text(text)
    window = Window(folder=f"{name}/measure", samples=(), scrapes=(), load={})
    return Raw(windows={"measure": window}, scores=read_scores(run / name, name))


# -- the tasks ---------------------------------------------------------------------------------


@pytest.mark.parametrize("task", [*SCORES, PROSE])
def test_a_task_reads_its_own_items_and_fetches_nothing(task: str) -> None:
    told = load_yaml(TASKS / f"{task}.yaml")
    assert (told["task"], told["dataset_path"]) == (task, "json")
    assert told["dataset_kwargs"]["data_files"] == {"test": f"/tasks/{task}.jsonl"}
    metric = {**SCORES, PROSE: "word_perplexity"}[task]
    assert [m["metric"] for m in told["metric_list"]] == [metric]


@pytest.mark.parametrize("task", [*SCORES, PROSE])
def test_every_item_is_whole_and_there_once(task: str) -> None:
    items = [json.loads(line) for line in (TASKS / f"{task}.jsonl").read_text().splitlines()]
    assert 12 <= len(items) <= 20
    assert len({json.dumps(item) for item in items}) == len(items)
    for item in items:
        if "choices" in item:
            assert 0 <= item["answer"] < len(set(item["choices"])) == len(item["choices"])


def test_the_sums_are_right() -> None:
    for line in (TASKS / "kit_math.jsonl").read_text().splitlines():
        item = json.loads(line)
        found = re.fullmatch(r"(\d+) ([-+*]) (\d+)", item["sum"])
        assert found
        a, b = int(found[1]), int(found[3])
        assert item["answer"] == str({"+": a + b, "-": a - b, "*": a * b}[found[2]])


def test_other_task_files_than_the_plan_names_are_refused() -> None:
    files = task_files(("kit_math",))
    check_tasks(("kit_math",), files)
    with pytest.raises(EnvironmentChanged, match=r"kit_math\.yaml is not the file"):
        check_tasks(("kit_math",), files | {"kit_math.yaml": "0" * 64})


def test_a_task_that_is_gone_is_refused() -> None:
    with pytest.raises(EnvironmentChanged, match=r"gone\.jsonl is not the file"):
        check_tasks(("gone",), {"gone.jsonl": "0" * 64})


# -- the plan ----------------------------------------------------------------------------------


def test_only_the_variant_that_asks_for_it_has_it_in_its_plan() -> None:
    base = find_experiment(NAME)
    for variant in (None, *base.variants):
        plan = plan_of(apply_variant(base, NAME, variant), variant)
        told = plan.model_dump(mode="json")
        assert ("evaluation" in told) is bool(variant and variant.startswith("lm-eval"))


def test_the_plan_names_image_words_and_task_files() -> None:
    plan = plan_of(choose(NAME, Options(variant="lm-eval")), "lm-eval")
    assert plan.evaluation is not None
    assert plan.distinct_images == (ARMS, TOOL)
    words = plan.evaluation.args
    api = json.loads(words[words.index("--model_args") + 1])
    assert api["base_url"] == "http://server:8000/v1/completions"
    assert (api["model"], api["num_concurrent"], api["seed"]) == ("smollm2-135m-instruct", 1, 7)
    assert set(plan.evaluation.files) == {
        f"{task}.{suffix}" for task in (*SCORES, PROSE) for suffix in ("yaml", "jsonl")
    }
    assert Plan.model_validate_json(plan.model_dump_json()) == plan


@pytest.mark.parametrize(
    "change",
    [
        {"image": ARMS},
        {"args": ("run",)},
        {"tasks": ("kit_math",)},
        {"files": {"kit_math.yaml": "0" * 64}},
        {"timeout_s": 1.0},
    ],
    ids=lambda change: next(iter(change)),
)
def test_all_of_it_is_in_the_hash(change: dict[str, Any]) -> None:
    plan = plan_of(choose(NAME, Options(variant="lm-eval")), "lm-eval")
    assert plan.evaluation is not None
    other = plan.evaluation.model_copy(update=change)
    assert plan.model_copy(update={"evaluation": other}).sha256 != plan.sha256


def test_a_reproduction_asks_for_the_same_bits_of_it() -> None:
    plan = plan_of(choose(NAME, Options(variant="lm-eval")), "lm-eval")
    _, found = reproduce._images(plan, set())
    assert f"image.{TOOL.id}" in [difference.where for difference in found]


def test_limits_on_the_scores_are_registered_beside_those_on_the_answers() -> None:
    plan = plan_of(choose(NAME, Options(variant="lm-eval")), "lm-eval")
    names = [limit.comparison for limit in plan.quality]
    assert names[-2:] == ["eval_score_difference", "eval_kit_prose_ratio"]
    assert "perplexity_ratio" in names
    compared = {c.name for c in choose(NAME, Options(variant="lm-eval")).comparisons}
    assert set(names) <= compared


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (Options(variant="lm-eval", model="qwen2.5-7b"), "needs real weights"),
        (Options(variant="lm-eval-hub"), f"needs the data sets {HUB[0]}.*{HUB[2]}"),
    ],
)
def test_what_cannot_be_evaluated_is_refused_before_anything_starts(
    options: Options, said: str
) -> None:
    chosen = choose(NAME, options)
    model = prepare.find_model(options.model or "smollm2-135m-instruct")
    with pytest.raises(UsageError, match=said):
        prepare._check_needs(NAME, chosen, model)


def test_no_arm_runs_an_image_of_tools() -> None:
    with pytest.raises(UsageError, match="image of lm-eval, which serves no model"):
        choose(NAME, Options(image="lm-eval-0.4.13"))


def test_the_record_is_of_a_release_of_lm_eval() -> None:
    record = find_image("lm-eval-0.4.13")
    assert (record.package, record.release, record.serves) == ("lm-eval", "0.4.13", False)


# -- the container -----------------------------------------------------------------------------


def test_its_service_sees_tasks_and_model_read_only_and_writes_its_own_folder(
    tmp_path: Path,
) -> None:
    plan = plan_of(choose(NAME, Options(variant="lm-eval")), "lm-eval")
    assert plan.evaluation is not None
    place = Placement("cpu", (), "1", tmp_path / "m", tmp_path / "w", tmp_path / "o", "10001:0")
    client = {
        "image": "sha256:client",
        "user": "10001:0",
        "read_only": True,
        "cap_drop": ["ALL"],
        "networks": {"inside": None},
        "volumes": [{"source": "/out"}],
        "environment": {"PYTHONPATH": "/kit"},
    }
    document: dict[str, Any] = {"services": {"client": client}}
    add_evaluation(document, plan.evaluation, Runtime("sha256:tool", "/py", "10001:0"), place)
    added = document["services"][EVALUATION]
    assert added["image"] == "sha256:tool"
    assert added["entrypoint"][:3] == ["/py", "-m", "lm_eval"]
    writable = {v["target"]: str(v["source"]) for v in added["volumes"] if not v["read_only"]}
    assert writable == {"/results": str(tmp_path / "o" / FOLDER)}
    assert {v["target"] for v in added["volumes"]} == {"/tasks", "/model", "/results"}
    assert (added["read_only"], added["cap_drop"]) == (True, ["ALL"])
    assert added["networks"] == {"inside": None}
    assert {added["environment"][k] for k in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")} == {"1"}
    assert client["volumes"] == [{"source": "/out"}]  # the client's own is untouched


def test_what_it_wrote_gets_names_without_a_time(tmp_path: Path) -> None:
    deep = tmp_path / "smollm2-135m-instruct"
    deep.mkdir()
    stamp = "2026-12-02T01-02-03.456789"
    (deep / f"results_{stamp}.json").write_text("{}")
    (deep / f"samples_kit_code_{stamp}.jsonl").write_text("{}\n")
    evaluate.keep_results(tmp_path)
    names = {p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*")}
    assert names == {RESULTS_FILE, "samples-kit_code.jsonl"}


# -- the scores --------------------------------------------------------------------------------


def test_scores_have_value_error_and_number_of_items(tmp_path: Path) -> None:
    raw = written(tmp_path, "r0", TOLD)
    score = score_of("kit_code", "acc")(raw)
    assert (score.value, score.n) == (0.75, 16)
    assert score.sources == (f"r0/{FOLDER}/{RESULTS_FILE}",)
    assert stderr_of("kit_code", "acc")(raw).value == 0.11
    assert score_of(PROSE, "word_perplexity")(raw).value == 42.5


def test_a_standard_error_that_is_not_given_is_null(tmp_path: Path) -> None:
    found = stderr_of("kit_math", "exact_match")(written(tmp_path, "r0", TOLD))
    assert (found.value, found.reason) == (None, "lm-eval gives no standard error")


def test_the_arms_differ_by_the_share_of_all_items(tmp_path: Path) -> None:
    worse = json.loads(json.dumps(TOLD))
    worse["results"]["kit_chat"]["acc,none"] = 0.25
    arms = written(tmp_path, "r0", TOLD), written(tmp_path, "r1", worse)
    found = difference_of(SCORES)(*arms)
    assert found.value == pytest.approx(-0.75 / 3)
    assert found.n == 48
    assert len(found.sources) == 2


def test_arms_that_were_asked_unequally_are_not_compared(tmp_path: Path) -> None:
    fewer = json.loads(json.dumps(TOLD))
    fewer["n-samples"]["kit_chat"]["effective"] = 8
    found = difference_of(SCORES)(written(tmp_path, "a", TOLD), written(tmp_path, "b", fewer))
    assert (found.value, found.reason) == (None, "kit_chat: 16 and 8 items")


@pytest.mark.parametrize(
    ("told", "why"),
    [
        ("{", "cannot be read"),
        ("[]", "cannot be read"),
        ({"results": [], "n-samples": {}}, "hold no such score"),
        ({"results": {"kit_code": 3}, "n-samples": {"kit_code": 3}}, "hold no such score"),
        (TOLD | {"n-samples": {}}, "hold no such score"),
        ('{"results": {"kit_code": {"acc,none": NaN}}, "n-samples": {"kit_code": '
         '{"effective": 1}}}', "hold no such score"),
        (None, "left no results"),
    ],
)  # fmt: skip
def test_damaged_results_are_null_with_a_reason(
    tmp_path: Path, told: dict[str, Any] | str | None, why: str
) -> None:
    raw = written(tmp_path, "r0", told)
    found = score_of("kit_code", "acc")(raw)
    assert found.value is None
    assert why in (found.reason or "")
    assert difference_of(SCORES)(raw, raw).value is None


@pytest.mark.parametrize(
    ("ended", "why"),
    [
        ({"exit_code": 1, "timed_out": False}, "exit code 1"),
        ({"exit_code": None, "timed_out": True}, "did not end in time"),
    ],
)
def test_how_it_ended_is_why_there_are_no_scores(
    tmp_path: Path, ended: dict[str, Any], why: str
) -> None:
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / ENDED_FILE).write_text(json.dumps(ended))
    assert why in read_scores(tmp_path, "r0").reason


def test_a_run_without_evaluation_says_so(tmp_path: Path) -> None:
    assert read_scores(tmp_path, "r0").reason == "nothing was evaluated"
    assert parse_scores({}) == {}
