"""What lossy choices that can be made of a finished pack cost it: thresholds of more sparsity, substitution of experts.

Measured on few tokens, each against the same pack without: what a choice adds to what the pack has lost already.
"""

import shutil
from dataclasses import dataclass, replace
from hashlib import sha256

import torch

from moe_pack.calib.price_of_sparsity import SparsityPrice, sparsity_prices
from moe_pack.calib.price_of_substitution import Substitution, substitution
from moe_pack.calib.sequences import stack_tokens
from moe_pack.calib.store import ProfileStore
from moe_pack.calib.text import Tokens
from moe_pack.formats import NO_PROGRESS, Pack, Progress, canonical
from moe_pack.runtime import TORCH, Operations

NUM_CALIBRATION_TOKENS = 2048  # to find thresholds on
NUM_TOKENS = 1024  # to judge sparsity on, and to decode
_WORK_FOLDER = "prices.work"


@dataclass(frozen=True, slots=True)
class Prices:
    """On the first `num_tokens` predicted tokens of a text. `calibration`: the text that thresholds were found on."""

    num_tokens: int
    calibration: str
    sparsity: tuple[SparsityPrice, ...]
    substitution: Substitution


def measure_prices(
    pack: Pack,
    tokens: Tokens,
    calibration: Tokens,
    progress: Progress = NO_PROGRESS,
    device: torch.device | None = None,
    operations: Operations = TORCH,
) -> Prices:
    """The prices of a pack on the first `NUM_TOKENS` of a text, in whole sequences; nothing of it is changed.

    Killed, it goes on after the last whole layer; decoding begins again.
    Args:    device: of sparsity; decoding is on the CPU.
    Raises:  ConversionError if its folder cannot be written; RunError if there is no memory to decode in; PackError if
             the pack is damaged.
    """
    judged, folder = first_tokens(tokens, NUM_TOKENS), pack.folder / _WORK_FOLDER
    facts = {"root": pack.manifest.root, "calibration": calibration.sha256, "text": judged.sha256}
    store = ProfileStore(folder, sha256(canonical(facts)).hexdigest(), starts_anew=True)
    try:
        sparsity = sparsity_prices(pack, judged, calibration, progress, store.work, device, operations)
        replaced = substitution(pack, judged, progress, store.work)
    finally:
        store.close()
    shutil.rmtree(folder)
    N, S = judged.sequences.shape
    return Prices(N * (stack_tokens(pack.spec, S) - 1), calibration.name, sparsity, replaced)


def first_tokens(tokens: Tokens, number: int) -> Tokens:
    """The first sequences of a text with at least so many tokens, or all it has."""
    kept = tokens.sequences[: -(-number // tokens.sequences.shape[1])]
    return replace(tokens, sequences=kept, sha256=sha256(kept.astype("<i4").tobytes()).hexdigest())
