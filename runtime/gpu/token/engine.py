"""The engine on a GPU for a pack, and its fit into a budget; importing this needs Triton.

The memory of driver, kernels and forward passes is not assumed. A first engine gets the least memory for experts, runs
every kernel and its longest passes, and is measured. The engine that stays gets the rest of the budget for its experts,
and runs the longest pass too, so that its prompts find the memory that they need (`fit_to_gpu`).
"""

import gc
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from moe_pack import formats
from moe_pack.runtime import model, offload
from moe_pack.runtime.cpu import Kernels
from moe_pack.runtime.gpu import cpu_share, devices, fit, placements
from moe_pack.runtime.gpu.kernels import elementwise
from moe_pack.runtime.gpu.prefill import GpuWeights
from moe_pack.runtime.gpu.token import decoder
from moe_pack.runtime.gpu.token import step as token_step
from moe_pack.runtime.gpu.token.prefetch import PredictionPlan
from moe_pack.runtime.gpu.weights import ExpertMemory
from moe_pack.runtime.model.caches import KvDtype
from moe_pack.runtime.offload import budgets

_ROUNDING_BYTES = 4 << 20  # the driver allocates in pieces of 2 MiB
_HEADS = ("head", "embed")  # the roles that can give logits
# An allocation of torch with so many bytes or more has a piece of the driver's memory of its own. Smaller ones share
# pieces of 20 MiB, and there may be one piece more than was measured.
_OWN_PIECE_BYTES, _SHARED_PIECE_BYTES = 10 << 20, 20 << 20


@dataclass(frozen=True, slots=True)
class GpuInputs:
    """The parts of an engine that do not depend on its memory; all stay the caller's."""

    pack: formats.Pack
    device: torch.device
    misses: placements.Misses  # who has missing records
    host: devices.HostArena | None  # experts in host memory; None if `tier` has them
    tier: model.ExpertRunner | None  # the CPU's own engine
    kernels: Kernels | None  # compute the CPU's share; None if everything is pulled or `tier` computes
    # By which the CPU computes some of the missing experts in passes of many tokens; None if it computes none.
    rates: cpu_share.Rates | None
    pulled_share: float  # of missing records of one token, that the link brings
    popularity: NDArray[Any]  # [L, E], how often experts are chosen, in any unit
    dynamic_share: float = placements.DYNAMIC_SHARE  # of the memory for experts, for rows on their way
    is_fast: bool = False  # whether a value in prompts is one float16 number, and not two
    prediction: PredictionPlan | None = None  # of experts, whose records the link brings ahead; None: none
    # Resident experts replace missing ones with low scores, as in `runtime.offload.split.substitute`, which changes the
    # answer; None: no expert is replaced.
    alpha: float | None = None
    by_expert: bool = False  # as in `StepInputs`
    few_tokens: int = decoder.FEW_TOKENS  # as in `GpuDecoder`
    offset_bytes: int = 4  # from `placements.offset_bytes_for`
    sequences: offload.Sequences = offload.ONE_SEQUENCE  # that run at once, each with a context of its own
    num_rows: int = 1  # the most tokens of a graph, of several sequences or of one

    @property
    def has_link(self) -> NDArray[np.bool_] | None:
        """The layers whose records the link may bring, bool [L]: those that a GPU reads in host memory; None: all."""
        num_layers = len(self.pack.layout.experts)
        if self.device.type != "cuda" or self.host is None:
            return None
        return np.array([self.host.is_layer_locked(layer_idx) for layer_idx in range(num_layers)])

    @property
    def num_predicted(self) -> int:
        """The experts of each layer for which records are pulled ahead."""
        return 0 if self.prediction is None else self.prediction.num_predicted

    @property
    def least_bytes(self) -> int:
        """The least memory for experts in which an engine runs."""
        sizes = (self.has_link, self.num_predicted, self.pulled_share > 0, self.offset_bytes)
        return placements.least_placement(self.pack.layout, self.misses, *sizes).num_bytes


def placement_of(inputs: GpuInputs, expert_bytes: int) -> placements.GpuPlacement:
    """Returns the division of the device's memory for experts. Raises: RunError if too little is left for them."""
    layout, heat = inputs.pack.layout, placements.usual_heat(inputs.pack.layout, inputs.pack.thresholds)
    sizes = (inputs.dynamic_share, inputs.has_link, inputs.pulled_share > 0, inputs.num_predicted)
    given = (inputs.misses, inputs.popularity, heat, *sizes, inputs.offset_bytes, inputs.num_rows)
    return placements.place_experts(layout, expert_bytes, *given)


class GpuEngine:
    """The engine for a pack. Owns its memory, not its inputs: `close` it.

    Args:    expert_bytes: the device's memory for experts.   chunk_tokens: of a forward pass, at most.
    Raises:  RunError if too little memory is left for experts.
    """

    def __init__(
        self, inputs: GpuInputs, expert_bytes: int, context_tokens: int, chunk_tokens: int, cache_dtype: KvDtype = "f32"
    ) -> None:
        pack, device = inputs.pack, inputs.device
        heat, placement = placements.usual_heat(pack.layout, pack.thresholds), placement_of(inputs, expert_bytes)
        queues = devices.Queues(device)
        with ExitStack() as opened:
            self.memory = opened.enter_context(closing(ExpertMemory(pack, placement, inputs.host, device)))
            exchange = cpu_share.Exchange.allocate(pack, placement, device.type == "cuda", inputs.num_rows)
            share, prompt_share = _cpu_shares(inputs, placement, exchange, opened)
            spare_bytes = max(0, expert_bytes - placement.num_bytes - _ROUNDING_BYTES) if placement.is_whole else 0
            self.weights = GpuWeights(
                pack, device, self.memory, inputs.host, queues, chunk_tokens, inputs.tier, prompt_share, inputs.is_fast,
                spare_bytes,
            )  # fmt: skip
            step = token_step.StepInputs(
                queues=queues,
                host=inputs.host,
                share=share,
                exchange=exchange,
                pulled_share=inputs.pulled_share,
                whole_records=placements.work_of_whole(pack.layout, heat),
                prediction=inputs.prediction,
                substitution=None
                if inputs.alpha is None
                else token_step.Substitution(inputs.alpha, placements.mostly_static(placement, heat)),
                by_expert=inputs.by_expert,
            )
            sizes_of_passes = (context_tokens, device, chunk_tokens, cache_dtype)
            rest = (inputs.few_tokens, inputs.sequences.number, inputs.sequences.checkpoints)
            self.decoder = decoder.GpuDecoder(self.weights, step, *sizes_of_passes, *rest, num_rows=inputs.num_rows)
            opened.callback(self.decoder.close)
            self.expert_bytes, self.dynamic_bytes = self.memory.num_bytes, placement.dynamic_bytes
            self.pass_bytes = self.weights.pass_bytes
            self._opened = opened.pop_all()

    def run_rows(self) -> None:
        """Launches passes of several rows once, without graphs: their kernels are others than a token's."""
        self.decoder.launch_all()

    def prepare(self) -> None:
        """Captures the launches of passes of few tokens as graphs."""
        self.decoder.prepare()

    def tune(self, known: decoder.LinkShares | None = None) -> decoder.LinkShares | None:
        """Sets what only whole tokens show, as in `GpuDecoder.tune`; without a GPU times mean nothing, so None."""
        return self.decoder.tune(known) if self.memory.device.type == "cuda" else None

    def close(self) -> None:
        """Releases the device's memory, after the device has done what it was given."""
        if self.memory.device.type == "cuda":
            torch.cuda.synchronize(self.memory.device)
        self._opened.close()
        del self.decoder, self.weights, self.memory


def _cpu_shares(
    inputs: GpuInputs, placement: placements.GpuPlacement, exchange: cpu_share.Exchange, opened: ExitStack
) -> tuple[cpu_share.CpuShare | None, cpu_share.PromptShare | None]:
    """Returns the CPU's shares of one token and of many; `opened` closes them."""
    if placement.is_whole or inputs.misses == "pull":
        return None, None
    ask = None if inputs.device.type != "cuda" else devices.driver_ask() or elementwise.ask
    if inputs.tier is not None:
        return opened.enter_context(closing(cpu_share.TierShare(inputs.tier, exchange, ask))), None
    assert inputs.host is not None and inputs.kernels is not None, "they compute the CPU's share"
    given = (inputs.pack, inputs.host, inputs.kernels)
    share = opened.enter_context(closing(cpu_share.PoolShare(*given, exchange, ask)))
    if inputs.rates is None:
        return share, None
    return share, opened.enter_context(closing(cpu_share.PromptShare(*given, inputs.rates)))


@dataclass(slots=True)
class Measured:
    """The memory of an engine with the least memory for experts, after every kernel and the longest passes; bytes."""

    overhead: int  # of everything that is not for experts
    cache: int
    passes: int  # as of `GpuEngine.pass_bytes`
    spare: int | None = None  # kept by torch for the longest pass, in the engine that stays; None: none has stayed yet


@dataclass(slots=True)
class Measurements:
    """The measurements of engines with the same inputs: later engines need no new ones."""

    context_bytes: int | None = None  # of the driver's context, before the first engine
    by_chunk: dict[int, Measured] = field(default_factory=dict)  # by the most tokens of a forward pass


def fit_to_gpu(
    pack: formats.Pack,
    device: torch.device,
    memory: devices.GpuMemory,
    request: fit.GpuRequest,
    least_bytes: int,
    build: Callable[[int, int], GpuEngine],
    compile_ahead: Callable[[Callable[[], None]], object] = lambda run: None,
    known: Measurements | None = None,
) -> tuple[GpuEngine, fit.GpuMemoryUse]:
    """Returns an engine whose experts have the rest of the budget, and its use of memory; it is still to be tuned.

    Torch keeps the memory of its longest pass. Later passes cut theirs from it: if a prompt began with short ones,
    torch would keep a larger piece for each that is longer than all before. The first engine that stays runs that pass;
    later ones reserve as much.
    Args:    least_bytes: the least that experts run in.   build: builds an engine with so many bytes for experts, and
             at most so many tokens a forward pass.   compile_ahead: compiles all kernels that a function launches.
             known: measurements that hold for this engine; new ones are added.
    Raises:  BudgetTooSmall.
    """
    known = Measurements() if known is None else known
    free_unused_memory()  # torch may keep memory of an earlier engine
    torch.zeros(1, device=device)  # makes the driver's context
    used_bytes = memory.used_bytes()
    if known.context_bytes is None:
        known.context_bytes = used_bytes
    budget = request.budget_bytes or fit.usual_budget(used_bytes + memory.free_bytes())
    chunk = _chunk_tokens(pack, request, budget, known.context_bytes)
    if chunk not in known.by_chunk:
        with closing(build(least_bytes, chunk)) as first:
            known.by_chunk[chunk] = _measure(pack, first, chunk, memory, compile_ahead)
        free_unused_memory()
    measured = known.by_chunk[chunk]
    # What drafts is loaded after the engine that stays.
    overhead = measured.overhead + request.sequences.draft_bytes
    overhead_kept = overhead + _ROUNDING_BYTES + (_SHARED_PIECE_BYTES if least_bytes < _OWN_PIECE_BYTES else 0)
    expert_bytes = budget - overhead_kept
    if expert_bytes < least_bytes:
        needed, experts = overhead_kept + least_bytes, formats.size_text(least_bytes)
        reason = (
            f"at least {formats.size_text(needed)} are needed: {experts} for experts, the rest for everything else, "
            "as measured"
        )
        raise budgets.BudgetTooSmall(budget, needed, reason, "give more, take --device cpu")
    built = build(expert_bytes, chunk)
    try:
        built.prepare()
        if measured.spare is None:
            before = unused_bytes()
            run_longest_pass(pack, built, chunk)
            measured.spare = unused_bytes() - before
        else:
            torch.empty(measured.spare, dtype=torch.uint8, device=device)
    except BaseException:
        built.close()
        raise
    dense = pack.manifest.totals.dense
    rest = overhead - dense - measured.cache + built.pass_bytes - measured.passes
    return built, fit.GpuMemoryUse(budget, dense, measured.cache, built.expert_bytes, built.dynamic_bytes, rest)


def _measure(
    pack: formats.Pack,
    first: GpuEngine,
    chunk_tokens: int,
    memory: devices.GpuMemory,
    compile_ahead: Callable[[Callable[[], None]], object],
) -> Measured:
    def run() -> None:
        run_everything(pack, first, chunk_tokens)
        first.run_rows()

    compile_ahead(run)
    first.prepare()
    run_everything(pack, first, chunk_tokens)
    return Measured(memory.used_bytes() - first.expert_bytes, first.decoder.cache_bytes, first.pass_bytes)


def _chunk_tokens(pack: formats.Pack, request: fit.GpuRequest, budget: int, context_bytes: int) -> int:
    """Returns the most tokens of a forward pass, by an estimate."""
    costs = fit.GpuCosts(request.cache_dtype, context_bytes, request.sequences)
    needs = fit.gpu_needs(pack.layout, request.context_tokens, costs)
    most = fit.divide_gpu(needs, budget, request.context_tokens).chunk_tokens
    return min(request.chunk_tokens or most, most, request.context_tokens)


def run_everything(pack: formats.Pack, built: GpuEngine, chunk_tokens: int) -> None:
    """Runs every kernel that the engine can launch, and its longest passes.

    Afterwards no prompt and no token loads another kernel or takes more memory. The kernel of a product depends on the
    number of tokens, in powers of two, and on the format of rows: an expert of each format, and a matrix of each
    format and shape, run with every such number. Torch's unused memory is given back before the passes, which show how
    much memory is needed.
    """
    decoder, weights, device = built.decoder, built.weights, built.decoder.device
    d, k = pack.spec.hidden_size, pack.spec.router.num_experts_per_tok
    lengths = {*(1 << power for power in range(chunk_tokens.bit_length())), chunk_tokens}
    for length in sorted(lengths, reverse=True):  # the allocator cuts shorter ones from what the longest has left
        for layer_idx, experts in _experts_of_each_format(pack):
            chosen = torch.tensor(experts, device=device).expand(length, k)
            x = torch.zeros(length, d, device=device)
            model.run_experts(x, chosen, torch.ones_like(chosen) / k, weights, layer_idx)
        for role, num_cols in _matrices_of_each_format(pack):
            if length <= fit.LOGITS_AT_ONCE or role not in _HEADS:
                model.linear(torch.zeros(length, num_cols, device=device), weights.matrix(role))
    free_unused_memory()
    _run_pass(pack, built, 0, chunk_tokens)
    run_longest_pass(pack, built, chunk_tokens)
    _run_pass(pack, built, decoder.cache.context_tokens - 1, 1)


def run_longest_pass(pack: formats.Pack, built: GpuEngine, chunk_tokens: int) -> None:
    """Runs the pass of a prompt that takes the most memory: its tokens are the last that the context has place for.

    Attention then has the most keys, which are decoded if they are stored as codes. Behind it comes the work of
    requests between passes: checkpoints, and copies of a sequence for another one.
    """
    _run_pass(pack, built, built.decoder.cache.context_tokens - chunk_tokens, chunk_tokens)


def _run_pass(pack: formats.Pack, built: GpuEngine, start: int, num_tokens: int) -> None:
    """Runs a pass of drawn tokens, so that experts of all kinds have some, from a position on; then forgets it."""
    decoder = built.decoder
    sequence, *others = decoder.sequences
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(pack.spec.vocab_size, (num_tokens,), generator=draw).tolist()
    sequence.reset()
    sequence.cache.num_tokens = start
    if num_tokens == 1:
        decoder.logits(ids)
    else:  # also where so few tokens run one after another
        hidden = decoder.append(sequence, ids)[-1]
        if pack.ends:
            decoder.logits_of(hidden[-fit.LOGITS_AT_ONCE :])
        del hidden  # a request's are gone by then
        sequence.save_checkpoint()
        for other in others[:1] if sequence.cache.is_cut_anywhere or sequence.checkpoints else ():
            other.take_beginning(sequence, sequence.num_tokens)
            other.reset()
    sequence.reset()


def _experts_of_each_format(pack: formats.Pack) -> list[tuple[int, list[int]]]:
    """Returns layers, each with as many experts as a token has, so that every format of experts is among them."""
    k, seen, choices = pack.spec.router.num_experts_per_tok, set[formats.ExpertLayout](), list[tuple[int, list[int]]]()
    for layer_idx, layer in enumerate(pack.layout.experts):
        for number, layout in enumerate(layer):
            if layout not in seen:
                others = [other for other in range(len(layer)) if other != number]
                chosen = sorted([number, *others[: k - 1]])
                choices.append((layer_idx, chosen))
                seen |= {layer[each] for each in chosen}
    return choices


def _matrices_of_each_format(pack: formats.Pack) -> list[tuple[str, int]]:
    """Returns the role and the columns of a dense matrix of each format and shape that multiplies tokens."""
    matrices: dict[object, tuple[str, int]] = {}
    for dense in pack.layout.dense:
        role, shape = dense.role.name, dense.role.shape
        is_product = (role != "embed" or pack.spec.tied_head) and not role.endswith(".kv_b")
        if len(shape) == 2 and is_product:
            matrices.setdefault((dense.rows, dense.dtype, shape, role in _HEADS), (role, shape[1]))
    return list(matrices.values())


def unused_bytes() -> int:
    """Returns the bytes that torch keeps for tensors of a MiB or more, and that none uses; 0 without a GPU."""
    stats = torch.cuda.memory_stats() if torch.cuda.is_initialized() else {}  # type: ignore[no-untyped-call]  # untyped in torch
    reserved, allocated = (stats.get(f"{kind}_bytes.large_pool.current", 0) for kind in ("reserved", "allocated"))
    return int(reserved - allocated)


def free_unused_memory() -> None:
    """Gives memory back to the driver that torch keeps and nothing uses."""
    gc.collect()
    torch.cuda.empty_cache()
