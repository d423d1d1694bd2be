"""The sensitivity stage against transformers with the same matrices replaced, and against whole experts run twice."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import case
from families import Tiny, original, write
from models import Tensors, TinyMixtral, Unbiased
from profiles import Recorder
from torch import Tensor

from moe_pack.calib.forward import KINDS, Array, LayerwiseWeights
from moe_pack.calib.sensitivity import (
    SPARSITIES,
    WIDTHS,
    LayerErrors,
    Level,
    SensitivityPass,
    all_copies,
    compared_formats,
    copies_of,
    roundable_roles,
)
from moe_pack.calib.sensitivity.effects import Copy, Divergences
from moe_pack.calib.sensitivity.errors import QUANTIZED, SPARSE, Change, Rounding
from moe_pack.formats import MATRICES, ModelSpec, PartFormat, Quantizer, Selector, part_format
from moe_pack.formats.families import Checkpoint
from moe_pack.runtime.model import CheckpointWeights, Decoder, Expert, Matrix, NeuronBlock

CPU = torch.device("cpu")
# A divergence is a sum of float32 differences: of about 1e-7 where copy and original are alike.
KL_TOLERANCE: dict[str, float] = {"rel": 2e-3, "abs": 1e-6}
# Errors are squares of differences of outputs of order 1, whose float32 rounding is 1e-6.
ERROR_TOLERANCE: dict[str, Any] = {"rtol": 2e-3, "atol": 1e-10}
IDS = torch.randint(96, (3, 24), generator=torch.Generator().manual_seed(5))
MANY_IDS = torch.randint(96, (10, 60), generator=torch.Generator().manual_seed(6))


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


def place(change: Change) -> tuple[int, int]:
    """Where a change's error is in an expert's [matrices, widths], or [kinds, sparsities]."""
    if change.kind_idx >= 0:
        return change.kind_idx, SPARSITIES.index(change.sparsity)
    return change.matrix_idx, WIDTHS.index(change.width)


@dataclass(frozen=True)
class Ran:
    """A pass over IDS or others, and the model it went over."""

    source: Path
    spec: ModelSpec
    level: Level
    errors: list[LayerErrors]
    measured: Divergences
    announced: int
    done: int

    def kl_of(self) -> Iterator[tuple[Copy, float]]:
        return zip(all_copies(self.spec, self.level), self.measured.kls.tolist(), strict=True)

    def ratio(self, layer: int, change: Change) -> float:
        """By what a change's error, as measured, is multiplied."""
        idx = compared_formats(self.spec.hidden_size).index(("hqq", part_format(change.width, 64)))
        return float(self.errors[layer].ratios[change.matrix_idx, idx])


def run_pass(
    source: Path, level: Level, folder: Path, ids: Tensor = IDS, restarts: bool = False, announce: bool = False
) -> Ran:
    """All of a pass; `restarts`: each layer by a new process, the first try of which was killed before `leave`."""
    checkpoint = Checkpoint(source)
    spec, recorder = checkpoint.spec, Recorder()

    def stage() -> SensitivityPass:
        weights = LayerwiseWeights(CheckpointWeights(checkpoint))
        return SensitivityPass(weights, ids, level, lambda l: thresholds(l, spec.router.num_experts), folder, CPU)

    running = stage()
    announced = running.cost(range(spec.num_hidden_layers)).multiplications if announce else 0
    errors = []
    for layer in range(spec.num_hidden_layers):
        if restarts:
            running.layer(layer)
            running = stage()
        errors.append(running.layer(layer, recorder))
        running.leave(layer)
        if restarts:
            running = stage()
    measured = running.divergences(recorder)
    running.states.close()
    checkpoint.close()
    assert not folder.exists()
    return Ran(source, spec, level, errors, measured, announced, recorder.done)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: made(tmp_path_factory.mktemp("sources") / name) for name, made in SOURCES.items()}


ANNOUNCED: list[tuple[str, Level]] = [("glm4_moe", "fast"), ("mixtral", "full")]


@pytest.fixture(scope="module")
def passes(sources: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, Level], Ran]:
    wanted: list[tuple[str, Level]] = [*((name, "fast") for name in SOURCES), ("mixtral", "full")]
    folder = tmp_path_factory.mktemp("passes")
    return {
        (name, level): run_pass(sources[name], level, folder / f"{name}-{level}", announce=(name, level) in ANNOUNCED)
        for name, level in wanted
    }


# --- transformers, its matrices replaced


class Reference:
    """A checkpoint in transformers: logits, and what passes through its layers, with any matrix replaced meanwhile."""

    def __init__(self, source: Path, ids: Tensor = IDS) -> None:
        self.model = original(source)
        self.layers: Any = self.model.model.layers
        self.ids = ids
        self.plain = self.logits()

    @torch.no_grad()
    def logits(self) -> Tensor:
        """[N, S, vocabulary]."""
        logits: Tensor = self.model(self.ids, use_cache=False).logits
        return logits

    def kl(self, logits: Tensor, sequences: slice = slice(None)) -> float:
        """The divergence of these logits from the model's own, a token."""
        expected, found = (held[sequences].double().log_softmax(-1) for held in (self.plain, logits))
        return float((expected.exp() * (expected - found)).sum(-1).mean())

    def nll(self, logits: Tensor) -> float:
        """Of the tokens that come next, a token."""
        held, next_ids = logits[:, :-1].double().flatten(0, 1), self.ids[:, 1:].flatten()
        return float(torch.nn.functional.cross_entropy(held, next_ids))

    def moe(self, layer: int) -> Any:
        held = self.layers[layer]
        return held.mlp if hasattr(held, "mlp") else held.block_sparse_moe

    def parameter(self, role: str) -> torch.nn.Parameter:
        """The matrix of a dense role."""
        _, layer, part, name = role.split(".")
        held = self.layers[int(layer)]
        module = held.self_attn if part == "attention" else held.mlp if part == "mlp" else held.mlp.shared_experts
        return getattr(module, f"{name}_proj").weight  # type: ignore[no-any-return]  # untyped in torch

    @contextmanager
    def rounded(self, *changes: tuple[torch.nn.Parameter, int]) -> Iterator[None]:
        """Each of these at a width, as plain rounding stores it."""
        kept = [parameter.detach().clone() for parameter, _ in changes]
        for parameter, width in changes:
            parameter.data = stored(parameter.data, width, "nearest")
        yield
        for (parameter, _), held in zip(changes, kept, strict=True):
            parameter.data = held

    @torch.no_grad()
    def unrouted(self, layer: int) -> Tensor:
        """The hidden states of a layer with attention and what every token gets added, [N S, d]."""
        seen: list[Tensor] = []
        held, moe = self.layers[layer], self.moe(layer)
        hooks = [held.post_attention_layernorm.register_forward_pre_hook(lambda _, x: seen.append(x[0]))]
        always = getattr(moe, "shared_experts", None if hasattr(moe, "experts") or hasattr(moe, "router") else moe)
        if always is not None:
            hooks.append(always.register_forward_hook(lambda _, x, output: seen.append(output)))
        self.logits()
        for hook in hooks:
            hook.remove()
        return torch.stack([one.reshape(self.ids.numel(), -1) for one in seen]).sum(0)

    @torch.no_grad()
    def inputs(self, layer: int) -> Tensor:
        """What the router and the experts of a layer see, [N S, d]."""
        seen: list[Tensor] = []
        hook = self.moe(layer).register_forward_pre_hook(lambda _, x: seen.append(x[0]))
        self.logits()
        hook.remove()
        return seen[0].reshape(self.ids.numel(), -1)


def stored(weights: Tensor, width: int, quantizer: Quantizer) -> Tensor:
    """The whole matrix as a pack would hold it: test_expert_error.py says so."""
    return Rounding(quantizer)(weights, width)


@pytest.fixture(scope="module")
def references(sources: dict[str, Path]) -> dict[str, Reference]:
    return {name: Reference(source) for name, source in sources.items()}


FAMILIES = pytest.mark.parametrize("name", SOURCES)
MIXTRAL_LEVELS = pytest.mark.parametrize("level", ["fast", "full"])
Passes = dict[tuple[str, Level], Ran]
References = dict[str, Reference]


@pytest.mark.slow
@FAMILIES
def test_an_embedding_copys_divergence_is_that_of_a_model_with_it_rounded(
    name: str, passes: Passes, references: References
) -> None:
    reference = references[name]
    table = reference.model.get_input_embeddings()
    original_table = table.weight
    found = [(copy, kl) for copy, kl in passes[name, "fast"].kl_of() if copy.kind == "embedding"]
    assert [copy.width for copy, _ in found] == [8, 4]
    for copy, kl in found:
        table.weight = torch.nn.Parameter(stored(original_table.data, copy.width, "nearest"))  # not a tied head's
        expected = reference.kl(reference.logits())
        table.weight = original_table
        assert kl == pytest.approx(expected, **KL_TOLERANCE)


@pytest.mark.slow
@FAMILIES
def test_a_dense_copys_divergence_is_that_of_a_model_with_the_layers_matrices_rounded(
    name: str, passes: Passes, references: References
) -> None:
    ran, reference = passes[name, "fast"], references[name]
    found = [(copy, kl) for copy, kl in ran.kl_of() if copy.kind == "dense"]
    assert [copy.layer for copy, _ in found] == list(range(ran.spec.num_hidden_layers))
    for copy, kl in found:
        with reference.rounded(*((reference.parameter(r), 4) for r in roundable_roles(ran.spec, copy.layer))):
            expected = reference.kl(reference.logits())
        assert kl == pytest.approx(expected, **KL_TOLERANCE)
        assert kl > 100 * KL_TOLERANCE["abs"], "there is something to compare"


@FAMILIES
def test_what_copies_lose_of_the_next_tokens_likelihood_is_what_a_rounded_model_loses(
    name: str, passes: Passes, references: References
) -> None:
    """The dense matrices' copies; the last token of a sequence has none after it."""
    ran, reference = passes[name, "fast"], references[name]
    plain = reference.nll(reference.plain)
    assert ran.measured.num_tokens == 3 * 23
    for copy, nll in zip(all_copies(ran.spec, "fast"), ran.measured.nlls.tolist(), strict=True):
        if copy.kind == "dense":
            with reference.rounded(*((reference.parameter(r), 4) for r in roundable_roles(ran.spec, copy.layer))):
                found = reference.nll(reference.logits())
            assert nll == pytest.approx(found - plain, rel=2e-3, abs=1e-5)  # a difference of nats of order 5
            assert nll != 0


@FAMILIES
def test_the_heads_divergences_are_those_of_a_model_with_it_rounded(
    name: str, passes: Passes, references: References
) -> None:
    reference, found = references[name], passes[name, "fast"].measured.head.tolist()
    head = reference.model.get_output_embeddings()
    original = head.weight
    for width, kl in zip((8, 4), found, strict=True):
        head.weight = torch.nn.Parameter(stored(original.data, width, "nearest"))  # not a tied embedding's too
        expected = reference.kl(reference.logits(), slice(0, 1))  # judged on the first sequence
        head.weight = original
        assert kl == pytest.approx(expected, **KL_TOLERANCE) and kl > 0


@FAMILIES
def test_dense_errors_are_what_each_matrix_changes_before_routed_experts(
    name: str, passes: Passes, references: References
) -> None:
    ran, reference = passes[name, "fast"], references[name]
    for layer, errors in enumerate(ran.errors):
        roles, plain = roundable_roles(ran.spec, layer), reference.unrouted(layer)
        expected = np.zeros((len(roles), 2))
        for row, role in enumerate(roles):
            for column, width in enumerate((8, 4)):
                with reference.rounded((reference.parameter(role), width)):
                    expected[row, column] = (reference.unrouted(layer) - plain).double().square().mean()
        np.testing.assert_allclose(errors.dense, expected, **ERROR_TOLERANCE)
        with reference.rounded(*((reference.parameter(role), 4) for role in roles)):
            together = float((reference.unrouted(layer) - plain).square().mean())
        assert errors.copies[0] == pytest.approx(together, rel=ERROR_TOLERANCE["rtol"])


# --- experts, each run whole


@dataclass(frozen=True)
class Routed:
    """A MoE layer's inputs float64 [T, d], what each expert weighs for each token [T, E], and all its matrices."""

    inputs: Tensor
    weights: Tensor
    matrices: list[dict[str, Tensor]]  # [f, d] each

    def output(self, expert: int, changed: dict[str, Tensor] | None = None) -> Tensor:
        held = {name: weights.double() for name, weights in (self.matrices[expert] | (changed or {})).items()}
        g, u = self.inputs @ held["gate"].T, self.inputs @ held["up"].T
        return (torch.nn.functional.silu(g) * u) @ held["down"]

    def quantized(self, expert: int, change: Change, quantizer: Quantizer, part: PartFormat | None = None) -> Tensor:
        """What an expert's share of every token changes by, [T, d]; `part`: its groups and scales (else 64, 16)."""
        name = MATRICES[change.matrix_idx]
        rounding = Rounding(quantizer, part.group, part.scale_bits) if part else Rounding(quantizer)
        held = {name: rounding(self.matrices[expert][name], change.width)}
        return (self.output(expert, held) - self.output(expert)) * self.weights[:, expert, None]

    def sparse(self, expert: int, kind: Selector, threshold: float) -> Tensor:
        held = {name: weights.double() for name, weights in self.matrices[expert].items()}
        gate, up = torch.nn.functional.silu(self.inputs @ held["gate"].T), self.inputs @ held["up"].T
        a = {"up": up, "gate": gate, "both": gate * up}[kind]
        return -torch.where(a.abs() < threshold, gate * up, 0.0) @ held["down"] * self.weights[:, expert, None]


def routed(ran: Ran, reference: Reference, layer: int) -> Routed:
    """From transformers' hidden states and the checkpoint's matrices; softmax over the k largest logits."""
    checkpoint = Checkpoint(ran.source)
    weights = CheckpointWeights(checkpoint)
    inputs = reference.inputs(layer).double()
    E, k = ran.spec.router.num_experts, ran.spec.router.num_experts_per_tok
    logits = inputs @ weights.matrix(f"layers.{layer}.router").rows(0, E).double().T
    best = logits.topk(k)
    shares = torch.zeros_like(logits).scatter(1, best.indices, best.values.softmax(-1))
    matrices = []
    for expert in range(E):
        (block,) = weights.expert(layer, expert).blocks()
        assert block.gate is not None
        matrices.append({"gate": block.gate, "up": block.up, "down": block.down})
    checkpoint.close()
    return Routed(inputs, shares * ran.spec.residual_multiplier, matrices)


@pytest.mark.parametrize(("name", "level"), [("mixtral", "fast"), ("mixtral", "full"), ("granitemoe", "fast")])
def test_expert_errors_are_those_of_whole_experts_with_a_matrix_replaced(
    name: str, level: Level, passes: Passes, references: References
) -> None:
    ran = passes[name, level]
    for layer, errors in enumerate(ran.errors):
        held = routed(ran, references[name], layer)
        quantizer: Quantizer = "hqq" if level == "full" else "nearest"
        assert level == "fast" or all(ran.ratio(layer, change) == 1 for change in QUANTIZED)
        for change in QUANTIZED:
            squares = [held.quantized(e, change, quantizer).square().mean() for e in range(len(held.matrices))]
            expected = np.asarray(squares) * ran.ratio(layer, change)
            np.testing.assert_allclose(errors.quantized[:, *place(change)], expected, **ERROR_TOLERANCE)


@MIXTRAL_LEVELS
def test_ratios_are_of_each_formats_errors_to_those_measured_on_the_most_popular_expert(
    level: Level, passes: Passes, references: References
) -> None:
    ran = passes["mixtral", level]
    base: Quantizer = "hqq" if level == "full" else "nearest"
    for layer, errors in enumerate(ran.errors):
        held = routed(ran, references["mixtral"], layer)
        popular = int((held.weights > 0).sum(0).argmax())
        for change in QUANTIZED:
            rough = float(held.quantized(popular, change, base).square().mean())
            for idx, (quantizer, part) in enumerate(compared_formats(ran.spec.hidden_size)):
                if part.width != change.width:
                    continue
                found = float(held.quantized(popular, change, quantizer, part).square().mean())
                # At 8 bits the two squares are of differences in the fourth digit of float32 sums.
                tolerance = 0.02 if part.width == 8 else 2e-3
                assert errors.ratios[change.matrix_idx, idx] == pytest.approx(found / rough, rel=tolerance)


@pytest.mark.parametrize("name", ["mixtral", "granitemoe"])
def test_sparse_errors_are_those_of_whole_experts_without_their_weakest_neurons(
    name: str, passes: Passes, references: References
) -> None:
    ran = passes[name, "fast"]
    for layer, errors in enumerate(ran.errors):
        held = routed(ran, references[name], layer)
        limits = thresholds(layer, len(held.matrices))
        for change in SPARSE:
            kind, limit = KINDS[change.kind_idx], limits[:, *place(change)]
            found = [held.sparse(e, kind, float(limit[e])).square().mean() for e in range(len(held.matrices))]
            np.testing.assert_allclose(errors.sparse[:, *place(change)], found, **ERROR_TOLERANCE)


@MIXTRAL_LEVELS
def test_an_expert_without_tokens_has_no_errors_and_one_with_all_has_some(
    level: Level, passes: Passes, references: References
) -> None:
    ran = passes["mixtral", level]
    reached = (routed(ran, references["mixtral"], 0).weights > 0).sum(0).tolist()
    assert reached[3] == 0 and reached[0] == IDS.numel(), "as planted"
    errors = ran.errors[0]
    assert not errors.quantized[3].any() and not errors.sparse[3].any()
    assert (errors.quantized[0] > 0).all() and (errors.sparse[0] > 0).all()


# --- copies of experts, through the rest of the model


@dataclass(frozen=True)
class Summed(Unbiased):
    """An expert whose output has the changes that replacing each matrix alone makes, each times a factor, added."""

    block: NeuronBlock
    changes: list[tuple[str, Tensor, float]]

    def blocks(self) -> Iterator[NeuronBlock]:
        held = {"gate": self.block.gate, "up": self.block.up, "down": self.block.down}
        for name, weights, factor in self.changes:
            one: dict[str, Any] = held | {name: weights}
            yield NeuronBlock(one["gate"], one["up"], one["down"] * factor)
        yield NeuronBlock(self.block.gate, self.block.up, self.block.down * (1 - sum(f for _, _, f in self.changes)))


class Changed:
    """A checkpoint whose experts of one layer are changed as a copy's are."""

    def __init__(self, source: CheckpointWeights, copy: Copy, ran: Ran, quantizer: Quantizer) -> None:
        self.spec, self.operations = source.spec, source.operations
        self._source, self._copy, self._ran, self._quantizer = source, copy, ran, quantizer
        self._sparse = next((change for change in copy.changes if change.kind_idx >= 0), None)
        self.selector: Selector = "none" if self._sparse is None else KINDS[self._sparse.kind_idx]

    def vector(self, role: str) -> Tensor:
        return self._source.vector(role)

    def matrix(self, role: str) -> Matrix:
        return self._source.matrix(role)

    def expert(self, layer_idx: int, expert: int) -> Expert:
        held = self._source.expert(layer_idx, expert)
        if self.spec.moe_layers[layer_idx] != self._copy.layer or self._sparse is not None:
            return held
        (block,) = held.blocks()
        changes = []
        for change in self._copy.changes:
            name = MATRICES[change.matrix_idx]
            factor = self._ran.ratio(self._copy.layer, change) ** 0.5
            changes.append((name, stored(getattr(block, name), change.width, self._quantizer), factor))
        return Summed(block, changes)

    def threshold(self, layer_idx: int, expert: int) -> float:
        if self._sparse is None or self.spec.moe_layers[layer_idx] != self._copy.layer:
            return 0.0
        return float(thresholds(layer_idx, self.spec.router.num_experts)[expert][place(self._sparse)])

    def rotation(self, layer_idx: int) -> None:
        return None


def test_an_expert_copys_divergence_is_that_of_a_model_with_its_experts_changed(
    passes: Passes, references: References
) -> None:
    for name, level in [*((name, "fast") for name in SOURCES), ("mixtral", "full")]:
        with case(name, level):
            ran, reference = passes[name, level], references[name]
            quantizer: Quantizer = "hqq" if level == "full" else "nearest"
            checkpoint = Checkpoint(ran.source)
            weights = CheckpointWeights(checkpoint)
            found = [(copy, kl) for copy, kl in ran.kl_of() if copy.kind == "experts"]
            assert len(found) == len(ran.spec.moe_layers) * (13 if level == "full" else 2)
            for copy, kl in found:
                changed = Changed(weights, copy, ran, quantizer)
                logits = torch.stack([Decoder(changed, 128).logits(sequence.tolist()) for sequence in IDS])
                assert kl == pytest.approx(reference.kl(logits), **KL_TOLERANCE), copy
            checkpoint.close()


def test_a_single_change_is_that_of_a_checkpoint_written_with_it(
    passes: Passes, references: References, tmp_path: Path
) -> None:
    """The same in transformers: hqq's 2-bit up matrices of layer 1, written over the original's."""
    ran, reference = passes["mixtral", "full"], references["mixtral"]

    def change(tensors: Tensors) -> None:
        plant_routes(tensors)
        for e in range(4):
            name = f"model.layers.1.block_sparse_moe.experts.{e}.w3.weight"
            tensors[name] = stored(tensors[name], 2, "hqq")

    TinyMixtral(num_layers=2, num_experts=4, dtype=torch.float32).write(tmp_path, change)
    wanted = Copy("experts", 1, changes=(Change(MATRICES.index("up"), 2),))
    assert dict(ran.kl_of())[wanted] == pytest.approx(reference.kl(Reference(tmp_path).plain), **KL_TOLERANCE)


@MIXTRAL_LEVELS
def test_a_copys_error_is_the_square_of_all_its_experts_changes_together(
    level: Level, passes: Passes, references: References
) -> None:
    ran = passes["mixtral", level]
    quantizer: Quantizer = "hqq" if level == "full" else "nearest"
    for layer, errors in enumerate(ran.errors):
        held, limits = routed(ran, references["mixtral"], layer), thresholds(layer, 4)
        begun = copies_of(ran.spec, level, layer)
        assert len(errors.copies) == len(begun)
        for copy, error in zip(begun, errors.copies.tolist(), strict=True):
            if copy.kind != "experts":
                continue
            delta = torch.zeros_like(held.inputs)
            for change in copy.changes:
                for e in range(4):
                    if change.kind_idx >= 0:
                        delta += held.sparse(e, KINDS[change.kind_idx], float(limits[e][place(change)]))
                    else:
                        delta += held.quantized(e, change, quantizer) * ran.ratio(layer, change) ** 0.5
            assert error == pytest.approx(float(delta.square().mean()), rel=ERROR_TOLERANCE["rtol"])


def test_with_one_expert_a_token_a_copys_error_is_the_sum_of_its_experts(tmp_path: Path) -> None:
    """No two experts change the same token, so that nothing cancels."""
    ran = run_pass(write_mixtral(tmp_path / "source", num_experts_per_tok=1), "full", tmp_path / "work")
    for layer, errors in enumerate(ran.errors):
        for copy, error in zip(copies_of(ran.spec, "full", layer), errors.copies.tolist(), strict=True):
            if len(copy.changes) != 1:
                continue
            (change,) = copy.changes
            parts = (errors.sparse if change.kind_idx >= 0 else errors.quantized)[:, *place(change)]
            assert error == pytest.approx(float(parts.sum()), rel=1e-5)  # float32 means over 4,608 values


# --- the pass itself


def test_a_pass_killed_in_and_after_every_layer_gives_the_same_bits(passes: Passes, tmp_path: Path) -> None:
    ran = passes["glm4_moe", "fast"]
    again = run_pass(ran.source, "fast", tmp_path / "work", restarts=True)
    for found, expected in zip(again.errors, ran.errors, strict=True):
        for array, array_before in zip(found.arrays().values(), expected.arrays().values(), strict=True):
            np.testing.assert_array_equal(array, array_before)
    for part in ("kls", "nlls", "head"):
        np.testing.assert_array_equal(getattr(again.measured, part), getattr(ran.measured, part))


def test_sequences_in_another_order_change_nothing_but_rounding(passes: Passes, tmp_path: Path) -> None:
    """All sequences are copied here, and none knows of another; the head alone is judged on the first."""
    ran = passes["mixtral", "fast"]
    other = run_pass(ran.source, "fast", tmp_path / "work", ids=IDS.flip(0))
    np.testing.assert_allclose(other.measured.kls, ran.measured.kls, rtol=1e-4, atol=1e-8)
    for found, expected in zip(other.errors, ran.errors, strict=True):
        for name in ("dense", "copies", "quantized", "sparse"):
            # Matrix products over other batches round otherwise: 8-bit errors are 1e-3 of outputs good to 1e-6.
            np.testing.assert_allclose(found.arrays()[name], expected.arrays()[name], rtol=2e-3, err_msg=name)


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """10 sequences of 60 tokens through 3 layers: 9 of them (512 tokens, in whole sequences) are copied."""
    source = write_mixtral(tmp_path_factory.mktemp("many") / "source", num_layers=3, num_experts_per_tok=1)
    return run_pass(source, "fast", tmp_path_factory.mktemp("many") / "work", MANY_IDS)


@pytest.mark.slow
def test_what_follows_the_copied_sequences_does_not_reach_the_copies(many: Ran, tmp_path: Path) -> None:
    alone = run_pass(many.source, "fast", tmp_path / "work", MANY_IDS[:9])
    for found, expected, copy in zip(many.measured.kls, alone.measured.kls, all_copies(many.spec, "fast"), strict=True):
        if copy.kind != "experts":  # of which the ratio, too, was found on more tokens
            assert found == pytest.approx(expected, rel=1e-4)


def test_errors_are_a_token_of_all_sequences_though_measured_on_some(many: Ran) -> None:
    """Expert 0 of layer 0 is measured on those of its tokens that copies have: more than the 256 it needs."""
    held = routed(many, Reference(many.source, MANY_IDS), 0)
    chosen = held.weights[:, 0].nonzero().flatten()
    measured = chosen[chosen < 540]
    assert 256 < len(measured) < len(chosen) < 600
    for change in QUANTIZED:
        square = float(held.quantized(0, change, "nearest")[measured].square().mean()) * len(chosen) / 600
        assert many.errors[0].quantized[0][place(change)] == pytest.approx(square * many.ratio(0, change), rel=2e-3)


@pytest.mark.parametrize(("name", "level"), ANNOUNCED)
def test_the_work_told_is_about_the_work_announced(name: str, level: Level, passes: Passes) -> None:
    ran = passes[name, level]
    assert 0.75 < ran.done / ran.announced < 1.1
