"""The time that a decoded token takes in addition to its bytes: Python, small kernels, bookkeeping.

`doctor` decodes with synthetic packs whose experts are offloaded, and subtracts the time of the weights at the
measured rates. The packs have more weights than the processor's caches hold, as real models do: with tiny weights
a layer takes a third of the time. Shared experts or latent attention take a little more.
"""

import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np

from moe_pack import formats, runtime
from moe_pack.convert import synthetic
from moe_pack.convert.plan import speed
from moe_pack.convert.plan.machines import machine_of_cpu
from moe_pack.formats import parts
from moe_pack.runtime import offload
from moe_pack.runtime.offload import budgets

_FEW_LAYERS, _MANY_LAYERS, _FEW_ACTIVE, _MANY_ACTIVE = 2, 4, 2, 8
# Experts, hidden size and neurons of three models. Usual experts have 0.9 MB: 58 MB and more a pack.
_USUAL, _TINY = (32, 1024, 512), (16, 64, 16)
# Records of 16 KiB, of which a tenth runs: one or two reads an expert, whose time is the disk's.
_ROWS, _ROWS_LAYERS, _ROWS_SPARSITY = (16, 4096, 16), 3, 0.9
_CONTEXT = 256
_WARM_TURNS, _TOKENS_AT_ONCE = 4, 8
_INT4 = formats.part_format(4, 64)


def measure_fixed_costs(facts: runtime.MachineFacts, seconds: float) -> runtime.FixedCosts:
    """Measures the fixed costs of this machine's CPU.

    Meaning: token(L, k) = token_s + L * (layer_s + k * expert_s) + weights, solved from three packs of L layers and k
             experts a token that are fully in memory. miss_s: a pack of tiny experts with memory for half of them,
             against one with memory for all. rows_s: likewise, from a pack of which single rows are read. The runs
             take turns, so that other work on the machine slows all of them.
    Args:    facts: with the rates of the CPU; without them, weights count as free.   seconds: the least time that all
             runs together decode.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="moe-pack-doctor-")))
        shapes = ((_FEW_LAYERS, _FEW_ACTIVE), (_MANY_LAYERS, _FEW_ACTIVE), (_MANY_LAYERS, _MANY_ACTIVE))
        usual = [_made(folder / f"{num_layers}-{k}", _small_spec(num_layers, k, *_USUAL)) for num_layers, k in shapes]
        tiny = _made(folder / "tiny", _small_spec(_MANY_LAYERS, _MANY_ACTIVE, *_TINY))
        sparse = _made(folder / "rows", _small_spec(_ROWS_LAYERS, _MANY_ACTIVE, *_ROWS), _ROWS_SPARSITY)
        ways = [*((pack, 1.0, 0.0) for pack in usual), (tiny, 1.0, 0.0), (tiny, 0.5, 0.0)]
        ways += [(sparse, 1.0, 0.0), (sparse, 0.5, 1.0)]
        runs = [_Run(stack, *way) for way in ways]
        end = time.perf_counter() + seconds
        while time.perf_counter() < end or not runs[-1].times:
            for run in runs:
                run.decode()
        few, many, wide = (run.token_s - _weights_s(pack, facts) for run, pack in zip(runs, usual, strict=False))
    present, missing, whole, rows = runs[len(usual) :]
    layer_s = (many - few) / (_MANY_LAYERS - _FEW_LAYERS)  # with its experts
    expert_s = max((wide - many) / (_MANY_LAYERS * (_MANY_ACTIVE - _FEW_ACTIVE)), 0.0)
    return runtime.FixedCosts(
        token_s=max(few - _FEW_LAYERS * layer_s, 0.0),
        layer_s=max(layer_s - _FEW_ACTIVE * expert_s, 0.0),
        expert_s=expert_s,
        miss_s=_each(missing.token_s - present.token_s, missing.misses),
        rows_s=_each(rows.token_s - whole.token_s, rows.in_part),
    )


def _weights_s(folder: Path, facts: runtime.MachineFacts) -> float:
    """Returns the seconds in which a token reads a pack's weights at the measured rates."""
    if not facts.cpu.experts:
        return 0.0
    free = replace(facts, fixed=runtime.FixedCosts(0.0, 0.0, 0.0, 0.0, 0.0))
    machine = machine_of_cpu(free)
    with formats.Pack(folder) as pack:
        layout, k = pack.layout, pack.spec.router.num_experts_per_tok
        experts = sum(k * speed.expert_seconds(layer[0], 1.0, machine)[0] for layer in layout.experts)
        return experts + speed.dense_seconds(layout, machine, _CONTEXT // 2)[0]


def _each(seconds: float, number: float) -> float:
    return max(seconds / number, 0.0) if number else 0.0


class _Run:
    """A small pack that decodes tokens on demand, with memory for a share of its experts."""

    def __init__(self, stack: ExitStack, folder: Path, share: float, cutover: float) -> None:
        self.times: list[float] = []  # of tokens, in seconds
        pack = stack.enter_context(formats.Pack(folder))
        budget = offload.whole_bytes(pack.layout, _CONTEXT, 0) if share == 1 else _budget_for(pack, share)
        options = runtime.EngineOptions(
            device="cpu",
            budget_bytes=budget,
            policy="lru",
            read="pread",
            cutover=cutover,
            chunk_tokens=budgets.LEAST_PREFILL_TOKENS,
        )
        engine = stack.enter_context(runtime.Engine(pack, options, _CONTEXT))
        self._decoder, weights = engine.decoder, engine.weights
        assert isinstance(weights, offload.OffloadedWeights), "with a budget, experts are offloaded"
        self._counts = weights.decode
        self._num_tokens = 0
        for _ in range(_WARM_TURNS):
            self.decode()
        self.times.clear()

    @property
    def token_s(self) -> float:
        return float(np.median(self.times))

    @property
    def in_part(self) -> float:
        return self._counts.in_part / self._counts.tokens

    @property
    def misses(self) -> float:
        return (self._counts.needed - self._counts.hits) / self._counts.tokens

    def decode(self) -> None:
        for _ in range(_TOKENS_AT_ONCE):
            if self._num_tokens % _CONTEXT == 0:
                self._decoder.reset()
            start = time.perf_counter()
            self._decoder.next_logits([self._num_tokens * 37 % 64])
            self.times.append(time.perf_counter() - start)
            self._num_tokens += 1


def _budget_for(pack: formats.Pack, share: float) -> int:
    """Returns the budget with pages for a share of the experts, in the shortest forward passes."""
    sizes = budgets.page_sizes(pack.layout)
    needs = budgets.cpu_needs(pack.layout, sizes, _CONTEXT, 0)
    num_pages = int(share * int(offload.expert_pages(pack.layout, sizes.page_bytes).sum()))
    return needs.fixed(budgets.LEAST_PREFILL_TOKENS).num_bytes + num_pages * (sizes.page_bytes + sizes.head_bytes)


def _small_spec(
    num_layers: int, num_active: int, num_experts: int, hidden_size: int, num_neurons: int
) -> formats.ModelSpec:
    return formats.ModelSpec(
        family="tiny",
        hidden_size=hidden_size,
        vocab_size=64,
        num_hidden_layers=num_layers,
        moe_layers=tuple(range(num_layers)),
        dense_intermediate_size=None,
        max_position_embeddings=_CONTEXT,
        norm=formats.NormSpec("rms", 1e-5),
        tied_head=False,
        head_bias=False,
        embedding_multiplier=1.0,
        residual_multiplier=1.0,
        logits_scaling=1.0,
        attention=parts.GroupedQuerySpec("grouped_query", 2, 1, 32, None, 32**-0.5, (), "none"),
        rope=parts.RopeSpec(1e4, 32, interleaved=False, scaling=None),
        router=formats.RouterSpec("softmax_topk", num_experts, num_active, normalize=True),
        expert=formats.ExpertSpec("silu", num_neurons, formats.MATRICES, (), 0),
        shared_expert=None,
    )


def _made(folder: Path, spec: formats.ModelSpec, sparsity: float = 0.0) -> Path:
    """Makes a pack in 4 bit; with a sparsity one of which single rows are read."""
    if sparsity:
        plan = formats.uniform_plan(spec, "up", formats.part_format(2, 64), formats.BF16, None, "nearest")
    else:
        plan = formats.uniform_plan(spec, "none", _INT4, _INT4, _INT4, "nearest")
    traits = synthetic.SyntheticTraits(sparsity, synthetic.skewed_popularity(spec, 0.0, 0), 0.0, 0)
    synthetic.synthesize(spec, plan, traits, folder, 1)
    return folder
