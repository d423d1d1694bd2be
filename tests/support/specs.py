"""Small models as specs, one a kind of attention, and a way to change one value of one."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from moe_pack.formats import (
    MATRICES,
    ExpertSpec,
    ModelSpec,
    NormSpec,
    PackError,
    RouterSpec,
    SharedExpertSpec,
    canonical,
    dump,
    load,
    parse,
)
from moe_pack.formats.parts import (
    CompressedSpec,
    CompressionSpec,
    EntryIndexerSpec,
    FactorsSpec,
    GatedDeltaSpec,
    GatedNormsSpec,
    GatedStreamsSpec,
    GroupedQuerySpec,
    LatentSpec,
    LightningSpec,
    MixedStreamsSpec,
    NormedResidualSpec,
    NormedStateSpec,
    OtherAttentionSpec,
    OutputGateSpec,
    ParallelResidualSpec,
    RelativeSpec,
    RopeSpec,
    ShortcutResidualSpec,
    TemperatureSpec,
)
from moe_pack.formats.parts.positions import ProportionalSpec
from moe_pack.formats.parts.specs import EncoderSpec, LimitSpec, spec_fault
from support.cases import case

Values = dict[str, Any]

# Three layers, the last without experts; every optional part is there.
GROUPED = ModelSpec(
    family="mixtral", hidden_size=64, vocab_size=96, num_hidden_layers=3, moe_layers=(0, 1), dense_intermediate_size=80,
    max_position_embeddings=128, norm=NormSpec("rms", 1e-5), tied_head=False, head_bias=False, embedding_multiplier=1.0,
    residual_multiplier=1.0, logits_scaling=1.0,
    attention=GroupedQuerySpec("grouped_query", 4, 2, 32, 16, 32**-0.5, ("q", "k", "v"), "head"),
    rope=RopeSpec(1e4, 32, interleaved=False, scaling=None), router=RouterSpec("softmax_topk", 6, 2, normalize=True),
    expert=ExpertSpec("silu", 48, MATRICES, bias=(), extra_floats=0), shared_expert=SharedExpertSpec(40, gated=True),
)  # fmt: skip
# Two layers, the first without experts.
LATENT = replace(
    GROUPED, family="deepseek_v2", num_hidden_layers=2, moe_layers=(1,), norm=NormSpec("rms", 1e-6), tied_head=True,
    attention=LatentSpec(
        kind="latent", num_heads=4, q_lora_rank=40, kv_lora_rank=24, qk_nope_head_dim=16, qk_rope_head_dim=8,
        v_head_dim=12, scale=24**-0.5, lora_norm_eps=1e-6,
    ),
    rope=RopeSpec(1e4, 8, interleaved=True, scaling=None),
    router=RouterSpec("softmax_topk", 8, 3, normalize=False, n_group=4, topk_group=2, scaling_factor=16.0),
    shared_expert=SharedExpertSpec(96, gated=False),
)  # fmt: skip
# Three layers, the first and the last with Gated DeltaNet; gated attention in the other.
HYBRID = replace(
    GROUPED,
    family="qwen3_next",
    norm=NormSpec("rms", 1e-6, zero_centered=True),
    attention=GroupedQuerySpec("grouped_query", 4, 2, 32, None, 32**-0.5, (), "head", gated=True),
    mixer=GatedDeltaSpec("gated_delta_net", (0, 2), 2, 4, 16, 24, conv_kernel=4, interleaved=True),
)
# Three layers whose halves do not simply add to the hidden state, by a name for each kind.
RESIDUALS = {
    "norms of inputs and outputs": replace(
        GROUPED, residual_multiplier=0.7,
        residual=NormedResidualSpec("normed", True, ("attention", "mlp"), False, True),
    ),
    "norms of outputs alone": replace(
        GROUPED, residual=NormedResidualSpec("normed", False, ("attention", "mlp"), False, False),
    ),
    "norms of experts' outputs": replace(
        GROUPED, residual=NormedResidualSpec("normed", True, ("experts",), False, False),
    ),
    "norms apart": replace(GROUPED, residual=NormedResidualSpec("normed", True, ("attention", "mlp"), True, True)),
    "sums by depth": replace(
        GROUPED,
        attention=GroupedQuerySpec(
            "grouped_query", 4, 2, 32, 16, 32**-0.5, (), "head",
            temperature=TemperatureSpec(0.1, 4, is_from_one=True, is_unrotated=False, is_power=True),
            gate=OutputGateSpec("value", "sigmoid", bias=True),
        ),
        residual=NormedResidualSpec("normed", True, ("attention", "mlp"), False, False, by_depth=True),
    ),
    "sums with what was read": replace(
        GROUPED, mixer=LightningSpec("lightning_attention", (1,), 4, 16, factors=(0.5,), norm_eps=1e-6),
        residual=NormedStateSpec(
            "normed_state", FactorsSpec(1.5, 0.75), FactorsSpec(2.0, 1.25), FactorsSpec(1.25, 0.5),
        ),
    ),
    "shortcut": replace(GROUPED, residual=ShortcutResidualSpec("shortcut", (1,))),
    "parallel": replace(GROUPED, residual=ParallelResidualSpec("parallel", averaged=True)),
    "parallel, layer norms": replace(
        GROUPED, norm=NormSpec("layer", 1e-5, unbiased=True), residual=ParallelResidualSpec("parallel", averaged=False),
    ),
    "gated norms": replace(GROUPED, residual=GatedNormsSpec("gated_norms", 6)),
    "gated streams": replace(
        GROUPED, norm=NormSpec("rms", 1e-6, zero_centered=True), residual=GatedStreamsSpec("gated_streams", 4, 40),
    ),
    "mixed streams": replace(GROUPED, residual=MixedStreamsSpec("mixed_streams", 3, mixing=4, magnitude=2.0, eps=1e-6)),
    "streams that do not mix": replace(
        GROUPED, residual=MixedStreamsSpec("mixed_streams", 2, mixing=0, magnitude=1.5, eps=1e-6),
    ),
}  # fmt: skip
_WINDOW = CompressedSpec(
    "compressed", num_heads=4, head_dim=16, q_lora_rank=40, sliding_window=4, scale=0.25, num_groups=2, o_lora_rank=24,
    compression=None,
)  # fmt: skip
_SPARSE = replace(_WINDOW, compression=CompressionSpec(2, overlap=True, indexer=EntryIndexerSpec(12, 12, 2)))
_HEAVY = replace(_WINDOW, compression=CompressionSpec(3, overlap=False, indexer=None))
# Three layers with entries that an indexer chooses, with all entries, and with a window alone; in the first, a table
# names experts.
COMPRESSED = replace(
    RESIDUALS["mixed streams"],
    family="deepseek_v4",
    norm=NormSpec("rms", 1e-6),
    attention=_SPARSE,
    rope=RopeSpec(1.6e5, 8, interleaved=True, scaling=None),
    others=(
        OtherAttentionSpec((1,), _HEAVY, RopeSpec(1.6e5, 8, interleaved=True, scaling=None)),
        OtherAttentionSpec((2,), _WINDOW, RopeSpec(1e4, 8, interleaved=True, scaling=None)),
    ),
    router=RouterSpec("sqrtsoftplus_topk", 6, 2, normalize=True, bias=True, scaling_factor=1.5, table_layers=(0,)),
    expert=replace(GROUPED.expert, function="clipped_silu", limits=(LimitSpec(None, 0.5, 0.5),)),
    shared_expert=SharedExpertSpec(48, gated=False),
)
_IDENTITY = RouterSpec("softmax_topk", 6, 3, normalize=False, scaling_factor=2.0, num_identity=4)
# Models whose routers and experts have rare parts, some of them with such a residual.
ROUTED = {
    "compressed attention, experts that a table names": COMPRESSED,
    "experts that return their input": replace(GROUPED, residual_multiplier=0.7, router=_IDENTITY),
    "the same a layer later": replace(RESIDUALS["shortcut"], router=_IDENTITY),
    "scaled routers and norms apart": replace(
        RESIDUALS["norms apart"],
        router=RouterSpec("softmax_topk", 6, 2, normalize=True, input_scale=True, expert_scale=True),
        attention=GroupedQuerySpec(
            "grouped_query", 4, 2, 32, 16, 1.0, (), "head", keys_as_values=True, v_norm=True,
            gate=OutputGateSpec("value", "softplus"),
        ),
        rope=RopeSpec(1e4, 32, interleaved=False, scaling=ProportionalSpec("proportional", 4, 1.0)), logits_softcap=2.0,
    ),
    "limits in some layers": replace(
        GROUPED, router=RouterSpec("sqrtsoftplus_topk", 6, 2, normalize=True, bias=True),
        expert=replace(
            GROUPED.expert, function="capped_silu", limits=(LimitSpec((0, 2), 0.5, 0.6), LimitSpec((1,), None, 0.4)),
        ),
    ),
}  # fmt: skip
# An encoder of two layers and a decoder of two, each stack's second with experts.
ANSWERING = replace(
    GROUPED,
    family="switch_transformers",
    num_hidden_layers=4,
    moe_layers=(1, 3),
    attention=RelativeSpec("relative", 4, 16, num_buckets=32, max_distance=128, scale=1.0),
    rope=None,
    router=RouterSpec("softmax_topk", 6, 1, normalize=False, capacity=5),
    expert=ExpertSpec("relu", 48, ("up", "down"), bias=(), extra_floats=0),
    shared_expert=None,
    encoder=EncoderSpec(num_layers=2, start_token=0),
)
# Scalings of positions as JSON, for a rotary_dim of 32.
YARN: Values = {
    "kind": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "attention_factor": 1.1,
    "truncate": True,
}
LONGROPE: Values = {
    "kind": "longrope",
    "original_max_position_embeddings": 32,
    "short_factor": [1.0] * 16,
    "long_factor": [2.0] * 16,
    "short_mscale": 1.0,
    "long_mscale": 1.2,
}


def changed(spec: ModelSpec, path: str, value: object) -> ModelSpec:
    """The spec with `value` where `path` leads (keys with a space between them), through JSON as a file holds it."""
    values: Values = parse(canonical(dump(spec)), "model", PackError)
    *keys, last = path.split()
    place = values
    for key in keys:
        place = place[key]
    place[last] = value
    return load(ModelSpec, values, "model", PackError)


def assert_refused_beside_legal(spec: ModelSpec, path: str, wrong: object, right: object, message: str) -> None:
    with case(path, wrong, right, message):
        assert spec_fault(changed(spec, path, right)) is None
        assert spec_fault(changed(spec, path, wrong)) == message


def assert_each_refused(spec: ModelSpec, cases: Iterable[tuple[str, object, object, str]]) -> None:
    """Each case has a field, a value that is refused, the nearest legal one, and the message."""
    for path, wrong, right, message in cases:
        assert_refused_beside_legal(spec, path, wrong, right, message)
