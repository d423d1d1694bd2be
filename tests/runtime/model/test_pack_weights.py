"""An expert's blocks from its bytes: biases, experts of two matrices, and blocks of any size."""

from itertools import product

import numpy as np
import pytest
import torch
from support.cases import case

from moe_pack.formats import BF16, ExpertFormat, ExpertSpec, Matrix, Selector
from moe_pack.formats.pack.layouts import expert_layout, write_rows
from moe_pack.runtime.model import PackedExpert
from moe_pack.runtime.model.compute.operations import MAX_DECODED_BYTES, row_blocks

D, F = 64, 7


def section(weights: torch.Tensor, bias: torch.Tensor | None) -> np.ndarray:
    raw = weights.to(torch.bfloat16).view(torch.uint8)
    parts = [raw] if bias is None else [raw, bias.view(torch.uint8).view(F, 4)]
    return torch.cat(parts, dim=1).numpy()


def packed(selector: Selector, matrices: tuple[Matrix, ...], bias: tuple[Matrix, ...]) -> tuple[PackedExpert, dict]:
    spec = ExpertSpec("silu", F, matrices, bias, 0)
    layout = expert_layout(ExpertFormat(BF16 if "gate" in matrices else None, BF16, BF16), selector, spec, D)
    generator = torch.Generator().manual_seed(1)
    weights = {m: torch.randn(F, D, generator=generator).to(torch.bfloat16).float() for m in matrices}
    biases = {m: torch.randn(F, generator=generator) for m in bias}
    sections = {m: section(weights[m], biases.get(m)) for m in matrices}
    extent = np.zeros(layout.num_bytes, np.uint8)
    if layout.selector:
        write_rows(layout.selector, sections, extent[: layout.selector_bytes].reshape(F, -1))
    write_rows(layout.records, sections, extent[layout.selector_bytes :].reshape(F, -1))
    return PackedExpert(layout, torch.from_numpy(extent)), {"weights": weights, "biases": biases}


def test_weights_and_biases_come_back_from_wherever_they_lie() -> None:
    for selector, bias in product(["up", "gate", "both", "none"], [(), ("gate",), ("up",), ("gate", "up")]):
        with case(selector, bias):
            expert, expected = packed(selector, ("gate", "up", "down"), bias)
            (block,) = expert.blocks()
            assert block.gate is not None
            for matrix, found in (("gate", block.gate), ("up", block.up), ("down", block.down)):
                assert torch.equal(found, expected["weights"][matrix])
            for matrix, found_bias in (("gate", block.gate_bias), ("up", block.up_bias)):
                if matrix in bias:
                    assert found_bias is not None
                    assert torch.equal(found_bias, expected["biases"][matrix])
                else:
                    assert found_bias is None


@pytest.mark.parametrize("selector", ["up", "none"])
def test_an_expert_of_two_matrices_has_no_gate(selector: Selector) -> None:
    expert, expected = packed(selector, ("up", "down"), ("up",))
    (block,) = expert.blocks()
    assert block.gate is None
    assert torch.equal(block.up, expected["weights"]["up"])
    assert torch.equal(block.down, expected["weights"]["down"])


def test_blocks_cover_all_rows_within_16_mib() -> None:
    for num_rows, num_cols, parts in [(14336, 4096, 3), (1, 64, 1), (5, 1 << 23, 1), (2049, 4096, 1)]:
        with case(num_rows, num_cols, parts):
            blocks = list(row_blocks(num_rows, num_cols, parts))
            assert [row for start, stop in blocks for row in range(start, stop)] == list(range(num_rows))
            for start, stop in blocks:
                assert 4 * num_cols * parts * (stop - start) <= MAX_DECODED_BYTES or stop - start == 1
