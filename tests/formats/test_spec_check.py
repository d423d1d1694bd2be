"""Every rule of what a model can be: a spec just beyond it, and the nearest that is allowed."""

import math
from dataclasses import replace
from typing import Any

import pytest
from support.cases import case
from support.specs import ANSWERING, GROUPED, HYBRID, LATENT, LONGROPE, RESIDUALS, YARN, Values, changed

from moe_pack.formats import ModelSpec, dump
from moe_pack.formats.parts import HalvesSpec, IndexerSpec, KimiDeltaSpec, LatentSpec, OtherAttentionSpec
from moe_pack.formats.parts.specs import spec_fault

MAX = 2**31 - 1

LARGE = "is {}, expected 1 to 2^31 - 1"
SIZES: list[tuple[ModelSpec, str, str]] = [
    (GROUPED, "hidden_size", "hidden_size"),
    (GROUPED, "vocab_size", "vocab_size"),
    (GROUPED, "num_hidden_layers", "num_hidden_layers"),
    (GROUPED, "max_position_embeddings", "max_position_embeddings"),
    (GROUPED, "dense_intermediate_size", "dense_intermediate_size"),
    (GROUPED, "rope rotary_dim", "rotary_dim"),
    (GROUPED, "router num_experts", "num_experts"),
    (GROUPED, "router num_experts_per_tok", "num_experts_per_tok"),
    (GROUPED, "router n_group", "n_group"),
    (GROUPED, "router topk_group", "topk_group"),
    (GROUPED, "expert intermediate_size", "intermediate_size"),
    (GROUPED, "shared_expert intermediate_size", "shared intermediate_size"),
    (GROUPED, "attention num_heads", "num_heads"),
    (GROUPED, "attention num_kv_heads", "num_kv_heads"),
    (GROUPED, "attention head_dim", "head_dim"),
    (GROUPED, "attention sliding_window", "sliding_window"),
    (GROUPED, "attention value_head_dim", "value_head_dim"),
    (LATENT, "attention num_heads", "num_heads"),
    (LATENT, "attention q_lora_rank", "q_lora_rank"),
    (LATENT, "attention kv_lora_rank", "kv_lora_rank"),
    (LATENT, "attention qk_nope_head_dim", "qk_nope_head_dim"),
    (LATENT, "attention qk_rope_head_dim", "qk_rope_head_dim"),
    (LATENT, "attention v_head_dim", "v_head_dim"),
    (HYBRID, "mixer num_key_heads", "mixer num_key_heads"),
    (HYBRID, "mixer num_value_heads", "mixer num_value_heads"),
    (HYBRID, "mixer key_head_dim", "mixer key_head_dim"),
    (HYBRID, "mixer value_head_dim", "mixer value_head_dim"),
    (HYBRID, "mixer conv_kernel", "mixer conv_kernel"),
]


def assert_refused_beside_legal(spec: ModelSpec, path: str, wrong: object, right: object, message: str) -> None:
    assert spec_fault(changed(spec, path, right)) is None
    assert spec_fault(changed(spec, path, wrong)) == message


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
    for path, wrong, right, message in cases:
        with case(path, wrong, right, message):
            assert_refused_beside_legal(GROUPED, path, wrong, right, message)


def test_an_expert_s_matrix_of_more_than_2_to_the_40_weights_is_refused() -> None:
    widest = changed(GROUPED, "hidden_size", 2**20)
    message = f"expert matrices of {2**20 + 1} by {2**20} are too large"
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
    for path, wrong, right, message in cases:
        with case(path, wrong, right, message):
            assert_refused_beside_legal(GROUPED, path, wrong, right, message)


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
        with case(wrong, right, message):
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
        with case(spec, path, wrong, right, message):
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
        with case(router, wrong, right, message):
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
        with case(wrong, right):
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
    for path, wrong, right, message in cases:
        with case(path, wrong, right, message):
            assert_refused_beside_legal(GROUPED, path, wrong, right, message)


def test_a_bias_of_a_matrix_the_experts_lack_is_refused() -> None:
    two = changed(GROUPED, "expert matrices", ["up", "down"])
    message = "expert bias names ('gate',), expected some of ('up', 'down') in this order"
    assert_refused_beside_legal(two, "expert bias", ["gate"], ["up"], message)


def test_the_values_of_a_bias_of_down_are_counted() -> None:
    biased = changed(changed(GROUPED, "expert extra_floats", 64), "expert bias", ["down"])
    assert spec_fault(biased) is None
    assert_refused_beside_legal(biased, "expert extra_floats", 63, 64, EXTRA.format(63, 64))


def test_a_neuron_function_of_gate_and_up_is_refused_without_a_gate() -> None:
    two = changed(GROUPED, "expert matrices", ["up", "down"])
    message = "expert function clamped_swiglu needs a gate"
    assert_refused_beside_legal(two, "expert function", "clamped_swiglu", "relu", message)


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
        with case(wrong):
            assert_refused_beside_legal(limited, "expert limits", wrong, right, message)
    two = changed(limited, "expert matrices", ["up", "down"])
    assert spec_fault(two) == "expert function clipped_silu needs a gate"


WINDOWED = "windowed_layers must list some decoder layers, but not all, in rising order"


def test_windowed_layers_that_cannot_be_are_refused() -> None:
    for wrong in [[], [0, 1, 2], [1, 0], [1, 1], [-1], [3]]:
        with case(wrong):
            assert_refused_beside_legal(GROUPED, "attention windowed_layers", wrong, [0, 2], WINDOWED)


def test_windowed_layers_without_a_window_are_refused() -> None:
    without = changed(GROUPED, "attention sliding_window", None)
    message = "windowed_layers is given without a sliding_window"
    assert_refused_beside_legal(without, "attention windowed_layers", [0], None, message)


def test_rotated_layers_and_chunks_that_cannot_be_are_refused() -> None:
    message = WINDOWED.replace("windowed", "rotated")
    for wrong in [[], [0, 1, 2], [1, 0], [1, 1], [-1], [3]]:
        with case(wrong):
            assert_refused_beside_legal(GROUPED, "attention rotated_layers", wrong, [0, 2], message)
    without = changed(GROUPED, "attention sliding_window", None)
    assert_refused_beside_legal(without, "attention chunked", True, False, "chunked is given without a sliding_window")


def test_a_bias_of_values_that_are_keys_is_refused() -> None:
    shared = changed(GROUPED, "attention keys_as_values", True)
    message = "attention bias names v, but keys_as_values leaves no projection of values"
    assert_refused_beside_legal(shared, "attention bias", ["q", "v"], ["q", "k"], message)


def test_values_that_are_clamped_have_a_projection_of_their_own() -> None:
    for name in ("gated", "keys_as_values"):
        with case(name):
            spec = changed(changed(GROUPED, "attention bias", []), f"attention {name}", True)
            message = f"attention has {name} and clip, of which only one can be"
            assert_refused_beside_legal(spec, "attention clip", 8.0, None, message)


def test_outputs_with_two_kinds_of_gates_are_refused() -> None:
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
        with case(wrong, right, message):
            assert_refused_beside_legal(
                spec, "attention temperature", TEMPERATURE | wrong, TEMPERATURE | right, message
            )
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
    for path, wrong, right, message in cases:
        with case(path, wrong, right, message):
            assert_refused_beside_legal(HYBRID, path, wrong, right, message)


def test_a_norm_without_bias_that_has_none_anyway_is_refused() -> None:
    message = "a norm that is unbiased needs kind layer, found rms"
    assert_refused_beside_legal(GROUPED, "norm unbiased", True, False, message)
    assert spec_fault(changed(changed(GROUPED, "norm kind", "layer"), "norm unbiased", True)) is None


def test_a_bound_of_decays_that_cannot_be_is_refused() -> None:
    kimi = replace(HYBRID, mixer=KimiDeltaSpec("kimi_delta_attention", (0, 2), 4, 16, conv_kernel=4, full_rank=True))
    for wrong in (0.0, 1.0, -1e6, math.nan):
        message = f"mixer lower_bound is {wrong}, expected above -1e6 and below 0"
        assert_refused_beside_legal(kimi, "mixer lower_bound", wrong, -5.0, message)


def test_a_zero_centered_norm_that_cannot_be_is_refused() -> None:
    message = "a zero-centered norm needs kind rms and grouped_query attention, found {}"
    assert spec_fault(changed(HYBRID, "norm kind", "layer")) == message.format("layer")
    assert_refused_beside_legal(LATENT, "norm zero_centered", True, False, message.format("rms"))


def test_a_mixer_in_a_model_with_an_encoder_is_refused() -> None:
    message = "a model with an encoder cannot have a mixer in place of attention"
    assert spec_fault(replace(ANSWERING, mixer=HYBRID.mixer)) == message


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
        with case(message):
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
        with case(message):
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
    for path, wrong, right, message in cases:
        with case(path, wrong):
            assert_refused_beside_legal(spec, path, wrong, right, message)


def test_scales_of_latents_that_cannot_be_are_refused() -> None:
    for name in ("q_latent_scale", "kv_latent_scale"):
        with case(name):
            message = "a latent's scale is 0.0, expected between 0 and 1e6"
            assert_refused_beside_legal(LATENT, f"attention {name}", 0.0, 2.0, message)


def test_gates_with_queries_that_cannot_be_are_refused() -> None:
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
        with case(message):
            assert_refused_beside_legal(HYBRID, "halves", halves, legal, message)
    twice = replace(HYBRID, dense_intermediate_size=None, halves=HalvesSpec((2,), (2,)))
    assert spec_fault(twice) == "halves list a layer twice"
