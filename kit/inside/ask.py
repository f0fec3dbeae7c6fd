"""One request to a server's control plane: `python -m inside.ask METHOD URL`.

`--json BODY` sends a body, `--timeout S` limits it; `--wait-healthy URL --timeout S` asks until
the answer is 200. Prints one JSON line `{"status", "body", "error"}`; the body is parsed where
it is JSON. Exit status: 0 when there was an answer, whatever its status; 1 when there was none
(or it never got healthy); 2 for wrong arguments.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

import httpx

from .parse import short_error

DEFAULT_TIMEOUT_S = 10.0
_PROBE_TIMEOUT_S = 2.0
_PROBE_EVERY_S = 0.1


def ask(
    method: str, url: str, body: object = None, timeout_s: float = DEFAULT_TIMEOUT_S
) -> dict[str, Any]:
    """Send one request; never raises for what the network or the server did."""
    try:
        answer = httpx.request(method, url, json=body, timeout=timeout_s, trust_env=False)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return {"status": None, "body": None, "error": short_error(type(error).__name__, error)}
    try:
        content = answer.json()
    except (ValueError, RecursionError):
        content = answer.text
    return {"status": answer.status_code, "body": content, "error": None}


def wait_healthy(url: str, timeout_s: float) -> dict[str, Any]:
    """Ask until the answer is 200 or the time is over; the last answer says what was wrong."""
    began = time.monotonic()
    while True:
        left_s = began + timeout_s - time.monotonic()
        answer = ask("GET", url, timeout_s=max(0.05, min(_PROBE_TIMEOUT_S, left_s)))
        waited_s = time.monotonic() - began
        if answer["status"] == 200 or waited_s >= timeout_s:
            break
        time.sleep(min(_PROBE_EVERY_S, max(0.0, timeout_s - waited_s)))
    if answer["status"] != 200 and answer["error"] is None:
        answer["error"] = f"not_healthy: status {answer['status']} after {waited_s:.1f} s"
    return {**answer, "waited_s": round(waited_s, 3)}


def main(words: Sequence[str]) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(prog="inside.ask", description=__doc__)
    parser.add_argument("method", nargs="?")
    parser.add_argument("url", nargs="?")
    parser.add_argument("--json", type=json.loads, default=None, metavar="BODY")
    parser.add_argument("--timeout", type=float, default=DEFAULT_TIMEOUT_S, metavar="S")
    parser.add_argument("--wait-healthy", metavar="URL")
    chosen = parser.parse_args(words)
    if (chosen.wait_healthy is None) == (chosen.url is None):
        parser.error("either METHOD URL or --wait-healthy URL")
    if chosen.wait_healthy is not None:
        answer = wait_healthy(chosen.wait_healthy, chosen.timeout)
    else:
        answer = ask(chosen.method, chosen.url, chosen.json, chosen.timeout)
    print(json.dumps(answer, ensure_ascii=False))
    return 0 if answer["error"] is None else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
