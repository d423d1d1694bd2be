"""Exports: a pack becomes a checkpoint again, whose tensors are the source's and whose logits are the pack's.

The judges are the source's own tensors, transformers, and the compressed-tensors library.
"""

import dataclasses
import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.cases import case
from support.coded import (
    FP8_CONFIG,
    MXFP4_CONFIG,
    from_mxfp4,
    packed_config,
    put_gpt_oss_into_blocks,
    quantize_fp8,
    quantize_packed,
)
from support.commands import done
from support.commands import moe_pack as run
from support.families import CARDS, TINY, Tiny, original, token_ids, write
from support.models import DEMO_MODEL, PackMaker, Tensors, TinyMixtral, pack
from support.profiles import profiled, random_tokens

from moe_pack.calib.quantize import rotation_vectors
from moe_pack.convert.account import Preparation
from moe_pack.convert.export import ExportWork, compare_export, export_compressed, export_plain
from moe_pack.convert.pipeline import convert
from moe_pack.formats import (
    BF16,
    ROW_GROUP,
    ConversionError,
    ExpertFormat,
    Pack,
    Plan,
    RunError,
    part_format,
    trellis_format,
    uniform_plan,
)
from moe_pack.formats.families import Checkpoint
from moe_pack.formats.pack.writer import Step, rewrite_thresholds
from moe_pack.formats.parts.specs import with_repeats
from moe_pack.runtime.model import CheckpointWeights, Decoder, PackWeights

MODEL = TinyMixtral(64, 128, num_layers=2, num_experts=3)
IDS = [5, 17, 3, 90, 41, 8, 8, 60]
# One of each way in which families store experts: by expert, fused, transposed, interlocking, one matrix, with biases,
# two stacks, tied heads, n-gram tables, tensors that are kept but not run.
FEW = {"mixtral", "gpt_oss", "dbrx", "granitemoe", "switch_transformers", "llama4_text", "gemma4_text", "deepseek_v3",
       "longcat_flash", "qwen4_exp_text"}  # fmt: skip


def tensors_of(folder: Path) -> Tensors:
    return {name: held for path in folder.glob("*.safetensors") for name, held in load_file(path).items()}


def in_16_bit(folder: Path) -> None:
    """Rounds the matrices of a checkpoint to bfloat16, as published ones are."""
    for path in folder.glob("*.safetensors"):
        held = load_file(path)
        rounded = {n: t.to(torch.bfloat16) if t.dtype == torch.float32 and t.dim() > 1 else t for n, t in held.items()}
        save_file(rounded, path, {"format": "pt"})


def whole_plan(checkpoint: Checkpoint) -> Plan:
    return uniform_plan(checkpoint.spec, "none", BF16, BF16, quantizer="nearest")


def exported(source: Path, folder: Path, plan: Callable[[Checkpoint], Plan] = whole_plan, **options: Any) -> Path:
    """The plain export of a pack of a checkpoint."""
    checkpoint = Checkpoint(source)
    convert(checkpoint, plan(checkpoint), folder / "pack", 1, prepared=Preparation(**options))
    checkpoint.close()
    with Pack(folder / "pack") as opened:
        export_plain(opened, folder / "out", None, ExportWork(shard_bytes=1 << 16))
    return folder / "out"


def check_equal(source: Path, out: Path) -> None:
    """Every tensor of the source is there again; those that packs do not keep may be missing, or partly zero."""
    expected, found = tensors_of(source), tensors_of(out)
    with Pack(out.parent / "pack") as opened:
        account = json.loads(opened.read_file("source.json").tobytes())["tensors"]
    dropped = {each["name"] for each in account if each["fate"] == "dropped"}
    partly = {each["name"] for each in account if each.get("weights") is not None}
    assert found.keys() <= expected.keys() and expected.keys() - found.keys() <= dropped
    for name, held in found.items():
        with case(name):
            assert held.dtype == expected[name].dtype and held.shape == expected[name].shape
            if name in partly:
                assert ((held == expected[name]) | (held == 0)).all() and held.count_nonzero()
            else:
                assert torch.equal(held, expected[name])


def test_a_head_that_differs_from_the_embedding_is_exported_as_one_of_its_own(new_folder: Callable[[], Path]) -> None:
    """The config of the source says that the embedding is the head, which programs other than transformers believe."""
    for tiny in (Tiny("mixtral", "", {}), Tiny("switch_transformers", "", {"tie_word_embeddings": False})):
        with case(tiny.family):
            folder = new_folder()
            (folder / "source").mkdir()
            source = write(tiny, folder / "source")
            values = json.loads((source / "config.json").read_text())
            (source / "config.json").write_text(json.dumps(values | {"tie_word_embeddings": True}))
            out = exported(source, folder)
            check_equal(source, out)
            said = json.loads((out / "config.json").read_text())["tie_word_embeddings"]
            assert said == (tiny.family == "switch_transformers"), "where the key scales what the head sees, it stays"
            with closing(Checkpoint(source)) as before, closing(Checkpoint(out)) as after:
                assert before.spec == after.spec and not after.spec.tied_head


def check_round_trip(tiny: Tiny, folder: Path) -> None:
    (folder / "source").mkdir()
    source = write(tiny, folder / "source")
    in_16_bit(source)
    out = exported(source, folder)
    check_equal(source, out)
    Checkpoint(out).close()


def test_a_16_bit_pack_gives_back_the_tensors_of_its_checkpoint(new_folder: Callable[[], Path]) -> None:
    seen = set()
    for tiny in TINY:
        if tiny.family in FEW - seen and tiny.name == "as it comes":
            seen.add(tiny.family)
            with case(tiny):
                check_round_trip(tiny, new_folder())
    assert seen == FEW


@pytest.mark.slow
def test_every_shape_of_every_family_comes_back(new_folder: Callable[[], Path]) -> None:
    for tiny in TINY:
        with case(tiny):
            check_round_trip(tiny, new_folder())


def test_a_checkpoint_of_many_shards_has_an_index_and_the_small_files(tmp_path: Path) -> None:
    source = TinyMixtral(vocab_size=4096).write_with_tokenizer(tmp_path / "source")
    out = exported(source, tmp_path)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    shards = sorted(path.name for path in out.glob("model-*.safetensors"))
    assert len(shards) > 1 and set(index["weight_map"].values()) == set(shards)
    for shard in shards:
        assert {n for n, at in index["weight_map"].items() if at == shard} == load_file(out / shard).keys()
        assert (out / shard).stat().st_size < 700_000  # one tensor has 524,288 bytes
    assert {p.name for p in out.iterdir()} - {*shards, "model.safetensors.index.json"} == {
        "config.json", "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    for name in ("config.json", "tokenizer.json"):
        assert (out / name).read_bytes() == (source / name).read_bytes()


@pytest.mark.slow
def test_order_rotation_and_repeated_rows_are_undone(tmp_path: Path) -> None:
    """transformers computes with the export what the pack does, although no row is where the source had it."""

    def loud(tensors: Tensors) -> None:
        for name, tensor in tensors.items():
            if ".w2." in name:
                tensor[:, [5, 100]] *= 30

    source = TinyMixtral(64, 1088, num_layers=2).write(tmp_path / "source", loud)
    profile = profiled(source, tmp_path / "profile", random_tokens(6, 32, 96))
    checkpoint = Checkpoint(source)
    spec = checkpoint.spec
    mixed = uniform_plan(
        with_repeats(spec, 34), "up", part_format(3, 64), trellis_format(8, ROW_GROUP), None, "calibrated"
    )
    eight = part_format(8, 64)
    plan = dataclasses.replace(mixed, experts=(mixed.experts[0], (ExpertFormat(eight, eight, eight),) * 2))
    generator = np.random.default_rng(1)
    order = np.array([[generator.permutation(1088) for _ in range(2)] for _ in range(2)], np.uint32)
    rotation = rotation_vectors(spec, "on")
    convert(
        checkpoint,
        plan,
        tmp_path / "pack",
        1,
        prepared=Preparation(order=order, calibration=profile, rotation=rotation),
    )
    checkpoint.close()
    with Pack(tmp_path / "pack") as opened:
        assert opened.spec.expert.repeats and opened.rotation is not None
        export_plain(opened, tmp_path / "out", "f32")
        expected = Decoder(PackWeights(opened, torch.device("cpu")), len(IDS)).logits(IDS)
        assert compare_export(opened, tmp_path / "out", IDS).largest < 1e-4
    with torch.no_grad():
        found = original(tmp_path / "out")(torch.tensor([IDS])).logits[0]
    assert expected.abs().max() > 0.5 and (found - expected).abs().max() < 1e-4


def test_quantized_sources_come_back_as_plain_weights(tmp_path: Path) -> None:
    for codec, config, code in (
        ("fp8", FP8_CONFIG, quantize_fp8),
        ("packed", packed_config(), quantize_packed),
    ):
        with case(codec):
            meant: Tensors = {}
            model = TinyMixtral(64, 128, config={"quantization_config": config})
            source = model.write(
                tmp_path / codec / "source", lambda t: meant.update(code(t, ("w1.weight", "w2.weight")))
            )
            checkpoint = Checkpoint(source)
            convert(checkpoint, whole_plan(checkpoint), tmp_path / codec / "pack", 1)
            checkpoint.close()
            with Pack(tmp_path / codec / "pack") as opened:
                export_plain(opened, tmp_path / codec / "out", None)
            found = tensors_of(tmp_path / codec / "out")
            assert found.keys() == model.tensors().keys()
            assert "quantization_config" not in json.loads((tmp_path / codec / "out" / "config.json").read_text())
            for name, held in meant.items():
                assert torch.equal(found[name], held.to(torch.bfloat16))
            Checkpoint(tmp_path / codec / "out").close()


def test_blocks_in_mxfp4_come_back_under_the_names_of_16_bit(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    write(Tiny("gpt_oss", "as it comes", {"hidden_size": 64, "intermediate_size": 64}), source)
    tensors, config = load_file(source / "model.safetensors"), json.loads((source / "config.json").read_text())
    put_gpt_oss_into_blocks(tensors, config["num_hidden_layers"], config["num_local_experts"], 64, 64)
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    (source / "config.json").write_text(json.dumps(config | {"quantization_config": MXFP4_CONFIG}))
    found = tensors_of(exported(source, tmp_path))
    for name in [name for name in tensors if name.endswith("_blocks")]:
        plain = name.removesuffix("_blocks")
        meant = from_mxfp4(tensors[name], tensors[f"{plain}_scales"]).mT  # 16-bit checkpoints have it transposed
        assert torch.equal(found[plain].float(), meant)
        assert name not in found and f"{plain}_scales" not in found
    with torch.no_grad():
        logits = original(tmp_path / "out")(torch.tensor([token_ids()])).logits[0]
    with Pack(tmp_path / "pack") as opened:
        expected = Decoder(PackWeights(opened, torch.device("cpu")), 128).logits(token_ids())
    assert (logits - expected).abs().max() < 1e-3


def test_dtypes_of_matrices_can_be_chosen(new_folder: Callable[[], Path]) -> None:
    source = MODEL.write(new_folder() / "source")
    for dtype, expected in (("bf16", torch.bfloat16), ("f16", torch.float16), ("f32", torch.float32)):
        with case(dtype):
            folder = new_folder()
            pack(source, folder / "pack", width=8)
            config = json.loads((folder / "pack" / "config.json").read_text())
            assert "dtype" not in config
            with Pack(folder / "pack") as opened:
                export_plain(opened, folder / "out", dtype)  # type: ignore[arg-type]  # a loop's variable is a str
                bound = {"bf16": 0.05, "f16": 0.01, "f32": 1e-4}[dtype]
                assert compare_export(opened, folder / "out", IDS).largest < bound
            found = tensors_of(folder / "out")
            assert found["model.layers.0.block_sparse_moe.experts.1.w2.weight"].dtype == expected
            assert found["lm_head.weight"].dtype == expected
            assert found["model.norm.weight"].dtype == torch.bfloat16  # vectors and routers keep the source's
            assert found["model.layers.0.block_sparse_moe.gate.weight"].dtype == torch.bfloat16


def by_library(folder: Path) -> torch.Tensor:
    """The logits of transformers, which decodes the codes with compressed-tensors."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    torch.nn.Module.float(model)  # it has experts in the dtype of their scales
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([IDS])).logits[0]
    return logits


def by_us(folder: Path) -> torch.Tensor:
    checkpoint = Checkpoint(folder)
    try:
        return Decoder(CheckpointWeights(checkpoint), len(IDS)).logits(IDS)
    finally:
        checkpoint.close()


def test_transformers_reads_codes_as_we_do(new_folder: Callable[[], Path]) -> None:
    """Scales in float32 make both exact; in bfloat16 the library rounds each product of a code and its scale."""
    source = MODEL.write(new_folder() / "source")
    for bits, dtype, bound in ((4, "f32", 1e-4), (8, "f32", 1e-4), (4, None, 0.05)):
        with case(bits, dtype):
            folder = new_folder()
            pack(source, folder / "pack", width=bits, group=32)
            with Pack(folder / "pack") as opened:
                result = export_compressed(opened, folder / "out", dtype)  # type: ignore[arg-type]  # as above
                assert result.formats is not None and {each.width for each in result.formats.values()} == {bits}
                expected = Decoder(PackWeights(opened, torch.device("cpu")), len(IDS)).logits(IDS)
            library, ours = by_library(folder / "out"), by_us(folder / "out")
            assert (library - ours).abs().max() < bound
            assert bits == 4 or (ours - expected).abs().max() < 0.1 < expected.abs().max()


def test_codes_with_a_zero_in_the_middle_are_carried_over(new_folder: Callable[[], Path]) -> None:
    """Gate and up of an absmax pack are the pack's own weights, bit for bit, if scales keep float16."""
    source = MODEL.write(new_folder() / "source")
    for width, group, bits in ((4, 32, 4), (2, 64, 4), (8, 64, 8), (4, ROW_GROUP, 8)):
        with case(width, group, bits):
            folder = new_folder()
            pack(source, folder / "pack", width=width, group=group, quantizer="absmax")
            with Pack(folder / "pack") as opened:
                result = export_compressed(opened, folder / "out", "f16", bits)  # type: ignore[arg-type]  # as above
                export_plain(opened, folder / "plain", "f32")
            assert result.codes is not None
            kept = {matrix: (each.carried, each.quantized) for matrix, each in result.codes.items()}
            assert kept == {"gate": (6, 0), "up": (6, 0), "down": (0, 6)}
            assert result.codes["gate"].error == 0 < result.codes["down"].error
            coded, plain = Checkpoint(folder / "out"), Checkpoint(folder / "plain")
            for matrix in ("gate", "up"):
                one, other = (CheckpointWeights(each).expert(1, 2) for each in (coded, plain))
                for block, same in zip(one.blocks(), other.blocks(), strict=True):
                    assert torch.equal(getattr(block, matrix), getattr(same, matrix))
            coded.close()
            plain.close()


def test_other_codes_are_quantized_again(new_folder: Callable[[], Path]) -> None:
    """Those of hqq and nearest have zeros that are no whole numbers; a rotated layer has other coordinates."""
    source = MODEL.write(new_folder() / "source")
    for options in (
        {"quantizer": "nearest"},
        {"quantizer": "absmax", "rotate": "on"},
        {"quantizer": "absmax", "group": 16},
    ):
        with case(options):
            folder = new_folder()
            pack(source, folder / "pack", **({"width": 4, "group": 32} | options))  # type: ignore[arg-type]  # of options
            with Pack(folder / "pack") as opened:
                codes = export_compressed(opened, folder / "out", None, 8).codes
            assert codes is not None and all(each.carried == 0 for each in codes.values())
            assert all(0 < each.relative < 0.01 for each in codes.values())


def test_words_are_those_of_the_library(tmp_path: Path) -> None:
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
    from compressed_tensors.quantization import QuantizationConfig

    pack(MODEL.write(tmp_path / "source"), tmp_path / "pack", width=4, group=32)
    with Pack(tmp_path / "pack") as opened:
        export_compressed(opened, tmp_path / "out", "f32")
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    read = QuantizationConfig.model_validate(config)
    (group,) = read.config_groups.values()
    assert group.weights is not None and (group.weights.num_bits, group.weights.group_size) == (4, 32)
    found, name = tensors_of(tmp_path / "out"), "model.layers.1.block_sparse_moe.experts.0.w2.weight"
    shape = torch.Size(found[f"{name}_shape"].tolist())
    codes = unpack_from_int32(found[f"{name}_packed"], 4, shape).float().view(64, -1, 32)
    meant = (codes * found[f"{name}_scale"].unsqueeze(2)).view(shape)
    checkpoint = Checkpoint(tmp_path / "out")
    (block,) = CheckpointWeights(checkpoint).expert(1, 0).blocks()
    assert shape == (64, 128) and torch.equal(block.down, meant.T)
    checkpoint.close()


def test_layers_of_different_widths_are_read_back(tmp_path: Path) -> None:
    checkpoint = Checkpoint(MODEL.write(tmp_path / "source"))
    plan, eight = whole_plan(checkpoint), part_format(8, 32)
    four = part_format(4, 32)
    layers = tuple((ExpertFormat(part, part, part),) * 3 for part in (four, eight))
    convert(checkpoint, dataclasses.replace(plan, experts=layers), tmp_path / "pack", 1)
    checkpoint.close()
    with Pack(tmp_path / "pack") as opened:
        formats = export_compressed(opened, tmp_path / "out", None).formats
        assert formats is not None and [formats[layer].width for layer in (0, 1)] == [4, 8]
        assert compare_export(opened, tmp_path / "out", IDS).kl < 0.1
    groups = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["config_groups"]
    assert [each["targets"] for each in groups.values()] == [
        [r"re:.*\.layers\.(0)\..*\.experts\.\d+\..*"],
        [r"re:.*\.layers\.(1)\..*\.experts\.\d+\..*"],
    ]
    experts = tensors_of(tmp_path / "out")
    sizes = [experts[f"model.layers.{layer}.block_sparse_moe.experts.0.w1.weight_packed"].shape[1] for layer in (0, 1)]
    assert sizes == [64 * 4 // 32, 64 * 8 // 32]


class KilledError(Exception):
    """The end of a run at a step."""


def test_a_killed_export_continues_to_the_same_bytes(tmp_path: Path) -> None:
    pack(MODEL.write(tmp_path / "source"), tmp_path / "pack", width=4, group=32)
    steps: list[Step] = []
    with Pack(tmp_path / "pack") as opened:
        small = ExportWork(shard_bytes=60_000)
        export_compressed(opened, tmp_path / "whole", None, work=dataclasses.replace(small, on_step=steps.append))
        expected = {path.name: path.read_bytes() for path in (tmp_path / "whole").iterdir()}
        for number in (*range(1, len(steps) + 1, 7), len(steps)):

            def kill(step: Step, at: int = number) -> None:
                if step.number == at:
                    raise KilledError

            folder = tmp_path / f"killed-{number}"
            with case(steps[number - 1]):
                with pytest.raises(KilledError):
                    export_compressed(opened, folder, None, work=dataclasses.replace(small, on_step=kill))
                if (folder / "export.json").exists():
                    with pytest.raises(
                        ConversionError, match="unfinished export of another pack or with other options"
                    ):
                        export_compressed(opened, folder, "f16", work=small)
                if (folder / "config.json").exists() and not (folder / "export.json").exists():
                    continue
                export_compressed(opened, folder, None, work=small)
                assert {path.name: path.read_bytes() for path in folder.iterdir()} == expected


def test_a_shard_that_is_complete_is_not_written_again(tmp_path: Path) -> None:
    pack(MODEL.write(tmp_path / "source"), tmp_path / "pack", width=4, group=32)
    first: list[Step] = []
    with Pack(tmp_path / "pack") as opened:

        def kill(step: Step) -> None:
            first.append(step)
            if step.action == "rename" and step.path.startswith("model-00003"):
                raise KilledError

        with pytest.raises(KilledError):
            export_plain(opened, tmp_path / "out", None, ExportWork(shard_bytes=60_000, on_step=kill))
        second: list[Step] = []
        work = ExportWork(shard_bytes=60_000, on_step=second.append)
        found = export_plain(opened, tmp_path / "out", None, work)
    renamed = [step.path for step in second if step.action == "rename" and step.path.startswith("model-")]
    assert renamed and renamed[0].startswith("model-00003")
    earlier = list((tmp_path / "out").glob("model-0000[12]-*"))
    assert found.resumed_bytes == sum(path.stat().st_size for path in earlier) and len(earlier) == 2


@pytest.mark.slow
def test_the_command_says_what_it_wrote_and_what_differs(demo_pack: PackMaker, tmp_path: Path) -> None:
    found = run("export", str(demo_pack("none", 4)), "--to", "compressed-tensors", "-o", tmp_path / "out", "--json")
    assert found.exit_code == 0, found.output
    values = json.loads(found.stdout)
    assert values["lost"] == {} and values["zeros"] == 0 and values["logits"]["kl"] < 0.01
    assert values["codes"]["down"]["carried"] == 0 and 0.05 < values["codes"]["down"]["relative"] < 0.12
    again = run("export", str(demo_pack("none", 4)), "--to", "safetensors", "-o", tmp_path / "out")
    assert again.exit_code == 1 and "is not empty; give a new folder" in again.output
    assert Checkpoint(tmp_path / "out").spec == Checkpoint(DEMO_MODEL).spec


def test_thresholds_are_said_to_be_lost(tmp_path: Path) -> None:
    pack(MODEL.write(tmp_path / "source"), tmp_path / "pack", width=4, group=32)
    with Pack(tmp_path / "pack") as opened:
        assert (
            "all neurons run"
            not in run(
                "export",
                tmp_path / "pack",
                "--to",
                "safetensors",
                "-o",
                tmp_path / "first",
                "--compare-tokens",
                "0",
            ).output
        )
        rewrite_thresholds(tmp_path / "pack", np.full_like(opened.thresholds, 0.01))
    found = run("export", tmp_path / "pack", "--to", "safetensors", "-o", tmp_path / "out", "--compare-tokens", "8")
    assert found.exit_code == 0 and "in the export all neurons run" in found.output
    assert "largest difference" in found.output  # from the pack with all neurons
    with Pack(tmp_path / "pack") as opened:
        assert compare_export(opened, tmp_path / "out", IDS).largest < 0.05


def test_what_cannot_be_exported_is_refused(new_folder: Callable[[], Path]) -> None:
    folder = new_folder()
    odd = TinyMixtral(64, 80, num_layers=1).write(folder / "source")
    pack(odd, folder / "pack", width=8, group=16)
    fused = new_folder()
    (fused / "source").mkdir()
    write(Tiny("gpt_oss", "as it comes", {"intermediate_size": 64}), fused / "source")
    in_16_bit(fused / "source")
    exported(fused / "source", fused)
    for place, arguments, message in [
        (folder, ("compressed-tensors",), "64 and 80 values; use --to safetensors"),
        (folder, ("compressed-tensors", "--group-size", "32"), "--group-size 32 does not divide"),
        (folder, ("safetensors", "--bits", "4"), "--bits needs --to compressed-tensors"),
        (fused, ("compressed-tensors",), "'gpt_oss' have no names for each expert's matrices"),
    ]:
        with case(arguments):
            found = run("export", place / "pack", "--to", *arguments, "-o", place / "refused")
            assert found.exit_code in (1, 2) and message in " ".join(found.output.split())
            assert not (place / "refused").exists()
    assert run("export", folder / "pack", "--to", "safetensors", "-o", folder / "out").exit_code == 0


def test_a_synthetic_pack_has_nothing_to_export(tmp_path: Path) -> None:
    MODEL.write(tmp_path / "source")
    done("synth", tmp_path / "source" / "config.json", "-o", tmp_path / "pack")
    with Pack(tmp_path / "pack") as opened, pytest.raises(RunError, match="is synthetic"):
        export_plain(opened, tmp_path / "out", None)


@pytest.mark.parametrize("family", ["llama4_text", "mistral4"])
def test_experts_that_have_codes_one_by_one_are_in_one_tensor_again(family: str, tmp_path: Path) -> None:
    sizes = {"intermediate_size": 64, "moe_intermediate_size": 64}
    tiny = Tiny(family, "as it comes", {key: size for key, size in sizes.items() if key in CARDS[family].config})
    (tmp_path / "source").mkdir()
    write(tiny, tmp_path / "source")
    exported(tmp_path / "source", tmp_path)
    with Pack(tmp_path / "pack") as opened:
        export_compressed(opened, tmp_path / "coded", "f32", 8)
    assert any(".experts.0." in name for name in tensors_of(tmp_path / "coded"))
    (tmp_path / "again").mkdir()
    out = exported(tmp_path / "coded", tmp_path / "again")
    assert set(tensors_of(out)) == set(tensors_of(tmp_path / "source"))
    with torch.no_grad():
        theirs = original(out)(torch.tensor([IDS]), use_cache=False).logits[0]
    with closing(Checkpoint(out)) as checkpoint:
        ours = Decoder(CheckpointWeights(checkpoint), 128).logits(IDS)
    assert (theirs - ours).abs().max() < 2e-5
