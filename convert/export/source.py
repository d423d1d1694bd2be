"""The checkpoint that a pack came from, and the tensors of an export.

`SourceModel` reads the pack's `config.json` and `source.json`. `exported_tensors` lists the tensors of a checkpoint in
16 or 32 bit: a source that was quantized gets the names and shapes that the family has for plain weights.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from moe_pack import formats
from moe_pack.convert.options import Dtype
from moe_pack.formats.families import claiming
from moe_pack.formats.families.encodings import WORD_BITS
from moe_pack.formats.families.family import Config, ExpertNames, Family
from moe_pack.formats.families.registry import read_spec
from moe_pack.formats.pack import manifests
from moe_pack.formats.parts.specs import with_repeats

CONFIG_FILE = "config.json"
_TIED = "tie_word_embeddings"
STORED_AS: Mapping[Dtype, str] = {"bf16": "BF16", "f16": "F16", "f32": "F32"}
_SHORT = ("BF16", "F16")


@dataclass(frozen=True, slots=True, eq=False)
class SourceModel:
    """The checkpoint of a pack: its config, its family, its spec, its tensors by name, and where each role lay."""

    config: dict[str, Any]
    family: Family
    spec: formats.ModelSpec
    tensors: Mapping[str, manifests.SourceTensor]
    claims: claiming.Claims

    @classmethod
    def of(cls, pack: formats.Pack) -> "SourceModel":
        """Reads the checkpoint of a pack.

        Raises:  RunError for a synthetic pack; PackError if config and account do not describe the pack's model.
        """
        if pack.is_synthetic:
            raise formats.RunError(
                f"{pack.folder}: is synthetic; its weights are random, so there is nothing to export"
            )
        if not pack.has(CONFIG_FILE):
            raise formats.PackError(
                f"{pack.folder}: has no {CONFIG_FILE}, which an export needs; convert the model again"
            )
        raw = pack.read_file(CONFIG_FILE).tobytes()
        values = formats.parse(raw, CONFIG_FILE, formats.PackError, is_foreign=True)
        family, spec, quantization = read_spec(Config(values, CONFIG_FILE))
        account = {
            tensor.name: tensor
            for tensor in manifests.read_account(pack.read_file(manifests.SOURCE_FILE).tobytes()).tensors
        }
        shapes = {name: (tensor.dtype, tensor.shape) for name, tensor in account.items()}
        spec = claiming.spec_of_tensors(family, spec, shapes)
        if (head := claiming.second_head(family, spec, shapes)) is not None and account[head].fate != "dropped":
            spec = replace(spec, tied_head=False)  # the checkpoint's tensors, and not its config, said so
        if with_repeats(spec, pack.spec.expert.repeats) != pack.spec:
            raise formats.PackError(
                f"{CONFIG_FILE}: describes another model than the pack's manifest; convert the model again"
            )
        claims = claiming.claim_tensors(family, spec, shapes, quantization)
        return cls(json.loads(raw), family, spec, account, claims)

    def shapes(self) -> claiming.Tensors:
        """Returns dtype and shape of each tensor, by name."""
        return {name: (tensor.dtype, tensor.shape) for name, tensor in self.tensors.items()}

    def plain_config(self) -> dict[str, Any]:
        """Returns the config without the encoding of quantized tensors, in the objects of all its models.

        The embedding is no longer the head if the model has another one and this changes nothing else.
        """
        plain = _without(self.config, "quantization_config")
        if read_spec(Config(plain, CONFIG_FILE))[1].tied_head == self.spec.tied_head:
            return plain
        untied = {**_untied(plain), _TIED: False}
        found = claiming.spec_of_tensors(self.family, read_spec(Config(untied, CONFIG_FILE))[1], self.shapes())
        return untied if found == self.spec else plain

    def lost(self) -> dict[str, int]:
        """Returns how many tensors a pack does not keep and an export cannot give back, by reason."""
        kept = self.claims.copies.keys() | self.claims.constants.keys()
        reasons = [reason for name, reason in self.claims.dropped.items() if name not in kept]
        return {reason: reasons.count(reason) for reason in dict.fromkeys(reasons)}


def _without(values: dict[str, Any], key: str) -> dict[str, Any]:
    kept = ((name, value) for name, value in values.items() if name != key)
    return {name: _without(value, key) if isinstance(value, dict) else value for name, value in kept}


def _untied(values: dict[str, Any]) -> dict[str, Any]:
    inner = {key: _untied(value) for key, value in values.items() if isinstance(value, dict)}
    return {**values, **inner, **({_TIED: False} if _TIED in values else {})}


def exported_tensors(
    pack: formats.Pack, model: SourceModel, dtype: Dtype | None, *, by_expert: bool = False
) -> claiming.Tensors:
    """Returns dtype and shape of each tensor of the plain checkpoint, by name.

    Meaning: matrices that the pack may quantize get `dtype`; without one, 16 bits: the source's dtype, or bfloat16 for
             those in 32 bit or in codes. A dense tensor that the pack has as it was, and any vector, keeps its dtype.
    Args:    by_expert: each matrix of an expert is a tensor, `[out, in]`, as families name it that know such names.
    Raises:  RunError if the family knows no such names.
    """
    tensors = _expert_tensors(model, dtype, by_expert)
    experts = {**model.claims.experts, **model.claims.expert_biases}
    of_experts = {name for source in experts.values() for name in (source.tensor, source.scales)}
    for name, (kind, shape, source) in _dense_tensors(pack, model, dtype).items():
        assert name not in of_experts, f"{name}: dense and an expert's"
        if source.codec == "packed":  # with a word for several columns
            shape = (*shape[:-1], shape[-1] * WORD_BITS // source.num_bits)
        tensors[name] = (kind, shape)
    tables = (source.tensor for pieces in model.claims.tables.values() for source in pieces)
    as_it_was = model.shapes()
    tensors |= {name: as_it_was[name] for name in (*tables, *model.claims.unused, *model.claims.constants)}
    for name, original in model.claims.copies.items():
        tensors[name] = tensors[original] if original in tensors else as_it_was[original]
    return tensors


def _dense_tensors(
    pack: formats.Pack, model: SourceModel, dtype: Dtype | None
) -> dict[str, tuple[str, tuple[int, ...], claiming.SourceMatrix]]:
    """Returns for each tensor of dense roles its dtype, and the shape and a place that it had in the source."""
    tensors: dict[str, tuple[str, tuple[int, ...], claiming.SourceMatrix]] = {}
    for dense in pack.layout.dense:
        source = model.claims.dense[dense.role.name]
        found = model.tensors[source.tensor]
        kind = found.dtype if source.codec == "plain" else "BF16"
        if dense.role.quantizable and dtype is not None:
            kind = STORED_AS[dtype]
        elif dense.rows is not None and kind not in _SHORT:
            kind = "BF16"
        tensors[plain_name(source)] = (kind, found.shape, source)
    return tensors


def plain_name(source: claiming.SourceMatrix) -> str:
    """Returns the name that the tensor of a matrix has in a checkpoint without codes."""
    return source.tensor.removesuffix("_packed") if source.codec == "packed" else source.tensor


def _expert_tensors(model: SourceModel, dtype: Dtype | None, by_expert: bool) -> dict[str, tuple[str, tuple[int, ...]]]:
    tensors = dict[str, tuple[str, tuple[int, ...]]]()
    for layer in model.spec.moe_layers:
        spelling = _plain_spelling(model, layer, by_expert)
        of_biases = {source.tensor for source in model.claims.expert_biases.values()}
        for name, shape in claiming.expert_tensors(model.spec, spelling, layer).items():
            found = model.tensors.get(name)
            if found is not None:
                shape = found.shape  # experts that return their input may have rows too
            usual = found.dtype if found is not None and (found.dtype in _SHORT or name in of_biases) else "BF16"
            tensors[name] = (usual if dtype is None or name in of_biases else STORED_AS[dtype], shape)
    return tensors


def _plain_spelling(model: SourceModel, layer: int, by_expert: bool) -> ExpertNames:
    """Returns the names of a layer's experts without codes: the source's if it has such names.

    If checkpoints without codes have all experts of a layer in one tensor, they are so here, whatever a source in codes
    or a GGUF file has: transformers reads no other.
    """
    own = claiming.expert_spelling(model.family, model.spec, model.shapes(), layer)
    known = claiming.known_spellings(model.family, model.spec, layer)
    if _is_by_expert(own) and not by_expert and not _is_by_expert(known[0]):
        own = known[0]
    for names in (own, *known):
        if not names.scales and not names.of_gguf and (not by_expert or _is_by_expert(names)):
            return names
    needed = "experts in 16 bit; this cannot be exported"
    if by_expert:
        needed = "each expert's matrices, which vLLM's codes need; use --to safetensors"
    raise formats.RunError(f"checkpoints of family {model.family.model_type!r} have no names for {needed}")


def _is_by_expert(names: ExpertNames) -> bool:
    return not names.transposed and all("{e}" in name for name in names.matrices.values())


@dataclass(frozen=True, slots=True)
class Owner:
    """The role of a place in a tensor: a dense role, or a matrix or a bias of an expert of a layer."""

    kind: Literal["dense", "matrix", "bias"]
    name: str
    layer: int = -1
    expert: int = -1


def owners(claims: claiming.Claims) -> Iterator[tuple[Owner, claiming.SourceMatrix]]:
    """Yields the owner of each place in the tensors of a checkpoint; a tensor that is a copy has its original's."""
    copies: dict[str, list[str]] = {}
    for name, original in claims.copies.items():
        copies.setdefault(original, []).append(name)
    for role, source in claims.dense.items():
        yield Owner("dense", role), source
        for name in copies.get(source.tensor, ()):
            yield Owner("dense", role), replace(source, tensor=name)
    for (layer, expert, matrix), source in claims.experts.items():
        yield Owner("matrix", matrix, layer, expert), source
    for (layer, expert, matrix), source in claims.expert_biases.items():
        yield Owner("bias", matrix, layer, expert), source
