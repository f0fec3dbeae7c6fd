"""Asks whether anything outside can be reached from here, without sending anything outside.

The routing table, a UDP `connect` (which sends no packet) and one question to the engine's own
resolver. Standard library only.
"""

from __future__ import annotations

import contextlib
import errno
import random
import socket
import struct

from .probe_field import Absent, Field, read_fields, read_text

OUTSIDE = ("192.0.2.1", 9)  # TEST-NET-1 of RFC 5737: belongs to nobody
NAME = "probe.invalid"  # RFC 6761: never exists
RESOLVER_WAIT_S = 0.5
_RCODES = {0: "NOERROR", 1: "FORMERR", 2: "SERVFAIL", 3: "NXDOMAIN", 5: "REFUSED"}


def has_default_route_v4(table: str) -> bool:
    """Tell whether /proc/net/route holds a route to 0.0.0.0/0."""
    rows = [line.split() for line in table.splitlines()[1:]]
    return any(row[1] == "00000000" and row[7] == "00000000" for row in rows)


def has_default_route_v6(table: str) -> bool:
    """Tell whether /proc/net/ipv6_route holds a route to ::/0 other than the reject entry."""
    rows = [line.split() for line in table.splitlines()]
    return any(row[0] == "0" * 32 and row[1] == "00" and row[9] != "lo" for row in rows)


def has_default_route() -> bool:
    """Tell whether packets to unknown addresses have somewhere to go."""
    found = has_default_route_v4(read_text("/proc/net/route"))
    with contextlib.suppress(FileNotFoundError):  # no IPv6 in this kernel
        found = found or has_default_route_v6(read_text("/proc/net/ipv6_route"))
    return found


def connect_outside() -> str:
    """Return `reachable`, or the name of the error that the kernel gives at once."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        try:
            udp.connect(OUTSIDE)
        except OSError as error:
            return error_name(error)
    return "reachable"


def error_name(error: OSError) -> str:
    """Return the symbolic name of an error number (`ENETUNREACH`), else the class name."""
    return errno.errorcode.get(error.errno or 0, type(error).__name__)


def nameservers(resolv_conf: str) -> list[str]:
    """Return the resolvers' addresses of a resolv.conf, in order."""
    words = [line.split() for line in resolv_conf.splitlines()]
    return [row[1] for row in words if len(row) > 1 and row[0] == "nameserver"]


def dns_question(name: str, number: int) -> bytes:
    """Build a query for the A record of a name (RFC 1035, section 4)."""
    labels = b"".join(bytes([len(label)]) + label.encode("ascii") for label in name.split("."))
    return (
        struct.pack(">6H", number, 0x0100, 1, 0, 0, 0) + labels + b"\0" + struct.pack(">2H", 1, 1)
    )


def dns_answer_kind(reply: bytes, number: int) -> str:
    """Return the response code's name of a reply to our question."""
    got, flags = struct.unpack(">2H", reply[:4])
    if got != number:
        raise ValueError("a reply to another question")
    return _RCODES.get(flags & 0xF, f"RCODE{flags & 0xF}")


def ask_resolver() -> str:
    """Return how the engine's resolver answers for a name that cannot exist.

    A resolver that is no loopback address is not asked: the question would leave the machine,
    and the route already shows that it could.
    """
    servers = nameservers(read_text("/etc/resolv.conf"))
    if not servers:
        raise Absent("no resolver is set")
    if not servers[0].startswith("127."):
        raise Absent("not asked: the resolver is not the engine's own")
    number = random.getrandbits(16)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        udp.settimeout(RESOLVER_WAIT_S)
        try:
            udp.connect((servers[0], 53))
            udp.send(dns_question(NAME, number))
            return dns_answer_kind(udp.recv(512), number)
        except TimeoutError:
            return f"no answer in {RESOLVER_WAIT_S:g} s"
        except OSError as error:
            return error_name(error)


def egress_fields() -> dict[str, Field]:
    """Return the three looks at the way out."""
    return read_fields(
        {
            "has_default_route": ("/proc/net/route, /proc/net/ipv6_route", has_default_route),
            "egress_connect": (f"UDP connect to {OUTSIDE[0]}, nothing sent", connect_outside),
            "egress_dns": (f"A record of {NAME} asked of the engine's resolver", ask_resolver),
        }
    )
