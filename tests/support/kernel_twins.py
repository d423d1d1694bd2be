"""The twins of Triton kernels in plain torch that nothing else has: what tests and the GPU's checks compare with."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from moe_pack.formats import RowLayout
from moe_pack.runtime.gpu.kernels.tables import (
    HERE,
    PULLED,
    WHOLE,
    HostRows,
    KeptNeurons,
    Landing,
    LayerTables,
    LeftToCpu,
    RunningNeurons,
)
from moe_pack.runtime.model import RowMatrix, StoredMatrix, linear, run_expert
from support.random_experts import RandomExpert


def gemv_twin(x: Tensor, rows: Tensor, layout: RowLayout | None) -> Tensor:
    """`rows @ x` in plain torch, float32 [n]; `layout` is None for plain values."""
    matrix = StoredMatrix(rows) if layout is None else RowMatrix(layout, rows)
    return linear(x[None], matrix)[0]


def reduce_twin(partials: Tensor, weights: Tensor) -> Tensor:
    return (partials.sum(1) * weights[:, None]).sum(0)


def run_experts_plain(
    x: Tensor, chosen: np.ndarray, weights: Tensor, experts: Sequence[RandomExpert], thresholds: Sequence[float]
) -> Tensor:
    """The weighted sums of each token's experts, float32 [T, d], as `grouped` computes them."""
    y = torch.zeros(x.shape)
    for number, (expert, threshold) in enumerate(zip(experts, thresholds, strict=True)):
        tokens, place = (torch.from_numpy(each) for each in np.nonzero(chosen == number))
        shape = expert.shape
        out = run_expert(x[tokens].float(), expert.packed(), shape.function, shape.selector, threshold)
        y[tokens] += weights[tokens, place][:, None] * out
    return y


def listed_in_blocks(running: RunningNeurons, place: int) -> list[int]:
    """The running neurons of a place, as `select` lists them."""
    blocks, counts = torch.split(running.blocks[place], running.block), running.counts[0, place].tolist()
    return [neuron for block, n in zip(blocks, counts, strict=True) for neuron in block[:n].tolist()]


def compact_plain(
    experts: Tensor,
    tables: LayerTables,
    running: RunningNeurons,
    landing: Landing,
    share: Tensor,
    left: LeftToCpu,
    is_split: bool,
    whole_records: float = 0.0,
    by_expert: bool = False,
    kept: KeptNeurons | None = None,
) -> None:
    share = share.cpu()
    balanced = _balanced_plain(experts, tables, running, landing, float(share), whole_records)
    if tables.selector_at is not None:
        num_whole = int((tables.selector_at[experts.long(), 0] < 0).sum())
        all_missing = max(int(running.counts[1].sum()), 1)
        share = (share * (1 + torch.tensor(num_whole * whole_records) / all_missing)).clamp(max=1)
    for place, e in enumerate(experts.tolist()):
        listed = listed_in_blocks(running, place)
        at = tables.record_at[e].tolist()
        missing = [neuron for neuron in listed if at[neuron] < 0]
        most = landing.num_kept + landing.num_scratch
        num_pulled = min(int((len(missing) * share).floor()), most) if is_split else len(missing)
        num_pulled = balanced[place] if is_split and by_expert else num_pulled
        ranges = ((landing.kept_at, landing.num_kept), (landing.scratch_at, landing.num_scratch))
        units_of = [at + (place * number + j) * landing.slot_units for at, number in ranges for j in range(number)]
        target = dict(zip(missing[:num_pulled], units_of, strict=False))
        if is_split:
            here = [neuron for neuron in listed if at[neuron] >= 0]
            entries = [(neuron, at[neuron]) for neuron in here] + list(target.items())
            to_cpu = missing[num_pulled:]
            running.totals[place] = torch.tensor([len(here), num_pulled, len(to_cpu), num_pulled + len(to_cpu)])
            is_whole = tables.selector_at is not None and tables.selector_at[e, 0] < 0
            left.counts[place] = WHOLE if is_whole else len(to_cpu)
            left.neurons[place, : len(to_cpu)] = torch.tensor(to_cpu, dtype=torch.int32)
            if tables.selector_at is not None:
                left.a[place, : len(to_cpu)] = running.a[place, to_cpu]
        else:
            entries = [(neuron, target.get(neuron, at[neuron])) for neuron in listed]
            running.totals[place] = torch.tensor([len(entries), 0, 0, len(missing)])
        if kept is not None:
            kept.counts[place] = num_kept = min(num_pulled, landing.num_kept)
            kept.neurons[place, :num_kept] = torch.tensor(missing[:num_kept], dtype=torch.int32)
        for number, (neuron, units) in enumerate(entries):
            running.neurons[place, number], running.units[place, number] = neuron, units


def _balanced_plain(
    experts: Tensor, tables: LayerTables, running: RunningNeurons, landing: Landing, share: float, whole_records: float
) -> list[int]:
    """Returns how many records of each expert Algorithm 2 pulls; the list is taken from both ends."""
    order, room = list(range(len(experts))), landing.num_kept + landing.num_scratch
    missing, pulled = running.counts[1].sum(dim=1).tolist(), [0] * len(order)
    units = [tables.kinds[int(tables.kind[e])].record_units for e in experts.tolist()]
    whole = [e for e in experts.tolist() if tables.selector_at is not None and tables.selector_at[e, 0] < 0]
    loaded = 0
    computed = int(whole_records * sum(tables.kinds[int(tables.kind[e])].record_units for e in whole))
    while order:
        is_loaded = loaded * (1 - share) <= computed * share
        place = order.pop(0 if is_loaded else -1)
        pulled[place] = min(missing[place], room) if is_loaded else 0
        loaded += pulled[place] * units[place]
        computed += (missing[place] - pulled[place]) * units[place]
    return pulled


def pull_records_plain(
    experts: Tensor, tables: LayerTables, running: RunningNeurons, host: HostRows, is_split: bool
) -> None:
    for place, e in enumerate(experts.tolist()):
        kind = tables.kinds[int(tables.kind[e])]
        here, pulled = running.totals[place, [HERE, PULLED]].tolist()
        for entry in range(here, here + pulled) if is_split else range(here):
            neuron, units = int(running.neurons[place, entry]), int(running.units[place, entry])
            if tables.record_at[e, neuron] < 0:
                source = int(host.extent_at[e]) + kind.num_rows * kind.selector_units + neuron * kind.record_units
                _copy_row(host.rows, source, tables.arena, units, kind.record_units)


def pull_selectors_plain(
    experts: Tensor, tables: LayerTables, host: HostRows, scratch_at: int, selector_units: Tensor
) -> None:
    assert tables.selector_at is not None
    f, most = tables.selector_at.shape[1], max(kind.selector_units for kind in tables.kinds)
    for place, e in enumerate(experts.tolist()):
        units = tables.kinds[int(tables.kind[e])].selector_units
        selector_units[place] = tables.selector_at[e]
        for neuron in range(f) if tables.selector_at[e, 0] < 0 else ():
            target = scratch_at + place * f * most + neuron * units
            selector_units[place, neuron] = target
            _copy_row(host.rows, int(host.extent_at[e]) + neuron * units, tables.arena, target, units)


def _copy_row(host_rows: Tensor, source: int, arena: Tensor, target: int, units: int) -> None:
    arena[16 * target : 16 * (target + units)] = host_rows[16 * source : 16 * (source + units)]
