"""Folders that can be read in two ways, or have something else in a file's place: one line says what to do."""

import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cases import case, line_of
from support.folders import EMBED, HEAD, INDEX, OTHER, SHARDS, SINGLE, base_alone, sharded, single, with_files, without
from support.models import Tensors

from moe_pack.convert import find_checkpoint
from moe_pack.formats import CheckpointError
from moe_pack.formats.families import Checkpoint
from moe_pack.runtime.text import Text

GGUF = Path(__file__).parents[1] / "data" / "gguf" / "mixtral.gguf"
ADAPTER = "peft: PeftModel.from_pretrained(MODEL, ADAPTER).merge_and_unload().save_pretrained(OUT)"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a21\nsize 4976698672\n"
PAGES = (
    "<!DOCTYPE html><html>not found</html>", "\n<html lang=en>", '<?xml version="1.0"?><Error/>',
    "<Error><Code>AccessDenied</Code></Error>",
)  # fmt: skip


def refusal(source: Path) -> str:
    return line_of(CheckpointError, lambda: Checkpoint(find_checkpoint(str(source))))


def test_a_folder_with_two_models_is_refused_until_one_is_removed(tmp_path: Path) -> None:
    folder = single(sharded(tmp_path), OTHER)
    assert refusal(folder) == (
        f"{folder}: has two models, {SINGLE} and 3 files that {INDEX} names; remove {INDEX} to convert {SINGLE}, which "
        f"transformers loads, or remove {SINGLE} to convert the others"
    )
    for removed in (INDEX, SINGLE):
        kept = Path(shutil.copytree(folder, tmp_path / f"without {removed}"))
        Checkpoint(without(kept, removed)).close()


def test_an_adapter_that_is_not_merged_is_refused(new_folder: Callable[[], Path]) -> None:
    names = [
        "adapter_model.safetensors", "adapter_model.bin", "adapter_model-00001-of-00002.safetensors",
        "adapters.safetensors", "0000100_adapters.safetensors", "pytorch_lora_weights.safetensors",
        "my-LoRA.safetensors",
    ]  # fmt: skip
    for name in names:
        for make in (single, sharded, with_gguf):
            with case(name, make):
                message = refusal(with_files(make(new_folder()), name))
                assert f"has an adapter, {name}, which is not merged into the weights; merge it first" in message
                assert ADAPTER in message
    alone = without(with_files(single(new_folder()), *names), "config.json", SINGLE)
    assert f"{alone}: has an adapter, {names[4]}, {names[2]}, {names[1]}, {names[0]} and 3 more, which" in refusal(
        alone
    )
    for name in ["checkpoint-9/adapter_model.safetensors", "exploration.safetensors", "adapter_config.json"]:
        with case(name):
            Checkpoint(with_files(single(new_folder()), name)).close()


def with_gguf(folder: Path) -> Path:
    shutil.copy(GGUF, folder)
    return folder


def test_tensors_of_an_adapter_are_refused(new_folder: Callable[[], Path]) -> None:
    names = [
        "q_proj.lora_A.weight", "q_proj.base_layer.weight", "q_proj.lora_magnitude_vector", "q_proj.lora_B.x.weight",
    ]  # fmt: skip
    for name in names:
        name = f"base_model.model.model.layers.0.self_attn.{name}"
        with case(name):
            folder = single(new_folder(), change=lambda tensors: tensors.__setitem__(name, torch.ones(2)))
            assert refusal(folder) == (
                f"checkpoint: tensor {name!r} is of an adapter that is not merged into the weights; merge it first "
                "with peft: model.merge_and_unload().save_pretrained(OUT)"
            )


def test_a_folder_that_lacks_weights_is_refused_by_what_it_has(new_folder: Callable[[], Path]) -> None:
    neither = f"found neither {SINGLE} nor {INDEX}; is the download complete?"
    cases = [
        (["model.safetensors.incomplete"], neither),
        (["training_args.bin", "optimizer.pt"], neither),
        (["original/consolidated.00.pth"], neither),
        (SHARDS[:2], f"found {', '.join(SHARDS[:2])} without {INDEX}, which says what is in them; download it too"),
        (["consolidated.safetensors", "model.Q4_0.gguf"],
         "found consolidated.safetensors, which has its authors' names of tensors; download the model's files for "
         f"transformers, {SINGLE} or {INDEX} and its shards"),
        (["model.fp16.safetensors"],
         f"found model.fp16.safetensors, expected {SINGLE} or {INDEX}; if one file has the whole model, rename it "
         f"to {SINGLE}"),
        (["flax_model.msgpack", "tf_model.h5"],
         f"found flax_model.msgpack, tf_model.h5, expected {SINGLE} or {INDEX}; download the model as safetensors"),
    ]  # fmt: skip
    for names, message in cases:
        with case(names):
            folder = without(with_files(single(new_folder()), *names), SINGLE)
            assert refusal(folder) == f"{folder}: {message}"


def test_a_folder_in_it_that_cannot_be_read_is_left_alone(tmp_path: Path) -> None:
    folder = with_files(single(tmp_path), "closed/model.bin", "loop/m.bin", "odd\n.bin")
    (folder / "loop" / "again").symlink_to(folder / "loop" / "again")
    (folder / "closed").chmod(0)
    try:
        with closing(Checkpoint(folder)) as checkpoint:
            (note,) = checkpoint.notes()
    finally:
        (folder / "closed").chmod(0o700)
    assert note.startswith("note: not used: 'odd\\n.bin', ") and note.endswith("loop/")


def test_all_missing_shards_are_named(tmp_path: Path) -> None:
    folder = without(sharded(tmp_path), SHARDS[0], SHARDS[2])
    (folder / SHARDS[2]).symlink_to("../blobs/gone")
    assert refusal(folder) == (
        f"{folder}: the download is incomplete: of 3 files that {INDEX} names, 2 are missing; download {SHARDS[0]}, "
        f"{SHARDS[2]}"
    )


def test_what_lies_in_a_file_s_place_is_named(new_folder: Callable[[], Path]) -> None:
    pointer = "is a Git LFS pointer, not the file; run git lfs pull, or download the file again"
    page = "is a page of HTML or XML, not the file; the download failed: download the file again"
    texts = [(POINTER, pointer), *((text, page) for text in PAGES), ("", "is empty")]
    for text, message in texts:
        for make, name in [(single, SINGLE), (sharded, SHARDS[1]), (sharded, INDEX), (single, "config.json")]:
            with case(text, name):
                folder = make(new_folder())
                (folder / name).write_text(text)
                assert refusal(folder).startswith(f"{name}: {message}")
        with case(text, "GGUF"):
            path = new_folder() / "model.gguf"
            path.write_text(text)
            assert refusal(path).startswith(f"model.gguf: {message}")
    folder = single(new_folder())
    (folder / SINGLE).write_text("Entry not found")
    assert refusal(folder).startswith(f"{SINGLE}: begins with the text 'Entry no', which no safetensors file does; ")


def test_a_pointer_in_a_tokenizer_s_place_is_named(tmp_path: Path) -> None:
    folder = single(tmp_path)
    (folder / "tokenizer.json").write_text(POINTER)
    checkpoint = Checkpoint(folder)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: is a Git LFS pointer, not the file; run git lfs pull"):
        Text(checkpoint.files)
    checkpoint.close()


def test_a_model_without_its_head_is_refused(tmp_path: Path) -> None:
    assert refusal(single(tmp_path, change=base_alone)) == (
        f"checkpoint: tensor {HEAD!r} is missing: the model was saved without its head; save it again with "
        "transformers' AutoModelForCausalLM"
    )


def test_two_tensors_of_one_name_are_not_joined(tmp_path: Path) -> None:
    """A wrapper's prefix is left out only where that leaves every tensor a name of its own."""

    def change(tensors: Tensors) -> None:
        tensors["module._orig_mod.model.norm.weight"] = tensors.pop("model.norm.weight")
        tensors["module.model.norm.weight"] = torch.ones(64)
        tensors[f"module.{EMBED}"] = tensors.pop(EMBED)

    assert refusal(single(tmp_path, change=change)) == f"checkpoint: tensor {EMBED!r} is missing"


def test_an_empty_quantization_config_is_none(new_folder: Callable[[], Path]) -> None:
    cases: list[Any] = [{}, None]
    for value in cases:
        with case(value):
            Checkpoint(single(new_folder(), quantization_config=value)).close()
    message = refusal(single(new_folder(), quantization_config={"quant_method": "awq"}))
    assert message.startswith("config.json: quantization_config: quant_method is 'awq', supported: ")
