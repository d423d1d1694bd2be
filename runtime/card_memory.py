"""What the driver charges this process for a card's memory: context, kernels and libraries included.

It is what nvidia-smi shows, and what a budget is kept against. PyTorch's own figures leave out what others allocated.
"""

import ctypes

import torch


class CardMemory:
    """A card's memory in use by this process. Make it before anything else uses the card.

    What was in use before is others'. Where that cannot be told (the driver's management library is missing, or this
    process used the card before), all that is in use counts as this process's.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        is_first = not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # untyped in torch
        self._nvml = _Nvml.open(device)
        self._before = self._nvml.used_bytes() if self._nvml is not None and is_first else 0

    def used_bytes(self) -> int:
        """Bytes in use by now, once all that was asked of the card is done."""
        torch.cuda.synchronize(self._device)  # what is under way may still take memory
        if self._nvml is not None:
            return self._nvml.used_bytes() - self._before
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free

    def free_bytes(self) -> int:
        """Bytes that nobody uses."""
        free, _ = torch.cuda.mem_get_info(self._device)
        return free


class _MemoryInfo(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _Nvml:
    """The driver's management library, of one card."""

    def __init__(self, library: ctypes.CDLL, handle: ctypes.c_void_p) -> None:
        self._library, self._handle = library, handle

    @classmethod
    def open(cls, device: torch.device) -> "_Nvml | None":
        """The card that torch calls `device`; None where the library is missing or does not know it."""
        try:
            library = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError:
            return None
        handle = ctypes.c_void_p()
        # torch counts the cards that CUDA_VISIBLE_DEVICES leaves, the library all: told apart by their names.
        name = f"GPU-{torch.cuda.get_device_properties(device).uuid}".encode()
        if library.nvmlInit_v2() or library.nvmlDeviceGetHandleByUUID(name, ctypes.byref(handle)):
            return None
        return cls(library, handle)

    def used_bytes(self) -> int:
        """Bytes in use on the card."""
        held = _MemoryInfo()
        fault = self._library.nvmlDeviceGetMemoryInfo(self._handle, ctypes.byref(held))
        assert fault == 0, "the card was there when it was opened"
        return int(held.used)
