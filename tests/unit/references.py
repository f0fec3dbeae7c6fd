"""The references below manifests/: all of them, and those that the short tier can afford."""

from __future__ import annotations

import pytest

from kit.paths import MANIFESTS
from kit.reference import archive_of

REFERENCES = sorted(MANIFESTS.glob("*/*.json"))
_SHORT = 5
_BY_SIZE = sorted(REFERENCES, key=lambda path: archive_of(path).stat().st_size)
SMALLEST, _IN_TIME = _BY_SIZE[0], _BY_SIZE[:_SHORT]

EACH = [pytest.param(path, id=path.parent.name) for path in REFERENCES]
EACH_IN_TIME = [
    pytest.param(path, id=path.parent.name, marks=[] if path in _IN_TIME else [pytest.mark.full])
    for path in REFERENCES
]
"""All with --full, else the smallest: what unpacks a reference takes seconds for each megabyte."""
