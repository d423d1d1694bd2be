"""Measures the time that a decoded token takes in addition to its bytes: Python, small kernels, bookkeeping.

`doctor` decodes with four tiny synthetic packs in a temporary folder, within a budget, so that their experts are
offloaded; their weights take almost no time. A family with more operations in a layer (shared experts, latent
attention) takes a little more time than these figures say.
"""

import tempfile
import time
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np

from moe_pack.convert.synthetic import SyntheticTraits, skewed_popularity, synthesize
from moe_pack.formats import (
    MATRICES,
    ExpertSpec,
    GroupedQuerySpec,
    ModelSpec,
    NormSpec,
    Pack,
    RouterSpec,
    part_format,
    uniform_plan,
)
from moe_pack.formats.spec import RopeSpec
from moe_pack.runtime import Engine, EngineOptions, FixedCosts
from moe_pack.runtime.offload import OffloadedWeights, divide_budget, expert_pages, whole_bytes

_NUM_EXPERTS, _FEW_LAYERS, _MANY_LAYERS, _FEW_ACTIVE, _MANY_ACTIVE = 16, 2, 10, 2, 8
_CONTEXT = 256
_WARM_TURNS, _TOKENS_AT_ONCE = 4, 8
_QUANTILE = 0.25  # of the times of tokens: other work on the machine can only add to them


def measure_fixed_costs(seconds: float) -> FixedCosts:
    """Measures the fixed costs of this machine's CPU.

    Meaning: token(L, k) = token_s + L * (layer_s + k * expert_s), solved from three packs of L layers and k experts a
             token that are fully in memory; miss_s from a fourth run with memory for half of the experts, whose files
             are in the system's cache. The runs take turns, so that other work on the machine slows all of them.
    Args:    seconds: the least time that all runs together decode.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="moe-pack-doctor-")))
        shapes = ((_FEW_LAYERS, _FEW_ACTIVE), (_MANY_LAYERS, _FEW_ACTIVE), (_MANY_LAYERS, _MANY_ACTIVE))
        packs = [_tiny_pack(folder / f"{num_layers}-{k}", num_layers, k) for num_layers, k in shapes]
        runs = [stack.enter_context(closing(_Run(pack))) for pack in packs]
        runs.append(stack.enter_context(closing(_Run(packs[-1], share=0.5))))
        end = time.perf_counter() + seconds
        while time.perf_counter() < end or not runs[-1].times:
            for run in runs:
                run.decode()
        few, many, wide, missing = (float(np.quantile(run.times, _QUANTILE)) for run in runs)
        misses = runs[-1].misses
    layer_s = (many - few) / (_MANY_LAYERS - _FEW_LAYERS)  # with its experts
    expert_s = max((wide - many) / (_MANY_LAYERS * (_MANY_ACTIVE - _FEW_ACTIVE)), 0.0)
    return FixedCosts(
        token_s=max(few - _FEW_LAYERS * layer_s, 0.0),
        layer_s=max(layer_s - _FEW_ACTIVE * expert_s, 0.0),
        expert_s=expert_s,
        miss_s=max((missing - wide) / misses, 0.0) if misses else 0.0,
    )


class _Run:
    """A tiny pack that decodes tokens on demand, with memory for a share of its experts.

    `times`: of tokens, in seconds.
    """

    def __init__(self, folder: Path, share: float = 1.0) -> None:
        self.times: list[float] = []
        with ExitStack() as stack:
            pack = stack.enter_context(Pack(folder))
            whole = whole_bytes(pack.layout, _CONTEXT, 0)
            plan = divide_budget(pack.layout, whole, _CONTEXT, 0)
            missing = int((1 - share) * int(expert_pages(pack.layout, plan.page_bytes).sum()))
            budget = whole - plan.left - missing * (plan.page_bytes + plan.head_bytes)
            options = EngineOptions(budget_bytes=budget, policy="lru", read="pread")
            engine = stack.enter_context(Engine(pack, options, _CONTEXT))
            self._decoder, weights = engine.decoder, engine.weights
            assert isinstance(weights, OffloadedWeights), "with a budget, experts are offloaded"
            self._counts = weights.decode
            self._num_tokens = 0
            for _ in range(_WARM_TURNS):
                self.decode()
            self.times.clear()
            self._stack = stack.pop_all()

    @property
    def misses(self) -> float:
        """The mean number of experts that are read for a token, the first tokens included."""
        return (self._counts.needed - self._counts.hits) / self._counts.tokens

    def decode(self) -> None:
        """Decodes a few tokens and times them; a new sequence begins when the context is full."""
        for _ in range(_TOKENS_AT_ONCE):
            if self._num_tokens % _CONTEXT == 0:
                self._decoder.reset()
            start = time.perf_counter()
            self._decoder.next_logits([self._num_tokens * 37 % 64])
            self.times.append(time.perf_counter() - start)
            self._num_tokens += 1

    def close(self) -> None:
        """Closes engine and pack."""
        self._stack.close()


def _tiny_spec(num_layers: int, num_active: int) -> ModelSpec:
    """Returns a model with the attention and the experts that most families have."""
    return ModelSpec(
        family="tiny",
        hidden_size=64,
        vocab_size=64,
        num_hidden_layers=num_layers,
        moe_layers=tuple(range(num_layers)),
        dense_intermediate_size=None,
        max_position_embeddings=_CONTEXT,
        norm=NormSpec("rms", 1e-5),
        tied_head=False,
        head_bias=False,
        embedding_multiplier=1.0,
        residual_multiplier=1.0,
        logits_scaling=1.0,
        attention=GroupedQuerySpec("grouped_query", 2, 1, 32, None, 32**-0.5, (), "none"),
        rope=RopeSpec(1e4, 32, interleaved=False, scaling=None),
        router=RouterSpec("softmax_topk", _NUM_EXPERTS, num_active, normalize=True),
        expert=ExpertSpec("silu", 16, MATRICES, (), 0),
        shared_expert=None,
    )


def _tiny_pack(folder: Path, num_layers: int, num_active: int) -> Path:
    spec, part = _tiny_spec(num_layers, num_active), part_format(4, 64)
    traits = SyntheticTraits(0.0, skewed_popularity(spec, 0.0, 0), 0.0, 0)
    synthesize(spec, uniform_plan(spec, "none", part, part, part, "nearest"), traits, folder, 1)
    return folder
