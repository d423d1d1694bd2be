"""Real configs of published models: read without complaint, and as large as published."""

import json
import math
from pathlib import Path

import pytest
import torch
from support.cases import case
from support.families import CARDS, REFERENCES, built, class_of, quiet_transformers, text_values, with_text
from support.published import CONFIGS, PUBLISHED, UNPUBLISHED, active, agrees, path_of, spec_of, total

from moe_pack.formats import MATRICES
from moe_pack.formats.families.family import Config, Published
from moe_pack.formats.families.registry import family_of, model_types, read_spec
from moe_pack.formats.parts import CompressedSpec, GroupedQuerySpec, LatentSpec
from moe_pack.formats.parts.positions import LongRopeSpec, YarnSpec
from moe_pack.formats.parts.specs import attending, cached_values, num_parameters


def by_name(name: str) -> Published:
    return next(model for model in PUBLISHED if model.name == name)


def test_every_family_and_every_fixture_has_a_row() -> None:
    assert {spec_of(model).family for model in PUBLISHED} == set(model_types()) - set(UNPUBLISHED)
    assert {path_of(model) for model in PUBLISHED} == set(CONFIGS.glob("*.json"))


def parameters_of_the_class(published: Published) -> int:
    """Counts those of the reference's tensors, or of the class of transformers."""
    from transformers import AutoConfig

    values = json.loads(path_of(published).read_text())
    if values["model_type"] in REFERENCES:
        reference = REFERENCES[values["model_type"]]
        return sum(map(math.prod, reference.shapes(reference.completed(values)).values()))
    values.pop("auto_map", None)  # the built-in class, never remote code
    values.pop("quantization_config", None)  # as many weights, in whatever codes
    text = text_values(values)
    if "attn_temperature_tuning" in text:  # Llama 4 has 4, which its class then read as true and now refuses
        values = with_text(values, text | {"attn_temperature_tuning": bool(text["attn_temperature_tuning"])})
    model_type, of_class = values["model_type"], built(values)
    config = AutoConfig.for_model(of_class[0], **of_class[1])
    with torch.device("meta"):
        model = class_of(model_type).from_config(config)
    # Of a multimodal model the language model and the head, which are one model without the others.
    around = CARDS[model_type].around
    others = tuple(f"{part}." for part in around.names) if around is not None else ()
    parameters = [
        held
        for name, held in model.named_parameters()
        if not name.startswith(others) and ".vision_moe." not in name  # ERNIE's experts for images
    ]
    # Learned values that the classes hold as buffers.
    learned = ("e_score_correction_bias", "expert_bias", "layer_scalar")
    buffers = [buffer for name, buffer in model.named_buffers() if name.endswith(learned)]
    return sum(held.numel() for held in [*parameters, *buffers])


@pytest.mark.slow
def test_parameters_are_those_of_transformers_or_the_reference_to_the_last_one() -> None:
    quiet_transformers()
    for published in PUBLISHED:
        with case(published.name):
            assert num_parameters(spec_of(published)) == parameters_of_the_class(published)


def test_parameters_are_those_published() -> None:
    for published in PUBLISHED:
        with case(published.name):
            spec = spec_of(published)
            assert agrees(total(published, spec), 1e9, published.total)
            assert agrees(active(published, spec), 1e9, published.active)


def cached_as_published(published: Published) -> bool:
    """Whether a token caches what is printed; where nobody printed it, what Table 1 of the DeepSeek-V2 paper says.

    `2 n_kv d_h l`, from the config's own numbers, for the layers with attention.
    """
    spec, values = spec_of(published), text_values(json.loads(path_of(published).read_text()))
    if published.cached is not None:
        return agrees(cached_values(spec), 1e3, published.cached)
    if spec.encoder is not None:  # heads with keys of their own; decoder layers keep those of text and answer
        return cached_values(spec) == 2 * 2 * values["num_heads"] * values["d_kv"] * values["num_decoder_layers"]
    family = family_of(spec.family)
    old_keys = {} if family is None else family.old_keys
    values = {old_keys.get(key, key): value for key, value in values.items()}
    num_layers = len(attending(spec))
    if isinstance(spec.attention, LatentSpec):
        return cached_values(spec) == num_layers * (values["kv_lora_rank"] + values["qk_rope_head_dim"])
    if isinstance(spec.attention, CompressedSpec):  # a key, and its share of an entry, with that of the indexer's key
        dims = {0: 0, 4: values["head_dim"] + values["index_head_dim"], 128: values["head_dim"]}
        entries = (dims[ratio] // max(ratio, 1) for ratio in values["compress_ratios"][:num_layers])
        return cached_values(spec) == num_layers * values["head_dim"] + sum(entries)
    head_dim = values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"]
    num_kv_heads = values.get("num_key_value_heads", values.get("attn_config", {}).get("kv_n_heads"))
    num_kv_heads = num_kv_heads or values["num_attention_heads"]
    return cached_values(spec) == 2 * num_kv_heads * head_dim * num_layers


@pytest.mark.parametrize("name", ["mimo-v2-flash", "step-3.7-flash", "deepseek-v4-flash", "deepseek-v4-pro"])
def test_keys_that_transformers_writes_in_another_way_mean_the_same(name: str, tmp_path: Path) -> None:
    from transformers import AutoConfig

    published = by_name(name)
    AutoConfig.for_model(**json.loads(path_of(published).read_text())).save_pretrained(tmp_path)
    rewritten = json.loads((tmp_path / "config.json").read_text())
    assert "rope_parameters" in text_values(rewritten)
    assert read_spec(Config(rewritten, "config.json"))[1] == spec_of(published)


def test_values_cached_a_token_are_those_published() -> None:
    assert [model.name for model in PUBLISHED if not cached_as_published(model)] == []


def test_a_number_agrees_with_what_is_printed_to_its_last_digit_only() -> None:
    assert agrees(46_702_792_704, 1e9, "46.7") and agrees(140_620_634_112, 1e9, "141")
    assert not agrees(46_850_000_000, 1e9, "46.7") and not agrees(142_000_000_001, 1e9, "141")


def test_what_is_particular_is_read_from_the_real_configs() -> None:
    deepseek, phi, glm = (spec_of(by_name(name)) for name in ("deepseek-v2", "phi-3.5-moe", "glm-4.5-air"))
    assert isinstance(deepseek.rope.scaling, YarnSpec) and deepseek.rope.scaling.factor == 40
    assert (deepseek.router.n_group, deepseek.router.topk_group, deepseek.router.scaling_factor) == (8, 3, 16.0)
    # 0.1 * 0.707 * ln 40 + 1 = 1.2608, squared, over the root of 128 + 64
    assert deepseek.attention.scale == pytest.approx(1.2608**2 / 192**0.5, rel=1e-4)
    assert deepseek.moe_layers == tuple(range(1, 60)) and deepseek.dense_intermediate_size == 12288
    assert isinstance(phi.rope.scaling, LongRopeSpec) and phi.rope.scaling.original_max_position_embeddings == 4096
    assert (phi.norm.kind, phi.head_bias, phi.router.kind, phi.router.jitter) == ("layer", True, "sparsemixer", 0.01)
    assert (glm.rope.rotary_dim, glm.router.kind, glm.router.bias, glm.moe_layers[0]) == (64, "sigmoid_topk", True, 1)
    v3, kimi = (spec_of(by_name(name)) for name in ("deepseek-v3", "kimi-k2-instruct"))
    # 0.1 * ln 40 + 1 = 1.3689, squared; cosine and sine keep their size, both mscales being the same
    assert v3.attention.scale == pytest.approx(1.3689**2 / 192**0.5, rel=1e-4)
    assert isinstance(v3.rope.scaling, YarnSpec) and v3.rope.scaling.attention_factor == 1 and v3.rope.interleaved
    assert (v3.router.kind, v3.router.n_group, v3.router.topk_group, v3.router.scaling_factor) == (
        "sigmoid_topk", 8, 4, 2.5,
    )  # fmt: skip
    assert isinstance(kimi.rope.scaling, YarnSpec) and (kimi.rope.scaling.beta_fast, kimi.family) == (1, "kimi_k2")
    qwen = spec_of(by_name("qwen1.5-moe-a2.7b"))
    assert qwen.shared_expert is not None and (qwen.shared_expert.intermediate_size, qwen.shared_expert.gated) == (
        5632,
        True,
    )
    assert isinstance(qwen.attention, GroupedQuerySpec) and qwen.attention.bias == ("q", "k", "v")
    assert (qwen.attention.sliding_window, qwen.router.normalize) == (None, False)
    gpt = spec_of(by_name("gpt-oss-20b"))
    assert isinstance(gpt.attention, GroupedQuerySpec) and gpt.attention.sinks and gpt.router.logit_bias
    assert (gpt.attention.sliding_window, gpt.attention.windowed_layers) == (128, tuple(range(0, 24, 2)))
    assert isinstance(gpt.rope.scaling, YarnSpec) and not gpt.rope.scaling.truncate
    assert (gpt.expert.function, gpt.expert.bias, gpt.expert.extra_floats) == ("clamped_swiglu", MATRICES, 2880)
