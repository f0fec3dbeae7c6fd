"""doctor on this machine, asked for an engine that is not there: it answers and starts nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from kit.paths import ROOT


def test_the_command_answers_where_no_engine_does(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kit", "doctor", "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "DOCKER_HOST": "unix:///no.sock"},
        timeout=200,
        check=False,
    )
    told = json.loads(done.stdout)
    assert done.returncode == told["exit_code"] == 23
    assert told["machine"][0]["what"] == "engine"
    assert told["machine"][0]["state"] == "missing"
    assert {row["state"] for row in told["experiments"]} == {"missing"}
    assert list(tmp_path.iterdir()) == []
