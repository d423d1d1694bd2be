"""The host's share of a GPU's experts, computed by native code.

For every MoE layer of a token the GPU writes to page-locked memory which experts and neurons the CPU computes
(`runtime/gpu/kernels/tables.py`, `LeftToCpu`). `HostShare` computes these neurons with the threads of the CPU kernels
and writes their weighted sum, without Python. Nothing that the GPU writes is trusted; a fault makes the layer's output
zero, and `check` raises it. The twin in plain torch is `runtime/model/compute/expert.py`.

`FlagCalls` takes the calls: the GPU writes a call's number to a flag in the same memory, and waits until the flag is 0.
A thread of native code, or one of Python, computes what is called for.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_pack.formats import RunError
from moe_pack.runtime.cpu.kernels import ExpertRows, Kernels, MapCutError, why_unavailable

try:
    import moe_pack.runtime.cpu._native as _native
except ImportError:  # then there are no kernels either
    _native = None  # type: ignore[assignment]  # a module or nothing

_CUT, _NO_MEMORY = 4, 5  # of ShareFault in host_share.h, and so are the next
_WRONG_REQUESTS = {
    1: "the GPU asked the CPU for an expert that does not exist",
    2: "the GPU asked the CPU for a number of neurons that the expert does not have",
    3: "the GPU gave the CPU neurons that are not in rising order, or not the expert's",
}


@dataclass(frozen=True, slots=True, eq=False)
class HostShareBuffers:
    """The memory through which a GPU and the CPU exchange tokens' experts, on the host, page-locked with a GPU.

    For T tokens of d columns and k experts, and lists of f neurons; all contiguous. Each token has P places, a multiple
    of the MoE layers: token t's place p, of layer p modulo their number, is t * P + p.
    """

    x: Tensor  # float32 [T, d], the experts' input
    weights: Tensor  # float32 [T, k], the router's
    experts: Tensor  # int32 [T, k]
    counts: Tensor  # int32 [T * P, k], how many neurons the list has, or `tables.WHOLE`
    neurons: Tensor  # int32 [T * P, k, f], the list, rising
    a: Tensor  # float32 [T, k, f], the selector's activations of the listed neurons; not read without a selector
    y: Tensor  # float32 [T, d], written: the sum over the experts of weight * output of their listed neurons

    def __post_init__(self) -> None:
        (num_tokens, d), (num_lists, k, f) = self.x.shape, self.neurons.shape
        shapes = {
            "x": (torch.float32, (num_tokens, d)),
            "weights": (torch.float32, (num_tokens, k)),
            "experts": (torch.int32, (num_tokens, k)),
            "counts": (torch.int32, (num_lists, k)),
            "neurons": (torch.int32, (num_lists, k, f)),
            "a": (torch.float32, (num_tokens, k, f)),
            "y": (torch.float32, (num_tokens, d)),
        }
        for name, (dtype, shape) in shapes.items():
            tensor: Tensor = getattr(self, name)
            if tensor.dtype != dtype or tensor.shape != shape or not tensor.is_contiguous() or tensor.is_cuda:
                expected = f"expected contiguous {dtype} {list(shape)} on the host"
                raise ValueError(f"{name}: found {tensor.dtype} {list(tensor.shape)} on {tensor.device}, {expected}")


@dataclass(frozen=True, slots=True)
class HostShareCounts:
    """The work of a share since it was opened."""

    num_experts: int
    num_neurons: int
    record_bytes: int
    busy_ns: int  # of layers in which the CPU had work


class HostShare:
    """The CPU's share of the experts of all MoE layers. `close` it after the calls that it serves.

    Args:    kernels: whose threads compute.   layers: for each MoE layer the rows of its experts, each in one piece.
             The row of extra values (the bias of down) is not added: the GPU adds it.
    """

    def __init__(self, kernels: Kernels, layers: Sequence[Sequence[ExpertRows]], buffers: HostShareBuffers) -> None:
        of = buffers
        tensors = (of.x, of.weights, of.experts, of.counts, of.neurons, of.a, of.y)
        self._share: object = kernels.open_share(layers, len(of.x), [each.numpy() for each in tensors])

    def run(self, at: int) -> None:
        """Computes the share of a token's place now, in this thread and those of the kernels."""
        _native.run_share(self._opened(), at)

    def serve(self, calls: "FlagCalls") -> None:
        """Answers calls until they are closed; meanwhile the thread does not have the interpreter's lock."""
        _native.serve_calls(calls.opened, self._opened())

    def counts(self) -> HostShareCounts:
        return HostShareCounts(*_native.share_counts(self._opened()))

    def check(self) -> None:
        """Raises the first fault since the last check: MapCutError, or RunError for a wrong request or no memory."""
        found = _native.take_share_fault(self._opened())
        if found is None:
            return
        fault, layer_idx, expert_idx = found
        if fault == _CUT:
            raise MapCutError("a file was cut while its map was read")
        if fault == _NO_MEMORY:
            raise RunError("there is no memory for the CPU's part of the experts; free some memory")
        raise RunError(f"MoE layer {layer_idx}, expert {expert_idx} of the token: {_WRONG_REQUESTS[fault]}")

    def close(self) -> None:
        """Ends the share and gives back the references."""
        self._share = None

    def _opened(self) -> object:
        assert self._share is not None, "the share is open"
        return self._share


class FlagCalls:
    """Calls of the CPU by a GPU, which a thread answers one after the other. Owns the thread: `close` it.

    Args:    flag: int32 [1], 0 unless the GPU waits; it writes a call's `number`.   counts: int32 [T * P, k], as of
             `HostShareBuffers`; the answer to counts that are all zero is zeros, without the thread's computation.
             y: float32 [T, d], likewise.   serve: computes what is called for: a share, or a function of a token's
             place, which must not raise.   limit_s: how long the GPU waits for an answer.
             All tensors are on the host, page-locked with a GPU.
    Raises:  RunError without the native code.
    """

    def __init__(
        self, flag: Tensor, counts: Tensor, y: Tensor, serve: HostShare | Callable[[int], None], limit_s: float
    ) -> None:
        if _native is None:
            raise RunError(f"experts from the disk on a GPU: native kernels {why_unavailable()}; or give more --ram")
        self.flag, self.limit_s, self._num_places = flag, limit_s, len(counts) // len(y)
        tensors = (flag.numpy(), counts.numpy(), y.numpy())
        self.opened: object = _native.open_calls(*tensors, len(y), counts.shape[1], round(1000 * limit_s))
        # Waits in native code, so that it may not keep the interpreter from ending.
        self._thread = threading.Thread(target=self._answer, args=(serve,), name="experts", daemon=True)
        self._thread.start()

    def number(self, place: int, num_tokens: int) -> int:
        """Returns the number of a call with a place of the first tokens, as many as given."""
        assert 0 <= place < self._num_places, "there is such a place"
        return (num_tokens - 1) * self._num_places + place + 1

    def take_unanswered(self) -> int | None:
        """Returns the place for which the GPU waited too long since the last time; None if for none.

        After such a call all others are answered at once, without being computed, until then.
        """
        return _native.take_call_fault(self.opened)

    def close(self) -> None:
        """Ends the waits and the thread. The GPU may not call any more."""
        _native.close_calls(self.opened)
        self._thread.join()

    def _answer(self, serve: HostShare | Callable[[int], None]) -> None:
        if isinstance(serve, HostShare):
            serve.serve(self)
            return
        while (at := _native.next_call(self.opened)) is not None:
            serve(at)
