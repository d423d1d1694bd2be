"""Checkpoints with integers packed in words (compressed-tensors): what they mean, which tensors they need, refusals."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cases import case, line_of
from support.coded import packed_config, packed_words, quantize_packed
from support.models import Tensors, TinyMixtral

from moe_pack.convert import compare_logits, compare_weights
from moe_pack.convert.kept import keep_source
from moe_pack.convert.pipeline import convert
from moe_pack.formats import BF16, CheckpointError, Matrix, Pack, PlanError, part_format, uniform_plan
from moe_pack.formats.families import Checkpoint
from moe_pack.formats.pack.manifests import read_account
from moe_pack.formats.pack.reader import audit
from moe_pack.formats.parts.specs import num_parameters
from moe_pack.runtime.model import CheckpointWeights, Decoder, read_neurons, read_rows

D, F = 192, 320
IDS = [5, 17, 3, 90, 41]
EXPERTS = ("w1.weight", "w2.weight", "w3.weight")
CODED = (*EXPERTS, "q_proj.weight", "o_proj.weight")
GATE = "model.layers.0.block_sparse_moe.experts.1.w1.weight"
WEIGHTS: dict[Matrix, str] = {"gate": "w1", "up": "w3", "down": "w2"}


def source_of(
    folder: Path,
    num_bits: int = 4,
    group_size: int = 32,
    dtype: str = "bfloat16",
    change: Callable[[Tensors], object] = lambda tensors: None,
    endings: tuple[str, ...] = CODED,
    **weights: Any,
) -> Tensors:
    """Writes a checkpoint, with the config's values for `weights`; returns what its coded matrices mean."""
    strategy = {"group_size": group_size} if group_size else {"strategy": "channel", "group_size": None}
    config = {"quantization_config": packed_config(**{"num_bits": num_bits} | strategy | weights)}
    meant: Tensors = {}

    def code(tensors: Tensors) -> None:
        meant.update(quantize_packed(tensors, endings, num_bits, group_size, dtype))
        change(tensors)

    TinyMixtral(D, F, num_layers=2, config=config).write(folder, code)
    return meant


def refusal(folder: Path) -> str:
    return line_of(CheckpointError, lambda: Checkpoint(folder))


def test_words_are_those_of_compressed_tensors() -> None:
    """The words are what `pack_to_int32` of compressed-tensors 0.20.0 returns; the first is checked by hand.

    Its codes plus 8 are 0, 1, 7, 8, 9, 13, 14, 15, from the lowest four bits on: 0xFED98710.
    """
    codes = torch.tensor([[-8, -7, -1, 0, 1, 5, 6, 7, 3, -3, 2, -2, 4, -4, 7, -8], [0] * 8 + [-8] * 8])
    assert packed_words(codes, 4).tolist() == [[0xFED98710 - 2**32, 256666203], [-2004318072, 0]]
    codes = torch.tensor([[-128, -127, -1, 0, 1, 2, 126, 127]])
    assert packed_words(codes, 8).tolist() == [[-2139160320, -97663]]


def test_a_matrix_of_those_words_is_read_as_code_times_scale(tmp_path: Path) -> None:
    """The values are written out, so that packing and reading cannot share an error."""
    words = torch.tensor([[0xFED98710 - 2**32, 256666203] * 12] * F, dtype=torch.int32)
    scales = torch.full((F, 6), 0.5, dtype=torch.bfloat16)
    scales[:, 1] = 3.0
    changes = {f"{GATE}_packed": words, f"{GATE}_scale": scales}
    source_of(tmp_path, change=lambda tensors: tensors.update(changes))
    checkpoint = Checkpoint(tmp_path)
    found = read_rows(checkpoint, checkpoint.expert_source(0, 1, "gate"), 7, 8)[0]
    codes = [-8, -7, -1, 0, 1, 5, 6, 7, 3, -3, 2, -2, 4, -4, 7, -8] * 12
    expected = [code * (3.0 if 32 <= col < 64 else 0.5) for col, code in enumerate(codes)]
    assert found.tolist() == expected and found.dtype == torch.float32
    checkpoint.close()


def test_codes_mean_themselves_times_the_scale_of_their_group(new_folder: Callable[[], Path]) -> None:
    for num_bits, group_size, dtype in [
        (4, 32, "bfloat16"), (4, 32, "float16"), (4, 16, "float32"), (8, 32, "bfloat16"), (4, 64, "float16"),
        (4, 0, "bfloat16"), (8, 0, "float32"),
    ]:  # fmt: skip
        with case(num_bits, group_size, dtype):
            tmp_path = new_folder()
            meant = source_of(tmp_path, num_bits, group_size, dtype)
            checkpoint = Checkpoint(tmp_path)
            for l in range(2):
                for e in range(checkpoint.spec.router.num_experts):
                    for matrix, w in WEIGHTS.items():
                        source = checkpoint.expert_source(l, e, matrix)
                        weights = meant[f"model.layers.{l}.block_sparse_moe.experts.{e}.{w}.weight"]
                        neurons = weights.T if matrix == "down" else weights
                        assert torch.equal(read_neurons(checkpoint, source), neurons)
                        for start, stop in ((0, 1), (3, 40), (31, 64), (60, 60)):
                            assert torch.equal(read_rows(checkpoint, source, start, stop), weights[start:stop])
            loaded = CheckpointWeights(checkpoint).load("layers.1.attention.o")
            assert torch.equal(loaded.rows(3, 50), meant["model.layers.1.self_attn.o_proj.weight"][3:50])
            checkpoint.close()


def test_its_tensors_are_accounted_for(tmp_path: Path) -> None:
    source_of(tmp_path)
    checkpoint = Checkpoint(tmp_path)
    tensors = {tensor.name: tensor for tensor in checkpoint.account()[1]}
    q = "model.layers.0.self_attn.q_proj.weight"
    for name, fate in ((GATE, "packed"), (q, "resident")):
        num_rows = F if name == GATE else D
        assert (tensors[f"{name}_packed"].fate, tensors[f"{name}_packed"].weights) == (fate, num_rows * D)
        assert (tensors[f"{name}_scale"].fate, tensors[f"{name}_scale"].weights) == ("scales", None)
        assert tensors[f"{name}_shape"].fate == "dropped"
        assert tensors[f"{name}_shape"].reason == "the shape of a packed matrix, which config.json gives too"
    assert num_parameters(checkpoint.spec) == sum(tensor.num_weights for tensor in tensors.values())
    checkpoint.close()


def test_its_pack_has_the_weights_that_the_codes_mean(tmp_path: Path) -> None:
    meant = source_of(tmp_path / "coded")
    plain = TinyMixtral(D, F, num_layers=2).write(tmp_path / "plain", lambda tensors: tensors.update(meant))
    checkpoint, same = Checkpoint(tmp_path / "coded"), Checkpoint(plain)
    assert torch.equal(
        Decoder(CheckpointWeights(checkpoint), 8).logits(IDS), Decoder(CheckpointWeights(same), 8).logits(IDS)
    )
    for name, part in (("16", BF16), ("4", part_format(4, 64))):
        plan = uniform_plan(checkpoint.spec, "up", part, part, quantizer="nearest")
        assert keep_source(checkpoint, plan, None, None, None) == plan  # no format of packs keeps packed codes
        convert(checkpoint, plan, tmp_path / name, 1)
        convert(same, plan, tmp_path / f"plain {name}", 1)
        with Pack(tmp_path / name) as pack, Pack(tmp_path / f"plain {name}") as other:
            audit(pack)
            assert pack.read_extent(1, 1).tobytes() == other.read_extent(1, 1).tobytes()
            dtypes = {dense.role.name: dense.dtype for dense in pack.layout.dense}
            assert (dtypes["layers.0.attention.q"], dtypes["layers.0.attention.k"]) == ("F32", "BF16")
            compare_weights(pack, checkpoint)
            if name == "4":
                account = read_account(pack.read_file("source.json").tobytes())
                assert {tensor.weights for tensor in account.tensors} == {None, D * D, D * F}
            else:
                assert compare_logits(pack, checkpoint, IDS).largest < 0.1  # codes times scales need 11 bits
    checkpoint.close()
    same.close()


def test_no_format_keeps_the_codes(tmp_path: Path) -> None:
    source_of(tmp_path)
    checkpoint = Checkpoint(tmp_path)
    with pytest.raises(PlanError) as refused:
        keep_source(checkpoint, uniform_plan(checkpoint.spec, "up", BF16, BF16), "source", "source", None)
    assert str(refused.value) == (
        "--record-bits source: model.safetensors: tensor "
        "'model.layers.0.block_sparse_moe.experts.0.w1.weight_packed' is I32, which no format of experts keeps "
        "without loss; give a width (16 is bfloat16)"
    )
    checkpoint.close()


def test_tensors_must_fit_the_config(new_folder: Callable[[], Path]) -> None:
    lost = "has no role in the model that config.json describes; the pack would lose it"
    cases: list[tuple[str, torch.Tensor | None, str]] = [
        ("_packed", None, f"'{GATE}' is missing"),
        (
            "_packed",
            torch.zeros((F, 48), dtype=torch.int32),
            f"'{GATE}_packed' has shape [320, 48], expected [320, 24]",
        ),
        ("_packed", torch.zeros((F, 24)), f"'{GATE}_packed' is F32, expected I32"),
        ("_scale", None, f"'{GATE}_scale' is missing"),
        ("_scale", torch.ones(F, 3), f"'{GATE}_scale' has shape [320, 3], expected [320, 6]"),
        ("_scale", torch.ones((F, 6), dtype=torch.int32), f"'{GATE}_scale' is I32, expected one of BF16, F16, F32"),
        ("", torch.ones(F, D), f"'{GATE}_shape' {lost}"),
        ("_g_idx", torch.zeros(D, dtype=torch.int32), f"'{GATE}_g_idx' {lost}"),
        ("_zero_point", torch.zeros((40, 6), dtype=torch.int32), f"'{GATE}_zero_point' {lost}"),
    ]
    for ending, tensor, message in cases:
        with case(ending, message):
            tmp_path = new_folder()

            def change(tensors: Tensors, name: str = f"{GATE}{ending}", tensor: torch.Tensor | None = tensor) -> None:
                if tensor is None:
                    del tensors[name]
                else:
                    tensors[name] = tensor

            source_of(tmp_path, change=change)
            assert refusal(tmp_path) == f"checkpoint: tensor {message}"


def test_the_shape_of_a_matrix_that_is_not_packed_belongs_to_nothing(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.k_proj.weight_shape"
    source_of(tmp_path, change=lambda tensors: tensors.update({name: torch.tensor([D, D])}))
    assert "has no role" in refusal(tmp_path) and name in refusal(tmp_path)


def test_rows_that_are_not_whole_groups_and_words_are_refused(new_folder: Callable[[], Path]) -> None:
    for group_size, message in [
        (80, "rows of 192 values, expected whole groups of 80 and whole words of 8"),
        (128, "rows of 192 values, expected whole groups of 128 and whole words of 8"),
    ]:
        with case(group_size):
            tmp_path = new_folder()
            source_of(tmp_path, endings=EXPERTS)
            config = json.loads((tmp_path / "config.json").read_text())
            config["quantization_config"] = packed_config(group_size=group_size)
            (tmp_path / "config.json").write_text(json.dumps(config))
            name = "model.layers.0.block_sparse_moe.experts.0.w1.weight_packed"
            assert refusal(tmp_path) == f"checkpoint: tensor '{name}': config.json gives it {message}"


def test_another_scheme_is_refused_by_name(new_folder: Callable[[], Path]) -> None:
    weights = "config_groups: group_0: weights: "
    only = "only {} is supported".format
    for change, message in [
        ({"num_bits": 3}, f"{weights}num_bits is 3; only 4 and 8 are supported"),
        ({"num_bits": None}, f"{weights}key 'num_bits' is missing, expected a whole number"),
        ({"symmetric": False}, f"{weights}symmetric is False; {only(True)}"),
        ({"type": "float"}, f"{weights}type is 'float'; {only(repr('int'))}"),
        ({"dynamic": True}, f"{weights}dynamic is True; {only(False)}"),
        ({"actorder": "group"}, f"{weights}actorder is 'group', supported: weight, static"),
        ({"strategy": "tensor"}, f"{weights}strategy is 'tensor', supported: group, channel"),
        ({"strategy": "channel"}, f"{weights}group_size is 32; {only(-1)}"),
        ({"group_size": None}, f"{weights}key 'group_size' is missing, expected a whole number"),
        ({"block_structure": [128, 128]}, f"{weights}block_structure is [128, 128]; {only(None)}"),
        ({"odd": 1}, f"{weights}key 'odd' (1) is unknown for this family and may change the arithmetic"),
    ]:
        with case(change):
            assert changed(new_folder(), packed_config(**change)) == f"config.json: quantization_config: {message}"
    whole = packed_config()
    group = whole["config_groups"]["group_0"]
    for config, message in [
        ({"format": "naive-quantized"}, "format is 'naive-quantized', supported: pack-quantized"),
        ({"quantization_status": "frozen"}, "quantization_status is 'frozen', supported: compressed"),
        ({"kv_cache_scheme": {"num_bits": 8}}, f"kv_cache_scheme is {{'num_bits': 8}}; {only(None)}"),
        ({"transform_config": {"a": 1}}, f"transform_config is {{'a': 1}}; {only({})}"),
        ({"config_groups": {}}, "config_groups has no weights; at least one kind is needed"),
        (
            {"config_groups": {"group_0": {"targets": ["Linear"]}}},
            "config_groups: group_0: weights is missing; only groups with quantized weights are supported",
        ),
        (
            {"config_groups": {"group_0": group | {"output_activations": {"num_bits": 8}}}},
            f"config_groups: group_0: output_activations is {{'num_bits': 8}}; {only(None)}",
        ),
        (
            {"config_groups": {"group_0": group | {"format": "int-quantized"}}},
            f"config_groups: group_0: format is 'int-quantized'; {only(repr('pack-quantized'))}",
        ),
        ({"odd": 1}, "key 'odd' (1) is unknown for this family and may change the arithmetic"),
    ]:
        with case(config):
            assert changed(new_folder(), whole | config) == f"config.json: quantization_config: {message}"


def changed(folder: Path, quantization: dict[str, Any]) -> str:
    source_of(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    return refusal(folder)


def test_tensors_of_several_widths_and_groups_are_told_apart_by_their_shapes(tmp_path: Path) -> None:
    """Those of w2 have 8 bits and groups of 64, all others 4 bits and groups of 32."""
    meant: Tensors = {}

    def code(tensors: Tensors) -> None:
        meant.update(quantize_packed(tensors, ("w1.weight", "w3.weight"), 4, 32))
        meant.update(quantize_packed(tensors, ("w2.weight",), 8, 64))

    config, other = packed_config(), packed_config(num_bits=8, group_size=64)["config_groups"]["group_0"]
    config["config_groups"]["group_1"] = other
    TinyMixtral(D, F, config={"quantization_config": config}).write(tmp_path, code)
    checkpoint = Checkpoint(tmp_path)
    for matrix, name in WEIGHTS.items():
        source = checkpoint.expert_source(0, 1, matrix)
        expected = meant[f"model.layers.0.block_sparse_moe.experts.1.{name}.weight"]
        assert torch.equal(read_rows(checkpoint, source, 0, source.num_rows), expected)
    checkpoint.close()


def test_what_changes_no_weight_is_accepted(new_folder: Callable[[], Path]) -> None:
    whole = packed_config(actorder="static", scale_dtype="torch.bfloat16", zp_dtype=None, strategy=None)
    group = whole["config_groups"]["group_0"]
    more = {
        "input_activations": {"num_bits": 8, "dynamic": True},
        "format": "pack-quantized",
        "targets": ["re:.*mlp.*"],
    }
    whole["config_groups"] |= {"group_1": group | more}
    whole |= {"sparsity_config": {}, "transform_config": {}, "version": "0.12.3", "global_compression_ratio": None}
    tmp_path = new_folder()
    source_of(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": whole}))
    Checkpoint(tmp_path).close()
