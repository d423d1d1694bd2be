"""Rules of compressed attention and of tables of experts: a spec just beyond each, and the nearest that is allowed."""

from dataclasses import replace

from support.cases import case
from support.specs import ANSWERING, COMPRESSED, LONGROPE, changed

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
