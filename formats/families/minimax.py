"""MiniMax-Text-01, M1 (as `-hf`): lightning attention (a fixed decay for each head) in seven layers of eight, sums of
normed hidden states and outputs by factors, half of each head rotated.

Source: transformers, models/minimax; MiniMax-01 (2501.08313). A `rotary_dim` is read as in MiniMax's own modeling file,
which rotates so many values of each head; transformers rotates all, whatever the key says.
"""

from dataclasses import replace

from moe_pack import formats
from moe_pack.formats import parts
from moe_pack.formats.families import family, readers, rotary
from moe_pack.formats.families.mixtral import MIXTRAL


def _read_config(config: family.Config) -> formats.ModelSpec:
    config.only(postnorm=True, shared_intermediate_size=0)
    config.ignore("shared_moe_mode")  # of shared experts, of which there are none
    config.require("num_key_value_heads")  # missing, transformers takes 8
    window = config.whole("sliding_window") if config.has("sliding_window") else None
    attention = readers.read_grouped_query(config, own_keys=True, sliding_window=window)
    mixer = _read_mixer(config, attention.num_heads, attention.head_dim)
    experts = config.whole(config.either("num_local_experts", "num_experts"))
    spec = readers.read_decoder(
        config,
        attention,
        _read_rope(config, attention.head_dim),
        formats.RouterSpec("softmax_topk", experts, config.whole("num_experts_per_tok", 2), normalize=True),
        config.whole("intermediate_size"),
        norm=formats.NormSpec("rms", config.number("rms_norm_eps", 1e-5)),
    )
    of_attention, of_mixer, of_mlp = (
        parts.FactorsSpec(config.number(f"{half}_alpha_factor", 1), config.number(f"{half}_beta_factor", 1))
        for half in ("full_attn", "linear_attn", "mlp")
    )
    of_layers = parts.NormedStateSpec("normed_state", of_attention, None if mixer is None else of_mixer, of_mlp)
    return replace(spec, mixer=mixer, residual=of_layers)


def _read_rope(config: family.Config, head_dim: int) -> parts.RopeSpec:
    """Reads rotary positions; with a `rotary_dim`, which is that of published models, they have no scaling."""
    if not config.has("rotary_dim"):
        config.ignore("rotary_dim")
        return rotary.read_rope(config, head_dim, default_theta=1e6)
    rope = rotary.read_rope(config, head_dim, default_theta=1e6, scalings=())
    return replace(rope, rotary_dim=config.whole("rotary_dim"))


def _read_mixer(config: family.Config, num_heads: int, head_dim: int) -> parts.LightningSpec | None:
    """Reads lightning attention, in the layers that `layer_types` names, else in every second; None if in no layer."""
    kinds = readers.read_kinds(config, "layer_types", ("full_attention", "linear_attention"))
    num_layers = config.num_layers()
    layers = tuple(i for i in range(num_layers) if (kinds[i] == "linear_attention" if kinds else i % 2 == 1))
    if not layers:
        return None
    factors = tuple(1 - layer / (num_layers - 1 + 1e-5) + 1e-5 for layer in layers)
    return parts.LightningSpec("lightning_attention", layers, num_heads, head_dim, factors, norm_eps=1e-6)


_CONSTANT = "a constant that follows from the number of heads and layers"
MINIMAX = family.Family(
    model_type="minimax",
    model_class="MiniMaxForCausalLM",
    short_names={
        "minimax-text-01": "MiniMaxAI/MiniMax-Text-01-hf",
        "minimax-m1-40k": "MiniMaxAI/MiniMax-M1-40k-hf",
        "minimax-m1-80k": "MiniMaxAI/MiniMax-M1-80k-hf",
    },
    unpublished="no public copy of the file of MiniMaxAI/MiniMax-Text-01-hf was found, only keys in other files",
    read_config=_read_config,
    dense_names={
        **MIXTRAL.dense_names,
        ".mixer.qkv": "self_attn.qkv_proj.weight",
        ".mixer.gate": "self_attn.output_gate.weight",
        ".mixer.out_norm": "self_attn.norm.weight",
        ".mixer.o": "self_attn.out_proj.weight",
    },
    expert_names=MIXTRAL.expert_names,
    dropped=tuple(
        family.LeftOut(f"model.layers.*.self_attn.{name}", _CONSTANT)
        for name in ("slope_rate", "query_decay", "key_decay", "diagonal_decay")
    ),
    ignored_keys=frozenset({"block_size"}),  # of tokens that are computed together
)
