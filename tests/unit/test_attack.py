"""The attack bench in small: the same cells, fewer runs, looser bounds."""

import math
from collections import Counter

import numpy as np
import pytest

from kit.attack import DOCUMENT, attack, run_cell, run_once
from kit.attack_cells import STRONG, cells
from kit.attack_table import Row, Table, broken_promises, render_table
from kit.attack_theory import median_sd, sign_flip_ps, t_power
from kit.planted import FAULTS
from kit.verdict import sign_flip_p
from kit.virtual import World, bench_frame, draw_run, replicate_factors

RUNS = 40


@pytest.fixture(scope="module")
def table() -> Table:
    chosen = [c for c in cells() if c.kind == "effect"]
    chosen += [c for c in cells() if c.kind == "auto" and c.name in ("exactly the margin", "+30 %")]
    return attack(RUNS, 5, lambda _: None, chosen=chosen)


def test_no_effect_cell_breaks_its_promise(table: Table) -> None:
    """Of 40 runs with a true rate of 2.5 % more than 7 come up once in a million cells."""
    assert broken_promises(table, false_supported=7 / RUNS, power=0.8) == []


def test_what_comes_out_is_what_the_test_alone_gives(table: Table) -> None:
    for row in table.rows:
        if row.cell.kind == "effect":
            assert row.theory is not None
            for seen, expected in (
                (row.share("supported"), row.theory.supported),
                (row.share("not supported"), row.theory.not_supported),
            ):
                sd = math.sqrt(max(expected * (1 - expected), 0.01) / RUNS)
                assert abs(seen - expected) < 5 * sd, row.cell.name


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_never_gets_a_verdict_and_its_twin_does(fault: str) -> None:
    both = {c.kind: c for c in cells() if c.fault == fault}
    words, _ = run_cell(both["fault"], seed=5, stream=0, first=0, count=10)
    assert dict(words) == {FAULTS[fault][1]: 10}
    words, _ = run_cell(both["twin"], seed=5, stream=0, first=0, count=10)
    assert dict(words) == {"supported": 10}


def test_every_fault_has_a_cell_and_a_twin_with_a_true_effect() -> None:
    for fault in FAULTS:
        kinds = {c.kind: c.world.effect for c in cells() if c.fault == fault}
        assert kinds == {"fault": STRONG, "twin": STRONG}


def test_names_of_cells_are_unique() -> None:
    names = [(c.kind, c.name) for c in cells()]
    assert len(names) == len(set(names))


def test_a_seed_gives_the_same_table_whatever_the_workers_and_the_company() -> None:
    some = [c for c in cells() if c.name in ("+15 %", "exactly the margin")]
    one = attack(6, 9, lambda _: None, workers=1, chosen=some)
    two = attack(6, 9, lambda _: None, workers=2, chosen=some)
    assert one == two
    alone = attack(6, 9, lambda _: None, workers=1, chosen=some[:1])
    assert alone.rows[0] == one.rows[0]


def test_two_runs_of_a_cell_differ_and_a_run_again_does_not() -> None:
    def readings(number: int) -> list[float]:
        draw = np.random.default_rng([1, 2, number])
        run = draw_run(bench_frame(1, 8, None), World(), draw)
        return [s["done_s"] for raw in run.raws.values() for s in raw.measured.samples]

    assert readings(0) == readings(0)
    assert readings(0) != readings(1)


def test_broken_promises_are_named(table: Table) -> None:
    row = next(r for r in table.rows if r.cell.name == "no effect")
    words = Counter({"supported": 10, "inconclusive": 30})
    bad = Table(RUNS, 5, (Row(row.cell, words, 8, row.theory),))
    assert broken_promises(bad) == ["effect: no effect: 25.0% falsely supported"]
    assert "Broken:" in render_table(bad)


def test_a_fault_that_gets_a_verdict_is_named() -> None:
    cell = next(c for c in cells() if c.kind == "fault")
    twin = next(c for c in cells() if c.kind == "twin")
    words = {"supported": 1, "invalid": 39}
    rows = (Row(cell, Counter(words), 8, None), Row(twin, Counter({"supported": 40}), 8, None))
    assert broken_promises(Table(RUNS, 5, rows)) == [
        f"fault: {cell.name}: 1 times supported, not invalid"
    ]


# -- theory and what is planted ----------------------------------------------------------------


def test_theory_lists_the_patterns_that_the_verdict_searches() -> None:
    gains = np.random.default_rng(1).normal(size=(50, 8))
    assert sign_flip_ps(gains).tolist() == [sign_flip_p(row) for row in gains]


def test_t_power_is_alpha_at_the_margin_and_grows() -> None:
    assert t_power(World(effect=0.05), 8) == pytest.approx(0.025)
    powers = [t_power(World(effect=e), 8) for e in (0.05, 0.10, 0.15, 0.20, 0.30)]
    assert powers == sorted(powers)
    assert t_power(World(effect=0.10), 16) > powers[1]


def test_the_planted_noise_is_as_said() -> None:
    draw = np.random.default_rng(1)
    shared = bench_frame(1, 8, None)
    logs = np.log([replicate_factors(shared, World(), draw) for _ in range(2000)])
    assert logs.std() == pytest.approx(0.05, rel=0.03)
    assert median_sd() == pytest.approx(0.35, abs=0.02)


@pytest.mark.parametrize("world", [World(0.3), World(0.3, rare=0.3), World(0.3, bimodal=0.2)])
def test_the_planted_effect_is_the_mean_log_ratio_whatever_the_noise(world: World) -> None:
    draw = np.random.default_rng(1)
    shared = bench_frame(1, 8, None)
    on = np.array([r.role == "candidate" for r in shared.replicates])
    logs = np.log([replicate_factors(shared, world, draw) for _ in range(4000)])
    assert logs[:, on].mean() - logs[:, ~on].mean() == pytest.approx(math.log(1.3), abs=0.003)


def test_run_once_takes_the_pairs_it_needs() -> None:
    strong = next(c for c in cells() if c.kind == "auto" and c.name == "+30 %")
    word, pairs = run_once(strong, np.random.default_rng(1), 0)
    assert (word, pairs) == ("supported", 6)


def test_the_committed_table_has_every_cell_at_full_size_and_held() -> None:
    text = DOCUMENT.read_text("utf-8")
    assert "`nox -s attack -- --runs 2000 --seed " in text
    assert "All held." in text
    for cell in cells():
        assert f"\n| {cell.name} |" in text
    for fault in FAULTS:
        assert f"\n| {fault} | 0 |" in text
