"""A.X K1: as `deepseek_v3`, with a norm of what the experts of a layer add.

Source: transformers, models/axk1; 2601.09200.
"""

from dataclasses import replace

from moe_pack import formats
from moe_pack.formats.families import family, readers
from moe_pack.formats.families.deepseek_v3 import DEEPSEEK_V3, read_latent_decoder
from moe_pack.formats.parts import NormedResidualSpec

_POST_NORM = "post_mlp_layernorm.weight"


def _read_config(config: family.Config) -> formats.ModelSpec:
    config.only(scoring_func="sigmoid")
    # Missing, transformers takes those of A.X K1.
    config.require("n_group", "topk_group", "routed_scaling_factor", "num_key_value_heads")
    if config.has("n_group") and config.whole("n_group") > 1:
        config.only(topk_method="noaux_tc")
    config.ignore("topk_method")  # without groups, all methods choose the largest
    config.whole("q_lora_rank")  # queries always have a latent
    spec = read_latent_decoder(config, readers.read_latent(config), readers.layers_after_dense_by_step(config))
    return replace(spec, residual=NormedResidualSpec("normed", True, ("experts",), apart=False, scaled=False))


AXK1 = family.Family(
    model_type="axk1",
    short_names={"a.x-k1": "skt/A.X-K1"},
    unpublished="no public copy of the file of skt/A.X-K1 was found; transformers' defaults are its sizes",
    read_config=_read_config,
    dense_names={
        **readers.DENSE_NAMES,
        **readers.LATENT_NAMES,
        ".mlp_post_norm": ("post_mlp_layernorm.weight", "mlp.post_mlp_layernorm.weight"),
    },
    dropped=(family.LeftOut(f"model.layers.*.{_POST_NORM}", "the norm after experts, in a layer without experts"),),
    unused=(readers.PREDICTION_LAYER,),
    ignored_keys=DEEPSEEK_V3.ignored_keys,
    may_lack_router_bias=True,
)
