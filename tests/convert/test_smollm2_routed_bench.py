"""The command that makes a model with trained routing from a dense one: the whole of it, on a tiny random Llama."""

import json
import zipfile
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from benchlib import BOOK
from click.testing import CliRunner
from smollm2_moe import opened
from smollm2_routed import Shape, dense_model, main, perplexity, started, tokens_of
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoModelForCausalLM

from moe_pack.formats.families import Checkpoint
from moe_pack.runtime.model import CheckpointWeights, Decoder

HIDDEN, HEADS, KV_HEADS, LAYERS, NEURONS = 64, 4, 2, 2, 192
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(ByteLevel.alphabet()), "th"]
CONTROL, NORMAL = 3, 1


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes a package with the GGUF file of a dense Llama, as the real one."""
    folder = tmp_path_factory.mktemp("wheel")
    writer, rng = gguf.GGUFWriter(folder / "tiny.gguf", "llama"), np.random.default_rng(0)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(NEURONS)
    writer.add_block_count(LAYERS)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_token_list(TOKENS)
    writer.add_token_types([CONTROL] * 3 + [NORMAL] * (len(TOKENS) - 3))
    writer.add_token_merges(["t h"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    kv = HIDDEN * KV_HEADS // HEADS
    shapes = {
        "attn_q": (HIDDEN, HIDDEN),
        "attn_k": (kv, HIDDEN),
        "attn_v": (kv, HIDDEN),
        "attn_output": (HIDDEN, HIDDEN),
    }
    shapes |= {"ffn_gate": (NEURONS, HIDDEN), "ffn_up": (NEURONS, HIDDEN), "ffn_down": (HIDDEN, NEURONS)}
    named = {f"blk.{layer}.{name}": shape for layer in range(LAYERS) for name, shape in shapes.items()}
    for name, shape in {"token_embd": (len(TOKENS), HIDDEN), **named}.items():
        writer.add_tensor(f"{name}.weight", rng.normal(0, shape[1] ** -0.5, shape).astype(np.float32))
    norms = [f"blk.{layer}.{name}" for layer in range(LAYERS) for name in ("attn_norm", "ffn_norm")]
    for name in ("output_norm", *norms):
        writer.add_tensor(f"{name}.weight", rng.uniform(0.5, 1.5, HIDDEN).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with zipfile.ZipFile(folder / "tiny.whl", "w") as archive:
        archive.write(folder / "tiny.gguf", "model/tiny.gguf")
    return folder / "tiny.whl"


def run(wheel: Path, folder: Path, *more: str) -> str:
    sizes = ("--experts", "4", "--neurons", "64", "--shared", "64", "--chosen", "2,1", "--tried", "3,1,2")
    few = ("--start", "2", "--steps", "3", "--length", "48", "--judged", "96", "--within", "-0.9")
    places = ("--work", str(folder / "work"), "-o", str(folder / "model"))
    found = CliRunner().invoke(main, [str(wheel), *sizes, *few, *places, *more], catch_exceptions=False)
    assert found.exit_code == 0, found.output
    return found.stdout


def test_it_writes_a_model_that_moe_pack_and_transformers_run_alike(wheel: Path, tmp_path: Path) -> None:
    """No perplexity is good enough, so that the first k is taken. A second run goes on where the first ended."""
    said = run(wheel, tmp_path)
    assert [line.split(":")[0] for line in said.splitlines()] == ["dense", *(f"{k} experts a token" for k in (1, 2, 3))]
    folder = tmp_path / "model"
    config, ids = json.loads((folder / "config.json").read_text("utf-8")), list(range(4, 60))
    assert (config["model_type"], config["num_experts_per_tok"], config["num_experts"]) == ("qwen2_moe", 2, 4)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    reached = float(said.splitlines()[2].split()[-2].rstrip(","))  # of the model in training
    assert perplexity(model, tokens_of(folder, BOOK, 96, 48)) == pytest.approx(reached, rel=0.02)  # bfloat16
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0]
    checkpoint = Checkpoint(folder)
    logits = Decoder(CheckpointWeights(checkpoint), 96).logits(ids)
    checkpoint.close()
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    weights = (folder / "model.safetensors").read_bytes()
    assert run(wheel, tmp_path) == said
    assert (folder / "model.safetensors").read_bytes() == weights


def test_a_start_whose_experts_all_run_is_the_dense_model(wheel: Path) -> None:
    """The router weighs all alike, and an expert takes no neurons of others: nothing is left to correct."""
    with opened(wheel) as source:
        dense = dense_model(source)
    ids = torch.randint(3, len(TOKENS), (3, 40), generator=torch.Generator().manual_seed(1))
    for shape in (Shape(4, 4, 32, 64), Shape(3, 3, 64, 0)):
        student = started(dense, ids, shape, spread=1e-6)
        with torch.no_grad():
            torch.testing.assert_close(student(ids).logits, dense(ids).logits, atol=0.05, rtol=0.05)
