"""Numeric modes of the CPU: how inputs of products are rounded, what that costs a pack, and which mode `auto` takes.

    exact     inputs are float32
    fast      inputs are rounded to 16 bits, by blocks of 64 columns: of prompts, and in panels those of every token
    fastest   inputs of prompts are rounded to 8 bits, others as in fast

Weights are multiplied as they are stored in all modes (docs/kernels.md, "Rounded inputs"). The loss of a pack with each
mode is measured where the pack is compared with its source (`moe-pack convert`, `moe-pack eval`) and written to the
sidecar `numerics.json`. `auto` takes the fastest mode whose loss is small enough, and `exact` where none was measured.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from moe_pack.formats.base import json_files

if TYPE_CHECKING:
    from moe_pack.formats import Pack

NUMERICS_FILE = "numerics.json"
LARGEST_KL = 0.0005  # nats a token: with less, `auto` takes a mode

NumericsMode = Literal["exact", "fast", "fastest"]
NumericsOption = Literal["auto", "exact", "fast", "fastest"]
DIGITS: dict[NumericsMode, int] = {"exact": 0, "fast": 2, "fastest": 1}  # of 8 bits; as `Kernels.take_digits` has them


@dataclass(frozen=True, slots=True)
class ModeLoss:
    """The cost of a mode: the mean KL divergence from `exact` in nats a token."""

    kl: float
    half_width: json_files.Amount | None  # of its 95% interval; None if there were too few tokens for one


@dataclass(frozen=True, slots=True)
class NumericsLoss:
    """The sidecar `numerics.json`: the loss of a pack with each mode, on `num_tokens` tokens of a text."""

    text: str
    num_tokens: json_files.Positive
    instruction_set: str
    fast: ModeLoss
    fastest: ModeLoss

    def of(self, mode: NumericsMode) -> ModeLoss | None:
        """Returns the loss with a mode; None for `exact`."""
        return {"fast": self.fast, "fastest": self.fastest}.get(mode)


def read_numerics(pack: "Pack") -> NumericsLoss | None:
    """Reads what was measured for the present content of a pack; None if nothing was.

    Raises:  PackError if the file is damaged.
    """
    if not (pack.folder / NUMERICS_FILE).exists():
        return None
    from moe_pack.formats.pack.sidecar import read_sidecar

    return read_sidecar(pack.folder, NUMERICS_FILE, NumericsLoss, pack.manifest.root)


def chosen_mode(option: NumericsOption, loss: NumericsLoss | None) -> NumericsMode:
    """Returns the mode that an option takes: for `auto` the fastest whose interval lies below `LARGEST_KL`.

    Args:    loss: of the pack; None if it was not measured.
    """
    if option != "auto":
        return option
    losses: dict[NumericsMode, ModeLoss] = {} if loss is None else {"fastest": loss.fastest, "fast": loss.fast}
    small = (mode for mode, of in losses.items() if of.half_width is not None and of.kl + of.half_width < LARGEST_KL)
    return next(small, "exact")


def mode_text(mode: NumericsMode, kl: float | None) -> str:
    """Returns a mode and its loss in nats a token, if that is known, in a few words."""
    if mode == "exact":
        return "exact"
    loss = "of unknown loss; moe-pack eval measures it" if kl is None else f"KL {kl:.2g} nats a token"
    inputs = "inputs" if mode == "fast" else "inputs of prompts"
    return f"{mode}: {inputs} are rounded to {8 * DIGITS[mode]} bits, {loss}"
