"""Takes from a finished pack what another plan for the same checkpoint stores alike: bytes copied, not made again."""

import hashlib
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from moe_pack.convert.account import recipe_account
from moe_pack.convert.recipe import Recipe
from moe_pack.formats import DENSE_FILE, SOURCE_FILE, UNUSED_FILE, Item, Pack, PackError


class Earlier:
    """An earlier pack, and which of a recipe's items it holds already. Owns the open pack: `close` it.

    An expert is held where selector kind, quantizer, all formats and the neuron order are the same, a dense tensor
    where its format and quantizer are. Nothing is where the account of the source or a version is another. That the
    source's weights are the same is not checked: the caller made the earlier pack of this checkpoint.
    Raises:  PackError if the folder holds no sound pack.
    """

    def __init__(self, folder: Path, recipe: Recipe) -> None:
        self._pack = Pack(folder)
        self._recipe = recipe
        held, plan = self._pack.manifest, recipe.plan
        origin = recipe_account(recipe).origin
        same_source = self._pack.read_file(SOURCE_FILE).tobytes() == origin.source and held.model == recipe.layout.spec
        self._is_alike = same_source and (held.made_with, held.quantizer) == (origin.made_with, plan.quantizer)
        self._order = self._pack.read_order() if self._is_alike else None
        self._dense = {dense.role.name: dense for dense in self._pack.layout.dense}
        self._checked: set[str] = set()

    def __enter__(self) -> "Earlier":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the earlier pack."""
        self._pack.close()

    def holds(self, item: Item) -> bool:
        """Whether the item's bytes are there."""
        if not self._is_alike:
            return False
        if item.kind == "unused":
            return True
        return self._holds_dense(item) if item.kind == "dense" else self._holds_expert(item)

    def item_bytes(self, item: Item) -> NDArray[np.uint8]:
        """The bytes of an item that is held, checked against their digest: u8 [item.num_bytes], own memory.

        Raises:  PackError if they are damaged.
        """
        assert self.holds(item), item
        if item.kind == "unused":
            return self._unused_bytes(item)
        if item.kind == "dense":
            return self._dense_bytes(item)
        raw = self._pack.read_extent(item.layer, item.expert)
        if hashlib.sha256(raw.data).digest() != self._pack.index.sha256[item.layer, item.expert].tobytes():
            raise PackError(f"{self._pack.folder}: {item.file}: expert {item.expert}: SHA-256 does not match its bytes")
        return raw

    def _holds_expert(self, item: Item) -> bool:
        recipe, place = self._recipe, (item.layer, item.expert)
        assert self._order is not None, "the earlier pack is alike"
        kept = self._order[place]
        wanted = np.arange(len(kept), dtype=np.uint32) if recipe.order is None else recipe.order[place]
        formats = self._pack.index.experts[item.layer][item.expert]
        same_kind = self._pack.manifest.selector == recipe.plan.selector
        return same_kind and formats == recipe.plan.experts[item.layer][item.expert] and np.array_equal(kept, wanted)

    def _holds_dense(self, item: Item) -> bool:
        wanted = next(dense for dense in self._recipe.layout.dense if dense.role.name == item.role)
        held = self._dense[item.role]
        return (held.dtype, held.rows) == (wanted.dtype, wanted.rows)

    def _dense_bytes(self, item: Item) -> NDArray[np.uint8]:
        self._check(DENSE_FILE)
        entry = self._dense[item.role].entry
        num_rows = item.num_bytes * entry.shape[0] // entry.num_bytes
        return self._pack.read_dense(entry, item.first_row, item.first_row + num_rows)

    def _unused_bytes(self, item: Item) -> NDArray[np.uint8]:
        self._check(UNUSED_FILE)
        return self._pack.read_unused(item.offset, item.num_bytes)

    def _check(self, file: str) -> None:
        """Checks a whole file's digest, once."""
        if file not in self._checked:
            self._pack.check_file(file)
            self._checked.add(file)
