"""Runs `vllm bench serve` with the kit's requests: `python -m inside.vllm_bench SPEC.json`.

Its command line, its load and its clock are its own; only the data set is replaced, since none of
its kinds sends prompts of token ids as they are. The result goes to RESULT in the spec's `out`.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import sys
from pathlib import Path
from typing import Any

from .spec import Request, load_requests, load_spec

RESULT = "vllm-bench.json"


def words_of(path: Path) -> list[str]:
    """Return the tool's words for a window: those of the plan, and where server and result are."""
    spec = load_spec(path)
    model = json.loads(load_requests(spec.requests)[0].body)["model"]
    return [
        *spec.tool,
        *("--host", spec.host, "--port", str(spec.port), "--model", model),
        *("--skip-tokenizer-init", "--dataset-name", "custom", "--dataset-path", "requests"),
        *("--ready-check-timeout-sec", "0", "--disable-tqdm", "--save-result", "--save-detailed"),
        *("--result-dir", str(spec.out), "--result-filename", RESULT),
    ]


def in_order(requests: list[Request]) -> list[Request]:
    """Return requests in the order of sending, which is that of the result's lists."""
    return sorted(requests, key=lambda request: request.at_s or 0.0)


def main(path: Path) -> None:
    """Run the tool; it raises, and prints, what it will."""
    version = importlib.metadata.version("vllm")
    serve: Any = importlib.import_module("vllm.benchmarks.serve")
    request_type: Any = importlib.import_module("vllm.benchmarks.datasets").SampleRequest

    def ours(*_: Any) -> list[Any]:
        found = []
        for request in in_order(load_requests(load_spec(path).requests)):
            body = json.loads(request.body)
            prompt = body["prompt"]
            found.append(
                request_type(
                    prompt=prompt,
                    prompt_len=len(prompt) if isinstance(prompt, list) else 1,  # usage tells it
                    expected_output_len=body["max_tokens"],
                    request_id=request.id,
                )
            )
        return found

    serve.get_samples = ours
    parser = argparse.ArgumentParser("vllm bench serve")
    serve.add_cli_args(parser)
    args = parser.parse_args(words_of(path))
    print(f"vllm {version} bench serve {' '.join(words_of(path))}", flush=True)
    serve.main(args)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
