"""A model in GGUF files as a checkpoint: the tensors and small files of its family's Hugging Face checkpoint.

`GgufFiles` makes `config.json` and the tokenizer's files from the metadata, and has every tensor under the family's
name. A tensor's rows are made when they are read: the whole model is never in memory.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moe_pack import formats
from moe_pack.formats.base.commands import did_you_mean
from moe_pack.formats.families import claiming, registry, weight_files
from moe_pack.formats.families.checkpoint_files import CheckpointFiles
from moe_pack.formats.families.family import Config, ExpertNames, Family, Stored
from moe_pack.formats.gguf import architecture, header, rows
from moe_pack.formats.gguf.decoders import DECODERS
from moe_pack.formats.gguf.factors import rope_factors
from moe_pack.formats.gguf.hybrids import HYBRIDS
from moe_pack.formats.gguf.latents import LATENTS
from moe_pack.formats.gguf.rows import Rows
from moe_pack.formats.gguf.tokenizer import tokenizer_files
from moe_pack.formats.pack.manifests import SourceFile
from moe_pack.formats.pack.safetensors import TensorEntry
from moe_pack.formats.parts import DenseRole

ARCHITECTURES: Mapping[str, architecture.Architecture] = {**DECODERS, **HYBRIDS, **LATENTS}


def architecture_of(metadata: header.Metadata) -> architecture.Architecture:
    """Returns the architecture of a GGUF file. Raises CheckpointError if it is unknown, or has no experts."""
    name = metadata.architecture
    if not metadata.has("expert_count") or not metadata.whole("expert_count"):
        raise formats.CheckpointError(
            f"{metadata.place}: architecture {name!r} has no experts; moe-pack is for mixture-of-experts models"
        )
    if name not in ARCHITECTURES:
        more = "docs/families.md lists the supported ones; the model's safetensors checkpoint may be supported"
        raise formats.CheckpointError(
            f"{metadata.place}: GGUF architecture {name!r} is not supported{did_you_mean(name, ARCHITECTURES, more)}"
        )
    return ARCHITECTURES[name]


@dataclass(frozen=True, slots=True)
class _Tensor:
    rows: Rows
    shape: tuple[int, ...]  # in the family's checkpoints
    file: str  # its name


def find_gguf(path: Path) -> Path | None:
    """Returns the GGUF file of a path: itself, or the one model of a folder without other weights; else None.

    Raises:  CheckpointError if a folder has several GGUF models.
    """
    if path.is_file() and path.suffix == ".gguf":
        return path
    if not path.is_dir():
        return None
    names = weight_files.file_names(path)
    if any(name.endswith(".safetensors") and "/" not in name and not weight_files.is_adapter(name) for name in names):
        return None
    models = sorted({_first_part(file) for file in path.glob("*.gguf") if not file.name.startswith("mmproj")})
    if len(models) > 1:
        others = ", ".join(model.name for model in models)
        raise formats.CheckpointError(f"{path}: has {len(models)} GGUF models; name one of them: {others}")
    if models:
        weight_files.refuse_adapters(str(path), names)
    return models[0] if models else None


def _first_part(file: Path) -> Path:
    with suppress(formats.CheckpointError):
        return header.part_paths(file)[0]
    return file


class GgufFiles(CheckpointFiles):
    """A model in one GGUF file, or in several parts. Owns the files' descriptors.

    Args:    path: the file, or one of the parts.   notes: lines for users on other files.
    Raises:  CheckpointError if a file is damaged, a part is missing, or the architecture or a tensor's type is unknown.
    """

    def __init__(self, path: Path, notes: Sequence[str] = ()) -> None:
        self._paths = header.part_paths(path)
        self._notes = notes
        self.folder = path
        self.metadata, self._stored = header.read_headers(self._paths)
        self._architecture = architecture_of(self.metadata)
        for tensor in self._stored.values():
            if tensor.type not in rows.AS_THEY_ARE and not rows.can_dequantize(tensor.type):
                raise formats.CheckpointError(
                    f"{self._paths[tensor.file].name}: tensor {tensor.name!r} is {tensor.type}, which the gguf package "
                    "cannot dequantize; a newer one may: pip install -U gguf"
                )
        self._small: dict[str, bytes] | None = None
        self._readers = [formats.RangeReader(part, formats.CheckpointError) for part in self._paths]
        self._tensors: dict[str, _Tensor] = {}
        self._entries: dict[str, TensorEntry] = {}
        self._used: set[str] = set()
        values = self._architecture.config(self.metadata)
        family = registry.family_of(values["model_type"])
        assert family is not None, values["model_type"]
        self._config: architecture.Values = {"architectures": [family.class_name], **values}
        types = {tensor.type for name, tensor in self._stored.items() if "_exps.weight" in name}
        if types == {"MXFP4"} and self._architecture.keeps_mxfp4:
            self._config["quantization_config"] = {"quant_method": "mxfp4"}
        self._roles: dict[str, DenseRole] = {}

    def has(self, name: str) -> bool:
        """Returns whether the metadata makes a small file. Raises CheckpointError for a tokenizer it cannot make."""
        return name in self._small_files()

    def read_file(self, name: str, most_bytes: int = 0) -> NDArray[np.uint8]:
        """Returns a small file that the metadata makes, u8 [bytes]. Raises CheckpointError if it makes none."""
        raw = self._small_files().get(name)
        if raw is None:
            raise formats.CheckpointError(f"{self._paths[0].name}: its metadata has nothing for {name}")
        return np.frombuffer(raw, np.uint8).copy()

    def _small_files(self) -> dict[str, bytes]:
        if self._small is None:
            files = {"config.json": self._config, **tokenizer_files(self.metadata)}
            self._small = {
                name: (
                    content if isinstance(content, str) else json.dumps(content, ensure_ascii=False, indent=1)
                ).encode()
                for name, content in files.items()
            }
        return self._small

    def config(self) -> object:
        """Returns the values of the `config.json` that the metadata makes."""
        return self._config

    def entries(self) -> Mapping[str, TensorEntry]:
        """Returns the tensors under the names of the family.

        Raises:  CheckpointError if one is missing, has another shape than the metadata says, or has no role.
        """
        if not self._entries:
            family, spec, _ = registry.read_spec(Config(self._config, "config.json"))
            self._tensors = dict(self._all_tensors(family, spec))
            self._check_factors(spec)
            self._check_left_out()
            for name, tensor in self._tensors.items():
                num_bytes = tensor.rows.num_rows * tensor.rows.row_bytes
                self._entries[name] = TensorEntry(name, tensor.rows.dtype, tensor.shape, 0, num_bytes)
        return self._entries

    def rename(self, names: Mapping[str, str]) -> None:
        """Does nothing: the tensors have the family's names."""
        assert not names, names

    def file_of(self, tensor: str) -> str:
        """Returns the name of the file with a tensor, or with its first rows."""
        return self._tensors[tensor].file

    def read(self, tensor: str, start: int, num_bytes: int) -> NDArray[np.uint8]:
        """Reads a range of a tensor's bytes: u8, own memory. Raises CheckpointError if the file is cut short."""
        found = self._tensors[tensor].rows
        size = found.row_bytes
        first, last = start // size, -(-(start + num_bytes) // size)  # rows are made whole
        raw = found.read(first, last).reshape(-1)
        return np.ascontiguousarray(raw[start - first * size : start - first * size + num_bytes])

    def decoded_from(self, tensor: str) -> str | None:
        """Returns the GGML types of a tensor that is dequantized, joined by `+`, or None."""
        found = self._tensors[tensor].rows
        types = found.types() if found.dtype == "F32" else frozenset()
        return "+".join(sorted(types)) if types - {"F32"} else None

    def account(self) -> list[SourceFile]:
        """Returns every GGUF file, sorted by name."""
        files = []
        for number, (path, reader) in enumerate(zip(self._paths, self._readers, strict=True)):
            offsets = [tensor.offset for tensor in self._stored.values() if tensor.file == number]
            head = reader.read(0, min(min(offsets, default=reader.num_bytes), header.MAX_HEADER_BYTES))
            files.append(SourceFile(path.name, reader.num_bytes, hashlib.sha256(head.data).hexdigest()))
        return sorted(files, key=lambda file: file.name)

    def notes(self) -> list[str]:
        """Returns the number of tensors of each type, with those that are dequantized, and lines on other files."""
        is_kept = "quantization_config" in self._config
        counts = Counter(
            (tensor.type, tensor.type in rows.AS_THEY_ARE or (is_kept and "_exps.weight" in name))
            for name, tensor in self._stored.items()
        )
        lines = [
            f"{kind}: {count} {'tensor' if count == 1 else 'tensors'}, {'as they are' if exact else 'dequantized'}"
            for (kind, exact), count in sorted(counts.items(), key=lambda item: -item[1])
        ]
        return [f"{self._paths[0].name}: {'; '.join(lines)}", *self._notes]

    def stamp(self) -> str:
        """Returns a digest of the files' sizes and modification times."""
        facts = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in self._paths]
        return hashlib.sha256(repr(facts).encode()).hexdigest()

    def close(self) -> None:
        """Closes all files."""
        for reader in self._readers:
            reader.close()
        self._readers = []

    def _all_tensors(self, family: Family, spec: formats.ModelSpec) -> Iterator[tuple[str, _Tensor]]:
        self._roles = {role.name: role for role in formats.dense_roles(spec)}
        for role in list(self._roles.values()):
            way = _plain_way(claiming.stored_ways(family, spec, role.name))
            if not way.roles:
                yield way.name, self._dense(spec, role, way)
            elif way.roles[0] == role.name:
                yield way.name, self._stack([self._dense(spec, self._roles[other], way) for other in way.roles])
        for layer in spec.moe_layers:
            yield from self._experts(family, spec, layer)
        for number in range(architecture.num_layers(self.metadata), self.metadata.whole("block_count")):
            yield from self._prediction_layer(family, spec, number)

    def _stack(self, tensors: Sequence[_Tensor]) -> _Tensor:
        stacked = rows.Stacked([tensor.rows for tensor in tensors])
        return _Tensor(stacked, (stacked.num_rows, *tensors[0].shape[1:]), tensors[0].file)

    def _dense(self, spec: formats.ModelSpec, role: DenseRole, way: Stored) -> _Tensor:
        """Returns the tensor of a role. Raises CheckpointError if there is none, or it has another size."""
        key, layer = claiming.role_key(spec, role.name)
        make = self._architecture.makers.get(key)
        name = "" if make else self._name(key, layer)
        made: Rows
        if make is not None:
            taken = list[header.GgufTensor]()

            def take(wanted: str) -> Rows:
                taken.append(self._take(f"blk.{layer}.{wanted}"))
                return self._rows(taken[-1])

            made = make(take, self.metadata)
            tensor = taken[0]
        elif key == "layers.{i}.attention.kv_b" and name not in self._stored:  # newer files have two tensors
            keys, values = (self._take(f"blk.{layer}.attn_{half}_b.weight") for half in ("k", "v"))
            made, tensor = rows.KeysAndValues(self._rows(keys), self._rows(values), keys.shape[0], role.shape[1]), keys
        elif self._architecture.fuses_shared and key.endswith((".shared.gate", ".shared.up")):
            tensor = self._take(f"blk.{layer}.ffn_up_shexp.weight")
            self._check(tensor, (2 * role.shape[0], role.shape[1]))
            made = rows.Part(self._rows(tensor), role.shape[0] if key.endswith("up") else 0, role.shape[0])
        elif name not in self._stored and key.rpartition(".")[2] in ("q", "k", "v"):
            made, tensor = self._of_fused(role, layer)
        else:
            tensor = self._take(name)
            made = self._rows(tensor)
        made = rows.Flat(made) if len(role.shape) == 1 else made
        self._check(tensor, role.shape, (made.num_rows, made.num_cols)[-len(role.shape) :])
        change = self._architecture.changes.get(key)
        shape = self._checkpoint_shape(spec, key, role) if way.parts == 1 else (way.parts, *role.shape)
        return _Tensor(made if change is None else _undone(made, change, spec), shape, self._paths[tensor.file].name)

    def _checkpoint_shape(self, spec: formats.ModelSpec, key: str, role: DenseRole) -> tuple[int, ...]:
        if key in self._architecture.one_row:
            return (1, *role.shape)
        if spec.mixer is None or ".mixer." not in key:
            return role.shape
        return spec.mixer.checkpoint_shape(key.rpartition(".mixer.")[2], role.shape)

    def _name(self, key: str, layer: int) -> str:
        template = self._architecture.names.get(key) or architecture.TENSOR_NAMES.get(key)
        assert template is not None, f"architecture {self.metadata.architecture!r} has no name for role {key!r}"
        name = template.format(i=layer)
        short = name.removesuffix(".bias")  # some versions of llama.cpp's converter wrote a router's bias so
        return short if name not in self._stored and short in self._stored else name

    def _of_fused(self, role: DenseRole, layer: int) -> tuple[Rows, header.GgufTensor]:
        first = 0
        for other in ("q", "k", "v"):
            if role.name.endswith(f".{other}"):
                break
            first += self._roles[f"layers.{layer}.attention.{other}"].shape[0]
        tensor = self._take(f"blk.{layer}.attn_qkv.weight", f"blk.{layer}.attn_{other}.weight")
        return rows.Part(self._rows(tensor), first, role.shape[0]), tensor

    def _experts(self, family: Family, spec: formats.ModelSpec, layer: int) -> Iterator[tuple[str, _Tensor]]:
        is_kept = "quantization_config" in self._config
        names = next(
            (way for way in family.expert_names if "{e}" in way.matrices["up"] and bool(way.scales) == is_kept),
            family.expert_names[0],
        )
        f, d, num_experts = spec.expert.intermediate_size, spec.hidden_size, spec.router.num_experts
        whole: dict[str, list[tuple[Rows, str]]] = {}
        for matrix in spec.expert.matrices:
            shape = (d, f) if matrix == "down" else (f, d)
            for expert, (made, file) in enumerate(self._expert_rows(layer, matrix, num_experts, shape)):
                name = claiming.named(names.matrices[matrix], layer, expert)
                if matrix in names.scales:
                    assert isinstance(made, rows.Part)
                    codes, scales = made.of(rows.Mxfp4Codes), made.of(rows.Mxfp4Scales)
                    yield name, _Tensor(codes, (codes.num_rows, codes.num_cols // 16, 16), file)
                    name = claiming.named(names.scales[matrix], layer, expert)
                    yield name, _Tensor(scales, (scales.num_rows, scales.num_cols), file)
                elif "{e}" in names.matrices[matrix]:
                    yield name, _Tensor(made, shape, file)
                else:
                    whole.setdefault(name, []).append((made, file))
            if matrix in names.biases:
                yield from self._expert_biases(names, matrix, layer, (num_experts, shape[0]))
        for name, parts in whole.items():
            count = len(parts) // num_experts  # of matrices in the tensor
            inner = rows.Stacked([parts[m * num_experts + e][0] for e in range(num_experts) for m in range(count)])
            yield name, _Tensor(inner, (num_experts, inner.num_rows // num_experts, inner.num_cols), parts[0][1])

    def _expert_rows(
        self, layer: int, matrix: formats.Matrix, num_experts: int, shape: tuple[int, int]
    ) -> Iterator[tuple[Rows, str]]:
        """Yields the matrix of each expert, from a tensor of all experts, or one of each in files of early 2024."""
        name = architecture.EXPERT_TENSORS[matrix].format(i=layer)
        both, first, step = architecture.GATE_UP_EXPERTS.format(i=layer), 0, shape[0]
        if f"{name}.weight" not in self._stored and f"{name[:-5]}.0.weight" in self._stored:
            for expert in range(num_experts):
                tensor = self._take(f"{name[:-5]}.{expert}.weight")
                self._check(tensor, shape)
                yield self._rows(tensor), self._paths[tensor.file].name
            return
        expected: tuple[int, ...] = (num_experts, *shape)
        if f"{name}.weight" not in self._stored and matrix != "down" and f"{both}.weight" in self._stored:
            name, first, step = both, shape[0] if matrix == "up" else 0, 2 * shape[0]
            expected = (num_experts, step, shape[1])
        tensor = self._take(f"{name}.weight")
        self._check(tensor, expected)
        stored = self._rows(tensor)
        for expert in range(num_experts):
            yield rows.Part(stored, expert * step + first, shape[0]), self._paths[tensor.file].name

    def _expert_biases(
        self, names: ExpertNames, matrix: formats.Matrix, layer: int, shape: tuple[int, int]
    ) -> Iterator[tuple[str, _Tensor]]:
        tensor = self._take(f"{architecture.EXPERT_TENSORS[matrix].format(i=layer)}.bias")
        self._check(tensor, shape)
        stored = self._rows(tensor)
        for expert in range(shape[0]):
            name = claiming.named(names.biases[matrix], layer, expert)
            yield name, _Tensor(rows.Part(stored, expert, 1), shape[1:], self._paths[tensor.file].name)

    def _prediction_layer(self, family: Family, spec: formats.ModelSpec, number: int) -> Iterator[tuple[str, _Tensor]]:
        """Yields the layer that predicts a further token, if any: like the last layer with attention and experts."""
        stored = [tensor for name, tensor in self._stored.items() if name.startswith(f"blk.{number}.")]
        kept = next((kept.pattern for kept in family.unused if kept.pattern in _UNRUN), None)
        if not family.prediction and kept is not None:
            for tensor in stored:  # which nothing runs: any name that the family keeps does
                self._used.add(tensor.name)
                part = tensor.name.removeprefix(f"blk.{number}.").removeprefix("nextn.")
                name = f"{kept.format(n=number)[:-1]}{part}" if "{n}" in kept else f"{kept[:-1]}{tensor.name}"
                yield name, _Tensor(self._rows(tensor), tensor.shape, self._paths[tensor.file].name)
        if not family.prediction or not stored:
            return
        names = family.prediction[0]
        like = max(layer for layer in spec.moe_layers if f"layers.{layer}.attention.o" in self._roles)
        if f"blk.{number}.indexer.attn_k.weight" in self._stored:  # of which the last decoder layer may have none
            indexed = (layer for layer in spec.moe_layers if f"layers.{layer}.attention.index_k" in self._roles)
            like = max(indexed, default=like)
        is_centered = self._architecture.changes.get("norm") == "plus_one"
        for part, theirs in _PREDICTION.items():
            name, own_name = getattr(names, part), f"blk.{number}.nextn.{theirs}.weight"
            if own_name in self._stored and name is not None:
                tensor = self._take(own_name)
                made: Rows = self._rows(tensor)
                if is_centered and len(tensor.shape) == 1:
                    made = _undone(made, "plus_one", spec)
                yield name.format(n=number), _Tensor(made, tensor.shape, self._paths[tensor.file].name)
        begin, moved = f"layers.{like}.", list[tuple[str, _Tensor]]()
        own = {
            role.name.replace(begin, f"layers.{number}."): role for role in self._roles.values() if begin in role.name
        }
        self._roles |= {name: replace(role, name=name) for name, role in own.items()}
        for name, role in own.items():
            way = _plain_way(claiming.stored_ways(family, spec, name))
            moved.append((way.name, self._dense(spec, self._roles[name], way)))
            assert not way.roles, f"{role.name} is in a tensor with others, which no family with prediction layers has"
        for name, moved_tensor in (*moved, *self._experts(family, spec, number)):
            yield names.layer.format(n=number) + name.removeprefix(names.stack.format(i=number)), moved_tensor

    def _take(self, name: str, otherwise: str | None = None) -> header.GgufTensor:
        """Returns a GGUF tensor, which then has a role."""
        if name not in self._stored:
            raise formats.CheckpointError(f"{self._paths[0].name}: tensor {otherwise or name!r} is missing")
        self._used.add(name)
        return self._stored[name]

    def _rows(self, tensor: header.GgufTensor) -> rows.TensorRows:
        return rows.TensorRows(self._readers[tensor.file], tensor)

    def _check(self, tensor: header.GgufTensor, shape: tuple[int, ...], found: tuple[int, ...] | None = None) -> None:
        if (tensor.shape if found is None else found) != shape:
            raise formats.CheckpointError(
                f"{self._paths[tensor.file].name}: tensor {tensor.name!r} has shape {list(tensor.shape)}, expected "
                f"{list(shape)} by the metadata"
            )

    def _check_factors(self, spec: formats.ModelSpec) -> None:
        expected = rope_factors(spec)
        if expected is None:
            return
        tensor = self._take(header.FACTORS)
        self._check(tensor, expected.shape)
        if not np.allclose(self.metadata.factors, expected, rtol=1e-5, atol=0):
            raise formats.CheckpointError(
                f"{self._paths[tensor.file].name}: tensor {header.FACTORS!r} has other factors than the published "
                f"models of architecture {self.metadata.architecture!r}; take its safetensors checkpoint, whose config "
                "says them"
            )

    def _check_left_out(self) -> None:
        for name, tensor in self._stored.items():
            if name not in self._used:
                raise formats.CheckpointError(
                    f"{self._paths[tensor.file].name}: tensor {name!r} has no role in architecture "
                    f"{self.metadata.architecture!r}; the pack would lose it"
                )


# Names of prediction layers that nothing runs.
_UNRUN = ("mtp.*", "model.mtp.*", "model.layers.{n}.*")
# Parts of a prediction layer that decoder layers lack, by the fields of `PredictionNames`.
_PREDICTION = {
    "project": "eh_proj",
    "embed_norm": "enorm",
    "hidden_norm": "hnorm",
    "norm": "shared_head_norm",
    "embed": "embed_tokens",
    "head": "shared_head_head",
}


def _plain_way(ways: tuple[Stored, ...]) -> Stored:
    """Returns the first way of storing a role that is neither transposed nor in one tensor with others, if any is."""
    return next((way for way in ways if not way.transposed and not way.roles), ways[0])


def _undone(stored: Rows, change: architecture.Change, spec: formats.ModelSpec) -> Rows:
    """Returns rows as they were before llama.cpp's converter changed them."""
    if change == "plus_one":
        return rows.Changed(stored, lambda values: values - np.float32(1))
    if change == "exp":
        return rows.Changed(stored, np.log)
    if change == "decay":
        return rows.Changed(stored, lambda values: np.log(-values))
    size = spec.attention.sizes["head_dim"]  # of pairs
    place = np.arange(size)
    return rows.Reordered(stored, 2 * (place % (size // 2)) + place // (size // 2))
