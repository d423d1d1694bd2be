"""Every rule of what a model can be: a spec just beyond it, and the nearest that is allowed."""

import math
from dataclasses import replace
from typing import Any

import pytest
from support.cases import case
from support.specs import (
    ANSWERING,
    COMPRESSED,
    GROUPED,
    HYBRID,
    LATENT,
    LONGROPE,
    RESIDUALS,
    YARN,
    Values,
    assert_each_refused,
    assert_refused_beside_legal,
    changed,
)  # fmt: skip

from moe_pack.formats import ModelSpec, dump
from moe_pack.formats.parts import HalvesSpec, IndexerSpec, KimiDeltaSpec, LatentSpec, OtherAttentionSpec
from moe_pack.formats.parts.specs import spec_fault

MAX = 2**31 - 1

LARGE = "is {}, expected 1 to 2^31 - 1"
SIZES: list[tuple[ModelSpec, str, str]] = [
    *((GROUPED, name, name) for name in ("hidden_size", "vocab_size", "num_hidden_layers", "max_position_embeddings")),
    (GROUPED, "dense_intermediate_size", "dense_intermediate_size"),
    (GROUPED, "rope rotary_dim", "rotary_dim"),
    *((GROUPED, f"router {name}", name) for name in ("num_experts", "num_experts_per_tok", "n_group", "topk_group")),
    (GROUPED, "expert intermediate_size", "intermediate_size"),
    (GROUPED, "shared_expert intermediate_size", "shared intermediate_size"),
    *(
        (spec, f"attention {name}", name)
        for spec, names in (
            (GROUPED, ("num_heads", "num_kv_heads", "head_dim", "sliding_window", "value_head_dim")),
            (
                LATENT,
                ("num_heads", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
            ),
        )
        for name in names
    ),
    *(
        (HYBRID, f"mixer {name}", f"mixer {name}")
        for name in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel")
    ),
]


@pytest.mark.parametrize("spec", [GROUPED, LATENT, HYBRID], ids=["grouped", "latent", "hybrid"])
def test_the_specs_the_faults_start_from_can_be(spec: ModelSpec) -> None:
    assert spec_fault(spec) is None


def test_a_size_outside_1_to_31_bits_is_refused() -> None:
    for size in [0, -1, MAX + 1]:
        for spec, path, name in SIZES:
            with case(size, spec, path, name):
                assert spec_fault(changed(spec, path, size)) == f"{name} {LARGE.format(size)}"


def test_the_least_and_the_largest_size_are_allowed() -> None:
    for path in ["vocab_size", "max_position_embeddings", "attention sliding_window"]:
        for size in [1, MAX]:
            with case(path, size):
                assert spec_fault(changed(GROUPED, path, size)) is None


def test_layers_and_matrices_that_cannot_be_are_refused() -> None:
    cases = [
        ("num_hidden_layers", 10_001, 10_000, "num_hidden_layers is 10001, at most 10000"),
        ("router num_experts", 500_002, 500_000, "2 layers of 500002 experts, at most 1000000 in all"),
        ("hidden_size", 2**24 + 64, 2**24, "expert matrices of 48 by 16777280 are too large"),
        ("hidden_size", 96, 128, "hidden_size is 96, expected a multiple of 64 (codes lie in blocks of 64)"),
        ("moe_layers", [], [0, 1], "moe_layers must list decoder layers, at least one, in rising order"),
        ("moe_layers", [1, 0], [0, 1], "moe_layers must list decoder layers, at least one, in rising order"),
        ("moe_layers", [1, 1], [0, 2], "moe_layers must list decoder layers, at least one, in rising order"),
        ("moe_layers", [1, 3], [1, 2], "moe_layers must list decoder layers, at least one, in rising order"),
        ("moe_layers", [-1, 1], [0], "moe_layers must list decoder layers, at least one, in rising order"),
        ("moe_layers", [0, 1, 2], [2], "dense_intermediate_size is 80, but 0 layers have no experts"),
        ("dense_intermediate_size", None, 1, "dense_intermediate_size is None, but 1 layers have no experts"),
    ]
    assert_each_refused(GROUPED, cases)
    widest, message = changed(GROUPED, "hidden_size", 2**20), f"expert matrices of {2**20 + 1} by {2**20} are too large"
    assert_refused_beside_legal(widest, "expert intermediate_size", 2**20 + 1, 2**20, message)


def test_a_multiplier_that_is_not_between_0_and_a_million_is_refused() -> None:
    cases = [
        (GROUPED, "embedding_multiplier", "embedding_multiplier"),
        (GROUPED, "residual_multiplier", "residual_multiplier"),
        (GROUPED, "logits_scaling", "logits_scaling"),
        (GROUPED, "logits_softcap", "logits_softcap"),
        (GROUPED, "attention scale", "attention scale"),
        (LATENT, "attention scale", "attention scale"),
        (GROUPED, "router scaling_factor", "router scaling_factor"),
    ]
    for spec, path, name in cases:
        with case(spec, path, name):
            for wrong, right in ((0.0, 1e-12), (-1.0, 1.0), (1e6, 999_999.0)):
                assert_refused_beside_legal(spec, path, wrong, right, f"{name} is {wrong}, expected between 0 and 1e6")


@pytest.mark.parametrize(
    ("spec", "path", "name"), [(GROUPED, "norm eps", "norm eps"), (LATENT, "attention lora_norm_eps", "lora_norm_eps")]
)
def test_an_eps_that_is_not_between_0_and_1_is_refused(spec: ModelSpec, path: str, name: str) -> None:
    for wrong, right in ((0.0, 1e-12), (-1e-6, 1e-6), (1.0, 0.999)):
        assert_refused_beside_legal(spec, path, wrong, right, f"{name} is {wrong}, expected between 0 and 1")


BIAS = "attention bias names {}, expected some of ('q', 'k', 'v', 'o') in this order"


def test_an_attention_that_cannot_be_is_refused() -> None:
    cases = [
        ("attention num_kv_heads", 3, 4, "4 heads cannot share 3 keys and values"),
        ("attention num_kv_heads", 8, 1, "4 heads cannot share 8 keys and values"),
        ("attention bias", ["k", "q"], ["q", "k"], BIAS.format("('k', 'q')")),
        ("attention bias", ["q", "q"], ["q", "k", "v", "o"], BIAS.format("('q', 'q')")),
        ("attention value_scale", 0.0, 0.5, "value_scale is 0.0, expected between 0 and 1e6"),
        ("attention value_scale", 1e6, 2.0, "value_scale is 1000000.0, expected between 0 and 1e6"),
        ("attention clip", 0.0, 0.5, "attention clip is 0.0, expected between 0 and 1e6"),
        ("attention clip", 1e6, None, "attention clip is 1000000.0, expected between 0 and 1e6"),
    ]
    assert_each_refused(GROUPED, cases)


def test_gates_in_the_projection_of_queries_need_values_of_their_size() -> None:
    message = "{} attention has keys of 32 and values of 16, expected equal".format
    assert_refused_beside_legal(HYBRID, "attention value_head_dim", 16, 32, message("gated"))
    twice = changed(changed(GROUPED, "attention keys_as_values", True), "attention bias", [])
    assert_refused_beside_legal(twice, "attention value_head_dim", 16, 32, message("keys_as_values"))
    assert spec_fault(changed(GROUPED, "attention value_head_dim", 16)) is None


def with_others(*others: Values) -> list[Values]:
    """A list for the key `others`: each is like the model's attention in layer 1, but for what is given."""
    same = {"layers": [1], "attention": dump(GROUPED.attention), "rope": dump(GROUPED.rope)}
    return [same | other for other in others]


ONCE = "others must list each layer once at most, and not all layers"
DECODER = "others must list decoder layers with attention, at least one each, in rising order"


def test_attention_of_some_layers_that_cannot_be_is_refused() -> None:
    attention, rope, latent = (dump(part) for part in (GROUPED.attention, GROUPED.rope, LATENT.attention))
    cases = [
        (GROUPED, with_others({"layers": []}), with_others({"layers": [0]}), DECODER),
        (GROUPED, with_others({"layers": [1, 0]}), with_others({"layers": [0, 1]}), DECODER),
        (GROUPED, with_others({"layers": [3]}), with_others({"layers": [2]}), DECODER),
        (GROUPED, with_others({"layers": [0, 1, 2]}), with_others({"layers": [0, 2]}), ONCE),
        (GROUPED, with_others({}, {}), with_others({}, {"layers": [0]}), ONCE),
        (GROUPED, with_others({"attention": attention | {"num_heads": 0}}),
         with_others({"attention": attention | {"num_heads": 2}}), "num_heads of others is 0, expected 1 to 2^31 - 1"),
        (GROUPED, with_others({"rope": rope | {"rotary_dim": 0}}), with_others({"rope": None}),
         "rotary_dim of others is 0, expected 1 to 2^31 - 1"),
        (GROUPED, with_others({"rope": rope | {"rotary_dim": 34}}), with_others({"rope": rope | {"rotary_dim": 16}}),
         "rotary_dim is 34, expected an even number up to 32"),
        (GROUPED, with_others({"attention": attention | {"num_kv_heads": 3}}),
         with_others({"attention": attention | {"num_kv_heads": 4}}), "4 heads cannot share 3 keys and values"),
        (replace(GROUPED, norm=replace(GROUPED.norm, zero_centered=True)),
         with_others({"attention": latent, "rope": dump(LATENT.rope)}), with_others({}),
         "a zero-centered norm needs kind rms and grouped_query attention, found rms"),
        (replace(ANSWERING, encoder=None), with_others({}), [], "relative attention cannot have others"),
        (ANSWERING, with_others({}), [], "attention is relative, but a model with an encoder needs relative"),
    ]  # fmt: skip
    for spec, wrong, right, message in cases:
        assert_refused_beside_legal(spec, "others", wrong, right, message)
    hybrid = changed(HYBRID, "mixer layers", [0])
    assert_refused_beside_legal(hybrid, "others", with_others({"layers": [0]}), with_others({"layers": [2]}), DECODER)


def test_rotary_positions_that_cannot_be_are_refused() -> None:
    cases = [
        (GROUPED, "rope rotary_dim", 31, 30, "rotary_dim is 31, expected an even number up to 32"),
        (GROUPED, "rope rotary_dim", 34, 32, "rotary_dim is 34, expected an even number up to 32"),
        (GROUPED, "attention head_dim", 31, 33, "rotary_dim is 32, expected an even number up to 31"),
        (LATENT, "rope rotary_dim", 6, 8, "rotary_dim is 6, expected qk_rope_head_dim, 8"),
        (LATENT, "attention qk_rope_head_dim", 9, 8, "rotary_dim is 8, expected qk_rope_head_dim, 9"),
        (GROUPED, "rope theta", 1.0, 1.0001, "rope theta is 1.0, expected between 1 and 1e12"),
        (GROUPED, "rope theta", 1e12, 9.9e11, "rope theta is 1000000000000.0, expected between 1 and 1e12"),
    ]
    for spec, path, wrong, right, message in cases:
        assert_refused_beside_legal(spec, path, wrong, right, message)


def test_an_encoder_or_relative_attention_that_cannot_be_is_refused() -> None:
    cases = [
        ("attention num_buckets", 30, 28, "num_buckets is 30, expected a multiple of 4 up to 65536"),
        ("attention num_buckets", 65_540, 65_536, "num_buckets is 65540, expected a multiple of 4 up to 65536"),
        ("attention max_distance", 16, 17, "max_distance is 16, expected more than half of 32 buckets"),
        ("attention num_heads", 0, 1, "num_heads is 0, expected 1 to 2^31 - 1"),
        ("rope", dump(GROUPED.rope), None, "relative attention cannot have rope"),
        ("encoder num_layers", 0, 1, "the encoder has 0 of 4 layers, expected some, but not all"),
        ("encoder num_layers", 4, 3, "the encoder has 4 of 4 layers, expected some, but not all"),
        ("encoder start_token", 96, 95, "start_token is 96, expected 0 to 95"),
        ("encoder start_token", -1, 0, "start_token is -1, expected 0 to 95"),
    ]
    for path, wrong, right, message in cases:
        with case(path, wrong, right, message):
            spec = changed(ANSWERING, "attention max_distance", 2**20) if path == "attention num_buckets" else ANSWERING
            assert_refused_beside_legal(spec, path, wrong, right, message)


@pytest.mark.parametrize("spec", [GROUPED, LATENT], ids=["grouped_query", "latent"])
def test_rotary_attention_may_have_no_rope_and_has_no_encoder(spec: ModelSpec) -> None:
    kind = spec.attention.kind
    assert spec_fault(changed(spec, "rope", None)) is None
    encoder = {"num_layers": 1, "start_token": 0}
    assert (
        spec_fault(changed(spec, "encoder", encoder))
        == f"attention is {kind}, but a model with an encoder needs relative"
    )


CAPACITY = "router capacity is {}; only softmax_topk with one expert a token can have a capacity"
NORMAL_ALREADY = "a {} router cannot have n_group, bias or normalize"
GROUPS = (
    "n_group is {} and topk_group is {}; {} experts must divide into n_group groups, "
    "and topk_group must not exceed n_group"
)
JITTER = ", expected 0, or less than 1 with sparsemixer"
LEAST_SUM = ", expected 0, or less than 1 with normalize True"
SOFT: dict[str, Any] = {
    "kind": "softmax_topk", "num_experts": 6, "num_experts_per_tok": 2, "normalize": False, "bias": False, "n_group": 1,
    "topk_group": 1, "scaling_factor": 1.0, "jitter": 0.0, "capacity": None,
}  # fmt: skip
TOPK, MIXER, SIGMA = (SOFT | {"kind": kind} for kind in ("topk_softmax", "sparsemixer", "sigmoid_topk"))


def test_a_router_that_cannot_be_is_refused() -> None:
    cases = [
        (SOFT, {"num_experts_per_tok": 7}, {"num_experts_per_tok": 6},
        "num_experts_per_tok is 7, expected at "
        "most num_experts, 6"),
        (SOFT, {"n_group": 4}, {"n_group": 3}, GROUPS.format(4, 1, 6)),
        (SOFT, {"topk_group": 2}, {"n_group": 2, "topk_group": 2}, GROUPS.format(1, 2, 6)),
        (SOFT, {"n_group": 6}, {"n_group": 6, "topk_group": 2},
        "num_experts_per_tok is 2, but topk_group leaves "
        "only 1 experts"),
        (SOFT, {"n_group": 3, "num_experts_per_tok": 3}, {"n_group": 2, "num_experts_per_tok": 3},
         "num_experts_per_tok is 3, but topk_group leaves only 2 experts"),
        (SIGMA, {"n_group": 6, "topk_group": 2}, {"n_group": 3, "topk_group": 2},
         "n_group is 6, but sigmoid_topk needs at least two experts in each group"),
        (SIGMA, {"num_experts": 2, "num_experts_per_tok": 1, "n_group": 2},
         {"num_experts": 4, "num_experts_per_tok": 1, "n_group": 2},
         "n_group is 2, but sigmoid_topk needs at least two experts in each group"),
        (SIGMA, {"num_experts": 1, "num_experts_per_tok": 1, "n_group": 2},
         {"num_experts": 1, "num_experts_per_tok": 1}, GROUPS.format(2, 1, 1)),
        (TOPK, {"n_group": 2}, {"n_group": 1}, NORMAL_ALREADY.format("topk_softmax")),
        (TOPK, {"bias": True}, {"bias": False}, NORMAL_ALREADY.format("topk_softmax")),
        (TOPK, {"normalize": True}, {"normalize": False}, NORMAL_ALREADY.format("topk_softmax")),
        (MIXER, {"n_group": 2}, {"n_group": 1}, NORMAL_ALREADY.format("sparsemixer")),
        (MIXER, {"bias": True}, {"bias": False}, NORMAL_ALREADY.format("sparsemixer")),
        (MIXER, {"normalize": True}, {"normalize": False}, NORMAL_ALREADY.format("sparsemixer")),
        (SOFT | {"normalize": True}, {"least_sum": 1.0}, {"least_sum": 0.999},
         "router least_sum is 1.0 with normalize True" + LEAST_SUM),
        (SIGMA | {"normalize": True}, {"least_sum": -1e-6}, {"least_sum": 1e-6},
         "router least_sum is -1e-06 with normalize True" + LEAST_SUM),
        (SOFT, {"least_sum": 1e-6}, {"least_sum": 0.0}, "router least_sum is 1e-06 with normalize False" + LEAST_SUM),
        (MIXER, {"jitter": 1.0}, {"jitter": 0.999}, "router jitter is 1.0 with sparsemixer" + JITTER),
        (MIXER, {"jitter": -0.1}, {"jitter": 0.0}, "router jitter is -0.1 with sparsemixer" + JITTER),
        (SOFT, {"jitter": 0.01}, {"jitter": 0.0}, "router jitter is 0.01 with softmax_topk" + JITTER),
        (TOPK, {"jitter": 0.01}, {"jitter": 0.0}, "router jitter is 0.01 with topk_softmax" + JITTER),
        (SIGMA, {"jitter": 0.01}, {"jitter": 0.0}, "router jitter is 0.01 with sigmoid_topk" + JITTER),
        (SOFT, {"capacity": 8}, {"capacity": 8, "num_experts_per_tok": 1}, CAPACITY.format(8)),
        (SIGMA | {"num_experts_per_tok": 1}, {"capacity": 8}, {"capacity": None}, CAPACITY.format(8)),
        (SOFT | {"num_experts_per_tok": 1}, {"capacity": 0}, {"capacity": 1},
         "router capacity is 0, expected 1 to 2^31 - 1"),
    ]  # fmt: skip
    for router, wrong, right, message in cases:
        assert_refused_beside_legal(GROUPED, "router", router | wrong, router | right, message)


def test_a_router_with_experts_that_return_their_input_is_a_softmax_of_all() -> None:
    only = "num_identity needs a softmax_topk router without n_group, normalize, capacity and on_input"
    range_of = "router num_identity is {}, expected 0 to 2^20 - 1"
    some = SOFT | {"num_identity": 3}
    cases: list[tuple[Values, Values, str]] = [
        ({"num_identity": -1}, {"num_identity": 0}, range_of.format(-1)),
        ({"num_identity": 2**20}, {"num_identity": 2**20 - 1}, range_of.format(2**20)),
        ({"kind": "sigmoid_topk"}, {"bias": True}, only),
        ({"n_group": 2, "topk_group": 2}, {"scaling_factor": 6.0}, only),
        ({"normalize": True}, {"logit_bias": True}, only),
        ({"num_experts_per_tok": 1, "capacity": 2}, {"num_experts_per_tok": 1}, only),
        ({"num_experts_per_tok": 1, "on_input": True}, {"expert_scale": True, "input_scale": True}, only),
    ]
    for wrong, right, message in cases:
        assert_refused_beside_legal(GROUPED, "router", some | wrong, some | right, message)
    for kind in ("sqrtsoftplus_topk", "topk_sigmoid"):
        biased = SOFT | {"kind": kind, "bias": True, "normalize": True}
        message = f"a {kind} router cannot have n_group"
        assert_refused_beside_legal(GROUPED, "router", biased | {"n_group": 2, "topk_group": 2}, biased, message)


@pytest.mark.parametrize("router", [SOFT, SIGMA], ids=["softmax_topk", "sigmoid_topk"])
def test_routers_with_scores_for_all_may_have_groups_bias_and_normalized_weights(router: Values) -> None:
    rich = router | {"n_group": 3, "topk_group": 2, "bias": True, "normalize": True, "scaling_factor": 2.5}
    assert spec_fault(changed(GROUPED, "router", rich)) is None


EXTRA = "extra_floats is {}, expected {}, the number of values in the bias of down"
MATRICES = "expert matrices are {}, expected ('gate', 'up', 'down') or ('up', 'down')"


def test_an_expert_that_cannot_be_is_refused() -> None:
    cases = [
        ("expert matrices", ["up", "gate", "down"], ["gate", "up", "down"], MATRICES.format("('up', 'gate', 'down')")),
        ("expert matrices", ["gate", "up"], ["up", "down"], MATRICES.format("('gate', 'up')")),
        ("expert matrices", ["gate", "down"], ["up", "down"], MATRICES.format("('gate', 'down')")),
        ("expert bias", ["up", "gate"], ["gate", "up"],
         "expert bias names ('up', 'gate'), expected some of ('gate', 'up', 'down') in this order"),
        ("expert bias", ["up", "up"], ["up"],
         "expert bias names ('up', 'up'), expected some of ('gate', 'up', 'down') in this order"),
        ("expert bias", ["down"], [], EXTRA.format(0, 64)),
        ("expert extra_floats", -1, 0, EXTRA.format(-1, 0)),
        ("expert extra_floats", 64, 0, EXTRA.format(64, 0)),
    ]  # fmt: skip
    assert_each_refused(GROUPED, cases)
    two = changed(GROUPED, "expert matrices", ["up", "down"])
    message = "expert bias names ('gate',), expected some of ('up', 'down') in this order"
    assert_refused_beside_legal(two, "expert bias", ["gate"], ["up"], message)
    gate = "expert function clamped_swiglu needs a gate"
    assert_refused_beside_legal(two, "expert function", "clamped_swiglu", "relu", gate)
    biased = changed(changed(GROUPED, "expert extra_floats", 64), "expert bias", ["down"])
    assert_refused_beside_legal(biased, "expert extra_floats", 63, 64, EXTRA.format(63, 64))


def test_limits_that_cannot_be_are_refused() -> None:
    def limits(*each: object) -> list[Values]:
        return [dict(zip(("layers", "routed", "unrouted"), limit, strict=True)) for limit in each]

    right = limits([[0, 2], 7.0, None], [[1], 7.0, 16.0])
    unlimited = changed(GROUPED, "expert limits", right)
    limited = changed(unlimited, "expert function", "clipped_silu")
    some = "expert function {} with {} limits; clipped and capped ones need some"
    assert spec_fault(unlimited) == some.format("silu", 2)
    assert_refused_beside_legal(limited, "expert limits", [], right, some.format("clipped_silu", 0))
    once = "expert limits must list each layer once at most"
    listed = "expert limits must list decoder layers, at least one each, in rising order"
    bounds = "expert limits are {} and {}, expected one at least, between 0 and 1e6"
    cases = [
        (limits([[0, 1], 7.0, None], [[1], 7.0, None]), once),
        (limits([None, 7.0, None], [[1], 7.0, None]), once),
        (limits([[], 7.0, None]), listed),
        (limits([[3], 7.0, None]), listed),
        (limits([[1, 0], 7.0, None]), listed),
        (limits([[0], None, None]), bounds.format(None, None)),
        (limits([[0], 0.0, 7.0]), bounds.format(0.0, 7.0)),
        (limits([None, 7.0, 1e6]), bounds.format(7.0, 1e6)),
    ]
    for wrong, message in cases:
        assert_refused_beside_legal(limited, "expert limits", wrong, right, message)
    two = changed(limited, "expert matrices", ["up", "down"])
    assert spec_fault(two) == "expert function clipped_silu needs a gate"


WINDOWED = "windowed_layers must list some decoder layers, but not all, in rising order"


def test_layers_with_windows_chunks_and_rotation_that_cannot_be_are_refused() -> None:
    for wrong in [[], [0, 1, 2], [1, 0], [1, 1], [-1], [3]]:
        for name in ("windowed", "rotated"):
            message = WINDOWED.replace("windowed", name)
            assert_refused_beside_legal(GROUPED, f"attention {name}_layers", wrong, [0, 2], message)
    without = changed(GROUPED, "attention sliding_window", None)
    message = "{} is given without a sliding_window".format
    assert_refused_beside_legal(without, "attention windowed_layers", [0], None, message("windowed_layers"))
    assert_refused_beside_legal(without, "attention chunked", True, False, message("chunked"))


def test_fields_of_attention_that_exclude_each_other_are_refused() -> None:
    shared = changed(GROUPED, "attention keys_as_values", True)
    message = "attention bias names v, but keys_as_values leaves no projection of values"
    assert_refused_beside_legal(shared, "attention bias", ["q", "v"], ["q", "k"], message)
    for name in ("gated", "keys_as_values"):
        spec = changed(changed(GROUPED, "attention bias", []), f"attention {name}", True)
        message = f"attention has {name} and clip, of which only one can be"
        assert_refused_beside_legal(spec, "attention clip", 8.0, None, message)
    message = "attention has gated and gate, of which only one can be"
    gated = changed(GROUPED, "attention gated", True)
    assert_refused_beside_legal(gated, "attention gate", {"each": "head", "function": "sigmoid"}, None, message)


TEMPERATURE: Values = {"slope": 0.1, "length": 8, "is_from_one": True, "is_unrotated": True}


def test_a_temperature_that_cannot_be_is_refused() -> None:
    plain = changed(GROUPED, "attention qk_norm", "none")
    out_of_range = "temperature slope {} or length {} is out of range".format
    undone = "qk_norm is {}, which undoes temperature".format
    everywhere = TEMPERATURE | {"is_unrotated": False}
    cases = [
        (plain, {"slope": 0.0}, {"slope": 1e-9}, out_of_range(0.0, 8)),
        (plain, {"slope": 1e6}, {"slope": 999_999.0}, out_of_range(1e6, 8)),
        (plain, {"length": 0}, {"length": 1}, out_of_range(0.1, 0)),
        (plain, {"length": MAX + 1}, {"length": MAX}, out_of_range(0.1, MAX + 1)),
        (
            LATENT,
            {"is_unrotated": True},
            {"is_unrotated": False},
            "latent attention rotates all layers, but temperature is of others",
        ),
        (changed(GROUPED, "attention qk_norm", "unit"), everywhere, TEMPERATURE, undone("unit")),
    ]
    for spec, wrong, right, message in cases:
        assert_refused_beside_legal(spec, "attention temperature", TEMPERATURE | wrong, TEMPERATURE | right, message)
    for norm in ("projection", "head"):
        with case(norm):
            spec = changed(GROUPED, "attention temperature", TEMPERATURE)
            assert_refused_beside_legal(spec, "attention qk_norm", "rotated_head", norm, undone("rotated_head"))


def test_a_mixer_that_cannot_be_is_refused() -> None:
    layers = "mixer layers must list decoder layers, at least one, in rising order"
    cases = [
        ("mixer layers", [], [0], layers),
        ("mixer layers", [1, 0], [0, 1], layers),
        ("mixer layers", [1, 1], [1], layers),
        ("mixer layers", [-1, 1], [0, 1, 2], layers),
        ("mixer layers", [0, 3], [0, 2], layers),
        ("mixer num_key_heads", 3, 4, "4 value heads cannot share 3 keys"),
        ("mixer conv_kernel", 65, 64, "mixer conv_kernel is 65, expected at most 64"),
        ("mixer key_head_dim", 2**25, 2**20, f"a mixer's state has {4 * 24 * 2**25 + 3 * (4 * 2**25 + 96)} values, "
         "expected at most 2^31"),
    ]  # fmt: skip
    assert_each_refused(HYBRID, cases)


def test_a_norm_that_cannot_be_is_refused() -> None:
    message = "a norm that is unbiased needs kind layer, found rms"
    assert_refused_beside_legal(GROUPED, "norm unbiased", True, False, message)
    assert spec_fault(changed(changed(GROUPED, "norm kind", "layer"), "norm unbiased", True)) is None
    message = "a zero-centered norm needs kind rms and grouped_query attention, found {}"
    assert spec_fault(changed(HYBRID, "norm kind", "layer")) == message.format("layer")
    assert_refused_beside_legal(LATENT, "norm zero_centered", True, False, message.format("rms"))


def test_a_bound_of_decays_and_a_mixer_with_an_encoder_are_refused() -> None:
    kimi = replace(HYBRID, mixer=KimiDeltaSpec("kimi_delta_attention", (0, 2), 4, 16, conv_kernel=4, full_rank=True))
    message = "a model with an encoder cannot have a mixer in place of attention"
    assert spec_fault(replace(ANSWERING, mixer=HYBRID.mixer)) == message
    for wrong in (0.0, 1.0, -1e6, math.nan):
        message = f"mixer lower_bound is {wrong}, expected above -1e6 and below 0"
        assert_refused_beside_legal(kimi, "mixer lower_bound", wrong, -5.0, message)


def test_an_indexer_that_cannot_be_is_refused() -> None:
    indexer: Values = {"num_heads": 4, "head_dim": 8, "top_k": 5}
    message = "an indexer needs q_lora_rank, and heads of at least qk_rope_head_dim values"
    assert_refused_beside_legal(LATENT, "attention indexer", indexer | {"head_dim": 7}, indexer, message)
    assert_refused_beside_legal(
        changed(LATENT, "attention indexer", indexer), "attention q_lora_rank", None, 40, message
    )
    for name in indexer:
        with case(name):
            line = f"indexer {name} is 0, expected 1 to 2^31 - 1"
            assert_refused_beside_legal(LATENT, "attention indexer", indexer | {name: 0}, indexer, line)
    for eps in (0.0, 1.0):
        line = f"indexer norm_eps is {eps}, expected between 0 and 1"
        wrong, right = (indexer | {"norm_eps": each} for each in (eps, 1e-5))
        assert_refused_beside_legal(LATENT, "attention indexer", wrong, right, line)


DYNAMIC: Values = {"kind": "dynamic", "factor": 4.0, "original_max_position_embeddings": 32}
BLOCKS: Values = {"kind": "largest", "num_heads": 2, "head_dim": 32, "block_tokens": 4, "num_blocks": 3}


def test_an_indexer_of_blocks_that_cannot_be_is_refused() -> None:
    plain = changed(GROUPED, "attention sliding_window", None)
    window = "an indexer of blocks needs attention without sliding_window and sinks"
    small = "an indexer of blocks has heads of 31, expected at least rotary_dim, 32"
    blocks = changed(plain, "attention indexer", BLOCKS)
    assert_refused_beside_legal(blocks, "attention sliding_window", 16, None, window)
    assert_refused_beside_legal(blocks, "attention sinks", True, False, window)
    assert_refused_beside_legal(blocks, "attention indexer head_dim", 31, 33, small)
    pooled = changed(blocks, "attention indexer", BLOCKS | {"kind": "pooled"})
    by_length = "an indexer of pooled blocks can have neither longrope nor dynamic scaling"
    for scaling in (LONGROPE, DYNAMIC):
        assert_refused_beside_legal(pooled, "rope scaling", scaling, YARN, by_length)
        assert spec_fault(changed(blocks, "rope scaling", scaling)) is None
    local = "indexer local_blocks is {} with {}, expected 0 to {}"
    for number in (4, -1):
        message = local.format(number, "largest", 3)
        assert_refused_beside_legal(blocks, "attention indexer local_blocks", number, 3, message)
    pooled = changed(blocks, "attention indexer kind", "pooled")
    assert_refused_beside_legal(pooled, "attention indexer local_blocks", 1, 0, local.format(1, "pooled", 0))
    heads = "3 heads of an indexer cannot choose for 2 keys and values"
    assert_refused_beside_legal(blocks, "attention indexer num_heads", 3, 1, heads)
    assert spec_fault(changed(pooled, "attention indexer num_heads", 3)) is None
    for name in ("num_heads", "head_dim", "block_tokens", "num_blocks"):
        with case(name):
            line = f"indexer {name} is 0, expected 1 to 2^31 - 1"
            assert_refused_beside_legal(blocks, f"attention indexer {name}", 0, BLOCKS[name], line)


def sharing(own: IndexerSpec | None, shared: IndexerSpec, layer: int) -> ModelSpec:
    """Two layers, one of which shares what the other one chose."""
    attention = LATENT.attention
    assert isinstance(attention, LatentSpec)
    other = OtherAttentionSpec((layer,), replace(attention, indexer=shared), LATENT.rope)
    return replace(LATENT, attention=replace(attention, indexer=own), others=(other,))


def test_a_choice_that_no_layer_before_made_cannot_be_shared() -> None:
    own = IndexerSpec(4, 8, 5)
    shared = replace(own, shared=True)
    message = "layer {} shares the choice of an indexer, but the layers before it have no such indexer"
    assert spec_fault(sharing(own, shared, 1)) is None
    assert spec_fault(sharing(own, shared, 0)) == message.format(0)
    assert spec_fault(sharing(None, shared, 1)) == message.format(1)
    assert spec_fault(sharing(replace(own, top_k=6), shared, 1)) == message.format(1)
    longer = replace(sharing(own, shared, 1), num_hidden_layers=3)  # so that a layer before or behind it has its own
    assert spec_fault(longer) is None
    assert spec_fault(replace(longer, halves=HalvesSpec(first=(), second=(0,)))) == message.format(1)


def test_weights_on_the_input_of_more_than_one_expert_are_refused() -> None:
    message = "router on_input needs one expert a token, but num_experts_per_tok is 2"
    assert_refused_beside_legal(GROUPED, "router on_input", True, False, message)
    on_input = changed(changed(GROUPED, "router num_experts_per_tok", 1), "router on_input", True)
    assert_refused_beside_legal(on_input, "router num_experts_per_tok", 2, 1, message)


def test_residuals_that_cannot_be_are_refused() -> None:
    normed = {"kind": "normed", "before": True, "after": ["mlp"], "apart": False, "scaled": False}
    shortcut = {"kind": "shortcut", "layers": [1]}
    norms = {"kind": "gated_norms", "rank": 8}
    gated = {"kind": "gated_streams", "streams": 4, "rank": 8}
    mixed = {"kind": "mixed_streams", "streams": 4, "mixing": 3, "magnitude": 2.0, "eps": 1e-6}
    order = "expected 'attention', and 'mlp' or 'experts', or one of these"
    needed = "residual apart needs a shared expert, rms norms, and router weights on outputs"
    layers = "residual layers must list MoE layers before the last layer, at least one, in rising order"
    cases: list[tuple[Values, Values, str]] = [
        (normed, {"after": ["mlp", "attention"]}, f"residual after is ('mlp', 'attention'), {order}"),
        (normed, {"after": []}, f"residual after is (), {order}"),
        (normed, {"before": False}, "residual leaves a half without a norm"),
        (
            normed | {"apart": True},
            {"before": False, "after": ["attention", "mlp"]},
            "residual apart needs norms before",
        ),
        (shortcut, {"layers": []}, layers),
        (shortcut, {"layers": [2]}, layers),
        (shortcut, {"layers": [0, 1]}, "residual layers must not follow each other"),
        (norms, {"rank": 0}, "residual rank is 0, expected 1 to 2^31 - 1"),
        (gated, {"streams": 1}, "residual streams is 1, expected 2 to 64"),
        (gated, {"rank": 0}, "residual rank is 0, expected 1 to 2^31 - 1"),
        (mixed, {"streams": 65}, "residual streams is 65, expected 2 to 64"),
        (mixed, {"eps": 1.0}, "residual mixing 3, magnitude 2.0 or eps 1.0 is out of range"),
        (mixed, {"mixing": -1}, "residual mixing -1, magnitude 2.0 or eps 1e-06 is out of range"),
        (mixed, {"magnitude": 0.0}, "residual mixing 3, magnitude 0.0 or eps 1e-06 is out of range"),
    ]
    for legal, wrong, message in cases:
        assert_refused_beside_legal(GROUPED, "residual", legal | wrong, legal, message)
    with_residual = {residual["kind"]: changed(GROUPED, "residual", residual) for residual in (shortcut, gated)}
    by_depth = changed(GROUPED, "residual", normed | {"by_depth": True})
    multiplied = "residual by_depth cannot have a residual_multiplier of 0.5"
    assert_refused_beside_legal(by_depth, "residual_multiplier", 0.5, 1.0, multiplied)
    shared = changed(GROUPED, "residual", normed | {"apart": True})
    assert_refused_beside_legal(shared, "norm kind", "layer", "rms", needed)
    assert spec_fault(replace(shared, shared_expert=None)) == needed
    multiplied = "a shortcut residual cannot have a residual_multiplier of 0.5"
    assert_refused_beside_legal(with_residual["shortcut"], "residual_multiplier", 0.5, 1.0, multiplied)
    kind = "a gated_streams residual needs norms of kind rms, found layer"
    assert_refused_beside_legal(with_residual["gated_streams"], "norm kind", "layer", "rms", kind)
    halves = "a shortcut residual needs layers with both halves, and no encoder"
    assert spec_fault(replace(with_residual["shortcut"], halves=HalvesSpec((), (0,)))) == halves


def test_sums_with_what_was_read_that_cannot_be_are_refused() -> None:
    lightning = RESIDUALS["sums with what was read"]
    one: Values = {"state": 1.0, "output": 1.0}
    legal: Values = {"kind": "normed_state", "attention": one, "mixer": one, "mlp": one}
    needs = "a normed_state residual needs factors of layers with a mixer where there are any, and only there"
    numbers = "residual factors are {}, expected between 0 and 1e6"
    cases = [
        ({"mixer": None}, needs),
        ({"attention": one | {"state": 0.0}}, numbers.format([0.0, 1.0, 1.0, 1.0, 1.0, 1.0])),
        ({"mixer": one | {"output": 1e6}}, numbers.format([1.0, 1.0, 1.0, 1e6, 1.0, 1.0])),
        ({"mlp": one | {"state": -1.0}}, numbers.format([1.0, 1.0, 1.0, 1.0, -1.0, 1.0])),
    ]
    for wrong, message in cases:
        assert_refused_beside_legal(lightning, "residual", legal | wrong, legal, message)
    assert spec_fault(replace(lightning, mixer=None)) == needs


def test_lightning_attention_that_cannot_be_is_refused() -> None:
    spec = RESIDUALS["sums with what was read"]
    between = "mixer factors are {}, expected above 0 and at most 2"
    cases: list[tuple[str, object, object, str]] = [
        ("mixer layers", [0, 1], [2], "mixer factors are 1 numbers for 2 layers"),
        ("mixer factors", [], [1.0], "mixer factors are 0 numbers for 1 layers"),
        ("mixer factors", [0.0], [2.0], between.format((0.0,))),
        ("mixer factors", [2.5], [1e-6], between.format((2.5,))),
        ("mixer norm_eps", 0.0, 1e-5, "mixer norm_eps is 0.0, expected between 0 and 1"),
        ("mixer head_dim", 0, 1, "mixer head_dim is 0, expected 1 to 2^31 - 1"),
    ]
    assert_each_refused(spec, cases)


def test_scales_of_latents_and_gates_with_queries_that_cannot_be_are_refused() -> None:
    for name in ("q_latent_scale", "kv_latent_scale"):
        message = "a latent's scale is 0.0, expected between 0 and 1e6"
        assert_refused_beside_legal(LATENT, f"attention {name}", 0.0, 2.0, message)
    gated, message = changed(LATENT, "attention gated", True), "gated latent attention needs q_lora_rank, and no gate"
    assert_refused_beside_legal(gated, "attention q_lora_rank", None, 40, message)
    assert_refused_beside_legal(gated, "attention gate", {"each": "head", "function": "sigmoid"}, None, message)


def test_groups_that_score_zero_are_refused_where_there_are_none() -> None:
    message = "zero_outside needs a sigmoid_topk router with n_group above 1"
    assert_refused_beside_legal(LATENT, "router zero_outside", True, False, message)
    sigmoid = changed(changed(LATENT, "router kind", "sigmoid_topk"), "router topk_group", 1)
    assert_refused_beside_legal(changed(sigmoid, "router zero_outside", True), "router n_group", 1, 2, message)


def test_halves_that_cannot_be_are_refused() -> None:
    rising = "halves {} must list decoder layers, in rising order"
    legal = {"first": [], "second": [1]}
    cases = [
        ({"first": [], "second": [1, 3]}, rising.format("second")),
        ({"first": [], "second": [1, 1]}, rising.format("second")),
        ({"first": [], "second": [0]}, "mixer layers list a layer without a first half"),
        ({"first": [0], "second": []}, "moe_layers lists a layer without a second half"),
        ({"first": [2], "second": []}, "dense_intermediate_size is 80, but 0 layers have no experts"),
    ]
    for halves, message in cases:
        assert_refused_beside_legal(HYBRID, "halves", halves, legal, message)
    twice = replace(HYBRID, dense_intermediate_size=None, halves=HalvesSpec((2,), (2,)))
    assert spec_fault(twice) == "halves list a layer twice"


# --- compressed attention, and tables of experts

COMPRESSED_SIZES = {
    **{name: name for name in ("num_heads", "head_dim", "q_lora_rank", "sliding_window", "num_groups", "o_lora_rank")},
    "compression window_tokens": "window_tokens",
    **{f"compression indexer {name}": f"indexer {name}" for name in ("num_heads", "head_dim", "top_k")},
}


def test_a_size_of_compressed_attention_outside_1_to_31_bits_is_refused() -> None:
    assert spec_fault(COMPRESSED) is None
    for path, name in COMPRESSED_SIZES.items():
        for number in (0, 2**31):
            with case(path, number):
                expected = f"{name} is {number}, expected 1 to 2^31 - 1"
                assert spec_fault(changed(COMPRESSED, f"attention {path}", number)) == expected


def test_compressed_attention_that_cannot_be_is_refused() -> None:
    groups = "4 heads do not divide into num_groups, 3"
    assert_refused_beside_legal(COMPRESSED, "attention num_groups", 3, 4, groups)
    small = "an indexer of entries has heads of 7, expected at least rotary_dim, 8"
    assert_refused_beside_legal(COMPRESSED, "attention compression indexer head_dim", 7, 8, small)
    rotary = "compressed attention needs rotary positions, and neither longrope nor dynamic scaling"
    assert spec_fault(replace(COMPRESSED, rope=None)) == rotary
    longrope = LONGROPE | {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    dynamic = {"kind": "dynamic", "factor": 4.0, "original_max_position_embeddings": 32}
    for scaling in (longrope, dynamic):
        assert spec_fault(changed(COMPRESSED, "rope scaling", scaling)) == rotary
    assert_refused_beside_legal(
        COMPRESSED, "rope rotary_dim", 18, 8, "an indexer of entries has heads of 12, expected at least rotary_dim, 18"
    )
    without = changed(COMPRESSED, "attention compression indexer", None)
    assert_refused_beside_legal(
        without, "rope rotary_dim", 18, 16, "rotary_dim is 18, expected an even number up to 16"
    )


def test_tables_of_experts_that_cannot_be_are_refused() -> None:
    message = "router table_layers must list MoE layers, in rising order"
    for wrong in ([1, 0], [2], [0, 0], [-1], [3]):
        assert_refused_beside_legal(COMPRESSED, "router table_layers", wrong, [0, 1], message)
    needs = "router table_layers need a model without an encoder, num_identity, capacity and sparsemixer"
    mixed = changed(changed(COMPRESSED, "router normalize", False), "router bias", False)
    assert_refused_beside_legal(mixed, "router kind", "sparsemixer", "topk_softmax", needs)
    identity = changed(mixed, "router kind", "softmax_topk")
    assert_refused_beside_legal(identity, "router num_identity", 2, 0, needs)
    assert spec_fault(replace(ANSWERING, router=replace(ANSWERING.router, table_layers=(1,)))) == needs
    assert spec_fault(changed(changed(identity, "router num_experts_per_tok", 1), "router capacity", 3)) == needs


# --- scaled positions

YARN_FACTORS = "yarn factor {} or attention_factor {} is out of range"
YARN_BETAS = "yarn beta_slow {} and beta_fast {} must satisfy 0 < beta_slow <= beta_fast"
LINEAR: Values = {"kind": "linear", "factor": 4.0}
DYNAMIC_FACTOR = "dynamic factor is {}, expected 1 to 1e6"
PROPORTIONAL: Values = {"kind": "proportional", "rotated_pairs": 4, "factor": 1.0}
PAIRS = "proportional rotated_pairs is {} and factor is {}, expected 1 to 16, and between 0 and 1e6"
LONG_MSCALES = "longrope short_mscale {} or long_mscale {} is out of range"
LENGTH = "original_max_position_embeddings is {}, expected 1 to 2^31 - 1"


def test_a_scaling_of_positions_that_cannot_be_is_refused() -> None:
    cases = [
        (YARN, {"original_max_position_embeddings": 0}, {"original_max_position_embeddings": 1}, LENGTH.format(0)),
        (YARN, {"original_max_position_embeddings": MAX + 1}, {"original_max_position_embeddings": MAX},
         LENGTH.format(MAX + 1)),
        (YARN, {"factor": 0.99}, {"factor": 1.0}, YARN_FACTORS.format(0.99, 1.1)),
        (YARN, {"factor": 1e6}, {"factor": 999_999.0}, YARN_FACTORS.format(1e6, 1.1)),
        (YARN, {"attention_factor": 0.0}, {"attention_factor": 1e-6}, YARN_FACTORS.format(4.0, 0.0)),
        (YARN, {"attention_factor": 1e6}, {"attention_factor": 999_999.0}, YARN_FACTORS.format(4.0, 1e6)),
        (YARN, {"beta_slow": 0.0}, {"beta_slow": 1e-6}, YARN_BETAS.format(0.0, 32.0)),
        (YARN, {"beta_slow": 33.0}, {"beta_slow": 32.0}, YARN_BETAS.format(33.0, 32.0)),
        (YARN, {"beta_fast": 1e6}, {"beta_fast": 999_999.0}, YARN_BETAS.format(1.0, 1e6)),
        (LINEAR, {"factor": 0.0}, {"factor": 0.5}, "linear factor is 0.0, expected between 0 and 1e6"),
        (LINEAR, {"factor": 1e6}, {"factor": 999_999.0}, "linear factor is 1000000.0, expected between 0 and 1e6"),
        (DYNAMIC, {"original_max_position_embeddings": 0}, {"original_max_position_embeddings": 1}, LENGTH.format(0)),
        (DYNAMIC, {"original_max_position_embeddings": MAX + 1}, {"original_max_position_embeddings": MAX},
         LENGTH.format(MAX + 1)),
        (DYNAMIC, {"factor": 0.99}, {"factor": 1.0}, DYNAMIC_FACTOR.format(0.99)),
        (DYNAMIC, {"factor": 1e6}, {"factor": 999_999.0}, DYNAMIC_FACTOR.format(1e6)),
        (PROPORTIONAL, {"rotated_pairs": 0}, {"rotated_pairs": 1}, PAIRS.format(0, 1.0)),
        (PROPORTIONAL, {"rotated_pairs": 17}, {"rotated_pairs": 16}, PAIRS.format(17, 1.0)),
        (PROPORTIONAL, {"factor": 0.0}, {"factor": 0.5}, PAIRS.format(4, 0.0)),
        (PROPORTIONAL, {"factor": 1e6}, {"factor": 8.0}, PAIRS.format(4, 1e6)),
        (LONGROPE, {"original_max_position_embeddings": 0}, {"original_max_position_embeddings": 1}, LENGTH.format(0)),
        (LONGROPE, {"original_max_position_embeddings": MAX + 1}, {"original_max_position_embeddings": MAX},
         LENGTH.format(MAX + 1)),
        (LONGROPE, {"short_factor": [1.0] * 15}, {"short_factor": [1.0] * 16},
         "longrope short_factor must be 16 numbers between 0 and 1e6"),
        (LONGROPE, {"short_factor": [1.0] * 15 + [0.0]}, {"short_factor": [1.0] * 15 + [0.5]},
         "longrope short_factor must be 16 numbers between 0 and 1e6"),
        (LONGROPE, {"long_factor": [1.0] * 17}, {"long_factor": [9.0] * 16},
         "longrope long_factor must be 16 numbers between 0 and 1e6"),
        (LONGROPE, {"long_factor": [1e6] + [1.0] * 15}, {"long_factor": [999_999.0] + [1.0] * 15},
         "longrope long_factor must be 16 numbers between 0 and 1e6"),
        (LONGROPE, {"short_mscale": 0.0}, {"short_mscale": 0.1}, LONG_MSCALES.format(0.0, 1.2)),
        (LONGROPE, {"short_mscale": 1e6}, {"short_mscale": 999_999.0}, LONG_MSCALES.format(1e6, 1.2)),
        (LONGROPE, {"long_mscale": 0.0}, {"long_mscale": 0.1}, LONG_MSCALES.format(1.0, 0.0)),
        (LONGROPE, {"long_mscale": 1e6}, {"long_mscale": 999_999.0}, LONG_MSCALES.format(1.0, 1e6)),
    ]  # fmt: skip
    for scaling, wrong, right, message in cases:
        assert_refused_beside_legal(GROUPED, "rope scaling", scaling | wrong, scaling | right, message)
    dynamic = changed(GROUPED, "rope scaling", DYNAMIC)
    assert_refused_beside_legal(dynamic, "rope rotary_dim", 2, 4, "dynamic scaling needs a rotary_dim above 2, found 2")


LLAMA3: Values = {
    "kind": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip


def test_a_llama3_scaling_that_cannot_be_is_refused() -> None:
    message = "llama3 factor {}, low_freq_factor {} or high_freq_factor {} is out of range".format
    cases = [
        ({"factor": 0.99}, {"factor": 1.0}, message(0.99, 1.0, 4.0)),
        ({"factor": 1e6}, {"factor": 999_999.0}, message(1e6, 1.0, 4.0)),
        ({"low_freq_factor": 0.0}, {"low_freq_factor": 1e-6}, message(8.0, 0.0, 4.0)),
        ({"low_freq_factor": 5.0}, {"low_freq_factor": 4.0}, message(8.0, 5.0, 4.0)),
        ({"high_freq_factor": 1e6}, {"high_freq_factor": 999_999.0}, message(8.0, 1.0, 1e6)),
        ({"original_max_position_embeddings": 0}, {"original_max_position_embeddings": 1}, LENGTH.format(0)),
    ]
    for wrong, right, line in cases:
        assert_refused_beside_legal(GROUPED, "rope scaling", LLAMA3 | wrong, LLAMA3 | right, line)
