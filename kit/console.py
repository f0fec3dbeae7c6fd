"""Everything a person sees. Progress and errors go to stderr; stdout carries only data.

What goes to stderr may quote logs and other programs, so the secrets of the caller's environment
are masked in it.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
import traceback
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kit.errors import KitError
from kit.secret import masked

_err = Console(stderr=True, highlight=False, soft_wrap=True)
_out = Console(highlight=False)


def say(text: str) -> None:
    """Print one line of progress."""
    _err.print(Text(masked(text)))


def warn(text: str) -> None:
    """Print one line that the person should read but that stops nothing."""
    _err.print(Text("warning: ", style="yellow") + Text(masked(text)))


def show_error(error: KitError) -> None:
    """Print an error: detail first, so that the line and its next step stand last."""
    if error.detail:
        _err.print(Text(masked(error.detail.rstrip()), style="dim"))
    _err.print(Text("error: ", style="bold red") + Text(masked(error.message)))
    if error.hint:
        _err.print(Text("  next: ") + Text(masked(error.hint)))


def show_fault(error: BaseException) -> None:
    """Print what the kit itself did not foresee: where it happened, and where to tell it."""
    lines = "".join(traceback.format_exception(error)).rstrip()
    _err.print(Text(masked(lines), style="dim"))
    _err.print(Text("error: ", style="bold red") + Text("a fault of the kit itself"))
    _err.print(Text("  next: ") + Text("open an issue with the lines above"))


@contextlib.contextmanager
def step(text: str, *, waits_for: str = "") -> Iterator[None]:
    """Announce a step, then how long it took; `waits_for` says what the time goes into."""
    start = time.monotonic()
    say(f"> {text}" + (f" (waiting for {waits_for})" if waits_for else ""))
    try:
        yield
    except BaseException:
        say(f"  failed after {time.monotonic() - start:.1f} s: {text}")
        raise
    say(f"  done in {time.monotonic() - start:.1f} s: {text}")


def table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    """Print a table on stdout; wide ones keep their columns when stdout is no terminal."""
    if not sys.stdout.isatty():
        for row in [columns, *rows]:
            print("\t".join(row))
        return
    grid = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        grid.add_column(column, no_wrap=number == 0)  # the first is what a person copies
    for row in rows:
        grid.add_row(*[Text(cell) for cell in row])
    _out.print(grid)


def text(value: str) -> None:
    """Print text on stdout; wrapped only where stdout is a terminal."""
    _out.print(Text(value), soft_wrap=not sys.stdout.isatty())


def data(value: Any) -> None:
    """Print a value as JSON on stdout, for scripts."""
    print(json.dumps(value, indent=2, ensure_ascii=False, sort_keys=True))
