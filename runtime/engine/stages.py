"""The engine on several GPUs: each has an engine of its own for some consecutive layers, within its own budget.

Layers are divided by an estimate, so that each GPU has the same share of its experts in its memory; where all fit, by
the time in which each reads what a token needs. The first GPU has the last layers: what a process computes outside of
the decoder, as drafts, runs on its usual device. Importing this needs Triton.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from moe_pack import formats
from moe_pack.formats.pack.slices import PackSlice, cuts
from moe_pack.runtime.engine import built, machine
from moe_pack.runtime.engine.drafting import DraftChoice
from moe_pack.runtime.engine.gpu import GpuPart, GpuRun, LiveGpus, built_of, open_gpu
from moe_pack.runtime.gpu import devices, fit
from moe_pack.runtime.model.kv_cache import layer_cache_bytes
from moe_pack.runtime.offload import budgets


def build_on_gpus(setup: built.Setup, choice: DraftChoice, gpus: Sequence[torch.device]) -> built.Built:
    """Builds an engine for each GPU, and the decoder of all layers.

    Args:    gpus: as many as budgets; the first one gets the last layers.
    Raises:  BudgetTooSmall; RunError if an option cannot be followed, or the layers cannot be divided.
    """
    setup.options.check_gpu(setup.pack.spec)
    draft_bytes = choice.memory_bytes(setup.context_tokens)
    setup = replace(setup, sequences=replace(setup.sequences, draft_bytes=draft_bytes))
    setups, parts = _setups(setup, choice, gpus), list[GpuPart]()
    with ExitStack() as stack:
        for own, run in zip(setups, open_gpus(setups, gpus), strict=True):
            opened_here = stack.enter_context(_closed_on(run.device))
            with devices.on_device(run.device):
                parts.append(GpuPart(own, run, None, choice.is_drafting(setup.options), opened_here))

        def assemble() -> built.Built:
            first, *others = (part.facts for part in reversed(parts))
            earlier, checkpoints = [part.facts.engine.decoder for part in parts[:-1]], setup.sequences.checkpoints
            first.engine.decoder.join(earlier, setup.pack.spec, checkpoints)
            setup.fallbacks[:] = dict.fromkeys(setup.fallbacks)  # each GPU has noted its own
            facts = built.Facts("gpu", setup.options.whole_budget, parts[-1].tier, first, tuple(others))
            return built_of(setup, choice, parts[-1], facts)

        live = LiveGpus(parts, assemble)
        stack.callback(live.release)
        return replace(live.take(), opened=stack.pop_all())


def open_gpus(setups: Sequence[built.Setup], gpus: Sequence[torch.device]) -> list[GpuRun]:
    """Opens the GPUs for the setups of their layers, the first layers' first."""
    memories = devices.GpuMemory.of_each(gpus)
    return [
        open_gpu(own, *gpu) for own, gpu in zip(setups, reversed(list(zip(gpus, memories, strict=True))), strict=True)
    ]


@contextmanager
def _closed_on(device: torch.device) -> Iterator[ExitStack]:
    """Gives a stack that is closed while a device is torch's current one."""
    stack = ExitStack()
    try:
        yield stack
    finally:
        with devices.on_device(device):
            stack.close()


def _setups(setup: built.Setup, choice: DraftChoice, gpus: Sequence[torch.device]) -> list[built.Setup]:
    """Returns the setup of each GPU's layers, the first layers' first."""
    pack, options, sequences = setup.pack, setup.options, setup.sequences
    costs, given = fit.GpuCosts(setup.kv_dtype, sequences=sequences), options.gpu_budgets[::-1]
    ends = divide_layers(pack.layout, given, setup.context_tokens, costs, memory_rates(gpus)[::-1])
    ram, host_bytes, found = options.ram_bytes or machine.usual_bytes(), devices.host_bytes(pack), list[built.Setup]()
    for budget, (first, last) in zip(given, pairwise((0, *ends)), strict=True):
        is_last = last == pack.spec.num_hidden_layers
        part = PackSlice(pack, first, last, has_embed=is_last and choice.layer is not None)
        # The joined decoder allocates checkpoints, within each GPU's budget.
        room = budgets.checkpoint_bytes(part.spec, setup.context_tokens, budgets.LEAST_PREFILL_TOKENS, setup.kv_dtype)
        kept = sequences.number * sequences.checkpoints * room
        own = replace(sequences, checkpoints=0, draft_bytes=kept + (sequences.draft_bytes if is_last else 0))
        ram_bytes = None if ram is None else ram * devices.host_bytes(part) // host_bytes
        own_options = replace(options, budget_bytes=budget, ram_bytes=ram_bytes)
        found.append(replace(setup, pack=part, options=own_options, sequences=own))
    return found


def memory_rates(gpus: Sequence[torch.device]) -> list[float]:
    """Returns how fast each GPU reads its memory, in any unit; all alike where one is not known."""
    found = []
    for device in gpus:
        properties = torch.cuda.get_device_properties(device)
        clock, width = (getattr(properties, name, 0) for name in ("memory_clock_rate", "memory_bus_width"))
        found.append(float(clock * width))
    return found if all(found) else [1.0] * len(found)


# ---- the division of layers -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Estimate:
    """The estimated bytes of layers; int64 [L] each."""

    fixed: NDArray[np.int64]  # dense tensors, keys, values and states
    experts: NDArray[np.int64]
    read: NDArray[np.int64]  # by a token: dense tensors, and as many experts as it chooses
    embed_bytes: int
    head_bytes: int  # with all dense tensors after the last layer, and what drafts
    stage_bytes: int  # of each stage: the driver's context and the workspace
    least_bytes: int  # for experts

    def stage(self, first: int, last: int) -> tuple[int, int, int]:
        """Returns the bytes of a stage without its experts, those of its experts, and those that a token reads."""
        own, head = slice(first, last), self.head_bytes * (last == len(self.fixed))
        fixed = self.stage_bytes + int(self.fixed[own].sum()) + head + self.embed_bytes * (first == 0)
        return fixed, int(self.experts[own].sum()), int(self.read[own].sum()) + head


def divide_layers(
    layout: formats.PackLayout,
    given: Sequence[int],
    context_tokens: int,
    costs: fit.GpuCosts,
    rates: Sequence[float],
) -> tuple[int, ...]:
    """Returns where the layers of each stage end, so that the smallest share of resident experts is as large as it can.

    Args:    given: the budget of each stage, the first layers' first.   rates: of its memory, in any unit. If all
             experts fit, and between divisions that are as good, the slowest stage is as fast as it can.
    Raises:  RunError if a stage would have no layer with experts, or a budget is too small for one layer.
    """
    spec, estimate = layout.spec, _estimate(layout, context_tokens, costs)
    possible, num_layers = cuts(spec), spec.num_hidden_layers
    if len(possible) < len(given) - 1:
        raise formats.RunError(
            f"--budget has {len(given)} sizes, and this model can be divided between {len(possible) + 1} GPUs at most; "
            "give fewer"
        )
    bounds = (0, *possible, num_layers)
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (1.0, 0.0, ())}  # by end: share, -seconds, all ends
    for number, (budget, rate) in enumerate(zip(given, rates, strict=True)):
        found: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        for first, (share, speed, ends) in best.items():
            for last in (end for end in bounds if end > first and (end == num_layers) == (number == len(given) - 1)):
                fixed, experts, read = estimate.stage(first, last)
                if not experts or fixed + estimate.least_bytes > budget:
                    continue
                own = min(1.0, (budget - fixed) / experts)
                new = (min(share, own), min(speed, -read / rate), (*ends, last))
                found[last] = max(found.get(last, new), new)
        best = found
    if num_layers not in best:
        sizes, least = ", ".join(map(formats.size_text, given)), estimate.stage_bytes + estimate.least_bytes
        raise formats.RunError(
            f"--budget: one of {sizes} is too small for a layer: a GPU needs some {formats.size_text(least)}, and more "
            "for the layer's dense weights and cache; give more, or fewer sizes"
        )
    return best[num_layers][2]


def _estimate(layout: formats.PackLayout, context_tokens: int, costs: fit.GpuCosts) -> _Estimate:
    spec, needs = layout.spec, fit.gpu_needs(layout, context_tokens, costs)
    parts, layers = needs.fixed(needs.shortest_chunk), range(spec.num_hidden_layers)
    dense, ends = np.zeros(len(layers), np.int64), {"embed": 0, "head": 0}
    for each in layout.dense:
        if each.role.name.startswith("layers."):
            dense[int(each.role.name.split(".")[1])] += each.entry.num_bytes
        else:
            ends["embed" if each.role.name == "embed" else "head"] += each.entry.num_bytes
    cached = np.array([
        layer_cache_bytes(spec, layer, context_tokens, needs.shortest_chunk, costs.kv_dtype) for layer in layers
    ], np.float64)  # fmt: skip
    if spec.mixer is not None:
        cached[list(spec.mixer.layers)] += 8 * spec.mixer.state.num_values  # with the copy to which they lead back
    experts = np.zeros(len(layers), np.int64)
    experts[list(spec.moe_layers)] = [sum(expert.num_bytes for expert in layer) for layer in layout.experts]
    running = experts * spec.router.num_experts_per_tok // spec.router.num_experts
    return _Estimate(
        fixed=dense + (parts.cache * cached / max(cached.sum(), 1)).astype(np.int64),
        experts=(experts * (needs.all_experts / experts.sum())).astype(np.int64),  # with the tables of their rows
        read=dense + running,
        embed_bytes=ends["embed"],
        head_bytes=ends["head"] + ends["embed"] * spec.tied_head + costs.sequences.draft_bytes,
        stage_bytes=parts.workspace + parts.overhead,
        least_bytes=needs.least_experts,
    )
