"""Drafts by the prediction layer that a model ships, whose weights are in memory in the checkpoint's bytes.

For token i + 1 and the hidden state h_i of the token before it, the layer predicts token i + 2:

    x = project([norm(embed(token i + 1)); norm(h_i)])
    x = decoder layer(x)        with keys and values of its own, at position i
    logits = head(norm(x))

For h_i it gets the model's hidden state after the final norm. For each further token of a draft it gets `norm(x)` of
its own instead. Sources: DeepSeek-V3 (2412.19437), section 2.2, and the engines that run it: vLLM gives the layer the
model's normed state (deepseek_mtp, glm4_moe_mtp, qwen3_next_mtp); for further tokens SGLang gives it its own normed
state in all families, vLLM in Qwen3-Next's, while its DeepSeek and GLM pass the state before that norm. We take the
normed one, because the layer was trained on normed states.

The layer's cache follows the model's sequence: the prompt enters it too, pass by pass. Hidden states of later tokens
wait, and run together when a draft is wanted or many wait, so that a text without drafts loses little time: together,
tokens share experts.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from moe_pack import formats
from moe_pack.formats import Matrix as MatrixName
from moe_pack.formats import families
from moe_pack.formats.families import prediction
from moe_pack.formats.pack import layouts, plans
from moe_pack.formats.pack.codecs import Fp8
from moe_pack.formats.parts.specs import cache_values
from moe_pack.runtime import model
from moe_pack.runtime.model import caches, checkpoint_weights, kv_cache, layers
from moe_pack.runtime.model.compute import RowTable
from moe_pack.runtime.model.compute.operations import row_blocks
from moe_pack.runtime.model.compute.rotation import Rotation
from moe_pack.runtime.model.compute.weights import norm
from moe_pack.runtime.model.pack_weights import stored_matrix

WAITING_TOKENS = 64  # whose hidden states wait at most
_LEAST_PROMPT = 16  # tokens of a pass over a prompt; passes over drafts are shorter
_FLOAT_BYTES = 4
_TABLES = ("embed", "head")
_COMPARED_ROWS = 256
_CPU = torch.device("cpu")
_SAME_TABLE = 0.5  # of the norm: codes of 2 bits are nearer to their weights, and other weights are about 1.4 away


class PredictionWeights(model.ExpertRunner):
    """The weights of a prediction layer, as those of a model of one layer; the experts are whole matrices.

    All of them are loaded: 4.8 GB for GLM-4.5-Air, 3.3 GB for Qwen3-Next, 12.1 GB for DeepSeek-V3 in FP8. Embedding and
    head are those of `main`, the model, unless the checkpoint has others for this layer.
    Args:    device: of `main`, which gets these weights too.
    Raises:  PackError if the file that has the layer is damaged.
    """

    selector: formats.Selector = "none"

    def __init__(self, layer: families.PredictionLayer, main: model.Weights, device: torch.device = _CPU) -> None:
        layer.check()
        self.spec, self.main, self.device = layer.spec, main, device
        self.operations: model.Operations = main.operations
        self._vectors: dict[str, Tensor] = {}
        self._matrices: dict[str, model.Matrix] = {}
        self._experts: dict[tuple[int, MatrixName], model.Matrix] = {}
        self.num_bytes = 0
        for name in _loaded_roles(layer):
            role, source = layer.roles[name], layer.dense[name]
            if len(role.shape) == 1:
                self._vectors[name] = (model.read_vector(layer, source) + role.offset).to(device)
                self.num_bytes += self._vectors[name].nbytes
            else:
                self._matrices[name] = self._load(layer, source)
        for expert in range(self.spec.router.num_experts):
            for matrix in self.spec.expert.matrices:
                self._experts[expert, matrix] = self._load(layer, layer.expert_source(expert, matrix))

    def _load(self, layer: families.PredictionLayer, source: families.SourceMatrix) -> model.Matrix:
        """Reads a matrix into memory, FP8 in rows that the operations multiply."""
        if not _is_in_rows(source):
            weight = model.read_rows(layer, source, 0, source.num_rows).contiguous().to(self.device)
            self.num_bytes += weight.nbytes
            return model.StoredMatrix(weight, self.operations)
        layout = layouts.row_layout([("weight", plans.FP8, False)], source.num_cols)
        stored = np.zeros((source.num_rows, layout.row_bytes), np.uint8)
        for start, stop in row_blocks(source.num_rows, source.num_cols):
            codes, scales = (
                read(layer, source, start, stop)
                for read in (checkpoint_weights.read_codes, checkpoint_weights.read_scales)
            )
            encoded = Fp8(plans.FP8, source.num_cols).encode(codes, scales)
            layouts.write_rows(layout, {"weight": encoded.numpy()}, stored[start:stop])
        self.num_bytes += stored.nbytes
        return model.RowMatrix(layout, torch.from_numpy(stored).to(self.device), self.operations)

    def vector(self, role: str) -> Tensor:
        return self._vectors[role]

    def matrix(self, role: str) -> model.Matrix:
        return self._matrices[role] if role in self._matrices else self.main.matrix(role)

    def expert(self, layer_idx: int, expert: int) -> model.Expert:
        return _WholeExpert(*(self._experts.get((expert, matrix)) for matrix in formats.MATRICES))

    def threshold(self, layer_idx: int, expert: int) -> float:
        return 0.0

    def rotation(self, layer_idx: int) -> Rotation | None:
        return None

    def ngram_table(self, layer: int) -> RowTable:
        raise AssertionError("a prediction layer has no n-grams")

    def run_experts(
        self,
        layer_idx: int,
        x: Tensor,
        experts: Tensor,
        router_weights: Tensor,
        partial_state: model.PartialState | None = None,
    ) -> Tensor:
        y, function = torch.zeros_like(x), model.neuron_of(self.spec.expert_function(layer_idx))
        for number, tokens, weights in model.tokens_by_expert(experts.cpu(), router_weights.cpu()):
            rows = torch.from_numpy(tokens).to(x.device)
            inputs = x[rows]
            gate = self._experts.get((number, "gate"))
            h = function.h(
                None if gate is None else model.linear(inputs, gate), model.linear(inputs, self._experts[number, "up"])
            )
            output = model.linear(h, self._experts[number, "down"])
            y[rows] += torch.from_numpy(weights)[:, None].to(x.device) * output
        return y


class _WholeExpert:
    """An expert of whole matrices: gate and up [f, d], down [d, f]."""

    def __init__(self, gate: model.Matrix | None, up: model.Matrix | None, down: model.Matrix | None) -> None:
        assert up is not None and down is not None, "every expert has up and down"
        self._gate, self._up, self._down = gate, up, down

    def blocks(self) -> Iterator[model.NeuronBlock]:
        down = self._down.rows(0, self._down.num_rows).T
        for start, stop in row_blocks(self._up.num_rows, self._up.num_cols, 3):
            gate = None if self._gate is None else self._gate.rows(start, stop)
            yield model.NeuronBlock(gate, self._up.rows(start, stop), down[start:stop], None, None)

    def down_bias(self) -> Tensor | None:
        return None


def loaded_bytes(layer: families.PredictionLayer) -> int:
    """Returns the bytes of the weights that `PredictionWeights` loads."""
    dense = sum(
        4 * layer.roles[name].shape[0] if len(layer.roles[name].shape) == 1 else _matrix_bytes(layer, layer.dense[name])
        for name in _loaded_roles(layer)
    )
    each = [
        _matrix_bytes(layer, layer.expert_source(expert, matrix))
        for expert in range(layer.spec.router.num_experts)
        for matrix in layer.spec.expert.matrices
    ]
    return dense + sum(each)


def _loaded_roles(layer: families.PredictionLayer) -> list[str]:
    """Returns the roles that are loaded: all, but for tables that are the model's."""
    return [name for name in layer.roles if name not in _TABLES or not _is_shared(layer, name)]


def _is_shared(layer: families.PredictionLayer, role: str) -> bool:
    """Whether the layer's embedding or head is the model's, which the pack may have in other formats.

    Some rows decide, because the table has gigabytes. One that differs only in other rows changes drafts, not answers.
    """
    source, main = layer.dense[role], {dense.role.name: dense for dense in layer.pack.layout.dense}[role]
    numbers = np.unique(np.linspace(0, source.num_rows - 1, _COMPARED_ROWS, dtype=np.int64)).tolist()
    own = torch.cat([model.read_rows(layer, source, number, number + 1).to(torch.float32) for number in numbers])
    raw = [torch.from_numpy(layer.pack.read_dense(main.entry, number, number + 1)) for number in numbers]
    theirs = torch.cat([stored_matrix(main, each).rows(0, 1) for each in raw])
    return bool((own - theirs).norm() <= _SAME_TABLE * theirs.norm())


def _is_in_rows(source: families.SourceMatrix) -> bool:
    return source.codec == "fp8" and plans.format_fault(plans.FP8, source.num_cols) is None


def _matrix_bytes(layer: families.PredictionLayer, source: families.SourceMatrix) -> int:
    if _is_in_rows(source):
        return source.num_rows * layouts.row_layout([("weight", plans.FP8, False)], source.num_cols).row_bytes
    return source.num_rows * source.num_cols * checkpoint_weights.weights_dtype(layer, source).itemsize


def prediction_bytes(layer: families.PredictionLayer, context_tokens: int) -> int:
    """Returns the memory of a `PredictionDrafter`: weights, keys and values, and hidden states that wait."""
    cached = cache_values(layer.spec, context_tokens, WAITING_TOKENS) + WAITING_TOKENS * layer.spec.hidden_size
    return loaded_bytes(layer) + _FLOAT_BYTES * cached


class PredictionDrafter:
    """Drafts of one sequence by a prediction layer. It is a `Drafter`, and the sequence's `Follower`.

    Args:    context_tokens: the longest sequence.   chunk_tokens: the most tokens for which the layer runs at once.
    """

    needs_hidden = False  # it gets those of all tokens by `follow`

    def __init__(self, weights: PredictionWeights, context_tokens: int, chunk_tokens: int) -> None:
        self._weights, device = weights, weights.device
        self._step = min(chunk_tokens, WAITING_TOKENS)
        spec = weights.spec
        self._cache = kv_cache.KVCache(spec, context_tokens, device, chunk_tokens=WAITING_TOKENS)
        self._sequence = kv_cache.CachedSequence(spec, self._cache, caches.LayerRopes(spec, device))
        self._waiting = torch.zeros(
            (WAITING_TOKENS, spec.hidden_size), device=device
        )  # hidden states that have not run
        self._num_waiting = 0
        self._begin = 0  # the position in the text of the first key
        self.num_bytes = weights.num_bytes + self._cache.num_bytes + self._waiting.nbytes

    def follow(self, ids: Sequence[int], first: int, hidden: Tensor) -> None:
        """Takes tokens that the model has run, and their hidden states.

        A position that ran before runs again: what the layer has of it and of later ones is dropped.
        Args:    ids: the whole sequence, to which the tokens belong.   first: the position of the first of them.
                 hidden: float32 [T, d], after the last layer and before the final norm.
        """
        self._cut_to(first)
        for start in range(0, len(hidden), WAITING_TOKENS):
            piece = hidden[start : start + WAITING_TOKENS]
            if self._num_waiting + len(piece) > WAITING_TOKENS:
                self._run_waiting(ids, self._num_waiting)
            self._waiting[self._num_waiting : self._num_waiting + len(piece)] = piece
            self._num_waiting += len(piece)
        if len(hidden) > _LEAST_PROMPT:  # the token after its last one is not known yet
            self._run_waiting(ids, self._num_waiting - 1)

    def propose(self, ids: Sequence[int], hidden: Tensor | None, most: int) -> list[int]:
        return [int(each) for each in self.logits(ids, most).argmax(dim=1)]

    @torch.inference_mode()
    def logits(self, ids: Sequence[int], most: int) -> Tensor:
        """Returns the logits of the tokens of a draft, each after the most likely one before it.

        Args:    ids: the whole sequence that the layer follows, the token that was chosen last at its end.
        Returns: float32 [n, vocabulary], n at most `most`; 0 if the layer lacks hidden states, or places for keys.
        """
        number = len(ids) - 1 - self._first_waiting
        most = min(most, self._cache.context_tokens - (len(ids) - 1 - self._begin) + 1)
        if most < 1 or not 1 <= number <= self._num_waiting:
            return torch.empty((0, self._weights.spec.vocab_size))
        x = self._run_waiting(ids, number)
        num_kept, rows = self._cache.num_tokens, [model.head(x, self._weights)]
        while len(rows) < most:
            x = self._run([int(rows[-1].argmax())], norm(x, self._weights, "norm"))
            rows.append(model.head(x, self._weights))
        self._cache.num_tokens = num_kept
        return torch.cat(rows)

    def accepted(self, number: int) -> None:
        pass  # keys of drafts are never kept, and the model's hidden states follow

    def reset(self) -> None:
        pass  # `follow` says where a text is another, and the beginning that it shares with the last one stays

    # ---- positions --------------------------------------------------------------------------------------------------

    @property
    def _first_waiting(self) -> int:
        return self._begin + self._cache.num_tokens

    def _cut_to(self, first: int) -> None:
        """Drops what follows a position. After a gap the layer begins again there.

        The key before `first` stays, although the token after it may be another now: one key of many is no reason to
        run the model again.
        """
        if first < self._begin or first > self._first_waiting + self._num_waiting:
            self._cache.num_tokens = self._num_waiting = 0
            self._begin = first
        elif first >= self._first_waiting:
            self._num_waiting = first - self._first_waiting
        else:
            self._cache.num_tokens, self._num_waiting = first - self._begin, 0

    # ---- the layer --------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _run_waiting(self, ids: Sequence[int], number: int) -> Tensor:
        """Runs the first hidden states that wait; returns the layer's own of the last of them, float32 [1, d]."""
        first, main, waiting = self._first_waiting, self._weights.main, self._waiting
        x = waiting[:0]
        for start in range(0, number, self._step):
            stop = min(start + self._step, number)
            tokens = list(ids[first + start + 1 : first + stop + 1])
            x = self._run(tokens, norm(waiting[start:stop], main, "norm"))
        self._num_waiting -= number
        waiting[: self._num_waiting] = waiting[number : number + self._num_waiting].clone()
        return x[-1:]

    def _run(self, ids: list[int], hidden: Tensor) -> Tensor:
        """Runs the layer for tokens and the normed hidden states before them; returns its own, float32 [T, d]."""
        weights, cache = self._weights, self._cache
        start, tokens = cache.num_tokens, torch.tensor(ids)
        both = (
            norm(model.embed(tokens, weights), weights, prediction.EMBED_NORM),
            norm(hidden, weights, prediction.HIDDEN_NORM),
        )
        x = model.linear(torch.cat(both, dim=1), weights.matrix(prediction.PROJECT))
        (angles,) = self._sequence.angles_at(start, start + len(ids), start + len(ids))
        x = model.add_attention(x, weights, 0, cache.of(0), angles)
        inputs = model.mlp_input(x, weights, 0)
        experts, router_weights = model.route_tokens(inputs, weights, 0, tokens)
        routed = model.run_experts(inputs, experts, router_weights, weights, 0)
        x = layers.enter_second(x, layers.run_unrouted(inputs, weights, 0), routed, weights, 0)
        cache.num_tokens = start + len(ids)
        return x
