"""Every model type with experts in the installed transformers is a family or has a reason, and the page counts them."""

import pytest
from support import expert_types
from support.expert_types import (
    PAGE,
    REASONS,
    WRITER,
    Reason,
    count_line,
    faults,
    found,
    in_group,
    library,
    parts,
    supported,
    unfound_folders,
    with_generated,
)

from moe_pack.formats import CheckpointError
from moe_pack.formats.families.family import Config
from moe_pack.formats.families.registry import read_spec


def test_every_type_is_a_family_or_has_a_reason() -> None:
    assert faults() == []


def test_types_are_found_in_configs_of_all_forms() -> None:
    cases = [
        ("a field", "mixtral"),
        ("in a part without a type", "dbrx"),
        ("in a part of the same folder", "qwen3_omni_moe"),
        ("in a part of another folder", "kimi_k25"),
        ("a key that is another's name", "hunyuan_v1_moe"),
        ("a part that is published alone", "step3p5"),
    ]
    for form, model_type in cases:
        assert model_type in found(), form
    for part in ("qwen3_vl_moe_text", "qwen3_omni_moe_thinker", "vitpose_backbone"):
        assert part in parts() and part not in found()
    for dense in ("llama", "gemma4_assistant", "mistral3", "granite_docling"):
        assert dense not in found()
    assert unfound_folders() == set()


def test_the_groups_and_the_families_are_all_types() -> None:
    groups = (in_group("not a text decoder"), in_group("text decoder, not yet"))
    assert len(supported()) + sum(map(len, groups)) == len(found())


def test_a_type_with_a_reason_is_refused_by_name() -> None:
    for reason in REASONS:
        with pytest.raises(CheckpointError, match=f"architecture '{reason.model_type}' is not supported"):
            read_spec(Config({"model_type": reason.model_type, "num_experts": 8}, "config.json"))


def test_contradictions_are_named_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, *others = REASONS
    wrong = (second, second, *others, Reason("mixtral", "", ""), Reason("no_model", "", ""))
    monkeypatch.setattr(expert_types, "REASONS", wrong)
    here = "REASONS in tests/support/expert_types.py"
    assert faults() == [
        f"mixtral: is supported now; remove its reason from {here}",
        f"{second.model_type}: has two reasons in {here}",
        f"no_model: has a reason, but no experts in transformers {library()}; remove it from {here}",
        f"{first.model_type}: has experts, but is no family and has no reason; add one to {here}",
    ]


def test_the_page_has_the_count_and_the_reasons() -> None:
    page = PAGE.read_text("utf-8")
    assert count_line() in " ".join(page.split())
    assert page == with_generated(page), f"run {WRITER}"
