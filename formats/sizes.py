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
    """Values the key-value cache holds for each token of the context, all layers together.

    With an encoder, for each token of the text and each of the answer: decoder layers keep keys and values of both.
    """
    attention, num_layers = spec.attention, spec.num_hidden_layers
    if isinstance(attention, GroupedQuerySpec):
        return num_layers * 2 * attention.num_kv_heads * attention.head_dim
    if isinstance(attention, LatentSpec):
        return num_layers * (attention.kv_lora_rank + attention.qk_rope_head_dim)
    kept = num_layers if spec.encoder is None else 2 * (num_layers - spec.encoder.num_layers)
    return kept * 2 * attention.num_heads * attention.head_dim


def _dense_parameters(spec: ModelSpec) -> int:
    return sum(math.prod(role.shape) for role in dense_roles(spec))


def _expert_parameters(spec: ModelSpec) -> int:
    expert = spec.expert
    neuron = spec.hidden_size * len(expert.matrices) + len(expert.bias)
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
