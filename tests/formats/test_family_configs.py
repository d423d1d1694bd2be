"""Typed reads of foreign configs, and the one reading of rotary positions that all families share."""

import math
from collections.abc import Callable
from typing import Any

import pytest
from support.cases import case

from moe_pack.formats import CheckpointError
from moe_pack.formats.families.family import Config
from moe_pack.formats.families.readers import (
    attention_bias,
    layers_after_dense,
    layers_by_step,
    read_grouped_query,
    window_if_used,
)
from moe_pack.formats.families.rotary import read_rope, yarn_scale
from moe_pack.formats.parts import RopeSpec
from moe_pack.formats.parts.positions import (
    DynamicSpec,
    LinearSpec,
    Llama3Spec,
    LongRopeSpec,
    ProportionalSpec,
    YarnSpec,
)

Values = dict[str, Any]
Read = Callable[[Config], object]


def config(**values: Any) -> Config:
    return Config(values, "config.json")


def refusal(read: Read, **values: Any) -> str:
    with pytest.raises(CheckpointError) as refused:
        read(config(**values))
    message = str(refused.value)
    assert message.startswith("config.json: ") and "\n" not in message
    return message.removeprefix("config.json: ")


# --- typed reads


def test_a_value_of_the_right_type_is_read_and_null_is_the_default() -> None:
    cases = [
        (lambda c: c.whole("a"), 1, 1),
        (lambda c: c.whole("a"), 2**31 - 1, 2**31 - 1),
        (lambda c: c.whole("a", 7), None, 7),
        (lambda c: c.count("a"), 0, 0),
        (lambda c: c.count("a"), 2**31 - 1, 2**31 - 1),
        (lambda c: c.count("a", 0), None, 0),
        (lambda c: c.num_layers("a"), 10_000, 10_000),
        (lambda c: c.counts("a"), [0, 3, 1], (0, 3, 1)),
        (lambda c: c.counts("a"), [], ()),
        (lambda c: c.counts("a"), None, ()),
        (lambda c: c.numbers("a"), [1, 2.5, -3], (1.0, 2.5, -3.0)),
        (lambda c: c.numbers("a"), None, ()),
        (lambda c: c.texts("a"), ["x", ""], ("x", "")),
        (lambda c: c.texts("a"), None, ()),
        (lambda c: c.number("a"), 3, 3.0),
        (lambda c: c.number("a", 0.5), None, 0.5),
        (lambda c: c.number("a", 0.5), 0, 0.0),
        (lambda c: c.text("a", "x"), "", ""),
        (lambda c: c.flag("a", True), False, False),
        (lambda c: c.flag("a", True), None, True),
        (lambda c: c.choice("a", ("x", "y")), "y", "y"),
        (lambda c: c.choice("a", ("x", "y")), None, "x"),
    ]
    for read, value, found in cases:
        with case(read, value, found):
            given = config(a=value)
            got = read(given)
            assert got == found and type(got) is type(found)
            given.refuse_unread()


def test_a_missing_key_without_default_is_refused() -> None:
    for name in ["whole", "count", "number", "text", "flag", "num_layers"]:
        with case(name):
            for values in ({}, {"a": None}):
                assert refusal(lambda c: getattr(c, name)("a"), **values).startswith("key 'a' is missing, expected ")


def test_a_value_of_another_type_or_range_is_refused() -> None:
    cases = [
        (lambda c: c.whole("a"), 0, "a is 0, expected 1 to 2^31 - 1"),
        (lambda c: c.whole("a"), 2**31, "a is 2147483648, expected 1 to 2^31 - 1"),
        (lambda c: c.whole("a"), True, "a is True, expected a whole number"),
        (lambda c: c.whole("a"), 2.0, "a is 2.0, expected a whole number"),
        (lambda c: c.count("a"), -1, "a is -1, expected 0 to 2^31 - 1"),
        (lambda c: c.count("a"), 2**31, "a is 2147483648, expected 0 to 2^31 - 1"),
        (lambda c: c.num_layers("a"), 10_001, "a is 10001, expected at most 10000"),
        (lambda c: c.counts("a"), 3, "a is 3, expected a list of whole numbers"),
        (lambda c: c.counts("a"), [1, -1], "a is [1, -1], expected a list of whole numbers"),
        (lambda c: c.counts("a"), [1, True], "a is [1, True], expected a list of whole numbers"),
        (lambda c: c.counts("a"), [1, None], "a is [1, None], expected a list of whole numbers"),
        (lambda c: c.counts("a"), [1.0], "a is [1.0], expected a list of whole numbers"),
        (lambda c: c.counts("a"), [[0]] * 50, f"a is {str([[0]] * 50)[:97]}..., expected a list of whole numbers"),
        (lambda c: c.numbers("a"), [1, "2"], "a is [1, '2'], expected a list of numbers"),
        (lambda c: c.numbers("a"), [False], "a is [False], expected a list of numbers"),
        (lambda c: c.numbers("a"), {"0": 1}, "a is {'0': 1}, expected a list of numbers"),
        (lambda c: c.texts("a"), "full", "a is 'full', expected a list of strings"),
        (lambda c: c.texts("a"), ["full", 1], "a is ['full', 1], expected a list of strings"),
        (lambda c: c.number("a"), True, "a is True, expected a number"),
        (lambda c: c.number("a"), "1e-5", "a is '1e-5', expected a number"),
        (lambda c: c.text("a"), 1, "a is 1, expected a string"),
        (lambda c: c.flag("a"), 1, "a is 1, expected true or false"),
        (lambda c: c.flag("a"), "x" * 98, f"a is '{'x' * 98}', expected true or false"),
        (lambda c: c.flag("a"), "x" * 99, f"a is '{'x' * 96}..., expected true or false"),
        (lambda c: c.flag("a"), "true", "a is 'true', expected true or false"),
        (lambda c: c.choice("a", ("x", "y")), "z", "a is 'z', supported: x, y"),
        (lambda c: c.choice("a", ("x", "y")), 0, "a is 0, expected a string"),
        (lambda c: c.group("a"), [1], "a: expected a JSON object"),
        (lambda c: c.group("a"), False, "a: expected a JSON object"),
    ]
    for read, value, message in cases:
        with case(read, value, message):
            assert refusal(read, a=value) == message


def test_the_one_value_supported_or_none_at_all_is_accepted() -> None:
    cases = [(False, False), (1, 1), (1, 1.0), (0.5, 0.5), ("silu", "silu"), (None, None), (2, None)]
    for expected, value in cases:
        with case(expected, value):
            for given in (config(a=value), config()):
                given.only(a=expected)
                given.refuse_unread()


def test_another_spelling_of_a_value_is_read_as_the_usual_one() -> None:
    for value, read in (("swish", "silu"), ("silu", "silu"), ("gelu", "gelu"), (None, "none")):
        with case(value):
            given = config(a=value)
            given.respell("a", "swish", "silu")
            assert given.text("a", "none") == read


def test_any_other_value_is_refused_and_true_is_no_1() -> None:
    cases = [
        (False, True),
        (False, 0),
        (True, 1),
        (1, True),
        (0, False),
        (1, 2),
        (None, False),
        (None, 8.0),
        ("silu", "gelu"),
    ]
    for expected, value in cases:
        with case(expected, value):
            message = f"a is {value!r}; only {expected!r} is supported"
            assert refusal(lambda c: c.only(a=expected), a=value) == message


def test_the_spelling_that_is_there_is_found_and_both_count_as_read() -> None:
    cases = [
        ({"a": 1}, "a"),
        ({"b": 1}, "b"),
        ({"a": 1, "b": 1}, "a"),
        ({"a": None, "b": 1}, "b"),
        ({}, "a"),
        ({"a": 0}, "a"),
    ]
    for values, key in cases:
        with case(values, key):
            given = config(**values)
            assert given.either("a", "b") == key
            given.refuse_unread()


def test_two_spellings_that_differ_are_refused() -> None:
    message = "a is 1, b is 2; these keys must be equal"
    assert refusal(lambda c: c.either("a", "b"), a=1, b=2) == message
    assert refusal(lambda c: c.either("x", "a", "b"), a=1, b=2) == message


def test_a_key_nobody_read_is_refused_unless_it_is_null_ignored_or_bookkeeping() -> None:
    given = config(read=1, passed=1, none=None, ignored=1, torch_dtype="bfloat16")
    given.whole("read")
    given.ignore("passed")
    given.refuse_unread(frozenset({"ignored"}))
    message = "key 'ignored' (1) is unknown for this family and may change the arithmetic"
    assert refusal(lambda c: c.refuse_unread(), none=None, ignored=1) == message


def test_a_key_that_must_be_there_may_be_null() -> None:
    config(a=None).require("a")
    assert refusal(lambda c: c.require("a")) == "key 'a' is missing, expected a value or null"


def test_a_group_keeps_its_own_account_and_names_itself() -> None:
    given = config(inner={"x": 1, "y": 2})
    inner = given.group("inner")
    assert inner is not None and inner.whole("x") == 1
    given.refuse_unread()
    with pytest.raises(CheckpointError) as refused:
        inner.refuse_unread()
    assert (
        str(refused.value) == "config.json: inner: key 'y' (2) is unknown for this family and may change the arithmetic"
    )
    assert config().group("inner") is None and config(inner=None).group("inner") is None


# --- what families share


def test_layers_with_experts_come_after_the_first_dense_ones() -> None:
    cases = [
        ({}, (1, 2, 3)),
        ({"first_k_dense_replace": None}, (1, 2, 3)),
        ({"first_k_dense_replace": 0}, (0, 1, 2, 3)),
        ({"first_k_dense_replace": 3}, (3,)),
        ({"first_k_dense_replace": 9}, ()),
    ]
    for values, layers in cases:
        with case(values, layers):
            assert layers_after_dense(config(num_hidden_layers=4, **values), default=1) == layers


def test_layers_with_experts_come_at_every_step_but_those_named() -> None:
    cases = [
        ({}, (0, 1, 2, 3, 4)),
        ({"decoder_sparse_step": 2}, (1, 3)),
        ({"mlp_only_layers": [0, 4, 7]}, (1, 2, 3)),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [3]}, (1,)),
        ({"decoder_sparse_step": 6}, ()),
    ]
    for values, layers in cases:
        with case(values, layers):
            assert layers_by_step(config(num_hidden_layers=5, **values)) == layers


@pytest.mark.parametrize(
    ("values", "window"),
    [({}, None), ({"use_sliding_window": False}, None), ({"use_sliding_window": True}, 4096)],
)
def test_a_window_counts_only_where_the_config_uses_it(values: Values, window: int | None) -> None:
    given = config(sliding_window=4096, max_window_layers=28, **values)
    assert window_if_used(given) == window
    given.refuse_unread()


def test_biases_are_all_projections_or_those_the_family_names() -> None:
    assert attention_bias(config()) == attention_bias(config(attention_bias=False)) == ()
    assert attention_bias(config(attention_bias=True)) == ("q", "k", "v", "o")
    assert attention_bias(config(attention_bias=True), ("q", "k", "v")) == ("q", "k", "v")


HEADS = {"hidden_size": 64, "num_attention_heads": 4}


def test_heads_share_the_hidden_size_unless_they_have_a_size_of_their_own() -> None:
    assert read_grouped_query(config(**HEADS, num_key_value_heads=2)).head_dim == 16
    own = read_grouped_query(config(**HEADS, num_key_value_heads=2, head_dim=64))
    assert (own.head_dim, own.num_heads, own.num_kv_heads, own.scale) == (64, 4, 2, 0.125)
    assert read_grouped_query(config(**HEADS, num_key_value_heads=2), scale=0.5).scale == 0.5


def test_missing_key_heads_are_each_head_s_own_only_in_families_that_say_so() -> None:
    assert read_grouped_query(config(**HEADS), own_keys=True).num_kv_heads == 4
    message = "key 'num_key_value_heads' is missing, expected a whole number"
    assert refusal(read_grouped_query, **HEADS) == message


# --- rotary positions

POSITIONS = {"max_position_embeddings": 4096}
YARN = {"factor": 4.0, "original_max_position_embeddings": 1024}
LONG = {"short_factor": [1, 1.5], "long_factor": [2.0, 4.0]}
MSCALES = {"short_mscale": 1.1, "long_mscale": 1.25}
BANDS = {"factor": 8.0, "low_freq_factor": 1, "high_freq_factor": 4.0, "original_max_position_embeddings": 1024}
LONGER = math.sqrt(1 + math.log(64) / math.log(64))  # longrope's own factor for 64 times 64 positions
TURNS = 0.1 * math.log(4) + 1  # yarn's own factor for cosine and sine at a factor of 4


def read_any_rope(given: Config, **defaults: Any) -> RopeSpec:
    """The rotary positions of heads of 32 values, in a family that has every scaling of transformers."""
    return read_rope(given, 32, **defaults)


def rope_of(values: Values, **defaults: Any) -> RopeSpec:
    """The rotary positions of a config, every key of which must have been read."""
    given = config(**(POSITIONS | values))
    rope = read_any_rope(given, **defaults)
    given.ignore("max_position_embeddings")
    given.refuse_unread()
    return rope


def yarn_of(scaling: Values) -> YarnSpec:
    yarn = rope_of({"rope_scaling": {"rope_type": "yarn"} | scaling}).scaling
    assert isinstance(yarn, YarnSpec)
    return yarn


def test_spellings_of_transformers_4_and_5_give_the_same_positions() -> None:
    cases = [
        ({"rope_theta": 5e5}, {"rope_type": "default", "rope_theta": 500_000}, RopeSpec(5e5, 32, False, None)),
        ({"rope_theta": 5e5, "rope_scaling": None}, {"rope_theta": 5e5}, RopeSpec(5e5, 32, False, None)),
        ({"partial_rotary_factor": 1.0, "rope_theta": 1e4},
         {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1}, RopeSpec(1e4, 32, False, None)),
        ({"rope_theta": 1e6, "rope_scaling": {"type": "yarn"} | YARN},
         {"rope_type": "yarn", "rope_theta": 1e6} | YARN,
         RopeSpec(1e6, 32, False, YarnSpec("yarn", 4.0, 1024, 32.0, 1.0, TURNS, truncate=True))),
        ({"rope_theta": 1e6, "rope_scaling": {"type": "longrope"} | LONG, "original_max_position_embeddings": 64},
         {"rope_type": "longrope", "rope_theta": 1e6, "original_max_position_embeddings": 64} | LONG,
         RopeSpec(1e6, 32, False, LongRopeSpec("longrope", 64, (1.0, 1.5), (2.0, 4.0), LONGER, LONGER))),
        ({"rope_scaling": {"type": "longrope", "factor": 1, "original_max_position_embeddings": 64} | LONG},
         {"rope_type": "longrope", "attention_factor": 1.0, "original_max_position_embeddings": 64} | LONG,
         RopeSpec(1e4, 32, False, LongRopeSpec("longrope", 64, (1.0, 1.5), (2.0, 4.0), 1.0, 1.0))),
        ({"rope_scaling": {"type": "linear", "factor": 4}}, {"rope_type": "linear", "factor": 4.0},
         RopeSpec(1e4, 32, False, LinearSpec("linear", 4.0))),
        ({"rope_scaling": {"type": "dynamic", "factor": 2, "original_max_position_embeddings": 1024}},
         {"rope_type": "dynamic", "factor": 2.0},
         RopeSpec(1e4, 32, False, DynamicSpec("dynamic", 2.0, 4096))),
        ({"rope_theta": 5e5, "rope_scaling": {"type": "llama3", "rope_type": "llama3"} | BANDS},
         {"rope_type": "llama3", "rope_theta": 5e5} | BANDS,
         RopeSpec(5e5, 32, False, Llama3Spec("llama3", 8.0, 1.0, 4.0, 1024))),
        ({"partial_rotary_factor": 0.25, "rope_scaling": {"type": "proportional"}},
         {"rope_type": "proportional", "partial_rotary_factor": 0.25, "factor": 1.0},
         RopeSpec(1e4, 32, False, ProportionalSpec("proportional", 4, 1.0))),
        ({"rope_scaling": {"type": "yarn", "factor": None, "original_max_position_embeddings": 1024}},
         {"rope_type": "yarn"} | YARN,
         RopeSpec(1e4, 32, False, YarnSpec("yarn", 4.0, 1024, 32.0, 1.0, TURNS, truncate=True))),
    ]  # fmt: skip
    for four, five, rope in cases:
        with case(four, five, rope):
            assert rope_of(four) == rope_of({"rope_parameters": five}) == rope


def test_what_the_config_leaves_open_is_the_family_s() -> None:
    family: Values = {"default_theta": 2e5, "interleaved": True, "partial_rotary_factor": 0.5}
    assert rope_of({}) == RopeSpec(1e4, 32, False, None)
    assert rope_of({}, **family) == rope_of({"rope_scaling": {}}, **family) == RopeSpec(2e5, 16, True, None)
    four, five = {"rope_theta": 3e5, "partial_rotary_factor": 0.25}, {"rope_theta": 3e5, "partial_rotary_factor": 0.25}
    assert rope_of(four, **family) == rope_of({"rope_parameters": five}, **family) == RopeSpec(3e5, 8, True, None)


def test_part_of_a_head_is_turned_only_in_families_that_do_so() -> None:
    for factor in [0.5, 0.999, 2.0, 0, -1, 1e30]:
        with case(factor):
            message = f"partial_rotary_factor is {float(factor)}; only 1.0 is supported"
            assert refusal(read_any_rope, partial_rotary_factor=factor) == message
            assert refusal(read_any_rope, rope_parameters={"partial_rotary_factor": factor}) == message


def test_the_same_value_in_the_group_and_beside_it_is_one() -> None:
    inner = {"rope_type": "longrope", "rope_theta": 1e6, "original_max_position_embeddings": 64} | LONG
    twice = {"rope_theta": 1_000_000, "original_max_position_embeddings": 64, "rope_parameters": inner}
    assert rope_of(twice) == rope_of({"rope_parameters": inner})
    kinds = {"rope_type": "yarn", "type": "yarn"} | YARN
    assert rope_of({"rope_scaling": kinds}) == rope_of({"rope_parameters": {"rope_type": "yarn"} | YARN})


def test_the_original_context_is_all_positions_where_nothing_says_otherwise() -> None:
    assert yarn_of({"factor": 4.0}).original_max_position_embeddings == 4096
    assert yarn_of(YARN).original_max_position_embeddings == 1024


def test_yarn_s_factor_of_cosine_and_sine_is_given_or_follows() -> None:
    cases = [
        ({}, TURNS),
        ({"factor": 1.0}, 1.0),
        ({"factor": 0.5}, 1.0),
        ({"factor": 1.5}, 0.1 * math.log(1.5) + 1),
        ({"mscale": 1}, TURNS),
        ({"mscale": 1, "mscale_all_dim": 0}, TURNS),
        ({"mscale": 0, "mscale_all_dim": 0}, TURNS),
        ({"attention_factor": 1.5}, 1.5),
        ({"attention_factor": 1.5, "mscale": 0.5, "mscale_all_dim": 0.25}, 1.5),
        ({"mscale": 0.5, "mscale_all_dim": 0.25}, (0.05 * math.log(4) + 1) / (0.025 * math.log(4) + 1)),
        ({"mscale": 0.707, "mscale_all_dim": 0.707}, 1.0),
    ]
    for scaling, attention_factor in cases:
        with case(scaling, attention_factor):
            assert yarn_of(YARN | scaling).attention_factor == pytest.approx(attention_factor, rel=1e-15)


def test_one_mscale_without_the_other_or_out_of_range_is_refused() -> None:
    cases = [(0.5, 0), (0.5, None), (0, 0.5), (None, 0.5), (0, 1), (1, -1), (-1, 1), (1e6, 1), (1, 1e6)]
    for mscale, all_dim in cases:
        with case(mscale, all_dim):
            scaling = {"rope_type": "yarn", "mscale": mscale, "mscale_all_dim": all_dim} | YARN
            assert refusal(read_any_rope, **POSITIONS, rope_scaling=scaling) == (
                f"rope_scaling: mscale is {float(mscale or 0)} and mscale_all_dim is {float(all_dim or 0)}; "
                "both must be above 0, or neither"
            )


def test_yarn_s_bounds_are_read() -> None:
    yarn = yarn_of(YARN | {"beta_fast": 16, "beta_slow": 2, "truncate": False})
    assert (yarn.beta_fast, yarn.beta_slow, yarn.truncate) == (16.0, 2.0, False)


def test_yarn_scales_attention_by_the_square_of_its_mscale_for_all_dimensions() -> None:
    scaled = config(rope_scaling={"type": "yarn", "mscale_all_dim": 0.707} | YARN)
    assert yarn_scale(scaled) == pytest.approx((0.0707 * math.log(4) + 1) ** 2, rel=1e-15)
    for values in ({}, {"rope_scaling": {"type": "yarn"} | YARN}, {"rope_parameters": {"rope_type": "default"}}):
        assert yarn_scale(config(**values)) == 1.0


KINDS = "rope_type {!r} is not supported; supported: {}"


def test_a_scaling_we_do_not_implement_is_refused_by_its_name() -> None:
    for kind in ["ntk", "su", "axial", "YARN", ""]:
        for group, key in [("rope_scaling", "type"), ("rope_parameters", "rope_type")]:
            with case(kind, group, key):
                assert refusal(read_any_rope, **{group: {key: kind, "factor": 2.0}}) == KINDS.format(
                    kind, "default, linear, dynamic, yarn, longrope, llama3, proportional"
                )


def test_a_scaling_that_only_other_families_have_is_refused_by_its_name() -> None:
    longrope, yarn = ({"rope_type": "longrope"} | LONG, {"rope_type": "yarn"} | YARN)
    message = KINDS.format("longrope", "default, yarn")
    assert refusal(lambda c: read_rope(c, 32, scalings=("yarn",)), **POSITIONS, rope_scaling=longrope) == message
    message = KINDS.format("yarn", "default, longrope")
    assert refusal(lambda c: read_rope(c, 32, scalings=("mscales",)), **POSITIONS, rope_scaling=yarn) == message
    assert rope_of({"rope_scaling": yarn}, scalings=("yarn",)) == rope_of({"rope_scaling": yarn})
    for kind in ("mscales", "ntk_alpha"):  # names of ours, which no config has
        message = KINDS.format(kind, "default, longrope, dynamic with an alpha")
        given = {"rope_scaling": {"type": kind, "factor": 2.0}}
        assert refusal(lambda c: read_rope(c, 32, scalings=("mscales", "ntk_alpha")), **given) == message
    given = {"rope_scaling": {"type": "dynamic", "factor": 2.0}}
    message = KINDS.format("dynamic", "default, dynamic with an alpha")
    assert refusal(lambda c: read_rope(c, 32, scalings=("ntk_alpha",)), **given) == message


def test_longrope_has_two_factors_of_cosine_and_sine_only_in_the_family_that_has_them() -> None:
    scaling: Values = {"rope_type": "longrope", "original_max_position_embeddings": 64} | LONG
    found = rope_of({"rope_parameters": scaling | MSCALES}, scalings=("mscales",)).scaling
    assert found == LongRopeSpec("longrope", 64, (1.0, 1.5), (2.0, 4.0), 1.1, 1.25)
    unknown = "rope_parameters: key 'short_mscale' (1.1) is unknown for this family and may change the arithmetic"
    assert refusal(read_any_rope, **POSITIONS, rope_parameters=scaling | MSCALES) == unknown


def test_a_group_with_a_key_unread_missing_or_of_another_type_is_refused() -> None:
    cases = [
        ({"rope_theta": 1e4, "factor": 2.0},
        "key 'factor' (2.0) is unknown for this family and may change the "
        "arithmetic"),
        ({"rope_type": "yarn", "low_freq_factor": 1.0} | YARN,
         "key 'low_freq_factor' (1.0) is unknown for this family and may change the arithmetic"),
        ({"rope_type": "linear", "factor": 4.0, "original_max_position_embeddings": 1024},
         "key 'original_max_position_embeddings' (1024) is unknown for this family and may change the arithmetic"),
        ({"rope_type": "linear"}, "key 'factor' is missing, expected a number"),
        ({"rope_type": "dynamic", "factor": None}, "key 'factor' is missing, expected a number"),
        ({"rope_type": "dynamic", "factor": 2.0, "alpha": 1000.0},
         "key 'alpha' (1000.0) is unknown for this family and may change the arithmetic"),
        ({"rope_type": "llama3"} | BANDS | {"low_freq_factor": None},
         "key 'low_freq_factor' is missing, expected a number"),
        ({"rope_type": "longrope", "original_max_position_embeddings": 1} | LONG,
         "original_max_position_embeddings is 1, expected more"),
        ({"full_attention": {"rope_theta": 1e4}},
         "key 'full_attention' ({'rope_theta': 10000.0}) is unknown for this family and may change the arithmetic"),
        ({"rope_type": "yarn"}, "key 'factor' is missing, expected a value or null"),
        ({"rope_type": "yarn", "truncate": 1} | YARN, "truncate is 1, expected true or false"),
        ({"rope_type": "yarn"} | YARN | {"original_max_position_embeddings": 1024.0},
         "original_max_position_embeddings is 1024.0, expected a whole number"),
        ({"rope_type": "longrope"} | LONG | {"short_factor": [1, "2"]},
         "short_factor is [1, '2'], expected a list of numbers"),
        ({"rope_type": "yarn", "type": "longrope"},
        "rope_type is 'yarn', type is 'longrope'; these keys must be "
        "equal"),
        ({"rope_theta": "1e4"}, "rope_theta is '1e4', expected a number"),
    ]  # fmt: skip
    for group, message in cases:
        with case(group, message):
            assert refusal(read_any_rope, **POSITIONS, rope_parameters=group) == f"rope_parameters: {message}"


def test_values_that_contradict_each_other_are_refused() -> None:
    cases = [
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e3}},
         "rope_theta is 10000.0; only 5000.0 is supported"),
        ({"partial_rotary_factor": 1.0, "rope_parameters": {"partial_rotary_factor": 0.5}},
         "partial_rotary_factor is 1.0; only 0.5 is supported"),
        ({"original_max_position_embeddings": 2048, "rope_scaling": {"type": "yarn"} | YARN},
         "original_max_position_embeddings is 2048; only 1024 is supported"),
        ({"rope_scaling": {"type": "default"}, "rope_parameters": {"rope_type": "default"}},
         "rope_parameters is {'rope_type': 'default'}, rope_scaling is {'type': 'default'}; these keys must be equal"),
    ]  # fmt: skip
    for values, message in cases:
        with case(values, message):
            assert refusal(read_any_rope, **POSITIONS, **values) == message


@pytest.mark.parametrize("number", [10**400, 1e300, -1e38])
def test_a_number_that_float32_cannot_hold_is_refused_in_a_short_line(number: float) -> None:
    line = refusal(lambda held: held.number("eps"), eps=number)
    assert line.startswith("eps is ") and line.endswith(", expected a magnitude below 1e+38")
    assert len(line) < 150
    assert config(eps=1e37).number("eps") == 1e37
