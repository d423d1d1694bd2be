"""Text models inside multimodal checkpoints: taken out by name, the other parts accounted for, and never packed."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from support.cases import case
from support.families import Tiny, write
from support.models import pack

from moe_pack.convert.cli.main import main as moe_pack
from moe_pack.formats import CheckpointError, Pack
from moe_pack.formats.families import Checkpoint, model_spec
from moe_pack.formats.pack.manifests import SOURCE_FILE, read_account

FAMILY = "qwen3_vl_moe"
REASON = "the vision part, which a text model does not run"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(Tiny(FAMILY, "whole"), tmp_path_factory.mktemp("source"))


def with_config(source: Path, folder: Path, **changes: Any) -> Path:
    """The checkpoint with other values in its config; None removes a key."""
    folder.mkdir(parents=True, exist_ok=True)
    values = json.loads((source / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({key: value for key, value in values.items() if value is not None}))
    (folder / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes())
    return folder


def text_config(source: Path) -> dict[str, Any]:
    text: dict[str, Any] = json.loads((source / "config.json").read_text())["text_config"]
    return text


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as refused:
        Checkpoint(folder)
    return str(refused.value)


def test_only_the_text_model_is_packed_and_the_rest_is_accounted_for(source: Path, tmp_path: Path) -> None:
    pack(source, tmp_path / "packed", width=16)
    names = {name for name in load_file(source / "model.safetensors") if name.startswith("model.visual.")}
    assert names
    with Pack(tmp_path / "packed") as opened:
        account = read_account(opened.read_file(SOURCE_FILE).tobytes())
        assert opened.manifest.totals.unused == 0
        assert opened.spec.family == FAMILY
    assert {tensor.name for tensor in account.tensors if tensor.fate == "dropped"} == names
    assert {tensor.reason for tensor in account.tensors if tensor.name in names} == {REASON}


def test_inspect_says_what_is_not_run(source: Path, tmp_path: Path) -> None:
    pack(source, tmp_path / "packed", width=16)
    dropped = {name: t for name, t in load_file(source / "model.safetensors").items() if "visual" in name}
    num_bytes = sum(tensor.nbytes for tensor in dropped.values())
    shown = CliRunner().invoke(moe_pack, ["inspect", str(tmp_path / "packed")])
    size = f"{num_bytes / 1024:.1f} KiB"
    assert f"not run: {len(dropped)} tensors, {size}, not in the pack: {REASON}\n" in shown.output
    as_json = json.loads(CliRunner().invoke(moe_pack, ["inspect", str(tmp_path / "packed"), "--json"]).output)
    assert as_json["left_out"] == [
        {"fate": "dropped", "reason": REASON, "num_tensors": len(dropped), "num_bytes": num_bytes}
    ]


def test_both_places_of_the_text_model_are_known(source: Path, tmp_path: Path) -> None:
    with_config(source, tmp_path)
    tensors = load_file(source / "model.safetensors")
    renamed = {}
    for name, tensor in tensors.items():
        name = name.replace("model.language_model.", "language_model.model.").replace("model.visual.", "visual.")
        renamed["language_model.lm_head.weight" if name == "lm_head.weight" else name] = tensor
    save_file(renamed, tmp_path / "model.safetensors")
    moved, first = Checkpoint(tmp_path), Checkpoint(source)
    assert moved.spec == first.spec
    assert len(moved.claims.dropped) == len(first.claims.dropped) > 0
    assert all(place.tensor.startswith("language_model.") for place in moved.claims.experts.values())
    moved.close()
    first.close()


def test_a_tensor_of_no_known_part_is_refused(source: Path, tmp_path: Path) -> None:
    with_config(source, tmp_path)
    tensors = load_file(source / "model.safetensors")
    tensors["model.audio.weight"] = tensors.pop("model.visual.pos_embed.weight")
    save_file(tensors, tmp_path / "model.safetensors")
    assert "tensor 'model.audio.weight' has no role" in refusal(tmp_path)


def test_a_config_is_refused_where_its_text_model_is_not_the_family_s(source: Path, tmp_path: Path) -> None:
    text = text_config(source)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"text_config": None}, "config.json: key 'text_config' is missing, expected the text model's object"),
        ({"text_config": 3}, "config.json: text_config: expected a JSON object"),
        (
            {"text_config": text | {"model_type": "qwen3_moe"}},
            "config.json: text_config: model_type is 'qwen3_moe', supported: qwen3_vl_moe_text, qwen3_vl_moe",
        ),
        (
            {"text_config": text | {"logit_cap": 3.0}},
            "config.json: text_config: key 'logit_cap' (3.0) is unknown for this family and may change the arithmetic",
        ),
        ({"logit_cap": 3.0}, "config.json: key 'logit_cap' (3.0) is unknown for this family and may change the "
                             "arithmetic"),
        ({"model_type": "qwen9_moe"}, "config.json: architecture 'qwen9_moe' is not supported; did you mean "),
    ]  # fmt: skip
    for number, (changes, message) in enumerate(cases):
        with case(changes):
            assert refusal(with_config(source, tmp_path / str(number), **changes)).startswith(message)


def test_the_head_is_tied_as_the_whole_config_says(source: Path, tmp_path: Path) -> None:
    text = text_config(source) | {"tie_word_embeddings": True}
    assert not model_spec(str(with_config(source, tmp_path / "text", text_config=text))).tied_head
    assert model_spec(str(with_config(source, tmp_path / "whole", tie_word_embeddings=True))).tied_head


def test_a_spec_of_fewer_layers_and_tokens_cuts_the_text_model(source: Path) -> None:
    cut = model_spec(str(source), 1, 50)
    assert (cut.num_hidden_layers, cut.vocab_size) == (1, 50)
    assert model_spec(str(source)).num_hidden_layers == 3
