"""Keys that transformers writes for every model: accepted with their defaults, refused where a change matters."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.cases import case
from support.families import IN_TRANSFORMERS, WITH_ENCODER, Tiny, config_of, text_config, text_values, with_text

from moe_pack.formats import CheckpointError
from moe_pack.formats.families.family import Config
from moe_pack.formats.families.registry import read_spec

# What PretrainedConfig of transformers 4.57 wrote with to_dict, beyond what the installed class writes.
OF_TRANSFORMERS_4: dict[str, Any] = {
    "add_cross_attention": False, "bad_words_ids": None, "begin_suppress_tokens": None,
    "cross_attention_hidden_size": None, "decoder_start_token_id": None, "diversity_penalty": 0.0, "do_sample": False,
    "early_stopping": False, "encoder_no_repeat_ngram_size": 0, "exponential_decay_length_penalty": None,
    "finetuning_task": None, "forced_bos_token_id": None, "forced_eos_token_id": None, "is_decoder": False,
    "length_penalty": 1.0, "max_length": 20, "min_length": 0, "no_repeat_ngram_size": 0, "num_beam_groups": 1,
    "num_beams": 1, "num_return_sequences": 1, "output_attentions": False, "output_scores": False, "prefix": None,
    "pruned_heads": {}, "remove_invalid_values": False, "repetition_penalty": 1.0, "return_dict_in_generate": False,
    "sep_token_id": None, "suppress_tokens": None, "task_specific_params": None, "temperature": 1.0,
    "tf_legacy_loss": False, "tie_encoder_decoder": False, "tokenizer_class": None, "top_k": 50, "top_p": 1.0,
    "torch_dtype": None, "torchscript": False, "typical_p": 1.0, "use_bfloat16": False,
}  # fmt: skip


def of_the_installed_class() -> dict[str, Any]:
    from transformers import GenerationConfig, PreTrainedConfig

    generation: dict[str, Any] = GenerationConfig._get_default_generation_params()
    values: dict[str, Any] = json.loads(json.dumps(PreTrainedConfig().to_dict()))
    return values | generation


@pytest.mark.parametrize("defaults", [of_the_installed_class, lambda: OF_TRANSFORMERS_4], ids=["installed", "4.57"])
def test_every_key_of_the_base_class_is_known(defaults: Callable[[], dict[str, Any]]) -> None:
    values = defaults()
    assert len(values) > 10
    Config(values, "config.json").refuse_unread()


def test_another_value_of_a_key_that_changes_the_model_is_refused() -> None:
    cases = {
        "add_cross_attention": True, "chunk_size_feed_forward": 64, "cross_attention_hidden_size": 32,
        "is_decoder": True, "is_encoder_decoder": True, "pruned_heads": {"0": [1]}, "tie_encoder_decoder": True,
        "tie_word_embeddings": True,  # of no family that asks for it
        "torchscript": True,
    }  # fmt: skip
    for key, value in (*cases.items(), ("is_encoder_decoder", 0)):  # 0 is no false
        with case(key, value):
            with pytest.raises(CheckpointError) as refused:
                Config({key: value}, "config.json").refuse_unread()
            assert str(refused.value).startswith(f"config.json: key {key!r} (")


def whole(family: str, dump: str, extra: dict[str, Any]) -> dict[str, Any]:
    """What `dump` writes of a family's tiny config, with `extra` in each object where the library has it."""
    values = text_config(family, json.loads(json.dumps(getattr(config_of(Tiny(family, dump)), dump)())))
    values["model_type"] = family
    added = extra | values
    return with_text(added, extra | text_values(values)) if text_values(values) is not values else added


def test_whatever_the_library_writes_of_a_family_is_read_as_one_model() -> None:
    for family in IN_TRANSFORMERS:
        kept = {} if family in WITH_ENCODER else OF_TRANSFORMERS_4  # decoder_start_token_id and others are its own
        specs = []
        for dump, extra in (("to_diff_dict", {}), ("to_dict", {}), ("to_dict", kept)):
            with case(family, dump):
                specs.append(read_spec(Config(whole(family, dump, extra), "config.json"))[1])
        assert specs[0] == specs[1] == specs[2], family


def test_a_config_of_to_dict_converts_no_other_model(tmp_path: Path) -> None:
    values = whole("mixtral", "to_dict", {})
    assert values["chunk_size_feed_forward"] == 0, "as it was seen to be refused"
    with pytest.raises(CheckpointError, match="chunk_size_feed_forward"):
        read_spec(Config(values | {"chunk_size_feed_forward": 8}, "config.json"))
