"""The operations of a forward pass, in plain torch and by native kernels.

`layer`, `attention` and the weights say what is computed; operations say how. `Operations` is plain torch on any device
and the reference. Faster operations override its methods and are tested against it; `NativeOperations` are those of the
C++ kernels on the CPU. The formulas of routers are in `router`, those of experts in `expert`.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_pack import formats
from moe_pack.formats.pack.layouts import Part
from moe_pack.formats.parts import attention
from moe_pack.runtime import cpu
from moe_pack.runtime.model import caches, mixers, router
from moe_pack.runtime.model.caches import rotate
from moe_pack.runtime.model.expert import neuron_of
from moe_pack.runtime.model.rotation import Rotation, hartley, odd_factor, transform

MAX_DECODED_BYTES = 16 << 20  # the most that an operation dequantizes at once
# The most scores that attention computes at once on the CPU, and the largest mask on a GPU, whose kernel stores none.
# Where torch has no fused attention it stores all scores, in several copies: 512 queries of 32 heads would take 512 MiB
# at 8,192 tokens.
MAX_SCORE_BYTES = 64 << 20
_FUSED_DIMS = 4  # a GPU's fused attention takes head dimensions of float32 that are multiples of it

Product = Callable[[Tensor], Tensor]  # from x float32 [T, columns] to x @ rows.T, float32 [T, rows]


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """The RMS norms of each head's queries and keys: weights float32 [head_dim] and eps.

    `is_last`: heads are normed after they are rotated, not before.
    """

    q: Tensor
    k: Tensor
    eps: float
    is_last: bool = False


class Operations:
    """The operations in plain torch, on any device."""

    def tokens_alone(self) -> AbstractContextManager[None]:
        """Returns a context in which the outputs of a token do not depend on the tokens next to it, to the bit.

        Torch promises nothing like it: there they agree but for rounding.
        """
        return nullcontext()

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Returns `x / rms(x) * weight` over the last dimension of x float32 [..., n], for weight float32 [n]."""
        return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))

    def route(self, logits: Tensor, spec: formats.RouterSpec, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Returns the experts of each token, int64 [T, k], best first, and their weights, float32 [T, k].

        The weight is zero if the token is beyond the expert's capacity.
        Args:    logits: float32 [T, E], or [T, E + Z] with experts that return their input.   bias: float32 of the
                 same width, added for the choice only; None if the spec has none.
        """
        experts, weights = self._choose(logits, spec, bias)
        return experts, router.limit_to_capacity(experts, weights, spec)

    def _choose(self, logits: Tensor, spec: formats.RouterSpec, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        return router.choose(logits, spec, bias)

    def attend(
        self,
        projected: tuple[Tensor, Tensor, Tensor],
        norms: HeadNorms | None,
        angles: caches.Angles,
        interleaved: bool,
        cache: caches.LayerCache,
        spec: attention.GroupedQuerySpec,
        window: int | None,
        sinks: Tensor | None,
        chosen: Tensor | None = None,
    ) -> Tensor:
        """Returns the output of each query head; the keys and values of new tokens enter the cache.

        Args:    projected: queries and keys, float32 [T, heads * head_dim], neither normed by head nor rotated, and
                 values [T, heads * value_dim].   window: the most positions that a token sees; None: all before it.
                 sinks: float32 [num_heads], logits without a value.   chosen: bool [m, T, blocks], the blocks of
                 positions that each token attends to with each of m shares of the heads; None: all.
        Returns: float32 [T, num_heads * value_dim].
        """
        dims = (spec.head_dim, spec.head_dim, spec.value_dim)
        # Each [heads, T, dim].
        q, k, v = (each.view(len(each), -1, dim).transpose(0, 1) for each, dim in zip(projected, dims, strict=True))
        if norms is not None and not norms.is_last:
            q, k = self.rms_norm(q, norms.q, norms.eps), self.rms_norm(k, norms.k, norms.eps)
        q, k = rotate(q, angles, interleaved), rotate(k, angles, interleaved)
        if norms is not None and norms.is_last:
            q, k = self.rms_norm(q, norms.q, norms.eps), self.rms_norm(k, norms.k, norms.eps)
        start, num_tokens, chunked = cache.num_tokens, q.shape[1], spec.chunked
        first = _first_seen(window, start, chunked)
        cache.append(k, v)
        if cache.reads_blocks:
            return _attend_cache_blocks(q, cache, first, spec, window, sinks, chosen).transpose(0, 1).flatten(1)
        keys, values = cache.between(first, start + num_tokens)
        rows = spec.num_heads if q.device.type == "cpu" else 1
        step = max(1, MAX_SCORE_BYTES // (4 * rows * max(keys.shape[1], 1)))
        mixed = []
        for begin in range(0, max(num_tokens, 1), step):
            piece, at = q[:, begin : begin + step], start + begin
            if chosen is not None:
                mixed.append(_attend_blocks(piece, keys, values, at, chosen[:, begin : begin + step], spec))
                continue
            piece_first = _first_seen(window, at, chunked)
            seen = slice(piece_first - first, at + piece.shape[1] - first)
            mixed.append(
                _attend_piece(
                    piece, keys[:, seen], values[:, seen], at, piece_first, spec.scale, window, sinks, chunked
                )
            )
        whole = mixed[0] if len(mixed) == 1 else torch.cat(mixed, dim=1)  # [heads, T, value_dim]
        return whole.transpose(0, 1).flatten(1)

    def activate(self, gate: Tensor | None, up: Tensor, function: formats.NeuronFunction) -> Tensor:
        """Returns h of neurons from `gate_i . x` (None without a gate) and `up_i . x`, all in one shape."""
        return neuron_of(function).h(gate, up)

    def convolve(self, x: Tensor, kernel: Tensor, bias: Tensor | None, state: mixers.LayerState) -> Tensor:
        """Returns a causal convolution of each channel of x float32 [T, channels], as `mixers.convolve` says."""
        return mixers.convolve(x, kernel, bias, state)

    def recur(
        self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, rate: Tensor | None, state: mixers.LayerState
    ) -> Tensor:
        """Returns what tokens read from a recurrent state, float32 [T, heads, values], as `mixers.recur` says."""
        return mixers.recur(q, k, v, log_decay, rate, state)

    def stored_product(self, weight: Tensor) -> Product:
        """Returns the product with a matrix of 16- or 32-bit values, [rows, columns]."""
        num_rows, num_cols = weight.shape

        def rows(start: int, stop: int) -> Tensor:
            return weight[start:stop].to(torch.float32)

        return lambda x: product_by_blocks(x, num_rows, num_cols, rows)

    def row_product(self, layout: formats.RowLayout, rows: Tensor) -> Product:
        """Returns the product with rows in a row layout of one part, u8 [rows, row bytes]."""
        (part,) = layout.parts

        def decoded(start: int, stop: int) -> Tensor:
            return self.decode(layout, part, rows[start:stop])

        return lambda x: product_by_blocks(x, len(rows), layout.num_cols, decoded)

    def decode(self, layout: formats.RowLayout, part: Part, rows: Tensor) -> Tensor:
        """Returns a part of rows u8 [rows, row bytes] as float32 [rows, columns]; all operations give the same bits."""
        from moe_pack.formats.pack.codecs import decode_part  # kernels decode without it

        codes = rows[:, part.offset : part.offset + part.code_bytes]
        scales = rows[:, part.scales_offset : part.bias_offset]
        return decode_part(part.format, layout.num_cols, torch.cat((codes, scales), dim=1))

    def rotate(self, x: Tensor, rotation: Rotation) -> Tensor:
        """Returns `R (a * x)`, the input of a rotated layer's experts, float32 [T, d]."""
        return transform(x * rotation.input)

    def rotate_back(self, y: Tensor, rotation: Rotation) -> Tensor:
        """Returns `b * R y`, what a rotated layer's experts add, float32 [T, d], for the sum y of their outputs."""
        return transform(y) * rotation.output

    def fastest_stored(self, weight: Tensor) -> Tensor:
        """Returns a weight of 16 or 32 bits in the dtype in which `stored_product` multiplies one token fastest.

        Torch would convert 16 bits to float32 for every product, which takes twice as long.
        """
        return weight.float()


TORCH: Operations = Operations()


def row_blocks(num_rows: int, num_cols: int, parts: int = 1) -> Iterator[tuple[int, int]]:
    """Yields (start, stop) of consecutive blocks of rows; a block of `parts` matrices fits `MAX_DECODED_BYTES`."""
    step = max(1, MAX_DECODED_BYTES // (4 * num_cols * parts))
    for start in range(0, num_rows, step):
        yield start, min(start + step, num_rows)


def product_by_blocks(x: Tensor, num_rows: int, num_cols: int, rows: Callable[[int, int], Tensor]) -> Tensor:
    """Returns `x @ matrix.T`, float32 [T, num_rows], from `rows(start, stop)`, float32, a block of rows at a time."""
    # The output is allocated first: allocated between two blocks, it would lie in the memory of the first block's rows,
    # and the next block would need new memory.
    y = x.new_empty((len(x), num_rows))
    for start, stop in row_blocks(num_rows, num_cols):
        y[:, start:stop] = x @ rows(start, stop).T
    return y


def seen_positions(
    window: int | None, first: int, start: int, num_tokens: int, device: torch.device, chunked: bool = False
) -> Tensor | None:
    """Returns which positions from `first` on each of `num_tokens` tokens from position `start` on sees.

    Returns: bool [T, start + T - first]; None if one token sees all.
    """
    if num_tokens == 1 and (window is None or window > start - first):
        return None
    query = torch.arange(start, start + num_tokens, device=device)[:, None]
    key = torch.arange(first, start + num_tokens, device=device)[None, :]
    seen = key <= query
    if window is None:
        return seen
    return seen & (key >= query - query % window if chunked else key > query - window)


def _first_seen(window: int | None, start: int, chunked: bool) -> int:
    """Returns the first position that a token at position `start` sees."""
    if window is not None and chunked:
        return start - start % window
    return 0 if window is None else max(0, start + 1 - window)


def _attend_piece(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    start: int,
    first: int,
    scale: float,
    window: int | None,
    sinks: Tensor | None,
    chunked: bool,
) -> Tensor:
    """Returns the attention of queries [heads, T, head_dim] from position `start` on, over keys from `first` on.

    Returns: float32 [heads, T, value_dim].
    """
    stop = start + q.shape[1]
    is_causal = start == 0 and (window is None or window >= stop)  # a whole sequence; torch needs no mask
    is_fused = q.device.type != "cpu" or (sinks is None and values.shape[-1] == q.shape[-1])
    is_all = is_causal and sinks is None and is_fused
    seen = None if is_all else seen_positions(window, first, start, q.shape[1], q.device, chunked)
    if not is_fused:
        return _softmax_attention(q, keys, values, seen, scale, sinks)
    if sinks is not None:
        return attend_with_sinks(q, keys, values, seen, scale, sinks)
    return _attend_seen(q, keys, values, seen, is_causal, scale)


def attend_with_sinks(
    q: Tensor, keys: Tensor, values: Tensor, seen: Tensor | None, scale: float, sinks: Tensor
) -> Tensor:
    """Returns `softmax(scale * q @ keys^T) @ values` of each head, with one more logit in its softmax, without a value.

    Args:    q: float32 [heads, T, n].   keys: float32 [kv_heads, S, n].   values: float32 [kv_heads, S, v].
             seen: bool [T, S]; None: all.   sinks: float32 [heads], these logits.
    Returns: float32 [heads, T, v].
    """
    if q.device.type == "cpu":
        return _softmax_attention(q, keys, values, seen, scale, sinks)
    least = torch.finfo(torch.float32).min  # minus infinity times 0 is NaN
    q, keys, values = _with_sinks(q, keys, values, (sinks / scale).clamp(min=least))
    seen = None if seen is None else torch.nn.functional.pad(seen, (0, 1), value=True)
    return fused_attention(q, keys, values, seen, False, scale)


def _attend_seen(q: Tensor, keys: Tensor, values: Tensor, seen: Tensor | None, is_causal: bool, scale: float) -> Tensor:
    """Returns the attention of queries [heads, T, head_dim] over keys that they see, float32 [heads, T, value_dim]."""
    if q.device.type != "cpu":
        return fused_attention(q, keys, values, seen, is_causal, scale)
    if values.shape[-1] != q.shape[-1]:
        return _softmax_attention(q, keys, values, seen, scale, None)
    mixed: Tensor = torch.nn.functional.scaled_dot_product_attention(
        q[None], keys[None], values[None], attn_mask=seen, is_causal=is_causal, scale=scale, enable_gqa=True
    )
    return mixed[0]


def _softmax_attention(
    q: Tensor, keys: Tensor, values: Tensor, seen: Tensor | None, scale: float, sinks: Tensor | None
) -> Tensor:
    """Returns `softmax(scale * q @ keys^T) @ values` of each head, with one array of all scores and no copy of keys.

    On the CPU, torch fuses neither sinks nor values of another size than keys. What it does instead copies the keys for
    each query head: one token took 12 s and 4 GB after 32,000 positions of 64 heads, and takes 0.1 s here.

    Args:    q: float32 [heads, T, n].   keys: float32 [kv_heads, S, n].   values: float32 [kv_heads, S, v].
             seen: bool [T, S]; None: all.   sinks: float32 [heads], logits without a value; None: none.
    Returns: float32 [heads, T, v].
    """
    num_heads, num_tokens, num_kv_heads = len(q), q.shape[1], len(keys)
    scores = (q * scale).reshape(num_kv_heads, -1, q.shape[2]) @ keys.transpose(1, 2)
    by_head = scores.view(num_heads, num_tokens, -1)
    if seen is not None:
        by_head.masked_fill_(~seen, -torch.inf)
    highest = by_head.detach().amax(dim=-1, keepdim=True)
    if sinks is not None:
        highest = torch.maximum(highest, sinks[:, None, None])
    by_head.sub_(highest).exp_()
    total = by_head.sum(dim=-1, keepdim=True)
    if sinks is not None:
        total = total + (sinks[:, None, None] - highest).exp()
    return (scores @ values).view(num_heads, num_tokens, -1) / total


def _attend_cache_blocks(
    q: Tensor,
    cache: caches.LayerCache,
    first: int,
    spec: attention.GroupedQuerySpec,
    window: int | None,
    sinks: Tensor | None,
    chosen: Tensor | None,
) -> Tensor:
    """Returns the attention of queries [heads, T, head_dim], of keys and values that are dequantized block by block.

    Args:    first: the first position that the first of them sees.   chosen: as of `Operations.attend`.
    Returns: float32 [heads, T, value_dim].
    """
    num_heads, num_tokens = q.shape[:2]
    start, stop = cache.num_tokens, cache.num_tokens + num_tokens
    softmax = caches.RunningSoftmax(num_heads, num_tokens, spec.value_dim, q.device, sinks)
    queries = torch.arange(start, stop, device=q.device)[:, None]
    for begin, end in cache.blocks(first, stop, MAX_DECODED_BYTES):
        keys, values = cache.between(begin, end)
        numbers = torch.arange(begin, end, device=q.device)
        step = max(1, MAX_DECODED_BYTES // (4 * num_heads * (end - begin)))
        for row in range(max(begin - start, 0), num_tokens, step):  # those before see none of the block
            rows = slice(row, row + step)
            seen = numbers <= queries[rows]
            if window is not None:
                far = queries[rows] - (queries[rows] % window if spec.chunked else window - 1)
                seen = seen & (numbers >= far)
            if chosen is not None:
                assert spec.indexer is not None, "an indexer chose blocks"
                blocks = chosen[:, rows].index_select(2, numbers // spec.indexer.block_tokens)
                seen = (blocks & seen).repeat_interleave(num_heads // len(chosen), dim=0)
            if not seen.any():
                continue
            piece = (q[:, rows] * spec.scale).reshape(len(keys), -1, q.shape[2])
            scores = (piece @ keys.transpose(1, 2)).view(num_heads, -1, end - begin).masked_fill_(~seen, -torch.inf)
            softmax.add(scores, values, rows=rows)
    return softmax.result()


def attend_entry_blocks(
    q: Tensor,
    cache: caches.LayerCache,
    compressed: caches.EntryCache,
    spec: attention.CompressedSpec,
    start: int,
    num_entries: int,
    seen: Tensor | None,
    sinks: Tensor,
) -> Tensor:
    """Returns the attention of queries [heads, T, head_dim] over a window and entries, dequantized block by block.

    A token alone reads the entries that it sees and no others.
    Args:    start: position of the first query.   seen: bool [T, num_entries], the entries that each query sees; None:
             all.   sinks: float32 [heads], logits without a value.
    Returns: float32 [heads, T, head_dim].
    """
    num_heads, num_tokens = q.shape[:2]
    first, stop = max(0, start + 1 - spec.sliding_window), start + num_tokens
    softmax = caches.RunningSoftmax(num_heads, num_tokens, spec.head_dim, q.device, sinks)

    def add(keys: Tensor, mask: Tensor | None) -> None:
        step = max(1, MAX_DECODED_BYTES // (4 * num_heads * max(len(keys), 1)))
        for begin in range(0, num_tokens, step):
            rows = slice(begin, begin + step)
            scores = q[:, rows] @ keys.T * spec.scale
            if mask is not None:
                scores.masked_fill_(~mask[rows], -torch.inf)
            softmax.add(scores, keys[None], rows=rows)

    add(cache.between(first, stop)[0][0], seen_positions(spec.sliding_window, first, start, num_tokens, q.device))
    if seen is not None and num_tokens == 1:
        chosen = seen[0].nonzero()[:, 0]
        for begin, end in compressed.blocks(len(chosen), MAX_DECODED_BYTES):
            add(compressed.keys(chosen[begin:end]), None)
    else:
        for begin, end in compressed.blocks(num_entries, MAX_DECODED_BYTES):
            add(compressed.keys(slice(begin, end)), None if seen is None else seen[:, begin:end])
    return softmax.result()


def _attend_blocks(
    q: Tensor, keys: Tensor, values: Tensor, start: int, chosen: Tensor, spec: attention.GroupedQuerySpec
) -> Tensor:
    """Returns the attention of queries [heads, T, head_dim] from position `start` on over blocks of keys from 0 on.

    A token alone reads the keys and values of its blocks and no others.
    Args:    chosen: bool [m, T, blocks], for each of m shares of the heads.
    Returns: float32 [heads, T, value_dim].
    """
    assert spec.indexer is not None, "an indexer chose blocks"
    stop, mixed = start + q.shape[1], []
    before = seen_positions(None, 0, start, q.shape[1], q.device)
    shares = (each.chunk(len(chosen)) for each in (q, keys[:, :stop], values[:, :stop]))
    for blocks, queries, own_keys, own_values in zip(chosen, *shares, strict=True):
        seen = blocks.repeat_interleave(spec.indexer.block_tokens, dim=1)[:, :stop]
        if before is not None:
            mixed.append(_attend_seen(queries, own_keys, own_values, seen & before, False, spec.scale))
            continue
        places = seen[0].nonzero()[:, 0]
        mixed.append(_attend_seen(queries, own_keys[:, places], own_values[:, places], None, False, spec.scale))
    return torch.cat(mixed)


def fused_attention(
    q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, is_causal: bool, scale: float
) -> Tensor:
    """Returns `softmax(scale * q @ keys^T) @ values` of each head, in the form for which a GPU stores no scores.

    The memory-efficient attention of torch takes float32, but only of batches with as many heads of keys as of queries,
    and with head dimensions that are multiples of 4. So each head of keys becomes a batch, whose heads are those of its
    queries and read the same keys, without a copy. For any other form torch stores all scores.

    Args:    q: float32 [heads, T, n].   keys: float32 [kv_heads, S, n].   values: float32 [kv_heads, S, v].
             mask: bool [T, S], which positions each query sees; None: all, or those up to its own if `is_causal`.
    Returns: float32 [heads, T, v].
    Source:  PyTorch 2.13, aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, can_use_mem_efficient_attention.
    """
    num_kv_heads, v = len(keys), values.shape[-1]
    q, keys, values = (_padded(each, _FUSED_DIMS) for each in (q, keys, values))
    q = q.reshape(num_kv_heads, len(q) // num_kv_heads, *q.shape[1:])  # a view
    keys, values = (each[:, None].expand(-1, q.shape[1], -1, -1) for each in (keys, values))
    mixed = torch.nn.functional.scaled_dot_product_attention(
        q, keys, values, attn_mask=mask, is_causal=is_causal, scale=scale
    )
    return mixed.flatten(0, 1)[..., :v]


def _padded(x: Tensor, multiple: int) -> Tensor:
    """Returns x with zeros after its last dimension, up to a multiple of so many values."""
    missing = -x.shape[-1] % multiple
    return torch.nn.functional.pad(x, (0, missing)) if missing else x


def _with_sinks(q: Tensor, keys: Tensor, values: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns queries, keys and values [heads, positions, head_dim] with one more position, the sink, which all see.

    Its score is the head's number in `sinks`: queries get one more dimension with that number, in which the sink's key
    is 1 and all other keys are 0. The sink's value is 0.
    """
    pad = torch.nn.functional.pad
    q = torch.cat((q, sinks[:, None, None].expand(*q.shape[:2], 1)), dim=-1)
    keys = pad(keys, (0, 1, 0, 1))  # [heads, S + 1, head_dim + 1]
    keys[:, -1, -1] = 1
    return q, keys, pad(values, (0, 0, 0, 1))


@dataclass(frozen=True, slots=True, eq=False)
class NativeProduct:
    """The product with rows u8 [rows, row bytes] in one piece, whose layout is from `row_numbers`, by a kernel."""

    kernels: cpu.Kernels
    layout: NDArray[np.int32]
    rows: NDArray[np.uint8]

    def __call__(self, x: Tensor) -> Tensor:
        """Returns `x @ matrix.T`, float32 [T, rows], for x float32 [T, columns]."""
        return self.kernels.product(x, self.layout, self.rows)


class NativeOperations(Operations):
    """The operations by native kernels; all tensors are on the CPU. The caller closes the kernels."""

    def __init__(self, kernels: cpu.Kernels) -> None:
        self.kernels = kernels

    def tokens_alone(self) -> AbstractContextManager[None]:
        """Returns a context in which a token is computed as if it were alone, to the bit."""
        return self.kernels.tokens_alone()

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Returns `x / rms(x) * weight` over the last dimension of x float32 [..., n]."""
        return self.kernels.rms_norm(x, weight, eps)

    def _choose(self, logits: Tensor, spec: formats.RouterSpec, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        if spec.num_identity or spec.zero_outside:  # the kernel lacks them
            return router.choose(logits, spec, bias)
        return self.kernels.route(logits, spec, bias, router.least_sum(spec))

    def attend(
        self,
        projected: tuple[Tensor, Tensor, Tensor],
        norms: HeadNorms | None,
        angles: caches.Angles,
        interleaved: bool,
        cache: caches.LayerCache,
        spec: attention.GroupedQuerySpec,
        window: int | None,
        sinks: Tensor | None,
        chosen: Tensor | None = None,
    ) -> Tensor:
        """Returns the attention of each query head, float32 [T, num_heads * value_dim].

        The kernel norms heads before it rotates them, has values as large as keys, and has sliding windows: for one
        token, a chunk is one. It attends to all positions of a window, not to blocks. What it lacks is computed in
        torch.
        """
        if spec.value_dim != spec.head_dim or chosen is not None:
            return super().attend(projected, norms, angles, interleaved, cache, spec, window, sinks, chosen)
        if spec.chunked and window is not None and len(projected[0]) == 1:
            window = cache.num_tokens % window + 1
        elif (spec.chunked and window is not None) or (norms is not None and norms.is_last):
            return super().attend(projected, norms, angles, interleaved, cache, spec, window, sinks)
        head_norms, eps = (None, 0.0) if norms is None else ((norms.q, norms.k), norms.eps)
        cached, (key_rows, _) = (cache.keys, cache.values), cache.rows
        return self.kernels.attend(
            projected,
            head_norms,
            eps,
            angles,
            interleaved,
            cached,
            key_rows.dtype,
            cache.num_tokens,
            spec,
            window,
            sinks,
        )

    def activate(self, gate: Tensor | None, up: Tensor, function: formats.NeuronFunction) -> Tensor:
        """Returns h of neurons from `gate_i . x` (None without a gate) and `up_i . x`, all in one shape."""
        return self.kernels.activate(gate, up, function)

    def convolve(self, x: Tensor, kernel: Tensor, bias: Tensor | None, state: mixers.LayerState) -> Tensor:
        """Returns a causal convolution of each channel, float32 [T, channels]."""
        return self.kernels.convolve(x, kernel, bias, state.conv)

    def recur(
        self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, rate: Tensor | None, state: mixers.LayerState
    ) -> Tensor:
        """Returns what tokens read from a recurrent state, float32 [T, heads, values], one token after the other."""
        return self.kernels.recur(q, k, v, log_decay, rate, state.recurrent)

    def stored_product(self, weight: Tensor) -> Product:
        """Returns the product with a matrix of 16- or 32-bit values, without a copy in float32."""
        rows = weight.contiguous().view(torch.uint8).numpy()
        return NativeProduct(self.kernels, cpu.stored_numbers(weight.dtype, weight.shape[1]), rows)

    def row_product(self, layout: formats.RowLayout, rows: Tensor) -> Product:
        """Returns the product with rows of codes, which the kernel decodes as it multiplies."""
        return NativeProduct(self.kernels, cpu.row_numbers(layout, layout.parts[0].name), rows.numpy())

    def decode(self, layout: formats.RowLayout, part: Part, rows: Tensor) -> Tensor:
        """Returns a part of rows in float32 [rows, columns]."""
        return self.kernels.decode(cpu.row_numbers(layout, part.name), rows.numpy())

    def rotate(self, x: Tensor, rotation: Rotation) -> Tensor:
        """Returns `R (a * x)`, float32 [T, d]."""
        return self._rotated(x, rotation.input, is_scaled_first=True)

    def rotate_back(self, y: Tensor, rotation: Rotation) -> Tensor:
        """Returns `b * R y`, float32 [T, d]."""
        return self._rotated(y, rotation.output, is_scaled_first=False)

    def _rotated(self, x: Tensor, scale: Tensor, *, is_scaled_first: bool) -> Tensor:
        matrix = hartley_array(x.shape[-1])
        if matrix is None:
            return transform(x * scale) if is_scaled_first else transform(x) * scale
        return self.kernels.rotate(x, scale, is_scaled_first, matrix)

    def fastest_stored(self, weight: Tensor) -> Tensor:
        """Returns the weight itself: the kernel multiplies 16 bits in half the time of 32."""
        return weight


@lru_cache(maxsize=8)
def hartley_array(hidden_size: int) -> NDArray[np.float32] | None:
    """Returns the Hartley matrix of a hidden size's odd factor, float32 [m, m]; None if kernels do not rotate it.

    Those sizes are 64 times a prime above `MAX_ODD_FACTOR`, which no published model has.
    """
    m = odd_factor(hidden_size)
    return None if m > cpu.MAX_ODD_FACTOR else np.array(hartley(m), np.float32)


@contextmanager
def operations_for(device: torch.device, threads: int | None = None) -> Iterator[Operations]:
    """Yields the operations for a device and closes them: on the CPU native ones if they were built, else torch."""
    kernels = cpu.open_kernels(threads) if device.type == "cpu" else None
    if kernels is None:
        yield TORCH
        return
    try:
        yield NativeOperations(kernels)
    finally:
        kernels.close()
