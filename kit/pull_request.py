"""A comparison of two versions as a block to paste into a pull request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kit.manifest import Manifest
from kit.report import command


def package_differences(manifest: Manifest) -> list[str]:
    """Return `name: old / new` for every package in which the arms' images differ."""
    old, new = (_packages(manifest, role) for role in ("baseline", "candidate"))
    return [
        f"{name}: {old.get(name, 'none')} / {new.get(name, 'none')}"
        for name in sorted({*old, *new})
        if old.get(name) != new.get(name)
    ]


def _packages(manifest: Manifest, role: str) -> Mapping[str, Any]:
    """Return the packages that the servers of an arm carry, by name."""
    for replicate in manifest.replicates:
        for fact in replicate.facts if replicate.role == role else ():
            is_list = (fact.group, fact.name) == ("packages", "packages")
            if is_list and fact.service != "client" and isinstance(fact.value, dict):
                return fact.value
    return {}


def pull_request_block(manifest: Manifest) -> str:
    """Return the block: effect with interval, replicates, image identities, one command."""
    plan, effect, verdict = manifest.plan, manifest.effect, manifest.verdict
    assert effect is not None
    assert verdict is not None
    old, new = plan.images
    lines = [f"### {plan.experiment}: {old} → {new}", ""]
    if effect.ratio is None:
        lines.append(f"`{effect.measure}`: no effect could be computed.")
    else:
        interval = (
            f", 95 % interval {effect.low:.3f} – {effect.high:.3f}"
            if effect.low is not None and effect.high is not None
            else ", no interval from one pair"
        )
        lines.append(f"`{effect.measure}`, new over old: **{effect.ratio:.3f}**{interval}.")
    change = " The effect points the other way." if verdict.reversed else ""
    lines += [
        f"{verdict.word}: {verdict.reason}.{change}",
        "",
        f"{len(effect.values)} pairs of freshly started servers, order A B B A, plan "
        f"`{manifest.plan_sha256[:16]}`, run `{manifest.run_id}`.",
        "",
        *(f"- `{i.id}`: identity `{i.identity}` ({i.state})" for i in manifest.images),
        "",
        "Packages that differ, old / new:",
        "",
        *(f"- {line}" for line in package_differences(manifest)),
        "",
        "```",
        command(manifest),
        "```",
        "",
    ]
    return "\n".join(lines)
