"""The graph engine's launches under the interpreter, over plain memory, against the decoder in plain torch."""

from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from gpu_runs import CPU, IDS, PROMPT, TOLERANCE, expert_bytes_for, graph_decoder, graph_logits, reference_logits
from models import TinyMixtral, pack

from moe_pack.convert import convert
from moe_pack.formats import ExpertFormat, Pack, Plan, Selector, part_format
from moe_pack.formats.families import Checkpoint
from moe_pack.formats.plan import uniform_dense
from moe_pack.formats.writer import rewrite_thresholds
from moe_pack.runtime.gpu.device import HostArena
from moe_pack.runtime.gpu.fit import run_everything
from moe_pack.runtime.gpu.graph_engine import GraphEngine
from moe_pack.runtime.model import Decoder, PackWeights

SHAPE = TinyMixtral(num_layers=2, num_experts=4, config={"num_experts_per_tok": 2})


def packed(folder: Path, selector: Selector = "up", sparse: bool = False, shape: TinyMixtral = SHAPE) -> Path:
    """A pack of two layers of four experts; if sparse, with thresholds that about half of the neurons lie below."""
    pack(shape.write(folder / "source"), folder / "packed", selector=selector)
    if sparse:
        rewrite_thresholds(folder / "packed", np.full((2, 4), 0.02, np.float32))
    return folder / "packed"


def test_logits_are_the_references_to_the_bit_alike_whatever_has_room(tmp_path: Path) -> None:
    folder = packed(tmp_path, sparse=True)
    nothing, some, all_there = (graph_logits(folder, share, IDS[:3]) for share in (0.0, 0.4, 1.0))
    assert (nothing - reference_logits(folder, IDS[:3])).abs().max() < TOLERANCE
    assert torch.equal(nothing, some)
    assert torch.equal(nothing, all_there)


@pytest.mark.slow
@pytest.mark.parametrize(
    "selector", ["none", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("gate", "both"))]
)
def test_every_selector_kind_selects_as_in_plain_torch(selector: Selector, tmp_path: Path) -> None:
    folder = packed(tmp_path, selector, sparse=True)
    assert (graph_logits(folder, 0.4, IDS[:3]) - reference_logits(folder, IDS[:3])).abs().max() < TOLERANCE


@pytest.mark.slow
def test_experts_of_different_widths_run_side_by_side(tmp_path: Path) -> None:
    source, folder = SHAPE.write(tmp_path / "source"), tmp_path / "packed"
    checkpoint = Checkpoint(source)
    two, three, eight = (part_format(width, 16) for width in (2, 3, 8))
    layer = tuple(
        ExpertFormat(gate, two, down) for gate, down in ((two, three), (eight, two), (two, three), (two, two))
    )
    dense = uniform_dense(checkpoint.spec, None)
    convert(checkpoint, Plan("up", "nearest", (layer, layer[::-1]), dense), folder, 1)
    checkpoint.close()
    assert (graph_logits(folder, 0.3) - reference_logits(folder)).abs().max() < TOLERANCE


@pytest.mark.slow
def test_a_sequence_that_outgrows_its_short_angles_is_computed_anew(tmp_path: Path) -> None:
    from families import LONGROPE, Tiny, write  # which imports transformers

    limit = 3
    scaling = LONGROPE | {"original_max_position_embeddings": limit}
    short = Tiny("phimoe", "short", {"rope_scaling": scaling, "num_hidden_layers": 1})
    source, folder = write(short, tmp_path / "source"), tmp_path / "packed"
    pack(source, folder)
    ids = [(37 * i + 5) % 96 for i in range(limit + 2)]
    got = graph_logits(folder, 1.0, ids, num_prompt=limit - 1)[limit - 1 :]
    with Pack(folder) as opened:
        decoder = Decoder(PackWeights(opened, CPU), 64)
        decoder.logits(ids[: limit - 1])
        expected = torch.cat([decoder.logits([token]) for token in ids[limit - 1 :]])
    assert (got - expected).abs().max() < TOLERANCE


@pytest.mark.slow
def test_logits_are_the_same_after_everything_was_run_to_be_measured(tmp_path: Path) -> None:
    folder = packed(tmp_path, shape=replace(SHAPE, num_layers=1))
    with ExitStack() as stack:
        held = stack.enter_context(Pack(folder))
        host = stack.enter_context(HostArena(held, CPU))
        built = stack.enter_context(closing(GraphEngine(held, host, CPU, expert_bytes_for(held, 0.3), 64, 16)))
        run_everything(held, built, 16)
        built.prepare()
        found = built.decoder.logits(IDS)
        assert built.decoder.counts().needed > 0
    assert (found - reference_logits(folder)).abs().max() < TOLERANCE


def test_what_was_needed_and_pulled_is_counted(tmp_path: Path) -> None:
    folder = packed(tmp_path)
    with graph_decoder(folder, 1.0) as decoder:
        decoder.next_logits(IDS[:1])
        counts = decoder.counts()
        assert (counts.needed, counts.hits, counts.rows, counts.num_bytes) == (4, 4, 0, 0)
        assert decoder.routes.shape == (2, 2)
    with graph_decoder(folder, 0.0) as decoder:
        decoder.next_logits(IDS[:1])
        counts = decoder.counts()
        assert (counts.needed, counts.hits) == (4, 0)
        assert counts.rows > 0 and counts.num_bytes > 0


@pytest.mark.slow
def test_a_cache_of_16_bit_changes_logits_a_little(tmp_path: Path) -> None:
    folder = packed(tmp_path, shape=replace(SHAPE, num_layers=1))
    expected = reference_logits(folder)[-1]
    with graph_decoder(folder, 1.0, cache_dtype=torch.bfloat16) as decoder:
        decoder.next_logits(IDS[:PROMPT])
        for token in IDS[PROMPT:]:
            got = decoder.next_logits([token]).clone()
    assert 0 < (got - expected).abs().max() < 0.02 * expected.abs().max()


@pytest.mark.parametrize("family", ["mixtral", pytest.param("qwen2_moe", marks=pytest.mark.slow)])
def test_rotated_layers_run_as_in_plain_torch(family: str, tmp_path: Path) -> None:
    """Prompts and single tokens; the second family has a shared expert, which is not rotated."""
    if family == "mixtral":
        source = replace(SHAPE, hidden_size=192).write(tmp_path / "source")
    else:
        from families import Tiny, write  # which imports transformers

        source = write(Tiny(family, "of two layers", {"num_hidden_layers": 2}), tmp_path / "source")
    folder = tmp_path / "packed"
    pack(source, folder, rotate="on")
    assert (graph_logits(folder, 0.4, IDS[:3]) - reference_logits(folder, IDS[:3])).abs().max() < TOLERANCE
