"""The pass layer by layer against the decoder, for every shape of a model; branches, resuming, and mapped arrays."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.answers import runner
from support.cases import case
from support.families import TINY, Tiny, write
from support.models import TinyMixtral
from support.specs import ANSWERING, GROUPED
from torch import Tensor

from moe_pack.calib.forward import (
    LayerStates,
    LayerTokens,
    LayerwiseWeights,
    Sequences,
    check_length,
    layers,
    stack_of,
    stack_tokens,
)
from moe_pack.calib.forward.layers import Beginning
from moe_pack.formats import RunError, Selector
from moe_pack.formats.families import Checkpoint
from moe_pack.runtime.model import (
    TORCH,
    CheckpointWeights,
    EncoderDecoder,
    Expert,
    StoredMatrix,
    Weights,
    embed,
    head,
    run_expert,
)

S, N = 24, 3
CPU = torch.device("cpu")
# Rows that differ from others in how their checkpoint is written make the same model.
SHAPES = [tiny for tiny in TINY if not tiny.fused and not tiny.four]
ONE_OF_EACH_FAMILY = list({tiny.family: tiny for tiny in SHAPES}.values())  # its last row
MODEL = TinyMixtral(num_layers=3, num_experts=3, intermediate_size=16, vocab_size=64)


def sequences(vocab_size: int = 64) -> Tensor:
    return torch.randint(vocab_size, (N, S), generator=torch.Generator().manual_seed(5))


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    return LayerwiseWeights(CheckpointWeights(Checkpoint(MODEL.write(tmp_path_factory.mktemp("mixtral")))))


def states_of(weights: Weights, folder: Path) -> LayerStates:
    ids = sequences()
    folder.mkdir(exist_ok=True)
    return LayerStates(weights, Beginning(lambda number: embed(ids[number], weights)), N, S, folder, CPU)


def run_layer(states: LayerStates, weights: Weights, layer: int, tokens: LayerTokens) -> None:
    """The routed experts of a layer, each added with its weight."""
    if layer not in weights.spec.moe_layers:
        assert tokens.experts.shape == tokens.weights.shape == (len(tokens.x), 0)
        return
    layer_idx = weights.spec.moe_layers.index(layer)
    with torch.inference_mode():
        for expert in range(weights.spec.router.num_experts):
            token_idx, router_weights = tokens.of_expert(expert)
            x = tokens.expert_inputs(token_idx)
            output = run_expert(
                x, weights.expert(layer_idx, expert), weights.spec.expert_function(layer_idx), "none", 0.0
            )
            states.add(tokens, token_idx, router_weights, output)


def run(states: LayerStates, weights: Weights, end: int | None = None) -> LayerStates:
    """All layers that are left, or those before `end`."""
    for layer in range(states.next_layer, weights.spec.num_hidden_layers if end is None else end):
        tokens = states.enter(layer)
        run_layer(states, weights, layer, tokens)
        states.leave(layer, tokens)
    return states


def final(states: LayerStates) -> Tensor:
    """All sequences' hidden states, float32 [sequences, S, d]."""
    return torch.stack([states.before(number) for number in range(states.num_sequences)])


def is_close(found: Tensor, expected: Tensor) -> bool:
    """Equal up to rounding: a product's last bits depend on how many rows it has, and three layers add to them."""
    return bool((found - expected).abs().max() <= 1e-5 * expected.abs().max())


@pytest.mark.parametrize("shapes", [ONE_OF_EACH_FAMILY[::4], pytest.param(SHAPES, marks=pytest.mark.slow)], ids=len)
def test_hidden_states_are_the_decoders(shapes: list[Tiny], tmp_path: Path) -> None:
    for number, tiny in enumerate(shapes):
        (case_folder := tmp_path / str(number)).mkdir()
        with case(tiny):
            checkpoint = Checkpoint(write(tiny, case_folder))
            weights = CheckpointWeights(checkpoint)
            given = Sequences.of(checkpoint.spec, sequences()[:2])
            held = LayerwiseWeights(weights)
            states = LayerStates(held, given.embedded(held), 2, given.length, case_folder, CPU)
            run(states, held)
            decoder = runner(weights, S)
            for place, sequence in enumerate(given.ids.tolist()):
                decoder.reset()
                if isinstance(decoder, EncoderDecoder):
                    decoder.encode(given.stacks[0][place].tolist())
                expected = decoder.logits(sequence)
                with torch.inference_mode():
                    found = head(states.before(place), held)
                assert expected.abs().max() > 0.4, "logits so small that the bound would prove nothing"
                # Routed, shared and residual parts are summed in another order: float32 loses in proportion to logits.
                size = max(float(expected.abs().max()), 1.0)
                assert (found - expected).abs().max() < 1e-5 * size
            checkpoint.close()


def test_an_expert_beyond_its_capacity_has_not_the_token() -> None:
    experts, weights = torch.tensor([[1], [1], [0], [1]]), torch.tensor([[0.5], [0.0], [0.25], [0.75]])
    tokens = LayerTokens(torch.zeros(4, 1), torch.zeros(4, 1), experts, weights)
    assert [held.tolist() for held in tokens.of_expert(1)] == [[0, 3], [0.5, 0.75]]


def test_tokens_of_an_expert_come_rising_with_their_weights() -> None:
    experts = torch.tensor([[2, 0], [1, 2], [0, 1], [2, 1]])
    weights = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.7, 0.3], [0.6, 0.4]])
    tokens = LayerTokens(torch.zeros(4, 1), torch.zeros(4, 1), experts, weights)
    token_idx, found = tokens.of_expert(2)
    assert token_idx.tolist() == [0, 1, 3]
    assert torch.equal(found, torch.tensor([0.9, 0.2, 0.6]))
    nobody, nothing = tokens.of_expert(3)
    assert len(nobody) == len(nothing) == 0


@pytest.mark.parametrize("layer", range(3))
def test_sequences_that_begin_later_go_on_from_their_hidden_states(
    layer: int, weights: Weights, tmp_path: Path
) -> None:
    states = run(states_of(weights, tmp_path), weights, layer)
    tokens = states.enter(layer)
    run_layer(states, weights, layer, tokens)
    states.leave(layer, tokens, [tokens.x[S : 3 * S].clone(), tokens.x[:S].clone()])
    assert states.num_sequences == N + 3
    found = final(run(states, weights))
    assert is_close(found[N:], found[[1, 2, 0]])


@pytest.mark.parametrize("killed_after", range(3))
def test_a_killed_pass_goes_on_to_the_same_bits(killed_after: int, weights: Weights, tmp_path: Path) -> None:
    def branched(states: LayerStates) -> LayerStates:
        if states.next_layer == 0:
            tokens = states.enter(0)
            run_layer(states, weights, 0, tokens)
            states.leave(0, tokens, [2 * tokens.x[:S]])
        return states

    expected = final(run(branched(states_of(weights, tmp_path / "whole")), weights))
    folder = tmp_path / "killed"
    run(branched(states_of(weights, folder)), weights, killed_after + 1)
    resumed = states_of(weights, folder)
    assert (resumed.next_layer, resumed.num_sequences) == (killed_after + 1, N + 1)
    assert torch.equal(final(run(branched(resumed), weights)), expected)


def test_a_pass_killed_inside_a_layer_begins_that_layer_again(weights: Weights, tmp_path: Path) -> None:
    expected = final(run(states_of(weights, tmp_path / "whole"), weights))
    states = run(states_of(weights, tmp_path / "killed"), weights, 1)
    run_layer(states, weights, 1, states.enter(1))
    (tmp_path / "killed" / "hidden.tmp").write_bytes(b"half of it")
    resumed = states_of(weights, tmp_path / "killed")
    assert resumed.next_layer == 1
    assert torch.equal(final(run(resumed, weights)), expected)


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-4])


def lose(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize("damage", [flip, cut, lose])
def test_a_damaged_file_is_not_gone_on_from(damage: Callable[[Path], None], weights: Weights, tmp_path: Path) -> None:
    run(states_of(weights, tmp_path), weights, 2)
    (path,) = tmp_path.glob("hidden-*")
    assert states_of(weights, tmp_path).next_layer == 2
    damage(path)
    states = states_of(weights, tmp_path)
    assert (states.next_layer, states.num_sequences) == (0, N)


def test_of_two_files_the_later_whole_one_is_gone_on_from(weights: Weights, tmp_path: Path) -> None:
    run(states_of(weights, tmp_path), weights, 1)
    (first,) = tmp_path.glob("hidden-*")
    held = first.read_bytes()
    run(states_of(weights, tmp_path), weights, 2)
    (second,) = tmp_path.glob("hidden-*")
    first.write_bytes(held)
    assert states_of(weights, tmp_path).next_layer == 2
    flip(second)
    assert states_of(weights, tmp_path).next_layer == 1


def test_arrays_beyond_the_bound_lie_in_mapped_files(
    weights: Weights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = final(run(states_of(weights, tmp_path / "held"), weights))
    monkeypatch.setattr(layers, "MAX_MEMORY_BYTES", 2 * 4 * N * S * MODEL.hidden_size - 1)
    states = states_of(weights, tmp_path / "mapped")
    assert torch.equal(final(run(states, weights)), expected)
    names = sorted(path.name for path in (tmp_path / "mapped").glob("held-*"))
    assert names == ["held-inputs.bin", "held-x.bin"]
    states.close()
    assert not (tmp_path / "mapped").exists()


def test_arrays_that_just_fit_the_bound_are_in_memory(
    weights: Weights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers, "MAX_MEMORY_BYTES", 2 * 4 * N * S * MODEL.hidden_size)
    run(states_of(weights, tmp_path), weights)
    assert not list(tmp_path.glob("held-*"))


def test_after_every_layer_one_file_is_left_and_none_once_closed(weights: Weights, tmp_path: Path) -> None:
    states = states_of(weights, tmp_path / "pass")
    for end in (1, 2, 3):
        run(states, weights, end)
        assert [path.name.split("-")[1] for path in (tmp_path / "pass").iterdir()] == [f"{end:03d}"]
    states.close()
    assert not list(tmp_path.iterdir())


def test_all_hidden_states_are_kept_where_a_pass_comes_back(weights: Weights, tmp_path: Path) -> None:
    """Before every layer, also after the pass was killed; a layer whose file is lost takes the later ones with it."""
    ids = sequences()

    def begun() -> LayerStates:
        folder = tmp_path / "kept"
        return LayerStates(
            weights, Beginning(lambda number: embed(ids[number], weights)), N, S, folder, CPU, keeps_all=True
        )

    states, before = begun(), [torch.stack([embed(ids[number], weights) for number in range(N)])]
    while states.next_layer < 3:
        layer = states.next_layer
        tokens = states.enter(layer)
        run_layer(states, weights, layer, tokens)
        states.leave(layer, tokens)
        before.append(torch.stack([states.before(number) for number in range(N)]))
    for again in (states, begun()):
        assert again.next_layer == 3
        for layer, expected in enumerate(before):
            assert torch.equal(torch.stack([again.at(layer, number) for number in range(N)]), expected)
        inside = again.inside(1, 2)
        assert inside.x.shape == inside.inputs.shape == (2 * S, MODEL.hidden_size)
    next((tmp_path / "kept").glob("hidden-002-*")).unlink()
    assert begun().next_layer == 1


TOKENS = torch.arange(1, 15).view(2, 7)


def test_without_an_encoder_the_decoder_is_given_all() -> None:
    given = Sequences.of(GROUPED, TOKENS)
    assert len(given.stacks) == 1 and given.length == stack_tokens(GROUPED, 7) == 7
    assert torch.equal(given.ids, TOKENS)


def test_an_encoder_reads_half_and_the_decoder_begins_with_its_start_token() -> None:
    assert ANSWERING.encoder is not None and ANSWERING.encoder.start_token == 0
    text, answer = Sequences.of(ANSWERING, TOKENS).stacks
    assert text.tolist() == [[1, 2, 3], [8, 9, 10]]
    assert answer.tolist() == [[0, 4, 5], [0, 11, 12]]  # of seven tokens the last two are left


def test_each_stack_begins_with_what_it_is_given() -> None:
    begun = Sequences.of(ANSWERING, TOKENS).begun(lambda ids, number: ids[number])
    assert begun.answer is not None and begun.ids is not None
    assert begun.first(1).tolist() == [8, 9, 10] and begun.answer(1).tolist() == [0, 11, 12]
    assert begun.ids(3).tolist() == [0, 11, 12], "a copy of the second sequence"
    begun = Sequences.of(GROUPED, TOKENS).begun(lambda ids, number: ids[number])
    assert begun.first(1).tolist() == TOKENS[1].tolist() and begun.answer is None


def test_layers_are_of_the_first_stack_up_to_the_encoders_last() -> None:
    assert [stack_of(ANSWERING, layer) for layer in range(4)] == [0, 0, 1, 1]
    assert [stack_of(GROUPED, layer) for layer in range(3)] == [0, 0, 0]


def test_halves_without_a_prediction_are_refused() -> None:
    check_length(ANSWERING, 4)
    with pytest.raises(RunError, match="--sequence-length: found 3, expected at least 4: this model's encoder reads"):
        check_length(ANSWERING, 3)
    check_length(GROUPED, 1)


class Counted:
    """A source that counts what it is asked for, and gives something new every time."""

    spec = GROUPED
    selector: Selector = "gate"

    operations = TORCH

    def __init__(self, num_cols: int = 1) -> None:
        self.num_cols = num_cols
        self.asked: Counter[tuple[str, str]] = Counter()

    def _new(self, how: str, role: str) -> Tensor:
        self.asked[how, role] += 1
        return torch.full((1, 1), float(self.asked.total()))

    def vector(self, role: str) -> Tensor:
        return self._new("vector", role)[0]

    def matrix(self, role: str) -> StoredMatrix:
        return StoredMatrix(self._new("matrix", role).expand(1, self.num_cols))

    def load(self, role: str) -> StoredMatrix:
        return StoredMatrix(self._new("load", role))

    def expert(self, layer_idx: int, expert: int) -> Expert:
        self._new("expert", f"{layer_idx}.{expert}")
        return object()  # type: ignore[return-value]  # passed on, never run

    def threshold(self, layer_idx: int, expert: int) -> float:
        return layer_idx + expert / 10

    def rotation(self, layer_idx: int) -> None:
        return None


Q, K, OTHER, TENTH = (
    f"layers.{name}" for name in ("1.attention.q", "1.attention.k", "0.attention.q", "10.attention.q")
)


def test_a_layers_matrix_is_brought_once() -> None:
    source = Counted()
    held = LayerwiseWeights(source)
    first = held.matrix(Q)
    for _ in range(3):
        assert held.matrix(Q) is first
        held.matrix(K)
    assert source.asked == {("load", Q): 1, ("load", K): 1}


@pytest.mark.parametrize("other", [OTHER, TENTH])
def test_another_layers_matrix_lets_go_of_the_layer_before(other: str) -> None:
    source = Counted()
    held = LayerwiseWeights(source)
    for role in (Q, K, other, Q, Q):
        held.matrix(role)
    assert source.asked == {("load", Q): 2, ("load", K): 1, ("load", other): 1}
    held.matrix(K)
    held.matrix(other)
    assert source.asked == {("load", Q): 2, ("load", K): 2, ("load", other): 2}, "no other layer's is in memory"


def test_another_layers_vector_lets_go_too() -> None:
    source = Counted()
    held = LayerwiseWeights(source)
    held.matrix(Q)
    held.vector("layers.1.mlp_norm")
    held.vector("layers.0.mlp_norm")
    held.vector("layers.0.mlp_norm")
    assert source.asked["vector", "layers.0.mlp_norm"] == 1
    held.matrix(Q)
    held.vector("layers.1.mlp_norm")
    assert (source.asked["load", Q], source.asked["vector", "layers.1.mlp_norm"]) == (2, 2)


@pytest.mark.parametrize("role", ["embed", "head"])
def test_a_large_embedding_or_head_is_never_held_and_lets_go_of_nothing(role: str) -> None:
    source = Counted(num_cols=(16 << 20) // 4 + 1)
    held = LayerwiseWeights(source)
    first = held.matrix(Q)
    for _ in range(2):
        held.matrix(role)
    assert source.asked == {("load", Q): 1, ("matrix", role): 2}
    assert held.matrix(Q) is first


def test_a_small_embedding_is_held_in_float32() -> None:
    source = Counted(num_cols=(16 << 20) // 4)
    held = LayerwiseWeights(source)
    first = held.matrix("embed")
    assert held.matrix("embed") is first and source.asked["load", "embed"] == 1


def test_a_vector_is_brought_once() -> None:
    source = Counted()
    held = LayerwiseWeights(source)
    for _ in range(3):
        held.vector("layers.1.mlp_norm")
        held.vector("norm")
    assert set(source.asked.values()) == {1}


def test_experts_and_thresholds_are_the_sources() -> None:
    source = Counted()
    held = LayerwiseWeights(source)
    for _ in range(2):
        held.expert(1, 5)
    assert source.asked == {("expert", "1.5"): 2}
    assert (held.threshold(1, 5), held.spec, held.selector) == (1.5, GROUPED, "gate")
