"""Grouped-query attention, with or without a window, sinks, gates or a choice of blocks."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from moe_pack.formats.base.json_files import added
from moe_pack.formats.parts import heads, part, positions

Projection = Literal["q", "k", "v", "o"]
PROJECTIONS: tuple[Projection, ...] = ("q", "k", "v", "o")


@dataclass(frozen=True, slots=True)
class BlockIndexerSpec:
    """The choice of `num_blocks` blocks of `block_tokens` positions that a query attends to, by small heads.

    There are `num_heads` queries, and one key a position, of `head_dim`, normed (rms, the model's eps) and rotated as
    the layer's own. Keys are in the cache.
    Source: transformers, models/qwen4_exp, Qwen4ExpTextQSAIndexer; models/minimax_m3_vl, MiniMaxM3VLIndexer.
    """

    # `pooled`: a block has one key, the mean of its positions'; the scores of all heads are added, and complete blocks
    # compete; the block that a query is in the middle of is seen in addition. `largest`: a block scores as the best of
    # its positions; each head chooses for its share of the layer's keys and values
    kind: Literal["pooled", "largest"]
    num_heads: int
    head_dim: int
    block_tokens: int
    num_blocks: int
    local_blocks: int = added(0)  # the last so many blocks, a query's own first, are always chosen; of `largest`

    def fault(self, attention: "GroupedQuerySpec", rope: positions.RopeSpec | None) -> str | None:
        """Returns why it cannot choose for this attention, or None."""
        if attention.sliding_window is not None or attention.sinks:
            return "an indexer of blocks needs attention without sliding_window and sinks"
        if rope is not None and rope.rotary_dim > self.head_dim:
            return f"an indexer of blocks has heads of {self.head_dim}, expected at least rotary_dim, {rope.rotary_dim}"
        if rope is not None and self.kind == "pooled" and rope.is_by_length:
            return "an indexer of pooled blocks can have neither longrope nor dynamic scaling"
        most = self.num_blocks if self.kind == "largest" else 0
        if not 0 <= self.local_blocks <= most:
            return f"indexer local_blocks is {self.local_blocks} with {self.kind}, expected 0 to {most}"
        if self.kind == "largest" and attention.num_kv_heads % self.num_heads:
            return f"{self.num_heads} heads of an indexer cannot choose for {attention.num_kv_heads} keys and values"
        return None


@dataclass(frozen=True, slots=True)
class GroupedQuerySpec(heads.Attention):
    """Grouped-query attention: `num_heads` queries share `num_kv_heads` keys and values of `head_dim`.

    Source: gpt-oss model card (2508.10925), section 2.3, for sinks; transformers, models/qwen3_next for the gate,
    models/gemma4, Gemma4TextAttention, for values from keys, and their norm.
    """

    kind: Literal["grouped_query"]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    sliding_window: int | None  # a position sees at most so many, itself included; null: all before it
    scale: float  # multiplies query times key
    bias: tuple[Projection, ...]  # projections that have one
    # Queries and keys are normed (rms, the model's eps): each head on its own, or the whole projection at once, before
    # they are rotated; `rotated_head`: each head after it; `unit`: each head, without a weight, in layers that rotate.
    qk_norm: Literal["none", "head", "projection", "rotated_head", "unit"]
    windowed_layers: tuple[int, ...] | None = added(None)  # rising, to which the window applies; null: all
    sinks: bool = added(False)  # each query head has a logit of its own in its softmax, to which no value belongs
    rotated_layers: tuple[int, ...] | None = added(None)  # rising, that rotate queries and keys; null: all
    # the window does not slide: a position sees those before it back to the last multiple of `sliding_window`
    chunked: bool = added(False)
    temperature: heads.TemperatureSpec | None = added(None)  # noqa: RUF009  # a field, whose default is None
    # the projection of queries has a gate after each head's query, whose sigmoid multiplies the head's output
    gated: bool = added(False)
    gate: heads.OutputGateSpec | None = added(None)  # noqa: RUF009  # other gates of outputs; null: none
    # there is no projection of values; they are that of keys, before their norm and rotation
    keys_as_values: bool = added(False)
    v_norm: bool = added(False)  # each head's values are normed (rms, the model's eps), without a weight
    value_head_dim: int | None = added(None)  # of values; null: `head_dim`
    value_scale: float = added(1.0)  # multiplies values last
    # null: a query attends to all positions before it
    indexer: BlockIndexerSpec | None = added(None)  # noqa: RUF009
    # every value of the three projections, after a norm of the whole one, is at least `-clip` and at most `clip`
    clip: float | None = added(None)

    @property
    def value_dim(self) -> int:
        """The values of a head's value, and of its output."""
        return self.head_dim if self.value_head_dim is None else self.value_head_dim

    @property
    def sizes(self) -> dict[str, int]:
        own = {} if self.indexer is None else part.sizes_of(self.indexer)
        own.pop("local_blocks", None)  # 0 is none
        return part.sizes_of(self) | {f"indexer {name}": size for name, size in own.items()}

    def fault(self, rope: positions.RopeSpec | None, num_layers: int) -> str | None:
        if self.num_heads % self.num_kv_heads:
            return f"{self.num_heads} heads cannot share {self.num_kv_heads} keys and values"
        return (
            next(self._faults(num_layers), None)
            or (None if self.indexer is None else self.indexer.fault(self, rope))
            or self._temperature_fault()
        )

    def _faults(self, num_layers: int) -> Iterator[str]:
        if self.bias != tuple(name for name in PROJECTIONS if name in self.bias):
            yield f"attention bias names {self.bias}, expected some of {PROJECTIONS} in this order"
        if (fault := part.numbers_fault({"value_scale": self.value_scale, "attention clip": self.clip})) is not None:
            yield fault
        name = "gated" if self.gated else "keys_as_values"
        if (self.gated or self.keys_as_values) and self.value_dim != self.head_dim:
            yield f"{name} attention has keys of {self.head_dim} and values of {self.value_dim}, expected equal"
        for field, layers in (("windowed_layers", self.windowed_layers), ("rotated_layers", self.rotated_layers)):
            is_legal = layers is None or (layers and part.are_layers(layers, num_layers) and len(layers) < num_layers)
            if not is_legal:
                yield f"{field} must list some decoder layers, but not all, in rising order"
        if self.sliding_window is None and (self.windowed_layers is not None or self.chunked):
            field = "chunked" if self.windowed_layers is None else "windowed_layers"
            yield f"{field} is given without a sliding_window"
        if self.keys_as_values and "v" in self.bias:
            yield "attention bias names v, but keys_as_values leaves no projection of values"
        if self.gated and self.gate is not None:
            yield "attention has gated and gate, of which only one can be"
        if self.clip is not None and (self.gated or self.keys_as_values):
            yield f"attention has {name} and clip, of which only one can be"

    def _temperature_fault(self) -> str | None:
        if self.temperature is None or (fault := self.temperature.fault()) is not None:
            return None if self.temperature is None else fault
        if self.qk_norm == "rotated_head" or (self.qk_norm == "unit" and not self.temperature.is_unrotated):
            return f"qk_norm is {self.qk_norm}, which undoes temperature"
        return None

    def rope_fault(self, rope: positions.RopeSpec) -> str | None:
        return rope.width_fault(self.head_dim)

    def roles(self, d: int, offset: float) -> Iterator[part.DenseRole]:
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        v, mixed = self.num_kv_heads * self.value_dim, self.num_heads * self.value_dim
        shapes = {"q": (2 * q if self.gated else q, d), "k": (kv, d), "v": (v, d), "o": (d, mixed)}
        if self.keys_as_values:
            del shapes["v"]
        for name, shape in shapes.items():
            yield part.DenseRole(name, shape, True)
            if name in self.bias:
                yield part.DenseRole(f"{name}_bias", shape[:1], False)
        if self.gate is not None:
            yield from self.gate.roles(self.num_heads, self.value_dim, d)
        if self.sinks:
            yield part.DenseRole("sinks", (self.num_heads,), False)
        if self.qk_norm not in ("none", "unit"):
            whole = self.qk_norm == "projection"
            yield part.DenseRole("q_norm", (q if whole else self.head_dim,), False, offset)
            yield part.DenseRole("k_norm", (kv if whole else self.head_dim,), False, offset)
        if (indexer := self.indexer) is not None:
            yield from part.matrices(index_q=(indexer.num_heads * indexer.head_dim, d), index_k=(indexer.head_dim, d))
            yield part.DenseRole("index_q_norm", (indexer.head_dim,), False, offset)
            yield part.DenseRole("index_k_norm", (indexer.head_dim,), False, offset)

    @property
    def cached_width(self) -> int:  # keys and values, and the indexer's key
        indexed = 0 if self.indexer is None else self.indexer.head_dim
        return self.num_kv_heads * (self.head_dim + self.value_dim) + indexed

    def window(self, layer: int) -> int | None:
        return self.sliding_window if self.windowed_layers is None or layer in self.windowed_layers else None

    def rotates(self, layer: int) -> bool:
        """Returns whether a decoder layer rotates queries and keys."""
        return self.rotated_layers is None or layer in self.rotated_layers

    @property
    def width(self) -> int:
        gates = 0 if self.gate is None else self.num_heads * self.value_dim
        indexed = 0 if self.indexer is None else 2 * (self.indexer.num_heads + 1) * self.indexer.head_dim
        return (self.num_heads + self.num_kv_heads) * (self.head_dim + self.value_dim) + gates + indexed

    @property
    def mixed_width(self) -> int:
        return self.value_dim

    @property
    def kernels_attend(self) -> bool:
        is_usual = self.value_dim == self.head_dim and self.qk_norm != "rotated_head"
        return is_usual and self.indexer is None and not self.chunked

    def score_bytes(self, num_tokens: int, num_positions: int, pieces: heads.PieceBytes) -> int:
        if self.value_dim == self.head_dim:
            return 0
        return min(4 * self.num_heads * num_tokens * num_positions, pieces.scores) * 5 // 4

    def position_bytes(self, num_tokens: int, num_positions: int, pieces: heads.PieceBytes) -> int:
        # Masks of the positions that are seen, and that are chosen, with copies.
        return 0 if self.indexer is None else heads.MASKS * num_tokens * num_positions

    def is_unknown_to(self, runner: part.Runner) -> bool:
        return False

    def gguf_values(self, rope: positions.RopeSpec | None) -> dict[str, Any]:
        values: dict[str, Any] = {
            "attention.head_count": self.num_heads,
            "attention.head_count_kv": self.num_kv_heads,
            "attention.key_length": self.head_dim,
            "attention.value_length": self.value_dim,
        }
        has_window = self.sliding_window is not None and not self.chunked
        return values | ({"attention.sliding_window": self.sliding_window} if has_window else {})
