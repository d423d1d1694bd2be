"""The plain references: as they were when written, and equal to transformers where a class of it comes to the same."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.cards import Values
from support.cases import case
from support.families import CARDS, REFERENCES, SIZES
from support.plain import Weights
from support.references import FIXTURES, TEXT, logits_of_shapes, shapes_of

Sibling = tuple[Values, Weights]  # the config and the tensors of a transformers class that comes to the same
IDS = [(11 * i * i + 5 * i + 3) % 96 for i in range(32)]


@pytest.mark.parametrize("model_type", REFERENCES)
def test_a_reference_says_what_it_said_when_it_was_written(model_type: str) -> None:
    kept, made = load_file(FIXTURES / f"{model_type}.safetensors"), logits_of_shapes(model_type)
    assert kept.keys() == made.keys()
    for name, logits in made.items():
        # Another library's exponentials and sums: some units in the last place of values up to 20.
        torch.testing.assert_close(logits, kept[name], rtol=0, atol=2e-5, msg=name)


@pytest.mark.parametrize("model_type", REFERENCES)
def test_every_switch_changes_what_is_said(model_type: str) -> None:
    kept = load_file(FIXTURES / f"{model_type}.safetensors")
    for name in CARDS[model_type].shapes:
        assert (kept[name] - kept["as it comes"]).abs().max() > 0.1, name


def in_common(values: Values) -> Values:
    """The keys that transformers' classes share, all spelled out."""
    keys = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "max_position_embeddings")
    return {key: values[key] for key in (*keys, "rms_norm_eps", "tie_word_embeddings")} | {
        "num_key_value_heads": values["num_key_value_heads"] or values["num_attention_heads"],
        "rope_parameters": {"rope_type": "default", "rope_theta": values["rope_theta"]},
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")),
    }


def as_qwen2_moe(values: Values, weights: Weights) -> Sibling:
    """DeepSeekMoE: the sigmoid of a shared router of zeros is a half, which shared experts twice as large undo."""
    freq, first = values["moe_layer_freq"], values["first_k_dense_replace"]
    layers = range(values["num_hidden_layers"])
    shared = values["n_shared_experts"]
    config = in_common(values) | {
        "intermediate_size": values["intermediate_size"],
        "moe_intermediate_size": values["moe_intermediate_size"],
        "num_experts": values["n_routed_experts"],
        "num_experts_per_tok": values["num_experts_per_tok"],
        "norm_topk_prob": values["norm_topk_prob"] and values["num_experts_per_tok"] > 1,
        "shared_expert_intermediate_size": values["moe_intermediate_size"] * (shared or 1),
        "mlp_only_layers": [i for i in layers if i < first or i % freq],
        "qkv_bias": False,
    }
    held = {name.replace("shared_experts", "shared_expert"): weight for name, weight in weights.items()}
    size, d = config["shared_expert_intermediate_size"], values["hidden_size"]
    for i in set(layers) - set(config["mlp_only_layers"]):
        mlp = f"model.layers.{i}.mlp"
        held[f"{mlp}.shared_expert_gate.weight"] = torch.zeros(1, d)
        if shared is None:
            made = {"gate_proj": (size, d), "up_proj": (size, d), "down_proj": (d, size)}
            held |= {f"{mlp}.shared_expert.{name}.weight": torch.zeros(shape) for name, shape in made.items()}
        else:
            held[f"{mlp}.shared_expert.down_proj.weight"] = 2 * held[f"{mlp}.shared_expert.down_proj.weight"]
    return config, held


def fused(weights: Weights, values: Values, router: str, names: tuple[str, str, str]) -> Weights:
    """Experts and router as Granite holds them: all of a layer in two tensors."""
    held = {name: weight for name, weight in weights.items() if ".mlp." not in name}
    for i in range(values["num_hidden_layers"]):
        mlp, moe = f"model.layers.{i}.mlp", f"model.layers.{i}.block_sparse_moe"
        held[f"{moe}.router.layer.weight"] = weights[f"{mlp}.{router}.weight"]
        gate, up, down = (
            torch.stack([weights[f"{mlp}.experts.{e}.{name}.weight"] for e in range(values["num_experts"])])
            for name in names
        )
        held[f"{moe}.input_linear.weight"], held[f"{moe}.output_linear.weight"] = torch.cat((gate, up), dim=1), down
    return held


def as_granitemoe(values: Values, weights: Weights) -> Sibling:
    """MiniCPM: its three scales are Granite's multipliers."""
    config = in_common(values) | {
        "intermediate_size": values["intermediate_size"],
        "num_local_experts": values["num_experts"],
        "num_experts_per_tok": values["num_experts_per_tok"],
        "attention_bias": values["attention_bias"],
        "attention_multiplier": (values["hidden_size"] // values["num_attention_heads"]) ** -0.5,
        "embedding_multiplier": values["scale_emb"],
        "residual_multiplier": values["scale_depth"] / values["num_hidden_layers"] ** 0.5,
        "logits_scaling": values["hidden_size"] / values["dim_model_base"],
    }
    return config, fused(weights, values, "gate", ("w1", "w3", "w2"))


def as_granitemoeshared(values: Values, weights: Weights) -> Sibling:
    """XVERSE: Granite with shared experts and no multiplier; the millionth in its weights' sum is not to be seen."""
    shared = values["num_shared_experts"]
    config = in_common(values) | {
        "intermediate_size": values["intermediate_size"],
        "shared_intermediate_size": values["intermediate_size"] * (shared or 0),
        "num_local_experts": values["num_experts"],
        "num_experts_per_tok": values["moe_top_k"],
        "attention_bias": values["attention_bias"],
        "attention_multiplier": (values["hidden_size"] // values["num_attention_heads"]) ** -0.5,
    }
    held = fused(weights, values, "router", ("gate_proj", "up_proj", "down_proj"))
    for i in range(values["num_hidden_layers"]) if shared else ():
        mlp, into = f"model.layers.{i}.mlp.shared_experts", f"model.layers.{i}.shared_mlp"
        both = [weights[f"{mlp}.{name}.weight"] for name in ("gate_proj", "up_proj")]
        held |= {
            f"{into}.input_linear.weight": torch.cat(both),
            f"{into}.output_linear.weight": weights[f"{mlp}.down_proj.weight"],
        }
    return config, held


SIBLINGS: dict[str, tuple[str, Callable[[Values, Weights], Sibling]]] = {
    "deepseek": ("qwen2_moe", as_qwen2_moe),
    "minicpm": ("granitemoe", as_granitemoe),
    "xverse": ("granitemoeshared", as_granitemoeshared),
}
CASES = [
    (model_type, name, values)
    for model_type in REFERENCES
    for name, values in shapes_of(model_type)
    if not (model_type == "deepseek" and values.get("attention_bias"))  # Qwen's o has no bias
]


def test_a_transformers_class_that_comes_to_the_same_says_the_same(new_folder: Callable[[], Path]) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    for model_type, name, values in CASES:
        with case(model_type, name):
            tmp_path = new_folder()
            reference, (sibling, translated) = REFERENCES[model_type], SIBLINGS[model_type]
            source = reference.write(values, tmp_path / "source")
            weights = {key: held.float() for key, held in load_file(source / "model.safetensors").items()}
            config, held = translated(reference.completed(values), weights)
            AutoConfig.for_model(sibling, **config).save_pretrained(tmp_path / "sibling")
            save_file(
                {key: weight.contiguous() for key, weight in held.items()}, tmp_path / "sibling" / "model.safetensors"
            )
            model, loading = AutoModelForCausalLM.from_pretrained(
                tmp_path / "sibling", dtype=torch.float32, output_loading_info=True
            )
            assert not loading["unexpected_keys"] and set(loading["missing_keys"]) <= {"lm_head.weight"}
            with torch.no_grad():
                theirs = model.eval()(torch.tensor([IDS])).logits[0]
            ours = reference.logits_of(source, IDS)
            assert ours.abs().max() > 0.5, "logits so small that the bound would prove nothing"
            assert (ours - theirs).abs().max() < 1e-4


def test_the_fixtures_text_is_within_the_vocabulary_and_the_window() -> None:
    assert max(TEXT) < SIZES["vocab_size"] and len(IDS) < SIZES["max_position_embeddings"]
    assert REFERENCES.keys() == SIBLINGS.keys()
