"""The statistics of a profile against brute force over what `transformers` does with the same tokens.

Nothing of calib is used to compute the expected: hooks take each MoE layer's input and routes, activations come from
the fused weights, counts from loops, quantiles from sorting. Files are read with the safetensors package.
"""

import math
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file
from support.models import BOOK, DEMO_MODEL
from support.profiles import StoppedError, StopsBefore, profiled

from moe_pack.calib.forward import Tokens, read_tokens
from moe_pack.formats.families.checkpoint_files import FolderFiles
from moe_pack.runtime import Text

Array = NDArray[Any]
NUM_SEQUENCES, S, NUM_HELD_OUT = 8, 256, 1  # a fifth of 8, rounded down, is held out
L, E, K, F = 4, 8, 2, 448
KINDS = ("up", "gate", "both")
SPARSITIES = (Fraction(1, 2), Fraction(7, 10), Fraction(8, 10), Fraction(9, 10))
LEVELS = (*(Fraction(number, 100) for number in range(100)), Fraction(995, 1000), Fraction(999, 1000), Fraction(1))
# Sums of 128 products in another order: activations are up to about 10, and differ by less than this.
NOISE = 1e-6


@dataclass(frozen=True)
class Seen:
    """A MoE layer's inputs and choices in transformers: `a[e]` float32 [kinds, n, f] for the n tokens of expert e."""

    inputs: torch.Tensor
    weights: Array
    routes: Array
    a: list[Array]


@pytest.fixture(scope="module")
def tokens() -> Tokens:
    found = read_tokens(str(BOOK), None, Text(FolderFiles(DEMO_MODEL)), NUM_SEQUENCES * S, S)
    assert found.sequences.shape == (NUM_SEQUENCES, S)
    return found


@pytest.fixture(scope="module")
def expected(tokens: Tokens) -> list[Seen]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    model.train(False)
    caught: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def catch(module: object, inputs: tuple[torch.Tensor], outputs: tuple[torch.Tensor, ...]) -> None:
        caught.append((inputs[0], outputs[1], outputs[2]))

    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(catch)
    with torch.no_grad():
        model.model(torch.from_numpy(tokens.sequences.astype(np.int64)), use_cache=False)
        return [seen(layer.mlp.experts, *held) for layer, held in zip(model.model.layers, caught, strict=True)]


def seen(experts: Any, inputs: torch.Tensor, weights: torch.Tensor, routes: torch.Tensor) -> Seen:
    a = []
    for e in range(E):
        x = inputs[(routes == e).any(dim=1)]
        gate, up = (x @ experts.gate_up_proj[e].T).split(F, dim=1)
        active = gate * torch.sigmoid(gate)
        a.append(torch.stack((up, active, active * up)).numpy())
    return Seen(inputs, weights.numpy(), routes.numpy(), a)


@pytest.fixture(scope="module")
def found(tokens: Tokens, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a profile whose predictors are left out: they take longest."""
    folder = tmp_path_factory.mktemp("statistics") / "profile"
    with pytest.raises(StoppedError):
        profiled(DEMO_MODEL, folder, tokens, progress=StopsBefore("predictors"))
    return folder


@pytest.fixture(scope="module")
def layers(found: Path) -> list[dict[str, Array]]:
    return [load_file(found / f"statistics-{layer:03d}.safetensors") for layer in range(L)]


def test_every_token_takes_the_same_experts_in_the_same_order(
    layers: list[dict[str, Array]], expected: list[Seen]
) -> None:
    for arrays, layer in zip(layers, expected, strict=True):
        assert np.array_equal(arrays["routes"], layer.routes)


def test_popularity_counts_every_token_and_the_held_out_ones(
    layers: list[dict[str, Array]], expected: list[Seen]
) -> None:
    for arrays, layer in zip(layers, expected, strict=True):
        for e in range(E):
            assert arrays["tokens"][e] == sum(e in token for token in layer.routes.tolist())
            held_out = layer.routes[-NUM_HELD_OUT * S :].tolist()
            assert arrays["held_out_tokens"][e] == sum(e in token for token in held_out)


def test_mass_is_the_sum_of_router_weights(layers: list[dict[str, Array]], expected: list[Seen]) -> None:
    for arrays, layer in zip(layers, expected, strict=True):
        for e in range(E):
            mass = math.fsum(layer.weights[layer.routes == e].tolist())
            # Weights differ by float32's rounding of softmax, some 1e-7 each, in either direction.
            assert arrays["mass"][e] == pytest.approx(mass, rel=1e-5)


def test_coactivation_counts_tokens_that_chose_both(layers: list[dict[str, Array]], expected: list[Seen]) -> None:
    counted = np.stack([arrays["coactivation"] for arrays in layers])
    for l, layer in enumerate(expected):
        pairs = Counter(pair for token in layer.routes.tolist() for pair in product(token, token))
        assert counted[l].tolist() == [[pairs[e, other] for other in range(E)] for e in range(E)]


def test_quantiles_are_those_of_sorted_magnitudes(layers: list[dict[str, Array]], expected: list[Seen]) -> None:
    for arrays, layer in zip(layers, expected, strict=True):
        for e, kind in product(range(E), range(3)):
            ordered = np.sort(np.abs(layer.a[e][kind]), axis=None)
            places = [max(math.ceil(level * len(ordered)), 1) - 1 for level in LEVELS]  # FloE Eq. 6
            # The histogram's bins are one part in 1,024 wide; the least magnitudes are sums that nearly cancel.
            np.testing.assert_allclose(arrays["quantiles"][e, kind], ordered[places], rtol=2.0**-10, atol=NOISE)


def test_the_sample_that_heat_is_taken_from_gives_the_quantiles_of_its_tokens(
    layers: list[dict[str, Array]], expected: list[Seen]
) -> None:
    for arrays, layer in zip(layers, expected, strict=True):
        for e, kind in product(range(E), range(3)):
            n = layer.a[e].shape[1]
            number = min(n, 256)
            sample = layer.a[e][kind][[place * n // number for place in range(number)]]
            ordered = np.sort(np.abs(sample), axis=None)
            places = [math.ceil(sparsity * len(ordered)) - 1 for sparsity in SPARSITIES]
            found = arrays["hot_thresholds"][e, kind]
            np.testing.assert_allclose(found, ordered[places], rtol=2.0**-10, atol=NOISE)


def test_heat_is_the_share_of_tokens_on_which_a_neuron_reaches_the_threshold(
    layers: list[dict[str, Array]], expected: list[Seen]
) -> None:
    num_equal = num_all = 0
    for arrays, layer in zip(layers, expected, strict=True):
        for e, kind, level in product(range(E), range(3), range(4)):
            magnitudes, threshold = np.abs(layer.a[e][kind]), arrays["hot_thresholds"][e, kind, level]
            counts = {shift: (magnitudes >= threshold + shift).sum(axis=0) for shift in (-NOISE, 0.0, NOISE)}
            # Stored in 65,535ths: with so few tokens every count comes back.
            found = np.rint(arrays["hot"][e, kind, level] / 65535 * len(magnitudes)).astype(np.int64)
            assert (counts[NOISE] <= found).all() and (found <= counts[-NOISE]).all()
            num_equal += int((found == counts[0.0]).sum())
            num_all += found.size
    # What lies on a threshold within the rounding of sums may fall on either side: few of the neurons have such.
    assert num_equal >= 0.999 * num_all, f"{num_all - num_equal} of {num_all} counts differ"


def test_similarity_is_the_cosine_of_successive_inputs_of_moe_layers(
    layers: list[dict[str, Array]], expected: list[Seen]
) -> None:
    assert np.isnan(layers[0]["cosine"]).all()
    for l in range(1, L):
        before, own = expected[l - 1].inputs.double().numpy(), expected[l].inputs.double().numpy()
        norms = np.linalg.norm(before, axis=1) * np.linalg.norm(own, axis=1)
        cosines = (before * own).sum(axis=1) / norms
        # Hidden states differ from transformers' by some 1e-6 of their size after four layers.
        assert layers[l]["cosine"] == pytest.approx([cosines.mean(), cosines.std()], abs=1e-5)


def learned_sets(expected: list[Seen]) -> list[list[tuple[int, ...]]]:
    """For each layer, the experts of each token that is not held out, ascending."""
    num_learned = (NUM_SEQUENCES - NUM_HELD_OUT) * S
    return [[tuple(sorted(token)) for token in layer.routes[:num_learned].tolist()] for layer in expected]


def test_paths_count_popularity_and_pairs_of_tokens_not_held_out(found: Path, expected: list[Seen]) -> None:
    arrays, sets = load_file(found / "paths.safetensors"), learned_sets(expected)
    for l in range(L):
        counts = Counter(e for token in sets[l] for e in token)
        assert arrays["popularity"][l].tolist() == [counts[e] for e in range(E)]
    for name, back in (("after_one", 1), ("after_two", 2)):
        assert len(arrays[name]) == L - back
        for l in range(back, L):
            pairs = Counter(
                pair for before, own in zip(sets[l - back], sets[l], strict=True) for pair in product(before, own)
            )
            assert arrays[name][l - back].tolist() == [[pairs[e, other] for other in range(E)] for e in range(E)]


def test_paths_hold_every_set_seen_eight_times_and_what_followed(found: Path, expected: list[Seen]) -> None:
    arrays, sets = load_file(found / "paths.safetensors"), learned_sets(expected)
    keys: list[tuple[int, ...]] = [*map(tuple, arrays["keys_one"].tolist()), *map(tuple, arrays["keys_two"].tolist())]
    for l in range(1, L):
        before = sets[0] if l == 1 else [a + b for a, b in zip(sets[l - 2], sets[l - 1], strict=True)]
        seen_times = Counter(before)
        successors: dict[tuple[int, ...], Counter[int]] = {key: Counter() for key in seen_times}
        for key, own in zip(before, sets[l], strict=True):
            successors[key].update(own)
        often = sorted(key for key in seen_times if seen_times[key] >= 8)
        assert often, "no set was seen often: the text is too short to prove anything"
        first, end = arrays["key_starts"][l : l + 2].tolist()
        assert keys[first:end] == often
        for number, key in enumerate(often, start=first):
            assert arrays["keys_seen"][number] == seen_times[key]
            entries = slice(*arrays["successor_starts"][number : number + 2].tolist())
            experts, counts = arrays["successor_experts"][entries], arrays["successor_counts"][entries]
            assert dict(zip(experts.tolist(), counts.tolist(), strict=True)) == dict(successors[key])
