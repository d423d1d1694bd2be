"""Multi-head latent attention, with or without an indexer that chooses positions."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from moe_pack.formats.base.json_files import added
from moe_pack.formats.parts import heads, part, positions


@dataclass(frozen=True, slots=True)
class IndexerSpec:
    """The choice of `top_k` positions that a query attends to, by `num_heads` small heads of `head_dim`.

    Each position has one key for all of them, in the cache after the latent's.
    Source: DeepSeek-V3.2 (2512.02556), section 2.1; transformers, models/deepseek_v32, DeepseekV32Indexer;
    models/glm_moe_dsa for shared choices; models/hy_v4, HYV4Indexer, for the last values.
    """

    num_heads: int
    head_dim: int
    top_k: int
    interleaved: bool = added(False)  # rotated in neighbours, not in halves
    # the layer has no indexer of its own; its queries attend to the positions that were chosen in the last layer before
    # it that has one
    shared: bool = added(False)
    rotates_last: bool = added(False)  # the last values of a head are rotated, not the first
    norm_eps: float = added(1e-6)  # of the layer norm of keys


@dataclass(frozen=True, slots=True)
class LatentSpec(heads.Attention):
    """Multi-head latent attention: keys and values of all heads come from one latent vector a position.

    The cache has this latent, normed, and one rotated key for all heads.
    Source: DeepSeek-V2 (2405.04434), section 2.1; transformers, models/hy_v4, HYV4Attention, for sinks; models/axk2,
    AXK2Attention, for `gated`.
    """

    kind: Literal["latent"]
    num_heads: int
    q_lora_rank: int | None  # values of the latent from which queries come; null: they come from the hidden state
    kv_lora_rank: int  # values of the latent of keys and values
    qk_nope_head_dim: int  # values of a head's key that come from the latent
    qk_rope_head_dim: int  # values of the rotated key
    v_head_dim: int
    scale: float  # multiplies query times key
    lora_norm_eps: float  # of the norms (rms) of both latents
    temperature: heads.TemperatureSpec | None = added(None)  # noqa: RUF009  # a field, whose default is None
    # null: a query attends to all positions before it
    indexer: IndexerSpec | None = added(None)  # noqa: RUF009
    q_latent_scale: float = added(1.0)  # multiplies the normed latent of queries
    kv_latent_scale: float = added(1.0)  # multiplies that of keys and values
    gate: heads.OutputGateSpec | None = added(None)  # noqa: RUF009  # gates of outputs; null: none
    sinks: bool = added(False)  # each query head has a logit of its own in its softmax, to which no value belongs
    # The projection of queries reads their latent normed, and then as it was before. After each head's query it has a
    # gate for each value of the head's output, which is multiplied by the gates' sigmoids.
    gated: bool = added(False)

    @property
    def own_indexer(self) -> IndexerSpec | None:
        """The indexer that a layer runs; None if it has none, or shares the choice of an earlier layer."""
        return None if self.indexer is None or self.indexer.shared else self.indexer

    @property
    def sizes(self) -> dict[str, int]:
        own = {} if self.indexer is None else part.sizes_of(self.indexer)
        return part.sizes_of(self) | {f"indexer {name}": size for name, size in own.items()}

    def fault(self, rope: positions.RopeSpec | None, num_layers: int) -> str | None:
        if (fault := part.numbers_fault({"lora_norm_eps": self.lora_norm_eps}, "1")) is not None:
            return fault
        for scale in (self.q_latent_scale, self.kv_latent_scale):
            if (fault := part.numbers_fault({"a latent's scale": scale})) is not None:
                return fault
        if self.gated and (self.q_lora_rank is None or self.gate is not None):
            return "gated latent attention needs q_lora_rank, and no gate"
        if (indexer := self.indexer) is not None:
            if self.q_lora_rank is None or indexer.head_dim < self.qk_rope_head_dim:
                return "an indexer needs q_lora_rank, and heads of at least qk_rope_head_dim values"
            if (fault := part.numbers_fault({"indexer norm_eps": indexer.norm_eps}, "1")) is not None:
                return fault
        if self.temperature is None or (fault := self.temperature.fault()) is not None:
            return None if self.temperature is None else fault
        is_unrotated = self.temperature.is_unrotated
        return "latent attention rotates all layers, but temperature is of others" if is_unrotated else None

    def rope_fault(self, rope: positions.RopeSpec) -> str | None:
        if (fault := rope.width_fault(self.qk_rope_head_dim)) is not None or rope.rotary_dim == self.qk_rope_head_dim:
            return fault
        return f"rotary_dim is {rope.rotary_dim}, expected qk_rope_head_dim, {self.qk_rope_head_dim}"

    def roles(self, d: int, offset: float) -> Iterator[part.DenseRole]:
        num_heads, rank, rope = self.num_heads, self.kv_lora_rank, self.qk_rope_head_dim
        q, outputs = num_heads * (self.qk_nope_head_dim + rope), num_heads * self.v_head_dim
        if self.q_lora_rank is None:
            yield part.DenseRole("q", (q, d), True)
        else:
            yield from part.matrices(q_a=(self.q_lora_rank, d))
            yield from part.vectors(q_a_norm=self.q_lora_rank)
            yield from part.matrices(q_b=(q + outputs, 2 * self.q_lora_rank) if self.gated else (q, self.q_lora_rank))
        yield from part.matrices(kv_a=(rank + rope, d))
        yield from part.vectors(kv_a_norm=rank)
        yield from part.matrices(kv_b=(num_heads * (self.qk_nope_head_dim + self.v_head_dim), rank), o=(d, outputs))
        if self.gate is not None:
            yield from self.gate.roles(num_heads, self.v_head_dim, d)
        if self.sinks:
            yield part.DenseRole("sinks", (num_heads,), False)
        if (indexer := self.own_indexer) is not None:
            heads, width = indexer.num_heads, indexer.head_dim
            yield from part.matrices(index_q=(heads * width, self.q_lora_rank or 0), index_k=(width, d))
            yield from part.vectors(index_k_norm=width, index_k_norm_bias=width, index_weights=(heads, d))

    @property
    def cached_width(self) -> int:  # the latent, the rotated key, and the indexer's key
        indexed = 0 if self.own_indexer is None else self.own_indexer.head_dim
        return self.kv_lora_rank + self.qk_rope_head_dim + indexed

    @property
    def width(self) -> int:
        indexer = self.own_indexer
        indexed = 0 if indexer is None else 2 * indexer.num_heads * indexer.head_dim
        gates = self.num_heads * self.v_head_dim if self.gated or self.gate is not None else 0
        return 4 * self.num_heads * (self.qk_nope_head_dim + self.qk_rope_head_dim) + indexed + gates

    @property
    def mixed_width(self) -> int:
        return max(self.kv_lora_rank, self.v_head_dim)

    def score_bytes(self, num_tokens: int, num_positions: int, pieces: heads.PieceBytes) -> int:
        return min(4 * self.num_heads * num_tokens * num_positions, pieces.decoded) if self.sinks else 0

    def position_bytes(self, num_tokens: int, num_positions: int, pieces: heads.PieceBytes) -> int:
        # Masks of the positions that are seen, and that are chosen, with copies.
        return 0 if self.indexer is None else heads.MASKS * num_tokens * num_positions

    def is_unknown_to(self, runner: part.Runner) -> bool:
        return False

    def lacks(self, runner: part.Runner) -> Iterator[str]:
        if runner == "gguf" and self.indexer is not None and self.indexer.head_dim % 64:
            yield f"an indexer with heads of {self.indexer.head_dim}; llama.cpp needs a multiple of 64"

    def log_multiplier(self, factor: float) -> float:
        """Returns a tenth of the model's `mscale_all_dim`, whose square is in the scale of queries times keys."""
        size = self.qk_nope_head_dim + self.qk_rope_head_dim
        return round((math.sqrt(self.scale * math.sqrt(size)) - 1) / math.log(factor), 6)

    def gguf_values(self, rope: positions.RopeSpec | None) -> dict[str, Any]:
        values: dict[str, Any] = {  # as attention of one head, which reads the latent
            "attention.head_count": self.num_heads,
            "attention.head_count_kv": 1,
            "attention.key_length": self.kv_lora_rank + self.qk_rope_head_dim,
            "attention.value_length": self.kv_lora_rank,
            "attention.key_length_mla": self.qk_nope_head_dim + self.qk_rope_head_dim,
            "attention.value_length_mla": self.v_head_dim,
            "attention.kv_lora_rank": self.kv_lora_rank,
            "attention.q_lora_rank": self.q_lora_rank,
            "rope.dimension_count": self.qk_rope_head_dim,
        }
        if rope is not None and isinstance(rope.scaling, positions.YarnSpec):
            values["rope.scaling.yarn_log_multiplier"] = self.log_multiplier(rope.scaling.factor)
        return values
