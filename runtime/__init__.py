"""Runs packs: the decoder, its sources of weights, sampling, text. `moe-run` is its command."""

from moe_pack.runtime.checkpoint_weights import CheckpointWeights, read_rows
from moe_pack.runtime.decoder import Decoder
from moe_pack.runtime.pack_weights import PackWeights
from moe_pack.runtime.weights import Weights

__all__ = ["CheckpointWeights", "Decoder", "PackWeights", "Weights", "read_rows"]
