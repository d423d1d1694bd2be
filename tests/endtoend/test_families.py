"""Every family: a tiny random checkpoint gives the original's logits and greedy text through a 16-bit pack."""

import json
import math
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

import families
import pytest
import torch
from families.phimoe import LONGROPE
from support.cases import case
from support.close import CLOSE, Close, refusal
from support.families import (
    CARDS,
    IN_TRANSFORMERS,
    REFERENCES,
    TINY,
    WITH_ENCODER,
    Tiny,
    as_transformers_4,
    briefly_differs,
    compare,
    named,
    original,
    text_values,
    token_ids,
    with_text,
    write,
    write_config,
)

from moe_pack.formats import CheckpointError
from moe_pack.formats.families import Checkpoint
from moe_pack.formats.families.family import Config
from moe_pack.formats.families.registry import families_of, model_types, modules, read_spec

# The project's bound on float32 logits. Sums in another order differ by less than 1e-5 here; logits reach 1 to 10.
TOLERANCE = 1e-4
PAGE = Path(__file__).parents[2] / "docs" / "families.md"


def test_every_family_has_a_card_in_the_file_of_its_module() -> None:
    files = {path.stem for path in Path(families.__file__).parent.glob("*.py")} - {"__init__"}
    assert files == set(modules())
    found = [(name, family) for name in files for family in import_module(f"families.{name}").CARDS]
    assert sorted(family for _, family in found) == sorted(model_types())
    assert all(family in {each.model_type for each in families_of(name)} for name, family in found)
    assert {tiny.family for tiny in TINY} == set(model_types())
    assert {tiny.family for tiny in FEW} == set(CHANGED)


# The families whose layers differ most, in the shape that changes most of their arithmetic; the slow suite has all.
CHANGED = {
    "mixtral": "window of 7",
    "qwen2_moe": "every second layer",
    "deepseek_v2": "groups, query latent, yarn",
    "glm4_moe": "groups, a quarter rotated",
    "gpt_oss": "as it comes",
    "switch_transformers": "capacity exceeded",
}
FEW = [tiny for tiny in TINY if tiny.name == CHANGED.get(tiny.family)]
# The slow suite has each family as it comes, and all shapes of those that need more than a text: an encoder, or
# longrope, which looks at the length of the text so far.
MORE = [
    tiny
    for tiny in TINY
    if tiny not in FEW and (tiny.name == "as it comes" or tiny.family in (*WITH_ENCODER, "phimoe"))
]
BRIEF = [tiny for tiny in TINY if tiny not in (*FEW, *MORE)]


@pytest.mark.parametrize("rows", [FEW, pytest.param(MORE, marks=pytest.mark.slow)], ids=["few", "more"])
def test_a_16_bit_pack_is_the_original_model(rows: list[Tiny], new_folder: Callable[[], Path]) -> None:
    for tiny in rows:
        with case(tiny):
            tmp_path = new_folder()
            found = compare(tiny, tmp_path)
            assert found.largest_logit > 0.5, "logits so small that the bound would prove nothing"
            assert found.prefill < TOLERANCE
            assert found.token_by_token < TOLERANCE
            assert found.greedy_equal


@pytest.mark.slow
def test_a_16_bit_pack_of_any_other_shape_has_the_originals_logits(new_folder: Callable[[], Path]) -> None:
    """`make families` compares all shapes token by token from the first one, and greedy text."""
    for tiny in BRIEF:
        with case(tiny):
            assert briefly_differs(tiny, new_folder()) < TOLERANCE


def test_without_changes_these_configs_are_accepted(new_folder: Callable[[], Path]) -> None:
    for family in model_types():
        with case(family):
            tmp_path = new_folder()
            assert refusal(Close(family, {}, ""), tmp_path) is None


@pytest.mark.parametrize(
    "configs", [CLOSE[::4], pytest.param(CLOSE, marks=pytest.mark.slow)], ids=["every fourth", "all"]
)
def test_a_config_close_to_a_known_one_is_refused_by_name(
    configs: Sequence[Close], new_folder: Callable[[], Path]
) -> None:
    for close in configs:
        with case(close):
            tmp_path = new_folder()
            message = str(refusal(close, tmp_path))
            places = ("config.json: ", "thinker_config: ", "text_config: ", "rope_parameters: ", "full_attention: ")
            for place in places:
                message = message.removeprefix(place)
            assert message == close.message


def test_up_to_the_original_context_transformers_own_longrope_is_the_published_one(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    source = write(Tiny("phimoe", "as it comes"), tmp_path)
    unchanged = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    limit = LONGROPE["original_max_position_embeddings"]
    assert isinstance(limit, int)
    ids = torch.tensor([token_ids()[:limit]])
    with torch.no_grad():
        assert (unchanged(ids).logits - original(source)(ids).logits).abs().max() < 1e-5


@pytest.mark.slow
def test_configs_of_transformers_4_and_5_describe_the_same_model(new_folder: Callable[[], Path]) -> None:
    for family in IN_TRANSFORMERS:
        with case(family):
            tmp_path = new_folder()
            five = Checkpoint(write(Tiny(family, "five"), tmp_path / "five"))
            four = Checkpoint(write(Tiny(family, "four", four=True), tmp_path / "four"))
            five.close()
            four.close()
            written = text_values(json.loads((tmp_path / "four" / "config.json").read_text()))
            is_rotary = ("rope_theta" in written) == (five.spec.rope is not None)
            rope = CARDS[family].rope
            assert "rope_parameters" not in written or rope == "by kind"
            assert is_rotary or rope in ("none", "by kind")
            assert four.spec == five.spec


@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.slow, id="all"), pytest.param(6, id="few")])
def test_a_key_that_is_missing_means_what_it_means_to_transformers(step: int, new_folder: Callable[[], Path]) -> None:
    """Each key is left out in turn: we refuse the config, or read of it what transformers makes of it."""
    from transformers import AutoConfig

    for four in [False, True]:
        for family in IN_TRANSFORMERS[four::step]:
            with case(four, family):
                tmp_path = new_folder()
                whole = write_config(Tiny(family, "whole"), tmp_path)
                text = as_transformers_4(family, text_values(whole)) if four else text_values(whole)
                for key in text.keys() - {"model_type"}:
                    values = with_text(whole, {name: value for name, value in text.items() if name != key})
                    try:
                        ours = read_spec(Config(values, "config.json"))[1]
                    except CheckpointError:
                        continue
                    if "time_step_limit" in text_values(values):  # infinity, which only from_pretrained reads
                        values = with_text(values, text_values(values) | {"time_step_limit": [0.0, math.inf]})
                    theirs = AutoConfig.for_model(**(values | {"model_type": CARDS[family].built_as or family}))
                    theirs.save_pretrained(tmp_path)
                    filled = named(family, tmp_path)
                    assert ours == read_spec(Config(filled, "config.json"))[1], f"without {key}"


@pytest.mark.parametrize("family", REFERENCES)
def test_a_key_that_is_missing_means_what_it_means_to_the_published_class(family: str, tmp_path: Path) -> None:
    whole = write_config(Tiny(family, "whole"), tmp_path)
    read = 0
    for key in whole.keys() - {"model_type"}:
        values = {name: value for name, value in whole.items() if name != key}
        try:
            ours = read_spec(Config(values, "config.json"))[1]
        except CheckpointError:
            continue
        filled = REFERENCES[family].completed(values)
        assert ours == read_spec(Config(filled, "config.json"))[1], f"without {key}"
        read += 1
    assert read > 5, "most keys have a default"
