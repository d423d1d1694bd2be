"""Outputs of transformers for a text and its answer, the reference for models with an encoder, and our outputs.

The text is read in one pass. The answer's tokens are given at once, and one by one to a cache: where an expert's
capacity is exceeded the two differ, because it is counted over a pass.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moe_pack.runtime.model import Decoder, EncoderDecoder, Weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def start_token(model: PreTrainedModel) -> int:
    """The token that answers begin with."""
    token: int = model.config.decoder_start_token_id
    return token


@torch.no_grad()
def their_answer(model: PreTrainedModel, text: list[int], answer: list[int]) -> Tensor:
    """The logits of an answer given at once, float32 [T, vocabulary]."""
    found: Tensor = model(
        input_ids=torch.tensor([text]), decoder_input_ids=torch.tensor([answer]), use_cache=False
    ).logits[0]
    return found


@torch.no_grad()
def their_steps(model: PreTrainedModel, text: list[int]) -> Generator[Tensor, int, None]:
    """The logits after each token that is sent, float32 [vocabulary], the text being read once; send the next."""
    read = model.get_encoder()(input_ids=torch.tensor([text]))
    cache = None
    token = yield torch.empty(0)
    while True:
        held = model(
            encoder_outputs=read, decoder_input_ids=torch.tensor([[token]]), past_key_values=cache, use_cache=True
        )
        cache = held.past_key_values
        token = yield held.logits[0, -1]


def their_logits_one_by_one(model: PreTrainedModel, text: list[int], answer: list[int]) -> Tensor:
    """As `their_answer`, each token a pass of its own."""
    steps = their_steps(model, text)
    next(steps)
    return torch.stack([steps.send(token) for token in answer])


def is_greedy(tokens: list[int], logits: Tensor) -> bool:
    """Whether each token has the largest logit of its row, float32 [n, vocabulary], by a twin.

    Or one that is lower by no more than the bound on differences of logits, 1e-4, lets two of them change places.
    """
    own = logits.gather(1, torch.tensor(tokens)[:, None])
    return bool((own >= logits.amax(dim=1, keepdim=True) - 2e-4).all())


def runner(weights: Weights, context_tokens: int, chunk_tokens: int = 512) -> Decoder | EncoderDecoder:
    """What runs the model that these weights are of."""
    kind = Decoder if weights.spec.encoder is None else EncoderDecoder
    return kind(weights, context_tokens, chunk_tokens=chunk_tokens)


def our_logits(weights: Weights, ids: list[int], one_by_one: bool = False) -> Tensor:
    """The logits of tokens; of a model with an encoder, those of the text's first half as answer to the whole."""
    made = runner(weights, len(ids))
    if isinstance(made, EncoderDecoder):
        made.encode(ids)
        assert weights.spec.encoder is not None
        ids = [weights.spec.encoder.start_token, *ids[: len(ids) // 2]]
    return torch.stack([made.next_logits([token]) for token in ids]) if one_by_one else made.logits(ids)
