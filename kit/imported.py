"""Results of others' load generators as raw data of the kit: its samples, measures and guards.

Such a run has no plan, no fresh containers and no second arm, so it has no verdict: its state is
`imported`, its environment what the tool declared. The tool's own file is kept beside the samples.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from kit import store
from kit.errors import StaleNumber, UsageError
from kit.explain import guard_names
from kit.foreign import Clock, Tool, beside, read_foreign
from kit.guard import GuardResult, check_imported
from kit.inside.writer import encode_line
from kit.manifest import RawFile, now_utc
from kit.measure import (
    Measure,
    Raw,
    Reading,
    Window,
    mean_of,
    output_throughput,
    pooled_gap_quantile,
    quantile_of,
    request_count,
    tpot_s,
    ttft_s,
)
from kit.value import Value, load_json, parse_value

RECORD = "imported.json"
_WINDOW = "measure"


class Imported(Value):
    """The record: what the file gave, what could be judged of it, and what could not.

    `not_judged` are the guards that need what only a run of the kit has. `files` as in a manifest.
    """

    schema_version: Literal["1.0"] = "1.0"
    state: Literal["imported"] = "imported"
    environment: Literal["declared"] = "declared"
    tool: Tool
    tool_version: str | None
    imported_utc: str
    clock: Clock
    per_token: bool
    declared: dict[str, str]
    readings: tuple[Reading, ...]
    guards: tuple[GuardResult, ...]
    not_judged: tuple[str, ...]
    files: dict[str, RawFile]

    @property
    def unknown(self) -> list[str]:
        """What nobody knows of it, by the names of the report's words."""
        of_tool = {"tokens": not self.per_token, "asked": "lost_samples" in self.not_judged}
        always = ["environment", "plan", "lag", "clock"]
        return [*always, *(name for name, lacks in of_tool.items() if lacks)]


def load_imported(folder: Path) -> Imported:
    """Read the record of an imported result; raise `StaleNumber` where a file is not as it says."""
    record = parse_value(Imported, load_json(folder / RECORD), RECORD, strict=True)
    if wrong := store.changed_files(folder, record.files):
        raise StaleNumber(f"a raw file is not as {RECORD} says: {wrong[0]}")
    return record


def measures_of(*, per_token: bool) -> Sequence[Measure]:
    """Return what can be measured; gaps between tokens only where the tool tells single tokens."""
    measures = [
        Measure("requests", "1", "requests answered", request_count()),
        Measure("ttft_p50_s", "s", "TTFT, median", quantile_of(ttft_s, 0.50)),
        Measure("ttft_p99_s", "s", "TTFT, p99", quantile_of(ttft_s, 0.99)),
        Measure("tpot_mean_s", "s", "time per output token, mean", mean_of(tpot_s)),
        Measure("output_tok_per_s", "tok/s", "output throughput", output_throughput()),
    ]
    gaps = [
        Measure("itl_p50_s", "s", "gap between tokens, median", pooled_gap_quantile(0.50)),
        Measure("itl_p99_s", "s", "gap between tokens, p99", pooled_gap_quantile(0.99)),
    ]
    return [*measures, *(gaps if per_token else ())]


def import_result(path: Path, out: Path) -> tuple[Imported, Path]:
    """Lay a tool's result out as a folder below `out`; return its record and the folder.

    Raises `BadFile` for a file that is no result of single requests, `UsageError` where the folder
    is there already.
    """
    found = read_foreign(path)
    stamp = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{store.sha256_file(path)[:6]}"
    folder = out / "imported" / found.tool / stamp
    if folder.exists():
        raise UsageError(f"{folder} is there already", hint="this file was imported just now")
    store.make_folder(folder / "source")
    for one in (path, *beside(path)):
        shutil.copyfile(one, folder / "source" / one.name)
    lines = b"".join(encode_line(dict(sample)) for sample in found.samples)
    store.write_bytes(folder / _WINDOW / "samples.jsonl", lines)
    window = Window(folder=_WINDOW, samples=found.samples, scrapes=(), load={})
    raw = Raw(windows={_WINDOW: window})
    guards = tuple(check_imported(window, found.asked))
    record = Imported(
        tool=found.tool,
        tool_version=found.version,
        imported_utc=now_utc(),
        clock=found.clock,
        per_token=found.per_token,
        declared=dict(found.declared),
        readings=tuple(measure.read(raw) for measure in measures_of(per_token=found.per_token)),
        guards=guards,
        not_judged=tuple(n for n in guard_names() if n not in {g.name for g in guards}),
        files=store.hash_files(folder),
    )
    store.write_json(folder / RECORD, record.model_dump(mode="json"))
    return record, folder
