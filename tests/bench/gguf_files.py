"""How fast GGUF files are read and written, how much memory that takes, and what a quantized source costs.

    python tests/bench/gguf_files.py rates
    python tests/bench/gguf_files.py convert
    python tests/bench/gguf_files.py export
    python tests/bench/gguf_files.py losses model-F16.gguf model-Q8_0.gguf model-Q4_K_M.gguf

`rates` dequantizes a matrix of random blocks of each type, in one thread. `convert` writes a file with the dimensions
of Qwen3-30B-A3B, fewer layers and experts, and random blocks, and makes a pack of it in a process of its own. `export`
makes a file of that pack. Times are processor time, which other work on the machine changes least. `losses` makes a
profile and calibrated packs of each file, and compares every file and pack with the first file's predictions on the
same tokens.
"""

import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from statistics import median
from typing import Any

import click
import gguf
import numpy as np
import torch
from benchlib import (
    BOOK,
    DEMO_MODEL,
    ROOT,
    SEQUENCE_LENGTH,
    finish,
    json_option,
    moe_pack,
    moe_pack_command,
    table,
)
from benchlib.judging import Blocks, Judge, paired_difference
from numpy.typing import NDArray

from moe_pack.calib.forward import read_tokens
from moe_pack.formats import Pack
from moe_pack.formats.families import Checkpoint
from moe_pack.formats.gguf import GgufFiles, vocabulary_fields
from moe_pack.runtime import Text
from moe_pack.runtime.model import CheckpointWeights, Decoder, PackWeights, operations_for

_TYPES = ("Q8_0", "Q6_K", "Q5_K", "Q4_K", "Q2_K", "IQ4_XS", "IQ3_XXS", "MXFP4")
_SIZE = 4096  # rows and columns of the matrix
_TEMPLATE = ROOT / "tests" / "data" / "gguf" / "qwen3_moe.gguf"  # its tokenizer and the keys of its metadata
_HIDDEN, _INTERMEDIATE, _HEADS, _KV_HEADS, _HEAD_DIM, _VOCAB = 2048, 768, 32, 4, 128, 4096
_MOST_BYTE = 60  # of random blocks, so that scales in float16 are below 1


@click.group(help=(__doc__ or "").splitlines()[0])
def main() -> None:
    pass


@main.command(help="Dequantizes random blocks of each type.")
@click.option("--rounds", default=3, show_default=True)
@json_option
def rates(rounds: int, as_json: bool) -> None:
    found = {name: median(_rate(name) for _ in range(rounds)) for name in _TYPES}
    rows = [(name, f"{rate:.0f}") for name, rate in found.items()]
    finish({"megabytes_a_second": found}, table(("type", "MB/s of the file"), rows), as_json)


def _rate(name: str) -> float:
    blocks = _random_blocks(name, (_SIZE, _SIZE))
    start = time.process_time()
    gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[name])
    return blocks.nbytes / 1e6 / (time.process_time() - start)


def _random_blocks(name: str, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """Returns the bytes of a tensor `[..., columns]` of a type: u8 [..., bytes of a row]."""
    block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    shape = (*shape[:-1], shape[-1] // block * block_bytes)
    return np.random.default_rng(0).integers(0, _MOST_BYTE, shape, np.uint8)


@main.command(help="Converts a file with Qwen3-30B-A3B's dimensions.")
@click.option("--layers", default=4, show_default=True)
@click.option("--experts", default=64, show_default=True)
@json_option
def convert(layers: int, experts: int, as_json: bool) -> None:
    with tempfile.TemporaryDirectory(prefix="moe-pack-") as scratch:
        path = Path(scratch) / "model.gguf"
        _write(path, layers, experts)
        facts = {"file_bytes": path.stat().st_size, **_pack(path, Path(scratch) / "packed")}
    _finish(facts, as_json)


@main.command(help="Makes GGUF files of a pack with Qwen3-30B-A3B's dimensions.")
@click.option("--layers", default=4, show_default=True)
@click.option("--experts", default=64, show_default=True)
@click.option("--type", "kind", default="q8_0", show_default=True)
@json_option
def export(layers: int, experts: int, kind: str, as_json: bool) -> None:
    with tempfile.TemporaryDirectory(prefix="moe-pack-") as scratch:
        folder = Path(scratch)
        _write(folder / "model.gguf", layers, experts)
        _pack(folder / "model.gguf", folder / "packed")
        options = ("--to", "gguf", "--type", kind, "-o", folder / "out", "--compare-tokens", "0")
        facts = _run("export", folder / "packed", *options)
        facts["file_bytes"] = next((folder / "out").iterdir()).stat().st_size
    _finish(facts, as_json)


def _pack(path: Path, folder: Path) -> dict[str, float]:
    return _run("convert", path, "-o", folder, "--quantizer", "nearest", "--workers", "1")


def _run(*arguments: object) -> dict[str, float]:
    """Runs a command of `moe-pack`; returns its processor time and its memory."""
    with subprocess.Popen(moe_pack_command(*arguments)) as process:
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise click.ClickException(f"moe-pack {arguments[0]} failed")
    return {"cpu_s": used.ru_utime + used.ru_stime, "peak_bytes": used.ru_maxrss << 10}


def _finish(facts: dict[str, float], as_json: bool) -> None:
    row = (f"{facts['file_bytes'] / 1e6:.0f}", f"{facts['cpu_s']:.1f}", f"{facts['peak_bytes'] / 2**30:.2f}")
    finish(facts, table(("file, MB", "processor time, s", "peak memory, GiB"), [row]), as_json)


@main.command(help="Measures what packs of quantized files lose against the first file, which is not quantized.")
@click.argument("files", type=click.Path(path_type=Path, exists=True), nargs=-1, required=True)
@click.option("--bits", multiple=True, default=("4", "3", "2"), show_default=True, help="Of an expert weight.")
@click.option("--tokens", default=16384, show_default=True)
@click.option("--text", type=click.Path(path_type=Path, exists=True), default=BOOK, show_default=True)
@json_option
def losses(files: tuple[Path, ...], bits: tuple[str, ...], tokens: int, text: Path, as_json: bool) -> None:
    with closing(GgufFiles(files[0])) as original:
        judged = read_tokens(str(text), None, Text(original), tokens, SEQUENCE_LENGTH)
    found: dict[str, dict[str, Any]] = {}
    first: list[Blocks] = []
    with ExitStack() as stack:
        opened = [stack.enter_context(closing(Checkpoint(GgufFiles(file)))) for file in files]
        judge = Judge(opened[0], judged)
        for file, checkpoint in zip(files, opened, strict=True):
            own = judge.blocks(Decoder(CheckpointWeights(checkpoint), SEQUENCE_LENGTH))
            packs = list(_packs_blocks(file, bits, (judge, Judge(checkpoint, judged))))
            first = first or [of_first for of_first, _ in packs]
            found[file.name] = {
                "bytes": file.stat().st_size,
                "kl": own.mean(),
                "packs": {
                    width: {
                        "kl_of_first": of_first.mean(),
                        "kl_of_file": of_file.mean(),
                        "more": str(paired_difference(of_first, other)),
                    }
                    for width, (of_first, of_file), other in zip(bits, packs, first, strict=True)
                },
            }
    rows = [
        (
            name,
            f"{each['bytes'] / 1e6:.1f}",
            f"{each['kl']:.4f}",
            width,
            f"{pack['kl_of_first']:.4f}",
            pack["more"],
            f"{pack['kl_of_file']:.4f}",
        )
        for name, each in found.items()
        for width, pack in each["packs"].items()
    ]
    header = ("source", "MB", "its KL", "bits", "KL of the pack", "more than from the first", "KL from its source")
    finish(found, table(header, rows), as_json)


def _packs_blocks(file: Path, bits: tuple[str, ...], judges: tuple[Judge, Judge]) -> Iterator[tuple[Blocks, Blocks]]:
    """Yields the divergence of calibrated packs of a file from both judges' sources, for each width."""
    cpu = torch.device("cpu")
    with tempfile.TemporaryDirectory(prefix="moe-pack-") as folder:
        profile = Path(folder) / "profile"
        moe_pack("profile", file, "-o", profile, "--tokens", 8192, "--sensitivity", "none")
        for width in bits:
            packed = Path(folder) / width
            moe_pack("convert", file, "--profile", profile, "--selector", "none", "--record-bits", width, "-o", packed)
            with Pack(packed) as pack, operations_for(cpu) as operations:
                decoder = Decoder(PackWeights(pack, cpu, operations), SEQUENCE_LENGTH)
                yield judges[0].blocks(decoder), judges[1].blocks(decoder)


def _write(path: Path, layers: int, experts: int) -> None:
    """Writes a GGUF file of random blocks: embedding and head in Q8_0, other matrices in Q4_K."""
    writer, d, f = gguf.GGUFWriter(path, "qwen3moe"), _HIDDEN, _INTERMEDIATE
    sizes = {
        "embedding_length": d, "block_count": layers, "expert_count": experts, "expert_used_count": 8,
        "expert_feed_forward_length": f, "feed_forward_length": 6144, "attention.head_count": _HEADS,
        "attention.head_count_kv": _KV_HEADS, "attention.key_length": _HEAD_DIM, "attention.value_length": _HEAD_DIM,
        "context_length": 4096, "rope.dimension_count": _HEAD_DIM,
    }  # fmt: skip
    for name, field in gguf.GGUFReader(_TEMPLATE).fields.items():
        if not name.startswith(("GGUF", "tokenizer")) and name != "general.architecture":
            value = sizes.get(name.removeprefix("qwen3moe."), field.contents())
            writer.add_key_value(name, value, field.types[0], field.types[1] if len(field.types) > 1 else None)

    _add_vocabulary(writer)

    def coded(name: str, *shape: int, kind: str = "Q4_K") -> None:
        writer.add_tensor(f"{name}.weight", _random_blocks(kind, shape), raw_dtype=gguf.GGMLQuantizationType[kind])

    def norm(name: str, size: int) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(size, np.float32))

    coded("token_embd", _VOCAB, d, kind="Q8_0")
    coded("output", _VOCAB, d, kind="Q8_0")
    norm("output_norm", d)
    for layer in (f"blk.{i}" for i in range(layers)):
        for name, size in (("attn_norm", d), ("ffn_norm", d), ("attn_q_norm", _HEAD_DIM), ("attn_k_norm", _HEAD_DIM)):
            norm(f"{layer}.{name}", size)
        coded(f"{layer}.attn_q", _HEADS * _HEAD_DIM, d)
        coded(f"{layer}.attn_k", _KV_HEADS * _HEAD_DIM, d)
        coded(f"{layer}.attn_v", _KV_HEADS * _HEAD_DIM, d)
        coded(f"{layer}.attn_output", d, _HEADS * _HEAD_DIM)
        writer.add_tensor(f"{layer}.ffn_gate_inp.weight", np.zeros((experts, d), np.float32))
        coded(f"{layer}.ffn_gate_exps", experts, f, d)
        coded(f"{layer}.ffn_up_exps", experts, f, d)
        coded(f"{layer}.ffn_down_exps", experts, d, f)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_vocabulary(writer: gguf.GGUFWriter) -> None:
    """Adds the demo model's tokenizer."""
    files = {name: (DEMO_MODEL / name).read_bytes() for name in ("tokenizer.json", "tokenizer_config.json")}
    fields = vocabulary_fields(files, _VOCAB)
    writer.add_tokenizer_model(fields["tokenizer.ggml.model"])
    writer.add_tokenizer_pre(fields["tokenizer.ggml.pre"])
    writer.add_token_list(fields["tokenizer.ggml.tokens"])
    writer.add_token_types(fields["tokenizer.ggml.token_type"])
    writer.add_token_merges(fields["tokenizer.ggml.merges"])


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
