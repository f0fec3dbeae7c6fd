"""Which kit this is: version, commit and what is uncommitted."""

from __future__ import annotations

import hashlib

import kit
from kit import process
from kit.errors import ToolMissing
from kit.manifest import KitIdentity
from kit.paths import ROOT


def kit_identity() -> KitIdentity:
    """Return the kit's version and, in a git checkout, its commit and the hash of its changes.

    The hash covers the difference of tracked files and the names and bytes of new ones.
    """
    try:
        commit = _git("rev-parse", "HEAD")
    except ToolMissing:
        commit = None
    if commit is None:
        return KitIdentity(version=kit.__version__, commit=None, dirty=None, diff_sha256=None)
    changed = _git("status", "--porcelain", "--untracked-files=all") or ""
    digest = None
    if changed:
        content = (_git("diff", "HEAD", "--binary") or "").encode()
        for line in changed.splitlines():
            path = ROOT / line[3:].strip('"')
            if line.startswith("??") and path.is_file():
                content += line.encode() + path.read_bytes()
        digest = hashlib.sha256(content).hexdigest()
    return KitIdentity(
        version=kit.__version__,
        commit=commit.strip(),
        dirty=bool(changed),
        diff_sha256=digest,
    )


def _git(*words: str) -> str | None:
    answer = process.run(["git", "-C", ROOT, *words], timeout_s=30)
    return answer.stdout if answer.ok else None
