"""Sizes that follow from a spec, against sums made by hand."""

from dataclasses import replace

from support.cases import case
from support.specs import COMPRESSED, GROUPED, HYBRID, LATENT, changed

from moe_pack.formats import dense_roles
from moe_pack.formats.parts import OtherAttentionSpec
from moe_pack.formats.parts.specs import (
    cache_values,
    cached_tokens,
    cached_values,
    num_active_parameters,
    num_parameters,
    spec_fault,
    state_values,
)

EXPERT = 3 * 48 * 64  # gate, up and down of each routed expert below
EMBEDDING = 96 * 64
# Three layers: norms; q and its bias; k, v and theirs; o; one norm for all heads' queries, one for their keys.
GROUPED_LAYER = 2 * 64 + (128 * 64 + 128) + 2 * (64 * 64 + 64) + 64 * 128 + 2 * 32
# Two with router, shared expert and the row that gates it; one with a dense expert.
GROUPED_DENSE = 2 * EMBEDDING + 64 + 3 * GROUPED_LAYER + 2 * (6 * 64 + 3 * 40 * 64 + 64) + 3 * 80 * 64
# Two layers: norms; q_a, its norm, q_b; kv_a, its norm, kv_b; o. The head is the embedding.
LATENT_LAYER = 2 * 64 + (40 * 64 + 40 + 96 * 40) + (32 * 64 + 24 + 112 * 24) + 64 * 48
LATENT_DENSE = EMBEDDING + 64 + 2 * LATENT_LAYER + (8 * 64 + 3 * 96 * 64) + 3 * 80 * 64


def test_all_weights_and_those_of_one_token_are_counted_with_grouped_queries() -> None:
    assert num_parameters(GROUPED) == GROUPED_DENSE + 2 * 6 * EXPERT == 229_632
    assert num_active_parameters(GROUPED) == GROUPED_DENSE + 2 * 2 * EXPERT == 155_904


def test_all_weights_and_those_of_one_token_are_counted_with_latents() -> None:
    assert num_parameters(LATENT) == LATENT_DENSE + 8 * EXPERT == 143_040
    assert num_active_parameters(LATENT) == LATENT_DENSE + 3 * EXPERT == 96_960


def test_the_cache_holds_keys_and_values_of_every_layer_or_a_latent_and_a_key() -> None:
    assert cached_values(GROUPED) == 3 * 2 * 2 * 32
    assert cached_values(LATENT) == 2 * (24 + 8)


def test_a_windowed_layers_cache_holds_what_the_first_of_a_chunk_sees_and_the_chunk() -> None:
    some = changed(GROUPED, "attention windowed_layers", [0, 2])
    assert cached_values(some) == cached_values(GROUPED)
    assert [cached_tokens(some, layer, 100, 10) for layer in range(3)] == [25, 100, 25]
    assert [cached_tokens(some, layer, 20, 10) for layer in range(3)] == [20, 20, 20]
    assert cache_values(some, 100, 10) == 128 * (25 + 100 + 25)
    assert cache_values(LATENT, 100, 10) == 100 * cached_values(LATENT)


def test_weights_of_compressed_attention_are_counted_and_tables_of_experts_are_not() -> None:
    # Norms; q_a, its norm, q_b; kv, its norm; sinks; o_a, o_b.
    window = 2 * 64 + (40 * 64 + 40 + 64 * 40) + (16 * 64 + 16) + 4 + (48 * 32 + 64 * 48)
    sparse = 2 * (32 * 64) + 2 * 32 + 16 + 2 * (24 * 64) + 2 * 24 + 12 + (144 * 40 + 12 * 64)
    heavy = 2 * (16 * 64) + 3 * 16 + 16
    streams = 2 * (15 * 192 + 15 + 3)  # of a layer's two halves: weights, bases and scales
    last = 3 * 192 + 3 + 1
    dense = 2 * EMBEDDING + 64 + last + 3 * (window + streams) + sparse + heavy
    dense += 2 * 6 * 64 + 6 + 2 * 3 * 48 * 64 + 3 * 80 * 64  # routers, one with a bias; shared experts; a dense expert
    assert num_parameters(COMPRESSED) == dense + 2 * 6 * EXPERT
    table = {role.name: role for role in dense_roles(COMPRESSED)}["layers.0.router_table"]
    assert table.shape == (96, 2) and table.integers


def test_layers_with_attention_of_their_own_cache_what_theirs_needs() -> None:
    attention = replace(GROUPED.attention, num_kv_heads=1, head_dim=64, sliding_window=None)
    spec = replace(GROUPED, others=(OtherAttentionSpec((1,), attention, GROUPED.rope),))
    assert spec_fault(spec) is None
    assert cached_values(spec) == 2 * 2 * 2 * 32 + 2 * 1 * 64
    assert cache_values(spec, 100, 10) == 128 * (25 + 100 + 25)
    wide = {role.name: role.shape for role in dense_roles(spec)}
    assert [wide[f"layers.{layer}.attention.q"] for layer in range(3)] == [(128, 64), (256, 64), (128, 64)]


def test_a_layer_without_attention_has_a_state_of_fixed_size_instead() -> None:
    conv, recurrent = 3 * (2 * 2 * 16 + 4 * 24), 4 * 16 * 24
    assert state_values(HYBRID) == 2 * (conv + recurrent)
    assert cached_values(HYBRID) == 2 * 2 * 32
    assert [cached_tokens(HYBRID, layer, 100, 10) for layer in range(3)] == [0, 100, 0]
    assert cache_values(HYBRID, 100, 10) == 100 * cached_values(HYBRID)
    assert state_values(GROUPED) == 0


def test_a_mixer_counts_its_projections_kernel_and_decays() -> None:
    qkvz, ba, conv, o = 64 * (2 * 32 + 2 * 96), 64 * 8, 4 * (2 * 32 + 96), 96 * 64
    mixer = qkvz + ba + conv + 4 + 4 + 24 + o
    attention = 64 * (2 * 128 + 2 * 64) + 128 * 64 + 2 * 32
    others = 6 * 64 + 64 + 2 * 96 * 64 + 2 * (6 * 64 + 3 * 40 * 64 + 64) + 3 * 80 * 64 + 2 * 6 * EXPERT
    assert num_parameters(HYBRID) == 2 * mixer + attention + others
    assert num_parameters(changed(HYBRID, "mixer interleaved", False)) == num_parameters(HYBRID)


def test_a_layer_without_a_half_has_none_of_its_weights_and_caches_nothing_without_the_first() -> None:
    alone = changed(HYBRID, "halves", {"first": [2], "second": [1]})
    spec = replace(alone, dense_intermediate_size=None)
    assert spec_fault(spec) is None
    attention = 64 * (2 * 128 + 2 * 64) + 128 * 64 + 2 * 32
    assert num_parameters(spec) == num_parameters(HYBRID) - attention - 3 * 80 * 64 - 2 * 64
    assert cached_values(spec) == 0 and state_values(spec) == state_values(HYBRID)
    assert [cached_tokens(spec, layer, 100, 10) for layer in range(3)] == [0, 0, 0]


def test_each_part_of_a_model_counts_its_weights() -> None:
    cases = [
        (GROUPED, "tied_head", True, -EMBEDDING),
        (GROUPED, "head_bias", True, 96),
        (GROUPED, "norm kind", "layer", 7 * 64),
        (changed(GROUPED, "norm kind", "layer"), "norm unbiased", True, -7 * 64),
        (GROUPED, "attention bias", [], -3 * (128 + 64 + 64)),
        (GROUPED, "attention bias", ["q", "k", "v", "o"], 3 * 64),
        (GROUPED, "attention qk_norm", "none", -3 * (32 + 32)),
        (GROUPED, "attention qk_norm", "projection", 3 * (96 + 32)),
        (GROUPED, "router bias", True, 2 * 6),
        (GROUPED, "shared_expert", None, -2 * (3 * 40 * 64 + 64)),
        (GROUPED, "shared_expert gated", False, -2 * 64),
        (GROUPED, "dense_intermediate_size", 81, 3 * 64),
        (GROUPED, "expert intermediate_size", 49, 12 * 3 * 64),
        (GROUPED, "expert bias", ["gate", "up"], 12 * 2 * 48),
        (GROUPED, "expert extra_floats", 64, 12 * 64),
        (GROUPED, "router logit_bias", True, 2 * 6),
        (GROUPED, "attention sinks", True, 3 * 4),
        (GROUPED, "attention windowed_layers", [1], 0),
        (GROUPED, "attention gated", True, 3 * (128 * 64 + 128)),
        (GROUPED, "norm zero_centered", True, 0),
        (GROUPED, "attention clip", 8.0, 0),
        (GROUPED, "rope rotary_dim", 16, 0),
        (GROUPED, "attention sliding_window", None, 0),
        (LATENT, "attention q_lora_rank", None, 2 * (96 * 64 - 40 * 64 - 40 - 96 * 40)),
        (LATENT, "attention kv_lora_rank", 25, 2 * (64 + 1 + 112)),
        (LATENT, "attention v_head_dim", 13, 2 * 4 * (24 + 64)),
    ]
    for spec, path, value, more in cases:
        with case(spec, path, value, more):
            assert num_parameters(changed(spec, path, value)) == num_parameters(spec) + more
