"""The stub's engine: how long a request takes, what it answers, and the counters it moves."""

from __future__ import annotations

import hashlib
import math
import os
import random
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from .clock import NS
from .stub_config import StubConfig, holds
from .stub_transfer import Fetched, Transfer

FAULTS = ("fail", "reset", "early_eof", "bad_json", "hang")


@dataclass(frozen=True)
class Service:
    """How one request will be served; offsets in ns from its arrival, or from the end of a fetch.

    `external_tokens` are fetched from a producer; computing them would take `saved_ns` longer.
    """

    prompt_tokens: int
    cached_tokens: int
    external_tokens: int
    texts: tuple[str, ...]
    tokens: int
    reported_tokens: int
    offsets_ns: tuple[int, ...]
    finish_reason: str
    fault: str | None
    saved_ns: int = 0


def prompt_tokens_of(body: Mapping[str, Any]) -> list[str]:
    """Return the prompt's tokens: words of its text, or the ids that were given."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and all(isinstance(item, int) for item in prompt):
        return [str(item) for item in prompt]
    if isinstance(prompt, list):
        prompt = " ".join(map(str, prompt))
    if prompt is None:
        messages = body.get("messages") or []
        prompt = " ".join(str(m.get("content", "")) for m in messages if isinstance(m, dict))
    return str(prompt).split()


class PrefixCache:
    """Whole blocks of tokens, found by the hash of everything up to their end, as vLLM does."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._known: set[bytes] = set()

    def take(self, tokens: list[str]) -> int:
        """Return how many leading tokens were known, and know all of them from now on.

        The last token is always computed, so a prompt is never known whole.
        """
        size = self._block_tokens
        digest = hashlib.blake2b(digest_size=16)
        known, unbroken = 0, True
        for end in range(size, len(tokens) + 1, size):
            digest.update(" ".join(tokens[end - size : end]).encode() + b"\0")
            key = digest.digest()
            unbroken = unbroken and key in self._known and end < len(tokens)
            known += size * unbroken
            self._known.add(key)
        return known

    def clear(self) -> None:
        """Forget everything."""
        self._known.clear()


class Engine:
    """Decides how each request is served and counts as vLLM's /metrics does."""

    def __init__(self, config: StubConfig, arguments: Mapping[str, Any]) -> None:
        self.config = config
        self.arguments = dict(arguments)
        caching = arguments.get("enable_prefix_caching", config.prefix_caching)
        self.prefix_caching = bool(caching)
        limit = arguments.get("max_num_seqs", config.max_num_seqs)
        self.max_running = int(limit) if limit is not None else None
        self.cache = PrefixCache(int(arguments.get("block_size") or config.block_tokens))
        self.running: dict[int, int] = {}  # request number -> tokens that it holds
        self.waiting = 0
        self.counts: defaultdict[str, float] = defaultdict(float)
        self.transfer = Transfer(config, self.arguments, self.block_tokens, self.counts)
        self.finished: Counter[str] = Counter()
        self.admitted = 0
        seed = config.process_seed
        own = random.Random(os.urandom(8) if seed is None else seed)  # noqa: S311 - not a secret
        self._process = math.exp(own.gauss(0.0, config.process_sd)) if config.process_sd else 1.0
        if config.slow_file and os.path.exists(config.slow_file):
            self._process *= config.slow_factor
        self._ttft_factor = self._itl_factor = 1.0
        for arm in config.arms:
            if holds(arm.get("when", {}), self.arguments):
                self._ttft_factor *= arm.get("ttft_factor", 1.0)
                self._itl_factor *= arm.get("itl_factor", 1.0)

    def admit(self, body: Mapping[str, Any]) -> tuple[int, Service]:
        """Take one request in; return its number and how it will be served."""
        number = self.admitted
        self.admitted += 1
        if self.config.counters_reset_after == number:
            self.counts.clear()
            self.finished.clear()
        tokens = prompt_tokens_of(body)
        cached = self.cache.take(tokens) if self.prefix_caching else 0
        draw = random.Random(f"{self.config.seed}:{number}")  # noqa: S311 - not a secret
        external = len(tokens) - cached if self._fetches(body, len(tokens) - cached) else 0
        service = self._serve(body, number, len(tokens), cached, external, draw)
        if not external:
            self._count_prompt(service)
        return number, service

    def fetched(self, service: Service, how: Fetched) -> Service:
        """Count a fetch that ended; return how the request goes on.

        One that failed is refused (`load`), or computed where the server was told to. The tokens
        then count as computed, but where a local hit is in front of them vLLM leaves them counted
        as moved.
        """
        if how != "failed":
            self.transfer.count_fetched(service.external_tokens)
            if how == "wrong":
                wrong = tuple(text.replace("w", "x") for text in service.texts)
                service = replace(service, texts=wrong)
        else:
            self.counts["nixl_failed"] += 1
            if not self.transfer.recomputes:
                return replace(service, fault="load")
            later = tuple(offset + service.saved_ns for offset in service.offsets_ns)
            moved = service.external_tokens if service.cached_tokens else 0
            service = replace(service, external_tokens=moved, offsets_ns=later)
        self._count_prompt(service)
        return service

    def _fetches(self, body: Mapping[str, Any], tokens: int) -> bool:
        """Whether these tokens of the prompt come from a producer; vLLM calls them hits anyway."""
        if not self.transfer.fetches(body):
            return False
        self.counts["external_queries"] += tokens
        self.counts["external_hits"] += tokens
        return not self.config.kv_transfer_disabled

    def _serve(
        self,
        body: Mapping[str, Any],
        number: int,
        prompt: int,
        cached: int,
        external: int,
        draw: random.Random,
    ) -> Service:
        config = self.config
        asked = int(body.get("max_tokens") or body.get("max_completion_tokens") or 16)
        count = max(1, round(asked * config.served_fraction))
        noise = math.exp(draw.gauss(0.0, config.noise_sd)) * self._process
        if draw.random() < config.bimodal_fraction:
            noise *= config.bimodal_factor
        ttft_s = config.ttft_s * (1 + config.drift_per_request * number)
        ttft_s += config.ttft_per_token_s * (prompt - cached - external)
        scale_ns = self._ttft_factor * noise * NS
        first_ns = ttft_s * scale_ns
        step_ns = config.itl_s * self._itl_factor * noise * NS
        texts = _chunk_texts(count, config.tokens_per_chunk)
        return Service(
            prompt_tokens=prompt,
            cached_tokens=cached,
            external_tokens=external,
            texts=texts,
            tokens=count,
            reported_tokens=max(1, round(count * config.usage_factor)),
            offsets_ns=tuple(round(first_ns + step_ns * i) for i in range(len(texts))),
            finish_reason="length" if count == asked else "stop",
            fault=self.transfer.harm(body) or _draw_fault(config, draw),
            saved_ns=round(config.ttft_per_token_s * external * scale_ns),
        )

    def _count_prompt(self, service: Service) -> None:
        count = self.counts
        computed = service.prompt_tokens - service.cached_tokens - service.external_tokens
        count["prompt_tokens"] += service.prompt_tokens
        count["local_compute"] += computed
        count["local_cache_hit"] += service.cached_tokens
        count["external_kv_transfer"] += service.external_tokens
        if self.prefix_caching:
            count["prefix_queries"] += service.prompt_tokens
            count["prefix_hits"] += service.cached_tokens

    def reset_cache(self) -> str:
        """Forget all prefixes; return the empty body that vLLM answers with."""
        self.cache.clear()
        return ""

    def has_room(self) -> bool:
        """Whether one more request may run now."""
        return self.max_running is None or len(self.running) < self.max_running

    def start(self, number: int, service: Service) -> None:
        """Let a request run: it holds cache blocks until `end`."""
        self.running[number] = service.prompt_tokens + service.tokens

    def end(self, number: int, service: Service | None, reason: str) -> None:
        """Count a request that ended; `service` is None when nothing was generated."""
        self.running.pop(number, None)
        self.finished[reason] += 1
        if service is None:
            return
        self.counts["generation_tokens"] += service.tokens
        self.counts["preemptions"] += self.config.preemptions_per_request
        self._count_drafts(service.tokens)

    def _count_drafts(self, tokens: int) -> None:
        speculative = self.arguments.get("speculative_config")
        if not isinstance(speculative, dict):
            return
        width = int(speculative.get("num_speculative_tokens", 1))
        drafts = max(1, round(tokens / (1 + width * self.config.spec_acceptance)))
        self.counts["drafts"] += drafts
        self.counts["draft_tokens"] += drafts * width
        self.counts["accepted"] += round(drafts * width * self.config.spec_acceptance)

    @property
    def kv_usage(self) -> float:
        """The share of cache blocks that running requests hold, 0 to 1."""
        return min(1.0, sum(self.running.values()) / (self.kv_blocks * self.block_tokens))

    @property
    def kv_blocks(self) -> int:
        return int(self.arguments.get("num_gpu_blocks_override") or self.config.kv_blocks)

    @property
    def block_tokens(self) -> int:
        return int(self.arguments.get("block_size") or self.config.block_tokens)


def _chunk_texts(tokens: int, per_chunk: int) -> tuple[str, ...]:
    words = [f" w{i}" for i in range(tokens)]
    return tuple("".join(words[i : i + per_chunk]) for i in range(0, tokens, per_chunk))


def _draw_fault(config: StubConfig, draw: random.Random) -> str | None:
    """Return the fault planted in this request; every fraction is drawn, the first one wins."""
    hit = [draw.random() < getattr(config, f"{fault}_fraction") for fault in FAULTS]
    return next((fault for fault, is_hit in zip(FAULTS, hit, strict=True) if is_hit), None)
