"""What a run itself has to say beside its numbers: cautions that no analysis of its files gives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kit.manifest import Cost, Manifest, Replicate
from kit.notice import Notice, notice
from kit.verdict import MIN_PAIRS, Verdict

COSTLY = 1.10


def cautions(manifest: Manifest, verdict: Verdict) -> Iterator[Notice]:
    """Yield the cautions about how a run came about, apart from the machine it ran on."""
    plan = manifest.plan
    if plan.engine == "stub":
        yield notice("stub_engine", "")
    if plan.pairs < MIN_PAIRS and verdict.word != "unsupported":
        yield notice("few_pairs", str(plan.pairs))
    for image in manifest.images:
        if image.state != "verified":
            code = "commit_declared" if image.lock_sha256 else "image_declared"
            yield notice(code, image.id)
    if manifest.resumed:
        yield notice("resumed", ", ".join(str(r.after) for r in manifest.resumed))
    if manifest.kit.dirty:
        yield notice("dirty_kit", "")
    cost = cost_of(manifest.replicates)
    if cost and cost.ratio > COSTLY:
        yield notice("kit_cost", f"{cost.ratio:.2f}")


def cost_of(replicates: Sequence[Replicate]) -> Cost | None:
    """Compare the time that replicates took with the time that containers and load account for."""
    known = [(r.wall_s, r.accounted_s) for r in replicates if r.accounted_s]
    if not known:
        return None
    wall = sum(w for w, _ in known)
    accounted = sum(a for _, a in known if a)
    return Cost(wall_s=wall, accounted_s=accounted, ratio=wall / accounted)
