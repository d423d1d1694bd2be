"""Folders of strangers: we read what transformers loads."""

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import torch
from support.cases import case
from support.families import Tiny, oracle, write
from support.folders import (
    EMBED,
    HEAD,
    INDEX,
    OTHER,
    SHARDS,
    SINGLE,
    Change,
    base_alone,
    head_alone,
    of_one_file,
    overlaid,
    prefixed,
    sharded,
    single,
    twice,
    unnamed,
    with_files,
    within,
    without,
)

from moe_pack.convert import find_checkpoint
from moe_pack.formats.families import Checkpoint
from moe_pack.runtime.model import CheckpointWeights, Decoder

IDS = [(11 * i * i + 5 * i + 3) % 64 for i in range(16)]
TOLERANCE = 1e-4  # of float32 logits, whose sums have another order; logits reach 1 to 10


@torch.no_grad()
def loaded(folder: Path) -> torch.Tensor:
    """The logits of transformers."""
    return oracle(folder)(IDS)


def read(folder: Path) -> tuple[torch.Tensor, list[str]]:
    """Our logits, and the lines for users on what is read."""
    with closing(Checkpoint(find_checkpoint(str(folder)))) as checkpoint:
        decoder = Decoder(CheckpointWeights(checkpoint, torch.device("cpu")), len(IDS))
        return decoder.logits(IDS), checkpoint.notes()


def test_a_folder_is_the_model_that_transformers_loads(new_folder: Callable[[], Path]) -> None:
    stale = (
        f"note: {INDEX} is not used: of 3 files that it names, {{}} missing; the weights are those of {SINGLE}, as in "
        "transformers"
    )
    cases: list[tuple[Callable[[Path], object], list[str]]] = [
        (single, []),
        (sharded, []),
        (of_one_file, []),
        (unnamed, [f"note: {INDEX} does not name model.norm.weight, used all the same, as transformers does"]),
        (lambda f: with_files(single(f), "training_args.bin", "optimizer.pt", "rng_state_0.pth", ".x.safetensors"), []),
        (lambda f: with_files(single(f), "runs/events.1", "README.md"), []),
        (lambda f: without(single(sharded(f, OTHER)), *SHARDS), [stale.format("3 are")]),
        (
            lambda f: without(single(sharded(f, OTHER)), SHARDS[1]),
            [stale.format("1 is"), f"note: not used: {SHARDS[0]}, {SHARDS[2]}"],
        ),
        (lambda f: with_files(sharded(f), "pytorch_model.bin"), ["note: not used: pytorch_model.bin"]),
        (
            lambda f: with_files(
                sharded(f), *(f"pytorch_model-{i}-of-9.bin" for i in range(9)), "pytorch_model.bin.index.json"
            ),
            ["note: not used: " + ", ".join(f"pytorch_model-{i}-of-9.bin" for i in range(4)) + " and 5 more"],
        ),
        (
            lambda f: with_files(single(f), "consolidated.safetensors", "original/consolidated.00.pth", "m.gguf"),
            ["note: not used: consolidated.safetensors, m.gguf, original/"],
        ),
        (
            lambda f: with_files(
                sharded(f), "model.fp16.safetensors", "x.safetensors.incomplete", "tf_model.h5", "onnx/m.onnx"
            ),
            ["note: not used: model.fp16.safetensors, tf_model.h5, x.safetensors.incomplete, onnx/"],
        ),
        (
            lambda f: overlaid(f, "model-overlay.safetensors", 1.0),
            [f"note: {SHARDS[0]}: {HEAD} is not used; {INDEX} names model-overlay.safetensors for it"],
        ),
        (
            lambda f: overlaid(f, "a-first.safetensors", 0.0),
            [f"note: {SHARDS[0]}: {HEAD} is not used; {INDEX} names a-first.safetensors for it"],
        ),
    ]
    for number, (build, notes) in enumerate(cases):
        folder = new_folder()
        build(folder)
        with case(number, notes):
            found, lines = read(folder)
            assert lines == notes
            assert (found - loaded(folder)).abs().max() < TOLERANCE


def test_the_index_decides_where_the_last_file_has_a_stale_copy(tmp_path: Path) -> None:
    """transformers takes the copy of the last file, whatever the index says."""
    found, notes = read(overlaid(tmp_path / "overlaid", "a-first.safetensors", 1.0))
    assert notes == [f"note: {SHARDS[0]}: {HEAD} is not used; {INDEX} names a-first.safetensors for it"]
    assert (found - read(single(tmp_path / "single"))[0]).abs().max() == 0


# --- heads and names


def test_a_tied_head_is_what_transformers_takes(new_folder: Callable[[], Path]) -> None:
    cases: list[tuple[Change, str]] = [
        (
            lambda tensors: None,
            f"config.json says that the head is the embedding, but {HEAD!r} differs from {EMBED!r}; ",
        ),
        (lambda tensors: tensors[HEAD][-1, -1:].mul_(2), f"but {HEAD!r} differs from {EMBED!r}; "),
        (twice, f"note: tensor {HEAD!r} is a copy of {EMBED!r}, and is left out"),
        (
            head_alone,
            f"note: tensor {EMBED!r} is missing; {HEAD!r} is read in its place, because config.json says that",
        ),
        (base_alone, "tensors have other names than the model's: 'embed_tokens.weight' is read as"),
    ]
    for number, (change, note) in enumerate(cases):
        with case(number, note):
            folder = single(new_folder() / "model", change=change, tie_word_embeddings=True)
            found, notes = read(folder)
            assert len(notes) == 1 and note in notes[0]
            assert (found - loaded(folder)).abs().max() < TOLERANCE


def test_a_tied_head_that_differs_is_the_head_in_each_family(new_folder: Callable[[], Path]) -> None:
    for family in ("qwen3_moe", "qwen2_moe", "granitemoe", "deepseek_v3", "gemma4"):
        with case(family):
            folder = write(Tiny(family, "own head", {"tie_word_embeddings": False}), new_folder())
            before, notes = read(folder)
            values = json.loads((folder / "config.json").read_text())
            (folder / "config.json").write_text(json.dumps(values | {"tie_word_embeddings": True}))
            assert notes == [] and (before - loaded(folder)).abs().max() < TOLERANCE
            found, notes = read(folder)
            assert torch.equal(found, before) and "differs from" in notes[0]


def test_names_with_a_wrapper_s_prefix_are_those_of_the_model(new_folder: Callable[[], Path]) -> None:
    expected = read(single(new_folder() / "model"))[0]
    cases: list[Change] = [
        prefixed("base_model.model."), prefixed("module."), prefixed("_orig_mod."), prefixed("module._orig_mod."),
        within("model.layers", "model._orig_mod.layers"), within("self_attn.", "self_attn._fsdp_wrapped_module."),
        within(".block_sparse_moe", "._checkpoint_wrapped_module.block_sparse_moe"),
        prefixed("model.language_model.", "model."), prefixed("language_model."), prefixed("", "model."),
        prefixed("transformer.", "model."), prefixed("module.", "model."),
    ]  # fmt: skip
    for number, change in enumerate(cases):
        with case(number):
            found, notes = read(single(new_folder() / "model", change=change))
            assert len(notes) == 1 and "tensors have other names than the model's: " in notes[0]
            assert torch.equal(found, expected)
