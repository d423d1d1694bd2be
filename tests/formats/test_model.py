"""A model by name or config.json alone: its spec, cut where that is asked for."""

import json
import re
from dataclasses import fields, is_dataclass, replace
from pathlib import Path

import pytest
from support.cases import case
from support.models import DEMO_MODEL, TinyMixtral
from support.published import PUBLISHED, spec_of

from moe_pack.formats import CheckpointError, ModelSpec
from moe_pack.formats.families import Checkpoint, model_spec, short_names
from moe_pack.formats.families.published import published_config, published_names
from moe_pack.formats.parts import GroupedQuerySpec


def test_every_published_model_is_known_by_its_name_to_convert_too() -> None:
    assert set(published_names()) == {model.name for model in PUBLISHED} <= set(short_names())
    for model in PUBLISHED:
        assert model_spec(model.name) == spec_of(model)


def test_a_name_may_be_another_one_of_the_same_checkpoint_in_any_case() -> None:
    assert model_spec("mixtral") == model_spec("Mixtral-8x7B") == model_spec("mixtral-8x7b")
    assert model_spec("granite-1b-a400m") == model_spec("granite-3.0-1b-a400m")


def test_a_folder_or_a_file_is_read_before_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = Checkpoint(DEMO_MODEL)
    checkpoint.close()
    assert model_spec(str(DEMO_MODEL)) == model_spec(str(DEMO_MODEL / "config.json")) == checkpoint.spec
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mixtral-8x7b").symlink_to(DEMO_MODEL)
    assert model_spec("mixtral-8x7b") == checkpoint.spec


def test_the_first_layers_have_the_windows_that_they_had() -> None:
    attention = model_spec("gpt-oss-20b", num_layers=5).attention
    assert isinstance(attention, GroupedQuerySpec) and attention.windowed_layers == (0, 2, 4)


def below_nine(part: object) -> object:
    """A part of a model as plain values, without later layers in its tuples of layers."""
    if is_dataclass(part) and not isinstance(part, type):
        return {field.name: below_nine(getattr(part, field.name)) for field in fields(part)}
    return tuple(value for value in part if not isinstance(value, int) or value < 9) if type(part) is tuple else part


def test_the_first_layers_of_every_published_decoder_are_those_of_the_whole() -> None:
    for model in PUBLISHED:
        whole = spec_of(model)
        if whole.encoder is None:
            with case(model.name):
                cut = model_spec(model.name, 9)
                assert cut.moe_layers == tuple(layer for layer in whole.moe_layers if layer < 9)
                for layer in range(8):  # the last of Gemma 4 is never one with a window
                    for part in (ModelSpec.attention_of, ModelSpec.rope_of, ModelSpec.mixer_of):
                        assert below_nine(part(cut, layer)) == below_nine(part(whole, layer))


def test_layers_of_a_model_with_an_encoder_are_all_needed() -> None:
    with pytest.raises(CheckpointError, match=r"^--layers does not support models with an encoder"):
        model_spec("switch-base-16", 3)


def test_the_first_layers_and_tokens_alone_leave_all_else_as_it_was() -> None:
    whole = model_spec("mixtral-8x7b")
    assert model_spec("mixtral-8x7b", 5, 1000) == replace(
        whole, num_hidden_layers=5, moe_layers=(0, 1, 2, 3, 4), vocab_size=1000
    )
    assert model_spec("mixtral-8x7b", 32, 32000) == whole
    cut = model_spec("deepseek-v2-lite", 3)
    assert (cut.moe_layers, cut.dense_intermediate_size) == ((1, 2), 10944)


def test_keys_may_have_the_older_names_that_a_family_knows(tmp_path: Path) -> None:
    """The names are those of NVIDIA's published file, which public tests quote."""
    alone = published_config("nemotron-3-nano-30b-a3b")
    whole = {
        "model_type": "NemotronH_Nano_Omni_Reasoning_V3", "max_sequence_length": 131072, "img_context_token_id": 18,
        "video_context_token_id": 131081, "sound_context_token_id": 27, "downsample_ratio": 0.5,
        "projector_hidden_size": 20480, "vit_hidden_size": 1280, "video_pruning_rate": 0.7,
        "vision_config": {"version": "c-radio_v4-h"}, "sound_config": {"model_type": "parakeet"}, "llm_config": alone,
    }  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(whole))
    expected = replace(model_spec("nemotron-3-nano-30b-a3b"), family="NemotronH_Nano_Omni_Reasoning_V3")
    assert model_spec(str(path)) == expected
    assert model_spec(str(path), 9).num_hidden_layers == 9
    path.write_text(json.dumps(whole | {"text_config": alone | {"head_dim": 64}}))
    with pytest.raises(CheckpointError, match=r"text_config is .*, llm_config is .*; these keys must be equal"):
        model_spec(str(path))


REFUSED = [
    (("gpt-4", None, None),
     r"gpt-4: no such file or folder, and no known model has this name; moe-pack synth --list prints all names"),
    (("mixtral", 33, None),
     r"--layers is 33, but this model's num_hidden_layers is 32; give a number from 1 to 32"),
    (("mixtral", None, 32001),
     r"--vocab is 32001, but this model's vocab_size is 32000; give a number from 1 to 32000"),
    (("glm-4.5-air", 1, None), r"glm-4.5-air's config.json: moe_layers .* \(with --layers 1; .*"),
]  # fmt: skip


def test_what_is_no_model_or_not_of_its_size_is_refused_with_what_to_do() -> None:
    for arguments, line in REFUSED:
        with case(arguments):
            with pytest.raises(CheckpointError) as caught:
                model_spec(*arguments)
            assert re.fullmatch(line, str(caught.value))


def test_a_config_that_is_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        model_spec(str(tmp_path))
    path.write_text("[]")
    with pytest.raises(CheckpointError, match=r"config\.json: expected a JSON object"):
        model_spec(str(path), 1, 1)
    path.write_text(json.dumps(TinyMixtral(config={"num_hidden_layers": "2"}).config_json()))
    with pytest.raises(CheckpointError, match="num_hidden_layers is '2', expected a whole number"):
        model_spec(str(path))
