"""Rotated packs: every engine of the CPU gives the answer of the same weights rotated back, by brute force."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.cases import case
from support.families import Tiny, token_ids, write
from support.models import DEMO_MODEL, pack
from support.native import INSTRUCTION_SETS, operations_limited_to
from support.second_reader import rotation_matrix
from support.streaming import budget_for
from torch import Tensor

from moe_pack.formats import Pack
from moe_pack.formats.families import Checkpoint
from moe_pack.formats.pack.manifests import RotationVectors
from moe_pack.formats.pack.writer import rewrite_thresholds
from moe_pack.runtime import Engine, EngineOptions
from moe_pack.runtime.model import (
    TORCH,
    CheckpointWeights,
    Decoder,
    EncoderDecoder,
    Expert,
    NeuronBlock,
    PackWeights,
    open_weights,
)
from moe_pack.runtime.model.compute.rotation import Rotation
from moe_pack.runtime.offload import PRESETS, OffloadedWeights, least_budget

CPU, CONTEXT, NUM_PROMPT = torch.device("cpu"), 32, 14
IDS = [1, 540, 33, 7, 2048, 19, 4095, 600, 600, 3, 77, 1000, 8, 9, 10, 11, 12, 2, 5, 4000]
SIZES = (64, 128, 192, 256, 320, 576, 704, 960, 2048, 2880, 64 * 67)


def some_rotation(d: int) -> Rotation:
    """Vectors of mixed sizes and signs."""
    generator = torch.Generator().manual_seed(d)
    a, b = torch.randn((2, d), generator=generator).exp() * torch.randn((2, d), generator=generator).sign()
    return Rotation(a, b)


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_native_rotations_are_those_of_torch(instruction_set: str) -> None:
    native = operations_limited_to(instruction_set)
    for d in SIZES:
        rotation, generator = some_rotation(d), torch.Generator().manual_seed(d + 1)
        for num_tokens in (0, 1, 3, 70):  # 70 of the longer ones are shared among threads
            with case(d, num_tokens):
                x = torch.randn((num_tokens, d), generator=generator)
                x[num_tokens // 2 :: 5] = 0
                for found, expected in (
                    (native.rotate(x, rotation), TORCH.rotate(x, rotation)),
                    (native.rotate_back(x, rotation), TORCH.rotate_back(x, rotation)),
                ):
                    # Sums of d terms in another order: a few units in the last place of the largest partial sums.
                    largest = float(expected.abs().max()) if num_tokens else 0.0
                    torch.testing.assert_close(found, expected, rtol=0, atol=3e-6 * largest)


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_what_is_not_finite_stays_seen(instruction_set: str) -> None:
    native = operations_limited_to(instruction_set)
    for bad in (torch.nan, torch.inf):
        x = torch.ones(2, 192)
        x[1, 77] = bad
        y = native.rotate(x, some_rotation(192))
        assert y[0].isfinite().all() and not y[1].isfinite().any()


class RotatedBack(PackWeights):
    """A rotated pack's weights in the coordinates of the source: the inverse of R, by its matrix in 64 bits."""

    def __init__(self, pack: Pack) -> None:
        super().__init__(pack, CPU)
        vectors = pack.rotation
        assert vectors is not None, "a rotated pack"
        self._stored: RotationVectors = vectors
        self._matrix = torch.from_numpy(rotation_matrix(pack.spec.hidden_size))

    def rotation(self, layer_idx: int) -> None:
        return None

    def expert(self, layer_idx: int, expert: int) -> Expert:
        stored = super().expert(layer_idx, expert)
        a, b = (torch.from_numpy(each[layer_idx]).double() for each in (self._stored.input, self._stored.output))
        return _Back(stored, self._matrix * a, self._matrix * b) if a.any() else stored


class _Back:
    def __init__(self, stored: Expert, into: Tensor, out: Tensor) -> None:
        self._stored, self._into, self._out = stored, into, out

    def blocks(self) -> Iterator[NeuronBlock]:
        for block in self._stored.blocks():
            gate, up = (
                None if rows is None else (rows.double() @ self._into).float() for rows in (block.gate, block.up)
            )
            assert up is not None
            down = (block.down.double() @ self._out).float()
            yield NeuronBlock(gate, up, down, block.gate_bias, block.up_bias)

    def down_bias(self) -> Tensor | None:
        bias = self._stored.down_bias()
        return None if bias is None else (bias.double() @ self._out).float()


def answers(decoder: Decoder | EncoderDecoder, ids: list[int]) -> Tensor:
    """The logits after a prompt, and after each of the tokens that follow it."""
    found = [decoder.begin(ids[:NUM_PROMPT])]
    found += [decoder.next_logits([token]) for token in ids[NUM_PROMPT:]]
    return torch.stack(found)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The demo model, rotated: in 16 bit, and in 4 bit with thresholds that leave out most neurons."""
    folder = tmp_path_factory.mktemp("rotated")
    pack(DEMO_MODEL, folder / "whole", width=16, rotate="on")
    pack(DEMO_MODEL, folder / "sparse", group=64, rotate="on")
    with Pack(folder / "sparse") as opened:
        shape = opened.thresholds.shape
    rewrite_thresholds(folder / "sparse", np.full(shape, 0.4, np.float32))
    return {"whole": folder / "whole", "sparse": folder / "sparse"}


@pytest.fixture(scope="module")
def expected(demo: dict[str, Path]) -> dict[str, Tensor]:
    found = {}
    for name, folder in demo.items():
        with Pack(folder) as opened:
            found[name] = answers(Decoder(RotatedBack(opened), CONTEXT), IDS)
    return found


def test_16_bits_rotated_are_the_source_but_for_the_rounding_of_weights(
    demo: dict[str, Path], expected: dict[str, Tensor]
) -> None:
    checkpoint = Checkpoint(DEMO_MODEL)
    source = answers(Decoder(CheckpointWeights(checkpoint), CONTEXT), IDS)
    checkpoint.close()
    with Pack(demo["whole"]) as opened:
        found = answers(Decoder(PackWeights(opened, CPU), CONTEXT), IDS)
    # A weight is rounded by up to 2^-9 of it, at random: some 2^-10 of an expert's output, and four layers amplify it.
    error = (found - source).square().mean().sqrt() / source.square().mean().sqrt()
    assert 0 < error < 2**-7
    torch.testing.assert_close(found, expected["whole"], rtol=0, atol=1e-4)


def test_every_engine_of_the_cpu_gives_the_same_answer(demo: dict[str, Path], expected: dict[str, Tensor]) -> None:
    for name, folder in demo.items():
        with Pack(folder) as opened:
            torch.testing.assert_close(
                answers(Decoder(PackWeights(opened, CPU), CONTEXT), IDS), expected[name], rtol=0, atol=1e-4
            )
            for kernels in ("portable", "auto"):
                with case(name, kernels), Engine(opened, EngineOptions(kernels=kernels), CONTEXT) as engine:
                    torch.testing.assert_close(answers(engine.decoder, IDS), expected[name], rtol=0, atol=1e-4)


def test_experts_that_stream_give_the_same_answer_whatever_predicts(
    demo: dict[str, Path], expected: dict[str, Tensor]
) -> None:
    runs = [("sparse", policy, "auto") for policy in sorted(PRESETS)]
    runs += [("sparse", "floe", "torch"), ("sparse", "importance", "torch"), ("whole", "importance", "auto")]
    for name, policy, kernels in runs:
        with case(name, policy, kernels), Pack(demo[name]) as opened:
            budget = budget_for(opened, 5, CONTEXT)
            options = EngineOptions(budget_bytes=budget, policy=policy, kernels=kernels)  # type: ignore[arg-type]  # literals
            with Engine(opened, options, CONTEXT) as engine:
                assert isinstance(engine.weights, OffloadedWeights)
                torch.testing.assert_close(answers(engine.decoder, IDS), expected[name], rtol=0, atol=1e-4)


def test_a_budget_counts_the_vectors(demo: dict[str, Path]) -> None:
    with Pack(demo["whole"]) as opened:
        assert opened.layout.rotation_bytes > 2 * 4 * 4 * opened.spec.hidden_size
        plain = replace(opened.layout, rotation_bytes=0)
        grown = least_budget(opened.layout, CONTEXT, 0) - least_budget(plain, CONTEXT, 0)
        assert grown == opened.layout.rotation_bytes


OTHERS = (
    Tiny("gpt_oss", "biases of gate, up and down"),
    Tiny("qwen2_moe", "a shared expert, and a layer without others", {"mlp_only_layers": [1]}),
    Tiny("switch_transformers", "an encoder, and no gate"),
)


@pytest.mark.parametrize("model", OTHERS, ids=str)
def test_other_models_give_the_same_answer(model: Tiny, tmp_path: Path) -> None:
    pack(write(model, tmp_path / "source"), tmp_path / "pack", width=16, rotate="on")
    with Pack(tmp_path / "pack") as opened:
        kind = Decoder if opened.spec.encoder is None else EncoderDecoder
        ids = token_ids()[: NUM_PROMPT + 6]
        wanted = answers(kind(RotatedBack(opened), 64), ids)
        plain = answers(kind(PackWeights(opened, CPU), 64), ids)
        torch.testing.assert_close(plain, wanted, rtol=0, atol=1e-4)
        found = answers(kind(open_weights(opened, CPU, operations_limited_to("portable")), 64), ids)
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)


def test_a_pack_of_which_one_layer_is_rotated_gives_the_same_answer(demo: dict[str, Path]) -> None:
    """A layer's vectors set to zero: its stored rows then mean something else, for both alike."""
    with Pack(demo["whole"]) as opened:
        assert opened.rotation is not None
        opened.rotation.input[[0, 2]] = opened.rotation.output[[0, 2]] = 0
        assert opened.rotation.layers(opened.spec) == (1, 3)
        wanted = answers(Decoder(RotatedBack(opened), CONTEXT), IDS)
        found = answers(Decoder(PackWeights(opened, CPU), CONTEXT), IDS)
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)


def test_predictions_are_as_good_as_those_of_a_pack_that_is_not_rotated(demo: dict[str, Path], tmp_path: Path) -> None:
    """Experts are predicted from states as they are, their neurons from states in their layer's coordinates."""
    pack(DEMO_MODEL, tmp_path / "plain", group=64)
    with Pack(tmp_path / "plain") as opened:
        shape = opened.thresholds.shape
    rewrite_thresholds(tmp_path / "plain", np.full(shape, 0.4, np.float32))
    for policy in ("importance", "corm", "floe"):
        found = []
        for folder in (demo["sparse"], tmp_path / "plain"):
            with Pack(folder) as opened:
                budget = budget_for(opened, 9, CONTEXT)
                options = EngineOptions(budget_bytes=budget, policy=policy, cutover=1.0)  # type: ignore[arg-type]  # a literal
                with Engine(opened, options, CONTEXT) as engine:
                    answers(engine.decoder, IDS)
                    assert isinstance(engine.weights, OffloadedWeights)
                    found.append(engine.weights.decode)
        rotated, plain = found
        # Of inputs in the wrong coordinates, a quarter of the experts and a twentieth of the neurons would be right.
        with case(policy):
            expected_share = plain.prefetched_chosen / plain.prefetched
            assert rotated.prefetched_chosen / rotated.prefetched > 0.7 * expected_share
            if plain.running:
                assert rotated.running_predicted / rotated.running > 0.5 * plain.running_predicted / plain.running
