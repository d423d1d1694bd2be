"""The experts of one token: which neurons run, one list of them with the place of each record, and their outputs.

`select` multiplies selectors, applies the threshold, and lists the running neurons of each block. `compact` makes one
list an expert of those that the GPU computes, and decides which records are pulled from host memory and which neurons
are left to the CPU. `neurons` computes the rest of the listed neurons' products and sums their down rows. It reads a
record in one pass, each byte once. Each of P programs takes an equal share of a list, whatever memory its records are
in, and writes a partial sum; `reduce` adds partial sums in a fixed order.

Each takes one launch, whatever kinds of experts a layer has. Programs of all kinds have as many threads; an expert
whose rows have fewer words takes several rows at a time instead (`products.zero_part`).

While a program multiplies some rows, the next ones are on their way. It loads a row's place just before the row: list
entries lie side by side, so that all but the first are in the nearest cache.
"""

from typing import Literal, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from moe_pack.runtime.gpu.kernels.elementwise import FUNCTIONS, act, factor
from moe_pack.runtime.gpu.kernels.products import (
    add_loaded,
    dot_loaded,
    load_part,
    load_part_scales,
    load_x_part,
    runs,
    store_part,
    zero_part,
)
from moe_pack.runtime.gpu.kernels.rows import RowPart, Tile, ahead_tile, dot_tile, lookup_for, sum_tile
from moe_pack.runtime.gpu.kernels.tables import (
    PER_LAYER,
    WHOLE,
    ExpertKind,
    Landing,
    LayerTables,
    LeftToCpu,
    RunningNeurons,
    StoredPart,
    of_kind,
)

Part = Literal["here", "pulled"]


class _Products(NamedTuple):
    """How one kind of experts runs, as kernels take it: all fields are constants when a kernel is compiled.

    `gate`, `up`: parts of the rows that a kernel reads, None if they are in the others or the family has none.
    `down`: None in selector rows.   `function`: a place in `FUNCTIONS`.   `rows`: that a program takes at a time.
    `groups`: into which it sums them up.
    """

    gate: RowPart | None
    up: RowPart | None
    down: RowPart | None
    is_gated: bool
    is_selected: bool
    function: int
    rows: int
    groups: int


@triton.constexpr_function
def _part(kinds: tuple[_Products, ...], number: int, field: str) -> RowPart | None:
    """Returns a part of a kind; Triton passes named tuples as plain ones."""
    part: RowPart | None = getattr(_Products(*kinds[number]), field)
    return None if part is None else RowPart(*part)


@triton.constexpr_function
def _words(kinds: tuple[_Products, ...], number: int, field: str) -> int:
    """Returns NW of a part of a kind, 0 without the part."""
    part: RowPart | None = getattr(_Products(*kinds[number]), field)
    return 0 if part is None else RowPart(*part).num_words


@triton.constexpr_function
def _value(kinds: tuple[_Products, ...], number: int, field: str) -> int:
    """Returns a field of a kind that is a number."""
    return int(getattr(_Products(*kinds[number]), field))


def select(
    x: Tensor,
    experts: Tensor,
    tables: LayerTables,
    running: RunningNeurons,
    selector_units: Tensor | None = None,
) -> None:
    """Finds the neurons that run, and counts how many of them have no record in the arena.

    If no selector is stored, it lists all neurons and sets `a` to 0. If an expert's selector rows are missing (the
    offset of the first is negative), it lists none.
    Args:    x: float32 [d].   experts: int32 [k].   running: `a`, `blocks` and `counts` are overwritten.
             selector_units: [k, f], where these experts' selector rows are; `tables.selector_at` if None.
    """
    f, at = tables.record_at.shape[1], tables.selector_at if selector_units is None else selector_units
    parts = [(_part_in(True, kind.gate), _part_in(True, kind.up)) for kind in tables.kinds]
    tiles = [_select_tile(_stored(*pair), running.block) for pair in parts]
    num_warps = max(tile.num_warps for tile in tiles)
    _select_kernel[running.counts.shape[1:]](
        x,
        experts,
        tables.arena,
        tables.record_at if at is None else at,
        tables.record_at,
        tables.kind,
        tables.thresholds,
        running.a,
        running.blocks,
        running.counts,
        lookup_for(x.device, *(part for pair in parts for part in pair)),
        BY_PLACE=selector_units is not None,
        F=f,
        BLOCK=running.block,
        KINDS=tuple(
            _products(kind, gate, up, None, tile, num_warps, running.block)
            for kind, (gate, up), tile in zip(tables.kinds, parts, tiles, strict=True)
        ),
        num_warps=num_warps,
        enable_fp_fusion=True,
    )


def _part_in(selector: bool, matrix: StoredPart | None) -> RowPart | None:
    """Returns a matrix's part if it is in selector rows, or in records."""
    return matrix.part if matrix is not None and matrix.in_selector == selector else None


def _stored(*parts: RowPart | None) -> tuple[RowPart, ...]:
    return tuple(part for part in parts if part is not None)


def _select_tile(parts: tuple[RowPart, ...], block: int) -> Tile:
    """Returns the tile for selector rows; one matrix of four bits or more leaves registers for two whole tiles."""
    if not parts:
        return Tile(block, 1)
    tile = dot_tile(parts)
    return ahead_tile(tile, parts) if len(parts) > 1 or parts[0].bits < 4 else tile


def _sum_tile(parts: tuple[RowPart, ...]) -> Tile:
    return ahead_tile(sum_tile(parts), parts)


def _products(
    kind: ExpertKind,
    gate: RowPart | None,
    up: RowPart | None,
    down: RowPart | None,
    tile: Tile,
    num_warps: int,
    most_rows: int,
) -> _Products:
    groups = num_warps // tile.num_warps
    rows = min(tile.rows * groups, most_rows)
    return _Products(
        gate=gate,
        up=up,
        down=down,
        is_gated=kind.gate is not None,
        is_selected=kind.selector != "none",
        function=FUNCTIONS[kind.function],
        rows=rows,
        groups=min(groups, rows),
    )


@triton.jit(do_not_specialize=PER_LAYER)
def _select_kernel(
    x_ptr,
    experts_ptr,
    arena_ptr,
    selector_at_ptr,
    record_at_ptr,
    kind_ptr,
    thresholds_ptr,
    a_ptr,
    blocks_ptr,
    counts_ptr,
    lookup_ptr,
    BY_PLACE: tl.constexpr,
    F: tl.constexpr,
    BLOCK: tl.constexpr,
    KINDS: tl.constexpr,
):
    place, block = tl.program_id(0), tl.program_id(1)
    expert = tl.load(experts_ptr + place)
    kind = tl.load(kind_ptr + expert)
    threshold = tl.load(thresholds_ptr + expert)
    neuron = block * BLOCK + tl.arange(0, BLOCK)
    live = neuron < F
    is_missing = tl.load(record_at_ptr + expert * F + neuron, mask=live, other=0) < 0
    selector_at_ptr += (place if BY_PLACE else expert) * F
    a_ptr += place * F
    for number in tl.static_range(len(KINDS)):
        if kind == number:
            if _part(KINDS, number, "gate") is None and _part(KINDS, number, "up") is None:
                tl.store(a_ptr + neuron, tl.zeros([BLOCK], tl.float32), mask=live)
                chosen = live
            else:
                is_there = tl.load(selector_at_ptr) >= 0
                if is_there:
                    _activate(x_ptr, arena_ptr, selector_at_ptr, a_ptr, block * BLOCK, lookup_ptr, F, BLOCK,
                              KINDS, number)  # fmt: skip
                tl.debug_barrier()  # other threads wrote the activations that are read below
                chosen = runs(tl.load(a_ptr + neuron, mask=live, other=0.0), threshold) & live
                if not is_there:
                    chosen = neuron < 0  # none
            before = tl.cumsum(chosen.to(tl.int32), 0) - 1
            tl.store(blocks_ptr + place * F + block * BLOCK + before, neuron, mask=chosen)
            counts_ptr += place * tl.num_programs(1) + block
            tl.store(counts_ptr, tl.sum(chosen.to(tl.int32)))
            others = tl.num_programs(0) * tl.num_programs(1)
            tl.store(counts_ptr + others, tl.sum((chosen & is_missing).to(tl.int32)))


@triton.jit
def _activate(
    x_ptr, arena_ptr, selector_at_ptr, a_ptr, first, lookup_ptr, F: tl.constexpr, BLOCK: tl.constexpr,
    KINDS: tl.constexpr, NUMBER: tl.constexpr
):  # fmt: skip
    """Writes the activations of a block's neurons, from `first` on."""
    R: tl.constexpr = _value(KINDS, NUMBER, "rows")
    GATE: tl.constexpr = _part(KINDS, NUMBER, "gate")
    UP: tl.constexpr = _part(KINDS, NUMBER, "up")
    GATE_NW: tl.constexpr = _words(KINDS, NUMBER, "gate")
    UP_NW: tl.constexpr = _words(KINDS, NUMBER, "up")
    IS_GATED: tl.constexpr = _value(KINDS, NUMBER, "is_gated")
    FUNCTION: tl.constexpr = _value(KINDS, NUMBER, "function")
    lanes = tl.arange(0, R)
    # The first rows are on their way while x is loaded.
    units, live = _selector_units(selector_at_ptr, first + lanes, F)
    if GATE is not None:
        gate = load_part(arena_ptr, units, live, GATE, GATE_NW)
        gate_scales = load_part_scales(arena_ptr, units, live, GATE, GATE_NW)
    if UP is not None:
        up = load_part(arena_ptr, units, live, UP, UP_NW)
        up_scales = load_part_scales(arena_ptr, units, live, UP, UP_NW)
    if GATE is not None:
        gate_x, gate_sums, gate_x_high = load_x_part(x_ptr, GATE, GATE_NW)
    if UP is not None:
        up_x, up_sums, up_x_high = load_x_part(x_ptr, UP, UP_NW)
    start = 0
    while start < BLOCK:
        units, live = _selector_units(selector_at_ptr, first + start + R + lanes, min(F, first + BLOCK))
        a = tl.full([R], 1.0, tl.float32)
        if GATE is not None:
            next_gate = load_part(arena_ptr, units, live, GATE, GATE_NW)
            next_gate_scales = load_part_scales(arena_ptr, units, live, GATE, GATE_NW)
        if UP is not None:
            next_up = load_part(arena_ptr, units, live, UP, UP_NW)
            next_up_scales = load_part_scales(arena_ptr, units, live, UP, UP_NW)
        if GATE is not None:
            g = dot_loaded(gate, gate_scales, gate_x, gate_sums, gate_x_high, lookup_ptr, GATE, GATE_NW)
            a = act(g, FUNCTION)
            gate, gate_scales = next_gate, next_gate_scales
        if UP is not None:
            u = dot_loaded(up, up_scales, up_x, up_sums, up_x_high, lookup_ptr, UP, UP_NW)
            a = a * factor(u, FUNCTION) if IS_GATED else act(u, FUNCTION)
            up, up_scales = next_up, next_up_scales
        row = first + start + lanes
        tl.store(a_ptr + row, a, mask=row < F)
        start += R


@triton.jit
def _selector_units(selector_at_ptr, row, last):
    """Loads where rows are, int64 [R], and returns which are before `last`."""
    live = row < last
    return tl.load(selector_at_ptr + row, mask=live, other=0).to(tl.int64), live


def compact(
    experts: Tensor,
    tables: LayerTables,
    running: RunningNeurons,
    landing: Landing,
    share: Tensor,
    left: LeftToCpu,
    is_split: bool,
    whole_records: float = 0.0,
    by_expert: bool = False,
) -> None:
    """Lists the neurons that the GPU computes with their records, and those that it leaves to the CPU.

    Of an expert's m running neurons without a record in the arena, ascending, those that are pulled go to the landing's
    S slots first, then to its scratch memory.
    - If not `is_split`, all are pulled. The list has all running neurons in ascending order, so that sums do not depend
      on what is in the arena. `totals` is (their number, 0, 0, m), and `left.counts`, `left.neurons` and `left.a` are
      not written.
    - If `is_split`, the first floor(m * share) are pulled, as far as there is memory, and listed after those whose
      records are in the arena; the CPU computes the others. It computes the whole expert if selector rows are missing.
      For w such experts, each as much work as `whole_records` records, the link brings more of what the other experts
      lack, M records together: the share is min(1, share * (1 + w * whole_records / M)).
    - If `by_expert` too, all that an expert lacks is pulled, as far as there is memory, or nothing is: experts are
      taken from both ends, the next one by the part that has cost less time so far, of equal ones by the link, which
      takes the first, where the CPU takes the last. The CPU begins with the w whole experts. A record costs its bytes,
      divided by `share` on the link, by 1 - `share` on the CPU. Source: Importance-Driven Expert Scheduling, Algorithm
      2, for a batch of one token, where the order is the router's, best first.
    `left.pulled` and `left.pulled_counts` say what is pulled to slots.
    Args:    experts: int32 [k].   running: from `select`; `neurons`, `units` and `totals` are overwritten.
             share: float32 [1] on the device, 0 to 1, of all work of the CPU; if `by_expert`, the link's rate divided
             by both rates; not read if not `is_split`.
    """
    k, num_blocks = running.counts.shape[1:]
    f, num_slots = tables.record_at.shape[1], landing.slots.shape[1]
    assert is_split or num_slots + landing.num_scratch >= f, "there is memory for every record"
    has_selector = tables.selector_at is not None and is_split
    _compact_kernel[k, num_blocks](
        experts,
        tables.selector_at if has_selector else tables.record_at,
        tables.record_at,
        tables.kind,
        running.a,
        running.blocks,
        running.counts,
        running.neurons,
        running.units,
        running.totals,
        landing.slots if num_slots else running.totals,
        share,
        left.counts,
        left.neurons,
        left.a,
        left.pulled_counts,
        left.pulled,
        num_slots,
        landing.scratch_at,
        landing.num_scratch,
        landing.slot_units,
        whole_records,
        IS_SPLIT=is_split,
        BY_EXPERT=by_expert and is_split,
        HAS_SELECTOR=has_selector,
        RECORD_UNITS=tuple(kind.record_units for kind in tables.kinds) if by_expert and is_split else (),
        F=f,
        BLOCK=running.block,
        BLOCKS_POW2=triton.next_power_of_2(num_blocks),
        PLACES_POW2=triton.next_power_of_2(k),
        ALL_POW2=triton.next_power_of_2(k * num_blocks),
        WHOLE=WHOLE,
        num_warps=1,
        enable_fp_fusion=True,
    )


@triton.jit
def _balanced(place, num_places, places, missing, units, work, share, room):
    """Returns how many missing records of the expert at `place` the link brings, as Algorithm 2 splits them.

    Args:    places: int32 [P], at least `num_places`; `missing`, `units`: of the experts there, records and the units
             of one.   work: of the CPU, before all others, in units.   room: for records of each expert.
    """
    first, last, found = place * 0, num_places - 1, place * 0
    loaded, computed = work * 0, work
    while first <= last:
        is_loaded = loaded.to(tl.float32) * (1.0 - share) <= computed.to(tl.float32) * share
        at = tl.where(is_loaded, first, last)
        number, row = tl.sum(tl.where(places == at, missing, 0)), tl.sum(tl.where(places == at, units, 0))
        pulled = tl.where(is_loaded, tl.minimum(number, room), 0)
        found = tl.where(at == place, pulled, found)
        loaded += pulled.to(tl.int64) * row
        computed += (number - pulled).to(tl.int64) * row
        first += is_loaded.to(tl.int32)
        last -= 1 - is_loaded.to(tl.int32)
    return found


@triton.jit(do_not_specialize=(*PER_LAYER, "left_counts_ptr", "left_neurons_ptr", "left_a_ptr", "pulled_counts_ptr",
                               "pulled_ptr"))  # fmt: skip
def _compact_kernel(
    experts_ptr,
    selector_at_ptr,
    record_at_ptr,
    kind_ptr,
    a_ptr,
    blocks_ptr,
    counts_ptr,
    neurons_ptr,
    units_ptr,
    totals_ptr,
    slots_ptr,
    share_ptr,
    left_counts_ptr,
    left_neurons_ptr,
    left_a_ptr,
    pulled_counts_ptr,
    pulled_ptr,
    num_slots,
    scratch_at,
    num_scratch,
    slot_units,
    whole_records,
    IS_SPLIT: tl.constexpr,
    BY_EXPERT: tl.constexpr,
    HAS_SELECTOR: tl.constexpr,
    RECORD_UNITS: tl.constexpr,
    F: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS_POW2: tl.constexpr,
    PLACES_POW2: tl.constexpr,
    ALL_POW2: tl.constexpr,
    WHOLE: tl.constexpr,
):
    place, block, num_blocks = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    expert = tl.load(experts_ptr + place)
    blocks = tl.arange(0, BLOCKS_POW2)
    num_places = tl.num_programs(0)
    all_missing_ptr = counts_ptr + num_places * num_blocks
    counts_ptr += place * num_blocks
    counts = tl.load(counts_ptr + blocks, mask=blocks < num_blocks, other=0)
    missing_counts = tl.load(all_missing_ptr + place * num_blocks + blocks, mask=blocks < num_blocks, other=0)
    lanes = tl.arange(0, BLOCK)
    live = lanes < tl.load(counts_ptr + block)
    neuron = tl.load(blocks_ptr + place * F + block * BLOCK + lanes, mask=live, other=0)
    units = tl.load(record_at_ptr + expert * F + neuron, mask=live, other=0)

    num_running, num_missing = tl.sum(counts), tl.sum(missing_counts)
    missing = live & (units < 0)
    place_of_all = tl.sum(tl.where(blocks < block, counts, 0)) + lanes
    place_of_missing = tl.sum(tl.where(blocks < block, missing_counts, 0)) + tl.cumsum(missing.to(tl.int32), 0) - 1
    num_pulled = num_missing
    if IS_SPLIT:
        share, places = tl.load(share_ptr), tl.arange(0, PLACES_POW2)
        others = tl.load(experts_ptr + places, mask=places < num_places, other=0)
        is_whole = places < 0
        if HAS_SELECTOR:
            is_whole = tl.load(selector_at_ptr + others * F, mask=places < num_places, other=0) < 0
        if BY_EXPERT:
            row_units = of_kind(tl.load(kind_ptr + others, mask=places < num_places, other=0), RECORD_UNITS)
            of_place = places[:, None] * num_blocks + blocks[None, :]
            is_there = (places < num_places)[:, None] & (blocks < num_blocks)[None, :]
            lacking = tl.sum(tl.load(all_missing_ptr + of_place, mask=is_there, other=0), 1)
            work = (tl.sum(tl.where(is_whole, row_units, 0)).to(tl.float32) * whole_records).to(tl.int64)
            room = num_slots + num_scratch
            num_pulled = _balanced(place, num_places, places, lacking, row_units, work, share, room)
        elif HAS_SELECTOR:
            all_blocks = tl.arange(0, ALL_POW2)
            all_missing = tl.load(all_missing_ptr + all_blocks, mask=all_blocks < num_places * num_blocks, other=0)
            work = tl.sum(is_whole.to(tl.int32)).to(tl.float32) * whole_records
            share = tl.minimum(share * (1.0 + work / tl.maximum(tl.sum(all_missing), 1).to(tl.float32)), 1.0)
        if not BY_EXPERT:
            num_pulled = tl.minimum((num_missing.to(tl.float32) * share).to(tl.int32), num_slots + num_scratch)
    is_pulled = missing & (place_of_missing < num_pulled)
    to_slot = is_pulled & (place_of_missing < num_slots)
    slot = tl.load(slots_ptr + place * num_slots + place_of_missing, mask=to_slot, other=0)
    scratch = scratch_at + (place * num_scratch + place_of_missing - num_slots) * slot_units
    tl.store(pulled_ptr + place * num_slots + place_of_missing, neuron, mask=to_slot)
    if IS_SPLIT:
        # Of those before this one, the last missing one included, `place_of_missing + 1` are missing.
        at = tl.where(missing, num_running - num_missing + place_of_missing, place_of_all - place_of_missing - 1)
        listed = live & (~missing | is_pulled)
        to_cpu = missing & ~is_pulled
        left_at = place * F + place_of_missing - num_pulled
        tl.store(left_neurons_ptr + left_at, neuron, mask=to_cpu)
        if HAS_SELECTOR:
            a = tl.load(a_ptr + place * F + neuron, mask=to_cpu, other=0.0)
            tl.store(left_a_ptr + left_at, a, mask=to_cpu)
    else:
        at = place_of_all
        listed = live
    units = tl.where(to_slot, slot, tl.where(is_pulled, scratch, units))
    tl.store(neurons_ptr + place * F + at, neuron, mask=listed)
    tl.store(units_ptr + place * F + at, units, mask=listed)
    if block == 0:
        num_here, num_left = num_running, 0
        num_pulled_too = 0  # after those that are here
        if IS_SPLIT:
            num_here, num_left, num_pulled_too = num_running - num_missing, num_missing - num_pulled, num_pulled
            left_count = num_left
            if HAS_SELECTOR:
                left_count = tl.where(tl.load(selector_at_ptr + expert * F) < 0, WHOLE, num_left)
            tl.store(left_counts_ptr + place, left_count)
        tl.store(pulled_counts_ptr + place, tl.minimum(num_pulled, num_slots))
        tl.store(totals_ptr + place * 4, num_here)
        tl.store(totals_ptr + place * 4 + 1, num_pulled_too)
        tl.store(totals_ptr + place * 4 + 2, num_left)
        tl.store(totals_ptr + place * 4 + 3, num_missing)


def neurons(
    x: Tensor, experts: Tensor, tables: LayerTables, running: RunningNeurons, partials: Tensor, part: Part
) -> None:
    """Writes partial sums of listed neurons' outputs: of those whose records are in the arena, or of the pulled ones.

    The first partial sum of "here" includes the bias of down, if there is one.
    Args:    x: float32 [d].   experts: int32 [k].   running: from `compact`; the records are where it says.
             partials: float32 [k, P, d], overwritten.
    """
    k, num_partials, _ = partials.shape
    parts = [(_part_in(False, kind.gate), _part_in(False, kind.up), kind.down.part) for kind in tables.kinds]
    tiles = [_sum_tile(_stored(*trio)) for trio in parts]
    num_warps = max(tile.num_warps for tile in tiles)
    _neurons_kernel[k, num_partials](
        x,
        experts,
        tables.arena,
        tables.kind,
        tables.thresholds,
        running.a,
        running.neurons,
        running.units,
        running.totals,
        tables.down_bias,
        partials,
        lookup_for(x.device, *(each for trio in parts for each in trio)),
        int(part == "pulled"),
        F=tables.record_at.shape[1],
        KINDS=tuple(
            _products(kind, *trio, tile, num_warps, 64)
            for kind, trio, tile in zip(tables.kinds, parts, tiles, strict=True)
        ),
        num_warps=num_warps,
        enable_fp_fusion=True,
    )


@triton.jit(do_not_specialize=(*PER_LAYER, "is_pulled"))
def _neurons_kernel(
    x_ptr,
    experts_ptr,
    arena_ptr,
    kind_ptr,
    thresholds_ptr,
    a_ptr,
    neurons_ptr,
    units_ptr,
    totals_ptr,
    down_bias_ptr,
    partials_ptr,
    lookup_ptr,
    is_pulled,
    F: tl.constexpr,
    KINDS: tl.constexpr,
):
    place, program = tl.program_id(0), tl.program_id(1)
    expert = tl.load(experts_ptr + place)
    kind = tl.load(kind_ptr + expert)
    first = tl.load(totals_ptr + place * 4) * is_pulled
    count = tl.load(totals_ptr + place * 4 + is_pulled)
    start = first + count * program // tl.num_programs(1)
    last = first + count * (program + 1) // tl.num_programs(1)
    D: tl.constexpr = _part(KINDS, 0, "down").num_cols
    partial_ptr = partials_ptr + (place * tl.num_programs(1) + program) * D
    for number in tl.static_range(len(KINDS)):
        if kind == number:
            _sum_up(x_ptr, arena_ptr, tl.load(thresholds_ptr + expert), a_ptr + place * F, neurons_ptr + place * F,
                    units_ptr + place * F, start, last, partial_ptr, lookup_ptr, KINDS, number)  # fmt: skip
    if down_bias_ptr is not None:
        tl.debug_barrier()  # other threads wrote what is read below
        if program + is_pulled == 0:
            _add_bias(partial_ptr, down_bias_ptr + expert.to(tl.int64) * D, D)


@triton.jit
def _sum_up(
    x_ptr, arena_ptr, threshold, a_ptr, neurons_ptr, units_ptr, start, last, partial_ptr, lookup_ptr,
    KINDS: tl.constexpr, NUMBER: tl.constexpr
):  # fmt: skip
    """Writes the sum of the outputs of the list's neurons from `start` to `last`."""
    R: tl.constexpr = _value(KINDS, NUMBER, "rows")
    GATE: tl.constexpr = _part(KINDS, NUMBER, "gate")
    UP: tl.constexpr = _part(KINDS, NUMBER, "up")
    GATE_NW: tl.constexpr = _words(KINDS, NUMBER, "gate")
    UP_NW: tl.constexpr = _words(KINDS, NUMBER, "up")
    IS_GATED: tl.constexpr = _value(KINDS, NUMBER, "is_gated")
    FUNCTION: tl.constexpr = _value(KINDS, NUMBER, "function")
    DOWN: tl.constexpr = _part(KINDS, NUMBER, "down")
    NW: tl.constexpr = _words(KINDS, NUMBER, "down")
    IS_SELECTED: tl.constexpr = _value(KINDS, NUMBER, "is_selected")
    lanes = tl.arange(0, R)
    # The first records are on their way while x is loaded.
    units, live = _record_units(units_ptr, start + lanes, last)
    if GATE is not None:
        gate = load_part(arena_ptr, units, live, GATE, GATE_NW)
        gate_scales = load_part_scales(arena_ptr, units, live, GATE, GATE_NW)
    if UP is not None:
        up = load_part(arena_ptr, units, live, UP, UP_NW)
        up_scales = load_part_scales(arena_ptr, units, live, UP, UP_NW)
    down = load_part(arena_ptr, units, live, DOWN, NW)
    down_scales = load_part_scales(arena_ptr, units, live, DOWN, NW)
    if GATE is not None:
        gate_x, gate_sums, gate_x_high = load_x_part(x_ptr, GATE, GATE_NW)
    if UP is not None:
        up_x, up_sums, up_x_high = load_x_part(x_ptr, UP, UP_NW)
    y, less, y_high = zero_part(DOWN, NW, _value(KINDS, NUMBER, "groups"))
    while start < last:
        units, live = _record_units(units_ptr, start + R + lanes, last)
        if GATE is not None:
            next_gate = load_part(arena_ptr, units, live, GATE, GATE_NW)
            next_gate_scales = load_part_scales(arena_ptr, units, live, GATE, GATE_NW)
        if UP is not None:
            next_up = load_part(arena_ptr, units, live, UP, UP_NW)
            next_up_scales = load_part_scales(arena_ptr, units, live, UP, UP_NW)
        next_down = load_part(arena_ptr, units, live, DOWN, NW)
        next_down_scales = load_part_scales(arena_ptr, units, live, DOWN, NW)
        h = _list_activations(a_ptr, neurons_ptr, start + lanes, last, IS_SELECTED)
        if GATE is not None:
            g = dot_loaded(gate, gate_scales, gate_x, gate_sums, gate_x_high, lookup_ptr, GATE, GATE_NW)
            h *= act(g, FUNCTION)
            gate, gate_scales = next_gate, next_gate_scales
        if UP is not None:
            u = dot_loaded(up, up_scales, up_x, up_sums, up_x_high, lookup_ptr, UP, UP_NW)
            h *= factor(u, FUNCTION) if IS_GATED else act(u, FUNCTION)
            up, up_scales = next_up, next_up_scales
        if not IS_SELECTED:
            h = tl.where(runs(h, threshold), h, 0.0)
        h = tl.where(start + lanes < last, h, 0.0)
        y, less, y_high = add_loaded(y, less, y_high, down, down_scales, h, lookup_ptr, DOWN, NW)
        down, down_scales = next_down, next_down_scales
        start += R
    store_part(partial_ptr, y, less, y_high, DOWN, NW)


@triton.jit
def _record_units(units_ptr, idx, last):
    """Loads where the records of list entries are, int64 [R], and returns which entries there are."""
    live = idx < last
    return tl.load(units_ptr + idx, mask=live, other=0).to(tl.int64), live


@triton.jit
def _list_activations(a_ptr, neurons_ptr, idx, last, IS_SELECTED: tl.constexpr):
    """Loads the selector's activations of list entries, float32 [R]; 1 if no selector is stored."""
    a = tl.full([idx.shape[0]], 1.0, tl.float32)
    if IS_SELECTED:
        live = idx < last
        a = tl.load(a_ptr + tl.load(neurons_ptr + idx, mask=live, other=0), mask=live, other=0.0)
    return a


@triton.jit
def _add_bias(y_ptr, bias_ptr, D: tl.constexpr):
    """Adds a bias to y [D]."""
    for begin in range(0, D, 1024):
        c = begin + tl.arange(0, 1024)
        y = tl.load(y_ptr + c, mask=c < D, other=0.0)
        tl.store(y_ptr + c, y + tl.load(bias_ptr + c, mask=c < D, other=0.0), mask=c < D)
