"""What every experiment and variant must be, whatever it asks."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from kit.experiment import (
    Arm,
    Condition,
    Experiment,
    QualityLimit,
    Scale,
    apply_variant,
    experiment_docs,
    experiment_names,
    find_experiment,
)
from kit.inside.spec import load_requests
from kit.metrics import PROXY_COST
from kit.plan import flag_words, request_lines
from kit.virtual import virtual_plan

PLATFORMS = ("cpu", "cuda")


def every_form() -> Iterator[tuple[str, str | None]]:
    for name in experiment_names():
        yield name, None
        for variant in find_experiment(name).variants:
            yield name, variant


FORMS = list(every_form())


def form(name: str, variant: str | None) -> Experiment:
    return apply_variant(find_experiment(name), name, variant)


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize(("name", "variant"), FORMS)
def test_the_load_generator_accepts_every_phase(
    name: str, variant: str | None, platform: str, tmp_path: Path
) -> None:
    phases = form(name, variant).workload(Scale(model="m", seed=1, platform=platform))
    assert [p.name for p in phases if not p.profile and not p.sample_hz][-1] == "measure"
    assert not any(p.profile for p in phases[: [p.name for p in phases].index("measure") + 1])
    ids: list[str] = []
    for phase in phases:
        path = tmp_path / f"{phase.name}.jsonl"
        path.write_bytes(request_lines(phase))
        requests = load_requests(path)
        assert len(requests) == len(phase.requests)
        ids += [r.id for r in requests]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize(("name", "variant"), FORMS)
def test_the_workload_is_the_same_bytes_each_time(name: str, variant: str | None) -> None:
    experiment = form(name, variant)
    one, two = (experiment.workload(Scale(model="m", seed=7)) for _ in range(2))
    assert [request_lines(p) for p in one] == [request_lines(p) for p in two]


@pytest.mark.parametrize(("name", "variant"), FORMS)
def test_what_is_judged_is_measured(name: str, variant: str | None) -> None:
    experiment = form(name, variant)
    names = [m.name for m in experiment.all_measures]
    assert len(set(names)) == len(names)
    assert experiment.hypothesis.measure in names
    held = [p.holds for p in experiment.preconditions]
    conditions = [*experiment.acted, *(h for h in held if isinstance(h, Condition))]
    assert {c.measure for c in conditions} <= set(names)
    compared = {c.name for c in experiment.comparisons}
    limits = [*experiment.quality, *(h for h in held if isinstance(h, QualityLimit))]
    assert {q.comparison for q in limits} <= compared


def difference(arm: Arm) -> tuple[object, ...]:
    return (arm.flags, arm.env, arm.image, arm.topology, arm.legs)


@pytest.mark.parametrize(("name", "variant"), FORMS)
def test_the_services_of_every_arm_are_there_and_equally_many_devices_unless_that_is_asked(
    name: str, variant: str | None
) -> None:
    plan, _ = virtual_plan(name, form(name, variant))
    for arm in plan.arms:
        topology = plan.topology_of(arm.role)
        assert {service.name for service in arm.services} <= set(topology.services)
        assert bool(topology.proxy) == bool(arm.service(topology.entry).args)
    devices = [a.ranks * len(plan.topology_of(a.role).engines) for a in plan.arms]
    assert devices[0] == devices[1] or plan.variable == "tensor_parallel_size"
    entries = {bool(plan.topology_of(a.role).proxy) for a in plan.arms}
    assert len(entries) == 1  # the proxy is in front of both arms or of none
    assert entries == {PROXY_COST.name in plan.measures}


@pytest.mark.parametrize(("name", "variant"), FORMS)
def test_the_arms_differ_and_only_by_their_own_flags(name: str, variant: str | None) -> None:
    experiment = form(name, variant)
    baseline, candidate = experiment.variable.arms
    assert difference(baseline) != difference(candidate)
    assert set(baseline.flags) == set(candidate.flags)
    assert set(baseline.env) == set(candidate.env)
    assert not set(baseline.flags) & set(experiment.settings)
    assert flag_words(experiment.settings)


@pytest.mark.parametrize(("name", "variant"), FORMS)
def test_every_sentence_is_there_in_both_languages(name: str, variant: str | None) -> None:
    experiment = form(name, variant)
    texts = [experiment.title, experiment.goal, experiment.hypothesis.text]
    texts += [experiment.variable.what, *(arm.label for arm in experiment.variable.arms)]
    assert all(t.en and t.zh for t in texts)
    for text in texts[:3]:
        assert any("\u4e00" <= c <= "\u9fff" for c in text.zh)


@pytest.mark.parametrize(("name", "variant"), [f for f in FORMS if f[1]])
def test_a_variant_says_in_a_line_what_it_does(name: str, variant: str) -> None:
    doc = (find_experiment(name).variants[variant].__doc__ or "").splitlines()[0]
    assert doc.rstrip().endswith((".", "?"))
    assert len(doc) <= 100
    assert json.dumps(doc).isascii()


def test_every_experiment_has_a_question() -> None:
    docs = experiment_docs()
    assert len(docs) >= 5
    assert all(doc.endswith("?") for doc in docs.values())
