"""The stub as one half of a prefill/decode pair, as vLLM's NixlConnector behaves.

`--kv-transfer-config {"kv_connector": "NixlConnector", "kv_role": "kv_producer"}` makes it hand
over blocks, `kv_consumer` fetch them; nothing is really moved. What kills or hangs vLLM's decoder
does so here too, so that a proxy that lets it through is found out.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from .stub_config import StubConfig

_ENGINE_ID = "stub-engine"
_DESCRIPTORS_PER_BLOCK = 2
_TRANSFER_S = 0.001
_NEEDED = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port")


class Transfer:
    """What a stub of this role does with `kv_transfer_params`."""

    def __init__(self, config: StubConfig, arguments: Mapping[str, Any], block_tokens: int) -> None:
        asked = arguments.get("kv_transfer_config")
        self.role = asked.get("kv_role") if isinstance(asked, dict) else None
        self._config = config
        self._block_tokens = block_tokens

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
        params = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [list(range(1, blocks + 1))],
            "remote_engine_id": _ENGINE_ID,
            "remote_request_id": f"cmpl-{request_id}-0",
            "remote_host": os.environ.get("VLLM_NIXL_SIDE_CHANNEL_HOST", "127.0.0.1"),
            "remote_port": int(os.environ.get("VLLM_NIXL_SIDE_CHANNEL_PORT", "5600")),
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

    def count_fetched(self, counts: dict[str, float], tokens: int) -> None:
        """Count one transfer of the blocks of `tokens` tokens."""
        blocks = -(-tokens // self._block_tokens)
        counts["nixl_transfers"] += 1
        counts["nixl_bytes"] += tokens * self._config.kv_bytes_per_token
        counts["nixl_descriptors"] += blocks * _DESCRIPTORS_PER_BLOCK
        counts["nixl_seconds"] += _TRANSFER_S
