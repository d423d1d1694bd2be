"""`verify --against`: a pack against its source, by weights and by logits."""

import math
from pathlib import Path

import pytest
import torch
from support.models import TinyMixtral, pack

from moe_pack.convert import compare_logits, compare_weights, same_tensors
from moe_pack.convert.verify import logits_error
from moe_pack.formats import Pack, PackError
from moe_pack.formats.families import Checkpoint

SHAPE = TinyMixtral(num_layers=2, intermediate_size=80)


def compared(source: Path, folder: Path) -> dict[tuple[str, str], float]:
    checkpoint = Checkpoint(source)
    try:
        with Pack(folder) as opened:
            same_tensors(opened, checkpoint)
            return {(m.matrix, m.stored_as): m.relative for m in compare_weights(opened, checkpoint)}
    finally:
        checkpoint.close()


def test_a_16_bit_pack_has_every_weight_of_its_source(tmp_path: Path) -> None:
    pack(SHAPE.write(tmp_path / "source"), tmp_path / "packed", width=16)
    found = compared(tmp_path / "source", tmp_path / "packed")
    assert found == {(matrix, "bf16"): 0.0 for matrix in ("dense", "gate", "up", "down")}


def test_errors_shrink_with_the_width_and_are_those_of_the_weights(tmp_path: Path) -> None:
    source = SHAPE.write(tmp_path / "source")
    means = []
    for width in (1, 2, 3, 4, 8):
        pack(source, tmp_path / str(width), width=width)
        means.append(compared(source, tmp_path / str(width))["gate", f"{width} bit g16"])
    assert means == sorted(means, reverse=True)
    assert 0 < means[-1] < 0.01 < means[0] < 1.5


@pytest.mark.parametrize("hidden_size", [64, 512])
def test_one_bit_hqq_over_whole_rows_is_still_known_for_its_source(hidden_size: int, tmp_path: Path) -> None:
    """One bit a weight keeps little over long rows, but more than chance."""
    source = TinyMixtral(hidden_size=hidden_size, intermediate_size=80).write(tmp_path / "source")
    pack(source, tmp_path / "packed", width=1, group=0, dense_width=1, quantizer="hqq")
    assert compared(source, tmp_path / "packed")["gate", "1 bit row"] > 0.5


def test_quantized_dense_matrices_are_compared_too(tmp_path: Path) -> None:
    source = SHAPE.write(tmp_path / "source")
    pack(source, tmp_path / "packed", dense_width=8)
    found = compared(source, tmp_path / "packed")
    assert 0 < found["dense", "8 bit g16"] < 0.01
    assert found["dense", "bf16"] == 0  # routers


@pytest.mark.parametrize("width", [1, 4, 16])
def test_a_checkpoint_of_the_same_shape_with_other_experts_is_told_apart(width: int, tmp_path: Path) -> None:
    source, other = SHAPE.write(tmp_path / "source"), tmp_path / "other"
    name = "model.layers.1.block_sparse_moe.experts.1.w1.weight"
    SHAPE.write(other, lambda tensors: tensors.update({name: tensors[name].flip(0).contiguous()}))
    pack(source, tmp_path / "packed", width=width)
    with pytest.raises(PackError, match=rf"^layer 1 expert 1: gate does not match the checkpoint's '{name}'$"):
        compared(other, tmp_path / "packed")


def test_another_dense_weight_is_told_apart(tmp_path: Path) -> None:
    source, other = SHAPE.write(tmp_path / "source"), tmp_path / "other"
    SHAPE.write(other, lambda tensors: tensors["model.norm.weight"][7].fill_(2))
    pack(source, tmp_path / "packed")
    with pytest.raises(
        PackError, match=r"^dense.safetensors: norm: does not match the checkpoint's 'model.norm.weight'$"
    ):
        compared(other, tmp_path / "packed")


def test_a_checkpoint_with_other_tensors_is_refused_by_name(tmp_path: Path) -> None:
    pack(SHAPE.write(tmp_path / "source"), tmp_path / "packed")
    other = TinyMixtral(num_layers=2, intermediate_size=64).write(tmp_path / "other")
    with pytest.raises(PackError, match=r"experts.0.w1.weight' is BF16 \[64, 64\] there and BF16 \[80"):
        compared(other, tmp_path / "packed")


def test_logits_of_a_16_bit_pack_are_the_sources(tmp_path: Path) -> None:
    source = SHAPE.write(tmp_path / "source")
    pack(source, tmp_path / "packed", width=16)
    checkpoint = Checkpoint(source)
    with Pack(tmp_path / "packed") as opened:
        error = compare_logits(opened, checkpoint, list(range(60)))
    checkpoint.close()
    assert (error.num_tokens, error.agreement) == (60, 1.0)
    assert error.largest < 1e-4
    assert abs(error.kl) < 1e-9


def test_kl_and_agreement_are_those_worked_by_hand() -> None:
    source, packed = (
        torch.log(torch.tensor([[0.5, 0.5], [0.9, 0.1]])),
        torch.log(torch.tensor([[0.75, 0.25], [0.1, 0.9]])),
    )
    error = logits_error(source, packed)
    by_hand = [
        0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25),
        0.9 * math.log(9) + 0.1 * math.log(1 / 9),
    ]
    assert error.kl == pytest.approx(sum(by_hand) / 2, rel=1e-6)
    assert error.agreement == 0.5
    assert error.largest == pytest.approx(math.log(9), rel=1e-6)
