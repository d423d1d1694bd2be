"""Sequential calibration: the inputs of a layer behind the stored layers before it, while a pack is written.

`StoredInputs` takes the profile's sequences through the pack as far as it is written: it reads dense tensors and
experts back from the files. A layer's experts can be made when all of the layers before are on disk. Hidden states
between layers lie in a folder in the pack's folder, so that a killed conversion continues, until the pack is complete.
"""

import shutil
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_pack import formats
from moe_pack.calib import forward
from moe_pack.convert.account import Recipe
from moe_pack.formats.base.commands import Part
from moe_pack.formats.pack import layouts
from moe_pack.runtime import model
from moe_pack.runtime.model import pack_weights
from moe_pack.runtime.model.compute import RowTable
from moe_pack.runtime.model.compute.expert import resting_output
from moe_pack.runtime.model.compute.rotation import Rotation
from moe_pack.runtime.model.compute.weights import from_experts, to_experts

STATES_FOLDER = "sequential"
_CPU = torch.device("cpu")


class StoredInputs:
    """The inputs of one layer after another behind a pack's stored layers. One thread at a time may enter a layer.

    Args:    recipe: sequential.   folder: of the pack.   workers: threads.   part: of several processes; each takes all
             sequences through the layers, because a layer's pass takes little compared with its experts' quantization.
    """

    def __init__(self, recipe: Recipe, folder: Path, workers: int, part: Part | None = None) -> None:
        assert recipe.calibration is not None, "a sequential recipe has a profile"
        self._profile = recipe.calibration
        self._spec = recipe.layout.spec
        self._folder = folder / (STATES_FOLDER if part is None else f"{STATES_FOLDER}{part.suffix}")
        self._weights = forward.LayerwiseWeights(_UnfinishedPack(recipe, folder))
        self._workers = workers
        self._states: forward.LayerStates | None = None
        self._entered: tuple[int, forward.LayerTokens] | None = None  # the MoE layer, and its tokens up to its experts

    def of_layer(self, layer_idx: int) -> Tensor:
        """Returns the inputs of the MoE layer that was entered last, float32 [T, d]."""
        assert self._entered is not None and self._entered[0] == layer_idx, "a layer is entered before it is made"
        return self._entered[1].expert_inputs(slice(None))

    @torch.inference_mode()
    def enter_layer(self, layer_idx: int) -> None:
        """Takes all sequences up to the experts of a MoE layer; all experts before are on disk."""
        last = self._spec.moe_layers[layer_idx]
        if self._states is None:
            self._states = self._begun(last)
        states = self._states
        if self._entered is not None:
            self._leave(states, *self._entered)
            self._entered = None
        while states.next_layer <= last:
            layer = states.next_layer
            tokens = states.enter(layer)
            if layer == last:
                self._entered = layer_idx, tokens
                return
            if layer in self._spec.moe_layers:  # made by an earlier run
                self._leave(states, self._spec.moe_layers.index(layer), tokens)
            else:
                states.leave(layer, tokens)
            del tokens  # otherwise two layers' tokens are in memory while the next layer is entered

    def remove(self) -> None:
        """Removes the hidden states from the disk."""
        self._entered = None
        if self._folder.exists():
            shutil.rmtree(self._folder)

    def remove_all(self) -> None:
        """Removes the hidden states of all parts from the disk."""
        for folder in self._folder.parent.glob(f"{STATES_FOLDER}*"):
            shutil.rmtree(folder, ignore_errors=True)  # a part that is late may still write there

    def _begun(self, last: int) -> forward.LayerStates:
        """Returns the sequences between layers, where an earlier run has left them."""
        given = forward.Sequences.of(self._spec, torch.from_numpy(self._profile.kept_sequences().astype(np.int64)))
        beginning = given.embedded(self._weights)

        def states() -> forward.LayerStates:
            return forward.LayerStates(
                self._weights, beginning, len(given.ids), given.length, self._folder, _CPU, workers=self._workers
            )

        found = states()
        if found.next_layer > last:  # of experts that are no longer on disk
            found.close()
            found = states()
        return found

    def _leave(self, states: forward.LayerStates, layer_idx: int, tokens: forward.LayerTokens) -> None:

        def work(expert: int) -> tuple[Tensor, Tensor, Tensor]:
            token_idx, router_weights = tokens.of_expert(expert)
            stored = self._weights.expert(layer_idx, expert)
            x = to_experts(tokens.expert_inputs(token_idx), self._weights, layer_idx)
            y = resting_output(x, stored)
            for block in stored.blocks():
                y.addmm_(model.activations(x, block, self._spec.expert_function(layer_idx)).h, block.down)
            return token_idx, router_weights, from_experts(y, self._weights, layer_idx)

        for added in forward.in_order(work, range(self._spec.router.num_experts), self._workers):
            states.add(tokens, *added)
        states.leave(self._spec.moe_layers[layer_idx], tokens)


class _UnfinishedPack:
    """The weights of a pack whose dense part and first layers are on disk, in which all neurons run."""

    def __init__(self, recipe: Recipe, folder: Path) -> None:
        self.spec: formats.ModelSpec = recipe.layout.spec
        self.selector: formats.Selector = "none"
        self.operations = model.TORCH
        self._source = model.CheckpointWeights(recipe.checkpoint)
        self._layout = recipe.layout
        self._folder = folder
        self.dense = {dense.role.name: dense for dense in recipe.layout.dense}
        self._vectors = recipe.rotation

    def vector(self, role: str) -> Tensor:
        return pack_weights.stored_vector(self.dense[role], self._rows(role, 0, self.dense[role].entry.shape[0]))

    def matrix(self, role: str) -> model.Matrix:
        return _UnfinishedMatrix(self, role)

    def load(self, role: str) -> model.Matrix:
        return self.rows_of(role, 0, self.dense[role].role.shape[0])

    def rows_of(self, role: str, start: int, stop: int) -> model.Matrix:
        return pack_weights.stored_matrix(self.dense[role], self._rows(role, start, stop), self.operations)

    def expert(self, layer_idx: int, expert: int) -> model.Expert:
        layout = self._layout.experts[layer_idx][expert]
        offset = self._layout.offsets[layer_idx][expert]
        raw = self._read(layouts.experts_file(self.spec.moe_layers[layer_idx]), offset, layout.num_bytes)
        return model.PackedExpert(layout, raw, self.operations)

    def threshold(self, layer_idx: int, expert: int) -> float:
        return 0.0

    def rotation(self, layer_idx: int) -> Rotation | None:
        vectors = self._vectors
        if vectors is None or not vectors.is_rotated(layer_idx):
            return None
        return Rotation(torch.from_numpy(vectors.input[layer_idx]), torch.from_numpy(vectors.output[layer_idx]))

    def ngram_table(self, layer: int) -> RowTable:
        return self._source.ngram_table(layer)

    def _rows(self, role: str, start: int, stop: int) -> Tensor:
        entry = self.dense[role].entry
        row_bytes = entry.num_bytes // entry.shape[0]
        return self._read(layouts.DENSE_FILE, entry.offset + start * row_bytes, (stop - start) * row_bytes)

    def _read(self, file: str, offset: int, num_bytes: int) -> Tensor:
        with formats.RangeReader(self._folder / file, formats.ConversionError) as reader:
            raw: NDArray[np.uint8] = reader.read(offset, num_bytes)
        return torch.from_numpy(raw)


class _UnfinishedMatrix:
    def __init__(self, weights: _UnfinishedPack, role: str) -> None:
        self._weights = weights
        self._role = role
        self.num_rows, self.num_cols = weights.dense[role].role.shape

    def rows(self, start: int, stop: int) -> Tensor:
        return self._weights.rows_of(self._role, start, stop).rows(0, stop - start)
