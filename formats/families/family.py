"""What a family says of its checkpoints: how to read the config, and which source tensor plays which role.

The account of a checkpoint: which source tensor is what, where each matrix lies in it, and what is left out.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Literal

from moe_pack.formats import CheckpointError, Matrix, ModelSpec, dense_roles
from moe_pack.formats.families.config import Config


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Source tensors that are not run: a pattern of names (`*` for anything), and the reason.

    `sign` is the name of a tensor without which they are something else, and claimed by nobody. `{n}` in either is
    the number of layers. `copy_of` is the name of a tensor that they must be equal to.
    """

    pattern: str
    reason: str
    sign: str | None = None
    copy_of: str | None = None


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """One way in which checkpoints of a family hold their experts.

    `matrices` has the tensors' names, with `{i}` for the layer and `{e}` for the expert; a name without `{e}` is that
    of a tensor of all experts of the layer, `[E, rows, columns]`. A matrix lies as `[out, in]` (gate and up
    `[f, d]`, down `[d, f]`), or as `[in, out]` if `transposed`. Where gate and up have the same name, the neurons of
    gate come first, or the two take turns if `interleaved`. `biases` has the names of the bias of a matrix, which lie
    alike: `[f]` for gate and up, `[d]` for down. `scales` names the scales of matrices that are in MXFP4 blocks.
    """

    matrices: Mapping[Matrix, str]
    biases: Mapping[Matrix, str] = field(default_factory=dict)
    interleaved: bool = False
    transposed: bool = False
    scales: Mapping[Matrix, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Family:
    """One `model_type`.

    `dense_names` maps roles to source names, with `{i}` for the layer; where a role has several names, a checkpoint has
    one of them. Of several `expert_names` a checkpoint follows one. Where there is an encoder, the roles of its layers
    begin with `encoder.{i}` here, `encoder_expert_names` is its experts', and both stacks' layers count from 0.
    `dropped` says what is not packed, `unused` what the pack keeps though nothing runs it. `ignored_keys` of the config
    change nothing at inference.
    """

    model_type: str
    short_names: Mapping[str, str]
    read_config: Callable[[Config], ModelSpec]
    dense_names: Mapping[str, str | tuple[str, ...]]
    expert_names: tuple[ExpertNames, ...]
    dropped: tuple[LeftOut, ...] = ()
    unused: tuple[LeftOut, ...] = ()
    ignored_keys: frozenset[str] = frozenset()
    encoder_expert_names: tuple[ExpertNames, ...] = ()


SCALE_BLOCK = 128  # rows, and columns, that share a scale of an FP8 matrix
MXFP4_BLOCK = 32  # columns that share a scale of an MXFP4 matrix
SourceCodec = Literal["plain", "fp8", "mxfp4"]
_DTYPES: Mapping[SourceCodec, tuple[str, ...]] = {
    "plain": ("BF16", "F16", "F32"),
    "fp8": ("F8_E4M3",),
    "mxfp4": ("U8",),
}
Tensors = Mapping[str, tuple[str, tuple[int, ...]]]  # dtype and shape of every source tensor, by name

_CONSTANT = LeftOut("*.rotary_emb.inv_freq", "a constant the runtime computes")
_TIED = LeftOut("", "tied: the embedding is the head")


@dataclass(frozen=True, slots=True)
class SourceMatrix:
    """Where a matrix (or a vector: one column) lies in the source, as `[num_rows, num_cols]`.

    Its rows are rows `first_row`, `first_row + row_step`, ... of a tensor, counted flat, of `row_size` values each;
    its columns the values `first_col`, `first_col + col_step`, ... of these. `neurons` tells what an expert's neurons
    are in it: rows, or columns (always as `[f, d]` or `[d, f]`).

    `codec`: what the tensor's values are in, themselves or codes. `scales` is then the tensor of their scales: one for
    128 rows by 128 columns with `fp8`, one for 32 columns with `mxfp4`.
    """

    tensor: str
    first_row: int
    num_rows: int
    num_cols: int
    row_size: int
    row_step: int = 1
    first_col: int = 0
    col_step: int = 1
    neurons: Literal["rows", "columns"] = "rows"
    codec: SourceCodec = "plain"
    scales: str | None = None

    def tensors(self) -> tuple[str, ...]:
        """The tensors it lies in: its own, and that of its scales."""
        return (self.tensor,) if self.scales is None else (self.tensor, self.scales)

    def number(self, row: int, col: int) -> tuple[int, int]:
        """The row and the column of the tensor, counted flat, that hold this value of the matrix."""
        return self.first_row + row * self.row_step, self.first_col + col * self.col_step


ExpertSources = dict[tuple[int, int, Matrix], SourceMatrix]


@dataclass(frozen=True, slots=True)
class Claims:
    """The account of a checkpoint: where each role and each expert's matrix lies, and which tensors are not run.

    `experts`, and `expert_biases` for the matrices that have one, have layer, expert and matrix as their key.
    `unused` and `dropped` give a reason for each: the former are kept in the pack. `copies` names, for some of those
    that are dropped, the tensor that each must be equal to.
    """

    dense: Mapping[str, SourceMatrix]
    experts: Mapping[tuple[int, int, Matrix], SourceMatrix]
    expert_biases: Mapping[tuple[int, int, Matrix], SourceMatrix]
    unused: Mapping[str, str]
    dropped: Mapping[str, str]
    copies: Mapping[str, str]


def claim_tensors(family: Family, spec: ModelSpec, tensors: Tensors, codec: SourceCodec = "plain") -> Claims:
    """Accounts for every source tensor.

    Args:    codec: what the config says that some of them are in.
    Raises:  CheckpointError for a tensor that is missing, misshapen, of a type we cannot read, or claimed by nobody.
    """
    dense = {}
    for role in dense_roles(spec):
        name = _present(_names(family, spec, role.name), tensors)
        cols = role.shape[1] if len(role.shape) == 2 else 1
        source = SourceMatrix(name, 0, role.shape[0], cols, cols)
        if role.quantizable:
            source = _with_scales(source, tensors, codec)
        _check_tensor(name, role.shape, tensors, source.codec)
        dense[role.name] = source
    experts, biases = _claim_experts(family, spec, tensors, codec)
    claimed = {name for held in (dense, experts, biases) for source in held.values() for name in source.tensors()}
    unused, dropped, copies = dict[str, str](), dict[str, str](), dict[str, str]()
    for name in tensors:
        if name in claimed:
            continue
        kept = _first(family.unused, spec, name, tensors)
        if kept is not None:
            unused[name] = kept.reason
            continue
        found = _why_dropped(family, spec, name, tensors)
        dropped[name] = found.reason
        if found.copy_of is not None:
            copies[name] = found.copy_of
    return Claims(dense, experts, biases, unused, dropped, copies)


def _in_stack(spec: ModelSpec, layer: int) -> tuple[bool, int]:
    """Whether a layer is the encoder's, and its number in its stack."""
    num_encoding = 0 if spec.encoder is None else spec.encoder.num_layers
    return layer < num_encoding, layer if layer < num_encoding else layer - num_encoding


def _names(family: Family, spec: ModelSpec, role: str) -> tuple[str, ...]:
    """The source's names of the dense tensor with this role."""
    first, _, rest = role.partition(".")
    number, _, name = rest.partition(".")
    key, layer = role, 0
    if first == "layers":
        is_encoding, layer = _in_stack(spec, int(number))
        key = f"{'encoder' if is_encoding else 'layers'}.{{i}}.{name}"
    assert key in family.dense_names, f"dense_names of family {family.model_type!r} has no role {key!r}"
    names = family.dense_names[key]
    return tuple(name.format(i=layer) for name in ((names,) if isinstance(names, str) else names))


def _present(names: Iterable[str], tensors: Tensors) -> str:
    """The first of `names` that is there, or else the first."""
    names = tuple(names)
    return next((name for name in names if name in tensors), names[0])


def _claim_experts(
    family: Family, spec: ModelSpec, tensors: Tensors, codec: SourceCodec
) -> tuple[ExpertSources, ExpertSources]:
    """The experts' matrices, and their biases."""
    matrices: ExpertSources = {}
    biases: ExpertSources = {}
    for layer in spec.moe_layers:
        spelling = _spelling(family, spec, tensors, layer)
        for matrix in spec.expert.matrices:
            matrices |= _claim_matrix(spec, tensors, spelling, matrix, layer, codec)
        for matrix in spec.expert.bias:
            biases |= _claim_bias(spec, tensors, spelling, matrix, layer)
    return matrices, biases


def _spelling(family: Family, spec: ModelSpec, tensors: Tensors, layer: int) -> ExpertNames:
    """The names that a layer's stack follows, as its first layer with experts shows."""
    is_encoding, _ = _in_stack(spec, layer)
    known = family.encoder_expert_names if is_encoding else family.expert_names
    first = next(number for other in spec.moe_layers for at, number in [_in_stack(spec, other)] if at == is_encoding)
    return next((names for names in known if names.matrices["up"].format(i=first, e=0) in tensors), known[0])


def _claim_matrix(
    spec: ModelSpec, tensors: Tensors, spelling: ExpertNames, matrix: Matrix, layer: int, codec: SourceCodec
) -> ExpertSources:
    """The places of a matrix of all experts of a layer."""
    template, claims = spelling.matrices[matrix], ExpertSources()
    fused, num_experts, (_, number) = "{e}" not in template, spec.router.num_experts, _in_stack(spec, layer)
    for expert in range(num_experts):
        name = template.format(i=number, e=expert)
        source, shape = _matrix_place(spec, spelling, matrix, name, expert if fused else 0)
        whole = (num_experts, *shape) if fused else shape
        if matrix in spelling.scales:
            source = replace(source, codec="mxfp4", scales=spelling.scales[matrix].format(i=number, e=expert))
        elif not fused:
            source = _with_scales(source, tensors, codec)
        if not fused or expert == 0:
            _check_matrix(source, whole, tensors, codec)
        claims[layer, expert, matrix] = source
    return claims


def _claim_bias(spec: ModelSpec, tensors: Tensors, spelling: ExpertNames, matrix: Matrix, layer: int) -> ExpertSources:
    """The places of the bias of a matrix of all experts of a layer."""
    template, claims = spelling.biases[matrix], ExpertSources()
    fused, num_experts, (_, number) = "{e}" not in template, spec.router.num_experts, _in_stack(spec, layer)
    for expert in range(num_experts):
        name = template.format(i=number, e=expert)
        source, shape = _bias_place(spec, spelling, matrix, name, expert if fused else 0)
        if not fused or expert == 0:
            _check_tensor(name, (num_experts, *shape) if fused else shape, tensors)
        claims[layer, expert, matrix] = source
    return claims


def _matrix_place(
    spec: ModelSpec, spelling: ExpertNames, matrix: Matrix, name: str, slot: int
) -> tuple[SourceMatrix, tuple[int, int]]:
    """Where an expert's matrix lies in a tensor whose `slot`-th matrix is its own, and that matrix's shape."""
    d, f = spec.hidden_size, spec.expert.intermediate_size
    first, step, size = _turn(spec, spelling, spelling.matrices, matrix, f)
    if (matrix == "down") == spelling.transposed:
        return SourceMatrix(name, slot * size + first, f, d, d, row_step=step), (size, d)
    place = SourceMatrix(name, slot * d, d, f, size, first_col=first, col_step=step, neurons="columns")
    return place, (d, size)


def _bias_place(
    spec: ModelSpec, spelling: ExpertNames, matrix: Matrix, name: str, slot: int
) -> tuple[SourceMatrix, tuple[int]]:
    """Where an expert's bias lies, as `_matrix_place` has it for a matrix."""
    num_values = spec.hidden_size if matrix == "down" else spec.expert.intermediate_size
    first, step, size = _turn(spec, spelling, spelling.biases, matrix, num_values)
    return SourceMatrix(name, slot * size + first, num_values, 1, 1, row_step=step), (size,)


def _turn(
    spec: ModelSpec, spelling: ExpertNames, names: Mapping[Matrix, str], matrix: Matrix, count: int
) -> tuple[int, int, int]:
    """First and step of `count` neurons among those of all matrices in one tensor, and how many these are."""
    sharing = [other for other in spec.expert.matrices if names.get(other) == names[matrix]]
    place, num_sharing = sharing.index(matrix), len(sharing)
    first, step = (place, num_sharing) if spelling.interleaved else (place * count, 1)
    return first, step, num_sharing * count


def _why_dropped(family: Family, spec: ModelSpec, name: str, tensors: Tensors) -> LeftOut:
    """Why a tensor that nobody claims is not packed."""
    if spec.tied_head and name in _names(family, spec, "head"):
        return _TIED
    found = _first((_CONSTANT, *family.dropped), spec, name, tensors)
    if found is None:
        raise CheckpointError(
            f"checkpoint: tensor {name!r} has no role in the model that config.json describes; the pack would lose it"
        )
    return found


def _first(left_out: tuple[LeftOut, ...], spec: ModelSpec, name: str, tensors: Tensors) -> LeftOut | None:
    """The first pattern that a name follows, or None."""
    n = spec.num_hidden_layers
    for found in left_out:
        is_there = found.sign is None or found.sign.format(n=n) in tensors
        if is_there and fnmatchcase(name, found.pattern.format(n=n)):
            return found
    return None


def _with_scales(source: SourceMatrix, tensors: Tensors, codec: SourceCodec) -> SourceMatrix:
    """A whole tensor's matrix as FP8 where the config says that some are, and this one is; its scales are checked."""
    if codec != "fp8" or tensors.get(source.tensor, ("",))[0] != "F8_E4M3":
        return source
    scales = f"{source.tensor}_scale_inv"
    blocks = (-(-source.num_rows // SCALE_BLOCK), -(-source.num_cols // SCALE_BLOCK))
    _check_tensor(scales, blocks, tensors)
    return replace(source, codec="fp8", scales=scales)


def _check_matrix(source: SourceMatrix, shape: tuple[int, ...], tensors: Tensors, codec: SourceCodec) -> None:
    """Checks the tensor of `shape` that an expert's matrix lies in, and of MXFP4 blocks that of the scales."""
    if source.codec != "mxfp4":
        _check_tensor(source.tensor, shape, tensors, source.codec)
        return
    if codec != "mxfp4":
        raise CheckpointError(
            f"checkpoint: tensor {source.tensor!r} is in MXFP4 blocks, but config.json has no "
            "quantization_config for them"
        )
    if shape[-1] % MXFP4_BLOCK:
        raise CheckpointError(
            f"checkpoint: tensor {source.tensor!r}: config.json gives it rows of {shape[-1]} values, expected a "
            "multiple "
            f"of {MXFP4_BLOCK}"
        )
    assert source.scales is not None, "a matrix in blocks has scales"
    blocks = (*shape[:-1], shape[-1] // MXFP4_BLOCK)
    _check_tensor(source.tensor, (*blocks, MXFP4_BLOCK // 2), tensors, "mxfp4")
    _check_tensor(source.scales, blocks, tensors, "mxfp4")


def _check_tensor(name: str, expected: tuple[int, ...], tensors: Tensors, codec: SourceCodec = "plain") -> None:
    if name not in tensors:
        raise CheckpointError(f"checkpoint: tensor {name!r} is missing")
    dtype, shape = tensors[name]
    if shape != expected:
        raise CheckpointError(f"checkpoint: tensor {name!r} has shape {list(shape)}, expected {list(expected)}")
    if dtype not in _DTYPES[codec]:
        one_of = "one of " if len(_DTYPES[codec]) > 1 else ""
        raise CheckpointError(f"checkpoint: tensor {name!r} is {dtype}, expected {one_of}{', '.join(_DTYPES[codec])}")
