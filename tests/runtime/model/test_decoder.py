"""The decoder against transformers' Mixtral: every shape its config allows, in prefill and token by token."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from support.cases import case
from support.models import TinyMixtral, pack

from moe_pack.formats import Pack, RunError
from moe_pack.formats.families import Checkpoint
from moe_pack.runtime.model import CheckpointWeights, Decoder, PackWeights

CPU = torch.device("cpu")
# Float32 sums in another order over d = 64 and 4 layers differ by about 1e-6; the project's bound is 1e-4.
TOLERANCE = 1e-4

SHAPES = {
    "plain": TinyMixtral(num_layers=2, num_experts=4),
    "one expert": TinyMixtral(num_experts=1),
    "grouped queries": TinyMixtral(num_heads=4, num_kv_heads=2, num_layers=2),
    "own head size": TinyMixtral(num_heads=2, num_kv_heads=2, config={"head_dim": 32}),
    "sliding window": TinyMixtral(num_layers=3, config={"sliding_window": 5}),
    "tied head": TinyMixtral(config={"tie_word_embeddings": True}),
    "float32": TinyMixtral(dtype=torch.float32),
    "float16": TinyMixtral(dtype=torch.float16),
    "rope of transformers 5": TinyMixtral(
        config={"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 5e3}}
    ),
}


def reference_logits(folder: Path, ids: list[int]) -> torch.Tensor:
    from transformers import MixtralForCausalLM

    model = MixtralForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0]


def written(shape: TinyMixtral, folder: Path) -> Path:
    tied = shape.config.get("tie_word_embeddings", False)
    return shape.write(folder, lambda tensors: tensors.pop("lm_head.weight") if tied else None)


def test_logits_are_those_of_transformers(new_folder: Callable[[], Path]) -> None:
    for name in SHAPES:
        with case(name):
            source = written(SHAPES[name], new_folder() / "source")
            ids = [(11 * i + 3) % 96 for i in range(40)]
            expected = reference_logits(source, ids)
            checkpoint = Checkpoint(source)
            decoder = Decoder(CheckpointWeights(checkpoint), 64)
            at_once = decoder.logits(ids)
            decoder.reset()
            one_by_one = torch.stack([decoder.next_logits([token]) for token in ids])
            checkpoint.close()
            assert (at_once - expected).abs().max() < TOLERANCE
            assert (one_by_one - expected).abs().max() < TOLERANCE


def test_a_prompt_longer_than_a_prefill_chunk_gives_the_same_logits(tmp_path: Path) -> None:
    shape = TinyMixtral(num_layers=2, config={"max_position_embeddings": 2048, "sliding_window": 600})
    source = shape.write(tmp_path / "source")
    pack(source, tmp_path / "packed", width=16)
    ids = [(7 * i * i + 3) % 96 for i in range(1100)]
    with Pack(tmp_path / "packed") as opened:
        decoder = Decoder(PackWeights(opened, CPU), 1100)
        logits = decoder.logits(ids)
        decoder.reset()
        decoder.next_logits(ids[:700])
        resumed = decoder.logits(ids[700:])
    assert (logits - reference_logits(source, ids)).abs().max() < TOLERANCE
    assert (logits[700:] - resumed).abs().max() < TOLERANCE


class Routes:
    """An observer that keeps what ran, by layer."""

    def __init__(self) -> None:
        self.of = dict[int, list[NDArray[np.int64]]]()

    def routed(self, layer_idx: int, experts: NDArray[np.int64]) -> None:
        self.of.setdefault(layer_idx, []).append(experts)

    def fetched(self, layer_idx: int, expert: int) -> None:
        assert layer_idx in self.of, "its router chose it"


def test_the_last_layers_experts_run_for_the_last_token_of_a_prompt_alone(tmp_path: Path) -> None:
    pack(SHAPES["plain"].write(tmp_path / "source"), tmp_path / "packed")
    ids = [(11 * i + 3) % 96 for i in range(60)]
    with Pack(tmp_path / "packed") as opened:
        weights, routes = PackWeights(opened, CPU), Routes()
        expected = Decoder(weights, 64).logits(ids)
        weights.observer = routes
        decoder = Decoder(weights, 64, chunk_tokens=20)
        assert (decoder.next_logits(ids) - expected[-1]).abs().max() < TOLERANCE
        assert [len(each) for each in routes.of[0]] == [20, 20, 20]
        assert [len(each) for each in routes.of[max(routes.of)]] == [1, 1, 1], "of each pass"
        routes.of.clear()
        decoder.reset()
        assert (decoder.logits(ids) - expected).abs().max() < TOLERANCE
        assert [len(each) for each in routes.of[max(routes.of)]] == [20, 20, 20], "all tokens are asked for"


def test_quantized_dense_matrices_run(tmp_path: Path, tiny_source: Path) -> None:
    pack(tiny_source, tmp_path / "eight", width=16, dense_width=8)
    ids = list(range(30))
    with Pack(tmp_path / "eight") as opened:
        logits = Decoder(PackWeights(opened, CPU), 30).logits(ids)
    error = (logits - reference_logits(tiny_source, ids)).abs().max()
    assert 0 < error < 0.2  # 8-bit weights of about 0.2 over 64 columns; the logits themselves reach 5


def test_a_context_that_is_full_is_refused(tiny_pack: Path) -> None:
    with Pack(tiny_pack) as opened:
        decoder = Decoder(PackWeights(opened, CPU), 4)
        decoder.next_logits([1, 2, 3, 4])
        with pytest.raises(RunError, match=r"^the context of 4 tokens is full$"):
            decoder.next_logits([5])


def test_a_context_beyond_the_models_positions_is_refused(tiny_pack: Path) -> None:
    with Pack(tiny_pack) as opened:
        weights = PackWeights(opened, CPU)
        with pytest.raises(RunError, match=r"^a context of 129 tokens is not possible; this model has 128 positions$"):
            Decoder(weights, 129)
        Decoder(weights, 128)


@pytest.mark.parametrize("token", [-1, 96])
def test_a_token_outside_the_vocabulary_is_refused(token: int, tiny_pack: Path) -> None:
    with Pack(tiny_pack) as opened:
        decoder = Decoder(PackWeights(opened, CPU), 4)
        with pytest.raises(RunError, match="vocabulary of 96"):
            decoder.next_logits([token])
        decoder.next_logits([95])


def test_one_row_decodes_as_it_does_among_others(tiny_source: Path, new_folder: Callable[[], Path]) -> None:
    """Alone, a row's parts begin at odd bytes where scales are bytes of an odd number."""
    for group, scale_bits in [(64, 8), (64, 16), (0, 8), (16, 8)]:
        case_folder = new_folder()
        with case(group, scale_bits):
            pack(tiny_source, case_folder / "packed", group=group, scale_bits=scale_bits, dense_width=3)
            with Pack(case_folder / "packed") as opened:
                embed = PackWeights(opened, CPU).matrix("embed")
                assert torch.equal(torch.cat([embed.rows(i, i + 1) for i in range(96)]), embed.rows(0, 96))


def test_a_cache_of_float32_is_what_a_decoder_has_unless_asked(tmp_path: Path, tiny_source: Path) -> None:
    pack(tiny_source, tmp_path / "packed", width=16)
    ids = list(range(30))
    with Pack(tmp_path / "packed") as opened:
        weights = PackWeights(opened, CPU)
        usual, asked = Decoder(weights, 30), Decoder(weights, 30, cache_dtype="f32")
        assert {opened.dtype for opened in (*usual.cache.keys, *usual.cache.values)} == {torch.float32}
        assert torch.equal(usual.logits(ids), asked.logits(ids))


def test_a_cache_of_bfloat16_takes_half_the_bytes_and_changes_logits_a_little(
    tmp_path: Path, tiny_source: Path
) -> None:
    pack(tiny_source, tmp_path / "packed", width=16)
    ids = list(range(30))
    with Pack(tmp_path / "packed") as opened:
        weights = PackWeights(opened, CPU)
        exact, rounded = Decoder(weights, 30), Decoder(weights, 30, cache_dtype="bf16")
        expected, at_once = exact.logits(ids), rounded.logits(ids)
        rounded.reset()
        one_by_one = torch.stack([rounded.next_logits([token]) for token in ids])
    assert rounded.cache.num_bytes == exact.cache.num_bytes // 2
    # Keys and values are off by 2^-9 of themselves at most, of logits that reach 5; routes have no near ties here.
    assert 0 < (at_once - expected).abs().max() < 0.1
    assert 0 < (one_by_one - expected).abs().max() < 0.1
