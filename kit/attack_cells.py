"""The cells of the attack bench: what is planted in the virtual runs of each row of its table."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from kit.planted import FAULTS
from kit.sequential import Stopping
from kit.virtual import MARGIN, World

Kind = Literal["effect", "limit", "auto", "fault", "twin", "spare"]

PAIRS = 8
SPARE = 3
STRONG = 0.30


@dataclass(frozen=True)
class Cell:
    """What is planted in all runs of one row of the table; `null` when `supported` is false.

    Rows of the kind `limit` show what the test does where its one assumption does not hold.
    """

    name: str
    kind: Kind
    world: World
    fault: str | None = None
    null: bool = False

    @property
    def stopping(self) -> Stopping | None:
        return Stopping() if self.kind == "auto" else None

    @property
    def spare(self) -> int:
        return SPARE if self.kind == "spare" else 0

    @property
    def pairs(self) -> int:
        return self.stopping.pairs if self.stopping else PAIRS


def _worlds() -> dict[str, tuple[World, bool]]:
    """Return the worlds of the effect cells; True where `supported` would be false."""
    plain: dict[str, tuple[World, bool]] = {
        "no effect": (World(), True),
        "+3 %": (World(effect=0.03), True),
        "exactly the margin": (World(effect=MARGIN), True),
        "+10 %": (World(effect=0.10), False),
        "+15 %": (World(effect=0.15), False),
        "+20 %": (World(effect=0.20), False),
        "+30 %": (World(effect=STRONG), False),
        "-10 %": (World(effect=-0.10), True),
    }
    shapes: tuple[tuple[str, dict[str, Any]], ...] = (
        ("bimodal servers", {"bimodal": 0.2}),
        ("linear drift", {"drift": "linear"}),
        ("warming up", {"drift": "warming"}),
        ("a step in time", {"drift": "step"}),
    )
    for name, world in shapes:
        plain[f"{name}, no effect"] = (World(**world), True)
        plain[f"{name}, the margin"] = (World(effect=MARGIN, **world), True)
        plain[f"{name}, +30 %"] = (World(effect=STRONG, **world), False)
    return plain


def cells() -> list[Cell]:
    """Return every cell of the bench; the order is part of what a seed means."""
    worlds = _worlds()
    found = [Cell(name, "effect", world, null=null) for name, (world, null) in worlds.items()]
    for name in ("no effect", "exactly the margin", "+10 %", "+15 %", "+20 %", "+30 %"):
        found.append(Cell(name, "auto", worlds[name][0], null=worlds[name][1]))
    for name in ("bimodal servers, the margin", "linear drift, the margin"):
        found.append(Cell(name, "auto", worlds[name][0], null=True))
    for rare in (0.2, -0.2, -0.3):
        name = f"a quarter of the candidate's containers {rare:+.0%}, the margin on average"
        found.append(Cell(name, "limit", World(effect=MARGIN, rare=rare), null=True))
    for fault in FAULTS:
        found.append(Cell(fault, "fault", World(effect=STRONG), fault))
        found.append(Cell(fault, "twin", World(effect=STRONG), fault))
    for name in ("no effect", "exactly the margin", "+15 %", "+30 %"):
        world, null = worlds[name]
        found.append(Cell(name, "spare", replace(world, spoiled=0.05), null=null))
    return found
