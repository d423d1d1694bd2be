"""Weights read from a pack whenever asked for are those of a pack in memory, bit for bit."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.families import Tiny, write
from support.models import TinyMixtral, pack

from moe_pack.formats import Pack, PackError, dense_roles
from moe_pack.runtime.model import Decoder, PackWeights, StreamedPackWeights, activations

CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=[None, 8, 4, 3], ids=["16 bit", "8 bit", "4 bit", "3 bit"])
def packed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pack]:
    """A pack with a shared expert, biases and a dense layer, its dense matrices in this width."""
    folder = tmp_path_factory.mktemp("packed")
    tiny = Tiny("qwen2_moe", "shared expert, biases, a dense layer", {"mlp_only_layers": [1]})
    pack(write(tiny, folder / "source"), folder / "pack", dense_width=request.param)
    with Pack(folder / "pack") as opened:
        yield opened


def test_vectors_are_equal(packed: Pack) -> None:
    streamed, whole = StreamedPackWeights(packed, CPU), PackWeights(packed, CPU)
    roles = [role.name for role in dense_roles(packed.spec) if len(role.shape) == 1]
    assert any("bias" in role for role in roles) and any("norm" in role for role in roles)
    for role in roles:
        found = streamed.vector(role)
        assert found.dtype == torch.float32 and torch.equal(found, whole.vector(role)), role


def test_rows_of_matrices_are_equal_streamed_or_loaded(packed: Pack) -> None:
    streamed, whole = StreamedPackWeights(packed, CPU), PackWeights(packed, CPU)
    for role in (role for role in dense_roles(packed.spec) if len(role.shape) == 2):
        expected = whole.matrix(role.name)
        for found in (streamed.matrix(role.name), streamed.load(role.name)):
            assert (found.num_rows, found.num_cols) == (expected.num_rows, expected.num_cols) == role.shape
            n = found.num_rows
            for start, stop in {(0, 1), (0, n), (n // 2, n), (n - 1, n)}:
                rows = found.rows(start, stop)
                assert rows.dtype == torch.float32 and rows.shape == (stop - start, found.num_cols)
                assert torch.equal(rows, expected.rows(start, stop)), role.name


def test_experts_and_thresholds_are_equal(packed: Pack) -> None:
    streamed, whole = StreamedPackWeights(packed, CPU), PackWeights(packed, CPU)
    assert (streamed.spec, streamed.selector) == (whole.spec, whole.selector)
    x = torch.randn(3, packed.spec.hidden_size, generator=torch.Generator().manual_seed(1))
    for layer_idx in range(len(packed.spec.moe_layers)):
        for expert in range(packed.spec.router.num_experts):
            assert streamed.threshold(layer_idx, expert) == whole.threshold(layer_idx, expert)
            found, expected = (
                [activations(x, block, "silu").h @ block.down for block in held.expert(layer_idx, expert).blocks()]
                for held in (streamed, whole)
            )
            assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_logits_are_equal(packed: Pack) -> None:
    ids = [3, 1, 4, 1, 5, 9, 2, 6]
    found = Decoder(StreamedPackWeights(packed, CPU), 8).logits(ids)
    assert torch.equal(found, Decoder(PackWeights(packed, CPU), 8).logits(ids))


def test_a_matrix_is_read_anew_whenever_asked_for(tmp_path: Path) -> None:
    pack(TinyMixtral().write(tmp_path / "source"), tmp_path / "pack", width=16)
    with Pack(tmp_path / "pack") as opened:
        matrix = StreamedPackWeights(opened, CPU).matrix("embed")
        before = matrix.rows(0, 96)
        path = tmp_path / "pack" / "dense.safetensors"
        entry = next(dense.entry for dense in opened.layout.dense if dense.role.name == "embed")
        with path.open("r+b") as file:
            file.seek(entry.offset)
            file.write(bytes(entry.num_bytes))
        assert before.any() and not matrix.rows(0, 96).any()


@pytest.mark.parametrize("dense_width", [None, 4])
def test_a_damaged_dense_file_is_refused_before_anything_is_read(dense_width: int | None, tmp_path: Path) -> None:
    pack(TinyMixtral().write(tmp_path / "source"), tmp_path / "pack", dense_width=dense_width)
    path = tmp_path / "pack" / "dense.safetensors"
    with Pack(tmp_path / "pack") as opened:
        StreamedPackWeights(opened, CPU)
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    with Pack(tmp_path / "pack") as opened, pytest.raises(PackError) as refused:
        StreamedPackWeights(opened, CPU)
    assert str(refused.value) == "dense.safetensors: SHA-256 does not match the manifest's; the file is damaged"


def test_a_damaged_expert_is_refused_when_it_is_asked_for(tmp_path: Path) -> None:
    pack(TinyMixtral().write(tmp_path / "source"), tmp_path / "pack")
    with Pack(tmp_path / "pack") as opened:
        offset = opened.layout.offsets[0][1]
        with (tmp_path / "pack" / "experts-000.safetensors").open("r+b") as file:
            file.seek(offset)
            byte = file.read(1)[0]
            file.seek(offset)
            file.write(bytes([byte ^ 1]))
        weights = StreamedPackWeights(opened, CPU)
        weights.expert(0, 0)
        with pytest.raises(PackError, match=r"^experts-000.safetensors: expert 1: CRC-32 does not match its bytes"):
            weights.expert(0, 1)
