"""Drafts by a prediction layer: its logits against a plain twin, its bytes, and the engine that runs it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.cases import case
from support.coded import FP8_CONFIG, quantize_fp8
from support.families import NUM_POSITIONS, Tiny, original, text_values, token_ids, with_text, write
from support.models import DEMO_MODEL, pack
from support.native import kernels_limited_to

from moe_pack.convert.kept import keep_source
from moe_pack.convert.pipeline import convert
from moe_pack.formats import BF16, Pack, PackError, RunError, size_text, uniform_plan
from moe_pack.formats.families import Checkpoint, PredictionLayer
from moe_pack.formats.pack.layouts import UNUSED_FILE
from moe_pack.runtime import SamplingOptions
from moe_pack.runtime.drafts import Drafts, prediction_layer
from moe_pack.runtime.engine.engine import Engine
from moe_pack.runtime.engine.options import DraftOption, EngineOptions
from moe_pack.runtime.engine.report import RunReport, report, report_lines
from moe_pack.runtime.generate import generate
from moe_pack.runtime.model import TORCH, Decoder, NativeOperations, Operations, PackWeights
from moe_pack.runtime.model.layers import run_one_by_one
from moe_pack.runtime.offload import Approximations, Sequences, routing_bytes
from moe_pack.runtime.offload.budgets import least_budget
from moe_pack.runtime.sampling import Sampler

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Tensors = dict[str, torch.Tensor]
FILE = "model.safetensors"
# Names of what is the layer's own, `{layers}` before a decoder layer's number and `{n}` the number of decoder layers.
NEXTN = {
    "layer": "{layers}{n}.",
    "project": "{layers}{n}.eh_proj.weight",
    "embed_norm": "{layers}{n}.enorm.weight",
    "hidden_norm": "{layers}{n}.hnorm.weight",
    "norm": "{layers}{n}.shared_head.norm.weight",
    "embed": "{layers}{n}.embed_tokens.weight",
    "head": "{layers}{n}.shared_head.head.weight",
}
MTP = {
    "layer": "mtp.layers.0.",
    "project": "mtp.fc.weight",
    "embed_norm": "mtp.pre_fc_norm_embedding.weight",
    "hidden_norm": "mtp.pre_fc_norm_hidden.weight",
    "norm": "mtp.norm.weight",
}


@dataclass(frozen=True)
class Predicting:
    """A row: a tiny model, its names, and whether embedding and head of the layer differ from the model's."""

    tiny: Tiny
    names: dict[str, str]
    has_own_tables: bool = False

    def __str__(self) -> str:
        return f"{self.tiny.family}{', own tables' if self.has_own_tables else ''}"


_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 32, "beta_slow": 1}
PREDICTING = (
    Predicting(Tiny("deepseek_v3", "a prediction layer"), NEXTN),
    Predicting(Tiny("deepseek_v3", "yarn", {"rope_parameters": _YARN | {"rope_theta": 1e4}}), NEXTN, True),
    Predicting(Tiny("deepseek_v32", "a prediction layer"), NEXTN),
    Predicting(Tiny("glm4_moe", "a prediction layer", {"use_qk_norm": True}), NEXTN),
    Predicting(Tiny("glm4_moe_lite", "a prediction layer"), NEXTN),
    Predicting(Tiny("glm4v_moe", "a prediction layer"), NEXTN),
    Predicting(Tiny("hy_v3", "a prediction layer"), NEXTN),
    Predicting(Tiny("qwen3_next", "a prediction layer"), MTP),
    Predicting(Tiny("qwen3_next", "experts in one tensor", fused=True), MTP),
    Predicting(Tiny("qwen3_5_moe_text", "a prediction layer"), MTP),
    Predicting(Tiny("qwen3_5_moe", "a prediction layer"), MTP),
)


def write_predicting(row: Predicting, folder: Path) -> Path:
    """Writes the checkpoint of a row."""
    write(row.tiny, folder)
    tensors = load_file(folder / FILE)
    layers, n, like = _places(folder, tensors)
    names = _named(row, layers, n)
    generator = torch.Generator().manual_seed(11)

    def shuffled(tensor: torch.Tensor) -> torch.Tensor:
        order = torch.randperm(tensor.numel(), generator=generator)
        return tensor.flatten()[order].view(tensor.shape).contiguous()

    begin = f"{layers}{like}."
    made = {names["layer"] + name.removeprefix(begin): shuffled(tensors[name]) for name in _of(tensors, begin)}
    embed, head = (next(name for name in tensors if name.endswith(end)) for end in _TABLES)
    norm = next(name for name in tensors if name.endswith(("model.norm.weight", "language_model.norm.weight")))
    d = tensors[norm].shape[0]
    made[names["project"]] = (torch.randn((d, 2 * d), generator=generator) * 0.15).to(tensors[norm].dtype)
    made |= {names[role]: shuffled(tensors[norm]) for role in ("embed_norm", "hidden_norm", "norm")}
    for role, name in (("embed", embed), ("head", head)):
        if role in names:
            made[names[role]] = shuffled(tensors[name]) if row.has_own_tables else tensors[name].clone()
    save_file(tensors | made, folder / FILE)
    values = json.loads((folder / "config.json").read_text())
    if row.names is NEXTN:
        values = with_text(values, text_values(values) | {"num_nextn_predict_layers": 1})
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def write_table(folder: Path, share_known: float = 1.0) -> Path:
    """Writes a GLM-4.5 whose next token follows from the last one alone, by a table that its prediction layer knows.

    Attention and experts add nothing; the projection passes the embedding on. So the layer predicts from token i + 1
    what the model predicts from it. The layer's own embedding is another for some tokens, which it thus gets wrong.
    """
    write_predicting(Predicting(Tiny("glm4_moe", "a table"), NEXTN), folder)
    tensors = load_file(folder / FILE)
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
        elif name.endswith("norm.weight"):
            tensor.fill_(1.0)
    embed, n = tensors["model.embed_tokens.weight"], 3
    vocab, d = embed.shape
    follows = torch.randperm(vocab, generator=torch.Generator().manual_seed(2))
    tensors["lm_head.weight"][follows] = embed
    tensors[f"model.layers.{n}.shared_head.head.weight"].copy_(tensors["lm_head.weight"])
    tensors[f"model.layers.{n}.eh_proj.weight"].copy_(torch.cat((torch.eye(d), torch.zeros(d, d)), dim=1))
    own = tensors[f"model.layers.{n}.embed_tokens.weight"]
    own.copy_(embed)
    first_unknown = int(vocab * share_known)
    own[first_unknown:] = -own[first_unknown:]
    save_file(tensors, folder / FILE)
    return folder


_TABLES = ("embed_tokens.weight", "lm_head.weight")


def _of(tensors: Tensors, begin: str) -> list[str]:
    return sorted(name for name in tensors if name.startswith(begin))


def _named(row: Predicting, layers: str, n: int) -> dict[str, str]:
    return {role: name.format(layers=layers, n=n) for role, name in row.names.items()}


def _places(folder: Path, tensors: Tensors) -> tuple[str, int, int]:
    """Returns the prefix of decoder layers, how many there are, and the last with attention and experts."""
    layers = next(name[: name.index("layers.0.") + len("layers.")] for name in sorted(tensors) if "layers.0." in name)
    n = text_values(json.loads((folder / "config.json").read_text()))["num_hidden_layers"]
    kinds = ("self_attn", "mlp.experts")
    alike = [i for i in range(n) if all(_of(tensors, f"{layers}{i}.{kind}") for kind in kinds)]
    return layers, n, alike[-1]


class Reference:
    """The prediction layer of a row's checkpoint.

    Args:    spare: a folder for the second checkpoint.
    """

    def __init__(self, row: Predicting, folder: Path, spare: Path) -> None:
        tensors = load_file(folder / FILE)
        layers, n, like = _places(folder, tensors)
        self._names, self._like = _named(row, layers, n), like
        self._own = {role: tensors[name].float() for role, name in self._names.items() if name in tensors}
        self._is_centered = row.names is MTP  # Qwen's norms are stored less 1
        alone = {name: tensor for name, tensor in tensors.items() if not name.startswith((f"{layers}{n}.", "mtp."))}
        part = {
            f"{layers}{like}." + name.removeprefix(self._names["layer"]): tensors[name]
            for name in _of(tensors, self._names["layer"])
        }
        part = {name: tensor for name, tensor in part.items() if name in alone}
        self._main = _loaded(folder, spare / "main", alone)
        self._layer = _loaded(folder, spare / "layer", alone | part)
        config: Any = self._main.config
        self._eps = getattr(config, "text_config", config).rms_norm_eps

    @torch.no_grad()
    def logits(self, ids: list[int], most: int) -> torch.Tensor:
        """The logits of the tokens after `ids`, each after the most likely one before it, [most, vocabulary]."""
        main: Any = self._main
        embed = self._own.get("embed", main.get_input_embeddings().weight)
        head = self._own.get("head", main.get_output_embeddings().weight)
        hidden = main.model(input_ids=torch.tensor([ids[:-1]]), use_cache=False).last_hidden_state[0]
        tokens, rows = ids[1:], []
        for _ in range(most):
            both = self._norm(embed[torch.tensor(tokens)], "embed_norm"), self._norm(hidden, "hidden_norm")
            x = self._norm(self._run(torch.cat(both, dim=1) @ self._own["project"].T)[-1:], "norm")
            rows.append((x @ head.T)[0])
            tokens, hidden = [*tokens, int(rows[-1].argmax())], torch.cat((hidden, x))
        return torch.stack(rows)

    def _norm(self, x: torch.Tensor, role: str) -> torch.Tensor:
        weight = self._own[role] + (1.0 if self._is_centered else 0.0)
        return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + self._eps) * weight

    def _run(self, x: torch.Tensor) -> torch.Tensor:
        modules = dict(self._layer.named_modules())
        (name,) = (name for name in modules if name.endswith(f".layers.{self._like}"))
        rotary: Any = modules[name.removesuffix(f"layers.{self._like}") + "rotary_emb"]
        positions, mask = torch.arange(len(x))[None], torch.full((len(x), len(x)), -torch.inf).triu(1)
        y: Any = modules[name](
            x[None],
            position_embeddings=rotary(x[None], positions),
            attention_mask=mask[None, None],
            position_ids=positions,
        )
        made: torch.Tensor = (y if isinstance(y, torch.Tensor) else y[0])[0]
        return made


def _loaded(source: Path, folder: Path, tensors: Tensors) -> PreTrainedModel:
    folder.mkdir(parents=True)
    shutil.copy(source / "config.json", folder / "config.json")
    save_file(tensors, folder / FILE, {"format": "pt"})
    return original(folder)


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
        layer = prediction_layer.PredictionWeights(layer_of(opened), self.weights)
        self.drafter = prediction_layer.PredictionDrafter(layer, NUM_POSITIONS, chunk_tokens)
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
        assert run.drafter.num_bytes == prediction_layer.prediction_bytes(layer, NUM_POSITIONS)
        own = sum(entry.num_bytes for entry in opened.layout.unused_file.entries if "pad." not in entry.name)  # type: ignore[union-attr]  # it is there
        tables = 2 * 2 * 96 * 64
        vectors = sum(role.shape[0] for role in layer.roles.values() if len(role.shape) == 1)
        assert (
            prediction_layer.loaded_bytes(layer) == own - tables + 2 * vectors
        )  # tables are the model's; vectors become float32


def test_native_kernels_run_it(glm: Packed) -> None:
    with Pack(glm.folder) as opened:
        run = Run(opened, NativeOperations(kernels_limited_to("portable")))
        run.run_to(40)
        assert difference(run, glm.reference, 41) < TOLERANCE


def test_experts_are_those_of_the_reference_semantics(glm: Packed) -> None:
    with Pack(glm.folder) as opened:
        weights = prediction_layer.PredictionWeights(layer_of(opened), PackWeights(opened, torch.device("cpu")))
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
        assert run.drafter.num_bytes == prediction_layer.prediction_bytes(layer, NUM_POSITIONS)
        codes = sum(entry.num_bytes for entry in opened.layout.unused_file.entries if entry.dtype == "F8_E4M3")  # type: ignore[union-attr]  # it is there
        assert codes < prediction_layer.loaded_bytes(layer) < 1.6 * codes


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
def test_a_gpu_s_graphs_verify_what_the_layer_drafts(glm: Packed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the interpreter: the layer follows the hidden states of graphs, and its drafts change no token."""
    from support.plain_gpu import plain_gpu  # which needs Triton

    import moe_pack.runtime.gpu.token.engine as gpu_engine

    monkeypatch.setattr(gpu_engine, "run_everything", lambda *of_engine: None)
    plain_gpu(monkeypatch).share = 1.0
    answers = []
    for options in (EngineOptions("cpu", draft="off"), EngineOptions("cuda", draft="mtp", kernels="portable")):
        with Pack(glm.folder) as opened, Engine(opened, options, 48) as engine:
            if engine.drafts is not None:
                engine.drafts._gate = None
            sampler = Sampler(SamplingOptions(temperature=0))
            answers.append(list(generate(engine.decoder, IDS[:5], sampler, 6, frozenset(), engine.drafts)))
            assert options.draft == "off" or (engine.drafts is not None and engine.drafts.counts.drafted > 0)
    assert answers[0] == answers[1]


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
        prediction_layer.PredictionWeights(layer_of(opened), PackWeights(opened, torch.device("cpu")))
    assert str(refused.value) == f"{UNUSED_FILE}: SHA-256 does not match the manifest's; the file is damaged"


CONTEXT, PROMPT = 100, token_ids()[:20]


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("table")
    pack(write_table(folder / "source"), folder / "packed", width=16)
    return folder / "packed"


def answer(opened: Pack, options: EngineOptions) -> tuple[list[int], RunReport]:
    with Engine(opened, options, CONTEXT) as engine:
        sampler = Sampler(SamplingOptions(temperature=0))
        tokens = list(generate(engine.decoder, PROMPT, sampler, 60, frozenset(), engine.drafts))
        return tokens, report(engine)


def layer_bytes(opened: Pack) -> int:
    layer = PredictionLayer.find(opened)
    assert layer is not None
    return prediction_layer.prediction_bytes(layer, CONTEXT)


def test_answers_come_from_fewer_passes(packed: Path) -> None:
    with Pack(packed) as opened:
        expected, _ = answer(opened, EngineOptions(draft="off"))
        budget = least_budget(opened.layout, CONTEXT, 0) + layer_bytes(opened) + (64 << 10)
        for options in (EngineOptions(draft="mtp"), EngineOptions(draft="mtp", budget_bytes=budget)):
            with case(options.budget_bytes):
                found, facts = answer(opened, options)
                assert found == expected
                drafts = facts.drafts
                assert drafts is not None and facts.fallbacks == ()
                assert drafts.accepted == drafts.drafted > 0
                assert ("prediction layer", size_text(layer_bytes(opened))) in report_lines(facts)


def test_a_budget_has_the_layer_to_the_byte(packed: Path) -> None:
    with Pack(packed) as opened:
        predictors = routing_bytes(packed)
        sequences = Sequences(draft_bytes=layer_bytes(opened))
        needed = least_budget(opened.layout, CONTEXT, predictors, sequences)
        assert needed == least_budget(opened.layout, CONTEXT, predictors) + layer_bytes(opened)
        with Engine(opened, EngineOptions(draft="mtp", budget_bytes=needed), CONTEXT) as engine:
            assert engine.plan is not None
            parts = {part.name: part.num_bytes for part in engine.plan.parts}
            assert parts["prediction layer"] == layer_bytes(opened)
            assert sum(parts.values()) == needed
        with pytest.raises(RunError) as refused:
            Engine(opened, EngineOptions(draft="mtp", budget_bytes=needed - 1), CONTEXT)
        assert " of the prediction layer and " in str(refused.value)
        with Engine(opened, EngineOptions(draft="ngram", budget_bytes=needed), CONTEXT) as engine:
            assert engine.plan is not None
            assert "prediction layer" not in {part.name for part in engine.plan.parts}


def test_what_cannot_draft_says_why(packed: Path, tmp_path: Path) -> None:
    pack(DEMO_MODEL, tmp_path / "demo")
    several = "a prediction layer follows one sequence, and several run; --draft ngram follows all"
    changed = "an option that CHANGES THE ANSWER makes it depend on which tokens run together"
    none = "the pack has no prediction layer that runs; --draft ngram needs none"
    approximate = EngineOptions(draft="mtp", approximations=Approximations(substitute=0.5), budget_bytes=1 << 30)
    cases: list[tuple[Path, EngineOptions, Sequences, str]] = [
        (packed, EngineOptions(draft="mtp"), Sequences(2), several),
        (packed, approximate, Sequences(), changed),
        (tmp_path / "demo", EngineOptions(draft="mtp"), Sequences(), none),
    ]
    for folder, options, sequences, why in cases:
        with case(why), Pack(folder) as opened, Engine(opened, options, CONTEXT, sequences=sequences) as engine:
            assert engine.drafts is None
            assert engine.fallbacks == [f"nothing is drafted: {why}"]
            assert engine.plan is None or engine.plan.fixed.drafts == 0
    strict = EngineOptions(draft="mtp", is_strict=True)
    with Pack(tmp_path / "demo") as opened, pytest.raises(RunError) as refused:
        Engine(opened, strict, CONTEXT)
    assert str(refused.value) == f"--strict: nothing is drafted: {none}"


def test_only_mtp_loads_the_layer(packed: Path) -> None:
    choices: tuple[DraftOption, ...] = ("auto", "off", "ngram")
    with Pack(packed) as opened:
        for draft in choices:
            with case(draft), Engine(opened, EngineOptions(draft=draft, budget_bytes=1 << 30), CONTEXT) as engine:
                assert engine.plan is not None and engine.plan.fixed.drafts == 0
                assert engine.decoder.sequences[0].follower is None  # type: ignore[union-attr]  # no encoder
