"""The kinds of attention, and what follows from their sizes: their tensors, what they cache, whether they can run.

docs/model.md says what each kind computes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from moe_pack.formats.base.json_files import added
from moe_pack.formats.parts import positions, roles

Projection = Literal["q", "k", "v", "o"]
PROJECTIONS: tuple[Projection, ...] = ("q", "k", "v", "o")


@dataclass(frozen=True, slots=True)
class TemperatureSpec:
    """Queries at position p are multiplied by `1 + slope * ln(1 + floor(p / length))`.

    `is_from_one`: with p + 1 in place of p. `is_unrotated`: only in layers that do not rotate. `is_power`: by
    `(1 + p / length) ** slope` instead.
    Source: 2501.19399; transformers, models/llama4 (from one), models/mistral4 and models/beam (a power).
    """

    slope: float
    length: int
    is_from_one: bool
    is_unrotated: bool
    is_power: bool = added(False)


@dataclass(frozen=True, slots=True)
class OutputGateSpec:
    """Gates of what heads give, from a matrix of their own: `function` of it times the layer's input.

    `each`: whether each head has one gate, or each value of it. `bias`: a number for each head is added to its gates
    first.
    Source: transformers, models/afmoe (values, sigmoid), models/laguna (softplus), models/step3p7 (heads), models/beam
    (bias).
    """

    each: Literal["head", "value"]
    function: Literal["sigmoid", "softplus"]
    bias: bool = added(False)

    def width(self, num_heads: int, head_dim: int) -> int:
        """Returns the number of gates for heads that give `head_dim` values."""
        return num_heads if self.each == "head" else num_heads * head_dim


@dataclass(frozen=True, slots=True)
class BlockIndexerSpec:
    """The choice of `num_blocks` blocks of `block_tokens` positions that a query attends to, by small heads.

    There are `num_heads` queries, and one key a position, of `head_dim`, normed (rms, the model's eps) and rotated as
    the layer's own. Keys are in the cache. docs/model.md says how blocks score:
    `pooled`: a block has one key, the mean of its positions'; the scores of all heads are added, and complete blocks
    compete. The block that a query is in the middle of is seen in addition.
    `largest`: a block scores as the best of its positions; each head chooses for its share of the layer's keys and
    values. The last `local_blocks` blocks, a query's own first, are always among the chosen.
    Source: transformers, models/qwen4_exp, Qwen4ExpTextQSAIndexer; models/minimax_m3_vl, MiniMaxM3VLIndexer.
    """

    kind: Literal["pooled", "largest"]
    num_heads: int
    head_dim: int
    block_tokens: int
    num_blocks: int
    local_blocks: int = added(0)


@dataclass(frozen=True, slots=True)
class GroupedQuerySpec:
    """Grouped-query attention: `num_heads` queries share `num_kv_heads` keys and values of `head_dim`.

    A position sees at most `sliding_window` positions, itself included; null means all before it. `scale` multiplies
    query times key. `bias` names the projections that have one. `qk_norm`: queries and keys are normed (rms, the
    model's eps) each head on its own, or the whole projection at once, before they are rotated; `rotated_head`: each
    head after it; `unit`: each head, without a weight, in layers that rotate.
    `windowed_layers`: the layers, rising, to which the window applies; null means all. `sinks`: each query head has a
    logit of its own in its softmax, to which no value belongs. `rotated_layers`: the layers, rising, that rotate
    queries and keys; null means all. `chunked`: the window does not slide: a position sees those before it back to the
    last multiple of `sliding_window`. `gated`: the projection of queries has a gate after each head's query; the head's
    output is multiplied by its sigmoid. `gate`: other gates of outputs; null if there are none.
    `keys_as_values`: there is no projection of values; they are that of keys, before their norm and rotation.
    `v_norm`: each head's values are normed (rms, the model's eps), without a weight. `value_head_dim`: of values, if
    not `head_dim`. `value_scale` multiplies values last. `indexer`: null if a query attends to all positions before it.
    `clip`: every value of the three projections, after a norm of the whole one, is at least `-clip` and at most `clip`;
    null: any.
    Source of the sinks: gpt-oss model card (2508.10925), section 2.3; transformers, models/gpt_oss. Of the gate:
    transformers, models/qwen3_next; of values from keys, and their norm: models/gemma4, Gemma4TextAttention.
    """

    kind: Literal["grouped_query"]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    sliding_window: int | None
    scale: float
    bias: tuple[Projection, ...]
    qk_norm: Literal["none", "head", "projection", "rotated_head", "unit"]
    windowed_layers: tuple[int, ...] | None = added(None)
    sinks: bool = added(False)
    rotated_layers: tuple[int, ...] | None = added(None)
    chunked: bool = added(False)
    temperature: TemperatureSpec | None = added(None)  # noqa: RUF009  # a field, whose default is None
    gated: bool = added(False)
    gate: OutputGateSpec | None = added(None)  # noqa: RUF009  # likewise
    keys_as_values: bool = added(False)
    v_norm: bool = added(False)
    value_head_dim: int | None = added(None)
    value_scale: float = added(1.0)
    indexer: BlockIndexerSpec | None = added(None)  # noqa: RUF009  # likewise
    clip: float | None = added(None)

    @property
    def value_dim(self) -> int:
        """The values of a head's value, and of its output."""
        return self.head_dim if self.value_head_dim is None else self.value_head_dim

    @property
    def cached_width(self) -> int:
        """The values of a position in the cache: keys and values, and the indexer's key."""
        indexed = 0 if self.indexer is None else self.indexer.head_dim
        return self.num_kv_heads * (self.head_dim + self.value_dim) + indexed

    def window(self, layer: int) -> int | None:
        """Returns how many positions a decoder layer sees at most, the current one included; None for all."""
        return self.sliding_window if self.windowed_layers is None or layer in self.windowed_layers else None

    def rotates(self, layer: int) -> bool:
        """Returns whether a decoder layer rotates queries and keys."""
        return self.rotated_layers is None or layer in self.rotated_layers


@dataclass(frozen=True, slots=True)
class IndexerSpec:
    """The choice of `top_k` positions that a query attends to, by `num_heads` small heads of `head_dim`.

    Each position has one key for all of them, in the cache after the latent's. docs/model.md says how.
    `interleaved`: rotated in neighbours, not in halves. `shared`: the layer has no indexer of its own; its queries
    attend to the positions that were chosen in the last layer before it that has one. `rotates_last`: the last values
    of a head are rotated, not the first. `norm_eps`: of the layer norm of keys.
    Source: DeepSeek-V3.2 (2512.02556), section 2.1; transformers, models/deepseek_v32, DeepseekV32Indexer. Of shared
    choices: transformers, models/glm_moe_dsa; of the last values: models/hy_v4, HYV4Indexer.
    """

    num_heads: int
    head_dim: int
    top_k: int
    interleaved: bool = added(False)
    shared: bool = added(False)
    rotates_last: bool = added(False)
    norm_eps: float = added(1e-6)


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """Multi-head latent attention: keys and values of all heads come from one latent vector a position.

    The cache has this latent (`kv_lora_rank` values, normed) and one rotated key (`qk_rope_head_dim`) for all heads.
    Queries come from a latent of their own, of `q_lora_rank`, unless that is null. The norms of both latents are rms
    with `lora_norm_eps`; `q_latent_scale` and `kv_latent_scale` multiply them then. `indexer`: null if a query attends
    to all positions before it. `gate`: gates of outputs; null if there are none. `sinks`: as of `GroupedQuerySpec`.
    `gated`: the projection of queries reads their latent normed, and then as it was before; after each head's query it
    has a gate for each value of the head's output, which is multiplied by the gates' sigmoids.
    Source: DeepSeek-V2 (2405.04434), section 2.1. Of the sinks: transformers, models/hy_v4, HYV4Attention; of `gated`:
    models/axk2, AXK2Attention.
    """

    kind: Literal["latent"]
    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    scale: float
    lora_norm_eps: float
    temperature: TemperatureSpec | None = added(None)  # noqa: RUF009  # a field, whose default is None
    indexer: IndexerSpec | None = added(None)  # noqa: RUF009  # likewise
    q_latent_scale: float = added(1.0)
    kv_latent_scale: float = added(1.0)
    gate: OutputGateSpec | None = added(None)  # noqa: RUF009
    sinks: bool = added(False)
    gated: bool = added(False)

    @property
    def cached_width(self) -> int:
        """The values of a position in the cache: the latent, the rotated key, and the indexer's key."""
        indexed = 0 if self.own_indexer is None else self.own_indexer.head_dim
        return self.kv_lora_rank + self.qk_rope_head_dim + indexed

    @property
    def own_indexer(self) -> IndexerSpec | None:
        """The indexer that a layer runs; None if it has none, or shares the choice of an earlier layer."""
        return None if self.indexer is None or self.indexer.shared else self.indexer


@dataclass(frozen=True, slots=True)
class RelativeSpec:
    """Attention of `num_heads` heads of `head_dim`, each with keys of its own, and no rotation.

    A learned bias is added to `scale` times query times key. Each head has `num_buckets` of them; the distance from
    query to key selects one. Buckets grow with the distance; all distances beyond `max_distance` share one. The layers
    of a stack share one table. Attention of a decoder layer to the encoder's output has no such bias.
    Source: T5 (1910.10683), section 2.1; transformers, models/switch_transformers, _relative_position_bucket.
    """

    kind: Literal["relative"]
    num_heads: int
    head_dim: int
    num_buckets: int
    max_distance: int
    scale: float


@dataclass(frozen=True, slots=True)
class EntryIndexerSpec:
    """The choice of `top_k` compressed entries that a query attends to, by `num_heads` small heads of `head_dim`.

    Heads have one key an entry, compressed in the same way as the entry from projections of the indexer's own.
    Source: transformers, models/deepseek_v4, DeepseekV4Indexer.
    """

    num_heads: int
    head_dim: int
    top_k: int


@dataclass(frozen=True, slots=True)
class CompressionSpec:
    """Entries, one for each `window_tokens` positions, that stand for all positions of a sequence.

    An entry is an average of its window's projections, weighted for each value by a softmax over positions, normed
    (rms, the model's eps), and rotated as at the window's first position. A query sees those of windows that end at
    its position or before. `overlap`: an entry also averages a second projection of the window before. `indexer`: null
    if a query attends to all entries that it sees.
    Source: transformers, models/deepseek_v4, DeepseekV4HCACompressor and DeepseekV4CSACompressor (overlap, indexer).
    """

    window_tokens: int
    overlap: bool
    indexer: EntryIndexerSpec | None

    @property
    def earlier_tokens(self) -> int:
        """The most tokens before a new one whose projections the new one's entry averages, or those after it do."""
        return self.window_tokens * (2 if self.overlap else 1) - 1

    def dims(self, head_dim: int) -> tuple[int, ...]:
        """Returns the values of an entry: those of its key, and of the indexer's."""
        return (head_dim,) if self.indexer is None else (head_dim, self.indexer.head_dim)

    def raw_width(self, head_dim: int) -> int:
        """Returns the values of a position from which entries follow: projections and the logits of their weights."""
        return 2 * (2 if self.overlap else 1) * sum(self.dims(head_dim))


@dataclass(frozen=True, slots=True)
class CompressedSpec:
    """Attention to a window of positions, and to compressed entries for all of a sequence.

    All heads share one key a position (or entry) of `head_dim`, which is also its value; it is normed (rms, the model's
    eps) with a weight, and then rotated. Queries come from a normed latent of `q_lora_rank`; each head's is normed
    without a weight. The last `rotary_dim` values of a head are rotated, and what heads give is rotated back by the
    query's angles. Each head has a sink, a logit in its softmax to which no value belongs. A position sees at most
    `sliding_window` positions, itself included. `scale` multiplies query times key.
    Outputs of heads go through two matrices, of which the first multiplies each of `num_groups` groups of heads alone,
    to `o_lora_rank` values a group. `compression`: null if a query attends to its window alone.
    Source: transformers, models/deepseek_v4, DeepseekV4Attention.
    """

    kind: Literal["compressed"]
    num_heads: int
    head_dim: int
    q_lora_rank: int
    sliding_window: int
    scale: float
    num_groups: int
    o_lora_rank: int
    compression: CompressionSpec | None

    @property
    def group_width(self) -> int:
        """The values of a group of heads."""
        return self.num_heads * self.head_dim // self.num_groups

    @property
    def cached_width(self) -> int:
        """The values that a position adds to the cache: its key, and its share of an entry, rounded up.

        What entries follow from is dropped when they are made.
        """
        if (compression := self.compression) is None:
            return self.head_dim
        return self.head_dim + -(-sum(compression.dims(self.head_dim)) // compression.window_tokens)

    def cache_values(self, places: int, context_tokens: int, chunk_tokens: int) -> int:
        """Returns the values of a layer's cache, with places for so many keys."""
        if (compression := self.compression) is None:
            return places * self.head_dim
        raw = raw_places(compression, context_tokens, chunk_tokens) * compression.raw_width(self.head_dim)
        entries = context_tokens // compression.window_tokens * sum(compression.dims(self.head_dim))
        return places * self.head_dim + raw + entries


def raw_places(compression: CompressionSpec, context_tokens: int, chunk_tokens: int) -> int:
    """Returns for how many positions a layer caches what entries follow from: the chunk, and what it needs before."""
    return min(context_tokens, compression.earlier_tokens + chunk_tokens)


AttentionSpec = GroupedQuerySpec | LatentSpec | RelativeSpec | CompressedSpec


@dataclass(frozen=True, slots=True)
class OtherAttentionSpec:
    """The attention of some `layers`, rising, that differs from that of all other layers, and its rotary positions."""

    layers: tuple[int, ...]
    attention: GroupedQuerySpec | LatentSpec | CompressedSpec
    rope: positions.RopeSpec | None


def others_fault(
    others: tuple[OtherAttentionSpec, ...], attention: AttentionSpec, attending: list[int], num_layers: int
) -> str | None:
    """Returns why layers cannot have attention of their own, or None.

    Args:    attention: that of the other layers.   attending: the layers with attention, of `num_layers`.
    """
    listed = [layer for other in others for layer in other.layers]
    if len(set(listed)) < len(listed) or (listed and len(listed) >= len(attending)):
        return "others must list each layer once at most, and not all layers"
    if others and isinstance(attention, RelativeSpec):
        return f"{attention.kind} attention cannot have others"
    for other in others:
        if not other.layers or not roles.are_layers(other.layers, num_layers) or set(other.layers) - set(attending):
            return "others must list decoder layers with attention, at least one each, in rising order"
        sizes = attention_sizes(other.attention) | {"rotary_dim": other.rope.rotary_dim if other.rope else None}
        for name, size in sizes.items():
            if size is not None and not 0 < size < 2**31:
                return f"{name} of others is {size}, expected 1 to 2^31 - 1"
        fault = attention_fault(other.attention, other.rope, num_layers) or rope_fault(other.rope, other.attention)
        if fault is not None:
            return fault
    return None


def cached_width(attention: AttentionSpec) -> int:
    """Returns the values that a token adds to the cache of a layer."""
    if not isinstance(attention, RelativeSpec):
        return attention.cached_width
    return 2 * attention.num_heads * attention.head_dim


def grouped_query_roles(attention: GroupedQuerySpec, d: int, offset: float) -> Iterator[roles.DenseRole]:
    """Yields the dense tensors of a layer's attention, for a hidden size d; `offset`: of the norms of heads."""
    q, kv = attention.num_heads * attention.head_dim, attention.num_kv_heads * attention.head_dim
    v, mixed = attention.num_kv_heads * attention.value_dim, attention.num_heads * attention.value_dim
    shapes = {"q": (2 * q if attention.gated else q, d), "k": (kv, d), "v": (v, d), "o": (d, mixed)}
    if attention.keys_as_values:
        del shapes["v"]
    for name, shape in shapes.items():
        yield roles.DenseRole(f"attention.{name}", shape, True)
        if name in attention.bias:
            yield roles.DenseRole(f"attention.{name}_bias", shape[:1], False)
    yield from _gate_role(attention.gate, attention.num_heads, attention.value_dim, d)
    if attention.sinks:
        yield roles.DenseRole("attention.sinks", (attention.num_heads,), False)
    if attention.qk_norm not in ("none", "unit"):
        whole = attention.qk_norm == "projection"
        yield roles.DenseRole("attention.q_norm", (q if whole else attention.head_dim,), False, offset)
        yield roles.DenseRole("attention.k_norm", (kv if whole else attention.head_dim,), False, offset)
    if (indexer := attention.indexer) is not None:
        yield roles.DenseRole("attention.index_q", (indexer.num_heads * indexer.head_dim, d), True)
        yield roles.DenseRole("attention.index_k", (indexer.head_dim, d), True)
        yield roles.DenseRole("attention.index_q_norm", (indexer.head_dim,), False, offset)
        yield roles.DenseRole("attention.index_k_norm", (indexer.head_dim,), False, offset)


def _gate_role(gate: OutputGateSpec | None, num_heads: int, head_dim: int, d: int) -> Iterator[roles.DenseRole]:
    if gate is not None:
        yield roles.DenseRole("attention.gate", (gate.width(num_heads, head_dim), d), gate.each == "value")
        if gate.bias:
            yield roles.DenseRole("attention.gate_bias", (num_heads,), False)


def latent_roles(attention: LatentSpec, d: int) -> Iterator[roles.DenseRole]:
    """Yields the dense tensors of a layer's attention, for a hidden size d."""
    num_heads, rank, rope = attention.num_heads, attention.kv_lora_rank, attention.qk_rope_head_dim
    q = num_heads * (attention.qk_nope_head_dim + rope)
    if attention.q_lora_rank is None:
        yield roles.DenseRole("attention.q", (q, d), True)
    else:
        yield roles.DenseRole("attention.q_a", (attention.q_lora_rank, d), True)
        yield roles.DenseRole("attention.q_a_norm", (attention.q_lora_rank,), False)
        gates, twice = (num_heads * attention.v_head_dim, 2) if attention.gated else (0, 1)
        yield roles.DenseRole("attention.q_b", (q + gates, twice * attention.q_lora_rank), True)
    yield roles.DenseRole("attention.kv_a", (rank + rope, d), True)
    yield roles.DenseRole("attention.kv_a_norm", (rank,), False)
    yield roles.DenseRole(
        "attention.kv_b", (num_heads * (attention.qk_nope_head_dim + attention.v_head_dim), rank), True
    )
    yield roles.DenseRole("attention.o", (d, num_heads * attention.v_head_dim), True)
    yield from _gate_role(attention.gate, num_heads, attention.v_head_dim, d)
    if attention.sinks:
        yield roles.DenseRole("attention.sinks", (num_heads,), False)
    if (indexer := attention.own_indexer) is not None:
        heads, width = indexer.num_heads, indexer.head_dim
        yield roles.DenseRole("attention.index_q", (heads * width, attention.q_lora_rank or 0), True)
        yield roles.DenseRole("attention.index_k", (width, d), True)
        yield roles.DenseRole("attention.index_k_norm", (width,), False)
        yield roles.DenseRole("attention.index_k_norm_bias", (width,), False)
        yield roles.DenseRole("attention.index_weights", (heads, d), False)


def compressed_roles(attention: CompressedSpec, d: int) -> Iterator[roles.DenseRole]:
    """Yields the dense tensors of a layer's attention, for a hidden size d."""
    width, rank = attention.num_heads * attention.head_dim, attention.q_lora_rank
    mixed = attention.num_groups * attention.o_lora_rank
    yield roles.DenseRole("attention.q_a", (rank, d), True)
    yield roles.DenseRole("attention.q_a_norm", (rank,), False)
    yield roles.DenseRole("attention.q_b", (width, rank), True)
    yield roles.DenseRole("attention.kv", (attention.head_dim, d), True)
    yield roles.DenseRole("attention.kv_norm", (attention.head_dim,), False)
    yield roles.DenseRole("attention.sinks", (attention.num_heads,), False)
    yield roles.DenseRole("attention.o_a", (mixed, attention.group_width), True)
    yield roles.DenseRole("attention.o_b", (d, mixed), True)
    if (compression := attention.compression) is None:
        return
    for name, dim in zip(("entry", "index"), compression.dims(attention.head_dim), strict=False):
        projected = dim * (2 if compression.overlap else 1)
        yield roles.DenseRole(f"attention.{name}_kv", (projected, d), True)
        yield roles.DenseRole(f"attention.{name}_gate", (projected, d), True)
        yield roles.DenseRole(f"attention.{name}_positions", (compression.window_tokens, projected), False)
        yield roles.DenseRole(f"attention.{name}_norm", (dim,), False)
    if (indexer := compression.indexer) is not None:
        yield roles.DenseRole("attention.index_q", (indexer.num_heads * indexer.head_dim, rank), True)
        yield roles.DenseRole("attention.index_weights", (indexer.num_heads, d), False)


def relative_roles(attention: RelativeSpec, d: int, name: str) -> Iterator[roles.DenseRole]:
    """Yields the dense tensors of a layer's attention of this name, `attention` or `cross`, for a hidden size d."""
    width = attention.num_heads * attention.head_dim
    for projection in ("q", "k", "v"):
        yield roles.DenseRole(f"{name}.{projection}", (width, d), True)
    yield roles.DenseRole(f"{name}.o", (d, width), True)


MAX_BUCKETS = 2**16


def attention_sizes(attention: AttentionSpec) -> dict[str, int | None]:
    """Returns the sizes that must be positive, by name."""
    names: tuple[str, ...]
    if isinstance(attention, GroupedQuerySpec):
        names = ("num_heads", "num_kv_heads", "head_dim", "sliding_window", "value_head_dim")
    elif isinstance(attention, RelativeSpec):
        names = ("num_heads", "head_dim", "num_buckets", "max_distance")
    elif isinstance(attention, CompressedSpec):
        names = ("num_heads", "head_dim", "q_lora_rank", "sliding_window", "num_groups", "o_lora_rank")
    else:
        names = ("num_heads", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    sizes = {name: getattr(attention, name) for name in names}
    if isinstance(attention, CompressedSpec):
        return sizes | _compression_sizes(attention.compression)
    if not isinstance(attention, RelativeSpec) and (indexer := attention.indexer) is not None:
        own = ("top_k",) if isinstance(indexer, IndexerSpec) else ("block_tokens", "num_blocks")
        sizes |= {f"indexer {name}": getattr(indexer, name) for name in ("num_heads", "head_dim", *own)}
    return sizes


def _compression_sizes(compression: CompressionSpec | None) -> dict[str, int | None]:
    if compression is None:
        return {}
    sizes: dict[str, int | None] = {"window_tokens": compression.window_tokens}
    if (indexer := compression.indexer) is not None:
        sizes |= {f"indexer {name}": getattr(indexer, name) for name in ("num_heads", "head_dim", "top_k")}
    return sizes


def attention_fault(attention: AttentionSpec, rope: positions.RopeSpec | None, num_layers: int) -> str | None:
    """Returns why attention with these rotary positions cannot be that of a model of so many layers, or None."""
    if not 0 < attention.scale < 1e6:
        return f"attention scale is {attention.scale}, expected between 0 and 1e6"
    if isinstance(attention, LatentSpec):
        if not 0 < attention.lora_norm_eps < 1:
            return f"lora_norm_eps is {attention.lora_norm_eps}, expected between 0 and 1"
        for scale in (attention.q_latent_scale, attention.kv_latent_scale):
            if not 0 < scale < 1e6:
                return f"a latent's scale is {scale}, expected between 0 and 1e6"
        if attention.gated and (attention.q_lora_rank is None or attention.gate is not None):
            return "gated latent attention needs q_lora_rank, and no gate"
        indexer = attention.indexer
        if indexer is not None and (attention.q_lora_rank is None or indexer.head_dim < attention.qk_rope_head_dim):
            return "an indexer needs q_lora_rank, and heads of at least qk_rope_head_dim values"
        if indexer is not None and not 0 < indexer.norm_eps < 1:
            return f"indexer norm_eps is {indexer.norm_eps}, expected between 0 and 1"
        return _temperature_fault(attention.temperature, attention)
    if isinstance(attention, RelativeSpec):
        return _relative_fault(attention)
    if isinstance(attention, CompressedSpec):
        return _compressed_fault(attention, rope)
    if attention.num_heads % attention.num_kv_heads:
        return f"{attention.num_heads} heads cannot share {attention.num_kv_heads} keys and values"
    if attention.bias != tuple(name for name in PROJECTIONS if name in attention.bias):
        return f"attention bias names {attention.bias}, expected some of {PROJECTIONS} in this order"
    if not 0 < attention.value_scale < 1e6:
        return f"value_scale is {attention.value_scale}, expected between 0 and 1e6"
    if attention.clip is not None and not 0 < attention.clip < 1e6:
        return f"attention clip is {attention.clip}, expected between 0 and 1e6"
    if (attention.gated or attention.keys_as_values) and attention.value_dim != attention.head_dim:
        name = "gated" if attention.gated else "keys_as_values"
        return f"{name} attention has keys of {attention.head_dim} and values of {attention.value_dim}, expected equal"
    lists = {"windowed_layers": attention.windowed_layers, "rotated_layers": attention.rotated_layers}
    for name, layers in lists.items():
        if layers is not None and (not layers or not roles.are_layers(layers, num_layers) or len(layers) == num_layers):
            return f"{name} must list some decoder layers, but not all, in rising order"
    if attention.sliding_window is None and (attention.windowed_layers is not None or attention.chunked):
        name = "chunked" if attention.windowed_layers is None else "windowed_layers"
        return f"{name} is given without a sliding_window"
    if attention.keys_as_values and "v" in attention.bias:
        return "attention bias names v, but keys_as_values leaves no projection of values"
    if attention.gated and attention.gate is not None:
        return "attention has gated and gate, of which only one can be"
    if attention.clip is not None and (attention.gated or attention.keys_as_values):
        return f"attention has {'gated' if attention.gated else 'keys_as_values'} and clip, of which only one can be"
    return _block_indexer_fault(attention, rope) or _temperature_fault(attention.temperature, attention)


def _compressed_fault(attention: CompressedSpec, rope: positions.RopeSpec | None) -> str | None:
    if attention.num_heads % attention.num_groups:
        return f"{attention.num_heads} heads do not divide into num_groups, {attention.num_groups}"
    if rope is None or positions.is_by_length(rope):
        return "compressed attention needs rotary positions, and neither longrope nor dynamic scaling"
    indexer = None if attention.compression is None else attention.compression.indexer
    if indexer is not None and indexer.head_dim < rope.rotary_dim:
        return f"an indexer of entries has heads of {indexer.head_dim}, expected at least rotary_dim, {rope.rotary_dim}"
    return None


def _block_indexer_fault(attention: GroupedQuerySpec, rope: positions.RopeSpec | None) -> str | None:
    indexer = attention.indexer
    if indexer is None:
        return None
    if attention.sliding_window is not None or attention.sinks:
        return "an indexer of blocks needs attention without sliding_window and sinks"
    if rope is not None and rope.rotary_dim > indexer.head_dim:
        return f"an indexer of blocks has heads of {indexer.head_dim}, expected at least rotary_dim, {rope.rotary_dim}"
    if rope is not None and indexer.kind == "pooled" and positions.is_by_length(rope):
        return "an indexer of pooled blocks can have neither longrope nor dynamic scaling"
    most = indexer.num_blocks if indexer.kind == "largest" else 0
    if not 0 <= indexer.local_blocks <= most:
        return f"indexer local_blocks is {indexer.local_blocks} with {indexer.kind}, expected 0 to {most}"
    if indexer.kind == "largest" and attention.num_kv_heads % indexer.num_heads:
        return f"{indexer.num_heads} heads of an indexer cannot choose for {attention.num_kv_heads} keys and values"
    return None


def _temperature_fault(temperature: TemperatureSpec | None, attention: GroupedQuerySpec | LatentSpec) -> str | None:
    if temperature is None:
        return None
    if not 0 < temperature.slope < 1e6 or not 0 < temperature.length < 2**31:
        return f"temperature slope {temperature.slope} or length {temperature.length} is out of range"
    if not isinstance(attention, GroupedQuerySpec):
        return "latent attention rotates all layers, but temperature is of others" if temperature.is_unrotated else None
    if attention.qk_norm == "rotated_head" or (attention.qk_norm == "unit" and not temperature.is_unrotated):
        return f"qk_norm is {attention.qk_norm}, which undoes temperature"
    return None


def _relative_fault(attention: RelativeSpec) -> str | None:
    # There are two directions. In each, half of the buckets have one distance; the others grow up to max_distance.
    if attention.num_buckets % 4 or attention.num_buckets > MAX_BUCKETS:
        return f"num_buckets is {attention.num_buckets}, expected a multiple of 4 up to {MAX_BUCKETS}"
    if attention.max_distance <= attention.num_buckets // 2:
        return f"max_distance is {attention.max_distance}, expected more than half of {attention.num_buckets} buckets"
    return None


def rope_fault(rope: positions.RopeSpec | None, attention: AttentionSpec) -> str | None:
    """Returns why rotary positions do not go with this attention, or None."""
    if rope is None:
        return None
    if isinstance(attention, RelativeSpec):
        return f"{attention.kind} attention cannot have rope"
    width = attention.qk_rope_head_dim if isinstance(attention, LatentSpec) else attention.head_dim
    if rope.rotary_dim % 2 or rope.rotary_dim > width:
        return f"rotary_dim is {rope.rotary_dim}, expected an even number up to {width}"
    if isinstance(attention, LatentSpec) and rope.rotary_dim != width:
        return f"rotary_dim is {rope.rotary_dim}, expected qk_rope_head_dim, {width}"
    if not 1 < rope.theta < 1e12:
        return f"rope theta is {rope.theta}, expected between 1 and 1e12"
    return positions.scaling_fault(rope)
