"""What a key-value cache in few bits costs: KL divergence, bytes and time, by `--kv-dtype` and by length.

    python tests/bench/kv_cache.py quality packed/ --tokens 1024 --tokens 4096
    python tests/bench/kv_cache.py quality packed/ --tokens 1024 --without-rotation
    python tests/bench/kv_cache.py speed

quality: a text runs up to each length with float32 keys and values, and with each other dtype, in the same pack. The
predictions of the last positions are compared: KL in nats a token over the whole vocabulary, its standard error over
positions, and the share of positions at which the likeliest token is the same. Prompts run in passes, and every
position reads earlier keys and values as they are stored. `--without-rotation` stores codes of values that are not
rotated; torch computes all attention then.

speed: attention of one layer by the native kernels, for one token and for 128, after some positions, with the heads of
SmolLM2-135M and of Mixtral. Dtypes take turns; medians, and their ratio to float32's.
"""

import statistics
import time
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import NamedTuple, get_args

import click
import torch
from benchlib import BOOK, finish, json_option, table
from torch import Tensor

from moe_pack.formats import Pack
from moe_pack.formats.parts import GroupedQuerySpec
from moe_pack.runtime import Text
from moe_pack.runtime.cpu import Kernels
from moe_pack.runtime.model import Decoder, NativeOperations, Operations, open_weights, operations_for
from moe_pack.runtime.model.caches import KvDtype, LayerCache, storage

CPU = torch.device("cpu")


class TorchAttention(NativeOperations):
    """Native operations, but for attention."""

    attend = Operations.attend


@dataclass(frozen=True, slots=True)
class Measured:
    """A dtype at a length; `agrees`: the share of positions with the same likeliest token."""

    kv_dtype: str
    tokens: int
    cache_bytes: int
    kl: float
    kl_error: float
    agrees: float
    seconds: float


def predictions(decoder: Decoder, ids: list[int], num_compared: int) -> Tensor:
    """Returns the log-probabilities of the last positions of a text, float32 [num_compared, V]."""
    decoder.reset()
    first = len(ids) - num_compared
    if first:
        decoder.next_logits(ids[:first])
    return decoder.logits(ids[first:]).log_softmax(dim=-1)


def compared(expected: Tensor, found: Tensor) -> tuple[float, float, float]:
    """Returns KL in nats a token, its standard error, and the share of equal likeliest tokens."""
    each = (expected.double().exp() * (expected.double() - found.double())).sum(dim=-1)
    same = (expected.argmax(dim=-1) == found.argmax(dim=-1)).double().mean()
    return float(each.mean()), float(each.std() / len(each) ** 0.5), float(same)


def measure(pack: Path, text: Path, lengths: list[int], num_compared: int, operations: Operations) -> list[Measured]:
    """Measures every dtype at every length."""
    found = []
    with Pack(pack) as opened, closing(open_weights(opened, CPU, operations)) as weights:
        ids = Text(opened).encode(text.read_text("utf-8")[: 20 * max(lengths)])
        for length in lengths:
            if len(ids) < length or opened.spec.max_position_embeddings < length:
                raise click.UsageError(f"--tokens {length}: the text has {len(ids)}, the model's context "
                                       f"{opened.spec.max_position_embeddings}")  # fmt: skip
            expected: Tensor | None = None
            for dtype in get_args(KvDtype):
                decoder, begin = Decoder(weights, length, CPU, cache_dtype=dtype), time.perf_counter()
                logs = predictions(decoder, ids[:length], num_compared)
                seconds = time.perf_counter() - begin
                expected = logs if expected is None else expected
                found.append(Measured(dtype, length, decoder.cache.num_bytes, *compared(expected, logs), seconds))
    return found


def same_values(width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Stands for `storage.rotation`: returns signs and a matrix that change nothing."""
    return torch.ones(width, device=device), torch.ones((1, 1), device=device)


@click.group(help=(__doc__ or "").splitlines()[0])
def main() -> None:
    pass


@main.command("quality", help="KL divergence and bytes of a pack.")
@click.argument("pack", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--tokens", "lengths", multiple=True, type=click.IntRange(2), default=(1024,), show_default=True)
@click.option("--compared", default=256, show_default=True, type=click.IntRange(1), help="Of the last positions.")
@click.option("--text", default=BOOK, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--without-rotation", is_flag=True, help="Store codes of keys and values that are not rotated.")
@json_option
def quality(
    pack: Path, lengths: tuple[int, ...], compared: int, text: Path, without_rotation: bool, as_json: bool
) -> None:
    if without_rotation:
        storage.rotation = same_values  # type: ignore[assignment]  # a function that is no cached one
    with operations_for(CPU) as operations:
        if without_rotation and isinstance(operations, NativeOperations):
            operations = TorchAttention(operations.kernels)
        found = measure(pack, text, sorted(lengths), compared, operations)
    rows = [
        (
            each.kv_dtype,
            f"{each.tokens:,}",
            f"{each.cache_bytes:,}",
            f"{each.kl:.6f}",
            f"{each.kl_error:.6f}",
            f"{each.agrees:.1%}",
            f"{each.seconds:.1f}",
        )
        for each in found
    ]
    header = ("kv-dtype", "tokens", "cache bytes", "KL", "error", "same token", "seconds")
    finish({"measured": [asdict(each) for each in found]}, table(header, rows), as_json, [])


class Heads(NamedTuple):
    """The heads of a model's attention."""

    model: str
    num_kv_heads: int
    group: int
    head_dim: int


COLD_BYTES = 128 << 20  # of all layers with float32, so that none stays in the processor's cache
HEADS = (Heads("SmolLM2-135M", 3, 3, 64), Heads("Mixtral", 8, 4, 128))


def attention_times(heads: Heads, positions: int, num_tokens: int, kernels: Kernels, rounds: int) -> dict[str, float]:
    """Returns the median seconds of one layer's attention for each dtype; the next layer's cache is a cold one."""
    kv_heads, d, operations = heads.num_kv_heads, heads.head_dim, NativeOperations(kernels)
    spec = GroupedQuerySpec("grouped_query", kv_heads * heads.group, kv_heads, d, None, d**-0.5, (), "none")
    widths = (kv_heads * heads.group * d, kv_heads * d, kv_heads * d)
    q, k, v = (torch.randn(num_tokens, width) for width in widths)
    turns, few = torch.randn(num_tokens, d // 2), torch.randn(kv_heads, 256, d)
    layers = -(-COLD_BYTES // (8 * kv_heads * positions * d)) if num_tokens == 1 else 1
    caches, times = dict[str, list[LayerCache]](), dict[str, list[float]]()
    for dtype in get_args(KvDtype):
        rows = storage.RowStorage(dtype, (d,))
        stored = rows.encode(few).repeat(1, -(-positions // 256), 1)[:, :positions].contiguous()
        start = positions - num_tokens
        each = (LayerCache(stored.clone(), stored.clone(), start, storage=(rows, rows)) for _ in range(layers))
        caches[dtype] = list(each)
        times[dtype] = []
    for _ in range(rounds):
        for dtype, held in caches.items():
            begin = time.perf_counter()
            for cache in held:
                operations.attend((q, k, v), None, (turns.cos(), turns.sin()), False, cache, spec, None, None)
            times[dtype].append((time.perf_counter() - begin) / len(held))
    return {dtype: statistics.median(each) for dtype, each in times.items()}


@main.command("speed", help="Times of attention.")
@click.option("--threads", default=2, show_default=True, type=click.IntRange(1))
@click.option("--limit", default="avx512vbmi", show_default=True, help="An instruction set.")
@click.option("--positions", multiple=True, default=(4096, 16384), show_default=True, type=click.IntRange(256))
@json_option
def speed(threads: int, limit: str, positions: tuple[int, ...], as_json: bool) -> None:
    torch.set_num_threads(1)
    rows, found = [], []
    with closing(Kernels(threads, limit)) as kernels:  # type: ignore[arg-type]  # it refuses other names
        for heads, number, (num_tokens, rounds) in product(HEADS, positions, ((1, 21), (128, 5))):
            times = attention_times(heads, number, num_tokens, kernels, rounds)
            found.append({"model": heads.model, "positions": number, "tokens": num_tokens, **times})
            each = [f"{1e6 * time:,.0f} ({time / times['f32']:.2f})" for time in times.values()]
            rows.append((heads.model, f"{number:,}", str(num_tokens), *each))
    header = ("heads of", "positions", "tokens", *(f"{dtype}, us" for dtype in get_args(KvDtype)))
    finish({"times": found}, table(header, rows), as_json, [])


if __name__ == "__main__":
    main()
