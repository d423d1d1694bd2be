"""The decoder: the forward pass of a whole model in plain torch, and the reference for every faster one.

    x = embed(ids)
    for each layer:
        x += ngrams(x)              in some layers of some models: rows of a table on the disk
        x += attention(norm(x))     or a mixer in its place
        x += mlp(norm(x))           routed experts, weighted, and the shared expert; or one dense expert
    logits = head(norm(x))

It runs over any weights, with their operations (`compute`). `layers` has the parts of a layer, `passes` batches of
sequences and drafts; `layer_calls` computes the same layers by native calls. Hidden states, router logits and all sums
are float32.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from moe_pack.runtime.model import caches, choosing, kv_cache, layers, passes
from moe_pack.runtime.model.compute.operations import NativeOperations
from moe_pack.runtime.model.compute.weights import Weights
from moe_pack.runtime.model.layer_calls import LayerCalls


class Decoder(passes.SequencePasses):
    """A model that runs: weights, and the key-value caches of one sequence or of several (`sequences`).

    Methods that name no sequence are about the first.
    Args:    context_tokens: the longest sequence, prompt and continuation together.   chunk_tokens: the most tokens of
             a forward pass, which bound its hidden states.   cache_dtype: of keys and values.   num_checkpoints: of
             each sequence, as of `CachedSequence`.   kv_caches: of each sequence; None: they are allocated.
    Raises:  RunError if the context is longer than the model's.
    """

    most_logits: int | None = None  # the most tokens whose logits are computed at once; None: any number
    chooser: choosing.Chooser | None = None  # None: tokens are chosen on the host

    def __init__(
        self,
        weights: Weights,
        context_tokens: int,
        device: torch.device | None = None,
        chunk_tokens: int = layers.PREFILL_TOKENS,
        cache_dtype: caches.KvDtype = "f32",
        num_sequences: int = 1,
        num_checkpoints: int = 0,
        kv_caches: Sequence[kv_cache.KVCache] | None = None,
    ) -> None:
        spec, device, operations = weights.spec, device or torch.device("cpu"), weights.operations
        layers.check_context(context_tokens, spec)
        self._ropes = ropes = caches.LayerRopes(spec, device)
        if kv_caches is None:
            make = partial(kv_cache.KVCache, spec, context_tokens, device, None, cache_dtype, chunk_tokens)
            kv_caches = [make() for _ in range(num_sequences)]
        sequences = tuple(kv_cache.CachedSequence(spec, each, ropes, num_checkpoints) for each in kv_caches)
        super().__init__(weights, device, chunk_tokens, sequences)
        self._calls = LayerCalls(weights, operations) if isinstance(operations, NativeOperations) else None

    @property
    def cache(self) -> kv_cache.KVCache:
        """The cache of the first sequence."""
        return self.sequences[0].cache

    @property
    def cache_bytes(self) -> int:
        """The bytes of all sequences' keys, values and states, and of their checkpoints."""
        return sum(sequence.num_bytes for sequence in self.sequences)

    def prepare_next(self) -> bool:
        """Does in some milliseconds what a pass would have to do for an expert; returns whether more may follow."""
        return self._calls is not None and self._calls.prepare_next()

    # ---- the model --------------------------------------------------------------------------------------------------

    def run_layers(self, x: Tensor, batch: passes.Pass, ids: Tensor, ends_early: bool) -> Tensor:
        if self._calls is not None:
            return self._calls.run_layers(x, batch, ids, ends_early)
        for layer in range(self.spec.num_hidden_layers):
            x = batch.add_ngrams(x, layer)
            x = batch.add_attention(x, layer)
            if ends_early and layer == self.spec.num_hidden_layers - 1:
                x, ids = x[-1:], ids[-1:]
            x = layers.add_mlp(x, self.weights, layer, ids, batch.partial_state(x, layer))
        return x

    @torch.inference_mode()
    def logits_of(self, hidden: Tensor) -> Tensor:
        """Returns the logits, float32 [T, vocabulary], of hidden states after the last layer, float32 [T, d]."""
        return layers.head(hidden, self.weights)

    # ---- one sequence -----------------------------------------------------------------------------------------------

    def reset(self) -> None:
        self.sequences[0].reset()

    def keep_beginning(self, prompt_ids: list[int]) -> list[int]:
        return self.sequences[0].keep_beginning(prompt_ids)

    def begin(self, prompt_ids: list[int]) -> Tensor:
        """Appends a prompt, a position to return to; returns the logits after it, float32 [vocabulary]."""
        logits = self.next_logits(prompt_ids)
        self.cache.save()
        return logits

    def next_logits(self, ids: list[int]) -> Tensor:
        """Appends tokens; returns the logits after the last, float32 [vocabulary]; raises as `extend`."""
        return self.extend(self.sequences[0], ids)

    def logits(self, ids: list[int]) -> Tensor:
        """Appends tokens; returns the logits after each of them, float32 [T, vocabulary]; raises as `extend`."""
        return self.logits_of(self.hidden_states(ids))

    def hidden_states(self, ids: list[int]) -> Tensor:
        """Appends tokens; returns the hidden states after the last layer, float32 [T, d]; raises as `extend`."""
        return torch.cat(self.append(self.sequences[0], ids))
