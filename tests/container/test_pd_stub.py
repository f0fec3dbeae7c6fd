"""Prefill and decode apart in real containers, the stub as every engine: evidence and faults."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from commands import only_manifest, run_kit

from kit.analyse import OTHER_LOAD
from kit.errors import ServerDied, ServerLost

RUN = ("run", "adv4_pd_disagg", "--platform", "cpu", "--quick", "--json")
PLANTED = {"ttft_s": 0.1, "itl_s": 0.02, "block_tokens": 16}

pytestmark = pytest.mark.usefixtures("nothing_left")


def test_a_run_keeps_what_every_service_said_and_proves_the_transfer(
    tmp_path: Path, stub_file: Callable[..., str]
) -> None:
    stub = stub_file(**PLANTED)
    ran = run_kit(*RUN, "--out", str(tmp_path / "runs"), "--stub", stub)
    assert ran.stdout.startswith("{"), ran.stderr
    manifest, run = only_manifest(tmp_path)
    # five services on shared cores send late now and then; nothing else may be wrong
    assert [g.text for g in manifest.guards if not g.ok and g.name not in OTHER_LOAD] == []
    assert manifest.confounders == ()
    assert all(g.ok for g in manifest.guards if g.name == "precondition")
    by_role = {r.role: r for r in manifest.replicates}
    wanted = {"candidate": ("producer", "consumer"), "baseline": ("replica-1", "replica-2")}
    for role, engines in wanted.items():
        folder = run / by_role[role].folder
        for engine in engines:
            assert (folder / f"server_info-{engine}.json").is_file()
            assert (folder / f"measure/metrics-{engine}.jsonl.gz").is_file()
            assert (folder / f"logs/{engine}.log").is_file()
        services = {f.service for f in by_role[role].facts}
        assert services == {*engines, "client", "proxy" if role == "candidate" else "baseline"}
    values = {x.name: x.value for x in by_role["candidate"].readings}
    assert (values["kv_bytes"] or 0) > 0
    assert (values["kv_tokens"] or 0) > 0
    assert by_role["candidate"].accounted_s is not None


def test_transfer_disabled_behind_the_proxy_s_back_is_judged_invalid(
    tmp_path: Path, stub_file: Callable[..., str]
) -> None:
    stub = stub_file(**PLANTED, kv_transfer_disabled=True)
    ran = run_kit(*RUN, "--out", str(tmp_path / "runs"), "--stub", stub)
    assert ran.code == 4, ran.stderr
    assert ran.result["verdict"]["reason"].startswith("no transfer evidence")
    manifest, _ = only_manifest(tmp_path)
    failed = [g for g in manifest.guards if g.name == "failed_requests" and not g.ok]
    assert failed == []  # every answer was a 200


@pytest.mark.parametrize(
    ("planted", "error", "says"),
    [
        ({"die_at_start_s": 0.2, "die_exit_code": 7}, ServerDied, "ended with exit code 7"),
        ({"die_after_requests": 12}, ServerLost, "died under load"),
        ({"die_after_requests": 1, "die_lingers_s": 3.0}, ServerLost, "died under load"),
    ],
    ids=["dies at start", "dies under load", "its engine dies in the warm-up"],
)
def test_the_service_that_failed_is_named(
    tmp_path: Path,
    stub_file: Callable[..., str],
    planted: dict[str, object],
    error: type[Exception],
    says: str,
) -> None:
    stub = stub_file(**PLANTED, **planted)
    ran = run_kit(*RUN, "--out", str(tmp_path / "runs"), "--stub", stub)
    assert ran.code == error.exit_code  # type: ignore[attr-defined]
    assert says in ran.stderr
    assert any(f"`{name}`" in ran.stderr for name in ("producer", "consumer", "replica-1"))
    assert "Traceback" not in ran.stderr
