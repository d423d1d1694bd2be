"""A contest of plans at equal bytes: whatever others store is judged beside our plan within as many bytes."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from comparators import stored_bytes
from expert_quantizers import joint_quantizers
from judge import Blocks, Judge
from llama_experts import LlamaPython, llama_experts, llama_types, write_experts
from memory_weights import MemoryWeights
from paired_bootstrap import Difference, paired_difference
from planned import ours
from tqdm import tqdm

from moe_pack.calib import Profile, Tokens
from moe_pack.formats import Checkpoint, Plan, PlanError
from moe_pack.runtime import CheckpointWeights, Decoder

SEQUENCE_LENGTH = 512


@dataclass(frozen=True, slots=True)
class Line:
    """One comparison: another's bytes and KL, and ours less its; without those where we have no plan so small."""

    name: str
    num_bytes: int
    kl: float
    our_bytes: int | None
    our_kl: float | None
    difference: Difference | None

    def verdict(self) -> str:
        """Whether our plan is lower."""
        return self.difference.verdict if self.difference else "we have no plan so small"

    def facts(self) -> dict[str, Any]:
        """What ours has beside it, for JSON."""
        interval = [self.difference.low, self.difference.high] if self.difference else None
        return {"our_bytes": self.our_bytes, "our_kl": self.our_kl, "interval": interval, "is": self.verdict()}

    def compared(self) -> str:
        """How ours stands beside it."""
        if self.difference is None or self.our_kl is None:
            return self.verdict()
        interval = f"{self.difference.mean:+.6f} [{self.difference.low:+.6f}, {self.difference.high:+.6f}]"
        return f"{self.our_bytes:12,}{self.our_kl:11.6f}  {interval}  {self.verdict()}"


class Contest:
    """Judges plans of a checkpoint; each plan once. `profile`: what our plans are made from."""

    def __init__(self, checkpoint: Checkpoint, unseen: Tokens, profile: Profile) -> None:
        self.checkpoint = checkpoint
        self.spec = checkpoint.spec
        self.weights = MemoryWeights(checkpoint)
        self._judge = Judge(Decoder(CheckpointWeights(checkpoint), SEQUENCE_LENGTH), unseen)
        self._decoder = Decoder(self.weights, SEQUENCE_LENGTH)
        self._profile = profile
        self._quantizers = joint_quantizers(profile)
        self._judged: dict[Plan, Blocks] = {}

    def judge(self, plan: Plan) -> Blocks:
        """The KL divergence of a plan, block by block."""
        if plan not in self._judged:
            self.weights.round_to(plan, self._quantizers.get(plan.quantizer))
            self._judged[plan] = self.judge_given()
        return self._judged[plan]

    def judge_given(self) -> Blocks:
        """The same of the experts that the weights were given."""
        return self._judge.blocks(self._decoder)

    def line(self, name: str, num_bytes: int, blocks: Blocks) -> Line:
        """Compares with our plan within as many bytes."""
        try:
            plan = ours(self._profile, self.spec, num_bytes)
        except PlanError:
            return Line(name, num_bytes, float(blocks.mean()), None, None, None)
        own, own_bytes = self.judge(plan), stored_bytes(self.spec, plan)
        assert own_bytes <= num_bytes, f"our plan takes {own_bytes:,} bytes, {num_bytes:,} are allowed"
        difference = paired_difference(own, blocks)
        return Line(name, num_bytes, float(blocks.mean()), own_bytes, float(own.mean()), difference)


def compare_llama(contest: Contest, sample: Tokens, llama: LlamaPython, folder: Path) -> Iterator[Line]:
    """Ours beside llama.cpp's types, each within its bytes."""
    contest.weights.give(contest.weights.original)
    write_experts(contest.weights, sample, folder)
    for kind in tqdm(llama_types(contest.spec), desc="llama.cpp", disable=None):
        stored = llama_experts(contest.weights, kind, folder, llama)
        contest.weights.give(stored.block)
        yield contest.line(kind, stored.num_bytes, contest.judge_given())
