"""A model by its name or its `config.json` alone: what its spec is, without any weights."""

from pathlib import Path
from typing import Any

from moe_pack.formats.checkpoint import read_json
from moe_pack.formats.errors import CheckpointError
from moe_pack.formats.families import SHORT_NAMES, Config, published_config, published_names, read_spec
from moe_pack.formats.spec import ModelSpec


def model_spec(source: str, num_layers: int | None = None, vocab_size: int | None = None) -> ModelSpec:
    """The spec of the model that `source` names, cut to its first layers and tokens where that is asked for.

    Args:    source: a `config.json`, a folder that has one, or the name of a published model; files come first.
             num_layers: of the decoder.   vocab_size: tokens that embedding and head keep.
    Raises:  CheckpointError for an unknown name, a config that we cannot read, or more layers or tokens than there are.
    """
    values, place = _config(source)
    if isinstance(values, dict):
        _cut(values, "num_hidden_layers", num_layers, f"--layers: found {num_layers}")
        _cut(values, "vocab_size", vocab_size, f"--vocab: found {vocab_size}")
        kinds = values.get("layer_types")
        if num_layers is not None and isinstance(kinds, list):
            values["layer_types"] = kinds[:num_layers]
    try:
        return read_spec(Config(values, place))[1]
    except CheckpointError as fault:
        if num_layers is None:
            raise
        raise CheckpointError(f"{fault} (with --layers {num_layers}; its first layers may have no experts)") from fault


def _cut(values: dict[str, Any], key: str, wanted: int | None, found: str) -> None:
    if wanted is None:
        return
    held = values.get(key)
    if type(held) is int and not 0 < wanted <= held:
        raise CheckpointError(f"{found}, this model's {key} is {held}; give a number from 1 to that")
    values[key] = wanted


def _config(source: str) -> tuple[Any, str]:
    """The values of a config, and where they are from."""
    path = Path(source)
    if path.is_dir():
        return read_json(path, "config.json"), "config.json"
    if path.exists():
        return read_json(path.parent, path.name), path.name
    names = published_names()
    hub_id = SHORT_NAMES.get(source.lower())
    name = next((name for name in names if name == source.lower() or SHORT_NAMES[name] == hub_id), None)
    if name is None:
        raise CheckpointError(
            f"{source}: no such file or folder, nor a model whose dimensions are known ({', '.join(names)})"
        )
    return published_config(name), f"{name}'s config.json"
