"""Names, limits and defaults that options of commands have; other modules compute with them."""

from dataclasses import dataclass, field
from typing import Literal

from moe_pack.formats.base import commands

Bits = float | None | str  # bits of a weight; None: the default; "source": the format of the checkpoint
SOURCE = "source"
MEMORY_BYTES = 1 << 30  # by default, for all items that are worked on at once

Dtype = Literal["bf16", "f16", "f32"]
GgufType = Literal["f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "mxfp4"]


def _percentage(text: str) -> float:
    """Returns the share that `1%` stands for.

    Raises:  ValueError if it is not a percentage of 0 or more.
    """
    try:
        share = float(text.removesuffix("%")) / 100
    except ValueError:
        share = -1.0
    if not text.endswith("%") or not 0 <= share < float("inf"):
        raise ValueError(f"found {text!r}, expected a percentage such as 1% or 0.5%")
    return share


@dataclass(frozen=True, slots=True)
class CheckLimits:
    """Limits of a pack's loss, bytes and memory; None: no limit. `max_ppl_increase` is relative, 0.01 for 1%."""

    max_kl: float | None = field(
        default=None,
        metadata=commands.option(
            "--max-kl", least=0, metavar="X", help="Largest KL divergence from the source, in nats a token."
        ),
    )
    max_ppl_increase: float | None = field(
        default=None,
        metadata=commands.option(
            "--max-ppl-increase",
            parse=_percentage,
            metavar="P%",
            help="Largest growth of perplexity over the source's, such as 1%.",
        ),
    )
    max_bytes: int | None = field(
        default=None,
        metadata=commands.option(
            "--max-bytes", parse=commands.read_size, metavar="B", help="Largest size of the pack, such as 26G."
        ),
    )
    budget_bytes: int | None = field(
        default=None,
        metadata=commands.option(
            "--budget",
            parse=commands.read_size,
            metavar="SIZE",
            help="Memory in which moe-run must be able to run the pack, such as 11G.",
        ),
    )

    @property
    def of_loss(self) -> bool:
        """Whether one of the limits is of loss."""
        return self.max_kl is not None or self.max_ppl_increase is not None
