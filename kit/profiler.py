"""Runs a phase under the engines' own profilers and keeps the trace of every rank. Effects only."""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from kit.errors import ProbeFailed
from kit.fact import Place
from kit.inbox import ClientBox
from kit.store import write_bytes
from kit.topology import PORT
from kit.trace import FOLDER, rank_of, trace_file


@contextlib.contextmanager
def profiled(
    box: ClientBox, engines: Mapping[str, Place], folder: Path, *, timeout_s: float
) -> Iterator[None]:
    """Let the engines, by their services, trace what is done in the block; keep it in `folder`.

    Raises `ProbeFailed` when one of them cannot, or leaves no trace.
    """
    for service in engines:
        _tell(box, service, "start_profile", timeout_s)
    yield
    for service in engines:  # which writes the traces before it answers
        _tell(box, service, "stop_profile", timeout_s)
    for service, place in engines.items():
        keep_traces(place, service, folder)


def _tell(box: ClientBox, service: str, word: str, timeout_s: float) -> None:
    answer = box.ask("POST", f"http://{service}:{PORT}/{word}", timeout_s=timeout_s)
    if answer.get("status") != 200:
        raise ProbeFailed(
            f"`{service}` answered {answer.get('status')} to /{word}",
            hint="its log says why; a server without --profiler-config has no such path",
        )


def keep_traces(place: Place, service: str, folder: Path) -> None:
    """Copy an engine's traces, one a rank, out of its container."""
    found = place.inside("probe_traces", FOLDER)
    names = {rank_of(name): name for name in found}
    if not names or None in names or len(names) < len(found):
        raise ProbeFailed(
            f"`{service}` left no trace for each rank: {', '.join(sorted(found)) or 'none at all'}",
            hint="its log says why the profiler wrote nothing",
        )
    for rank, name in names.items():
        write_bytes(folder / trace_file(service, int(rank or 0)), base64.b64decode(found[name]))
