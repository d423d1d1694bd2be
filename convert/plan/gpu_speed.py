"""The speed of a pack on a GPU: the CPU and the link bring what its memory lacks.

The placement of static rows says which records are missing, whatever tokens came before (`estimate_on_gpu`).
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moe_pack import formats
from moe_pack.calib import forward
from moe_pack.calib.profile import Profile
from moe_pack.convert.plan import machines, speed
from moe_pack.formats.pack import layouts
from moe_pack.formats.parts import specs
from moe_pack.runtime import offload
from moe_pack.runtime.gpu import fit, placements
from moe_pack.runtime.offload import budgets

Array = NDArray[Any]
Floats = NDArray[np.float64]


def estimate_on_gpu(
    layout: formats.PackLayout,
    placement: placements.GpuPlacement,
    machine: machines.Machine,
    popularity: Array,
    heat: Array,
    passes: offload.Passes | None = None,
    seen_tokens: int = 0,
) -> speed.SpeedEstimate:
    """Estimates how fast a pack of this layout decodes on a GPU with `--misses auto`.

    Meaning: a layer takes its dense part, its selectors, and the longest of three that run at the same time:
                 GPU:   the running records that are resident
                 CPU:   a call; the missing records that the link does not bring; whole experts without their selector
                 link:  `pulled_records`, and their products
             If the placement is for experts on the disk, the CPU computes all missing experts. Host memory has an equal
             share of each, and the rest is read.
    Args:    placement: of `place_experts`.   heat: [L, E, H], the share of its tokens for which a row runs, in each of
             H equal slices of an expert's rows, hottest first.   The others as in `estimate_on_cpu`.
    Not modelled: partial sums and tables of rows; memory that is not page-locked; the CPU's other work; policies that
             predict, as `--policy auto` does not. The estimate was not yet compared with a measurement.
    """
    if layout.experts[0][0].selector is None:
        heat = np.ones_like(heat)  # without a selector a token needs all rows
    shares = _gpu_shares(layout, placement, machine, heat)
    routes, layers = speed.routed(layout, popularity, passes, is_rough=False)[0].routes, np.arange(len(layout.experts))

    def by_layer(values: Array) -> Array:
        """Returns the sums over tokens' experts, float64 [T, L], of values [L, E]."""
        sums: Array = values[layers[:, None], routes].sum(axis=2)
        return sums

    def mean(values: Array) -> float:
        return float(by_layer(values).sum(axis=1).mean())

    missing, needed, fixed = shares.missing_bytes, shares.needed_bytes, machine.fixed
    is_split = ((placement.first_dynamic < placement.num_rows) | ~placement.has_selector).any(axis=1)
    chosen = (layers[:, None], routes)
    pulled = pulled_records(
        placement, shares.lacking, routes, shares.pulled_share, placements.work_of_whole(layout, heat)
    )
    cpu_s = by_layer(shares.cpu_s) - (pulled * shares.cpu_row_s[chosen]).sum(axis=2) + fixed.miss_s * is_split
    longest = np.maximum(cpu_s, (pulled * shares.link_row_s[chosen]).sum(axis=2))
    waiting = np.maximum(longest - by_layer(shares.gpu_s), 0.0).sum(axis=1).mean()
    dense_s, dense_bytes = speed.dense_seconds(layout, machine, seen_tokens)
    runs = popularity * (layout.spec.router.num_experts_per_tok / popularity.sum(axis=1, keepdims=True))
    return speed.SpeedEstimate(
        policy="lru",  # the simplest: static rows need none
        hit_rate=1 - mean(missing) / mean(needed),
        misses=runs * missing / needed,
        fetched_bytes=mean(missing),
        read_bytes=mean(needed - missing) + dense_bytes,
        seconds=speed.TokenSeconds(
            fixed.token_s + layout.spec.num_hidden_layers * fixed.layer_s,
            dense_s,
            mean(shares.select_s + shares.gpu_s),
            float(waiting),
        ),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _GpuShares:
    """The shares of GPU, CPU and link in an expert that a token chooses: float64 [L, E], seconds and bytes."""

    select_s: Array  # of the GPU, before the others begin
    gpu_s: Array
    cpu_s: Array  # if nothing is pulled
    # Records that the link may bring, its usual share of them, and what one takes on the CPU and over the link.
    lacking: Array
    pulled_share: Array
    cpu_row_s: Array
    link_row_s: Array
    missing_bytes: Array  # of selector and running records, those that are not resident
    needed_bytes: Array  # of selector and running records, all of them


def _gpu_shares(
    layout: formats.PackLayout, placement: placements.GpuPlacement, machine: machines.Machine, heat: Array
) -> _GpuShares:
    assert machine.host is not None and machine.link_rate is not None, "a GPU has a host and a link"
    host, link_rate, running = machine.host, machine.link_rate, heat.mean(axis=2)
    rows, is_left = running_rows(placement, heat), ~placement.has_selector  # left to the CPU as a whole
    selector_bytes, row_bytes, select_s, row_s, host_select_s, host_row_s = speed.expert_table(
        layout,
        running,
        lambda e, _: (
            e.selector_bytes,
            e.records.row_bytes,
            *speed.row_seconds(e, machine),
            *speed.row_seconds(e, host),
        ),
    )
    cpu_s = rows.missing * host_row_s + is_left * host_select_s
    if placement.misses == "disk":
        on_disk = disk_share(int(budgets.extent_bytes(layout)[is_left].sum()), machine)
        reads = speed.expert_table(layout, running, lambda e, share: (speed.disk_seconds(e, share, machine.disk),))[0]
        cpu_s += on_disk * is_left * reads
    return _GpuShares(
        select_s=~is_left * select_s,
        gpu_s=rows.resident * row_s,
        cpu_s=cpu_s,
        lacking=~is_left * rows.missing,
        pulled_share=link_rate / (link_rate + row_bytes / host_row_s),
        cpu_row_s=host_row_s,
        link_row_s=row_bytes / link_rate + row_s,
        missing_bytes=is_left * selector_bytes + rows.missing * row_bytes,
        needed_bytes=selector_bytes + running * placement.num_rows * row_bytes,
    )


def pulled_records(
    placement: placements.GpuPlacement, lacking: Array, routes: Array, pulled_share: Array | float, work: Array
) -> Array:
    """Returns how many records the link brings for each of a token's experts, as `compact` decides: [T, L, k].

    Meaning: with w experts that the CPU has as a whole, and M records that the others lack, a share of
             min(1, pulled_share * (1 + w * work / M)), as far as there is memory.
    Args:    lacking: [L, E], records that an expert lacks; 0 if the CPU has it as a whole.   routes: [T, L, k].
             pulled_share: [L, E] or one, of all work of the CPU.   work: [L], of `work_of_whole`.
    """
    chosen = (np.arange(len(lacking))[:, None], routes)
    of_experts, num_whole = lacking[chosen], (~placement.has_selector)[chosen].sum(axis=2, keepdims=True)
    more = 1 + num_whole * work[:, None] / np.maximum(of_experts.sum(axis=2, keepdims=True), 1)
    share = np.minimum(np.broadcast_to(pulled_share, lacking.shape)[chosen] * more, 1.0)
    pulled: Array = np.minimum(share * of_experts, placement.num_scratch[:, None])
    return pulled


class RunningRows(NamedTuple):
    """The records of each expert that a token runs, as expected: float64 [L, E], resident on a GPU and missing."""

    resident: Array
    missing: Array


def running_rows(placement: placements.GpuPlacement, heat: Array) -> RunningRows:
    """Returns how many of an expert's records run for a token that chooses it.

    Args:    heat: [L, E, H], as in `estimate_on_gpu`.
    """
    before, num_rows = placement.first_dynamic, placement.num_rows
    static = _rows_before(heat, before, num_rows)
    return RunningRows(static, _rows_before(heat, np.full_like(before, num_rows), num_rows) - static)


def _rows_before(heat: Array, number: Array, num_rows: int) -> Array:
    """Returns how many of an expert's first rows run, as expected: float64 [L, E].

    Args:    number: int64 [L, E], of the first rows.
    """
    edges = np.linspace(0, num_rows, heat.shape[2] + 1)
    covered = np.clip(number[:, :, None] - edges[:-1], 0, np.diff(edges))
    expected: Array = (heat * covered).sum(axis=2)
    return expected


def disk_share(num_bytes: int, machine: machines.Machine) -> float:
    """Returns the share of so many bytes of experts that does not fit in host memory."""
    return 0.0 if machine.ram_bytes is None else max(0.0, 1 - machine.ram_bytes / max(num_bytes, 1))


NUM_SLICES = 16


class RowHeat:
    """The heat of slices of an expert's rows in the pack's order, hottest first, read from the profile on demand.

    Args:    profile: if None, all neurons run equally often.
    """

    def __init__(self, profile: Profile | None) -> None:
        self._profile = profile
        self._known: dict[int, Floats] = {}

    def at(self, selector: specs.Selector, sparsity: Floats) -> Floats:
        """Returns the share of an expert's tokens for which a row of each slice is read: float64 [L, E, slices].

        Meaning: interpolated between the counted sparsities, then scaled so that the mean is 1 - sparsity. Without a
                 selector every row is read: 1.
        Args:    sparsity: [L, E].
        """
        if selector == "none":
            return np.ones((*sparsity.shape, 1))
        running = 1 - sparsity[:, :, None]
        if self._profile is None:
            return running
        levels = np.array((0.0, *forward.HOT_SPARSITIES))
        counted = self._counted(forward.KINDS.index(selector), self._profile)  # [L, E, levels, slices]
        above = np.clip(np.searchsorted(levels, sparsity, side="right"), 1, len(levels) - 1)
        part = np.clip((sparsity - levels[above - 1]) / (levels[above] - levels[above - 1]), 0, 1)[:, :, None]
        low, high = (np.take_along_axis(counted, n[:, :, None, None], axis=2)[:, :, 0] for n in (above - 1, above))
        heat = low + (high - low) * part
        mean = heat.mean(axis=2, keepdims=True)
        scaled: Floats = heat * np.divide(running, mean, out=np.ones_like(mean), where=mean > 0)
        return np.minimum(scaled, 1.0)

    def _counted(self, kind_idx: int, profile: Profile) -> Floats:
        """Returns the means of slices at sparsity 0 and at all counted sparsities: float64 [L, E, levels, slices]."""
        if kind_idx not in self._known:
            layers = []
            for layer_idx in range(len(profile.spec.moe_layers)):
                statistics = profile.statistics(layer_idx)
                shares = np.stack(
                    [statistics.hot_share(kind_idx, sparsity) for sparsity in forward.HOT_SPARSITIES], axis=1
                )
                ordered = -np.sort(-shares.astype(np.float64), axis=2)  # [E, levels, f]
                ends = np.linspace(0, ordered.shape[2], min(NUM_SLICES, ordered.shape[2]) + 1).astype(np.int64)
                sums = np.concatenate([np.zeros((*ordered.shape[:2], 1)), np.cumsum(ordered, axis=2)], axis=2)
                means = np.diff(sums[:, :, ends], axis=2) / np.diff(ends)
                layers.append(np.concatenate([np.ones_like(means[:, :1]), means], axis=1))
            self._known[kind_idx] = np.stack(layers)
        return self._known[kind_idx]


class GpuTier(speed.MemoryTier):
    """GPU memory over host memory, and that over the disk: the tier of `--device cuda`."""

    def __init__(
        self,
        machine: machines.Machine,
        routing: speed.RoutingFacts,
        heats: RowHeat,
        budget_bytes: int,
        context_tokens: int,
    ) -> None:
        super().__init__(machine, routing, budget_bytes, context_tokens)
        self._heats = heats

    def estimate(
        self, layout: layouts.PackLayout, sparsity: Floats, less_bytes: int = 0, is_rough: bool = False
    ) -> speed.SpeedEstimate:
        # Rows are placed as in a run, which does not know how often each runs (`usual_heat`).
        routing, machine = self._routing, self._machine
        needs = fit.gpu_needs(layout, self._context_tokens)
        division = fit.divide_gpu(needs, self.budget_bytes - less_bytes, self._context_tokens)
        fits_host = disk_share(int(budgets.extent_bytes(layout).sum()), machine) == 0
        placement = placements.place_experts(
            layout,
            division.experts,
            "split" if fits_host else "disk",
            routing.popularity,
            placements.usual_heat(layout, sparsity),
            is_pulled=fits_host,
            offset_bytes=placements.offset_bytes_for(layout, self.budget_bytes),
        )
        heat = self._heats.at(_selector_of(layout), sparsity)
        token = estimate_on_gpu(layout, placement, machine, routing.popularity, heat, routing.passes, self._seen_tokens)
        return replace(token, shares=_gpu_parts(division, placement))

    def least_bytes(self, layout: layouts.PackLayout) -> int:
        return fit.least_gpu_budget(layout, self._context_tokens)

    def fetch_seconds(self, expert: layouts.ExpertLayout, sparsity: float) -> float:
        """Returns the seconds in which the CPU computes an expert that is not resident, and reads it from the disk.

        A part is from the disk if experts do not fit in host memory. The link's share does not count: it brings
        nothing of an expert whose selector is not resident.
        """
        assert self._machine.host is not None, "a GPU has a host"
        on_disk = disk_share(expert.num_bytes * self._routing.popularity.size, self._machine)  # if all were like this
        computing = speed.expert_seconds(expert, 1 - sparsity, self._machine.host)[0]
        return computing + on_disk * speed.disk_seconds(expert, 1 - sparsity, self._machine.disk)


def _gpu_parts(division: budgets.Division, placement: placements.GpuPlacement) -> tuple[budgets.MemoryPart, ...]:
    fixed = division.fixed
    return (
        budgets.MemoryPart("dense weights", fixed.dense),
        budgets.MemoryPart("key-value cache", fixed.cache),
        budgets.MemoryPart("workspace", fixed.workspace),
        budgets.MemoryPart("overhead", fixed.overhead),
        budgets.MemoryPart("static rows", int(placement.static_bytes.sum())),
        budgets.MemoryPart("slots", placement.dynamic_bytes),
        budgets.MemoryPart("tables of rows", placement.other_bytes),
        budgets.MemoryPart("left over", division.experts - placement.num_bytes),
    )


def _selector_of(layout: layouts.PackLayout) -> specs.Selector:
    selected = layout.experts[0][0].selector
    if selected is None:
        return "none"
    names = {part.name for part in selected.parts}
    return "both" if len(names) == 2 else "gate" if "gate" in names else "up"
