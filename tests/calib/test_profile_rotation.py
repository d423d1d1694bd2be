"""The profile's rotation: which layers, what is stored, how it resumes; errors are measured in its coordinates."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models import TinyMixtral
from support.profiles import Recorder, StoppedError, copied, folder_bytes, profiled, random_tokens, reseal
from support.second_reader import rotation_matrix

from moe_pack.calib.profile import Profile, ProfileOptions, losses_of
from moe_pack.calib.quantize import LayerRotation, measured_rotation
from moe_pack.formats import PackError, trellis_format
from moe_pack.formats.families import Checkpoint
from moe_pack.formats.pack.manifests import RotationVectors, rotation_bytes
from moe_pack.runtime.model import CheckpointWeights, activations, run_expert

D = 192
SHAPE = TinyMixtral(D, 70, num_layers=3, num_experts=2)
TOKENS = random_tokens(12, 16, 96)
FILE = "rotation.safetensors"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose second layer has a few huge weights."""
    folder = SHAPE.write(tmp_path_factory.mktemp("model") / "source")
    tensors = load_file(folder / "model.safetensors")
    for name in tensors:
        if "layers.1." in name and name.endswith(("w1.weight", "w2.weight", "w3.weight")):
            tensors[name][7, 3] = 40 * tensors[name].abs().max()
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def judged(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Profile:
    return profiled(source, tmp_path_factory.mktemp("profile") / "auto", TOKENS)


@pytest.fixture
def checkpoint(source: Path) -> Iterator[Checkpoint]:
    opened = Checkpoint(source)
    yield opened
    opened.close()


def test_auto_rotates_a_layer_with_huge_weights_with_the_vectors_of_convert(
    checkpoint: Checkpoint, judged: Profile
) -> None:
    found, every = judged.rotation(), measured_rotation(checkpoint)
    assert found is not None and found.is_rotated(1)
    for l in range(3):
        for mine, theirs in ((found.input[l], every.input[l]), (found.output[l], every.output[l])):
            np.testing.assert_array_equal(mine, theirs if found.is_rotated(l) else np.zeros(D))
    assert (judged.folder / FILE).read_bytes() == rotation_bytes(found)  # as in a pack


@pytest.mark.slow
def test_the_options_decide_without_judging(source: Path, checkpoint: Checkpoint, tmp_path: Path) -> None:
    for options in (
        ProfileOptions("none", rotate="off"),
        ProfileOptions("none", rotate="auto", keeps_inputs=False),  # nothing to judge on
    ):
        folder = tmp_path / options.rotate
        assert profiled(source, folder, TOKENS, options).rotation() is None and not (folder / FILE).exists()
    every = profiled(source, tmp_path / "on", TOKENS, ProfileOptions("none", rotate="on", keeps_inputs=False))
    assert (tmp_path / "on" / FILE).read_bytes() == rotation_bytes(measured_rotation(checkpoint))
    assert every.facts.rotate == "on"


@pytest.mark.slow
def test_a_profile_killed_while_layers_are_judged_ends_in_the_same_bytes(
    source: Path, judged: Profile, tmp_path: Path
) -> None:
    whole = Recorder()
    profiled(source, tmp_path / "whole", TOKENS, progress=whole)
    first = whole.events.index("rotation")
    with pytest.raises(StoppedError):
        profiled(source, tmp_path / "p", TOKENS, progress=Recorder(first + 2))  # the first layer is judged
    assert len(list((tmp_path / "p" / "work").glob(f"{FILE}.*"))) == 2
    profiled(source, tmp_path / "p", TOKENS)
    assert folder_bytes(tmp_path / "p") == folder_bytes(judged.folder) == folder_bytes(tmp_path / "whole")


def test_damaged_vectors_are_refused(judged: Profile, tmp_path: Path) -> None:
    found = judged.rotation()
    assert found is not None
    zero = RotationVectors(found.input, found.output.copy())
    zero.output[1, 5] = 0
    short = RotationVectors(found.input[:, :64], found.output)
    for name, vectors, message in (
        ("zero", zero, f"{FILE}: output 5 of layer 1 is 0.0, expected a finite number other than 0"),
        ("short", short, f"{FILE}: tensor 'input' is F32 [3, 64], expected F32 [3, 192]"),
    ):
        folder = copied(judged.folder, tmp_path / name)
        (folder / FILE).write_bytes(rotation_bytes(vectors))
        with pytest.raises(PackError) as changed:
            Profile(folder).rotation()
        assert str(changed.value) == f"{FILE}: SHA-256 does not match profile.json; profile the model again"
        reseal(folder, lambda values: None)
        with pytest.raises(PackError) as refused:
            Profile(folder).rotation()
        assert str(refused.value) == message


def test_gradients_in_rotated_coordinates_are_those_of_the_source(checkpoint: Checkpoint) -> None:
    vectors = measured_rotation(checkpoint)
    rotation, R = LayerRotation.of(vectors, 2), torch.from_numpy(rotation_matrix(D))
    a, b = (torch.from_numpy(each[2]).double() for each in (vectors.input, vectors.output))
    generator = torch.Generator().manual_seed(1)
    g, change = (torch.randn(5, D, generator=generator) for _ in range(2))
    torch.testing.assert_close(rotation.output_gradients(g).double(), (g.double() * b) @ R, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(rotation.input_gradients(g).double(), (g.double() @ R) * a, rtol=1e-5, atol=1e-5)
    # A change of stored outputs costs by the gradient there what it costs in the source's coordinates.
    costs = (rotation.outputs(change) * g).sum(dim=1)
    torch.testing.assert_close((change * rotation.output_gradients(g)).sum(dim=1), costs, rtol=1e-4, atol=1e-4)


def test_a_rotated_expert_computes_what_its_source_does(checkpoint: Checkpoint) -> None:
    rotation = LayerRotation.of(measured_rotation(checkpoint), 2)
    x = torch.randn(5, D, generator=torch.Generator().manual_seed(2))
    source = CheckpointWeights(checkpoint).expert(2, 1)
    stored = rotation.expert(source)
    y = rotation.outputs(run_expert(rotation.inputs(x), stored, "silu", "none", 0.0))
    torch.testing.assert_close(y, run_expert(x, source, "silu", "none", 0.0), rtol=1e-4, atol=1e-5)
    (mine,), (theirs,) = stored.blocks(), source.blocks()
    assert not torch.allclose(mine.up, theirs.up, rtol=0.1)
    found, expected = activations(rotation.inputs(x), mine, "silu").h, activations(x, theirs, "silu").h
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def losses(source: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Profile, Profile]:
    """Profiles with all layers rotated, and with none."""
    folder = tmp_path_factory.mktemp("losses")
    rotated = profiled(source, folder / "on", TOKENS, ProfileOptions("fast", rotate="on"))
    return rotated, profiled(source, folder / "off", TOKENS, ProfileOptions("fast", rotate="off"))


@pytest.mark.slow
def test_a_layer_with_huge_weights_loses_far_less_if_it_is_rotated(losses: tuple[Profile, Profile]) -> None:
    predicted = [losses_of(profile) for profile in losses]
    place = predicted[0].calibrated_formats.index(trellis_format(4, 0))  # 2 bits, a scale a row
    rotated, plain = (each.calibrated[1, :, :, place].sum() for each in predicted)
    assert rotated < plain / 2


@pytest.mark.slow
def test_losses_by_sparsity_are_the_same_in_both_coordinates(losses: tuple[Profile, Profile]) -> None:
    for layer in range(3):
        found = [profile.layer_losses(layer).sparse / profile.effects().growth[layer] for profile in losses]
        np.testing.assert_allclose(found[0], found[1], rtol=1e-2, atol=1e-9)
