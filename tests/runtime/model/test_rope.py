"""Rotary positions under each scaling, and sliding windows, against transformers."""

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from support.cases import case
from support.families import Tiny, original, token_ids, write
from support.models import pack
from support.native import INSTRUCTION_SETS, operations_limited_to
from torch import Tensor

from moe_pack.formats import Pack, RunError
from moe_pack.formats.families import Checkpoint
from moe_pack.formats.parts import GroupedQuerySpec, RopeSpec
from moe_pack.formats.parts.positions import DynamicSpec, LongRopeSpec, ProportionalSpec, YarnSpec
from moe_pack.formats.parts.specs import cache_values
from moe_pack.runtime.model import TORCH, CheckpointWeights, Decoder, Expert, Operations, open_weights
from moe_pack.runtime.model.caches import LayerCache
from moe_pack.runtime.model.caches.ropes import Rope, rotate
from moe_pack.runtime.model.compute.softmax import View

CPU = torch.device("cpu")
POSITIONS = torch.tensor([0, 1, 17, 4095, 100_000])


def test_yarn_is_transformers_yarn() -> None:
    from transformers import Qwen3MoeConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    for original_context, factor, truncate, betas in product(
        [64, 4096, 32768], [1.0, 4.0, 40.0], [True, False], [(32.0, 1.0), (8.0, 8.0)]
    ):
        with case(original_context, factor, truncate, betas):
            config = Qwen3MoeConfig(
                head_dim=64,
                max_position_embeddings=int(original_context * factor),
                rope_parameters={
                    "rope_type": "yarn",
                    "rope_theta": 1e4,
                    "factor": factor,
                    "original_max_position_embeddings": original_context,
                    "beta_fast": betas[0],
                    "beta_slow": betas[1],
                    "truncate": truncate,
                },
            )
            frequencies, attention_factor = ROPE_INIT_FUNCTIONS["yarn"](config)
            yarn = YarnSpec("yarn", factor, original_context, *betas, attention_factor, truncate)
            cos, sin = Rope(RopeSpec(1e4, 64, False, yarn), CPU)(POSITIONS, 5)
            angles = POSITIONS[:, None].float() * frequencies
            torch.testing.assert_close(cos, angles.cos() * attention_factor)
            torch.testing.assert_close(sin, angles.sin() * attention_factor)


def test_proportional_positions_are_transformers_own() -> None:
    from transformers import Qwen3MoeConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    for share, factor in product([0.25, 0.3, 1.0], [1.0, 8.0]):
        with case(share, factor):
            values = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": share, "factor": factor}
            frequencies, _ = ROPE_INIT_FUNCTIONS["proportional"](Qwen3MoeConfig(head_dim=64, rope_parameters=values))
            proportional = ProportionalSpec("proportional", int(share * 64 // 2), factor)
            cos, sin = Rope(RopeSpec(1e6, 64, False, proportional), CPU)(POSITIONS, 5)
            angles = POSITIONS[:, None].float() * frequencies
            torch.testing.assert_close(cos, angles.cos())
            torch.testing.assert_close(sin, angles.sin())
            assert int((sin[2] != 0).sum()) == proportional.rotated_pairs


def test_pairs_are_turned_against_each_other_and_the_rest_stays() -> None:
    """A quarter turn of (1, 2), an eighth of (3, 4), in halves or interleaved; 5 and 6 are not rotated."""
    angles = torch.tensor([[math.pi / 2, math.pi / 4]])
    turned = (angles.cos(), angles.sin())
    eighth = [(3 - 4) / math.sqrt(2), (4 + 3) / math.sqrt(2)]
    halves = rotate(torch.tensor([[[1.0, 3.0, 2.0, 4.0, 5.0, 6.0]]]), turned, interleaved=False)
    paired = rotate(torch.tensor([[[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]]]), turned, interleaved=True)
    torch.testing.assert_close(halves, torch.tensor([[[-2.0, eighth[0], 1.0, eighth[1], 5.0, 6.0]]]))
    torch.testing.assert_close(paired, torch.tensor([[[-2.0, 1.0, eighth[0], eighth[1], 5.0, 6.0]]]))


def test_longrope_divides_by_its_factors_and_changes_over_beyond_the_original_context() -> None:
    longrope = LongRopeSpec("longrope", 8, (1.0, 2.0), (4.0, 8.0), 1.5, 2.5)
    rope = Rope(RopeSpec(100.0, 4, False, longrope), CPU)
    position = torch.tensor([3])
    torch.testing.assert_close(rope(position, 8)[0], 1.5 * torch.tensor([[3.0, 3 / (2 * 10)]]).cos())
    torch.testing.assert_close(rope(position, 9)[0], 2.5 * torch.tensor([[3 / 4, 3 / (8 * 10)]]).cos())


def test_every_position_as_the_last_one_has_the_angles_of_its_own_length() -> None:
    """With frequencies that follow the length, and with others."""
    scalings = (None, LongRopeSpec("longrope", 8, (1.0, 2.0), (4.0, 8.0), 1.5, 2.5), DynamicSpec("dynamic", 4.0, 8))
    for scaling, count in product(scalings, (5, 8, 9, 20)):
        with case(scaling, count):
            rope = Rope(RopeSpec(100.0, 4, False, scaling), CPU)
            each = [rope(torch.tensor([last]), last + 1) for last in range(count)]
            for found, alone in zip(rope.as_last(count), zip(*each, strict=True), strict=True):
                torch.testing.assert_close(found, torch.cat(alone))


def test_what_ran_before_holds_or_is_computed_again_as_its_scaling_says() -> None:
    """Within 8 tokens all is as it was; beyond, longrope computes everything again, dynamic scaling keeps its keys."""
    longrope = LongRopeSpec("longrope", 8, (1.0, 2.0), (4.0, 8.0), 1.5, 2.5)
    lengths = ((0, 9), (3, 8), (3, 9), (9, 12), (9, 9), (12, 5))
    expected = {
        None: ([True] * 6, [False] * 5),
        longrope: ([False, True, False, True, True, False], [False, False, True, False, False]),
        DynamicSpec("dynamic", 4.0, 8): ([False, True, False, False, False, False], [False] * 5),
    }
    for scaling, (are_same, outgrown) in expected.items():
        with case(scaling):
            rope = Rope(RopeSpec(100.0, 4, False, scaling), CPU)
            assert [rope.are_same(*each) for each in lengths] == are_same
            assert [rope.outgrows(*each) for each in lengths[:-1]] == outgrown  # in the last one, it does not grow


def test_a_sequence_that_grows_beyond_the_original_context_is_what_it_would_be_at_once(
    new_folder: Callable[[], Path],
) -> None:
    for before in [1, 39, 40, 41, 60]:
        with case(before):
            source = write(Tiny("phimoe", "as it comes"), new_folder())
            ids = token_ids()
            with torch.no_grad():
                expected = original(source)(torch.tensor([ids])).logits[0]
            checkpoint = Checkpoint(source)
            decoder = Decoder(CheckpointWeights(checkpoint), 96)
            decoder.next_logits(ids[:before])
            found = decoder.logits(ids[before:])
            again = decoder.cache.num_tokens
            checkpoint.close()
            assert (len(found), again) == (96 - before, 96)
            assert (found - expected[before:]).abs().max() < 1e-4


class Failing(CheckpointWeights):
    """Weights that cannot be read after `left` more experts."""

    left = 1_000_000

    def expert(self, layer_idx: int, expert: int) -> Expert:
        self.left -= 1
        if self.left < 0:
            raise RunError("cannot be read")
        return super().expert(layer_idx, expert)


@pytest.mark.parametrize(("before", "kept"), [(20, 20), (38, 0)])
def test_after_a_failure_what_was_whole_before_is_still_there(before: int, kept: int, tmp_path: Path) -> None:
    """Two tokens more are within the original context, or beyond it: then all is computed again."""
    checkpoint = Checkpoint(write(Tiny("phimoe", "as it comes"), tmp_path))
    weights, ids = Failing(checkpoint), token_ids()[: before + 3]
    decoder, untouched = Decoder(weights, 96), Decoder(CheckpointWeights(checkpoint), 96)
    decoder.next_logits(ids[:before])
    weights.left = 9  # in the middle of a pass of 3 tokens
    with pytest.raises(RunError):
        decoder.next_logits(ids[before:])
    weights.left = 1_000_000
    assert decoder.cache.num_tokens == kept
    found = decoder.next_logits(ids[kept:])
    expected = untouched.next_logits(ids)
    checkpoint.close()
    assert (found - expected).abs().max() < 1e-4


def test_after_a_reset_the_sequence_is_short_again(tmp_path: Path) -> None:
    checkpoint = Checkpoint(write(Tiny("phimoe", "as it comes"), tmp_path))
    decoder = Decoder(CheckpointWeights(checkpoint), 96)
    first = decoder.next_logits([1, 2, 3])
    decoder.logits(token_ids()[:80])
    decoder.reset()
    again = decoder.next_logits([1, 2, 3])
    checkpoint.close()
    assert torch.equal(first, again)


HEAD_DIM, NUM_HEADS, NUM_KV_HEADS = 24, 4, 2  # a head that is no multiple of the kernels' registers
SPEC = GroupedQuerySpec("grouped_query", NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, 7, HEAD_DIM**-0.5, (), "none", sinks=True)
MIXED = Tiny("gpt_oss", "window on two of three", {"layer_types": ["full_attention", *["sliding_attention"] * 2]})
ALL = Tiny("mixtral", "window of 7", {"sliding_window": 7})
OTHER = Tiny("mimo_v2_flash", "other attention in layers with windows")
ENTRIES = Tiny("deepseek_v4", "tables, windows, entries")

WAYS = [None, *INSTRUCTION_SETS]


def operations_of(instruction_set: str | None) -> Operations:
    return TORCH if instruction_set is None else operations_limited_to(instruction_set)


def tokens(count: int, seed: int = 0, value_dim: int = HEAD_DIM) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    widths = (NUM_HEADS * HEAD_DIM, NUM_KV_HEADS * HEAD_DIM, NUM_KV_HEADS * value_dim)
    q, k, v = (torch.randn(count, width, generator=draw) for width in widths)
    return q, k, v


def attended(
    given: tuple[Tensor, Tensor, Tensor],
    chunk: int,
    places: int,
    window: int | None,
    sinks: Tensor | None,
    operations: Operations,
) -> Tensor:
    """The attention of tokens that come in chunks, over a cache of so many places, full of NaNs before."""
    value_dim = given[2].shape[1] // NUM_KV_HEADS
    keys, values = (torch.full((NUM_KV_HEADS, places, dim), torch.nan) for dim in (HEAD_DIM, value_dim))
    spec = SPEC if value_dim == HEAD_DIM else replace(SPEC, value_head_dim=value_dim)
    found = []
    for start in range(0, len(given[0]), chunk):
        new = tuple(each[start : start + chunk] for each in given)
        count = len(new[0])
        cache = LayerCache(keys, values, start)
        angles = (torch.ones(count, 0), torch.ones(count, 0))
        found.append(operations.attend(new, None, angles, False, View(cache, spec, window, sinks)))  # type: ignore[arg-type]  # three
    return torch.cat(found)


def written_out(given: tuple[Tensor, Tensor, Tensor], window: int | None, sinks: Tensor | None) -> Tensor:
    """Softmax over what each position sees, and its head's sink, in float64, one after the other."""
    heads = (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS)
    q, k, v = (each.double().view(len(each), count, -1) for each, count in zip(given, heads, strict=True))
    out = torch.zeros(len(q), NUM_HEADS, v.shape[2], dtype=torch.float64)
    for position in range(len(q)):
        first = 0 if window is None else max(0, position + 1 - window)
        for head in range(NUM_HEADS):
            seen = slice(first, position + 1)
            shared = head // (NUM_HEADS // NUM_KV_HEADS)
            scores = SPEC.scale * (k[seen, shared] @ q[position, head])
            weights = scores.exp()
            total = weights.sum() + (0 if sinks is None else sinks[head].double().exp())
            out[position, head] = (weights / total) @ v[seen, shared]
    return out.flatten(1)


def test_attention_with_sinks_is_softmax_written_out() -> None:
    for instruction_set, chunk, window, has_sinks in product(WAYS, [1, 3, 40], [None, 1, 7], [True, False]):
        with case(instruction_set, chunk, window, has_sinks):
            given = tokens(40)
            sinks = torch.tensor([0.5, -3.0, 4.0, -torch.inf]) if has_sinks else None
            found = attended(given, chunk, 40, window, sinks, operations_of(instruction_set))
            torch.testing.assert_close(found, written_out(given, window, sinks).float(), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_values_may_be_smaller_or_larger_than_keys() -> None:
    for instruction_set, chunk, window, has_sinks in product(WAYS, [1, 3, 40], [None, 7], [True, False]):
        for value_dim in (16, 40):
            with case(instruction_set, chunk, window, has_sinks, value_dim):
                given = tokens(40, value_dim=value_dim)
                sinks = torch.tensor([0.5, -3.0, 30.0, -torch.inf]) if has_sinks else None
                found = attended(given, chunk, 40, window, sinks, operations_of(instruction_set))
                torch.testing.assert_close(found, written_out(given, window, sinks).float(), rtol=1e-5, atol=1e-5)


def test_a_ring_gives_the_bits_that_all_positions_give() -> None:
    for instruction_set, (chunk, window) in product(
        WAYS, [(1, 1), (1, 7), (3, 7), (7, 3), (40, 7), (64, 300), (130, 70)]
    ):
        with case(instruction_set, chunk, window):
            operations, given, sinks = operations_of(instruction_set), tokens(450), torch.tensor([0.5, -3.0, 4.0, 0.0])
            whole = attended(given, chunk, 450, window, sinks, operations)
            for places in (window - 1 + chunk, window + chunk + 5):
                assert torch.equal(attended(given, chunk, places, window, sinks, operations), whole)


def test_a_ring_too_small_for_what_is_seen_is_refused() -> None:
    for instruction_set in INSTRUCTION_SETS:
        with case(instruction_set), pytest.raises(ValueError, match="what the new tokens see is not within the cache"):
            attended(tokens(30), 3, 8, 7, None, operations_of(instruction_set))


@pytest.mark.slow
def test_a_text_far_beyond_the_window_is_transformers_in_chunks_of_any_size(new_folder: Callable[[], Path]) -> None:
    for has_kernels, tiny in product([True, False], [MIXED, ALL, OTHER, ENTRIES]):
        case_folder = new_folder()
        with case(has_kernels, tiny):
            source, ids = write(tiny, case_folder / "source"), token_ids()
            pack(source, case_folder / "packed", width=16)
            with torch.no_grad():
                expected = original(source)(torch.tensor([ids])).logits[0]
            with Pack(case_folder / "packed") as opened:
                weights = open_weights(opened, CPU, operations_limited_to("portable") if has_kernels else TORCH)
                for chunk in (1, 2, 5, 16, 40):
                    decoder = Decoder(weights, len(ids), chunk_tokens=chunk)
                    assert decoder.cache.is_ring
                    assert decoder.cache.num_bytes == 4 * cache_values(opened.spec, len(ids), chunk)
                    found = torch.cat([decoder.logits(ids[:33]), decoder.logits(ids[33:])])
                    assert (found - expected).abs().max() < 1e-4


@pytest.mark.parametrize(("num_new", "kept"), [(5, 20), (12, 0)])
def test_after_a_failure_a_ring_that_was_written_over_holds_nothing(num_new: int, kept: int, tmp_path: Path) -> None:
    """Within a chunk only places are taken that nobody sees any more; the next takes others."""
    checkpoint, ids = Checkpoint(write(MIXED, tmp_path)), token_ids()
    weights, untouched = Failing(checkpoint), Decoder(CheckpointWeights(checkpoint), 96)
    decoder = Decoder(weights, 96, chunk_tokens=5)
    decoder.logits(ids[:20])
    weights.left = 30 if kept == 0 else 10  # a chunk takes up to 18
    with pytest.raises(RunError):
        decoder.logits(ids[20 : 20 + num_new])
    weights.left = 1_000_000
    assert decoder.cache.num_tokens == kept
    found, expected = decoder.logits(ids[kept:40])[-1], untouched.logits(ids[:40])[-1]
    checkpoint.close()
    assert (found - expected).abs().max() < 1e-4


def test_a_window_is_of_the_layers_that_are_named() -> None:
    some = replace(SPEC, windowed_layers=(0, 2))
    assert [some.window(layer) for layer in range(4)] == [7, None, 7, None]
    assert [SPEC.window(layer) for layer in range(3)] == [7, 7, 7]


def test_a_chunk_is_seen_back_to_its_first_position_alone() -> None:
    chunks = replace(SPEC, sinks=False, chunked=True)
    given, window, count = tokens(40, seed=3), 7, 40
    q, k, v = (each.view(count, -1, HEAD_DIM).transpose(0, 1) for each in given)
    k, v = (each.repeat_interleave(NUM_HEADS // NUM_KV_HEADS, dim=0) for each in (k, v))
    at = torch.arange(count)
    seen = (at <= at[:, None]) & (at // window == at[:, None] // window)
    scores = (q @ k.transpose(1, 2) * chunks.scale).masked_fill(~seen, -torch.inf)
    expected = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
    for way, new, places in product(WAYS, (1, 5, 40), (40, 46)):
        with case(way, new, places):
            shape = (NUM_KV_HEADS, places if new == 40 else window - 1 + new, HEAD_DIM)
            keys, values = torch.full(shape, torch.nan), torch.full(shape, torch.nan)
            found = []
            for start in range(0, count, new):
                few = tuple(each[start : start + new] for each in given)
                angles = (torch.ones(len(few[0]), 0), torch.ones(len(few[0]), 0))
                cache = LayerCache(keys, values, start)
                found.append(operations_of(way).attend(few, None, angles, False, View(cache, chunks, window, None)))  # type: ignore[arg-type]  # three
            assert (torch.cat(found) - expected).abs().max() < 1e-5
