"""Checkpoints in FP8 and MXFP4: what their codes mean, which tensors they need, what is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cases import assert_each, case, line_of
from support.coded import (
    FP8_CONFIG,
    IN_BLOCKS,
    MXFP4_CONFIG,
    from_mxfp4,
    held_so,
    put_into_blocks,
    quantize_fp8,
    random_mxfp4,
)
from support.models import Tensors, TinyMixtral

from moe_pack.formats import CheckpointError, Matrix
from moe_pack.formats.families import Checkpoint
from moe_pack.formats.families.registry import LOADED
from moe_pack.runtime.model import CheckpointWeights, Decoder, read_neurons, read_rows

D, F = 192, 320  # neither is a multiple of 128
IDS = [5, 17, 3, 90, 41]
CODED = ("q_proj.weight", "o_proj.weight", "w1.weight", "w2.weight", "w3.weight")
GATE = "model.layers.0.block_sparse_moe.experts.1.w1.weight"
WEIGHTS: dict[Matrix, str] = {"gate": "w1", "up": "w3", "down": "w2"}


def fp8_model(**config: Any) -> TinyMixtral:
    return TinyMixtral(D, F, num_layers=2, config={"quantization_config": FP8_CONFIG | config})


def mxfp4_model(intermediate_size: int = 96, **config: Any) -> TinyMixtral:
    return TinyMixtral(64, intermediate_size, num_layers=2, config={"quantization_config": MXFP4_CONFIG} | config)


def in_fp8(tensors: Tensors) -> Tensors:
    return quantize_fp8(tensors, CODED)


def refusal(folder: Path) -> str:
    return line_of(CheckpointError, lambda: Checkpoint(folder))


def assert_experts_mean(checkpoint: Checkpoint, meant: Tensors) -> None:
    for l in range(2):
        for e in range(checkpoint.spec.router.num_experts):
            for matrix, w in WEIGHTS.items():
                source = checkpoint.expert_source(l, e, matrix)
                weights = meant[f"model.layers.{l}.block_sparse_moe.experts.{e}.{w}.weight"]
                held = weights.T if matrix == "down" else weights
                assert torch.equal(read_neurons(checkpoint, source).float(), held)
                for start, stop in ((0, 1), (3, 40), (31, 64), (60, 60)):
                    assert torch.equal(read_rows(checkpoint, source, start, stop).float(), weights[start:stop])


def test_fp8_matrices_mean_code_times_scale_of_their_block(tmp_path: Path) -> None:
    meant: Tensors = {}
    checkpoint = Checkpoint(fp8_model().write(tmp_path, lambda tensors: meant.update(in_fp8(tensors))))
    assert_experts_mean(checkpoint, meant)
    source = checkpoint.dense_source("layers.1.attention.q")
    for start, stop in ((0, D), (0, 128), (120, 136), (128, 129), (191, 192)):
        expected = meant["model.layers.1.self_attn.q_proj.weight"][start:stop]
        assert torch.equal(read_rows(checkpoint, source, start, stop), expected)
    checkpoint.close()


def test_mxfp4_blocks_mean_what_transformers_makes_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    monkeypatch.setitem(LOADED, "mixtral", held_so(IN_BLOCKS))
    meant: Tensors = {}
    tensors: Tensors = {}

    def change(held: Tensors) -> None:
        meant.update(put_into_blocks(held, 96, 64))
        tensors.update(held)

    checkpoint = Checkpoint(mxfp4_model().write(tmp_path, change))
    assert_experts_mean(checkpoint, meant)
    theirs = convert_moe_packed_tensors(  # type: ignore[no-untyped-call]  # untyped in transformers
        tensors["model.layers.1.experts.gate_up_blocks"], tensors["model.layers.1.experts.gate_up_scales"]
    )  # [E, d, 2 f]
    for e in range(2):
        for matrix, first in (("gate", 0), ("up", 1)):
            ours = read_neurons(checkpoint, checkpoint.expert_source(1, e, matrix))  # type: ignore[arg-type]  # a literal of Matrix
            assert torch.equal(ours, theirs[e, :, first::2].T)
    checkpoint.close()


def test_the_smallest_and_the_largest_mxfp4_scales_are_exact() -> None:
    blocks, scales = random_mxfp4((4, 64), torch.Generator().manual_seed(0))
    scales[0], scales[1] = 0, 252
    meant = from_mxfp4(blocks, scales)
    assert torch.equal(meant.to(torch.bfloat16).float(), meant) and meant.isfinite().all()


@pytest.mark.parametrize("coded", ["fp8", "mxfp4"])
def test_a_coded_checkpoint_computes_what_its_weights_in_float32_do(
    coded: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meant: Tensors = {}
    if coded == "fp8":
        model, change = fp8_model(), lambda tensors: meant.update(in_fp8(tensors))
    else:
        model, change = mxfp4_model(), lambda tensors: meant.update(put_into_blocks(tensors, 96, 64))
    plain = Checkpoint(
        TinyMixtral(model.hidden_size, model.intermediate_size, num_layers=2).write(
            tmp_path / "plain", lambda tensors: (change(dict(tensors)), tensors.update(meant))
        )
    )
    if coded == "mxfp4":
        monkeypatch.setitem(LOADED, "mixtral", held_so(IN_BLOCKS))
    checkpoint = Checkpoint(model.write(tmp_path / "coded", change))
    found = Decoder(CheckpointWeights(checkpoint), 8).logits(IDS)
    expected = Decoder(CheckpointWeights(plain), 8).logits(IDS)
    assert torch.equal(found, expected)
    loaded = CheckpointWeights(checkpoint).load("layers.0.attention.q")
    assert torch.equal(loaded.rows(3, 50), CheckpointWeights(plain).matrix("layers.0.attention.q").rows(3, 50))
    checkpoint.close()
    plain.close()


def test_scales_are_accounted_for_as_such(tmp_path: Path) -> None:
    checkpoint = Checkpoint(fp8_model().write(tmp_path, in_fp8))
    fates = {tensor.name: tensor.fate for tensor in checkpoint.account()[1]}
    assert (fates[f"{GATE}_scale_inv"], fates[GATE]) == ("scales", "packed")
    q = "model.layers.0.self_attn.q_proj.weight"
    assert (fates[f"{q}_scale_inv"], fates[q]) == ("scales", "resident")
    checkpoint.close()


def test_scales_that_are_missing_or_misshapen_are_refused(new_folder: Callable[[], Path]) -> None:
    def found(scales: torch.Tensor | None) -> str:
        def change(tensors: Tensors) -> None:
            in_fp8(tensors)
            if scales is None:
                del tensors[f"{GATE}_scale_inv"]
            else:
                tensors[f"{GATE}_scale_inv"] = scales

        return refusal(fp8_model().write(new_folder(), change))

    cases = [
        (None, "is missing"),
        (torch.ones(3, 1), "has shape [3, 1], expected [3, 2]"),
        (torch.ones((3, 2), dtype=torch.uint8), "is U8, expected one of BF16, F16, F32"),
    ]
    assert_each(cases, found, f"checkpoint: tensor '{GATE}_scale_inv' ")


def test_fp8_where_none_may_be_is_refused(new_folder: Callable[[], Path]) -> None:
    q, router = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.block_sparse_moe.gate.weight"
    cases = [
        (TinyMixtral(D, F, num_layers=2), in_fp8, f"{q!r} is F8_E4M3, expected one of BF16, F16, F32"),  # by the config
        (
            fp8_model(),
            lambda tensors: quantize_fp8(tensors, (router,)),
            f"{router!r} is F8_E4M3, expected one of BF16, F16, F32",
        ),
        (
            fp8_model(),
            lambda tensors: tensors.update({f"{GATE}_scale_inv": torch.ones(3, 2)}),  # of a matrix in 16 bits
            f"'{GATE}_scale_inv' has no role in the model that config.json describes; the pack would lose it",
        ),
    ]
    assert_each(cases, lambda model, change: refusal(model.write(new_folder(), change)), "checkpoint: tensor ")


def test_scales_in_bfloat16_are_read_exactly(tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        in_fp8(tensors)
        tensors[f"{GATE}_scale_inv"] = torch.tensor([[0.5, 2.0], [1.5, 3.0], [0.25, 7.0]], dtype=torch.bfloat16)

    folder, held = tmp_path, Tensors()
    checkpoint = Checkpoint(fp8_model().write(folder, lambda tensors: (change(tensors), held.update(tensors))))
    found = read_rows(checkpoint, checkpoint.expert_source(0, 1, "gate"), 120, 130)
    codes = held[GATE][120:130].float()
    expected = torch.cat((codes[:, :128] * torch.tensor([0.5] * 8 + [1.5] * 2)[:, None],
                          codes[:, 128:] * torch.tensor([2.0] * 8 + [3.0] * 2)[:, None]), dim=1)  # fmt: skip
    assert torch.equal(found, expected)
    checkpoint.close()


def test_another_quantization_is_refused_by_name(new_folder: Callable[[], Path]) -> None:
    cases = [
        ({"weight_block_size": [64, 128]}, "weight_block_size is [64, 128]; only [128, 128] is supported"),
        ({"weight_block_size": None}, "weight_block_size is []; only [128, 128] is supported"),
        ({"fmt": "e5m2"}, "fmt is 'e5m2', supported: e4m3"),
        ({"activation_scheme": "static"}, "activation_scheme is 'static', supported: dynamic"),
        ({"kv_cache_scheme": "fp8"},
         "key 'kv_cache_scheme' ('fp8') is unknown for this family and may change the arithmetic"),
        ({"quant_method": "awq"},
         "quant_method is 'awq', supported: fp8, mxfp4, compressed-tensors; use the 16-bit original"),
        ({"quant_method": None},
         "quant_method is '', supported: fp8, mxfp4, compressed-tensors; use the 16-bit original"),
    ]  # fmt: skip

    def found(config: dict[str, Any]) -> str:
        return refusal(fp8_model(**config).write(new_folder(), in_fp8))

    assert_each(cases, found, "config.json: quantization_config: ")


@pytest.mark.parametrize("key", ["modules_to_not_convert", "ignored_layers"])
def test_what_was_not_converted_is_told_by_the_tensors(key: str, tmp_path: Path) -> None:
    folder = fp8_model(**{key: ["lm_head"], "scale_fmt": "ue8m0"}).write(tmp_path, in_fp8)
    checkpoint = Checkpoint(folder)
    assert checkpoint.dtype(checkpoint.dense_source("head")) == "BF16"
    assert checkpoint.dtype(checkpoint.dense_source("layers.0.attention.o")) == "F8_E4M3"
    checkpoint.close()


def test_blocks_and_their_scales_must_fit_the_model(new_folder: Callable[[], Path]) -> None:
    cases = [
        ("gate_up_scales", None, "'model.layers.0.experts.gate_up_scales' is missing"),
        ("gate_up_scales", torch.zeros((2, 192, 3), dtype=torch.uint8),
         "'model.layers.0.experts.gate_up_scales' has shape [2, 192, 3], expected [2, 192, 2]"),
        ("down_scales", torch.zeros(2, 64, 3),
         "'model.layers.0.experts.down_scales' is F32, expected U8"),
        ("down_blocks", torch.zeros((2, 64, 3, 32), dtype=torch.uint8),
         "'model.layers.0.experts.down_blocks' has shape [2, 64, 3, 32], expected [2, 64, 3, 16]"),
    ]  # fmt: skip
    for name, tensor, message in cases:
        with case(name, tensor, message), pytest.MonkeyPatch.context() as monkeypatch:
            tmp_path = new_folder()
            monkeypatch.setitem(LOADED, "mixtral", held_so(IN_BLOCKS))

            def change(tensors: Tensors) -> None:
                put_into_blocks(tensors, 96, 64)
                for layer in range(2):
                    place = f"model.layers.{layer}.experts.{name}"
                    if tensor is None:
                        del tensors[place]
                    else:
                        tensors[place] = tensor.clone()

            assert refusal(mxfp4_model().write(tmp_path, change)) == f"checkpoint: tensor {message}"


def test_blocks_that_the_config_does_not_speak_of_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LOADED, "mixtral", held_so(IN_BLOCKS))
    folder = mxfp4_model(quantization_config=None).write(tmp_path, lambda tensors: put_into_blocks(tensors, 96, 64))
    assert refusal(folder) == (
        "checkpoint: tensor 'model.layers.0.experts.gate_up_blocks' is in MXFP4 blocks, but config.json has no "
        "quantization_config for them"
    )
