"""The stub as one half of a prefill/decode pair, as vLLM's NixlConnector behaves.

`--kv-transfer-config {"kv_connector": "NixlConnector", "kv_role": "kv_producer"}` makes it hand
over blocks, `kv_consumer` fetch them (stub_channel). What kills or hangs vLLM's decoder does so
here too, so that a proxy that lets it through is found out.

A fetch that fails ends the request with vLLM's error, or with the argument's key
`"kv_load_failure_policy": "recompute"` lets the consumer compute the prompt itself.
"""

from __future__ import annotations

import os
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, Literal

from .stub_config import StubConfig

Fetched = Literal["whole", "wrong", "failed"]

_DESCRIPTORS_PER_BLOCK = 2
_NEEDED = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port")


class Transfer:
    """What a stub of this role does with `kv_transfer_params`. Times in seconds."""

    def __init__(
        self,
        config: StubConfig,
        arguments: Mapping[str, Any],
        block_tokens: int,
        counts: defaultdict[str, float],
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        asked = arguments.get("kv_transfer_config")
        told = asked if isinstance(asked, dict) else {}
        self.role = told.get("kv_role")
        self.recomputes = told.get("kv_load_failure_policy", "fail") == "recompute"
        self.engine_id = uuid.uuid4().hex
        self.host = os.environ.get("VLLM_NIXL_SIDE_CHANNEL_HOST", "127.0.0.1")
        self.port = int(os.environ.get("VLLM_NIXL_SIDE_CHANNEL_PORT", "5600"))
        self.transfer_s = config.kv_transfer_s
        self.fetch_after_s = config.kv_fetch_after_s
        self.handshake_s = config.kv_handshake_s
        self._config = config
        self._block_tokens = block_tokens
        self._counts = counts
        self._now_s = now_s
        self._leases: dict[str, float] = {}

    def handed_over(
        self, body: Mapping[str, Any], prompt_tokens: int, request_id: str, reason: str
    ) -> dict[str, Any] | None:
        """Return what a producer answers: where the prompt's blocks are, if it kept them."""
        asked = body.get("kv_transfer_params")
        if self.role != "kv_producer" or not isinstance(asked, dict) or reason != "length":
            return None
        if not asked.get("do_remote_decode") or self._config.kv_drop == "all":
            return None
        blocks = prompt_tokens // self._block_tokens
        if not self._config.kv_full_blocks_only:
            blocks = -(-prompt_tokens // self._block_tokens)
        remote_id = f"cmpl-{request_id}-0"
        self._leases[remote_id] = self._now_s() + self._config.kv_lease_s
        params = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [list(range(1, blocks + 1))],
            "remote_engine_id": self.engine_id,
            "remote_request_id": remote_id,
            "remote_host": self.host,
            "remote_port": self.port,
            "tp_size": 1,
        }
        params.pop(self._config.kv_drop, None)
        return params

    def fetches(self, body: Mapping[str, Any]) -> bool:
        """Whether a consumer was told to fetch the prompt's blocks."""
        asked = body.get("kv_transfer_params")
        told = isinstance(asked, dict) and asked.get("do_remote_prefill") is True
        return told and self.role == "kv_consumer"

    def harm(self, body: Mapping[str, Any]) -> str | None:
        """Return what incomplete parameters do to vLLM's decoder: `die`, `stuck` or nothing."""
        if not self.fetches(body):
            return None
        params = body["kv_transfer_params"]
        if not params.get("remote_block_ids"):
            return "die"
        return None if all(name in params for name in _NEEDED) else "stuck"

    def expire(self) -> None:
        """As a producer: free and count the blocks that nobody fetched while their lease ran."""
        ended = [name for name, until_s in self._leases.items() if until_s <= self._now_s()]
        for name in ended:
            del self._leases[name]
        self._counts["nixl_expired"] += len(ended)

    def release(self, remote_id: str) -> bool:
        """As a producer: end a request's lease; tell whether it still ran."""
        self.expire()
        kept = self._leases.pop(remote_id, None) is not None
        self._counts["nixl_late"] += not kept
        return kept

    def count_fetched(self, tokens: int) -> None:
        """As a consumer: count one transfer of the blocks of `tokens` tokens."""
        blocks = -(-tokens // self._block_tokens)
        self._counts["nixl_transfers"] += 1
        self._counts["nixl_bytes"] += tokens * self._config.kv_bytes_per_token
        self._counts["nixl_descriptors"] += blocks * _DESCRIPTORS_PER_BLOCK
        self._counts["nixl_seconds"] += self._config.kv_transfer_s
