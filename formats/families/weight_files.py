"""The files of a folder that have a model's weights, found by the names of all its files and the index of its shards.

The rule is that of transformers: `model.safetensors` comes before `model.safetensors.index.json`, and other files are
not read. But a folder with two whole models, or with an adapter that is not merged, is refused. Each other file with
weights that is not read is named in a note.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from moe_pack.formats import CheckpointError
from moe_pack.formats.pack.safetensors import TensorEntry

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_SHARD = re.compile(r"[A-Za-z0-9_][\w.-]{0,200}\.safetensors", re.ASCII)
_NUMBERED = re.compile(r".*-[0-9]+-of-[0-9]+\.safetensors")
_TORCH = (".bin", ".pt", ".pth", ".ckpt")
_UNFINISHED = (".incomplete", ".part", ".aria2", ".crdownload")
_WEIGHTS = (".safetensors", *_TORCH, ".gguf", ".npz", ".h5", ".msgpack", ".onnx", ".ot", *_UNFINISHED)
# What a trainer keeps to go on with: it has no weights of the model.
_TRAINING = re.compile(r"(training_args|optimizer|scheduler|scaler|rng_state|random_states|.*optim_states).*")
_ADAPTER = re.compile(r"(adapter_model|([0-9]+_)?adapters|(.*[^a-z])?lora([^a-z].*)?)[.-].*(?<!\.gguf)", re.IGNORECASE)
_MOST_NAMES = 4


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """The files that have a model's weights."""

    shards: tuple[str, ...]  # their names, sorted
    weight_map: Mapping[str, str] | None  # each tensor's shard by the index; None if no index is read
    notes: tuple[str, ...]  # lines for users on files that are not read


@dataclass(frozen=True, slots=True)
class JoinedShards:
    """The tensors of all shards."""

    entries: dict[str, TensorEntry]  # by name
    shards: dict[str, str]  # of each tensor
    notes: tuple[str, ...]  # lines for users on copies that are not read


def file_names(folder: Path) -> list[str]:
    """Returns the names of a folder's files, and of those in its folders as `folder/name`; no hidden ones, sorted.

    Raises:  CheckpointError if the folder cannot be read. A folder in it that cannot be read counts as empty.
    """
    try:
        found = [path for path in folder.iterdir() if not path.name.startswith(".")]
        paths = [path for path in found if path.is_file()]
    except OSError as fault:
        raise CheckpointError(f"{folder}: cannot be read ({fault.strerror})") from fault
    for inner in found:
        with suppress(PermissionError):
            listed = list(inner.iterdir()) if inner.is_dir() else []
            paths += [path for path in listed if not path.name.startswith(".") and path.is_file()]
    return sorted(path.relative_to(folder).as_posix() for path in paths)


def find_weights(place: str, names: Collection[str], read_index: Callable[[], object]) -> WeightFiles:
    """Returns which files have the weights.

    Args:    place: the folder, for messages.   names: of all its files, with those of folders in it.
             read_index: returns the values of `model.safetensors.index.json`, which is one of the names.
    Raises:  CheckpointError if there are no safetensors, some are missing, there are two models or an adapter, or the
             index is not one.
    """
    weight_map = weight_map_of(read_index()) if INDEX in names else None
    shards = [SINGLE] if weight_map is None else sorted(set(weight_map.values()))
    refuse_adapters(place, set(names).difference(shards))
    missing = [shard for shard in shards if shard not in names]
    notes = list[str]()
    if weight_map is not None and SINGLE in names and SINGLE not in shards:
        if not missing:
            raise CheckpointError(
                f"{place}: has two models, {SINGLE} and {len(shards)} files that {INDEX} names; remove {INDEX} to "
                f"convert {SINGLE}, which transformers loads, or remove {SINGLE} to convert the others"
            )
        notes.append(
            f"note: {INDEX} is not used: of {len(shards)} files that it names, {len(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} missing; the weights are those of {SINGLE}, as in transformers"
        )
        weight_map, shards = None, [SINGLE]
    elif weight_map is None and missing:
        raise CheckpointError(f"{place}: {_why_none(names)}")
    elif missing:
        raise CheckpointError(
            f"{place}: the download is incomplete: of {len(shards)} files that {INDEX} names, {len(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} missing; download {', '.join(missing)}"
        )
    return WeightFiles(tuple(shards), weight_map, (*notes, *unused_notes(names, shards)))


def refuse_adapters(place: str, names: Iterable[str]) -> None:
    """Raises CheckpointError if one of a folder's files is an adapter, whose weights are not those of the model."""
    found = [name for name in sorted(names) if is_adapter(name)]
    if found:
        raise CheckpointError(
            f"{place}: has an adapter, {_listed(found)}, which is not merged into the weights; merge it first with "
            "peft: PeftModel.from_pretrained(MODEL, ADAPTER).merge_and_unload().save_pretrained(OUT); or remove it to "
            "convert the model without it"
        )


def is_adapter(name: str) -> bool:
    """Returns whether a file has the weights of an adapter, such as of LoRA, by its name."""
    return "/" not in name and _has_weights(name) and _ADAPTER.fullmatch(name) is not None


def unused_notes(names: Iterable[str], used: Collection[str]) -> list[str]:
    """Returns a line that names the files with weights that are not read, if there are any."""
    unused = [name for name in sorted(names) if name not in used and _has_weights(name)]
    folders = dict.fromkeys(f"{PurePosixPath(name).parts[0]}/" for name in unused if "/" in name)
    found = [*(name for name in unused if "/" not in name), *folders]
    return [f"note: not used: {_listed(found)}"] if found else []


def join_shards(weights: WeightFiles, headers: Mapping[str, Iterable[TensorEntry]]) -> JoinedShards:
    """Returns all tensors; of those in several shards, the ones that the index names.

    Args:    headers: the entries of each shard.
    Raises:  CheckpointError if a tensor without a place in the index is in two shards, or one is not in the shard that
             the index names.
    """
    weight_map = weights.weight_map or {}
    entries, shards, stale, unnamed = dict[str, TensorEntry](), dict[str, str](), dict[str, list[str]](), list[str]()
    for shard, header in headers.items():
        for entry in header:
            if weight_map.get(entry.name, shard) != shard:
                stale.setdefault(shard, []).append(entry.name)
                continue
            if entry.name in entries:
                raise CheckpointError(
                    f"{shard}: tensor {entry.name!r} is also in {shards[entry.name]}; each tensor must be in one shard"
                )
            entries[entry.name], shards[entry.name] = entry, shard
            if weights.weight_map is not None and entry.name not in weight_map:
                unnamed.append(entry.name)
    for name, shard in weight_map.items():
        if shards.get(name) != shard:
            raise CheckpointError(f"{INDEX}: tensor {name!r} is not in {shard}")
    notes = [
        f"note: {shard}: {_listed(names)} {'is' if len(names) == 1 else 'are'} not used; {INDEX} names "
        f"{_listed(sorted({weight_map[name] for name in names}))} for {'it' if len(names) == 1 else 'them'}"
        for shard, names in stale.items()
    ]
    if unnamed:
        notes.append(f"note: {INDEX} does not name {_listed(unnamed)}, used all the same, as transformers does")
    return JoinedShards(entries, shards, tuple(notes))


def weight_map_of(index: object) -> dict[str, str]:
    """Returns each tensor's shard by the values of `model.safetensors.index.json`.

    Raises:  CheckpointError if they are not those of an index, or a name is not that of a shard in the same folder.
    """
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{INDEX}: weight_map is missing")
    for shard in weight_map.values():
        if not isinstance(shard, str) or not _SHARD.fullmatch(shard):
            raise CheckpointError(f"{INDEX}: {shard!r} is not the name of a safetensors file in the same folder")
    return weight_map


def _has_weights(name: str) -> bool:
    """Returns whether a file has weights, by its name."""
    last = PurePosixPath(name).name
    return last.endswith(_WEIGHTS) and not _TRAINING.fullmatch(last)


def _why_none(names: Iterable[str]) -> str:
    """Returns what a folder without the weights of a model has in their place, and what to do."""
    found = [name for name in sorted(names) if "/" not in name and _has_weights(name)]
    stored = [name for name in found if name.endswith(".safetensors")]
    if shards := [name for name in stored if _NUMBERED.fullmatch(name) and not name.startswith("consolidated")]:
        return f"found {_listed(shards)} without {INDEX}, which says what is in them; download it too"
    if any(name.endswith(_TORCH) for name in found):
        return (
            "found .bin or .pt weights, expected safetensors; convert once with transformers: "
            "AutoModelForCausalLM.from_pretrained(IN, dtype='auto').save_pretrained(OUT)"
        )
    if any(name.startswith("consolidated") for name in stored):
        return (
            f"found {_listed(stored)}, which has its authors' names of tensors; download the model's files for "
            f"transformers, {SINGLE} or {INDEX} and its shards"
        )
    if stored:
        return (
            f"found {_listed(stored)}, expected {SINGLE} or {INDEX}; if one file has the whole model, rename it to "
            f"{SINGLE}"
        )
    if found and not any(name.endswith(_UNFINISHED) for name in found):
        return f"found {_listed(found)}, expected {SINGLE} or {INDEX}; download the model as safetensors"
    return f"found neither {SINGLE} nor {INDEX}; is the download complete?"


def _listed(names: Collection[str]) -> str:
    """Returns the first names, and how many more there are."""
    shown = [name if name.isprintable() else ascii(name) for name in list(names)[:_MOST_NAMES]]
    rest = len(names) - len(shown)
    return ", ".join(shown) + (f" and {rest} more" if rest else "")
