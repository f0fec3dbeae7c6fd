"""The frames of the stub's generations, shaped as vLLM's."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from .stub_engine import Service


@dataclass
class Frames:
    """Builds the frames of one answer."""

    id: str
    model: str
    is_chat: bool

    def event(
        self,
        text: str,
        reason: str | None,
        *,
        role: str | None = None,
        usage: dict[str, Any] | None = None,
    ) -> bytes:
        """Return one event of a stream; with `usage` it has no choices, as the last one."""
        choices = [] if usage is not None else [self._choice("delta", text, reason, role)]
        return b"data: " + json.dumps(self._frame(choices, usage)).encode() + b"\n\n"

    def whole(
        self, service: Service, params: dict[str, Any] | None, *, has_params: bool
    ) -> dict[str, Any]:
        """Return a whole answer; a server with a KV connector tells `params` even when null."""
        text = "".join(service.texts)
        choice = self._choice("message", text, service.finish_reason, "assistant")
        frame = self._frame([choice], usage_of(service))
        return {**frame, "kv_transfer_params": params} if has_params else frame

    def _choice(
        self, holder: str, text: str, reason: str | None, role: str | None
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": reason}
        if self.is_chat:
            choice[holder] = {"role": role, "content": text} if role else {"content": text}
        else:
            choice["text"] = text
        return choice

    def _frame(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None) -> dict[str, Any]:
        return {
            "id": f"cmpl-{self.id}",
            "object": "chat.completion" if self.is_chat else "text_completion",
            "created": 0,
            "model": self.model,
            "choices": choices,
            "usage": usage,
        }


def usage_of(service: Service) -> dict[str, Any]:
    """Return the token counts that an answer reports."""
    return {
        "prompt_tokens": service.prompt_tokens,
        "completion_tokens": service.reported_tokens,
        "total_tokens": service.prompt_tokens + service.reported_tokens,
        "prompt_tokens_details": {"cached_tokens": service.cached_tokens},
    }
