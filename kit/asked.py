"""Requests as experiments ask them: streamed completions of a fixed length, with their usage."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from kit.experiment import Scale


def random_ids(scale: Scale, name: str, count: int) -> list[int]:
    """Return a prompt of exactly that many tokens: ids that every vocabulary has.

    The same plan's seed and name give the same ids.
    """
    draw = random.Random(f"{scale.seed}:{name}")  # noqa: S311 - text, not a secret
    return [draw.randrange(1000, 20_000) for _ in range(count)]


def completion(
    scale: Scale,
    name: str,
    prompt: str | Sequence[int],
    tokens: int,
    *,
    temperature: float = 0.0,
    tags: Mapping[str, Any] | None = None,
    **when: Any,
) -> dict[str, Any]:
    """Return a line of the load file: a completion of exactly `tokens` tokens.

    `when` is `lane` (closed loop: after the lane's last answer) or `at_s` (open loop).
    """
    body = {
        "model": scale.model,
        "prompt": prompt if isinstance(prompt, str) else list(prompt),
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": temperature,
        "seed": scale.seed,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return {"id": name, "path": "/v1/completions", "body": body, "tags": dict(tags or {}), **when}
