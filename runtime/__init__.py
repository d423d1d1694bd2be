"""Runs packs: the decoder, its sources of weights, sampling, text. `moe-run` is its command."""

from moe_pack.runtime.checkpoint_weights import CheckpointWeights, read_rows
from moe_pack.runtime.decoder import Decoder
from moe_pack.runtime.doctor import measure_machine
from moe_pack.runtime.expert import ACTIVATIONS, Activations, activations, run_expert
from moe_pack.runtime.folder_files import FolderFiles
from moe_pack.runtime.generate import context_for, generate
from moe_pack.runtime.kernels import (
    ExpertRows,
    Kernels,
    expert_numbers,
    is_available,
    kernels_for,
    num_cpus,
    open_kernels,
)
from moe_pack.runtime.kv_cache import KVCache
from moe_pack.runtime.layer import add_attention, embed, head, mlp_input, route_tokens, run_unrouted
from moe_pack.runtime.machine import CpuFacts, DriveFacts, LinkFacts, MachineFacts, ReadRate, load_facts, save_facts
from moe_pack.runtime.matrix import TORCH_DTYPES, Matrix, StoredMatrix, linear, row_blocks
from moe_pack.runtime.pack_weights import PackWeights, StreamedPackWeights
from moe_pack.runtime.packed_expert import PackedExpert
from moe_pack.runtime.reads import Reads, ReadStats, open_reads
from moe_pack.runtime.rope import Angles, Rope
from moe_pack.runtime.sampling import Sampler
from moe_pack.runtime.text import Text, TextStream
from moe_pack.runtime.weights import Expert, NeuronBlock, Weights

__all__ = [
    "ACTIVATIONS",
    "TORCH_DTYPES",
    "Activations",
    "Angles",
    "CheckpointWeights",
    "CpuFacts",
    "Decoder",
    "DriveFacts",
    "Expert",
    "ExpertRows",
    "FolderFiles",
    "KVCache",
    "Kernels",
    "LinkFacts",
    "MachineFacts",
    "Matrix",
    "NeuronBlock",
    "PackWeights",
    "PackedExpert",
    "ReadRate",
    "ReadStats",
    "Reads",
    "Rope",
    "Sampler",
    "StoredMatrix",
    "StreamedPackWeights",
    "Text",
    "TextStream",
    "Weights",
    "activations",
    "add_attention",
    "context_for",
    "embed",
    "expert_numbers",
    "generate",
    "head",
    "is_available",
    "kernels_for",
    "linear",
    "load_facts",
    "measure_machine",
    "mlp_input",
    "num_cpus",
    "open_kernels",
    "open_reads",
    "read_rows",
    "route_tokens",
    "row_blocks",
    "run_expert",
    "run_unrouted",
    "save_facts",
]
