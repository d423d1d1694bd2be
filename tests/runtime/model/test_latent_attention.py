"""Latent attention: both its ways give one answer, and the choice between them counts multiplications."""

import random
from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from families.deepseek_v2 import FULL_V2
from support.families import NUM_TOKENS, Tiny, token_ids, write

from moe_pack.formats.families import Checkpoint
from moe_pack.formats.parts import LatentSpec
from moe_pack.formats.parts.specs import cached_values
from moe_pack.runtime.model import CheckpointWeights, Decoder, ExpertRunner, PartialState, mlp_input
from moe_pack.runtime.model.attention import latent
from moe_pack.runtime.model.compute import softmax
from moe_pack.runtime.model.kv_cache import KVCache
from moe_pack.runtime.model.layers import run_one_by_one

LITE = LatentSpec("latent", 16, None, 512, 128, 64, 128, 192**-0.5, 1e-6)  # DeepSeek-V2-Lite's


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint(write(Tiny("deepseek_v2", "groups", FULL_V2), tmp_path_factory.mktemp("latent")))


BOTH_WAYS = (Tiny("deepseek_v2", "groups", FULL_V2), Tiny("hy_v4", "sinks"))


@pytest.fixture(scope="module", params=BOTH_WAYS, ids=lambda tiny: tiny.family)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint(write(request.param, tmp_path_factory.mktemp("both")))


PIECES = [[96], [1] * 96, [40, 1, 1, 30, 24], [5] * 19 + [1]]


def in_pieces(decoder: Decoder, ids: list[int], pieces: list[int]) -> torch.Tensor:
    """The logits of a text that comes in pieces of these sizes."""
    ends = accumulate(pieces)
    return torch.cat([decoder.logits(ids[end - size : end]) for size, end in zip(pieces, ends, strict=True)])


@pytest.mark.parametrize("pieces", PIECES, ids=str)
@pytest.mark.parametrize("absorbed", [True, False])
def test_absorbed_and_expanded_give_the_same_logits(
    pieces: list[int], absorbed: bool, model: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = token_ids()
    expected = Decoder(CheckpointWeights(model), NUM_TOKENS).logits(ids)
    monkeypatch.setattr(latent, "absorbs", lambda *sizes: absorbed)
    found = in_pieces(Decoder(CheckpointWeights(model), NUM_TOKENS), ids, pieces)
    assert (found - expected).abs().max() < 1e-4  # float32 sums in another order: about 1e-5


@pytest.mark.parametrize("absorbed", [True, False])
def test_heads_may_come_one_at_a_time(absorbed: bool, model: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = token_ids()
    expected = Decoder(CheckpointWeights(model), NUM_TOKENS).logits(ids)
    monkeypatch.setattr(latent, "absorbs", lambda *sizes: absorbed)
    monkeypatch.setattr(softmax, "MAX_DECODED_BYTES", 1)
    assert (Decoder(CheckpointWeights(model), NUM_TOKENS).logits(ids) - expected).abs().max() < 1e-4


def test_a_token_alone_is_absorbed_and_a_prompt_is_expanded() -> None:
    assert all(latent.absorbs(1, seen, LITE) for seen in (2, 100, 32_000))
    assert not any(latent.absorbs(num_new, num_new, LITE) for num_new in (2, 100, 512))


def product(left: tuple[int, int], right: tuple[int, int]) -> int:
    """Multiplications of a matrix product."""
    assert left[1] == right[0]
    return left[0] * left[1] * right[1]


def test_the_choice_is_the_way_with_fewer_multiplications_product_by_product() -> None:
    rng, chosen = random.Random(2), []
    for _ in range(300):
        rank, nope, rope, v = (rng.randrange(1, 40) for _ in range(4))
        new = rng.randrange(1, 12)
        seen = new + rng.randrange(12)
        absorbed = product((new, nope), (nope, rank)) + product((new, rank + rope), (rank + rope, seen))
        absorbed += product((new, seen), (seen, rank)) + product((new, rank), (rank, v))
        expanded = product((seen, rank), (rank, nope)) + product((seen, rank), (rank, v))
        expanded += product((new, nope + rope), (nope + rope, seen)) + product((new, seen), (seen, v))
        spec = replace(LITE, kv_lora_rank=rank, qk_nope_head_dim=nope, qk_rope_head_dim=rope, v_head_dim=v)
        chosen.append(latent.absorbs(new, seen, spec))
        assert chosen[-1] == (absorbed <= expanded)
    assert 20 < sum(chosen) < 280, "both ways are chosen"


def test_the_cache_holds_one_latent_and_one_rotated_key_a_token_and_layer(checkpoint: Checkpoint) -> None:
    cache = KVCache(checkpoint.spec, 10, torch.device("cpu"))
    assert cached_values(checkpoint.spec) == 3 * (24 + 8)
    assert cache.num_bytes == 10 * 4 * cached_values(checkpoint.spec)
    for keys, values in zip(cache.keys, cache.values, strict=True):
        assert values.data_ptr() == keys.data_ptr(), "values are a view of keys"


SHARING = Tiny("glm_moe_dsa", "two layers share a choice", {"indexer_types": ["full", "shared", "shared", "full"]})


@pytest.fixture(scope="module")
def sharing(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint(write(SHARING, tmp_path_factory.mktemp("sharing")))


def test_a_layer_that_shares_a_choice_keeps_no_keys_of_an_indexer(sharing: Checkpoint) -> None:
    cache = KVCache(sharing.spec, 10, torch.device("cpu"))
    assert [keys.shape[-1] for keys in cache.keys] == [24 + 8 + 16, 24 + 8, 24 + 8, 24 + 8 + 16]
    assert cached_values(sharing.spec) == 4 * (24 + 8) + 2 * 16
    assert cache.num_bytes == 10 * 4 * cached_values(sharing.spec)
    assert [sharing.spec.chooser_of(layer) for layer in range(4)] == [None, 0, 0, None]


@pytest.mark.parametrize("pieces", PIECES, ids=str)
def test_pieces_of_a_text_share_choices_of_their_own(pieces: list[int], sharing: Checkpoint) -> None:
    ids = token_ids()
    expected = Decoder(CheckpointWeights(sharing), NUM_TOKENS).logits(ids)
    found = in_pieces(Decoder(CheckpointWeights(sharing), NUM_TOKENS, chunk_tokens=17), ids, pieces)
    assert (found - expected).abs().max() < 1e-4


class Predicting(CheckpointWeights, ExpertRunner):
    """Weights that ask for the state after the next layer's attention, as predictions of its experts do."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        self.predicted: torch.Tensor | None = None
        self.num_compared = 0

    def run_experts(
        self,
        layer_idx: int,
        x: torch.Tensor,
        experts: torch.Tensor,
        router_weights: torch.Tensor,
        partial_state: PartialState | None = None,
    ) -> torch.Tensor:
        if self.predicted is not None:
            torch.testing.assert_close(x, self.predicted)  # nothing was missing: the prediction is the truth
            self.num_compared += 1
        y = run_one_by_one(x, experts, router_weights, self, layer_idx)
        layer = self.spec.moe_layers[layer_idx]
        self.predicted = None if partial_state is None else mlp_input(partial_state(y), self, layer + 1)
        return y


def test_a_prediction_of_a_layer_that_shares_a_choice_uses_that_choice_and_leaves_it(sharing: Checkpoint) -> None:
    ids, weights = token_ids(), Predicting(sharing)
    expected = Decoder(CheckpointWeights(sharing), NUM_TOKENS).logits(ids)
    decoder = Decoder(weights, NUM_TOKENS)
    found = torch.cat([decoder.logits(ids[:60]), *(decoder.logits([token]) for token in ids[60:])])
    assert (found - expected).abs().max() < 1e-4
    assert weights.num_compared == 2 * 37, "layers 2 and 3 are predicted from the layers before them"
