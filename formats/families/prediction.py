"""The prediction layer of a pack: a decoder layer that predicts a further token, which a draft runs.

It has norms of its own and a projection (DeepSeek-V3, 2412.19437, section 2.2, calls it a module for multi-token
prediction). Packs keep its tensors in `unused-000.safetensors`, under the checkpoint's names and in its bytes. With the
checkpoint's `config.json` they say which family's names to look for. docs/model.md has the names.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from moe_pack import formats
from moe_pack.formats import parts
from moe_pack.formats.base import json_files
from moe_pack.formats.families import claiming
from moe_pack.formats.families.encodings import Quantization
from moe_pack.formats.families.family import Config, DenseNames, Family, PredictionNames
from moe_pack.formats.families.registry import read_spec
from moe_pack.formats.families.source_reader import SourceReader
from moe_pack.formats.pack.layouts import UNUSED_FILE
from moe_pack.formats.pack.safetensors import TensorEntry
from moe_pack.formats.parts.specs import with_repeats

_CONFIG = "config.json"
PROJECT, EMBED_NORM, HIDDEN_NORM = "project", "embed_norm", "hidden_norm"  # roles that only this layer has


class PredictionLayer(SourceReader):
    """The prediction layer of an open pack, as a model of one layer. The pack stays the caller's."""

    def __init__(self, pack: formats.Pack, family: Family, names: PredictionNames, quantization: Quantization) -> None:
        self.pack = pack
        # One layer with attention and experts, as those of the model; its norm is the one before the head.
        one = replace(pack.spec, num_hidden_layers=1, moe_layers=(0,), mixer=None, halves=None)
        self.spec = with_repeats(replace(one, dense_intermediate_size=None), 0)
        self._entries = _kept(pack)
        tensors = {name: (entry.dtype, entry.shape) for name, entry in self._entries.items()}
        own = _layer_family(family, names, pack.spec.num_hidden_layers, tensors)
        # A layer's (`layers.0.…`), `norm`, `project` [d, 2d], `embed_norm` and `hidden_norm`; `embed` and `head` if the
        # checkpoint has them for this layer too.
        self.roles = {role.name: role for role in _roles(self.spec, own)}
        try:
            places = claiming.claim_parts(own, self.spec, tuple(self.roles.values()), tensors, quantization)
            self.dense, self._experts = places
        except formats.CheckpointError as fault:
            raise formats.PackError(f"{UNUSED_FILE}: the prediction layer cannot run: {fault}") from fault

    @classmethod
    def find(cls, pack: formats.Pack) -> "PredictionLayer | None":
        """Returns the prediction layer of a pack; None if the pack has none, or none that the runtime can run.

        Raises:  PackError if its tensors are not those of a layer of the model, or `config.json` is damaged.
        """
        if not pack.has(UNUSED_FILE) or not pack.has(_CONFIG) or not drafts_for(pack.spec):
            return None
        values = json_files.parse(pack.read_file(_CONFIG).tobytes(), _CONFIG, formats.PackError, is_foreign=True)
        try:
            family, _, quantization = read_spec(Config(values, _CONFIG))
        except formats.CheckpointError as fault:
            raise formats.PackError(str(fault)) from fault
        entries, n = _kept(pack), pack.spec.num_hidden_layers
        found = (names for names in family.prediction if names.project.format(n=n) in entries)
        names = next(found, None)
        return None if names is None else cls(pack, family, names, quantization)

    def entry(self, tensor: str) -> TensorEntry:
        """Returns what the file's header says about a tensor."""
        return self._entries[tensor]

    def raw(self, tensor: str, start: int, num_bytes: int) -> NDArray[np.uint8]:
        """Reads `num_bytes` of a tensor, from byte `start` on: u8, own memory, unchecked (`check`).

        Raises:  PackError if the file cannot be read.
        """
        entry = self._entries[tensor]
        assert 0 <= start <= start + num_bytes <= entry.num_bytes, (tensor, start, num_bytes)
        return self.pack.read_unused(entry.offset + start, num_bytes)

    def expert_source(self, expert: int, matrix: formats.Matrix) -> claiming.SourceMatrix:
        """Returns the place of a matrix of a routed expert."""
        return self._experts[0, expert, matrix]

    def check(self) -> None:
        """Checks the bytes of the file that has the layer. Raises PackError if they are damaged."""
        self.pack.check_file(UNUSED_FILE)


def _kept(pack: formats.Pack) -> dict[str, TensorEntry]:
    """Returns the tensors that a pack keeps but does not run, by name."""
    file = pack.layout.unused_file
    entries = () if file is None else file.entries
    return {entry.name: entry for entry in entries if not entry.name.startswith("pad.")}


def drafts_for(spec: formats.ModelSpec) -> bool:
    """Returns whether a layer of the model can stand alone: with one residual stream and one kind of attention."""
    is_same = len(set(map(spec.attention.window, range(spec.num_hidden_layers)))) == 1
    return spec.residual is None and spec.encoder is None and not spec.others and is_same and not spec.needs_ids


def _roles(spec: formats.ModelSpec, family: Family) -> Iterator[parts.DenseRole]:
    """Yields the roles of the layer's dense tensors; of embedding and head, those that the family has names for."""
    for role in formats.dense_roles(spec):
        if role.name not in ("embed", "head") or role.name in family.dense_names:
            yield role
        if role.name == "norm":
            yield replace(role, name=EMBED_NORM)
            yield replace(role, name=HIDDEN_NORM)
    yield parts.DenseRole(PROJECT, (spec.hidden_size, 2 * spec.hidden_size), True)


def _layer_family(family: Family, names: PredictionNames, n: int, tensors: claiming.Tensors) -> Family:
    """Returns a family whose layer 0 has the names of the prediction layer behind `n` decoder layers."""

    def named(name: str) -> str:
        return name.replace(names.stack, names.layer.format(n=n), 1)

    own = {"norm": names.norm, PROJECT: names.project, EMBED_NORM: names.embed_norm, HIDDEN_NORM: names.hidden_norm}
    for role, name in (("embed", names.embed), ("head", names.head)):
        if name is not None and name.format(n=n) in tensors:
            own[role] = name
    dense_names: dict[str, DenseNames] = {role: name.format(n=n) for role, name in own.items()}
    for role, ways in family.ways.items():
        of_layer = tuple(replace(way, name=named(way.name)) for way in ways if way.name.startswith(names.stack))
        if role.startswith("layers.") and of_layer:
            dense_names[role] = of_layer
    experts = tuple(known.renamed(named) for known in family.expert_names if names.stack in known.matrices["up"])
    return replace(family, dense_names=dense_names, expert_names=experts)
