"""The parts of a contest of plans at equal bytes: its bootstrap, its comparators, and what it judges."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from cases import case
from comparators import hqq_plan, pmq_plans, sizes, stored_bytes
from expert_inputs import expert_inputs
from judge import BLOCK_TOKENS, Judge
from llama_experts import llama_types, write_experts
from memory_weights import MatrixQuantizer, MemoryWeights, Parts
from models import BOOK, DEMO_MODEL
from paired_bootstrap import paired_difference
from pmq import PUBLISHED, RELEASED, Factors, measure_factors, pmq_widths

from moe_pack.calib import Tokens, read_tokens
from moe_pack.convert import convert
from moe_pack.formats import MATRICES, Checkpoint, ExpertFormat, Pack
from moe_pack.runtime import CheckpointWeights, Decoder, FolderFiles, NeuronBlock, PackWeights, Text

if TYPE_CHECKING:
    from transformers import MixtralForCausalLM

WIDTHS = (1, 2, 3)


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return Checkpoint(DEMO_MODEL)


@pytest.fixture(scope="module")
def tokens() -> Tokens:
    return read_tokens(str(BOOK), None, Text(FolderFiles(DEMO_MODEL)), 512, 256)


def test_the_bootstrap_gives_the_interval_of_the_normal_law_for_many_blocks() -> None:
    generator = np.random.default_rng(3)
    noise = generator.normal(size=2000)
    found = paired_difference(noise - 0.1, np.zeros(2000))
    error = noise.std() / 2000**0.5  # the standard error of the mean
    assert found.mean == pytest.approx(noise.mean() - 0.1)
    assert found.low == pytest.approx(found.mean - 1.96 * error, abs=0.1 * error)  # 10,000 resamples: quantile +- 2%
    assert found.high == pytest.approx(found.mean + 1.96 * error, abs=0.1 * error)


def test_the_bootstrap_pairs_blocks_so_that_what_they_share_is_no_noise() -> None:
    shared = np.random.default_rng(1).normal(size=100) * 100
    assert paired_difference(shared - 0.01, shared).verdict == "lower"
    assert paired_difference(shared + 0.01, shared).verdict == "behind"


def test_the_bootstrap_does_not_tell_apart_what_chance_explains() -> None:
    difference = np.tile([1.0, -1.0], 50)
    assert paired_difference(difference, np.zeros(100)).verdict == "not told apart"


def test_the_bootstrap_of_one_seed_is_always_the_same() -> None:
    first, second = np.random.default_rng(5).normal(size=(2, 40))
    assert paired_difference(first, second) == paired_difference(first, second)


def brute_force(costs: np.ndarray, sizes: tuple[int, ...], max_bytes: int, needed: tuple[int, ...]) -> float:
    """The least cost of a layer [E, W] over all choices."""
    return min(
        sum(float(expert[choice]) for expert, choice in zip(costs, choices, strict=True))
        for choices in product(range(len(sizes)), repeat=len(costs))
        if sum(sizes[choice] for choice in choices) <= max_bytes and set(needed) <= set(choices)
    )


def test_pmq_finds_the_cheapest_widths_of_every_layer() -> None:
    for needed in [(), (1, 2)]:
        for max_bytes in [1168, 1240, 1400, 1808, 2400]:
            with case(needed, max_bytes):
                costs = np.random.default_rng(max_bytes).random((3, 6, 3))  # not even falling with the width
                width_bytes = (160, 224, 304)
                found = pmq_widths(costs, WIDTHS, width_bytes, max_bytes, tuple(WIDTHS[choice] for choice in needed))
                for layer, widths in zip(costs, found, strict=True):
                    choices = [WIDTHS.index(width) for width in widths.tolist()]
                    assert sum(width_bytes[choice] for choice in choices) <= max_bytes
                    assert set(needed) <= set(choices)
                    cost = sum(float(layer[expert, choice]) for expert, choice in enumerate(choices))
                    assert cost == pytest.approx(brute_force(layer, width_bytes, max_bytes, needed))


def test_pmq_says_when_no_widths_fit() -> None:
    with pytest.raises(ValueError, match="found no choice of widths within 959 bytes a layer"):
        pmq_widths(np.ones((1, 6, 3)), WIDTHS, (160, 224, 304), 959)


def test_pmq_weighs_frequency_router_weight_and_error_by_the_published_exponents() -> None:
    factors = Factors(WIDTHS, np.array([[0.25]]), np.array([[4.0]]), np.array([[[5.0, 3.0, 2.0]]]))
    assert factors.costs(PUBLISHED, (2, 3)).tolist() == [[[0.25 * 8 * 9, 0.25 * 8 * 4]]]
    assert factors.costs(RELEASED, WIDTHS).tolist() == [[[0.25 * 8 * 5, 0.25 * 8 * 3, 0.25 * 8 * 2]]]


@pytest.fixture(scope="module")
def oracle() -> MixtralForCausalLM:
    """The demo model in transformers."""
    from transformers import MixtralForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    return MixtralForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32, local_files_only=True)


@torch.inference_mode()
def last_layer(oracle: MixtralForCausalLM, tokens: Tokens) -> torch.Tensor:
    """The output of the last layer, before the last norm."""
    kept: list[torch.Tensor] = []
    hook = oracle.model.layers[3].register_forward_hook(lambda module, given, output: kept.append(output))
    oracle(torch.from_numpy(tokens.sequences.astype(np.int64)))
    hook.remove()
    return kept[0]


@pytest.mark.slow
def test_pmq_measures_how_the_layer_output_changes_when_one_expert_is_stored(
    checkpoint: Checkpoint, tokens: Tokens, oracle: MixtralForCausalLM
) -> None:
    weights, plan = MemoryWeights(checkpoint), hqq_plan(checkpoint.spec, np.full((4, 8), 2))
    factors = measure_factors(weights, tokens, {2: plan})
    before, stored = last_layer(oracle, tokens), weights.rounded(3, 5, plan)
    experts = oracle.model.layers[3].mlp.experts
    kept = experts.gate_up_proj.data[5].clone(), experts.down_proj.data[5].clone()
    assert stored.gate is not None
    experts.gate_up_proj.data[5] = torch.cat((stored.gate, stored.up))
    experts.down_proj.data[5] = stored.down.T
    change = last_layer(oracle, tokens) - before
    experts.gate_up_proj.data[5], experts.down_proj.data[5] = kept
    assert factors.errors[3, 5, 0] == pytest.approx(float(change.norm()), rel=1e-3)


def test_an_expert_sees_what_it_sees_in_transformers(
    checkpoint: Checkpoint, tokens: Tokens, oracle: MixtralForCausalLM
) -> None:
    seen: list[torch.Tensor] = []
    hook = oracle.model.layers[2].mlp.register_forward_hook(lambda module, given, output: seen.append(given[0]))
    with torch.inference_mode():
        oracle(torch.from_numpy(tokens.sequences.astype(np.int64)))
    hook.remove()
    inputs = [held for held in expert_inputs(MemoryWeights(checkpoint), tokens) if held.layer_idx == 2]
    total = sum(held.weights.sum() for held in inputs)
    assert float(total) == pytest.approx(tokens.sequences.size, rel=1e-5)  # router weights of a token add up to 1
    assert sum(len(held.x) for held in inputs) == 2 * tokens.sequences.size
    found = torch.cat([held.x for held in inputs]).double().sum(dim=0)
    torch.testing.assert_close(found, 2 * seen[0].double().sum(dim=(0, 1)), rtol=1e-4, atol=1e-3)


def test_the_importance_matrix_is_the_mean_square_of_what_each_column_is_multiplied_with(
    checkpoint: Checkpoint, tokens: Tokens, oracle: MixtralForCausalLM, tmp_path: Path
) -> None:
    write_experts(MemoryWeights(checkpoint), tokens, tmp_path)
    seen: list[torch.Tensor] = []
    block = oracle.model.layers[1].mlp
    hook = block.register_forward_hook(lambda module, given, output: seen.append(given[0]))
    with torch.inference_mode():
        oracle(torch.from_numpy(tokens.sequences.astype(np.int64)))
        hook.remove()
        x = seen[0].flatten(0, 1)  # [T, d]
        chosen = (x @ block.gate.weight.T).topk(2, dim=1).indices  # [T, 2]
        x = x[(chosen == 6).any(dim=1)]
        gate, up = (x @ block.experts.gate_up_proj[6].T).chunk(2, dim=1)
        h = torch.nn.functional.silu(gate) * up
    place = 1 * 8 + 6
    for name, expected in (("gate", x), ("up", x), ("down", h)):
        found = np.load(tmp_path / f"{name}-importance.npy")
        np.testing.assert_allclose(found[place], expected.square().mean(dim=0).numpy(), rtol=1e-3)
    np.testing.assert_array_equal(np.load(tmp_path / "down.npy")[place], block.experts.down_proj.data[6].numpy())


@pytest.mark.slow
def test_the_weights_in_memory_predict_what_the_pack_does(
    checkpoint: Checkpoint, tokens: Tokens, tmp_path: Path
) -> None:
    plan = hqq_plan(checkpoint.spec, np.random.default_rng(0).choice((2, 3, 4), (4, 8)))
    judge = Judge(Decoder(CheckpointWeights(checkpoint), 256), tokens)
    weights = MemoryWeights(checkpoint)
    weights.round_to(plan)
    convert(checkpoint, plan, tmp_path / "pack", 1)
    with Pack(tmp_path / "pack") as pack:
        packed = judge.blocks(Decoder(PackWeights(pack, torch.device("cpu")), 256))
        totals = pack.manifest.totals
    found = judge.blocks(Decoder(weights, 256))
    assert found.shape == (tokens.sequences.size // BLOCK_TOKENS,)
    assert found == pytest.approx(packed, rel=1e-3)  # the same weights, sums in another order
    assert found.min() > 0.001, "the plan changes predictions"
    assert stored_bytes(checkpoint.spec, plan) == totals.selectors + totals.records + totals.extra


class Recorded(MatrixQuantizer):
    """Quantizes by absmax, and keeps whom it was asked for."""

    def __init__(self) -> None:
        super().__init__("absmax")
        self.asked: list[tuple[int, int, ExpertFormat]] = []

    def encode(self, layer_idx: int, expert: int, weights: NeuronBlock, formats: ExpertFormat) -> Parts:
        self.asked.append((layer_idx, expert, formats))
        return super().encode(layer_idx, expert, weights, formats)


def test_a_quantizer_of_whole_experts_is_asked_once_for_each_and_its_bytes_are_the_weights(
    checkpoint: Checkpoint,
) -> None:
    plan = hqq_plan(checkpoint.spec, np.random.default_rng(2).choice((2, 4), (4, 8)))
    weights, quantizer = MemoryWeights(checkpoint), Recorded()
    weights.round_to(plan, quantizer)
    weights.round_to(plan, quantizer)
    assert quantizer.asked == [(l, e, plan.experts[l][e]) for l in range(4) for e in range(8)]
    alone, together = weights.rounded(1, 6, plan), weights.rounded(1, 6, plan, quantizer)
    by_absmax = weights.rounded(1, 6, replace(plan, quantizer="absmax"))
    for matrix in MATRICES:
        given, expected = getattr(together, matrix), getattr(by_absmax, matrix)
        torch.testing.assert_close(given, expected, rtol=0, atol=0)
        assert not torch.equal(getattr(alone, matrix), given)


def test_rows_that_blocks_of_256_do_not_divide_leave_llama_the_types_of_blocks_of_32(checkpoint: Checkpoint) -> None:
    spec = checkpoint.spec
    assert (spec.hidden_size, spec.expert.intermediate_size) == (128, 448)
    assert llama_types(spec) == ("MXFP4", "Q4_0", "IQ4_NL")
    wide = replace(spec, hidden_size=256, expert=replace(spec.expert, intermediate_size=768))
    assert {"IQ1_S", "IQ2_XXS", "Q2_K", "IQ3_S", "Q4_K", "IQ4_NL"} < set(llama_types(wide))


def test_pmq_plans_keep_within_the_bytes_and_leave_less_than_an_expert_of_a_layer(checkpoint: Checkpoint) -> None:
    for mean_width in [1.5, 2.0, 2.5, 3.0, 3.5]:
        with case(mean_width):
            spec, shape = checkpoint.spec, (4, 8)
            generator = np.random.default_rng(7)
            errors = np.sort(generator.random((*shape, 5)), axis=2)[:, :, ::-1]  # less at every width more
            factors = Factors((1, 2, 3, 4, 8), generator.random(shape), generator.random(shape), errors)
            lower, upper = (stored_bytes(spec, hqq_plan(spec, np.full(shape, width))) for width in (1, 2))
            max_bytes = int(lower + (mean_width - 1) * (upper - lower))
            plans = pmq_plans(spec, max_bytes, factors)
            assert [name.startswith("pmq, 2 to 8") for name in plans] == {
                1.5: [False, False],
                2.0: [False, False],
                2.5: [False, False, True, True],
                3.0: [True, True],
                3.5: [True, True],
            }[mean_width]
            for plan in plans.values():
                assert max_bytes - 4 * (upper - lower) * 4 / 32 < stored_bytes(spec, plan) <= max_bytes


def test_the_source_has_no_divergence_from_itself(checkpoint: Checkpoint, tokens: Tokens) -> None:
    judge = Judge(Decoder(CheckpointWeights(checkpoint), 256), tokens)
    assert judge.blocks(Decoder(MemoryWeights(checkpoint), 256)) == pytest.approx(0.0, abs=1e-6)


def test_every_plan_of_a_size_takes_its_bytes_and_halves_differ(checkpoint: Checkpoint) -> None:
    for size in sizes(checkpoint.spec, 3):
        assert {stored_bytes(checkpoint.spec, plan) for plan in size.plans.values()} == {size.max_bytes}
        assert len(set(size.plans.values())) == len(size.plans) == (1 if size.mean_width.is_integer() else 3)
