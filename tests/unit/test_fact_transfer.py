"""Which transports UCX says it chose for reading the other leg's memory."""

from types import SimpleNamespace
from typing import Any, cast

from kit.fact import Place
from kit.facts.transfer import collect, read_transports

STAMP = "[1796164767.144064] [79eb93202fac:361  :0]   "
LOG = "\n".join(
    STAMP + line
    for line in (
        "+------------+--------------------------------------------------+",
        "| 20009a25-2f64-4510-b2c7-f742a8f inter-node cfg#1               |",
        "| active message by ucp_am_send*(egr) from host memory           |",
        "+------------+----------------------+----------------------------+",
        "| Range      | Description          | Config                     |",
        "|    0..8184 | short                | tcp/lo                     |",
        "+------------+----------------------+----------------------------+",
        "| 20009a25-2f64-4510-b2c7-f742a8f inter-node cfg#1               |",
        "| remote memory read by ucp_get*(multi) into host memory         |",
        "+------------+----------------------+----------------------------+",
        "| Range      | Description          | Config                     |",
        "| 0..4095    | zero-copy            | cuda_ipc/cuda              |",
        "| 4096..inf  | software emulation   | 60% on tcp/eth0, 40% on tcp/eth1 |",
        "+------------+----------------------+----------------------------+",
        "| remote memory write by ucp_put* from host memory to host       |",
        "| 0..inf     | copy-in              | sysv/memory                |",
    )
)


def test_only_tables_of_remote_reads_count() -> None:
    assert read_transports(LOG) == ["cuda_ipc/cuda", "tcp/eth0", "tcp/eth1"]
    assert read_transports("INFO: vllm | serving /v1/completions | ready |\n") == []


def place(log: str, *environment: str) -> Place:
    container = SimpleNamespace(
        attrs={"Config": {"Env": list(environment)}}, logs=lambda: log.encode()
    )
    return cast(Place, SimpleNamespace(container=container, service="consumer"))


def seen(*words: Any) -> list[tuple[Any, str | None]]:
    return [(fact.value, fact.reason) for fact in collect(place(*words))]


def test_a_leg_tells_what_was_used_and_says_when_nothing_was() -> None:
    assert seen(LOG, "UCX_PROTO_INFO=y") == [(["cuda_ipc/cuda", "tcp/eth0", "tcp/eth1"], None)]
    nothing = "no memory was read from another engine yet"
    assert seen("", "UCX_PROTO_INFO=y") == [(None, nothing)]


def test_other_containers_and_the_host_say_nothing() -> None:
    assert seen(LOG, "PATH=/bin") == []
    assert collect(cast(Place, SimpleNamespace(container=None))) == []
