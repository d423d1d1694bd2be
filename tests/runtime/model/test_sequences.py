"""Several sequences in one pass: each gets the bits that it has alone, mapped and offloaded, dense and sparse."""

import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from support.cases import case
from support.families import NUM_POSITIONS, Tiny, token_ids, write
from support.models import PackMaker, pack
from torch import Tensor

from moe_pack.formats import Pack
from moe_pack.formats.pack.writer import rewrite_thresholds
from moe_pack.runtime import Engine, EngineOptions
from moe_pack.runtime.cpu import Kernels, is_available
from moe_pack.runtime.model import TORCH, Decoder, NativeOperations, Operations, PackWeights, open_weights
from moe_pack.runtime.model.caches import KvDtype
from moe_pack.runtime.offload import Approximations, Sequences, least_budget
from moe_pack.runtime.offload.budgets import cache_bytes, checkpoint_bytes

CPU = torch.device("cpu")
CONTEXT = 96
LENGTHS = (20, 33, 7, 50, 41)
NUM_STEPS = 8

pytestmark = pytest.mark.skipif(not is_available(), reason="native kernels were not built")


def texts(vocab_size: int) -> list[tuple[list[int], list[int]]]:
    """Prompts of different lengths, and the tokens that follow each."""
    draw = torch.Generator().manual_seed(3)

    def tokens(number: int) -> list[int]:
        return torch.randint(vocab_size, (number,), generator=draw).tolist()

    return [(tokens(length), tokens(NUM_STEPS)) for length in LENGTHS]


def alone(decoder: Decoder, prompt: list[int], steps: list[int]) -> Tensor:
    decoder.reset()
    return torch.stack([decoder.next_logits(prompt), *(decoder.next_logits([token]) for token in steps)])


def together(decoder: Decoder, all_texts: list[tuple[list[int], list[int]]]) -> list[Tensor]:
    """Sequences join one step after the other, and leave out a step now and then."""
    found: list[list[Tensor]] = [[] for _ in all_texts]
    for turn in range(len(all_texts) + 3 * NUM_STEPS):
        if turn < len(all_texts):
            found[turn].append(decoder.extend(decoder.sequences[turn], all_texts[turn][0]))
        going = [i for i, logits in enumerate(found) if 0 < len(logits) <= NUM_STEPS and (i + turn) % 3]
        if not going:
            continue
        tokens = [all_texts[i][1][len(found[i]) - 1] for i in going]
        for i, row in zip(going, decoder.extend_each([decoder.sequences[i] for i in going], tokens), strict=True):
            found[i].append(row)
    return [torch.stack(logits) for logits in found]


@contextmanager
def native(limit: str | None = None) -> Iterator[Operations]:
    with closing(Kernels(2, limit)) as kernels:  # type: ignore[arg-type]  # a name of the loop
        yield NativeOperations(kernels)


def sparse_pack(source: Path, folder: Path) -> Path:
    """A copy of a pack in which about half of the neurons run."""
    shutil.copytree(source, folder)
    with Pack(folder) as opened:
        shape = opened.thresholds.shape
    rewrite_thresholds(folder, np.full(shape, 0.3, np.float32))
    return folder


@pytest.mark.slow
def test_each_sequence_of_a_batch_gets_the_bits_that_it_has_alone(demo_pack: PackMaker, tmp_path: Path) -> None:
    sparse = sparse_pack(demo_pack("up", 2), tmp_path / "sparse")
    for folder, limit in ((demo_pack("none", 4), None), (demo_pack("none", 4), "portable"), (sparse, None)):
        with Pack(folder) as pack, native(limit) as operations, closing(open_weights(pack, CPU, operations)) as weights:
            all_texts = texts(pack.spec.vocab_size)
            for dtype in get_args(KvDtype) if limit != "portable" else ("f32", "q4"):
                single = Decoder(weights, CONTEXT, cache_dtype=dtype)
                expected = [alone(single, *text) for text in all_texts]
                batch = Decoder(weights, CONTEXT, cache_dtype=dtype, num_sequences=len(all_texts))
                found = together(batch, all_texts)
                for number, (own, others) in enumerate(zip(expected, found, strict=True)):
                    assert torch.equal(own, others), f"sequence {number}, {folder.name}, {limit}, {dtype}"


def test_torch_agrees_but_for_rounding(demo_pack: PackMaker) -> None:
    with Pack(demo_pack("none", 4)) as pack:
        all_texts = texts(pack.spec.vocab_size)
        weights = PackWeights(pack, CPU, TORCH)
        expected = [alone(Decoder(weights, CONTEXT), *text) for text in all_texts]
        found = together(Decoder(weights, CONTEXT, num_sequences=len(all_texts)), all_texts)
    for own, others in zip(expected, found, strict=True):
        torch.testing.assert_close(own, others, rtol=0, atol=1e-4)


@pytest.mark.slow
def test_an_offloaded_batch_reads_an_expert_once_for_all(demo_pack: PackMaker, tmp_path: Path) -> None:
    sparse = sparse_pack(demo_pack("up", 2), tmp_path / "sparse")
    for folder in (demo_pack("none", 4), sparse):
        with Pack(folder) as pack:
            all_texts = texts(pack.spec.vocab_size)
            sequences = Sequences(len(all_texts), checkpoints=1)
            budget = least_budget(pack.layout, CONTEXT, 0, sequences) + (1 << 20)
            with Engine(pack, EngineOptions(budget_bytes=budget), CONTEXT, sequences=sequences) as engine:
                assert isinstance(engine.decoder, Decoder) and engine.offloaded is not None and engine.plan is not None
                found = together(engine.decoder, all_texts)
                assert engine.plan.fixed.cache == sum(each.num_bytes for each in engine.decoder.sequences)
                decode, chunk = engine.offloaded.decode, engine.decoder.chunk_tokens
            assert decode.tokens >= len(all_texts) * NUM_STEPS  # a prompt may end with a pass of one token
            assert decode.needed < decode.tokens * pack.spec.router.num_experts_per_tok * len(pack.layout.experts)
            with native() as operations, closing(open_weights(pack, CPU, operations)) as weights:
                single = Decoder(weights, CONTEXT, chunk_tokens=chunk)
                for text, own in zip(all_texts, found, strict=True):
                    assert torch.equal(alone(single, *text), own), folder.name


def test_a_batch_runs_what_ranks_high_for_one_of_its_sequences_in_place_of_what_is_missing(
    demo_pack: PackMaker,
) -> None:
    with Pack(demo_pack("none", 4)) as pack:
        all_texts = texts(pack.spec.vocab_size)
        budget = least_budget(pack.layout, CONTEXT, 0, Sequences(len(all_texts))) + (1 << 20)
        options = EngineOptions(budget_bytes=budget, approximations=Approximations(substitute=0.5))
        with Engine(pack, options, CONTEXT, sequences=Sequences(len(all_texts))) as engine:
            assert isinstance(engine.decoder, Decoder) and engine.offloaded is not None
            for sequence, (prompt, _) in zip(engine.decoder.sequences, all_texts, strict=True):
                engine.decoder.extend(sequence, prompt)
            before = engine.offloaded.decode.substituted
            engine.decoder.extend_each(engine.decoder.sequences, [steps[0] for _, steps in all_texts])
            assert engine.offloaded.decode.substituted > before


def test_a_beginning_is_taken_over_from_another_sequence(demo_pack: PackMaker) -> None:
    folder = demo_pack("none", 4)
    with Pack(folder) as pack, native() as operations, closing(open_weights(pack, CPU, operations)) as weights:
        (prompt, steps), *_ = texts(pack.spec.vocab_size)
        decoder = Decoder(weights, CONTEXT, num_sequences=2, num_checkpoints=1)
        first, second = decoder.sequences
        decoder.extend(first, prompt)
        expected = torch.stack([decoder.extend(first, [token]) for token in steps])
        assert first.num_common(prompt) == len(prompt) - 1 and first.num_kept([*prompt, 1]) == len(prompt)
        second.take_beginning(first, len(prompt))
        assert second.ids == prompt and second.num_tokens == len(prompt)
        found = torch.stack([decoder.extend(second, [token]) for token in steps])
    assert torch.equal(expected, found)


FAMILIES = ("gpt_oss", "qwen3_next", "deepseek_v4", "deepseek_v2", "qwen4_exp_text")  # rings, states, entries, n-grams
CHUNK = 16


@pytest.mark.slow
def test_every_kind_of_cache_batches_copies_and_cuts_back(tmp_path: Path) -> None:
    ids = token_ids()
    prompts, steps = (ids[:30], ids[10:35], ids[5:47]), (ids[40:48], ids[50:58], ids[20:28])
    for family in FAMILIES:
        source = write(Tiny(family, "as it comes"), tmp_path / family / "source")
        folder = tmp_path / family / "packed"
        pack(source, folder, width=8)
        with (
            case(family),
            Pack(folder) as opened,
            native() as operations,
            closing(open_weights(opened, CPU, operations)) as weights,
        ):
            for dtype in ("f32", "q8", "q4"):
                single = Decoder(weights, NUM_POSITIONS, chunk_tokens=CHUNK, cache_dtype=dtype)
                expected = [alone(single, *text) for text in zip(prompts, steps, strict=True)]
                decoder = Decoder(
                    weights, NUM_POSITIONS, chunk_tokens=CHUNK, cache_dtype=dtype, num_sequences=3, num_checkpoints=2
                )
                found = together(decoder, list(zip(prompts, steps, strict=True)))
                for own, others in zip(expected, found, strict=True):
                    # Torch's functions of single values round the last ones of a row in another way, unless a row has
                    # a multiple of 32 of them, as in published models.
                    assert_close(own, others, dtype, 1e-5)
                check_bytes(decoder, opened, dtype)
                check_cut_back(decoder, single, ids, dtype)


def assert_close(found: Tensor, expected: Tensor, dtype: KvDtype, tolerance: float) -> None:
    """Few values of a cache of codes may become other codes: their neighbours', if they lie between two."""
    differences = (found - expected).abs()
    assert differences.max() < (tolerance if dtype == "f32" else 0.02) and differences.median() < 10 * tolerance


def check_bytes(decoder: Decoder, opened: Pack, dtype: KvDtype) -> None:
    number = 0 if decoder.cache.is_cut_anywhere else 2
    spec, sizes = opened.spec, (NUM_POSITIONS, CHUNK)
    needed = cache_bytes(spec, *sizes, dtype) + number * checkpoint_bytes(spec, *sizes, dtype)
    assert [each.num_bytes for each in decoder.sequences] == 3 * [needed]


def check_cut_back(decoder: Decoder, single: Decoder, ids: list[int], dtype: KvDtype) -> None:
    """A text goes on from a checkpoint in its middle, and from a copy, with the bits of one that began again."""
    first, second, _ = decoder.sequences
    first.reset()
    for start, stop in ((0, 20), (20, 30)):
        decoder.extend(first, ids[start:stop])
        first.save_checkpoint()
    for token in ids[30:60]:
        decoder.extend(first, [token])
    other = ids[:25] + ids[60:70]
    kept = first.num_kept(other)
    assert kept == (25 if decoder.cache.is_cut_anywhere else 20)
    found = decoder.extend(first, first.keep_beginning(other))
    single.reset()
    single.next_logits(ids[:20])
    if kept > 20:
        single.next_logits(ids[20:kept])
    assert_close(found, single.next_logits(other[kept:]), dtype, 2e-6)
    second.take_beginning(first, first.num_tokens)
    assert torch.equal(decoder.extend(first, [5]), decoder.extend(second, [5]))
