"""What the words of a result mean and what to do next: a closed set, in both languages.

The words are those of the code: verdicts, outcomes of a reproduction, guards, warnings, and the
states of a fact. Their text is in `templates/explain.yml`; a test holds the two together.
"""

from __future__ import annotations

import ast
from functools import lru_cache
from typing import Literal, get_args

import yaml

from kit import compare, fact, notice, verdict
from kit.experiment import Text, unknown
from kit.paths import ROOT, TEMPLATES
from kit.value import Value, parse_value

Kind = Literal["verdict", "outcome", "guard", "warning", "state"]


class Explanation(Value):
    """One word: what it says of a run, and what to do next."""

    kind: Kind
    word: str
    what: Text
    next: Text


def guard_names() -> list[str]:
    """Return the names of all guards, as the modules of the kit give them."""
    names: set[str] = set()
    for path in (ROOT / "kit").glob("*.py"):
        text = path.read_text("utf-8")
        if "GuardResult(" in text:
            names |= _names_given(ast.parse(text))
    return sorted(names)


def _names_given(tree: ast.AST) -> set[str]:
    return {
        str(keyword.value.value)
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and getattr(call.func, "id", None) == "GuardResult"
        for keyword in call.keywords
        if keyword.arg == "name" and isinstance(keyword.value, ast.Constant)
    }


def all_words() -> dict[Kind, list[str]]:
    """Return every word that a result may carry, by kind."""
    return {
        "verdict": list(get_args(verdict.Word)),
        "outcome": list(get_args(compare.Word)),
        "guard": guard_names(),
        "warning": notice.codes(),
        "state": list(get_args(fact.State)),
    }


@lru_cache
def explanations() -> tuple[Explanation, ...]:
    """Return all explanations, in the order of their file."""
    path = TEMPLATES / "explain.yml"
    written = yaml.safe_load(path.read_text("utf-8"))
    return tuple(
        parse_value(Explanation, {"kind": kind, "word": word, **texts}, f"{path.name}: {word}")
        for kind, words in written.items()
        for word, texts in words.items()
    )


def explain(word: str) -> list[Explanation]:
    """Return what is known of a word; some are of two kinds. Raises `UnknownName`."""
    plain = _plain(word)
    found = [each for each in explanations() if _plain(each.word) == plain]
    if not found:
        raise unknown("word", word, list(dict.fromkeys(each.word for each in explanations())))
    return found


def find_explanation(kind: Kind, word: str) -> Explanation | None:
    """Return the explanation of a word of that kind; None for one of another kit's words."""
    return next((e for e in explanations() if (e.kind, e.word) == (kind, word)), None)


def _plain(word: str) -> str:
    """Return a word as people may type it: `not-supported` and `Not Supported` are one."""
    return word.strip().lower().replace("-", " ").replace("_", " ")
