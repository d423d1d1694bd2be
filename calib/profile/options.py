"""The options of a profile, from which the command line is derived."""

from dataclasses import dataclass, field
from typing import Literal, get_args

from moe_pack.calib.quantize import RotateChoice
from moe_pack.formats import option

Sensitivity = Literal["none", "fast", "full", "exact"]


@dataclass(frozen=True, slots=True)
class ProfileOptions:
    """The options of a profile."""

    sensitivity: Sensitivity = field(
        default="fast",
        metadata=option(
            "--sensitivity",
            help="How to measure what each width and sparsity costs. none: not at all. fast: on at most 2,048 tokens, "
            "with all formats compared in one layer. full: on at most 4,096 tokens, with all formats compared in every "
            "layer. exact: like full, and also with each expert alone at 2 bits, as EdgeMoE does.",
        ),
    )
    # Of an expert at once: limits memory, changes only float rounding; None: the usual number
    chunk_tokens: int | None = None
    rotate: RotateChoice = field(
        default="auto",
        metadata=option(
            "--rotate",
            choices=get_args(RotateChoice),
            help="In which layers errors are measured in rotated coordinates; convert stores their experts in them. "
            "auto: where an expert that is calibrated to 2 bits loses less in them, which needs the experts' inputs; "
            "never where the checkpoint has experts in MXFP4 codes, which plans keep. on: in all layers. off: in none.",
        ),
    )
    keeps_inputs: bool = field(
        default=True,
        metadata=option(
            "--inputs/--no-inputs",
            help="Keep the experts' inputs for a part of the text (4,096 tokens an expert on average, none held out). "
            "Only calibrated quantization needs them. They take 2 bytes for each token, hidden value and layer.",
        ),
    )
