"""One token's latent attention by kernels against plain torch, which takes the absorbed way too."""

import pytest
import torch
from gpu import cases
from gpu.cases import LatentShape
from gpu.comparing import assert_right

from moe_pack.formats import part_format

SHAPES = [
    LatentShape(3, 16, 8, 16, 24, "BF16"),
    LatentShape(2, 20, 6, 12, 64, "F32", interleaved=False),
    LatentShape(17, 8, 4, 8, 64, part_format(8, 64), position=0),
    LatentShape(2, 33, 8, 17, 128, part_format(4, 64), position=129, room=0),
    LatentShape(2, 20, 8, 17, 128, "t5", position=7),
    LatentShape(2, 16, 8, 18, 192, part_format(3, 64), interleaved=False),
    LatentShape(1, 12, 8, 16, 128, part_format(4, 64, 8), position=1, room=0),
    LatentShape(2, 16, 8, 16, 320, part_format(2, 16)),
]
TOLERANCE = 1e-5  # of the RMS: float32 sums in another order, one after the other: four products and a softmax


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape.rank}-{shape.position}")
def test_a_token_attends_as_in_torch(shape: LatentShape, kernel_device: torch.device) -> None:
    prepared = cases.latent_case(shape, kernel_device)
    assert_right(prepared, TOLERANCE if kernel_device.type == "cpu" else None)
