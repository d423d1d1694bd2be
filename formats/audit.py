"""`verify` without a source: every byte of a pack proved, by SHA-256 and row CRCs, with nothing decoded."""

import hashlib

from moe_pack.formats.errors import PackError
from moe_pack.formats.layout import DENSE_FILE
from moe_pack.formats.manifest import SOURCE_FILE
from moe_pack.formats.pack import Pack
from moe_pack.formats.progress import NO_PROGRESS, Progress, Stage
from moe_pack.formats.rows import check_rows
from moe_pack.formats.source_account import read_account


def audit(pack: Pack, progress: Progress = NO_PROGRESS) -> None:
    """Checks everything that opening a pack and running it leave unchecked.

    Whole files by SHA-256; each extent by CRC-32 and SHA-256, each of its rows by CRC-32, row padding, and the padding
    between extents; the neuron order; the source account; rows of quantized dense matrices.

    Raises:  PackError with the first fault.
    """
    progress.begin(Stage("checking", pack.manifest.totals.content, "B"))
    for file in pack.manifest.files:
        pack.check_file(file.name)
        progress.advance(file.bytes)
    pack.read_order()
    read_account(pack.read_file(SOURCE_FILE).tobytes())
    _check_dense_rows(pack)
    for layer_idx, held in enumerate(pack.layout.expert_files):
        progress.advance(len(held.header))
        for expert, layout in enumerate(pack.layout.experts[layer_idx]):
            _check_expert(pack, layer_idx, expert)
            progress.advance(layout.num_bytes)
        for padding in pack.padding(layer_idx):
            if pack.read_range(layer_idx, padding).any():
                raise PackError(f"{pack.manifest.expert_files[layer_idx].name}: {padding.name} is not zero")
            progress.advance(padding.num_bytes)
    progress.end()


def _check_expert(pack: Pack, layer_idx: int, expert: int) -> None:
    place = f"{pack.manifest.expert_files[layer_idx].name}: expert {expert}"
    extent = pack.read_extent(layer_idx, expert)
    if hashlib.sha256(extent.data).digest() != pack.index.sha256[layer_idx, expert].tobytes():
        raise PackError(f"{place}: SHA-256 does not match the index; the file is damaged")
    layout = pack.layout.experts[layer_idx][expert]
    records = extent[layout.selector_bytes : layout.selector_bytes + layout.records_bytes]
    if layout.selector is not None:
        selector = extent[: layout.selector_bytes].reshape(layout.num_rows, -1)
        check_rows(layout.selector, selector, f"{place}: selector")
    check_rows(layout.records, records.reshape(layout.num_rows, -1), f"{place}: records")
    if layout.extra is not None:
        check_rows(layout.extra, extent[-layout.extra_bytes :].reshape(1, -1), f"{place}: extra")


def _check_dense_rows(pack: Pack) -> None:
    quantized = [dense for dense in pack.layout.dense if dense.rows is not None]
    if not quantized:
        return
    held = pack.read_file(DENSE_FILE)
    for dense in quantized:
        assert dense.rows is not None, "filtered above"
        raw = held[dense.entry.offset : dense.entry.offset + dense.entry.num_bytes]
        check_rows(dense.rows, raw.reshape(dense.entry.shape), f"{DENSE_FILE}: {dense.role.name}")
