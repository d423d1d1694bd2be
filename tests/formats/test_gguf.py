"""GGUF files as checkpoints: what is read of them, and every reason to refuse one, each with the nearest accepted."""

import json
import re
import shutil
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from numpy.typing import NDArray
from support.cases import case, line_of
from support.golden_gguf import GOLDEN
from support.models import DEMO_MODEL, TinyMixtral
from tokenizers import Tokenizer, models, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from moe_pack.convert.cli.main import main
from moe_pack.formats import CheckpointError, Pack, RangeReader
from moe_pack.formats.families import Checkpoint
from moe_pack.formats.gguf import GgufFiles, find_gguf
from moe_pack.formats.gguf.files import ARCHITECTURES
from moe_pack.formats.gguf.header import GgufTensor
from moe_pack.formats.gguf.rows import TensorRows, can_dequantize
from moe_pack.runtime.model import CheckpointWeights, Decoder, PackWeights
from moe_pack.runtime.text import Text, check_text

# The project's bound on float32 logits; sums in another order differ by less than 1e-5 here.
TOLERANCE = 1e-4
MIXTRAL, JAMBA = GOLDEN / "mixtral.gguf", GOLDEN / "jamba.gguf"
PAGE = (
    "It was 1984, the clocks were striking thirteen; don't ASK why. 3.14159 + 1000000 = ?\n\n\tTabs  and   spaces \n"
    "Grüße, señor: naïve façade — “quotes” … 東京の天気は晴れ。 Привет мир! مرحبا 🙂🚀 snake_case camelCase x->y();"
)


def logits(path: Path, ids: list[int]) -> NDArray[np.float32]:
    with closing(Checkpoint(GgufFiles(path))) as checkpoint:
        return Decoder(CheckpointWeights(checkpoint, torch.device("cpu")), 64).logits(ids).numpy()


def assert_same_logits(path: Path, golden: Path = MIXTRAL) -> None:
    expected = stored(golden)
    assert np.abs(logits(path, expected["ids"].tolist()) - expected["logits"]).max() < TOLERANCE


def stored(path: Path) -> dict[str, Any]:
    with np.load(path.with_suffix(".npz")) as arrays:
        return dict(arrays)


def rewritten(
    path: Path,
    source: Path = MIXTRAL,
    values: Callable[[dict[str, Any]], object] = lambda values: None,
    tensors: Callable[[dict[str, Any]], object] = lambda tensors: None,
    **options: Any,
) -> Path:
    """Writes a GGUF file with the metadata and tensors of another, of which some are changed."""
    reader = gguf.GGUFReader(source)
    fields = {
        name: (field.contents(), field.types) for name, field in reader.fields.items() if not name.startswith("GGUF.")
    }
    kept = {tensor.name: (np.array(tensor.data), tensor.tensor_type) for tensor in reader.tensors}
    values(fields)
    tensors(kept)
    writer = gguf.GGUFWriter(path, fields.pop("general.architecture")[0], **options)
    for name, (value, kinds) in fields.items():
        writer.add_key_value(name, value, kinds[0], kinds[1] if len(kinds) > 1 else None)
    for name, (raw, kind) in kept.items():
        writer.add_tensor(name, raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def refusal(path: Path) -> str:
    return line_of(CheckpointError, lambda: Checkpoint(GgufFiles(path)).close())


# --- what is read


def test_each_architecture_has_a_file() -> None:
    names = {gguf.GGUFReader(path).fields["general.architecture"].contents() for path in GOLDEN.glob("*.gguf")}
    assert names == set(ARCHITECTURES)


def test_each_family_has_the_logits_of_its_dequantized_weights_in_transformers() -> None:
    for path in sorted(GOLDEN.glob("*.gguf")):
        with case(path.stem):
            assert np.abs(stored(path)["logits"]).max() > 0.5, "logits so small that the bound would prove nothing"
            assert_same_logits(path, path)


def test_config_json_names_the_class_of_the_model() -> None:
    """Without it, vLLM takes the model for one that embeds text, and llama.cpp's converter takes none."""
    classes = {**MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, **MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
    classes |= {"deepseek": "DeepseekForCausalLM", "step3p5": "Step3p5ForCausalLM"}  # not in transformers
    for path in sorted(GOLDEN.glob("*.gguf")):
        with case(path.stem), closing(GgufFiles(path)) as files:
            values = json.loads(files.read_file("config.json").tobytes())
            kind = values["model_type"]
            assert values["architectures"] == [classes[kind]]


def test_each_type_is_read_in_any_range_as_llama_cpp_dequantizes_it(tmp_path: Path) -> None:
    generator = np.random.default_rng(3)
    kinds = [kind for kind in gguf.GGMLQuantizationType if kind.name not in NOT_READ]
    assert len(kinds) > 22
    for kind in kinds:
        with case(kind.name):
            block, num_bytes = gguf.GGML_QUANT_SIZES[kind]
            raw = generator.integers(0, 60, (20, 512 // block * num_bytes), np.uint8)  # no float16 is infinite
            path = tmp_path / kind.name
            path.write_bytes(b"before" + raw.tobytes())
            expected = gguf.quants.dequantize(raw, kind).astype(np.float32)
            assert can_dequantize(kind.name) and np.isfinite(expected).all() and expected.any()
            with RangeReader(path, CheckpointError) as reader:
                rows = TensorRows(reader, GgufTensor("t", kind.name, (4, 5, 512), 0, 6, raw.nbytes))
                assert (rows.dtype, rows.num_rows, rows.num_cols) == ("F32", 20, 512)
                for first, last in ((0, 20), (7, 8), (3, 17), (5, 5)):
                    np.testing.assert_array_equal(rows.floats(first, last), expected[first:last])
    assert not any(can_dequantize(name) for name in ("I32", "Q8_K"))


UINT32 = [gguf.GGUFValueType.UINT32]
# Which are no weights, or which the gguf package does not dequantize; those in 16 and 32 bits are read as they are.
NOT_READ = {"F16", "BF16", "F32", "F64", "I8", "I16", "I32", "I64", "Q8_1", "Q8_K", "Q1_0", "Q2_0"}


def test_values_of_16_and_32_bits_keep_their_bytes(tmp_path: Path) -> None:
    source = TinyMixtral(num_layers=1, vocab_size=64, config={"head_dim": 32}).tensors()["model.embed_tokens.weight"]
    kinds = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
    for name, dtype in kinds.items():
        with case(name):
            raw = source.to(dtype).contiguous().view(torch.uint8).numpy()
            path = rewritten(
                tmp_path / f"{name}.gguf",
                tensors=lambda tensors: tensors.update({"token_embd.weight": (raw, gguf.GGMLQuantizationType[name])}),
            )
            with closing(GgufFiles(path)) as files:
                entry = files.entries()["model.embed_tokens.weight"]
                assert (entry.dtype, entry.shape) == (name, (64, 64))
                np.testing.assert_array_equal(files.read(entry.name, 0, entry.num_bytes), raw.reshape(-1))


def test_a_model_in_parts_is_that_in_one_file(tmp_path: Path) -> None:
    rewritten(tmp_path / "model.gguf", split_max_tensors=9)
    parts = sorted(tmp_path.glob("*.gguf"))
    assert len(parts) == 3
    assert find_gguf(tmp_path) == parts[0]
    for part in parts:
        assert_same_logits(part)
    parts[1].unlink()
    assert refusal(parts[0]) == f"{parts[0].name}: the model's part {parts[1].name} is missing in {tmp_path}"


def test_experts_gate_and_up_or_queries_keys_and_values_may_be_in_one_tensor(tmp_path: Path) -> None:
    def join(tensors: dict[str, Any]) -> None:
        for layer in range(2):
            for names, joined, axis in (
                (("ffn_gate_exps", "ffn_up_exps"), "ffn_gate_up_exps", 1),
                (("attn_q", "attn_k", "attn_v"), "attn_qkv", 0),
            ):
                parts = [tensors.pop(f"blk.{layer}.{name}.weight") for name in names]
                raw = np.concatenate([part[0] for part in parts], axis=axis)
                tensors[f"blk.{layer}.{joined}.weight"] = (raw, parts[0][1])

    assert_same_logits(rewritten(tmp_path / "joined.gguf", tensors=join))


def test_files_of_early_2024_have_a_tensor_for_each_expert(tmp_path: Path) -> None:
    def part(tensors: dict[str, Any]) -> None:
        for name in [name for name in tensors if "_exps." in name]:
            raw, kind = tensors.pop(name)
            for expert, matrix in enumerate(raw):
                tensors[name.replace("_exps.", f".{expert}.")] = (matrix, kind)

    assert_same_logits(rewritten(tmp_path / "early.gguf", tensors=part))


def test_mxfp4_blocks_keep_their_codes() -> None:
    with closing(Checkpoint(GgufFiles(GOLDEN / "gpt_oss.gguf"))) as checkpoint:
        assert {source.codec for source in checkpoint.claims.experts.values()} == {"mxfp4"}
        counts = "F32: 25 tensors, as they are; MXFP4: 10 tensors, dequantized; MXFP4: 6 tensors, as they are"
        assert checkpoint.files.notes() == [f"gpt_oss.gguf: {counts}"]


def test_a_prediction_layer_keeps_its_tensors(tmp_path: Path) -> None:
    def add(tensors: dict[str, Any]) -> None:
        number = 3 if "blk.2.attn_norm.weight" in tensors else 2
        last, new = f"blk.{number - 1}.", f"blk.{number}."
        tensors |= {name.replace(last, new): tensors[name] for name in tensors if name.startswith(last)}
        norm = tensors["output_norm.weight"]
        tensors |= {f"{new}nextn.{name}.weight": norm for name in ("enorm", "hnorm", "shared_head_norm")}
        tensors[f"{new}nextn.eh_proj.weight"] = (np.ones((64, 128), np.float32), gguf.GGMLQuantizationType.F32)

    def count(values: dict[str, Any]) -> None:
        prefix = values["general.architecture"][0]
        layers = values[f"{prefix}.block_count"][0] + 1
        values |= {f"{prefix}.block_count": (layers, UINT32), f"{prefix}.nextn_predict_layers": (1, UINT32)}

    cases = {
        "glm4_moe": "model.layers.2.", "qwen3_next": "mtp.layers.0.", "exaone_moe": "mtp.blk.2.",
        "mimo_v2_flash": "model.mtp.blk.2.", "step3p5": "model.layers.3.", "bailing_hybrid": "model.layers.2.",
        "deepseek_v32": "model.layers.2.",
    }  # fmt: skip
    for family, begin in cases.items():
        with case(family):
            path = rewritten(tmp_path / f"{family}.gguf", GOLDEN / f"{family}.gguf", values=count, tensors=add)
            checkpoint = Checkpoint(GgufFiles(path))
            unused = set(checkpoint.claims.unused)
            assert any(name.startswith(begin) for name in unused)
            if family in ("glm4_moe", "qwen3_next", "deepseek_v32"):  # whose layer is run
                spec, claims = checkpoint.spec, checkpoint.claims
                (projected,) = [name for name in unused if name.endswith(("eh_proj.weight", "mtp.fc.weight"))]
                assert checkpoint.entry(projected).shape == (64, 128)
                up = claims.experts[1, 0, "up"].tensor.replace("model.layers.1.", begin)
                assert up in unused
                np.testing.assert_array_equal(
                    checkpoint.raw(up, 0, 512), checkpoint.raw(claims.experts[1, 0, "up"].tensor, 0, 512)
                )
                assert spec.num_hidden_layers == 2
            checkpoint.close()


def test_a_pack_of_a_gguf_file_says_what_was_dequantized(tmp_path: Path) -> None:
    packed = tmp_path / "packed"
    said = CliRunner().invoke(main, ["convert", str(MIXTRAL), "-o", str(packed)])
    assert said.exit_code == 0, said.output
    assert "mixtral.gguf: Q4_0: 16 tensors, dequantized; F32: 7 tensors, as they are\n" in said.output
    assert "float32" not in said.output
    for options in (["--dense-bits", "source"], ["--selector-bits", "16", "--record-bits", "16"]):
        whole = CliRunner().invoke(main, ["convert", str(MIXTRAL), "-o", str(tmp_path / options[0]), *options])
        assert whole.exit_code == 0, whole.output
        assert (
            # Embedding and head 2 * 64 * 64; attention of both layers 2 * (64 * 64 + 32 * 64 + 32 * 64 + 64 * 64).
            "note: 10 dense matrices are dequantized and stored as float32, 128.0 KiB; --dense-bits 8 takes about a "
            "quarter\n" in whole.output
        )
    narrow = CliRunner().invoke(main, ["convert", str(JAMBA), "-o", str(tmp_path / "jamba")])  # rows of 32
    assert "note: 1 dense matrix is dequantized and stored as float32, 8.0 KiB\n" in narrow.output
    kept = CliRunner().invoke(main, ["convert", str(MIXTRAL), "-o", str(tmp_path / "s"), "--record-bits", "source"])
    assert kept.exit_code == 1 and "is Q4_0, which no format of experts keeps without loss" in kept.output
    account = json.loads((packed / "source.json").read_text())
    assert [file["name"] for file in account["files"]] == ["mixtral.gguf"]
    decoded = {tensor["name"]: tensor.get("decoded_from") for tensor in account["tensors"]}
    assert decoded["lm_head.weight"] == "Q4_0" and decoded["model.norm.weight"] is None
    assert json.loads((packed / "config.json").read_text())["model_type"] == "mixtral"
    with Pack(packed) as pack, closing(Checkpoint(GgufFiles(MIXTRAL))) as checkpoint:
        assert pack.spec == checkpoint.spec


# --- tokenizers


def with_tokenizer(path: Path, fields: dict[str, Any]) -> Path:
    kinds = {
        str: [gguf.GGUFValueType.STRING],
        bool: [gguf.GGUFValueType.BOOL],
        int: UINT32,
    }
    lists = {str: gguf.GGUFValueType.STRING, int: gguf.GGUFValueType.INT32, float: gguf.GGUFValueType.FLOAT32}

    def change(values: dict[str, Any]) -> None:
        for name in [name for name in values if name.startswith("tokenizer.")]:
            del values[name]
        for name, value in fields.items():
            of_list = isinstance(value, list)
            kind = [gguf.GGUFValueType.ARRAY, lists[type(value[0])]] if of_list else kinds[type(value)]
            values[f"tokenizer.{name}"] = (value, kind)

    return rewritten(path, values=change)


def byte_level() -> dict[str, Any]:
    """The demo model's tokenizer, as llama.cpp's converter writes it."""
    values = json.loads((DEMO_MODEL / "tokenizer.json").read_text())
    special = {token["id"] for token in values["added_tokens"]}
    vocabulary = values["model"]["vocab"]
    tokens = sorted(vocabulary, key=lambda text: int(vocabulary[text]))
    return {
        "ggml.model": "gpt2", "ggml.pre": "gpt-2", "ggml.tokens": tokens,
        "ggml.token_type": [3 if number in special else 1 for number in range(len(tokens))],
        "ggml.merges": [" ".join(merge) for merge in values["model"]["merges"]], "ggml.bos_token_id": 0,
        "ggml.eos_token_id": 1, "ggml.add_bos_token": True,
    }  # fmt: skip


def test_a_byte_level_tokenizer_gives_the_originals_tokens(tmp_path: Path) -> None:
    original = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    more = {"chat_template": "{{ messages[0].content }}", "ggml.eot_token_id": 3}
    with closing(GgufFiles(with_tokenizer(tmp_path / "model.gguf", byte_level() | more))) as files:
        text = Text(files)
    assert text.encode(PAGE) == original.encode(PAGE).ids
    marked = original.encode(f"<s>{PAGE}</s>", add_special_tokens=False).ids
    assert text.encode(f"<s>{PAGE}</s>", special_tokens=False) == marked
    assert text.end_ids == {1, 3} and text.chat_template is not None
    stream = text.stream([])
    ids = text.encode(PAGE, special_tokens=False)
    assert "".join(map(stream.push, ids)) + stream.finish() == PAGE


def test_a_sentencepiece_tokenizer_gives_the_originals_tokens(tmp_path: Path) -> None:
    trained = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    special = ["<unk>", "<s>", "</s>", *(f"<0x{number:02X}>" for number in range(256))]
    space = "\N{LOWER ONE EIGHTH BLOCK}"
    lines = [space + line.replace(" ", space) for line in PAGE.splitlines()] * 3
    trained.train_from_iterator(lines, trainers.BpeTrainer(vocab_size=400, special_tokens=special, show_progress=False))
    values = json.loads(trained.to_str())["model"]
    tokens = sorted(values["vocab"], key=lambda text: int(values["vocab"][text]))
    ranks = {"".join(merge): rank for rank, merge in enumerate(reversed(values["merges"]))}
    fields = {
        "ggml.model": "llama", "ggml.tokens": tokens,
        "ggml.scores": [float(-len(ranks) + ranks.get(token, -len(tokens))) for token in tokens],
        "ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * (len(tokens) - 259)], "ggml.bos_token_id": 1,
        "ggml.eos_token_id": 2, "ggml.unknown_token_id": 0,
    }  # fmt: skip
    with closing(GgufFiles(with_tokenizer(tmp_path / "model.gguf", fields))) as files:
        text = Text(files)
    trained.add_special_tokens(special[:3])
    assert text.encode(PAGE) == [1, *trained.encode(space + PAGE.replace(" ", space)).ids]
    assert text.encode("no 北 in it")[0] == 1
    stream = text.stream([])
    assert "".join(map(stream.push, text.encode(PAGE))) + stream.finish() == PAGE


def test_a_tokenizer_with_unknown_rules_is_refused(tmp_path: Path) -> None:
    changes: Iterable[tuple[dict[str, Any], str]] = [
        ({"ggml.pre": "no-such"}, "tokenizer.ggml.pre is 'no-such'; supported: afmoe, "),
        ({"ggml.pre": ""}, "tokenizer.ggml.pre is missing; llama.cpp writes it since 2024; supported: "),
        ({"ggml.model": "bert"}, "tokenizer.ggml.model is 'bert'; supported: gpt2, llama, gemma4. "),
        ({"ggml.token_type": [1, 1]}, "tokenizer.ggml.tokens and token_type do not fit each other"),
    ]
    for number, (change, message) in enumerate(changes):
        with case(message):
            with closing(GgufFiles(with_tokenizer(tmp_path / f"{number}.gguf", byte_level() | change))) as files:
                found = line_of(CheckpointError, lambda: files.has("tokenizer.json"))
            assert found.startswith(f"{number}.gguf: {message}")


def test_a_file_without_a_tokenizer_gets_a_note(tmp_path: Path) -> None:
    with closing(GgufFiles(with_tokenizer(tmp_path / "model.gguf", {}))) as files:
        (note,) = check_text(files, 4096)
    assert note.startswith(f"{tmp_path}/model.gguf: has no tokenizer, so the pack cannot read text, and moe-run can on")


FLOAT, TEXT = [gguf.GGUFValueType.FLOAT32], [gguf.GGUFValueType.STRING]


def config_of(path: Path) -> dict[str, Any]:
    with closing(GgufFiles(path)) as files:
        values: dict[str, Any] = json.loads(files.read_file("config.json").tobytes())
    return values


def test_linear_scaling_is_read_in_each_spelling(tmp_path: Path) -> None:
    """llama.cpp takes linear where the type is missing, and no scaling at all where it is `none`."""
    cases: Iterable[tuple[dict[str, Any], float | None]] = [
        ({"rope.scaling.type": ("linear", TEXT), "rope.scaling.factor": (4.0, FLOAT)}, 4.0),
        ({"rope.scaling.factor": (4.0, FLOAT)}, 4.0),
        ({"rope.scale_linear": (4.0, FLOAT)}, 4.0),
        ({"rope.scaling.type": ("linear", TEXT), "rope.scaling.factor": (1.0, FLOAT)}, None),
        ({"rope.scaling.type": ("none", TEXT), "rope.scaling.factor": (4.0, FLOAT)}, None),
    ]
    ids = list(range(20))
    plain = logits(MIXTRAL, ids)
    for number, (added, factor) in enumerate(cases):
        with case(added):
            values = {f"llama.{key}": value for key, value in added.items()}
            path = rewritten(tmp_path / f"{number}.gguf", values=lambda fields, values=values: fields.update(values))
            scaling = config_of(path).get("rope_scaling")
            assert scaling == (None if factor is None else {"rope_type": "linear", "factor": factor})
            assert (np.abs(logits(path, ids) - plain).max() > TOLERANCE) == (factor is not None)
    for number, (source, kind, expected) in enumerate(
        ((MIXTRAL, "longrope", "none, linear, yarn"), (GOLDEN / "deepseek_v2.gguf", "linear", "none, yarn"))
    ):
        with case(kind):
            key = f"{gguf.GGUFReader(source).fields['general.architecture'].contents()}.rope.scaling"
            values = {f"{key}.type": (kind, TEXT), f"{key}.factor": (4.0, FLOAT)}
            path = tmp_path / f"refused-{number}.gguf"
            rewritten(path, source, values=lambda fields, values=values: fields.update(values))
            message = refusal(path)
            assert f"{key}.type is {kind!r}; supported" in message and message.endswith(f": {expected}")


def llama3_factors(theta: float, size: int, scaling: dict[str, float]) -> NDArray[np.float32]:
    """Returns the factors that llama.cpp's converter writes for a scaling by bands."""
    factor, low, high, context = scaling.values()
    found = []
    for pair in range(size // 2):
        length = 2 * np.pi * theta ** (2 * pair / size)
        smooth = (context / length - low) / (high - low)
        mixed = 1 / ((1 - smooth) / factor + smooth)
        found.append(1.0 if length < context / high else factor if length > context / low else mixed)
    return np.array(found, np.float32)


def test_factors_of_rotary_positions_are_read_as_bands_where_llama_cpp_takes_them(tmp_path: Path) -> None:
    """Files of merges of Llama 3.1 have architecture `llama`, and their bands as a tensor."""
    # In these small heads, two pairs must be between the bounds.
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 64.0, "context": 512}
    for name, rotated in (("mixtral", 16), ("granitemoe", 16), ("exaone_moe", 32)):
        with case(name):
            source = GOLDEN / f"{name}.gguf"
            theta = config_of(source)["rope_theta"]
            factors = llama3_factors(theta, rotated, scaling)
            added = {"rope_freqs.weight": (factors, gguf.GGMLQuantizationType.F32)}
            path = tmp_path / f"{name}.gguf"
            rewritten(path, source, tensors=lambda tensors, added=added: tensors.update(added))
            assert config_of(path)["rope_scaling"] == {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 64.0,
                "original_max_position_embeddings": 512,
            }
            ids = list(range(20))
            assert np.abs(logits(path, ids) - logits(source, ids)).max() > TOLERANCE


# --- what is refused


def test_a_file_that_is_cut_or_no_gguf_file_is_refused(tmp_path: Path) -> None:
    whole, path = MIXTRAL.read_bytes(), tmp_path / "model.gguf"
    for size in (3, 4, 23, 24, 100, 1000, 4000, len(whole) // 2, len(whole) - 1):
        with case(size):
            path.write_bytes(whole[:size])
            assert re.match(r"model\.gguf: .*cut short", refusal(path))
    path.write_bytes(b"GGML" + whole[4:])
    assert refusal(path) == "model.gguf: is no GGUF file, or is cut short"


def test_another_model_is_refused_by_name(tmp_path: Path) -> None:
    def without(key: str) -> Callable[[dict[str, Any]], object]:
        return lambda values: values.pop(key)

    def changed(key: str, value: Any, kind: list[Any]) -> Callable[[dict[str, Any]], object]:
        return lambda values: values.update({key: (value, kind)})

    cases: Iterable[tuple[Callable[[dict[str, Any]], object], str]] = [
        (without("llama.expert_count"), "architecture 'llama' has no experts; moe-pack is for mixture-of-experts"),
        (without("llama.block_count"), "metadata has no key 'llama.block_count'"),
        (changed("llama.block_count", "2", [gguf.GGUFValueType.STRING]), "llama.block_count is '2', expected a whole"),
        (
            changed("llama.feed_forward_length", 48, UINT32),
            "tensor 'blk.0.ffn_gate_exps.weight' has shape [4, 32, 64], ",
        ),
        (changed("llama.block_count", 1, UINT32), "tensor 'blk.1."),
        (changed("split.count", 3, UINT32), "is one of 3 parts; keep their names as llama.cpp made them"),
    ]
    for number, (change, message) in enumerate(cases):
        with case(message):
            found = refusal(rewritten(tmp_path / f"{number}.gguf", values=change))
            assert found.startswith(f"{number}.gguf: {message}")

    def rename(values: dict[str, Any]) -> None:
        for name in [name for name in values if name.startswith("llama.")]:
            values[name.replace("llama.", "grok.")] = values.pop(name)
        values["general.architecture"] = ("grok", [gguf.GGUFValueType.STRING])

    message = refusal(rewritten(tmp_path / "grok.gguf", values=rename))
    assert message.startswith("grok.gguf: GGUF architecture 'grok' is not supported; docs/families.md lists the ")


def test_a_tensor_that_is_missing_or_has_no_role_or_no_values_is_refused(tmp_path: Path) -> None:
    kinds = gguf.GGMLQuantizationType
    cases: Iterable[tuple[Callable[[dict[str, Any]], object], str]] = [
        (lambda tensors: tensors.pop("blk.1.attn_v.weight"), "tensor 'blk.1.attn_v.weight' is missing"),
        (lambda tensors: tensors.pop("token_embd.weight"), "tensor 'token_embd.weight' is missing"),
        (lambda tensors: tensors.update({"blk.0.attn_q.lora_a": tensors["blk.0.attn_q.weight"]}),
         "tensor 'blk.0.attn_q.lora_a' has no role in architecture 'llama'; the pack would lose it"),
        (lambda tensors: tensors.update({"rope_freqs.weight": (np.ones(8, np.float32), kinds.F32)}),
         "tensor 'rope_freqs.weight' has no role in architecture 'llama'; the pack would lose it"),
        (lambda tensors: tensors.update({"blk.0.attn_norm.weight": (np.ones(32, np.float32), kinds.F32)}),
         "tensor 'blk.0.attn_norm.weight' has shape [32], expected [64] by the metadata"),
        (lambda tensors: tensors.update({"blk.0.attn_norm.weight": (np.ones(64, np.int32), kinds.I32)}),
         "tensor 'blk.0.attn_norm.weight' is I32, which the gguf package cannot dequantize; a newer one may: "),
    ]  # fmt: skip
    for number, (change, message) in enumerate(cases):
        with case(message):
            found = refusal(rewritten(tmp_path / f"{number}.gguf", tensors=change))
            assert found.startswith(f"{number}.gguf: {message}")


def test_factors_of_rotary_positions_that_no_scaling_has_are_refused(tmp_path: Path) -> None:
    def change(tensors: dict[str, Any]) -> None:
        factors, kind = tensors["rope_freqs.weight"]
        assert factors[1] > 1
        tensors["rope_freqs.weight"] = (factors * np.array([1, 1.01, *[1] * (len(factors) - 2)], np.float32), kind)

    path = rewritten(tmp_path / "model.gguf", GOLDEN / "step3p5.gguf", tensors=change)
    assert refusal(path) == (
        "model.gguf: tensor 'rope_freqs.weight' has no role in architecture 'step35'; the pack would lose it"
    )


def test_factors_of_rotary_positions_that_are_not_the_models_are_refused(tmp_path: Path) -> None:
    name, kinds = "rope_freqs.weight", gguf.GGMLQuantizationType
    gemma, scout = GOLDEN / "gemma4_text.gguf", GOLDEN / "llama4_text-scout.gguf"
    own, bands = (
        next(np.array(each.data) for each in gguf.GGUFReader(path).tensors if each.name == name)
        for path in (gemma, scout)
    )
    assert set(bands.tolist()) == {1.0, 16.0}
    changes: dict[str, tuple[Path, Any, str]] = {
        "missing": (gemma, None, f"tensor '{name}' is missing"),
        "type": (gemma, (np.minimum(own, 2).astype(np.float16), kinds.F16), f"tensor '{name}' is F16, expected F32"),
        "number": (gemma, (own[:-1], kinds.F32), f"tensor '{name}' has shape [15], expected [16] by the metadata"),
        "value": (gemma, (np.where(np.arange(16) == 1, 2, own).astype(np.float32), kinds.F32),
                  f"tensor '{name}' has other factors than the published models of architecture 'gemma4'"),
        "bands": (scout, (np.minimum(bands, np.arange(1, len(bands) + 1)).astype(np.float32), kinds.F32),
                  f"tensor '{name}' has other factors than the published models of architecture 'llama4'"),
    }  # fmt: skip
    for title, (source, value, message) in changes.items():
        with case(title):

            def change(tensors: dict[str, Any], value: Any = value) -> None:
                del tensors[name]
                tensors |= {} if value is None else {name: value}

            assert message in refusal(rewritten(tmp_path / f"{title}.gguf", source, tensors=change))
    for source in (gemma, scout):
        Checkpoint(GgufFiles(rewritten(tmp_path / source.name, source))).close()


def test_a_head_that_is_missing_is_the_embedding(tmp_path: Path) -> None:
    path = rewritten(tmp_path / "tied.gguf", tensors=lambda tensors: tensors.pop("output.weight"))
    with closing(Checkpoint(GgufFiles(path))) as checkpoint:
        assert checkpoint.spec.tied_head


def test_a_folder_names_its_one_model(tmp_path: Path) -> None:
    assert find_gguf(tmp_path) is None
    (tmp_path / "mmproj-model.gguf").touch()  # of a multimodal model, what maps images to its embeddings
    path = rewritten(tmp_path / "a.gguf")
    assert find_gguf(tmp_path) == path
    (tmp_path / "b.gguf").touch()
    with pytest.raises(CheckpointError, match=r"has 2 GGUF models; name one of them: a\.gguf, b\.gguf"):
        find_gguf(tmp_path)
    (tmp_path / "model.safetensors").touch()
    assert find_gguf(tmp_path) is None


# --- commands


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with the demo model's vocabulary, so that commands can run it on text."""
    draw = np.random.default_rng(0)

    def widen(tensors: dict[str, Any]) -> None:
        for name in ("token_embd.weight", "output.weight"):
            tensors[name] = (draw.standard_normal((4096, 64), np.float32) / 8, gguf.GGMLQuantizationType.F32)

    folder = tmp_path_factory.mktemp("model")
    return rewritten(folder / "tiny.gguf", with_tokenizer(folder / "vocabulary", byte_level()), tensors=widen)


def ran(*arguments: object) -> str:
    done = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.slow
def test_a_plan_of_a_file_converts_it(model: Path, tmp_path: Path) -> None:
    target = ("--device", "cpu", "--target-vram", "40M", "--context", 128)
    assert f"{model}: mixtral, 2 layers of 4 experts" in ran("plan", model, *target, "-o", tmp_path / "plan.json")
    ran("convert", model, "--plan", tmp_path / "plan.json", "-o", tmp_path / "packed")
    for name in ("a.gguf", "b.gguf"):
        shutil.copy(model, tmp_path / name)
    said = CliRunner().invoke(main, ["plan", str(tmp_path), *(str(value) for value in target)])
    assert said.exit_code == 1
    assert said.output == f"main: {tmp_path}: has 2 GGUF models; name one of them: a.gguf, b.gguf\n"


@pytest.mark.slow
def test_a_pack_is_compared_with_the_file_it_was_made_from(model: Path, tmp_path: Path) -> None:
    packed = tmp_path / "packed"
    ran("convert", model, "--selector", "none", "--record-bits", 8, "--dense-bits", "source", "-o", packed)
    assert "same likeliest token" in ran("verify", packed, "--against", model)
    ran("eval", packed, "--against", model, "--tokens", 256)
    against = json.loads((packed / "quality.json").read_text())["content"]["against"]
    assert 0 < against["kl"]["value"] < 1e-3
    assert "as in the source" in ran("check", packed, "--against", model, "--max-kl", 0.001)


def test_an_export_of_its_pack_is_a_checkpoint_for_transformers(model: Path, tmp_path: Path) -> None:
    ran("convert", model, "--selector", "none", "--record-bits", 4, "-o", tmp_path / "packed")
    ran("export", tmp_path / "packed", "--to", "safetensors", "--dtype", "f32", "-o", tmp_path / "exported")
    tokens = AutoTokenizer.from_pretrained(tmp_path / "exported")(PAGE)["input_ids"]
    ids = tokens[:64]
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")(torch.tensor([ids])).logits[0]
    with Pack(tmp_path / "packed") as pack:
        assert tokens == Text(pack).encode(PAGE)
        found = Decoder(PackWeights(pack, torch.device("cpu")), 64).logits(ids)
    assert expected.abs().max() > 0.5, "logits so small that the bound would prove nothing"
    assert (found - expected).abs().max() < TOLERANCE
