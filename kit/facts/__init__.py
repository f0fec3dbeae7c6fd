"""Groups of facts, one file each; a group's name is its file's name.

A group is a module with `collect(place) -> list[Fact]`. A place that the group says nothing
about (a container for `host`, the host for `packages`) gives an empty list.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable
from typing import cast

from kit.errors import UnknownName
from kit.fact import Fact, Place


def groups() -> list[str]:
    """Return the names of all groups, by looking in this folder."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def collect(place: Place, names: Iterable[str] | None = None) -> list[Fact]:
    """Collect the named groups (default: all) at one place, ordered by group and name.

    Raises `UnknownName` for a group that has no file and `ProbeFailed` when a container does
    not answer at all; everything smaller is a fact with a null value and a reason.
    """
    known = groups()
    found: list[Fact] = []
    for name in known if names is None else names:
        if name not in known:
            raise UnknownName(
                f"no group of facts is called {name!r}", hint=f"there are: {', '.join(known)}"
            )
        module = importlib.import_module(f"{__name__}.{name}")
        found += cast(Callable[[Place], list[Fact]], module.collect)(place)
    return sorted(found, key=lambda fact: (fact.group, fact.name))
