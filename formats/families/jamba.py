"""Jamba v0.1, 1.5 Mini and Large: Mamba, attention in every eighth layer without positions, experts in every second
layer.

Source: transformers, models/jamba; Jamba (2403.19887).
"""

import math
from dataclasses import replace

from moe_pack import formats
from moe_pack.formats.families import family, readers
from moe_pack.formats.parts import MambaSpec


def _every(config: family.Config, name: str, period: int, offset: int) -> tuple[int, ...]:
    """Reads the layers at a period and an offset, which are keys that begin with `name`."""
    period = config.whole(f"{name}_layer_period", period)
    offset = config.count(f"{name}_layer_offset", offset)
    if offset >= period:
        raise formats.CheckpointError(
            f"{config.place}: {name}_layer_offset is {offset}, expected less than the period, {period}"
        )
    return tuple(i for i in range(config.num_layers()) if i % period == offset)


def _read_mixer(config: family.Config) -> MambaSpec | None:
    d, attention = config.whole("hidden_size"), _every(config, "attn", 8, 4)
    rank = math.ceil(d / 16)
    layers = tuple(i for i in range(config.num_layers()) if i not in attention)
    mixer = MambaSpec(
        kind="mamba",
        layers=layers,
        channels=config.whole("mamba_expand", 2) * d,
        state_size=config.whole("mamba_d_state", 16),
        step_rank=rank if config.is_text("mamba_dt_rank", "auto") else config.whole("mamba_dt_rank", rank),
        conv_kernel=config.whole("mamba_d_conv", 4),
        conv_bias=config.flag("mamba_conv_bias", True),
        proj_bias=config.flag("mamba_proj_bias", False),
    )
    return mixer if layers else None


def _read_config(config: family.Config) -> formats.ModelSpec:
    config.only(sliding_window=None)  # in published configs; no code of transformers reads it
    num_experts = config.whole("num_experts", 16)
    if num_experts == 1:
        raise readers.dense_model(config)
    router = formats.RouterSpec("softmax_topk", num_experts, config.whole("num_experts_per_tok", 2), normalize=False)
    size, moe_layers = config.whole("intermediate_size"), _every(config, "expert", 2, 1)
    attention = readers.read_grouped_query(config)
    spec = readers.read_decoder(config, attention, None, router, size, moe_layers=moe_layers)
    return replace(spec, mixer=_read_mixer(config))


_MLP = "model.layers.{i}.feed_forward"
_MAMBA_NAMES = {
    "in": "in_proj.weight",
    "in_bias": "in_proj.bias",
    "conv": "conv1d.weight",
    "conv_bias": "conv1d.bias",
    "x": "x_proj.weight",
    "dt_norm": "dt_layernorm.weight",
    "b_norm": "b_layernorm.weight",
    "c_norm": "c_layernorm.weight",
    "dt": "dt_proj.weight",
    "dt_bias": "dt_proj.bias",
    "a_log": "A_log",
    "skip": "D",
    "o": "out_proj.weight",
    "o_bias": "out_proj.bias",
}
JAMBA = family.Family(
    model_type="jamba",
    short_names={
        "jamba-v0.1": "ai21labs/Jamba-v0.1",
        "jamba-1.5-mini": "ai21labs/AI21-Jamba-1.5-Mini",
        "jamba-1.5-large": "ai21labs/AI21-Jamba-1.5-Large",
    },
    published=(family.Published("jamba-v0.1", "52", "12"),),
    read_config=_read_config,
    dense_names={
        **readers.DENSE_NAMES,
        **{f".mixer.{role}": f"mamba.{name}" for role, name in _MAMBA_NAMES.items()},
        ".mlp_norm": "pre_ff_layernorm.weight",
        ".mlp.{gate,up,down}": "feed_forward.{}_proj.weight",
        ".router": "feed_forward.router.weight",
        "norm": "model.final_layernorm.weight",
    },
    expert_names=(
        family.ExpertNames(family.matrices(f"{_MLP}.experts.{{e}}.*.weight", "gate_proj", "up_proj", "down_proj")),
        family.ExpertNames(family.matrices(f"{_MLP}.experts.*", "gate_up_proj", "gate_up_proj", "down_proj")),
    ),
    ignored_keys=frozenset({"num_logits_to_keep", "use_associative_scan", "use_mamba_kernels", "use_mambapy"}),
)
