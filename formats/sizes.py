"""How large a model is, from its spec alone: parameters, those one token uses, and what its cache holds a token.

Also how sizes are written by people, and for them.
"""

import math
import re

from moe_pack.formats.roles import dense_roles
from moe_pack.formats.spec import GroupedQuerySpec, LatentSpec, ModelSpec

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)
_UNITS = ("", "K", "M", "G", "T")


def num_parameters(spec: ModelSpec) -> int:
    """All weights: dense ones (a tied head counted once) and every routed expert's."""
    return _dense_parameters(spec) + len(spec.moe_layers) * spec.router.num_experts * _expert_parameters(spec)


def num_active_parameters(spec: ModelSpec) -> int:
    """The weights that one token uses: all dense ones, embedding and head whole, and `k` experts a MoE layer."""
    return _dense_parameters(spec) + len(spec.moe_layers) * spec.router.num_experts_per_tok * _expert_parameters(spec)


def cached_values(spec: ModelSpec) -> int:
    """Values the key-value cache gets for each token, all layers together; those with a window keep only the last.

    With an encoder, for each token of the text and each of the answer: decoder layers keep keys and values of both.
    """
    if spec.encoder is not None:
        return 2 * (spec.num_hidden_layers - spec.encoder.num_layers) * _layer_values(spec)
    return spec.num_hidden_layers * _layer_values(spec)


def cache_values(spec: ModelSpec, context_tokens: int, chunk_tokens: int) -> int:
    """Values a key-value cache holds for so many tokens, of which at most `chunk_tokens` enter at once."""
    if spec.encoder is not None:
        return context_tokens * cached_values(spec)
    places = [cached_tokens(spec, layer, context_tokens, chunk_tokens) for layer in range(spec.num_hidden_layers)]
    return sum(places) * _layer_values(spec)


def cached_tokens(spec: ModelSpec, layer: int, context_tokens: int, chunk_tokens: int) -> int:
    """How many tokens a decoder layer's cache has places for: all, or what the first of a chunk sees and the chunk."""
    window = _window(spec, layer)
    return context_tokens if window is None else min(context_tokens, window - 1 + chunk_tokens)


def _window(spec: ModelSpec, layer: int) -> int | None:
    return spec.attention.window(layer) if isinstance(spec.attention, GroupedQuerySpec) else None


def _layer_values(spec: ModelSpec) -> int:
    attention = spec.attention
    if isinstance(attention, GroupedQuerySpec):
        return 2 * attention.num_kv_heads * attention.head_dim
    if isinstance(attention, LatentSpec):
        return attention.kv_lora_rank + attention.qk_rope_head_dim
    return 2 * attention.num_heads * attention.head_dim


def _dense_parameters(spec: ModelSpec) -> int:
    return sum(math.prod(role.shape) for role in dense_roles(spec))


def _expert_parameters(spec: ModelSpec) -> int:
    expert = spec.expert
    neuron = spec.hidden_size * len(expert.matrices) + len(expert.row_bias)
    return expert.intermediate_size * neuron + expert.extra_floats


def size_text(num_bytes: float) -> str:
    """Bytes as a person reads them: 1023 B, 4.2 KiB, 26.1 GiB."""
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} GiB"


def parse_size(text: str) -> int | None:
    """The bytes in a text as 11G, 1.5 GiB or 800m, units being powers of 1024; None if it is no size."""
    found = _SIZE.fullmatch(text.strip())
    return None if found is None else int(float(found[1]) * 1024 ** _UNITS.index(found[2].upper()))


def read_size(text: str) -> int:
    """Returns the bytes that `11G`, `512M`, `1.5g`, `64K` or `1048576` stand for: G is 2^30.

    Raises:  ValueError if it is none of these.
    """
    num_bytes = parse_size(text)
    if not num_bytes:
        raise ValueError(f"found {text!r}, expected a size such as 11G, 1.5G or 512M")
    return num_bytes
