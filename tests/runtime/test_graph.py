"""The graph engine's launches under the interpreter, over plain memory, against the decoder in plain torch."""

from pathlib import Path

import pytest
import torch
from cards import CPU, graph_decoder
from families import FAMILY_SHAPES
from models import PackMaker

from moe_pack.formats import Pack
from moe_pack.runtime import Decoder, PackWeights, rethreshold

TOLERANCE = 1e-4  # the project's bound on logits, maximum absolute; sums in another order differ by some 1e-6
IDS = [(37 * i + 5) % 4096 for i in range(12)]


def reference(folder: Path, ids: list[int]) -> torch.Tensor:
    with Pack(folder) as pack:
        return Decoder(PackWeights(pack, CPU), 64).logits(ids)
