"""Attention and norms by the native kernels against plain torch: heads, windows, norms, rotation."""

from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from support.cases import case as named_case
from support.combinations import Combination, sample
from support.native import INSTRUCTION_SETS, operations_limited_to
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moe_pack.formats.parts import GroupedQuerySpec
from moe_pack.runtime.model import TORCH, NativeOperations, Operations
from moe_pack.runtime.model.caches import LayerCache
from moe_pack.runtime.model.compute.operations import HeadNorms
from moe_pack.runtime.model.compute.softmax import MAX_SCORE_BYTES, View, fused_attention

# Float32 sums of up to 256 values, and softmax over up to 900, in another order.
TOLERANCE = 3e-6
CHOICES: dict[str, tuple[object, ...]] = {
    "num_kv_heads": (1, 2, 3, 8),
    "group": (1, 2, 3, 5, 8, 16),
    "head_dim": (6, 64, 80, 96, 128, 256),
    "num_tokens": (1, 2, 3, 5, 17, 64, 65, 130),
    "start": (0, 1, 63, 255, 256, 257, 770),
    "window": (None, 1, 2, 64, 100, 500),
    "normed": (False, True),
    "rotated": (0.0, 0.5, 1.0),
    "interleaved": (False, True),
    "room": (0, 1, 40),
}


def can_be(c: Combination) -> bool:
    return c["num_kv_heads"] * c["group"] * c["head_dim"] * c["num_tokens"] <= 1 << 20  # type: ignore[operator]


SAMPLE = sample(CHOICES, can_be, 90)


@dataclass(frozen=True)
class Case:
    """New tokens of a layer, and the cache they enter."""

    spec: GroupedQuerySpec
    projected: tuple[Tensor, Tensor, Tensor]
    norms: HeadNorms | None
    angles: tuple[Tensor, Tensor]
    interleaved: bool
    keys: Tensor
    values: Tensor
    start: int
    sinks: Tensor | None = None

    def found(self, operations: Operations) -> tuple[Tensor, LayerCache]:
        """The attention, and the cache afterwards."""
        cache = LayerCache(self.keys.clone(), self.values.clone(), self.start)
        view = View(cache, self.spec, self.spec.sliding_window, self.sinks)
        y = operations.attend(self.projected, self.norms, self.angles, self.interleaved, view)
        return y, cache


def made(
    num_kv_heads: int,
    group: int,
    head_dim: int,
    num_tokens: int,
    start: int,
    window: int | None = None,
    normed: bool = False,
    rotated: float = 1.0,
    interleaved: bool = False,
    room: int = 0,
    seed: int = 0,
) -> Case:
    draw = torch.Generator().manual_seed(seed)
    num_heads, scale = group * num_kv_heads, 1.5 * head_dim**-0.5
    spec = GroupedQuerySpec("grouped_query", num_heads, num_kv_heads, head_dim, window, scale, (), "none")

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw)

    widths = (num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim)
    q, k, v = (random(num_tokens, width) for width in widths)
    norms = HeadNorms(1 + random(head_dim) / 4, 1 + random(head_dim) / 4, 1e-5) if normed else None
    turns = 9 * random(num_tokens, int(rotated * head_dim / 2))
    shape = (num_kv_heads, start + num_tokens + room, head_dim)
    return Case(spec, (q, k, v), norms, (turns.cos(), turns.sin()), interleaved, random(*shape), random(*shape), start)


@cache
def case(number: int) -> tuple[Case, Tensor, LayerCache]:
    held = made(**SAMPLE[number], seed=number)  # type: ignore[arg-type]
    return held, *held.found(TORCH)


def name_of(number: int) -> str:
    return "-".join(str(value) for value in SAMPLE[number].values())


def assert_near(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= TOLERANCE * expected.abs().max()


@pytest.fixture(scope="module", params=INSTRUCTION_SETS)
def native(request: pytest.FixtureRequest) -> NativeOperations:
    return operations_limited_to(request.param)


def test_attention_is_torchs(native: NativeOperations) -> None:
    for number in range(len(SAMPLE)):
        with named_case(number):
            held, expected, expected_cache = case(number)
            y, cache = held.found(native)
            assert_near(y, expected)
            assert_near(cache.keys, expected_cache.keys)
            assert torch.equal(cache.values, expected_cache.values)
            start, stop = held.start, held.start + len(y)
            for found, before in ((cache.keys, held.keys), (cache.values, held.values)):
                assert torch.equal(found[:, :start], before[:, :start]) and torch.equal(
                    found[:, stop:], before[:, stop:]
                )


def test_what_lies_outside_the_window_or_later_is_not_seen(native: NativeOperations) -> None:
    for num_tokens in [1, 3, 130]:
        with named_case(num_tokens):
            held = made(2, 3, 64, num_tokens, 300, window=7, room=20)
            y, _ = held.found(native)
            held.keys[:, :294], held.values[:, :294] = 1e30, 1e30
            held.keys[:, 300 + num_tokens :], held.values[:, 300 + num_tokens :] = torch.nan, torch.nan
            assert torch.equal(held.found(native)[0], y)


def scored(scores: Tensor) -> Case:
    """One query of 256 values that has these scores with as many keys; values pick out each one's probability."""
    spec = GroupedQuerySpec("grouped_query", 1, 1, 256, None, 1.0, (), "none")
    angles = (torch.empty(1, 0), torch.empty(1, 0))
    q, keys, values = torch.zeros(1, 256), torch.zeros(1, len(scores), 256), torch.zeros(1, len(scores), 256)
    q[0, 0], keys[0, :, 0] = 1.0, scores
    values[0, torch.arange(len(scores)), torch.arange(len(scores))] = 1.0
    return Case(
        spec, (q, keys[:, -1].clone(), values[:, -1].clone()), None, angles, False, keys, values, len(scores) - 1
    )


def test_exponentials_are_as_precise_as_float32(native: NativeOperations) -> None:
    for highest in [0.0, -300.0, 2e4]:
        with named_case(highest):
            scores = highest + torch.cat([torch.linspace(-80, 0, 120), torch.linspace(-1, 0, 131), torch.tensor([0.0])])
            y, _ = scored(scores).found(native)
            expected = scores.double().softmax(dim=0)
            # A unit in the last place of an exponential, and the roundings of a sum of 252.
            assert ((y[0, : len(scores)] - expected) / expected).abs().max() < 1e-6


def test_scores_far_below_the_highest_count_for_nothing(native: NativeOperations) -> None:
    y, _ = scored(torch.tensor([-torch.inf, -3e38, -1e4, -104.0, 0.0])).found(native)
    assert torch.equal(y[0, :5], torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0]))


def test_what_sees_a_score_that_is_no_number_is_none(native: NativeOperations) -> None:
    for wrong, num_tokens in product([torch.nan, torch.inf], [1, 2, 130]):
        with named_case(wrong, num_tokens):
            held = made(2, 2, 64, num_tokens, 300)
            held.keys[1, 20] = wrong
            expected, (y, _) = held.found(TORCH)[0], held.found(native)
            assert torch.equal(y.isnan(), expected.isnan()) and y.isnan().any() and not y.isnan().all()


def test_no_tokens_have_no_attention(native: NativeOperations) -> None:
    held = made(2, 2, 64, 0, 5)
    y, cache = held.found(native)
    assert y.shape == (0, 256) and torch.equal(cache.keys, held.keys)


def test_norms_are_torchs(native: NativeOperations) -> None:
    for eps, (num_rows, n) in product([0.0, 1e-6, 1.0], [(0, 8), (1, 1), (1, 2048), (3, 70), (33, 2880), (600, 64)]):
        with named_case(eps, num_rows, n):
            draw = torch.Generator().manual_seed(n)
            x, weight = torch.randn(num_rows, n, generator=draw), torch.randn(n, generator=draw)
            torch.testing.assert_close(
                native.rms_norm(x, weight, eps), TORCH.rms_norm(x, weight, eps), rtol=2e-6, atol=0
            )


def test_norms_are_of_the_last_dimension_wherever_rows_lie(native: NativeOperations) -> None:
    x, weight = torch.randn(4, 100, generator=torch.Generator().manual_seed(0)), torch.linspace(1, 2, 30)
    part = x[:, 20:50].view(2, 2, 30)
    torch.testing.assert_close(
        native.rms_norm(part, weight, 1e-6), TORCH.rms_norm(part, weight, 1e-6), rtol=2e-6, atol=0
    )


class LargestTensor(TorchDispatchMode):
    """Takes note of the largest tensor that an operation makes."""

    num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for each in tree_leaves(made):
            if isinstance(each, Tensor):
                self.num_bytes = max(self.num_bytes, each.nbytes)
        return made


@pytest.mark.slow
def test_long_contexts_never_have_all_their_scores_in_memory() -> None:
    kinds = [(0, False, 8), (1500, False, 8), (1500, True, 8), (1500, False, 5)]
    for window, (start, has_sinks, value_dim) in product([None, 700], kinds):
        with named_case(window, start, has_sinks, value_dim):
            held = replace(made(4, 4, 8, 600, start, window), sinks=torch.randn(16) if has_sinks else None)
            if value_dim != 8:
                values = held.projected[2].view(600, 4, 8)[..., :value_dim].flatten(1)
                held = replace(
                    held,
                    spec=replace(held.spec, value_head_dim=value_dim),
                    projected=(*held.projected[:2], values),
                    values=held.values[..., :value_dim],
                )
            with (
                sdpa_kernel(SDPBackend.MATH),
                LargestTensor() as largest,
            ):  # what torch runs where it has no fused attention
                y, cache = held.found(TORCH)
            assert largest.num_bytes <= MAX_SCORE_BYTES
            if start and window is None:
                assert 4 * 16 * 600 * (start + 600) > MAX_SCORE_BYTES, "the case needs more than one piece"
            for begin in (0, 300, 599):  # of the first piece and of the last
                few = slice(begin, begin + 1)
                alone = replace(
                    held,
                    projected=tuple(each[few] for each in held.projected),  # type: ignore[arg-type]  # three
                    angles=(held.angles[0][few], held.angles[1][few]),
                    keys=cache.keys,
                    values=cache.values,
                    start=start + begin,
                )
                assert_near(y[few], alone.found(TORCH)[0])


def test_the_form_for_a_gpu_has_the_same_attention() -> None:
    draw = torch.Generator().manual_seed(0)
    for num_kv_heads, group, num_tokens, num_keys, n, v in (
        (1, 1, 1, 1, 4, 4),
        (2, 3, 5, 9, 6, 6),
        (4, 8, 17, 130, 64, 64),
        (2, 4, 33, 33, 65, 64),  # with sinks
        (8, 1, 7, 20, 192, 128),  # latents, expanded
        (1, 16, 3, 3, 80, 80),
    ):
        q = torch.randn(num_kv_heads * group, num_tokens, n, generator=draw)
        keys, values = (torch.randn(num_kv_heads, num_keys, width, generator=draw) for width in (n, v))
        mask = torch.rand(num_tokens, num_keys, generator=draw) > 0.5
        mask[:, 0] = True
        for seen, is_causal in ((None, False), (mask, False), (None, True)):
            with named_case(num_kv_heads, group, num_tokens, num_keys, n, v, seen is not None, is_causal):
                expected = torch.nn.functional.scaled_dot_product_attention(
                    q[None], keys[None], values[None], seen, is_causal=is_causal, scale=0.3, enable_gqa=True
                )
                assert_near(fused_attention(q, keys, values, seen, is_causal, 0.3), expected[0])
                rounded = fused_attention(q, keys, values, seen, is_causal, 0.3, in_half=True)
                assert not torch.equal(rounded, expected[0])
                torch.testing.assert_close(rounded, expected[0], atol=1e-2, rtol=1e-2)


def test_on_other_devices_attention_has_the_form_that_is_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def record(q: Tensor, keys: Tensor, values: Tensor, attn_mask: Tensor | None, **options: Any) -> Tensor:
        asked.append((q, keys, values, attn_mask))
        return q.new_empty((*q.shape[:-1], values.shape[-1]))

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", record)
    for head_dim, start, window, has_sinks in (
        (64, 0, None, False),
        (6, 0, None, False),
        (64, 30000, None, False),
        (64, 1500, 700, True),
        (64, 0, None, True),
    ):
        with named_case(head_dim, start, window, has_sinks):
            asked.clear()
            made_here = made(4, 4, head_dim, 600, start, window)
            held = replace(
                made_here,
                projected=tuple(each.to("meta") for each in made_here.projected),  # type: ignore[arg-type]  # three
                angles=(made_here.angles[0].to("meta"), made_here.angles[1].to("meta")),
                keys=made_here.keys.to("meta"),
                values=made_here.values.to("meta"),
                sinks=torch.randn(16, device="meta") if has_sinks else None,
            )
            y, _ = held.found(TORCH)
            assert y.shape == (600, 16 * head_dim)
            assert sum(q.shape[2] for q, *_ in asked) == 600
            assert (len(asked) > 1) == (4 * 600 * (start + 600) > MAX_SCORE_BYTES)
            for q, keys, values, mask in asked:
                assert q.shape[:2] == keys.shape[:2] == values.shape[:2] == (4, 4), (
                    "as many heads of keys as of queries"
                )
                assert q.shape[3] % 4 == values.shape[3] % 4 == 0 and q.shape[3] == keys.shape[3]
                assert keys.stride(1) == values.stride(1) == 0, "the heads of a group read the same keys"
                assert mask is None or 4 * mask.numel() <= MAX_SCORE_BYTES
