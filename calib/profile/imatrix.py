"""llama.cpp's importance files (`imatrix`), written from profiles and read into profiles.

An entry has, for each expert of a matrix (or for the matrix, if it is no expert's), the sum over tokens of the squares
of its inputs, by column, and the number of tokens. Files in GGUF format are read and written: `NAME.in_sum2` float32
[E, columns] and `NAME.counts` float32 [E, 1]. The older format, usually called `.dat`, is read only; it has one count
for all experts and sums that are scaled to it.
Source:  llama.cpp, tools/imatrix/imatrix.cpp and common/imatrix-loader.cpp.
"""

import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import Lock

import numpy as np
import torch
from torch import Tensor

from moe_pack import formats
from moe_pack.calib import forward
from moe_pack.calib.forward.experts import sums_of_squares
from moe_pack.calib.profile import profiles
from moe_pack.calib.profile.profiler import listed
from moe_pack.formats.base.commands import Stage
from moe_pack.formats.base.errors import shortened
from moe_pack.formats.families import Checkpoint
from moe_pack.formats.gguf import architecture, header
from moe_pack.runtime import model
from moe_pack.runtime.model import Matrix as RunMatrix
from moe_pack.runtime.model.compute import matrices

_SUMS, _COUNTS = ".in_sum2", ".counts"
_LEGACY_CHUNK = 512  # tokens of a chunk by default; the older format does not say how many
_MAX_BYTES = 1 << 34
_MAX_ENTRIES, _MAX_NAME_BYTES = 1 << 20, 1 << 12  # of the older format


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """A matrix of an importance file."""

    sums: forward.Array  # float32 [n, columns]; n is 1 or counts experts
    counts: forward.Array  # float32 [n]


@dataclass(frozen=True, slots=True, eq=False)
class Imatrix:
    """An importance file. Its arrays are mapped from the file."""

    path: Path
    entries: Mapping[str, Entry]
    datasets: tuple[str, ...]  # the names of its texts
    num_chunks: int  # of the text; 0 if the file does not say
    chunk_tokens: int  # 0 if the file does not say
    has_counts: bool  # whether it counts the tokens of each expert; the older format does not
    sha256: str = ""  # of the file


def expert_tensor(layer: int, name: str) -> str:
    """Returns the entry of a matrix of all experts of a decoder layer, by its name in GGUF files with `{i}`."""
    return f"{name.format(i=layer)}.weight"


# Latent attention multiplies with other matrices in llama.cpp, which it makes of this one.
_NO_ENTRY = "layers.{i}.attention.kv_b"


def dense_tensor(role: str) -> str | None:
    """Returns llama.cpp's name of a dense matrix of a decoder layer; None without an entry, as for the head."""
    stack, _, rest = role.partition(".")
    layer, _, matrix = rest.partition(".")
    usual = f"layers.{{i}}.{matrix}"
    if stack != "layers" or usual == _NO_ENTRY or usual not in architecture.TENSOR_NAMES:
        return None
    return architecture.TENSOR_NAMES[usual].format(i=layer)


class _ObservedMatrix(matrices.InMemoryMatrix):
    def __init__(self, matrix: RunMatrix, observe: Callable[[Tensor], None]) -> None:
        self._matrix, self._observe = matrix, observe
        self.num_rows, self.num_cols = matrix.num_rows, matrix.num_cols

    def rows(self, start: int, stop: int) -> Tensor:
        return self._matrix.rows(start, stop)

    def take(self, ids: Tensor) -> Tensor:
        return matrices.gather_rows(self._matrix, ids)

    def product(self, x: Tensor) -> Tensor:
        self._observe(x)
        return model.linear(x, self._matrix)


class _ObservedWeights(forward.LayerwiseWeights):
    """Sums the squares of the inputs of dense matrices, sequence by sequence in one order. Thread-safe."""

    def __init__(self, checkpoint: Checkpoint, num_sequences: int) -> None:
        super().__init__(model.CheckpointWeights(checkpoint))
        self._num_sequences = num_sequences
        self._waiting = dict[str, list[forward.Array]]()
        self._sums = dict[str, forward.Array]()
        self._counts = dict[str, int]()
        self._sums_lock = Lock()

    def matrix(self, role: str) -> RunMatrix:
        matrix, name = super().matrix(role), dense_tensor(role)
        return matrix if name is None else _ObservedMatrix(matrix, partial(self._observe, name))

    def entries(self) -> dict[str, Entry]:
        for name in self._waiting:
            self._add(name)
        return {
            name: Entry(self._sums[name].astype(np.float32)[None], np.array([self._counts[name]], np.float32))
            for name in sorted(self._sums)
        }

    def _observe(self, name: str, x: Tensor) -> None:
        squares = sums_of_squares(x).numpy()
        with self._sums_lock:
            waiting = self._waiting.setdefault(name, [])
            waiting.append(squares)
            self._counts[name] = self._counts.get(name, 0) + len(x)
            if len(waiting) == self._num_sequences:
                self._add(name)

    def _add(self, name: str) -> None:
        if waiting := self._waiting[name]:
            sums = np.sort(np.stack(waiting), axis=0).sum(axis=0)
            self._sums[name] = self._sums.get(name, 0.0) + sums
            waiting.clear()


@torch.inference_mode()
def dense_entries(
    profile: profiles.Profile, checkpoint: Checkpoint, work: Path, progress: formats.Progress = formats.NO_PROGRESS
) -> dict[str, Entry]:
    """Returns the entries of dense matrices, from the profile's text; the caller removes `work`. Raises PlanError."""
    profiles.check_same_source(profile, checkpoint)
    spec = _decoder_alone(profile)
    given = forward.Sequences.of(spec, torch.from_numpy(profile.tokens().sequences.astype(np.int64)))
    weights = _ObservedWeights(checkpoint, len(given.ids))
    states = forward.LayerStates(
        weights, given.embedded(weights), len(given.ids), given.length, work, torch.device("cpu")
    )
    progress.begin(Stage("inputs of dense matrices", spec.num_hidden_layers, "layers"))
    for layer in range(spec.num_hidden_layers):
        tokens = states.enter(layer)
        for expert in range(spec.router.num_experts if layer in spec.moe_layers else 0):
            number = spec.moe_layers.index(layer), expert
            forward.run_counted(states, tokens, weights, number, weights.threshold(*number), lambda num_tokens: None)
        states.leave(layer, tokens)
        del tokens  # otherwise two layers' tokens are in memory while the next layer is entered
        progress.advance(1, f"layer {layer}")
    states.close()
    progress.end()
    return weights.entries()


def _decoder_alone(profile: profiles.Profile) -> formats.ModelSpec:
    """Returns the profile's model; refuses one with an encoder."""
    if profile.spec.encoder is not None:
        raise formats.PlanError(f"{profile.folder}: the model has an encoder; llama.cpp has no experts of such models")
    return profile.spec


def write_imatrix(
    profile: profiles.Profile, path: Path, dense: Mapping[str, Entry] | None = None
) -> list[tuple[int, int]]:
    """Writes an importance file from a profile: all experts, and the entries of dense matrices.

    Returns: layer and number of the experts that no token reached. llama-quantize takes their zeros as equal
             importance.
    Raises:  PlanError for a model with an encoder or unknown counts; ConversionError if the file cannot be written;
             PackError if sums are not finite.
    """
    spec, text = _decoder_alone(profile), profile.facts.text
    if profile.facts.imatrix is not None and not profile.facts.imatrix.has_counts:
        raise formats.PlanError(
            f"{profile.folder}: was made from an importance file in the older format, without the experts' tokens; "
            "use that file itself"
        )
    package = header.gguf_package()
    unfinished = path.with_name(f"{path.name}.tmp")
    writer = package.GGUFWriter(unfinished, "")  # of no architecture, like the files of llama.cpp
    writer.add_type(package.GGUFType.IMATRIX)
    writer.add_array(package.Keys.IMatrix.DATASETS, [text.name])
    writer.add_uint32(package.Keys.IMatrix.CHUNK_COUNT, text.num_sequences)
    writer.add_uint32(package.Keys.IMatrix.CHUNK_SIZE, profile.layer_tokens)
    for name, shape in _shapes(spec):
        writer.add_tensor_info(name + _SUMS, shape, np.dtype(np.float32), 4 * shape[0] * shape[1])
        writer.add_tensor_info(name + _COUNTS, (shape[0], 1), np.dtype(np.float32), 4 * shape[0])
    for name, entry in (dense or {}).items():
        writer.add_tensor_info(name + _SUMS, entry.sums.shape, entry.sums.dtype, entry.sums.nbytes)
        writer.add_tensor_info(name + _COUNTS, entry.counts.shape, entry.counts.dtype, entry.counts.nbytes)
    unreached = list[tuple[int, int]]()
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for layer_idx, layer in enumerate(spec.moe_layers):
            moments = profile.moments(layer_idx)
            unreached += [(layer, int(e)) for e in np.flatnonzero(moments.tokens == 0)]
            counts = moments.tokens.astype(np.float32)[:, None]
            for matrix in spec.expert.matrices:
                sums = moments.hidden_squares if matrix == "down" else moments.input_squares
                if not np.isfinite(sums).all():
                    raise formats.PackError(f"{profile.folder}: the sums of squares of layer {layer} are not finite")
                writer.write_tensor_data(np.ascontiguousarray(sums, np.float32))
                writer.write_tensor_data(counts)
        for entry in (dense or {}).values():
            writer.write_tensor_data(entry.sums)
            writer.write_tensor_data(entry.counts)
        writer.close()
        unfinished.replace(path)
    except OSError as fault:
        raise formats.ConversionError(
            f"--output {path}: cannot be written ({fault.strerror}); give another file"
        ) from fault
    finally:
        writer.close()
        unfinished.unlink(missing_ok=True)
    return unreached


def _shapes(spec: formats.ModelSpec) -> Iterator[tuple[str, tuple[int, int]]]:
    for layer, matrix in itertools.product(spec.moe_layers, spec.expert.matrices):
        name = expert_tensor(layer, architecture.EXPERT_TENSORS[matrix])
        yield name, (spec.router.num_experts, _num_inputs(spec, matrix))


def _num_inputs(spec: formats.ModelSpec, matrix: formats.Matrix) -> int:
    return spec.expert.intermediate_size if matrix == "down" else spec.hidden_size


def read_imatrix(path: Path) -> Imatrix:
    """Reads an importance file in either format; PackError if it is missing, damaged or of another kind."""
    with formats.RangeReader(path, formats.PackError) as reader:
        if not reader.num_bytes:
            raise formats.PackError(f"{path}: the file is empty; expected an importance file of llama-imatrix")
        if reader.num_bytes > _MAX_BYTES:
            raise formats.PackError(
                f"{path}: has {reader.num_bytes:,} bytes, an importance file has at most {_MAX_BYTES:,}; give a file "
                "that llama-imatrix wrote"
            )
        is_gguf = reader.read(0, min(4, reader.num_bytes)).tobytes() == header.MAGIC
        read = _read_gguf(path) if is_gguf else _read_legacy(path)
        return replace(read, sha256=reader.sha256())


def _read_gguf(path: Path) -> Imatrix:
    package = header.gguf_package()
    values, listed = header.read_header(path, formats.PackError)
    kind = values.get(package.Keys.General.TYPE)
    if kind != package.GGUFType.IMATRIX:
        raise formats.PackError(
            f"{path}: its general.type is {shortened(kind)}, expected 'imatrix'; give a file that llama-imatrix wrote"
        )
    tensors = {tensor.name: tensor for tensor in listed}
    for name, tensor in tensors.items():
        ending = next((each for each in (_SUMS, _COUNTS) if name.endswith(each)), None)
        if ending is None:
            raise formats.PackError(
                f"{path}: tensor {shortened(name)} is neither a sum ({_SUMS}) nor a count ({_COUNTS})"
            )
        other = name.removesuffix(ending) + (_COUNTS if ending == _SUMS else _SUMS)
        if other not in tensors:
            raise formats.PackError(f"{path}: has tensor {shortened(name)}, but not {shortened(other)}")
        if tensor.type != "F32":
            raise formats.PackError(f"{path}: tensor {shortened(name)} is {tensor.type}, expected F32")
    raw, entries = np.memmap(path, np.uint8, "r"), {}
    for name in (name.removesuffix(_SUMS) for name in tensors if name.endswith(_SUMS)):
        sums, counts = (
            raw[tensor.offset : tensor.offset + tensor.num_bytes].view("<f4")
            for tensor in (tensors[name + _SUMS], tensors[name + _COUNTS])
        )
        if len(sums) % len(counts):
            raise formats.PackError(
                f"{path}: entry {shortened(name)} has {len(sums):,} sums for {len(counts):,} experts; the file is "
                "damaged"
            )
        entries[name] = Entry(sums.reshape(len(counts), -1), counts)
    datasets = values.get(package.Keys.IMatrix.DATASETS)
    names = tuple(map(str, datasets)) if isinstance(datasets, list) else ()
    chunks = (values.get(key) for key in (package.Keys.IMatrix.CHUNK_COUNT, package.Keys.IMatrix.CHUNK_SIZE))
    num_chunks, chunk_tokens = (each if type(each) is int and 0 <= each < 2**31 else 0 for each in chunks)
    return Imatrix(path, entries, names, num_chunks, chunk_tokens, True)


def _read_legacy(path: Path) -> Imatrix:
    """Reads the older format: int32 number of entries; of each int32 length, name, int32 calls, int32 length, float32
    sums; then, in later files, int32 chunks, int32 length, name of the text. All are little-endian.
    """
    raw, place = np.memmap(path, np.uint8, "r"), 0

    def fault(what: str) -> formats.PackError:
        return formats.PackError(f"{path}: {what}; the file is damaged, or no importance file of llama-imatrix")

    def take(num_bytes: int) -> forward.Array:
        nonlocal place
        if not 0 <= num_bytes <= len(raw) - place:
            raise fault(f"byte {place:,} says that {num_bytes:,} bytes follow, the file has {len(raw):,}")
        place += num_bytes
        return raw[place - num_bytes : place]

    def number() -> int:
        return int(take(4).view("<i4")[0])

    def text(what: str) -> str:
        start, length = place, number()
        if length > _MAX_NAME_BYTES:
            raise fault(f"{what} at byte {start:,} has {length:,} bytes, at most {_MAX_NAME_BYTES:,}")
        try:
            return take(length).tobytes().decode("utf-8")
        except UnicodeDecodeError as wrong:
            raise fault(f"{what} at byte {start:,} is not text") from wrong

    entries = dict[str, Entry]()
    num_entries = number()
    if not 1 <= num_entries <= _MAX_ENTRIES:
        raise fault(f"it has {num_entries:,} entries, expected 1 to {_MAX_ENTRIES:,}")
    for _ in range(num_entries):
        name, calls = text("the name"), number()
        if name in entries:
            raise fault(f"entry {shortened(name)} appears twice")
        entries[name] = Entry(take(4 * number()).view("<f4")[None], np.array([calls], np.float32))
    num_chunks, datasets = 0, tuple[str, ...]()
    if place < len(raw):
        num_chunks, datasets = max(0, number()), (text("the name of the text"),)
    return Imatrix(path, entries, datasets, num_chunks, 0, False)


def profile_of_imatrix(imatrix: Imatrix, checkpoint: Checkpoint, folder: Path) -> profiles.Profile:
    """Writes a profile of an importance file: only experts' moments. PlanError if entries are missing or wrong."""
    spec = checkpoint.spec
    name = ", ".join(imatrix.datasets) or imatrix.path.name
    text = profiles.TextFacts(name, "", max(imatrix.num_chunks, 1), imatrix.chunk_tokens or _LEGACY_CHUNK, 0, 0)
    origin = profiles.ImatrixFacts(imatrix.sha256, imatrix.has_counts)
    facts = profiles.facts_of(checkpoint, text, "off", "none", origin)
    with closing(forward.ProfileStore(folder, hashlib.sha256(profiles.facts_bytes(facts)).hexdigest())) as store:
        for layer in spec.moe_layers:
            store.write(profiles.layer_file("moments", layer), _moments(imatrix, spec, layer).arrays())
        store.seal(profiles.facts_bytes(replace(facts, files=tuple(map(listed, sorted(folder.glob("*.safetensors")))))))
    return profiles.Profile(folder)


def _moments(imatrix: Imatrix, spec: formats.ModelSpec, layer: int) -> profiles.LayerMoments:
    gate, up, down = (architecture.EXPERT_TENSORS[matrix] for matrix in formats.MATRICES)
    names = {"up": (up, architecture.GATE_UP_EXPERTS, gate), "down": (down,)}  # gate and up have the same inputs
    counts, sums = dict[str, forward.Array](), dict[formats.Matrix, forward.Array]()
    for matrix in ("up", "down"):
        known = [expert_tensor(layer, each) for each in names[matrix]]
        name = next((each for each in known if each in imatrix.entries), None)
        if name is None:
            raise formats.PlanError(
                f"--imatrix {imatrix.path}: has no entry {known[0]!r}; give a file that was made for this model"
            )
        entry, E = imatrix.entries[name], spec.router.num_experts
        if entry.sums.size != E * _num_inputs(spec, matrix) or len(entry.counts) not in (1, E):
            raise formats.PlanError(
                f"--imatrix {imatrix.path}: entry {name!r} has {entry.sums.size:,} sums and {len(entry.counts):,} "
                f"counts, expected {E} times {_num_inputs(spec, matrix):,} sums and {E} counts; give a file that was "
                "made for this model"
            )
        for values in (entry.sums, entry.counts):
            if not np.isfinite(values).all() or (values < 0).any() or (values >= 2.0**127).any():
                raise formats.PlanError(
                    f"--imatrix {imatrix.path}: entry {name!r} has values that are no sums of squares"
                )
        sums[matrix] = np.ascontiguousarray(entry.sums, np.float32).reshape(E, -1)
        counts[matrix] = np.broadcast_to(np.rint(entry.counts), (E,))
    if (counts["up"] >= 2.0**32).any() or not np.array_equal(counts["up"], counts["down"]):
        raise formats.PlanError(
            f"--imatrix {imatrix.path}: gate and down of layer {layer} have different counts, or counts of 2^32 or "
            "more; make the file again"
        )
    return profiles.LayerMoments(counts["up"].astype(np.uint32), sums["up"], sums["down"])
