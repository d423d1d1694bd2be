"""The experts of the next layer, predicted for one token, and the records that were pulled for them.

A prediction is scores of all experts, of which `rank` takes the best. `enter_pulled` enters their records in the next
layer's table; `forget_pulled` takes them out after that layer has been listed, and counts the needed ones. The twins
are `runtime.offload.prefetch` and `runtime.offload.paths`.
"""

from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from moe_pack.runtime.gpu.kernels.products import runs
from moe_pack.runtime.gpu.kernels.router import keys_of, largest
from moe_pack.runtime.gpu.kernels.tables import PER_LAYER, LayerTables, RunningNeurons
from moe_pack.runtime.offload import PathStatistics

_BLOCK = tl.constexpr(256)  # records that a program enters, hidden units that it sums up, or keys that it compares
_SUCCESSORS = tl.constexpr(16)  # that are added at once
_HASH_BITS = 56  # sums of the hashes of a token's experts stay below 2^63


def rank(scores: Tensor, experts: Tensor, *, bias: Tensor | None = None, is_sigmoid: bool = False) -> None:
    """Writes the experts with the largest scores, best first, equals by index.

    Args:    scores: float32 [E].   experts: int32 [n], overwritten.   bias: float32 [E], added to the softmax of the
             scores, or to their sigmoids, as a router with biases does; None: the scores themselves are ranked.
    """
    _rank_kernel[(1,)](scores, bias, experts, len(scores), len(experts), is_sigmoid, num_warps=4, enable_fp_fusion=True)


@triton.jit
def _rank_kernel(scores_ptr, bias_ptr, experts_ptr, E: tl.constexpr, N: tl.constexpr, IS_SIGMOID: tl.constexpr):
    index = tl.arange(0, triton.next_power_of_2(E))[None, :]
    mask = index < E
    scores = tl.load(scores_ptr + index, mask=mask, other=-float("inf"))
    # As a router with biases, which adds them to scores and not to logits.
    if bias_ptr is not None:
        if IS_SIGMOID:
            scores = 1.0 / (1.0 + tl.exp(-scores))
        else:
            powers = tl.exp(scores - tl.max(scores))
            scores = powers / tl.sum(powers)
        scores += tl.load(bias_ptr + index, mask=mask, other=0.0)
    experts = largest(keys_of(scores, index, mask), index, N)
    places = tl.arange(0, experts.shape[0])
    tl.store(experts_ptr + places, experts, mask=places < N)


def add_routes(first: Tensor, by_route: Tensor, routes: Tensor, is_rectified: bool) -> None:
    """Adds a row for each of a token's routes to a network's first layer.

    Args:    first: float32 [h], changed in place.   by_route: bfloat16 [p, E, h], contiguous, for the p layers before.
             routes: int32 [p, k], contiguous rows, the layer further back first.   is_rectified: whether a second
             layer follows, which gets the positive part.
    """
    (p, k), h = routes.shape, len(first)
    _add_routes_kernel[(triton.cdiv(h, _BLOCK.value),)](
        first, by_route, routes, routes.stride(0), by_route.shape[1], h, p, k, is_rectified, num_warps=4,
        enable_fp_fusion=True,
    )  # fmt: skip


@triton.jit(do_not_specialize=("routes_ptr",))
def _add_routes_kernel(
    first_ptr,
    by_route_ptr,
    routes_ptr,
    STRIDE: tl.constexpr,
    E: tl.constexpr,
    H: tl.constexpr,
    P: tl.constexpr,
    K: tl.constexpr,
    IS_RECTIFIED: tl.constexpr,
):
    unit = tl.program_id(0) * _BLOCK + tl.arange(0, _BLOCK)
    mask = unit < H
    total = tl.load(first_ptr + unit, mask=mask, other=0.0)
    for place in tl.static_range(P * K):
        row = place // K * E + tl.load(routes_ptr + place // K * STRIDE + place % K)
        total += tl.load(by_route_ptr + row * H + unit, mask=mask, other=0.0).to(tl.float32)
    if IS_RECTIFIED:
        total = tl.maximum(total, 0.0)
    tl.store(first_ptr + unit, total, mask=mask)


class LayerPaths(NamedTuple):
    """Path statistics of one MoE layer on a device, for the p layers just before it."""

    # float32 [p, E, E], of each expert before, further back first, the logarithms of `PathStatistics`' second stage; 0
    # where `is_known`, int32 [p, E], is 0.
    logs: Tensor
    is_known: Tensor
    shares: Tensor  # float32 [E], the popularity
    hashes: Tensor  # int64 [p, E], whose sum over a token's experts stands for them
    keys: Tensor  # int64 [n], the sums of the exact keys
    starts: Tensor  # int32 [n + 1], where each key's successors begin
    successors: Tensor  # int32, the experts that followed
    counts: Tensor  # float32, how often

    @classmethod
    def of(cls, paths: PathStatistics, layer_idx: int, num_before: int, device: torch.device) -> "LayerPaths":
        """Returns the statistics of a layer for predictions by the routes of the `num_before` layers before."""
        tables = [paths.log_shares(layer_idx, back) for back in range(num_before, 0, -1)]
        E = paths.popularity.shape[1]
        hashes = np.random.default_rng(layer_idx).integers(0, 1 << _HASH_BITS, (num_before, E))
        first, keys = paths.exact_keys(layer_idx, num_before)
        k = paths.experts_per_token
        before = keys.reshape(len(keys), num_before, k).astype(np.int64)
        sums = hashes[np.arange(num_before)[:, None], before].sum(axis=(1, 2))
        starts = paths.successor_starts[first : first + len(keys) + 1].astype(np.int64)
        following = slice(int(starts[0]), int(starts[-1]))
        values: dict[str, NDArray[np.generic]] = {
            "logs": np.stack([logs for logs, _ in tables]).astype(np.float32),
            "is_known": np.stack([known for _, known in tables]).astype(np.int32),
            "shares": (paths.popularity[layer_idx] / paths.popularity[layer_idx].sum()).astype(np.float32),
            "hashes": hashes,
            "keys": sums,
            "starts": (starts - starts[0]).astype(np.int32),
            "successors": paths.successor_experts[following].astype(np.int32),
            "counts": paths.successor_counts[following].astype(np.float32),
        }
        return cls(**{name: torch.from_numpy(np.ascontiguousarray(each)).to(device) for name, each in values.items()})


def score_paths(routes: Tensor, paths: LayerPaths, scores: Tensor) -> None:
    """Writes scores of a layer's experts by path statistics, for `rank`: of the first stage that knows the token.

    Args:    routes: int32 [p, k], contiguous rows, the layer further back first.   scores: float32 [E], overwritten.
    """
    p, k = routes.shape
    _score_paths_kernel[(1,)](
        routes, paths, scores, len(paths.keys), routes.stride(0), p, k, len(scores), num_warps=4, enable_fp_fusion=True
    )


@triton.jit(do_not_specialize=("routes_ptr", "num_keys"))
def _score_paths_kernel(
    routes_ptr, paths, scores_ptr, num_keys, STRIDE: tl.constexpr, P: tl.constexpr, K: tl.constexpr, E: tl.constexpr
):
    BLOCK_E: tl.constexpr = triton.next_power_of_2(E)
    expert = tl.arange(0, BLOCK_E)
    mask = expert < E
    # The second stage adds what is known of each expert before; the third is popularity.
    key, num_known = tl.load(routes_ptr).to(tl.int64) * 0, tl.load(routes_ptr) * 0
    logs = tl.zeros([BLOCK_E], tl.float32)
    for place in tl.static_range(P * K):
        row = place // K * E + tl.load(routes_ptr + place // K * STRIDE + place % K)
        key += tl.load(paths.hashes + row)
        num_known += tl.load(paths.is_known + row)
        logs += tl.load(paths.logs + row * E + expert, mask=mask, other=0.0)
    scores = logs
    if num_known == 0:
        scores = tl.load(paths.shares + expert, mask=mask, other=0.0)
    # The first stage knows tokens with exactly these experts, by the sum of their hashes.
    found = num_known * 0 - 1
    start = 0
    while start < num_keys:
        number = start + tl.arange(0, _BLOCK)
        is_it = tl.load(paths.keys + number, mask=number < num_keys, other=-1) == key
        found = tl.maximum(found, tl.max(tl.where(is_it, number, -1), 0))
        start += _BLOCK
    if found >= 0:
        scores = tl.zeros([BLOCK_E], tl.float32)
        first, last = tl.load(paths.starts + found), tl.load(paths.starts + found + 1)
        while first < last:
            number = first + tl.arange(0, _SUCCESSORS)
            successor = tl.load(paths.successors + number, mask=number < last, other=-1)
            count = tl.load(paths.counts + number, mask=number < last, other=0.0)
            scores += tl.sum(tl.where(successor[:, None] == expert[None, :], count[:, None], 0.0), 0)
            first += _SUCCESSORS
    tl.store(scores_ptr + expert, scores, mask=mask)


class PulledAhead(NamedTuple):
    """The records that are pulled for the experts predicted for one layer."""

    experts: Tensor  # int32 [n]
    neurons: Tensor  # int32 [n, S], of each expert those with a record
    counts: Tensor  # int32 [n], how many of them


def enter_pulled(pulled: PulledAhead, record_at: Tensor, first: int, row_units: int) -> None:
    """Enters records in a layer's table `record_at` [E, f].

    Args:    first, row_units: record `j` of the p-th expert is at `first + (p * S + j) * row_units`, in units of 16
             bytes; -1 and 0 take them out again.
    """
    n, most = pulled.neurons.shape
    _enter_pulled_kernel[n, triton.cdiv(most, _BLOCK.value)](
        pulled, record_at, most, first, row_units, record_at.shape[1], num_warps=4, enable_fp_fusion=True
    )


@triton.jit(do_not_specialize=("most", "first", "row_units"))
def _enter_pulled_kernel(pulled, record_at_ptr, most, first, row_units, F: tl.constexpr):
    place = tl.program_id(0)
    number = tl.program_id(1) * _BLOCK + tl.arange(0, _BLOCK)
    mask = number < tl.load(pulled.counts + place)
    neuron = tl.load(pulled.neurons + place * most + number, mask=mask, other=0)
    at = first + (place * most + number) * row_units
    tl.store(record_at_ptr + tl.load(pulled.experts + place) * F + neuron, at, mask=mask)


def forget_pulled(
    pulled: PulledAhead, experts: Tensor, tables: LayerTables, running: RunningNeurons, totals: Tensor
) -> None:
    """Takes records out of a layer's table again, after `neurons.compact` has listed the layer.

    Args:    experts: int32 [k], those of the layer, with `running` from `neurons.select`.   totals: int32 [n, 3],
             overwritten: each predicted expert, its pulled records, and how many of these ran.
    """
    n, most = pulled.neurons.shape
    k, f = running.a.shape
    is_selected = tables.selector_at is not None
    _forget_pulled_kernel[(n,)](
        pulled, experts, tables.record_at, tables.thresholds, running.a, totals, most, is_selected, f, k,
        num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip


@triton.jit(do_not_specialize=(*PER_LAYER, "totals_ptr", "most"))
def _forget_pulled_kernel(
    pulled,
    experts_ptr,
    record_at_ptr,
    thresholds_ptr,
    a_ptr,
    totals_ptr,
    most,
    IS_SELECTED: tl.constexpr,
    F: tl.constexpr,
    K: tl.constexpr,
):
    predicted = tl.program_id(0)
    expert, count = tl.load(pulled.experts + predicted), tl.load(pulled.counts + predicted)
    threshold = tl.load(thresholds_ptr + expert)
    # Finds the predicted expert among those that ran.
    place = expert * 0 - 1
    for other in tl.static_range(K):
        place = tl.where(tl.load(experts_ptr + other) == expert, other, place)
    # Forgets its records, and counts those whose neurons ran.
    num_ran, start = count * 0, 0
    while start < count:
        number = start + tl.arange(0, _BLOCK)
        mask = number < count
        neuron = tl.load(pulled.neurons + predicted * most + number, mask=mask, other=0)
        tl.store(record_at_ptr + expert * F + neuron, -1, mask=mask)
        ran = mask & (place >= 0)
        if IS_SELECTED:
            ran = ran & runs(tl.load(a_ptr + place * F + neuron, mask=ran, other=0.0), threshold)
        num_ran += tl.sum(ran.to(tl.int32), 0)
        start += _BLOCK
    tl.store(totals_ptr + predicted * 3, expert)
    tl.store(totals_ptr + predicted * 3 + 1, count)
    tl.store(totals_ptr + predicted * 3 + 2, num_ran)
