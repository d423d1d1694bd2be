"""Attention with learned biases by distance, of models with an encoder."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from moe_pack.formats.parts import heads, part, positions

MAX_BUCKETS = 2**16


@dataclass(frozen=True, slots=True)
class RelativeSpec(heads.Attention):
    """Attention of `num_heads` heads of `head_dim`, each with keys of its own, and no rotation.

    A learned bias is added to `scale` times query times key. Each head has `num_buckets` of them, selected by the
    distance from query to key. The layers of a stack share one table. Attention to the encoder's output has no such
    bias.
    Source: T5 (1910.10683), section 2.1; transformers, models/switch_transformers, _relative_position_bucket.
    """

    kind: Literal["relative"]
    num_heads: int
    head_dim: int
    num_buckets: int  # grow with the distance
    max_distance: int  # all distances beyond it share one bucket
    scale: float  # multiplies query times key

    def fault(self, rope: positions.RopeSpec | None, num_layers: int) -> str | None:
        # There are two directions. In each, half of the buckets have one distance; the others grow up to max_distance.
        if self.num_buckets % 4 or self.num_buckets > MAX_BUCKETS:
            return f"num_buckets is {self.num_buckets}, expected a multiple of 4 up to {MAX_BUCKETS}"
        if self.max_distance <= self.num_buckets // 2:
            return f"max_distance is {self.max_distance}, expected more than half of {self.num_buckets} buckets"
        return None

    def rope_fault(self, rope: positions.RopeSpec) -> str | None:
        return "relative attention cannot have rope"

    def roles(self, d: int, offset: float) -> Iterator[part.DenseRole]:
        width = self.num_heads * self.head_dim
        yield from part.matrices(q=(width, d), k=(width, d), v=(width, d), o=(d, width))

    def stack_roles(self) -> Iterator[part.DenseRole]:
        yield part.DenseRole("position_bias", (self.num_buckets, self.num_heads), False)

    @property
    def cached_width(self) -> int:
        return 2 * self.num_heads * self.head_dim

    @property
    def width(self) -> int:
        return 4 * self.num_heads * self.head_dim

    @property
    def mixed_width(self) -> int:
        return self.head_dim

    def is_unknown_to(self, runner: part.Runner) -> bool:
        return runner == "gpu"

    def position_bytes(self, num_tokens: int, num_positions: int, pieces: heads.PieceBytes) -> int:
        biases = 4 * 2 * self.num_heads * 2 * num_positions
        return biases + min(12 * self.num_heads * num_tokens * num_positions, 2 * pieces.decoded)
