"""The GPU's engine under the interpreter, over plain memory, against the decoder in plain torch."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.cases import case
from support.gpt_oss_pack import CHUNK, WINDOW, packed_gpt_oss
from support.gpt_oss_pack import IDS as GPT_OSS_IDS
from support.gpt_oss_pack import PROMPT as GPT_OSS_PROMPT
from support.gpu_runs import (
    CPU,
    IDS,
    PROMPT,
    TOLERANCE,
    GpuRun,
    expert_bytes_for,
    gpu_decoder,
    gpu_engine,
    gpu_logits,
    reference_logits,
)
from support.models import TinyMixtral, pack
from support.native import kernels_limited_to
from support.played_memory import played, recorded_tokens
from support.synthetic import made, small

from moe_pack.convert.pipeline import convert
from moe_pack.formats import ExpertFormat, Pack, Plan, Selector, part_format, trellis_format, uniform_plan
from moe_pack.formats.families import Checkpoint
from moe_pack.formats.pack.plans import E5M2, MXFP4, uniform_dense
from moe_pack.formats.pack.writer import rewrite_thresholds
from moe_pack.runtime.gpu.placements import Misses, place_experts, usual_heat
from moe_pack.runtime.gpu.token.engine import run_everything
from moe_pack.runtime.gpu.token.prefetch import PredictionPlan
from moe_pack.runtime.model import Decoder, NativeOperations, PackWeights
from moe_pack.runtime.model.caches import KvDtype
from moe_pack.runtime.offload import CacheFacts
from moe_pack.runtime.offload.eviction import Importance

SHAPE = TinyMixtral(num_layers=2, num_experts=4, config={"num_experts_per_tok": 2})
LONG_IDS = [(37 * i + 5) % 96 for i in range(8)]


def packed(folder: Path, selector: Selector = "up", sparse: bool = False, shape: TinyMixtral = SHAPE) -> Path:
    """A pack of two layers of four experts; if sparse, with thresholds that about half of the neurons lie below."""
    pack(shape.write(folder / "source"), folder / "packed", selector=selector)
    if sparse:
        rewrite_thresholds(folder / "packed", np.full((shape.num_layers, 4), 0.02, np.float32))
    return folder / "packed"


def check(folder: Path, run: GpuRun, ids: list[int] = IDS) -> None:
    assert (gpu_logits(folder, run, ids) - reference_logits(folder, ids)).abs().max() < TOLERANCE


@pytest.mark.slow
def test_logits_are_the_references_where_cpu_and_link_share_what_is_missing(tmp_path: Path) -> None:
    check(packed(tmp_path, sparse=True), GpuRun(0.4), LONG_IDS[:5])


@pytest.mark.slow
def test_pulling_gives_the_same_bits_whatever_is_resident(tmp_path: Path) -> None:
    folder = packed(tmp_path, sparse=True)
    first, other = (gpu_logits(folder, GpuRun(share, "pull"), LONG_IDS[:4]) for share in (0.0, 0.5))
    assert (first - reference_logits(folder, LONG_IDS[:4])).abs().max() < TOLERANCE
    assert torch.equal(first, other)


@pytest.mark.slow
def test_logits_are_the_references_on_every_way_to_what_is_missing(tmp_path: Path) -> None:
    folder = packed(tmp_path, sparse=True)
    expected = reference_logits(folder, LONG_IDS)
    for run in (
        GpuRun(0.0, cpu_share=0.3),
        GpuRun(0.6, pulled_share=0.0),
        GpuRun(0.4, pulled_share=1.0, dynamic_share=0.9),
        GpuRun(0.5, cpu_share=3.0, dynamic_share=0.0),
        GpuRun(0.4, "disk"),
        GpuRun(0.5, offset_bytes=8),
        GpuRun(0.4, "pull", offset_bytes=8),
        GpuRun(1.0, offset_bytes=8),
    ):
        with case(str(run)):
            found = gpu_logits(folder, run, LONG_IDS)
            assert (found - expected).abs().max() < TOLERANCE


@pytest.mark.slow
def test_what_tokens_need_is_counted(tmp_path: Path) -> None:
    folder = packed(tmp_path, sparse=True)
    found = {}
    for run in (GpuRun(1.0), GpuRun(0.0), GpuRun(0.5), GpuRun(0.5, "pull"), GpuRun(0.5, pulled_share=0.0)):
        with gpu_decoder(folder, run) as decoder:
            for token in LONG_IDS:
                decoder.next_logits([token])
            assert decoder.routes.shape == (2, 2)
            found[run] = decoder.counts()
    whole, none, some, pulled, left = found.values()
    num_neurons = whole.resident
    assert num_neurons and (whole.pulled, whole.left, whole.whole, whole.link_bytes) == (0, 0, 0, 0)
    assert none.whole == 4 * len(LONG_IDS) and not none.resident
    assert some.pulled and some.left and some.link_bytes
    assert some.resident + some.pulled + some.left == num_neurons
    assert pulled.pulled and not pulled.left and pulled.resident + pulled.pulled == num_neurons
    assert left.resident and left.left and not (left.pulled or left.link_bytes)
    assert all(counts.tokens == len(LONG_IDS) for counts in found.values())


class Seen(Importance):
    """Importance's policy, and the scores that it gets, by layer."""

    def __init__(self, facts: CacheFacts) -> None:
        super().__init__(facts)
        self.scores: list[list[np.ndarray]] = [[] for _ in facts.pages]

    def routed(self, layer_idx: int, experts: Sequence[int], scores: np.ndarray | None) -> None:
        super().routed(layer_idx, experts, scores)
        assert scores is not None and set(np.argsort(-scores)[: len(experts)]) == set(experts)
        self.scores[layer_idx].append(scores.copy())


@pytest.mark.slow
def test_counts_are_as_they_are_played(tmp_path: Path) -> None:
    """The engine's counts are those of a play of the same tokens, which computes nothing."""
    folder, ids = packed(tmp_path, sparse=True), [*LONG_IDS, *LONG_IDS]
    prediction = PredictionPlan({1: "router"}, 2, None)
    run = GpuRun(0.7, pulled_share=0.0, dynamic_share=0.4, prediction=prediction)
    with gpu_decoder(folder, run) as decoder:
        for token in ids:
            decoder.next_logits([token])
        found = decoder.counts()
    with Pack(folder) as opened:
        native = NativeOperations(kernels_limited_to("portable"))
        tokens = recorded_tokens(opened, native, ids)
        popularity = np.ones(opened.index.size.shape)
        heat, room = usual_heat(opened.layout, opened.thresholds), expert_bytes_for(opened, run.share)
        placement = place_experts(opened.layout, room, "split", popularity, heat, run.dynamic_share, num_predicted=2)
        most_ahead = int(placement.num_ahead[1])
        expected = played(placement, tokens, most_ahead)
    assert expected.resident and found.resident == expected.resident
    assert expected.ahead and (found.ahead, found.ahead_ran) == (expected.ahead, expected.ahead_ran)
    assert found.left == expected.left - expected.whole


@pytest.mark.slow
def test_every_selector_kind_selects_as_in_plain_torch(tmp_path: Path) -> None:
    for selector in ("none", "gate", "both"):
        for misses in ("split", "pull"):
            with case(f"{selector}, {misses}"):
                folder = packed(tmp_path / selector / misses, selector, sparse=True)
                check(folder, GpuRun(0.4, misses), LONG_IDS[:5])


def mixed(folder: Path) -> Path:
    """Experts of three formats side by side."""
    checkpoint = Checkpoint(SHAPE.write(folder / "source"))
    two, three, eight = (part_format(width, 16) for width in (2, 3, 8))
    layer = tuple(
        ExpertFormat(gate, two, down) for gate, down in ((two, three), (eight, two), (two, three), (two, two))
    )
    dense = uniform_dense(checkpoint.spec, None)
    convert(checkpoint, Plan("up", "nearest", (layer, layer[::-1]), dense), folder / "packed", 1)
    checkpoint.close()
    return folder / "packed"


def test_layers_run_in_any_order_though_the_next_ones_experts_are_on_their_way(tmp_path: Path) -> None:
    folder = packed(tmp_path)
    x = torch.randn(16, SHAPE.hidden_size, generator=torch.Generator().manual_seed(3))
    chosen, weights = torch.arange(32).reshape(16, 2) % 4, torch.full((16, 2), 0.5)
    found = {0: list[torch.Tensor](), 1: list[torch.Tensor]()}
    with gpu_engine(folder, GpuRun(0.0, "pull")) as built:
        for layer_idx in (0, 0, 1, 0, 1):
            found[layer_idx].append(built.weights.run_experts(layer_idx, x, chosen, weights))
    assert torch.equal(found[0][0], found[0][1]) and torch.equal(found[0][0], found[0][2])
    assert torch.equal(*found[1]) and not torch.equal(found[0][0], found[1][0])


@pytest.mark.slow
def test_experts_of_different_widths_run_side_by_side(tmp_path: Path) -> None:
    folder = mixed(tmp_path)
    for run in (GpuRun(0.3), GpuRun(0.3, "pull")):
        check(folder, run)


@pytest.mark.slow
def test_a_sequence_that_outgrows_its_original_context_has_other_angles(tmp_path: Path) -> None:
    """With longrope everything is computed again; with dynamic scaling only the new tokens have another base."""
    from families.phimoe import LONGROPE
    from support.families import Tiny, write  # which imports transformers

    limit = 3
    dynamic = {"rope_type": "dynamic", "factor": 40.0, "rope_theta": 1e4}
    cases = {
        "phimoe": {"rope_scaling": LONGROPE | {"original_max_position_embeddings": limit}},
        "mixtral": {"head_dim": 16, "max_position_embeddings": limit, "rope_parameters": dynamic},
    }
    for family, config in cases.items():
        with case(family):
            source = write(Tiny(family, "short", config | {"num_hidden_layers": 1}), tmp_path / family)
            folder = tmp_path / f"{family}-packed"
            pack(source, folder)
            ids = [(37 * i + 5) % 96 for i in range(limit + 2)]
            got = gpu_logits(folder, GpuRun(0.5), ids, num_prompt=limit - 1)[limit - 1 :]
            with Pack(folder) as opened:
                decoder = Decoder(PackWeights(opened, CPU), 64)
                decoder.logits(ids[: limit - 1])
                expected = torch.cat([decoder.logits([token]) for token in ids[limit - 1 :]])
            assert (got - expected).abs().max() < TOLERANCE


@pytest.mark.slow
def test_logits_are_the_same_after_everything_was_run_to_be_measured(tmp_path: Path) -> None:
    folder = packed(tmp_path, shape=replace(SHAPE, num_layers=1))
    with ExitStack() as stack:
        built = stack.enter_context(gpu_engine(folder, GpuRun(0.3)))
        run_everything(stack.enter_context(Pack(folder)), built, 16)
        built.prepare()
        found = built.decoder.logits(IDS)
    assert (found - reference_logits(folder)).abs().max() < TOLERANCE


@pytest.mark.slow
def test_a_cache_of_16_bit_changes_logits_a_little(tmp_path: Path) -> None:
    folder = packed(tmp_path, shape=replace(SHAPE, num_layers=1))
    expected = reference_logits(folder)[-1]
    with gpu_decoder(folder, GpuRun(1.0, cache_dtype="bf16")) as decoder:
        decoder.next_logits(IDS[:PROMPT])
        for token in IDS[PROMPT:]:
            got = decoder.next_logits([token]).clone()
    assert 0 < (got - expected).abs().max() < 0.02 * expected.abs().max()


@pytest.mark.parametrize("dtype", ["q8", pytest.param("q4", marks=pytest.mark.slow)])
def test_a_cache_of_codes_runs_as_in_plain_torch(dtype: KvDtype, tmp_path: Path) -> None:
    """A prompt, then single tokens, which read what it wrote and what they write."""
    folder = packed(tmp_path, shape=replace(SHAPE, num_layers=1))
    with Pack(folder) as pack:
        expected = Decoder(PackWeights(pack, CPU), 64, cache_dtype=dtype).logits(IDS)
    with gpu_decoder(folder, GpuRun(1.0, cache_dtype=dtype)) as decoder:
        found = torch.cat([decoder.logits(IDS[:PROMPT]), *(decoder.logits([token]) for token in IDS[PROMPT:])])
    assert (found - expected).abs().max() < TOLERANCE
    assert (found - reference_logits(folder)).abs().max() > TOLERANCE, "codes change the answer"


@pytest.mark.slow
def test_fast_prompts_differ_by_rounding_and_single_tokens_do_not(tmp_path: Path) -> None:
    folder = packed(tmp_path, shape=replace(SHAPE, num_layers=1))
    expected = reference_logits(folder, LONG_IDS)
    prompt = (gpu_logits(folder, GpuRun(1.0, is_fast=True), LONG_IDS, len(LONG_IDS)) - expected).abs().max()
    assert TOLERANCE < prompt < 0.005 * expected.abs().max()
    alone = gpu_logits(folder, GpuRun(1.0, is_fast=True), LONG_IDS, 0)
    assert (alone - expected).abs().max() < TOLERANCE


@pytest.mark.parametrize("family", ["mixtral", pytest.param("qwen2_moe", marks=pytest.mark.slow)])
def test_rotated_layers_run_as_in_plain_torch(family: str, tmp_path: Path) -> None:
    """Prompts and single tokens; the second family has a shared expert, which is not rotated."""
    if family == "mixtral":
        source = replace(SHAPE, hidden_size=192).write(tmp_path / "source")
    else:
        from support.families import Tiny, write  # which imports transformers

        source = write(Tiny(family, "of two layers", {"num_hidden_layers": 2}), tmp_path / "source")
    folder = tmp_path / "packed"
    pack(source, folder, rotate="on")
    check(folder, GpuRun(0.4, "split" if family == "mixtral" else "disk"), IDS[:3])


@pytest.mark.slow
@pytest.mark.parametrize("selector", ["both", "up"])
def test_gpt_oss_runs_as_in_plain_torch(selector: Selector, tmp_path: Path) -> None:
    """MXFP4 as in its source, sinks, biases, windows in a ring."""
    folder = packed_gpt_oss(tmp_path, selector)
    with Pack(folder) as opened:
        formats = {form for layer in opened.index.experts for e in layer for form in (e.gate, e.up, e.down)}
        assert formats == {MXFP4, E5M2} and opened.spec.expert.bias == ("gate", "up", "down")
        expected = Decoder(PackWeights(opened, CPU), 64, chunk_tokens=CHUNK).logits(GPT_OSS_IDS)
    misses: Misses
    for misses in ("split", "pull", "disk"):
        with case(misses):
            found = gpu_logits(folder, GpuRun(0.3, misses, chunk_tokens=CHUNK), GPT_OSS_IDS, GPT_OSS_PROMPT)
            assert (found - expected).abs().max() < TOLERANCE
    with gpu_decoder(folder, GpuRun(1.0, chunk_tokens=CHUNK)) as decoder:
        assert [keys.shape[1] for keys in decoder.cache.keys] == [WINDOW - 1 + CHUNK, 64]


def packed_in_trellises(folder: Path, selector: Selector) -> Path:
    """A random pack in which every other expert of a layer has its matrices in trellises of other widths."""
    spec = replace(small(num_layers=1, num_experts=4, hidden_size=64), vocab_size=128)
    first = trellis_format(4, 64)
    plan = uniform_plan(spec, selector, first, trellis_format(7, 32, 8), trellis_format(8, 16), "nearest")
    other = ExpertFormat(part_format(3, 64), trellis_format(6, 0), trellis_format(5, 64))
    experts = tuple(tuple(other if e % 2 else held for e, held in enumerate(layer)) for layer in plan.experts)
    return made(spec, folder, plan=replace(plan, experts=experts))


@pytest.mark.slow
@pytest.mark.parametrize(("selector", "misses"), [("up", "pull"), ("both", "split"), ("none", "split")])
def test_trellises_run_as_in_plain_torch(selector: Selector, misses: Misses, tmp_path: Path) -> None:
    check(packed_in_trellises(tmp_path / "pack", selector), GpuRun(0.3, misses))
