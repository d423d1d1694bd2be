"""The division of experts in passes of many tokens: so many are decoded at once, and so many of their neurons.

Importing this needs no Triton: plans of packs count the memory of passes by it.
"""

from typing import NamedTuple

from moe_pack import formats

FAST_HALVES, EXACT_HALVES = 1, 2  # float16 numbers of a value
_TOKEN_BYTES = 512 << 10  # scratch memory for each token of a pass: short ones cannot fill larger products
_MOST_BYTES = 256 << 20  # a slice of it has some hundred programs; experts have the rest
_BLOCK = 64  # neurons of a slice are a multiple of it
_LEAST_SLICE = 512  # neurons, if experts do not fit as a whole: with fewer, sums of down are short and programs few


class Slicing(NamedTuple):
    """So many experts of a layer are decoded at once, and so many of their neurons."""

    num_experts: int
    num_neurons: int  # a multiple of 64

    @classmethod
    def of(cls, num_rows: int, num_cols: int, num_experts: int, num_halves: int, scratch_bytes: int) -> "Slicing":
        """Returns the division by which a layer's experts fit scratch memory: whole ones, or slices of many."""
        most = max(_BLOCK, scratch_bytes // (2 * 3 * num_halves * num_cols))
        whole = -(-num_rows // _BLOCK) * _BLOCK
        if most >= whole:
            return cls(min(num_experts, most // whole), whole)
        together = max(1, min(num_experts, most // _LEAST_SLICE))
        num_slices = -(-whole // (most // together // _BLOCK * _BLOCK))
        return cls(together, -(-num_rows // (num_slices * _BLOCK)) * _BLOCK)

    @classmethod
    def for_passes(
        cls, layout: formats.PackLayout, chunk_tokens: int, num_halves: int, spare_bytes: int = 0
    ) -> "Slicing":
        """Returns the division for passes of at most so many tokens.

        Args:    spare_bytes: of the GPU, which nothing else needs: where there is space for more experts at once, a
                 pass has fewer launches. Their slices stay as they are, so that the memory changes no bit.
        """
        spec = layout.spec
        sizes = (spec.expert.intermediate_size, spec.hidden_size, spec.router.num_experts, num_halves)
        usual = cls.of(*sizes, min(_TOKEN_BYTES * chunk_tokens, _MOST_BYTES))
        one_more = usual._replace(num_experts=usual.num_experts + 1)
        expert_bytes = one_more.num_bytes(layout, chunk_tokens, num_halves) - usual.num_bytes(
            layout, chunk_tokens, num_halves
        )
        number = min(spec.router.num_experts, usual.num_experts + spare_bytes // expert_bytes)
        return usual._replace(num_experts=number)

    def num_bytes(self, layout: formats.PackLayout, chunk_tokens: int, num_halves: int) -> int:
        """Returns the memory of passes: decoded rows, and neurons and outputs of all pairs of tokens and experts."""
        number, n = self
        d, pairs = layout.spec.hidden_size, chunk_tokens * layout.spec.router.num_experts_per_tok
        return 2 * 3 * num_halves * number * n * d + 4 * 5 * number * n + pairs * (4 * (n + d + 1) + 2 * num_halves * n)
