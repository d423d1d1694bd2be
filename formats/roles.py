"""The names dense tensors carry in a pack, and the shapes a `ModelSpec` gives them.

`layers.{i}` is a layer; where there is an encoder, its layers come first. Families map these roles to the source's
names; the runtime asks for them.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from moe_pack.formats.spec import GroupedQuerySpec, LatentSpec, ModelSpec, RelativeSpec


@dataclass(frozen=True, slots=True)
class DenseRole:
    """A dense tensor: its name in the pack, its shape (matrices `[out, in]`), and whether it may be quantized."""

    name: str
    shape: tuple[int, ...]
    quantizable: bool


def dense_roles(spec: ModelSpec) -> tuple[DenseRole, ...]:
    """Every dense tensor the model runs, in the order of `dense.safetensors`."""
    roles = [DenseRole("embed", (spec.vocab_size, spec.hidden_size), True)]
    moe_layers = frozenset(spec.moe_layers)
    num_encoding = 0 if spec.encoder is None else spec.encoder.num_layers
    for i in range(spec.num_hidden_layers):
        layer = _layer(spec, i in moe_layers, is_crossing=spec.encoder is not None and i >= num_encoding)
        roles += [DenseRole(f"layers.{i}.{role.name}", role.shape, role.quantizable) for role in layer]
    if isinstance(spec.attention, RelativeSpec):
        table = (spec.attention.num_buckets, spec.attention.num_heads)
        stacks = ("",) if spec.encoder is None else ("encoder_", "")
        roles += [DenseRole(f"{stack}position_bias", table, False) for stack in stacks]
    if spec.encoder is not None:
        roles += _norm(spec, "encoder_norm")
    roles += _norm(spec, "norm")
    if not spec.tied_head:
        roles.append(DenseRole("head", (spec.vocab_size, spec.hidden_size), True))
    if spec.head_bias:
        roles.append(DenseRole("head_bias", (spec.vocab_size,), False))
    return tuple(roles)


def _layer(spec: ModelSpec, has_experts: bool, is_crossing: bool) -> Iterator[DenseRole]:
    yield from _norm(spec, "attention_norm")
    if isinstance(spec.attention, GroupedQuerySpec):
        yield from _grouped_query(spec.attention, spec.hidden_size)
    elif isinstance(spec.attention, LatentSpec):
        yield from _latent(spec.attention, spec.hidden_size)
    else:
        yield from _relative(spec.attention, spec.hidden_size, "attention")
        if is_crossing:
            yield from _norm(spec, "cross_norm")
            yield from _relative(spec.attention, spec.hidden_size, "cross")
    yield from _norm(spec, "mlp_norm")
    if not has_experts:
        assert spec.dense_intermediate_size is not None, "a checked spec"
        yield from _mlp(spec, "mlp", spec.dense_intermediate_size)
        return
    yield DenseRole("router", (spec.router.num_experts, spec.hidden_size), False)
    if spec.router.logit_bias:
        yield DenseRole("router_logit_bias", (spec.router.num_experts,), False)
    if spec.router.bias:
        yield DenseRole("router_bias", (spec.router.num_experts,), False)
    if spec.shared_expert is not None:
        yield from _mlp(spec, "shared", spec.shared_expert.intermediate_size)
        if spec.shared_expert.gated:
            yield DenseRole("shared_router", (1, spec.hidden_size), False)


def _norm(spec: ModelSpec, name: str) -> list[DenseRole]:
    weight = DenseRole(name, (spec.hidden_size,), False)
    return [weight] if spec.norm.kind == "rms" else [weight, DenseRole(f"{name}_bias", (spec.hidden_size,), False)]


def _mlp(spec: ModelSpec, name: str, intermediate_size: int) -> Iterator[DenseRole]:
    d, f = spec.hidden_size, intermediate_size
    for matrix in spec.expert.matrices:
        yield DenseRole(f"{name}.{matrix}", (d, f) if matrix == "down" else (f, d), True)


def _grouped_query(attention: GroupedQuerySpec, d: int) -> Iterator[DenseRole]:
    q, kv = attention.num_heads * attention.head_dim, attention.num_kv_heads * attention.head_dim
    shapes = {"q": (q, d), "k": (kv, d), "v": (kv, d), "o": (d, q)}
    for name, shape in shapes.items():
        yield DenseRole(f"attention.{name}", shape, True)
        if name in attention.bias:
            yield DenseRole(f"attention.{name}_bias", shape[:1], False)
    if attention.sinks:
        yield DenseRole("attention.sinks", (attention.num_heads,), False)
    if attention.qk_norm != "none":
        whole = attention.qk_norm == "projection"
        yield DenseRole("attention.q_norm", (q if whole else attention.head_dim,), False)
        yield DenseRole("attention.k_norm", (kv if whole else attention.head_dim,), False)


def _latent(attention: LatentSpec, d: int) -> Iterator[DenseRole]:
    num_heads, rank, rope = attention.num_heads, attention.kv_lora_rank, attention.qk_rope_head_dim
    q = num_heads * (attention.qk_nope_head_dim + rope)
    if attention.q_lora_rank is None:
        yield DenseRole("attention.q", (q, d), True)
    else:
        yield DenseRole("attention.q_a", (attention.q_lora_rank, d), True)
        yield DenseRole("attention.q_a_norm", (attention.q_lora_rank,), False)
        yield DenseRole("attention.q_b", (q, attention.q_lora_rank), True)
    yield DenseRole("attention.kv_a", (rank + rope, d), True)
    yield DenseRole("attention.kv_a_norm", (rank,), False)
    yield DenseRole("attention.kv_b", (num_heads * (attention.qk_nope_head_dim + attention.v_head_dim), rank), True)
    yield DenseRole("attention.o", (d, num_heads * attention.v_head_dim), True)


def _relative(attention: RelativeSpec, d: int, name: str) -> Iterator[DenseRole]:
    width = attention.num_heads * attention.head_dim
    for projection in ("q", "k", "v"):
        yield DenseRole(f"{name}.{projection}", (width, d), True)
    yield DenseRole(f"{name}.o", (d, width), True)
