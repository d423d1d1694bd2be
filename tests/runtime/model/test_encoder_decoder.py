"""Models with an encoder against transformers, and their relative positions."""

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from support.answers import runner
from support.cases import case
from support.families import Tiny, token_ids, write
from support.models import pack
from support.native import operations_limited_to
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from torch import Tensor

from moe_pack.formats import Pack, PackLayout, RunError
from moe_pack.formats.parts import RelativeSpec
from moe_pack.formats.parts.specs import cached_values
from moe_pack.runtime import Engine, EngineOptions, Sampler, SamplingOptions, report
from moe_pack.runtime.cli.main import main
from moe_pack.runtime.engine.offloaded import cache_facts
from moe_pack.runtime.generate import generate
from moe_pack.runtime.loaded_model import load
from moe_pack.runtime.model import EncoderDecoder, PackWeights, PartialState, tokens_by_expert
from moe_pack.runtime.model.attention.relative import PositionBias, distance_buckets
from moe_pack.runtime.model.pack_weights import MappedPackWeights
from moe_pack.runtime.offload import PRESETS, ExpertCache, OffloadedWeights, PolicyName, expert_cache_for, least_budget
from moe_pack.runtime.offload.cache import ComputeEvent

CPU, CONTEXT, NUM_MADE = torch.device("cpu"), 96, 32
SHAPE = Tiny(
    "switch_transformers",
    "experts in most layers",
    {"num_sparse_encoder_layers": 4, "num_sparse_decoder_layers": 3, "expert_capacity": 9},
)


def write_tokenizer(folder: Path) -> None:
    """96 words, of which some are special: padding, an end that is put after each text, and a sentinel."""
    words = {"<pad>": 0, "</s>": 1, "<extra_id_0>": 2} | {f"w{i}": i for i in range(3, 96)}
    made = Tokenizer(WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = Whitespace()  # type: ignore[assignment]  # a property, says the stub
    made.add_special_tokens([AddedToken(word, special=True) for word in ("<pad>", "</s>", "<extra_id_0>")])
    made.post_processor = TemplateProcessing(  # type: ignore[assignment]  # likewise
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    made.save(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("answering")
    source = write(SHAPE, folder / "source")
    write_tokenizer(source)
    pack(source, folder / "packed", width=16)
    return folder / "packed"


@pytest.fixture
def opened(packed: Path) -> Iterator[Pack]:
    with Pack(packed) as opened:
        yield opened


def greedy(made: EncoderDecoder) -> list[int]:
    return list(generate(made, token_ids(), Sampler(SamplingOptions(temperature=0)), NUM_MADE, frozenset()))


@pytest.fixture(scope="module")
def expected(packed: Path) -> list[int]:
    """The text of the plain engine."""
    with Pack(packed) as opened:
        return greedy(EncoderDecoder(PackWeights(opened, CPU), CONTEXT))


def least(layout: PackLayout) -> int:
    return least_budget(layout, CONTEXT, 0)


@pytest.mark.slow
def test_experts_that_stream_inside_the_least_budget_give_the_same_text(opened: Pack, expected: list[int]) -> None:
    policies: tuple[PolicyName, ...] = ("lru", "fiddler", "corm", "edgemoe", "importance", "floe", "auto")
    for kernels, policy in [*(("auto", policy) for policy in policies), ("torch", "lru"), ("torch", "floe")]:
        with case(kernels, policy):
            budget = least(opened.layout)
            options = EngineOptions(budget_bytes=budget, policy=policy, kernels=kernels)  # type: ignore[arg-type]  # literals
            with Engine(opened, options, CONTEXT) as engine:
                assert isinstance(engine.decoder, EncoderDecoder)
                assert greedy(engine.decoder) == expected
                stream = report(engine).stream
                assert stream is not None and engine.plan is not None
                assert engine.plan.fixed.cache == engine.decoder.cache.num_bytes + engine.decoder.read.num_bytes
                assert engine.plan.left >= 0
                assert (stream.prefill.tokens, stream.decode.tokens) == (len(token_ids()), NUM_MADE)


class WatchedWeights(MappedPackWeights):
    """Notes the experts that each layer of each pass needs."""

    def __init__(self, pack: Pack) -> None:
        super().__init__(pack, operations_limited_to("portable"))
        self.steps: list[tuple[int, list[int]]] = []

    def run_experts(
        self,
        layer_idx: int,
        x: Tensor,
        experts: Tensor,
        router_weights: Tensor,
        partial_state: PartialState | None = None,
    ) -> Tensor:
        self.steps.append((layer_idx, sorted(each for each, _, _ in tokens_by_expert(experts, router_weights))))
        return super().run_experts(layer_idx, x, experts, router_weights)


def decode_hits(cache: ExpertCache, steps: list[tuple[int, list[int]]]) -> int:
    """Returns how many experts of the decoder, whose layers are 4 to 6, were resident."""
    events = [(layer, event) for layer, experts in steps for event in cache.schedule(layer, experts)]
    return sum(layer >= 4 and isinstance(event, ComputeEvent) and event.is_hit for layer, event in events)


def test_edgemoe_keeps_the_decoders_experts_and_counts_what_its_rule_gives(opened: Pack) -> None:
    """Two texts one after the other; the rule of one stack for both, as before, has fewer hits in the decoder."""
    watched = WatchedWeights(opened)
    plain = EncoderDecoder(watched, CONTEXT)
    texts = [greedy(plain), greedy(plain)]
    gained = 0
    for num_bytes in (160_000, 240_000, 320_000):  # of 860,160 for all experts
        options = EngineOptions(
            budget_bytes=least(opened.layout) + num_bytes, policy="edgemoe", prefetches=False, kernels="portable"
        )
        with Engine(opened, options, CONTEXT) as engine:
            assert isinstance(engine.decoder, EncoderDecoder) and engine.plan is not None
            assert [greedy(engine.decoder), greedy(engine.decoder)] == texts
            assert isinstance(engine.weights, OffloadedWeights)
            counted = engine.weights.decode
            facts = cache_facts(opened, engine.plan, None)
        assert facts.num_encoder_layers == 4
        hits = decode_hits(expert_cache_for(PRESETS["edgemoe"], facts), watched.steps)
        assert (counted.hits, counted.needed) == (hits, 2 * NUM_MADE * 3)
        one_stack = replace(facts, num_encoder_layers=0)
        before = decode_hits(expert_cache_for(PRESETS["edgemoe"], one_stack), watched.steps)
        assert hits >= before
        gained += hits - before
    assert gained > 0


def test_a_byte_less_than_the_least_budget_is_refused(opened: Pack) -> None:
    with pytest.raises(RunError, match=r"^budget: .* the model needs at least"):
        Engine(opened, EngineOptions(budget_bytes=least(opened.layout) - 1), CONTEXT)


def test_experts_where_they_lie_in_mapped_files_give_the_same_text(opened: Pack, expected: list[int]) -> None:
    with Engine(opened, EngineOptions(), CONTEXT) as engine:
        assert isinstance(engine.decoder, EncoderDecoder)
        assert greedy(engine.decoder) == expected


@pytest.mark.parametrize("chunk_tokens", [1, 7, 95])
def test_what_is_computed_in_pieces_is_the_same(opened: Pack, chunk_tokens: int) -> None:
    whole, pieces = (runner(PackWeights(opened, CPU), CONTEXT, chunk) for chunk in (CONTEXT, chunk_tokens))
    answer = [0, *token_ids()[:60]]
    for made in (whole, pieces):
        assert isinstance(made, EncoderDecoder)
        made.encode(token_ids())
    # The project's bound: sums are made in another order.
    assert (whole.logits(answer) - pieces.logits(answer)).abs().max() < 1e-4


def test_a_new_text_forgets_the_one_before(opened: Pack) -> None:
    made = EncoderDecoder(PackWeights(opened, CPU), CONTEXT)
    made.begin([5, 6, 7])
    made.next_logits([9])
    again = made.begin(token_ids())
    assert torch.equal(again, EncoderDecoder(PackWeights(opened, CPU), CONTEXT).begin(token_ids()))


def test_caches_hold_text_and_answer_of_the_decoder_s_layers_alone(opened: Pack) -> None:
    made = EncoderDecoder(PackWeights(opened, CPU), CONTEXT)
    assert made.cache.num_bytes == made.read.num_bytes == 4 * CONTEXT * 3 * 2 * 4 * 16
    assert made.cache.num_bytes + made.read.num_bytes == 4 * CONTEXT * cached_values(opened.spec)


def test_texts_and_answers_that_do_not_fit_are_refused(opened: Pack) -> None:
    made = EncoderDecoder(PackWeights(opened, CPU), 8)
    with pytest.raises(RunError, match="there is no text to answer; encode one first"):
        made.next_logits([0])
    for text in ([], [3] * 9):
        with pytest.raises(RunError, match=f"the text has {len(text)} tokens; give 1 to 8, the context"):
            made.encode(text)
    with pytest.raises(RunError, match="token 96 is not in the model's vocabulary of 96"):
        made.encode([96])
    made.encode([3] * 8)
    made.logits([0] * 8)
    with pytest.raises(RunError, match="the context of 8 tokens is full"):
        made.next_logits([0])


def test_a_record_is_refused(opened: Pack, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="--record does not support models with an encoder"):
        Engine(opened, EngineOptions(record=tmp_path / "record"), CONTEXT)


def test_tokens_beyond_an_expert_s_capacity_are_left_out_of_its_work() -> None:
    experts, weights = torch.tensor([[0], [0], [1], [0], [2]]), torch.tensor([[0.5], [0.0], [0.25], [0.75], [0.0]])
    found = [(number, tokens.tolist(), held.tolist()) for number, tokens, held in tokens_by_expert(experts, weights)]
    assert found == [(0, [0, 3], [0.5, 0.75]), (1, [2], [0.25])]
    assert list(tokens_by_expert(experts[:1], torch.zeros(1, 1))) == []


def text_of(ids: list[int]) -> str:
    return " ".join("<extra_id_0>" if i == 2 else f"w{i}" for i in ids if i > 1)


def test_moe_run_answers_a_text_and_shows_sentinels(opened: Pack, packed: Path) -> None:
    ids = [2, *token_ids()[3:40]]
    made = EncoderDecoder(PackWeights(opened, CPU), CONTEXT)
    answer = list(
        generate(made, [i for i in ids if i > 1] + [1], Sampler(SamplingOptions(temperature=0)), 20, frozenset({1}))
    )
    result = CliRunner().invoke(
        main, [str(packed), "--prompt", text_of(ids), "--temperature", "0", "--max-tokens", "20", "--kernels", "torch"]
    )
    assert result.exit_code == 0, result.output
    assert result.stdout.split() == text_of(answer).split()
    with load(packed, options=EngineOptions(kernels="torch")) as model:
        assert model.generate(text_of(ids), 20, temperature=0).split() == text_of(answer).split()


def test_sentinels_are_shown_and_other_special_tokens_are_not(opened: Pack) -> None:
    from moe_pack.runtime import Text

    stream = Text(opened).stream([])
    assert "".join([stream.push(token) for token in (0, 2, 7, 1)] + [stream.finish()]).split() == ["<extra_id_0>", "w7"]


def test_chat_is_refused(packed: Path) -> None:
    result = CliRunner().invoke(main, [str(packed), "--prompt", "w7", "--chat"])
    assert result.exit_code == 1
    assert "--chat does not support models with an encoder; remove it" in result.stderr


def test_bench_runs(packed: Path) -> None:
    arguments = [str(packed), "--bench", "--prompt-tokens", "20", "--max-tokens", "4", "--json"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)


def reference_buckets(distances: Tensor, is_mutual: bool, spec: RelativeSpec) -> Tensor:
    from transformers.models.switch_transformers.modeling_switch_transformers import SwitchTransformersAttention

    found: Tensor = SwitchTransformersAttention._relative_position_bucket(  # type: ignore[no-untyped-call]  # its own
        distances, bidirectional=is_mutual, num_buckets=spec.num_buckets, max_distance=spec.max_distance
    )
    return found


SPECS = [
    RelativeSpec("relative", 4, 16, num_buckets=32, max_distance=128, scale=1.0),
    RelativeSpec("relative", 3, 8, num_buckets=48, max_distance=100, scale=1.0),
    RelativeSpec("relative", 1, 8, num_buckets=4, max_distance=3, scale=1.0),
    RelativeSpec("relative", 2, 8, num_buckets=256, max_distance=4096, scale=1.0),
]


def test_every_distance_has_the_reference_s_bucket() -> None:
    for is_mutual, spec in product([True, False], SPECS):
        with case(is_mutual, spec):
            distances = torch.arange(20_000)
            expected = reference_buckets(-distances, is_mutual, spec)
            assert torch.equal(distance_buckets(spec, 20_000, is_mutual), expected)


def test_rows_are_the_table_s_at_the_reference_s_buckets() -> None:
    for is_mutual, spec in product([True, False], SPECS):
        with case(is_mutual, spec):
            num_positions = 150
            table = torch.randn((spec.num_buckets, spec.num_heads), generator=torch.Generator().manual_seed(3))
            positions = torch.arange(num_positions)
            away = positions[None, :] - positions[:, None]
            expected = table[reference_buckets(away, is_mutual, spec)].permute(2, 0, 1)
            if not is_mutual:
                expected = expected.masked_fill(away > 0, -torch.inf)
            bias = PositionBias(spec, table, num_positions, is_mutual)
            for start, stop, num_keys in ((0, 150, 150), (0, 1, 1), (149, 150, 150), (7, 40, 40), (7, 40, 93)):
                assert torch.equal(bias.rows(start, stop, num_keys), expected[:, start:stop, :num_keys])


def test_one_position_has_one_bias() -> None:
    bias = PositionBias(SPECS[0], torch.arange(128.0).view(32, 4), 1, is_mutual=True)
    assert torch.equal(bias.rows(0, 1, 1), torch.arange(4.0).view(4, 1, 1))
