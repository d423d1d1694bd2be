"""Mixers against loops over tokens and heads in float64; the states in which they live on; their memory in budgets."""

from contextlib import closing
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Literal

import pytest
import torch
from support.cases import case
from support.families import Tiny, token_ids, write
from support.models import pack
from support.native import INSTRUCTION_SETS, kernels_limited_to
from support.specs import GROUPED, HYBRID
from torch.testing import assert_close

from moe_pack.formats import Pack
from moe_pack.formats.parts import GatedDeltaSpec
from moe_pack.formats.parts.specs import cache_values, state_values
from moe_pack.runtime.cpu import Kernels
from moe_pack.runtime.model import Decoder, PackWeights, open_weights, operations_for
from moe_pack.runtime.model.caches import KvDtype, LayerCache, LayerState
from moe_pack.runtime.model.compute.operations import NativeOperations, Operations
from moe_pack.runtime.model.compute.recurrence import DeltaNet, Gates, convolve, recur
from moe_pack.runtime.model.kv_cache import KVCache
from moe_pack.runtime.offload.budgets import cache_bytes

CPU = torch.device("cpu")
Tensor = torch.Tensor


class Given:
    """Random inputs of a recurrence: T tokens, key heads, heads, keys and values."""

    def __init__(self, num_tokens: int, sizes: tuple[int, int, int, int], by_key: bool, has_rate: bool) -> None:
        key_heads, heads, keys, values = sizes
        generator = torch.Generator().manual_seed(num_tokens)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        self.q, k = normal(num_tokens, key_heads, keys), normal(num_tokens, key_heads, keys)
        self.k = torch.nn.functional.normalize(k, dim=-1)
        self.v = normal(num_tokens, heads, values)
        self.log_decay = -torch.rand((num_tokens, heads, keys) if by_key else (num_tokens, heads), generator=generator)
        self.rate = torch.rand((num_tokens, heads), generator=generator) if has_rate else None
        self.before = normal(heads, keys, values)

    def state(self) -> LayerState:
        return LayerState(torch.zeros(0), self.before.clone())

    def ran(self, *sizes: int) -> tuple[Tensor, Tensor]:
        """Returns the tokens' outputs when they enter so many at a time, and the state afterwards."""
        state, start, read = self.state(), 0, []
        for size in sizes:
            at = slice(start, start + size)
            rate = None if self.rate is None else self.rate[at]
            read.append(recur(self.q[at], self.k[at], self.v[at], self.log_decay[at], rate, state))
            start += size
        return torch.cat(read), state.recurrent

    def expected(self) -> tuple[Tensor, Tensor]:
        """The same, one token and one head after the other, float64."""
        state, read = self.before.double(), torch.zeros(self.v.shape, dtype=torch.float64)
        shared = self.v.shape[1] // self.k.shape[1]
        for token in range(len(self.v)):
            for head in range(self.v.shape[1]):
                q, k = (each[token, head // shared].double() for each in (self.q, self.k))
                decayed = self.log_decay[token, head].double().exp()[..., None] * state[head]
                v = self.v[token, head].double()
                if self.rate is not None:
                    v = self.rate[token, head].double() * (v - k @ decayed)
                state[head] = decayed + torch.outer(k, v)
                read[token, head] = q @ state[head]
        return read, state


SIZES = [(2, 4, 16, 24), (3, 3, 8, 8), (1, 5, 4, 1)]


def test_a_recurrence_is_that_of_its_definition_whatever_enters_at_once() -> None:
    for sizes in SIZES:
        for by_key in [False, True]:
            for has_rate in [False, True]:
                given = Given(131, sizes, by_key, has_rate)
                read, after = given.expected()
                for pieces in [(131,), (1,) * 131, (64, 67), (1, 128, 2), (130, 1)]:
                    with case(sizes, by_key, has_rate, pieces[:3]):
                        found, state = given.ran(*pieces)
                        assert (found - read).abs().max() < 2e-5
                        assert (state - after).abs().max() < 2e-5


def test_decays_that_forget_all_at_once_give_no_nan() -> None:
    given = Given(70, SIZES[0], by_key=False, has_rate=True)
    given.log_decay[::3] = -1e4
    found, state = given.ran(70)
    read, after = given.expected()
    assert (found - read).abs().max() < 2e-5 and (state - after).abs().max() < 2e-5


def test_a_convolution_sees_the_inputs_before_and_keeps_the_last() -> None:
    generator = torch.Generator().manual_seed(3)
    x, kernel, bias = (torch.randn(shape, generator=generator) for shape in ((11, 6), (6, 4), (6,)))
    padded = torch.cat((torch.zeros(3, 6), x))
    expected = torch.stack([sum(kernel[:, tap] * padded[t + tap] for tap in range(4)) for t in range(11)])
    for pieces in [(11,), (1,) * 11, (2, 9), (9, 2)]:
        with case(pieces):
            state = LayerState(torch.zeros(3, 6), torch.zeros(0))
            found = torch.cat([convolve(piece, kernel.flatten(), None, state) for piece in x.split(list(pieces))])
            assert (found - expected).abs().max() < 1e-6
            assert torch.equal(state.conv, x[-3:])
    state = LayerState(torch.zeros(3, 6), torch.zeros(0))
    assert (convolve(x, kernel.flatten(), bias, state) - expected - bias).abs().max() < 1e-6


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_native_kernels_do_what_torch_does(instruction_set: str) -> None:
    kernels = kernels_limited_to(instruction_set)
    for seed in range(40):
        with case(seed):
            generator = torch.Generator().manual_seed(seed)

            def upto(most: int, generator: torch.Generator = generator) -> int:
                return int(torch.randint(1, most, (1,), generator=generator))

            key_heads = upto(4)
            given = Given(upto(80), (key_heads, key_heads * upto(4), upto(70), upto(150)), seed % 2 == 1, seed % 3 > 0)
            read, after = given.expected()
            state = given.before.clone()
            found = kernels.recur(given.q, given.k, given.v, given.log_decay, given.rate, state)
            assert (found - read).abs().max() < 1e-4 and (state - after).abs().max() < 2e-5
            channels, taps = upto(900), upto(9)
            x, kernel, bias, conv = (
                torch.randn(shape, generator=generator)
                for shape in ((upto(20), channels), (channels * taps,), (channels,), (taps - 1, channels))
            )
            ours, theirs = conv.clone(), LayerState(conv.clone(), torch.zeros(0))
            for some in [bias, None]:
                expected = convolve(x, kernel, some, theirs)
                assert (kernels.convolve(x, kernel, some, ours) - expected).abs().max() < 1e-5
                assert torch.equal(ours, theirs.conv)


class DeltaGiven:
    """Random inputs of a Gated DeltaNet, some large: queries, keys and values together, gates, and its weights."""

    def __init__(self, num_tokens: int, sizes: tuple[int, int, int, int], taps: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator) * (10 if seed % 4 == 3 else 1)

        gate: Literal["silu", "sigmoid"] = "silu" if seed % 2 else "sigmoid"
        spec = GatedDeltaSpec("gated_delta_net", (0,), *sizes, taps, interleaved=False, gate=gate)
        heads = spec.num_value_heads
        self.inputs = random(num_tokens, spec.conv_channels), random(num_tokens, spec.value_width)
        gates = random(num_tokens, heads), random(num_tokens, heads), random(heads).clamp(max=3), random(heads)
        self.gates = Gates(*gates)
        kernel, out_norm = random(spec.conv_channels * taps), random(spec.value_head_dim)
        self.delta = DeltaNet(spec, kernel, out_norm, 1e-6)
        recurrent = torch.randn(heads, spec.key_head_dim, spec.value_head_dim, generator=generator)
        self.state = LayerState(random(taps - 1, spec.conv_channels), recurrent)

    def ran(self, operations: Operations, *pieces: int) -> tuple[Tensor, LayerState]:
        """What tokens give that enter together, as many as each piece says, and the state after them."""
        state, found, first = self.state.copied(), list[Tensor](), 0
        for piece in pieces:
            rows, first = slice(first, first + piece), first + piece
            qkv, z = (each[rows] for each in self.inputs)
            found.append(operations.gated_delta(qkv, z, self.gates.of_rows(rows), self.delta, state))
        return torch.cat(found), state


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_a_native_gated_delta_net_does_what_torch_does(instruction_set: str) -> None:
    kernels = kernels_limited_to(instruction_set)
    for seed, (num_tokens, sizes) in enumerate(product((1, 7, 40), ((1, 1, 4, 3), (2, 6, 20, 33), (16, 32, 64, 64)))):
        with case(num_tokens, sizes):
            given = DeltaGiven(num_tokens, sizes, taps=2 + seed % 3, seed=seed)
            expected, after = given.ran(Operations(), num_tokens)
            found, state = given.ran(NativeOperations(kernels), num_tokens)
            assert_close(found, expected, rtol=1e-4, atol=1e-4)
            assert_close(state.recurrent, after.recurrent, rtol=1e-4, atol=1e-4)
            assert torch.equal(state.conv, after.conv)
            one_by_one, own = given.ran(NativeOperations(kernels), *(1,) * num_tokens)
            assert torch.equal(one_by_one, found) and torch.equal(own.recurrent, state.recurrent)


def test_native_results_do_not_depend_on_threads() -> None:
    given, results = Given(5, (16, 32, 64, 64), by_key=False, has_rate=True), []
    for threads in [1, 2, 3]:
        with closing(Kernels(threads)) as kernels:
            state = given.before.clone()
            ran, after = DeltaGiven(5, (16, 32, 64, 64), taps=4, seed=0).ran(NativeOperations(kernels), 5)
            recurred = kernels.recur(given.q, given.k, given.v, given.log_decay, given.rate, state)
            results.append((recurred, state, ran, after.recurrent, after.conv))
    assert all(torch.equal(a, b) for one in results[1:] for a, b in zip(one, results[0], strict=True))


def test_a_pack_runs_by_native_kernels_as_by_torch(packed: Path) -> None:
    ids = token_ids()
    with Pack(packed) as opened, operations_for(CPU) as operations:
        expected = Decoder(PackWeights(opened, CPU), len(ids)).logits(ids)
        decoder = Decoder(open_weights(opened, CPU, operations), len(ids))
        assert (decoder.logits(ids) - expected).abs().max() < 1e-4
        decoder.reset()
        one_by_one = torch.stack([decoder.next_logits([token]) for token in ids])
        assert (one_by_one - expected).abs().max() < 1e-4


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hybrid")
    pack(write(Tiny("qwen3_next", "as it comes"), folder / "source"), folder / "packed", width=16)
    return folder / "packed"


def test_states_are_counted_in_the_cache_and_are_float32_whatever_the_keys_are() -> None:
    for spec in [HYBRID, replace(HYBRID, mixer=replace(HYBRID.mixer, layers=(1,)))]:
        dtypes: list[tuple[KvDtype, int]] = [("f32", 4), ("bf16", 2)]
        for dtype, size in dtypes:
            cache = KVCache(spec, 100, CPU, dtype=dtype, chunk_tokens=10)
            assert cache.num_bytes == size * cache_values(spec, 100, 10) + 2 * 4 * state_values(spec)
            states = [cache.of(layer) for layer in spec.mixer.layers]
            assert {each.dtype for state in states for each in (state.conv, state.recurrent)} == {torch.float32}
        assert cache_bytes(spec, 100, 10) == KVCache(spec, 100, CPU, chunk_tokens=10).num_bytes
    cache = KVCache(HYBRID, 100, CPU)
    assert isinstance(cache.of(1), LayerCache) and not cache.is_ring
    assert not KVCache(GROUPED, 100, CPU).states


def test_a_cache_with_states_begins_again_but_is_not_cut_back() -> None:
    cache = KVCache(HYBRID, 100, CPU)
    cache.num_tokens = 7
    cache.of(0).recurrent.fill_(1.0)
    with pytest.raises(AssertionError, match="cannot be cut back"):
        cache.num_tokens = 6
    cache.num_tokens = 0
    assert not cache.of(0).recurrent.any()
    plain = KVCache(GROUPED, 100, CPU)
    plain.num_tokens, plain.num_tokens = 7, 6


@pytest.mark.slow
def test_a_text_may_come_in_any_pieces(packed: Path) -> None:
    ids = token_ids()
    with Pack(packed) as opened:
        weights = PackWeights(opened, CPU)
        whole = Decoder(weights, len(ids)).logits(ids)
        for chunk in [1, 7, 64]:
            with case(chunk):
                decoder = Decoder(weights, len(ids), chunk_tokens=chunk)
                assert (decoder.logits(ids) - whole).abs().max() < 1e-4
                decoder.reset()
                pieces = [decoder.logits(ids[start : start + 10]) for start in range(0, len(ids), 10)]
                assert (torch.cat(pieces) - whole).abs().max() < 1e-4


def test_a_text_that_begins_as_one_before_goes_on_from_there(packed: Path) -> None:
    ids = token_ids()
    with Pack(packed) as opened:
        weights = PackWeights(opened, CPU)
        decoder, whole = Decoder(weights, 128), Decoder(weights, 128)
        cases: list[tuple[list[int], int]] = [
            (ids[:40], 40),  # nothing was read before
            (ids[:60], 20),  # goes on where the sequence is
            ([*ids[:70], 1], 11),
            ([*ids[:70], 1, 5, 6], 2),
            ([*ids[:70], 1, 5, 9], 73),  # nothing leads back to the middle of a prompt
            ([*ids[:70], 1, 5, 9], 73),  # nor to the place before its last token, which must be read for its logits
            ([ids[0], *ids[2:50]], 49),
        ]
        for prompt, num_left in cases:
            with case(len(prompt), num_left):
                left = decoder.keep_beginning(prompt)
                whole.reset()
                assert len(left) == num_left and prompt[len(prompt) - num_left :] == left
                assert (decoder.begin(left) - whole.begin(prompt)).abs().max() < 1e-4
                assert decoder.cache.num_tokens == len(prompt)
                decoder.next_logits([3])  # what was generated is no part of the next prompt


def test_keys_and_values_lead_back_to_any_position_and_rings_to_none() -> None:
    plain = KVCache(replace(GROUPED, attention=replace(GROUPED.attention, sliding_window=None)), 100, CPU)
    ring = KVCache(GROUPED, 100, CPU, chunk_tokens=10)
    for cache, expected in [(plain, 20), (ring, 0)]:
        cache.num_tokens = 30
        cache.save()
        cache.num_tokens = 50
        assert [cache.reachable(number) for number in (20, 50, 60)] == [expected, 50, 50]
        cache.return_to(expected)
        assert cache.num_tokens == expected


class Failing(PackWeights):
    """Weights that fail at the router of a layer, once."""

    fails = False

    def matrix(self, role: str) -> object:
        if self.fails and role == "layers.2.router":
            self.fails = False
            raise KeyboardInterrupt
        return super().matrix(role)


def test_a_pass_that_fails_leaves_no_state_half_way(packed: Path) -> None:
    ids = token_ids()[:20]
    with Pack(packed) as opened:
        weights = Failing(opened, CPU)
        decoder = Decoder(weights, 40)
        expected = decoder.next_logits(ids)
        weights.fails = True
        with pytest.raises(KeyboardInterrupt):
            decoder.next_logits([5])
        assert decoder.cache.num_tokens == 0, "states moved on with the first layers: the sequence is lost as a whole"
        assert torch.equal(decoder.next_logits(ids), expected)


def test_a_trial_pass_of_the_next_layer_leaves_its_state_alone() -> None:
    cache = KVCache(HYBRID, 10, CPU)
    trial = cache.trial(0)
    assert isinstance(trial, LayerState)
    trial.recurrent.fill_(1.0)
    assert not cache.of(0).recurrent.any()
