"""What the driver charges this process for a card's memory: context, kernels and libraries included.

It is what nvidia-smi shows, and what a budget is kept against. PyTorch's own figures leave out what others allocated.
"""

import ctypes
from dataclasses import dataclass

import torch

_NAME_BYTES = 96  # of a card's UUID, as the library writes it


class CardMemory:
    """A card's memory in use by this process. Make it before anything else uses the card.

    What was in use before is others'. Where that cannot be told (the driver's management library is missing, or this
    process used the card before), all that is in use counts as this process's.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Before torch is asked for anything, which might make the context that is to be counted.
        cards = [] if torch.cuda.is_initialized() else _cards()  # type: ignore[no-untyped-call]  # untyped in torch
        # torch counts the cards that CUDA_VISIBLE_DEVICES leaves, the library all: told apart by their names.
        name = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        self._card = next((card for card in cards if card.name == name), None)

    def used_bytes(self) -> int:
        """Bytes in use by now, once all that was asked of the card is done."""
        torch.cuda.synchronize(self._device)  # what is under way may still take memory
        if self._card is not None:
            return self._card.used_bytes() - self._card.before_bytes
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free

    def free_bytes(self) -> int:
        """Bytes that nobody uses."""
        free, _ = torch.cuda.mem_get_info(self._device)
        return free


class _MemoryInfo(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


@dataclass(slots=True)
class _Card:
    """A card as the driver's management library knows it. `before_bytes`: in use when it was found."""

    library: ctypes.CDLL
    handle: ctypes.c_void_p
    name: str
    before_bytes: int = 0

    def used_bytes(self) -> int:
        """Bytes in use."""
        held = _MemoryInfo()
        fault = self.library.nvmlDeviceGetMemoryInfo(self.handle, ctypes.byref(held))
        assert fault == 0, "the card was there when it was found"
        return int(held.used)


def _cards() -> list[_Card]:
    """All cards; none where the library is missing."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return []
    count = ctypes.c_uint()
    if library.nvmlInit_v2() or library.nvmlDeviceGetCount_v2(ctypes.byref(count)):
        return []
    found = []
    for idx in range(count.value):
        handle, name = ctypes.c_void_p(), ctypes.create_string_buffer(_NAME_BYTES)
        if library.nvmlDeviceGetHandleByIndex_v2(idx, ctypes.byref(handle)):
            continue  # a card that this process may not use
        if not library.nvmlDeviceGetUUID(handle, name, _NAME_BYTES):
            card = _Card(library, handle, name.value.decode())
            card.before_bytes = card.used_bytes()
            found.append(card)
    return found
