"""Evaluation of packs: against plain decoders and float64 sums, killed and resumed, the compact against the exact."""

import dataclasses
import math
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from support.cases import case
from support.models import BOOK, DEMO_MODEL, PackMaker, TinyMixtral, pack
from support.profiles import Recorder, StoppedError, random_tokens, tokens_of
from support.sparsities import realized_sparsity

from moe_pack.calib.evaluate import Reference, ThresholdRule, evaluate, make_reference
from moe_pack.calib.evaluate.thresholds import measure_thresholds
from moe_pack.calib.forward import Tokens, read_tokens
from moe_pack.formats import ConversionError, Pack, PlanError
from moe_pack.formats.base.commands import Stage
from moe_pack.formats.families import Checkpoint
from moe_pack.formats.families.checkpoint_files import FolderFiles
from moe_pack.runtime import Text
from moe_pack.runtime.model import CheckpointWeights, Decoder, PackWeights, Weights
from moe_pack.runtime.quality import Quality

SHAPE = TinyMixtral(num_layers=2, num_experts=4, vocab_size=300)
TOKENS = random_tokens(4, 100, SHAPE.vocab_size)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return SHAPE.write(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def packed(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A 2-bit pack with thresholds; read only."""
    folder = tmp_path_factory.mktemp("packs") / "packed"
    pack(source, folder, width=2)
    with Pack(folder) as opened:
        measure_thresholds(opened, TOKENS, ThresholdRule(sparsity=0.5), Recorder())
    return folder


@pytest.fixture(scope="module")
def reference(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return reference_of(source, tmp_path_factory.mktemp("reference"), TOKENS)


def reference_of(source: Path, folder: Path, tokens: Tokens) -> Reference:
    with closing(Checkpoint(source)) as checkpoint:
        return make_reference(checkpoint, tokens, folder, Recorder())


def exact(folder: Path, source: Path, tokens: Tokens = TOKENS) -> Quality:
    with closing(Checkpoint(source)) as checkpoint, Pack(folder) as opened:
        return evaluate(opened, tokens, Recorder(), checkpoint)


def compact(folder: Path, reference: Reference) -> Quality:
    with Pack(folder) as opened:
        return evaluate(opened, reference.tokens(), Recorder(), reference)


def plain(weights: Weights, tokens: Tokens = TOKENS) -> torch.Tensor:
    """Log-probabilities of a plain decoder in float64, [tokens predicted, V]."""
    decoder, found = Decoder(weights, tokens.sequences.shape[1]), []
    for sequence in tokens.sequences:
        decoder.reset()
        found.append(decoder.logits(sequence.tolist())[:-1].double().log_softmax(dim=1))
    return torch.cat(found)


def plain_pair(folder: Path, source: Path) -> tuple[torch.Tensor, torch.Tensor]:
    checkpoint = Checkpoint(source)
    with Pack(folder) as opened:
        found = plain(CheckpointWeights(checkpoint)), plain(PackWeights(opened, torch.device("cpu")))
    checkpoint.close()
    return found


def test_it_measures_what_plain_decoders_and_sums_give(source: Path, packed: Path) -> None:
    p, q = plain_pair(packed, source)
    came = torch.from_numpy(TOKENS.sequences[:, 1:].astype(np.int64)).reshape(-1, 1)
    found = exact(packed, source)
    against = found.against
    assert against is not None and against.is_exact and found.num_tokens == len(p) == 396
    nll, source_nll = -float(q.gather(1, came).mean()), -float(p.gather(1, came).mean())
    assert found.perplexity.value == pytest.approx(math.exp(nll), rel=1e-4)
    assert against.source_perplexity.value == pytest.approx(math.exp(source_nll), rel=1e-4)
    assert against.perplexity_increase.value == pytest.approx(math.exp(nll - source_nll) - 1, rel=1e-3)
    assert against.kl.value == pytest.approx(float((p.exp() * (p - q)).sum(1).mean()), rel=1e-3)
    assert against.agreement.value == pytest.approx(float((p.argmax(1) == q.argmax(1)).double().mean()), abs=1e-9)
    likeliest = p.topk(256).indices
    for tail, held in ((against.source_tail, p), (against.pack_tail, q)):
        assert tail == pytest.approx(1 - float(held.exp().gather(1, likeliest).sum(1).mean()), abs=1e-5)


def test_the_half_width_of_kl_is_that_of_blocks_of_tokens(source: Path, packed: Path) -> None:
    p, q = plain_pair(packed, source)
    blocks = (p.exp() * (p - q)).sum(1).split(128)  # 128, 128, 128, 12
    m = float(torch.cat(blocks).mean())
    squares = sum((float(block.sum()) - m * len(block)) ** 2 for block in blocks)
    expected = 3.1824 * math.sqrt(4 / 3 * squares) / 396  # Student's t of 3 degrees of freedom
    against = exact(packed, source).against
    assert against is not None and against.kl.half_width == pytest.approx(expected, rel=2e-3)


def test_the_compact_reference_tells_the_same_but_for_the_tail(
    source: Path, packed: Path, reference: Reference
) -> None:
    whole, short = exact(packed, source), compact(packed, reference)
    assert whole.against is not None and short.against is not None and not short.against.is_exact
    assert dataclasses.replace(short, against=None) == dataclasses.replace(whole, against=None)
    for name in ("kl_bound", "source_perplexity", "perplexity_increase", "agreement"):
        one, other = getattr(short.against, name), getattr(whole.against, name)
        assert one.value == pytest.approx(other.value, rel=1e-5)
        assert one.half_width == pytest.approx(other.half_width, rel=1e-5)
    assert short.against.source_tail == pytest.approx(whole.against.source_tail, rel=1e-5)
    assert short.against.pack_tail == pytest.approx(whole.against.pack_tail, rel=1e-5)
    assert short.against.kl_bound.value < whole.against.kl.value
    assert short.against.noise_floor == whole.against.noise_floor


def test_sparsity_is_that_of_the_packs_thresholds_and_bytes_are_its_contents(packed: Path) -> None:
    with Pack(packed) as opened:
        found = evaluate(opened, TOKENS, Recorder())
        assert found.sparsity == realized_sparsity(opened, TOKENS).overall
        assert found.content_bytes == opened.manifest.totals.content
    assert found.sparsity is not None and 0.45 < found.sparsity < 0.55 and found.against is None


def test_a_pack_without_loss_is_within_the_noise(source: Path, tmp_path: Path) -> None:
    pack(source, tmp_path / "packed", width=16)
    against = exact(tmp_path / "packed", source).against
    assert against is not None
    assert against.kl.value <= 10 * against.noise_floor < 1e-9
    assert against.perplexity_increase.value == pytest.approx(0, abs=1e-6)


def test_stopped_it_goes_on_to_the_same_figures(source: Path, packed: Path, tmp_path: Path) -> None:
    for number, number in enumerate([0, 5, 10, 12, 20, 24]):
        (case_folder := tmp_path / str(number)).mkdir()
        with case(number):
            checkpoint = Checkpoint(source)
            with Pack(packed) as opened:
                whole = evaluate(opened, TOKENS, Recorder(), checkpoint)
                with pytest.raises(StoppedError):
                    evaluate(opened, TOKENS, Recorder(stop_at=number), checkpoint, folder=case_folder / "work")
                assert evaluate(opened, TOKENS, Recorder(), checkpoint, folder=case_folder / "work") == whole
            checkpoint.close()
            assert not (case_folder / "work").exists()


def test_stopped_it_does_not_do_again_what_is_done(packed: Path, tmp_path: Path) -> None:
    with Pack(packed) as opened:
        whole = Recorder()
        evaluate(opened, TOKENS, whole, folder=tmp_path / "work")
        with pytest.raises(StoppedError):
            evaluate(opened, TOKENS, Recorder(stop_at=len(whole.events) - 1), folder=tmp_path / "work")
        rest = Recorder()
        evaluate(opened, TOKENS, rest, folder=tmp_path / "work")
    assert [event for event in rest.events if event.startswith("layer")] == []


def test_a_pack_being_evaluated_is_left_alone(packed: Path, tmp_path: Path) -> None:
    class Meddler(Recorder):
        def begin(self, stage: Stage) -> None:
            with pytest.raises(ConversionError, match="another process is writing"):
                evaluate(opened, TOKENS, Recorder())
            raise StoppedError

    with Pack(packed) as opened, pytest.raises(StoppedError):
        evaluate(opened, TOKENS, Meddler())


def test_a_reference_of_another_model_is_refused(packed: Path, tmp_path: Path) -> None:
    other = dataclasses.replace(SHAPE, seed=1).write(tmp_path / "other")
    with pytest.raises(PlanError) as refusal:
        compact(packed, reference_of(other, tmp_path, TOKENS))
    assert str(refusal.value) == (
        "--against: the reference is of another model; give one of the checkpoint that was packed"
    )


def test_another_checkpoint_is_refused(packed: Path, tmp_path: Path) -> None:
    other = dataclasses.replace(SHAPE, seed=1).write(tmp_path / "other")
    with pytest.raises(PlanError) as refusal:
        exact(packed, other)
    assert str(refusal.value) == f"--against {other}: {packed} was made from another checkpoint; give that one"


def test_a_reference_on_other_text_is_refused(packed: Path, reference: Reference) -> None:
    with Pack(packed) as opened, pytest.raises(PlanError) as refusal:
        evaluate(opened, random_tokens(4, 100, SHAPE.vocab_size, seed=1), Recorder(), reference)
    assert (
        str(refusal.value) == "--against: the reference was made on other text (made up); remove the options for text"
    )


def test_a_text_of_two_tokens_is_one_prediction_without_a_half_width(packed: Path) -> None:
    with Pack(packed) as opened:
        found = evaluate(opened, tokens_of(np.array([[3, 5]], np.int32)), Recorder())
    assert found.num_tokens == 1 and found.perplexity.half_width is None


@pytest.mark.slow
@pytest.mark.parametrize("width", [4, pytest.param(2, marks=pytest.mark.slow)])
def test_on_the_demo_model_the_compact_kl_is_within_two_percent_of_the_exact(
    width: int, demo_pack: PackMaker, tmp_path: Path
) -> None:
    tokens = read_tokens(str(BOOK), None, Text(FolderFiles(DEMO_MODEL)), 2048, 512)
    folder = demo_pack("up", width)
    short = compact(folder, reference_of(DEMO_MODEL, tmp_path, tokens)).against
    whole = exact(folder, DEMO_MODEL, tokens).against
    assert short is not None and whole is not None
    assert short.kl.value == pytest.approx(whole.kl.value, rel=0.02)
    assert short.kl_bound.value < 0.95 * whole.kl.value  # a tenth of the mass lies beyond 256 tokens of 4,096
