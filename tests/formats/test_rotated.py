"""`rotation.safetensors`: what is refused, and the nearest legal file; the second reader agrees on what it means."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from support.cases import case
from support.models import TinyMixtral, pack
from support.reseal import (
    JsonObject,
    array_tensor,
    edit_array,
    edit_byte,
    read_tensors,
    read_whole,
    refusal,
    reseal,
    unchanged,
    write_tensors,
)
from support.second_reader import BadPackError, SecondReader, rotation_matrix

from moe_pack.formats import Pack
from moe_pack.runtime.model import TORCH
from moe_pack.runtime.model.compute.rotation import Rotation

NAME = "rotation.safetensors"
TOGETHER = f"manifest.json: feature 'rotated' and file {NAME!r} must be present together"
L, D = 2, 64
Vectors = dict[str, NDArray[np.float32]]


def legal() -> Vectors:
    """Vectors of two layers, of which the second is rotated; values of many sizes, some below all normal numbers."""
    generator = np.random.default_rng(5)
    values = generator.standard_normal((2, L, D)).astype(np.float32) * 3
    values[:, 0] = 0
    values[0, 1, 7], values[1, 1, 0] = 1e-45, -3e38
    return {"input": values[0], "output": values[1]}


def listed(values: JsonObject) -> None:
    values["files"].append({"name": NAME})


def required(values: JsonObject) -> None:
    values["features"] = sorted([*values["features"], "rotated"])


def both(values: JsonObject) -> None:
    listed(values)
    required(values)


def write_vectors(folder: Path, vectors: Vectors) -> None:
    write_tensors(folder / NAME, {name: array_tensor("F32", values) for name, values in vectors.items()})


@pytest.fixture
def new_rotated(new_pack: Callable[[], Path]) -> Callable[[], Path]:
    """Makes a pack with the legal file."""

    def made() -> Path:
        folder = new_pack()
        write_vectors(folder, legal())
        reseal(folder, both)
        return folder

    return made


def test_vectors_are_read_and_name_the_rotated_layers(new_rotated: Callable[[], Path]) -> None:
    folder = new_rotated()
    read_whole(folder)
    with Pack(folder) as opened:
        assert opened.rotation is not None and opened.rotation.layers(opened.spec) == (1,)
        assert opened.layout.rotation_bytes == (folder / NAME).stat().st_size
        for name, values in legal().items():
            np.testing.assert_array_equal(getattr(opened.rotation, name), values)


def test_a_pack_without_the_file_is_not_rotated(folder: Path) -> None:
    with Pack(folder) as opened:
        assert opened.rotation is None and opened.layout.rotation_bytes == 0


@pytest.mark.parametrize("change", [listed, required], ids=["the file alone", "the feature alone"])
def test_the_file_and_its_feature_go_together(change: Callable[[JsonObject], None], folder: Path) -> None:
    write_vectors(folder, legal())
    reseal(folder, unchanged)  # not listed: not part of the pack
    read_whole(folder)
    reseal(folder, change)
    assert refusal(folder) == TOGETHER


def test_values_that_no_layer_may_have_are_refused_and_their_neighbours_read(
    new_rotated: Callable[[], Path],
) -> None:
    wanted, zero = "expected a finite number other than 0", "expected 0, because input is all zeros"
    cases: list[tuple[str, tuple[int, ...], float, float, str]] = [
        ("input", (1, 3), math.nan, 1e-40, f"input 3 of layer 1 is nan, {wanted}"),
        ("input", (1, 63), math.inf, 3.4e38, f"input 63 of layer 1 is inf, {wanted}"),
        ("input", (1, 0), 0.0, -1e-45, f"input 0 of layer 1 is 0.0, {wanted}"),
        ("output", (1, 0), -math.inf, -3.4e38, f"output 0 of layer 1 is -inf, {wanted}"),
        ("output", (1, 62), 0.0, 1.0, f"output 62 of layer 1 is 0.0, {wanted}"),
        ("output", (0, 5), 1.0, -0.0, f"output 5 of layer 0 is 1.0, {zero}"),
        ("output", (0, 5), math.nan, 0.0, f"output 5 of layer 0 is nan, {zero}"),
        ("input", (0, 5), 1.0, -0.0, f"input 0 of layer 0 is 0.0, {wanted}"),
        ("input", (0, 5), math.nan, 0.0, f"input 0 of layer 0 is 0.0, {wanted}"),
    ]
    for tensor, place, wrong, right, message in cases:
        with case(tensor, place, wrong):
            folder = new_rotated()
            for value in (right, wrong):
                edit_array(folder / NAME, tensor, lambda values, v=value, p=place: values.__setitem__(p, v))
                reseal(folder)
                if value is right:
                    read_whole(folder)
            assert refusal(folder) == f"{NAME}: {message}"


def test_a_file_in_which_no_layer_is_rotated_is_refused(new_rotated: Callable[[], Path]) -> None:
    folder = new_rotated()
    write_vectors(folder, {name: np.zeros((L, D), np.float32) for name in ("input", "output")})
    reseal(folder)
    assert refusal(folder) == f"{NAME}: no layer is rotated; a pack without rotated layers has no such file"


def test_tensors_of_another_name_dtype_or_shape_are_refused(new_rotated: Callable[[], Path]) -> None:
    zeros = np.ones((L, D + 1), np.float32)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"output": None}, "tensor 'output' is missing"),
        ({"scale": array_tensor("F32", [1.0])}, "unknown tensor 'scale'"),
        ({"input": array_tensor("F64", legal()["input"])}, "tensor 'input' is F64 [2, 64], expected F32 [2, 64]"),
        ({"input": array_tensor("F32", zeros)}, "tensor 'input' is F32 [2, 65], expected F32 [2, 64]"),
    ]
    for change, message in cases:
        with case(message):
            folder = new_rotated()
            tensors = {**read_tensors(folder / NAME), **change}
            write_tensors(folder / NAME, {name: held for name, held in tensors.items() if held is not None})
            reseal(folder)
            assert refusal(folder) == f"{NAME}: {message}"


def test_a_damaged_byte_is_refused(new_rotated: Callable[[], Path]) -> None:
    folder = new_rotated()
    edit_byte(folder / NAME, -9)
    assert refusal(folder) == f"{NAME}: SHA-256 does not match the manifest's; the file is damaged"


@pytest.fixture(scope="module")
def rotated_pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A converted pack whose hidden size has an odd factor."""
    folder = tmp_path_factory.mktemp("rotated")
    source = TinyMixtral(hidden_size=192, num_layers=2).write(folder / "source")
    pack(source, folder / "pack", width=16, rotate="on")
    return folder / "pack"


def test_the_second_reader_rotates_as_the_runtime_does(rotated_pack: Path) -> None:
    second = SecondReader(rotated_pack)
    x = torch.randn(3, 192, generator=torch.Generator().manual_seed(1))
    with Pack(rotated_pack) as opened:
        assert opened.rotation is not None and opened.rotation.layers(opened.spec) == (0, 1)
        for l in range(2):
            a, b = opened.rotation.input[l], opened.rotation.output[l]
            rotation = Rotation(torch.from_numpy(a), torch.from_numpy(b))
            into, out = second.rotation(l) or pytest.fail("rotated")
            np.testing.assert_allclose(TORCH.rotate(x, rotation), x.numpy() @ into.T, atol=2e-6)
            np.testing.assert_allclose(TORCH.rotate_back(x, rotation), x.numpy() @ out.T, atol=2e-6)


def test_rotated_rows_give_the_activations_and_outputs_of_the_source(rotated_pack: Path) -> None:
    second = SecondReader(rotated_pack)
    tensors = TinyMixtral(hidden_size=192, num_layers=2).tensors()
    x = np.random.default_rng(2).standard_normal((4, 192))
    for l in range(2):
        into, out = second.rotation(l) or pytest.fail("rotated")
        stored = second.expert(l, 1)
        for matrix, name in {"gate": "w1", "up": "w3", "down": "w2"}.items():
            original = tensors[f"model.layers.{l}.block_sparse_moe.experts.1.{name}.weight"].double().numpy()
            # bfloat16 rounds each stored weight by at most 2^-9 of it.
            if matrix == "down":
                h = np.random.default_rng(3).standard_normal((4, original.shape[1]))
                expected, found = h @ original.T, (h @ stored[matrix].astype(np.float64)) @ out.T
            else:
                expected, found = x @ original.T, (x @ into.T) @ stored[matrix].astype(np.float64).T
            assert np.abs(found - expected).max() < 2**-7 * np.abs(expected).max()
            assert np.abs(found - expected).max() > 0


def test_the_second_reader_refuses_a_flipped_byte_in_the_vectors(rotated_pack: Path, tmp_path: Path) -> None:
    whole = (rotated_pack / NAME).read_bytes()
    folder = tmp_path / "pack"
    folder.mkdir()
    for path in rotated_pack.iterdir():
        (folder / path.name).hardlink_to(path)
    (folder / NAME).unlink()
    for offset in range(0, len(whole), len(whole) // 9):
        (folder / NAME).write_bytes(whole[:offset] + bytes([whole[offset] ^ 4]) + whole[offset + 1 :])
        with pytest.raises(BadPackError):
            SecondReader(folder)


@pytest.mark.parametrize("d", [64, 192, 320, 576, 960, 64 * 11])
def test_the_transform_is_its_matrix_and_its_own_inverse(d: int) -> None:
    R = rotation_matrix(d)
    np.testing.assert_allclose(R, R.T, atol=1e-15)
    np.testing.assert_allclose(R @ R, np.eye(d), atol=1e-12)
    ones = torch.ones(d)
    x = torch.randn(5, d, generator=torch.Generator().manual_seed(d))
    found = TORCH.rotate(x, Rotation(ones, ones))
    np.testing.assert_allclose(found, x.double().numpy() @ R, atol=3e-6)
    for row, alone in zip(found, x, strict=True):
        assert torch.equal(TORCH.rotate(alone[None], Rotation(ones, ones))[0], row)  # whatever is around it


def test_the_documented_element_of_the_rotation() -> None:
    assert abs(rotation_matrix(192)[65, 129] - 0.09858439) < 5e-9
