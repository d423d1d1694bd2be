"""The plan of a pack: the selector kind and, for every matrix, its codec, width and group; the facts of codecs."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from moe_pack.formats.base.errors import PlanError
from moe_pack.formats.base.json_files import added
from moe_pack.formats.parts import specs

Codec = Literal["bf16", "affine", "fp8", "e5m2", "mxfp4", "trellis"]
Quantizer = Literal["hqq", "absmax", "nearest", "calibrated"]
QUANTIZERS: tuple[Quantizer, ...] = ("hqq", "absmax", "nearest", "calibrated")
WIDTHS = (1, 2, 3, 4, 8)
TRELLIS_WIDTHS = (4, 5, 6, 7, 8)  # bits of two weights
GROUPS = (16, 32, 64, 128)
ROW_GROUP = 0  # one group as long as the row
BLOCK = 64  # codes lie in blocks of this many


@dataclass(frozen=True, slots=True)
class CodecFacts:
    """The facts of a codec; `codecs` has its arithmetic. Without scales or quantizers its weights are plain values."""

    number: int  # in the index
    widths: tuple[int, ...]  # bits of a code
    groups: tuple[int, ...] = (ROW_GROUP,)
    scale_bits: tuple[int, ...] = (16,)  # 16: float16; 8: E8M0, or of a quantized codec bytes with a multiplier a row
    quantizers: tuple[Quantizer, ...] = ()  # those that choose codes for weights; none: codes are a checkpoint's
    has_scales: bool = True
    has_zeros: bool = False
    weights_per_code: int = 1


CODECS: Mapping[Codec, CodecFacts] = {
    # Little-endian bfloat16.
    "bf16": CodecFacts(1, (16,), has_scales=False),
    # `w = (code - zero) * scale`.
    "affine": CodecFacts(2, WIDTHS, (ROW_GROUP, *GROUPS), (16, 8), QUANTIZERS, has_zeros=True),
    # Codes of quantized checkpoints, `w = code * scale`: E4M3, E5M2 and E2M1.
    "fp8": CodecFacts(3, (8,), (128,), (32,)),
    "e5m2": CodecFacts(4, (8,), (ROW_GROUP,), (8,)),
    "mxfp4": CodecFacts(5, (4,), (32,), (8,)),
    # `w = value * scale`, values selected by the last 7 bits of a stream to which every two weights add `width` bits.
    "trellis": CodecFacts(
        6, TRELLIS_WIDTHS, (ROW_GROUP, *GROUPS), (16, 8), ("nearest", "calibrated"), weights_per_code=2
    ),
}


@dataclass(frozen=True, slots=True)
class PartFormat:
    """How one matrix's rows are stored."""

    codec: Codec
    width: int  # bits of a code
    group: int  # values along the row that share a scale and, with `affine`, a zero; 0: the whole row
    scale_bits: int

    @property
    def facts(self) -> CodecFacts:
        """The facts of its codec."""
        return CODECS[self.codec]

    def num_groups(self, num_cols: int) -> int:
        """Returns the number of groups in a row; the last may be shorter."""
        if not self.facts.has_scales:
            return 0
        return 1 if self.group == ROW_GROUP else -(-num_cols // self.group)

    def code_bytes(self, num_cols: int) -> int:
        """Returns the bytes of a row's codes."""
        return int(num_cols * self.bits) // 8

    def scale_bytes(self, num_cols: int) -> int:
        """Returns the bytes of a row's scales."""
        multiplier = 2 if self.has_byte_scales else 0
        return self.num_groups(num_cols) * self.scale_bits // 8 + multiplier

    def zero_bytes(self, num_cols: int) -> int:
        """Returns the bytes of a row's zeros."""
        return self.scale_bytes(num_cols) if self.facts.has_zeros else 0

    def part_bytes(self, num_cols: int) -> int:
        """Returns the bytes of a row's codes, scales and zeros."""
        return self.code_bytes(num_cols) + self.scale_bytes(num_cols) + self.zero_bytes(num_cols)

    @property
    def bits(self) -> float:
        """The bits of a weight's code; a trellis's width counts two weights."""
        return self.width if self.facts.weights_per_code == 1 else self.width / self.facts.weights_per_code

    @property
    def is_quantized(self) -> bool:
        """Whether its codes are chosen for weights."""
        return bool(self.facts.quantizers)

    @property
    def keeps_source(self) -> bool:
        """Whether it keeps a quantized source's codes; weights are never quantized to it."""
        return self.facts.has_scales and not self.is_quantized

    @property
    def has_byte_scales(self) -> bool:
        """Whether scales (and zeros) are bytes, with a float16 multiplier a row for each of the two."""
        return self.is_quantized and self.scale_bits == 8


def _one_format(codec: Codec) -> PartFormat:
    facts = CODECS[codec]
    return PartFormat(codec, facts.widths[0], facts.groups[0], facts.scale_bits[0])


BF16, FP8 = _one_format("bf16"), _one_format("fp8")
E5M2, MXFP4 = _one_format("e5m2"), _one_format("mxfp4")
KEPT = tuple(_one_format(codec) for codec in CODECS if _one_format(codec).keeps_source)  # with a source's codes


def format_fault(part: PartFormat, num_cols: int) -> str | None:
    """Returns why rows of `num_cols` values cannot be stored as `part`, or None."""
    facts = part.facts
    if not part.is_quantized and part != (only := _one_format(part.codec)):
        if part.scale_bits != only.scale_bits:
            return f"{part.codec} has scales of {only.scale_bits} bits, found {part.scale_bits}"
        groups = f"groups of {only.group}" if only.group else "no groups"
        return f"{part.codec} has width {only.width} and {groups}, found width {part.width}, group {part.group}"
    if not facts.has_scales:
        return None
    if part.width not in facts.widths:
        widths = ", ".join(map(str, facts.widths))
        if part.codec == "affine":
            return f"width {part.width}, expected one of {widths} (or 16 for bf16)"
        return f"{part.codec} of width {part.width}, expected one of {widths}"
    if part.group not in facts.groups:
        return f"group size {part.group}, expected one of {', '.join(map(str, GROUPS))} or row"
    if part.scale_bits not in facts.scale_bits:
        return f"scales of {part.scale_bits} bits, expected 8 or 16"
    if num_cols % BLOCK:
        return f"rows of {num_cols} values, expected a multiple of {BLOCK}"
    if part.is_quantized and part.group != ROW_GROUP and num_cols % part.group:
        return f"group size {part.group} does not divide rows of {num_cols} values"
    return None


def quantizer_fault(part: PartFormat, quantizer: Quantizer) -> str | None:
    """Returns why the quantizer has no method for `part`, or None."""
    if part.codec == "affine" and part.width == 1 and quantizer == "absmax":
        return "width 1 has no absmax quantization; use hqq or nearest"
    if part.is_quantized and quantizer not in part.facts.quantizers:
        return f"a {part.codec} has no {quantizer} quantization; use {' or '.join(sorted(part.facts.quantizers))}"
    return None


def dense_quantizer(quantizer: Quantizer) -> Quantizer:
    """Returns the quantizer of dense matrices: the experts', or HQQ for `calibrated`, which needs experts' inputs."""
    return "hqq" if quantizer == "calibrated" else quantizer


def part_format(width: int, group: int, scale_bits: int = 16) -> PartFormat:
    """Returns the format for a width in bits: bf16 for 16, affine for less."""
    return BF16 if width == 16 else PartFormat("affine", width, group, scale_bits)


def trellis_format(width: int, group: int, scale_bits: int = 16) -> PartFormat:
    """Returns the trellis format in which two weights have `width` bits."""
    return PartFormat("trellis", width, group, scale_bits)


def format_text(part: PartFormat) -> str:
    """Returns the name of a format in tables: `bf16`, `4 bit g64`, `2 bit row, byte scales`, `2.5 bit trellis row`."""
    if not part.is_quantized:
        return part.codec
    kind = " trellis" if part.codec == "trellis" else ""
    group = "row" if part.group == ROW_GROUP else f"g{part.group}"
    return f"{part.bits:g} bit{kind} {group}" + (", byte scales" if part.scale_bits == 8 else "")


@dataclass(frozen=True, slots=True)
class ExpertFormat:
    """The formats of one expert's matrices; `gate` is None if the family has none."""

    gate: PartFormat | None
    up: PartFormat
    down: PartFormat

    def of(self, matrix: specs.Matrix) -> PartFormat | None:
        """Returns the format of a matrix, or None if the expert does not have it."""
        return {"gate": self.gate, "up": self.up, "down": self.down}[matrix]


@dataclass(frozen=True, slots=True)
class Plan:
    """The formats of a pack."""

    selector: specs.Selector
    quantizer: Quantizer
    experts: tuple[tuple[ExpertFormat, ...], ...]  # [l][e] for the l-th MoE layer
    dense: tuple[PartFormat | None, ...]  # in the order of `dense_roles`; None keeps the source's bytes
    repeats: int = added(0)  # neurons of each expert with two rows (`ExpertSpec`); only calibrated codes have some


def uniform_dense(spec: specs.ModelSpec, part: PartFormat | None) -> tuple[PartFormat | None, ...]:
    """Returns the formats of all dense tensors: `part` for those that allow it."""
    return tuple(
        part if part is not None and role.quantizable and not format_fault(part, role.shape[1]) else None
        for role in specs.dense_roles(spec)
    )


def uniform_plan(
    spec: specs.ModelSpec,
    selector: specs.Selector,
    selector_format: PartFormat,
    record_format: PartFormat,
    dense: PartFormat | None = None,
    quantizer: Quantizer = "hqq",
) -> Plan:
    """Returns the plan that gives every expert the same formats.

    Args:    spec: the source's, or `with_repeats` for calibrated codes.
    Raises:  PlanError if this model's rows do not allow the formats, or the model has no such selector.
    """
    selected = specs.selector_matrices(selector, spec.expert.matrices)
    if selector != "none" and "gate" not in spec.expert.matrices and selector != "up":
        raise PlanError(f"--selector {selector}: this model's experts have no gate matrix; use up or none")
    checked = [("--record-bits/--group-size", record_format, quantizer)]
    if selected:
        checked.append(("--selector-bits/--group-size", selector_format, quantizer))
    if dense is not None:
        checked.append(("--dense-bits/--group-size", dense, dense_quantizer(quantizer)))
    for flag, part, method in checked:
        fault = format_fault(part, spec.hidden_size) or quantizer_fault(part, method)
        if fault:
            raise PlanError(f"{flag}: {fault}")
    formats = {m: selector_format if m in selected else record_format for m in specs.MATRICES}
    expert = ExpertFormat(
        gate=formats["gate"] if "gate" in spec.expert.matrices else None, up=formats["up"], down=formats["down"]
    )
    layer = (expert,) * spec.router.num_experts
    experts = (layer,) * len(spec.moe_layers)
    repeats = spec.expert.repeats if quantizer == "calibrated" else 0  # others do not know which neurons to repeat
    return Plan(selector, quantizer, experts, uniform_dense(spec, dense), repeats)


def plan_fault(plan: Plan, spec: specs.ModelSpec) -> str | None:
    """Returns why `plan` does not fit `spec`, or None."""
    if len(plan.experts) != len(spec.moe_layers):
        return f"{len(plan.experts)} layers planned, but the model has {len(spec.moe_layers)} with experts"
    if fault := _dense_fault(plan.dense, spec) or _repeats_fault(plan, spec):
        return fault
    needed = (
        *specs.selector_matrices(plan.selector, spec.expert.matrices),
        *specs.record_matrices(plan.selector, spec.expert.matrices),
    )
    for layer, experts in enumerate(plan.experts):
        if len(experts) != spec.router.num_experts:
            return f"layer {layer}: {len(experts)} experts planned, but the model has {spec.router.num_experts}"
        for number, expert in enumerate(experts):
            for matrix in specs.MATRICES:
                part = expert.of(matrix)
                if (part is None) != (matrix not in needed):
                    return f"layer {layer} expert {number}: format of {matrix} does not fit the model's matrices"
                if part is not None and (fault := format_fault(part, spec.hidden_size)):
                    return f"layer {layer} expert {number} {matrix}: {fault}"
    return None


def _repeats_fault(plan: Plan, spec: specs.ModelSpec) -> str | None:
    if not 0 <= plan.repeats <= spec.expert.source_size:
        return f"repeats is {plan.repeats}, expected 0 to {spec.expert.source_size}, the neurons of an expert"
    if not plan.repeats:
        return None
    if plan.quantizer != "calibrated":
        return f"repeats is {plan.repeats}, but {plan.quantizer} does not know which neurons to repeat; use calibrated"
    if any(expert.down.keeps_source for layer in plan.experts for expert in layer):
        return f"repeats is {plan.repeats}, but down keeps the checkpoint's codes, which loses nothing; use 0"
    return None


def _dense_fault(dense: tuple[PartFormat | None, ...], spec: specs.ModelSpec) -> str | None:
    roles = specs.dense_roles(spec)
    if len(dense) != len(roles):
        return f"formats given for {len(dense)} dense tensors, but the model has {len(roles)}"
    for role, part in zip(roles, dense, strict=True):
        if part is not None:
            fault = format_fault(part, role.shape[-1]) if role.quantizable else "must not be quantized"
            if fault:
                return f"dense {role.name}: {fault}"
    return None
