"""How far packs of a checkpoint are from their source on a text, block by block, and whether a difference is chance.

This is not the product's evaluation: the source's log-probabilities stay in memory, so that many packs are compared
with them, and every block of tokens has a figure of its own, so that two packs are compared block by block.
"""

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from support.allocation import least_loss
from torch import Tensor

from moe_pack.calib.forward import Tokens
from moe_pack.calib.profile import Profile, losses_of
from moe_pack.calib.quantize import needs_inputs, usual_repeats
from moe_pack.convert.account import Preparation
from moe_pack.convert.pipeline import convert
from moe_pack.convert.plan.rotation import PlanRotation
from moe_pack.formats import ExpertFormat, ModelSpec, Pack, PartFormat, Plan, Quantizer
from moe_pack.formats.families import Checkpoint
from moe_pack.formats.pack.layouts import expert_layout
from moe_pack.formats.pack.plans import uniform_dense
from moe_pack.formats.parts.specs import with_repeats
from moe_pack.runtime.model import CheckpointWeights, Decoder, Expert, NeuronBlock, PackWeights, operations_for

BLOCK_TOKENS = 128
RESAMPLES = 10_000
_LEVEL = 0.95
_CHUNK = 500  # resamples drawn at once: their counts take 4 MB for a thousand blocks
_CPU = torch.device("cpu")

Blocks = NDArray[np.float64]  # [num_blocks]: the mean KL divergence of each block of tokens, nats a token
Verdict = Literal["lower", "not told apart", "higher"]


@dataclass(frozen=True, slots=True)
class Difference:
    """The mean over blocks of one less another, and its 95% interval."""

    mean: float
    low: float
    high: float

    @property
    def verdict(self) -> Verdict:
        """Whether the first is lower; only an interval without 0 tells them apart."""
        if self.high < 0:
            return "lower"
        return "higher" if self.low > 0 else "not told apart"

    def __str__(self) -> str:
        return f"{self.mean:+.6f} [{self.low:+.6f}, {self.high:+.6f}]"


def paired_difference(
    ours: NDArray[np.float64], other: NDArray[np.float64], seed: int = 0, resamples: int = RESAMPLES
) -> Difference:
    """Returns the difference of two means over the same blocks, all of one size, and how far it may be chance.

    Meaning: the percentile interval of the mean of `ours - other` over resamples of the blocks with replacement.
    Args:    ours, other: [num_blocks].
    Source:  Efron and Tibshirani, An Introduction to the Bootstrap, §13.3.
    """
    assert ours.shape == other.shape and ours.ndim == 1 and len(ours), (ours.shape, other.shape)
    generator, difference = np.random.default_rng(seed), ours - other
    num_blocks = len(difference)
    even = np.full(num_blocks, 1 / num_blocks)
    means = [
        generator.multinomial(num_blocks, even, min(_CHUNK, resamples - first)) @ difference / num_blocks
        for first in range(0, resamples, _CHUNK)
    ]
    low, high = np.quantile(np.concatenate(means), ((1 - _LEVEL) / 2, (1 + _LEVEL) / 2))
    return Difference(float(difference.mean()), float(low), float(high))


class Judge:
    """Measures plans of a checkpoint against the source's predictions for the sequences of a text, which it keeps.

    Args:    tokens: sequences whose length is a multiple of `BLOCK_TOKENS`.   profile: what calibrated plans round by,
             and the layers that are rotated.   is_sequential: how they are rounded (`convert`).
    """

    def __init__(
        self, checkpoint: Checkpoint, tokens: Tokens, profile: Profile | None = None, is_sequential: bool = True
    ) -> None:
        assert tokens.sequences.shape[1] % BLOCK_TOKENS == 0, tokens.sequences.shape
        self.checkpoint, self.spec = checkpoint, checkpoint.spec
        self._profile = profile
        self._is_sequential = is_sequential
        self._sequences: list[list[int]] = tokens.sequences.tolist()
        self._context = tokens.sequences.shape[1]
        source = Decoder(CheckpointWeights(checkpoint), self._context)
        self._expected = [_log_probabilities(source, ids) for ids in self._sequences]
        self._judged: dict[Plan, Blocks] = {}

    def plan(self, plan: Plan) -> Blocks:
        """Returns the KL divergence of a plan's pack from the source in each block; makes the pack once."""
        if plan not in self._judged:
            num_threads = torch.get_num_threads()
            with tempfile.TemporaryDirectory(prefix="moe-pack-") as folder:
                rotation = PlanRotation.chosen("auto", self.checkpoint, self._profile).of(plan)
                out = Path(folder) / "pack"
                convert(
                    self.checkpoint,
                    plan,
                    out,
                    num_threads,
                    prepared=Preparation(calibration=self._profile, rotation=rotation, sequential=self._is_sequential),
                )
                torch.set_num_threads(num_threads)  # converting leaves torch with one thread
                with Pack(out) as pack, operations_for(_CPU) as operations:
                    self._judged[plan] = self.blocks(Decoder(PackWeights(pack, _CPU, operations), self._context))
        return self._judged[plan]

    def experts(self, expert: Callable[[int, int], NeuronBlock]) -> Blocks:
        """Returns the same for the source with these experts in place of its own."""
        return self.blocks(Decoder(_OtherExperts(self.checkpoint, expert), self._context))

    def blocks(self, decoder: Decoder) -> Blocks:
        """Returns the KL divergence of a decoder from the source in each block of tokens, in order."""
        found = []
        for ids, expected in zip(self._sequences, self._expected, strict=True):
            kl = (expected.exp() * (expected - _log_probabilities(decoder, ids))).sum(dim=1)  # [S]
            found.append(kl.double().view(-1, BLOCK_TOKENS).mean(dim=1))
        return np.asarray(torch.cat(found).numpy(), np.float64)


def _log_probabilities(decoder: Decoder, ids: list[int]) -> Tensor:
    decoder.reset()
    return decoder.logits(ids).log_softmax(dim=1)


@dataclass(frozen=True, slots=True)
class _WholeExpert:
    """An expert whose neurons are one block."""

    block: NeuronBlock

    def down_bias(self) -> None:
        """Returns None: it has no bias."""

    def blocks(self) -> Iterator[NeuronBlock]:
        """Yields all neurons."""
        yield self.block


class _OtherExperts(CheckpointWeights):
    """A checkpoint's weights with other experts."""

    def __init__(self, checkpoint: Checkpoint, expert: Callable[[int, int], NeuronBlock]) -> None:
        super().__init__(checkpoint)
        self._other = expert

    def expert(self, layer_idx: int, expert: int) -> Expert:
        return _WholeExpert(self._other(layer_idx, expert))


def stored_bytes(spec: ModelSpec, plan: Plan) -> int:
    """Returns what the experts of a plan take in a pack, without the padding between extents."""
    stored = with_repeats(spec, plan.repeats)
    return sum(
        expert_layout(expert, plan.selector, stored.expert, spec.hidden_size).num_bytes
        for layer in plan.experts
        for expert in layer
    )


def num_expert_weights(spec: ModelSpec) -> int:
    """Returns the number of weights of all routed experts."""
    expert = spec.expert.intermediate_size * spec.hidden_size * len(spec.expert.matrices)
    return len(spec.moe_layers) * spec.router.num_experts * expert


def uniform(spec: ModelSpec, part: PartFormat, quantizer: Quantizer) -> Plan:
    """Returns the plan that stores every matrix of every expert alike, without a selector, as `convert` does."""
    layer = (ExpertFormat(part, part, part),) * spec.router.num_experts
    repeats = usual_repeats(spec.expert.source_size) if quantizer == "calibrated" and needs_inputs(part) else 0
    return Plan("none", quantizer, (layer,) * len(spec.moe_layers), uniform_dense(spec, None), repeats)


def planned(profile: Profile, spec: ModelSpec, max_bytes: int, quantizer: Quantizer = "calibrated") -> Plan | None:
    """Returns the planner's plan with the least predicted loss whose experts take at most `max_bytes`, if any fits."""
    stored = with_repeats(spec, usual_repeats(spec.expert.source_size) if quantizer == "calibrated" else 0)
    found = least_loss(stored, "none", replace(losses_of(profile), quantizer=quantizer), max_bytes)
    return found.decision.plan if found else None


def predicted_losses(profile: Profile, quantizer: Quantizer = "calibrated") -> dict[PartFormat, float]:
    """Returns the nats that a profile predicts to lose with all experts in one format, by format."""
    formats, losses = losses_of(profile).of(quantizer)
    return dict(zip(formats, losses.sum(axis=(0, 1, 2)).tolist(), strict=True))
