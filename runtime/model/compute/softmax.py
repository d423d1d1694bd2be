"""Softmax attention of queries, keys and values in torch: grouped heads, windows, sinks, and keys block by block."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_pack.formats.parts import GroupedQuerySpec
from moe_pack.runtime.model.caches import layer_cache

MAX_DECODED_BYTES = 16 << 20  # the most that an operation dequantizes at once
# The most scores that attention computes at once on the CPU, and the largest mask on a GPU, whose kernel stores none.
# Where torch has no fused attention it stores all scores, in several copies: 512 queries of 32 heads would take 512 MiB
# at 8,192 tokens.
MAX_SCORE_BYTES = 64 << 20
_FUSED_DIMS = 4  # a GPU's fused attention takes head dimensions of float32 that are multiples of it
_HALF_DIMS = 8  # and of float16
_ALL = slice(None)


@dataclass(frozen=True, slots=True)
class View:
    """The cache of a layer as its new tokens see it."""

    cache: layer_cache.LayerCache
    spec: GroupedQuerySpec
    window: int | None  # the most positions that a token sees; None: all before it
    sinks: Tensor | None  # float32 [num_heads], logits without a value
    # bool [m, T, blocks], the blocks of positions that each token attends to with each of m shares of the heads;
    # None: all.
    chosen: Tensor | None = None


def attend_new(q: Tensor, k: Tensor, v: Tensor, view: View, in_half: bool = False) -> Tensor:
    """Returns the attention of new tokens' rotated q, k, v [heads, T, n], float32 [T, heads * n]; caches k and v.

    Args:    in_half: as of `fused_attention`, where that is used.
    """
    cache, spec, window, chosen = view.cache, view.spec, view.window, view.chosen
    start, num_tokens, chunked = cache.num_tokens, q.shape[1], spec.chunked
    first = _first_seen(window, start, chunked)
    cache.append(k, v)
    if cache.reads_blocks:
        return _attend_cache_blocks(q, first, view).transpose(0, 1).flatten(1)
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
        own = keys[:, seen], values[:, seen]
        mixed.append(_attend_piece(piece, *own, at, piece_first, spec.scale, window, view.sinks, chunked, in_half))
    return joined(mixed, dim=1).transpose(0, 1).flatten(1)


def joined(pieces: list[Tensor], dim: int = 0) -> Tensor:
    """Joins pieces into one tensor; a single one is not copied."""
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=dim)


def seen_positions(
    window: int | None, first: int, start: int, num_tokens: int, device: torch.device, chunked: bool = False
) -> Tensor | None:
    """Returns which positions from `first` on tokens from `start` on see, bool [T, S]; None if one token sees all."""
    if num_tokens == 1 and (window is None or window > start - first):
        return None
    query = torch.arange(start, start + num_tokens, device=device)[:, None]
    key = torch.arange(first, start + num_tokens, device=device)[None, :]
    seen = key <= query
    if window is None:
        return seen
    return seen & (key >= query - query % window if chunked else key > query - window)


def _first_seen(window: int | None, start: int, chunked: bool) -> int:
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
    in_half: bool,
) -> Tensor:
    """Returns the attention of queries from position `start` on over keys from `first` on, [heads, T, value_dim]."""
    stop = start + q.shape[1]
    is_causal = start == 0 and (window is None or window >= stop)  # a whole sequence; torch needs no mask
    is_fused = q.device.type != "cpu" or in_half or (sinks is None and values.shape[-1] == q.shape[-1])
    is_all = is_causal and sinks is None and is_fused
    seen = None if is_all else seen_positions(window, first, start, q.shape[1], q.device, chunked)
    if not is_fused:
        return _softmax_attention(q, keys, values, seen, scale, sinks)
    if sinks is not None:
        return attend_with_sinks(q, keys, values, seen, scale, sinks, in_half)
    return _attend_seen(q, keys, values, seen, is_causal, scale, in_half)


def attend_with_sinks(
    q: Tensor, keys: Tensor, values: Tensor, seen: Tensor | None, scale: float, sinks: Tensor, in_half: bool = False
) -> Tensor:
    """Returns `softmax(scale * q @ keys^T) @ values` of each head, with one more logit in its softmax, without a value.

    Args:    q: float32 [heads, T, n].   keys: float32 [kv_heads, S, n].   values: float32 [kv_heads, S, v].   seen:
             bool [T, S]; None: all.   sinks: float32 [heads], these logits.
    Returns: float32 [heads, T, v].
    """
    if q.device.type == "cpu" and not in_half:
        return _softmax_attention(q, keys, values, seen, scale, sinks)
    least = torch.finfo(torch.float32).min  # minus infinity times 0 is NaN
    q, keys, values = _with_sinks(q, keys, values, (sinks / scale).clamp(min=least))
    seen = None if seen is None else torch.nn.functional.pad(seen, (0, 1), value=True)
    return fused_attention(q, keys, values, seen, False, scale, in_half)


def _attend_seen(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    seen: Tensor | None,
    is_causal: bool,
    scale: float,
    in_half: bool = False,
) -> Tensor:
    if q.device.type != "cpu" or in_half:
        return fused_attention(q, keys, values, seen, is_causal, scale, in_half)
    if values.shape[-1] != q.shape[-1]:
        return _softmax_attention(q, keys, values, seen, scale, None)
    mixed: Tensor = torch.nn.functional.scaled_dot_product_attention(
        q[None], keys[None], values[None], attn_mask=seen, is_causal=is_causal, scale=scale, enable_gqa=True
    )
    return mixed[0]


def _softmax_attention(
    q: Tensor, keys: Tensor, values: Tensor, seen: Tensor | None, scale: float, sinks: Tensor | None
) -> Tensor:
    """Computes `attend_with_sinks` on the CPU, with one array of all scores and no copy of keys.

    On the CPU, torch fuses neither sinks nor values of another size than keys. It copies the keys for each query head
    instead: one token took 12 s and 4 GB after 32,000 positions of 64 heads, and takes 0.1 s here.
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


def _attend_cache_blocks(q: Tensor, first: int, view: View) -> Tensor:
    """Returns the attention of queries [heads, T, head_dim] to keys from `first` on, dequantized block by block."""
    cache, spec, window, chosen = view.cache, view.spec, view.window, view.chosen
    num_heads, num_tokens = q.shape[:2]
    start, stop = cache.num_tokens, cache.num_tokens + num_tokens
    softmax = RunningSoftmax(num_heads, num_tokens, spec.value_dim, q.device, view.sinks)
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


def _attend_blocks(
    q: Tensor, keys: Tensor, values: Tensor, start: int, chosen: Tensor, spec: GroupedQuerySpec
) -> Tensor:
    """Returns the attention of queries from position `start` on to chosen blocks; a token alone reads no others."""
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
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float,
    in_half: bool = False,
) -> Tensor:
    """Returns `softmax(scale * q @ keys^T) @ values` of each head, in the form for which a GPU stores no scores.

    The memory-efficient attention of torch takes float32, but only of batches with as many heads of keys as of queries,
    and with head dimensions that are multiples of 4. So each head of keys becomes a batch, whose heads are those of its
    queries and read the same keys, without a copy. For any other form torch stores all scores.

    Args:    q: float32 [heads, T, n].   keys: float32 [kv_heads, S, n].   values: float32 [kv_heads, S, v].   mask:
             bool [T, S], the positions that each query sees; None: all, or those up to its own if `is_causal`.
             in_half: whether queries, keys and values are rounded to float16; their sums stay float32.
    Returns: float32 [heads, T, v].
    Source:  PyTorch 2.13, aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, can_use_mem_efficient_attention.
    """
    num_kv_heads, v = len(keys), values.shape[-1]
    if in_half:
        q, keys, values, scale = (q * scale).half(), keys.half(), values.half(), 1.0
    q, keys, values = (_padded(each, _HALF_DIMS if in_half else _FUSED_DIMS) for each in (q, keys, values))
    q = q.reshape(num_kv_heads, len(q) // num_kv_heads, *q.shape[1:])  # a view
    keys, values = (each[:, None].expand(-1, q.shape[1], -1, -1) for each in (keys, values))
    mixed = torch.nn.functional.scaled_dot_product_attention(
        q, keys, values, attn_mask=mask, is_causal=is_causal, scale=scale
    )
    return mixed.flatten(0, 1)[..., :v].float()


def _padded(x: Tensor, multiple: int) -> Tensor:
    missing = -x.shape[-1] % multiple
    return torch.nn.functional.pad(x, (0, missing)) if missing else x


def _with_sinks(q: Tensor, keys: Tensor, values: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Adds the sink as one more position, which all queries see, to queries, keys and values [heads, positions, n].

    Queries get one more dimension with the head's number in `sinks`; there the sink's key is 1 and other keys are 0.
    """
    pad = torch.nn.functional.pad
    q = torch.cat((q, sinks[:, None, None].expand(*q.shape[:2], 1)), dim=-1)
    keys = pad(keys, (0, 1, 0, 1))  # [heads, S + 1, head_dim + 1]
    keys[:, -1, -1] = 1
    return q, keys, pad(values, (0, 0, 0, 1))


def query_blocks(num_tokens: int, scores_each: int) -> Iterator[tuple[int, int]]:
    """Yields (first, last) of queries whose scores and biases stay within `MAX_DECODED_BYTES` together."""
    step = max(1, MAX_DECODED_BYTES // (8 * scores_each))
    for first in range(0, num_tokens, step):
        yield first, min(first + step, num_tokens)


class RunningSoftmax:
    """The softmax of scores that come block by block, and the values' weighted sums (2112.05682, section 3)."""

    def __init__(self, num_heads: int, num_tokens: int, width: int, device: torch.device, sinks: Tensor | None) -> None:
        self._largest = torch.full((num_heads, num_tokens), -torch.inf, device=device)
        self._sums = torch.zeros((num_heads, num_tokens), device=device)
        self.mixed = torch.zeros((num_heads, num_tokens, width), device=device)
        if sinks is not None:
            self._largest[:] = sinks[:, None]
            self._sums[:] = 1.0

    def add(self, scores: Tensor, values: Tensor, heads: slice = _ALL, rows: slice = _ALL) -> None:
        """Adds positions for some heads and rows.

        Args:    scores: float32 [heads, T, n], minus infinity for positions that are not seen; overwritten.   values:
                 float32 [kv heads, n, v], each for as many heads.
        """
        before = self._largest[heads, rows]
        largest = torch.maximum(before, scores.amax(dim=-1))
        shift = largest.masked_fill(largest == -torch.inf, 0.0)
        factors = (before - shift).exp_()
        weights = scores.sub_(shift[..., None]).exp_()
        self._largest[heads, rows] = largest
        self._sums[heads, rows] = self._sums[heads, rows] * factors + weights.sum(dim=-1)
        added = (weights.reshape(len(values), -1, weights.shape[-1]) @ values).view(*scores.shape[:2], -1)
        self.mixed[heads, rows] = self.mixed[heads, rows] * factors[..., None] + added

    def result(self) -> Tensor:
        """Returns the weighted means of values, float32 [heads, T, v]."""
        return self.mixed / self._sums[..., None]
