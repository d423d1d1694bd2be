"""The cases of several rows for `cases`: what a kernel gives for rows together is, bit for bit, what each has alone.

A case has some rows of one text and some of others. It runs them in one launch, and then each for itself, in order.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from support.chosen_tokens import EACH, mismatches
from support.gpu_layers import random_layer
from support.named_formats import Name, label, named_expert, named_format
from support.random_experts import Shape, random_rows
from torch import Tensor

from gpu.comparing import Case, Difference, Prepared, exact, nans, random_values
from moe_pack.formats import RouterSpec
from moe_pack.runtime.gpu.kernels.attention import (
    AttentionWorkspace,
    Entering,
    QkNorms,
    RowPositions,
    View,
    attend,
)
from moe_pack.runtime.gpu.kernels.elementwise import Norm, reduce
from moe_pack.runtime.gpu.kernels.matmul import Product, StoredRows, gated, gather_row, gemv, normed_gemv
from moe_pack.runtime.gpu.kernels.mixers.recurrence import TokenOperations, TokenStates
from moe_pack.runtime.gpu.kernels.neurons import compact, neurons, select
from moe_pack.runtime.gpu.kernels.router import Routed, Router, route
from moe_pack.runtime.gpu.kernels.rows import part_of, stored_part
from moe_pack.runtime.gpu.kernels.tables import Landing, LeftToCpu, RunningNeurons
from moe_pack.runtime.model.caches import KvDtype, RowStorage
from moe_pack.runtime.model.compute.recurrence import Gates

# Runs some rows on a device; returns tensors of which each has the rows' parts one after the other. A run from the
# first row on begins with new caches and states.
Run = Callable[[slice], tuple[Tensor, ...]]
_SLOTS, _POSITIONS = [2, 2, 2, 0, 1, 1, 3, 3], [930, 931, 932, 5, 440, 441, 0, 1]  # of the rows
_NUM_SLOTS = 4
_NUM_ROWS, _FEW_ROWS, _TAPS = len(_SLOTS), 4, 4
_K, _NUM_EXPERTS, _NUM_SUMS = 2, 4, 3


def row_cases(d: int, f: int, is_real: bool) -> Iterator[Case]:
    """Yields the cases, for hidden states of d columns and experts of f neurons."""
    num_rows = _NUM_ROWS if is_real else _FEW_ROWS

    def case(kernels: str, name: str, make: Callable[[torch.device], Run]) -> Case:
        return Case(kernels, f"{name}, {num_rows} rows and each alone", partial(_rows_case, make, num_rows))

    names: tuple[Name, ...] = (2, 4, 16, "fp8", "mxfp4", "t4") if is_real else (4,)
    matrix_rows = (5, 1003, 8024) if is_real else (3, 10, 40)
    for name in names:
        yield case("gemv, normed_gemv, gated, gather_row", label(name), partial(_dense, name, d, matrix_rows))
        yield case("select, compact, neurons", label(name), partial(_experts, name, d, f))
    for num_experts in (8, 128) if is_real else (8,):
        yield case("route", f"{num_experts} experts", partial(_route, num_experts, d))
    yield case("reduce", f"{_K} experts, {d}", partial(_reduce, d))
    yield Case("choose", "tokens of several rows", partial(_choose, 151_936 if is_real else 1000))
    dtypes: tuple[KvDtype, ...] = ("f32", "bf16", "q8", "q4")
    for dtype in dtypes if is_real else dtypes[1:3]:
        for heads in ((32, 8, 128), (16, 2, 256)) if is_real else ((4, 2, 16),):
            if dtype != "q4" or heads[2] <= 128:  # longer rows of 4 bits are refused
                yield case(
                    "attend",
                    f"{heads[0]}/{heads[1]} heads of {heads[2]}, {dtype}",
                    partial(_attend, heads, dtype, 1024 if is_real else 64),
                )
    yield case("convolve_step, gated_step", "Gated DeltaNet", partial(_states, (16, 32, 128) if is_real else (1, 2, 8)))


def _rows_case(make: Callable[[torch.device], Run], num_rows: int, device: torch.device) -> Prepared:
    run, found = make(device), list[tuple[Tensor, ...]]()

    def launch() -> None:
        found[:] = [run(slice(0, num_rows)), *(run(slice(row, row + 1)) for row in range(num_rows))]

    def compare() -> Difference:
        together, *alone = found
        pairs = zip(together, zip(*alone, strict=True), strict=True)
        return exact(all(torch.equal(whole, torch.cat(parts)) for whole, parts in pairs))

    return Prepared(launch, compare)


def _stored(name: Name, num_rows: int, num_cols: int, device: torch.device) -> StoredRows:
    layout, raw = random_rows(named_format(name), num_rows, num_cols)
    return StoredRows(torch.from_numpy(raw).to(device), part_of(layout, "weight"))


def _dense(name: Name, d: int, matrix_rows: tuple[int, int, int], device: torch.device) -> Run:
    matrices = [_stored(name, n, d, device) for n in matrix_rows]
    x, weights = (each.to(device) for each in (random_values(_NUM_ROWS, d), random_values(_NUM_ROWS, seed=1)))
    norm = Norm((1 + random_values(d, seed=2) / 4).to(device), None, 1e-6)
    residual, ids = (
        random_values(_NUM_ROWS, matrix_rows[1], seed=3).to(device),
        torch.arange(_NUM_ROWS, device=device).int(),
    )

    def run(rows: slice) -> tuple[Tensor, ...]:
        given, number = x[rows], rows.stop - rows.start
        outs = [nans((number, len(each.rows)), device) for each in matrices]
        added, hidden, embedded = (
            residual[rows].clone(),
            nans((number, matrix_rows[1]), device),
            nans((number, d), device),
        )
        normed_gemv(given, norm, [Product(each, out) for each, out in zip(matrices, outs, strict=True)])
        gemv(given, matrices[1], added, residual=added, scale=0.5)
        gated(given, matrices[1], matrices[1], "silu", hidden, norm=norm, weight=weights[rows])
        gather_row(matrices[2], ids[rows], embedded)
        return *outs, added, hidden, embedded

    return run


def _experts(name: Name, d: int, f: int, device: torch.device) -> Run:
    """Experts that lack nothing; rows share some of them, and some of the neurons do not run."""
    stored = named_expert(name)
    shape = Shape(f, d, "up", stored.gate, stored.up, stored.down)
    tables = random_layer([shape] * _NUM_EXPERTS, thresholds=[0.0, 0.1, 0.5, 1e9]).tables_on(device)
    x = random_values(_NUM_ROWS, d).to(device)
    chosen = torch.tensor([(row % _NUM_EXPERTS, (row // 2 + 1) % _NUM_EXPERTS) for row in range(_NUM_ROWS)])
    routes, share = chosen.int().to(device), torch.zeros(1, device=device)

    def numbers(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, pin_memory=device.type == "cuda")

    def run(rows: slice) -> tuple[Tensor, ...]:
        number, experts = rows.stop - rows.start, routes[rows].reshape(-1)
        running = RunningNeurons.allocate(_K, f, device, num_tokens=number)
        landing = Landing(0, f, tables.kinds[0].record_units)
        sizes = (number * _K, f)
        left = LeftToCpu(numbers(sizes[0]), numbers(*sizes), numbers(*sizes).float())
        sums = nans((number * _K, _NUM_SUMS, d), device)
        select(x[rows], experts, tables, running)
        compact(experts, tables, running, landing, share, left, is_split=False, num_tokens=number)
        neurons(x[rows], experts, tables, running, sums, "here")
        return sums, running.a, running.totals

    return run


def _route(num_experts: int, d: int, device: torch.device) -> Run:
    spec = RouterSpec("softmax_topk", num_experts, _K, True)
    stored = [
        StoredRows(random_values(n, d, seed=n).bfloat16().to(device), stored_part("BF16", d)) for n in (num_experts, 1)
    ]
    norm = Norm((1 + random_values(d, seed=2) / 4).to(device), None, 1e-6)
    router, x = Router(spec, norm, stored[0], None, None, stored[1]), random_values(_NUM_ROWS, d).to(device)

    def run(rows: slice) -> tuple[Tensor, ...]:
        number = rows.stop - rows.start
        routed, experts = Routed.allocate(d, spec, device, number), torch.full((number, _K), -7, device=device).int()
        route(x[rows], router, experts, routed)
        return experts, *routed

    return run


def _reduce(d: int, device: torch.device) -> Run:
    partials = random_values(_NUM_ROWS, _K, _NUM_SUMS, d).to(device)
    weights, residual, shared = (
        random_values(_NUM_ROWS, n, seed=seed).to(device) for seed, n in enumerate((_K, d, d), 1)
    )

    def run(rows: slice) -> tuple[Tensor, ...]:
        out = residual[rows].clone()
        reduce(partials[rows].flatten(0, 1), weights[rows], out, residual=out, shared=shared[rows], scale=0.5)
        return (out,)

    return run


def _attend(sizes: tuple[int, int, int], dtype: KvDtype, num_places: int, device: torch.device) -> Run:
    """Rows enter the caches of their sequences, and attend to them; what they wrote there is a result too."""
    (heads, kv_heads, dim), own_positions = sizes, [position % num_places for position in _POSITIONS]
    stored, view = RowStorage(dtype, (dim,)), View(dim**-0.5)
    before = [stored.encode(random_values(_NUM_SLOTS, kv_heads, num_places, dim, seed=seed)) for seed in (1, 2)]
    projected = [random_values(_NUM_ROWS, n * dim, seed=2 + n).to(device) for n in (heads, kv_heads, kv_heads)]
    q_norm, k_norm = ((1 + random_values(dim, seed=seed) / 4).to(device) for seed in (8, 9))
    norms = QkNorms(q_norm, k_norm, 1e-6)
    turns = 9 * random_values(num_places, dim // 2, seed=7).to(device)
    angles, caches = (turns.cos(), turns.sin()), list[Tensor]()
    slots, positions = (torch.tensor(each, dtype=torch.int32, device=device) for each in (_SLOTS, own_positions))

    def run(rows: slice) -> tuple[Tensor, ...]:
        if rows.start == 0:
            caches[:] = [each.to(device, copy=True) for each in before]
        number = rows.stop - rows.start
        q, out = (nans((number, heads, dim), device) for _ in range(2))
        q_row, k_row, v_row = (each[rows] for each in projected)
        new = Entering(q_row, k_row, v_row, norms, False, angles, False)
        workspace = AttentionWorkspace.allocate(heads, kv_heads, dim, num_places, device, number)
        at = RowPositions(positions[rows].clone(), slots[rows].clone())
        attend(q, (caches[0], caches[1]), at, view, workspace, out, new, (stored, stored))
        places = list(zip(_SLOTS[rows], own_positions[rows], strict=True))
        return out, q, *(torch.stack([cache[slot, :, place] for slot, place in places]) for cache in caches)

    return run


def _choose(vocab_size: int, device: torch.device) -> Prepared:
    """Rows of different options, against the host's choice."""
    logits, options = 3 * random_values(len(EACH), vocab_size), [replace(each, seed=5) for each in EACH]
    found = list[str]()

    def launch() -> None:
        found[:] = mismatches(logits.to(device), options)

    return Prepared(launch, lambda: exact(not found))


def _states(sizes: tuple[int, int, int], device: torch.device) -> Run:
    """A convolution and Gated DeltaNet's recurrence: rows of a sequence follow one another in its state."""
    key_heads, heads, width = sizes
    parts = [key_heads * width, key_heads * width, heads * width]
    x, kernel = (
        random_values(_NUM_ROWS, sum(parts)).to(device),
        random_values(sum(parts) * _TAPS, seed=1).to(device) / _TAPS,
    )
    steps, rates = (random_values(_NUM_ROWS, heads, seed=seed).to(device) for seed in (2, 3))
    a_log, dt_bias = (random_values(heads, seed=seed).to(device) for seed in (4, 5))
    before = (
        random_values(_NUM_SLOTS, _TAPS - 1, sum(parts), seed=6),
        random_values(_NUM_SLOTS, heads, width, width, seed=7),
    )
    slots, states = torch.tensor(_SLOTS, dtype=torch.int32, device=device), list[TokenStates]()

    def run(rows: slice) -> tuple[Tensor, ...]:
        if rows.start == 0:
            conv, recurrent = (each.to(device, copy=True) for each in before)
            states[:] = [TokenStates(conv, recurrent, slots)]
        state = replace(states[0], slots=slots[rows].clone())
        mixed = TokenOperations().convolve(x[rows], kernel, None, state, activates=True)
        q, k, v = (part.reshape(len(part), -1, width) for part in torch.split(mixed, parts, 1))
        return mixed, TokenOperations().recur_gated(q, k, v, Gates(steps[rows], rates[rows], a_log, dt_bias), state)

    return run
