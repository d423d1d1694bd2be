"""GGUF files of a pack's dimensions, for llama.cpp: metadata and tensors are those that `moe-pack export` writes.

A file has its pack's routers, embedding, attention and norms, in Q4_0 where the pack has 4 bit and in Q8_0 where it has
8, and experts of random codes, under scales that give them the deviation of the pack's: tokens go to experts as in the
pack, some often, some seldom. Of the experts that 24 random tokens chose in each layer, 91 to 98% were the pack's own
choices; at OLMoE's dimensions, 16 layers, 92 to 96% (llama-cpp-python 0.3.36). Without a pack, all of it is random.
"""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import click
import gguf as package
import numpy as np
import torch
from numpy.typing import NDArray

from benchlib.packs import SPARSE
from moe_pack.convert.export import gguf as export
from moe_pack.formats import ModelSpec, Pack, gguf
from moe_pack.runtime.model import TORCH, PackWeights

Blocks = NDArray[np.uint8]
DEFAULT_TYPE = "Q4_0"  # 4.5 bits a weight
EXPERT_TYPES = (DEFAULT_TYPE, "Q4_K", "IQ2_XXS")
_DEVIATION = 0.02
_EMBEDDING_SCALE = 256.0  # so that tokens stay different after some layers, and go to different experts
_POOL_BYTES = 1 << 25


def make_gguf(pack: Path, expert_type: str = DEFAULT_TYPE) -> Path:
    """Returns a synthetic pack's GGUF in the same folder, made unless it is there.

    A pack of which some neurons do not run has the GGUF of the pack of which all run: llama.cpp runs all of both.
    """
    with Pack(pack) as opened:
        widths = {dense.format.width for dense in opened.manifest.dense}
        dense_type = "Q8_0" if widths == {8} else "Q4_0"
        path = pack.with_name(f"{pack.name.removesuffix(SPARSE)}-{dense_type}-{expert_type}.gguf")
        if not path.exists():
            click.echo(f"making {path}", err=True)
            write_gguf(path, opened.spec, dense_type, expert_type, opened)
    return path


def write_gguf(
    path: Path, spec: ModelSpec, dense_type: str, expert_type: str = DEFAULT_TYPE, pack: Pack | None = None
) -> None:
    """Writes a temporary file, and renames it. All cores copy random blocks into it, which is mapped."""
    model, generator = gguf.gguf_model(spec), np.random.default_rng(0)
    tensors = []
    for place in model.placements:
        is_expert = isinstance(place, gguf.ExpertPlacement)
        kind = expert_type if is_expert else dense_type if getattr(place, "is_matrix", False) else "F32"
        tensors.append((place.name, kind, place.shape))
    (layout,) = gguf.lay_out_parts(model.metadata | _vocabulary(spec.vocab_size), [tensors])
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(layout.header)
    os.truncate(temporary, layout.num_bytes)
    mapped = np.memmap(temporary, np.uint8, "r+")
    deviations = {} if pack is None else _deviations(pack)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        copies = []
        for place, entry in zip(model.placements, layout.entries, strict=True):
            target = mapped[entry.offset : entry.offset + entry.num_bytes]
            if pack is not None and not isinstance(place, gguf.ExpertPlacement):
                _write_dense(pack, place, (entry.name, entry.dtype, entry.shape), target)
            elif entry.dtype == "F32":
                values = generator.standard_normal(entry.shape, np.float32) * np.float32(_DEVIATION)
                target[:] = (values + np.float32("norm" in entry.name)).reshape(-1).view(np.uint8)
            else:
                scale = _EMBEDDING_SCALE if entry.name == "token_embd.weight" else 1.0
                pool = _pool(entry.dtype, deviations.get(entry.name.split(".")[-2], _DEVIATION * scale))
                copies += [threads.submit(np.copyto, *piece) for piece in _pieces(target, pool, generator)]
        for copy in copies:
            copy.result()
    mapped.flush()
    temporary.rename(path)


def _write_dense(
    pack: Pack,
    place: gguf.Placement | gguf.ConstantPlacement,
    stored: tuple[str, str, tuple[int, ...]],
    target: Blocks,
) -> None:
    def put(_: str, begin: int, raw: Blocks) -> None:
        target[begin : begin + len(raw)] = raw

    if isinstance(place, gguf.ConstantPlacement):
        export.put_constant(place, put)
    else:
        export.put_dense(pack, TORCH, place, stored, put)


def _vocabulary(size: int) -> dict[str, Any]:
    """A token's text is its number: llama-server writes text, whatever it is asked."""
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [f"{number} " for number in range(size)],
        "tokenizer.ggml.scores": [0.0] * size,
        "tokenizer.ggml.token_type": [1] * size,
    }


@cache
def _pool(kind: str, deviation: float) -> Blocks:
    """Blocks of random codes, u8 [blocks, bytes of a block], about `_POOL_BYTES` of them, of weights around 0."""
    generator = np.random.default_rng(1)
    type_ = package.GGMLQuantizationType[kind]
    _, num_bytes = package.GGML_QUANT_SIZES[type_]
    blocks: Blocks = generator.integers(0, 256, (_POOL_BYTES // num_bytes | 1, num_bytes), np.uint8)
    if kind == "Q4_0":
        # No code 0, which has no opposite: codes whose mean is not 0 add one direction to all hidden states, and after
        # a layer all tokens go to the same experts.
        blocks = np.where(blocks & 0x0F, blocks, blocks | 0x08)
        blocks = np.where(blocks & 0xF0, blocks, blocks | 0x80)
    if kind == "Q4_K":  # all scales and minima of sub-blocks are 32, and a minimum is the mean of codes
        blocks[:, 4:12], blocks[:, 12:16] = 0xA0, 0
        blocks[:, 2:4] = np.array([7.5], np.float16).view(np.uint8)
    blocks[:, :2] = np.array([1.0], np.float16).view(np.uint8)
    scale = deviation / package.quants.dequantize(blocks[:1024], type_).std()
    blocks[:, :2] = np.array([scale], np.float16).view(np.uint8)
    if kind == "Q4_K":
        blocks[:, 2:4] = np.array([7.5 * scale], np.float16).view(np.uint8)
    return blocks


def _pieces(target: Blocks, pool: Blocks, generator: np.random.Generator) -> Iterator[tuple[Blocks, Blocks]]:
    """Yields parts of a matrix in bytes, each with a piece of the pool from a random place on."""
    done = 0
    while done < len(target):
        piece = pool[int(generator.integers(len(pool))) :].reshape(-1)[: len(target) - done]
        yield target[done : done + len(piece)], piece
        done += len(piece)


def _deviations(pack: Pack) -> dict[str, float]:
    """Of the weights of experts, by GGUF's names: those of the first."""
    blocks = list(PackWeights(pack, torch.device("cpu")).expert(0, 0).blocks())
    gates = [block.gate for block in blocks if block.gate is not None]
    matrices = {"gate": gates, "up": [block.up for block in blocks], "down": [block.down for block in blocks]}
    return {f"ffn_{name}_exps": float(torch.cat(parts).std()) for name, parts in matrices.items()}
