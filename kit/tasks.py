"""The kit's own tasks for lm-eval (`docker/tasks`), and the words that lm-eval is run with.

An item file is JSON lines, a task file lm-eval's YAML; nothing of either is fetched.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence

from kit.errors import EnvironmentChanged
from kit.experiment import Evaluation
from kit.paths import DOCKER

TASKS = DOCKER / "tasks"
SEEN_AS, RESULTS, MODEL = "/tasks", "/results", "/model"
"""Where the evaluation's container has tasks, its output and the model's tokenizer."""
MOST_TOKENS = 2048  # of one request, as the servers of the experiments are set


def task_files(tasks: Sequence[str]) -> dict[str, str]:
    """Return the sha256 of each task's two files, by file name."""
    names = sorted(f"{task}.{suffix}" for task in tasks for suffix in ("jsonl", "yaml"))
    return {name: hashlib.sha256((TASKS / name).read_bytes()).hexdigest() for name in names}


def check_tasks(tasks: Sequence[str], files: Mapping[str, str]) -> None:
    """Raise `EnvironmentChanged` unless this kit's task files are those that a plan names."""
    try:
        here = task_files(tasks)
    except FileNotFoundError as error:
        here = {str(error.filename): ""}
    for name, sha256 in files.items():
        if here.get(name) != sha256:
            raise EnvironmentChanged(
                f"docker/tasks/{name} is not the file that the plan names",
                hint="check out the kit's commit that the manifest names",
            )


def evaluation_words(asked: Evaluation, *, model: str, url: str, seed: int) -> tuple[str, ...]:
    """Return lm-eval's arguments: one request at a time, the model's own tokenizer, every answer.

    The tokenizer is needed to tell where a choice begins; prompts are sent as token ids.
    """
    api = {
        "model": model,
        "base_url": url,
        "tokenizer": MODEL,
        "tokenizer_backend": "huggingface",
        "tokenized_requests": True,
        "num_concurrent": 1,
        "max_retries": 1,
        "max_length": MOST_TOKENS,
        "seed": seed,
    }
    return (
        *("run", "--model", "local-completions"),
        *("--model_args", json.dumps(api, separators=(",", ":"), sort_keys=True)),
        *("--tasks", ",".join(asked.tasks), "--include_path", SEEN_AS),
        *("--limit", str(asked.limit), "--batch_size", "1", "--seed", str(seed)),
        *("--output_path", RESULTS, "--log_samples"),
    )
