"""What a run becomes for others' tools: valid for them, with no number but the manifest's."""

from __future__ import annotations

import csv
import io
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from arro3.core import DataType, Table
from arro3.io import read_parquet
import requests
from requests.adapters import HTTPAdapter
from requests_cache import CachedSession
from rocrate_validator import services
from rocrate_validator.models import Severity, ValidationSettings
from urllib3 import HTTPResponse
from virtual_run import exp1_run, write_run

from kit import store
from kit.errors import BadFile, StaleNumber, UnknownName
from kit.export import FORMATS, export
from kit.export_crate import METADATA, ro_crate
from kit.export_llmd import flags_of, llm_d_reports
from kit.export_mlperf import FIELDS, mlperf_system
from kit.manifest import Failure, Manifest, load_manifest, manifest_json
from kit.measure import ttft_s
from kit.paths import MANIFESTS

REFERENCES = sorted(MANIFESTS.glob("*/*.json"))
CONTEXTS = Path(__file__).resolve().parents[1] / "data" / "ro-crate-contexts.json"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    write_run(folder, exp1_run(pairs=1))
    return folder


def entities(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {each["@id"]: each for each in document["@graph"]}


def refs(value: Any) -> Iterator[str]:
    for each in value if isinstance(value, list) else [value]:
        if isinstance(each, dict):
            yield each["@id"]


class Published(HTTPAdapter):
    """Answers with the published contexts, so that nothing needs a network."""

    def send(self, request: requests.PreparedRequest, *args: Any, **more: Any) -> requests.Response:
        document = json.loads(CONTEXTS.read_text("utf-8"))[request.url]
        body = io.BytesIO(json.dumps(document).encode())
        kind = {"Content-Type": "application/ld+json"}
        return self.build_response(
            request, HTTPResponse(body, kind, status=200, preload_content=False)
        )


def failed_rules(crate: Path, cache: Path) -> list[str]:
    """Check a crate by roc-validator's rules, offline: its HTTP cache is filled beforehand."""
    with CachedSession(str(cache), backend="sqlite", expire_after=-1) as session:
        session.mount("https://", Published())
        for address in ("crate/1.1/context", "terms/workflow-run/context"):
            session.get(f"https://w3id.org/ro/{address}")
    result = services.validate(
        ValidationSettings(
            rocrate_uri=str(crate),
            profile_identifier="process-run-crate",
            requirement_severity=Severity.REQUIRED,
            offline=True,
            cache_path=cache,
        )
    )
    return [str(issue.message) for issue in result.get_issues()]


def test_the_crate_passes_the_validator_of_its_profile(run: Path, tmp_path: Path) -> None:
    export(run, "ro-crate")
    assert failed_rules(run, tmp_path / "cache") == []


def test_the_validator_does_find_what_the_profile_forbids(run: Path, tmp_path: Path) -> None:
    document = json.loads(export(run, "ro-crate")[0].read_text("utf-8"))
    for entity in document["@graph"]:
        entity.pop("instrument", None)
    store.write_json(run / METADATA, document)
    assert any("instrument" in each for each in failed_rules(run, tmp_path / "cache"))


def test_a_crate_refers_only_to_what_it_describes_and_names_nothing_twice(run: Path) -> None:
    document = json.loads(export(run, "ro-crate")[0].read_text("utf-8"))
    found = entities(document)
    assert Counter(each["@id"] for each in document["@graph"]).most_common(1)[0][1] == 1
    outside = {r for e in found.values() for v in e.values() for r in refs(v)} - found.keys()
    assert {address.partition("/ro/")[0] for address in outside} == {"https://w3id.org"}
    assert all(f.rpartition("#")[2] == f or f in found for f in outside if f.startswith("#"))


def test_a_crate_has_every_file_of_the_run_with_its_hash(run: Path) -> None:
    (run / "report.en.md").write_text("report\n", "utf-8")
    found = entities(json.loads(export(run, "ro-crate")[0].read_text("utf-8")))
    files = {e["name"]: e for e in found.values() if e["@type"] == "File"}
    on_disk = {p.relative_to(run).as_posix(): p for p in run.rglob("*") if p.is_file()}
    assert files.keys() == on_disk.keys() - {METADATA}
    for name, entity in files.items():
        assert entity["sha256"] == store.sha256_file(on_disk[name])
        assert entity["contentSize"] == str(on_disk[name].stat().st_size)
    assert set(refs(found["./"]["hasPart"])) == {e["@id"] for e in files.values()}


def test_each_replicate_is_an_action_of_kit_and_image(run: Path) -> None:
    manifest = load_manifest(run / "manifest.json")
    found = entities(ro_crate(manifest, {}))
    actions = list(refs(found["./"]["mentions"]))
    assert actions == ["#replicate-0", "#replicate-1", "#conclusion"]
    first = found["#replicate-0"]
    arm = manifest.plan.arm(manifest.replicates[0].role)
    assert list(refs(first["instrument"])) == ["#kit", f"#server-{arm.image.id}"]
    assert {"plan.json", f"#model-{manifest.plan.model.id}"} <= set(refs(first["object"]))
    assert f"{manifest.replicates[0].folder}/measure/samples.jsonl" in set(refs(first["result"]))
    assert first["actionStatus"].endswith("/CompletedActionStatus")
    image = found[first["containerImage"]["@id"]]
    assert image["sha256"] == manifest.images[0].identity.removeprefix("sha256:")


def test_a_run_that_failed_says_why_in_its_crate(run: Path) -> None:
    whole = load_manifest(run / "manifest.json")
    failure = Failure(error="ServerDied", exit_code=60, message="the server died")
    first = whole.replicates[0].model_copy(update={"status": "failed"})
    changes = {"status": "failed", "failure": failure, "verdict": None, "finished_utc": None}
    manifest = whole.model_copy(update={"replicates": (first,), **changes})
    found = entities(ro_crate(manifest, {}))
    for name in ("#replicate-0", "#conclusion"):
        assert found[name]["actionStatus"].endswith("/FailedActionStatus")
        assert found[name]["error"] == "the server died"
    broken = manifest.model_copy(update={"started_utc": "yesterday"})
    with pytest.raises(BadFile, match="`yesterday` is no time"):
        ro_crate(broken, {})


def numbers(value: Any) -> Iterator[float]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from numbers(each)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield value


@pytest.mark.parametrize("path", REFERENCES, ids=lambda p: p.parent.name)
def test_every_number_of_a_benchmark_report_is_one_of_the_manifest(path: Path) -> None:
    manifest = load_manifest(path)
    known = set(numbers(manifest.model_dump(mode="json")))
    reports = llm_d_reports(manifest)
    assert len(reports) == len(manifest.replicates)
    for report in reports.values():
        component = report["scenario"]["stack"][0]["standardized"]
        if manifest.plan.platform == "cuda":
            assert component.pop("replicas") == 1  # a replicate is one server
            component["accelerator"].pop("parallelism")  # from --tensor-parallel-size, else 1
        else:
            assert "accelerator" not in component
        assert set(numbers(report)) <= known


def test_a_benchmark_report_gives_means_only_where_there_are_means() -> None:
    path = next(p for p in REFERENCES if p.parent.name == "exp1_prefix_cache")
    manifest = load_manifest(path)
    reading = {r.name: r.value for r in manifest.replicates[0].readings}
    report = llm_d_reports(manifest)["00-pair0-baseline"]
    found = report["results"]["request_performance"]["aggregate"]
    assert found["throughput"]["output_token_rate"]["mean"] == reading["output_tok_per_s"]
    assert found["requests"]["output_length"]["mean"] == reading["output_tokens_min"]
    assert "input_length" not in found["requests"], "1033 to 1036 tokens: no mean is recorded"
    assert "latency" not in found, "this run has quantiles of TTFT, no mean"
    assert found["requests"] | {"total": 24, "failures": 0} == found["requests"]
    told = {r["name"] for r in report["results"]["observability"]["readings"]}
    assert told == reading.keys()
    load = report["scenario"]["load"]["standardized"]
    assert load["input_seq_len"] == {
        "distribution": "other", "value": 1036, "min": 1033, "max": 1036,
    }  # fmt: skip
    assert load["output_seq_len"] == {"distribution": "fixed", "value": 16}
    server = report["scenario"]["stack"][0]["standardized"]
    assert (server["kind"], server["tool_version"]) == ("inference_engine", "0.26.0")


def test_without_accelerator_the_server_is_a_generic_component(run: Path) -> None:
    reports = llm_d_reports(load_manifest(run / "manifest.json"))
    server = next(iter(reports.values()))["scenario"]["stack"][0]["standardized"]
    assert server["kind"] == "generic"
    assert "accelerator" not in server


def test_flags_are_read_with_their_values() -> None:
    words = ["serve", "/model", "--seed", "1", "--enforce-eager", "--port", "8000"]
    assert flags_of(words) == {"--seed": "1", "--enforce-eager": None, "--port": "8000"}
    assert flags_of([]) == {}


@pytest.mark.parametrize("path", REFERENCES, ids=lambda p: p.parent.name)
def test_a_system_description_has_every_field_and_no_number_of_its_own(path: Path) -> None:
    manifest = load_manifest(path)
    found = mlperf_system(manifest)
    assert tuple(found) == FIELDS
    on_gpu = manifest.plan.platform == "cuda"
    assert found["accelerator_model_name"] == ("NVIDIA H200" if on_gpu else "")
    assert found["framework"] == ("vLLM 0.26.0" if on_gpu else "vLLM 0.32.0+cpu")
    assert found["host_processor_core_count"] == ("16" if on_gpu else "2")
    assert found["submitter"] == found["division"] == found["cooling"] == ""
    text = manifest_json(manifest)
    for key, value in found.items():
        words = re.findall(r"[0-9][0-9.]*", value.replace("L3 ", ""))
        assert all(word in text for word in words), key


def test_a_machine_without_facts_gives_empty_fields(run: Path) -> None:
    manifest = load_manifest(run / "manifest.json").model_copy(update={"facts": ()})
    found = mlperf_system(manifest)
    empty = ("host_processor_model_name", "accelerators_per_node", "operating_system")
    assert {found[key] for key in empty} == {""}
    assert "None" not in "".join(found.values())


def test_samples_become_tables_with_the_raw_values(run: Path) -> None:
    texts = {path.name: io.StringIO(path.read_text("utf-8")) for path in export(run, "csv")}
    tables = {name: list(csv.DictReader(text)) for name, text in texts.items()}
    manifest = load_manifest(run / "manifest.json")
    raw = [
        (r.replicate, phase.name, json.loads(line))
        for r in manifest.replicates
        for phase in manifest.plan.phases
        for line in (run / r.folder / phase.name / "samples.jsonl").read_text("utf-8").splitlines()
    ]
    assert len(tables["samples.csv"]) == len(raw)
    for row, (replicate, phase, sample) in zip(tables["samples.csv"], raw, strict=True):
        assert (row["replicate"], row["phase"], row["id"]) == (str(replicate), phase, sample["id"])
        assert float(row["sent_s"]) == sample["sent_s"]
        assert float(row["ttft_s"]) == ttft_s(sample)
        assert json.loads(row["tags"]) == sample.get("tags", {})
        assert int(row["chunks"]) == len(sample["chunk_s"])
    received = [float(row["received_s"]) for row in tables["chunks.csv"]]
    assert received == [at for _, _, sample in raw for at in sample["chunk_s"]]
    values = [row["value"] for row in tables["measures.csv"]]
    readings = [x for r in manifest.replicates for x in r.readings]
    assert values == ["" if x.value is None else str(x.value) for x in readings]


def test_parquet_holds_the_values_of_the_csv_with_their_types(run: Path) -> None:
    typed = {path.stem: Table.from_arrow(read_parquet(path)) for path in export(run, "parquet")}
    plain = {
        path.stem: list(csv.reader(io.StringIO(path.read_text("utf-8"))))
        for path in export(run, "csv")
    }
    assert set(typed) == set(plain) == {"samples", "chunks", "measures"}
    for name, (head, *rows) in plain.items():
        table = typed[name]
        assert table.schema.names == head
        assert table.num_rows == len(rows)
        for place, column in enumerate(head):
            told = [cell.as_py() for cell in table.column(column)]
            for value, row in zip(told, rows, strict=True):
                text = row[place]
                assert (value is None) if text == "" else (type(value)(text) == value), column
    assert str(typed["samples"].schema.field("sent_s").type) == str(DataType.float64())
    assert str(typed["samples"].schema.field("prompt_tokens").type) == str(DataType.int64())


@pytest.mark.parametrize("name", FORMATS)
def test_an_export_changes_nothing_that_the_manifest_hashes(run: Path, name: str) -> None:
    before: Manifest = load_manifest(run / "manifest.json")
    assert export(run, name)
    assert store.hash_files(run) == before.files
    first = {p: p.read_bytes() for p in export(run, name)}
    assert first == {p: p.read_bytes() for p in export(run, name)}


def test_a_changed_raw_file_or_unknown_format_is_refused(run: Path) -> None:
    with pytest.raises(UnknownName, match="known: ro-crate, llm-d, mlperf, csv, parquet"):
        export(run, "xlsx")
    (run / "plan.json").write_text("{}", "utf-8")
    with pytest.raises(StaleNumber, match=r"plan\.json"):
        export(run, "llm-d")
