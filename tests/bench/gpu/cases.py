"""Every kernel and its twin in plain torch: one list of cases, for `make gpu-check`'s parts `twins` and `sanitizer`.

Sizes are `real`, `wide` for compute-sanitizer, which makes kernels a hundred times as slow, or `tiny` for the
interpreter.
Run as a program (`cases.py DEVICE SIZE FIRST`), it runs the cases from number FIRST on, and writes a line of JSON
before and after each: the parent process then knows which case ended this one, and goes on after it.
"""

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Literal, cast

import numpy as np
import torch
from support.attending import AttendingToken, AttentionShape
from support.gpu_layers import layer_of, partly_there, random_layer, running_on
from support.interpreted_bf16 import correct_bf16
from support.kernel_twins import (
    compact_plain,
    listed_in_blocks,
    pull_records_plain,
    pull_selectors_plain,
    reduce_twin,
    run_experts_plain,
)
from support.named_formats import Name, label, named_expert, named_format
from support.random_experts import (
    Shape,
    magnitudes,
    product_magnitudes,
    random_expert,
    random_rows,
    random_tokens,
    running,
    threshold_at,
    weight_magnitudes,
)
from torch import Tensor

from gpu.comparing import EXP, Case, Difference, Prepared, against_rms, exact, excess, nans, random_values
from gpu.mixer_cases import FORMS, state_case
from gpu.predicted_cases import paths_case, pulled_ahead_case, routes_case, substituted_case
from gpu.row_cases import row_cases
from moe_pack.formats import NeuronFunction, NormSpec, PartFormat, RouterSpec, Selector
from moe_pack.formats.parts import LatentSpec
from moe_pack.runtime.gpu.ahead import collected_launches, compile_ahead
from moe_pack.runtime.gpu.kernels.attention import (
    AttentionWorkspace,
    RowPositions,
    View,
    attend,
    enter_latent,
    leave_latent,
)
from moe_pack.runtime.gpu.kernels.elementwise import Norm, hand_over, norm, reduce
from moe_pack.runtime.gpu.kernels.grouped import Group, PassMemory, combine, run_group, sort_pairs
from moe_pack.runtime.gpu.kernels.halves import Halves, padded, round_rows
from moe_pack.runtime.gpu.kernels.matmul import Product, StoredRows, gated, gather_row, gemm, gemv, normed_gemv
from moe_pack.runtime.gpu.kernels.neurons import compact, neurons, select
from moe_pack.runtime.gpu.kernels.pull import pull_records, pull_selectors
from moe_pack.runtime.gpu.kernels.rotation import device_matrix, rotate, rotate_back
from moe_pack.runtime.gpu.kernels.router import Routed, Router
from moe_pack.runtime.gpu.kernels.router import route as route_kernel
from moe_pack.runtime.gpu.kernels.rows import part_of, stored_part
from moe_pack.runtime.gpu.kernels.tables import WHOLE, RunningNeurons
from moe_pack.runtime.model import (
    TORCH,
    Matrix,
    RowMatrix,
    StoredMatrix,
    Weights,
    activations,
    linear,
    neuron_of,
    run_expert,
)
from moe_pack.runtime.model.attention import latent
from moe_pack.runtime.model.caches import KvDtype, LayerCache, RowStorage
from moe_pack.runtime.model.caches.layer_cache import each_sequence
from moe_pack.runtime.model.compute.matrices import TORCH_DTYPES
from moe_pack.runtime.model.compute.rotation import Rotation

CPU = torch.device("cpu")
Size = Literal["real", "tiny", "2048 columns", "4096 columns", "wide"]
SELECTORS: tuple[Selector, ...] = ("up", "gate", "both", "none")
FORMATS: dict[Size, tuple[Name, ...]] = {
    "real": (1, 2, 3, 4, 8, 16, "fp8", "e5m2", "mxfp4", "t4", "t5", "t6", "t7", "t8"),
    "tiny": (2, 3, 4, "mxfp4", "t4"),
    "2048 columns": (2, 4, "t4"),
    "4096 columns": (2, 4, "t4"),
}
_ALL_SELECTORS: dict[Size, tuple[Name, ...]] = {
    "real": (4, "mxfp4", "t4"),
    "tiny": (4,),
    "2048 columns": (4,),
    "4096 columns": (),
}
# A matrix's rows and columns; an expert's neurons: off every block.
_ROWS: dict[Size, int] = {"real": 1003, "tiny": 19, "2048 columns": 19, "4096 columns": 19}
_COLS: dict[Size, int] = {"real": 2048, "tiny": 128, "2048 columns": 2048, "4096 columns": 4096}
# Few enough that twins decode all at once.
_NEURONS: dict[Size, int] = {"real": 642, "tiny": 66, "2048 columns": 66, "4096 columns": 66}
# Bounds, of the sums of magnitudes behind a value: float32 products in another order. Tensor cores add products in 21
# bits or more, and cut sums off: their bound is of the answer's root mean square. So is that of products with one
# float16 a value.
_FLOAT32, _TENSOR_CORES, _FAST = 1e-6, 3e-5, 0.015
_CODES = 0.01  # of attention where the token's own key or value has another code
_FAULT_LINES = 12
# Key heads, heads, keys and values of a mixer, by whether sizes are real ones and whether it is Mamba.
_MIXERS = {
    (True, False): (16, 32, 128, 128),
    (True, True): (1, 8192, 16, 1),
    (False, False): (1, 2, 8, 40),
    (False, True): (1, 70, 8, 1),
}
_NORMS = (NormSpec("rms", 1e-6), NormSpec("layer", 1e-6))


def cases(size: Size) -> Iterator[Case]:
    """All of them, simple ones first; if wide, those of rows as long as real models' have, in small numbers."""
    if size == "wide":
        for each in _WIDE:
            yield from (case for case in cases(each) if _reads_rows(case))
        return
    f, d = _NEURONS[size], _COLS[size]
    for norm_spec in _NORMS:
        yield Case("norm", f"{norm_spec.kind} {d}", partial(norm_case, norm_spec, d))
    for hidden in (2048, 2880, 4096, 7168) if size == "real" else (64, 192):
        yield Case("rotate", f"{hidden}", partial(rotate_case, (3, hidden), ("residual",)))
    for function in ("silu", "relu", "clamped_swiglu"):
        forms = named_format(4), named_format(16)
        yield Case("gated", function, partial(gated_case, function, forms, (f, d), _NORMS[0], 0.5))
    for spec in _ROUTERS:
        yield Case("route", f"{spec.kind}, {spec.num_experts} experts, {spec.n_group} groups", partial(_route, spec, d))
        for tokens in (1, 3):
            choice = f"{spec.kind}, {spec.num_experts} experts, {tokens} substituted"
            yield Case("route", choice, partial(substituted_case, spec, tokens))
    for num_experts in (16, 256):
        yield Case("rank, score_paths", f"{num_experts} experts", partial(paths_case, num_experts))
    for form in FORMS:
        sizes = _MIXERS[size == "real", form == "Mamba"]
        yield Case("convolve_step, recur_step", form, partial(state_case, form, sizes))
        yield Case("convolve_prompt, recur_step", f"{form}, a prompt", partial(state_case, form, sizes, num_tokens=40))
    yield Case("add_routes", "2 layers of 8 experts", partial(routes_case, 300, 2, True))
    yield Case("enter_pulled, forget_pulled", "300 neurons", partial(pulled_ahead_case, "up"))
    for name in FORMATS[size]:
        yield Case("gemv", label(name), partial(_gemv, name, size))
        for norm_spec in _NORMS:
            yield Case("normed_gemv", f"{label(name)}, {norm_spec.kind}", partial(_normed_gemv, name, norm_spec, size))
        yield Case("gather_row", label(name), partial(_gather, name, d))
        for num_tokens in (3, 70) if size == "real" else (3,):
            yield Case("gemm", f"{label(name)}, {num_tokens} tokens", partial(_gemm, name, num_tokens, size))
    for name in FORMATS[size]:
        for selector in SELECTORS if name in _ALL_SELECTORS[size] else SELECTORS[:1]:
            named = f"{label(name)}, {selector}"
            splits = (False, True) if name in _ALL_SELECTORS[size] else (False,)
            yield from _token_cases(named, [_shape(name, selector, size)] * 2, splits)
            for num_tokens in (5, 40) if size == "real" else (3,):
                for num_halves in (1, 2):
                    passed = f"{named}, {num_tokens} tokens, {num_halves} float16 a value"
                    many = partial(_grouped, [_shape(name, selector, size)] * 3, num_tokens, num_halves)
                    yield Case("run_group, combine", passed, many)
    biased = replace(_shape("mxfp4", "both", size), bias=("gate", "up", "down"), function="clamped_swiglu")
    yield from _token_cases("mxfp4, both, biases and clamped SwiGLU", [biased] * 2)
    mixed: tuple[Name, ...] = (1, 3, 16, "t5") if size == "real" else (2, 16)
    kinds = [_shape(name, "up", size) for name in mixed]
    yield from _token_cases("up, of several kinds", kinds)
    yield Case("run_group, combine", "up, of several kinds, 20 tokens", partial(_grouped, kinds, 20, 2))
    yield Case("reduce", f"8 experts, 16 sums, {d}", partial(reduce_case, (8, 16, d), ("pulled", "host", "residual")))
    yield Case("hand_over", f"6 experts, {d}", partial(hand_over_case, 6, d))
    for shape, kv_dtype in _ATTENTION[size]:
        heads = f"{shape.heads}/{shape.kv_heads} heads of {shape.head_dim}"
        name = f"{heads}, position {shape.position} of {shape.places}, window {shape.window}, {kv_dtype}"
        yield Case("attend", name, partial(_attention, shape, kv_dtype))
    for stored in ("BF16", 4, "t5") if size == "real" else (4,):
        latent_shape = LatentShape(16, 128, 64, 128, 512, stored, 680, 19) if size == "real" else _TINY_LATENT
        yield Case("enter_latent, attend, leave_latent", str(stored), partial(latent_case, latent_shape))
    if size in ("real", "tiny"):
        yield from row_cases(d, f, size == "real")


_WIDE: tuple[Size, ...] = ("2048 columns", "4096 columns")


def _reads_rows(case: Case) -> bool:
    """Whether the case's kernels multiply rows, add up their products, or attend."""
    return any(name in case.kernels for name in ("gemv", "gemm", "gated", "select", "run_group", "reduce", "attend"))


# --- what lies between products


def _random_norm(spec: NormSpec, d: int, device: torch.device) -> tuple[Norm, Callable[[Tensor], Tensor]]:
    weight, bias = 1 + random_values(d, seed=1) / 4, random_values(d, seed=2) if spec.kind == "layer" else None
    there = Norm(weight.to(device), None if bias is None else bias.to(device), spec.eps)

    def plain(x: Tensor) -> Tensor:
        if bias is None:
            return TORCH.rms_norm(x, weight, spec.eps)
        return torch.nn.functional.layer_norm(x, (d,), weight, bias, spec.eps)

    return there, plain


def norm_case(spec: NormSpec, d: int, device: torch.device) -> Prepared:
    x, (there, plain) = 5 + random_values(3, d), _random_norm(spec, d, device)
    out, expected = nans(x, device), plain(x)
    launch = partial(norm, x.to(device), there, out)
    return Prepared(launch, lambda: Difference(excess(out, expected, 1 + expected.abs()), 4 * _FLOAT32))


def rotate_case(shape: tuple[int, ...], added: Sequence[str], device: torch.device) -> Prepared:
    """Tokens there, and back, where a residual and a shared expert's output may be added."""
    d, x = shape[-1], random_values(*shape)
    vectors = random_values(d, seed=1) + 3, random_values(d, seed=2) - 3
    others = {name: random_values(*shape, seed=3 + len(name)) for name in added}
    expected = TORCH.rotate(x, Rotation(*vectors))
    returned = 0.5 * (others.get("shared", 0.0) + TORCH.rotate_back(x, Rotation(*vectors)))
    returned += others.get("residual", 0.0)
    there, matrix = Rotation(*(each.to(device) for each in vectors)), device_matrix(d, device)
    given, on_device = x.to(device), {name: each.to(device) for name, each in others.items()}
    out, back = nans(x, device), nans(x, device)

    def launch() -> None:
        rotate(given, there, matrix, out)
        rotate_back(given, there, matrix, back, scale=0.5, **on_device)

    def compare() -> Difference:
        error = max(against_rms(out, expected), against_rms(back, returned))
        return Difference(error, 16 * _FLOAT32)

    return Prepared(launch, compare)


def gated_case(
    function: NeuronFunction,
    forms: tuple[PartFormat | None, PartFormat],
    shape: tuple[int, int],
    norm_spec: NormSpec | None,
    weight: float | None,
    device: torch.device,
) -> Prepared:
    """The neurons of a dense expert, whose gate and up are stored in these formats; None: there is no gate."""
    (f, d), x, there, stored, products = shape, 1 + random_values(shape[1]), None, [], []
    normed = x
    if norm_spec is not None:
        there, plain = _random_norm(norm_spec, d, device)
        normed = plain(x)
    for seed, form in enumerate(forms):
        if form is not None:
            layout, raw = random_rows(form, f, d, seed)
            rows = torch.from_numpy(raw)
            stored.append(StoredRows(rows.to(device), part_of(layout, "weight")))
            values = RowMatrix(layout, rows).rows(0, f)
            products.append((values @ normed, values.abs() @ normed.abs()))
    factor, out = None if weight is None else torch.tensor([weight], device=device), nans((f,), device)
    *gates, (u, u_bound) = products
    g, bound = None, 1.1 * u_bound  # the steepest function is silu
    if gates:
        ((g, g_bound),) = gates
        bound = 1.1 * g_bound * (u.abs() + (function == "clamped_swiglu")) + g.abs() * u_bound
    times = 1.0 if weight is None else weight
    expected, gate = times * neuron_of(function).h(g, u), stored[0] if gates else None
    launch = partial(gated, x.to(device), gate, stored[-1], function, out, norm=there, weight=factor)
    return Prepared(launch, lambda: Difference(excess(out, expected, times * bound), 4 * _FLOAT32))


_ROUTERS = (
    RouterSpec("softmax_topk", 8, 2, True),
    RouterSpec("softmax_topk", 128, 8, True),
    RouterSpec("softmax_topk", 160, 6, False, n_group=8, topk_group=3, scaling_factor=16.0),
    RouterSpec("sigmoid_topk", 256, 8, True, bias=True, n_group=8, topk_group=4, scaling_factor=2.5),
    RouterSpec("topk_softmax", 40, 8, False),
    RouterSpec("sparsemixer", 16, 2, False, jitter=0.01),
)


def _route(spec: RouterSpec, d: int, device: torch.device) -> Prepared:
    """The norm, a router of values in 16 bits, and the weight of a shared expert; what is chosen follows its logits."""
    k, x, (there, plain) = spec.num_experts_per_tok, random_values(d), _random_norm(NormSpec("rms", 1e-6), d, device)
    rows, shared = (random_values(n, d, seed=n).bfloat16() for n in (spec.num_experts, 1))
    bias = random_values(spec.num_experts, seed=1) / 10 if spec.bias else None
    experts, routed = torch.zeros(k, dtype=torch.int32, device=device), Routed.allocate(d, spec, device)
    stored = [StoredRows(each.to(device), stored_part("BF16", d)) for each in (rows, shared)]
    router = Router(spec, there, stored[0], None, None if bias is None else bias.to(device), stored[1])
    normed = plain(x)
    logits, shared_weight = normed @ rows.float().T, torch.sigmoid(normed @ shared.float()[0])

    def compare() -> Difference:
        chosen, weights = TORCH.route(routed.logits.cpu(), spec, bias)
        if not torch.equal(experts.cpu().long(), chosen[0]):
            return exact(False)
        error = max(
            excess(routed.normed[0], normed, 1 + normed.abs()),
            against_rms(routed.logits[0], logits),
            excess(routed.weights, weights, weights.abs()),
            excess(routed.shared_weight[0], shared_weight, torch.tensor(1.0)),
        )
        return Difference(error, 2 * EXP)

    return Prepared(partial(route_kernel, x.to(device), router, experts, routed), compare)


# --- dense matrices


def _matrix(name: Name, num_rows: int, num_cols: int) -> tuple[Tensor, RowMatrix, Tensor]:
    """Bytes of random rows, what they mean, and what errors of products are relative to."""
    layout, raw = random_rows(named_format(name), num_rows, num_cols)
    rows = torch.from_numpy(raw)
    magnitude = weight_magnitudes(layout.parts[0].format, num_cols, raw[:, : layout.parts[0].num_bytes])
    return rows, RowMatrix(layout, rows), magnitude


def _part(name: Name, num_cols: int):  # type: ignore[no-untyped-def]  # a NamedTuple of an untyped module
    return part_of(random_rows(named_format(name), 1, num_cols)[0], "weight")


def _gemv(name: Name, size: Size, device: torch.device) -> Prepared:
    n, d = _ROWS[size], _COLS[size]
    rows, matrix, magnitude = _matrix(name, n, d)
    x, out = random_tokens(1, d), nans((n,), device)
    there, stored, expected = x[0].to(device), StoredRows(rows.to(device), _part(name, d)), linear(x, matrix)[0]
    bounds = product_magnitudes(x, magnitude)[0]
    return Prepared(lambda: gemv(there, stored, out), lambda: Difference(excess(out, expected, bounds), _FLOAT32))


def _normed_gemv(name: Name, spec: NormSpec, size: Size, device: torch.device) -> Prepared:
    """Three matrices of one format, of other sizes; the last with so many rows that programs take several blocks."""
    d, (there, plain), x = _COLS[size], _random_norm(spec, _COLS[size], device), random_tokens(1, _COLS[size])[0]
    normed, products, compared = plain(x)[None], [], []
    for n in (5, _ROWS[size], 8 * _ROWS[size]):
        rows, matrix, magnitude = _matrix(name, n, d)
        products.append(Product(StoredRows(rows.to(device), _part(name, d)), nans((n,), device)))
        compared.append((linear(normed, matrix)[0], product_magnitudes(normed, magnitude)[0]))

    def compare() -> Difference:
        errors = [excess(each.out, *known) for each, known in zip(products, compared, strict=True)]
        return Difference(max(errors), 4 * _FLOAT32)

    return Prepared(partial(normed_gemv, x.to(device), there, products), compare)


def _gather(name: Name, d: int, device: torch.device) -> Prepared:
    rows, matrix, magnitude = _matrix(name, 5, d)
    row_id, out = torch.tensor([3], dtype=torch.int32, device=device), nans((d,), device)
    stored, expected = StoredRows(rows.to(device), _part(name, d)), 2 * matrix.rows(3, 4)[0]
    return Prepared(
        lambda: gather_row(stored, row_id, out, scale=2.0),
        lambda: Difference(excess(out, expected, 2 * magnitude[3]), _FLOAT32),
    )


def _gemm(name: Name, num_tokens: int, size: Size, device: torch.device) -> Prepared:
    n, d = _ROWS[size], _COLS[size]
    rows, matrix, _ = _matrix(name, n, d)
    x, out = random_values(num_tokens, d), nans((num_tokens, n), device)
    stored, expected = StoredRows(rows.to(device), _part(name, d)), linear(x, matrix)
    scratch = torch.empty(2 * n * d, dtype=torch.float16, device=device)
    launch = partial(gemm, x.to(device), stored, out, scratch, 2)
    return Prepared(launch, lambda: Difference(against_rms(out, expected), _TENSOR_CORES))


# --- experts


def _shape(name: Name, selector: Selector, size: Size) -> Shape:
    stored = named_expert(name)
    return Shape(_NEURONS[size], _COLS[size], selector, stored.gate, stored.up, stored.down)


def _token_cases(name: str, shapes: Sequence[Shape], splits: Sequence[bool] = (False, True)) -> Iterator[Case]:
    """A token through these experts: all missing records are pulled, or, if the list is split, a share of them."""
    for is_split in splits:
        pulls_selectors = not is_split and shapes[0].selector != "none"
        kernels = "pull_selectors, " * pulls_selectors + "select, compact, pull_records, neurons"
        yield Case(kernels, f"{name}, {'split' if is_split else 'pull'}", partial(_token, shapes, is_split))


def _token(shapes: Sequence[Shape], is_split: bool, device: torch.device) -> Prepared:
    """Runs experts that lack half of the records and the first one's selector; 60% of the neurons do not run.

    If the list is split, a share of the missing records is pulled, and torch computes the CPU's part.
    """
    k, f, d, selector, function = (
        len(shapes),
        shapes[0].num_rows,
        shapes[0].num_cols,
        shapes[0].selector,
        shapes[0].function,
    )
    x, made = random_tokens(1, d), random_layer(shapes, zero_rows=(0, 5, f - 1))
    values = [activations(x, expert.block(), function) for expert in made.experts]
    layer = layer_of(made.experts, thresholds=[threshold_at(each.of(selector), 0.6) for each in values])
    there, twin = (partly_there(layer, on, 0.5, k, f // 8, missing_selectors=(0,)) for on in (device, CPU))
    chosen, share = torch.arange(k - 1, -1, -1, dtype=torch.int32), torch.tensor([0.75])
    tables, given, experts, share_there = there.tables, x[0].to(device), chosen.to(device), share.to(device)
    found, left = running_on(_unwritten(RunningNeurons.allocate(k, f, CPU)), device), there.pinned(k)
    kept = there.kept(k)
    selector_units = None
    if selector != "none" and not is_split:
        selector_units = torch.full((k, f), -7, dtype=torch.int32, device=device)
    here, pulled = nans((k, 3, d), device), torch.zeros((k, 3, d), device=device)

    def launch() -> None:
        if selector_units is not None:
            pull_selectors(experts, tables, there.host, there.selectors_at, selector_units)
        select(given, experts, tables, found, selector_units)
        compact(experts, tables, found, there.landing, share_there, left, is_split, kept=kept)
        pull_records(experts, tables, found, there.host, is_split)
        neurons(given, experts, tables, found, here, "here")
        if is_split:
            neurons(given, experts, tables, found, pulled, "pulled")

    def is_as_the_twin(on_host: RunningNeurons) -> bool:
        """Whether lists and pulled rows are the twin's, bit for bit."""
        expected, expected_left, expected_kept = _unwritten(on_host), twin.pinned(k), twin.kept(k)
        if selector_units is not None:
            pull_selectors_plain(chosen, twin.tables, twin.host, twin.selectors_at, selector_units.cpu())
        compact_plain(chosen, twin.tables, expected, twin.landing, share, expected_left, is_split, kept=expected_kept)
        pull_records_plain(chosen, twin.tables, expected, twin.host, is_split)
        pairs = [(tables.arena.cpu(), twin.tables.arena)]
        pairs += [(getattr(on_host, name), getattr(expected, name)) for name in ("neurons", "units", "totals")]
        pairs += [(getattr(left, name), getattr(expected_left, name)) for name in ("counts", "neurons", "a")]
        pairs += [(ours.cpu(), theirs) for ours, theirs in zip(kept or (), expected_kept or (), strict=True)]
        return all(torch.equal(*pair) for pair in pairs)

    def compare() -> Difference:
        on_host, worst = running_on(found, CPU), 0.0
        if not is_as_the_twin(on_host):
            return exact(False)
        for place, e in enumerate(chosen.tolist()):
            expert, threshold, count = layer.experts[e], float(layer.tables.thresholds[e]), int(left.counts[place])
            runs = running(values[e], selector, threshold)
            wanted = list(range(f)) if selector == "none" else runs[0].nonzero()[:, 0].tolist()
            if listed_in_blocks(on_host, place) != ([] if count == WHOLE else wanted):
                return exact(False)
            to_cpu = wanted if count == WHOLE else left.neurons[place, : max(0, count)].tolist()
            by_cpu = (values[e].h * runs)[:, to_cpu] @ expert.block().down[to_cpu]
            y = run_expert(x, expert.packed(), function, selector, threshold)
            sums = here[place].sum(0) + pulled[place].sum(0)
            worst = max(worst, excess(sums.cpu()[None] + by_cpu, y, magnitudes(x, expert, runs).y))
        return Difference(worst, _FLOAT32)

    return Prepared(launch, compare)


def _unwritten(running: RunningNeurons) -> RunningNeurons:
    """The same, but with a number in the lists of `compact` that is no neuron."""
    lists = {name: torch.full_like(getattr(running, name), -7) for name in ("neurons", "units", "totals")}
    return running._replace(neurons=lists["neurons"], units=lists["units"], totals=lists["totals"])


def _grouped(shapes: Sequence[Shape], num_tokens: int, num_halves: int, device: torch.device) -> Prepared:
    """Some tokens, each through two of these experts, of which 60% of the neurons do not run."""
    k, f, d, selector = 2, shapes[0].num_rows, shapes[0].num_cols, shapes[0].selector
    experts = [random_expert(shape, seed, zero_rows=(0, 3)) for seed, shape in enumerate(shapes)]
    x = random_values(num_tokens, d)
    values = [activations(x, expert.block(), "silu").of(selector) for expert in experts]
    thresholds = [threshold_at(each, 0.6) for each in values]
    draw = np.random.default_rng(0)
    chosen = np.stack([draw.permutation(len(experts))[:k] for _ in range(num_tokens)])
    weights = torch.rand(num_tokens, k, generator=torch.Generator().manual_seed(3))
    expected = run_experts_plain(x, chosen, weights, experts, thresholds)
    tables = layer_of(experts, thresholds=thresholds).tables_on(device)
    order = torch.arange(len(experts), dtype=torch.int32, device=device)
    memory = PassMemory.allocate(2, padded(-(-f // 2)), d, num_tokens * k, num_halves, device)
    there, routes, factors = x.to(device), torch.from_numpy(chosen).to(device), weights.to(device)
    rounded, y = Halves.allocate(num_halves, num_tokens, d, device), nans((num_tokens, d), device)

    def launch() -> None:
        pairs = sort_pairs(routes, order, len(experts))
        round_rows(there, rounded)
        for first in range(0, len(experts), 2):
            run_group(rounded, Group(pairs, tables, first, min(2, len(experts) - first)), memory)
        combine(memory.outputs, factors, y)

    return Prepared(launch, lambda: Difference(against_rms(y, expected), _FAST if num_halves == 1 else _TENSOR_CORES))


def reduce_case(shape: tuple[int, int, int], added: Sequence[str], device: torch.device) -> Prepared:
    """Sums [k, P, d] of neurons, and what may be added: those of pulled ones, the CPU's, shared experts', a residual.

    Sums go to the residual's memory, if there is one.
    """
    (k, num_partials, d), names = shape, ("host", "residual", "shared")
    weights, partials = random_values(k, seed=1), random_values(*shape)
    others = {name: random_values(d, seed=2 + seed) for seed, name in enumerate(names) if name in added}
    pulled = random_values(k, num_partials + 3, d, seed=5) if "pulled" in added else torch.zeros(k, 1, d)
    sums = torch.cat([partials, pulled], dim=1)
    inner = [others[name] for name in ("host", "shared") if name in added]
    start = others.get("residual", torch.zeros(d))
    expected = start + 2.5 * sum(inner, start=reduce_twin(sums, weights))
    bounds = start.abs() + 2.5 * sum((each.abs() for each in inner), start=reduce_twin(sums.abs(), weights.abs()))
    there = {name: each.to(device) for name, each in others.items()}
    there |= {"pulled": pulled.to(device)} if "pulled" in added else {}
    if "host" in added and device.type == "cuda":
        there["host"] = others["host"].pin_memory()
    given, out = (partials.to(device), weights.to(device)), there.get("residual", nans((d,), device))

    def launch() -> None:
        if "residual" in added:
            out.copy_(start)
        reduce(*given, out, scale=2.5, **there)

    return Prepared(launch, lambda: Difference(excess(out, expected, bounds), _FLOAT32))


def hand_over_case(k: int, d: int, device: torch.device, num_tokens: int = 1) -> Prepared:
    experts = torch.arange(num_tokens * k, dtype=torch.int32).view(num_tokens, k) + 3
    given = (random_values(num_tokens, d), random_values(num_tokens, k, seed=1), experts)
    there = [torch.zeros(each.shape, dtype=each.dtype, pin_memory=device.type == "cuda") for each in given]
    x, weights, experts = (each.to(device) for each in given)

    def compare() -> Difference:
        if device.type == "cuda":
            torch.cuda.synchronize()
        return exact(all(torch.equal(found, wanted) for found, wanted in zip(there, given, strict=True)))

    return Prepared(lambda: hand_over(x, weights, experts, *there), compare)


# --- attention


_CODED: tuple[KvDtype, ...] = ("q8", "q4")
_LARGE = AttentionShape(32, 8, 128, 4095, 4096)
_FIRST, _ODD = replace(_LARGE, position=0), AttentionShape(8, 8, 80, 300, 320)
_RING = AttentionShape(64, 8, 64, 5000, 640, window=128, sinks=True)
_WIDE_HEADS = AttentionShape(32, 4, 128, 300, 320)
_TINY_RING = AttentionShape(4, 2, 64, 70, 40, window=24, sinks=True)
_ATTENTION: dict[Size, tuple[tuple[AttentionShape, KvDtype], ...]] = {
    "real": (
        (_LARGE, "f32"),
        (AttentionShape(32, 4, 128, 4095, 8192), "bf16"),
        (_FIRST, "f32"),
        (_ODD, "f32"),
        (_RING, "bf16"),
        *product((_LARGE, _FIRST, _ODD, AttentionShape(16, 2, 256, 700, 1024), _RING), _CODED),
    ),
    "tiny": (
        (AttentionShape(4, 2, 16, 70, 96), "f32"),
        (replace(_TINY_RING, head_dim=16), "f32"),
        *((_TINY_RING, dtype) for dtype in _CODED),
    ),
    "2048 columns": tuple((_WIDE_HEADS, dtype) for dtype in ("f32", "bf16", *_CODED)),
    "4096 columns": (),
}


def _attention(shape: AttentionShape, dtype: KvDtype, device: torch.device) -> Prepared:
    """A token enters the cache and attends: heads normed and rotated."""
    token, rows, found = AttendingToken(shape, 0, device), RowStorage(dtype, (shape.head_dim,)), list[Tensor]()
    cached = (rows.encode(token.cache[0]), rows.encode(token.cache[1]))
    expected, after = token.expected(cached, rows)
    keys, values = (each.to(device) for each in cached)

    def launch() -> None:
        found[:] = token.attended((keys, values), rows=rows)

    def compare() -> Difference:
        error = against_rms(found[0], expected)
        if rows.is_coded:
            # A code or a scale of the token's may be the next one where a value lies between two.
            others = max(int((own.cpu() != its).sum()) for own, its in zip((keys, values), after, strict=True))
            return Difference(error, _CODES) if others <= shape.kv_heads * shape.head_dim // 50 else exact(False)
        rounding = 2**-7 if dtype == "bf16" else 4 * _FLOAT32  # to one bfloat16 or the next
        if excess(keys.float(), after[0].float(), 1 + after[0].float().abs()) > rounding:
            return exact(False)
        return Difference(error, 0.02 if dtype == "bf16" else _TENSOR_CORES)

    return Prepared(launch, compare)


@dataclass(frozen=True, slots=True)
class LatentShape:
    heads: int
    nope: int
    rope: int
    v: int
    rank: int
    stored: PartFormat | Name | Literal["BF16", "F32"]  # how `kv_b` is stored
    position: int = 40
    room: int = 100  # positions of the cache behind the token's
    interleaved: bool = True


_TINY_LATENT = LatentShape(2, 20, 8, 17, 128, 4, 40, 19)


def latent_case(shape: LatentShape, device: torch.device) -> Prepared:
    heads, nope, rope, v, rank = shape.heads, shape.nope, shape.rope, shape.v, shape.rank
    spec = LatentSpec("latent", heads, None, rank, nope, rope, v, (nope + rope) ** -0.5, 1e-6)
    num_rows, at, width, stored = heads * (nope + v), shape.position, 16, shape.stored
    matrix: Matrix
    if stored in ("BF16", "F32"):
        weight = random_values(num_rows, rank).to(TORCH_DTYPES[stored]) / 8
        matrix, kv_b = StoredMatrix(weight), StoredRows(weight.to(device), stored_part(stored, rank))
    else:
        layout, raw = random_rows(stored if isinstance(stored, PartFormat) else named_format(stored), num_rows, rank)
        matrix = RowMatrix(layout, torch.from_numpy(raw))
        kv_b = StoredRows(torch.from_numpy(raw).to(device), part_of(layout, "weight"))
    matrices: dict[str, Matrix] = {
        "q": StoredMatrix(random_values(heads * (nope + rope), width)),
        "kv_a": StoredMatrix(random_values(rank + rope, width)),
        "kv_b": matrix,
        "o": StoredMatrix(torch.eye(heads * v)),
    }
    norm_weight, x, turns = 1 + random_values(rank) / 4, random_values(1, width), 9 * random_values(at + 1, rope // 2)
    cos, sin, keys = turns.cos(), turns.sin(), random_values(1, at + 1 + shape.room, rank + rope, seed=1)
    weights = SimpleNamespace(
        spec=SimpleNamespace(rope_of=lambda _: SimpleNamespace(interleaved=shape.interleaved)),
        matrix=lambda role: matrices[role.rpartition(".")[2]],
        vector=lambda role: norm_weight,
        operations=TORCH,
    )
    cache = LayerCache(keys.clone(), keys[..., :rank], at)
    sequences = each_sequence(cache, 1)
    expected = latent.Latent(cast(Weights, weights), spec, 0).attend(x, sequences, (cos[at:], sin[at:]))[0]
    given = [each.to(device) for each in (linear(x, matrices["q"])[0], linear(x, matrices["kv_a"])[0], norm_weight)]
    there, angles = keys.to(device), (cos.to(device), sin.to(device))
    position = torch.tensor([at], dtype=torch.int32, device=device)
    moved, mixed, out = (nans(shape, device) for shape in ((heads, rank + rope), (heads, rank), (heads * v,)))
    workspace = AttentionWorkspace.allocate(heads, 1, rank, keys.shape[1], device)
    places, stacked = RowPositions(position, torch.zeros_like(position)), there[None]

    def launch() -> None:
        projected = (given[0][None], given[1][None])
        enter_latent(projected, given[2], angles, shape.interleaved, places, spec, kv_b, moved[None], stacked)
        attend(moved[None], (stacked, stacked[..., :rank]), places, View(spec.scale), workspace, mixed[None])
        leave_latent(mixed[None], spec, kv_b, out[None])

    def compare() -> Difference:
        error = max(against_rms(out, expected), against_rms(there, cache.keys))
        return Difference(error, _TENSOR_CORES)

    return Prepared(launch, compare)


def main(device_name: str, size: Size, first: int) -> int:
    """Runs the cases of a size from one on; a GPU whose memory was misused runs no more: then 3."""
    device, found = torch.device(device_name), list(cases(size))[first:]
    if device.type == "cpu":
        correct_bf16()
    made = _compiled(found, device) if device.type == "cuda" and size == "real" else {}
    for number, case in enumerate(found):
        _tell({"kernels": case.kernels, "case": case.name})
        start = time.perf_counter()
        try:
            prepared = made.pop(number, None) or case.prepare(device)
            prepared.launch()
            difference = prepared.compare()
        except Exception as fault:  # the other cases are wanted, whatever it is
            lines = traceback.format_exc().splitlines()[-_FAULT_LINES:]
            _tell({"fault": "\n".join(lines), "seconds": time.perf_counter() - start})
            if "CUDA error" in str(fault):
                return 3
        else:
            _tell(asdict(difference) | {"is_right": difference.is_small, "seconds": time.perf_counter() - start})
    return 0


def _compiled(found: list[Case], device: torch.device) -> dict[int, Prepared]:
    """Prepares all cases, and compiles their kernels by all cores; a case without inputs fails in its turn."""
    start, processes, made = time.perf_counter(), len(os.sched_getaffinity(0)), dict[int, Prepared]()
    with collected_launches() as jobs:
        for number, case in enumerate(found):
            with suppress(Exception):
                made[number] = case.prepare(device)
                made[number].launch()
    prepared_s = time.perf_counter() - start
    compiled = compile_ahead(list(jobs.values()), processes)
    seconds = time.perf_counter() - start - prepared_s
    counts = {"collected": len(jobs), "compiled": compiled, "processes": processes}
    _tell(counts | {"prepared_s": prepared_s, "seconds": seconds})
    return made


def _tell(event: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], cast(Size, sys.argv[2]), int(sys.argv[3])))
