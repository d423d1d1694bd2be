"""MiniMax-M2, M2.1, M2.7: sigmoid routing with a bias, q and k norms over all heads, half of each head rotated.

Source: transformers, models/minimax_m2; its released modeling_minimax_m2.py.
"""

from moe_pack import formats
from moe_pack.formats.families import family, readers, rotary
from moe_pack.formats.families.mixtral import MIXTRAL


def _read_config(config: family.Config) -> formats.ModelSpec:
    config.only(
        attn_type_list=[1] * config.num_layers(),
        qk_norm_type="per_layer",
        use_qk_norm=True,
        scoring_func="sigmoid",
        use_routing_bias=True,
        shared_intermediate_size=0,
        sliding_window=None,
        layernorm_full_attention_beta=1.0,
        layernorm_linear_attention_beta=1.0,
        layernorm_mlp_beta=1.0,
    )
    config.require("head_dim")  # missing, transformers takes 128
    attention = readers.read_grouped_query(config, qk_norm="projection")
    # Released configs give the rotated part of a head in values; with a factor too, transformers takes the factor.
    rotary_dim = config.whole("rotary_dim", attention.head_dim)
    router = formats.RouterSpec(
        "sigmoid_topk",
        config.whole(config.either("num_local_experts", "num_experts")),
        config.whole("num_experts_per_tok", 8),
        normalize=True,
        bias=True,
    )
    return readers.read_decoder(
        config,
        attention,
        rotary.read_rope(config, attention.head_dim, 5e6, partial_rotary_factor=rotary_dim / attention.head_dim),
        router,
        config.whole("intermediate_size"),
        dense_size_key=None,
    )


MINIMAX_M2 = family.Family(
    model_type="minimax_m2",
    model_class="MiniMaxM2ForCausalLM",
    short_names={
        "minimax-m2": "MiniMaxAI/MiniMax-M2",
        "minimax-m2.1": "MiniMaxAI/MiniMax-M2.1",
        "minimax-m2.7": "MiniMaxAI/MiniMax-M2.7",
    },
    published=(family.Published("minimax-m2.7", "229", "10", active_leaves_out=("embed", "head")),),
    read_config=_read_config,
    dense_names={
        **readers.DENSE_NAMES,
        ".router": ("block_sparse_moe.gate.weight", "mlp.gate.weight"),
        ".router_bias": ("block_sparse_moe.e_score_correction_bias", "mlp.e_score_correction_bias"),
    },
    expert_names=MIXTRAL.expert_names,
    # No released checkpoint has the prediction layers that these announce.
    ignored_keys=frozenset(
        {"mlp_intermediate_size", "mtp_transformer_layers", "num_mtp_modules", "shared_moe_mode", "use_mtp"}
    ),
)
