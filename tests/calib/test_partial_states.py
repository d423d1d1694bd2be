"""Partial hidden states in a profile: by hand in plain torch, which layers have them, and what a profile stores."""

from contextlib import closing
from pathlib import Path

import pytest
import torch
from support.families import Tiny, write
from support.models import TinyMixtral
from torch import Tensor
from torch.nn.functional import silu

from moe_pack.calib.forward import LayerStates, LayerwiseWeights
from moe_pack.calib.forward.layers import Beginning
from moe_pack.calib.statistics import PartialStates, Shares, measure_layer
from moe_pack.calib.statistics.partial import resident_half
from moe_pack.formats.families import Checkpoint
from moe_pack.runtime.model import CheckpointWeights, embed

CPU = torch.device("cpu")
E, K, D, L, S, N, JUDGED = 5, 2, 64, 3, 8, 10, 4
SHAPE = TinyMixtral(intermediate_size=24, num_layers=L, num_experts=E, dtype=torch.float32)
IDS = torch.randint(96, (N, S), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def scores(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Tensor]:
    """The scores of layers 1 and 2 for the last four sequences, as a profile's first stage computes them."""
    folder = tmp_path_factory.mktemp("partial")
    weights = LayerwiseWeights(CheckpointWeights(Checkpoint(SHAPE.write(folder / "source"))))
    states = LayerStates(weights, Beginning(lambda number: embed(IDS[number], weights)), N, S, folder / "states", CPU)
    partial = PartialStates(folder, weights.spec, Shares(N, S, N - JUDGED, JUDGED), JUDGED * S)
    for layer in range(L):
        tokens = states.enter(layer)
        partial.run(layer, states, weights)
        partial.begin(layer, tokens)

        def on_output(
            expert: int, token_idx: Tensor, router_weights: Tensor, output: Tensor, layer: int = layer
        ) -> None:
            partial.add(layer, expert, token_idx, router_weights, output)

        measure_layer(states, tokens, weights, layer, (0.0, 0.0), JUDGED * S, on_output=on_output)
        partial.end(layer, states, weights)
        states.leave(layer, tokens)
    found = {layer: partial.scores(layer) for layer in range(L)}
    assert found[0] is None
    return {layer: each for layer, each in found.items() if each is not None}


def normed(x: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()


class ByHand:
    """The model for first tokens alone: their attention has one key, so it is the value, twice for two heads."""

    def __init__(self) -> None:
        self._tensors = {name: tensor.double() for name, tensor in SHAPE.tensors().items()}

    def _of(self, layer: int, name: str) -> Tensor:
        return self._tensors[f"model.layers.{layer}.{name}.weight"]

    def begun(self, ids: Tensor) -> Tensor:
        return self._tensors["model.embed_tokens.weight"][ids]

    def attended(self, x: Tensor, layer: int) -> Tensor:
        value = normed(x) @ self._of(layer, "self_attn.v_proj").T
        return x + torch.cat((value, value), dim=1) @ self._of(layer, "self_attn.o_proj").T

    def logits(self, x: Tensor, layer: int) -> Tensor:
        return normed(x) @ self._of(layer, "block_sparse_moe.gate").T

    def routes(self, x: Tensor, layer: int) -> list[list[int]]:
        return self.logits(x, layer).topk(K).indices.tolist()

    def with_experts(self, x: Tensor, layer: int, resident: set[int]) -> Tensor:
        """Returns x with the outputs of those chosen experts that are resident."""
        out = x.clone()
        for token, (chosen, logits) in enumerate(zip(self.routes(x, layer), self.logits(x, layer), strict=True)):
            shares = logits[chosen].softmax(dim=0)  # Mixtral normalizes over the chosen ones
            for expert, share in zip(chosen, shares, strict=True):
                if expert in resident:
                    gate, down, up = (self._of(layer, f"block_sparse_moe.experts.{expert}.w{n}") for n in (1, 2, 3))
                    h = normed(x[token])
                    out[token] += share * (down @ (silu(gate @ h) * (up @ h)))
        return out


def resident_experts(layer: int, tmp_path: Path) -> set[int]:
    """The three that most of the first six sequences' tokens choose, from the plain pass."""
    weights = LayerwiseWeights(CheckpointWeights(Checkpoint(SHAPE.write(tmp_path / "source"))))
    states = LayerStates(weights, Beginning(lambda number: embed(IDS[number], weights)), N, S, tmp_path / "states", CPU)
    for each in range(layer):
        tokens = states.enter(each)
        measure_layer(states, tokens, weights, each, (0.0, 0.0), 0)
        states.leave(each, tokens)
    chosen = states.enter(layer).experts[: (N - JUDGED) * S].flatten().tolist()
    return set(sorted(range(E), key=lambda expert: (-chosen.count(expert), expert))[:3])


def test_the_scores_are_those_of_the_state_without_missing_experts(scores: dict[int, Tensor], tmp_path: Path) -> None:
    model, everything = ByHand(), set(range(E))
    x = model.attended(model.begun(IDS[N - JUDGED :, 0]), 0)
    for layer in (1, 2):
        resident = resident_experts(layer - 1, tmp_path / str(layer))
        partial = model.attended(model.with_experts(x, layer - 1, resident), layer)
        expected, found = model.logits(partial, layer), scores[layer].view(JUDGED, S, E)[:, 0].double()
        # float32 sums of 64 products, three layers deep
        torch.testing.assert_close(found.log_softmax(1), expected.log_softmax(1), rtol=1e-3, atol=1e-4)
        assert found.argsort(descending=True).tolist() == expected.argsort(descending=True).tolist()
        x = model.attended(model.with_experts(x, layer - 1, everything), layer)
        whole = model.logits(x, layer)
        assert (whole.log_softmax(1) - expected.log_softmax(1)).abs().max() > 0.01, "some chosen experts are missing"


def test_the_more_popular_half_is_resident() -> None:
    choices = torch.tensor([[4, 2], [4, 2], [4, 1], [3, 1]])  # counts 0, 2, 2, 1, 3
    assert resident_half(choices, 5).tolist() == [False, True, True, False, True]
    assert resident_half(choices, 6).tolist() == [False, True, True, False, True, False]
    assert resident_half(torch.zeros((0, 2), dtype=torch.int64), 4).tolist() == [True, True, False, False]


def test_a_layer_is_judged_if_the_layer_before_has_experts_in_the_same_stack(tmp_path: Path) -> None:
    shapes = [
        (Tiny("qwen2_moe", "every second layer", {"decoder_sparse_step": 2}), set[int]()),
        (Tiny("qwen2_moe", "dense", {"mlp_only_layers": [0]}), {2, 3}),
        (
            Tiny("switch_transformers", "all", {"num_sparse_encoder_layers": 4, "num_sparse_decoder_layers": 3}),
            {1, 2, 3, 5, 6},
        ),
    ]
    for number, (shape, expected) in enumerate(shapes):
        with closing(Checkpoint(write(shape, tmp_path / str(number)))) as checkpoint:
            spec = checkpoint.spec
        layers = range(spec.num_hidden_layers)
        partial = PartialStates(tmp_path, spec, Shares(N, S, 6, 4), 4 * S)
        assert {layer for layer in layers if partial.is_judged(layer)} == expected & set(layers), shape.name
        for learned, judged in ((0, 4), (6, 0)):
            unjudged = PartialStates(tmp_path, spec, Shares(N, S, learned, judged), 4 * S)
            assert not any(unjudged.is_judged(layer) for layer in layers)
            assert unjudged.scores(1) is None
