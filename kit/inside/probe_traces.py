"""Hands over what a profiler wrote: `python -m inside.probe_traces FOLDER`.

Prints one JSON object, file name to content in base64, of the traces in the folder; none where it
is not there. They are in a container's own memory, which the engine's copy does not reach.
"""

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path


def traces(folder: Path) -> dict[str, str]:
    """Return the folder's traces, by name."""
    return {
        path.name: base64.b64encode(path.read_bytes()).decode("ascii")
        for path in sorted(folder.glob("*.pt.trace.json.gz"))
    }


if __name__ == "__main__":
    print(json.dumps(traces(Path(sys.argv[1]))))
