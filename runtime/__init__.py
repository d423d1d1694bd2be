"""Runs packs: the decoder, its sources of weights, sampling, text. `moe-run` is its command."""

from moe_pack.runtime.budget import (
    AS_TARGET,
    BudgetPlan,
    MemoryPart,
    divide_budget,
    expert_pages,
    least_budget,
    page_sizes,
    routing_bytes,
    whole_bytes,
    workspace_bytes,
)
from moe_pack.runtime.card_budget import CARD_PAGE_BYTES, CardPlan, divide_card, expert_compression, least_card
from moe_pack.runtime.checkpoint_weights import CheckpointWeights
from moe_pack.runtime.decoder import Decoder
from moe_pack.runtime.doctor import measure_machine
from moe_pack.runtime.encoder_decoder import (
    EncoderDecoder,
    add_cross_attention,
    add_own_attention,
    enter_text,
    position_bias,
)
from moe_pack.runtime.engine import DEVICE_OPTION, Engine, EngineOptions
from moe_pack.runtime.expert import (
    NEURONS,
    Activations,
    Expert,
    NeuronBlock,
    activations,
    resting_output,
    run_expert,
    running,
)
from moe_pack.runtime.folder_files import FolderFiles
from moe_pack.runtime.generate import context_for, generate
from moe_pack.runtime.kv_cache import KVCache
from moe_pack.runtime.layer import add_attention, embed, head, mlp_input, route_tokens, router_scores, run_unrouted
from moe_pack.runtime.machine import (
    CpuFacts,
    DriveFacts,
    FixedCosts,
    LinkFacts,
    MachineFacts,
    ReadRate,
    SizedRate,
    WidthRate,
    load_facts,
    save_facts,
)
from moe_pack.runtime.matrix import TORCH_DTYPES, Matrix, StoredMatrix, linear
from moe_pack.runtime.memory import available_bytes, give_back_freed, total_bytes
from moe_pack.runtime.mlp_predictor import MAX_PREVIOUS, Predictor, multi_hot, network_logits
from moe_pack.runtime.model import Model, load
from moe_pack.runtime.native_kernels import (
    ExpertRows,
    Kernels,
    expert_numbers,
    is_available,
    num_cpus,
)
from moe_pack.runtime.native_operations import NativeOperations, operations_for
from moe_pack.runtime.native_search import TrellisRows, search_trellis
from moe_pack.runtime.norm import norm
from moe_pack.runtime.operations import TORCH, Operations, row_blocks
from moe_pack.runtime.pack_weights import MappedPackWeights, PackWeights, StreamedPackWeights, open_weights
from moe_pack.runtime.packed_expert import PackedExpert
from moe_pack.runtime.path_checks import PATH_MIN_SEEN
from moe_pack.runtime.path_statistics import PATH_MEMORY, PathStatistics, Stage, ranked, rows_as_keys
from moe_pack.runtime.policies import PRESETS, PolicyName, Preset, residency_for
from moe_pack.runtime.prediction import PREDICTION_NAMES, Observed, Prediction, PredictionName, make_prediction
from moe_pack.runtime.reads import Reads, ReadStats, open_reads
from moe_pack.runtime.record import Passes, Record, read_record
from moe_pack.runtime.replay import PathShares, Played, auto_preset, best_of, optimum, replay
from moe_pack.runtime.residency import CacheFacts, Compute, Fetch, Residency
from moe_pack.runtime.rope import Angles, Rope
from moe_pack.runtime.routing import (
    MAX_ROUTED_TOKENS,
    NO_PREDICTOR,
    PREDICTORS,
    ROUTING_FILE,
    Routing,
    routing_file_bytes,
    write_routing,
)
from moe_pack.runtime.sampling import Sampler
from moe_pack.runtime.source_codes import (
    read_codes,
    read_neurons,
    read_rows,
    read_scales,
    read_vector,
    weights_dtype,
)
from moe_pack.runtime.streaming import StreamingWeights, Trust
from moe_pack.runtime.text import Text, TextStream
from moe_pack.runtime.weights import Weights

__all__ = [
    "AS_TARGET",
    "CARD_PAGE_BYTES",
    "DEVICE_OPTION",
    "MAX_PREVIOUS",
    "MAX_ROUTED_TOKENS",
    "NEURONS",
    "NO_PREDICTOR",
    "PATH_MEMORY",
    "PATH_MIN_SEEN",
    "PREDICTION_NAMES",
    "PREDICTORS",
    "PRESETS",
    "ROUTING_FILE",
    "TORCH",
    "TORCH_DTYPES",
    "Activations",
    "Angles",
    "BudgetPlan",
    "CacheFacts",
    "CardPlan",
    "CheckpointWeights",
    "Compute",
    "CpuFacts",
    "Decoder",
    "DriveFacts",
    "EncoderDecoder",
    "Engine",
    "EngineOptions",
    "Expert",
    "ExpertRows",
    "Fetch",
    "FixedCosts",
    "FolderFiles",
    "KVCache",
    "Kernels",
    "LinkFacts",
    "MachineFacts",
    "MappedPackWeights",
    "Matrix",
    "MemoryPart",
    "Model",
    "NativeOperations",
    "NeuronBlock",
    "Observed",
    "Operations",
    "PackWeights",
    "PackedExpert",
    "Passes",
    "PathShares",
    "PathStatistics",
    "Played",
    "PolicyName",
    "Prediction",
    "PredictionName",
    "Predictor",
    "Preset",
    "ReadRate",
    "ReadStats",
    "Reads",
    "Record",
    "Residency",
    "Rope",
    "Routing",
    "Sampler",
    "SizedRate",
    "Stage",
    "StoredMatrix",
    "StreamedPackWeights",
    "StreamingWeights",
    "Text",
    "TextStream",
    "TrellisRows",
    "Trust",
    "Weights",
    "WidthRate",
    "activations",
    "add_attention",
    "add_cross_attention",
    "add_own_attention",
    "auto_preset",
    "available_bytes",
    "best_of",
    "context_for",
    "divide_budget",
    "divide_card",
    "embed",
    "enter_text",
    "expert_compression",
    "expert_numbers",
    "expert_pages",
    "generate",
    "give_back_freed",
    "head",
    "is_available",
    "least_budget",
    "least_card",
    "linear",
    "load",
    "load_facts",
    "make_prediction",
    "measure_machine",
    "mlp_input",
    "multi_hot",
    "network_logits",
    "norm",
    "num_cpus",
    "open_reads",
    "open_weights",
    "operations_for",
    "optimum",
    "page_sizes",
    "position_bias",
    "ranked",
    "read_codes",
    "read_neurons",
    "read_record",
    "read_rows",
    "read_scales",
    "read_vector",
    "replay",
    "residency_for",
    "resting_output",
    "route_tokens",
    "router_scores",
    "routing_bytes",
    "routing_file_bytes",
    "row_blocks",
    "rows_as_keys",
    "run_expert",
    "run_unrouted",
    "running",
    "save_facts",
    "search_trellis",
    "total_bytes",
    "weights_dtype",
    "whole_bytes",
    "workspace_bytes",
    "write_routing",
]
