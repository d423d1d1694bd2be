"""Some consecutive layers of an open pack, as a pack of a smaller model, so that several GPUs have some layers each.

Its layers count from 0. The dense tensors before the first layer and after the last one belong to it only where these
layers are the model's first or last.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from moe_pack.formats.base.errors import RunError
from moe_pack.formats.pack import layouts, safetensors
from moe_pack.formats.pack.reader import Pack
from moe_pack.formats.parts import specs

_EMBED = "embed"


class PackSlice(Pack):
    """The layers `first` to `last`, without `last`, of an open pack, whose files it shares; `close` that one.

    Args:    has_embed: whether it has the embedding even if its first layer is not the model's.
    """

    def __init__(self, whole: Pack, first: int, last: int, has_embed: bool = False) -> None:
        spec, layout = whole.spec, whole.layout
        assert spec.encoder is None and spec.ngrams is None, "GPUs run no such models"
        self.folder, self.whole, self.first, self.last = whole.folder, whole, first, last
        self.begins, self.ends = first == 0, last == spec.num_hidden_layers
        self._readers, self._paths, self._files = whole._readers, whole._paths, whole._files
        self._maps, self._checked = {}, set()
        self.spec = spec.of_layers(first, last)
        begin = sum(layer < first for layer in spec.moe_layers)
        own = self.moe_slice = slice(begin, begin + len(self.spec.moe_layers))
        self.index, self.thresholds = whole.index.of_layers(own.start, own.stop), whole.thresholds[own]
        self.rotation = None if whole.rotation is None else whole.rotation.of_layers(own.start, own.stop)
        self._sources = dict(self._dense_sources(has_embed or self.begins or (self.ends and spec.tied_head)))
        dense_file = safetensors.lay_out(
            [[(name, d.entry.dtype, d.entry.shape)] for name, d in self._sources.items()], layouts.DENSE_ALIGN
        )
        entries = dense_file.by_name()
        self.layout = replace(
            layout,
            spec=self.spec,
            experts=layout.experts[own],
            offsets=layout.offsets[own],
            expert_files=layout.expert_files[own],
            dense=tuple(
                replace(dense, role=replace(dense.role, name=name), entry=entries[name])
                for name, dense in self._sources.items()
            ),
            dense_file=dense_file,
            unused_file=None,
            rotation_bytes=layout.rotation_bytes * len(self.spec.moe_layers) // len(spec.moe_layers),
        )
        manifest = whole.manifest
        self.manifest = replace(
            manifest,
            model=self.spec,
            expert_files=manifest.expert_files[own],
            totals=replace(manifest.totals, dense=dense_file.num_bytes),
        )

    def close(self) -> None:
        """Does nothing: the files are those of the whole pack."""

    def read_file(self, name: str) -> NDArray[np.uint8]:
        """Reads a file without experts, of the dense file the tensors of these layers; raises as `Pack.read_file`."""
        if name != layouts.DENSE_FILE:
            return super().read_file(name)
        self.whole.check_file(name)
        found = np.zeros(self.layout.dense_file.num_bytes, np.uint8)
        for dense in self.layout.dense:
            entry = dense.entry
            found[entry.offset : entry.offset + entry.num_bytes] = self.read_dense(entry, 0, entry.shape[0])
        return found

    def read_dense(self, entry: safetensors.TensorEntry, start: int, stop: int) -> NDArray[np.uint8]:
        """Reads rows of a tensor of the slice's dense file, unchecked."""
        return self.whole.read_dense(self._sources[entry.name].entry, start, stop)

    def _dense_sources(self, has_embed: bool) -> Iterator[tuple[str, layouts.DenseLayout]]:
        """Yields the name of each dense tensor of the slice, and the tensor in the whole pack."""
        for dense in self.whole.layout.dense:
            name = dense.role.name
            if name.startswith("layers."):
                _, layer, role = name.split(".", 2)
                if self.first <= int(layer) < self.last:
                    yield f"layers.{int(layer) - self.first}.{role}", dense
            elif has_embed if name == _EMBED else self.ends:
                yield name, dense


def cuts(spec: specs.ModelSpec) -> tuple[int, ...]:
    """Returns the layers at which a model can be cut, rising: there are layers with experts before and after each.

    It is not cut between an indexer and the layers that share its choice.
    Raises:  RunError if layers depend on their place in the model.
    """
    if (lacked := next(spec.lacks("gpus"), None)) is not None:
        raise RunError(f"--budget: models with {lacked} run on one GPU; give one budget")
    choosers = [(layer, spec.chooser_of(layer)) for layer in range(spec.num_hidden_layers)]
    shared = {cut for layer, chooser in choosers if chooser is not None for cut in range(chooser + 1, layer + 1)}
    return tuple(cut for cut in range(spec.moe_layers[0] + 1, spec.moe_layers[-1] + 1) if cut not in shared)
