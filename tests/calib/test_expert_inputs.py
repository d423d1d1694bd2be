"""Inputs of experts kept in a file: as the safetensors package reads them, what an expert gets of them, bad files."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.cases import case
from support.families import Tiny, write
from support.models import TinyMixtral
from support.profiles import SMALLEST, profiled, random_tokens
from support.specs import GROUPED
from torch import Tensor

from moe_pack.calib.forward import (
    ExpertInputs,
    KeptInputs,
    LayerStates,
    LayerTokens,
    LayerwiseWeights,
    Sequences,
    input_bytes,
    input_pieces,
    num_kept_sequences,
)
from moe_pack.calib.forward.experts import OTHERS_COUNT
from moe_pack.calib.quantize import MAX_OTHER_TOKENS, MAX_OWN_TOKENS, ExpertTokens
from moe_pack.formats import ModelSpec, PackError
from moe_pack.formats.families import Checkpoint
from moe_pack.runtime.model import CheckpointWeights, run_expert

S, D, E, K = 6, 16, 5, 2
SPEC = replace(GROUPED, hidden_size=D, router=replace(GROUPED.router, num_experts=E, num_experts_per_tok=K))


def made_up(experts: Tensor) -> LayerTokens:
    """Tokens of these routes [T, k]: input t is t, then noise; hidden states of one norm."""
    generator = torch.Generator().manual_seed(4)
    inputs = torch.randn((len(experts), D), generator=generator)
    inputs[:, 0] = torch.arange(len(experts)) % 256  # exact in bfloat16
    inputs[:, 1] = torch.arange(len(experts)) // 256
    hidden = torch.ones_like(inputs)
    return LayerTokens(hidden, inputs, experts, torch.rand(experts.shape, generator=generator) + 0.1)


def random_routes(num_tokens: int) -> Tensor:
    return torch.rand(num_tokens, E, generator=torch.Generator().manual_seed(6)).argsort(dim=1)[:, :K]


def kept(tokens: LayerTokens, folder: Path, sequences: list[int] | None = None) -> Path:
    which = torch.arange(len(tokens.x) // S) if sequences is None else torch.tensor(sequences)
    path = folder / "inputs-000.safetensors"
    path.write_bytes(b"".join(input_pieces(SPEC, tokens, S, which)))
    return path


def of_expert(tokens: LayerTokens, expert: int, folder: Path) -> ExpertTokens:
    with ExpertInputs(kept(tokens, folder), SPEC, len(tokens.x)) as opened:
        return opened.of_expert(expert)


def numbers(found: ExpertTokens) -> list[int]:
    assert found.inputs.dtype == found.weights.dtype == torch.float32
    assert found.inputs.shape == (len(found.weights), D)
    return [int(number) for number in found.inputs[:, 0] + 256 * found.inputs[:, 1]]


# --- files


def test_the_safetensors_package_reads_what_was_kept(tmp_path: Path) -> None:
    tokens = made_up(random_routes(400 * S))  # of several pieces
    found = load_file(kept(tokens, tmp_path, [0, 3, *range(7, 395)]))
    rows = torch.cat([torch.arange(S), torch.arange(3 * S, 4 * S), torch.arange(7 * S, 395 * S)])
    assert torch.equal(found["inputs"], tokens.inputs[rows].to(torch.bfloat16))
    assert torch.equal(found["experts"].to(torch.int64), tokens.experts[rows])
    assert torch.equal(found["weights"], tokens.weights[rows])
    assert torch.equal(found["norms"], torch.ones(len(rows)))


@pytest.mark.parametrize("num_sequences", [1, 7])
def test_what_a_file_takes_is_known_before(num_sequences: int, tmp_path: Path) -> None:
    path = kept(made_up(random_routes(num_sequences * S)), tmp_path)
    assert path.stat().st_size == input_bytes(SPEC, num_sequences * S)


def test_rows_are_read_in_any_order(tmp_path: Path) -> None:
    tokens = made_up(random_routes(4 * S))
    places = torch.tensor([9, 0, 9, 4 * S - 1])
    with ExpertInputs(kept(tokens, tmp_path), SPEC, 4 * S) as opened:
        assert torch.equal(opened.rows(places), tokens.inputs[places].to(torch.bfloat16).to(torch.float32))
        assert opened.rows(places[:0]).shape == (0, D)


Change = Callable[[dict[str, Tensor]], object]
FAULTS: list[tuple[Change, str]] = [
    (lambda held: held.pop("weights"), "tensor 'weights' is missing"),
    (lambda held: held.update(more=torch.zeros(1)), "unknown tensor 'more'"),
    (
        lambda held: held.update(inputs=held["inputs"].float()),
        "tensor 'inputs' is F32 [18, 16], expected BF16 [18, 16]",
    ),
    (lambda held: held.update(inputs=held["inputs"][:-1]), "tensor 'inputs' is BF16 [17, 16], expected BF16 [18, 16]"),
    (
        lambda held: held.update(experts=held["experts"].to(torch.int16).fill_(E).view(torch.uint16)),
        "tensor 'experts' is 5 at [0, 0], expected a finite number of at most 4; the file is damaged, make it again",
    ),
]


def test_files_of_something_else_are_refused(tmp_path: Path) -> None:
    for change, fault in FAULTS:
        with case(change, fault):
            path = kept(made_up(random_routes(3 * S)), tmp_path)
            held = load_file(path)
            save_file(held, path)
            ExpertInputs(path, SPEC, 3 * S).close()
            change(held)
            save_file(held, path)
            with pytest.raises(PackError) as refused:
                ExpertInputs(path, SPEC, 3 * S)
            assert str(refused.value) == f"{path.name}: {fault}"


# --- how many sequences


def test_as_many_sequences_are_kept_as_give_an_expert_4096_tokens() -> None:
    for num_experts, num_chosen, num_learned, sequence_length, expected in [
        (8, 2, 1000, 512, 32),  # Mixtral: 16,384 tokens
        (8, 2, 10, 512, 10),  # all there are
        (256, 8, 1000, 512, 256),  # 131,072
        (60, 4, 1000, 500, 123),  # 61,440, in whole sequences
        (3, 2, 1, 8, 1),
    ]:
        with case(num_experts, num_chosen, num_learned, sequence_length, expected):
            router = replace(SPEC.router, num_experts=num_experts, num_experts_per_tok=num_chosen)
            assert num_kept_sequences(replace(SPEC, router=router), num_learned, sequence_length) == expected


# --- what an expert is calibrated on


def test_an_expert_has_its_own_tokens_with_squared_weights_and_its_layers_as_32(tmp_path: Path) -> None:
    routes = torch.tensor([[0, 1]] * 30 + [[2, 3]] * 70 + [[3, 0]] * 20)
    tokens = made_up(routes)
    found = of_expert(tokens, 0, tmp_path)
    assert numbers(found) == [*range(30), *range(100, 120), *range(30, 100)]
    squares = torch.cat((tokens.weights[:30, 0], tokens.weights[100:, 1])).square()
    assert torch.equal(found.weights[:50], squares)
    assert (found.weights[50:] == found.weights[50]).all()
    assert float(found.weights[50:].sum()) == pytest.approx(OTHERS_COUNT * float(squares.mean()), rel=1e-5)


def test_an_error_counts_in_the_measure_of_the_hidden_state_that_it_enters(tmp_path: Path) -> None:
    tokens = made_up(torch.tensor([[0, 1]] * 6 + [[2, 3]] * 6))
    tokens.x[2], tokens.x[7], tokens.x[4] = 500.0, 0.5, 0.0
    found = of_expert(tokens, 0, tmp_path)
    shares = torch.tensor([1, 1, 500.0**-2, 1, 1e6, 1])  # the fifth: a thousandth of the median
    torch.testing.assert_close(found.weights[:6], tokens.weights[:6, 0].square() * shares)
    torch.testing.assert_close(found.weights[7], 4 * found.weights[6])  # of the layer's others


def test_an_expert_of_many_tokens_has_some_of_them_evenly_spread(tmp_path: Path) -> None:
    tokens = made_up(torch.tensor([[0, 1], [0, 2], [1, 2]] * 2400))
    found = of_expert(tokens, 0, tmp_path)
    own, others = numbers(found)[:MAX_OWN_TOKENS], numbers(found)[MAX_OWN_TOKENS:]
    assert len(others) == MAX_OTHER_TOKENS and len(found.weights) == MAX_OWN_TOKENS + MAX_OTHER_TOKENS
    assert own == sorted(set(own)) and all(number % 3 != 2 for number in own)
    assert others == sorted(set(others)) and all(number % 3 == 2 for number in others)
    for held in (own, others):
        quarters = torch.histc(torch.tensor(held, dtype=torch.float32), 4, 0, 7200)
        assert (quarters - len(held) / 4).abs().max() <= 2
    assert torch.equal(found.weights[:MAX_OWN_TOKENS], tokens.weights[own, 0].square())


def test_of_tokens_from_one_on_an_expert_has_what_a_file_of_these_alone_would_give(tmp_path: Path) -> None:
    tokens, first = made_up(random_routes(20 * S)), 7 * S
    tokens.x[-3:] *= 3
    later = LayerTokens(tokens.x[first:], tokens.inputs[first:], tokens.experts[first:], tokens.weights[first:])
    with ExpertInputs(kept(tokens, tmp_path), SPEC, len(tokens.x)) as opened:
        found = opened.of_expert(2, first)
    expected = of_expert(later, 2, tmp_path)
    assert min(numbers(found)) >= first
    assert torch.equal(found.inputs, expected.inputs) and torch.equal(found.weights, expected.weights)


def test_tokens_judged_on_come_before_those_calibrated_on_and_leave_half_of_them() -> None:
    for sequences, num_judged, expected in [
        ([0, 4, 8, 12], 10, (10, S)),  # of 6 tokens each: one and a part of none
        ([0, 1, 2, 3], 13, (12, 12)),  # half of all is left
        ([0, 1, 2], 100, (9, 9)),
        ([5, 6], 20, (20, 0)),  # none of what is judged was kept
        ([0], 100, (3, 3)),
    ]:
        with case(sequences, num_judged, expected):

            def nothing(layer_idx: int) -> ExpertInputs:
                raise AssertionError

            assert KeptInputs(torch.tensor(sequences), S, nothing).split(num_judged) == expected


def test_an_expert_that_no_token_reached_has_its_layers_alone(tmp_path: Path) -> None:
    tokens = made_up(torch.tensor([[0, 1], [2, 3]] * 30))
    found = of_expert(tokens, 4, tmp_path)
    assert numbers(found) == list(range(60))
    assert torch.equal(found.weights, torch.ones(60))


def test_an_expert_that_all_tokens_chose_has_these_alone(tmp_path: Path) -> None:
    tokens = made_up(torch.tensor([[1, 0], [2, 1]] * 30))
    found = of_expert(tokens, 1, tmp_path)
    assert numbers(found) == list(range(60))
    assert torch.equal(found.weights[::2], tokens.weights[::2, 0].square())
    assert torch.equal(found.weights[1::2], tokens.weights[1::2, 1].square())


def test_a_token_beyond_an_experts_capacity_is_one_of_the_others(tmp_path: Path) -> None:
    tokens = made_up(torch.tensor([[0, 1]] * 12))
    tokens.weights[5:, 0] = 0
    found = of_expert(tokens, 0, tmp_path)
    assert numbers(found) == list(range(12))
    assert torch.equal(found.weights[:5], tokens.weights[:5, 0].square())
    assert float(found.weights[5:].sum()) == pytest.approx(OTHERS_COUNT * float(found.weights[:5].mean()), rel=1e-5)


# --- what a profile keeps


def layers_of(source: Path, ids: Tensor, folder: Path) -> tuple[ModelSpec, list[LayerTokens]]:
    """Every MoE layer's tokens, of a pass of its own over all sequences."""
    weights = LayerwiseWeights(CheckpointWeights(Checkpoint(source)))
    spec, given = weights.spec, Sequences.of(weights.spec, ids)
    states = LayerStates(weights, given.embedded(weights), *given.ids.shape, folder, torch.device("cpu"))
    found = []
    with torch.inference_mode():
        for layer in range(spec.num_hidden_layers):
            tokens = states.enter(layer)
            if layer in spec.moe_layers:
                found.append(tokens)
                for expert in range(spec.router.num_experts):
                    token_idx, router_weights = tokens.of_expert(expert)
                    held = weights.expert(spec.moe_layers.index(layer), expert)
                    output = run_expert(tokens.inputs[token_idx], held, spec.expert.function, "none", 0.0)
                    states.add(tokens, token_idx, router_weights, output)
            states.leave(layer, tokens)
    return spec, found


DENSE_BETWEEN = Tiny("qwen3_moe", "", {"num_hidden_layers": 3, "mlp_only_layers": [1], "vocab_size": 32})
ENCODER = Tiny("switch_transformers", "", {"expert_capacity": 3, "tie_word_embeddings": False})
SHAPES: dict[str, Callable[[Path], Path]] = {
    "mixtral": SMALLEST.write,
    "a dense layer between": lambda folder: write(DENSE_BETWEEN, folder),
    "an encoder, and a capacity": lambda folder: write(ENCODER, folder),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_profile_keeps_what_experts_were_given_of_text_that_is_not_held_out(shape: str, tmp_path: Path) -> None:
    source, text = SHAPES[shape](tmp_path / "source"), random_tokens(5, 16, 32)
    profile = profiled(source, tmp_path / "profile", text)
    spec, expected = layers_of(source, torch.from_numpy(text.sequences).to(torch.int64), tmp_path / "states")
    n = profile.layer_tokens
    assert profile.facts.text.num_kept == 4 and len(expected) == len(spec.moe_layers)
    if spec.encoder is not None:
        assert any((tokens.weights == 0).any() for tokens in expected), "no capacity is exceeded"
    for layer_idx, tokens in enumerate(expected):
        with profile.inputs(layer_idx) as found:
            assert torch.equal(torch.from_numpy(found.experts.astype("i8")), tokens.experts[: 4 * n])
            torch.testing.assert_close(torch.from_numpy(found.weights), tokens.weights[: 4 * n])
            norms = tokens.x[: 4 * n].square().mean(dim=1).sqrt()  # with the outputs of the experts
            torch.testing.assert_close(torch.from_numpy(found.norms), norms)
            rows = found.rows(torch.arange(4 * n))
            torch.testing.assert_close(rows, tokens.inputs[: 4 * n], rtol=2**-8, atol=1e-6)  # bfloat16's rounding


def test_where_not_all_is_kept_the_sequences_are_spread(tmp_path: Path) -> None:
    model = TinyMixtral(num_layers=1, num_experts=2, intermediate_size=16, vocab_size=32)
    text = random_tokens(100, 100, 32)  # 4,096 tokens of 8,000 that are not held out
    profile = profiled(model.write(tmp_path / "source"), tmp_path / "profile", text)
    assert profile.facts.text.num_kept == 41
    routes = profile.statistics(0).routes.reshape(100, 100, 2)
    with profile.inputs(0) as found:
        places = [i * 80 // 41 for i in range(41)]
        assert (found.experts.reshape(41, 100, 2) == routes[places]).all()
