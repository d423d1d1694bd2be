"""Weights with some dense matrices rounded: which those are, in every family, and that nothing else changes."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.cases import case
from support.families import TINY, Tiny, write_config
from support.specs import GROUPED, LATENT

from moe_pack.calib.quantize import RowQuantizer
from moe_pack.calib.sensitivity import roundable_roles
from moe_pack.calib.sensitivity.errors import RoundedDense, RoundedExperts, Rounding
from moe_pack.formats import ModelSpec, dense_roles, part_format
from moe_pack.formats.families import Checkpoint
from moe_pack.formats.families.family import Config
from moe_pack.formats.families.registry import read_spec
from moe_pack.formats.pack.codecs import decode_part
from moe_pack.runtime.model import CheckpointWeights, Weights

ROLES = ("layers.0.attention.q", "layers.0.attention.o")


@pytest.fixture(scope="module")
def source(tiny_source: Path) -> Iterator[CheckpointWeights]:
    checkpoint = Checkpoint(tiny_source)
    yield CheckpointWeights(checkpoint)
    checkpoint.close()


def whole(weights: Weights, role: str) -> torch.Tensor:
    matrix = weights.matrix(role)
    return matrix.rows(0, matrix.num_rows)


def test_the_roles_named_are_as_conversion_stores_them(source: CheckpointWeights) -> None:
    rounded = RoundedDense(source, ROLES, 4, Rounding("nearest"))
    for role in ROLES:
        original, part = whole(source, role), part_format(4, 64)
        expected = decode_part(part, 64, RowQuantizer(part, 64, "nearest").encode(original))
        assert torch.equal(whole(rounded, role), expected)
        assert not torch.equal(expected, original)


def test_nothing_else_changes(source: CheckpointWeights) -> None:
    rounded = RoundedDense(source, ROLES, 2, Rounding("nearest"))
    assert (rounded.spec, rounded.selector, rounded.threshold(0, 1)) == (source.spec, source.selector, 0.0)
    others = [role for role in dense_roles(source.spec) if role.name not in ROLES]
    for role in others:
        if len(role.shape) == 1:
            assert torch.equal(rounded.vector(role.name), source.vector(role.name))
        else:
            assert torch.equal(whole(rounded, role.name), whole(source, role.name))
    (found,), (expected,) = rounded.expert(0, 1).blocks(), source.expert(0, 1).blocks()
    assert torch.equal(found.up, expected.up) and torch.equal(found.down, expected.down)
    assert {"layers.0.router", "embed", "head", "layers.0.attention.k"} < {role.name for role in others}


def test_rounded_experts_have_their_matrices_rounded_and_nothing_else(source: CheckpointWeights) -> None:
    plain = Rounding("nearest")
    rounded = RoundedExperts(source, 2, plain)
    (found,), (expected,) = rounded.expert(0, 1).blocks(), source.expert(0, 1).blocks()
    assert expected.gate is not None and found.gate is not None
    assert torch.equal(found.gate, plain(expected.gate, 2)) and not torch.equal(found.gate, expected.gate)
    assert torch.equal(found.up, plain(expected.up, 2))
    assert torch.equal(found.down, plain(expected.down, 2))  # a neuron a row: the group runs along d
    for role in ROLES:
        assert torch.equal(whole(rounded, role), whole(source, role))
    assert torch.equal(rounded.vector("norm"), source.vector("norm"))
    assert (rounded.spec, rounded.selector, rounded.threshold(0, 1)) == (source.spec, source.selector, 0.0)


def test_rows_in_pieces_are_the_rows_at_once(source: CheckpointWeights) -> None:
    matrix = RoundedDense(source, ("embed",), 3, Rounding("nearest")).matrix("embed")
    assert (matrix.num_rows, matrix.num_cols) == (96, 64)
    for step in (1, 7, 64):
        pieces = [matrix.rows(start, min(start + step, 96)) for start in range(0, 96, step)]
        assert torch.equal(torch.cat(pieces), matrix.rows(0, 96))


def test_roles_that_rows_of_64_cannot_hold_are_left_out() -> None:
    """The attention of GROUPED is 4 heads of 32 wide, so its every matrix has 64 or 128 columns; its experts' 80, 40.

    LATENT's second halves of queries and keys have 40 and 24 columns, its attention's output 48, its shared down 96.
    """
    attention = ("attention.q", "attention.k", "attention.v", "attention.o")
    with_experts = (*attention, "shared.gate", "shared.up")
    assert roundable_roles(GROUPED, 1) == tuple(f"layers.1.{name}" for name in with_experts)
    assert roundable_roles(GROUPED, 2) == tuple(f"layers.2.{name}" for name in (*attention, "mlp.gate", "mlp.up"))
    assert roundable_roles(GROUPED, None) == ("embed", "head")
    latent = ("attention.q_a", "attention.kv_a", "shared.gate", "shared.up")
    assert roundable_roles(LATENT, 1) == tuple(f"layers.1.{name}" for name in latent)
    assert roundable_roles(LATENT, None) == ("embed",)


def test_a_layers_roles_are_not_those_of_a_layer_whose_number_begins_alike() -> None:
    deep = replace(GROUPED, num_hidden_layers=12, moe_layers=tuple(range(12)))
    assert all(role.startswith("layers.1.") for role in roundable_roles(deep, 1))
    assert len(roundable_roles(deep, 1)) == len(roundable_roles(deep, 11)) == 6


def spec_of(tiny: Tiny, folder: Path) -> ModelSpec:
    return read_spec(Config(write_config(tiny, folder), "config.json"))[1]


@pytest.mark.slow
def test_in_every_family_only_matrices_a_plan_may_quantize_are_rounded(tmp_path: Path) -> None:
    for number, tiny in enumerate([tiny for tiny in TINY if not (tiny.fused or tiny.four)]):
        case_folder = tmp_path / str(number)
        case_folder.mkdir()
        with case(tiny):
            spec = spec_of(tiny, case_folder)
            by_name = {role.name: role for role in dense_roles(spec)}
            layers = [roundable_roles(spec, layer) for layer in range(spec.num_hidden_layers)]
            found = [*roundable_roles(spec, None), *(name for roles in layers for name in roles)]
            assert len(set(found)) == len(found)
            for name in found:
                assert by_name[name].quantizable and len(by_name[name].shape) == 2 and by_name[name].shape[1] % 64 == 0
                assert not any(word in name for word in ("router", "norm", "bias"))
            for layer, roles in enumerate(layers):
                assert all(name.startswith(f"layers.{layer}.") for name in roles)
            missing = [role for name, role in by_name.items() if role.quantizable and name not in found]
            assert all(role.shape[1] % 64 for role in missing)
            assert any("attention" in name or "mixer" in name for name in found)
            assert ("head" in found) == (not spec.tied_head)
