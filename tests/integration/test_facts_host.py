"""Facts of the machine that runs the tests, by the real /proc, /sys and NVML library."""

from __future__ import annotations

import getpass
import json
import os
import platform
import re
import socket
import subprocess
import time
import uuid
from pathlib import Path

import pytest

from kit import facts
from kit.compare import distance, machine_of
from kit.fact import Fact, HostPlace
from kit.facts.gpu import ask_host
from kit.inside.probe_gpu import SYSTEM_FIELDS


@pytest.fixture(scope="module")
def host() -> dict[str, Fact]:
    return {fact.name: fact for fact in facts.collect(HostPlace(), ["host"])}


def test_the_host_s_facts_agree_with_other_sources(host: dict[str, Fact]) -> None:
    assert host["cpu_threads"].value == os.cpu_count()
    assert host["cpu_allowed"].value == sorted(os.sched_getaffinity(0))
    assert host["kernel_release"].value == platform.release()
    page = os.sysconf("SC_PAGE_SIZE")
    assert host["memory_total_bytes"].value == os.sysconf("SC_PHYS_PAGES") * page
    lines = subprocess.run(["lscpu", "-J"], capture_output=True, check=True).stdout
    told = {row["field"].rstrip(":"): row["data"] for row in json.loads(lines)["lscpu"]}
    assert host["architecture"].value == told["Architecture"]
    if "Model name" in told and platform.machine() == "x86_64":
        assert host["cpu_model"].value == told["Model name"]


def test_what_decides_kernels_and_verdicts_must_match(host: dict[str, Fact]) -> None:
    must = {name for name, fact in host.items() if fact.match == "must"}
    assert {"cpu_model", "cpu_flags", "cpu_threads", "cpu_governors", "cpu_turbo"} <= must
    ignored = {name for name, fact in host.items() if fact.match == "ignored"}
    assert {"load_1m", "memory_available_bytes", "cpu_mhz_now"} <= ignored
    assert host["kernel_release"].match == "reported"


def test_every_fact_has_a_source_and_every_null_a_reason(host: dict[str, Fact]) -> None:
    assert len(host) > 30
    for fact in host.values():
        assert fact.how
        assert fact.value is not None or fact.reason


def test_reading_the_host_takes_less_than_half_a_second() -> None:
    start = time.monotonic()
    facts.collect(HostPlace(), ["host"])
    assert time.monotonic() - start < 0.5


def test_no_fact_names_the_machine_or_its_user() -> None:
    text = json.dumps([fact.model_dump() for fact in facts.collect(HostPlace())])
    mac = ":".join(re.findall("..", f"{uuid.getnode():012x}"))
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    machine = Path("/etc/machine-id")
    private = [socket.gethostname(), str(Path.home()), mac, boot]
    private += [machine.read_text().strip()] if machine.exists() else []
    private += [f'"{getpass.getuser()}"']
    words = set(re.findall(r"[\w.:/-]+", text)) | set(re.findall(r'"[^"]*"', text))
    assert not [word for word in private if word and word in words]


def fake_module(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "pynvml.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(folder))


def test_a_driver_that_hangs_costs_the_group_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_module(tmp_path, "import time\ndef nvmlInit(): time.sleep(60)\n", monkeypatch)
    start = time.monotonic()
    found = facts.collect(HostPlace(timeout_s=1.0), ["gpu"])
    assert time.monotonic() - start < 15
    assert {fact.name for fact in found} == set(SYSTEM_FIELDS)
    assert all(fact.reason == "TimeoutError: no answer within 1 s" for fact in found)


def test_a_library_that_kills_its_process_is_a_reason_and_no_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_module(tmp_path, "import os\ndef nvmlInit(): os.abort()\n", monkeypatch)
    found = ask_host(HostPlace())
    assert all("probe_gpu ended with -6" in str(field["error"]) for field in found.values())


def test_without_nvidia_ml_py_the_group_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_module(tmp_path, "raise ModuleNotFoundError('No module named pynvml')\n", monkeypatch)
    found = facts.collect(HostPlace(), ["gpu"])
    driver = next(fact for fact in found if fact.name == "driver_version")
    assert driver.value is None
    assert str(driver.reason).startswith("ModuleNotFoundError")


def test_groups_of_containers_say_nothing_about_the_host() -> None:
    assert facts.collect(HostPlace(), ["container", "packages", "vllm"]) == []


def test_without_an_engine_its_group_is_null_with_the_reason() -> None:
    found = facts.collect(HostPlace(), ["engine"])
    assert [(fact.value, fact.reason) for fact in found] == [(None, "no engine was asked")]


def test_locale_and_time_zone_of_the_caller_change_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def stable() -> list[str]:
        found = facts.collect(HostPlace(), ["host", "gpu"])
        return [fact.model_dump_json() for fact in found if fact.match != "ignored"]

    before = stable()
    monkeypatch.setenv("LC_ALL", "C")
    monkeypatch.setenv("TZ", "Asia/Kathmandu")
    time.tzset()
    try:
        assert stable() == before
    finally:
        monkeypatch.undo()
        time.tzset()


def test_the_same_host_twice_is_the_same_machine() -> None:
    first, second = facts.collect(HostPlace()), facts.collect(HostPlace())
    must = [{p: v for p, (v, m) in machine_of(f).items() if m == "must"} for f in (first, second)]
    assert must[0] == must[1]
    assert must[0]["host.cpu_model"]
    assert distance(first, second, {"cpu"}) == "same machine"


def test_the_machine_mark_is_not_the_machine_id() -> None:
    found = {f.name: f.value for f in facts.collect(HostPlace()) if f.group == "host"}
    assert len(str(found["machine_mark"])) == 64
    assert Path("/etc/machine-id").read_text().strip() not in str(found)
