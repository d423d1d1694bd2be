"""Tokens that passes of a GPU choose, each a step ahead of the host, against the host's sampler, to the token.

The order checker looks at all of them (`conftest`).
"""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from support.cases import case
from support.chosen_tokens import EACH, PLAIN, described
from support.gpu_runs import GpuRun, gpu_decoder
from support.models import TinyMixtral, pack
from support.running_scheduler import Answer, NoText
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moe_pack.formats import RunError
from moe_pack.runtime import SamplingOptions
from moe_pack.runtime.generate import generate
from moe_pack.runtime.gpu import fit
from moe_pack.runtime.gpu.cpu_share import PoolShare
from moe_pack.runtime.gpu.kernels.sampling import ChoiceMemory
from moe_pack.runtime.gpu.token.choice import TokenChoice
from moe_pack.runtime.gpu.token.decoder import GpuDecoder
from moe_pack.runtime.model.choosing import NOT_FINITE, ChosenRow
from moe_pack.runtime.sampling import Sampler
from moe_pack.runtime.serve.requests import Request
from moe_pack.runtime.serve.scheduler import BatchScheduler

pytestmark = pytest.mark.usefixtures("few_programs")
RESIDENT = GpuRun(1.0, num_sequences=3, num_rows=3)
SPLIT = GpuRun(0.0)
NUM_TOKENS = 5


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chosen")
    shape = TinyMixtral(num_layers=2, num_experts=4, config={"num_experts_per_tok": 2})
    pack(shape.write(folder / "source"), folder / "packed", selector="up")
    return folder / "packed"


def prompt(number: int) -> list[int]:
    return [(37 * i + 11 * number + 5) % 96 for i in range(3 + number)]


def text_of(decoder: GpuDecoder, options: SamplingOptions, end_ids: frozenset[int] = frozenset()) -> list[int]:
    decoder.reset()
    return list(generate(decoder, prompt(0), Sampler(options, prompt(0)), NUM_TOKENS, end_ids))


def by_host(decoder: GpuDecoder) -> None:
    """Lets the host choose."""
    decoder.chooser = None


def test_texts_are_those_that_the_host_chooses(packed: Path) -> None:
    for run, options in (
        (RESIDENT, EACH[:1] + EACH[5:]),
        (SPLIT, EACH[2:3]),
        (replace(SPLIT, misses="pull"), EACH[:1]),
    ):
        with gpu_decoder(packed, run) as decoder:
            chosen = [text_of(decoder, replace(each, seed=3)) for each in options]
            assert decoder.sequences[0].ids[len(prompt(0)) :] == chosen[-1][:-1], "what was asked for alone"
            by_host(decoder)
            for each, found in zip(options, chosen, strict=True):
                with case(f"{run.misses} {each}"):
                    assert found == text_of(decoder, replace(each, seed=3))


def test_a_pass_of_the_token_that_ends_a_text_stays_in_the_sequence(packed: Path) -> None:
    with gpu_decoder(packed, RESIDENT) as decoder:
        whole = text_of(decoder, replace(PLAIN, seed=3))
        end = next(place for place in range(2, NUM_TOKENS) if whole[place] not in whole[:place])
        assert text_of(decoder, replace(PLAIN, seed=3), frozenset(whole[end : end + 1])) == whole[:end]
        assert decoder.sequences[0].ids == [*prompt(0), *whole[: end + 1]]
        # The sequence is what its tokens say: a longer text goes on from it.
        ids = [*decoder.sequences[0].ids, 7]
        left = decoder.keep_beginning(ids)
        found = decoder.begin(left).clone()
        decoder.reset()
        assert (decoder.begin(ids) - found).abs().max() < 1e-4


def test_a_plan_counts_the_memory_of_a_choice() -> None:
    logits = torch.zeros(2, 151_936)
    memory = ChoiceMemory.allocate(logits, torch.zeros(2, dtype=torch.int32), 2)
    num_bytes = sum(each.nbytes for name, each in memory._asdict().items() if name != "host_logits")
    assert 0 <= num_bytes / logits.numel() - fit._CHOICE_BYTES < 0.5, "all else is small"


class NewTensors(TorchDispatchMode):
    """Notes the sizes of tensors that operations put into new memory."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        given = {each.untyped_storage().data_ptr() for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        self.sizes += [
            each.numel()
            for each in tree_leaves(found)
            if isinstance(each, Tensor) and each.untyped_storage().data_ptr() not in given
        ]
        return found


def test_nothing_of_the_vocabularys_size_is_allocated_for_a_token(packed: Path) -> None:
    """New tensors are the rows' numbers and options, on the host."""
    with gpu_decoder(packed, RESIDENT) as decoder:
        text_of(decoder, replace(EACH[-1], seed=3))
        chooser, sampler = decoder.chooser, Sampler(replace(EACH[-1], seed=3), prompt(0))
        assert chooser is not None
        decoder.reset()
        decoder.begin(prompt(0))
        with NewTensors() as new:
            steps = chooser.steps([ChosenRow(decoder.sequences[0], 5, *described([sampler]))], lambda: True)
            for _ in range(3):
                sampler.accept(next(steps)[0])
        steps.close()
        assert new.sizes and max(new.sizes) < decoder.spec.vocab_size


def test_a_full_context_ends_a_text(packed: Path) -> None:
    with gpu_decoder(packed, replace(RESIDENT, context_tokens=len(prompt(0)) + 3)) as decoder:
        assert len(text_of(decoder, replace(PLAIN, seed=3))) == 4
        assert decoder.cache.num_tokens == decoder.cache.context_tokens


class OnlySome:
    """A grammar that allows even tokens."""

    def allow(self, logits: Tensor) -> Tensor:
        return logits.masked_fill(torch.arange(len(logits)) % 2 == 1, -float("inf"))

    def accept(self, token: int) -> None:
        assert token % 2 == 0


def served(decoder: GpuDecoder, requests: Sequence[Request]) -> list[Answer]:
    """Answers of requests, of which three run at once."""
    for sequence in decoder.sequences:
        sequence.reset()
        sequence.num_kept = lambda prompt_ids: 0  # type: ignore[method-assign]  # prompts run whole
    answers = [Answer() for _ in requests]
    with closing(BatchScheduler(decoder, cast(Any, NoText()))) as scheduler:
        for request, answer in zip(requests, answers, strict=True):
            scheduler.submit(request, answer.events.put)
        return [answer.wait() for answer in answers]


def test_requests_that_come_and_go_get_the_tokens_of_the_host(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of them, with a grammar and with log-probabilities, need the host."""
    lengths = (3, 7, 4, 8, 3, 5, 2)
    requests = [
        Request(tuple(prompt(number)), replace(options, seed=number), length, frozenset(),
                grammar=OnlySome() if number == 4 else None, top_logprobs=2 if number == 5 else None)
        for number, (options, length) in enumerate(zip(EACH, lengths, strict=True))
    ]  # fmt: skip
    by_hand = list[Sampler]()
    choose = Sampler.choose
    with gpu_decoder(packed, RESIDENT) as decoder:
        with monkeypatch.context() as patched:
            patched.setattr(Sampler, "choose", lambda self, logits: by_hand.append(self) or choose(self, logits))
            found = served(decoder, requests)
        by_host(decoder)
        expected = served(decoder, requests)
    # Of the others only the token after the prompt.
    assert sorted(by_hand.count(each) for each in set(by_hand)) == [1] * 5 + [3, 5]
    assert [answer.tokens for answer in found] == [answer.tokens for answer in expected]
    assert [len(answer.tokens) for answer in found] == list(lengths)


def test_a_row_whose_logits_are_no_numbers_ends_alone(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = TokenChoice.tokens
    monkeypatch.setattr(TokenChoice, "tokens", lambda *given: [NOT_FINITE, *tokens(*given)[1:]])
    requests = [Request(tuple(prompt(number)), PLAIN, length, frozenset()) for number, length in ((0, 8), (1, 5))]
    with gpu_decoder(packed, RESIDENT) as decoder:
        wrong, right = served(decoder, requests)
    assert wrong.end.reason == "error" and "NaN" in wrong.end.message
    assert right.end.reason in ("length", "error"), "alone it is the first row"


def test_a_fault_of_the_cpu_is_raised_a_step_behind(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with gpu_decoder(packed, SPLIT) as decoder:
        decoder.begin(prompt(0))
        sampler, checks = Sampler(replace(PLAIN, seed=1)), list[int]()

        def check(share: PoolShare) -> None:
            checks.append(decoder.cache.num_tokens)
            if len(checks) == 2:
                raise RunError("the CPU failed")

        monkeypatch.setattr(PoolShare, "check", check)
        assert decoder.chooser is not None
        rows = [ChosenRow(decoder.sequences[0], 5, *described([sampler]))]
        steps = decoder.chooser.steps(rows, lambda: True)
        next(steps)
        with pytest.raises(RunError, match="the CPU failed"):
            next(steps)
        assert decoder.cache.num_tokens == len(prompt(0)) + 1
        assert decoder.chooser.can_choose(rows) and next(decoder.chooser.steps(rows, lambda: False))


def test_the_host_chooses_where_it_has_to(packed: Path) -> None:
    with gpu_decoder(packed, RESIDENT) as decoder:
        chooser, sequence = decoder.chooser, decoder.sequences[0]
        assert chooser is not None
        (plain, far) = described([Sampler(PLAIN), Sampler(replace(PLAIN, logit_bias=((96, 1.0),)))])
        assert chooser.can_choose([ChosenRow(sequence, 1, plain)])
        assert not chooser.can_choose([ChosenRow(sequence, 1, far)]), "a token that is not in the vocabulary"
        assert not chooser.can_choose([ChosenRow(each, 1, plain) for each in (*decoder.sequences, sequence)])
        assert Sampler(PLAIN, grammar=OnlySome()).choice() is None
