"""Rules of compressed attention, of tables of experts and of scaled positions: specs just beyond, and those allowed."""

from dataclasses import replace

from support.cases import case
from support.specs import ANSWERING, COMPRESSED, GROUPED, LONGROPE, YARN, Values, changed

from moe_pack.formats import ModelSpec
from moe_pack.formats.parts.specs import spec_fault

SIZES = {
    **{name: name for name in ("num_heads", "head_dim", "q_lora_rank", "sliding_window", "num_groups", "o_lora_rank")},
    "compression window_tokens": "window_tokens",
    **{f"compression indexer {name}": f"indexer {name}" for name in ("num_heads", "head_dim", "top_k")},
}


def assert_refused_beside_legal(spec: ModelSpec, path: str, wrong: object, right: object, message: str) -> None:
    assert spec_fault(changed(spec, path, right)) is None
    assert spec_fault(changed(spec, path, wrong)) == message


def test_a_size_outside_1_to_31_bits_is_refused() -> None:
    assert spec_fault(COMPRESSED) is None
    for path, name in SIZES.items():
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
        with case(wrong):
            assert_refused_beside_legal(COMPRESSED, "router table_layers", wrong, [0, 1], message)
    needs = "router table_layers need a model without an encoder, num_identity, capacity and sparsemixer"
    mixed = changed(changed(COMPRESSED, "router normalize", False), "router bias", False)
    assert_refused_beside_legal(mixed, "router kind", "sparsemixer", "topk_softmax", needs)
    identity = changed(mixed, "router kind", "softmax_topk")
    assert_refused_beside_legal(identity, "router num_identity", 2, 0, needs)
    assert spec_fault(replace(ANSWERING, router=replace(ANSWERING.router, table_layers=(1,)))) == needs
    assert spec_fault(changed(changed(identity, "router num_experts_per_tok", 1), "router capacity", 3)) == needs


# --- scaled positions

MAX = 2**31 - 1
YARN_FACTORS = "yarn factor {} or attention_factor {} is out of range"
YARN_BETAS = "yarn beta_slow {} and beta_fast {} must satisfy 0 < beta_slow <= beta_fast"
LINEAR: Values = {"kind": "linear", "factor": 4.0}
DYNAMIC: Values = {"kind": "dynamic", "factor": 4.0, "original_max_position_embeddings": 32}
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
        with case(scaling, wrong, right, message):
            assert_refused_beside_legal(GROUPED, "rope scaling", scaling | wrong, scaling | right, message)
    dynamic = changed(GROUPED, "rope scaling", DYNAMIC)
    assert_refused_beside_legal(dynamic, "rope rotary_dim", 2, 4, "dynamic scaling needs a rotary_dim above 2, found 2")


LLAMA3: Values = {
    "kind": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


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
        with case(wrong, right, line):
            assert_refused_beside_legal(GROUPED, "rope scaling", LLAMA3 | wrong, LLAMA3 | right, line)
