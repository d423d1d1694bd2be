"""The native search for trellis codes. What it finds, and its twin in plain torch, are in `calib/trellis_search.py`."""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_pack.formats import RunError
from moe_pack.runtime.native_kernels import InstructionSet, is_available, why_unavailable

if is_available():
    import moe_pack.runtime._native as _native


class TrellisRows(NamedTuple):
    """What is searched: weights, targets, scales float32 [R, n]; importance float32 [n] or [R, n]; factor float32
    [n, n], or None: no feedback; starts u8 [R]."""

    weights: Tensor
    targets: Tensor
    scales: Tensor
    importance: Tensor
    factor: Tensor | None
    starts: Tensor


def search_trellis(
    rows: TrellisRows, width: int, tables: Tensor, num_kept: int, limit: InstructionSet | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes u8 and values float32 [R, num_kept], and windows u8 [R] of rows of 1 to 65,536 columns.

    In the caller's thread alone, without the interpreter's lock: callers run several. `tables`: float32 [2, 128], of
    even columns and of odd ones. `limit` keeps to an older instruction set than the machine's best; all find the same.
    Some 320 bytes a column are held beside what comes back.
    """
    if not is_available():
        raise RunError(f"native kernels {why_unavailable()}")
    num_rows, n = rows.weights.shape
    codes = np.empty((num_rows, num_kept), np.uint8)
    values = np.empty((num_rows, num_kept), np.float32)
    windows = np.empty(num_rows, np.uint8)
    weights, targets, scales, importance = (_array(each) for each in rows[:4])
    factor = None if rows.factor is None else _array(rows.factor)
    starts, looked_up = rows.starts.contiguous().numpy(), _array(tables)
    shape = (limit, n, num_kept, width)
    found = (codes, values, windows)
    _native.search_trellis(*shape, weights, targets, scales, importance, factor, looked_up, starts, *found)
    return torch.from_numpy(codes), torch.from_numpy(values), torch.from_numpy(windows)


def _array(values: Tensor) -> NDArray[np.float32]:
    array: NDArray[np.float32] = values.contiguous().numpy()
    return array
