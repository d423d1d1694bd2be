"""What a model is given of sequences: all of them, or halves to encoder and decoder."""

import pytest
import torch
from support.specs import ANSWERING, GROUPED

from moe_pack.calib.forward import Sequences, check_length, stack_of, stack_tokens
from moe_pack.formats import RunError

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
