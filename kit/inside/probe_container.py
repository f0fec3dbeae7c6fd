"""Everything that the kit asks a container, in one visit: prints one JSON object."""

from __future__ import annotations

import json
import sys

from .probe_gpu import gpu_section
from .probe_limits import limits_section
from .probe_packages import packages_section
from .probe_vllm import vllm_section


def main() -> None:
    """Print `{"container", "packages", "vllm", "gpu"}`, each a mapping of fields."""
    sections = {
        "container": limits_section(),
        "packages": packages_section(),
        "vllm": vllm_section(),
        "gpu": gpu_section(),
    }
    json.dump(sections, sys.stdout)


if __name__ == "__main__":
    main()
