"""The account of a checkpoint by its family's facts: the place of every matrix, and why other tensors are not run."""

import itertools
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Literal

from moe_pack import formats
from moe_pack.formats.families import encodings
from moe_pack.formats.families.family import ExpertNames, Family, LeftOut, Stored
from moe_pack.formats.parts import DenseRole, part

_DTYPES: Mapping[encodings.SourceCodec | Literal["integers"], tuple[str, ...]] = {
    "plain": part.FLOAT_DTYPES,
    "integers": part.INTEGER_DTYPES,
    "fp8": ("F8_E4M3",),
    "mxfp4": ("U8",),
    "packed": ("I32",),
}
Tensors = Mapping[str, tuple[str, tuple[int, ...]]]  # dtype and shape of every source tensor, by name
_CONSTANT = LeftOut("*.rotary_emb.inv_freq", "a constant the runtime computes")


@dataclass(frozen=True, slots=True)
class SourceMatrix:
    """The place of a matrix (or of a vector: one column) in the source, as `[num_rows, num_cols]`.

    Its rows are rows `first_row`, `first_row + row_step`, ... of a tensor, counted flat, of `row_size` values each; its
    columns are the values `first_col`, `first_col + col_step`, ... of these.
    """

    tensor: str
    first_row: int
    num_rows: int
    num_cols: int
    row_size: int
    row_step: int = 1
    first_col: int = 0
    col_step: int = 1
    neurons: Literal["rows", "columns"] = "rows"  # of an expert's matrix: rows `[f, d]`, columns `[d, f]`
    codec: encodings.SourceCodec = "plain"
    # For codes, the tensor of their scales: one for 128 rows by 128 columns with `fp8`, one for 32 columns with
    # `mxfp4`, one for `group_size` columns with `packed`.
    scales: str | None = None
    num_bits: int = 0  # of a `packed` code
    group_size: int = 0
    transposed: bool = False  # it is instead the whole tensor, `[num_cols, num_rows]`

    @property
    def is_kept(self) -> bool:
        """Whether the values are codes that a format of packs keeps."""
        return self.codec in ("fp8", "mxfp4")

    def number(self, row: int, col: int) -> tuple[int, int]:
        """Returns row and column, in the tensor counted flat, of a value of the matrix."""
        if self.transposed:
            return col, row
        return self.first_row + row * self.row_step, self.first_col + col * self.col_step


ExpertSources = dict[tuple[int, int, formats.Matrix], SourceMatrix]  # by decoder layer, expert and matrix


@dataclass(frozen=True, slots=True)
class Claims:
    """The account of a checkpoint."""

    dense: Mapping[str, SourceMatrix]  # by role
    experts: ExpertSources
    expert_biases: ExpertSources  # of matrices that have one
    unused: Mapping[str, str]  # the reason for each tensor that is kept in the pack
    dropped: Mapping[str, str]  # the reason for each that is not
    copies: Mapping[str, str]  # for some dropped tensors, the tensor that each must be equal to
    # The pieces of the n-gram table of each layer that has one, in the order of their rows.
    tables: Mapping[int, tuple[SourceMatrix, ...]] = field(default_factory=dict)
    constants: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # numbers that dropped tensors must have


def spec_of_tensors(family: Family, spec: formats.ModelSpec, tensors: Tensors) -> formats.ModelSpec:
    """Returns the spec of a checkpoint with these tensors: that of its config, or without the routers' bias."""
    roles = [f"layers.{layer}.router_bias" for layer in spec.moe_layers if family.may_lack_router_bias]
    if not roles or any(way.name in tensors for role in roles for way in stored_ways(family, spec, role)):
        return spec
    return replace(spec, router=replace(spec.router, bias=False))


def second_head(family: Family, spec: formats.ModelSpec, tensors: Collection[str]) -> str | None:
    """Returns the tensor of the head in a checkpoint whose config says that the embedding is the head, or None.

    It is a copy of the embedding, or the config is wrong.
    """
    ways = stored_ways(family, spec, "head") if spec.tied_head else ()
    return next((name for way in ways for name in (way.name, f"{way.name}_packed") if name in tensors), None)


def claim_tensors(
    family: Family, spec: formats.ModelSpec, tensors: Tensors, quantization: encodings.Quantization = encodings.PLAIN
) -> Claims:
    """Accounts for every source tensor.

    Args:    quantization: the encoding of some of them by the config.
    Raises:  CheckpointError for a tensor that is missing, has another shape or an unknown dtype, or has no role.
    """
    source = _Source(family, spec, tensors, quantization)
    dense = source.claim_dense(formats.dense_roles(spec))
    experts, biases = source.claim_experts()
    tables, constants = source.claim_tables()
    places = itertools.chain(dense.values(), experts.values(), biases.values(), *tables.values())
    claimed = {name for place in places for name in (place.tensor, place.scales)}
    unused, dropped, copies = dict[str, str](), dict[str, str](), dict[str, str]()
    for name in tensors:
        if name in claimed:
            continue
        if name.endswith("_shape") and f"{name.removesuffix('_shape')}_packed" in claimed:
            dropped[name] = "the shape of a packed matrix, which config.json gives too"
        elif name in constants:
            dropped[name] = "constants that the config gives"
        elif (kept := source.first_left_out(family.unused, name)) is not None:
            unused[name] = kept.reason
        elif name == second_head(family, spec, (name,)):
            dropped[name] = "tied: the embedding is the head"
        elif (left_out := source.first_left_out((_CONSTANT, *family.dropped), name)) is not None:
            dropped[name] = left_out.reason
            if left_out.copy_of is not None:
                copies[name] = left_out.copy_of
        else:
            raise formats.CheckpointError(
                f"checkpoint: tensor {name!r} has no role in the model that config.json describes; the pack would lose "
                "it"
            )
    return Claims(dense, experts, biases, unused, dropped, copies, tables, constants)


def claim_parts(
    family: Family,
    spec: formats.ModelSpec,
    roles: Sequence[DenseRole],
    tensors: Tensors,
    quantization: encodings.Quantization,
) -> tuple[dict[str, SourceMatrix], ExpertSources]:
    """Returns the places of some dense roles and of all experts, whatever other tensors there are.

    Raises:  CheckpointError as `claim_tensors`, for a tensor that is missing or has another shape or dtype.
    """
    source = _Source(family, spec, tensors, quantization)
    return source.claim_dense(roles), source.claim_experts()[0]


def role_key(spec: formats.ModelSpec, role: str) -> tuple[str, int]:
    """Returns a role's key in `Family.ways`, and its layer in its stack (0 if it is of none)."""
    first, _, rest = role.partition(".")
    if first != "layers":
        return role, 0
    number, _, name = rest.partition(".")
    is_encoding, layer = _in_stack(spec, int(number))
    return f"{'encoder' if is_encoding else 'layers'}.{{i}}.{name}", layer


def _in_stack(spec: formats.ModelSpec, layer: int) -> tuple[bool, int]:
    """Returns whether a layer is the encoder's, and its number in its stack."""
    num_encoding = 0 if spec.encoder is None else spec.encoder.num_layers
    return layer < num_encoding, layer if layer < num_encoding else layer - num_encoding


def stored_ways(family: Family, spec: formats.ModelSpec, role: str) -> tuple[Stored, ...]:
    """Returns the ways in which the dense tensor with this role may be stored in the source."""
    key, layer = role_key(spec, role)
    assert key in family.ways, f"dense_names of family {family.model_type!r} has no role {key!r}"
    number = role.split(".")[1] if "." in role else ""
    return tuple(
        replace(way, name=named(way.name, layer), roles=tuple(other.format(i=number) for other in way.roles))
        for way in family.ways[key]
    )


def named(template: str, layer: int, expert: int = 0) -> str:
    """Returns a tensor's name."""
    return template.format(i=layer, pair=layer // 2, side=layer % 2, e=expert)


def _is_present(name: str, tensors: Tensors) -> bool:
    """Returns whether the source has a tensor, plain or packed."""
    return name in tensors or f"{name}_packed" in tensors


def expert_spelling(family: Family, spec: formats.ModelSpec, tensors: Tensors, layer: int) -> ExpertNames:
    """Returns the names of experts in a layer's stack, found by the stack's first layer with experts.

    If some spellings have the same names, the shape decides: one may transpose what another does not.
    """
    is_encoding, _ = _in_stack(spec, layer)
    known = known_spellings(family, spec, layer)
    first = next(number for other in spec.moe_layers for at, number in [_in_stack(spec, other)] if at == is_encoding)
    found = [names for names in known if _is_present(named(names.matrices["up"], first), tensors)] or [known[0]]

    def fits(names: ExpertNames) -> bool:
        name = named(names.matrices["up"], first)
        _, shape = _matrix_place(spec, names, "up", name, 0)
        return name in tensors and tensors[name][1][-2:] == shape

    return next(filter(fits, found), found[0])


def known_spellings(family: Family, spec: formats.ModelSpec, layer: int) -> tuple[ExpertNames, ...]:
    """Returns the ways in which checkpoints of a family name and store the experts of a layer."""
    return family.encoder_expert_names if _in_stack(spec, layer)[0] else family.expert_names


def expert_tensors(spec: formats.ModelSpec, spelling: ExpertNames, layer: int) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the tensors that have the experts of a layer, and their biases, in a spelling."""
    (_, number), shapes = _in_stack(spec, layer), dict[str, tuple[int, ...]]()
    for expert in range(spec.router.num_experts):
        for matrix in spec.expert.matrices:
            name = named(spelling.matrices[matrix], number, expert)
            _, shape = _matrix_place(spec, spelling, matrix, name, 0)
            fused = "{e}" not in spelling.matrices[matrix]
            shapes[name] = _fused_shape(spec, spelling, {}, name, shape) if fused else shape
        for matrix in spec.expert.bias:
            name = named(spelling.biases[matrix], number, expert)
            _, length = _bias_place(spec, spelling, matrix, name, 0)
            shapes[name] = length if "{e}" in spelling.biases[matrix] else (spec.router.num_experts, *length)
    return shapes


def _matrix_place(
    spec: formats.ModelSpec, spelling: ExpertNames, matrix: formats.Matrix, name: str, slot: int
) -> tuple[SourceMatrix, tuple[int, int]]:
    """Returns the place of an expert's matrix, the `slot`-th of a tensor, and the shape of each of these matrices."""
    d, f = spec.hidden_size, spec.expert.intermediate_size
    first, step, size = _turn(spec, spelling, spelling.matrices, matrix, f)
    if (matrix == "down") == (spelling.transposed in (True, matrix)):
        return SourceMatrix(name, slot * size + first, f, d, d, row_step=step), (size, d)
    place = SourceMatrix(name, slot * d, d, f, size, first_col=first, col_step=step, neurons="columns")
    return place, (d, size)


def _bias_place(
    spec: formats.ModelSpec, spelling: ExpertNames, matrix: formats.Matrix, name: str, slot: int
) -> tuple[SourceMatrix, tuple[int]]:
    """Returns the place of an expert's bias, and its shape, as `_matrix_place` does for a matrix."""
    num_values = spec.hidden_size if matrix == "down" else spec.expert.intermediate_size
    first, step, size = _turn(spec, spelling, spelling.biases, matrix, num_values)
    return SourceMatrix(name, slot * size + first, num_values, 1, 1, row_step=step), (size,)


def _turn(
    spec: formats.ModelSpec, spelling: ExpertNames, names: Mapping[formats.Matrix, str], matrix: formats.Matrix, n: int
) -> tuple[int, int, int]:
    """Returns first and step of a matrix's `n` neurons among those of its tensor, and the number of these."""
    sharing = [other for other in spec.expert.matrices if names.get(other) == names[matrix]]
    place, num_sharing = sharing.index(matrix), len(sharing)
    first, step = (place, num_sharing) if spelling.interleaved else (place * n, 1)
    return first, step, num_sharing * n


def _fused_shape(
    spec: formats.ModelSpec, spelling: ExpertNames, tensors: Tensors, name: str, shape: tuple[int, int]
) -> tuple[int, ...]:
    """Returns the shape of a tensor of all experts, each of whose matrices has `shape`.

    Experts that return their input may have rows too, which mean nothing.
    """
    num_experts, num_outputs = spec.router.num_experts, spec.router.num_outputs
    if spelling.one_matrix:
        return num_experts * shape[0], shape[1]
    is_with_identity = name in tensors and tensors[name][1][:1] == (num_outputs,)
    return num_outputs if is_with_identity else num_experts, *shape


@dataclass(frozen=True, slots=True)
class _Source:
    """The tensors of a checkpoint, and what its family and its config say of them."""

    family: Family
    spec: formats.ModelSpec
    tensors: Tensors
    quantization: encodings.Quantization

    def claim_dense(self, wanted: Sequence[DenseRole]) -> dict[str, SourceMatrix]:
        """Returns the place of each role's tensor."""
        dense, roles = {}, {role.name: role for role in wanted}
        for role in roles.values():
            ways = stored_ways(self.family, self.spec, role.name)
            stored = next((way for way in ways if _is_present(way.name, self.tensors)), ways[0])
            stacked, cols = stored.roles, role.shape[1] if len(role.shape) == 2 else 1
            sizes = [roles[other].shape[0] for other in stacked] or [role.shape[0]]
            first = sum(sizes[: stacked.index(role.name)]) if stacked else 0
            place = SourceMatrix(stored.name, first, role.shape[0], cols, cols, transposed=stored.transposed)
            if role.quantizable and not stacked:
                place = self._with_scales(place)
            shape = (sum(sizes), *role.shape[1:])
            shape = shape[::-1] if stored.transposed else shape if stored.parts == 1 else (stored.parts, *shape)
            # A vector may be one row; a mixer's or n-grams' may have any shape of as many values.
            found = self.tensors.get(stored.name, ("", ()))[1]
            is_shaped = found == (1, *shape) or ".mixer." in role.name or ".ngrams." in role.name
            shape = found if len(shape) == 1 and math.prod(found) == shape[0] and is_shaped else shape
            if role.name == "head" and place.tensor not in self.tensors:
                raise formats.CheckpointError(
                    f"checkpoint: tensor {place.tensor!r} is missing: the model was saved without its head; save it "
                    "again with transformers' AutoModelForCausalLM"
                )
            self._check_place(place, shape, "integers" if role.integers else place.codec)
            dense[role.name] = place
        return dense

    def claim_experts(self) -> tuple[ExpertSources, ExpertSources]:
        """Returns the places of the experts' matrices, and of their biases."""
        spec, matrices, biases = self.spec, ExpertSources(), ExpertSources()
        for layer in spec.moe_layers:
            spelling, (_, number) = expert_spelling(self.family, spec, self.tensors, layer), _in_stack(spec, layer)
            for matrix in spec.expert.matrices:
                for expert, place in enumerate(self._claim_matrix(spelling, matrix, number)):
                    matrices[layer, expert, matrix] = place
            for matrix in spec.expert.bias:
                fused = "{e}" not in spelling.biases[matrix]
                for expert in range(spec.router.num_experts):
                    name = named(spelling.biases[matrix], number, expert)
                    place, shape = _bias_place(spec, spelling, matrix, name, expert if fused else 0)
                    if not fused or expert == 0:
                        self._check_tensor(name, (spec.router.num_experts, *shape) if fused else shape)
                    biases[layer, expert, matrix] = place
        return matrices, biases

    def _claim_matrix(self, spelling: ExpertNames, matrix: formats.Matrix, number: int) -> list[SourceMatrix]:
        """Returns the places of a matrix of all experts of a layer, the `number`-th of its stack."""
        template, places = spelling.matrices[matrix], list[SourceMatrix]()
        fused = "{e}" not in template
        for expert in range(self.spec.router.num_experts):
            name = named(template, number, expert)
            place, shape = _matrix_place(self.spec, spelling, matrix, name, expert if fused else 0)
            whole = _fused_shape(self.spec, spelling, self.tensors, name, shape) if fused else shape
            if matrix in spelling.scales:
                place = replace(place, codec="mxfp4", scales=named(spelling.scales[matrix], number, expert))
            elif not fused:
                place = self._with_scales(place)
            if not fused or expert == 0:
                self._check_place(place, whole, place.codec)
            places.append(place)
        return places

    def claim_tables(self) -> tuple[dict[int, tuple[SourceMatrix, ...]], dict[str, tuple[int, ...]]]:
        """Returns the pieces of each n-gram table, and the numbers of each tensor of constants that there is."""
        tables, constants = dict[int, tuple[SourceMatrix, ...]](), dict[str, tuple[int, ...]]()
        ngrams, names = self.spec.ngrams, self.family.table_names
        if ngrams is None:
            return tables, constants
        assert names, f"family {self.family.model_type!r} has n-grams, but no table_names"
        for place, layer in enumerate(ngrams.layers):
            spellings = [tuple(name.format(i=layer, part="{part}") for name in astuple(each)) for each in names]
            table, *others = next((each for each in spellings if each[0].format(part=0) in self.tensors), spellings[0])
            tables[layer] = self._claim_table(table, ngrams.table_shape(layer))
            sizes = ngrams.head_sizes[place]
            offsets = (0, *itertools.accumulate(sizes[:-1]))
            for name, values in zip(others, (ngrams.multipliers[place], sizes, offsets), strict=True):
                if name in self.tensors:
                    constants[name] = values
                    if self.tensors[name] != ("I64", (len(values),)):
                        dtype, shape = self.tensors[name]
                        raise formats.CheckpointError(
                            f"checkpoint: tensor {name!r} is {dtype} {list(shape)}, expected I64 {[len(values)]}"
                        )
        return tables, constants

    def _claim_table(self, template: str, shape: tuple[int, int]) -> tuple[SourceMatrix, ...]:
        """Returns the pieces of a table of this shape: all its parts, or one tensor."""
        numbers = itertools.takewhile(lambda number: template.format(part=number) in self.tensors, itertools.count())
        names = [template.format(part=number) for number in numbers] if "{part}" in template else [template]
        if "{part}" not in template or not names:
            self._check_tensor(template.format(part=0), shape)
        (num_rows, num_cols), pieces = shape, list[SourceMatrix]()
        for name in names:
            (dtype, found), (first_dtype, _) = self.tensors[name], self.tensors[names[0]]
            rows = found[0] if found else 0
            self._check_tensor(name, (rows, num_cols))
            if dtype != first_dtype:
                raise formats.CheckpointError(
                    f"checkpoint: tensor {name!r} is {dtype}, expected {first_dtype} as {names[0]!r}"
                )
            pieces.append(SourceMatrix(name, 0, rows, num_cols, num_cols))
        if (found_rows := sum(piece.num_rows for piece in pieces)) != num_rows:
            raise formats.CheckpointError(
                f"checkpoint: {len(names)} tensors from {names[0]!r} on have {found_rows} rows, expected {num_rows}"
            )
        return tuple(pieces)

    def first_left_out(self, left_out: tuple[LeftOut, ...], name: str) -> LeftOut | None:
        """Returns the first whose pattern a name follows, or None."""
        for candidate in left_out:
            n, pattern = self.spec.num_hidden_layers + candidate.after, candidate.pattern
            if candidate.sign is not None and candidate.sign.format(n=n) not in self.tensors:
                continue
            if "{e}" not in pattern:
                if fnmatchcase(name, pattern.format(n=n)):
                    return candidate
                continue
            experts = re.escape(pattern.format(n=n, e="{e}")).replace(r"\*", ".*").replace(r"\{e\}", "([0-9]+)")
            found = re.fullmatch(experts, name)
            if found is not None and int(found[1]) >= self.spec.router.num_experts:
                return candidate
        return None

    def _with_scales(self, place: SourceMatrix) -> SourceMatrix:
        """Returns the place of a whole tensor with its scales, which are checked, if it is in codes by the config."""
        if self.quantization.codec == "packed":
            return self._with_packed(place)
        if self.quantization.codec != "fp8" or self.tensors.get(place.tensor, ("",))[0] != "F8_E4M3":
            return place
        scales, other = f"{place.tensor}_scale_inv", f"{place.tensor.removesuffix('weight')}scale"
        if scales not in self.tensors and other in self.tensors:
            raise formats.CheckpointError(
                f"checkpoint: tensor {other!r} has the scales of {place.tensor!r}, which are not supported under this "
                "name; use a 16-bit copy"
            )
        self._check_tensor(
            scales, (-(-place.num_rows // encodings.SCALE_BLOCK), -(-place.num_cols // encodings.SCALE_BLOCK))
        )
        return replace(place, codec="fp8", scales=scales)

    def _with_packed(self, place: SourceMatrix) -> SourceMatrix:
        """Returns the place in the words of `weight_packed` in place of `weight`, if the checkpoint has only those."""
        packed, num_cols = f"{place.tensor}_packed", place.num_cols
        if place.tensor in self.tensors or packed not in self.tensors:
            return place
        kinds = (self.quantization, *self.quantization.others)
        known = [(each.num_bits, each.group_size or num_cols) for each in kinds]
        scales = f"{place.tensor}_scale"
        found = [self.tensors[name][1][-1:] for name in (packed, scales) if name in self.tensors]
        fitting = [
            each for each in known if found == [(num_cols * each[0] // encodings.WORD_BITS,), (num_cols // each[1],)]
        ]
        num_bits, group_size = (fitting or known)[0]
        if num_cols % group_size or num_cols * num_bits % encodings.WORD_BITS:
            raise formats.CheckpointError(
                f"checkpoint: tensor {packed!r}: config.json gives it rows of {num_cols} values, expected whole groups "
                f"of {group_size} and whole words of {encodings.WORD_BITS // num_bits}"
            )
        self._check_tensor(scales, (place.num_rows, num_cols // group_size))
        return replace(place, tensor=packed, codec="packed", scales=scales, num_bits=num_bits, group_size=group_size)

    def _check_place(
        self, place: SourceMatrix, shape: tuple[int, ...], kind: encodings.SourceCodec | Literal["integers"]
    ) -> None:
        """Checks that the values of a tensor have `shape`; for MXFP4 blocks, also the tensor of their scales."""
        if kind == "packed":  # a word has several columns
            shape = (*shape[:-1], shape[-1] * place.num_bits // encodings.WORD_BITS)
        if kind != "mxfp4":
            self._check_tensor(place.tensor, shape, kind)
            return
        if self.quantization.codec != "mxfp4":
            raise formats.CheckpointError(
                f"checkpoint: tensor {place.tensor!r} is in MXFP4 blocks, but config.json has no quantization_config "
                "for them"
            )
        if shape[-1] % encodings.MXFP4_BLOCK:
            raise formats.CheckpointError(
                f"checkpoint: tensor {place.tensor!r}: config.json gives it rows of {shape[-1]} values, expected a "
                f"multiple of {encodings.MXFP4_BLOCK}"
            )
        assert place.scales is not None, "a matrix in blocks has scales"
        blocks = (*shape[:-1], shape[-1] // encodings.MXFP4_BLOCK)
        self._check_tensor(place.tensor, (*blocks, encodings.MXFP4_BLOCK // 2), "mxfp4")
        self._check_tensor(place.scales, blocks, "mxfp4")

    def _check_tensor(
        self, name: str, expected: tuple[int, ...], kind: encodings.SourceCodec | Literal["integers"] = "plain"
    ) -> None:
        if name not in self.tensors:
            raise formats.CheckpointError(f"checkpoint: tensor {name!r} is missing")
        dtype, shape = self.tensors[name]
        if shape != expected:
            raise formats.CheckpointError(
                f"checkpoint: tensor {name!r} has shape {list(shape)}, expected {list(expected)}"
            )
        if dtype not in _DTYPES[kind]:
            one_of = "one of " if len(_DTYPES[kind]) > 1 else ""
            raise formats.CheckpointError(
                f"checkpoint: tensor {name!r} is {dtype}, expected {one_of}{', '.join(_DTYPES[kind])}"
            )
