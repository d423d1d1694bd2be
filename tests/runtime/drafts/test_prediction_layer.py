"""Drafts of a prediction layer: its logits are those of the checkpoint's own layer, and it follows the sequence."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.cases import case
from support.coded import FP8_CONFIG, quantize_fp8
from support.families import NUM_POSITIONS, Tiny, token_ids
from support.models import pack
from support.native import kernels_limited_to
from support.prediction import FILE, MTP, NEXTN, PREDICTING, Predicting, Reference, write_predicting, write_table

from moe_pack.convert.kept import keep_source
from moe_pack.convert.pipeline import convert
from moe_pack.formats import BF16, Pack, PackError, uniform_plan
from moe_pack.formats.families import Checkpoint, PredictionLayer
from moe_pack.formats.pack.layouts import UNUSED_FILE
from moe_pack.runtime import SamplingOptions
from moe_pack.runtime.drafts import Drafts
from moe_pack.runtime.drafts.prediction_layer import (
    PredictionDrafter,
    PredictionWeights,
    loaded_bytes,
    prediction_bytes,
)
from moe_pack.runtime.generate import generate
from moe_pack.runtime.model import TORCH, Decoder, NativeOperations, Operations, PackWeights
from moe_pack.runtime.model.layers import run_one_by_one
from moe_pack.runtime.sampling import Sampler

TOLERANCE = 1e-4  # the bound of tests/endtoend/test_families.py
CHUNK = 24  # not a multiple of the hidden states that wait
GLM = Predicting(Tiny("glm4_moe", "as it comes"), NEXTN)
IDS = token_ids()[:60]


def layer_of(opened: Pack) -> PredictionLayer:
    layer = PredictionLayer.find(opened)
    assert layer is not None
    return layer


class Run:
    """A decoder of an open pack, whose sequence a drafter follows."""

    def __init__(self, opened: Pack, operations: Operations = TORCH, chunk_tokens: int = CHUNK) -> None:
        self.weights = PackWeights(opened, torch.device("cpu"), operations)
        self.decoder = Decoder(self.weights, NUM_POSITIONS, chunk_tokens=chunk_tokens)
        layer = PredictionWeights(layer_of(opened), self.weights)
        self.drafter = PredictionDrafter(layer, NUM_POSITIONS, chunk_tokens)
        self.sequence = self.decoder.sequences[0]
        self.sequence.follower = self.drafter

    def run_to(self, num_tokens: int) -> None:
        """Runs the text up to a position, at once."""
        if self.sequence.num_tokens < num_tokens:
            self.decoder.next_logits(IDS[self.sequence.num_tokens : num_tokens])


@dataclass(frozen=True)
class Packed:
    folder: Path
    reference: Reference


@pytest.fixture(scope="module")
def glm(tmp_path_factory: pytest.TempPathFactory) -> Packed:
    folder = tmp_path_factory.mktemp("glm")
    source = write_predicting(GLM, folder / "source")
    pack(source, folder / "packed", width=16)
    return Packed(folder / "packed", Reference(GLM, source, folder / "spare"))


def difference(run: Run, reference: Reference, length: int) -> float:
    """The largest difference of the logits of three tokens after the first tokens of the text."""
    found, expected = run.drafter.logits(IDS[:length], 3), reference.logits(IDS[:length], 3)
    assert found.shape == expected.shape
    return float((found - expected).abs().max())


@pytest.mark.slow
def test_logits_are_those_of_the_checkpoint_s_layer(new_folder: Callable[[], Path]) -> None:
    for row in PREDICTING:
        with case(str(row)):
            folder = new_folder()
            source = write_predicting(row, folder / "source")
            pack(source, folder / "packed", width=16)
            reference = Reference(row, source, folder / "spare")
            with Pack(folder / "packed") as opened:
                run, found = Run(opened), []
                for length in (41, 42, 45, 50):  # a prompt of three passes, a token, several, with drafts between
                    run.run_to(length - 1)
                    found.append(difference(run, reference, length))
                assert max(found) < TOLERANCE


@pytest.mark.slow
def test_prompts_of_any_length_enter_in_passes_of_any_length(glm: Packed) -> None:
    text = token_ids()
    with Pack(glm.folder) as opened:
        for num_tokens in (1, 2, 16, 17, 64, 65, 90):
            expected = glm.reference.logits(text[: num_tokens + 1], 2)
            for chunk_tokens in (1, 16, 17, 128):
                with case((num_tokens, chunk_tokens)):
                    run = Run(opened, chunk_tokens=chunk_tokens)
                    run.decoder.next_logits(text[:num_tokens])
                    found = run.drafter.logits(text[: num_tokens + 1], 2)
                    assert float((found - expected).abs().max()) < TOLERANCE


def test_tokens_without_drafts_wait_and_are_not_lost(glm: Packed) -> None:
    text = token_ids()
    with Pack(glm.folder) as opened:
        run = Run(opened)
        for i in range(0, 90, 3):
            run.decoder.next_logits(text[i : i + 3])
        assert float((run.drafter.logits(text[:91], 2) - glm.reference.logits(text[:91], 2)).abs().max()) < TOLERANCE


def test_wrong_drafts_leave_no_trace(glm: Packed) -> None:
    with Pack(glm.folder) as opened:
        for num_right in (0, 1, 2):
            with case(num_right):
                run = Run(opened)
                run.run_to(30)
                run.drafter.propose(IDS[:31], None, 3)
                wrong = [(token + 1) % 96 for token in IDS[31 + num_right : 34]]
                run.decoder.verify(run.sequence, [IDS[30], *IDS[31 : 31 + num_right], *wrong])
                run.decoder.keep(run.sequence, 31 + num_right)
                run.drafter.accepted(num_right)
                assert difference(run, glm.reference, 32 + num_right) < TOLERANCE
                run.run_to(50)
                assert difference(run, glm.reference, 51) < TOLERANCE


def test_another_text_begins_anew_and_a_common_beginning_stays(glm: Packed) -> None:
    with Pack(glm.folder) as opened:
        run = Run(opened)
        run.decoder.next_logits(IDS[20:60])
        run.drafter.propose([*IDS[20:60], 3], None, 2)
        run.decoder.reset()
        run.drafter.reset()
        assert run.drafter.propose(IDS[:3], None, 2) == []  # nothing of this text has run
        run.run_to(40)
        assert difference(run, glm.reference, 41) < TOLERANCE
        left = run.decoder.keep_beginning([*IDS[:30], 5, 6, 7])
        run.drafter.reset()
        run.decoder.next_logits(left)
        other = [*IDS[:30], 5, 6, 7, 8]
        found, expected = run.drafter.logits(other, 1), glm.reference.logits(other, 1)
        # The key of position 29 is that of the token after it in the text before; all others are the same.
        assert 0 < float((found - expected).abs().max()) < 0.25 * float(expected.abs().max())


def test_a_follower_that_comes_late_drafts_from_what_it_has_seen(glm: Packed) -> None:
    with Pack(glm.folder) as opened:
        run = Run(opened)
        run.sequence.follower = None
        run.run_to(20)
        assert run.drafter.propose(IDS[:21], None, 2) == []
        run.sequence.follower = run.drafter
        run.run_to(30)
        assert len(run.drafter.propose(IDS[:31], None, 2)) == 2


def test_a_draft_ends_where_the_context_ends(glm: Packed) -> None:
    text = [IDS[i % 60] for i in range(NUM_POSITIONS)]
    with Pack(glm.folder) as opened:
        run = Run(opened)
        run.decoder.next_logits(text[:-1])
        assert len(run.drafter.propose(text, None, 8)) == 2
        run = Run(opened)
        run.decoder.next_logits(text[:-3])
        assert len(run.drafter.propose(text[:-2], None, 8)) == 4


def test_memory_is_what_is_said_before_to_the_byte(glm: Packed) -> None:
    with Pack(glm.folder) as opened:
        run, layer = Run(opened), layer_of(opened)
        assert run.drafter.num_bytes == prediction_bytes(layer, NUM_POSITIONS)
        own = sum(entry.num_bytes for entry in opened.layout.unused_file.entries if "pad." not in entry.name)  # type: ignore[union-attr]  # it is there
        tables = 2 * 2 * 96 * 64
        vectors = sum(role.shape[0] for role in layer.roles.values() if len(role.shape) == 1)
        assert loaded_bytes(layer) == own - tables + 2 * vectors  # tables are the model's; vectors become float32


def test_native_kernels_run_it(glm: Packed) -> None:
    with Pack(glm.folder) as opened:
        run = Run(opened, NativeOperations(kernels_limited_to("portable")))
        run.run_to(40)
        assert difference(run, glm.reference, 41) < TOLERANCE


def test_experts_are_those_of_the_reference_semantics(glm: Packed) -> None:
    with Pack(glm.folder) as opened:
        weights = PredictionWeights(layer_of(opened), PackWeights(opened, torch.device("cpu")))
        generator = torch.Generator().manual_seed(1)
        x = torch.randn((5, 64), generator=generator)
        experts = torch.tensor([[0, 2], [1, 2], [5, 3], [2, 0], [4, 1]])
        shares = torch.rand((5, 2), generator=generator)
        expected = run_one_by_one(x, experts, shares, weights, 0)
        torch.testing.assert_close(weights.run_experts(0, x, experts, shares), expected)


def test_fp8_layers_are_loaded_as_they_are(tmp_path: Path) -> None:
    shape = {"hidden_size": 128, "moe_intermediate_size": 64, "intermediate_size": 128, "q_lora_rank": 64}
    row = Predicting(Tiny("deepseek_v3", "fp8", shape), NEXTN)
    plain = write_predicting(row, tmp_path / "plain")
    coded = load_file(plain / FILE)
    meant = quantize_fp8(coded, ("_proj.weight",))
    source = tmp_path / "source"
    source.mkdir()
    save_file(coded, source / FILE)
    config = json.loads((plain / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"quantization_config": FP8_CONFIG}))
    save_file(load_file(plain / FILE) | meant, plain / FILE)
    checkpoint = Checkpoint(source)
    plan = keep_source(checkpoint, uniform_plan(checkpoint.spec, "up", BF16, BF16), "source", "source", "source")
    convert(checkpoint, plan, tmp_path / "packed", 2)
    checkpoint.close()
    reference = Reference(row, plain, tmp_path / "spare")
    with Pack(tmp_path / "packed") as opened:
        run, layer = Run(opened), layer_of(opened)
        assert layer.dense["project"].codec == "fp8"
        run.run_to(40)
        assert difference(run, reference, 41) < TOLERANCE
        assert run.drafter.num_bytes == prediction_bytes(layer, NUM_POSITIONS)
        codes = sum(entry.num_bytes for entry in opened.layout.unused_file.entries if entry.dtype == "F8_E4M3")  # type: ignore[union-attr]  # it is there
        assert codes < loaded_bytes(layer) < 1.6 * codes


@pytest.mark.slow
def test_answers_are_the_same_with_drafts(glm: Packed) -> None:
    with Pack(glm.folder) as opened:
        for temperature in (0.0, 0.8):
            with case(temperature):
                answers = []
                for with_drafts in (False, True):
                    run = Run(opened)
                    drafts = Drafts(run.drafter, None) if with_drafts else None
                    sampler = Sampler(SamplingOptions(temperature=temperature, seed=5))
                    answers.append(list(generate(run.decoder, IDS[:20], sampler, 40, frozenset(), drafts)))
                    assert drafts is None or drafts.counts.drafted > 0
                assert answers[0] == answers[1]


@pytest.mark.slow
def test_models_with_states_draft_too(tmp_path: Path) -> None:
    """Their states are taken back by running the right tokens again, which the layer follows."""
    row = Predicting(Tiny("qwen3_next", "states"), MTP)
    source = write_predicting(row, tmp_path / "source")
    pack(source, tmp_path / "packed", width=16)
    reference = Reference(row, source, tmp_path / "spare")
    with Pack(tmp_path / "packed") as opened:
        run, plain, sampler = Run(opened), Run(opened), Sampler(SamplingOptions(temperature=0))
        drafts = Drafts(run.drafter, None)
        text = list(generate(run.decoder, IDS[:20], sampler, 30, frozenset(), drafts))
        assert text == list(generate(plain.decoder, IDS[:20], sampler, 30, frozenset()))
        assert drafts.counts.drafted > drafts.counts.accepted
        whole = [*IDS[:20], *text]
        found, expected = run.drafter.logits(whole[: run.sequence.num_tokens + 1], 2), reference.logits(whole, 2)
        assert float((found - expected).abs().max()) < TOLERANCE


@pytest.mark.slow
def test_drafts_that_are_right_save_passes(new_folder: Callable[[], Path]) -> None:
    for share_known, least, most in ((1.0, 8.0, 9.0), (0.5, 1.5, 3.0), (0.0, 1.0, 1.1)):
        with case(share_known):
            folder = new_folder()
            pack(write_table(folder / "source", share_known), folder / "packed", width=16)
            with Pack(folder / "packed") as opened:
                run, plain = Run(opened), Run(opened)
                drafts, sampler = Drafts(run.drafter, None), Sampler(SamplingOptions(temperature=0))
                text = list(generate(run.decoder, IDS[:20], sampler, 60, frozenset(), drafts))
                assert text == list(generate(plain.decoder, IDS[:20], sampler, 60, frozenset()))
                assert least <= drafts.counts.tokens_per_pass <= most
                assert drafts.counts.passes == 59 - drafts.counts.accepted


def test_what_has_no_layer_has_no_drafts(glm: Packed, tmp_path: Path) -> None:
    source = write_predicting(GLM, tmp_path / "source")
    tensors = load_file(source / FILE)
    names = {name for name in tensors if name.startswith("model.layers.3.")}
    save_file({name: tensor for name, tensor in tensors.items() if name not in names}, source / FILE)
    pack(source, tmp_path / "without", width=16)
    with Pack(tmp_path / "without") as opened:
        assert PredictionLayer.find(opened) is None
    missing = "model.layers.3.mlp.experts.1.up_proj.weight"
    save_file({name: tensor for name, tensor in tensors.items() if name != missing}, source / FILE)
    pack(source, tmp_path / "part", width=16)
    with Pack(tmp_path / "part") as opened, pytest.raises(PackError) as refused:
        PredictionLayer.find(opened)
    assert str(refused.value) == (
        f"{UNUSED_FILE}: the prediction layer cannot run: checkpoint: tensor {missing!r} is missing"
    )


def test_a_damaged_layer_is_refused(glm: Packed, tmp_path: Path) -> None:
    source = write_predicting(GLM, tmp_path / "source")
    pack(source, tmp_path / "packed", width=16)
    path = tmp_path / "packed" / UNUSED_FILE
    raw = bytearray(path.read_bytes())
    raw[-100] ^= 1
    path.write_bytes(raw)
    with Pack(tmp_path / "packed") as opened, pytest.raises(PackError) as refused:
        PredictionWeights(layer_of(opened), PackWeights(opened, torch.device("cpu")))
    assert str(refused.value) == f"{UNUSED_FILE}: SHA-256 does not match the manifest's; the file is damaged"
