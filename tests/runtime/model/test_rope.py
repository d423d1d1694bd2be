"""Rotary positions: scalings against transformers' own functions, turning by hand, and where longrope changes over."""

import math
from itertools import product
from pathlib import Path

import pytest
import torch
from support.cases import case
from support.families import Tiny, original, token_ids, write

from moe_pack.formats import RunError
from moe_pack.formats.families import Checkpoint
from moe_pack.formats.parts import RopeSpec
from moe_pack.formats.parts.positions import DynamicSpec, LongRopeSpec, ProportionalSpec, YarnSpec
from moe_pack.runtime.model import CheckpointWeights, Decoder, Expert
from moe_pack.runtime.model.caches.ropes import Rope, rotate

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
    """Of frequencies that follow the length, and of those that do not."""
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


def test_a_sequence_that_grows_beyond_the_original_context_is_what_it_would_be_at_once(tmp_path: Path) -> None:
    for number, before in enumerate([1, 39, 40, 41, 60]):
        case_folder = tmp_path / str(number)
        case_folder.mkdir()
        with case(before):
            source = write(Tiny("phimoe", "as it comes"), case_folder)
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
    """Weights that cannot be read while `fails` is set."""

    fails = False

    def expert(self, layer_idx: int, expert: int) -> Expert:
        if self.fails and layer_idx == 2:
            raise RunError("cannot be read")
        return super().expert(layer_idx, expert)


@pytest.mark.parametrize(("before", "kept"), [(20, 20), (38, 0)])
def test_after_a_failure_what_was_whole_before_is_still_there(before: int, kept: int, tmp_path: Path) -> None:
    """Two tokens more are within the original context, or beyond it: then all is computed again."""
    checkpoint = Checkpoint(write(Tiny("phimoe", "as it comes"), tmp_path))
    weights, ids = Failing(checkpoint), token_ids()[: before + 3]
    decoder, untouched = Decoder(weights, 96), Decoder(CheckpointWeights(checkpoint), 96)
    decoder.next_logits(ids[:before])
    weights.fails = True
    with pytest.raises(RunError):
        decoder.next_logits(ids[before:])
    weights.fails = False
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
