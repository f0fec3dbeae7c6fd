"""README's tables are what the code says, and exit codes tell errors apart."""

from collections import Counter

from kit import docs
from kit.errors import all_errors
from kit.paths import ROOT


def test_readme_tables_equal_the_code() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    assert docs.with_tables(text) == text, "run `python -m kit docs`"


def test_readme_has_a_place_for_each_table() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    for name, table in docs.readme_tables().items():
        assert text.count(f"<!-- {name}: begin") == 1
        assert table in text


def test_exit_codes_are_unique() -> None:
    counts = Counter(cls.exit_code for cls in all_errors())
    assert [code for code, n in counts.items() if n > 1] == []
