"""Calibrated conversion: the bytes that the quantizer gives, the same after any stop, and what it refuses to begin."""

import dataclasses
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event, Lock

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from support.cases import case
from support.coded import IN_BLOCKS, MXFP4_CONFIG, held_so, put_into_blocks
from support.commands import done
from support.commands import moe_pack as run
from support.killing import different_files, files_in
from support.models import Tensors, TinyMixtral
from support.profiles import QUICK, profiled, random_tokens
from torch import Tensor

from moe_pack.calib.profile import Profile
from moe_pack.calib.quantize import GuardedQuantizer, calibration_bytes
from moe_pack.convert import encoding
from moe_pack.convert.account import Preparation, Recipe
from moe_pack.convert.encoding import MadeItem, job_bytes, made_item
from moe_pack.convert.kept import keep_source
from moe_pack.convert.pipeline import convert, layout_for, memory_line
from moe_pack.formats import (
    BF16,
    MATRICES,
    CheckpointError,
    ConversionError,
    ExpertFormat,
    Pack,
    PartFormat,
    Plan,
    PlanError,
    part_format,
    trellis_format,
    uniform_plan,
)
from moe_pack.formats.families import Checkpoint
from moe_pack.formats.families.registry import LOADED
from moe_pack.formats.pack.codecs import decode_part
from moe_pack.formats.pack.layouts import Item
from moe_pack.formats.pack.writer import Step
from moe_pack.runtime.model import CheckpointWeights, NeuronBlock, PackWeights

D, F, E = 64, 1088, 2  # more neurons than are rounded at once
MODEL = TinyMixtral(D, F, num_layers=2, vocab_size=96)
TWO, EIGHT, HALVES = part_format(2, 64), part_format(8, 64), trellis_format(5, 0)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return MODEL.write(tmp_path_factory.mktemp("calibrated") / "source")


@pytest.fixture(scope="module")
def profile(source: Path) -> Profile:
    return profiled(source, source.parent / "profile", random_tokens(6, 32, 96))


@pytest.fixture
def checkpoint(source: Path) -> Iterator[Checkpoint]:
    held = Checkpoint(source)
    yield held
    held.close()


def plan_of(checkpoint: Checkpoint, selector: PartFormat = TWO, record: PartFormat = TWO) -> Plan:
    return uniform_plan(checkpoint.spec, "up", selector, record, part_format(4, 64), "calibrated")


def whole(weights: CheckpointWeights | PackWeights, layer_idx: int, expert: int) -> NeuronBlock:
    blocks = list(weights.expert(layer_idx, expert).blocks())
    gate = torch.cat([block.gate for block in blocks if block.gate is not None])
    return NeuronBlock(gate, torch.cat([block.up for block in blocks]), torch.cat([block.down for block in blocks]))


def part_of(block: NeuronBlock, first: int, end: int) -> NeuronBlock:
    assert block.gate is not None
    return NeuronBlock(block.gate[first:end], block.up[first:end], block.down[first:end])


def shuffled() -> NDArray[np.uint32]:
    return np.stack([np.random.default_rng(e).permutation(F).astype(np.uint32) for e in range(2 * E)]).reshape(2, E, F)


@pytest.mark.slow
def test_an_expert_holds_what_the_quantizer_makes_of_its_own_tokens(
    checkpoint: Checkpoint, profile: Profile, tmp_path: Path
) -> None:
    mixed = ExpertFormat(TWO, BF16, HALVES)
    plan = plan_of(checkpoint)
    plan = dataclasses.replace(plan, experts=(plan.experts[0], (ExpertFormat(EIGHT, BF16, EIGHT), mixed)))
    convert(checkpoint, plan, tmp_path / "p", 1, prepared=Preparation(calibration=profile, sequential=False))
    with Pack(tmp_path / "p") as pack:
        held = PackWeights(pack, CPU)
        assert pack.manifest.quantizer == "calibrated"
        for place in ((0, 1), (1, 1)):
            original = whole(CheckpointWeights(checkpoint), *place)
            with profile.inputs(place[0]) as inputs:
                tokens = inputs.of_expert(place[1])
            formats = plan.experts[place[0]][place[1]]
            quantizer = GuardedQuantizer(formats, tokens, "silu")
            blocks = [part_of(original, *ends) for ends in ((0, 1024), (1024, F))]
            made = [{m: quantizer.rows(m, block) for m in MATRICES} for block in blocks]
            found = whole(held, *place)
            for matrix in MATRICES:
                part = formats.of(matrix)
                assert part is not None
                expected = decode_part(part, D, torch.cat([block[matrix] for block in made]))
                assert torch.equal(getattr(found, matrix), expected), f"{place} {matrix}"


@pytest.mark.slow
def test_any_workers_stops_and_order_give_the_same_experts(
    checkpoint: Checkpoint, profile: Profile, tmp_path: Path
) -> None:
    plan = plan_of(checkpoint, TWO, HALVES)
    convert(checkpoint, plan, tmp_path / "one", 1, prepared=Preparation(calibration=profile))
    expected, stops = files_in(tmp_path / "one"), 0

    def stops_at(number: int) -> Callable[[Step], None]:
        def on_step(step: Step) -> None:
            if step.number == number:
                raise KeyboardInterrupt

        return on_step

    for number in range(5, 60, 18):
        try:
            convert(
                checkpoint, plan, tmp_path / "p", 2, on_step=stops_at(number), prepared=Preparation(calibration=profile)
            )
            break
        except KeyboardInterrupt:
            stops += 1
    convert(checkpoint, plan, tmp_path / "p", 2, prepared=Preparation(calibration=profile))
    assert stops >= 2 and not different_files(files_in(tmp_path / "p"), expected)
    convert(checkpoint, plan, tmp_path / "shuffled", 1, prepared=Preparation(order=shuffled(), calibration=profile))
    with Pack(tmp_path / "one") as one, Pack(tmp_path / "shuffled") as other:
        for e in range(E):
            rows = [torch.from_numpy(shuffled()[0, e].astype(np.int64)), torch.arange(F)]
            found, kept = (whole(PackWeights(held, CPU), 0, e) for held in (other, one))  # the same inputs
            assert torch.equal(found.down, kept.down[rows[0]]) and torch.equal(found.up, kept.up[rows[0]])


@pytest.mark.slow
def test_experts_at_work_at_once_keep_to_the_memory_and_the_bytes_are_the_same(
    checkpoint: Checkpoint, profile: Profile, new_folder: Callable[[], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(checkpoint)
    largest = max(job_bytes(checkpoint, plan, item) for item in layout_for(checkpoint, plan).items())
    convert(checkpoint, plan, one := new_folder(), 1, prepared=Preparation(calibration=profile))
    lock, begun, most = Lock(), 0, 0

    def counted(recipe: Recipe, item: Item, stop: Event, stored: Tensor | None = None) -> MadeItem:
        nonlocal begun, most
        with lock:
            begun += item.kind == "expert"
            most = max(most, begun)
        made = made_item(recipe, item, stop, stored)
        with lock:
            begun -= item.kind == "expert"
        return made

    monkeypatch.setattr(encoding, "made_item", counted)
    for num_experts, allowed in [(1, 1), (2.5, 2), (100, 3)]:
        with case(num_experts, allowed):
            most = 0
            memory_bytes = int(num_experts * largest)
            convert(
                checkpoint,
                plan,
                out := new_folder(),
                3,
                prepared=Preparation(calibration=profile),
                memory_bytes=memory_bytes,
            )
            assert most <= allowed and (most > 1 or allowed == 1)
            assert not different_files(files_in(out), files_in(one))


@pytest.mark.slow
def test_workers_that_wait_for_memory_are_told_of_and_how_much_would_do(
    source: Path, checkpoint: Checkpoint, profile: Profile
) -> None:
    out = source.parent / "told"
    few = [out, "--profile", profile.folder, "--record-bits", 2, "--workers", 5, "--memory", "30M"]
    found = done("convert", source, "-o", *few)
    told = re.search(
        r"(\d) of 5 workers run at once, because an expert takes up to (.*) MiB; --memory 1G is enough", found.stderr
    )
    assert told and int(told[1]) == max(1, 30 // float(told[2])), found.stderr
    plan = plan_of(checkpoint)
    assert memory_line(checkpoint, plan, layout_for(checkpoint, plan), 5, 1 << 30) is None


@pytest.mark.slow
def test_inputs_of_another_text_are_another_conversion(
    checkpoint: Checkpoint, profile: Profile, source: Path, tmp_path: Path
) -> None:
    plan = plan_of(checkpoint)
    convert(checkpoint, plan, tmp_path / "p", 1, prepared=Preparation(calibration=profile))
    other = profiled(source, tmp_path / "other", random_tokens(6, 32, 96, seed=1))
    with pytest.raises(ConversionError, match="contains another pack"):
        convert(checkpoint, plan, tmp_path / "p", 1, prepared=Preparation(calibration=other))
    plain = dataclasses.replace(plan, quantizer="nearest")
    convert(checkpoint, plain, tmp_path / "plain", 1, prepared=Preparation(calibration=profile))
    convert(checkpoint, plain, tmp_path / "plain", 1)  # to which inputs say nothing


def test_without_inputs_of_this_checkpoint_nothing_begins(
    checkpoint: Checkpoint, profile: Profile, source: Path, tmp_path: Path
) -> None:
    bare = profiled(source, tmp_path / "bare", random_tokens(2, 8, 96), dataclasses.replace(QUICK, keeps_inputs=False))
    stranger = profiled(
        dataclasses.replace(MODEL, seed=1).write(tmp_path / "source"), tmp_path / "stranger", random_tokens(2, 8, 96)
    )
    refused: list[tuple[Profile | None, str]] = [
        (None, "--quantizer calibrated needs a profile; give --profile, or make one with moe-pack profile"),
        (
            bare,
            f"--profile {bare.folder}: has no inputs of experts, which --quantizer calibrated needs; profile "
            "the model again, without --no-inputs",
        ),
        (stranger, f"--profile {stranger.folder}: the profile is of another checkpoint; profile this one"),
    ]
    for given, line in refused:
        with pytest.raises(PlanError) as error:
            convert(checkpoint, plan_of(checkpoint), tmp_path / "p", 1, prepared=Preparation(calibration=given))
        assert str(error.value) == line
        assert not (tmp_path / "p").exists()


@pytest.mark.parametrize(("matrix", "name"), [("down", "w2"), pytest.param("up", "w3", marks=pytest.mark.slow)])
def test_a_weight_that_no_scale_holds_is_named(
    matrix: str, name: str, profile: Profile, source: Path, tmp_path: Path
) -> None:
    def change(tensors: Tensors) -> None:
        weights = tensors[f"model.layers.1.block_sparse_moe.experts.1.{name}.weight"]
        (weights.T if matrix == "down" else weights)[1030] = 1e9

    held = Checkpoint(MODEL.write(tmp_path / "source", change))
    wide = profiled(tmp_path / "source", tmp_path / "profile", random_tokens(2, 8, 96))
    line = "column 1030" if matrix == "down" else "row 1030"
    with pytest.raises(CheckpointError, match=f"{name}.weight.*: {line} has weights too large for float16 scales"):
        convert(held, plan_of(held), tmp_path / "p", 1, prepared=Preparation(calibration=wide))
    held.close()


def test_kept_codes_and_biases_stand_next_to_calibrated_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LOADED, "mixtral", held_so(IN_BLOCKS, bias=("gate", "up")))

    def change(tensors: Tensors) -> None:
        put_into_blocks(tensors, 128, D)
        tensors["model.layers.0.experts.gate_up_bias"] = torch.randn(E, 256).to(torch.bfloat16)

    model = TinyMixtral(D, 128, config={"quantization_config": MXFP4_CONFIG})
    held = Checkpoint(model.write(tmp_path / "source", change))
    profile = profiled(tmp_path / "source", tmp_path / "profile", random_tokens(4, 16, 96))
    plan = keep_source(held, uniform_plan(held.spec, "up", TWO, HALVES, None, "calibrated"), 2, "source", None)
    convert(held, plan, tmp_path / "p", 1, prepared=Preparation(calibration=profile, sequential=False))
    block = next(iter(CheckpointWeights(held).expert(0, 1).blocks()))
    with profile.inputs(0) as inputs:
        quantizer = GuardedQuantizer(plan.experts[0][1], inputs.of_expert(1), held.spec.expert.function)
    assert quantizer.matrices == ("up",)
    made = {"up": quantizer.rows("up", block)}
    with Pack(tmp_path / "p") as pack:
        found = next(iter(PackWeights(pack, CPU).expert(0, 1).blocks()))
    assert torch.equal(found.up, decode_part(TWO, D, made["up"]))
    assert found.gate is not None and block.gate is not None and torch.equal(found.gate, block.gate)
    assert torch.equal(found.down, block.down)
    assert found.up_bias is not None and block.up_bias is not None and torch.equal(found.up_bias, block.up_bias)
    held.close()


def test_a_job_counts_what_its_calibration_holds(checkpoint: Checkpoint) -> None:
    calibrated, plain = plan_of(checkpoint), uniform_plan(checkpoint.spec, "up", TWO, TWO)
    item = next(item for item in layout_for(checkpoint, plain).items() if item.kind == "expert")
    across = 2 * F * D  # down, bfloat16
    assert job_bytes(checkpoint, plain, item) == item.num_bytes + across
    assert job_bytes(checkpoint, calibrated, item) == calibration_bytes(D, F, item.num_bytes + across)
    assert calibration_bytes(D, F, item.num_bytes + across) > item.num_bytes + across + 4 * 3 * D * 1024
    wide = uniform_plan(checkpoint.spec, "up", EIGHT, EIGHT, None, "calibrated")
    assert job_bytes(checkpoint, wide, item) == item.num_bytes + across


# --- the command


def formats_in(folder: Path) -> tuple[str, set[PartFormat | None]]:
    with Pack(folder) as pack:
        experts = [expert for layer in pack.index.experts for expert in layer]
        return pack.manifest.quantizer, {part for one in experts for part in (one.gate, one.up, one.down)}


def test_a_profile_with_inputs_calibrates(new_folder: Callable[[], Path]) -> None:
    source = TinyMixtral(D, 64).write(new_folder())
    profile = profiled(source, new_folder(), random_tokens(4, 16, 96))
    cases = [
        (["--record-bits", "2"], "calibrated", {trellis_format(8, 0), trellis_format(4, 0)}),
        (["--record-bits", "2.5", "--selector-bits", "3.5", "--group-size", "32", "--scale-bits", "8"],
         "calibrated", {trellis_format(5, 32, 8), trellis_format(7, 32, 8)}),
        (["--codec", "affine", "--record-bits", "3", "--dense-bits", "4"],
         "calibrated", {part_format(3, 64), part_format(4, 64)}),
        (["--quantizer", "hqq", "--sparsity", "0.5"], "hqq", {part_format(4, 64)}),
    ]  # fmt: skip
    for options, quantizer, formats in cases:
        with case(options, quantizer, formats):
            tmp_path = new_folder()
            done("convert", source, "-o", tmp_path / "p", "--profile", profile.folder, *options)
            assert formats_in(tmp_path / "p") == (quantizer, formats)


def test_a_profile_without_inputs_leaves_it_to_hqq(source: Path, tmp_path: Path) -> None:
    profiled(source, tmp_path / "bare", random_tokens(2, 8, 96), dataclasses.replace(QUICK, keeps_inputs=False))
    done("convert", source, "-o", tmp_path / "p", "--profile", tmp_path / "bare")
    assert formats_in(tmp_path / "p") == ("hqq", {part_format(4, 64)})


REFUSED = {
    "--quantizer calibrated": (
        2, "Error: --quantizer calibrated needs the experts' inputs; give a profile that has them with --profile"
    ),
    "--quantizer nearest --profile PROFILE": (
        2, "Error: --profile: nearest does not use a profile, and neurons are sorted only for a sparsity; give "
        "--sparsity, or remove --quantizer"
    ),
    "--codec trellis --record-bits 8": (
        1, "moe-pack: --record-bits 8: a trellis has 2 to 4 bits a weight; use --codec affine"
    ),
    "--codec affine --selector-bits 2.5": (
        1, "moe-pack: --selector-bits 2.5: affine has whole bits only; use --codec trellis"
    ),
    "--record-bits 2.5": (
        1, "moe-pack: --record-bits/--group-size: a trellis has no hqq quantization; use calibrated or nearest"
    ),
}  # fmt: skip


def test_options_that_do_not_go_together_and_formats_that_there_are_not_are_refused(
    source: Path, profile: Profile, tmp_path: Path
) -> None:
    for options, (exit_code, line) in REFUSED.items():
        with case(options):
            given = [str(profile.folder) if option == "PROFILE" else option for option in options.split()]
            refused = run("convert", source, "-o", tmp_path / "p", *given)
            assert refused.exit_code == exit_code and refused.stderr.splitlines()[-1] == line
