"""Inputs that strangers bring, as they bring them: each is refused in one line, or gives the right value.

Every test is one public report, by its number; what is general about it is tested where its code is. transformers is
the judge where it loads the folder.
"""

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file
from support.cases import case
from support.models import DEMO_MODEL, TinyMixtral
from tokenizers import AddedToken, Tokenizer, decoders, normalizers
from tokenizers import models as tokenizer_models
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

from moe_pack.convert.cli.main import main as moe_pack
from moe_pack.formats import Pack
from moe_pack.runtime import Text
from moe_pack.runtime.cli.main import main as moe_run
from moe_pack.runtime.helper import Helper
from moe_pack.runtime.model import TORCH, Decoder, PackWeights

IDS = [3, 1, 4, 15, 9, 26, 5]
EXACT = ("--record-bits", "16", "--selector-bits", "16")
MODEL = TinyMixtral(vocab_size=4096)


def run(program: Any, *arguments: str | Path) -> Result:
    name = "moe-run" if program is moe_run else "moe-pack"
    return CliRunner().invoke(program, [str(argument) for argument in arguments], prog_name=name)


def converted(source: Path, *options: str) -> Path:
    """The pack of a checkpoint, next to it."""
    pack = source.with_name(f"{source.name}-packed")
    result = run(moe_pack, "convert", source, "-o", pack, *(options or ("--quantizer", "nearest")))
    assert result.exit_code == 0, result.output
    return pack


def refused(*arguments: str | Path, program: Any = moe_pack, exit_code: int = 1) -> str:
    """The one line with which a command ends."""
    result = run(program, *arguments)
    assert result.exit_code == exit_code and "Traceback" not in result.output, result.output
    lines = [line for line in result.stderr.splitlines() if line and not line.startswith(("Usage:", "Try "))]
    assert lines, result.output
    return lines[-1]


def logits(pack: Path) -> torch.Tensor:
    with Pack(pack) as opened:
        weights = PackWeights(opened, torch.device("cpu"), TORCH)
        return Decoder(weights, len(IDS)).logits(IDS)


def judged(source: Path) -> torch.Tensor:
    """The logits that transformers computes of the same folder."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    with torch.no_grad():
        found: torch.Tensor = model(torch.tensor([IDS])).logits[0]
    return found


def test_01_bytes_that_make_no_utf_8_do_not_end_an_answer(tmp_path: Path) -> None:
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    for word in ["\u2581", "\u2581Hello", "\u2581wor", "ld", "\u2581a", "b", "c"]:
        vocabulary[word] = len(vocabulary)
    tokenizer = Tokenizer(tokenizer_models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    strip = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(strip)
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    source = TinyMixtral(vocab_size=len(vocabulary), config={"eos_token_id": 2}).write(tmp_path / "source")
    tokenizer.save(str(source / "tokenizer.json"))
    pack = converted(source)
    sampling = ("--temperature", "1", "--top-p", "1", "--max-tokens", "60")
    answers = [run(moe_run, pack, "--prompt", "Hello wor", *sampling, "--seed", str(seed)) for seed in range(4)]
    assert [answer.exit_code for answer in answers] == [0] * 4, answers[0].output
    assert "\ufffd" in "".join(answer.stdout for answer in answers)


def test_02_tokens_that_tokenizer_json_lacks_are_tokens(tmp_path: Path) -> None:
    source = TinyMixtral(vocab_size=4100, config={"eos_token_id": 1}).write(tmp_path / "source")
    shutil.copy(DEMO_MODEL / "tokenizer.json", source)
    values = json.loads((DEMO_MODEL / "tokenizer_config.json").read_text())
    flags = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False) | {"special": True}
    marks = {"4096": "<|im_start|>", "4097": "<|im_end|>"}
    decoder = {number: {"content": mark, **flags} for number, mark in marks.items()}
    values |= {"eos_token": "<|im_end|>", "added_tokens_decoder": decoder}
    (source / "tokenizer_config.json").write_text(json.dumps(values))
    conversation = "<|im_start|>user\nhi<|im_end|>"
    with Pack(converted(source)) as pack:
        text = Text(pack)
    assert text.encode(conversation) == AutoTokenizer.from_pretrained(source)(conversation).input_ids
    assert text.encode(conversation)[-1] == 4097 and text.answer_end_ids == {1, 4097}


def qwen3(seed: int) -> Any:
    torch.manual_seed(seed)
    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 64, "head_dim": 16}
    counts = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 4}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **counts, num_experts_per_tok=2)).to(torch.bfloat16)


def test_03_a_stale_index_is_ignored_and_two_models_are_refused(tmp_path: Path) -> None:
    stale, two = tmp_path / "stale", tmp_path / "two"
    qwen3(0).save_pretrained(stale, max_shard_size="100KB")
    qwen3(7).save_pretrained(stale)  # removes the old shards, not their index
    result = run(moe_pack, "convert", stale, "-o", tmp_path / "packed", *EXACT)
    assert result.exit_code == 0, result.output
    assert "model.safetensors.index.json" in result.stderr
    assert (logits(tmp_path / "packed") - judged(stale)).abs().max() < 1e-4
    qwen3(0).save_pretrained(two)
    qwen3(7).save_pretrained(two, max_shard_size="100KB")
    said = refused("convert", two, "-o", tmp_path / "second")
    assert "model.safetensors" in said and "model.safetensors.index.json" in said


def test_04_a_head_of_its_own_is_not_left_out_by_a_flags_word(tmp_path: Path) -> None:
    source = TinyMixtral(config={"tie_word_embeddings": True}).write(tmp_path / "own")
    assert (logits(converted(source, *EXACT)) - judged(source)).abs().max() < 1e-4

    def tied(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    copy = TinyMixtral(config={"tie_word_embeddings": True}).write(tmp_path / "copy", tied)
    assert (logits(converted(copy, *EXACT)) - judged(copy)).abs().max() < 1e-4


def test_05_an_adapter_that_is_not_merged_is_refused(tmp_path: Path) -> None:
    source = MODEL.write(tmp_path / "source")
    facts = {"peft_type": "LORA", "r": 2, "lora_alpha": 64, "target_modules": ["q_proj"]}
    (source / "adapter_config.json").write_text(json.dumps(facts))
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    tensors = {f"{name}A.weight": torch.ones(2, 64), f"{name}B.weight": torch.ones(64, 2)}
    save_file(tensors, source / "adapter_model.safetensors")
    said = refused("convert", source, "-o", tmp_path / "packed")
    assert "adapter_model.safetensors" in said and "merge" in said


def broken(name: str, content: str | None) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        if content is None:
            (folder / name).unlink()
        else:
            (folder / name).write_text(content)

    return change


def cut(folder: Path) -> None:
    raw = (folder / "tokenizer.json").read_bytes()
    (folder / "tokenizer.json").write_bytes(raw[:1000])


def model_alone(folder: Path) -> None:
    (folder / "tokenizer.json").rename(folder / "tokenizer.model")


def test_09_what_moe_run_demands_is_asked_before_anything_is_written(tmp_path: Path) -> None:
    faults = {
        "tokenizer.model": model_alone,
        "tokenizer.json": cut,
        "generation_config.json": broken("generation_config.json", ""),
        "</t>": broken("generation_config.json", '{"eos_token_id": "</t>"}'),
    }
    for number, (named, change) in enumerate(faults.items()):
        with case(named):
            source = MODEL.write_with_tokenizer(tmp_path / f"source-{number}")
            change(source)
            assert named in refused("convert", source, "-o", tmp_path / "packed")
            assert not (tmp_path / "packed").exists()
    named = MODEL.write_with_tokenizer(tmp_path / "named")
    (named / "generation_config.json").write_text('{"eos_token_id": "</s>"}')  # the name of a token
    with Pack(converted(named)) as pack:
        assert Text(pack).end_ids == {1}
    result = run(moe_pack, "convert", MODEL.write(tmp_path / "none"), "-o", tmp_path / "silent", *EXACT)
    assert result.exit_code == 0 and "tokenizer.json" in result.stderr  # for benchmarks; the note says what it lacks


def test_10_bytes_that_are_no_text_in_a_prompt_are_wrong_usage(tmp_path: Path) -> None:
    said = refused(tmp_path, "--prompt", "caf\udce9", program=moe_run, exit_code=2)
    assert "--prompt" in said and "UTF-8" in said


def test_12_a_template_that_calls_itself_ends_in_one_line(tmp_path: Path) -> None:
    source = MODEL.write_with_tokenizer(tmp_path / "source")
    values = json.loads((source / "tokenizer_config.json").read_text())
    values["chat_template"] = "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"
    (source / "tokenizer_config.json").write_text(json.dumps(values))
    assert "chat template" in refused(converted(source), "--chat", "--prompt", "hi", program=moe_run)


def test_13_a_mixtral_of_llamas_keeps_their_scaling(tmp_path: Path) -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config = {"rope_scaling": scaling | {"original_max_position_embeddings": 8192}, "max_position_embeddings": 131072}
    source = TinyMixtral(config=config | {"rope_theta": 500000.0}).write(tmp_path / "source")
    assert (logits(converted(source, *EXACT)) - judged(source)).abs().max() < 1e-4


def test_14_the_index_says_which_of_two_copies_counts(tmp_path: Path) -> None:
    source = TinyMixtral(num_shards=2).write(tmp_path / "source")
    index = json.loads((source / "model.safetensors.index.json").read_text())
    name = "model.norm.weight"
    (path,) = {source / index["weight_map"][name]}
    overlay = {name: load_file(path)[name] * 3}
    save_file(overlay, source / "model-overlay.safetensors")
    index["weight_map"][name] = "model-overlay.safetensors"
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    assert (logits(converted(source, *EXACT)) - judged(source)).abs().max() < 1e-4


def test_21_an_importance_file_that_claims_2_to_the_40_numbers_ends_at_once(tmp_path: Path) -> None:
    def text(raw: bytes) -> bytes:
        return struct.pack("<Q", len(raw)) + raw

    header = b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + text(b"general.type") + struct.pack("<I", 8) + text(b"imatrix")
    path = tmp_path / "importance.gguf"
    path.write_bytes(header + text(b"a") + struct.pack("<IIQ", 9, 0, 1 << 40))
    said = refused("profile", MODEL.write(tmp_path / "source"), "--imatrix", path, "-o", tmp_path / "profile")
    assert str(path.name) in said


def test_21_a_tokenizer_of_200_gigabytes_is_refused_by_its_size(tmp_path: Path) -> None:
    pack = converted(MODEL.write_with_tokenizer(tmp_path / "source"))
    with (pack / "tokenizer.json").open("r+b") as file:
        file.truncate(200 << 30)
    assert "tokenizer.json" in refused(pack, "--prompt", "hi", program=moe_run)


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'a' * 10**10 }}",
        "{{ '%1000000000d' % 1 }}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{{ ('a ' * 100000) | wordwrap(1) }}" * 50,
    ],
    ids=["product", "format", "loops", "parentheses", "filter"],
)
def test_21_a_template_without_an_end_ends_in_one_line(
    template: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moe_pack.runtime.helper.HELPER", Helper(seconds=0.5))
    source = MODEL.write_with_tokenizer(tmp_path / "source")
    (source / "chat_template.jinja").write_text(template)
    result = run(moe_pack, "convert", source, "-o", tmp_path / "packed", "--quantizer", "nearest")
    if result.exit_code:  # known before anything is written
        assert "chat template" in result.stderr and not (tmp_path / "packed").exists()
        return
    assert "chat template" in refused(tmp_path / "packed", "--chat", "--prompt", "hi", program=moe_run)
