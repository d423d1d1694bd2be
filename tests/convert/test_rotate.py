"""`--rotate`: what is stored, what identifies it, what is refused; calibrated rows see rotated inputs."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from threading import Event

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.commands import done
from support.commands import moe_pack as run
from support.killing import different_files, files_in
from support.models import DEMO_MODEL, TinyMixtral
from support.profiles import profiled, random_tokens
from support.second_reader import SecondReader, rotation_matrix

from moe_pack.calib.profile import Profile, ProfileOptions
from moe_pack.calib.quantize import GuardedQuantizer, measured_rotation, rotation_vectors
from moe_pack.convert.account import Preparation, Recipe
from moe_pack.convert.encoding import made_item
from moe_pack.convert.pipeline import EarlierPack, convert, layout_for
from moe_pack.convert.plan.rotation import PlanRotation, check_rotation
from moe_pack.convert.verify import compare_weights
from moe_pack.formats import ExpertFormat, Pack, PackError, Plan, PlanError, part_format, trellis_format, uniform_plan
from moe_pack.formats.families import Checkpoint
from moe_pack.formats.pack.codecs import decode_part
from moe_pack.formats.pack.manifests import RotationVectors
from moe_pack.formats.pack.plans import FP8
from moe_pack.formats.pack.writer import Step
from moe_pack.runtime.model import CheckpointWeights, NeuronBlock, PackWeights

D, F = 192, 70
SHAPE = TinyMixtral(D, F, num_layers=3, num_experts=2)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Iterator[Checkpoint]:
    opened = Checkpoint(SHAPE.write(tmp_path / "source"))
    yield opened
    opened.close()


def plan_of(checkpoint: Checkpoint, width: int = 4) -> Plan:
    part = part_format(width, 64)
    return uniform_plan(checkpoint.spec, "up", part, part, None, "nearest")


def vectors_of(checkpoint: Checkpoint, *unrotated: int) -> RotationVectors:
    """The command's vectors with scales of many sizes; some layers without any."""
    signs = rotation_vectors(checkpoint.spec, "on")
    assert signs is not None
    scales = np.random.default_rng(3).uniform(0.1, 9, (2, *signs.input.shape)).astype(np.float32)
    a, b = signs.input * scales[0], signs.output * scales[1]
    a[list(unrotated)] = b[list(unrotated)] = 0
    return RotationVectors(a, b)


def test_vectors_are_signs_that_depend_on_the_layer_alone(checkpoint: Checkpoint) -> None:
    spec = checkpoint.spec
    found = rotation_vectors(spec, "on")
    assert found is not None and rotation_vectors(spec, "off") is None
    for array in (found.input, found.output):
        assert array.shape == (3, D) and array.dtype == np.float32 and set(np.unique(array)) == {-1, 1}
        assert len({row.tobytes() for row in array}) == 3
    fewer = rotation_vectors(dataclasses.replace(spec, moe_layers=(2,)), "on")
    assert fewer is not None
    np.testing.assert_array_equal(fewer.input[0], found.input[2])


def test_outputs_are_scaled_by_the_root_of_how_large_their_channels_are(checkpoint: Checkpoint) -> None:
    spec, signs = checkpoint.spec, rotation_vectors(checkpoint.spec, "on")
    found, tensors = measured_rotation(checkpoint), SHAPE.tensors()
    assert signs is not None
    np.testing.assert_array_equal(found.input, signs.input)
    for l in range(3):
        names = [f"model.layers.{l}.block_sparse_moe.experts.{e}.w2.weight" for e in range(spec.router.num_experts)]
        sizes = torch.cat([tensors[name].double() for name in names], dim=1).square().mean(dim=1).sqrt()  # [d]
        expected = (sizes / sizes.mean()).sqrt().to(torch.bfloat16).float().numpy()
        np.testing.assert_array_equal(found.output[l], signs.output[l] * expected)


def test_a_channel_of_zeros_has_a_scale(tmp_path: Path) -> None:
    folder = SHAPE.write(tmp_path / "source")
    tensors = load_file(folder / "model.safetensors")
    for name in tensors:
        if name.endswith("w2.weight"):
            tensors[name][5] = 0
    save_file(tensors, folder / "model.safetensors")
    opened = Checkpoint(folder)
    found = measured_rotation(opened)
    np.testing.assert_allclose(np.abs(found.output[:, 5]), 1 / 8)
    opened.close()


def test_stored_rows_are_the_sources_in_rotated_coordinates(checkpoint: Checkpoint, tmp_path: Path) -> None:
    vectors = vectors_of(checkpoint, 1)
    convert(checkpoint, plan_of(checkpoint, 16), tmp_path / "p", 2, prepared=Preparation(rotation=vectors))
    reader, tensors, R = SecondReader(tmp_path / "p"), SHAPE.tensors(), rotation_matrix(D)
    for l in range(3):
        for matrix, name in {"gate": "w1", "up": "w3", "down": "w2"}.items():
            original = tensors[f"model.layers.{l}.block_sparse_moe.experts.1.{name}.weight"].double().numpy()
            rows, found = original.T if matrix == "down" else original, reader.expert(l, 1)[matrix]
            if l == 1:
                assert reader.rotation(l) is None
                np.testing.assert_array_equal(found, rows)
                continue
            expected = rows / (vectors.output if matrix == "down" else vectors.input)[l] @ R
            np.testing.assert_allclose(found, expected, rtol=2**-8, atol=1e-6)  # rounded to bfloat16


def test_verify_compares_in_the_packs_coordinates_to_the_bit(checkpoint: Checkpoint, tmp_path: Path) -> None:
    vectors = vectors_of(checkpoint)
    convert(checkpoint, plan_of(checkpoint, 16), tmp_path / "p", 2, prepared=Preparation(rotation=vectors))
    with Pack(tmp_path / "p") as pack:
        errors = {error.matrix: error for error in compare_weights(pack, checkpoint)}
        assert all(errors[matrix].largest == 0 for matrix in ("gate", "up", "down"))
        assert pack.rotation is not None
        pack.rotation.input[2, 5] *= np.float32(1 + 2**-6)  # other coordinates than the rows'
        with pytest.raises(PackError, match=r"layer 2 expert 0: (gate|up) does not match"):
            compare_weights(pack, checkpoint)


def test_another_rotation_is_another_conversion(checkpoint: Checkpoint, tmp_path: Path) -> None:
    plan, vectors = plan_of(checkpoint), vectors_of(checkpoint)
    other = RotationVectors(vectors.input, -vectors.output)
    identities = set()
    for number, rotation in enumerate((None, vectors, other)):
        convert(checkpoint, plan, tmp_path / str(number), 1, prepared=Preparation(rotation=rotation))
        with Pack(tmp_path / str(number)) as pack:
            identities.add(pack.manifest.conversion)
    assert len(identities) == 3


def test_a_stopped_conversion_with_rotated_layers_goes_on_to_the_same_bytes(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    plan, prepared = plan_of(checkpoint), Preparation(rotation=vectors_of(checkpoint, 0))
    convert(checkpoint, plan, tmp_path / "whole", 2, prepared=prepared)
    written: list[str] = []

    def stops(step: Step) -> None:
        if step.action == "write":
            written.append(step.path)
        if written.count("experts-001.safetensors") == 3:  # its header and an expert are there
            raise InterruptedError

    with pytest.raises(InterruptedError):
        convert(checkpoint, plan, tmp_path / "p", 1, on_step=stops, prepared=prepared)
    result = convert(checkpoint, plan, tmp_path / "p", 1, prepared=prepared)
    assert result.written and result.resumed_bytes > 0
    assert different_files(files_in(tmp_path / "p"), files_in(tmp_path / "whole")) == []


def test_experts_are_copied_from_an_earlier_pack_only_from_the_same_coordinates(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    plan, first, second = plan_of(checkpoint), vectors_of(checkpoint, 1), vectors_of(checkpoint, 1, 2)
    first.input[0, 0] *= 2
    for name, earlier_rotation, expected in (
        ("other", first, {1}), ("none", None, {1, 2}), ("same", second, {0, 1, 2})
    ):  # fmt: skip
        convert(checkpoint, plan, tmp_path / name, 1, prepared=Preparation(rotation=earlier_rotation))
        layout = layout_for(checkpoint, plan, second)
        with EarlierPack(tmp_path / name, Recipe(checkpoint, plan, layout, None, None, second)) as opened:
            found = {item.layer for item in layout.items() if item.kind == "expert" and opened.contains(item)}
        assert found == expected, name
    convert(checkpoint, plan, tmp_path / "direct", 1, prepared=Preparation(rotation=second))
    convert(checkpoint, plan, tmp_path / "copied", 1, prepared=Preparation(rotation=second), earlier=tmp_path / "other")
    assert different_files(files_in(tmp_path / "copied"), files_in(tmp_path / "direct")) == []


@pytest.mark.slow
def test_calibrated_rows_are_rounded_on_rotated_inputs(checkpoint: Checkpoint, tmp_path: Path) -> None:
    profile = profiled(checkpoint.folder, tmp_path / "profile", random_tokens(6, 32, 96))
    assert isinstance(profile, Profile)
    part, vectors = trellis_format(4, 0), vectors_of(checkpoint)
    plan = uniform_plan(checkpoint.spec, "up", part, part, None, "calibrated")
    layout, place = layout_for(checkpoint, plan, vectors), (1, 0)
    item = next(item for item in layout.items() if item.kind == "expert" and (item.layer, item.expert) == place)
    convert(
        checkpoint,
        plan,
        tmp_path / "p",
        1,
        prepared=Preparation(calibration=profile, rotation=vectors, sequential=False),
    )
    made = made_item(Recipe(checkpoint, plan, layout, None, profile, vectors), item, Event())
    with Pack(tmp_path / "p") as pack:
        np.testing.assert_array_equal(pack.read_extent(*place), made.raw)
        (found,) = PackWeights(pack, torch.device("cpu")).expert(*place).blocks()
    R = torch.from_numpy(rotation_matrix(D))
    a, b = (torch.from_numpy(each[1]).double() for each in (vectors.input, vectors.output))
    with profile.inputs(1) as inputs:
        tokens = inputs.of_expert(0)
    x = ((tokens.inputs.double() * a) @ R).float()
    (source,) = CheckpointWeights(checkpoint).expert(*place).blocks()
    assert source.gate is not None and found.gate is not None
    gate, up = ((rows.double() / a @ R).float() for rows in (source.gate, source.up))
    block = NeuronBlock(gate, up, (source.down.double() / b @ R).float())
    quantizer = GuardedQuantizer(plan.experts[1][0], dataclasses.replace(tokens, inputs=x), "silu")
    for matrix in quantizer.matrices:
        stored = quantizer.rows(matrix, block)
        expected, theirs = decode_part(part, D, stored), getattr(found, matrix)
        # A rounding of the last bit may choose another path of a row, and nearly all rows have none.
        assert (expected == theirs).all(dim=1).float().mean() > 0.9, matrix


def test_codes_of_the_checkpoint_cannot_be_rotated(checkpoint: Checkpoint) -> None:
    plan = plan_of(checkpoint)
    kept = dataclasses.replace(plan.experts[1][1], down=FP8)
    plan = dataclasses.replace(plan, experts=(plan.experts[0], (plan.experts[1][0], kept), plan.experts[2]))
    check_rotation(vectors_of(checkpoint, 1), plan, checkpoint.spec)  # that layer is not rotated
    with pytest.raises(PlanError) as refused:
        check_rotation(vectors_of(checkpoint), plan, checkpoint.spec)
    assert str(refused.value) == (
        "--rotate on: down of layer 1 expert 1 keeps the checkpoint's fp8 codes, which cannot be rotated; use --rotate "
        "off, or give --selector-bits and --record-bits below the codes' bits"
    )


def test_source_keeps_nothing_that_is_rotated(tmp_path: Path) -> None:
    for option in ("--selector-bits", "--record-bits"):
        refused = run("convert", DEMO_MODEL, "-o", tmp_path / "p", option, "source", "--rotate", "on")
        assert refused.exit_code == 2 and "--rotate on rounds the experts' weights" in refused.stderr
        assert not (tmp_path / "p").exists()


def test_wrong_vectors_are_refused(checkpoint: Checkpoint) -> None:
    plan, vectors = plan_of(checkpoint), vectors_of(checkpoint, 0)
    check_rotation(vectors, plan, checkpoint.spec)
    vectors.output[1, 7] = 0
    with pytest.raises(PlanError, match=r"^rotation: output 7 of layer 1 is 0.0, expected a finite number"):
        check_rotation(vectors, plan, checkpoint.spec)
    short = RotationVectors(vectors.input[:, :64], vectors.output)
    with pytest.raises(PlanError, match=r"^rotation: input has shape \[3, 64\], expected \[3, 192\]"):
        check_rotation(short, plan, checkpoint.spec)


def test_the_command_rotates_and_inspect_and_verify_say_so(tmp_path: Path) -> None:
    done("convert", DEMO_MODEL, "-o", tmp_path / "p", "--quantizer", "nearest", "--rotate", "on")
    assert "\nrotated layers: all\n" in run("inspect", tmp_path / "p").stdout
    facts = json.loads(run("inspect", tmp_path / "p", "--json").stdout)
    assert facts["rotated"] == [True] * 4 and facts["features"] == ["affine", "dense_rows", "rotated"]
    done("verify", tmp_path / "p", "--against", DEMO_MODEL)
    other = run("convert", DEMO_MODEL, "-o", tmp_path / "p", "--quantizer", "nearest")
    assert other.exit_code == 1 and "contains another pack" in other.stderr


def test_inspect_names_the_layers_that_are_rotated(checkpoint: Checkpoint, tmp_path: Path) -> None:
    for unrotated, text in (((), "all"), ((1,), "0, 2"), ((2,), "0-1")):
        out = tmp_path / text.replace(" ", "")
        convert(
            checkpoint, plan_of(checkpoint), out, 1, prepared=Preparation(rotation=vectors_of(checkpoint, *unrotated))
        )
        assert f"\nrotated layers: {text}\n" in run("inspect", out).stdout
    convert(checkpoint, plan_of(checkpoint), tmp_path / "none", 1)
    assert "\nrotated layers: none\n" in run("inspect", tmp_path / "none").stdout


def test_a_synthetic_pack_may_be_rotated(tmp_path: Path) -> None:
    done("synth", DEMO_MODEL, "-o", tmp_path / "p", "--layers", 1, "--rotate", "on")
    with Pack(tmp_path / "p") as pack:
        assert pack.is_synthetic and pack.rotation is not None and pack.rotation.layers(pack.spec) == (0,)


TRELLIS = ExpertFormat(*(trellis_format(4, 0),) * 3)
EIGHT = ExpertFormat(*(part_format(8, 64),) * 3)
CODES = ExpertFormat(TRELLIS.gate, TRELLIS.up, FP8)


@pytest.mark.slow
def test_auto_takes_the_profiles_layers_except_where_no_format_gains_or_codes_are_kept(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    folder, tokens = checkpoint.folder, random_tokens(6, 32, 96)
    rotated = profiled(folder, tmp_path / "on", tokens, ProfileOptions("none", rotate="on"))
    measured, plan = measured_rotation(checkpoint), plan_of(checkpoint)
    for layers, expected in (
        ((TRELLIS, TRELLIS, TRELLIS), (0, 1, 2)),
        ((EIGHT, TRELLIS, CODES), (1,)),
        ((EIGHT, EIGHT, CODES), ()),
    ):
        mixed = dataclasses.replace(plan, experts=tuple((EIGHT, formats) for formats in layers))
        found = PlanRotation.chosen("auto", checkpoint, rotated).of(mixed)
        assert expected == (() if found is None else found.layers(checkpoint.spec)), layers
        for l in expected:
            assert found is not None
            np.testing.assert_array_equal(found.input[l], measured.input[l])
            np.testing.assert_array_equal(found.output[l], measured.output[l])
        assert PlanRotation.chosen("off", checkpoint, rotated).of(mixed) is None
        forced = PlanRotation.chosen("on", checkpoint, None).of(mixed)
        assert forced is not None and len(forced.layers(checkpoint.spec)) == 3
    assert PlanRotation.chosen("auto", checkpoint, None).of(plan) is None
    plain = profiled(folder, tmp_path / "off", tokens, ProfileOptions("none", rotate="off"))
    assert PlanRotation.chosen("auto", checkpoint, plain).of(plan) is None


@pytest.mark.slow
def test_a_line_says_that_losses_were_predicted_in_other_coordinates(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder, tokens = checkpoint.folder, random_tokens(6, 32, 96)
    rotated = profiled(folder, tmp_path / "on", tokens, ProfileOptions("none", rotate="on"))
    plain = profiled(folder, tmp_path / "off", tokens, ProfileOptions("none", rotate="off"))
    off, on = PlanRotation.chosen("off", checkpoint, None), PlanRotation.chosen("on", checkpoint, None)
    for chosen, profile, counts in ((off, rotated, (0, 3)), (on, plain, (3, 0))):
        assert chosen.note(profile) == (
            f"note: {counts[0]} of 3 layers are rotated, but the profile predicts losses with {counts[1]} of them "
            f"rotated; profile the model with --rotate {'on' if counts[0] else 'off'} for predictions that fit"
        )
    for profile in (rotated, plain):
        assert PlanRotation.chosen("auto", checkpoint, profile).note(profile) is None
    assert on.note(rotated) is None and off.note(plain) is None
