"""The sensitivity stage against transformers, with its gradients and with its matrices replaced."""

import math
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.cases import case
from support.families import Tiny, original, write
from support.held_experts import RoundedExperts
from support.models import DEMO_MODEL, Tensors, TinyMixtral
from support.profiles import SMALLEST, Recorder, random_tokens
from support.specs import GROUPED, LATENT
from torch import Tensor

from moe_pack.calib.forward import Array, LayerStates, LayerwiseWeights
from moe_pack.calib.forward.layers import Beginning
from moe_pack.calib.profile import ProfileOptions, make_profile
from moe_pack.calib.sensitivity import (
    WIDTHS,
    Cost,
    ExactPass,
    LayerLosses,
    SensitivityPass,
    Trial,
    compared_formats,
    copies_of,
    costs,
    expert_multiplications,
    half_multiplications,
    quantized_formats,
    roundable_roles,
)
from moe_pack.calib.sensitivity.costs import prediction_cost
from moe_pack.calib.sensitivity.effects import Copy, Divergences, Level
from moe_pack.calib.sensitivity.errors import Rounding, plainly_rounded, ratios_of_widths
from moe_pack.formats import ROW_GROUP, ModelSpec, part_format, trellis_format
from moe_pack.formats.base.cli import StageTime
from moe_pack.formats.base.commands import Stage
from moe_pack.formats.families import Checkpoint
from moe_pack.runtime.model import CheckpointWeights, Decoder

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
        assert running.way_back.next_layer == layer
        if restarts:
            running.way_back.measure()
            running = stage()
        losses[layer] = running.way_back.measure(recorder)
        running.way_back.leave()
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
    """The embedding costs the square of its change along the gradient that has passed through all layers."""
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


@dataclass
class HiddenFiles(Recorder):
    """Progress that remembers the hidden states last on the disk, and may end a run before a stage."""

    folder: Path = field(kw_only=True)
    stop: str = field(kw_only=True)
    last: dict[str, bytes] = field(default_factory=dict)

    def begin(self, stage: Stage) -> None:
        if stage.name == self.stop:
            raise KeyboardInterrupt

    def advance(self, amount: int, what: str = "", kind: str = "") -> None:
        found = {str(path): path.read_bytes() for path in self.folder.rglob("hidden-*")}
        self.last = found or self.last


@pytest.mark.slow
def test_hidden_states_that_statistics_left_are_not_taken_for_those_of_this_stage(tmp_path: Path) -> None:
    """As a run leaves them that is killed after its last file of statistics, before it removes its hidden states."""
    checkpoint, text = Checkpoint(SMALLEST.write(tmp_path / "m")), random_tokens(1, 16, SMALLEST.vocab_size)
    options = ProfileOptions(keeps_inputs=False)
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    progress = HiddenFiles(folder=killed, stop="sensitivity")
    with pytest.raises(KeyboardInterrupt):
        make_profile(checkpoint, text, killed, options, progress)
    assert len(progress.last) == 1
    for path, raw in progress.last.items():
        Path(path).parent.mkdir(exist_ok=True)
        Path(path).write_bytes(raw)
    for folder in (killed, whole):
        make_profile(checkpoint, text, folder, options, HiddenFiles(folder=folder, stop="never"))
    checkpoint.close()
    files = {path.name: path.read_bytes() for path in whole.iterdir()}
    assert {path.name: path.read_bytes() for path in killed.iterdir()} == files


S = 10
# The demo model: d = 128, f = 448, 8 experts; 4 heads of 32, 2 of keys and values; 4096 words.
HALF = 128 * 128 + 64 * 128 + 64 * 128 + 128 * 128 + 8 * 128 + S * 128  # q, k, v, o, router, attention to S / 2 tokens
EXPERT = 3 * 128 * 448


@pytest.fixture(scope="module")
def weights() -> Iterator[CheckpointWeights]:
    checkpoint = Checkpoint(DEMO_MODEL)
    yield CheckpointWeights(checkpoint)
    checkpoint.close()


@pytest.fixture(scope="module")
def states(weights: CheckpointWeights, tmp_path_factory: pytest.TempPathFactory) -> LayerStates:
    folder: Path = tmp_path_factory.mktemp("trial") / "states"
    return LayerStates(weights, Beginning(lambda number: torch.randn(S, 128)), 1, S, folder, torch.device("cpu"))


@pytest.fixture(scope="module")
def trial(weights: CheckpointWeights, states: LayerStates) -> Trial:
    return Trial(weights, states)


def test_the_demo_model_is_counted_as_by_hand(trial: Trial) -> None:
    checkpoint = Checkpoint(DEMO_MODEL)
    spec = checkpoint.spec
    checkpoint.close()
    assert half_multiplications(spec, 0, S) == HALF
    assert expert_multiplications(spec) == EXPERT


def test_layers_without_experts_and_shared_experts_are_counted_as_by_hand() -> None:
    attention = 128 * 64 + 2 * 64 * 64 + 64 * 128 + 7 * 64
    assert half_multiplications(GROUPED, 1, 7) == attention + 6 * 64 + 3 * 40 * 64 + 64  # routers of 6 and 1
    assert half_multiplications(GROUPED, 2, 7) == attention + 3 * 80 * 64


def test_layers_whose_numbers_begin_alike_are_counted_apart() -> None:
    deep = replace(GROUPED, num_hidden_layers=12, moe_layers=tuple(range(12)), dense_intermediate_size=None)
    assert half_multiplications(deep, 1, 7) == half_multiplications(GROUPED, 1, 7)


def test_an_expert_of_two_matrices_costs_two_thirds() -> None:
    two = replace(GROUPED, expert=replace(GROUPED.expert, matrices=("up", "down")))
    assert expert_multiplications(two) * 3 == expert_multiplications(GROUPED) * 2 == 6 * 64 * 48


def test_predictors_cost_three_times_their_parameters_a_token_and_epoch() -> None:
    """d = 64, E = 6: 6 rows of 64 + 12 + 1; 512 of those and 6 rows of 513. 20 epochs."""
    cost = prediction_cost(GROUPED, 100)
    assert cost.seconds > 0
    assert cost.multiplications == 3 * 20 * 100 * (6 * 77 + 512 * 77 + 6 * 513)


def test_layers_of_a_kind_are_tried_once() -> None:
    assert costs.kinds_of_layers(GROUPED) == {0, 2}
    assert [costs.kind_of(GROUPED, layer) for layer in range(3)] == [0, 0, 2]
    assert [costs.kind_of(LATENT, layer) for layer in range(2)] == [0, 1]
    every = replace(GROUPED, moe_layers=(0, 1, 2))
    assert costs.kinds_of_layers(every) == {0}


def test_costs_add_and_scale() -> None:
    assert Cost(3, 0.5, 7) + Cost(4, 1.0, 2) * 2.5 == Cost(13, 3.0, 12)
    assert sum([Cost(1, 1.0)] * 3, start=Cost()) == Cost(3, 3.0)


@pytest.mark.slow
def test_every_trial_finds_seconds_and_counts_what_it_stands_for(trial: Trial) -> None:
    found = {
        trial.half(0): HALF * S,
        trial.counted(20): EXPERT * 20,
        trial.counted(2.5): EXPERT * 2.5,
        trial.plain(20): EXPERT * 20,
        trial.half_back(0): 2 * HALF * S,
        trial.back(20): 2 * EXPERT * 20,
        trial.predicted_back(100): 2 * 100 * 128 * 4096,
        trial.compared(compared_formats(128)[:2]): 0,  # of rounding nothing is counted
        trial.calibrated(16, (trellis_format(4, 0),)): 0,
        trial.predicted(100): 100 * 128 * 4096,
    }
    for cost, multiplications in found.items():
        assert cost.multiplications == multiplications
        assert cost.seconds > 0 and math.isfinite(cost.seconds)


@pytest.mark.parametrize(
    ("tries", "expected"),
    [
        ([0.9, 0.01, 0.09, 0.02, 0.03, 0.04], 0.03),  # five after the first, which is not counted
        ([0.9, 0.1, 0.11], 0.105),  # then it is enough
        ([0.9, 0.3], 0.3),
        ([1.1], 1.1),  # not again
    ],
)
def test_announced_is_the_median_of_tries_after_the_first(
    tries: list[float], expected: float, trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([time for taken in tries for time in (0.0, taken)])  # before and after each try
    monkeypatch.setattr(costs, "_MOST_TRIES", 5)  # all other tests try once
    monkeypatch.setattr("time.perf_counter", lambda: next(times))
    assert trial.half(0).seconds == pytest.approx(expected)
    assert not list(times)


def test_work_that_may_end_early_has_no_time_left_before_it_is_measured() -> None:
    cost = Cost(10**9, 600.0)
    stage, most = cost.stage("one"), cost.stage("other", is_most=True)
    assert (stage.note, most.note) == ("1.0 G multiplications, about 10 min", "1.0 G multiplications, at most 10 min")
    assert (StageTime(stage, 0.0).left(0.0), StageTime(most, 0.0).left(0.0)) == (600.0, None)


def test_more_tokens_than_are_tried_take_their_share_of_seconds(trial: Trial) -> None:
    cost = trial.plain(1_000_000)
    assert cost.multiplications == EXPERT * 1_000_000
    assert cost.seconds > trial.plain(1).seconds


def test_a_trial_leaves_the_states_where_they_were(trial: Trial, states: LayerStates) -> None:
    trial.half(0)
    assert states.next_layer == 0


EXACT_SHAPE = TinyMixtral(num_layers=2, num_experts=3)
EXACT_IDS = torch.randint(EXACT_SHAPE.vocab_size, (2, 16), generator=torch.Generator().manual_seed(0))
ROUNDING = Rounding("absmax", ROW_GROUP)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return EXACT_SHAPE.write(tmp_path_factory.mktemp("source"))


def losses(
    source: Path, folder: Path, stops: bool = False
) -> dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float32]]]:
    """The whole pass; if it `stops`, started again after every layer."""
    with closing(Checkpoint(source)) as checkpoint:
        stage = ExactPass(LayerwiseWeights(CheckpointWeights(checkpoint)), EXACT_IDS, folder, CPU)
        for layer in range(2):
            stage.layer(layer)
            if stops:
                stage = ExactPass(LayerwiseWeights(CheckpointWeights(checkpoint)), EXACT_IDS, folder, CPU)
                assert stage.states.next_layer == layer + 1
        return stage.losses()


def log_probabilities(weights: CheckpointWeights) -> torch.Tensor:
    return torch.cat([Decoder(weights, 16).logits(row.tolist()).double().log_softmax(1) for row in EXACT_IDS])


def test_each_expert_alone_at_2_bits_loses_what_models_rounded_so_diverge(source: Path, tmp_path: Path) -> None:
    found = losses(source, tmp_path / "pass")
    checkpoint = Checkpoint(source)
    original = log_probabilities(CheckpointWeights(checkpoint))

    def kl(low: tuple[int, int] | None) -> float:
        rounded = log_probabilities(RoundedExperts(checkpoint, lambda l, e, name: 2 if (l, e) == low else 4, ROUNDING))
        return float((original.exp() * (original - rounded)).sum(1).mean())

    # Sums of float32 products in another order; the divergences are of 0.01 and more.
    assert found["base"].tolist() == pytest.approx([kl(None)], rel=1e-3)
    expected = [[kl((l, e)) for e in range(3)] for l in range(2)]
    np.testing.assert_allclose(found["losses"], expected, rtol=1e-3)
    assert min(map(min, expected)) > 0.01
    checkpoint.close()


def test_begun_anew_after_every_layer_losses_are_the_same_bits(source: Path, tmp_path: Path) -> None:
    whole, stopped = losses(source, tmp_path / "whole"), losses(source, tmp_path / "stopped", stops=True)
    assert all((whole[name] == stopped[name]).all() for name in ("losses", "base"))
