"""The sensitivity stage against transformers, with its gradients and with its matrices replaced."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.cases import case
from support.families import Tiny, original, write
from support.models import Tensors, TinyMixtral
from support.profiles import Recorder
from torch import Tensor

from moe_pack.calib.forward import Array, LayerwiseWeights
from moe_pack.calib.sensitivity import (
    WIDTHS,
    LayerLosses,
    SensitivityPass,
    compared_formats,
    copies_of,
    quantized_formats,
    roundable_roles,
)
from moe_pack.calib.sensitivity.effects import Copy, Divergences, Level
from moe_pack.calib.sensitivity.errors import plainly_rounded, ratios_of_widths
from moe_pack.formats import ModelSpec, part_format
from moe_pack.formats.families import Checkpoint
from moe_pack.runtime.model import CheckpointWeights

CPU = torch.device("cpu")
# A divergence is a sum of float32 differences: of about 1e-7 where copy and original are alike.
KL_TOLERANCE: dict[str, float] = {"rel": 2e-3, "abs": 1e-6}
IDS = torch.randint(96, (3, 24), generator=torch.Generator().manual_seed(5))


def plant_routes(tensors: Tensors) -> None:
    """At layer 0 expert 0 gets every token, expert 3 none: all embeddings share a direction its router looks at."""
    tensors["model.embed_tokens.weight"][:, 0] = 4
    tensors["model.layers.0.self_attn.o_proj.weight"] *= 0.1  # leaves that direction the largest
    router = tensors["model.layers.0.block_sparse_moe.gate.weight"]
    router[:, 0] = torch.tensor([0.4, 0, 0, -3])


def write_mixtral(folder: Path, num_layers: int = 2, **config: int) -> Path:
    shape = TinyMixtral(num_layers=num_layers, num_experts=4, dtype=torch.float32, config=config)
    return shape.write(folder, plant_routes)


SOURCES: dict[str, Callable[[Path], Path]] = {
    "mixtral": write_mixtral,
    "glm4_moe": lambda folder: write(Tiny("glm4_moe", "dense first layer, shared experts"), folder),
    "granitemoe": lambda folder: write(
        Tiny("granitemoe", "multipliers, tied head", {"embedding_multiplier": 2.0, "logits_scaling": 0.5}), folder
    ),
}


def thresholds(layer_idx: int, num_experts: int) -> Array:
    """Made up: float32 [E, kinds, sparsities], rising."""
    generator = np.random.default_rng(layer_idx)
    return np.sort(generator.random((num_experts, 3, 4)).astype(np.float32) * 0.3, axis=2)


@dataclass(frozen=True)
class Ran:
    """A pass over IDS, and the model it went over."""

    source: Path
    spec: ModelSpec
    losses: list[LayerLosses]
    measured: Divergences
    announced: dict[str, int]
    done: dict[str, int]

    def copies(self) -> tuple[Copy, ...]:
        """Returns the copies that the pass made."""
        return copies_of([self.losses[layer] for layer in self.spec.moe_layers], self.spec.hidden_size)


def run_pass(source: Path, level: Level, folder: Path, restarts: bool = False, ids: Tensor = IDS) -> Ran:
    """Runs a pass; `restarts`: each layer by a new process, the first try of which was killed before it was stored."""
    checkpoint = Checkpoint(source)
    spec, recorder, losses = checkpoint.spec, Recorder(), dict[int, LayerLosses]()

    def stage() -> SensitivityPass:
        weights = LayerwiseWeights(CheckpointWeights(checkpoint))
        E = spec.router.num_experts
        return SensitivityPass(
            weights, ids, level, lambda l: thresholds(l, E), folder, CPU, stored=lambda layer: losses[layer]
        )

    running = stage()
    announced = {phase: cost.multiplications for phase, cost in running.cost().items()}
    for layer in range(spec.num_hidden_layers):
        assert running.states.next_layer == layer
        running.forward(recorder)
        running = stage() if restarts else running
    for layer in reversed(range(spec.num_hidden_layers)):
        assert running.next_back == layer
        if restarts:
            running.back()
            running = stage()
        losses[layer] = running.back(recorder)
        running.leave_back()
        running = stage() if restarts else running
    measured = running.divergences([losses[layer] for layer in spec.moe_layers], recorder)
    running.close()
    checkpoint.close()
    assert not folder.exists()
    return Ran(source, spec, [losses[layer] for layer in sorted(losses)], measured, announced, recorder.by_kind)


@pytest.fixture(scope="module")
def passes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ran]:
    folder = tmp_path_factory.mktemp("passes")
    return {name: run_pass(made(folder / name), "full", folder / f"{name}-pass") for name, made in SOURCES.items()}


class Reference:
    """A checkpoint in transformers, and the gradients of the projections that the stage draws of its logits."""

    def __init__(self, source: Path) -> None:
        self.model = original(source)
        self.layers: Any = self.model.model.layers
        table = self.model.get_input_embeddings().weight.detach()
        embedded = table[IDS].requires_grad_()
        self.embedded = embedded
        self.seen: dict[tuple[int, str], Tensor] = {}
        hooks = [
            layer.register_forward_hook(lambda _, x, y, number=number: self._keep(number, "output", y))
            for number, layer in enumerate(self.layers)
        ]
        logits = self.model(inputs_embeds=embedded, use_cache=False).logits
        for hook in hooks:
            hook.remove()
        self.plain = logits.detach().double().log_softmax(-1)
        p = logits.detach().softmax(-1)
        noise = torch.stack([torch.randn(p.shape[1:], generator=torch.Generator().manual_seed(n)) for n in range(3)])
        v = p.sqrt() * noise
        v = v - p * v.sum(-1, keepdim=True)
        names = list(self.seen)
        found = torch.autograd.grad(logits, [embedded, *self.seen.values()], v)
        self.of_embedding = found[0].flatten(0, 1)
        self.gradients = {name: one.flatten(0, 1) for name, one in zip(names, found[1:], strict=True)}

    def _keep(self, layer: int, name: str, value: Any) -> None:
        self.seen[layer, name] = value[0] if isinstance(value, tuple) else value

    @torch.no_grad()
    def kl(self, sequences: slice = slice(None)) -> float:
        """Returns the divergence of the model as it is now from the original, a token."""
        found = self.model(IDS[sequences], use_cache=False).logits.double().log_softmax(-1)
        expected = self.plain[sequences]
        return float((expected.exp() * (expected - found)).sum(-1).mean())

    @torch.no_grad()
    def nll(self, number: int) -> float:
        """Returns the negative log-likelihood of the next tokens of the first sequences, a token."""
        logits = self.model(IDS[:number], use_cache=False).logits[:, :-1].double().flatten(0, 1)
        return float(torch.nn.functional.cross_entropy(logits, IDS[:number, 1:].flatten()))

    def parameter(self, role: str) -> torch.nn.Parameter:
        """Returns the matrix of a dense role."""
        _, layer, part, name = role.split(".")
        held = self.layers[int(layer)]
        module = held.self_attn if part == "attention" else held.mlp if part == "mlp" else held.mlp.shared_experts
        return getattr(module, f"{name}_proj").weight  # type: ignore[no-any-return]  # untyped in torch


@pytest.fixture(scope="module")
def references(passes: dict[str, Ran]) -> dict[str, Reference]:
    return {name: Reference(ran.source) for name, ran in passes.items()}


FAMILIES = pytest.mark.parametrize("name", SOURCES)
Passes = dict[str, Ran]
References = dict[str, Reference]


@FAMILIES
def test_the_way_back_through_the_whole_model_is_torchs(name: str, passes: Passes, references: References) -> None:
    """What the embedding costs is the square of its change along the gradient that has passed through all layers."""
    reference, found = references[name], passes[name].measured.embedding
    table = reference.model.get_input_embeddings().weight.detach()
    for width, kl in zip((8, 4), found.tolist(), strict=True):
        change = (plainly_rounded(table, width) - table)[IDS].flatten(0, 1)
        expected = float((change * reference.of_embedding).sum(1).double().square().mean()) / 2
        assert kl == pytest.approx(expected, rel=5e-3)
        assert kl > 0


@pytest.mark.parametrize("name", ["mixtral", "granitemoe"])
def test_experts_cost_what_their_second_moments_and_torchs_gradients_say(
    name: str, passes: Passes, references: References
) -> None:
    """Down of each expert, with the plain loss before hqq's ratio; experts of few tokens are drawn to the average."""
    ran, reference = passes[name], references[name]
    checkpoint = Checkpoint(ran.source)
    weights = CheckpointWeights(checkpoint)
    for layer, losses in enumerate(ran.losses):
        x = reference_inputs(reference, layer)
        logits = x @ weights.matrix(f"layers.{layer}.router").rows(0, ran.spec.router.num_experts).T
        best = logits.topk(ran.spec.router.num_experts_per_tok)
        shares = torch.zeros_like(logits).scatter(1, best.indices, best.values.softmax(-1))
        above = reference.gradients[layer, "output"] * ran.spec.residual_multiplier
        expected, counts = [], []
        for expert in range(ran.spec.router.num_experts):
            (block,) = weights.expert(layer, expert).blocks()
            assert block.gate is not None
            h = torch.nn.functional.silu(x @ block.gate.T) * (x @ block.up.T) * shares[:, expert, None]
            error = plainly_rounded(block.down, 2) - block.down  # of 64 columns: one group
            expected.append(float((h.square() @ error.square().sum(1) * above.square().mean(1)).double().sum()) / 2)
            counts.append(int((shares[:, expert] > 0).sum()))
        average = sum(expected) / sum(counts)
        drawn = [(loss * n + 8 * average * n) / (n + 8) for loss, n in zip(expected, counts, strict=True)]
        ratio = ratios_of_widths(losses.ratios, ran.spec.hidden_size)[2, 0]
        np.testing.assert_allclose(losses.quantized[:, 2, 0], np.asarray(drawn) * ratio / IDS.numel(), rtol=1e-2)
        assert (losses.quantized[np.asarray(counts) == 0] == 0).all(), "no token, no loss"
    checkpoint.close()


@torch.no_grad()
def reference_inputs(reference: Reference, layer: int) -> Tensor:
    """Returns what the router and the experts of a layer see, [N S, d]."""
    seen: list[Tensor] = []
    held = reference.layers[layer]
    moe = held.mlp if hasattr(held, "mlp") else held.block_sparse_moe
    hook = moe.register_forward_pre_hook(lambda _, x: seen.append(x[0]))
    reference.model(IDS, use_cache=False)
    hook.remove()
    return seen[0].reshape(IDS.numel(), -1)


@FAMILIES
def test_the_heads_divergences_are_those_of_a_model_with_it_rounded(
    name: str, passes: Passes, references: References
) -> None:
    reference, found = references[name], passes[name].measured.head.tolist()
    head = reference.model.get_output_embeddings()
    original_weight = head.weight
    for width, kl in zip((8, 4), found, strict=True):
        head.weight = torch.nn.Parameter(plainly_rounded(original_weight.data, width))  # not a tied embedding's too
        expected = reference.kl(slice(0, 1))  # judged on the first sequence
        head.weight = original_weight
        assert kl == pytest.approx(expected, **KL_TOLERANCE) and kl > 0


@FAMILIES
def test_dense_matrices_cost_about_what_a_model_with_them_rounded_diverges(
    name: str, passes: Passes, references: References
) -> None:
    """At 8 bits half of them within a factor of 2: 24 tokens with one projection each, and a route may turn."""
    ran, reference, found = passes[name], references[name], list[float]()
    for layer, losses in enumerate(ran.losses):
        roles = roundable_roles(ran.spec, layer)
        for role, kl in zip(roles, losses.dense[:, 0].tolist(), strict=True):
            parameter = reference.parameter(role)
            kept = parameter.data
            parameter.data = plainly_rounded(kept, 8)
            found.append(kl / reference.kl())
            parameter.data = kept
        assert losses.dense.shape == (len(roles), 2) and (losses.dense > 0).all()
        np.testing.assert_allclose(losses.dense[:, 0] / losses.dense[:, 1], (15 / 255) ** 2, rtol=1e-5)
    assert sum(0.5 < ratio < 2 for ratio in found) >= len(found) / 2, found


def test_copies_diverge_as_a_model_whose_layers_experts_are_rounded(passes: Passes, tmp_path: Path) -> None:
    """Each of two layers has a copy, of two of the three sequences; the other model is written with rounded experts."""
    ran = passes["mixtral"]
    copies, reference = ran.copies(), Reference(ran.source)
    assert [copy.layers for copy in copies] == [range(1), range(1, 2)]
    for idx, copy in enumerate(copies):

        def rounded(tensors: Tensors, copy: Copy = copy) -> None:
            plant_routes(tensors)
            for layer in copy.layers:
                for name in tensors:
                    if f"layers.{layer}.block_sparse_moe.experts" in name:
                        turned = name.endswith("w2.weight")  # rows of down are columns of the checkpoint's matrix
                        rows = tensors[name].T.contiguous() if turned else tensors[name]
                        stored = plainly_rounded(rows, copy.width)
                        tensors[name] = stored.T.contiguous() if turned else stored

        shape = TinyMixtral(num_layers=2, num_experts=4, dtype=torch.float32)
        other = Reference(shape.write(tmp_path / str(idx), rounded))
        other.plain = reference.plain
        kl = other.kl(slice(0, 2))
        assert ran.measured.kls[idx] == pytest.approx(kl, **KL_TOLERANCE) and kl > 1e-4
        assert ran.measured.nlls[idx] == pytest.approx(other.nll(2) - reference.nll(2), rel=5e-3, abs=1e-5)
    assert ran.measured.num_tokens == 2 * 23


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixtral", "glm4_moe"])
def test_a_pass_killed_in_and_after_every_layer_gives_the_same_bits(name: str, passes: Passes, tmp_path: Path) -> None:
    again = run_pass(passes[name].source, "full", tmp_path / "pass", restarts=True)
    for found, expected in zip(again.losses, passes[name].losses, strict=True):
        for key, array in expected.arrays().items():
            np.testing.assert_array_equal(found.arrays()[key], array, err_msg=key)
    assert again.measured.kls.tolist() == passes[name].measured.kls.tolist()
    assert again.measured.embedding.tolist() == passes[name].measured.embedding.tolist()


def test_fast_scales_the_last_layers_formats_by_those_it_compares(passes: Passes, tmp_path: Path) -> None:
    full = passes["mixtral"]
    fast = run_pass(full.source, "fast", tmp_path / "pass")
    np.testing.assert_array_equal(fast.losses[1].ratios, full.losses[1].ratios)
    formats = compared_formats(64)
    for width in WIDTHS:
        anchor = formats.index(("hqq", part_format(width, 64)))
        np.testing.assert_allclose(fast.losses[0].ratios[:, anchor], full.losses[0].ratios[:, anchor], rtol=1e-6)
        for idx, (_, part) in enumerate(formats):
            if part.width == width:
                expected = full.losses[1].ratios[:, idx] / full.losses[1].ratios[:, anchor]
                found = fast.losses[0].ratios[:, idx] / fast.losses[0].ratios[:, anchor]
                np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert len(quantized_formats(64)) < len(formats)


@FAMILIES
def test_the_work_told_is_about_the_work_announced(name: str, passes: Passes) -> None:
    ran = passes[name]
    assert ran.done.keys() == ran.announced.keys()
    for phase, announced in ran.announced.items():
        with case(phase):
            assert 0.75 < ran.done[phase] / announced < 1.25
