"""Folders with the weights of tiny models, as programs and people leave them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from support.models import Tensors, TinyMixtral

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARDS = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
MODEL, OTHER = TinyMixtral(vocab_size=64), TinyMixtral(vocab_size=64, seed=7)
HEAD, EMBED = "lm_head.weight", "model.embed_tokens.weight"
Change = Callable[[Tensors], object]


def saved(tensors: Tensors, path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, {"format": "pt"})


def configured(folder: Path, **config: Any) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(MODEL.config_json() | config))


def single(folder: Path, model: TinyMixtral = MODEL, change: Change = lambda tensors: None, **config: Any) -> Path:
    configured(folder, **config)
    tensors = model.tensors()
    change(tensors)
    saved(tensors, folder / SINGLE)
    return folder


def sharded(folder: Path, model: TinyMixtral = MODEL) -> Path:
    configured(folder)
    tensors = model.tensors()
    names, shards = sorted(tensors), dict[str, str]()
    for number, shard in enumerate(SHARDS):
        shards |= dict.fromkeys(names[number::3], shard)
        saved({name: tensors[name] for name in names[number::3]}, folder / shard)
    indexed(folder, lambda weight_map: weight_map.update(shards))
    return folder


def indexed(folder: Path, change: Callable[[dict[str, str]], object]) -> None:
    """Changes the map of an index, which is made if there is none."""
    path = folder / INDEX
    index = json.loads(path.read_text()) if path.exists() else {"metadata": {}, "weight_map": {}}
    change(index["weight_map"])
    path.write_text(json.dumps(index))


def with_files(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"not read")
    return folder


def without(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).unlink()
    return folder


def overlaid(folder: Path, overlay: str, stale: float) -> Path:
    """Three files, and one with a tensor that is also in the first one, where it is off by `stale`."""
    sharded(folder)
    name = sorted(MODEL.tensors())[0]
    first = load_file(folder / SHARDS[0])
    saved({name: first[name].clone()}, folder / overlay)
    saved(first | {name: first[name] + stale}, folder / SHARDS[0])
    indexed(folder, lambda weight_map: weight_map.update({name: overlay}))
    return folder


def unnamed(folder: Path) -> Path:
    sharded(folder)
    indexed(folder, lambda weight_map: weight_map.pop("model.norm.weight"))
    return folder


def of_one_file(folder: Path) -> Path:
    indexed(single(folder), lambda weight_map: weight_map.update(dict.fromkeys(MODEL.tensors(), SINGLE)))
    return folder


def twice(tensors: Tensors) -> None:
    tensors[HEAD] = tensors[EMBED].clone()


def head_alone(tensors: Tensors) -> None:
    del tensors[EMBED]


def base_alone(tensors: Tensors) -> None:
    """The names of a model that is saved without its head."""
    del tensors[HEAD]
    prefixed("", "model.")(tensors)


def prefixed(new: str, old: str = "") -> Change:
    """A change of how names begin, of those that begin with `old`."""

    def change(tensors: Tensors) -> None:
        renamed = {new + name.removeprefix(old) if name.startswith(old) else name: tensors[name] for name in tensors}
        tensors.clear()
        tensors.update(renamed)

    return change


def within(old: str, new: str) -> Change:
    def change(tensors: Tensors) -> None:
        renamed = {name.replace(old, new): tensors[name] for name in tensors}
        tensors.clear()
        tensors.update(renamed)

    return change
