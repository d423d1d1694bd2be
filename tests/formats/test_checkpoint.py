"""Checkpoints: what is read of them, and every reason to refuse one, each with the nearest that is accepted."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.cases import assert_each, case, line_of
from support.models import DEMO_MODEL, Tensors, TinyMixtral, pack

from moe_pack.formats import CheckpointError, ModelSpec
from moe_pack.formats.families import Checkpoint
from moe_pack.formats.parts import GroupedQuerySpec

INDEX = "model.safetensors.index.json"
SHARD_1, SHARD_2 = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
GATE_0 = "model.layers.0.block_sparse_moe.experts.0.w1.weight"


def spec_of(folder: Path) -> ModelSpec:
    checkpoint = Checkpoint(folder)
    checkpoint.close()
    return checkpoint.spec


def refusal(folder: Path) -> str:
    return line_of(CheckpointError, lambda: Checkpoint(folder))


def configured(folder: Path, **config: Any) -> Path:
    return TinyMixtral(config=config).write(folder)


def edit_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


# --- what is read


def test_the_demo_model_is_read_as_what_it_is() -> None:
    spec = spec_of(DEMO_MODEL)
    assert (spec.hidden_size, spec.expert.intermediate_size, spec.num_hidden_layers) == (128, 448, 4)
    assert (spec.router.num_experts, spec.router.num_experts_per_tok, spec.router.normalize) == (8, 2, True)
    assert spec.attention == GroupedQuerySpec("grouped_query", 4, 2, 32, None, 32**-0.5, bias=(), qk_norm="none")
    assert (spec.rope.theta, spec.norm.kind, spec.norm.eps, spec.tied_head) == (1e6, "rms", 1e-5, False)


def test_a_tied_head_needs_no_tensor_of_its_own(tmp_path: Path) -> None:
    model = TinyMixtral(config={"tie_word_embeddings": True})
    assert spec_of(model.write(tmp_path, lambda tensors: tensors.pop("lm_head.weight"))).tied_head


@pytest.mark.parametrize("num_shards", [1, 2, 3])
def test_one_shard_or_several_give_the_same_account_and_bytes(tmp_path: Path, num_shards: int) -> None:
    single = Checkpoint(TinyMixtral().write(tmp_path / "single"))
    sharded = Checkpoint(TinyMixtral(num_shards=num_shards).write(tmp_path / "sharded"))
    files, tensors = sharded.account()
    assert len(files) == num_shards
    assert sorted(tensors, key=lambda tensor: tensor.name) == sorted(single.account()[1], key=lambda t: t.name)
    assert sharded.claims == single.claims
    for source in [*single.claims.dense.values(), *single.claims.experts.values()]:
        size = source.num_rows
        assert np.array_equal(single.rows(source, 0, size), sharded.rows(source, 0, size))
    single.close()
    sharded.close()


def test_a_range_of_rows_has_the_source_s_bytes(tmp_path: Path) -> None:
    model = TinyMixtral(dtype=torch.float32)
    checkpoint = Checkpoint(model.write(tmp_path))
    gate, norm = checkpoint.expert_source(0, 0, "gate"), checkpoint.dense_source("norm")
    assert checkpoint.rows(gate, 5, 9).tobytes() == model.tensors()[GATE_0][5:9].numpy().tobytes()
    assert checkpoint.rows(norm, 3, 4).tobytes() == np.float32(1).tobytes()
    checkpoint.close()


def test_a_tensor_that_is_dropped_is_accounted_for_with_its_reason(tmp_path: Path) -> None:
    extra = "model.layers.0.self_attn.rotary_emb.inv_freq"
    folder = TinyMixtral().write(tmp_path, lambda tensors: tensors.__setitem__(extra, torch.ones(16)))
    checkpoint = Checkpoint(folder)
    fates = {tensor.name: (tensor.fate, tensor.reason) for tensor in checkpoint.account()[1]}
    checkpoint.close()
    assert fates[extra] == ("dropped", "a constant the runtime computes")
    assert fates[GATE_0] == ("packed", "") and fates["lm_head.weight"] == ("resident", "")


# --- folder and config


def test_a_folder_without_config_or_weights_is_refused(new_folder: Callable[[], Path]) -> None:
    def without(name: str) -> tuple[Path, str]:
        folder = TinyMixtral().write(new_folder())
        (folder / name).unlink()
        return folder, refusal(folder)

    none = new_folder() / "none"
    assert refusal(none) == f"{none}: no such folder"
    folder, message = without("config.json")
    assert message == f"{folder}: config.json is missing; a checkpoint folder has one"
    folder, message = without("model.safetensors")
    assert message == f"{folder}: found neither model.safetensors nor {INDEX}; is the download complete?"


def test_a_config_that_is_no_config_is_refused(new_folder: Callable[[], Path]) -> None:
    cases = [
        ("[]", "config.json: expected a JSON object"),
        ("{", "config.json: not valid JSON "
         "(Expecting property name enclosed in double quotes: line 1 column 2 (char 1))"),
        ('{"model_type": "mixtral", "model_type": "mixtral"}', "config.json: key 'model_type' appears twice"),
        ('{"model_type": "mixtral", "rope_theta": NaN}', "config.json: found NaN, which is not a JSON number"),
        ("{}", "config.json: key 'model_type' is missing, expected a string"),
        ('{"model_type": ["mixtral"]}', "config.json: model_type is ['mixtral'], expected a string"),
    ]  # fmt: skip

    def found(text: str) -> str:
        folder = TinyMixtral().write(new_folder())
        (folder / "config.json").write_text(text)
        return refusal(folder)

    assert_each(cases, found)


def test_an_architecture_without_experts_or_an_unknown_one_is_refused(new_folder: Callable[[], Path]) -> None:
    listed, dense = (
        "docs/families.md lists the supported ones",
        {"num_local_experts": None, "num_experts_per_tok": None},
    )
    cases = [
        ({"model_type": "llama"} | dense, "'llama' is a dense model without experts; there is nothing to pack"),
        ({"model_type": "unheard_of"}, f"architecture 'unheard_of' is not supported; {listed}"),
        ({"model_type": "dots2"}, f"architecture 'dots2' is not supported; did you mean dots1? {listed}"),
    ]
    assert_each(cases, lambda config: refusal(configured(new_folder(), **config)), "config.json: ")


def test_a_config_we_cannot_follow_is_refused_by_its_key(new_folder: Callable[[], Path]) -> None:
    cases = [
        ({"hidden_size": "64"}, "hidden_size is '64', expected a whole number"),
        ({"num_hidden_layers": 10_000, "num_local_experts": 2_000_000_000},
         "10000 layers of 2000000000 experts, at most 1000000 in all"),
        ({"hidden_size": 96}, "hidden_size is 96, expected a multiple of 64 (codes lie in blocks of 64)"),
        ({"num_key_value_heads": 3}, "2 heads cannot share 3 keys and values"),
        ({"head_dim": 31}, "rotary_dim is 31, expected an even number up to 31"),
        ({"num_experts_per_tok": 3}, "num_experts_per_tok is 3, expected at most num_experts, 2"),
    ]  # fmt: skip
    assert_each(cases, lambda config: refusal(configured(new_folder(), **config)), "config.json: ")


def test_the_nearest_legal_config_is_read(new_folder: Callable[[], Path]) -> None:
    cases = [
        {"quantization_config": None, "rope_scaling": None},
        {"attention_dropout": 0.1, "use_cache": False, "router_aux_loss_coef": 0.5, "pad_token_id": 0},
        {"rope_theta": None, "rope_parameters": {"rope_theta": 10_000}},
        {"num_experts_per_tok": 1},
        {"rms_norm_eps": 0.5},
        {"head_dim": 32, "num_key_value_heads": 1},
    ]
    for config in cases:
        with case(config):
            folder = TinyMixtral().write(new_folder())
            edit_json(folder / "config.json", lambda values: values.update(config))  # null values stay
            spec_of(folder)


# --- shards and index


def test_a_bin_checkpoint_is_refused_with_how_to_convert_it(new_folder: Callable[[], Path]) -> None:
    cases = ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "consolidated.00.pth", "m.pt"]
    for name in cases:
        with case(name):
            tmp_path = new_folder()
            (TinyMixtral().write(tmp_path) / "model.safetensors").rename(tmp_path / name)
            assert refusal(tmp_path) == (
                f"{tmp_path}: found .bin or .pt weights, expected safetensors; convert once with transformers: "
                "AutoModelForCausalLM.from_pretrained(IN, dtype='auto').save_pretrained(OUT)"
            )


def test_bin_files_beside_safetensors_are_left_alone(tmp_path: Path) -> None:
    (TinyMixtral().write(tmp_path) / "pytorch_model.bin").write_bytes(b"pickle")
    spec_of(tmp_path)


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    folder = TinyMixtral(num_shards=2).write(tmp_path / "sharded")
    spec_of(folder)
    return folder


def name_in(folder: Path, shard: str) -> str:
    weight_map: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
    return next(name for name, held in weight_map.items() if held == shard)


def test_an_index_that_names_anything_but_a_shard_next_to_it_is_refused(sharded: Path) -> None:
    (sharded / "x.safetensors").write_bytes((sharded / SHARD_1).read_bytes())
    name = name_in(sharded, SHARD_1)
    named = ["../x.safetensors", "/x.safetensors", "a/x.safetensors", "x.bin", "..", "", 3, None, ["x.safetensors"]]
    impossible = ["x\0.safetensors", "x\ud800.safetensors", "x" * 300 + ".safetensors"]
    for shard in (*named, *impossible):
        with case(shard):
            edit_json(sharded / INDEX, lambda index: index["weight_map"].update({name: shard}))
            message = f"{INDEX}: {shard!r} is not the name of a safetensors file in the same folder"
            assert refusal(sharded) == message or shard in impossible


def test_an_index_without_weight_map_is_refused(sharded: Path) -> None:
    for index in ["[]", "{}", '{"weight_map": {}}', '{"weight_map": []}', '{"weight_map": null}']:
        with case(index):
            (sharded / INDEX).write_text(index)
            assert refusal(sharded) == f"{INDEX}: weight_map is missing"
    (sharded / INDEX).write_text("{]")
    assert refusal(sharded).startswith(f"{INDEX}: not valid JSON (")


def test_a_missing_shard_is_refused(sharded: Path) -> None:
    (sharded / SHARD_2).unlink()
    assert refusal(sharded) == (
        f"{sharded}: the download is incomplete: of 2 files that {INDEX} names, 1 is missing; download {SHARD_2}"
    )


def test_a_tensor_that_is_not_in_the_shard_the_index_names_is_refused(sharded: Path) -> None:
    for name in ("model.ghost", name_in(sharded, SHARD_1)):
        with case(name):
            index = (sharded / INDEX).read_bytes()
            edit_json(sharded / INDEX, lambda index: index["weight_map"].update({name: SHARD_2}))
            assert refusal(sharded) == f"{INDEX}: tensor {name!r} is not in {SHARD_2}"
            (sharded / INDEX).write_bytes(index)


def test_a_tensor_in_two_shards_is_refused_if_the_index_names_neither(sharded: Path) -> None:
    name = name_in(sharded, SHARD_1)
    twice = load_file(sharded / SHARD_1)[name]
    save_file(load_file(sharded / SHARD_2) | {name: twice}, sharded / SHARD_2)
    spec_of(sharded)
    edit_json(sharded / INDEX, lambda index: index["weight_map"].pop(name))
    assert refusal(sharded) == f"{SHARD_2}: tensor {name!r} is also in {SHARD_1}; each tensor must be in one shard"


def test_shards_under_other_names_are_read(sharded: Path) -> None:
    (sharded / SHARD_2).rename(sharded / "second..safetensors")
    index = (sharded / INDEX).read_text()
    (sharded / INDEX).write_text(index.replace(SHARD_2, "second..safetensors"))
    spec_of(sharded)


def test_a_shard_cut_or_with_bytes_after_its_end_is_refused(sharded: Path) -> None:
    raw = (sharded / SHARD_2).read_bytes()
    for cut in [1, 100, -1]:
        (sharded / SHARD_2).write_bytes((raw + b"\0")[: len(raw) - cut])
        described = f"file has {len(raw) - cut} bytes, its header describes {len(raw)}"
        assert refusal(sharded) == f"{SHARD_2}: {described}; the file is cut or damaged"


# --- tensors


def tensor_refusal(folder: Path, change: Callable[[Tensors], object]) -> str:
    message = refusal(TinyMixtral().write(folder, change))
    assert message.startswith("checkpoint: tensor "), message
    return message.removeprefix("checkpoint: tensor ")


def test_a_missing_tensor_is_refused_by_name(new_folder: Callable[[], Path]) -> None:
    for name in ["model.norm.weight", "lm_head.weight", "model.layers.0.self_attn.k_proj.weight", GATE_0]:
        with case(name):
            found = tensor_refusal(new_folder(), lambda tensors: tensors.pop(name))
            assert found.startswith(f"{name!r} is missing")


def test_a_tensor_without_a_role_or_of_another_shape_is_refused(new_folder: Callable[[], Path]) -> None:
    lost = "has no role in the model that config.json describes; the pack would lose it"
    strange = [
        "model.layers.1.input_layernorm.weight", "model.layers.0.block_sparse_moe.experts.2.w1.weight",
        "model.layers.0.self_attn.q_proj.bias", "score.weight",
    ]  # fmt: skip
    shapes = [
        ("model.embed_tokens.weight", (97, 64), "[96, 64]"), ("model.norm.weight", (64, 1), "[64]"),
        ("model.layers.0.self_attn.k_proj.weight", (64, 64), "[32, 64]"),
        ("model.layers.0.block_sparse_moe.gate.weight", (64, 2), "[2, 64]"), (GATE_0, (64, 48), "[48, 64]"),
        (GATE_0.replace("w1", "w2"), (48, 64), "[64, 48]"), (GATE_0.replace("w1", "w3"), (48 * 64,), "[48, 64]"),
        ("lm_head.weight", (), "[96, 64]"),
    ]  # fmt: skip
    cases = [(name, (64,), f"{name!r} {lost}") for name in strange]
    cases += [(name, shape, f"{name!r} has shape {list(shape)}, expected {right}") for name, shape, right in shapes]

    def found(name: str, shape: tuple[int, ...]) -> str:
        return tensor_refusal(new_folder(), lambda tensors: tensors.update({name: torch.ones(shape)}))

    assert_each(cases, found)


def test_a_tensor_of_a_type_we_do_not_read_is_refused(new_folder: Callable[[], Path]) -> None:
    dtypes = {"I8": torch.int8, "U8": torch.uint8, "F64": torch.float64, "F8_E4M3": torch.float8_e4m3fn}
    cases = [
        (name, dtype, f"{name!r} is {named}, expected one of BF16, F16, F32")
        for named, dtype in dtypes.items()
        for name in ("model.norm.weight", GATE_0)
    ]

    def found(name: str, dtype: torch.dtype) -> str:
        return tensor_refusal(new_folder(), lambda tensors: tensors.update({name: tensors[name].to(dtype)}))

    assert_each(cases, found)


def test_tensors_of_the_three_types_we_read_may_stand_side_by_side(tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.float32)
        tensors[GATE_0] = tensors[GATE_0].to(torch.float16)

    spec_of(TinyMixtral().write(tmp_path, change))


# --- values: looked at by the conversion

EXPERT_1 = "model.layers.0.block_sparse_moe.experts.1"


def conversion_refusal(folder: Path, **options: Any) -> str:
    message = line_of(CheckpointError, lambda: pack(folder, folder / "packed", **options))
    assert not (folder / "packed" / "manifest.json").exists()
    return message


def test_a_weight_that_is_no_number_is_refused_with_shard_tensor_and_position(new_folder: Callable[[], Path]) -> None:
    places: list[tuple[str, tuple[int, ...]]] = [
        ("model.embed_tokens.weight", (17, 5)), ("lm_head.weight", (95, 63)),
        ("model.layers.0.self_attn.v_proj.weight", (0, 0)), ("model.layers.0.block_sparse_moe.gate.weight", (1, 2)),
        (f"{EXPERT_1}.w1.weight", (3, 5)), (f"{EXPERT_1}.w2.weight", (63, 47)), (f"{EXPERT_1}.w3.weight", (47, 63)),
        ("model.norm.weight", (7,)),
    ]  # fmt: skip
    for value in (float("nan"), float("inf"), -float("inf")):
        for name, place in places:
            with case(value, name, place):
                model = TinyMixtral(num_shards=2)
                folder = model.write(new_folder(), lambda tensors: tensors[name].__setitem__(place, value))
                shard = json.loads((folder / INDEX).read_text())["weight_map"][name]
                row, col = (*place, 0)[:2]
                message = f"{shard}: tensor {name!r}: weight [{row}, {col}] is {value}, expected a number"
                assert conversion_refusal(folder) == message


def test_a_weight_far_down_a_matrix_is_named_by_its_row_there(new_folder: Callable[[], Path]) -> None:
    for value in [float("nan"), float("inf")]:
        for dtype in [torch.float16, torch.float32, torch.bfloat16]:
            with case(value, dtype):
                model = TinyMixtral(vocab_size=600, dtype=dtype)
                folder = model.write(
                    new_folder(), lambda tensors: tensors["lm_head.weight"].__setitem__((550, 9), value)
                )
                begin = "model.safetensors: tensor 'lm_head.weight': weight [550, 9] is "
                assert conversion_refusal(folder).startswith(begin)


def test_large_weights_that_are_numbers_are_packed(new_folder: Callable[[], Path]) -> None:
    head = "lm_head.weight"  # whose sum is beyond float32
    for width in [16, 4]:
        for dtype, name, largest in [
            (torch.float16, f"{EXPERT_1}.w1.weight", 65504.0),
            (torch.bfloat16, f"{EXPERT_1}.w1.weight", 65280.0),
            (torch.bfloat16, head, 3e38),
        ]:
            with case(width, dtype, largest):
                folder = TinyMixtral(dtype=dtype).write(new_folder(), lambda tensors: tensors[name].fill_(largest))
                assert pack(folder, folder / "packed", width=width).written


@pytest.mark.parametrize("matrix", ["w1", "w3"])
def test_a_row_that_float16_scales_cannot_express_is_named_by_its_number(tmp_path: Path, matrix: str) -> None:
    name = f"{EXPERT_1}.{matrix}.weight"
    model = TinyMixtral(intermediate_size=640)
    folder = model.write(tmp_path, lambda tensors: tensors[name].__setitem__((600, 0), 1e8))
    assert conversion_refusal(folder) == (
        f"model.safetensors: tensor {name!r}: row 600 has weights too large for float16 scales; store it in 16 bits"
    )


def test_a_float32_weight_beyond_bfloat16_is_not_packed_as_infinity(tmp_path: Path) -> None:
    name = f"{EXPERT_1}.w1.weight"
    model = TinyMixtral(dtype=torch.float32)
    folder = model.write(tmp_path, lambda tensors: tensors[name].__setitem__((3, 5), 3.4028e38))
    conversion_refusal(folder, width=16)
