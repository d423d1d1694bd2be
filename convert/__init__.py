"""Turns checkpoints into packs."""

from moe_pack.convert.account import check_calibration
from moe_pack.convert.autopack import AutoPacker, AutoPackResult, PackGoal, threshold_rule
from moe_pack.convert.fixed_costs import measure_fixed_costs
from moe_pack.convert.hub import find_checkpoint
from moe_pack.convert.matrix_bytes import SOURCE, keep_source, kept_text, lossless_formats, with_kept
from moe_pack.convert.pipeline import MEMORY_BYTES, ConversionResult, convert, layout_for, memory_line
from moe_pack.convert.synthetic import (
    SyntheticTraits,
    link_memory_folder,
    profiled_popularity,
    skewed_popularity,
    synthesize,
    synthetic_layout,
)
from moe_pack.convert.verify import (
    CheckLimits,
    CheckResult,
    LogitsError,
    MatrixError,
    bits_per_weight,
    budget,
    compare_logits,
    compare_weights,
    describe,
    digests,
    format_runs,
    junit_xml,
    losses,
    num_bytes,
    opened,
    same_tensors,
    tensors,
)

__all__ = [
    "MEMORY_BYTES",
    "SOURCE",
    "AutoPackResult",
    "AutoPacker",
    "CheckLimits",
    "CheckResult",
    "ConversionResult",
    "LogitsError",
    "MatrixError",
    "PackGoal",
    "SyntheticTraits",
    "bits_per_weight",
    "budget",
    "check_calibration",
    "compare_logits",
    "compare_weights",
    "convert",
    "describe",
    "digests",
    "find_checkpoint",
    "format_runs",
    "junit_xml",
    "keep_source",
    "kept_text",
    "layout_for",
    "link_memory_folder",
    "losses",
    "lossless_formats",
    "measure_fixed_costs",
    "memory_line",
    "num_bytes",
    "opened",
    "profiled_popularity",
    "same_tensors",
    "skewed_popularity",
    "synthesize",
    "synthetic_layout",
    "tensors",
    "threshold_rule",
    "with_kept",
]
