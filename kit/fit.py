"""Arithmetic from a model's config.json: what fits, which splits divide it, what must move.

Pure. Dense decoders of the Llama and Qwen2 families, whose tensors it counts one by one; other
families are refused rather than guessed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kit.errors import BadFile
from kit.value import Value

ELEMENT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "fp8": 1}
LINKS = {
    "TCP 10 Gbit/s": 1.25e9,
    "TCP 100 Gbit/s": 12.5e9,
    "PCIe 4.0 x16": 31.5e9,
    "PCIe 5.0 x16": 63.0e9,
    "NVLink 4": 450.0e9,
    "NVLink 5": 900.0e9,
}
"""Nominal bytes a second in one direction. What a link really gives is a measurement."""

_FAMILIES = {"llama": False, "mistral": False, "qwen2": True}  # with bias on q, k and v


class Shape(Value):
    """What decides sizes, from config.json."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool
    qkv_bias: bool

    @property
    def parameters(self) -> int:
        """The number of weights."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = 2 * self.hidden * q + 2 * self.hidden * kv + self.qkv_bias * (q + 2 * kv)
        layer = attention + 3 * self.hidden * self.intermediate + 2 * self.hidden
        embeddings = self.vocab * self.hidden * (1 if self.tied else 2)
        return embeddings + self.layers * layer + self.hidden

    def kv_bytes(self, tokens: int, element_bytes: int) -> int:
        """Return the bytes of keys and values of that many tokens, all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * element_bytes * tokens


def shape_of(config: Mapping[str, Any], source: str) -> Shape:
    """Read a parsed config.json; raise `BadFile` for what is missing or of another family."""
    family = config.get("model_type")
    if family not in _FAMILIES:
        raise BadFile(
            f"{source}: model_type: {family!r} is not one of {', '.join(_FAMILIES)}",
            hint="its tensors are not known here, so nothing is computed",
        )
    keys = {
        "layers": "num_hidden_layers",
        "hidden": "hidden_size",
        "heads": "num_attention_heads",
        "intermediate": "intermediate_size",
        "vocab": "vocab_size",
    }
    try:
        found = {name: int(config[key]) for name, key in keys.items()}
    except KeyError as missing:
        raise BadFile(f"{source}: {missing.args[0]}: missing") from None
    return Shape(
        **found,
        kv_heads=int(config.get("num_key_value_heads") or found["heads"]),
        head_dim=int(config.get("head_dim") or found["hidden"] // found["heads"]),
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=bool(config.get("attention_bias", _FAMILIES[family])),
    )


def split_refusal(shape: Shape, ranks: int) -> str | None:
    """Return why the model cannot be split over that many ranks; None when it can."""
    if shape.heads % ranks:
        return f"{shape.heads} attention heads do not divide by {ranks}"
    if shape.kv_heads % ranks and ranks % shape.kv_heads:
        return f"{shape.kv_heads} KV heads and {ranks} ranks do not divide"
    return None


def kv_bytes_per_rank(shape: Shape, tokens: int, element_bytes: int, ranks: int) -> int:
    """Return a rank's share of the KV; heads are doubled where there are fewer than ranks."""
    heads = max(1, shape.kv_heads // ranks)
    return shape.kv_bytes(tokens, element_bytes) // shape.kv_heads * heads


def reduce_bytes_per_token(shape: Shape, element_bytes: int, ranks: int) -> float:
    """Return what each rank sends for a token: two ring all-reduces of the hidden state a layer."""
    return 2 * shape.layers * shape.hidden * element_bytes * 2 * (ranks - 1) / ranks


def transfer_s(size_bytes: float, bytes_per_s: float, *, latency_s: float = 0.0) -> float:
    """Return how long a transfer takes at least."""
    return latency_s + size_bytes / bytes_per_s


def break_even_tokens(
    kv_bytes_a_token: float, bytes_per_s: float, *, prefill_tok_per_s: float, latency_s: float
) -> float | None:
    """Return from how many tokens on moving KV takes less time than computing it again.

    None when it never does: a token's KV then takes longer to move than to compute.
    """
    gain_s = 1 / prefill_tok_per_s - kv_bytes_a_token / bytes_per_s
    return latency_s / gain_s if gain_s > 0 else None


class Split(Value):
    """One way to use the devices: `ranks` for each of `instances` servers.

    Bytes are of one device; `kv_tokens` is what fits beside the weights, of one server; all null
    where `refusal` says why the model cannot be split so.
    """

    ranks: int
    instances: int
    refusal: str | None = None
    weight_bytes: int | None = None
    kv_tokens: int | None = None
    reduce_bytes_per_token: float | None = None

    @property
    def fits(self) -> bool:
        return bool(self.kv_tokens)


def splits_of(
    shape: Shape, devices: int, *, memory_bytes: float, element_bytes: int, kv_element_bytes: int
) -> list[Split]:
    """Return every split that uses all devices, one rank a server first.

    `memory_bytes` is what a server may use of one device; activations are not in it, so what fits
    here is an upper bound.
    """
    found = []
    for ranks in (n for n in range(1, devices + 1) if devices % n == 0):
        refusal = split_refusal(shape, ranks)
        if refusal is not None:
            found.append(Split(ranks=ranks, instances=devices // ranks, refusal=refusal))
            continue
        weights = -(-shape.parameters * element_bytes // ranks)
        a_token = kv_bytes_per_rank(shape, 1, kv_element_bytes, ranks)
        found.append(
            Split(
                ranks=ranks,
                instances=devices // ranks,
                weight_bytes=weights,
                kv_tokens=max(0, int((memory_bytes - weights) // a_token)),
                reduce_bytes_per_token=reduce_bytes_per_token(shape, element_bytes, ranks),
            )
        )
    return found
