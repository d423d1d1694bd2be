"""The decoder on a GPU: it repeats the launches of passes of few tokens; importing this needs Triton."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from statistics import median
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from moe_pack import formats
from moe_pack.runtime.gpu import fit
from moe_pack.runtime.gpu.kernels import tables
from moe_pack.runtime.gpu.placements import NUM_TURNS
from moe_pack.runtime.gpu.prefill import GpuWeights
from moe_pack.runtime.gpu.token import step as token_step
from moe_pack.runtime.gpu.token.choice import ChoosingSteps, TokenChoice
from moe_pack.runtime.gpu.token.layers import LayerBuffers, TokenLayers
from moe_pack.runtime.gpu.token.rows import TokenCaches
from moe_pack.runtime.gpu.token.stages import RowEntry, Stages
from moe_pack.runtime.gpu.weights import ExpertMemory
from moe_pack.runtime.model import Decoder, caches, kv_cache, passes
from moe_pack.runtime.model.choosing import Choice
from moe_pack.runtime.offload.split import fastest_share

_WARMING_TOKENS, _TUNED_TOKENS = 2, 7  # for each share that is tried
_FIRST_TOKEN = 1  # any
_AHEAD_SHARES = (1.0, 0.5, 0.25, 0.125)  # of a predicted expert's missing records, that are tried
# Tokens of a pass that run one after another. A pass decodes every expert that has a token, whatever their number: for
# Mixtral on an H200 that takes 120 ms by prediction (tests/bench/gpu_prompts.py), a token 3.2 ms as measured.
FEW_TOKENS = 16
_INTERPRETED_SMS = 1  # programs run one after the other


class LinkShares(NamedTuple):
    """The shares that the link brings."""

    pulled: float  # of missing records
    ahead: float | None  # of the records that predicted experts lack; None: nothing is predicted


class _TokenCounts:
    def __init__(self, memory: ExpertMemory, step: token_step.TokenStep, inputs: token_step.StepInputs) -> None:
        self._step, self._inputs = step, inputs
        self._record_bytes = np.array([[16 * kind.record_units for kind in layer] for layer in memory.kinds])
        self.clear()

    def clear(self) -> None:
        self._sums = np.zeros(7, np.int64)  # resident, pulled, left, whole, ahead, ahead and ran, changed
        self._num_tokens = self._pulled_bytes = 0
        self._busy_before = self._busy_seconds()

    def add(self, turn: int, num_rows: int) -> None:
        step, k = self._step, self._step.spec.router.num_experts_per_tok
        totals = step.totals[turn][:, : num_rows * k].numpy()
        routes = step.routes[turn][:, :num_rows].flatten(1).numpy()
        running, left = (
            totals[..., tables.HERE] + totals[..., tables.PULLED] + totals[..., tables.LEFT],
            totals[..., tables.LEFT],
        )
        pulled = totals[..., tables.MISSING] - left
        self._sums[:3] += [int((running - totals[..., tables.MISSING]).sum()), int(pulled.sum()), int(left.sum())]
        record_bytes = np.take_along_axis(self._record_bytes, routes, axis=1)
        self._pulled_bytes += int((pulled * record_bytes).sum())
        for row in range(num_rows):
            self._sums[3] += int((self._inputs.exchange.of_row(row).counts[turn] < 0).sum())
        if step.prefetch is not None and num_rows == 1:
            ahead = step.ahead[turn].numpy()  # [L, n, 3]
            self._sums[4:6] += ahead[..., 1:].sum(axis=(0, 1))
            self._pulled_bytes += int((ahead[..., 1] * np.take_along_axis(self._record_bytes, ahead[..., 0], 1)).sum())
        self._sums[6] += step.num_changed(turn, num_rows)
        self._num_tokens += num_rows

    def result(self) -> fit.GpuCounts:
        resident, pulled, left, whole, ahead, ahead_ran, changed = self._sums.tolist()
        counts = (resident, pulled, left, whole, ahead, ahead_ran, changed, self._pulled_bytes)
        return fit.GpuCounts(self._num_tokens, *counts, self._busy_seconds() - self._busy_before)

    def _busy_seconds(self) -> float:
        return 0.0 if self._inputs.share is None else self._inputs.share.busy_seconds()


class GpuDecoder(Decoder):
    """A decoder on a GPU, whose logits are in host memory.

    Before `prepare`, and on a CPU, where the interpreter runs the kernels, the same launches run without graphs.
    Args:    chunk_tokens: of a forward pass of many tokens.   cache_dtype: of keys and values.   few_tokens: of a pass,
             that run one after another.   num_sequences, num_checkpoints: as of `Decoder`.   num_rows: the most tokens
             of a graph, of several sequences or of one.
    """

    most_logits = fit.LOGITS_AT_ONCE

    def __init__(
        self,
        weights: GpuWeights,
        inputs: token_step.StepInputs,
        context_tokens: int,
        device: torch.device,
        chunk_tokens: int,
        cache_dtype: caches.KvDtype = "f32",
        few_tokens: int = FEW_TOKENS,
        num_sequences: int = 1,
        num_checkpoints: int = 0,
        num_rows: int = 1,
    ) -> None:
        spec = weights.spec
        token_caches = TokenCaches(spec, context_tokens, device, cache_dtype, chunk_tokens, num_sequences)
        sizes = (context_tokens, device, chunk_tokens, cache_dtype, num_sequences, num_checkpoints)
        super().__init__(weights, *sizes, token_caches.sequences())
        self._slot_of = {id(sequence): slot for slot, sequence in enumerate(self.sequences)}
        self._is_cuda = device.type == "cuda"
        self._gpu_weights, self._inputs = weights, inputs
        self._few_tokens, self._num_rows = few_tokens, num_rows
        self._buffers = buffers = LayerBuffers.allocate(spec, context_tokens, num_rows, device)
        angles = self._ropes.as_last(context_tokens)
        layers = {n: TokenLayers(weights, token_caches, angles, buffers, n) for n in range(1, num_rows + 1)}
        self._step = token_step.TokenStep(weights, layers, inputs, _num_sms(device))
        self._counts = _TokenCounts(weights.memory, self._step, inputs)
        shape = (NUM_TURNS, *buffers.control.shape)
        self._control = torch.zeros(shape, dtype=torch.int32, pin_memory=self._is_cuda)
        self._logits, self._choice = buffers.logits, None  # without a head there are none, and no choice
        if weights.ends:
            self._choice = TokenChoice(buffers.logits, buffers.control, num_sequences)
            self._logits = self._choice.host_logits
            self.chooser = ChoosingSteps(self, self._choice)
        # By the number of rows, and the turn.
        self._runs: dict[tuple[int, int], Callable[[], None]] = {
            (n, turn): partial(self.launch, turn, n) for n in layers for turn in range(NUM_TURNS)
        }
        # Those of one token without predictions, if these are tried.
        self._plain_runs: dict[tuple[int, int], Callable[[], None]] = {}
        if self._step.prefetch is not None and inputs.prediction is not None and inputs.prediction.is_tried:
            self._plain_runs = {key: run for key, run in self._runs.items() if key[0] == 1}
        self._turn, self._num_running = 0, 0  # of the oldest pass that runs, or the next one; passes that run
        self.own_sequences, self.queues, self.begins = self.sequences, inputs.queues, weights.begins
        self._own_of: dict[int, kv_cache.CachedSequence] = {}  # of a whole model's sequences
        self._decoders: tuple[GpuDecoder, ...] = (self,)  # of all stages, the last one is this
        self._stages = Stages(self._decoders)

    def join(self, earlier: Sequence["GpuDecoder"], spec: formats.ModelSpec, num_checkpoints: int) -> None:
        """Makes this the decoder of a whole model, whose earlier layers other decoders have; they stay the caller's.

        `spec` and `weights` stay those of this decoder's own layers.
        Args:    earlier: in the order of their layers, with as many sequences and rows.   spec: the model's.
                 num_checkpoints: of each sequence; those of the parts have none.
        """
        self._decoders = (*earlier, self)
        self._stages = Stages(self._decoders)
        self.chunk_tokens = min(each.chunk_tokens for each in self._decoders)
        ropes, caches_of_slots = caches.LayerRopes(spec, self.device), self._stages.caches(spec)
        self.sequences = tuple(kv_cache.CachedSequence(spec, each, ropes, num_checkpoints) for each in caches_of_slots)
        self._slot_of = {id(sequence): slot for slot, sequence in enumerate(self.sequences)}
        for decoder in self._decoders:
            decoder._own_of = dict(zip(self._slot_of, decoder.own_sequences, strict=True))

    def logits(self, ids: list[int]) -> Tensor:
        """Returns logits in host memory."""
        if self._are_few(self.sequences[0], ids):
            return torch.cat([logits.clone() for logits in self._few(self.sequences[0], ids)])
        return torch.cat(
            [
                self.logits_of(some).cpu()
                for hidden in self.append(self.sequences[0], ids)
                for some in torch.split(hidden, fit.LOGITS_AT_ONCE)
            ]
        )

    def logits_of(self, hidden: Tensor) -> Tensor:
        """Returns logits on this decoder's device, whichever is torch's current one."""
        with self.queues.current():
            return super().logits_of(hidden)

    def _head(self, hidden: Tensor) -> Tensor:
        return self.logits_of(hidden)

    def extend(self, sequence: kv_cache.CachedSequence, ids: list[int]) -> Tensor:
        """Returns the last logits in host memory, valid until the next call."""
        if not self._are_few(sequence, ids):
            return super().extend(sequence, ids).cpu()
        for logits in self._few(sequence, ids):
            last = logits[-1]
        return last

    @torch.inference_mode()
    def prepare(self) -> None:
        """Captures the launches of each number of rows as a graph for each turn; a run before loads all kernels."""
        if not self._is_cuda:
            return
        self._capture(self._runs)
        with self._step.unpredicted():
            self._capture(self._plain_runs)
        self.reset()
        self._counts.clear()

    def _capture(self, runs: dict[tuple[int, int], Callable[[], None]]) -> None:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # untyped in torch
        stream.wait_stream(torch.cuda.current_stream())  # these launches use buffers that the current stream fills
        with torch.cuda.stream(stream):
            for key, launch in list(runs.items()):
                launch()
                stream.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=stream):
                    launch()
                runs[key] = graph.replay

    @torch.inference_mode()
    def launch_all(self) -> None:
        """Launches passes of several rows of the first sequence, from its beginning on, which is forgotten."""
        self._control.zero_()
        self._control[:, 1] = torch.arange(self._num_rows) % self.cache.context_tokens
        for number in range(2, self._num_rows + 1):
            self.launch(0, number)
        self.reset()

    @torch.inference_mode()
    def tune(self, known: LinkShares | None = None) -> LinkShares:
        """Sets what the link brings, of the missing records and ahead, chosen by the duration of tokens.

        A prediction that is tried stays if tokens are faster with it.
        Args:    known: what was chosen before; None: tokens run with several.
        """
        step, found = self._step, self._fastest_shares() if known is None else known
        step.pull(found.pulled)
        if step.prefetch is not None and found.ahead is not None:
            step.pull_ahead(found.ahead)
        elif step.prefetch is not None:
            step.prefetch, self._runs = None, self._runs | self._plain_runs
        self._plain_runs = {}
        self.reset()
        self._counts.clear()
        return found

    def _fastest_shares(self) -> LinkShares:
        inputs, step = self._inputs, self._step
        pulled = inputs.pulled_share
        if inputs.share is not None and pulled and not inputs.by_expert:
            pulled = fastest_share(partial(self._seconds_with, step.pull), pulled)
            step.pull(pulled)
        return LinkShares(pulled, None if step.prefetch is None else self._fastest_ahead())

    def _fastest_ahead(self) -> float | None:
        """Returns the share of predicted experts' records to pull ahead; None if a prediction is better not made."""
        seconds, share = min((self._seconds_with(self._step.pull_ahead, share), share) for share in _AHEAD_SHARES)
        if not self._plain_runs:
            return share
        predicted, self._runs = self._runs, self._runs | self._plain_runs
        with self._step.unpredicted():
            is_faster = self._seconds() <= seconds
        self._runs = predicted
        return None if is_faster else share

    def _seconds_with(self, choose: Callable[[float], None], share: float) -> float:
        choose(share)
        return self._seconds()

    def _seconds(self) -> float:
        """Returns the median duration of tokens, each the one that the model finds likeliest after the last."""
        self.reset()
        token, times = _FIRST_TOKEN % self.spec.vocab_size, []
        for _ in range(_WARMING_TOKENS + _TUNED_TOKENS):
            if self.cache.num_tokens == self.cache.context_tokens:
                self.reset()
            if self._step.received is not None:
                self._step.received.rows.normal_()
            started = time.perf_counter()
            logits = self._run_rows([(self.sequences[0], token)])
            times.append(time.perf_counter() - started)
            token = int(logits.argmax())
        return median(times[_WARMING_TOKENS:])

    def close(self) -> None:
        """Frees the graphs, which contain calls of the CPU."""
        self._runs.clear()
        self._plain_runs.clear()

    @property
    def predicts(self) -> bool:
        """Whether records of predicted experts are pulled ahead."""
        return self._step.prefetch is not None

    @property
    def routes(self) -> Tensor:
        """The experts of the last pass of few tokens, of its first row: int32 [L, k]."""
        return torch.cat([each._step.routes[1 - each._turn][:, 0] for each in self._decoders])

    def counts(self) -> fit.GpuCounts:
        """Returns the needs of the tokens that ran in passes of few until now, of this decoder's own layers."""
        return self._counts.result()

    # ---- passes of few tokens ----------------------------------------------------------------------------------------

    def _are_few(self, sequence: kv_cache.CachedSequence, ids: list[int]) -> bool:
        """Whether these tokens run in graphs, and no earlier position has to be computed again."""
        return 0 < len(ids) <= self._few_tokens and not sequence.outgrows(len(ids))

    def _few(self, sequence: kv_cache.CachedSequence, ids: list[int]) -> Iterator[Tensor]:
        """Appends tokens to a sequence, as many in a graph as it takes; yields their logits [n, vocabulary]."""
        for first in range(0, len(ids), self._num_rows):
            yield self._run_rows([(sequence, token) for token in ids[first : first + self._num_rows]])

    def append(self, sequence: kv_cache.CachedSequence, ids: list[int], last_only: bool = False) -> list[Tensor]:
        """Returns the hidden states of new tokens; experts stream through the GPU."""
        self._stages.begin_pass()
        hidden = super().append(sequence, ids, last_only)
        self._stages.end_pass()
        return hidden

    def begin_pass(self) -> None:
        """Begins passes of many tokens."""
        self._gpu_weights.stream.begin_pass()

    def end_pass(self) -> None:
        """Ends passes of many tokens."""
        self._gpu_weights.stream.end_pass()

    def _embed(self, ids: Tensor) -> Tensor:
        return self._stages.embed(ids)

    def run_layers(self, x: Tensor, batch: passes.Pass, ids: Tensor, ends_early: bool) -> Tensor:
        """Returns the hidden states after all stages; passes are whole, whatever `ends_early`."""
        return self._stages.run_layers(x, batch, ids)

    def run_own_layers(self, x: Tensor, batch: passes.Pass, ids: Tensor) -> Tensor:
        """Returns the hidden states [T, w] of tokens int64 [T] after this decoder's own layers."""
        return super().run_layers(x, batch, ids, ends_early=False)

    def own_sequence(self, sequence: kv_cache.CachedSequence) -> kv_cache.CachedSequence:
        """Returns a whole model's sequence with the caches of this decoder's own layers."""
        own = self._own_of[id(sequence)]
        own.cache.go_with(sequence.cache)
        return own

    def _extend_together(self, sequences: list[kv_cache.CachedSequence], ids: list[int]) -> Tensor:
        rows = list(zip(sequences, ids, strict=True))
        pieces = [rows[first : first + self._num_rows] for first in range(0, len(rows), self._num_rows)]
        return torch.cat([self._run_rows(piece).clone() for piece in pieces])

    def most_verified(self, sequence: kv_cache.CachedSequence) -> int:
        """Returns how many tokens `verify` may append now, at most those of a graph."""
        return min(super().most_verified(sequence), self._num_rows)

    def _logits_after(self, verified: Tensor) -> Tensor:
        """Returns logits in host memory, valid until the next call."""
        return self._logits[: len(verified)]

    def _append_alone(self, sequence: kv_cache.CachedSequence, ids: list[int]) -> Tensor:
        self._run_rows([(sequence, token) for token in ids])
        hidden = self._buffers.x[: len(ids)].clone()
        sequence.hidden = hidden[-1]
        return hidden

    @torch.inference_mode()
    def _run_rows(self, rows: list[tuple[kv_cache.CachedSequence, int]]) -> Tensor:
        """Appends tokens to sequences, those of one next to each other; returns logits [T, vocabulary].

        The logits are in host memory, and valid until the next call.
        """
        entries, new = list[RowEntry](), dict[int, list[int]]()
        for sequence, token in rows:
            slot = self.slot_of(sequence)
            own = new.setdefault(slot, [])
            entries.append(RowEntry(token, sequence.num_tokens + len(own), slot))
            own.append(token)
        for slot, tokens in new.items():
            self._check_ids(self.sequences[slot], tokens)
        try:
            self._stages.run_rows(entries)
        except BaseException:
            self.abandon([self.sequences[slot] for slot in new])
            raise
        self.enter_new(new)
        return self._logits[: len(rows)]

    def launch_rows(self, entries: Sequence[RowEntry], choices: Sequence[Choice | None] | None = None) -> None:
        """Launches rows through this decoder's own layers.

        Args:    choices: how the next token of each row is chosen; None: by the host, for one or all.
        """
        turn = (self._turn + self._num_running) % NUM_TURNS
        self._control[turn, :, : len(entries)] = torch.tensor(entries).T
        if self._choice is not None:
            self._choice.set_choices(turn, choices)
        self._runs[len(entries), turn]()
        self._num_running += 1

    def abandon(self, sequences: Sequence[kv_cache.CachedSequence]) -> None:
        """Waits for passes of which one has failed, and cuts their sequences back; forgets faults of the others."""
        for decoder in self._decoders:
            with decoder.queues.current():
                decoder.wait()
            decoder._num_running = 0
            if decoder._inputs.share is not None:
                with suppress(Exception):
                    decoder._inputs.share.check()
        for sequence in sequences:
            passes.keep_what_is_whole(sequence.cache, sequence.num_tokens)

    def can_chain(self, num_rows: int) -> bool:
        """Whether so many rows fit into a pass, and a pass can take its tokens from the one before it."""
        return num_rows <= self._num_rows and len(self._decoders) == 1

    def slot_of(self, sequence: kv_cache.CachedSequence) -> int:
        """Returns the number of one of the sequences."""
        return self._slot_of[id(sequence)]

    @property
    def turn(self) -> int:
        """The turn of the oldest pass that runs."""
        return self._turn

    def wait(self) -> None:
        """Waits for all that was launched: the only wait for a pass, whose logits are returned.

        It is a mark and not a stream, because a test makes torch forbid waits for streams. It takes a CPU, which the
        CPU's share leaves free.
        """
        self.queues.mark().wait()

    def end_rows(self, num_rows: int) -> None:
        """Counts the rows that have run in this decoder's own layers; raises RunError if the CPU's share has failed."""
        if self._inputs.share is not None:
            self._inputs.share.check()
        self._counts.add(self._turn, num_rows)
        self._turn, self._num_running = 1 - self._turn, self._num_running - 1

    def hidden(self, num_rows: int) -> Tensor:
        """The hidden states [T, w] of rows after this decoder's own layers."""
        return self._buffers.x[:num_rows]

    def received(self, num_rows: int) -> Tensor:
        """The memory [T, w] for hidden states of rows from the layers before, on another device."""
        assert self._step.received is not None, "there are layers before"
        return self._step.received.rows[:num_rows]

    def enter_new(self, new: dict[int, list[int]]) -> None:
        """Counts the new tokens of each slot, and shows their hidden states to a sequence's follower."""
        row = 0
        for slot, tokens in new.items():
            sequence = self.sequences[slot]
            before = sequence.num_tokens
            sequence.ids[before:] = tokens
            if sequence.follower is not None:  # it may keep them
                sequence.follower.follow(sequence.ids, before, self._buffers.x[row : row + len(tokens)].clone())
            sequence.cache.num_tokens += len(tokens)
            row += len(tokens)

    def launch(self, turn: int, num_rows: int = 1) -> None:
        """Launches the rows in the control memory; a graph repeats it."""
        buffers = self._buffers
        if self._choice is None:
            buffers.control.copy_(self._control[turn], non_blocking=True)
        else:
            self._choice.enter(turn, self._control[turn])
        self._step.run(turn, num_rows)
        if self._choice is not None:
            self._choice.launch(turn, num_rows)


def _num_sms(device: torch.device) -> int:
    if device.type != "cuda":
        return _INTERPRETED_SMS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
