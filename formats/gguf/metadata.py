"""The metadata of a GGUF file by a model's spec: the inverse of what an architecture's `config` reads.

llama.cpp ignores keys that an architecture does not know, so one function serves nearly all; `_EXTRAS` has the other
keys of architectures. llama.cpp has some values as constants: the writer reads a file's header back and compares the
spec. Source: llama.cpp, src/llama-arch.cpp and src/models/.
"""

from collections.abc import Callable, Mapping

from moe_pack.formats import parts
from moe_pack.formats.gguf.architecture import Values
from moe_pack.formats.parts import positions, specs

Extras = Callable[[specs.ModelSpec], Values]
_GATING = {"softmax_topk": 1, "sigmoid_topk": 2}  # llama.cpp has the other kinds as constants
_SECTIONS = [11, 11, 10, 0]  # of rotary positions by time, height and width, which are equal in a text


def model_metadata(spec: specs.ModelSpec, architecture: str) -> Values:
    """Returns the metadata of a model by full key, without its name and its tokenizer."""
    values: Values = {
        "block_count": spec.num_hidden_layers,
        "context_length": spec.max_position_embeddings,
        "embedding_length": spec.hidden_size,
        "vocab_size": spec.vocab_size,
        "feed_forward_length": spec.dense_intermediate_size or spec.expert.source_size,
        "leading_dense_block_count": spec.moe_layers[0],
        **_experts(spec),
        **spec.attention.gguf_values(spec.rope),
        **_rope(spec.rope, spec.attention.kind == "latent"),
        **({} if spec.mixer is None else spec.mixer.gguf_values(spec.num_hidden_layers, spec.rope is not None)),
    }
    norm = "layer_norm_rms_epsilon" if spec.norm.kind == "rms" else "layer_norm_epsilon"
    values |= {f"attention.{norm}": spec.norm.eps}
    if extras := _EXTRAS.get(architecture):
        values |= extras(spec)
    if (spec.mixer or spec.halves) and "attention.recurrent_layers" not in values:
        heads, layers = values.get("attention.head_count_kv"), range(spec.num_hidden_layers)
        attending = [spec.has_first(layer) and spec.mixer_of(layer) is None for layer in layers]
        values["attention.head_count_kv"] = [heads if flag else 0 for flag in attending]
    own = {f"{architecture}.{key}": value for key, value in values.items() if value is not None}
    return {"general.architecture": architecture, "general.type": "model", **own}


def _experts(spec: specs.ModelSpec) -> Values:
    router, size = spec.router, spec.expert.source_size
    values: Values = {
        "expert_count": router.num_experts,
        "expert_used_count": router.num_experts_per_tok,
        "expert_feed_forward_length": size,
    }
    if spec.shared_expert is not None:
        shared = spec.shared_expert.intermediate_size
        values |= {"expert_shared_feed_forward_length": shared, "expert_shared_count": max(1, shared // size)}
    if router.kind in _GATING:
        values |= {
            "expert_gating_func": _GATING[router.kind],
            "expert_weights_norm": router.normalize,
            "expert_weights_scale": router.scaling_factor,
            "expert_group_count": router.n_group,
            "expert_group_used_count": router.topk_group,
        }
    return values


def _rope(rope: parts.RopeSpec | None, is_latent: bool = False) -> Values:
    if rope is None:
        return {}
    values: Values = {"rope.freq_base": rope.theta, "rope.dimension_count": rope.rotary_dim}
    if rope.scaling is not None:
        values |= rope.scaling.gguf_values(is_latent)
    return values


def _grouped(spec: specs.ModelSpec, layer: int | None = None) -> parts.GroupedQuerySpec:
    attention = spec.attention if layer is None else spec.attention_of(layer)
    assert isinstance(attention, parts.GroupedQuerySpec), "an architecture with grouped-query attention"
    return attention


def _latent(spec: specs.ModelSpec) -> parts.LatentSpec:
    assert isinstance(spec.attention, parts.LatentSpec), "an architecture with latent attention"
    return spec.attention


def _granite(spec: specs.ModelSpec) -> Values:
    return {
        "attention.scale": spec.attention.scale,
        "embedding_scale": spec.embedding_multiplier,
        "residual_scale": spec.residual_multiplier,
        "logit_scale": spec.logits_scaling,
        "rope.dimension_count": _grouped(spec).head_dim,  # also without rotary positions
    }


def _windows(spec: specs.ModelSpec) -> Values:
    layers = range(spec.num_hidden_layers)
    return {"attention.sliding_window_pattern": [spec.attention_of(i).window(i) is not None for i in layers]}


def _by_kind(spec: specs.ModelSpec) -> Values:
    """Returns the keys of models whose layers with a window, `_swa`, have heads and rotary positions of their own."""
    attentions = [_grouped(spec, layer) for layer in range(spec.num_hidden_layers)]
    sliding = [attention.window(layer) is not None for layer, attention in enumerate(attentions)]
    full = sliding.index(False) if False in sliding else 0
    own, rope = attentions[full], spec.rope_of(full)
    heads = [attention.num_heads for attention in attentions]
    values: Values = {
        "attention.head_count": _one_if_alike(heads),
        "attention.head_count_kv": _one_if_alike([attention.num_kv_heads for attention in attentions]),
        "attention.key_length": own.head_dim,
        "attention.value_length": own.value_dim,
        "attention.sliding_window_pattern": sliding,
        **_rope(rope),
    }
    if True in sliding:
        windowed = attentions[sliding.index(True)]
        rope_there = spec.rope_of(sliding.index(True))
        values |= {
            "attention.sliding_window": windowed.sliding_window,
            "attention.key_length_swa": windowed.head_dim,
            "attention.value_length_swa": windowed.value_dim,
        }
        if rope_there is not None:
            values |= {"rope.freq_base_swa": rope_there.theta, "rope.dimension_count_swa": rope_there.rotary_dim}
    return values


def _one_if_alike(values: list[int]) -> int | list[int]:
    return values[0] if len(set(values)) == 1 else values


def _windowed(spec: specs.ModelSpec) -> Values:
    """Returns the keys of architectures that must have a window, and heads of keys for each layer."""
    heads = [_grouped(spec, layer).num_kv_heads for layer in range(spec.num_hidden_layers)]
    window = {"attention.sliding_window": spec.max_position_embeddings}
    return window | _by_kind(spec) | {"attention.head_count_kv": heads}


def _step35(spec: specs.ModelSpec) -> Values:
    heads = [spec.attention_of(layer).num_heads for layer in range(spec.num_hidden_layers)]
    values = _windowed(spec) | {"attention.head_count": heads}
    return values | {"rope.dimension_count": None} | _limits(spec)  # half of a head, or all of it in windowed layers


def _limits(spec: specs.ModelSpec) -> Values:
    """Returns the limits of the neurons of each layer, if any has one; 0 is none."""
    values: Values = {}
    for name, key in (("routed", "exp"), ("unrouted", "shexp")):
        found = {layer: getattr(limit, name) for limit in spec.expert.limits for layer in limit.layers or ()}
        if spec.expert.limits:
            values[f"swiglu_clamp_{key}"] = [found.get(layer) or 0.0 for layer in range(spec.num_hidden_layers)]
    return values


def _indexed(spec: specs.ModelSpec) -> Values:
    indexer = _latent(spec).indexer
    assert indexer is not None, "an indexer"
    return {
        "attention.indexer.head_count": indexer.num_heads,
        "attention.indexer.key_length": indexer.head_dim,
        "attention.indexer.top_k": indexer.top_k,
    }


def _mistral4(spec: specs.ModelSpec) -> Values:
    temperature = _latent(spec).temperature
    assert temperature is not None, "queries that are sharpened"
    return {"attention.temperature_scale": temperature.slope, "attention.temperature_length": temperature.length}


def _minimax_m3(spec: specs.ModelSpec) -> Values:
    indexer = _grouped(spec).indexer
    assert indexer is not None, "an indexer of blocks"
    return {
        "attention.indexer.head_count": indexer.num_heads,
        "attention.indexer.key_length": indexer.head_dim,
        "attention.indexer.top_k": indexer.num_blocks,
        "attention.indexer.block_size": indexer.block_tokens,
        "attention.indexer.local_blocks": indexer.local_blocks,
    }


def _minimax01(spec: specs.ModelSpec) -> Values:
    assert isinstance(spec.residual, parts.NormedStateSpec), "MiniMax's residual"
    recurrent = [spec.mixer_of(layer) is not None for layer in range(spec.num_hidden_layers)]
    return {"residual_scale": spec.residual.attention.state, "attention.recurrent_layers": recurrent}


def _bailing(spec: specs.ModelSpec) -> Values:
    assert isinstance(spec.mixer, parts.KimiDeltaSpec) and spec.mixer.lower_bound is not None, "bounded decays"
    return {
        "attention.value_length": spec.mixer.head_dim,
        "kda.safe_gate": True,
        "kda.gate_lower_bound": spec.mixer.lower_bound,
        **_limits(spec),
    }


def _shared_choices(spec: specs.ModelSpec) -> Values:
    indexers = [spec.indexer_of(layer) for layer in range(spec.num_hidden_layers)]
    types = [indexer is not None and not indexer.shared for indexer in indexers]
    return {**_indexed(spec), "attention.indexer.types": types}


def _cohere(spec: specs.ModelSpec) -> Values:
    values = {"logit_scale": 1 / spec.logits_scaling, "rope.scaling.type": "none", **_windows(spec)}
    if spec.router.kind == "topk_softmax":  # llama.cpp takes the softmax first and normalizes afterwards
        values |= {"expert_gating_func": 1, "expert_weights_norm": True}
    return values


def _nemotron(spec: specs.ModelSpec) -> Values:
    layers, size = range(spec.num_hidden_layers), spec.expert.source_size
    return {
        "attention.layer_norm_epsilon": spec.norm.eps,  # llama.cpp needs both
        "feed_forward_length": [size if layer in spec.moe_layers else 0 for layer in layers],
        "rope.dimension_count": _grouped(spec).head_dim,
    }


def _step(spec: specs.ModelSpec) -> Values:
    layers = spec.moe_layers
    return {"interleave_moe_layer_step": layers[1] - layers[0] if len(layers) > 1 else layers[0] + 1}


def _gemma4(spec: specs.ModelSpec) -> Values:
    assert spec.shared_expert is not None, "a dense expert next to routed ones"
    return {
        **_by_kind(spec),
        "feed_forward_length": spec.shared_expert.intermediate_size,
        "expert_shared_feed_forward_length": None,
        "expert_shared_count": None,
        "attention.shared_kv_layers": 0,
        "embedding_length_per_layer_input": 0,
        "final_logit_softcapping": spec.logits_softcap or 0.0,  # without the key llama.cpp takes 30
    }


def _granite_swa(spec: specs.ModelSpec) -> Values:
    layers = range(spec.num_hidden_layers)
    ropes = [rope for _, rope in spec.attention_kinds if rope is not None]
    windows = [window for i in layers if (window := spec.attention_of(i).window(i)) is not None]
    return {
        **_rope(ropes[0]),
        **_granite(spec),
        **_windows(spec),
        "attention.sliding_window": max(windows, default=spec.max_position_embeddings),
        "attention.rope_pattern": [spec.rope_of(layer) is not None for layer in layers],
    }


def _laguna(spec: specs.ModelSpec) -> Values:
    heads = [spec.attention_of(layer).num_heads for layer in range(spec.num_hidden_layers)]
    return {**_by_kind(spec), "attention.head_count": heads}


def _text_sections(spec: specs.ModelSpec) -> Values:
    """Returns every third pair of rotary positions for time, height and width, which are equal in a text.

    llama.cpp does not rotate the pairs of none. Published files have 24, 20 and 20: two of 64 have none.
    """
    pairs = spec.rotation.rotary_dim // 2
    return {"rope.dimension_sections": [(pairs + 2) // 3, (pairs + 1) // 3, pairs // 3, 0]}


_EXTRAS: Mapping[str, Extras] = {
    "granitemoe": _granite,
    "granitehybrid": _granite,
    "cohere2moe": _cohere,
    "exaone-moe": _windows,
    "nemotron_h_moe": _nemotron,
    "llama4": _step,
    "ernie4_5-moe": lambda spec: {"interleave_moe_layer_step": 1},
    "dbrx": lambda spec: {"attention.clamp_kqv": _grouped(spec).clip},
    "deepseek32": _indexed,
    "mistral4": _mistral4,
    "bailingmoe3": _bailing,
    "minimax-01": _minimax01,
    "minimax-m3": _minimax_m3,
    "glm-dsa": _shared_choices,
    "mimo2": lambda spec: {"attention.value_scale": _grouped(spec).value_scale, **_windowed(spec)},
    "step35": _step35,
    "kimi-linear": lambda spec: {"attention.value_length": _latent(spec).v_head_dim},
    "mellum": _by_kind,
    "laguna": _laguna,
    "granite_swa": _granite_swa,
    "gemma4": _gemma4,
    "qwen3vlmoe": _text_sections,
    "qwen35moe": lambda spec: {"rope.dimension_sections": _SECTIONS},
}


_WINDOWED = ("mimo2", "step35")  # architectures in which some layers must have a sliding window
_UNSCALED = ("bailingmoe3", "glm-dsa")  # whose scaled rotary positions with latent attention are not the model's


def not_loaded(spec: specs.ModelSpec, architecture: str, own_head: bool) -> str | None:
    """Returns a part of a model that llama.cpp cannot load, or computes otherwise than its metadata says; or None.

    Source: llama.cpp, src/models/, the shapes in each architecture's `load_arch_tensors`; src/llama-graph.cpp.
    """
    attention = spec.attention
    if spec.tied_head and own_head:
        return "a head that is the embedding"
    if architecture == "nemotron_h_moe" and specs.num_dense_layers(spec):
        return "layers with a dense expert, where other layers have routed experts"
    if (lacked := next(spec.lacks("gguf"), None)) is not None:
        return lacked
    if isinstance(attention, parts.GroupedQuerySpec):
        kinds = (kind for kind, _ in spec.attention_kinds if isinstance(kind, parts.GroupedQuerySpec))
        if architecture in _WINDOWED and all(kind.sliding_window is None for kind in kinds):
            return "only layers without a sliding window"
        if architecture == "minimax-m3" and (fault := _blocks_fault(spec, attention)) is not None:
            return fault
        if architecture == "mellum" and len({rope.theta for _, rope in spec.attention_kinds if rope is not None}) > 1:
            return "other rotary bases in layers with a window"
        if architecture == "llama" and attention.sliding_window is not None:
            return "a sliding window"
        if architecture == "dots1" and attention.num_kv_heads != attention.num_heads:
            return "fewer heads of keys than of queries"
    if not isinstance(attention, parts.LatentSpec):
        return None
    scaling = spec.rope.scaling if spec.rope else None
    if isinstance(scaling, positions.YarnSpec) and architecture != "deepseek2":
        if architecture in _UNSCALED:
            return "scaled rotary positions"
        if (multiplier := attention.log_multiplier(scaling.factor)) != 0.1:
            return f"an mscale of {10 * multiplier:g}; only 1 is"
    if architecture in ("deepseek2", "mistral4"):
        num_layers = spec.num_hidden_layers
        is_lite = num_layers in (26, 27) or (num_layers, spec.vocab_size) == (48, 128256)
        if is_lite != (attention.q_lora_rank is None):
            found = "no latent" if attention.q_lora_rank is None else "a latent"
            return f"{num_layers} layers with {found} of queries; models of 26 or 27 layers have none, others have one"
    return None


def _blocks_fault(spec: specs.ModelSpec, attention: parts.GroupedQuerySpec) -> str | None:
    indexer = attention.indexer
    kinds = (spec.attention_of(layer) for layer in range(spec.num_hidden_layers))
    indexed = [isinstance(kind, parts.GroupedQuerySpec) and kind.indexer is not None for kind in kinds]
    dense = spec.num_hidden_layers - len(spec.moe_layers)
    if indexer is None or any(flag != (layer >= dense) for layer, flag in enumerate(indexed)):
        return "an indexer in other layers than those with experts, which must be the last"
    if indexer.num_heads != attention.num_kv_heads:
        return f"{indexer.num_heads} heads of the indexer and {attention.num_kv_heads} of keys; both must be equal"
    if indexer.block_tokens & (indexer.block_tokens - 1):
        return f"blocks of {indexer.block_tokens} positions; llama.cpp needs a power of 2"
    return None
