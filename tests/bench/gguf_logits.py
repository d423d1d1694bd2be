"""What llama.cpp computes from our GGUF files, against what we compute from the packs that they were made of.

    pip install llama-cpp-python==0.3.36
    python tests/bench/gguf_logits.py

A tiny random checkpoint of each family that GGUF can have becomes a pack in 16 bit and a GGUF file in float32. The
logits of both are compared, token by token.
"""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from benchlib import finish, json_option, table
from numpy.typing import NDArray
from support.families import TINY, Tiny, quiet_transformers, write
from support.golden_gguf import DELTA, EXPERTS, LATENT, ROUTED, SCALED, SHAPES, SIZES, YARN
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from moe_pack.convert import convert
from moe_pack.convert.export import ExportWork, export_gguf
from moe_pack.formats import BF16, Pack, RunError, uniform_plan
from moe_pack.formats.families import Checkpoint
from moe_pack.formats.gguf import gguf_model
from moe_pack.runtime.model import Decoder, PackWeights

_IDS = [(11 * i * i + 5 * i + 3) % 64 for i in range(24)]
_CONTEXT = 128
_STATES = SIZES | {name: size for name, size in EXPERTS.items() if name != "intermediate_size"} | DELTA
_STATES |= {"linear_value_head_dim": DELTA["linear_key_head_dim"]}  # the others are tests of refusals
_LLAMA4 = {
    "num_hidden_layers": 4,
    "no_rope_layers": [1, 1, 1, 0],
    "layer_types": ["chunked_attention"] * 3 + ["full_attention"],
    "attn_scale": 0.1,
    "attn_temperature_tuning": True,
}
# Golden files of sizes that llama.cpp loads.
_GOLDEN = (
    "afmoe",
    "deepseek_v32",
    "glm_moe_dsa",
    "granitemoe_swa",
    "kimi_linear",
    "laguna",
    "lfm2_moe",
    "mellum",
    "minimax",
    "minimax_m3_vl",
    "mistral4",
    "qwen3_vl_moe",
    "step3p5",
)
# Sizes that llama.cpp loads, of families whose tiny checkpoints in the tests have others.
_LOADED: dict[str, dict[str, Any]] = {
    **{name: SIZES | SHAPES[name][1] for name in _GOLDEN},
    "qwen3_next": _STATES | {"intermediate_size": 64},
    "qwen3_5_moe_text": _STATES,
    "nemotron_h": SIZES
    | SHAPES["nemotron_h"][1]
    | {"num_hidden_layers": 3, "layers_block_type": ["linear_attention", "moe", "full_attention"], "use_bias": False},
    "llama4_text": SIZES | SHAPES["llama4_text"][1] | _LLAMA4,
    "llama4_text-scout": SIZES | SHAPES["llama4_text-scout"][1] | _LLAMA4,
    "deepseek_v2": SIZES | ROUTED | LATENT | {"num_hidden_layers": 27, "rope_parameters": YARN | SCALED},
    "jamba": SIZES | SHAPES["jamba"][1] | {"mamba_proj_bias": False},
    "dots1": SIZES | SHAPES["dots1"][1] | {"num_key_value_heads": 4},
}


@click.command(help=(__doc__ or "").splitlines()[0])
@click.option("--family", help="One family alone.")
@click.option("--file", hidden=True, help="Print what llama.cpp computes from a file.")
@json_option
def main(family: str | None, file: str | None, as_json: bool) -> None:
    if file is not None:
        np.save(sys.stdout.buffer, _logits_there(file))
        return
    quiet_transformers()
    found = {}
    for tiny in _models():
        if family in (None, tiny.family) and (compared := _compare(tiny)) is not None:
            found[str(tiny)] = compared
    rows = [(name, each["architecture"], f"{each['largest']:.1e}") for name, each in found.items()]
    finish(found, table(("model", "architecture", "largest difference"), rows), as_json)


def _models() -> Iterator[Tiny]:
    for tiny in TINY:
        if not tiny.fused and not tiny.four:  # which are the same model under other names
            yield tiny
    for name, config in _LOADED.items():
        family, _, variant = name.partition("-")
        yield Tiny(family, variant or "sizes that llama.cpp loads", config)


def _compare(tiny: Tiny) -> dict[str, Any] | None:
    """Returns the largest difference of a logit; None for a model that GGUF cannot have."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write(tiny, folder / "checkpoint")
        few_tokens().save(str(folder / "checkpoint" / "tokenizer.json"))
        with closing(Checkpoint(folder / "checkpoint")) as checkpoint:
            try:
                architecture = gguf_model(checkpoint.spec).architecture
            except RunError:
                return None
            plan = uniform_plan(checkpoint.spec, "none", BF16, BF16, quantizer="nearest")
            convert(checkpoint, plan, folder / "pack", 1)
        with Pack(folder / "pack") as pack:
            export_gguf(pack, folder / "gguf", "f32", ExportWork())
            weights = PackWeights(pack, torch.device("cpu"))
            expected = Decoder(weights, _CONTEXT).logits(_IDS).numpy()
            weights.close()
        (path,) = (folder / "gguf").iterdir()
        run = subprocess.run([sys.executable, __file__, "--file", str(path)], capture_output=True, check=False)
        if run.returncode:
            raise click.ClickException(f"{tiny}: llama.cpp failed: {run.stderr.decode()[-500:]}")
        (folder / "there.npy").write_bytes(run.stdout)
        return {
            "architecture": architecture,
            "largest": float(np.abs(np.load(folder / "there.npy") - expected).max()),
            "logits": float(np.abs(expected).max()),
        }


def few_tokens() -> Tokenizer:
    """Returns a tokenizer of few tokens, without which llama.cpp loads no file."""
    vocabulary = {"a": 0, "b": 1, "ab": 2} | {f"t{number}": number for number in range(3, 64)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("a", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _logits_there(path: str) -> NDArray[np.float32]:
    """Returns the logits of llama.cpp for all tokens, float32 [tokens, vocabulary]."""
    import llama_cpp as there

    quiet = there.llama_log_callback(lambda level, text, data: None)
    there.llama_log_set(quiet, None)
    model = there.llama_model_load_from_file(path.encode(), there.llama_model_default_params())
    if not model:
        raise click.ClickException("the file does not load")
    options = there.llama_context_default_params()
    options.n_ctx = options.n_batch = options.n_ubatch = _CONTEXT
    options.n_threads = options.n_threads_batch = 1
    options.type_k = options.type_v = there.GGML_TYPE_F32
    # Without it, MiniMax-M3 attends to all blocks; with it, keys and values are rounded to float16.
    with Path(path).open("rb") as file:
        flash = "ENABLED" if b"minimax-m3" in file.read(4096) else "DISABLED"
    options.flash_attn_type = getattr(there, f"LLAMA_FLASH_ATTN_TYPE_{flash}")
    context = there.llama_init_from_model(model, options)
    batch = there.llama_batch_init(len(_IDS), 0, 1)
    batch.n_tokens = len(_IDS)
    for place, token in enumerate(_IDS):
        batch.token[place], batch.pos[place], batch.logits[place] = token, place, 1
        batch.n_seq_id[place], batch.seq_id[place][0] = 1, 0
    if there.llama_decode(context, batch):
        raise click.ClickException("llama_decode failed")
    size = there.llama_vocab_n_tokens(there.llama_model_get_vocab(model))
    rows = [np.ctypeslib.as_array(there.llama_get_logits_ith(context, i), (size,)).copy() for i in range(len(_IDS))]
    return np.stack(rows)


if __name__ == "__main__":
    main()
