"""Passes of many tokens: bytes over the link, launches, and waits of the host."""

from pathlib import Path

import pytest
import torch
from gpu.launches import WAIT, count_prompt, is_triton
from support.gpu_runs import GpuRun, gpu_engine, reference_logits
from support.models import TinyMixtral, pack

from moe_pack.formats import Pack
from moe_pack.runtime.gpu.fit import EXACT_HALVES, FAST_HALVES, Slicing
from moe_pack.runtime.offload import ExpertKey

NUM_PASSES, CHUNK_TOKENS = 2, 16
IDS = [(37 * i + 5) % 96 for i in range(NUM_PASSES * CHUNK_TOKENS)]


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prompts")
    pack(
        TinyMixtral(num_layers=2, num_experts=8, config={"num_experts_per_tok": 2}).write(folder / "source"),
        folder / "packed",
    )
    return folder / "packed"


@pytest.mark.parametrize("share", [0.0, 0.3, 0.5])
def test_each_missing_byte_of_an_expert_comes_over_the_link_once_a_pass(share: float, packed: Path) -> None:
    run = GpuRun(share, "pull", chunk_tokens=CHUNK_TOKENS)
    with gpu_engine(packed, run) as engine:  # of 8 experts, 2 a token
        stream, kinds = engine.weights.stream, engine.memory.kinds
        keys = [ExpertKey(l, e) for l, layer in enumerate(kinds) for e in range(len(layer))]
        pieces = [stream.missing(key) for key in keys if not stream.is_static(key)]
        assert pieces, "some rows are missing"
        logits = engine.decoder.logits(IDS)
        assert stream.copied_bytes == NUM_PASSES * sum(stop - start for start, stop in pieces)
    torch.testing.assert_close(logits, reference_logits(packed, IDS), atol=1e-4, rtol=0)


def test_a_resident_prompt_waits_for_nothing_and_its_launches_are_counted(tmp_path: Path) -> None:
    found = count_prompt("qwen3-30b-a3b", tmp_path, 512)
    assert found.total(lambda name: name == WAIT) == 0
    # 128 experts of which 14 are decoded at once; a step has a decode, two products and the rounding between them.
    assert (found.num_steps, found.spare_steps) == (10, 1)
    assert found.total(is_triton, found.spare_steps) == found.total(is_triton) - 9 * 4 * 48
    assert sum(found.step.values()) == 4
    # Queries, keys, values, output and router: each is rounded, decoded and multiplied.
    (layers,) = found.layers
    assert [layers.launches[name] for name in ("_decode_rows_kernel", "_multiply_kernel")] == [5, 5]
    assert layers.launches["_round_rows_kernel"] == 5 + 1 + 1


def test_few_tokens_run_one_after_another(packed: Path) -> None:
    expected = reference_logits(packed, IDS)
    with gpu_engine(packed, GpuRun(0.5, chunk_tokens=CHUNK_TOKENS, few_tokens=4)) as engine:
        decoder = engine.decoder
        found = [decoder.logits(IDS[:4]), decoder.logits(IDS[4:9]), decoder.extend(decoder.sequences[0], IDS[9:12])]
        assert decoder.counts().tokens == 4 + 3, "five are a pass"
    torch.testing.assert_close(torch.cat(found[:2]), expected[:9], atol=1e-4, rtol=0)
    torch.testing.assert_close(found[2], expected[11], atol=1e-4, rtol=0)


def test_memory_to_spare_takes_all_experts_of_a_layer_at_once_and_changes_no_slice(packed: Path) -> None:
    with Pack(packed) as pack:
        layout = pack.layout
    for num_halves in (FAST_HALVES, EXACT_HALVES):
        usual = Slicing.for_passes(layout, 1, num_halves)
        spare_bytes = 3 * (2 * 3 * num_halves * 64 + 20) * usual.num_neurons  # of three experts with 64 columns
        more = Slicing.for_passes(layout, 1, num_halves, spare_bytes)
        assert more == (min(8, usual.num_experts + 3), usual.num_neurons)
        assert more.num_bytes(layout, 1, num_halves) <= usual.num_bytes(layout, 1, num_halves) + spare_bytes
        assert Slicing.for_passes(layout, 1, num_halves, 1 << 30).num_experts == 8
