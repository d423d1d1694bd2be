"""What a pack's experts add to their outputs whichever neurons run, for tables that a device has of all of them."""

import numpy as np
import torch
from torch import Tensor

from moe_pack.formats import Pack, check_rows


def down_biases(pack: Pack, layer_idx: int) -> Tensor | None:
    """The biases of down of a layer's experts, float32 [E, d] in host memory; None where the family has none.

    Raises:  PackError if they are damaged or cannot be read.
    """
    extra = pack.layout.experts[layer_idx][0].extra
    if extra is None:
        return None
    entries = {entry.name: entry for entry in pack.layout.expert_files[layer_idx].entries}
    place, num_experts = pack.manifest.expert_files[layer_idx].name, len(pack.layout.experts[layer_idx])
    rows = np.stack([pack.read_range(layer_idx, entries[f"{expert}.extra"]) for expert in range(num_experts)])
    check_rows(extra, rows, f"{place}: biases of down")
    return torch.from_numpy(rows[:, : extra.crc_offset].copy()).view(torch.float32)
