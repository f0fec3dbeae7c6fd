"""The stub's side channel: a consumer meets the producer that keeps its prompt's blocks.

Two lines of JSON each way: a handshake, then the transfer. No block is moved, but the two really
meet, so a producer that was killed, stopped, cut off or told otherwise is found out, and by whom.

As NixlConnector of vLLM 0.32.0 does (its sources): a handshake that is not answered in time, or
from another engine or configuration, fails; so does a transfer whose producer dies. A transfer
that falls silent does not end. The model's revision is not compared, and a block whose lease has
ended is read all the same: both give a wrong text that nobody but the producer's counters tells.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from .stub_transfer import Fetched, Transfer

_COMPARED = ("version", "model", "dtype", "cache_dtype")


def identity_of(version: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a leg tells of itself, from its resolved configuration."""
    model = config["model_config"]
    return {
        "version": version,
        "model": model["model"],
        "dtype": model["dtype"],
        "cache_dtype": config["cache_config"]["cache_dtype"],
        "revision": model.get("revision"),
    }


class SideChannel:
    """One leg's end: a producer answers on it, a consumer asks through it."""

    def __init__(self, transfer: Transfer, identity: Mapping[str, Any]) -> None:
        self._transfer = transfer
        self._identity = identity

    async def open(self) -> None:
        """Answer from now on, at the address that the producer hands over."""
        transfer = self._transfer
        server = await asyncio.start_server(self._answer, transfer.host, transfer.port)
        transfer.port = server.sockets[0].getsockname()[1]

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            request = await _read(reader)
            told = {"engine_id": self._transfer.engine_id, "identity": self._identity}
            writer.write(_line(told))
            await _read(reader)
            await asyncio.sleep(self._transfer.transfer_s)
            writer.write(_line({"kept": self._transfer.release(request["request_id"])}))
            await writer.drain()
        except (OSError, EOFError):
            return  # the consumer has gone; the lease stays
        finally:
            writer.close()

    async def fetch(self, params: Mapping[str, Any]) -> Fetched:
        """Fetch a prompt's blocks from where `kv_transfer_params` say; return how that ended."""
        await asyncio.sleep(self._transfer.fetch_after_s)
        try:
            async with asyncio.timeout(self._transfer.handshake_s):
                reader, writer = await asyncio.open_connection(
                    params["remote_host"], params["remote_port"]
                )
        except OSError:  # a timeout is one
            return "failed"
        try:
            async with asyncio.timeout(self._transfer.handshake_s):
                writer.write(_line({"request_id": params["remote_request_id"]}))
                theirs = await _read(reader)
            if theirs["engine_id"] != params["remote_engine_id"]:
                return "failed"
            ours, other = self._identity, theirs["identity"]
            if any(ours[key] != other[key] for key in _COMPARED):
                return "failed"
            writer.write(_line({}))
            kept = (await _read(reader))["kept"]
        except (OSError, EOFError):
            return "failed"
        finally:
            writer.close()
        return "whole" if kept and ours["revision"] == other["revision"] else "wrong"


def _line(told: Mapping[str, Any]) -> bytes:
    return json.dumps(told).encode() + b"\n"


async def _read(reader: asyncio.StreamReader) -> dict[str, Any]:
    """Return the next line. Raises `EOFError` when the other end has closed."""
    line = await reader.readline()
    if not line.endswith(b"\n"):
        raise EOFError
    found: dict[str, Any] = json.loads(line)
    return found
