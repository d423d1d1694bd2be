"""Random experts at work in combinations of all choices, and the codecs and sizes of rows, for tests of kernels."""

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_pack.formats import BF16, LimitedFunction, PartFormat, Selector, part_format, trellis_format
from moe_pack.formats.pack.plans import KEPT, TRELLIS_WIDTHS
from moe_pack.formats.parts.specs import SELECTORS
from moe_pack.runtime.model import Activations, NeuronBlock, activations, run_expert
from support.combinations import Combination
from support.random_experts import (
    Magnitudes,
    RandomExpert,
    Shape,
    magnitudes,
    random_expert,
    random_tokens,
    running,
    threshold_at,
)

ROW_CODECS = [BF16, *(part_format(w, g, s) for w in (1, 2, 3, 4, 8) for g in (0, 16, 32, 64, 128) for s in (16, 8))]
ROW_CODECS += [trellis_format(w, g, s) for w in TRELLIS_WIDTHS for g in (0, 16, 32, 64, 128) for s in (16, 8)]
ROW_CODECS += KEPT
COLUMNS = (64, 192, 320, 640, 1088)


TRELLISES = {f"trellis {width}": width for width in TRELLIS_WIDTHS}
SOURCES: dict[str, PartFormat] = {part.codec: part for part in KEPT}  # each in its one format
LIMITED = (LimitedFunction("clipped_silu", 0.2), LimitedFunction("capped_silu", 0.1))  # where many neurons reach them
CODECS = (1, 2, 3, 4, 8, 16, *SOURCES, *TRELLISES)
CHOICES: dict[str, tuple[object, ...]] = {
    "gate": (*CODECS, None),
    "up": CODECS,
    "down": CODECS,
    "group": (0, 16, 32, 64, 128),
    "scale_bits": (16, 8),
    "selector": SELECTORS,
    "bias": ((), ("up",), ("gate", "up"), ("down",), ("gate", "up", "down")),
    "function": ("silu", "relu", "relu2", "clamped_swiglu", "gelu_tanh", *LIMITED),
    "num_rows": (1, 7, 33, 65, 129, 257),
    "num_cols": (64, 70, 192, 320, 640, 1088),  # multiples of a block but not of a chunk; 70 with bf16 alone
    "num_tokens": (1, 2, 3, 4, 5, 17, 64, 65, 100),
    "sparsity": (0.0, 0.5, 0.8, 0.9, 1.0),
}
# Each codec of each matrix with every way of few and of many tokens; each selector with every bias and function.
FEW_CHOICES = CHOICES | {"num_tokens": (1, 3, 4, 65)}
TOGETHER = (("up", "num_tokens"), ("selector", "bias"), ("selector", "function"), ("selector", "sparsity"))


def can_be(c: Combination) -> bool:
    widths = [c[name] for name in ("gate", "up", "down") if c[name] is not None]
    if c["gate"] is None and (c["selector"] in ("gate", "both") or "gate" in c["bias"]):  # type: ignore[operator]
        return False
    if c["gate"] is None and c["function"] in ("clamped_swiglu", *LIMITED):
        return False
    if c["num_cols"] % 64:  # type: ignore[operator]
        return widths.count(16) == len(widths)
    grouped = any(width in TRELLISES or (isinstance(width, int) and width < 16) for width in widths)
    return not grouped or not c["group"] or not c["num_cols"] % c["group"]  # type: ignore[operator]


@dataclass(frozen=True)
class Case:
    """An expert at work on tokens, and what plain torch makes of them."""

    expert: RandomExpert
    x: Tensor
    threshold: float
    block: NeuronBlock
    values: Activations
    runs: Tensor
    errors: Magnitudes
    y: Tensor

    @property
    def selector(self) -> Selector:
        return self.expert.shape.selector


def case_of(expert: RandomExpert, x: Tensor, sparsity: float) -> Case:
    block, selector = expert.block(), expert.shape.selector
    values = activations(x, block, expert.shape.function)
    errors = magnitudes(x, expert, torch.ones_like(values.h)).a
    threshold = threshold_at(values.of(selector), sparsity, errors)
    runs = running(values, selector, threshold)
    y = run_expert(x, expert.packed(), expert.shape.function, selector, threshold)
    return Case(expert, x, threshold, block, values, runs, magnitudes(x, expert, runs), y)


def stored_as(name: object, c: Combination) -> PartFormat:
    if name in TRELLISES:
        return trellis_format(TRELLISES[str(name)], c["group"], c["scale_bits"])  # type: ignore[arg-type]
    if name in SOURCES:
        return SOURCES[str(name)]
    return part_format(name, c["group"], c["scale_bits"])  # type: ignore[arg-type]


def drawn(c: Combination, seed: int) -> Case:
    """A random expert and tokens of this combination, of which one neuron has zero weights and one constant ones."""
    gate = None if c["gate"] is None else stored_as(c["gate"], c)
    shape = Shape(
        c["num_rows"],  # type: ignore[arg-type]
        c["num_cols"],  # type: ignore[arg-type]
        c["selector"],  # type: ignore[arg-type]
        gate,
        stored_as(c["up"], c),
        stored_as(c["down"], c),
        c["bias"],  # type: ignore[arg-type]
        c["function"],  # type: ignore[arg-type]
    )
    special = (shape.num_rows // 2, shape.num_rows // 3) if shape.num_rows > 2 else ()
    expert = random_expert(shape, seed, special[:1], special[1:])
    return case_of(expert, random_tokens(c["num_tokens"], shape.num_cols, seed), c["sparsity"])  # type: ignore[arg-type]


def fitting(stored: PartFormat) -> list[int]:
    """The row sizes that a codec may have."""
    whole = stored.codec in ("affine", "trellis") and stored.group
    return [n for n in COLUMNS if not whole or n % whole == 0] + ([70, 1] if stored == BF16 else [])
