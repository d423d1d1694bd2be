"""The benchmark of real experts: its errors, what it compares with what, and its command on a small file."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from real_experts import Loss, compared, errors, main, output, read_experts
from safetensors.torch import save_file

D, F = 128, 64
OTHERS = ("HQQ, 2 bit", "HQQ, 3 bit", "HQQ, 4 bit")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Two layers of random experts; the second has a single huge weight in down, and a token that meets it."""
    generator, tensors = torch.Generator().manual_seed(0), dict[str, torch.Tensor]()
    for layer in (3, 20):
        for name, rows in (("gate", F), ("up", F), ("down", F), ("calibration", 200), ("test", 50)):
            tensors[f"layer-{layer}.{name}"] = torch.randn(rows, D, generator=generator).bfloat16()
        tensors[f"layer-{layer}.down"] *= 0.02
    tensors["layer-20.down"][7, 9] = 8.0
    save_file(tensors, tmp_path / "experts.safetensors")
    return tmp_path / "experts.safetensors"


def run(file: Path, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["--experts", str(file), "--json", *arguments])


def test_an_error_is_that_of_all_tokens_and_of_the_median_token() -> None:
    y, expected = np.random.default_rng(0).normal(size=(2, 9, 4))
    wrong, squares = ((values**2).sum(axis=1) for values in (y - expected, expected))
    found = errors(torch.from_numpy(y).float(), torch.from_numpy(expected).float())
    assert found == pytest.approx((wrong.sum() / squares.sum(), np.median(wrong / squares)))


def test_an_expert_is_read_with_down_transposed_and_computes_swiglu(file: Path) -> None:
    expert = read_experts(file)[1]
    assert expert.layer == 20 and expert.weights.gate is not None
    gate, up, down, x = (
        values.double() for values in (expert.weights.gate, expert.weights.up, expert.weights.down, expert.test)
    )
    z = gate @ x[0]
    expected = down.T @ (z / (1 + (-z).exp()) * (up @ x[0]))
    assert torch.allclose(output(expert.weights, expert.test)[0].double(), expected, rtol=1e-4, atol=1e-4)


def test_a_type_is_compared_with_our_largest_format_of_at_most_its_bits() -> None:
    ours = [Loss(1, f"{bits}", bits, 1 / bits, 0.0, is_ours=True) for bits in (2.0, 3.0)]
    others = [Loss(1, "other", bits, 0.4, 0.0, is_ours=False) for bits in (1.9, 2.9, 3.0)]
    found = compared([*others, *ours, Loss(2, "elsewhere", 2.0, 0.1, 0.0, is_ours=True)])
    assert [(x.bits, x.our_bits) for x in found if x.stored_as == "other"] == [(1.9, None), (2.9, 2.0), (3.0, 3.0)]
    faults = [x.fault() for x in found]
    assert [x for x in faults if x] == ["layer 1, other: 0.40000, ours of 2.00 bits 0.50000"]
    assert replace(found[2], our_error=found[2].error).fault() is not None, "equal is not lower"


def test_more_bits_lose_less_and_bits_are_those_of_whole_rows(file: Path) -> None:
    result = run(file)
    facts = json.loads(result.stdout)
    losses = facts["losses"]
    lost = [x for x in losses if x["our_error"] is not None and not x["our_error"] < x["error"]]
    assert (result.exit_code, len(facts["faults"])) == (int(bool(lost)), len(lost)), result.output
    for layer in (3, 20):
        mine = [x for x in losses if x["layer"] == layer and x["is_ours"]]
        two, _, three, _, four = (x["error"] for x in mine)  # half a bit is within chance in so small an expert
        assert two > three > four
        assert two < 0.4  # three roundings of 0.08 each, and chance
        for x, bits in zip(mine, (2, 2.5, 3, 3.5, 4), strict=True):
            codes = D * bits / 8
            end = 2 * (-(-codes // 16) * 16) + codes + 3 * 2 + 4  # codes from multiples of 16 on, scales, a CRC
            assert x["bits"] == pytest.approx(8 * (-(-end // 16) * 16) / (3 * D))
        others = [x for x in losses if x["layer"] == layer and not x["is_ours"]]
        assert [x["stored_as"] for x in others] == [f"{name} g64" for name in OTHERS]


def test_a_file_without_a_tensor_is_refused(file: Path, tmp_path: Path) -> None:
    save_file({"layer-1.gate": torch.zeros(F, D)}, tmp_path / "other.safetensors")
    result = run(tmp_path / "other.safetensors")
    assert result.exit_code == 1
    assert "layer-1.calibration, layer-1.down, layer-1.test, layer-1.up is missing" in result.output
