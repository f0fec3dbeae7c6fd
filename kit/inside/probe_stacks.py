"""Hands over what the sampler wrote: `python -m inside.probe_stacks FOLDER MARK SECONDS`.

Waits until MARK (`ready.json`, `done.json`) is there, then prints it as JSON; with `done.json` also
`files`, each name's content as gzip in base64. `null` where it did not come in time.
"""

from __future__ import annotations

import base64
import gzip
import json
import sys
import time
from pathlib import Path
from typing import Any


def handed(folder: Path, mark: str, seconds: float) -> dict[str, Any] | None:
    """Return what the mark says, with the files; None where it is not there after `seconds`."""
    deadline = time.monotonic() + seconds
    while not (folder / mark).is_file():
        if time.monotonic() > deadline:
            return None
        time.sleep(0.1)
    told: dict[str, Any] = json.loads((folder / mark).read_text("utf-8"))
    if mark == "done.json":
        told["files"] = {
            path.name: base64.b64encode(gzip.compress(path.read_bytes(), mtime=0)).decode("ascii")
            for path in sorted(folder.glob("stacks-*.txt"))
        }
    return told


if __name__ == "__main__":
    print(json.dumps(handed(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]))))
