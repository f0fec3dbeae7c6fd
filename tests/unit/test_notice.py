"""Warnings and the report's words: a closed set, each in both languages."""

import re

import pytest
import yaml

from kit import notice
from kit.paths import ROOT
from kit.report import TEMPLATES

CHINESE = re.compile(r"[\u4e00-\u9fff]")
SAME_IN_BOTH = {"vllm", "torch", "colon"}


@pytest.mark.parametrize("code", notice.codes())
def test_each_notice_speaks_both_languages_and_shows_what_was_seen(code: str) -> None:
    found = notice.notice(code, "SEEN")
    assert found.code == code
    assert CHINESE.search(found.text.zh)
    assert not CHINESE.search(found.text.en)
    assert ("SEEN" in found.text.en) == ("SEEN" in found.text.zh)
    assert "{" not in found.text.en + found.text.zh


def test_every_notice_is_given_somewhere() -> None:
    code = "".join(p.read_text("utf-8") for p in (ROOT / "kit").rglob("*.py"))
    given = set(re.findall(r"notice\(\s*\"(\w+)\"", code))
    named = {c for c in notice.codes() if code.count(f'"{c}"') > 1}
    assert given <= set(notice.codes())
    assert set(notice.codes()) <= given | named


def words() -> dict[str, dict[str, str]]:
    return dict(yaml.safe_load((TEMPLATES / "words.yml").read_text("utf-8")))


@pytest.mark.parametrize("key", sorted(words()))
def test_each_word_of_the_report_has_both_languages(key: str) -> None:
    both = words()[key]
    assert set(both) == {"en", "zh"}
    assert all(both.values())
    assert key in SAME_IN_BOTH or CHINESE.search(both["zh"])
    assert not CHINESE.search(both["en"])


@pytest.mark.parametrize("name", ["report.md.j2", "report.html.j2"])
def test_every_word_that_the_template_asks_for_is_there(name: str) -> None:
    template = (TEMPLATES / name).read_text("utf-8")
    asked = set(re.findall(r"\bw\.(\w+)", template))
    assert asked
    assert asked <= set(words())
