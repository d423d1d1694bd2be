"""The guard of calibrated rounding: which tokens judge, what it takes, and the loss that it reports."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from support.cases import case
from torch import Tensor

from moe_pack.calib.quantize import Calibration, ExpertLoss, ExpertQuantizer, ExpertTokens, GuardedQuantizer
from moe_pack.calib.quantize.gptq import damping, square_quantizer
from moe_pack.formats import MATRICES, ExpertFormat, Matrix, PartFormat, part_format, trellis_format
from moe_pack.formats.pack.codecs import decode_part
from moe_pack.runtime.model import NeuronBlock, activations

D, N, TOKENS = 128, 40, 320
PARTS = [trellis_format(4, 0), part_format(2, 64)]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def block_of(seed: int = 0) -> NeuronBlock:
    return NeuronBlock(*(0.1 * random(N, D, seed=seed + i) for i in range(3)))


def judges(num_tokens: int) -> Tensor:
    return torch.arange(num_tokens) % 8 == 7


def honest() -> ExpertTokens:
    """Tokens that calibrate and tokens that judge are alike: few directions matter."""
    inputs = random(TOKENS, 16) @ random(16, D, seed=1) + 0.3 * random(TOKENS, D, seed=2)
    return ExpertTokens(inputs, 0.5 + random(TOKENS, seed=3).abs())


def lying() -> ExpertTokens:
    """Tokens that judge go in directions that those that calibrate never had."""
    tokens, hidden = honest(), random(4, D, seed=9)
    inputs = tokens.inputs.clone()
    inputs[judges(TOKENS)] = 5 * random(int(judges(TOKENS).sum()), 4, seed=8) @ hidden
    return ExpertTokens(inputs, tokens.weights)


def alike(part: PartFormat) -> ExpertFormat:
    return ExpertFormat(part, part, part)


def matrix_of(block: NeuronBlock, matrix: Matrix) -> Tensor:
    weights = {"gate": block.gate, "up": block.up, "down": block.down}[matrix]
    assert weights is not None
    return weights


def hidden(x: Tensor, block: NeuronBlock) -> Tensor:
    """The activations h of a block in float64, [T, N]."""
    x, gate, up = x.double(), matrix_of(block, "gate").double(), block.up.double()
    g = x @ gate.T
    return g * torch.sigmoid(g) * (x @ up.T)


def row_losses(tokens: ExpertTokens, weights: Tensor, rounded: Tensor) -> list[float]:
    losses = []
    for error in weights.double() - rounded.double():
        losses.append(
            sum(float(s) * float(error @ x.double()) ** 2 for x, s in zip(tokens.inputs, tokens.weights, strict=True))
        )
    return losses


def block_loss(tokens: ExpertTokens, block: NeuronBlock, stored: NeuronBlock, rounded: Tensor) -> float:
    lost = hidden(tokens.inputs, block) @ block.down.double() - hidden(tokens.inputs, stored) @ rounded.double()
    return float(tokens.weights.double() @ lost.square().sum(dim=1))


def guarded(part: PartFormat, tokens: ExpertTokens, block: NeuronBlock) -> tuple[dict[Matrix, Tensor], ExpertLoss]:
    quantizer = GuardedQuantizer(alike(part), tokens, "silu")
    made = {matrix: quantizer.rows(matrix, block) for matrix in MATRICES}
    quantizer.judge(block, made)
    loss = quantizer.loss()
    assert loss is not None
    return made, loss


def stored_block(part: PartFormat, block: NeuronBlock, made: dict[Matrix, Tensor]) -> NeuronBlock:
    """The block with gate and up as a reader finds them."""
    return replace(block, gate=decode_part(part, D, made["gate"]), up=decode_part(part, D, made["up"]))


def calibrated(
    part: PartFormat, tokens: ExpertTokens, block: NeuronBlock, made: dict[Matrix, Tensor]
) -> dict[Matrix, Tensor]:
    """Without the guard, but for the gate and up for which down makes up."""
    quantizer = ExpertQuantizer(alike(part), Calibration(tokens.divided()[0], "silu"), D)
    stored = stored_block(part, block, made)
    return {"gate": quantizer.rows("gate", block), "up": quantizer.rows("up", block)} | {
        "down": quantizer.rows("down", block, stored)
    }


def plain(part: PartFormat, weights: Tensor) -> Tensor:
    quantizer = square_quantizer(part, D)
    return quantizer.encode(weights, quantizer.scales(weights))[0]


def test_every_eighth_token_of_its_own_judges_and_all_others_calibrate() -> None:
    inputs = torch.arange(200.0)[:, None].expand(200, D)
    calibrating, judging = ExpertTokens(inputs, torch.arange(200.0), 40).divided()
    assert judging.inputs[:, 0].tolist() == judging.weights.tolist() == list(range(7, 160, 8))
    assert judging.num_others == 0 and calibrating.num_others == 40
    both = torch.cat((calibrating.inputs, judging.inputs))[:, 0]
    assert sorted(both.tolist()) == list(range(200)) and len(judging.weights) == 20


def test_an_expert_of_few_tokens_is_judged_on_others_too() -> None:
    for num_own, expected in [(0, [7, 15]), (5, [12, 20]), (16, [7, 15, 23, 31])]:
        with case(num_own):
            tokens = ExpertTokens(torch.zeros(num_own + 16, D), torch.arange(num_own + 16.0), 16)
            calibrating, judging = tokens.divided()
            assert judging.weights.tolist() == expected
            assert judging.num_others == 2 and calibrating.num_others == 14


def test_no_tokens_or_tokens_without_weight_judge_nothing() -> None:
    block, part = block_of(), PARTS[0]
    for tokens in (ExpertTokens(random(3, D), torch.ones(3)), ExpertTokens(random(TOKENS, D), torch.zeros(TOKENS))):
        quantizer = GuardedQuantizer(alike(part), tokens, "silu")
        made = {matrix: quantizer.rows(matrix, block) for matrix in MATRICES}
        quantizer.judge(block, made)
        assert quantizer.loss() is None
        for matrix, rows in calibrated(part, tokens, block, made).items():
            assert torch.equal(made[matrix], rows)


def test_of_a_calibration_that_holds_nothing_falls_back() -> None:
    for part in PARTS:
        with case(part):
            made, loss = guarded(part, honest(), block_of())
            assert (loss.plain_gate, loss.plain_up, loss.plain_down) == (0, 0, 0)
            for matrix, rows in calibrated(part, honest(), block_of(), made).items():
                assert torch.equal(made[matrix], rows)


def test_each_row_and_block_that_calibration_makes_worse_is_rounded_plainly() -> None:
    for part in PARTS:
        with case(part):
            block, tokens = block_of(), lying()
            judging = tokens.divided()[1]
            made, loss = guarded(part, tokens, block)
            given = calibrated(part, tokens, block, made)
            for matrix, fallen in (("gate", loss.plain_gate), ("up", loss.plain_up)):
                weights = matrix_of(block, matrix)
                mine, theirs, plainly = (
                    row_losses(judging, weights, decode_part(part, D, rows))
                    for rows in (made[matrix], given[matrix], plain(part, weights))
                )
                # A row whose calibrated rounding loses less than half of what a plain one is expected to is kept.
                better = [p < c for c, p in zip(theirs, plainly, strict=True)]
                assert N / 4 < fallen <= sum(better)
                assert sum(mine) < 0.8 * sum(theirs) and sum(mine) <= sum(plainly)
                for row in range(N):
                    assert mine[row] in (theirs[row], plainly[row]) and mine[row] <= theirs[row]
            losses = [
                block_loss(judging, block, stored_block(part, block, made), decode_part(part, D, rows))
                for rows in (made["down"], given["down"], plain(part, block.down))
            ]
            assert losses[0] == min(losses[1:])
            assert loss.plain_down == (losses[2] < losses[1])


def test_down_makes_up_for_the_errors_of_gate_and_up() -> None:
    """By the same least squares, of damped rows; rounded, they lose less on the tokens that calibrate."""
    for part in PARTS:
        with case(part):
            block, tokens = block_of(), honest()
            calibrating, _ = tokens.divided()
            made, _ = guarded(part, tokens, block)
            stored = stored_block(part, block, made)
            calibration = Calibration(calibrating, "silu")
            fitted = calibration.down(block, stored).weights
            g, h = hidden(calibrating.inputs, stored), hidden(calibrating.inputs, block)
            s = calibrating.weights.double() / calibrating.weights.double().sum()
            moments = g.T @ (g * s[:, None])
            ridge = 3 * damping(calibrating.weights, N) * float(moments.diagonal().mean())
            # The same as rows under g: sqrt(s) g, and sqrt(r) I with the rows of down themselves.
            rows = torch.cat((g * s.sqrt()[:, None], torch.eye(N).double() * ridge**0.5))
            wanted = torch.cat((h @ block.down.double() * s.sqrt()[:, None], block.down.double() * ridge**0.5))
            best = torch.linalg.lstsq(rows, wanted).solution
            torch.testing.assert_close(fitted.double(), best, rtol=1e-3, atol=1e-4)
            alone = ExpertQuantizer(alike(part), calibration, D).rows("down", block)
            losses = [block_loss(calibrating, block, stored, decode_part(part, D, x)) for x in (made["down"], alone)]
            assert losses[0] < 0.95 * losses[1]


def test_the_loss_is_that_of_all_matrices_together_as_they_are_stored() -> None:
    for part, tokens in product(PARTS, (honest(), lying())):
        with case(part):
            blocks = [block_of(), block_of(50)]
            quantizer, judging = GuardedQuantizer(alike(part), tokens, "silu"), tokens.divided()[1]
            y, stored_y = torch.zeros(40, D).double(), torch.zeros(40, D).double()
            for block in blocks:
                made = {matrix: quantizer.rows(matrix, block) for matrix in MATRICES}
                quantizer.judge(block, made)
                stored = NeuronBlock(*(decode_part(part, D, made[matrix]) for matrix in MATRICES))
                y += hidden(judging.inputs, block) @ block.down.double()
                stored_y += hidden(judging.inputs, stored) @ stored.down.double()
            loss = quantizer.loss()
            assert loss is not None and loss.num_tokens == 40
            lost, squares = (y - stored_y).square().sum(dim=1), y.square().sum(dim=1)
            weights = judging.weights.double()
            expected = float((weights * lost).sum() / (weights * squares).sum())
            assert loss.relative_error == pytest.approx(expected, rel=2e-3)  # four digits are kept
            assert loss.median_error == pytest.approx(float((lost / squares).median()), rel=2e-3)


def test_expected_errors_of_plain_rows_are_near_the_real_ones() -> None:
    for part in [*PARTS, trellis_format(6, 0), part_format(4, 32)]:
        with case(part):
            weights, quantizer = 0.1 * random(64, D), square_quantizer(part, D)
            weights[:8, 5] = 2.0  # huge weights
            scales = quantizer.scales(weights)
            expected = quantizer.expected_errors(weights, scales)
            real = (quantizer.encode(weights, scales)[1] - weights).square().sum(dim=1)
            assert 0.85 < float(expected[8:].sum() / real[8:].sum()) < 1.15
            assert 0.7 < float(expected[:8].sum() / real[:8].sum()) < 2  # a huge weight is one draw


# --- inputs behind stored layers


def shifted(tokens: ExpertTokens, judged_shift: Tensor | None = None) -> ExpertTokens:
    """The same tokens behind stored layers: smaller, and with errors in a few directions.

    `judged_shift` float32 [d, d]: the errors of tokens that judge, in place of those that the others have.
    """
    mixing = 0.2 * random(D, 8, seed=21) @ random(8, D, seed=22) / 8
    stored = 0.9 * tokens.inputs + tokens.inputs @ mixing
    if judged_shift is not None:
        judging = judges(len(stored))
        stored[judging] = tokens.inputs[judging] @ judged_shift
    return replace(tokens, stored=stored)


@pytest.mark.parametrize("part", PARTS)
def test_rows_make_up_for_a_part_of_what_earlier_layers_lose(part: PartFormat) -> None:
    block = block_of(5)
    tokens = shifted(honest())
    judging = tokens.divided()[1]
    losses: list[ExpertLoss] = []
    for given in (tokens, replace(tokens, inputs=tokens.given)):  # the second does not know what is missing
        quantizer = GuardedQuantizer(alike(part), given, "silu")
        rows = {matrix: quantizer.rows(matrix, block) for matrix in MATRICES}
        judged = GuardedQuantizer(alike(part), tokens, "silu")
        judged.judge(block, rows)
        found = judged.loss()
        assert found is not None
        losses.append(found)
    y, inherited = (
        activations(x, block, "silu").h.double() @ block.down.double() for x in (judging.inputs, judging.given)
    )
    s = judging.weights.double()
    share = float(s @ (inherited - y).square().sum(dim=1)) / float(s @ y.square().sum(dim=1))
    assert losses[0].inherited_error == pytest.approx(share, rel=1e-3)
    assert losses[0].relative_error < 0.97 * losses[1].relative_error


def test_no_step_is_made_that_tokens_that_judge_deny() -> None:
    block, part = block_of(5), trellis_format(4, 0)
    for opposed, moves in ((None, True), (1.3 * torch.eye(D), False)):  # the others are smaller, these larger
        tokens = shifted(honest(), opposed)
        quantizer = GuardedQuantizer(alike(part), tokens, "silu")
        rows = quantizer.rows("up", block)
        plain = GuardedQuantizer(alike(part), replace(tokens, inputs=tokens.given), "silu").rows("up", block)
        assert torch.equal(rows, plain) != moves
