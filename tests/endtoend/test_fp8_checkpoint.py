"""A checkpoint as DeepSeek-V3's are: FP8 by blocks, a multi-token-prediction layer behind the last. Its pack is it."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support.coded import FP8_CONFIG, quantize_fp8
from support.commands import moe_pack as run
from support.families import Tiny, config_of, original, token_ids, write_random

from moe_pack.convert.kept import keep_source
from moe_pack.convert.pipeline import convert
from moe_pack.formats import BF16, Pack, PackError, uniform_plan
from moe_pack.formats.families import Checkpoint
from moe_pack.formats.pack.layouts import UNUSED_FILE
from moe_pack.formats.pack.manifests import read_account
from moe_pack.formats.pack.plans import FP8
from moe_pack.formats.pack.reader import audit
from moe_pack.formats.parts.specs import num_parameters
from moe_pack.runtime.model import Decoder, PackWeights

# The project's bound on float32 logits; see test_families.py.
TOLERANCE = 1e-4
SHAPE = {
    "hidden_size": 192, "moe_intermediate_size": 160, "intermediate_size": 320, "q_lora_rank": 64, "kv_lora_rank": 64,
    "v_head_dim": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16,
}  # fmt: skip
CODED = ("_proj.weight", "kv_a_proj_with_mqa.weight")


@pytest.fixture(scope="module", params=["deepseek_v3", "kimi_k2"])
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The checkpoint in FP8, and the same one with what its codes mean in float32, which transformers loads."""
    place = tmp_path_factory.mktemp(request.param)
    source, plain = place / "source", place / "plain"
    write_random(config_of(Tiny(request.param, "fp8", SHAPE)), plain)
    tensors, config = load_file(plain / "model.safetensors"), json.loads((plain / "config.json").read_text())
    n = config["num_hidden_layers"]
    last = {name: held for name, held in tensors.items() if name.startswith(f"model.layers.{n - 1}.")}
    behind = {name.replace(f"layers.{n - 1}.", f"layers.{n}."): held + 1 for name, held in last.items()}
    behind[f"model.layers.{n}.eh_proj.weight"] = torch.ones((192, 384), dtype=torch.bfloat16)
    behind[f"model.layers.{n}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    coded = tensors | (behind if request.param == "deepseek_v3" else {})
    meant = quantize_fp8(coded, CODED)
    source.mkdir()
    save_file(coded, source / "model.safetensors")
    config |= {"quantization_config": FP8_CONFIG, "model_type": request.param}
    (source / "config.json").write_text(json.dumps(config))
    save_file(tensors | {name: meant[name] for name in meant if name in tensors}, plain / "model.safetensors")
    return source, plain


@pytest.fixture(scope="module")
def packed(folders: tuple[Path, Path]) -> Path:
    checkpoint = Checkpoint(folders[0])
    plan = keep_source(checkpoint, uniform_plan(checkpoint.spec, "up", BF16, BF16), "source", "source", "source")
    out = folders[0].parent / "packed"
    convert(checkpoint, plan, out, 2)
    checkpoint.close()
    return out


def test_its_pack_computes_what_transformers_does_over_dequantized_weights(
    folders: tuple[Path, Path], packed: Path
) -> None:
    ids = token_ids()
    with torch.no_grad():
        expected = original(folders[1])(torch.tensor([ids]), use_cache=False).logits[0]
    with Pack(packed) as opened:
        assert {part for layer in opened.index.experts for e in layer for part in (e.gate, e.up, e.down)} == {FP8}
        assert {dense.format for dense in opened.manifest.dense} == {FP8}
        # Rows of 160 values are no multiple of 64: they are kept as what the codes mean.
        odd = {dense.role.name: dense.dtype for dense in opened.layout.dense if dense.role.name.endswith("shared.down")}
        assert odd == {"layers.1.shared.down": "F32", "layers.2.shared.down": "F32"}
        assert {"layers.0.mlp.down", "layers.1.shared.up", "layers.2.attention.kv_b"} <= {
            dense.name for dense in opened.manifest.dense
        }
        logits = Decoder(PackWeights(opened, torch.device("cpu")), 128).logits(ids)
    assert expected.abs().max() > 0.5 and (logits - expected).abs().max() < TOLERANCE


def test_its_prediction_layer_lies_in_the_pack_byte_for_byte(folders: tuple[Path, Path], packed: Path) -> None:
    source = load_file(folders[0] / "model.safetensors")
    behind = {name: opened for name, opened in source.items() if name.startswith("model.layers.3.")}
    with Pack(packed) as opened:
        audit(opened)
        account = read_account(opened.read_file("source.json").tobytes())
        unused = {tensor.name: tensor.reason for tensor in account.tensors if tensor.fate == "unused"}
        assert (unused.keys() == behind.keys() and "unused" in opened.manifest.features) or not behind
        assert num_parameters(opened.spec) == sum(tensor.num_weights for tensor in account.tensors)
        assert not any(tensor.fate == "dropped" for tensor in account.tensors)
        if not behind:  # Kimi K2 has none
            assert not opened.has(UNUSED_FILE) and opened.manifest.totals.unused == 0
            return
        assert set(unused.values()) == {"a multi-token-prediction layer, which plain decoding does not run"}
        assert opened.manifest.totals.unused == (packed / UNUSED_FILE).stat().st_size
    found = load_file(packed / UNUSED_FILE)
    assert {name for name in found if not name.startswith("pad.")} == behind.keys()
    for name, expected in behind.items():
        assert found[name].dtype == expected.dtype
        assert torch.equal(found[name].view(torch.uint8), expected.view(torch.uint8)), name


def spoiled(packed: Path, folder: Path) -> Path:
    """A copy of the pack with a byte of its prediction layer changed."""
    folder.mkdir()
    for path in packed.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    raw = bytearray((folder / UNUSED_FILE).read_bytes())
    raw[-100] ^= 1
    (folder / UNUSED_FILE).write_bytes(raw)
    return folder


def test_what_is_not_run_is_never_read_but_by_who_verifies(
    folders: tuple[Path, Path], packed: Path, tmp_path: Path
) -> None:
    if not (packed / UNUSED_FILE).exists():
        pytest.skip("this checkpoint has no such layer")
    folder = spoiled(packed, tmp_path / "spoiled")
    with Pack(folder) as opened:
        logits = Decoder(PackWeights(opened, torch.device("cpu")), 128).logits([1, 2, 3])
        assert logits.isfinite().all()
        with pytest.raises(PackError, match=r"^unused-000.safetensors: SHA-256 does not match the manifest's"):
            audit(opened)


def test_inspect_counts_it_apart_and_verify_compares_it(
    folders: tuple[Path, Path], packed: Path, tmp_path: Path
) -> None:
    source = folders[0]
    shown = json.loads(run("inspect", packed, "--json").stdout)
    unused = (packed / UNUSED_FILE).stat().st_size if (packed / UNUSED_FILE).exists() else 0
    assert shown["bytes"].get("unused", 0) == unused
    assert ("\nunused " in run("inspect", packed).stdout) == (unused > 0)
    verified = run("verify", packed, "--against", source)
    assert verified.exit_code == 0, verified.output
    if unused:
        tensors = load_file(source / "model.safetensors")
        tensors["model.layers.3.eh_proj.weight"][7, 7] = 2
        other = tmp_path / "other"
        other.mkdir()
        save_file(tensors, other / "model.safetensors")
        (other / "config.json").write_bytes((source / "config.json").read_bytes())
        refused = run("verify", packed, "--against", other)
        assert refused.exit_code == 1
        assert refused.stderr.splitlines()[-1] == (
            "moe-pack: unused-000.safetensors: 'model.layers.3.eh_proj.weight' does not match the checkpoint's"
        )
    with safe_open(packed / "dense.safetensors", "pt") as dense:
        assert not any("layers.3" in name for name in dense.keys())  # noqa: SIM118  # no mapping


def test_four_bits_are_quantized_from_what_the_codes_mean(folders: tuple[Path, Path], tmp_path: Path) -> None:
    source, plain = folders
    for name, folder in (("coded", source), ("plain", plain)):
        result = run("convert", folder, "-o", tmp_path / name, "--record-bits", 4, "--selector-bits", 4, "--quantizer",
                     "nearest", "--dense-bits", 4)  # fmt: skip
        assert result.exit_code == 0, result.stderr
    with Pack(tmp_path / "coded") as coded, Pack(tmp_path / "plain") as same:
        for l in range(2):
            for e in range(8):
                assert coded.read_extent(l, e).tobytes() == same.read_extent(l, e).tobytes()
        assert {dense.format.codec for dense in coded.manifest.dense} == {"affine"}


def test_killed_while_it_copies_the_layer_a_conversion_goes_on(
    folders: tuple[Path, Path], packed: Path, tmp_path: Path
) -> None:
    if not (packed / UNUSED_FILE).exists():
        pytest.skip("this checkpoint has no such layer")
    checkpoint = Checkpoint(folders[0])
    plan = keep_source(checkpoint, uniform_plan(checkpoint.spec, "up", BF16, BF16), "source", "source", "source")
    writes = 0

    def dies(step: object) -> None:
        nonlocal writes
        writes += getattr(step, "path", "") == UNUSED_FILE and getattr(step, "action", "") == "write"
        if writes == 9:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        convert(checkpoint, plan, tmp_path / "p", 1, on_step=dies)
    convert(checkpoint, plan, tmp_path / "p", 1)
    assert {path.name: path.read_bytes() for path in (tmp_path / "p").iterdir()} == {
        path.name: path.read_bytes() for path in packed.iterdir()
    }
    checkpoint.close()
