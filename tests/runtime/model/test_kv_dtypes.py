"""Keys and values in few bits: what rows hold, every kind of attention against its plain twin, bytes, refusals."""

from collections import deque
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from support.cases import case
from support.choices import Choices
from support.families import NUM_POSITIONS, Tiny, token_ids, write
from support.models import PackMaker
from support.native import INSTRUCTION_SETS, operations_limited_to
from torch import Tensor

from moe_pack.formats import Pack, RunError
from moe_pack.formats.families import Checkpoint, model_spec
from moe_pack.formats.parts import GroupedQuerySpec, LatentSpec
from moe_pack.runtime import Engine, EngineOptions
from moe_pack.runtime.model import TORCH, CheckpointWeights, Decoder
from moe_pack.runtime.model.caches import KvDtype, LayerCache, layer_cache
from moe_pack.runtime.model.caches.storage import RowStorage, rotation
from moe_pack.runtime.model.compute import operations, softmax
from moe_pack.runtime.model.compute.operations import HeadNorms
from moe_pack.runtime.model.compute.softmax import View
from moe_pack.runtime.model.compute.weights import Weights
from moe_pack.runtime.model.kv_cache import KVCache
from moe_pack.runtime.offload import Sequences, least_budget
from moe_pack.runtime.offload.budgets import cache_bytes, checkpoint_bytes

CPU = torch.device("cpu")
ALL_PARTS = slice(None)
CODED: tuple[KvDtype, ...] = ("q8", "q4")
ROUNDED: tuple[KvDtype, ...] = ("bf16", *CODED)
WIDTHS = ((1,), (6,), (16,), (64,), (80,), (96,), (128,), (192,), (512, 64), (12, 6, 16))


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(5))


def read_row(row: bytes, dtype: KvDtype, widths: tuple[int, ...]) -> list[float]:
    """A second reader of a row of codes: value by value, as the storage's description says; not rotated back."""
    values, at = list[float](), 0
    for width in widths:
        number = -(-width // 32)
        each = -(-width // number)
        each += each % 2
        code_bytes = each if dtype == "q8" else each // 2
        codes, at = row[at : at + number * code_bytes], at + number * code_bytes
        scales, at = np.frombuffer(row[at : at + 2 * number], np.float16), at + 2 * number
        minima = np.zeros(number, np.float16)
        if dtype == "q4":
            minima, at = np.frombuffer(row[at : at + 2 * number], np.float16), at + 2 * number
        for i in range(width):
            block, place = divmod(i, each)
            if dtype == "q8":
                code = int(np.int8(np.uint8(codes[block * each + place])))
            else:
                byte = codes[block * code_bytes + place % code_bytes]
                code = byte >> 4 if place >= code_bytes else byte & 15
            values.append(code * float(scales[block]) + float(minima[block]))
    assert at == len(row)
    return values


def test_rows_hold_what_their_description_says() -> None:
    for dtype in CODED:
        for widths in WIDTHS:
            with case(dtype, widths):
                storage, values = RowStorage(dtype, widths), drawn(5, sum(widths))
                values[0] = 0.0
                stored = storage.encode(values)
                assert stored.shape == (5, storage.row_bytes) and stored.dtype == torch.uint8
                plain = torch.tensor([read_row(bytes(row.numpy()), dtype, widths) for row in stored])
                rotated = []
                for part, found in zip(
                    torch.split(values, list(widths), 1), torch.split(plain, list(widths), 1), strict=True
                ):
                    signs, matrix = rotation(part.shape[1], CPU)
                    pieces = (part * signs).view(5, -1, len(matrix)) @ matrix
                    # A code is off by half a step, and 16 bits of scales and minima by a part of the largest value.
                    step = (pieces.amax() - pieces.amin()) / (254 if dtype == "q8" else 15)
                    assert (pieces.flatten(1) - found).abs().max() < 0.56 * step + 1e-3
                    rotated.append((found.view(5, -1, len(matrix)) @ matrix.T).flatten(1) * signs)
                torch.testing.assert_close(
                    storage.decode(stored), torch.cat(rotated, dim=1), rtol=0, atol=1e-5
                )  # two sums of 512 float32
                assert not storage.decode(stored)[0].any(), "zeros stay zeros"


def test_rotations_keep_products_and_parts_stay_apart() -> None:
    for width in (1, 6, 64, 80, 192):
        signs, matrix = rotation(width, CPU)
        q, k = drawn(2, width)
        turned = [((each * signs).view(-1, len(matrix)) @ matrix).flatten() for each in (q, k)]
        torch.testing.assert_close(turned[0] @ turned[1], q @ k, rtol=1e-5, atol=1e-5)
    storage, values = RowStorage("q4", (64, 16, 8)), drawn(3, 88)
    whole = storage.encode(values)
    for parts, columns in ((slice(0, 2), slice(0, 80)), (slice(2, 3), slice(80, 88))):
        assert torch.equal(storage.encode(values[:, columns], parts), whole[:, storage.places(parts)])
        read = storage.decode(whole[:, storage.places(parts)], parts)
        assert torch.equal(read, storage.decode(whole)[:, columns])


# Windows and sinks; latents with and without an indexer; entries; blocks; chunks; values of another size than keys.
FAMILIES = (Tiny("mixtral", "plain"), Tiny("gpt_oss", "windows and sinks"), Tiny("deepseek_v2", "latents"),
            Tiny("glm_moe_dsa", "latents with an indexer"), Tiny("hy_v4", "latents with sinks"),
            Tiny("deepseek_v4", "entries"), Tiny("minimax_m3_vl", "blocks"), Tiny("llama4_text", "chunks"),
            Tiny("mimo_v2_flash", "values of another size"))  # fmt: skip


def coded_cache(dtype: KvDtype, shape: tuple[int, int, int], num_tokens: int) -> LayerCache:
    storage = RowStorage(dtype, shape[2:])
    keys, values = drawn(2, *shape)
    return LayerCache(storage.encode(keys), storage.encode(values), num_tokens, storage=(storage, storage))


# Tokens, positions before them, places, a window, and the values of a head. Rings, tiles that wrap, several blocks.
SHAPES = ((1, 700, 701, None, 64), (5, 300, 320, None, 128), (130, 17, 147, None, 80), (3, 0, 5, None, 6),
          (1, 100, 10, 10, 32), (9, 95, 48, 40, 96), (1, 600, 300, 300, 64))  # fmt: skip


def assert_stores(cache: LayerCache, twin: LayerCache, keys: Tensor, values: Tensor) -> None:
    """Each byte is the one of the twin, to which these keys and values came last, or of a value that rounding moves."""
    draw, near = torch.Generator().manual_seed(3), [(twin.keys.clone(), twin.values.clone())]
    if torch.equal(cache.keys, twin.keys) and torch.equal(cache.values, twin.values):
        return
    for _ in range(20):
        moved = [x + 2e-6 * x.abs().amax() * torch.randn(x.shape, generator=draw) for x in (keys, values)]
        twin.append(*moved)
        near.append((twin.keys.clone(), twin.values.clone()))
    for own, others in zip((cache.keys, cache.values), zip(*near, strict=True), strict=True):
        assert (own == torch.stack(others)).any(dim=0).all(), "no rounding stores this"
        assert (own != others[0]).float().mean() < 1e-2


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_kernels_read_codes_as_they_are_stored(instruction_set: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin reads, in torch, the bytes that the kernel wrote, which are those that torch would write."""
    native, kv_heads, group = operations_limited_to(instruction_set), 2, 3
    for (num_tokens, start, places, window, d), dtype in product(SHAPES, ROUNDED):
        with case(num_tokens, start, places, d, dtype), monkeypatch.context() as patch:
            spec = GroupedQuerySpec("grouped_query", 6, kv_heads, d, window, d**-0.5, (), "head")
            q, k, v = (drawn(num_tokens, heads * d) for heads in (kv_heads * group, kv_heads, kv_heads))
            turns = 9 * drawn(num_tokens, d // 2)
            norms = HeadNorms(1 + drawn(d) / 4, 1 - drawn(d) / 4, 1e-5)
            given = ((q, k, v), norms, (turns.cos(), turns.sin()), False)
            cache, written = (coded_cache(dtype, (kv_heads, places, d), start) for _ in range(2))
            sinks = drawn(6)
            found, entered = native.attend(*given, View(cache, spec, window, sinks)), list[tuple[Tensor, Tensor]]()
            append = LayerCache.append
            patch.setattr(LayerCache, "append", lambda to, *rows: [entered.append(rows), append(to, *rows)])
            TORCH.attend(*given, View(written, spec, window, sinks))
            patch.undo()
            assert_stores(cache, written, *entered[0])
            patch.setattr(LayerCache, "append", lambda *_: None)
            expected = TORCH.attend(*given, View(cache, spec, window, sinks))
            assert (found - expected).abs().max() <= 3e-6 * expected.abs().max()


def test_what_is_not_finite_makes_its_row_so() -> None:
    for dtype in CODED:
        for fault in (float("nan"), float("inf"), -float("inf")):
            with case(dtype, fault):
                native, cache = operations_limited_to("portable"), coded_cache(dtype, (1, 4, 64), 0)
                k, v = drawn(2, 64), drawn(2, 64)
                k[0, 3] = fault
                spec = GroupedQuerySpec("grouped_query", 1, 1, 64, None, 0.125, (), "none")
                angles = torch.ones(2, 0), torch.zeros(2, 0)
                found = native.attend((drawn(2, 64), k, v), None, angles, False, View(cache, spec, None, None))
                assert found.isnan().all(), "every query sees the first key"


THOROUGH = ("mixtral", "deepseek_v2")  # with every dtype; the others with the last


def run(weights: Weights, kv_dtype: KvDtype, ids: list[int]) -> Tensor:
    """Logits of a prompt in passes of 33 tokens at most, then of tokens one by one."""
    decoder = Decoder(weights, NUM_POSITIONS, chunk_tokens=33, cache_dtype=kv_dtype)
    return torch.cat([decoder.logits(ids[:70]), *(decoder.logits([token]) for token in ids[70:74])])


class Stored:
    """The codes that a run stored, in its order; its twin gets them back as float32 keys and values.

    A value between two codes becomes either, and all that follows would differ: so the twin's own values must be close,
    and then it has the first run's codes.
    """

    def __init__(self) -> None:
        self._rows: deque[tuple[Tensor, Tensor]] = deque()  # values, and what they are stored as
        self._encode = RowStorage.encode

    @contextmanager
    def recorded(self) -> Iterator[None]:
        def encode(storage: RowStorage, values: Tensor, parts: slice = ALL_PARTS) -> Tensor:
            self._rows.append((values, self._encode(storage, values, parts)))
            return self._rows[-1][1]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(RowStorage, "encode", encode)
            yield

    @contextmanager
    def given_back(self, dtype: KvDtype, tolerance: float) -> Iterator[None]:
        def decoded(storage: RowStorage, values: Tensor, parts: slice = ALL_PARTS) -> Tensor:
            expected, stored = self._rows.popleft()
            torch.testing.assert_close(values, expected, rtol=0, atol=tolerance)
            return RowStorage(dtype, storage.parts).decode(stored, parts)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(RowStorage, "encode", decoded)
            yield
        assert not self._rows, "the first run stored more"


def test_attention_to_codes_is_attention_to_what_they_stand_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The twin has float32 keys and values that were rounded as codes, and attends to all of them at once."""
    ids = token_ids()
    for tiny in FAMILIES:
        with closing(Checkpoint(write(tiny, tmp_path / tiny.family))) as checkpoint:
            weights = CheckpointWeights(checkpoint)
            exact = run(weights, "f32", ids)
            for dtype in ROUNDED if tiny.family in THOROUGH else ROUNDED[-1:]:
                stored, choices = Stored(), Choices()
                with case(tiny.family, dtype), monkeypatch.context() as patch:
                    for module in (operations, softmax):
                        patch.setattr(module, "MAX_DECODED_BYTES", 1 << 15)  # several blocks
                    with stored.recorded(), choices.recorded():
                        found = run(weights, dtype, ids)
                    patch.undo()
                    patch.setattr(layer_cache, "plain_dtype", lambda _: torch.bfloat16)
                    # What both have in bfloat16, as an indexer's keys, may be rounded either way.
                    with stored.given_back(dtype, 0.1), choices.forced(0.1):
                        twin = run(weights, "f32", ids)
                    # Float32 sums in another order.
                    assert (found - twin).abs().max() < 1e-4
                    assert (found - exact).abs().median() > 2e-3, "codes are not the values"


def tensors_of(cache: KVCache) -> list[Tensor]:
    """All tensors of a cache's layers with attention."""
    found = list[Tensor]()
    for layer in range(len(cache.keys)):
        held = cache.layer(layer)
        found.append(held.keys)
        if held.values.data_ptr() != held.keys.data_ptr():
            found.append(held.values)
        found += [] if held.index is None else [held.index]
        found += [] if held.compressed is None else [held.compressed.raw, held.compressed.entries]
    return found


def test_bytes_are_counted_as_they_are_stored(tmp_path: Path) -> None:
    for tiny in FAMILIES:
        spec = model_spec(write(tiny, tmp_path / tiny.family))
        for dtype in get_args(KvDtype):
            for context, chunk in ((100, 16), (20, 20)):
                with case(tiny.family, dtype, context):
                    cache = KVCache(spec, context, CPU, dtype=dtype, chunk_tokens=chunk)
                    stored = sum(each.nbytes for each in tensors_of(cache))
                    assert cache.num_bytes == stored == cache_bytes(spec, context, chunk, dtype)
                    assert cache.new_checkpoint().num_bytes == checkpoint_bytes(spec, context, chunk, dtype)


@pytest.mark.slow
def test_a_budget_has_the_bytes_of_codes(demo_pack: PackMaker) -> None:
    folder, context = demo_pack("none", 4), 200
    with Pack(folder) as opened:
        spec, least = opened.spec, list[int]()
        assert isinstance(spec.attention, GroupedQuerySpec)
        rows = 2 * spec.num_hidden_layers * spec.attention.num_kv_heads * context
        assert spec.attention.head_dim == 32
        for dtype, row_bytes in zip(get_args(KvDtype), (128, 64, 34, 20), strict=True):
            sequences = Sequences(3, kv_dtype=dtype)
            least.append(least_budget(opened.layout, context, 0, sequences))
            options = EngineOptions(budget_bytes=least[-1], kv_dtype=dtype)
            with case(dtype), Engine(opened, options, context, sequences=Sequences(3)) as engine:
                assert engine.plan is not None and engine.plan.fixed.cache == 3 * rows * row_bytes
                assert isinstance(engine.decoder, Decoder)
                assert sum(each.num_bytes for each in engine.decoder.sequences) == engine.plan.fixed.cache
                assert least[0] - least[-1] == 3 * rows * (128 - row_bytes)
                engine.decoder.next_logits([1, 2, 3])
            with case(dtype), pytest.raises(RunError, match="is too little"):
                Engine(opened, replace(options, budget_bytes=least[-1] - 1), context, sequences=Sequences(3))


def test_where_few_bits_are_not_supported_the_message_says_so(demo_pack: PackMaker, tmp_path: Path) -> None:
    with Pack(demo_pack("none", 4)) as opened:
        heads = opened.spec
    assert isinstance(heads.attention, GroupedQuerySpec)
    odd, most, wide = (replace(heads, attention=replace(heads.attention, head_dim=dim)) for dim in (18, 128, 256))
    latent = model_spec(write(Tiny("deepseek_v2", "latents"), tmp_path / "latent"))
    assert isinstance(latent.attention, LatentSpec)
    deep = replace(latent, attention=replace(latent.attention, kv_lora_rank=512, qk_rope_head_dim=64))
    for named, spec, part, instead in (
        ("q4", deep, "of 576 values", "q8, or --device cpu"),
        ("q4", odd, "of 18 values", "bf16 or f32"),
        ("q4", wide, "of 256 values", "q8, or --device cpu"),
    ):
        with case(named, part), pytest.raises(RunError, match=f"--kv-dtype {named} with .*{part}; use {instead}$"):
            EngineOptions(device="cuda", kv_dtype=named).check_gpu(spec)
    for spec in (heads, odd, wide, latent, deep):
        EngineOptions(device="cuda", kv_dtype="q8").check_gpu(spec)
    for spec in (heads, most, latent):
        EngineOptions(device="cuda", kv_dtype="q4").check_gpu(spec)
    spec = model_spec(write(Tiny("switch_transformers", "encoder"), tmp_path / "encoder"))
    for named in ("bf16", *CODED):
        with pytest.raises(RunError, match=f"--kv-dtype {named} does not support models with an encoder; remove it"):
            EngineOptions(kv_dtype=named).check_cpu(spec)
    EngineOptions(kv_dtype="f32").check_cpu(spec)
