"""Biases by relative position against transformers' own, and a hand-written one of a few positions."""

from itertools import product

import torch
from support.cases import case
from torch import Tensor

from moe_pack.formats.parts import RelativeSpec
from moe_pack.runtime.model.attention.relative import PositionBias, distance_buckets


def reference_buckets(distances: Tensor, is_mutual: bool, spec: RelativeSpec) -> Tensor:
    from transformers.models.switch_transformers.modeling_switch_transformers import SwitchTransformersAttention

    found: Tensor = SwitchTransformersAttention._relative_position_bucket(  # type: ignore[no-untyped-call]  # its own
        distances, bidirectional=is_mutual, num_buckets=spec.num_buckets, max_distance=spec.max_distance
    )
    return found


SPECS = [
    RelativeSpec("relative", 4, 16, num_buckets=32, max_distance=128, scale=1.0),
    RelativeSpec("relative", 3, 8, num_buckets=48, max_distance=100, scale=1.0),
    RelativeSpec("relative", 1, 8, num_buckets=4, max_distance=3, scale=1.0),
    RelativeSpec("relative", 2, 8, num_buckets=256, max_distance=4096, scale=1.0),
]


def test_every_distance_has_the_reference_s_bucket() -> None:
    for is_mutual, spec in product([True, False], SPECS):
        with case(is_mutual, spec):
            distances = torch.arange(20_000)
            expected = reference_buckets(-distances, is_mutual, spec)
            assert torch.equal(distance_buckets(spec, 20_000, is_mutual), expected)


def test_rows_are_the_table_s_at_the_reference_s_buckets() -> None:
    for is_mutual, spec in product([True, False], SPECS):
        with case(is_mutual, spec):
            num_positions = 150
            table = torch.randn((spec.num_buckets, spec.num_heads), generator=torch.Generator().manual_seed(3))
            positions = torch.arange(num_positions)
            away = positions[None, :] - positions[:, None]
            expected = table[reference_buckets(away, is_mutual, spec)].permute(2, 0, 1)
            if not is_mutual:
                expected = expected.masked_fill(away > 0, -torch.inf)
            bias = PositionBias(spec, table, num_positions, is_mutual)
            for start, stop, num_keys in ((0, 150, 150), (0, 1, 1), (149, 150, 150), (7, 40, 40), (7, 40, 93)):
                assert torch.equal(bias.rows(start, stop, num_keys), expected[:, start:stop, :num_keys])


def test_one_position_has_one_bias() -> None:
    bias = PositionBias(SPECS[0], torch.arange(128.0).view(32, 4), 1, is_mutual=True)
    assert torch.equal(bias.rows(0, 1, 1), torch.arange(4.0).view(4, 1, 1))
