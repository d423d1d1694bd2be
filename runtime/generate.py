"""Generation: prompt in, tokens out, one at a time."""

from collections.abc import Iterator

from moe_pack.formats import RunError
from moe_pack.runtime.decoder import Decoder
from moe_pack.runtime.encoder_decoder import EncoderDecoder
from moe_pack.runtime.sampling import Sampler


def context_for(num_prompt_tokens: int, max_tokens: int, max_positions: int, has_encoder: bool = False) -> int:
    """The context to allocate: prompt and continuation, as far as the model's positions go.

    Args:    has_encoder: the prompt is read by an encoder, and the answer's positions begin anew: the longer of both.
    Raises:  RunError if the prompt leaves no position for a new token.
    """
    if num_prompt_tokens >= max_positions:
        raise RunError(
            f"--prompt: has {num_prompt_tokens} tokens, this model's context is {max_positions}; "
            f"shorten it to at most {max_positions - 1}"
        )
    needed = max(num_prompt_tokens, max_tokens) if has_encoder else num_prompt_tokens + max_tokens
    return min(needed, max_positions)


def generate(
    decoder: Decoder | EncoderDecoder,
    prompt_ids: list[int],
    sampler: Sampler,
    max_tokens: int,
    end_ids: frozenset[int],
) -> Iterator[int]:
    """New tokens until one ends the text, `max_tokens` are made, or the context is full; the end token is not given.

    Args:    prompt_ids: at least one token, appended to what the decoder already holds; with an encoder, a new text.
    """
    logits = decoder.begin(prompt_ids)
    for made in range(1, max_tokens + 1):
        token = sampler.choose(logits)
        if token in end_ids:
            return
        yield token
        if made == max_tokens or decoder.cache.num_tokens == decoder.cache.context_tokens:
            return
        logits = decoder.next_logits([token])
