"""A second reader of packs, written from docs/pack.md, docs/model.md and the table file alone, in plain numpy.

It shares no code and no file with moe_pack. Section numbers are those of docs/pack.md; "the model" is docs/model.md.
"""

import hashlib
import json
import math
import re
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from support.second_reader_roles import (
    BadPackError,
    Shape,
    attention_shapes,
    gated_norm_shapes,
    mixer_shapes,
    relative_shapes,
    require,
    stream_shapes,
)

Array = NDArray[Any]
Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

MATRICES = ("gate", "up", "down")
SELECTED = {"up": ("up",), "gate": ("gate",), "both": ("gate", "up"), "none": ()}
FEATURES = {"affine", "bf16", "byte_scales", "dense_rows", "e5m2", "fp8", "mxfp4", "repeated", "rotated", "trellis"}
FEATURES |= {"ngrams"}
REQUIRED = {"index.safetensors", "dense.safetensors", "thresholds.safetensors", "order.safetensors", "source.json"}
CODECS = {1: "bf16", 2: "affine", 3: "fp8", 4: "e5m2", 5: "mxfp4", 6: "trellis"}
FORMATS = {"bf16": (16, 0, 16), "fp8": (8, 128, 32), "e5m2": (8, 0, 8), "mxfp4": (4, 32, 8)}  # width, group, scale_bits
TABLES = json.loads((Path(__file__).parents[2] / "docs" / "trellis-tables.json").read_text())  # section 8
NUMPY_DTYPES = {
    "U8": "<u1", "U16": "<u2", "U32": "<u4", "U64": "<u8", "F16": "<f2", "BF16": "<u2", "F32": "<f4", "I32": "<i4",
    "I64": "<i8",
}  # fmt: skip
SELF_DIGEST = re.compile(rb',\n "sha256": "([0-9a-f]{64})"\n}\n')
SELF_DIGEST_BYTES = 82
INDEX_TAILS: dict[str, tuple[str, tuple[int, ...]]] = {
    "offset": ("U64", ()), "size": ("U64", ()), "selector_row_bytes": ("U32", ()), "record_row_bytes": ("U32", ()),
    "crc32": ("U32", ()), "group": ("U16", (3,)), "codec": ("U8", (3,)), "width": ("U8", (3,)),
    "scale_bits": ("U8", (3,)), "sha256": ("U8", (32,)),
}  # fmt: skip

Tensor = tuple[str, str, Shape]  # name, dtype, shape


def align(size: int, boundary: int) -> int:
    return -(-size // boundary) * boundary


@dataclass(frozen=True)
class Part:
    codec: str
    width: int
    group: int
    scale_bits: int
    has_bias: bool = False

    def num_groups(self, n: int) -> int:
        return -(-n // self.group) if self.group else 1

    def scale_bytes(self, n: int) -> int:
        if self.codec == "bf16":
            return 0
        if self.codec not in ("affine", "trellis"):
            return self.num_groups(n) * self.scale_bits // 8
        return 2 * self.num_groups(n) if self.scale_bits == 16 else 2 + self.num_groups(n)

    def bytes_behind(self, n: int) -> int:
        """Scales, zeros and bias, which lie behind the codes of all parts."""
        return self.scale_bytes(n) * (2 if self.codec == "affine" else 1) + 4 * self.has_bias

    def code_bytes(self, n: int) -> int:
        return n * self.width // (16 if self.codec == "trellis" else 8)

    def check(self, place: str) -> None:
        """Checks that section 5 has this format, except `affine` and `trellis`."""
        if self.codec not in ("affine", "trellis"):
            require((self.width, self.group, self.scale_bits) == FORMATS[self.codec], f"{place}: format")

    def decode(self, codes: Bytes, behind: Bytes, n: int) -> Floats:
        scales = behind[:, : self.scale_bytes(n)]
        if self.codec == "bf16":
            return bf16(np.ascontiguousarray(codes).view("<u2"))
        if self.codec not in ("affine", "trellis"):
            return self._decode_kept(codes, scales, n)
        scale = self._scales(scales, "u1")[:, :, None]
        if self.codec == "trellis":
            values = self._levels(codes, n).reshape(len(codes), self.num_groups(n), -1)
        else:
            zero = self._scales(behind[:, self.scale_bytes(n) : 2 * self.scale_bytes(n)], "i1")[:, :, None]
            grouped = unpack(codes, self.width).astype(np.float32).reshape(len(codes), self.num_groups(n), -1)
            values = grouped - zero
        return (values * scale).reshape(len(codes), n)

    def _decode_kept(self, codes: Bytes, scales: Bytes, n: int) -> Floats:
        weights: Floats
        if self.codec == "fp8":
            weights, scale = small_floats(codes, 4), np.ascontiguousarray(scales).view("<f4")
        else:
            weights = small_floats(codes, 5) if self.codec == "e5m2" else E2M1[unpack(codes, 4)]
            scale = np.where(scales == 255, np.nan, np.ldexp(1.0, scales.astype(np.int64) - 127)).astype(np.float32)
        with np.errstate(invalid="ignore", over="ignore"):
            weights = weights * np.repeat(scale, self.group or n, axis=1)[:, :n]
        return weights

    def _levels(self, codes: Bytes, n: int) -> Floats:
        bits = ((self.width - 4) // 2, (self.width - 3) // 2)
        values = np.empty((len(codes), n), np.float32)
        middle: Bytes = np.zeros(len(codes), np.uint8)
        newest = middle
        for t in range(n // 2):
            oldest, middle, newest = middle, newest, (codes[:, t // 2] >> 4 * (t % 2) & 15).astype(np.uint8)
            hashes = [np.array(TABLES["hash"][name], np.uint8) for name in ("newest", "middle", "oldest")]
            mixed = hashes[0][newest] ^ hashes[1][middle] ^ hashes[2][oldest]
            block, c = t // 32, t % 32 // 2 + 16 * (t % 2)
            begin = n // 4 + block * 4 * sum(bits)
            for half in (0, 1):
                refined = codes[:, begin : begin + 4 * bits[half]]
                if bits[half]:
                    u = refined[:, c % (4 * bits[half])] >> (c // (4 * bits[half]) * bits[half]) & (2 ** bits[half] - 1)
                else:
                    u = np.zeros(len(codes), np.uint8)
                levels = np.array(TABLES["levels"][str(self.width)][half], np.float32)
                values[:, 64 * block + 32 * half + c] = levels[16 * u.astype(np.int64) + (mixed >> 4 * half & 15)]
                begin += 4 * bits[half]
        return values

    def _scales(self, stored: Bytes, byte_dtype: str) -> Floats:
        stored = np.ascontiguousarray(stored)
        if self.scale_bits == 16:
            return stored.view("<f2").astype(np.float32)
        multiplier = np.ascontiguousarray(stored[:, :2]).view("<f2").astype(np.float32)
        return np.ascontiguousarray(stored[:, 2:]).view(byte_dtype).astype(np.float32) * multiplier


@dataclass(frozen=True)
class Rows:
    parts: dict[str, Part]
    n: int

    @property
    def places(self) -> dict[str, tuple[int, int]]:
        """The places of each part's codes, and of its scales, zeros and bias."""
        end, begins, places = 0, [], {}
        for part in self.parts.values():
            begins.append(align(end, 16))
            end = begins[-1] + part.code_bytes(self.n)
        for begin, (name, part) in zip(begins, self.parts.items(), strict=True):
            places[name] = (begin, end)
            end += part.bytes_behind(self.n)
        return places

    @property
    def crc_offset(self) -> int:
        name, last = list(self.parts.items())[-1]
        return self.places[name][1] + last.bytes_behind(self.n)

    @property
    def row_bytes(self) -> int:
        return align(self.crc_offset + 4, 16)

    def decode(self, rows: Bytes, place: str) -> dict[str, Floats]:
        end, places = self.crc_offset, self.places
        for number, row in enumerate(rows):
            crc = int.from_bytes(row[end : end + 4].tobytes(), "little")
            require(zlib.crc32(row[:end].tobytes()) == crc, f"{place}: row {number}: CRC-32")
            require(not row[end + 4 :].any(), f"{place}: row {number}: padding")
            stop = 0
            for name, part in self.parts.items():
                require(not row[stop : places[name][0]].any(), f"{place}: row {number}: padding before {name}")
                stop = places[name][0] + part.code_bytes(self.n)
        decoded = {}
        for name, part in self.parts.items():
            begin, behind = places[name]
            codes = rows[:, begin : begin + part.code_bytes(self.n)]
            decoded[name] = part.decode(codes, rows[:, behind : behind + part.bytes_behind(self.n)], self.n)
        return decoded


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def small_floats(codes: Bytes, exponent_bits: int) -> Floats:
    """E4M3 (four bits of exponent) or E5M2, by whole numbers (section 8)."""
    fraction_bits = 7 - exponent_bits
    e, m = (codes & 0x7F) >> fraction_bits, (codes & (2**fraction_bits - 1)).astype(np.int64)
    whole = np.where(e == 0, m, 2**fraction_bits + m)
    bias = 2 ** (exponent_bits - 1) - 1 + fraction_bits
    numbers = np.ldexp(whole.astype(np.float64), np.maximum(e.astype(np.int64), 1) - bias)
    if exponent_bits == 4:
        numbers[(e == 15) & (m == 7)] = np.nan
    else:
        numbers[e == 31] = np.where(m[e == 31] == 0, np.inf, np.nan)
    signed: Floats = np.where(codes >> 7, -numbers, numbers).astype(np.float32)
    return signed


def bf16(values: Array) -> Floats:
    return (values.astype(np.uint32) << 16).view(np.float32)


def unpack(packed: Bytes, width: int) -> Bytes:
    """Codes [rows, n] for [rows, n * width / 8] bytes of planar blocks (section 8)."""
    blocks = packed.reshape(len(packed), -1, 8 * width)
    if width == 3:
        low, high = _plane(blocks[:, :, :16], 2), _plane(blocks[:, :, 16:], 1)
        return (low + 4 * high).reshape(len(packed), -1)
    return _plane(blocks, width).reshape(len(packed), -1)


def _plane(blocks: Bytes, b: int) -> Bytes:
    codes = np.empty((*blocks.shape[:2], 64), np.uint8)
    for j in range(8 * b):
        for p in range(8 // b):
            codes[:, :, j + 8 * b * p] = (blocks[:, :, j] >> (b * p)) & (2**b - 1)
    return codes


def lay_out(groups: list[list[Tensor]], boundary: int) -> tuple[bytes, dict[str, tuple[int, int]], int]:
    """The header, each tensor's place (begin and end in the file), and the file's size (section 4)."""
    placed: list[tuple[Tensor, int, int]] = []
    end = num_pads = 0
    for group in [*groups, []]:
        if gap := align(end, boundary) - end:
            placed.append(((f"pad.{num_pads}", "U8", (gap,)), end, end + gap))
            num_pads, end = num_pads + 1, end + gap
        for name, dtype, shape in group:
            size = np.dtype(NUMPY_DTYPES[dtype]).itemsize * math.prod(shape)
            placed.append(((name, dtype, shape), end, end + size))
            end += size
    fields = (
        f'"{name}":{{"dtype":"{dtype}","shape":[{",".join(map(str, shape))}],"data_offsets":[{begin},{stop}]}}'
        for (name, dtype, shape), begin, stop in placed
    )
    text = ("{" + ",".join(fields) + "}").encode("ascii")
    text = text.ljust(align(8 + len(text), boundary) - 8)
    header = len(text).to_bytes(8, "little") + text
    places = {tensor[0]: (len(header) + begin, len(header) + stop) for tensor, begin, stop in placed}
    return header, places, len(header) + end


def rotation_matrix(d: int) -> Array:
    """R in float64, element by element (the model)."""
    size = 1
    while d % (2 * size) == 0:
        size *= 2
    m = d // size
    place, number = np.divmod(np.arange(d), size)
    angles = 2 * np.pi * (np.outer(place, place) % m) / m
    signs = [[(-1) ** bin(r & s).count("1") for s in number.tolist()] for r in number.tolist()]
    return (np.cos(angles) + np.sin(angles)) * np.array(signs) / math.sqrt(m * size)


def strict_json(raw: bytes, place: str) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        require(len(dict(pairs)) == len(pairs), f"{place}: a key appears twice")
        return dict(pairs)

    def constant(text: str) -> Any:
        raise BadPackError(f"{place}: {text}")

    try:
        return json.loads(raw.decode("utf-8"), object_pairs_hook=unique, parse_constant=constant)
    except ValueError as fault:
        raise BadPackError(f"{place}: no JSON") from fault


class SecondReader:
    """A pack read into memory and checked in full when it is opened."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.manifest = self._read_manifest()
        self._files = {file["name"]: self._content(file) for file in self.manifest["files"]}
        model = self.manifest["model"]
        self._d, self._f = model["hidden_size"], model["expert"]["intermediate_size"]
        self._L, self._E = len(model["moe_layers"]), model["router"]["num_experts"]
        shape = (self._L, self._E)
        self._index = self._table("index.safetensors", {n: (t, (*shape, *s)) for n, (t, s) in INDEX_TAILS.items()})
        self.thresholds = self._table("thresholds.safetensors", {"threshold": ("F32", shape)})["threshold"]
        require((np.isfinite(self.thresholds) & (self.thresholds >= 0)).all(), "thresholds")
        self.order = self._table("order.safetensors", {"order": ("U32", (*shape, self._f))})["order"]
        repeats = model["expert"].get("repeats", 0)
        require((repeats > 0) == ("repeated" in self.manifest["features"]), "feature repeated")
        self._num_neurons = self._f - repeats
        for order in self.order.reshape(-1, self._f):
            times = np.bincount(order, minlength=self._num_neurons)
            require(len(times) == self._num_neurons and set(times.tolist()) <= {1, 2}, "order is no permutation")
        self._rotation = self._read_rotation() if "rotated" in self.manifest["features"] else None
        self._rows = [[self._expert_rows(l, e) for e in range(self._E)] for l in range(self._L)]
        self._layers = [self._read_layer(l) for l in range(self._L)]
        self._dense_rows = {dense["name"]: dense for dense in self.manifest["dense"]}
        self._dense_places = self._lay_out_dense()

    def expert(self, l: int, e: int) -> dict[str, Floats]:
        """The expert's matrices, neurons in the order of the source, down of repeated ones added up (the model)."""
        extent = self._extent(l, e)
        weights: dict[str, Floats] = {}
        start = 0
        for rows in self._rows[l][e]:
            stop = start + self._f * rows.row_bytes
            held = np.frombuffer(extent[start:stop], np.uint8).reshape(self._f, rows.row_bytes)
            weights |= rows.decode(held, f"layer {l} expert {e}")
            start = stop
        source = {name: np.zeros((self._num_neurons, self._d), np.float32) for name in weights}
        for name, stored in weights.items():
            if name == "down" and self._num_neurons < self._f:
                np.add.at(source[name], self.order[l, e], stored)
            else:
                source[name][self.order[l, e]] = stored
        return source

    def table(self, layer: int) -> Floats:
        """The n-gram table of a decoder layer, float32 [num_rows, values] (section 9)."""
        ngrams, name = self.manifest["model"]["ngrams"], f"ngrams-{layer:03d}.safetensors"
        raw = self._files[name]
        written = strict_json(raw[8 : 8 + int.from_bytes(raw[:8], "little")], name)
        dtype, num_rows = written["table"]["dtype"], ngrams["num_rows"][ngrams["layers"].index(layer)]
        require(dtype in ("BF16", "F16", "F32"), f"{name}: dtype")
        values = ngrams["embed_dim"] // ((ngrams["ngram_size"] - 1) * ngrams["heads_per_ngram"])
        size = np.dtype(NUMPY_DTYPES[dtype]).itemsize
        row_bytes = align(values * size + 4, 16)
        header, places, file_bytes = lay_out([[("table", dtype, (num_rows, row_bytes // size))]], 4096)
        require(raw.startswith(header) and len(raw) == file_bytes, f"{name}: header")
        rows = np.frombuffer(raw[slice(*places["table"])], np.uint8).reshape(num_rows, row_bytes)
        for number, row in enumerate(rows):
            crc = int.from_bytes(row[values * size : values * size + 4].tobytes(), "little")
            require(zlib.crc32(row[: values * size].tobytes()) == crc, f"{name}: row {number}: CRC-32")
            require(not row[values * size + 4 :].any(), f"{name}: row {number}: padding")
        stored = np.ascontiguousarray(rows[:, : values * size]).view(NUMPY_DTYPES[dtype])
        return bf16(stored) if dtype == "BF16" else stored.astype(np.float32)

    def rotation(self, l: int) -> tuple[Array, Array] | None:
        """Two matrices [d, d], of the experts' input and of their sum (the model); None without rotation."""
        if self._rotation is None or not self._rotation["input"][l].any():
            return None
        R = rotation_matrix(self._d)
        return R * self._rotation["input"][l], self._rotation["output"][l][:, None] * R

    def _read_rotation(self) -> dict[str, Array]:
        """The vectors of each layer (section 5)."""
        shape = (self._L, self._d)
        found = self._table("rotation.safetensors", {"input": ("F32", shape), "output": ("F32", shape)})
        for a, b in zip(found["input"], found["output"], strict=True):
            usable = np.isfinite([a, b]).all() and np.all([a, b])
            require(usable if a.any() else not b.any(), "rotation: vectors")
        require(found["input"].any(), "rotation: no layer")
        return found

    def down_bias(self, l: int, e: int) -> Floats | None:
        """Returns the bias of the expert's output (section 6)."""
        count = self.manifest["model"]["expert"]["extra_floats"]
        if not count:
            return None
        row = self._extent(l, e)[-align(4 * count + 4, 16) :]
        require(
            zlib.crc32(row[: 4 * count]) == int.from_bytes(row[4 * count : 4 * count + 4], "little"), "CRC of extra"
        )
        require(not any(row[4 * count + 4 :]), "padding of extra")
        return np.frombuffer(row[: 4 * count], "<f4")

    def dense(self, role: str) -> Floats:
        dtype, shape, begin, end = self._dense_places[role]
        raw = self._files["dense.safetensors"][begin:end]
        if role in self._dense_rows:
            rows = self._layout_of_dense(role)
            return rows.decode(np.frombuffer(raw, np.uint8).reshape(shape), role)["weight"]
        values = np.frombuffer(raw, NUMPY_DTYPES[dtype]).reshape(shape)
        stored = bf16(values) if dtype == "BF16" else values.astype(np.float32)
        is_centered = self.manifest["model"]["norm"].get("zero_centered", False)
        if is_centered and role.endswith("norm") and not role.endswith(".mixer.out_norm"):
            return stored + np.float32(1)
        return stored

    @property
    def dense_roles(self) -> list[str]:
        return list(self._dense_places)

    def _read(self, name: str, size: int) -> bytes:
        path = self._folder / name
        require(path.is_file() and path.stat().st_size == size, f"{name}: missing, or not of {size} bytes")
        return path.read_bytes()

    def _content(self, listed: dict[str, Any]) -> bytes:
        """A file's bytes, of this SHA-256; new thresholds may still be in their partial file (section 5)."""
        name, digest = listed["name"], listed["sha256"]
        new = self._folder / f"{name}.new"
        if (
            name == "thresholds.safetensors"
            and new.is_file()
            and hashlib.sha256(new.read_bytes()).hexdigest() == digest
        ):
            name = new.name
        raw = self._read(name, listed["bytes"])
        require(hashlib.sha256(raw).hexdigest() == digest, f"{name}: SHA-256")
        return raw

    def _read_manifest(self) -> dict[str, Any]:
        raw = (self._folder / "manifest.json").read_bytes()
        require(len(raw) <= 1_000_000, "manifest.json: too long")
        manifest: dict[str, Any] = strict_json(raw, "manifest.json")
        require(manifest.get("format") == "moe-pack" and manifest.get("version") == 3, "manifest.json: version")
        require(set(manifest.get("features", ())) <= FEATURES, "manifest.json: unknown feature")
        has_vectors = any(file["name"] == "rotation.safetensors" for file in manifest["files"])
        require(has_vectors == ("rotated" in manifest["features"]), "manifest.json: rotated")
        found = SELF_DIGEST.fullmatch(raw[-SELF_DIGEST_BYTES:])
        require(found is not None, "manifest.json: does not end with its digest")
        zeroed = raw[:-SELF_DIGEST_BYTES] + b',\n "sha256": "' + b"0" * 64 + b'"\n}\n'
        require(hashlib.sha256(zeroed).hexdigest() == manifest["sha256"], "manifest.json: its own SHA-256")
        names = [file["name"] for file in manifest["files"]]
        tables = [f"ngrams-{layer:03d}.safetensors" for layer in manifest["model"].get("ngrams", {}).get("layers", [])]
        require([name for name in names if name.startswith("ngrams-")] == tables, "manifest.json: tables")
        require(bool(tables) == ("ngrams" in manifest["features"]), "manifest.json: feature ngrams")
        require(set(names) >= REQUIRED and len(set(names)) == len(names), "manifest.json: files")
        layers = [f"experts-{layer:03d}.safetensors" for layer in manifest["model"]["moe_layers"]]
        require([file["name"] for file in manifest["expert_files"]] == layers, "manifest.json: expert_files")
        lines = [(file["name"], file["sha256"], file["bytes"]) for file in manifest["files"]]
        lines += [(file["name"], file["header_sha256"], file["bytes"]) for file in manifest["expert_files"]]
        listing = "".join(f"{digest} {size} {name}\n" for name, digest, size in sorted(lines))
        require(hashlib.sha256(listing.encode()).hexdigest() == manifest["root"], "manifest.json: root")
        totals = manifest["totals"]
        require(sum(line[2] for line in lines) == totals["content"], "manifest.json: content")
        require(sum(totals.values()) == 2 * totals["content"], "manifest.json: totals")
        return manifest

    def _table(self, name: str, wanted: dict[str, tuple[str, tuple[int, ...]]]) -> dict[str, Array]:
        """The arrays of a small safetensors file, which is laid out by the rule of section 4."""
        raw = self._files[name]
        header, places, size = lay_out([[(tensor, *kind)] for tensor, kind in wanted.items()], 64)
        require(len(raw) == size and raw.startswith(header), f"{name}: header")
        return {
            tensor: np.frombuffer(raw[slice(*places[tensor])], NUMPY_DTYPES[dtype]).reshape(shape)
            for tensor, (dtype, shape) in wanted.items()
        }

    def _expert_rows(self, l: int, e: int) -> list[Rows]:
        """Selector, where the kind has one, and records (section 6)."""
        bias, parts = self.manifest["model"]["expert"]["bias"], {}
        for m, matrix in enumerate(MATRICES):
            facts = (int(self._index[name][l, e, m]) for name in ("codec", "width", "group", "scale_bits"))
            codec, width, group, scale_bits = facts
            if matrix in self.manifest["model"]["expert"]["matrices"]:
                require(codec in CODECS, f"layer {l} expert {e}: codec of {matrix}")
                parts[matrix] = Part(CODECS[codec], width, group, scale_bits, matrix in bias and matrix != "down")
                parts[matrix].check(f"layer {l} expert {e} {matrix}")
        selected = SELECTED[self.manifest["selector"]]
        selector = Rows({name: part for name, part in parts.items() if name in selected}, self._d)
        records = Rows({name: part for name, part in parts.items() if name not in selected}, self._d)
        found = self._index["selector_row_bytes"][l, e], self._index["record_row_bytes"][l, e]
        require(found == (selector.row_bytes if selector.parts else 0, records.row_bytes), "row sizes")
        return [selector, records] if selector.parts else [records]

    def _read_layer(self, l: int) -> bytes:
        """A layer's file; header, places and padding checked (sections 4 and 6)."""
        listed, groups = self.manifest["expert_files"][l], []
        extra = self.manifest["model"]["expert"]["extra_floats"]
        for e in range(self._E):
            names = [f"{e}.selector", f"{e}.records"][-len(self._rows[l][e]) :]
            group: list[Tensor] = [
                (name, "U8", (self._f, rows.row_bytes)) for name, rows in zip(names, self._rows[l][e], strict=True)
            ]
            # The values, a CRC-32, and zeros up to a multiple of 16 bytes.
            groups.append([*group, (f"{e}.extra", "U8", (1, align(4 * extra + 4, 16)))] if extra else group)
        header, places, size = lay_out(groups, 4096)
        raw = self._read(listed["name"], size)
        require((listed["bytes"], listed["header_bytes"]) == (size, len(header)), f"{listed['name']}: sizes")
        require(raw.startswith(header), f"{listed['name']}: header")
        require(hashlib.sha256(header).hexdigest() == listed["header_sha256"], f"{listed['name']}: header digest")
        for name, (begin, end) in places.items():
            require(not name.startswith("pad.") or not any(raw[begin:end]), f"{listed['name']}: {name}")
        for e, group in enumerate(groups):
            begin, end = places[group[0][0]][0], places[group[-1][0]][1]
            found = int(self._index["offset"][l, e]), int(self._index["size"][l, e])
            require(found == (begin, end - begin), f"index: place of layer {l} expert {e}")
        return raw

    def _extent(self, l: int, e: int) -> bytes:
        offset, size = int(self._index["offset"][l, e]), int(self._index["size"][l, e])
        extent = self._layers[l][offset : offset + size]
        require(zlib.crc32(extent) == self._index["crc32"][l, e], f"layer {l} expert {e}: CRC-32")
        digest = self._index["sha256"][l, e].tobytes()
        require(hashlib.sha256(extent).digest() == digest, f"layer {l} expert {e}: SHA-256")
        return extent

    def _layout_of_dense(self, role: str) -> Rows:
        kept = self._dense_rows[role]["format"]
        part = Part(kept["codec"], kept["width"], kept["group"], kept["scale_bits"])
        return Rows({"weight": part}, self._dense_rows[role]["cols"])

    def _lay_out_dense(self) -> dict[str, tuple[str, tuple[int, ...], int, int]]:
        """Each role's dtype, shape, begin and end in the dense file, whose header is checked (section 9)."""
        raw = self._files["dense.safetensors"]
        length = int.from_bytes(raw[:8], "little")
        written = strict_json(raw[8 : 8 + length], "dense.safetensors")
        tensors: list[Tensor] = []
        for role, shape in self._dense_shapes():
            require(role in written, f"dense.safetensors: {role} is missing")
            dtype = written[role]["dtype"]
            if role in self._dense_rows:
                kept = self._dense_rows[role]
                require((kept["rows"], kept["cols"]) == shape, f"manifest.json: shape of {role}")
                dtype, shape = "U8", (shape[0], self._layout_of_dense(role).row_bytes)
            else:
                known = ("I32", "I64") if role.endswith(".router_table") else ("BF16", "F16", "F32")
                require(dtype in known, f"dense.safetensors: dtype of {role}")
            tensors.append((role, dtype, shape))
        header, places, size = lay_out([[tensor] for tensor in tensors], 64)
        require(raw.startswith(header) and len(raw) == size, "dense.safetensors: header")
        return {role: (dtype, shape, *places[role]) for role, dtype, shape in tensors}

    def _dense_shapes(self) -> list[tuple[str, Shape]]:
        """Every role and its shape, in the order of the model's list of tensors."""
        model, d = self.manifest["model"], self._d
        shapes: list[tuple[str, Shape]] = [("embed", (model["vocab_size"], d))]
        for i in range(model["num_hidden_layers"]):
            mixer = model.get("mixer")
            is_mixer = mixer is not None and i in mixer["layers"]
            others = [other["attention"] for other in model.get("others", []) if i in other["layers"]]
            first = mixer_shapes(mixer, d) if is_mixer else attention_shapes([*others, model["attention"]][0], d)
            halves = model.get("halves", {"first": [], "second": []})
            residual = model.get("residual")
            layer = self._ngram_shapes(i)
            layer += [] if i in halves["second"] else [*self._first_norms(residual), *first]
            if model.get("encoder") is not None and i >= model["encoder"]["num_layers"]:
                layer += self._norm_shapes("cross_norm")
                layer += [(f"cross.{role}", shape) for role, shape in relative_shapes(model["attention"], d)]
            if i not in halves["first"]:
                has_experts = i in model["moe_layers"]
                layer += [*self._second_norms(residual, has_experts), *self._mlp_shapes(i, has_experts)]
            shapes += [(f"layers.{i}.{role}", shape) for role, shape in layer]
        if model["attention"]["kind"] == "relative":
            table = (model["attention"]["num_buckets"], model["attention"]["num_heads"])
            shapes += [("encoder_position_bias", table)] if model.get("encoder") is not None else []
            shapes.append(("position_bias", table))
        shapes += self._norm_shapes("encoder_norm") if model.get("encoder") is not None else []
        if (residual := model.get("residual")) is not None:
            shapes += stream_shapes(residual, "streams", d)
        if residual is None or residual["kind"] != "gated_streams":
            shapes += self._norm_shapes("norm")
        if not model["tied_head"]:
            shapes.append(("head", (model["vocab_size"], d)))
        return [*shapes, ("head_bias", (model["vocab_size"],))] if model["head_bias"] else shapes

    def _first_norms(self, residual: dict[str, Any] | None) -> list[tuple[str, Shape]]:
        """Returns the roles before those of attention or of a mixer."""
        if residual is None or residual["kind"] in ("shortcut", "parallel", "normed_state"):
            return self._norm_shapes("attention_norm")
        if residual["kind"] == "gated_norms":
            return [*self._norm_shapes("attention_norm"), *gated_norm_shapes(residual, "attention_gates", self._d)]
        if residual["kind"] != "normed":
            shapes = stream_shapes(residual, "attention_streams", self._d)
            return shapes if residual["kind"] == "gated_streams" else [*shapes, *self._norm_shapes("attention_norm")]
        shapes = self._norm_shapes("attention_norm") if residual["before"] else []
        return [*shapes, *self._norm_shapes("attention_post_norm")] if "attention" in residual["after"] else shapes

    def _second_norms(self, residual: dict[str, Any] | None, has_experts: bool) -> list[tuple[str, Shape]]:
        """Returns the roles before those of experts or of a dense expert."""
        if residual is None or residual["kind"] in ("shortcut", "normed_state"):
            return self._norm_shapes("mlp_norm")
        if residual["kind"] == "parallel":
            return []
        if residual["kind"] == "gated_norms":
            gates = gated_norm_shapes(residual, "mlp_gates", self._d) if has_experts else []
            return [*self._norm_shapes("mlp_norm"), *gates]
        if residual["kind"] != "normed":
            shapes = stream_shapes(residual, "mlp_streams", self._d)
            return shapes if residual["kind"] == "gated_streams" else [*shapes, *self._norm_shapes("mlp_norm")]
        apart = residual["apart"] and has_experts
        shapes = self._norm_shapes("mlp_norm") if residual["before"] and not apart else []
        if apart:
            for name in ("shared_norm", "experts_norm", "shared_post_norm", "experts_post_norm"):
                shapes += self._norm_shapes(name)
        if "mlp" in residual["after"] or (has_experts and "experts" in residual["after"]):
            shapes += self._norm_shapes("mlp_post_norm")
        return [*shapes, ("scale", (1,))] if residual["scaled"] else shapes

    def _ngram_shapes(self, i: int) -> list[tuple[str, Shape]]:
        ngrams = self.manifest["model"].get("ngrams")
        if ngrams is None or i not in ngrams["layers"]:
            return []
        residual = self.manifest["model"].get("residual") or {}
        width, embed_dim = residual.get("streams", 1) * self._d, ngrams["embed_dim"]
        shapes: list[tuple[str, Shape]] = [("ngrams.key", (width, embed_dim)), ("ngrams.value", (self._d, embed_dim))]
        shapes += [(f"ngrams.{name}_norm", (width,)) for name in ("key", "query", "conv")]
        return [*shapes, ("ngrams.conv", (width * ngrams["conv_kernel"],))]

    def _norm_shapes(self, role: str) -> list[tuple[str, Shape]]:
        norm = self.manifest["model"]["norm"]
        biased = norm["kind"] == "layer" and not norm.get("unbiased", False)
        return [(name, (self._d,)) for name in ([role, f"{role}_bias"] if biased else [role])]

    def _mlp_shapes(self, i: int, has_experts: bool) -> list[tuple[str, Shape]]:
        model, d = self.manifest["model"], self._d
        if not has_experts:
            return self._neurons("mlp", model["dense_intermediate_size"])
        router, num_logits = model["router"], self._E + model["router"].get("num_identity", 0)
        shapes: list[tuple[str, Shape]] = [("router", (num_logits, d))]
        if router.get("logit_bias", False):
            shapes.append(("router_logit_bias", (num_logits,)))
        if i in router.get("table_layers", []):
            shapes.append(("router_table", (model["vocab_size"], router["num_experts_per_tok"])))
        elif router["bias"]:
            shapes.append(("router_bias", (num_logits,)))
        if router.get("input_scale", False):
            shapes.append(("router_scale", (d,)))
        if router.get("expert_scale", False):
            shapes.append(("router_expert_scale", (self._E,)))
        if (shared := model["shared_expert"]) is not None:
            shapes += self._neurons("shared", shared["intermediate_size"])
            if shared["gated"]:
                shapes.append(("shared_router", (1, d)))
        return shapes

    def _neurons(self, role: str, size: int) -> list[tuple[str, Shape]]:
        shapes: dict[str, Shape] = {"gate": (size, self._d), "up": (size, self._d), "down": (self._d, size)}
        return [(f"{role}.{name}", shapes[name]) for name in self.manifest["model"]["expert"]["matrices"]]
