"""However a checkpoint holds its experts (apart, in turns, transposed, with biases), the pack is the same."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from support.coded import held_so
from support.models import Tensors, TinyMixtral, pack

from moe_pack.convert import compare_weights
from moe_pack.formats import CheckpointError, Matrix, Pack, PackError
from moe_pack.formats.families import Checkpoint
from moe_pack.formats.families.family import ExpertNames
from moe_pack.formats.families.registry import LOADED
from moe_pack.runtime.model import CheckpointWeights, Decoder, PackWeights

MODEL = TinyMixtral(num_layers=2, num_experts=3, intermediate_size=20)
E, D, F = 3, 64, 20
EXPERTS = "model.layers.{i}.experts."
MATRICES: dict[Matrix, str] = {"gate": EXPERTS + "gate_up", "up": EXPERTS + "gate_up", "down": EXPERTS + "down"}
BIASES: dict[Matrix, str] = {"gate": EXPERTS + "gate_up_bias", "up": EXPERTS + "gate_up_bias"}
IDS = [5, 17, 3, 90, 41]
Change = Callable[[Tensors], object]


def joined(first: torch.Tensor, second: torch.Tensor, interleaved: bool) -> torch.Tensor:
    return torch.stack((first, second), dim=1).flatten(0, 1) if interleaved else torch.cat((first, second))


def fuse(tensors: Tensors, interleaved: bool, transposed: bool) -> None:
    """Puts the experts of each layer into two tensors, gate and up in one of them."""
    for i in range(2):
        source = f"model.layers.{i}.block_sparse_moe.experts."
        of = {w: [tensors.pop(f"{source}{e}.w{w}.weight") for e in range(E)] for w in (1, 2, 3)}
        gate_ups = [joined(gate, up, interleaved) for gate, up in zip(of[1], of[3], strict=True)]
        for name, matrices in (("gate_up", gate_ups), ("down", of[2])):
            held = torch.stack(matrices)
            tensors[EXPERTS.format(i=i) + name] = (held.transpose(1, 2) if transposed else held).contiguous()


def add_biases(tensors: Tensors, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Gives every layer the same biases, and returns them: [E, f] each."""
    generator = torch.Generator().manual_seed(3)
    gate, up = (torch.randn((E, F), generator=generator).to(torch.bfloat16) for _ in range(2))
    held = torch.stack([joined(g, u, interleaved) for g, u in zip(gate, up, strict=True)])
    tensors |= {EXPERTS.format(i=i) + "gate_up_bias": held.clone() for i in range(2)}
    return gate, up


@pytest.fixture(params=[(False, False), (True, False), (False, True), (True, True)], ids=str)
def names(request: pytest.FixtureRequest) -> Iterator[ExpertNames]:
    interleaved, transposed = request.param
    yield ExpertNames(MATRICES, BIASES, interleaved, transposed)


@pytest.fixture
def storing(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Change]:
    """Has Mixtral's checkpoints store experts under some names; returns the change of tensors that does it."""

    def made(names: ExpertNames, biased: bool = True) -> Change:
        monkeypatch.setitem(LOADED, "mixtral", held_so(names, bias=("gate", "up")) if biased else held_so(names))

        def change(tensors: Tensors) -> None:
            fuse(tensors, names.interleaved, names.transposed is True)
            if biased:
                add_biases(tensors, names.interleaved)

        return change

    return made


def extents(folder: Path) -> list[bytes]:
    pack = Pack(folder)
    held = [pack.read_extent(l, e).tobytes() for l in range(2) for e in range(E)]
    pack.close()
    return held


def test_experts_in_any_place_make_the_same_pack(
    names: ExpertNames, storing: Callable[..., Change], tmp_path: Path
) -> None:
    pack(MODEL.write(tmp_path / "apart"), tmp_path / "expected", selector="up", width=4)
    folder = MODEL.write(tmp_path / "fused", storing(names, biased=False))
    pack(folder, tmp_path / "packed", selector="up", width=4)
    assert extents(tmp_path / "packed") == extents(tmp_path / "expected")


def test_rows_lie_where_the_tensor_has_them(names: ExpertNames, storing: Callable[..., Change], tmp_path: Path) -> None:
    checkpoint = Checkpoint(MODEL.write(tmp_path, storing(names, biased=False)))
    original = MODEL.tensors()
    for e in range(E):
        for matrix, w in (("gate", 1), ("up", 3), ("down", 2)):
            source = checkpoint.expert_source(1, e, matrix)  # type: ignore[arg-type]  # a literal of Matrix
            whole = original[f"model.layers.1.block_sparse_moe.experts.{e}.w{w}.weight"]
            whole = whole.T.contiguous() if names.transposed else whole
            for start, stop in ((0, source.num_rows), (3, 4), (5, 11), (7, 7)):
                read = checkpoint.rows(source, start, stop)
                assert read.tobytes() == whole[start:stop].view(torch.uint8).numpy().tobytes()
    checkpoint.close()


def test_every_value_of_an_expert_s_tensors_is_claimed_once(
    names: ExpertNames, storing: Callable[..., Change], tmp_path: Path
) -> None:
    checkpoint = Checkpoint(MODEL.write(tmp_path, storing(names)))
    tensors = {tensor.name: tensor for tensor in checkpoint.account()[1]}
    counts: dict[str, np.ndarray] = {}
    for source in (*checkpoint.claims.experts.values(), *checkpoint.claims.expert_biases.values()):
        shape = (-1, source.row_size)
        count = counts.setdefault(source.tensor, np.zeros(np.prod(tensors[source.tensor].shape), int).reshape(shape))
        for row in range(source.num_rows):
            for col in range(source.num_cols):
                count[source.number(row, col)] += 1
    assert all((count == 1).all() for count in counts.values()) and len(counts) == 6
    assert all(tensors[name].fate == "packed" for name in counts)
    checkpoint.close()


def test_biases_reach_the_rows_and_the_answer(
    names: ExpertNames, storing: Callable[..., Change], tmp_path: Path
) -> None:
    folder = MODEL.write(tmp_path / "source", storing(names))
    pack(folder, tmp_path / "packed", selector="gate", width=16)
    checkpoint, packed = Checkpoint(folder), Pack(tmp_path / "packed")
    weights = PackWeights(packed, torch.device("cpu"))
    gate, up = add_biases({}, names.interleaved)  # the same each time
    for e in range(E):
        block = next(iter(weights.expert(1, e).blocks()))
        assert block.gate_bias is not None and torch.equal(block.gate_bias, gate[e].float())
        assert block.up_bias is not None and torch.equal(block.up_bias, up[e].float())
    original, stored = Decoder(CheckpointWeights(checkpoint), 8).logits(IDS), Decoder(weights, 8).logits(IDS)
    torch.testing.assert_close(stored, original, rtol=0, atol=1e-5)
    compare_weights(packed, checkpoint)
    checkpoint.close()
    packed.close()


def test_biases_of_another_checkpoint_are_told(storing: Callable[..., Change], tmp_path: Path) -> None:
    change = storing(ExpertNames(MATRICES, BIASES, True))

    def another(tensors: Tensors) -> None:
        change(tensors)
        tensors["model.layers.1.experts.gate_up_bias"][2, 3] += 1  # up's second

    pack(MODEL.write(tmp_path / "source", change), tmp_path / "packed", width=16)
    checkpoint, packed = Checkpoint(MODEL.write(tmp_path / "other", another)), Pack(tmp_path / "packed")
    with pytest.raises(PackError, match=r"^layer 1 expert 2: the bias of up does not match the checkpoint's$"):
        compare_weights(packed, checkpoint)
    checkpoint.close()
    packed.close()


def test_a_weight_that_is_no_number_is_named_by_its_place_in_the_tensor(
    storing: Callable[..., Change], tmp_path: Path
) -> None:
    for transposed, place, rows in ((False, "[47, 9]", "41 to 79"), (True, "[73, 7]", "64 to 127")):
        store = storing(ExpertNames(MATRICES, BIASES, True, transposed), biased=False)

        def change(tensors: Tensors) -> None:
            store(tensors)
            held = tensors["model.layers.0.experts.gate_up"][1]  # up's neuron 3, its weight 9
            held[(9, 7) if transposed else (7, 9)] = torch.nan

        with pytest.raises(CheckpointError) as refused:
            pack(MODEL.write(tmp_path / f"source {rows}", change), tmp_path / f"packed {rows}")
        tensor = "model.safetensors: tensor 'model.layers.0.experts.gate_up'"
        assert str(refused.value) == f"{tensor}, rows {rows}: weight {place} is nan, expected a number"


def test_a_bias_of_another_shape_is_refused(storing: Callable[..., Change], tmp_path: Path) -> None:
    store = storing(ExpertNames(MATRICES, BIASES, True))

    def change(tensors: Tensors) -> None:
        store(tensors)
        tensors["model.layers.0.experts.gate_up_bias"] = torch.zeros(E, F)

    with pytest.raises(CheckpointError) as refused:
        Checkpoint(MODEL.write(tmp_path, change))
    assert str(refused.value) == (
        "checkpoint: tensor 'model.layers.0.experts.gate_up_bias' has shape [3, 20], expected [3, 40]"
    )
