"""Attention to a window of positions, and to compressed entries that stand for all of a sequence."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from moe_pack.formats.parts import heads, part, positions


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
    (rms, the model's eps), and rotated as at the window's first position. A query sees entries of windows that are
    over.
    Source: transformers, models/deepseek_v4, DeepseekV4HCACompressor and DeepseekV4CSACompressor (overlap, indexer).
    """

    window_tokens: int
    overlap: bool  # an entry also averages a second projection of the window before
    indexer: EntryIndexerSpec | None  # null: a query attends to all entries that it sees

    @property
    def earlier_tokens(self) -> int:
        """The most tokens before a new one whose projections its entry, or a later one, averages."""
        return self.window_tokens * (2 if self.overlap else 1) - 1

    def dims(self, head_dim: int) -> tuple[int, ...]:
        """Returns the values of an entry: those of its key, and of the indexer's."""
        return (head_dim,) if self.indexer is None else (head_dim, self.indexer.head_dim)

    def raw_width(self, head_dim: int) -> int:
        """Returns the cached values of a position: projections and the logits of their weights."""
        return 2 * (2 if self.overlap else 1) * sum(self.dims(head_dim))


def raw_places(compression: CompressionSpec, context_tokens: int, chunk_tokens: int) -> int:
    """Returns for how many positions a layer caches projections: those of the chunk, and those it needs before."""
    return min(context_tokens, compression.earlier_tokens + chunk_tokens)


@dataclass(frozen=True, slots=True)
class CompressedSpec(heads.Attention):
    """Attention to a window of positions, and to compressed entries for all of a sequence.

    All heads share one key a position (or entry) of `head_dim`, which is also its value; it is normed (rms, the model's
    eps) and then rotated. Each head's query is normed without a weight. The last `rotary_dim` values of a head are
    rotated, and outputs are rotated back by the query's angles. Each head has a sink in its softmax, without a value.
    Source: transformers, models/deepseek_v4, DeepseekV4Attention.
    """

    kind: Literal["compressed"]
    num_heads: int
    head_dim: int
    q_lora_rank: int  # values of the normed latent from which queries come
    sliding_window: int  # a position sees at most so many positions, itself included
    scale: float  # multiplies query times key
    num_groups: int  # outputs of heads go through two matrices, of which the first multiplies each group alone
    o_lora_rank: int  # values of a group between both matrices
    compression: CompressionSpec | None  # null: a query attends to its window alone

    @property
    def sizes(self) -> dict[str, int]:
        found = part.sizes_of(self)
        if self.compression is not None:
            found |= part.sizes_of(self.compression)
            if self.compression.indexer is not None:
                own = part.sizes_of(self.compression.indexer)
                found |= {f"indexer {name}": size for name, size in own.items()}
        return found

    def fault(self, rope: positions.RopeSpec | None, num_layers: int) -> str | None:
        if self.num_heads % self.num_groups:
            return f"{self.num_heads} heads do not divide into num_groups, {self.num_groups}"
        if rope is None or rope.is_by_length:
            return "compressed attention needs rotary positions, and neither longrope nor dynamic scaling"
        indexer = None if self.compression is None else self.compression.indexer
        if indexer is not None and indexer.head_dim < rope.rotary_dim:
            found, least = indexer.head_dim, rope.rotary_dim
            return f"an indexer of entries has heads of {found}, expected at least rotary_dim, {least}"
        return None

    def rope_fault(self, rope: positions.RopeSpec) -> str | None:
        return rope.width_fault(self.head_dim)

    def roles(self, d: int, offset: float) -> Iterator[part.DenseRole]:
        width, rank = self.num_heads * self.head_dim, self.q_lora_rank
        mixed = self.num_groups * self.o_lora_rank
        yield from part.matrices(q_a=(rank, d))
        yield from part.vectors(q_a_norm=rank)
        yield from part.matrices(q_b=(width, rank), kv=(self.head_dim, d))
        yield from part.vectors(kv_norm=self.head_dim, sinks=self.num_heads)
        yield from part.matrices(o_a=(mixed, width // self.num_groups), o_b=(d, mixed))
        if (compression := self.compression) is None:
            return
        for name, dim in zip(("entry", "index"), compression.dims(self.head_dim), strict=False):
            projected = dim * (2 if compression.overlap else 1)
            yield part.DenseRole(f"{name}_kv", (projected, d), True)
            yield part.DenseRole(f"{name}_gate", (projected, d), True)
            yield part.DenseRole(f"{name}_positions", (compression.window_tokens, projected), False)
            yield part.DenseRole(f"{name}_norm", (dim,), False)
        if (indexer := compression.indexer) is not None:
            yield part.DenseRole("index_q", (indexer.num_heads * indexer.head_dim, rank), True)
            yield part.DenseRole("index_weights", (indexer.num_heads, d), False)

    @property
    def cached_width(self) -> int:
        # Its key, and its share of an entry, rounded up. What entries follow from is dropped when they are made.
        if (compression := self.compression) is None:
            return self.head_dim
        return self.head_dim + -(-sum(compression.dims(self.head_dim)) // compression.window_tokens)

    def window(self, layer: int) -> int | None:
        return self.sliding_window

    def cache_values(self, places: int, context_tokens: int, chunk_tokens: int) -> int:
        if (compression := self.compression) is None or not places:
            return places * self.head_dim
        raw = raw_places(compression, context_tokens, chunk_tokens) * compression.raw_width(self.head_dim)
        entries = context_tokens // compression.window_tokens * sum(compression.dims(self.head_dim))
        return places * self.head_dim + raw + entries

    def checkpoint_values(self, context_tokens: int, chunk_tokens: int) -> int:
        # What the next entries follow from, unless the cache has it for all positions.
        compression = self.compression
        if compression is None or raw_places(compression, context_tokens, chunk_tokens) == context_tokens:
            return 0
        return compression.earlier_tokens * compression.raw_width(self.head_dim)

    @property
    def width(self) -> int:
        # Queries, normed and rotated ones, what they give, that rotated back, and its groups.
        heads = 5 * self.num_heads * self.head_dim
        outputs = 2 * self.num_groups * self.o_lora_rank
        if (compression := self.compression) is None:
            return heads + outputs
        indexer = compression.indexer
        indexed = 0 if indexer is None else 2 * indexer.num_heads * (indexer.head_dim + 1)
        return heads + outputs + 3 * compression.raw_width(self.head_dim) + indexed  # raw values with a copy

    @property
    def mixed_width(self) -> int:
        return self.head_dim

    def score_bytes(self, num_tokens: int, num_positions: int, pieces: heads.PieceBytes) -> int:
        return min(4 * self.num_heads * num_tokens * num_positions, pieces.scores) * 5 // 4

    def position_bytes(self, num_tokens: int, num_positions: int, pieces: heads.PieceBytes) -> int:
        # Masks of positions in the window and of entries, and a copy of their keys.
        compression, window = self.compression, self.sliding_window - 1 + num_tokens
        num_entries = 0 if compression is None else num_positions // compression.window_tokens
        return (window + num_entries) * (heads.MASKS * num_tokens + 4 * self.head_dim)

    def is_unknown_to(self, runner: part.Runner) -> bool:
        return runner == "gpu"
