"""The extension built from runtime/cpu/native/ (module.cpp): takes arrays and numbers from `kernels`."""

import numpy as np
from numpy.typing import NDArray

class MapCutError(Exception):
    """A page that was read is no longer in its file, because the file was cut."""

def open_pool(threads: int, limit: str | None, /) -> object: ...
def instruction_set(pool: object, /) -> str: ...
def take_tokens_alone(pool: object, alone: bool, /) -> None: ...
def stitch(rows: tuple[object, ...], num_rows: int, row_bytes: int, /) -> None: ...
def search_trellis(
    limit: str | None,
    steps: int,
    kept: int,
    weights: NDArray[np.float32],
    targets: NDArray[np.float32],
    scales: NDArray[np.float32],
    importance: NDArray[np.float32],
    factor: NDArray[np.float32] | None,
    hashes: NDArray[np.uint8],
    first_levels: NDArray[np.float32],
    second_levels: NDArray[np.float32],
    starts: NDArray[np.uint8],
    codes: NDArray[np.uint8],
    values: NDArray[np.float32],
    ends: NDArray[np.uint8],
    /,
) -> None: ...
def open_reader(memory: NDArray[np.uint8], threads: int, direct: bool, max_read_bytes: int, /) -> object: ...
def add_file(reader: object, descriptor: int, /) -> tuple[int, int]: ...
def row_pieces(
    neurons: NDArray[np.int32],
    has_block: NDArray[np.bool_],
    page_places: NDArray[np.int64],
    begin: int,
    row_bytes: int,
    first_block: int,
    page_blocks: int,
    gap_blocks: int,
    offset: int,
    /,
) -> tuple[bytes, bytes, bytes, bytes]: ...
def submit_reads(
    reader: object,
    file: int,
    offsets: NDArray[np.int64],
    places: NDArray[np.int64],
    sizes: NDArray[np.int64],
    urgent: bool,
    /,
) -> int: ...
def wait_reads(reader: object, ticket: int, /) -> tuple[int, int, int] | None: ...
def are_read(reader: object, ticket: int, /) -> bool: ...
def promote_reads(reader: object, ticket: int, /) -> None: ...
def cancel_reads(reader: object, ticket: int, /) -> bool: ...
def read_stats(reader: object, /) -> tuple[int, int, int, int]: ...
def close_reader(reader: object, /) -> None: ...
def open_layers(num_layers: int, /) -> object: ...
def set_layer(
    layers: object,
    layer: int,
    numbers: NDArray[np.int32],
    floats: NDArray[np.float32],
    vectors: tuple[NDArray[np.float32] | None, ...],
    matrices: tuple[tuple[object, ...] | None, ...],
    /,
) -> None: ...
def set_layer_expert(layers: object, layer: int, expert: int, /, *rows: object) -> None: ...
def run_share(share: object, layer: int, /) -> None: ...
def share_function(share: object, layer: int, /) -> tuple[int, int]: ...
def share_counts(share: object, /) -> tuple[int, int, int, int]: ...
def take_share_fault(share: object, /) -> tuple[int, int, int] | None: ...
