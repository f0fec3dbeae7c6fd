"""Short prompts and texts that the kit brings along, and the phase that asks for them.

Greedy answers of both arms are compared, and the texts are scored for perplexity. All of it is the
kit's own or in the public domain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kit.experiment import QUALITY_PHASE, Phase, Scale

PROMPTS = (
    "The capital of France is",
    "The capital of Italy is",
    "The opposite of hot is",
    "Water freezes at a temperature of",
    "The largest planet in the solar system is",
    "The first president of the United States was",
    "One, two, three, four,",
    "Monday, Tuesday, Wednesday,",
    "The chemical symbol for water is",
    "Two plus two equals",
    "The sun rises in the",
    "A year has twelve",
    "The author of Romeo and Juliet is",
    "The color of the sky on a clear day is",
    "Bees make",
    "The Great Wall is a monument in",
)
"""Short questions with one likely answer: an intact cache cannot move many of them."""

ANSWER_TOKENS = 4
"""The answer itself. What follows it is free choice, which any change of rounding may turn."""

TEXTS = (
    "Alice was beginning to get very tired of sitting by her sister on the bank, and of having "
    "nothing to do: once or twice she had peeped into the book her sister was reading, but it "
    'had no pictures or conversations in it, "and what is the use of a book," thought Alice, '
    '"without pictures or conversations?" So she was considering in her own mind, as well as she '
    "could, for the hot day made her feel very sleepy and stupid, whether the pleasure of making "
    "a daisy-chain would be worth the trouble of getting up and picking the daisies, when "
    "suddenly a White Rabbit with pink eyes ran close by her.",
    "Four score and seven years ago our fathers brought forth on this continent, a new nation, "
    "conceived in Liberty, and dedicated to the proposition that all men are created equal. Now "
    "we are engaged in a great civil war, testing whether that nation, or any nation so conceived "
    "and so dedicated, can long endure. We are met on a great battle-field of that war. We have "
    "come to dedicate a portion of that field, as a final resting place for those who here gave "
    "their lives that that nation might live. It is altogether fitting and proper that we should "
    "do this.",
    "It is a truth universally acknowledged, that a single man in possession of a good fortune, "
    "must be in want of a wife. However little known the feelings or views of such a man may be "
    "on his first entering a neighbourhood, this truth is so well fixed in the minds of the "
    "surrounding families, that he is considered as the rightful property of some one or other of "
    "their daughters.",
)
"""Openings in the public domain: Carroll 1865, Lincoln 1863, Austen 1813."""

TASKS: Mapping[str, Sequence[str]] = {
    "code": (
        "def add(a, b):\n    return",
        "class Point:\n    def __init__(self, x, y):\n        self.x =",
        "numbers = [1, 2, 3]\nfor number in",
        'if __name__ == "__main',
        "import os\nhere = os.path.",
        "try:\n    value = int(text)\nexcept",
    ),
    "math": (
        "2 + 3 =",
        "10 - 7 =",
        "Half of 100 is",
        "Three times three equals",
        "1, 2, 4, 8, 16,",
        "The number after 99 is",
    ),
    "chat": (
        "User: What color is grass?\nAssistant: Grass is",
        "User: How many days has a week?\nAssistant: A week has",
        "User: Thank you very much!\nAssistant: You are",
        "User: What do cows drink?\nAssistant: Cows drink",
        "User: Which animal says meow?\nAssistant: The",
        "User: Is the sun hot or cold?\nAssistant: The sun is",
    ),
}
"""What people ask of a model beside facts; a perplexity says little about these."""


def plain_request(scale: Scale, name: str, prompt: str, lane: str, **more: Any) -> dict[str, Any]:
    """Return one greedy completion request; `more` are further keys of its body."""
    body = {
        "model": scale.model,
        "prompt": prompt,
        "temperature": 0.0,
        "seed": scale.seed,
        **more,
    }
    return {"id": name, "path": "/v1/completions", "body": body, "lane": lane, "tags": {}}


def quality_phase(scale: Scale, tasks: Mapping[str, Sequence[str]] | None = None) -> Phase:
    """Build the phase of greedy answers (`q00`; of a task `code-0`) and scored texts (`t0`)."""
    asked = {f"q{i:02d}": prompt for i, prompt in enumerate(PROMPTS)}
    for task, prompts in (tasks or {}).items():
        asked |= {f"{task}-{i}": prompt for i, prompt in enumerate(prompts)}
    asks = [
        plain_request(scale, name, prompt, "ask", max_tokens=ANSWER_TOKENS)
        for name, prompt in asked.items()
    ]
    scored = [
        plain_request(scale, f"t{i}", text, "score", max_tokens=1, prompt_logprobs=0)
        for i, text in enumerate(TEXTS)
    ]
    return Phase(QUALITY_PHASE, (*asks, *scored), concurrency=2, scrape_every_s=None)
