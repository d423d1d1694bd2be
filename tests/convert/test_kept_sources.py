"""Packs that keep what a checkpoint in 8 or 4 bit holds: every weight the same bits, in any order, after any kill."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.cases import case
from support.coded import FP8_CONFIG, IN_BLOCKS, MXFP4_CONFIG, held_so, put_into_blocks, quantize_fp8
from support.commands import done
from support.commands import moe_pack as run
from support.losses import random_losses
from support.models import BOOK, Tensors, TinyMixtral

from moe_pack.convert import compare_logits, compare_weights
from moe_pack.convert.account import Preparation
from moe_pack.convert.kept import keep_source, lossless_formats, with_kept
from moe_pack.convert.pipeline import convert
from moe_pack.convert.plan.search import expert_choices
from moe_pack.formats import (
    BF16,
    CheckpointError,
    ExpertFormat,
    Pack,
    PackError,
    PartFormat,
    Plan,
    PlanError,
    Selector,
    dense_roles,
    part_format,
    uniform_plan,
)
from moe_pack.formats.families import Checkpoint
from moe_pack.formats.families.registry import LOADED
from moe_pack.formats.pack.plans import E5M2, FP8, MXFP4
from moe_pack.formats.pack.reader import audit
from moe_pack.runtime.model import PackWeights, read_neurons, read_rows

D, F, E = 192, 576, 2  # more neurons than are read at once; neither is a multiple of 128
CODED = ("_proj.weight", "w1.weight", "w2.weight", "w3.weight")
FOUR = part_format(4, 64)
CPU = torch.device("cpu")


def fp8_source(folder: Path) -> Path:
    model = TinyMixtral(D, F, num_layers=2, config={"quantization_config": FP8_CONFIG})
    return model.write(folder, lambda tensors: quantize_fp8(tensors, CODED))


@pytest.fixture
def mxfp4_source(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Makes a checkpoint in MXFP4 blocks; `spans` has the exponents of one neuron of layer 1, expert 0 so far apart."""

    def made(folder: Path, spans: int = 13) -> Path:
        monkeypatch.setitem(LOADED, "mixtral", held_so(IN_BLOCKS, bias=("gate", "up")))

        def change(tensors: Tensors) -> None:
            put_into_blocks(tensors, F, D)
            scales = tensors["model.layers.1.experts.down_scales"]  # [E, d, f / 32]
            scales[0, 3, 2], scales[0, 4, 2] = scales[0, :, 2].max(), scales[0, :, 2].max() - spans
            for i in range(2):
                tensors[f"model.layers.{i}.experts.gate_up_bias"] = torch.randn(E, 2 * F).to(torch.bfloat16)

        return TinyMixtral(D, F, num_layers=2, config={"quantization_config": MXFP4_CONFIG}).write(folder, change)

    return made


def kept_plan(checkpoint: Checkpoint, selector: Selector = "up") -> Plan:
    plan = uniform_plan(checkpoint.spec, selector, BF16, BF16)
    return keep_source(checkpoint, plan, "source", "source", "source")


def shuffled() -> np.ndarray:
    neurons = np.tile(np.arange(F, dtype=np.uint32), (2, E, 1))
    return np.random.default_rng(4).permuted(neurons, axis=2)


def assert_same_bits(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.equal(found.view(torch.int32), expected.contiguous().view(torch.int32))


def assert_experts_have_the_source_s_bits(pack: Pack, checkpoint: Checkpoint) -> None:
    weights, order = PackWeights(pack, CPU), pack.read_order().astype(np.int64)
    for l in range(2):
        for e in range(E):
            blocks = list(weights.expert(l, e).blocks())
            for matrix in checkpoint.spec.expert.matrices:
                stored = torch.cat([getattr(block, matrix) for block in blocks])
                original = read_neurons(checkpoint, checkpoint.expert_source(l, e, matrix)).float()
                assert_same_bits(stored, original[torch.from_numpy(order[l, e])])


@pytest.mark.slow
def test_kept_weights_have_the_source_s_bits(new_folder: Callable[[], Path], mxfp4_source: Callable[..., Path]) -> None:
    for coded in ["fp8", "mxfp4"]:  # last what changes how the family holds its experts
        for order in [None, shuffled()]:
            for selector in ["up", "both", "none"]:
                with case(coded, order, selector):
                    tmp_path = new_folder()
                    checkpoint = Checkpoint(
                        fp8_source(tmp_path / "s") if coded == "fp8" else mxfp4_source(tmp_path / "s")
                    )
                    plan = kept_plan(checkpoint, selector)
                    convert(checkpoint, plan, tmp_path / "p", 1, prepared=Preparation(order=order))
                    with Pack(tmp_path / "p") as pack:
                        audit(pack)
                        found = {part for layer in pack.index.experts for e in layer for part in (e.gate, e.up, e.down)}
                        assert found == ({FP8} if coded == "fp8" else {MXFP4, E5M2})
                        assert_experts_have_the_source_s_bits(pack, checkpoint)
                        assert all(error.mean == error.largest == 0 for error in compare_weights(pack, checkpoint))
                        assert compare_logits(pack, checkpoint, [5, 17, 3]).largest < 1e-5  # sums in the rows' order
                    checkpoint.close()


def test_dense_matrices_in_fp8_have_the_source_s_bits(tmp_path: Path) -> None:
    checkpoint = Checkpoint(fp8_source(tmp_path / "s"))
    convert(checkpoint, uniform_plan(checkpoint.spec, "up", FOUR, FOUR, quantizer="nearest"), tmp_path / "p", 1)
    with Pack(tmp_path / "p") as pack:
        weights, formats = PackWeights(pack, CPU), {dense.name: dense.format for dense in pack.manifest.dense}
        assert set(formats.values()) == {FP8} and len(formats) == 2 * 4 and "layers.1.attention.o" in formats
        for role in dense_roles(checkpoint.spec):
            if len(role.shape) == 2:
                original = read_rows(checkpoint, checkpoint.dense_source(role.name), 0, role.shape[0]).float()
                assert_same_bits(weights.matrix(role.name).rows(0, role.shape[0]), original)
        assert {"fp8", "affine", "dense_rows"} <= set(pack.manifest.features)
    checkpoint.close()


@pytest.mark.parametrize(("spans", "expected"), [(28, E5M2), (29, BF16)])
def test_a_neuron_whose_exponents_are_too_far_apart_takes_its_expert_s_down_to_bf16(
    spans: int, expected: PartFormat, tmp_path: Path, mxfp4_source: Callable[..., Path]
) -> None:
    checkpoint = Checkpoint(mxfp4_source(tmp_path / "s", spans))
    plan = kept_plan(checkpoint)
    assert [[expert.down for expert in layer] for layer in plan.experts] == [[E5M2, E5M2], [expected, E5M2]]
    assert {expert.gate for layer in plan.experts for expert in layer} == {MXFP4}
    convert(checkpoint, plan, tmp_path / "p", 1, prepared=Preparation(order=shuffled()))
    with Pack(tmp_path / "p") as pack:
        assert_experts_have_the_source_s_bits(pack, checkpoint)
    checkpoint.close()


def test_a_plan_that_would_round_such_a_neuron_is_refused(tmp_path: Path, mxfp4_source: Callable[..., Path]) -> None:
    near, far = (Checkpoint(mxfp4_source(tmp_path / str(spans), spans)) for spans in (28, 29))
    with pytest.raises(
        CheckpointError, match=r"exponents of a column 29 apart, e5m2 represents at most 28; store it in bf16$"
    ):
        convert(far, kept_plan(near), tmp_path / "p", 1)
    near.close()
    far.close()


def test_codes_are_kept_wherever_they_are_no_wider_than_what_is_asked_for(
    new_folder: Callable[[], Path], mxfp4_source: Callable[..., Path]
) -> None:
    eight, three = part_format(8, 64), part_format(3, 64)
    cases = [
        *(("fp8", bits, (FP8, FP8)) for bits in (None, 16, 8)), ("fp8", 4, (FOUR, FOUR)),
        ("plain", None, (FOUR, FOUR)), ("plain", 8, (eight, eight)), ("plain", "source", (BF16, BF16)),
        *(("mxfp4", bits, (MXFP4, E5M2)) for bits in (None, "source", 8)),
        ("mxfp4", 4, (MXFP4, FOUR)), ("mxfp4", 3, (three, three)),
    ]  # fmt: skip
    for coded, bits, expected in cases:
        with case(coded, bits, expected):
            tmp_path = new_folder()
            if coded == "mxfp4":
                folder = mxfp4_source(tmp_path)
            else:
                folder = fp8_source(tmp_path) if coded == "fp8" else TinyMixtral(D, F, num_layers=2).write(tmp_path)
            checkpoint = Checkpoint(folder)
            asked = bits if isinstance(bits, int) else 16 if bits == "source" else 4
            plan = uniform_plan(checkpoint.spec, "up", part_format(asked, 64), part_format(asked, 64))
            kept = keep_source(checkpoint, plan, bits, bits, None)
            assert {(e.gate, e.up, e.down) for layer in kept.experts for e in layer} == {(expected[0], *expected)}
            checkpoint.close()


def test_dense_fp8_is_kept_unless_fewer_bits_are_asked_for(new_folder: Callable[[], Path]) -> None:
    for bits, kept in [(None, True), ("source", True), (16, True), (8, True), (4, False)]:
        with case(bits, kept):
            tmp_path = new_folder()
            checkpoint = Checkpoint(fp8_source(tmp_path))
            width = bits if isinstance(bits, int) else 16
            dense = None if width == 16 else part_format(width, 64)
            plan = keep_source(checkpoint, uniform_plan(checkpoint.spec, "up", FOUR, FOUR, dense), 4, 4, bits)
            formats = {role.name: part for role, part in zip(dense_roles(checkpoint.spec), plan.dense, strict=True)}
            assert formats["layers.0.attention.q"] == (None if kept else dense)
            assert formats["embed"] == dense  # in 16 bit in the source
            checkpoint.close()


@pytest.mark.parametrize(("dtype", "name"), [(torch.float16, "F16"), (torch.float32, "F32")])
def test_experts_that_no_format_keeps_are_refused(dtype: torch.dtype, name: str, tmp_path: Path) -> None:
    checkpoint = Checkpoint(TinyMixtral(dtype=dtype).write(tmp_path))
    with pytest.raises(PlanError) as refused:
        kept_plan(checkpoint)
    assert str(refused.value) == (
        "--record-bits source: model.safetensors: tensor 'model.layers.0.block_sparse_moe.experts.0.w1.weight' is "
        f"{name}, which no format of experts keeps without loss; give a width (16 is bfloat16)"
    )
    checkpoint.close()


def test_a_plan_that_keeps_codes_the_checkpoint_has_not_is_refused(tmp_path: Path) -> None:
    coded, plain = Checkpoint(fp8_source(tmp_path / "s")), Checkpoint(TinyMixtral(D, F, num_layers=2).write(tmp_path))
    with pytest.raises(PlanError) as refused:
        convert(plain, kept_plan(coded), tmp_path / "p", 1)
    assert str(refused.value) == (
        "plan: model.safetensors: tensor 'model.layers.0.block_sparse_moe.experts.0.w1.weight' is BF16 and "
        "cannot be kept as fp8; make a plan for this checkpoint"
    )
    coded.close()
    plain.close()


@pytest.mark.parametrize("coded", ["fp8", "mxfp4"])
def test_a_code_that_is_no_number_is_named(coded: str, tmp_path: Path, mxfp4_source: Callable[..., Path]) -> None:
    def spoil(tensors: Tensors) -> None:
        quantize_fp8(tensors, CODED)
        name = "model.layers.1.block_sparse_moe.experts.0.w2.weight"
        tensors[name].view(torch.uint8)[5, 130] = 0x7F

    if coded == "fp8":
        model = TinyMixtral(D, F, num_layers=2, config={"quantization_config": FP8_CONFIG})
        folder = model.write(tmp_path / "s", spoil)
    else:
        folder = mxfp4_source(tmp_path / "s")
        path = folder / "model.safetensors"
        tensors = load_file(path)
        tensors["model.layers.1.experts.down_scales"][0, :, 2] = 240
        tensors["model.layers.1.experts.down_scales"][0, 5, 2] = 255
        save_file(tensors, path)
    checkpoint = Checkpoint(folder)
    with pytest.raises(CheckpointError) as refused:
        convert(checkpoint, kept_plan(checkpoint), tmp_path / "p", 1)
    where = (
        "tensor 'model.layers.1.block_sparse_moe.experts.0.w2.weight': weight [5, 130]"
        if coded == "fp8"
        else "tensor 'model.layers.1.experts.down_blocks', rows 0 to 191: weight [5, 64]"
    )
    assert str(refused.value) == f"model.safetensors: {where} is nan, expected a number"
    checkpoint.close()


def test_a_changed_code_of_the_source_is_told_from_what_was_kept(tmp_path: Path) -> None:
    source = Checkpoint(fp8_source(tmp_path / "s"))
    convert(source, kept_plan(source), tmp_path / "p", 1)

    def change(tensors: Tensors) -> None:
        quantize_fp8(tensors, CODED)
        tensors["model.layers.1.block_sparse_moe.experts.1.w2.weight"].view(torch.uint8)[5, 130] ^= 1

    model = TinyMixtral(D, F, num_layers=2, config={"quantization_config": FP8_CONFIG})
    other = Checkpoint(model.write(tmp_path / "other", change))
    with (
        Pack(tmp_path / "p") as pack,
        pytest.raises(PackError, match=r"^layer 1 expert 1: down does not match the checkpoint"),
    ):
        compare_weights(pack, other)
    source.close()
    other.close()


# --- the command line


def test_by_default_a_checkpoint_in_fp8_keeps_its_codes_and_is_told_so(tmp_path: Path) -> None:
    source = fp8_source(tmp_path / "s")
    result = done("convert", source, "-o", tmp_path / "p")
    assert "kept without loss: down fp8 (4 experts), gate fp8 (4 experts), up fp8 (4 experts)\n" in result.stderr
    facts = json.loads(run("inspect", tmp_path / "p", "--json").stdout)
    assert facts["experts"][1][1]["down"] == "fp8"
    # Attention is in FP8 too, and its codes stay. Embedding and head have 16 bits in the source, and get 8.
    codecs = {name: part["codec"] for name, part in facts["dense"].items()}
    assert codecs.pop("embed") == codecs.pop("head") == "affine"
    assert set(codecs.values()) == {"fp8"} and len(codecs) == 2 * 4
    lost = json.loads(run("verify", tmp_path / "p", "--against", source, "--json").stdout)["weights"]
    largest = {error["stored_as"]: error["largest"] for error in lost if error["matrix"] == "dense"}
    assert largest["fp8"] == 0 < largest["8 bit g64"]
    verified = done("verify", tmp_path / "p", "--against", source)
    assert "fp8" in verified.output and "nan" not in verified.output
    done("check", tmp_path / "p", "--against", source)


def test_a_synthetic_pack_has_no_source_to_keep(tmp_path: Path) -> None:
    result = run("synth", "olmoe", "-o", tmp_path / "p", "--record-bits", "source")
    assert result.exit_code == 1
    assert "--record-bits source: no checkpoint is given whose weights can be kept; give a width\n" in result.stderr


# --- plans for a memory


@pytest.mark.slow
@pytest.mark.parametrize(("limit", "is_kept"), [("1e-7", True), ("2", False)])
def test_a_plan_for_a_memory_keeps_fp8_where_little_may_be_lost_and_quantizes_it_where_much_may(
    limit: str, is_kept: bool, tmp_path: Path, unmeasured: None
) -> None:
    config = {"quantization_config": FP8_CONFIG, "num_experts_per_tok": 2}
    model = TinyMixtral(128, 160, num_layers=2, num_experts=4, vocab_size=4096, config=config)
    source = model.write_with_tokenizer(tmp_path / "s")
    model.write(source, lambda tensors: quantize_fp8(tensors, CODED))
    done("profile", source, "-o", tmp_path / "profile", "--tokens", 1024, "--sequence-length", 64)
    target = ["--target-vram", "16M", "--device", "cpu", "--context", "64", "--max-loss", limit]
    text = ["--eval-data", BOOK, "--eval-tokens", 512]
    done("convert", source, "-o", tmp_path / "p", "--profile", tmp_path / "profile", *target, *text)
    with Pack(tmp_path / "p") as pack:
        parts = {part for layer in pack.index.experts for e in layer for part in (e.gate, e.up, e.down) if part}
        assert {part.codec == "fp8" for part in parts} == {is_kept}
        kl = json.loads((tmp_path / "p" / "quality.json").read_text())["content"]["against"]["kl"]
        assert (abs(kl["value"]) < 1e-8) == is_kept


def test_a_format_that_keeps_a_matrix_is_offered_for_it_alone(
    tmp_path: Path, mxfp4_source: Callable[..., Path]
) -> None:
    near, far = (Checkpoint(mxfp4_source(tmp_path / str(spans), spans)) for spans in (28, 29))
    assert lossless_formats(near) == {"gate": MXFP4, "up": MXFP4, "down": E5M2}
    assert lossless_formats(far) == {"gate": MXFP4, "up": MXFP4}  # one expert's down is in bf16
    known = random_losses(near.spec)
    losses = with_kept(known, lossless_formats(near))
    assert losses.formats[-1] == BF16 and set(losses.formats) - set(known.formats) == {MXFP4, E5M2}
    for part, kept in ((MXFP4, (True, True, False)), (E5M2, (False, False, True))):
        lost = losses.quantized[..., losses.formats.index(part)]
        for matrix_idx, is_kept in enumerate(kept):
            assert (lost[:, :, matrix_idx] == (0 if is_kept else np.inf)).all()
    choices = expert_choices(near.spec, "up", losses)
    assert ExpertFormat(MXFP4, MXFP4, E5M2) in choices.formats
    assert not any(choice.down == MXFP4 or E5M2 in (choice.gate, choice.up) for choice in choices.formats)
    assert np.isfinite(choices.losses(losses)).all()
    near.close()
    far.close()
