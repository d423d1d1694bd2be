"""The experts of T tokens: which neurons run, one list of them with the place of each record, and their outputs.

`select` multiplies selectors, applies the threshold, and lists the running neurons of each block. `compact` makes one
list an expert of those that the GPU computes, and decides which records are pulled and which neurons are left to the
CPU. `neurons` computes the rest of the listed neurons' products and sums their down rows. Each of P programs takes an
equal share of a list, and writes a partial sum; `reduce` adds partial sums in a fixed order.

Each takes one launch, whatever kinds of experts a layer has, and however many tokens. Place `t * k + c` is the c-th of
token t's k experts. A token's results do not depend on the others: a place has as many programs, with as large a part
of the work, for any T. Programs of the same part of all places start one after another, so that rows of an expert of
several tokens are read from memory once, and by the others from the cache.

Programs of all kinds have as many threads; an expert whose rows have fewer words takes several rows at a time instead
(`products.zero_part`). While a program multiplies some rows, the next ones are on their way.
"""

from typing import Literal, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from moe_pack.runtime.gpu.kernels.elementwise import FUNCTIONS, act, factor
from moe_pack.runtime.gpu.kernels.grids import Registers, launch_options, resident_warps, wait_for_earlier, wave
from moe_pack.runtime.gpu.kernels.products import (
    add_loaded,
    dot_loaded,
    load_rows,
    load_x_part,
    runs,
    store_part,
    zero_part,
)
from moe_pack.runtime.gpu.kernels.rows import SUM_WARPS, RowPart, Tile, ahead_tile, dot_tile, lookup_for, sum_tile
from moe_pack.runtime.gpu.kernels.tables import (
    PER_LAYER,
    WHOLE,
    ExpertKind,
    KeptNeurons,
    Landing,
    LayerTables,
    LeftToCpu,
    RunningNeurons,
    StoredPart,
    of_kind,
)

Part = Literal["here", "pulled"]
_WHOLE = tl.constexpr(WHOLE)


class _Products(NamedTuple):
    """How one kind of experts runs, as kernels take it: all fields are constants when a kernel is compiled."""

    gate: RowPart | None  # parts of the rows that a kernel reads; None if they are in the others or there are none
    up: RowPart | None
    down: RowPart | None  # None in selector rows
    is_gated: bool
    is_selected: bool
    function: int  # a place in `FUNCTIONS`
    rows: int  # that a program takes at a time
    groups: int  # into which it sums them up


@triton.constexpr_function
def _part(kinds: tuple[_Products, ...], number: int, field: str) -> RowPart | None:
    """Returns a part of a kind; Triton passes named tuples as plain ones."""
    part: RowPart | None = getattr(_Products(*kinds[number]), field)
    return None if part is None else RowPart(*part)


def _token_shape(x: Tensor, num_places: int) -> tuple[int, int] | None:
    """Returns a token's number of experts and of columns of x; None for one token, whose kernels need neither."""
    num_tokens = x.numel() // x.shape[-1]
    return None if num_tokens == 1 else (num_places // num_tokens, x.shape[-1])


@triton.constexpr_function
def _value(kinds: tuple[_Products, ...], number: int, field: str) -> int:
    return int(getattr(_Products(*kinds[number]), field))


def select(
    x: Tensor, experts: Tensor, tables: LayerTables, running: RunningNeurons, selector_units: Tensor | None = None
) -> None:
    """Finds the neurons that run, and counts how many of them have no record in the arena.

    If no selector is stored, it lists all neurons and sets `a` to 0. If an expert's selector rows are missing (the
    offset of the first is negative), it lists none.
    Args:    x: float32 [T, d], or [d] for one token; contiguous.   experts: int32 [T * k].   running: `a`, `blocks` and
             `counts` are overwritten.   selector_units: [T * k, f], where these experts' selector rows are;
             `tables.selector_at` if None.
    """
    parts = [(_part_in(True, kind.gate), _part_in(True, kind.up)) for kind in tables.kinds]
    tiles = [_select_tile(_stored(*pair), running.block) for pair in parts]
    num_warps = max(tile.num_warps for tile in tiles)
    kinds = tuple(
        _products(kind, gate, up, None, tile, num_warps, running.block)
        for kind, (gate, up), tile in zip(tables.kinds, parts, tiles, strict=True)
    )
    different = tuple(dict.fromkeys(kinds))  # kinds may differ in their records alone
    which = tuple(map(different.index, kinds))
    at = tables.selector_at if selector_units is None else selector_units
    _select_kernel[running.counts.shape[1:]](
        x, experts, tables.pointers._replace(selector_at=tables.record_at if at is None else at), running,
        lookup_for(x.device, *(part for pair in parts for part in pair)), selector_units is not None,
        tables.record_at.shape[1], running.block, different, which, _token_shape(x, experts.numel()),
        num_warps=num_warps, enable_fp_fusion=True, **launch_options(_most_registers(parts)),
    )  # fmt: skip


def select_programs(kinds: tuple[ExpertKind, ...]) -> int:
    """Returns how many programs `select` has at least, if there are neurons enough: two waves."""
    parts = [_stored(_part_in(True, kind.gate), _part_in(True, kind.up)) for kind in kinds]
    return 2 * wave(Registers.SELECT, max(_select_tile(each, 1).num_warps for each in parts))


def sums_at_once(kinds: tuple[ExpertKind, ...]) -> int:
    """Returns how many programs of `neurons` a multiprocessor runs at once."""
    parts = [_summed(kind) for kind in kinds]
    registers = Registers.NEURONS if any(len(_stored(*trio)) == 2 for trio in parts) else Registers.NEURONS_OTHERS
    return max(1, resident_warps(registers) // _sum_warps([_sum_tile(_stored(*trio)) for trio in parts]))


def _summed(kind: ExpertKind) -> tuple[RowPart | None, RowPart | None, RowPart]:
    return _part_in(False, kind.gate), _part_in(False, kind.up), kind.down.part


def _sum_warps(tiles: list[Tile]) -> int:
    return max(SUM_WARPS, *(tile.num_warps for tile in tiles))


def _part_in(selector: bool, matrix: StoredPart | None) -> RowPart | None:
    return matrix.part if matrix is not None and matrix.in_selector == selector else None


def _stored(*parts: RowPart | None) -> tuple[RowPart, ...]:
    return tuple(part for part in parts if part is not None)


def _most_registers(parts: list[tuple[RowPart | None, RowPart | None]]) -> int | None:
    """Returns the limit for `select`: rows of 2 bits would take 121 registers, and fewer bytes be in flight."""
    stored = [_stored(*pair) for pair in parts]
    is_two = all(len(each) == 1 and each[0].bits == 2 and each[0].group for each in stored)
    return Registers.SELECT.value if is_two else None


def _select_tile(parts: tuple[RowPart, ...], block: int) -> Tile:
    """Returns the tile for selector rows; one matrix of codes in one plane leaves registers for two whole tiles."""
    if not parts:
        return Tile(block, 1)
    tile = dot_tile(parts)
    return ahead_tile(tile, parts) if len(parts) > 1 or parts[0].bits in (1, 3) else tile


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
    tables,
    running,
    lookup_ptr,
    BY_PLACE: tl.constexpr,
    F: tl.constexpr,
    BLOCK: tl.constexpr,
    KINDS: tl.constexpr,
    WHICH: tl.constexpr,
    TOKEN: tl.constexpr,
):
    # A program takes a block of the neurons of one of a token's experts.
    place, block = tl.program_id(0), tl.program_id(1)
    if TOKEN is not None:
        x_ptr += place // TOKEN[0] * TOKEN[1]
    wait_for_earlier()
    expert = tl.load(experts_ptr + place)
    selector_at_ptr = tables.selector_at + (place if BY_PLACE else expert) * F
    if len(KINDS) == 1:
        _select_block(x_ptr, tables, running, lookup_ptr, place, block, expert, selector_at_ptr, F, BLOCK, KINDS, 0)
    else:
        number = of_kind(tl.load(tables.kind + expert), WHICH)
        for each in tl.static_range(len(KINDS)):
            if number == each:
                _select_block(
                    x_ptr, tables, running, lookup_ptr, place, block, expert, selector_at_ptr, F, BLOCK, KINDS, each
                )


@triton.jit
def _select_block(
    x_ptr, tables, running, lookup_ptr, place, block, expert, selector_at_ptr, F: tl.constexpr, BLOCK: tl.constexpr,
    KINDS: tl.constexpr, NUMBER: tl.constexpr
):  # fmt: skip
    """Lists a block's running neurons, and counts them."""
    threshold = tl.load(tables.thresholds + expert)
    neuron = block * BLOCK + tl.arange(0, BLOCK)
    live = neuron < F
    is_missing = tl.load(tables.record_at + expert * F + neuron, mask=live, other=0) < 0
    a_ptr = running.a + place * F
    # Multiplies the selector; without one all neurons run, and with a missing one none.
    if _part(KINDS, NUMBER, "gate") is None and _part(KINDS, NUMBER, "up") is None:
        tl.store(a_ptr + neuron, tl.zeros([BLOCK], tl.float32), mask=live)
        chosen = live
    else:
        is_there = tl.load(selector_at_ptr) >= 0
        if is_there:
            _activate(x_ptr, tables.arena, selector_at_ptr, a_ptr, block * BLOCK, lookup_ptr, F, BLOCK, KINDS, NUMBER)
        tl.debug_barrier()  # other threads wrote the activations that are read below
        chosen = runs(tl.load(a_ptr + neuron, mask=live, other=0.0), threshold) & live
        if not is_there:
            chosen = neuron < 0  # none
    # Lists the running neurons at the block's beginning, and counts them and those without a record.
    before = tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(running.blocks + place * F + block * BLOCK + before, neuron, mask=chosen)
    counts_ptr = running.counts + place * tl.num_programs(1) + block
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
    FUNCTION: tl.constexpr = _value(KINDS, NUMBER, "function")
    lanes = tl.arange(0, R)
    # The first rows are on their way while x is loaded.
    units, live = _units_at(selector_at_ptr, first + lanes, F)
    if GATE is not None:
        gate, gate_scales = load_rows(arena_ptr, units, live, GATE)
    if UP is not None:
        up, up_scales = load_rows(arena_ptr, units, live, UP)
    if GATE is not None:
        gate_x = load_x_part(x_ptr, GATE)
    if UP is not None:
        up_x = load_x_part(x_ptr, UP)
    start = 0
    while start < BLOCK:
        # Loads the next rows before these are multiplied.
        units, live = _units_at(selector_at_ptr, first + start + R + lanes, min(F, first + BLOCK))
        a = tl.full([R], 1.0, tl.float32)
        if GATE is not None:
            next_gate, next_gate_scales = load_rows(arena_ptr, units, live, GATE)
        if UP is not None:
            next_up, next_up_scales = load_rows(arena_ptr, units, live, UP)
        # The activation is what the stored part of a neuron gives: act(gate), up's factor, or both.
        if GATE is not None:
            a = act(dot_loaded(gate, gate_scales, gate_x, lookup_ptr, GATE), FUNCTION)
            gate, gate_scales = next_gate, next_gate_scales
        if UP is not None:
            u = dot_loaded(up, up_scales, up_x, lookup_ptr, UP)
            a = a * factor(u, FUNCTION) if _value(KINDS, NUMBER, "is_gated") else act(u, FUNCTION)
            up, up_scales = next_up, next_up_scales
        row = first + start + lanes
        tl.store(a_ptr + row, a, mask=row < F)
        start += R


@triton.jit
def _units_at(units_ptr, number, last):
    """Loads where rows are, int64 [R], and returns which are before `last`."""
    live = number < last
    return tl.load(units_ptr + number, mask=live, other=0).to(tl.int64), live


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
    num_tokens: int = 1,
    kept: KeptNeurons | None = None,
) -> None:
    """Lists the neurons that the GPU computes with their records, and those that it leaves to the CPU.

    An expert has m running neurons without a record in the arena, ascending. Pulled ones go to the landing's kept
    memory first, then to its scratch memory; `kept` names those in the first.
    - If not `is_split`, all are pulled. The list has all running neurons in ascending order, so that sums do not depend
      on the arena. `totals` is (their number, 0, 0, m); `left.counts`, `left.neurons` and `left.a` are not written.
    - If `is_split`, the first floor(m * share) are pulled, as far as there is memory, and listed after those in the
      arena; the CPU computes the others, and whole experts that lack selector rows. With w such experts, each as much
      work as `whole_records` records, and M missing records of the others, the link brings more: the share is
      min(1, share * (1 + w * whole_records / M)).
    - If `by_expert` too, all that an expert lacks is pulled, as far as there is memory, or nothing. Experts are taken
      from both ends, the next one by the part that has cost less time so far, of equal ones by the link. It takes the
      first, and the CPU the last. The CPU begins with the w whole experts. A record costs its bytes, divided by `share`
      on the link, by 1 - `share` on the CPU. Source: Importance-Driven Expert Scheduling, Algorithm 2, for a batch of
      one token, in the router's order, best first.
    Experts of several tokens lack no row.
    Args:    experts: int32 [T * k].   running: from `select`; `neurons`, `units` and `totals` are overwritten.
             share: float32 [1] on the device, 0 to 1, of all work of the CPU; if `by_expert`, the link's rate divided
             by both rates; not read if not `is_split`.   num_tokens: T.   kept: overwritten; None if the landing keeps
             none.
    """
    num_places, num_blocks = running.counts.shape[1:]
    f, num_kept = tables.record_at.shape[1], landing.num_kept
    assert (kept is None) == (num_kept == 0), "kept records have names"
    assert num_tokens == 1 or not is_split, "several tokens lack nothing"
    assert is_split or num_kept + landing.num_scratch >= f, "there is memory for every record"
    has_selector = tables.selector_at is not None and is_split
    by_expert = by_expert and is_split
    record_units = tuple(kind.record_units for kind in tables.kinds) if by_expert else ()
    k = num_places if num_tokens == 1 else 0
    split = _Split(is_split, by_expert, has_selector, record_units, k, num_blocks, f, running.block)
    pointers = tables.pointers if has_selector else tables.pointers._replace(selector_at=tables.record_at)
    _compact_kernel[num_places, num_blocks](
        experts, pointers, running, share, landing.kept_at, num_kept, landing.scratch_at, landing.num_scratch,
        landing.slot_units, whole_records, *left, kept, split, num_warps=1, enable_fp_fusion=True, **launch_options(),
    )  # fmt: skip


class _Split(NamedTuple):
    is_split: bool
    by_expert: bool
    has_selector: bool
    record_units: tuple[int, ...]  # of each kind, if experts are split one by one
    k: int  # of one token; 0 for several
    num_blocks: int
    f: int
    block: int


@triton.jit
def _balanced(place, num_places, places, missing, units, work, share, most):
    """Returns how many missing records of the expert at `place` the link brings, as Algorithm 2 splits them.

    Args:    places: int32 [P], at least `num_places`; `missing`, `units`: of the experts there, records and the units
             of one.   work: of the CPU, before all others, in units.   most: records of each expert.
    """
    # Takes experts from both ends, for the part that has cost less time so far.
    first, last, found = place * 0, num_places - 1, place * 0
    loaded, computed = work * 0, work
    while first <= last:
        is_loaded = loaded.to(tl.float32) * (1.0 - share) <= computed.to(tl.float32) * share
        at = tl.where(is_loaded, first, last)
        number, row = tl.sum(tl.where(places == at, missing, 0)), tl.sum(tl.where(places == at, units, 0))
        pulled = tl.where(is_loaded, tl.minimum(number, most), 0)
        found = tl.where(at == place, pulled, found)
        loaded += pulled.to(tl.int64) * row
        computed += (number - pulled).to(tl.int64) * row
        first += is_loaded.to(tl.int32)
        last -= 1 - is_loaded.to(tl.int32)
    return found


# More than ten: Triton specializes kernels for all that stands in tuples, and these differ between layers.
@triton.jit(do_not_specialize=(*PER_LAYER, "left_counts_ptr", "left_neurons_ptr", "left_a_ptr"))
def _compact_kernel(
    experts_ptr,
    tables,
    running,
    share_ptr,
    kept_at,
    num_kept,
    scratch_at,
    num_scratch,
    slot_units,
    whole_records,
    left_counts_ptr,
    left_neurons_ptr,
    left_a_ptr,
    kept,
    SPLIT: tl.constexpr,
):
    # A program lists a block's neurons; it needs the counts of all blocks of its expert to know where.
    F: tl.constexpr = SPLIT.f
    place, block = tl.program_id(0), tl.program_id(1)
    wait_for_earlier()
    expert = tl.load(experts_ptr + place)
    blocks = tl.arange(0, triton.next_power_of_2(SPLIT.num_blocks))
    is_block = blocks < SPLIT.num_blocks
    num_places = SPLIT.k
    if SPLIT.k == 0:
        num_places = tl.num_programs(0)
    all_missing_ptr = running.counts + num_places * SPLIT.num_blocks
    counts_ptr = running.counts + place * SPLIT.num_blocks
    counts = tl.load(counts_ptr + blocks, mask=is_block, other=0)
    missing_counts = tl.load(all_missing_ptr + place * SPLIT.num_blocks + blocks, mask=is_block, other=0)
    lanes = tl.arange(0, SPLIT.block)
    live = lanes < tl.load(counts_ptr + block)
    neuron = tl.load(running.blocks + place * F + block * SPLIT.block + lanes, mask=live, other=0)
    units = tl.load(tables.record_at + expert * F + neuron, mask=live, other=0)
    # Numbers the block's neurons among all that run, and the missing ones among all that are missing.
    num_running, num_missing = tl.sum(counts), tl.sum(missing_counts)
    missing = live & (units < 0)
    place_of_all = tl.sum(tl.where(blocks < block, counts, 0)) + lanes
    place_of_missing = tl.sum(tl.where(blocks < block, missing_counts, 0)) + tl.cumsum(missing.to(tl.int32), 0) - 1
    num_pulled = num_missing
    if SPLIT.is_split:
        num_pulled = _num_pulled(experts_ptr, tables, all_missing_ptr, share_ptr, num_missing,
                                 num_kept + num_scratch, whole_records, SPLIT)  # fmt: skip
    # The first missing records are pulled, to kept memory as far as there is any, and then to scratch memory.
    is_pulled = missing & (place_of_missing < num_pulled)
    target = scratch_at + (place * num_scratch + place_of_missing - num_kept) * slot_units
    if kept is not None:
        is_kept = is_pulled & (place_of_missing < num_kept)
        target = tl.where(is_kept, kept_at + (place * num_kept + place_of_missing) * slot_units, target)
        tl.store(kept.neurons + place * num_kept + place_of_missing, neuron, mask=is_kept)
    if SPLIT.is_split:
        # Lists those that are here before those that are pulled, and the others for the CPU. Of the neurons before this
        # one, the last missing one included, `place_of_missing + 1` are missing.
        at = tl.where(missing, num_running - num_missing + place_of_missing, place_of_all - place_of_missing - 1)
        listed = live & (~missing | is_pulled)
        to_cpu = missing & ~is_pulled
        left_at = place * F + place_of_missing - num_pulled
        tl.store(left_neurons_ptr + left_at, neuron, mask=to_cpu)
        if SPLIT.has_selector:
            a = tl.load(running.a + place * F + neuron, mask=to_cpu, other=0.0)
            tl.store(left_a_ptr + left_at, a, mask=to_cpu)
    else:
        at = place_of_all
        listed = live
    units = tl.where(is_pulled, target, units)
    tl.store(running.neurons + place * F + at, neuron, mask=listed)
    tl.store(running.units + place * F + at, units, mask=listed)
    if block == 0:
        if kept is not None:
            tl.store(kept.counts + place, tl.minimum(num_pulled, num_kept))
        _store_totals(running, tables, left_counts_ptr, place, expert, num_running, num_missing, num_pulled, SPLIT)


@triton.jit
def _num_pulled(experts_ptr, tables, all_missing_ptr, share_ptr, num_missing, most, whole_records, SPLIT: tl.constexpr):
    """Returns how many of the expert's missing records the link brings, `most` at most; the CPU computes the others.

    Args:    all_missing_ptr: to int32 [k, blocks], missing records of all blocks.   num_missing: of this expert.
    """
    share, places = tl.load(share_ptr), tl.arange(0, triton.next_power_of_2(SPLIT.k))
    is_place = places < SPLIT.k
    # The CPU computes experts whole whose selector is missing, and that is work which the link cannot take.
    others = tl.load(experts_ptr + places, mask=is_place, other=0)
    is_whole = places < 0
    if SPLIT.has_selector:
        is_whole = tl.load(tables.selector_at + others * SPLIT.f, mask=is_place, other=0) < 0
    if SPLIT.by_expert:
        # Splits the experts one by one: all programs go through the same steps.
        RECORD_UNITS: tl.constexpr = SPLIT.record_units
        row_units = of_kind(tl.load(tables.kind + others, mask=is_place, other=0), RECORD_UNITS)
        blocks = tl.arange(0, triton.next_power_of_2(SPLIT.num_blocks))
        of_place = places[:, None] * SPLIT.num_blocks + blocks[None, :]
        is_there = is_place[:, None] & (blocks < SPLIT.num_blocks)[None, :]
        lacking = tl.sum(tl.load(all_missing_ptr + of_place, mask=is_there, other=0), 1)
        work = (tl.sum(tl.where(is_whole, row_units, 0)).to(tl.float32) * whole_records).to(tl.int64)
        number = _balanced(tl.program_id(0), SPLIT.k, places, lacking, row_units, work, share, most)
    else:
        if SPLIT.has_selector:
            # The link's share is of all work: whole experts make it larger for the others.
            all_blocks = tl.arange(0, triton.next_power_of_2(SPLIT.k * SPLIT.num_blocks))
            is_there = all_blocks < SPLIT.k * SPLIT.num_blocks
            all_missing = tl.load(all_missing_ptr + all_blocks, mask=is_there, other=0)
            work = tl.sum(is_whole.to(tl.int32)).to(tl.float32) * whole_records
            share = tl.minimum(share * (1.0 + work / tl.maximum(tl.sum(all_missing), 1).to(tl.float32)), 1.0)
        number = tl.minimum((num_missing.to(tl.float32) * share).to(tl.int32), most)
    return number


@triton.jit
def _store_totals(
    running, tables, left_counts_ptr, place, expert, num_running, num_missing, num_pulled, SPLIT: tl.constexpr
):
    """Writes an expert's totals, and its number of neurons for the CPU."""
    num_here, num_left, num_pulled_too = num_running, 0, 0  # all that run are in one list
    if SPLIT.is_split:
        num_here, num_left, num_pulled_too = num_running - num_missing, num_missing - num_pulled, num_pulled
        left_count = num_left
        if SPLIT.has_selector:
            is_whole = tl.load(tables.selector_at + expert * SPLIT.f) < 0
            left_count = tl.where(is_whole, _WHOLE, num_left)
        tl.store(left_counts_ptr + place, left_count)
    totals_ptr = running.totals + place * 4
    tl.store(totals_ptr, num_here)
    tl.store(totals_ptr + 1, num_pulled_too)
    tl.store(totals_ptr + 2, num_left)
    tl.store(totals_ptr + 3, num_missing)


def neurons(
    x: Tensor, experts: Tensor, tables: LayerTables, running: RunningNeurons, partials: Tensor, part: Part
) -> None:
    """Writes partial sums of listed neurons' outputs: of those whose records are in the arena, or of the pulled ones.

    The first partial sum of "here" includes the bias of down, if there is one.
    Args:    x: float32 [T, d], or [d] for one token; contiguous.   experts: int32 [T * k].   running: from `compact`;
             the records are where it says.   partials: float32 [T * k, P, d], overwritten.
    """
    num_places, num_partials, _ = partials.shape
    parts = [_summed(kind) for kind in tables.kinds]
    tiles = [_sum_tile(_stored(*trio)) for trio in parts]
    num_warps = _sum_warps(tiles)
    kinds = tuple(
        _products(kind, *trio, tile, num_warps, 64) for kind, trio, tile in zip(tables.kinds, parts, tiles, strict=True)
    )
    _neurons_kernel[num_places, num_partials](
        x, experts, tables.pointers, running, partials,
        lookup_for(x.device, *(each for trio in parts for each in trio)),
        int(part == "pulled"), tables.record_at.shape[1], kinds, _token_shape(x, num_places),
        num_warps=num_warps, enable_fp_fusion=True, **launch_options(),
    )  # fmt: skip


@triton.jit(do_not_specialize=(*PER_LAYER, "is_pulled"))
def _neurons_kernel(
    x_ptr,
    experts_ptr,
    tables,
    running,
    partials_ptr,
    lookup_ptr,
    is_pulled,
    F: tl.constexpr,
    KINDS: tl.constexpr,
    TOKEN: tl.constexpr,
):
    # A program takes an equal share of the list: of its first range, or of the second if the pulled ones are summed.
    place, program = tl.program_id(0), tl.program_id(1)
    if TOKEN is not None:
        x_ptr += place // TOKEN[0] * TOKEN[1]
    wait_for_earlier()
    expert = tl.load(experts_ptr + place)
    first = tl.load(running.totals + place * 4) * is_pulled
    count = tl.load(running.totals + place * 4 + is_pulled)
    start = first + count * program // tl.num_programs(1)
    last = first + count * (program + 1) // tl.num_programs(1)
    D: tl.constexpr = _part(KINDS, 0, "down").num_cols
    partial_ptr = partials_ptr + (place * tl.num_programs(1) + program) * D
    listed = (running.a + place * F, running.neurons + place * F, running.units + place * F)
    threshold = tl.load(tables.thresholds + expert)
    if len(KINDS) == 1:
        _sum_up(x_ptr, tables.arena, threshold, listed, start, last, partial_ptr, lookup_ptr, KINDS, 0)
    else:
        kind = tl.load(tables.kind + expert)
        for number in tl.static_range(len(KINDS)):
            if kind == number:
                _sum_up(x_ptr, tables.arena, threshold, listed, start, last, partial_ptr, lookup_ptr, KINDS, number)
    # One partial sum of an expert has the bias of down too.
    if tables.down_bias is not None:
        tl.debug_barrier()  # other threads wrote what is read below
        if program + is_pulled == 0:
            _add_bias(partial_ptr, tables.down_bias + expert.to(tl.int64) * D, D)


@triton.jit
def _sum_up(
    x_ptr, arena_ptr, threshold, listed, start, last, partial_ptr, lookup_ptr, KINDS: tl.constexpr, NUMBER: tl.constexpr
):
    """Writes the sum of the outputs of the list's neurons from `start` to `last`.

    Args:    listed: the expert's activations, neurons, and places of records.
    """
    R: tl.constexpr = _value(KINDS, NUMBER, "rows")
    GATE: tl.constexpr = _part(KINDS, NUMBER, "gate")
    UP: tl.constexpr = _part(KINDS, NUMBER, "up")
    FUNCTION: tl.constexpr = _value(KINDS, NUMBER, "function")
    DOWN: tl.constexpr = _part(KINDS, NUMBER, "down")
    IS_SELECTED: tl.constexpr = _value(KINDS, NUMBER, "is_selected")
    a_ptr, neurons_ptr, units_ptr = listed
    lanes = tl.arange(0, R)
    # The first records are on their way while x is loaded.
    units, live = _units_at(units_ptr, start + lanes, last)
    if GATE is not None:
        gate, gate_scales = load_rows(arena_ptr, units, live, GATE)
    if UP is not None:
        up, up_scales = load_rows(arena_ptr, units, live, UP)
    down, down_scales = load_rows(arena_ptr, units, live, DOWN)
    if GATE is not None:
        gate_x = load_x_part(x_ptr, GATE)
    if UP is not None:
        up_x = load_x_part(x_ptr, UP)
    sums = zero_part(DOWN, _value(KINDS, NUMBER, "groups"))
    while start < last:
        # Loads the next records before these are multiplied.
        units, live = _units_at(units_ptr, start + R + lanes, last)
        if GATE is not None:
            next_gate, next_gate_scales = load_rows(arena_ptr, units, live, GATE)
        if UP is not None:
            next_up, next_up_scales = load_rows(arena_ptr, units, live, UP)
        next_down, next_down_scales = load_rows(arena_ptr, units, live, DOWN)
        # A neuron's output is the selector's activation times what the record adds to it; 0 if it does not run.
        h = _list_activations(a_ptr, neurons_ptr, start + lanes, last, IS_SELECTED)
        if GATE is not None:
            h *= act(dot_loaded(gate, gate_scales, gate_x, lookup_ptr, GATE), FUNCTION)
            gate, gate_scales = next_gate, next_gate_scales
        if UP is not None:
            u = dot_loaded(up, up_scales, up_x, lookup_ptr, UP)
            h *= factor(u, FUNCTION) if _value(KINDS, NUMBER, "is_gated") else act(u, FUNCTION)
            up, up_scales = next_up, next_up_scales
        if not IS_SELECTED:
            h = tl.where(runs(h, threshold), h, 0.0)
        h = tl.where(start + lanes < last, h, 0.0)
        # Its down row joins the sums, which stay in registers.
        sums = add_loaded(sums, down, down_scales, h, lookup_ptr, DOWN)
        down, down_scales = next_down, next_down_scales
        start += R
    store_part(partial_ptr, sums, DOWN)


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
    for begin in range(0, D, 1024):
        c = begin + tl.arange(0, 1024)
        y = tl.load(y_ptr + c, mask=c < D, other=0.0)
        tl.store(y_ptr + c, y + tl.load(bias_ptr + c, mask=c < D, other=0.0), mask=c < D)
