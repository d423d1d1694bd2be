"""The names dense tensors carry in a pack, and the shapes a `ModelSpec` gives them.

`layers.{i}` is a decoder layer. Families map these roles to the source's names; the runtime asks for them.
"""

from dataclasses import dataclass

from moe_pack.formats.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class DenseRole:
    """A dense tensor: its name in the pack, its shape (matrices `[out, in]`), and whether it may be quantized."""

    name: str
    shape: tuple[int, ...]
    quantizable: bool


def dense_roles(spec: ModelSpec) -> tuple[DenseRole, ...]:
    """Every dense tensor the model runs, in the order of `dense.safetensors`."""
    d, attention = spec.hidden_size, spec.attention
    q, kv = attention.num_heads * attention.head_dim, attention.num_kv_heads * attention.head_dim
    roles = [DenseRole("embed", (spec.vocab_size, d), True)]
    for i in range(spec.num_hidden_layers):
        roles += [
            DenseRole(f"layers.{i}.attention_norm", (d,), False),
            DenseRole(f"layers.{i}.attention.q", (q, d), True),
            DenseRole(f"layers.{i}.attention.k", (kv, d), True),
            DenseRole(f"layers.{i}.attention.v", (kv, d), True),
            DenseRole(f"layers.{i}.attention.o", (d, q), True),
            DenseRole(f"layers.{i}.experts_norm", (d,), False),
            DenseRole(f"layers.{i}.router", (spec.router.num_experts, d), False),
        ]
    roles.append(DenseRole("norm", (d,), False))
    if not spec.tied_head:
        roles.append(DenseRole("head", (spec.vocab_size, d), True))
    return tuple(roles)
