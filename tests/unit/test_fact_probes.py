"""The texts that probes read, parsed: kernels, cgroups, routes, generated Python files."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from kit.facts.host import cpu_model_of, parse_cpuinfo
from kit.inside import probe_cgroup
from kit.inside.probe_egress import (
    NAME,
    dns_answer_kind,
    dns_question,
    has_default_route_v4,
    has_default_route_v6,
    nameservers,
)
from kit.inside.probe_field import Absent
from kit.inside.probe_limits import capability_names, parse_mountinfo
from kit.inside.probe_packages import installed, list_sha256, normal_name
from kit.inside.probe_vllm import assigned, is_listed

X86 = "processor\t: 0\nmodel name\t: Intel(R) Xeon(R)\nflags\t\t: fpu avx2\n\nprocessor\t: 1\n"
ARM = (
    "processor\t: 0\nCPU implementer\t: 0x41\nCPU variant\t: 0x1\nCPU part\t: 0xd0c\n\nSerial: 1\n"
)


def test_cpuinfo_gives_one_block_per_processor() -> None:
    assert [cpu["processor"] for cpu in parse_cpuinfo(X86)] == ["0", "1"]
    assert cpu_model_of(parse_cpuinfo(X86)[0]) == "Intel(R) Xeon(R)"


def test_arm_s_numbers_name_the_design() -> None:
    blocks = parse_cpuinfo(ARM)
    assert len(blocks) == 1
    assert cpu_model_of(blocks[0]) == "implementer 0x41 part 0xd0c r0x1"


def test_a_cpu_without_any_name_is_an_error_and_not_empty() -> None:
    with pytest.raises(KeyError):
        cpu_model_of({"processor": "0"})


@pytest.mark.parametrize(
    ("mask", "names"),
    [
        ("0000000000000000", []),
        ("0000000000000401", ["chown", "net_bind_service"]),
        ("0000020000000000", ["bit41"]),
        ("00000000a80425fb", None),
    ],
)
def test_capability_masks_become_names(mask: str, names: list[str] | None) -> None:
    found = capability_names(mask)
    if names is None:  # the engine's default set
        assert len(found) == 14
        assert {"chown", "net_raw", "setfcap", "mknod"} <= set(found)
    else:
        assert found == names


def test_mounts_are_named_by_target_and_never_by_their_place_on_the_host() -> None:
    text = (
        "31 23 8:1 /home/someone/models /model ro,relatime - ext4 /dev/sda1 rw\n"
        "32 23 0:5 / /with\\040space rw shared:1 - tmpfs tmpfs rw\n"
    )
    mounts = parse_mountinfo(text)
    assert mounts == [
        {"target": "/model", "type": "ext4", "read_only": True},
        {"target": "/with space", "type": "tmpfs", "read_only": False},
    ]
    assert "someone" not in str(mounts)


def test_default_routes_are_seen_in_both_tables() -> None:
    head = "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\n"
    subnet = "eth0\t000012AC\t00000000\t0001\t0\t0\t0\t0000FFFF\n"
    default = "eth0\t00000000\t010012AC\t0003\t0\t0\t0\t00000000\n"
    assert not has_default_route_v4(head + subnet)
    assert has_default_route_v4(head + subnet + default)
    zero = "0" * 32
    reject = f"{zero} 00 {zero} 00 {zero} ffffffff 00000001 00000000 00200200       lo\n"
    gateway = f"{zero} 00 {zero} 00 fe80{'0' * 27}1 00000400 00000001 00000000 00000003     eth0\n"
    assert not has_default_route_v6(reject)
    assert has_default_route_v6(reject + gateway)


def test_the_question_is_the_one_that_rfc_1035_describes() -> None:
    question = dns_question(NAME, 0x1234)
    assert question[:2] == b"\x12\x34"
    assert question[12:] == b"\x05probe\x07invalid\x00\x00\x01\x00\x01"


@pytest.mark.parametrize(
    ("code", "kind"),
    [(0, "NOERROR"), (2, "SERVFAIL"), (3, "NXDOMAIN"), (5, "REFUSED"), (9, "RCODE9")],
)
def test_answers_are_told_apart_by_their_code(code: int, kind: str) -> None:
    reply = struct.pack(">6H", 7, 0x8180 | code, 1, 0, 0, 0)
    assert dns_answer_kind(reply, 7) == kind
    with pytest.raises(ValueError, match="another question"):
        dns_answer_kind(reply, 8)


def test_only_nameserver_lines_name_resolvers() -> None:
    text = "# nameserver 1.1.1.1\nsearch x\nnameserver 127.0.0.11\nnameserver ::1\n"
    assert nameservers(text) == ["127.0.0.11", "::1"]


@pytest.mark.parametrize(
    ("source", "value"),
    [
        ('__commit_id__ = commit_id = "gffd46bfab"', "gffd46bfab"),
        ("__commit_id__: str | None\n__commit_id__ = commit_id = None", None),
        ('__commit_id__: str = "abc"', "abc"),
        ('if True:\n    pass\n__commit_id__ = "x"\n__commit_id__ = "y"', "y"),
    ],
)
def test_generated_files_are_read_as_text(source: str, value: str | None) -> None:
    assert assigned(source, "__commit_id__") == value


def test_a_file_without_the_name_is_absent_and_code_is_never_run() -> None:
    with pytest.raises(Absent):
        assigned("__commit_id__: str\n", "__commit_id__")
    with pytest.raises(ValueError, match="malformed"):
        assigned("__commit_id__ = __import__('os').getcwd()", "__commit_id__")
    with pytest.raises(ValueError, match="no Python source"):
        assigned("__commit_id__ = (", "__commit_id__")


def test_only_listed_variables_leave_the_container() -> None:
    listed = ["VLLM_CPU_KVCACHE_SPACE", "OMP_NUM_THREADS", "LD_PRELOAD", "NCCL_DEBUG", "TZ"]
    assert all(is_listed(name) for name in listed)
    assert not any(is_listed(name) for name in ["AWS_SECRET_ACCESS_KEY", "USER", "HOSTNAME"])


def test_the_hash_of_packages_depends_on_content_and_not_on_order() -> None:
    first = list_sha256({"a": "1", "b": "2"})
    assert first == list_sha256({"b": "2", "a": "1"})
    assert first != list_sha256({"a": "1", "b": "3"})


def test_names_of_distributions_are_written_one_way() -> None:
    assert normal_name("Prometheus_Client") == normal_name("prometheus.client")
    packages = installed()
    assert packages["pydantic"]
    assert list(packages) == sorted(packages)


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def test_the_tightest_limit_on_the_way_up_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(
        tmp_path,
        {
            "cgroup.controllers": "cpu memory pids",
            "memory.max": "max",
            "pids.max": "100",
            "cpu.max": "150000 100000",
            "cpuset.cpus.effective": "0-2,5\n",
        },
    )
    monkeypatch.setattr(probe_cgroup, "MOUNT", tmp_path)
    fields = probe_cgroup.cgroup_fields()
    found = {name: (field["value"], field["error"]) for name, field in fields.items()}
    assert found == {
        "cgroup_version": (2, None),
        "cgroup_memory_limit_bytes": (None, "no limit"),
        "cgroup_swap_limit_bytes": (None, "no limit: the group has no memory.swap.max"),
        "cgroup_pids_limit": (100, None),
        "cgroup_cpu_limit_cores": (1.5, None),
        "cgroup_cpuset_cpus": ("0-2,5", None),
    }


def test_the_older_hierarchy_is_read_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(
        tmp_path,
        {
            "memory/memory.limit_in_bytes": "1073741824",
            "memory/memory.memsw.limit_in_bytes": "1610612736",
            "pids/pids.max": "max",
            "cpu/cpu.cfs_quota_us": "-1",
            "cpu/cpu.cfs_period_us": "100000",
            "cpuset/cpuset.cpus": "0",
        },
    )
    monkeypatch.setattr(probe_cgroup, "MOUNT", tmp_path)
    fields = probe_cgroup.cgroup_fields()
    assert fields["cgroup_version"]["value"] == 1
    assert fields["cgroup_memory_limit_bytes"]["value"] == 2**30
    assert fields["cgroup_swap_limit_bytes"]["value"] == 2**29
    assert fields["cgroup_pids_limit"]["error"] == "no limit"
    assert fields["cgroup_cpu_limit_cores"]["error"] == "no limit"
    assert fields["cgroup_cpuset_cpus"]["value"] == "0"


def test_a_machine_without_control_groups_loses_only_these_fields(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe_cgroup, "MOUNT", tmp_path)
    fields = probe_cgroup.cgroup_fields()
    assert all(field["value"] is None and field["absent"] for field in fields.values())
