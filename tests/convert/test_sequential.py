"""Sequential calibration: experts are quantized for the inputs that the stored layers before them give."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from support.cases import case
from support.commands import moe_pack as run
from support.killing import different_files, files_in
from support.models import TinyMixtral
from support.profiles import profiled, random_tokens
from torch import Tensor

from moe_pack import formats
from moe_pack.calib.forward import LayerStates
from moe_pack.calib.forward.layers import Beginning
from moe_pack.calib.profile import Profile
from moe_pack.calib.quantize import ExpertTokens, GuardedQuantizer, LayerRotation, rotation_vectors
from moe_pack.convert.account import Preparation, read_rounding
from moe_pack.convert.pipeline import convert
from moe_pack.convert.sequential import STATES_FOLDER
from moe_pack.formats.families import Checkpoint
from moe_pack.formats.pack.codecs import decode_part
from moe_pack.formats.pack.manifests import RotationVectors
from moe_pack.formats.pack.writer import Step
from moe_pack.runtime.model import CheckpointWeights, NeuronBlock, PackWeights, activations, embed

D, F, E = 64, 128, 3
MODEL = TinyMixtral(D, F, num_layers=3, num_experts=E, vocab_size=96)
TWO, FOUR, HALVES = formats.trellis_format(4, 0), formats.trellis_format(8, 0), formats.part_format(2, 64)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return MODEL.write(tmp_path_factory.mktemp("sequential") / "source")


@pytest.fixture(scope="module")
def profile(source: Path) -> Profile:
    return profiled(source, source.parent / "profile", random_tokens(6, 32, 96))


@pytest.fixture
def checkpoint(source: Path) -> Iterator[Checkpoint]:
    opened = Checkpoint(source)
    yield opened
    opened.close()


def plan_of(checkpoint: Checkpoint, *others: tuple[int, int]) -> formats.Plan:
    """Returns a plan of 2 bits with a dense part in 4 bits; experts at these places have 4 bits."""
    plan = formats.uniform_plan(checkpoint.spec, "up", TWO, TWO, formats.part_format(4, 64), "calibrated")
    experts = [
        tuple(formats.ExpertFormat(FOUR, FOUR, FOUR) if (l, e) in others else one for e, one in enumerate(layer))
        for l, layer in enumerate(plan.experts)
    ]
    return dataclasses.replace(plan, experts=tuple(experts))


def inputs_in(pack: formats.Pack, profile: Profile, folder: Path) -> list[Tensor]:
    """Returns the inputs of each layer's experts in a finished pack, float32 [T, d], by plain torch."""
    weights = PackWeights(pack, CPU)
    sequences = torch.from_numpy(profile.kept_sequences().astype(np.int64))
    states = LayerStates(weights, Beginning(lambda n: embed(sequences[n], weights)), *sequences.shape, folder, CPU)
    found = []
    for layer in range(MODEL.num_layers):
        tokens = states.enter(layer)
        found.append(tokens.inputs.clone())
        rotation = LayerRotation(weights.rotation(layer))
        for e in range(E):
            token_idx, shares = tokens.of_expert(e)
            (block,) = weights.expert(layer, e).blocks()
            y = activations(rotation.inputs(found[-1][token_idx]), block, "silu").h @ block.down
            states.add(tokens, token_idx, shares, rotation.outputs(y))
        states.leave(layer, tokens)
    return found


def rows_of(pack: formats.Pack, layer: int, expert: int) -> NeuronBlock:
    (block,) = PackWeights(pack, CPU).expert(layer, expert).blocks()
    return block


@pytest.mark.slow
@pytest.mark.parametrize("rotate", ["off", "on"])
def test_each_layer_is_quantized_for_the_inputs_that_the_finished_pack_gives(
    rotate: str, checkpoint: Checkpoint, profile: Profile, tmp_path: Path
) -> None:
    vectors = rotation_vectors(checkpoint.spec, "on") if rotate == "on" else None
    convert(
        checkpoint, plan_of(checkpoint), tmp_path / "p", 2, prepared=Preparation(calibration=profile, rotation=vectors)
    )
    with formats.Pack(tmp_path / "p") as pack, torch.inference_mode():
        stored = inputs_in(pack, profile, tmp_path / "states")
        for layer, e in ((0, 1), (1, 0), (2, 2)):
            with profile.inputs(layer) as inputs:
                tokens, source_tokens = inputs.of_expert(e, stored=stored[layer]), inputs.of_expert(e)
            assert tokens.stored is not None and not torch.allclose(tokens.stored, source_tokens.inputs, atol=1e-2)
            made = rebuilt(checkpoint, tokens, (layer, e), vectors)
            found = rows_of(pack, layer, e)
            for matrix in formats.MATRICES:
                # Sums of other batches differ in their last bits, by which single codes may turn over.
                same = (getattr(found, matrix) == made[matrix]).all(dim=1).float().mean()
                assert same > 0.9, f"layer {layer} expert {e} {matrix}: {same:.0%} of the rows"
        rounding = read_rounding(pack)
        assert rounding is not None
        inherited = [[loss.inherited_error for loss in layer if loss is not None] for layer in rounding.experts]
        assert min(inherited[1]) > 0 and np.mean(inherited[2]) > np.mean(inherited[0]) > 0


def rebuilt(
    checkpoint: Checkpoint, tokens: ExpertTokens, place: tuple[int, int], vectors: RotationVectors | None
) -> dict[str, Tensor]:
    """Returns what the quantizer makes of an expert with these tokens."""
    rotation = LayerRotation.of(vectors, place[0])
    (block,) = CheckpointWeights(checkpoint).expert(*place).blocks()
    quantizer = GuardedQuantizer(formats.ExpertFormat(TWO, TWO, TWO), tokens.mapped(rotation.inputs), "silu")
    return {m: decode_part(TWO, D, quantizer.rows(m, rotation.block(block))) for m in formats.MATRICES}


@pytest.mark.slow
def test_any_workers_and_stops_give_the_same_bytes_and_no_states_stay(
    checkpoint: Checkpoint, profile: Profile, tmp_path: Path
) -> None:
    plan, out = plan_of(checkpoint), tmp_path / "p"
    convert(checkpoint, plan, tmp_path / "one", 1, prepared=Preparation(calibration=profile))
    stopped = list[Path]()

    def on_step(step: Step) -> None:
        states = list((out / STATES_FOLDER).glob("hidden-*"))
        if states and step.path.startswith("experts") and states[0] not in stopped:
            stopped.append(states[0])
            if len(stopped) == 2:  # a file that is cut is not gone on from
                states[0].write_bytes(states[0].read_bytes()[:100])
            raise KeyboardInterrupt

    for workers in (3, 1):
        with pytest.raises(KeyboardInterrupt):
            convert(checkpoint, plan, out, workers, on_step=on_step, prepared=Preparation(calibration=profile))
    convert(checkpoint, plan, out, 2, prepared=Preparation(calibration=profile))
    expected = files_in(tmp_path / "one")
    assert not different_files(files_in(out), expected) and not (out / STATES_FOLDER).exists()
    with pytest.raises(formats.ConversionError, match="another pack"):
        convert(checkpoint, plan, out, 1, prepared=Preparation(calibration=profile, sequential=False))


@pytest.mark.slow
def test_layers_behind_a_changed_layer_are_not_copied(checkpoint: Checkpoint, profile: Profile, tmp_path: Path) -> None:
    convert(checkpoint, plan_of(checkpoint), tmp_path / "earlier", 1, prepared=Preparation(calibration=profile))
    before = files_in(tmp_path / "earlier")
    for changed in ((2, 1), (1, 0)):
        with case(changed):
            plan, name = plan_of(checkpoint, changed), f"{changed[0]}"
            convert(checkpoint, plan, tmp_path / name, 1, prepared=Preparation(calibration=profile))
            convert(
                checkpoint,
                plan,
                tmp_path / f"{name}c",
                2,
                prepared=Preparation(calibration=profile),
                earlier=tmp_path / "earlier",
            )
            whole = files_in(tmp_path / name)
            assert not different_files(files_in(tmp_path / f"{name}c"), whole)
            behind = [f"experts-{layer:03d}.safetensors" for layer in range(changed[0] + 1, MODEL.num_layers)]
            assert all(whole[file] != before[file] for file in behind)


@pytest.mark.slow
def test_convert_says_which_errors_come_from_earlier_layers(source: Path, profile: Profile, tmp_path: Path) -> None:
    arguments = ["convert", str(source), "--profile", str(profile.folder), "--record-bits", "2", "--selector-bits", "2"]
    for choice, shown in (("--sequential", True), ("--no-sequential", False)):
        out = tmp_path / choice
        assert run(*arguments, "-o", out, choice).exit_code == 0
        said = run("inspect", out).stdout
        assert ("from earlier layers" in said) == shown
