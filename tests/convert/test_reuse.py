"""Items of an earlier pack are copied: the bytes are the same, and only changed items are made."""

import dataclasses
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from support.killing import different_files, files_in
from support.models import TinyMixtral

from moe_pack.convert.account import Recipe
from moe_pack.convert.pipeline import EarlierPack, convert, layout_for
from moe_pack.formats import PackError, Plan, dense_roles, part_format, uniform_plan
from moe_pack.formats.families import Checkpoint
from moe_pack.formats.pack.layouts import Item

SHAPE = TinyMixtral(num_layers=2, num_experts=3, intermediate_size=70)
CHANGED = {("expert", 0, 1), ("expert", 1, 2), ("dense", "embed")}


def plans(checkpoint: Checkpoint) -> tuple[Plan, Plan]:
    """A plan, and another that differs in `CHANGED`."""
    spec = checkpoint.spec
    four, two = part_format(4, 32), part_format(2, 32)
    first = uniform_plan(spec, "up", four, four, None, "nearest")
    other = uniform_plan(spec, "up", two, four, None, "nearest").experts[0][0]
    experts = [list(layer) for layer in first.experts]
    experts[0][1] = experts[1][2] = other
    dense = tuple(part_format(8, 32) if role.name == "embed" else None for role in dense_roles(spec))
    return first, Plan("up", "nearest", tuple(map(tuple, experts)), dense)


def taken(checkpoint: Checkpoint, plan: Plan, earlier: Path, order: NDArray[np.uint32] | None = None) -> set[Item]:
    """The items but headers that an earlier pack holds of a plan."""
    layout = layout_for(checkpoint, plan)
    with EarlierPack(earlier, Recipe(checkpoint, plan, layout, order)) as opened:
        return {item for item in layout.items() if item.kind != "header" and opened.contains(item)}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Iterator[Checkpoint]:
    """A checkpoint, of which `first` is a pack."""
    with closing(Checkpoint(SHAPE.write(tmp_path / "source"))) as opened:
        convert(opened, plans(opened)[0], tmp_path / "first", 2)
        yield opened


def test_only_what_changed_is_made_and_the_pack_is_as_made_directly(checkpoint: Checkpoint, tmp_path: Path) -> None:
    _, second = plans(checkpoint)
    items = {item for item in layout_for(checkpoint, second).items() if item.kind != "header"}
    changed = items - taken(checkpoint, second, tmp_path / "first")
    assert {("expert", i.layer, i.expert) if i.kind == "expert" else (i.kind, i.role) for i in changed} == CHANGED
    convert(checkpoint, second, tmp_path / "second", 2, earlier=tmp_path / "first")
    convert(checkpoint, second, tmp_path / "direct", 2)
    assert different_files(files_in(tmp_path / "second"), files_in(tmp_path / "direct")) == []


def test_what_is_taken_is_copied_not_made_again(checkpoint: Checkpoint, tmp_path: Path) -> None:
    first, _ = plans(checkpoint)
    other = Checkpoint(TinyMixtral(num_layers=2, num_experts=3, intermediate_size=70, seed=9).write(tmp_path / "other"))
    convert(other, first, tmp_path / "second", 1, earlier=tmp_path / "first")  # which says that its caller must know
    held, expected = files_in(tmp_path / "second"), files_in(tmp_path / "first")
    assert held["experts-000.safetensors"] == expected["experts-000.safetensors"]
    other.close()


def test_an_expert_in_another_neuron_order_is_made_again(checkpoint: Checkpoint, tmp_path: Path) -> None:
    first, _ = plans(checkpoint)
    order = np.tile(np.arange(70, dtype=np.uint32), (2, 3, 1))
    order[1, 0] = order[1, 0, ::-1]
    experts = {(i.layer, i.expert) for i in taken(checkpoint, first, tmp_path / "first", order) if i.kind == "expert"}
    assert experts == {(0, 0), (0, 1), (0, 2), (1, 1), (1, 2)}


def test_another_quantizer_selector_or_model_takes_nothing(checkpoint: Checkpoint, tmp_path: Path) -> None:
    first, _ = plans(checkpoint)
    assert not taken(checkpoint, dataclasses.replace(first, quantizer="absmax"), tmp_path / "first")
    four = part_format(4, 32)
    gate = uniform_plan(checkpoint.spec, "gate", four, four, None, "nearest")
    assert {item.kind for item in taken(checkpoint, gate, tmp_path / "first")} == {"dense"}
    larger = Checkpoint(TinyMixtral(num_layers=2, num_experts=3, intermediate_size=71).write(tmp_path / "larger"))
    plan = uniform_plan(larger.spec, "up", four, four, None, "nearest")
    assert not taken(larger, plan, tmp_path / "first")
    larger.close()


def test_a_damaged_earlier_pack_is_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    _, second = plans(checkpoint)
    path = tmp_path / "first" / "experts-000.safetensors"
    raw = bytearray(path.read_bytes())
    raw[4096] ^= 1  # the first byte of the first expert
    path.write_bytes(raw)
    with pytest.raises(PackError, match=r"experts-000\.safetensors: expert 0: CRC-32 does not match its bytes"):
        convert(checkpoint, second, tmp_path / "second", 1, earlier=tmp_path / "first")
