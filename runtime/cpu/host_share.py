"""The host's share of a GPU's experts, computed by native code.

For every MoE layer of a token the GPU writes to page-locked memory which experts and neurons the CPU computes
(`runtime/gpu/kernels/tables.py`, `LeftToCpu`). `HostShare` gives CUDA a function to call there (`cudaLaunchHostFunc`):
it computes these neurons with the threads of the CPU kernels and writes their weighted sum, without Python. Nothing
that the GPU writes is trusted; a fault makes the layer's output zero, and `check` raises it. The twin in plain torch is
`runtime/model/compute/expert.py`.

`WorkerCalls` is for what Python computes: its function hands the call to a thread, and waits without the interpreter's
lock.
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
    """The memory through which a GPU and the CPU exchange a token's experts, on the host, page-locked with a GPU.

    For d columns, k experts of a token, L MoE layers and lists of f neurons; all contiguous, in the order of calls.
    """

    x: Tensor  # float32 [d], the experts' input
    weights: Tensor  # float32 [k], the router's
    experts: Tensor  # int32 [k]
    counts: Tensor  # int32 [L, k], how many neurons the list has, or `tables.WHOLE`
    neurons: Tensor  # int32 [L, k, f], the list, rising
    a: Tensor  # float32 [k, f], the selector's activations of the listed neurons; not read without a selector
    y: Tensor  # float32 [d], written: the sum over the experts of weight * output of their listed neurons

    def __post_init__(self) -> None:
        num_layers, k, f = self.neurons.shape
        shapes = {
            "x": (torch.float32, self.y.shape),
            "weights": (torch.float32, (k,)),
            "experts": (torch.int32, (k,)),
            "counts": (torch.int32, (num_layers, k)),
            "neurons": (torch.int32, (num_layers, k, f)),
            "a": (torch.float32, (k, f)),
            "y": (torch.float32, (self.y.numel(),)),
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
    """The CPU's share of the experts of all MoE layers. No CUDA graph may call its functions after `close`.

    Args:    kernels: whose threads compute.   layers: for each MoE layer the rows of its experts, each in one piece.
             The row of extra values (the bias of down) is not added: the GPU adds it.
    """

    def __init__(self, kernels: Kernels, layers: Sequence[Sequence[ExpertRows]], buffers: HostShareBuffers) -> None:
        of = buffers
        tensors = (of.x, of.weights, of.experts, of.counts, of.neurons, of.a, of.y)
        self._share: object = kernels.open_share(layers, [each.numpy() for each in tensors])

    def run(self, layer_idx: int) -> None:
        """Computes a layer's share now, in this thread and those of the kernels."""
        _native.run_share(self._opened(), layer_idx)

    def function(self, layer_idx: int) -> tuple[int, int]:
        """Returns the addresses of a C function `void (void*)` that computes a layer's share, and of its argument."""
        return _native.share_function(self._opened(), layer_idx)

    def counts(self) -> HostShareCounts:
        return HostShareCounts(*_native.share_counts(self._opened()))

    def check(self) -> None:
        """Raises the first fault since the last check: MapCutError, or RunError for a wrong request or no memory."""
        found = _native.take_share_fault(self._opened())
        if found is None:
            return
        fault, layer_idx, place_idx = found
        if fault == _CUT:
            raise MapCutError("a file was cut while its map was read")
        if fault == _NO_MEMORY:
            raise RunError("there is no memory for the CPU's part of the experts; free some memory")
        raise RunError(f"MoE layer {layer_idx}, expert {place_idx} of the token: {_WRONG_REQUESTS[fault]}")

    def close(self) -> None:
        """Ends the share and gives back the references."""
        self._share = None

    def _opened(self) -> object:
        assert self._share is not None, "the share is open"
        return self._share


class WorkerCalls:
    """Calls from a CUDA graph that a thread of Python answers, one after the other. Owns the thread: `close` it.

    Args:    counts: int32 [places, k], on the host; a call whose counts are all zero fills `y` with zeros, and is not
             handed to the thread.   y: float32 [d], on the host.   compute: answers the call of a place; must not
             raise.   limit_s: how long a call waits for its answer.
    Raises:  RunError without the native code.
    """

    def __init__(self, counts: Tensor, y: Tensor, compute: Callable[[int], None], limit_s: float) -> None:
        if _native is None:
            raise RunError(f"experts from the disk on a GPU: native kernels {why_unavailable()}; or give more --ram")
        self.limit_s, self._compute = limit_s, compute
        self._calls = _native.open_calls(counts.numpy(), counts.shape[1], y.numpy(), round(1000 * limit_s))
        # Waits in native code, so that it may not keep the interpreter from ending.
        self._thread = threading.Thread(target=self._answer, name="experts", daemon=True)
        self._thread.start()

    def function(self, place: int) -> tuple[int, int]:
        """Returns the addresses of a C function `void (void*)` that calls with a place, and of its argument."""
        return _native.call_function(self._calls, place)

    def take_unanswered(self) -> int | None:
        """Returns the place of the call that was not answered in time since the last time; None if all were.

        After such a call no other is handed over until then.
        """
        return _native.take_call_fault(self._calls)

    def close(self) -> None:
        """Ends the waits and the thread. The functions may still be called until this is freed, and do nothing."""
        _native.close_calls(self._calls)
        self._thread.join()

    def _answer(self) -> None:
        while (place := _native.next_call(self._calls)) is not None:
            self._compute(place)
