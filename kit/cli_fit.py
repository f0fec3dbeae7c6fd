"""`kit fit`: whether a model fits on some devices, how it may be split, and what must move."""

from __future__ import annotations

import math
from typing import Annotated, Any

import typer

from kit import console, fit
from kit.cli_images import Json
from kit.errors import NotFound, UnknownName, UsageError
from kit.fit import ELEMENT_BYTES, LINKS, Shape, Split
from kit.model import ModelRecord, find_model, model_path
from kit.value import load_json


def read_shape(record: ModelRecord) -> Shape:
    """Return a model's shape from its record or its folder; raise `NotFound` without either."""
    if record.config is not None:
        return fit.shape_of(record.config, f"docker/models.yaml: models.{record.id}.config")
    path = model_path(record) / "config.json"
    if not path.is_file():
        raise NotFound(
            f"the model {record.id} is not on this machine",
            hint=f"`nox -s models -- {record.id}` fetches or makes it",
        )
    return fit.shape_of(load_json(path), path.name)


def fit_command(
    name: Annotated[str, typer.Argument(metavar="MODEL", help="Model id; see `nox -s models`.")],
    devices: Annotated[int, typer.Argument(help="How many devices there are.")],
    memory_gib: Annotated[
        float, typer.Option(help="What a server may use of one device, in GiB.")
    ] = 12.0,
    dtype: Annotated[str, typer.Option(help="Type of the weights.")] = "bfloat16",
    kv_dtype: Annotated[str | None, typer.Option(help="Type of the KV; default: as dtype.")] = None,
    context: Annotated[int, typer.Option(help="Tokens of a prompt whose KV is moved.")] = 4096,
    prefill_tok_per_s: Annotated[
        float | None,
        typer.Option(
            help="Prompt tokens that a server computes in a second: when is moving faster?"
        ),
    ] = None,
    latency_ms: Annotated[
        float, typer.Option(help="What a transfer costs beside its bytes.")
    ] = 1.0,
    as_json: Json = False,
) -> None:
    """Say whether a model fits, which splits divide its heads, and what transfers take."""
    sizes = [_element_bytes(each) for each in (dtype, kv_dtype or dtype)]
    above_0 = (devices, memory_gib, context, 1 if prefill_tok_per_s is None else prefill_tok_per_s)
    if min(above_0) <= 0 or latency_ms < 0:
        raise UsageError("devices, memory, context and rate must be above 0", hint="see --help")
    shape = read_shape(find_model(name))
    splits = fit.splits_of(
        shape,
        devices,
        memory_bytes=memory_gib * 2**30,
        element_bytes=sizes[0],
        kv_element_bytes=sizes[1],
    )
    moved = shape.kv_bytes(context, sizes[1])
    pays_from = {
        link: fit.break_even_tokens(
            shape.kv_bytes(1, sizes[1]),
            speed,
            prefill_tok_per_s=prefill_tok_per_s,
            latency_s=latency_ms / 1e3,
        )
        for link, speed in LINKS.items()
        if prefill_tok_per_s is not None
    }
    if as_json:
        console.data(
            {
                "model": name,
                "parameters": shape.parameters,
                "splits": [each.model_dump(mode="json") for each in splits],
                "kv_bytes": moved,
                "kv_transfer_s": {link: fit.transfer_s(moved, s) for link, s in LINKS.items()},
                "transfer_pays_from_tokens": pays_from,
            }
        )
        return
    columns = ["tp", "servers", "weights/device", "KV tokens/server", "sent/token", "verdict"]
    console.table(f"{name} on {devices} device(s)", columns, [_row(each) for each in splits])
    title = f"KV of {context} tokens, {moved / 2**20:.1f} MiB; nominal links, so the least time"
    columns = ["link", "KV", *(f"reduce, tp {s.ranks}" for s in splits)]
    rows = [
        [link, f"{fit.transfer_s(moved, speed) * 1e3:.2f} ms", *(_reduce(s, speed) for s in splits)]
        for link, speed in LINKS.items()
    ]
    if pays_from:
        columns.append("moving is faster")
        for row in rows:
            row.append(_pays(pays_from[row[0]]))
    console.table(title, columns, rows)


def _pays(tokens: float | None) -> str:
    return "never" if tokens is None else f"from {math.ceil(tokens):,} tokens"


def _element_bytes(dtype: str) -> int:
    if dtype not in ELEMENT_BYTES:
        raise UnknownName(f"no type `{dtype}`", hint=f"known: {', '.join(ELEMENT_BYTES)}")
    return ELEMENT_BYTES[dtype]


def _row(split: Split) -> list[Any]:
    head = [str(split.ranks), str(split.instances)]
    if split.weight_bytes is None:
        return [*head, "", "", "", split.refusal]
    return [
        *head,
        f"{split.weight_bytes / 2**30:.2f} GiB",
        f"{split.kv_tokens:,}",
        f"{(split.reduce_bytes_per_token or 0) / 2**10:.1f} KiB",
        "fits" if split.fits else "does not fit",
    ]


def _reduce(split: Split, bytes_per_s: float) -> str:
    sent = split.reduce_bytes_per_token
    return "" if sent is None else f"{fit.transfer_s(sent, bytes_per_s) * 1e6:.2f} us/token"
