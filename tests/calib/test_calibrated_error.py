"""The cost of calibrated rounding by format: against the expert run whole, and against a model's measurement."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from support.cases import case
from support.families import original
from support.held_experts import HeldExpert
from support.models import TinyMixtral
from support.profiles import profiled, random_tokens
from torch import Tensor

from moe_pack.calib.profile import Profile, ProfileOptions, losses_of
from moe_pack.calib.quantize import Calibration, ExpertQuantizer, ExpertTokens, needs_inputs
from moe_pack.calib.sensitivity import base_width, calibrated_formats
from moe_pack.calib.sensitivity.errors import (
    calibrated_anchor,
    calibrated_ratios,
    judged_columns,
    judged_rows,
    measured_formats,
    plainly_rounded,
)
from moe_pack.formats import BF16, MATRICES, ExpertFormat, Matrix, part_format, trellis_format
from moe_pack.formats.families import Checkpoint
from moe_pack.formats.pack.codecs import decode_part
from moe_pack.formats.pack.plans import TRELLIS_WIDTHS, format_fault, format_text
from moe_pack.runtime.model import CheckpointWeights, NeuronBlock, activations

D, F = 128, 20


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def mixed(num_tokens: int, seed: int) -> Tensor:
    """Tokens whose values hang together, the same way for any seed."""
    return random(num_tokens, D // 4, seed=seed) @ random(D // 4, D, seed=7) / 6 + 0.3 * random(
        num_tokens, D, seed=seed + 1
    )


def held(has_gate: bool = True, num_neurons: int = F) -> HeldExpert:
    gate, up, down = (random(num_neurons, D, seed=i) * 0.1 for i in range(3))
    return HeldExpert(NeuronBlock(gate if has_gate else None, up, down), step=7)


def plain_error(square: Callable[[Tensor], float], rows: Tensor, width: int, exact: Sequence[int] = ()) -> float:
    """The geometric mean of plain rounding at 2, 3 and 4 bits, by the square of the step."""
    logarithms = []
    for each in (2, 3, 4):
        rounded = plainly_rounded(rows, each)
        rounded[list(exact)] = rows[list(exact)]
        logarithms.append(math.log(square(rounded) * (2**each - 1) ** 2))
    return math.exp(sum(logarithms) / 3) / (2**width - 1) ** 2


CALIBRATED_ON = ExpertTokens(mixed(200, seed=20), torch.rand(200, generator=torch.Generator().manual_seed(1)))
JUDGED_ON, WEIGHTS = mixed(30, seed=40), torch.linspace(0, 1, 30)


def ratios(expert: HeldExpert) -> Tensor:
    return calibrated_ratios(expert, "silu", JUDGED_ON, WEIGHTS, CALIBRATED_ON, calibrated_formats(D))


def test_formats_are_trellises_of_every_width_then_affine_codes() -> None:
    names = [format_text(part) for part in calibrated_formats(256)]
    assert names[:4] == [
        "2 bit trellis row",
        "2 bit trellis g128, byte scales",
        "2 bit trellis g32, byte scales",
        "2.5 bit trellis row",
    ]
    assert names[15:19] == ["2 bit row", "2 bit g64, byte scales", "2 bit g32, byte scales", "3 bit row"]
    assert len(set(names)) == len(names) == 27


def test_every_format_holds_such_rows_and_has_more_than_one_group_of_bytes() -> None:
    for num_cols in [64, 128, 192, 7168]:
        with case(num_cols):
            parts = calibrated_formats(num_cols)
            assert all(format_fault(part, num_cols) is None for part in parts)
            assert all(part.scale_bits == 16 or part.num_groups(num_cols) > 1 for part in parts)
            assert trellis_format(4, 0) in parts


def test_a_trellis_is_compared_with_the_width_next_above() -> None:
    widths = [base_width(trellis_format(width, 0)) for width in TRELLIS_WIDTHS]
    assert widths == [2, 3, 3, 4, 4]
    assert [base_width(part_format(width, 0)) for width in (2, 3, 4, 8)] == [2, 3, 4, 8]


@pytest.mark.parametrize("has_gate", [True, False])
def test_ratios_are_those_of_mean_squares_of_the_whole_expert(has_gate: bool) -> None:
    expert = held(has_gate)
    found = ratios(expert)
    whole = expert.whole

    def square(matrix: Matrix, rounded: Tensor) -> float:
        changed = replace(whole, **{matrix: rounded})
        change = activations(JUDGED_ON, changed, "silu").h @ changed.down
        change -= activations(JUDGED_ON, whole, "silu").h @ whole.down
        return float((change * WEIGHTS[:, None]).square().mean())

    for idx, part in enumerate(calibrated_formats(D)):
        formats = ExpertFormat(part if has_gate else None, part, part)
        rows = ExpertQuantizer(formats, Calibration(CALIBRATED_ON, "silu"), D).encode(whole)
        for matrix_idx, matrix in enumerate(MATRICES):
            weights = getattr(whole, matrix)
            if weights is None:
                assert found[matrix_idx, idx] == 1
                continue
            rough = plain_error(partial(square, matrix), weights, base_width(part))
            expected = square(matrix, decode_part(part, D, rows[matrix])) / rough
            # At 8 bits the difference is of outputs that agree to 3 digits: 1e-7 of 1e-3, twice, squared.
            tolerance = 0.02 if part.width == 8 and part.codec == "affine" else 1e-3
            if part not in measured_formats(calibrated_formats(D)):
                tolerance = 0.8  # between those that were measured, of 20 neurons
            assert found[matrix_idx, idx].item() == pytest.approx(expected, rel=tolerance), format_text(part)


def test_calibrated_rounding_loses_less_than_plain_rounding_of_its_width() -> None:
    found, parts = ratios(held()), calibrated_formats(D)
    for part in (trellis_format(4, 0), trellis_format(6, 0), part_format(2, 64, 8), part_format(3, 64, 8)):
        gate, up, down = found[:, parts.index(part)].tolist()
        assert max(gate, up) < 0.8 and down < 1, format_text(part)  # of few neurons little hangs together


def test_no_token_to_judge_on_leaves_ratios_of_one() -> None:
    formats = calibrated_formats(D)
    found = calibrated_ratios(held(), "silu", JUDGED_ON[:0], WEIGHTS[:0], CALIBRATED_ON, formats)
    assert (found == 1).all()


def test_half_of_the_formats_are_measured_and_one_alone_is_as_among_all() -> None:
    formats = calibrated_formats(256)
    assert [format_text(part) for part in measured_formats(formats)] == [
        "2 bit trellis row",
        "2 bit trellis g128, byte scales",
        "2 bit trellis g32, byte scales",
        "4 bit trellis row",
        *(f"{bits} bit {group}" for bits in (2, 4, 8) for group in ("row", "g64, byte scales", "g32, byte scales")),
    ]
    anchor = calibrated_anchor(calibrated_formats(D))
    assert anchor == trellis_format(4, 0)
    alone = calibrated_ratios(held(), "silu", JUDGED_ON, WEIGHTS, CALIBRATED_ON, (anchor,))
    assert torch.equal(alone[:, 0], ratios(held())[:, calibrated_formats(D).index(anchor)])


def test_large_experts_are_judged_on_some_rows_and_down_on_some_columns() -> None:
    assert (judged_rows(4096, 14336), judged_columns(4096, 14336)) == (32, 128)
    assert (judged_rows(7168, 2048), judged_columns(7168, 2048)) == (32, 128)
    assert (judged_rows(256, 768), judged_columns(256, 768)) == (128, 128)
    assert (judged_rows(1024, 256), judged_columns(1024, 256)) == (64, 256)
    assert (judged_rows(64, 48), judged_columns(64, 48)) == (48, 64)


@pytest.mark.slow  # some 8 s: all formats of 600 neurons
def test_of_a_larger_expert_some_rows_and_columns_are_judged() -> None:
    """600 neurons of 512 weights: gate and up on the first 128, down on the first 128 columns of all."""
    generator = torch.Generator().manual_seed(2)
    gate, up, down = (torch.randn(600, 512, generator=generator) / 22 for _ in range(3))
    x, weights = torch.randn(20, 512, generator=generator), torch.ones(20)
    tokens = ExpertTokens(torch.randn(64, 512, generator=generator), torch.ones(64))
    expert = HeldExpert(NeuronBlock(gate, up, down), step=7)
    found = calibrated_ratios(expert, "silu", x, weights, tokens, calibrated_formats(512))
    part = trellis_format(4, 0)
    few, narrow = NeuronBlock(gate[:128], up[:128], down[:128]), NeuronBlock(gate, up, down[:, :128].contiguous())
    for idx, matrix, block in ((0, "gate", few), (1, "up", few), (2, "down", narrow)):
        held = getattr(block, matrix)
        calibration, num_cols = Calibration(tokens, "silu"), held.shape[1]
        quantizer = ExpertQuantizer(ExpertFormat(part, part, part), calibration, num_cols)
        repeats = 4 if matrix == "down" else 0  # of 600 neurons, 1 of 128
        stored = decode_part(part, num_cols, quantizer.rows(matrix, block, repeats=repeats))
        if repeats:
            stored = stored[:600].index_add(0, torch.tensor(quantizer.repeated), stored[600:])

        def square(rounded: Tensor, matrix: str = matrix, block: NeuronBlock = block) -> float:
            changed = replace(block, **{matrix: rounded})
            before = activations(x, block, "silu").h @ block.down
            return float((activations(x, changed, "silu").h @ changed.down - before).square().mean())

        expected = square(stored) / plain_error(square, held, 2, quantizer.repeated)
        assert found[idx, calibrated_formats(512).index(part)].item() == pytest.approx(expected, rel=1e-3)


MODEL, TOKENS = TinyMixtral(num_layers=2, num_experts=5, intermediate_size=128), random_tokens(10, 24, 96)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return MODEL.write(tmp_path_factory.mktemp("model") / "source")


@pytest.fixture(scope="module")
def profile(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Profile:
    """Not rotated, as a profile without inputs is, and as the errors that are compared with it."""
    options = ProfileOptions("fast", rotate="off")
    return profiled(source, tmp_path_factory.mktemp("profiled") / "profile", TOKENS, options)


@pytest.mark.slow
def test_a_profile_with_inputs_estimates_calibrated_formats_and_one_without_what_it_did(
    source: Path, profile: Profile, tmp_path: Path
) -> None:
    with_inputs = losses_of(profile)
    without = losses_of(profiled(source, tmp_path / "without", TOKENS, ProfileOptions("fast", keeps_inputs=False)))
    assert (with_inputs.quantizer, without.quantizer) == ("calibrated", "hqq")
    parts, lost = with_inputs.of("calibrated")
    assert parts == (*calibrated_formats(64), BF16)
    assert lost.shape == (2, 5, 3, len(parts)) and not lost[..., -1].any() and (lost[..., :-1] > 0).all()
    assert without.of("calibrated")[0] == (BF16,)
    for one, other in zip(with_inputs.of("hqq"), without.of("hqq"), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.slow
def test_formats_are_judged_on_tokens_before_those_they_are_calibrated_on(source: Path, profile: Profile) -> None:
    """The first 96 tokens of 8 sequences of 24 judge, the others calibrate. Tokens count as much as their gradients."""
    experts = profile.statistics(1).routes
    popular = int(np.bincount(experts.ravel()).argmax())
    with profile.inputs(1) as opened:
        tokens = opened.of_expert(popular, 96)
        token_idx, place = (opened.experts[:96] == popular).nonzero()
        x, weights = opened.rows(torch.from_numpy(token_idx)), torch.from_numpy(opened.weights[token_idx, place].copy())
    checkpoint = Checkpoint(source)
    expert = CheckpointWeights(checkpoint).expert(1, popular)
    weights *= gradient_sizes(source)[token_idx]
    found = calibrated_ratios(expert, "silu", x, weights, tokens, calibrated_formats(64)).numpy()
    checkpoint.close()
    # The pass has the judged tokens in float32, the file in bfloat16.
    np.testing.assert_allclose(profile.layer_losses(1).calibrated, found, rtol=0.03)


def gradient_sizes(source: Path) -> Tensor:
    """The root mean square of torch's gradient by the last layer's output: [96], of 4 sequences."""
    model, sizes = original(source), list[Tensor]()
    for number, ids in enumerate(torch.from_numpy(np.asarray(TOKENS.sequences[:4], np.int64))):
        embedded = model.get_input_embeddings()(ids[None]).detach().requires_grad_()
        kept: list[Tensor] = []
        hook = model.model.norm.register_forward_pre_hook(lambda _, x, kept=kept: kept.append(x[0]))
        logits = model(inputs_embeds=embedded, use_cache=False).logits[0]
        hook.remove()
        p = logits.detach().softmax(-1)
        v = p.sqrt() * torch.randn(p.shape, generator=torch.Generator().manual_seed(number))
        (gradient,) = torch.autograd.grad(logits, kept[0], v - p * v.sum(-1, keepdim=True))
        sizes.append(gradient[0].square().mean(1).sqrt())
    return torch.cat(sizes)


@pytest.mark.slow
def test_calibrated_losses_are_plain_ones_times_the_ratio(profile: Profile) -> None:
    """Losses are stored multiplied by hqq's ratio of groups of 64 at their width."""
    losses = losses_of(profile)
    solved, parts = losses.formats, calibrated_formats(64)
    layer = profile.layer_losses(1)
    widths = (2, 3, 4, 8)
    assert (layer.repeated < 0.999 * layer.quantized[:, MATRICES.index("down")]).all(), "one of 128 neurons"
    num_less = 0
    for e in profile.statistics(1).tokens.nonzero()[0].tolist():
        for matrix, idx in np.ndindex(3, len(parts)):
            width_idx = widths.index(base_width(parts[idx]))
            hqq = layer.ratios[matrix, solved.index(part_format(widths[width_idx], 64))]
            plain = layer.quantized[e, matrix]
            if MATRICES[matrix] == "down" and needs_inputs(parts[idx]):
                plain = layer.repeated[e]
            expected = plain[width_idx] / hqq * layer.calibrated[matrix, idx]
            found = losses.calibrated[1, e, matrix, idx]
            assert found <= expected * (1 + 1e-5)
            num_less += found < expected * (1 - 1e-5)  # as fewer bits lost less
    assert num_less < 0.1 * 15 * len(parts)


@pytest.mark.slow
def test_in_more_bits_of_the_same_codec_and_groups_nothing_loses_more(profile: Profile) -> None:
    parts, lost = losses_of(profile).of("calibrated")
    kinds: dict[tuple[str, int, int], list[tuple[float, int]]] = {}
    for idx, part in enumerate(parts):
        kinds.setdefault((part.codec, part.group, part.scale_bits), []).append((part.bits, idx))
    assert {len(held) for held in kinds.values()} == {1, 4, 5}
    for held in kinds.values():
        assert (np.diff(lost[..., [idx for _, idx in sorted(held)]], axis=3) <= 0).all()
