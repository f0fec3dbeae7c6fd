"""Every word that a result may carry has an explanation and a next step, in both languages."""

import json
import re

import numpy as np
import pytest

from kit.cli import main
from kit.errors import UnknownName
from kit.explain import (
    Explanation,
    all_words,
    explain,
    explanations,
    find_explanation,
    guard_names,
)
from kit.guard import check_replicate, check_same_prompts
from kit.virtual import World, bench_frame, draw_run

CHINESE = re.compile(r"[\u4e00-\u9fff]")


def test_no_word_is_missing_and_none_is_made_up() -> None:
    written: dict[str, list[str]] = {}
    for each in explanations():
        written.setdefault(each.kind, []).append(each.word)
    assert {k: sorted(v) for k, v in written.items()} == {
        k: sorted(v) for k, v in all_words().items()
    }


def test_the_guards_of_the_code_are_those_that_a_replicate_meets() -> None:
    run = draw_run(bench_frame(1, 1, None), World(effect=0.3), np.random.default_rng(1))
    requests = {p: [json.loads(x) for x in lines.splitlines()] for p, lines in run.files.items()}
    met = {
        g.name
        for number, raw in run.raws.items()
        for g in check_replicate(
            raw,
            replicate=number,
            requests=requests,
            primary_s=0.1,
            telemetry=run.telemetry[number],
            telemetry_file="telemetry.jsonl",
            limits=run.plan.limits,
        )
    }
    met |= {g.name for g in check_same_prompts(run.raws, run.plan.limits)}
    assert len(met) > 6
    assert met <= set(guard_names())
    assert {"precondition", "device_memory", "throttled"} <= set(guard_names())


@pytest.mark.parametrize("each", explanations(), ids=lambda e: f"{e.kind}-{e.word}")
def test_each_explanation_speaks_both_languages(each: Explanation) -> None:
    for text in (each.what, each.next):
        assert CHINESE.search(text.zh)
        assert not CHINESE.search(text.en)
        assert text.en.endswith(".")
        assert text.zh.endswith("。")


def test_a_word_is_found_however_it_is_typed() -> None:
    for typed in ("not supported", "not-supported", "Not_Supported "):
        assert [e.word for e in explain(typed)] == ["not supported"]
    assert [e.kind for e in explain("inconclusive")] == ["verdict", "outcome"]
    assert find_explanation("guard", "of another kit") is None
    with pytest.raises(UnknownName, match="no word `send_lagg`") as caught:
        explain("send_lagg")
    assert "did you mean `send_lag`" in caught.value.hint


def test_the_command_explains_a_word_lists_all_and_speaks_json(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["explain", "send-lag"]) == 0
    assert "next" in capsys.readouterr().out
    assert main(["explain", "send-lag", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(e["kind"], e["word"]) for e in found] == [("guard", "send_lag")]
    assert main(["explain", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == len(explanations())
    assert main(["explain", "nonsense"]) == UnknownName.exit_code
