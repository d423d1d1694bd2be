"""The compact reference: against a plain decoder, killed and resumed, and each way a file of it can be wrong."""

import json
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.cases import case
from support.models import TinyMixtral
from support.profiles import Recorder, StoppedError, random_tokens

from moe_pack.calib.evaluate import REFERENCE_FILE, Reference, make_reference, read_reference
from moe_pack.calib.forward import Tokens
from moe_pack.formats import ConversionError, PackError, RunError, canonical
from moe_pack.formats.families import Checkpoint
from moe_pack.formats.pack.sidecar import TensorSidecar, write_tensor_sidecar
from moe_pack.runtime.model import CheckpointWeights, Decoder

SHAPE = TinyMixtral(num_layers=2, num_experts=4, vocab_size=300)
TOKENS = random_tokens(3, 40, SHAPE.vocab_size)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return SHAPE.write(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def made(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    make(source, folder)
    return folder


def make(source: Path, folder: Path, tokens: Tokens = TOKENS, progress: Recorder | None = None) -> Reference:
    with closing(Checkpoint(source)) as checkpoint:
        return make_reference(checkpoint, tokens, folder, progress or Recorder())


def plain_log_probs(source: Path) -> torch.Tensor:
    """Predictions of a plain decoder, float32 [N, S - 1, V]."""
    checkpoint, found = Checkpoint(source), []
    decoder = Decoder(CheckpointWeights(checkpoint), TOKENS.sequences.shape[1])
    for sequence in TOKENS.sequences:
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
    came = torch.from_numpy(TOKENS.sequences[:, 1:, None].astype(np.int64))
    np.testing.assert_allclose(found.next_log_probs, plain.gather(2, came)[:, :, 0], atol=1e-5)


def test_it_says_of_what_it_is_and_has_its_text(made: Path) -> None:
    found = read_reference(made)
    facts = found.facts
    assert (facts.text, facts.num_sequences, facts.sequence_length) == ("made up", 3, 40)
    assert (facts.vocab_size, facts.num_outcomes, facts.num_drawn) == (300, 256, 32)
    assert found.tokens().sha256 == TOKENS.sha256
    np.testing.assert_array_equal(found.tokens().sequences, TOKENS.sequences)


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
    for number, (change, message) in enumerate(
        [
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
        ]
    ):
        (case_folder := tmp_path / str(number)).mkdir()
        with case(change, message):
            with pytest.raises(PackError) as refusal:
                read_reference(rewritten(made, case_folder, change))
            assert str(refusal.value) == f"reference.safetensors: {message}"


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    write_tensor_sidecar(tmp_path, REFERENCE_FILE, [("x", "U8", np.zeros(3, "<u1"))], "0" * 64)
    with pytest.raises(PackError) as refusal:
        read_reference(tmp_path)
    assert str(refusal.value).endswith("the file is no reference of moe-pack eval --keep-reference; it has no facts")


def test_the_file_may_have_another_name(made: Path, tmp_path: Path) -> None:
    shutil.copy(made / REFERENCE_FILE, tmp_path / "kept.safetensors")
    assert read_reference(tmp_path / "kept.safetensors").facts == read_reference(made).facts
