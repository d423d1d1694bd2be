"""Makes the tiny GGUF files of `tests/data/gguf`, and what transformers says of their weights.

    python tests/support/golden_gguf.py LLAMA_CPP [SHAPE ...]

LLAMA_CPP is a source tree of llama.cpp, whose converter writes the files from checkpoints of random weights. Then every
matrix is quantized, in the file as llama.cpp has it and in the checkpoint as transformers has it; both go row by row,
so that the values are the same. `SHAPE.npz` has the logits of transformers, float32, for the tokens `ids`.
"""

import json
import re
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from support.families import Tiny, oracle, write

GOLDEN = Path(__file__).parents[1] / "data" / "gguf"
VOCAB, POSITIONS = 64, 128
IDS = [(11 * i * i + 5 * i + 3) % VOCAB for i in range(24)]
SIZES: dict[str, Any] = {"num_hidden_layers": 2, "vocab_size": VOCAB, "max_position_embeddings": POSITIONS}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "intermediate_size": 64}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "intermediate_size": 64}
LATENT = {"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}
# So many heads that hardly any score is 0, of which no more than one would be the same here and there.
INDEXED = {"q_lora_rank": 32, "index_n_heads": 10, "index_head_dim": 64, "index_topk": 7, "num_attention_heads": 2}
INDEXED |= {"num_key_value_heads": 2}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0}
SHARPENED = {"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 16}
SCALED = {"mscale": 0.707, "mscale_all_dim": 0.707}
BANDS = {
    "rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 32.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
MROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [3, 3, 2], "mrope_interleaved": True}
# Keys that published configs have and transformers 5 does not write; llama.cpp's converter reads them.
WRITTEN: dict[str, dict[str, Any]] = {
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "kimi_linear": {
        "linear_attn_config": {
            "kda_layers": [1], "full_attn_layers": [2], "num_heads": 4, "head_dim": 16, "short_conv_kernel_size": 4,
        },
        "first_k_dense_replace": 0, "num_shared_experts": 1, "num_experts": 4,
    },
    "minimax_m2": {"rotary_dim": 16},
    "step3p5": {
        "architectures": ["Step3p5ForCausalLM"], "num_attention_groups": 2, "moe_num_experts": 4, "moe_top_k": 2,
        "moe_router_activation": "sigmoid", "norm_expert_weight": True, "moe_layers_enum": "1,2",
        "attention_other_setting": {"attention_type": "sliding_attention", "num_attention_heads": 6},
        "rope_parameters": None, "rope_theta": [100.0, 10000.0, 10000.0], "rope_scaling": BANDS,
        "partial_rotary_factors": [0.5, 1.0, 1.0],
    },
    "granitemoe_swa": {"no_rope_layers": [1, 0, 1]}, "deepseek_v32": {"scoring_func": "sigmoid"},
    "glm_moe_dsa": {"scoring_func": "sigmoid"},
    "minimax": {
        "architectures": ["MiniMaxText01ForCausalLM"],
        **dict.fromkeys([f"layernorm_{each}_alpha" for each in ("full_attention", "linear_attention", "mlp")], 3.5),
        **dict.fromkeys([f"layernorm_{each}_beta" for each in ("full_attention", "linear_attention", "mlp")], 1.0),
    },
    "bailing_hybrid": {
        "architectures": ["BailingMoeV3ForCausalLM"], "first_k_dense_replace": 0,
        "gated_attention_proj_granularity_type": "head_wise", "kda_lower_bound": -5.0, "kda_safe_gate": True,
        "layer_group_size": 2, "moe_shared_expert_intermediate_size": 32, "no_kda_lora": True, "norm_topk_prob": True,
        "n_group": 2, "num_experts": 4, "score_function": "sigmoid", "short_conv_kernel_size": 4,
    },
    "minimax_m3_vl": {
        "architectures": ["MiniMaxM3SparseForConditionalGeneration"], "scoring_func": "sigmoid", "n_shared_experts": 1,
        "moe_layer_freq": [0, 1],
        "sparse_attention_config": {
            "sparse_num_index_heads": 2, "sparse_index_dim": 32, "sparse_topk_blocks": 3, "sparse_block_size": 4,
            "sparse_local_block": 1,
        },
    },
    "mimo_v2_flash": {
        "hybrid_layer_pattern": [0, 1], "swa_head_dim": 32, "swa_v_head_dim": 24, "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2, "topk_method": "noaux_tc", "layernorm_epsilon": 1e-5, "rope_parameters": None,
        "rope_theta": 5000000, "swa_rope_theta": 10000, "partial_rotary_factor": 0.334,
    },
    "hunyuan_v1_moe": {"moe_intermediate_size": [32, 32], "moe_topk": [2, 2], "num_shared_expert": [1, 1]},
}  # fmt: skip
# Whose published config.json transformers 5 would give to llama.cpp's converter under names that this does not know.
AS_WRITTEN = ("bailing_hybrid", "mimo_v2_flash", "step3p5")
# The type of a family's matrices, and its sizes.
DELTA = {
    "layer_types": ["linear_attention", "full_attention"], "num_attention_heads": 2, "num_key_value_heads": 1,
    "shared_expert_intermediate_size": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 32,
}  # fmt: skip
DBRX = {
    "ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2, "moe_normalize_expert_weights": 1.0,
    "ffn_act_fn": {"name": "silu"},
}  # fmt: skip
LLAMA4 = {
    "num_local_experts": 4, "intermediate_size": 32, "intermediate_size_mlp": 64, "interleave_moe_layer_step": 2,
    "attention_chunk_size": 8192, "floor_scale": 8192,
}  # fmt: skip
SCOUT = BANDS | {"factor": 16.0, "high_freq_factor": 1.0, "original_max_position_embeddings": 8192}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": ("Q4_0", EXPERTS | DELTA), "qwen3_5_moe_text": ("Q5_0", EXPERTS | DELTA),
    "granitemoehybrid": ("Q4_0", {
        "num_local_experts": 4, "intermediate_size": 32, "shared_intermediate_size": 32,
        "layer_types": ["linear_attention", "full_attention"],
    }),
    "jamba": ("Q4_0", {
        "num_experts": 4, "intermediate_size": 32, "attn_layer_period": 2, "attn_layer_offset": 1,
        "expert_layer_period": 2, "expert_layer_offset": 1,
    }),
    "nemotron_h": ("Q4_0", {
        "n_routed_experts": 4, "moe_intermediate_size": 32, "intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 32,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
    }),
    "kimi_linear": ("Q4_0", LATENT | {
        "layer_types": ["linear_attention", "full_attention"], "num_local_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, "intermediate_size": 64, "linear_num_heads": 4,
        "mlp_layer_types": ["sparse", "sparse"],
    }),
    "llama4_text": ("Q4_0", LLAMA4),
    "llama4_text-scout": ("Q4_0", LLAMA4 | {
        "interleave_moe_layer_step": 1, "rope_parameters": SCOUT | {"rope_theta": 5e5},
    }),
    "afmoe": ("Q4_0", EXPERTS | {"num_hidden_layers": 4, "global_attn_every_n_layers": 4}),
    "exaone_moe": ("Q5_0", EXPERTS | {"layer_types": ["sliding_attention", "full_attention"]}),
    "minimax_m2": ("Q4_0", {"num_local_experts": 4, "intermediate_size": 32}),
    "hy_v3": ("Q4_1", EXPERTS | {"num_experts": 4}),
    "ernie4_5_moe": ("Q4_0", {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "intermediate_size": 64}),
    "granitemoe": ("Q4_0", {"num_local_experts": 4, "intermediate_size": 32}),
    "granitemoeshared": ("Q4_0", {"num_local_experts": 4, "intermediate_size": 32, "shared_intermediate_size": 32}),
    "deepseek": ("Q4_0", ROUTED),
    "hunyuan_v1_moe": ("Q4_0", {"num_experts": 4, "moe_topk": 2, "intermediate_size": 32}),
    "dbrx": ("Q4_0", {"n_layers": 2, "vocab_size": VOCAB, "ffn_config": DBRX}),
    "cohere2_moe": ("Q4_0", {
        "num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32, "prefix_dense_intermediate_size": 64,
        "layer_types": ["sliding_attention", "full_attention"], "mlp_layer_types": ["dense", "sparse"],
    }),
    "step3p5": ("Q4_0", ROUTED | {
        "num_hidden_layers": 3, "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse"], "swiglu_limits": [None, 0.4, 0.3],
        "swiglu_limits_shared": [0.5, None, 0.3], "share_expert_dim": 32, "head_dim": 16,
        "rope_parameters": {
            "full_attention": BANDS | {"rope_theta": 100.0, "partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
        },
    }),
    "deepseek_v32": ("Q4_0", ROUTED | LATENT | INDEXED | {"n_group": 2, "topk_group": 1}),
    "glm_moe_dsa": ("Q4_0", ROUTED | LATENT | INDEXED | {"indexer_types": ["full", "shared"]}),
    "mistral4": ("Q4_0", ROUTED | LATENT | {
        "q_lora_rank": 32, "num_attention_heads": 2, "num_key_value_heads": 2,
        "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0} | SHARPENED,
    }),
    "minimax_m3_vl": ("Q4_0", {
        "num_local_experts": 4, "intermediate_size": 32, "dense_intermediate_size": 64, "shared_intermediate_size": 32,
        "mlp_layer_types": ["dense", "sparse"], "layer_types": ["full_attention", "minimax_m3_sparse"],
        "index_head_dim": 32, "index_block_size": 4,
    }),
    "minimax": ("Q4_0", {
        "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
        "num_local_experts": 2, "num_experts_per_tok": 1, "intermediate_size": 32,
        "layer_types": ["linear_attention", "linear_attention", "full_attention"], "rotary_dim": 8,
        **dict.fromkeys(("full_attn_alpha_factor", "linear_attn_alpha_factor", "mlp_alpha_factor"), 3.5),
        **dict.fromkeys(("full_attn_beta_factor", "linear_attn_beta_factor", "mlp_beta_factor"), 1.0),
    }),
    "bailing_hybrid": ("Q4_0", EXPERTS | LATENT | {
        "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "layer_group_size": 2,
        "first_k_dense_replace": 0, "num_experts_per_token": 2, "num_expert_group": 2, "topk_group": 1,
        "expert_swiglu_limit_list": [0, 0.25], "share_expert_swiglu_limit_list": [0.75, 0],
    }),
    "mimo_v2_flash": ("Q4_0", ROUTED | {"v_head_dim": 24}),
    "lfm2_moe": ("Q4_0", EXPERTS | {"layer_types": ["conv", "full_attention"], "conv_bias": False}),
    "mixtral": ("Q4_0", {"num_local_experts": 4, "intermediate_size": 32}),
    "qwen2_moe": ("Q5_0", EXPERTS | {"shared_expert_intermediate_size": 32}), "qwen3_moe": ("Q4_0", EXPERTS),
    "gemma4_text": ("Q4_0", EXPERTS | {
        "num_hidden_layers": 3, "num_experts": 3, "head_dim": 16,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    }),
    "mellum": ("Q4_0", EXPERTS | {
        "num_hidden_layers": 3, "num_experts": 3, "head_dim": 16,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "mlp_layer_types": ["sparse"] * 3,
        "rope_parameters": {
            "full_attention": YARN | {"attention_factor": 1.3},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    }),
    "laguna": ("Q4_0", EXPERTS | {
        "num_hidden_layers": 3, "num_experts": 3, "head_dim": 16, "shared_expert_intermediate_size": 32,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse"], "num_attention_heads_per_layer": [2, 4, 4],
        "rope_parameters": {
            "full_attention": YARN | {"attention_factor": 1.3, "partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e5, "partial_rotary_factor": 1.0},
        },
    }),
    "granitemoe_swa": ("Q4_0", {
        "num_hidden_layers": 3, "num_local_experts": 4, "intermediate_size": 32, "shared_intermediate_size": 32,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"], "layer_rope_theta": [1e5, 0, 1e5],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e5},
    }),
    "qwen3_vl_moe": ("Q4_0", EXPERTS | {
        "num_experts": 3, "moe_intermediate_size": 96, "head_dim": 16, "mlp_only_layers": [], "rope_parameters": MROPE,
    }),
    "olmoe": ("Q4_1", EXPERTS | {"intermediate_size": 32, "num_key_value_heads": 4}),
    "deepseek_v2": ("Q5_1", ROUTED | LATENT | {"rope_parameters": YARN | SCALED}),
    "deepseek_v3": ("Q8_0", ROUTED | LATENT | {"q_lora_rank": 32, "n_group": 2, "topk_group": 1}),
    "gpt_oss": ("MXFP4", {"num_local_experts": 4, "intermediate_size": 64}), "glm4_moe": ("Q4_0", ROUTED),
    "dots1": ("Q4_1", ROUTED),
}  # fmt: skip
# Which stay float32: routers, kernels, and what llama.cpp's converter transposes.
_KEPT_THERE = re.compile(
    r"ffn_gate_inp|conv|attn_[kv]_b|ssm_(a|d|dt|ba|alpha|beta|norm)\b|token_types|exp_probs|attn_sinks|bias"
)
_KEPT_HERE = re.compile(
    r"router|mlp\.gate\.|\.gate\.weight|gate\.wg|conv|kv_b_proj|A_log|shared_expert_gate|bias|sinks|in_proj_ba"
    r"|in_proj_[ab]\.|dt_proj|(self_attn|attention)\.b_proj"
)
_TRANSPOSED = dict.fromkeys(("gpt_oss", "llama4_text", "qwen3_vl_moe"), r"experts\.(gate_up_proj|down_proj)$")


def is_whole(shape: tuple[int, ...]) -> bool:
    return len(shape) > 1 and shape[-1] % 32 == 0


def rounded(values: torch.Tensor, kind: Any) -> torch.Tensor:
    import gguf

    raw = gguf.quants.quantize(values.contiguous().numpy(), kind)
    return torch.from_numpy(gguf.quants.dequantize(raw, kind).reshape(values.shape))


def transpose_experts(folder: Path) -> None:
    """Transposes the experts of a checkpoint that transformers wrote as it has them, which published ones do not."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name in tensors:
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[name] = tensors[name].transpose(-1, -2).contiguous()
    save_file(tensors, path, metadata={"format": "pt"})


def round_checkpoint(folder: Path, family: str, kind: Any) -> None:
    """Quantizes every matrix of a checkpoint, which is float32 afterwards."""
    tensors = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
    for name, tensor in tensors.items():
        if family in _TRANSPOSED and re.search(_TRANSPOSED[family], name):
            tensors[name] = rounded(tensor.transpose(-1, -2), kind).transpose(-1, -2).contiguous()
        elif family == "dbrx" and name.endswith("mlp.w2"):
            whole = tensor.reshape(-1, 32, tensor.shape[-1]).transpose(1, 2)
            tensors[name] = rounded(whole, kind).transpose(1, 2).reshape(tensor.shape).contiguous()
        elif is_whole(tuple(tensor.shape)) and not _KEPT_HERE.search(name):
            tensors[name] = rounded(tensor, kind)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def convert_there(llama_cpp: Path, folder: Path, out: Path) -> None:
    """Converts a checkpoint by llama.cpp, with a vocabulary of no meaning."""
    import gguf

    base = import_module("conversion.base")
    written = json.loads((folder / "config.json").read_text())
    values = written if written["model_type"] in AS_WRITTEN else base.ModelBase.load_hparams(folder, False)
    if written["model_type"] == "mistral4":  # which llama.cpp has in a multimodal checkpoint alone
        found = import_module("conversion.mistral3").Mistral3Model.Mistral4Model
    else:
        architecture = import_module("convert_hf_to_gguf").get_model_architecture(values, base.ModelType.TEXT)
        found = import_module("conversion").get_model_class(architecture)

    def set_vocab(self: Any) -> None:
        self.gguf_writer.add_tokenizer_model("gpt2")
        self.gguf_writer.add_tokenizer_pre("gpt-2")
        self.gguf_writer.add_token_list([f"t{number}" for number in range(VOCAB)])
        self.gguf_writer.add_token_types([1] * VOCAB)
        self.gguf_writer.add_token_merges([])

    own = {"set_vocab": set_vocab, "model_arch": found.model_arch, "_get_suppress_tokens": lambda self: None}
    made = type(found.__name__, (found,), own)
    if hasattr(made, "no_mtp"):
        made.no_mtp = True
    with torch.inference_mode():
        made(folder, gguf.LlamaFileType.ALL_F32, out, hparams=values).write()


def quantize_there(path: Path, out: Path, kind: Any) -> None:
    import gguf

    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(out, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in ("general.architecture",):
            kinds = field.types
            writer.add_key_value(name, field.contents(), kinds[0], kinds[1] if len(kinds) > 1 else None)
    for tensor in reader.tensors:
        shape = tuple(int(size) for size in reversed(tensor.shape))
        values = np.asarray(tensor.data, np.float32).reshape(shape)
        own = gguf.GGMLQuantizationType.F32
        if is_whole(shape) and not _KEPT_THERE.search(tensor.name):
            own = kind
        raw = values if own == gguf.GGMLQuantizationType.F32 else gguf.quants.quantize(values, own)
        writer.add_tensor(tensor.name, raw, raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@torch.no_grad()
def make(llama_cpp: Path, name: str, golden: Path = GOLDEN) -> None:
    sys.path[:0] = [str(llama_cpp), str(llama_cpp / "gguf-py")]  # its converter needs the package of its own version
    import gguf

    type_name, sizes = SHAPES[name]
    family = name.partition("-")[0]
    kind = gguf.GGMLQuantizationType[type_name]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, "checkpoint")
        write(Tiny(family, "golden", SIZES | sizes), folder)
        weights = load_file(folder / "model.safetensors")
        kept = {name: weight for name, weight in weights.items() if not re.search(r"slope_rate|_decay$", name)}
        save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
        values = json.loads((folder / "config.json").read_text())
        values |= WRITTEN.get(family, {})
        values = {key: value for key, value in values.items() if (key, value) != ("rope_parameters", None)}
        (folder / "config.json").write_text(json.dumps(values))
        if family == "gemma4_text":  # whose vocabulary says how many rows of the embedding are kept
            words = {"model": {"vocab": {f"t{number}": number for number in range(VOCAB)}}, "added_tokens": []}
            (folder / "tokenizer.json").write_text(json.dumps(words))
        if family == "qwen3_vl_moe":
            transpose_experts(folder)
        convert_there(llama_cpp, folder, Path(scratch, "f32.gguf"))
        quantize_there(Path(scratch, "f32.gguf"), golden / f"{name}.gguf", kind)
        round_checkpoint(folder, family, kind)
        logits = oracle(folder)(IDS).numpy()
    np.savez_compressed(golden / f"{name}.npz", logits=logits, ids=np.array(IDS))


if __name__ == "__main__":
    for wanted in sys.argv[2:] or SHAPES:
        make(Path(sys.argv[1]), wanted)
