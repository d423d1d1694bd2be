"""Evaluation of packs: against plain decoders and float64 sums, killed and resumed, the compact against the exact."""

import dataclasses
import json
import math
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.cases import case
from support.models import BOOK, DEMO_MODEL, PackMaker, TinyMixtral, pack
from support.profiles import Recorder, StoppedError, random_tokens, tokens_of
from support.sparsities import realized_sparsity
from torch import Tensor

from moe_pack.calib.evaluate import REFERENCE_FILE, Reference, ThresholdRule, evaluate, make_reference, read_reference
from moe_pack.calib.evaluate.reference import (
    BLOCK_TOKENS,
    NUM_DRAWN,
    NUM_OUTCOMES,
    block_sums,
    distances,
    exponential,
    kept_outcomes,
    mean,
    student_t,
    whole_divergence,
)
from moe_pack.calib.evaluate.thresholds import measure_thresholds
from moe_pack.calib.forward import Tokens, read_tokens
from moe_pack.formats import ConversionError, Pack, PackError, PlanError, RunError, canonical
from moe_pack.formats.base.commands import Stage
from moe_pack.formats.families import Checkpoint
from moe_pack.formats.families.checkpoint_files import FolderFiles
from moe_pack.formats.pack.sidecar import TensorSidecar, write_tensor_sidecar
from moe_pack.runtime import Text
from moe_pack.runtime.model import CheckpointWeights, Decoder, PackWeights, Weights
from moe_pack.runtime.quality import Estimate, Quality

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
    return make(source, tmp_path_factory.mktemp("reference"), TOKENS)


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
    with closing(Checkpoint(source)) as checkpoint, Pack(packed) as opened:
        whole = evaluate(opened, TOKENS, Recorder(), checkpoint)
        for number in (0, 5, 10, 12, 20, 24):
            with case(number):
                with pytest.raises(StoppedError):
                    evaluate(opened, TOKENS, Recorder(stop_at=number), checkpoint, folder=tmp_path / "work")
                assert evaluate(opened, TOKENS, Recorder(), checkpoint, folder=tmp_path / "work") == whole
                assert not (tmp_path / "work").exists()


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
        compact(packed, make(other, tmp_path, TOKENS))
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
    short = compact(folder, make(DEMO_MODEL, tmp_path, tokens)).against
    whole = exact(folder, DEMO_MODEL, tokens).against
    assert short is not None and whole is not None
    assert short.kl.value == pytest.approx(whole.kl.value, rel=0.02)
    assert short.kl_bound.value < 0.95 * whole.kl.value  # a tenth of the mass lies beyond 256 tokens of 4,096


FEW_TOKENS = random_tokens(3, 40, SHAPE.vocab_size)


@pytest.fixture(scope="module")
def made(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    make(source, folder)
    return folder


def make(source: Path, folder: Path, tokens: Tokens = FEW_TOKENS, progress: Recorder | None = None) -> Reference:
    with closing(Checkpoint(source)) as checkpoint:
        return make_reference(checkpoint, tokens, folder, progress or Recorder())


def plain_log_probs(source: Path) -> torch.Tensor:
    checkpoint, found = Checkpoint(source), []
    decoder = Decoder(CheckpointWeights(checkpoint), FEW_TOKENS.sequences.shape[1])
    for sequence in FEW_TOKENS.sequences:
        decoder.reset()
        found.append(decoder.logits(sequence.tolist())[:-1].log_softmax(dim=1))
    checkpoint.close()
    return torch.stack(found)


def test_it_holds_the_predictions_of_a_plain_decoder(source: Path, made: Path) -> None:
    found, plain = read_reference(made), plain_log_probs(source)
    likeliest = plain.topk(256).values
    np.testing.assert_allclose(found.log_probs, likeliest, atol=1e-5)
    for ids, log_probs in ((found.ids, found.log_probs), (found.drawn_ids, found.drawn_log_probs)):
        there = plain.gather(2, torch.from_numpy(ids.astype(np.int64)))
        np.testing.assert_allclose(log_probs, there, atol=1e-5)
    np.testing.assert_allclose(np.exp(found.log_tail), 1 - likeliest.double().exp().sum(dim=2), atol=1e-5)
    came = torch.from_numpy(FEW_TOKENS.sequences[:, 1:, None].astype(np.int64))
    np.testing.assert_allclose(found.next_log_probs, plain.gather(2, came)[:, :, 0], atol=1e-5)


def test_it_says_of_what_it_is_and_has_its_text(made: Path) -> None:
    found = read_reference(made)
    facts = found.facts
    assert (facts.text, facts.num_sequences, facts.sequence_length) == ("made up", 3, 40)
    assert (facts.vocab_size, facts.num_outcomes, facts.num_drawn) == (300, 256, 32)
    assert found.tokens().sha256 == FEW_TOKENS.sha256
    np.testing.assert_array_equal(found.tokens().sequences, FEW_TOKENS.sequences)


def test_the_noise_floor_is_small_and_not_nothing(made: Path) -> None:
    assert 0 < read_reference(made).facts.noise_floor < 1e-9


def test_a_small_vocabulary_is_kept_whole(tmp_path: Path) -> None:
    shape = TinyMixtral(vocab_size=20)
    found = make(shape.write(tmp_path / "source"), tmp_path / "made", random_tokens(2, 8, 20))
    again = read_reference(tmp_path / "made")
    assert found.ids.shape == again.ids.shape == (2, 7, 20) and again.drawn_ids.shape == (2, 7, 0)
    assert (again.log_tail == -np.inf).all()


def test_made_again_it_is_read(source: Path, made: Path) -> None:
    progress = Recorder()
    assert make(source, made, progress=progress).facts == read_reference(made).facts
    assert not progress.events


def test_another_text_does_not_take_its_place(source: Path, made: Path) -> None:
    with pytest.raises(ConversionError) as refusal:
        make(source, made, random_tokens(3, 40, SHAPE.vocab_size, seed=1))
    assert str(refusal.value) == (
        f"{made}: this folder has a reference of another model or text; give another one, or remove it"
    )


def test_stopped_it_goes_on_to_the_same_bytes(source: Path, made: Path, tmp_path: Path) -> None:
    for number, number in enumerate([0, 3, 9, 12]):
        (case_folder := tmp_path / str(number)).mkdir()
        with case(number):
            with pytest.raises(StoppedError):
                make(source, case_folder, progress=Recorder(stop_at=number))
            assert not (case_folder / REFERENCE_FILE).exists()
            make(source, case_folder)
            assert (case_folder / REFERENCE_FILE).read_bytes() == (made / REFERENCE_FILE).read_bytes()
            assert [path.name for path in case_folder.iterdir()] == [REFERENCE_FILE]


def test_sequences_longer_than_the_models_positions_are_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="found 200, expected at most the 128 positions"):
        make(source, tmp_path, random_tokens(1, 200, SHAPE.vocab_size))


def test_a_flipped_bit_is_found(made: Path, tmp_path: Path) -> None:
    raw = bytearray((made / REFERENCE_FILE).read_bytes())
    raw[-1] ^= 1
    (tmp_path / REFERENCE_FILE).write_bytes(raw)
    with pytest.raises(PackError) as refusal:
        read_reference(tmp_path / REFERENCE_FILE)
    assert str(refusal.value) == "reference.safetensors: SHA-256 does not match its bytes; the file is damaged"


def test_no_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(PackError, match=r"reference\.safetensors"):
        read_reference(tmp_path)


Arrays = dict[str, Any]


def rewritten(made: Path, folder: Path, change: Callable[[Arrays], object], root: str | None = None) -> Path:
    """The reference with its arrays changed (`facts` as a dict), sealed as a whole file."""
    with TensorSidecar(made, REFERENCE_FILE) as opened:
        arrays: Arrays = {name: opened.read(name) for name in opened.entries}
        old_root = opened.root
    arrays["facts"] = json.loads(arrays["facts"].tobytes())
    change(arrays)
    arrays["facts"] = np.frombuffer(canonical(arrays["facts"]), "<u1")
    kinds = {"u1": "U8", "u4": "U32", "f4": "F32", "f8": "F64"}
    tensors = [(name, kinds[array.dtype.str[1:]], array) for name, array in arrays.items()]
    write_tensor_sidecar(folder, REFERENCE_FILE, tensors, root or old_root)
    return folder


def set_fact(name: str, value: Any) -> Callable[[Arrays], object]:
    return lambda arrays: arrays["facts"].__setitem__(name, value)


def set_value(name: str, value: float) -> Callable[[Arrays], object]:
    return lambda arrays: arrays[name].reshape(-1).__setitem__(-1, value)


def test_rewritten_without_a_change_it_is_read(made: Path, tmp_path: Path) -> None:
    assert read_reference(rewritten(made, tmp_path, lambda arrays: None)).facts == read_reference(made).facts


def test_what_no_reference_can_be_is_refused(made: Path, tmp_path: Path) -> None:
    for change, message in [
        (set_fact("format", "else"), "expected format 'moe-pack reference', version 1; make the reference again"),
        (set_fact("version", 2), "expected format 'moe-pack reference', version 1; make the reference again"),
        (set_fact("more", 1), "facts: unknown key 'more'"),
        (set_fact("source", "0" * 64), "root is not the source in its facts; make the reference again"),
        (set_fact("sequence_length", 1), "facts: found impossible counts; make the reference again"),
        (set_fact("noise_floor", -1.0), "facts: noise_floor: found -1.0, expected at least 0"),
        (
            set_fact("num_outcomes", 255),
            "facts: found 255 outcomes and 32 drawn, expected 256 and 32; make the reference again",
        ),
        (set_fact("num_sequences", 4), "tensor 'sequences' is U32 [3, 40], expected U32 [4, 40]"),
        (
            set_fact("text_sha256", "0" * 64),
            "the tokens do not match the digest in its facts; make the reference again",
        ),
        (lambda arrays: arrays.pop("log_tail"), "tensor 'log_tail' is missing"),
        (lambda arrays: arrays.update(other=arrays["log_tail"]), "unknown tensor 'other'"),
        (
            lambda arrays: arrays.update(log_tail=arrays["log_tail"].astype("<f8")),
            "tensor 'log_tail' is F64 [3, 39], expected F32 [3, 39]",
        ),
        (
            set_value("ids", 300),
            "tensor 'ids' is 300 at [2, 38, 255], expected a finite number of at most 299; the file is "
            "damaged, make it again",
        ),
        (
            set_value("drawn_ids", 300),
            "tensor 'drawn_ids' is 300 at [2, 38, 31], expected a finite number of at most 299; the file is "
            "damaged, make it again",
        ),
        (
            set_value("log_probs", 0.1),
            "tensor 'log_probs' is 0.1 at [2, 38, 255], expected a finite number of at most 0.001; the file is "
            "damaged, make it again",
        ),
        (
            set_value("log_tail", np.nan),
            "tensor 'log_tail' is nan at [2, 38], expected a finite number of at most 0.001; the file is "
            "damaged, make it again",
        ),
        (
            set_value("next_log_probs", -np.inf),
            "tensor 'next_log_probs' is -inf at [2, 38], expected a finite number of at most 0.001; the file is "
            "damaged, make it again",
        ),
    ]:
        with case(change, message):
            with pytest.raises(PackError) as refusal:
                read_reference(rewritten(made, tmp_path, change))
            assert str(refusal.value) == f"reference.safetensors: {message}"


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    write_tensor_sidecar(tmp_path, REFERENCE_FILE, [("x", "U8", np.zeros(3, "<u1"))], "0" * 64)
    with pytest.raises(PackError) as refusal:
        read_reference(tmp_path)
    assert str(refusal.value).endswith("the file is no reference of moe-pack eval --keep-reference; it has no facts")


def test_the_file_may_have_another_name(made: Path, tmp_path: Path) -> None:
    shutil.copy(made / REFERENCE_FILE, tmp_path / "kept.safetensors")
    assert read_reference(tmp_path / "kept.safetensors").facts == read_reference(made).facts


def test_students_t_is_that_of_the_tables() -> None:
    for degrees, value in [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (9, 2.262), (30, 2.042), (1000, 1.962)]:
        with case(degrees, value):
            assert student_t(degrees) == pytest.approx(value, rel=0.002)


def test_blocks_are_of_128_tokens_and_the_last_of_the_rest() -> None:
    sums = block_sums(np.ones(2 * BLOCK_TOKENS + 5))
    assert sums.tolist() == [128, 128, 5]


def test_a_mean_of_equal_blocks_has_the_half_width_of_their_standard_error() -> None:
    sums, number = np.array([1.0, 2.0, 6.0]), np.array([2, 2, 2])
    found = mean(sums, number)
    # block means 0.5, 1, 3: mean 1.5, deviation sqrt((1 + 0.25 + 2.25) / 2), over sqrt(3); t of 2 is 4.3027
    assert found.value == pytest.approx(1.5)
    assert found.half_width == pytest.approx(4.30265 * math.sqrt(1.75 / 3), rel=1e-4)


def test_a_single_block_has_no_half_width() -> None:
    assert mean(np.array([3.0]), np.array([2])) == Estimate(1.5, None)


def test_the_interval_holds_the_truth_nineteen_times_of_twenty() -> None:
    rng = np.random.default_rng(0)
    number = np.array([128] * 9 + [40])
    held = 0
    for _ in range(2000):
        sums = rng.normal(0.3 * number, 5 * np.sqrt(number))
        found = mean(sums, number)
        assert found.half_width is not None
        held += abs(found.value - 0.3) <= found.half_width
    assert 0.93 < held / 2000 < 0.97


def test_the_interval_of_an_exponential_is_its_upper_half() -> None:
    found = exponential(Estimate(0.02, 0.01), less=1.0)
    assert found.value == pytest.approx(math.exp(0.02) - 1)
    assert found.upper == pytest.approx(math.exp(0.03) - 1)


def test_a_perplexity_beyond_all_numbers_is_a_number() -> None:
    found = exponential(Estimate(1e6, 10.0))
    assert math.isfinite(found.value) and found.half_width == 0


VOCABULARY = 1000


def predictions(number: int, vocab_size: int, seed: int, spread: float = 2.0) -> Tensor:
    logits = torch.randn(number, vocab_size, generator=torch.Generator().manual_seed(seed)) * spread
    return logits.log_softmax(dim=1)


def shifted(log_probs: Tensor, size: float, seed: int = 1) -> Tensor:
    noise = torch.randn(log_probs.shape, generator=torch.Generator().manual_seed(seed))
    return (log_probs + size * noise).log_softmax(dim=1)


def plain_divergence(expected: Tensor, found: Tensor) -> Tensor:
    """KL in float64, both renormalised there."""
    p, q = expected.double().log_softmax(dim=1), found.double().log_softmax(dim=1)
    return (p.exp() * (p - q)).sum(dim=1)


def draws(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_the_divergence_of_whole_predictions_is_the_plain_sum() -> None:
    for size in [1e-3, 0.1, 1.0, 10.0]:
        with case(size):
            p = predictions(70, VOCABULARY, 0)
            q = shifted(p, size)
            torch.testing.assert_close(whole_divergence(p, q), plain_divergence(p, q), rtol=1e-4, atol=1e-9)


def test_no_difference_is_no_divergence() -> None:
    p = predictions(40, VOCABULARY, 0)
    found = distances(kept_outcomes(p, draws()), p)
    assert whole_divergence(p, p).abs().max() == 0
    assert found.estimate.abs().max() < 1e-9
    assert found.bound.abs().max() < 1e-9


@pytest.mark.parametrize("vocab_size", [1, 5, NUM_OUTCOMES])
def test_a_vocabulary_that_is_kept_whole_has_no_tail_and_an_exact_divergence(vocab_size: int) -> None:
    p = predictions(40, vocab_size, 0)
    q = shifted(p, 0.5)
    kept, exact = kept_outcomes(p, draws()), plain_divergence(p, q)
    found = distances(kept, q)
    assert kept.drawn_ids.shape == (40, 0) and (kept.log_tail == -torch.inf).all() and (found.tail == 0).all()
    torch.testing.assert_close(found.bound, exact, rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(found.estimate, exact, rtol=1e-4, atol=1e-7)


def test_what_is_kept_are_the_likeliest_tokens_and_the_mass_of_all_others() -> None:
    p = predictions(40, VOCABULARY, 0)
    kept = kept_outcomes(p, draws())
    for row, ids, log_probs, log_tail, drawn in zip(
        p, kept.ids, kept.log_probs, kept.log_tail, kept.drawn_ids, strict=True
    ):
        order = row.argsort(descending=True)
        assert set(ids.tolist()) == set(order[:NUM_OUTCOMES].tolist())
        torch.testing.assert_close(log_probs, row[order[:NUM_OUTCOMES]])
        assert float(log_tail.exp()) == pytest.approx(float(row[order[NUM_OUTCOMES:]].exp().sum()), rel=1e-5)
        assert len(drawn) == NUM_DRAWN and not set(drawn.tolist()) & set(ids.tolist())


def test_a_tail_as_one_outcome_is_never_farther_than_the_whole() -> None:
    p = predictions(200, VOCABULARY, 0, spread=0.5)
    for size in (0.01, 0.3, 2.0):
        q = shifted(p, size)
        found = distances(kept_outcomes(p, draws()), q)
        assert (found.bound <= plain_divergence(p, q) * (1 + 1e-5) + 1e-9).all()
        assert found.bound.mean() < 0.9 * plain_divergence(p, q).mean()  # it can be much nearer: this tail is heavy


def test_the_estimate_is_right_in_the_mean_over_draws() -> None:
    p = predictions(1, VOCABULARY, 0, spread=0.5)
    q, number = shifted(p, 0.5), 4000
    kept = kept_outcomes(p.expand(number, -1), draws())
    found = distances(kept, q.expand(number, -1)).estimate
    error = float(found.std()) / number**0.5
    assert abs(float(found.mean()) - float(plain_divergence(p, q)[0])) < 4 * error
    assert error < 0.01 * float(found.mean())


def test_the_packs_tail_is_its_mass_outside_the_sources_outcomes() -> None:
    p, q = predictions(5, VOCABULARY, 0), predictions(5, VOCABULARY, 1)
    kept = kept_outcomes(p, draws())
    expected = 1 - q.double().exp().gather(1, kept.ids).sum(dim=1)
    torch.testing.assert_close(distances(kept, q).tail, expected, rtol=1e-5, atol=1e-6)


def test_a_tail_of_hardly_any_mass_is_drawn_from() -> None:
    logits = torch.full((3, VOCABULARY), -200.0)
    logits[:, 7] = 0.0
    p = logits.log_softmax(dim=1)
    kept = kept_outcomes(p, draws())
    found = distances(kept, shifted(p, 0.5))
    assert 7 not in kept.drawn_ids and torch.isfinite(found.estimate).all() and (found.estimate < 1e-6).all()
