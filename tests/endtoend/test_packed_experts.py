"""A checkpoint as Kimi K2.5's is: experts of four bits in packed words, the rest in 16, all in a multimodal config."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.coded import packed_config, quantize_packed
from support.families import Tiny, original, token_ids, write

from moe_pack.convert import compare_weights
from moe_pack.convert.pipeline import convert
from moe_pack.formats import CheckpointError, Pack, part_format, uniform_plan
from moe_pack.formats.families import Checkpoint
from moe_pack.formats.pack.reader import audit
from moe_pack.runtime.model import CheckpointWeights, Decoder, PackWeights


@pytest.fixture(scope="module")
def kimi(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The checkpoint with packed experts, and the same one with what its codes mean, which transformers loads."""
    place = tmp_path_factory.mktemp("kimi")
    coded, plain = place / "coded", place / "plain"
    sizes = {"moe_intermediate_size": 64, "num_key_value_heads": 4}
    write(Tiny("kimi_k25", "packed", sizes), plain)
    tensors, config = load_file(plain / "model.safetensors"), json.loads((plain / "config.json").read_text())
    published = {
        name.replace(".blocks.", ".layers.") if "language" in name else name: held for name, held in tensors.items()
    }
    endings = tuple(name for name in published if ".mlp.experts." in name)
    meant = quantize_packed(published, endings)
    coded.mkdir()
    save_file(published, coded / "model.safetensors")
    text = config["text_config"] | {"model_type": "kimi_k2", "quantization_config": packed_config()}
    (coded / "config.json").write_text(json.dumps(config | {"text_config": text}))
    save_file(
        tensors | {name.replace(".layers.", ".blocks."): held for name, held in meant.items()},
        plain / "model.safetensors",
    )
    return coded, plain


def test_kimi_s_pack_computes_what_transformers_does_over_dequantized_weights(
    kimi: tuple[Path, Path], tmp_path: Path
) -> None:
    ids = token_ids()
    with torch.no_grad():
        expected = original(kimi[1])(torch.tensor([ids]), use_cache=False).logits[0]
    checkpoint = Checkpoint(kimi[0])
    found = Decoder(CheckpointWeights(checkpoint), 128).logits(ids)
    assert expected.abs().max() > 0.5 and (found - expected).abs().max() < 1e-4
    part = part_format(8, 32)
    convert(checkpoint, uniform_plan(checkpoint.spec, "none", part, part, quantizer="nearest"), tmp_path / "p", 2)
    with Pack(tmp_path / "p") as pack:
        audit(pack)
        assert all(error.relative < 0.01 for error in compare_weights(pack, checkpoint))
        assert Decoder(PackWeights(pack, torch.device("cpu")), 128).logits(ids).isfinite().all()
    checkpoint.close()


def test_two_configs_of_the_quantization_must_be_equal(kimi: tuple[Path, Path], tmp_path: Path) -> None:
    config = json.loads((kimi[0] / "config.json").read_text())
    save_file(load_file(kimi[0] / "model.safetensors"), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": packed_config()}))
    Checkpoint(tmp_path).close()
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": packed_config(num_bits=8)}))
    with pytest.raises(CheckpointError) as refused:
        Checkpoint(tmp_path)
    assert str(refused.value) == (
        "config.json: text_config: quantization_config differs from that outside; these must be equal"
    )
