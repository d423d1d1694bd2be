"""Plans: what a model's rows can hold, and what no plan can ask of it."""

import dataclasses

import pytest
from support.cases import assert_each, case, line_of
from support.specs import GROUPED

from moe_pack.formats import (
    BF16,
    ExpertFormat,
    ExpertSpec,
    ModelSpec,
    PartFormat,
    Plan,
    PlanError,
    RouterSpec,
    dense_roles,
    part_format,
    uniform_plan,
)
from moe_pack.formats.pack.layouts import pack_layout
from moe_pack.formats.pack.plans import KEPT, format_fault, format_text

# Two layers of three experts.
SPEC = dataclasses.replace(
    GROUPED,
    num_hidden_layers=2,
    dense_intermediate_size=None,
    router=RouterSpec("softmax_topk", 3, 2, normalize=True),
    shared_expert=None,
)
FOUR = part_format(4, 32)
PLAN = uniform_plan(SPEC, "up", FOUR, BF16)


def refusal(plan: Plan, spec: ModelSpec = SPEC) -> str:
    return line_of(PlanError, lambda: pack_layout(spec, plan, ["BF16"] * len(dense_roles(spec))))


def test_a_uniform_plan_stores_selector_and_records_as_asked() -> None:
    assert PLAN.experts == ((ExpertFormat(gate=BF16, up=FOUR, down=BF16),) * 3,) * 2
    assert len(pack_layout(SPEC, PLAN, ["BF16"] * len(dense_roles(SPEC))).experts) == 2


def test_every_expert_may_have_formats_of_its_own() -> None:
    other = ExpertFormat(part_format(2, 16), part_format(3, 0, 8), part_format(8, 64))
    mixed = dataclasses.replace(PLAN, experts=((PLAN.experts[0][0], other, other), PLAN.experts[1]))
    layout = pack_layout(SPEC, mixed, ["BF16"] * len(dense_roles(SPEC)))
    # Up in 3 bit with one pair of byte scales: 24 + 2 * 3 + 4 bytes, padded to 48.
    assert [expert.selector.row_bytes for expert in layout.experts[0] if expert.selector] == [48, 48, 48]
    # Gate in 2 bit with 4 groups and down in 8 bit with one: 16 + 16 + 64 + 4 + 4 bytes, padded to 112.
    assert [expert.records.row_bytes for expert in layout.experts[0]] == [272, 112, 112]


def test_a_plan_for_another_model_is_refused() -> None:
    cases = [
        ({"experts": PLAN.experts[:1]}, "plan: 1 layers planned, but the model has 2 with experts"),
        ({"experts": (PLAN.experts[0], PLAN.experts[1][:2])}, "plan: layer 1: 2 experts planned, but the model has 3"),
        ({"experts": (PLAN.experts[0], (ExpertFormat(None, FOUR, FOUR),) * 3)},
         "plan: layer 1 expert 0: format of gate does not fit the model's matrices"),
        ({"experts": (PLAN.experts[0], (ExpertFormat(FOUR, FOUR, part_format(4, 128)),) * 3)},
         "plan: layer 1 expert 0 down: group size 128 does not divide rows of 64 values"),
        ({"dense": (part_format(5, 64), *PLAN.dense[1:])},
         "plan: dense embed: width 5, expected one of 1, 2, 3, 4, 8 (or 16 for bf16)"),
        ({"dense": PLAN.dense[1:]},
         f"plan: formats given for {len(PLAN.dense) - 1} dense tensors, but the model has {len(PLAN.dense)}"),
        ({"dense": (None, part_format(8, 64), *PLAN.dense[2:])},
         "plan: dense layers.0.attention_norm: must not be quantized"),
    ]  # fmt: skip
    assert_each(cases, lambda change: refusal(dataclasses.replace(PLAN, **change)))


def test_a_format_that_no_codec_has_is_refused() -> None:
    cases = [
        (PartFormat("affine", 4, 24, 16), "group size 24, expected one of 16, 32, 64, 128 or row"),
        (PartFormat("affine", 4, 64, 12), "scales of 12 bits, expected 8 or 16"),
        (PartFormat("bf16", 8, 0, 16), "bf16 has width 16 and no groups, found width 8, group 0"),
        (PartFormat("fp8", 8, 64, 32), "fp8 has width 8 and groups of 128, found width 8, group 64"),
        (PartFormat("fp8", 4, 128, 32), "fp8 has width 8 and groups of 128, found width 4, group 128"),
        (PartFormat("fp8", 8, 128, 16), "fp8 has scales of 32 bits, found 16"),
        (PartFormat("e5m2", 8, 128, 8), "e5m2 has width 8 and no groups, found width 8, group 128"),
        (PartFormat("e5m2", 8, 0, 16), "e5m2 has scales of 8 bits, found 16"),
        (PartFormat("mxfp4", 4, 16, 8), "mxfp4 has width 4 and groups of 32, found width 4, group 16"),
        (PartFormat("mxfp4", 8, 32, 8), "mxfp4 has width 4 and groups of 32, found width 8, group 32"),
        (PartFormat("mxfp4", 4, 32, 16), "mxfp4 has scales of 8 bits, found 16"),
        (PartFormat("affine", 16, 64, 16), "width 16, expected one of 1, 2, 3, 4, 8 (or 16 for bf16)"),
    ]

    def found(part: PartFormat) -> str:
        return line_of(PlanError, lambda: uniform_plan(SPEC, "up", FOUR, part))

    assert_each(cases, found, "--record-bits/--group-size: ")


def test_experts_without_gate_have_no_gate_selector() -> None:
    two = dataclasses.replace(SPEC, expert=ExpertSpec("silu", 48, ("up", "down"), (), 0))
    assert uniform_plan(two, "up", FOUR, FOUR).experts[0][0].gate is None
    with pytest.raises(PlanError, match=r"^--selector both: this model's experts have no gate matrix; use up or none$"):
        uniform_plan(two, "both", FOUR, FOUR)


def test_formats_are_named_as_tables_show_them() -> None:
    formats = (BF16, part_format(4, 64), part_format(2, 0, 8), *KEPT)
    names = ["bf16", "4 bit g64", "2 bit row, byte scales", "fp8", "e5m2", "mxfp4"]
    assert [format_text(part) for part in formats] == names


def test_codecs_of_sources_take_rows_of_whole_blocks() -> None:
    for part in KEPT:
        with case(part):
            assert [format_fault(part, num_cols) for num_cols in (64, 192, 2880)] == [None] * 3
            assert format_fault(part, 96) == "rows of 96 values, expected a multiple of 64"


def test_bytes_of_a_row_are_those_of_codes_and_scales() -> None:
    sizes = {part.codec: [part.part_bytes(n) for n in (64, 128, 192, 2880)] for part in KEPT}
    assert sizes == {
        "fp8": [64 + 4, 128 + 4, 192 + 8, 2880 + 4 * 23],
        "e5m2": [65, 129, 193, 2881],
        "mxfp4": [32 + 2, 64 + 4, 96 + 6, 1440 + 90],
    }
