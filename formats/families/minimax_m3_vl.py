"""MiniMax-M3 (text): attention to blocks of positions that an indexer with keys of its own chooses for each key head,
zero-centered norms, clamped neurons, sigmoid routing with a bias, half of each head rotated, dense first layers, shared
expert.

Source: transformers, models/minimax_m3_vl.
"""

from dataclasses import replace

from moe_pack import formats
from moe_pack.formats import parts
from moe_pack.formats.families import family, multimodal, readers, rotary
from moe_pack.formats.families.mixtral import MIXTRAL

_FULL, _SPARSE = "full_attention", "minimax_m3_sparse"


def _read_config(config: family.Config) -> formats.ModelSpec:
    config.only(
        scoring_func="sigmoid",
        use_routing_bias=True,
        use_qk_norm=True,
        qk_norm_type="per_head",
        use_gemma_norm=True,
        attention_output_gate=False,
        n_shared_experts=1,
        swiglu_alpha=1.702,
        swiglu_limit=7.0,
    )
    config.respell("hidden_act", "swigluoai", "silu")  # the neuron function is the same, whatever it says
    # Missing, transformers takes M3's own.
    config.require("head_dim", "num_key_value_heads", "shared_intermediate_size", "routed_scaling_factor", "rotary_dim")
    num_layers = config.num_layers()
    plain = readers.read_grouped_query(config, qk_norm="head")
    rope = rotary.read_rope(config, plain.head_dim, default_theta=5e6, partial_rotary_factor=1.0)
    scaling, pairs = rope.scaling, rope.rotary_dim // 2
    if scaling is not None and scaling.kind == "proportional":
        pairs = scaling.rotated_pairs
    config.only(rotary_dim=2 * pairs)  # the same, which transformers does not read
    indexer, sparse = _read_indexer(config)
    full = tuple(layer for layer in range(num_layers) if layer not in sparse)
    router = formats.RouterSpec(
        "sigmoid_topk",
        config.whole(config.either("num_local_experts", "num_experts")),
        config.whole("num_experts_per_tok", 4),
        normalize=True,
        bias=True,
        scaling_factor=config.number("routed_scaling_factor"),
    )
    size = config.whole("intermediate_size")
    spec = readers.read_decoder(
        config,
        replace(plain, indexer=indexer) if sparse else plain,
        rope,
        router,
        size,
        moe_layers=_moe_layers(config),
        dense_size_key="dense_intermediate_size",
        shared_expert=formats.SharedExpertSpec(config.whole("shared_intermediate_size"), gated=False),
        norm=formats.NormSpec("rms", config.number("rms_norm_eps", 1e-6), zero_centered=True),
    )
    others = (parts.OtherAttentionSpec(full, plain, rope),) if sparse and full else ()
    return replace(
        spec,
        others=others,
        expert=formats.ExpertSpec("clamped_swiglu", size, formats.MATRICES, bias=(), extra_floats=0),
    )


def _moe_layers(config: family.Config) -> tuple[int, ...]:
    """Reads the layers with experts: by `mlp_layer_types`, else by `moe_layer_freq`, else all."""
    num_layers, kinds = config.num_layers(), readers.read_kinds(config, "mlp_layer_types", ("dense", "sparse"))
    flags = _flags(config, "moe_layer_freq", num_layers)
    return tuple(i for i in range(num_layers) if (kinds[i] == "sparse" if kinds else not flags or flags[i]))


def _flags(config: family.Config, key: str, num_layers: int) -> tuple[int, ...]:
    """Reads a list of 0 or 1 for each layer; empty if the key is missing or null."""
    flags = config.counts(key)
    if flags and (len(flags) != num_layers or max(flags) > 1):
        raise formats.CheckpointError(
            f"{config.place}: {key} is {list(flags)}, expected 0 or 1 for each of {num_layers} layers"
        )
    return flags


def _read_indexer(config: family.Config) -> tuple[parts.BlockIndexerSpec, tuple[int, ...]]:
    """Reads the indexer, and the layers that have one.

    Keys in `sparse_attention_config` come before those that transformers writes, except for the layers.
    """
    num_layers, kinds = config.num_layers(), readers.read_kinds(config, "layer_types", (_FULL, _SPARSE))
    group = config.group("sparse_attention_config")
    flags: tuple[int, ...] = ()
    if group is not None:
        # Nobody reads these: other values would be another model.
        group.only(use_sparse_attention=True, sparse_score_type="max", sparse_init_block=0)
        flags = _flags(group, "sparse_attention_freq", num_layers)
        group.only(sparse_disable_index_value=list(flags))

    def size(key: str, legacy: str, default: int, least: int = 1) -> int:
        found = config.count(key, default)
        found = found if group is None else group.count(legacy, found)
        if found < least:
            raise formats.CheckpointError(f"{config.place}: {key} is {found}, expected at least {least}")
        return found

    indexer = parts.BlockIndexerSpec(
        "largest",
        size("index_n_heads", "sparse_num_index_heads", 4),
        size("index_head_dim", "sparse_index_dim", 128),
        size("index_block_size", "sparse_block_size", 128),
        size("index_topk_blocks", "sparse_topk_blocks", 16),
        size("index_local_blocks", "sparse_local_block", 1, least=0),
    )
    if group is not None:
        group.refuse_unread()
    return indexer, readers.layers_of(kinds, _SPARSE) if kinds else tuple(i for i, flag in enumerate(flags) if flag)


def _neurons(role: str, moe: str, own: str) -> dict[str, tuple[family.DenseName, ...]]:
    """Returns the names of the matrices of a dense expert; transformers' own fuse gate and up."""
    gate, up = f".{role}.gate", f".{role}.up"
    whole = family.Stored(f"{own}.gate_up_proj.weight", roles=(gate, up))
    return {
        gate: (f"{moe}.gate_proj.weight", whole),
        up: (f"{moe}.up_proj.weight", whole),
        f".{role}.down": (f"{moe}.down_proj.weight", f"{own}.down_proj.weight"),
    }


_TEXT = family.Family(
    model_type="minimax_m3_vl_text",
    read_config=_read_config,
    dense_names={
        **readers.DENSE_NAMES,
        **_neurons("mlp", "mlp", "mlp"),
        **_neurons("shared", "block_sparse_moe.shared_experts", "mlp.shared_experts"),
        ".router": ("block_sparse_moe.gate.weight", "mlp.gate.weight"),
        ".router_bias": ("block_sparse_moe.e_score_correction_bias", "mlp.gate.e_score_correction_bias"),
        ".attention.index_q": ("self_attn.index_q_proj.weight", "self_attn.indexer.q_proj.weight"),
        ".attention.index_k": ("self_attn.index_k_proj.weight", "self_attn.indexer.k_proj.weight"),
        ".attention.index_q_norm": ("self_attn.index_q_norm.weight", "self_attn.indexer.q_norm.weight"),
        ".attention.index_k_norm": ("self_attn.index_k_norm.weight", "self_attn.indexer.k_norm.weight"),
    },
    expert_names=MIXTRAL.expert_names,
    unused=(family.LeftOut("model.mtp.*", "a multi-token-prediction layer, which plain decoding does not run"),),
    ignored_keys=frozenset({"num_mtp_modules", "num_nextn_predict_layers"}),
)
MINIMAX_M3_VL = replace(
    multimodal.within(
        _TEXT,
        "minimax_m3_vl",
        parts={**multimodal.PARTS, "patch_merge_mlp.*": "what maps vision to the text model"},
        tied_by_text=True,
        ignored_keys=family.keys(
            """
            image_grid_pinpoints image_seq_length img_token_compression_config merged_hidden_size
            multimodal_projector_bias num_reward_heads process_image_mode projector_hidden_act projector_hidden_size
            video_token_index vision_feature_layer vision_feature_select_strategy
            """
        ),
    ),
    model_class="MiniMaxM3SparseForConditionalGeneration",
    short_names={"minimax-m3": "MiniMaxAI/MiniMax-M3"},
    published=(family.Published("minimax-m3", "427", "23", cached="68.736", active_leaves_out=("embed", "head")),),
)
