"""The benchmark of quality by size: its bootstrap, its judge, llama.cpp's side, and its faults."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from benchlib.judging import (
    BLOCK_TOKENS,
    Difference,
    Judge,
    paired_difference,
    planned,
    predicted_losses,
    stored_bytes,
    uniform,
)
from benchlib.llama import LlamaExperts, experts_with_inputs, llama_types
from quality import Curve, Point
from support.models import DEMO_MODEL, TinyMixtral
from support.profiles import profiled, random_tokens

from moe_pack.calib.profile import Profile, ProfileOptions, losses_of
from moe_pack.convert.pipeline import convert
from moe_pack.formats import Pack, part_format
from moe_pack.formats.families import Checkpoint
from moe_pack.formats.pack.plans import QUANTIZERS, format_text
from moe_pack.runtime.model import CheckpointWeights, Decoder

pytestmark = pytest.mark.slow

if TYPE_CHECKING:  # they take seconds to import
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

TEXT = random_tokens(2, 512, 96)
NUM_FIRST = TEXT.sequences.size // BLOCK_TOKENS // 2  # blocks: the second sequence stands for the other text


# --- the bootstrap


def test_the_bootstrap_gives_the_interval_of_the_normal_law_for_many_blocks() -> None:
    noise = np.random.default_rng(3).normal(size=2000)
    found = paired_difference(noise - 0.1, np.zeros(2000))
    error = noise.std() / 2000**0.5  # the standard error of the mean
    assert found.mean == pytest.approx(noise.mean() - 0.1)
    assert found.low == pytest.approx(found.mean - 1.96 * error, abs=0.1 * error)  # 10,000 resamples: quantile +- 2%
    assert found.high == pytest.approx(found.mean + 1.96 * error, abs=0.1 * error)


def test_the_bootstrap_pairs_blocks_so_that_what_they_share_is_no_noise() -> None:
    shared = np.random.default_rng(1).normal(size=100) * 100
    assert paired_difference(shared - 0.01, shared).verdict == "lower"
    assert paired_difference(shared + 0.01, shared).verdict == "higher"


def test_the_bootstrap_does_not_tell_apart_what_chance_explains_and_repeats_itself() -> None:
    difference = np.tile([1.0, -1.0], 50)
    assert paired_difference(difference, np.zeros(100)).verdict == "not told apart"
    first, second = np.random.default_rng(5).normal(size=(2, 40))
    assert paired_difference(first, second) == paired_difference(first, second)


# --- a small model, judged


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    folder = tmp_path_factory.mktemp("curve")
    model = TinyMixtral(128, 64, num_layers=2, num_experts=4, config={"max_position_embeddings": 512})
    return profiled(model.write(folder / "model"), folder / "profile", TEXT, ProfileOptions("fast"))


@pytest.fixture(scope="module")
def checkpoint(profile: Profile) -> Checkpoint:
    return Checkpoint(profile.folder.parent / "model")


@pytest.fixture(scope="module")
def judge(checkpoint: Checkpoint, profile: Profile) -> Judge:
    return Judge(checkpoint, TEXT, profile)


@pytest.fixture(scope="module")
def curve(judge: Judge, profile: Profile) -> Curve:
    return Curve(judge, profile, NUM_FIRST, 0.25)


def test_the_source_has_no_divergence_from_itself(judge: Judge, checkpoint: Checkpoint) -> None:
    found = judge.blocks(Decoder(CheckpointWeights(checkpoint), 512))
    assert found.shape == (TEXT.sequences.size // BLOCK_TOKENS,)
    assert found == pytest.approx(0.0, abs=1e-6)


def test_the_bytes_of_a_plan_are_those_of_the_packs_experts(checkpoint: Checkpoint, tmp_path: Path) -> None:
    plan = uniform(checkpoint.spec, part_format(3, 64), "hqq")
    convert(checkpoint, plan, tmp_path / "pack", 1)
    with Pack(tmp_path / "pack") as pack:
        totals = pack.manifest.totals
    assert stored_bytes(checkpoint.spec, plan) == totals.selectors + totals.records + totals.extra


def test_a_format_throughout_is_predicted_to_lose_what_all_matrices_lose(profile: Profile) -> None:
    losses = losses_of(profile)
    for quantizer in QUANTIZERS:
        found, (formats, quantized) = predicted_losses(profile, quantizer), losses.of(quantizer)
        assert tuple(found) == formats
        for number, part in enumerate(formats):
            assert found[part] == pytest.approx(sum(quantized[:, :, :, number].ravel().tolist()))


@pytest.mark.slow  # a calibrated conversion for each format
def test_single_formats_are_predicted_to_lose_less_the_more_they_store(curve: Curve, profile: Profile) -> None:
    points = list(curve.formats())
    sizes = [point.num_bytes for point in points]
    assert sizes == sorted(set(sizes))
    assert all(1.5 <= point.bits <= 4.75 for point in points)
    losses = {format_text(part): loss for part, loss in predicted_losses(profile).items()}
    shown = [losses[point.name] for point in points]
    assert shown == sorted(shown, reverse=True) and shown[0] > shown[-1]
    assert points[-1].kl < points[0].kl / 4


@pytest.mark.slow  # a calibrated conversion for each format
def test_our_plans_fill_the_bytes_of_every_quarter_of_a_bit_and_hqq_is_compared_with_them(
    curve: Curve, profile: Profile
) -> None:
    found = {float(point.name.removeprefix("plan of ")): point for point in curve.plans()}
    assert {3.0, 3.25, 3.5, 3.75, 4.0, 4.25, 4.5} <= set(found)
    for bits, point in found.items():
        assert bits - 0.2 < point.bits <= bits
    assert found[4.5].kl < found[4.0].kl < found[3.0].kl
    for point in curve.hqq():
        plan = planned(profile, profile.spec, point.num_bytes)
        assert plan is not None and point.our_kl is not None and point.difference is not None
        assert point.difference.mean == pytest.approx(point.our_kl - point.kl)


def test_each_text_has_a_divergence_of_its_own(curve: Curve, judge: Judge, profile: Profile) -> None:
    blocks = judge.plan(uniform(profile.spec, part_format(2, 64), "hqq"))
    found = next(curve.hqq())
    assert (found.name, found.kl) == ("2 bit", pytest.approx(blocks[:NUM_FIRST].mean()))
    assert found.other_kl == pytest.approx(blocks[NUM_FIRST:].mean()) != pytest.approx(found.kl)
    assert found.kl_error == pytest.approx(1.96 * blocks[:NUM_FIRST].std() / NUM_FIRST**0.5)


# --- llama.cpp's side


def test_rows_that_blocks_of_256_do_not_divide_leave_llama_the_types_of_blocks_of_32() -> None:
    spec = Checkpoint(DEMO_MODEL).spec
    assert (spec.hidden_size, spec.expert.intermediate_size) == (128, 448)
    assert llama_types(128, 448) == ("MXFP4", "Q4_0", "IQ4_NL")


def matches(found: dict[str, np.ndarray], x: torch.Tensor, block: "MixtralSparseMoeBlock") -> bool:
    """Whether these are the mean squares over the tokens [T, d] of a sequence that go to the last expert."""
    chosen = (x @ block.gate.weight.T).topk(2, dim=1).indices  # [T, 2]
    x = x[(chosen == 3).any(dim=1)]
    gate, up = (x @ block.experts.gate_up_proj[3].T).chunk(2, dim=1)
    h = torch.nn.functional.silu(gate) * up
    expected = {"gate": x, "up": x, "down": h}
    return all(np.allclose(found[name], y.square().mean(dim=0).numpy(), rtol=1e-2) for name, y in expected.items())


@torch.inference_mode()
def test_the_importance_matrix_is_the_mean_square_of_what_each_column_is_multiplied_with(
    checkpoint: Checkpoint, profile: Profile, tmp_path: Path
) -> None:
    from transformers import MixtralForCausalLM
    from transformers.utils.logging import disable_progress_bar

    LlamaExperts(experts_with_inputs(checkpoint, profile), "silu", Path("python"), None, tmp_path)
    disable_progress_bar()
    oracle = MixtralForCausalLM.from_pretrained(profile.folder.parent / "model", dtype=torch.float32)
    assert profile.facts.text.num_kept == 1, "of the two sequences"
    block, place, seen = oracle.model.layers[1].mlp, 1 * 4 + 3, list[torch.Tensor]()
    block.register_forward_hook(lambda module, given, output: seen.append(given[0]))
    oracle(torch.from_numpy(TEXT.sequences.astype(np.int64)))
    found = {name: np.load(tmp_path / f"{name}-importance.npy")[place] for name in ("gate", "up", "down")}
    assert any(matches(found, x, block) for x in seen[0])
    np.testing.assert_array_equal(np.load(tmp_path / "down.npy")[place], block.experts.down_proj[3].numpy())


# --- faults and the picture


def point(series: str, name: str, bits: float, kl: float, low: float | None = -2.0, high: float = -1.0) -> Point:
    difference = None if low is None else Difference((low + high) / 2, low, high)
    is_ours = series.startswith("moe-pack")
    return Point(series, name, 4_500, bits, kl, 0.001, None, None, is_ours, our_kl=0.003, difference=difference)


def test_a_point_that_ours_is_not_below_is_a_fault() -> None:
    assert point("llama.cpp", "Q4_K", 4.5, 0.004).fault() is None
    for low, high, verdict in ((-0.002, 0.001, "not told apart"), (0.001, 0.002, "higher")):
        fault = point("llama.cpp", "Q4_K", 4.5, 0.004, low, high).fault()
        assert fault == f"llama.cpp, Q4_K, 4.500 bits: {verdict}, lower expected"
    assert point("llama.cpp", "IQ1_M", 1.75, 0.05, None).fault() is not None
    assert point("llama.cpp", "IQ1_S", 1.5625, 0.05, None).fault() is None, "below the range"
    assert point("moe-pack, plans", "plan of 2", 2, 0.05, None).fault() is None
