"""What commands share: the options that decide a plan of those that write packs.

What commands share that plan for a memory: what was measured of this machine.
"""

import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from moe_pack.calib.evaluate import ThresholdRule
from moe_pack.convert import MEMORY_BYTES, SOURCE, keep_source
from moe_pack.convert.matrix_bytes import Bits
from moe_pack.convert.plan import Target
from moe_pack.formats import (
    ROW_GROUP,
    ModelSpec,
    PackLayout,
    PartFormat,
    Plan,
    PlanError,
    Quantizer,
    Selector,
    UsageError,
    option,
    part_format,
    trellis_format,
    uniform_plan,
)
from moe_pack.formats.cli import cache_folder
from moe_pack.formats.commands import given
from moe_pack.formats.families import Checkpoint
from moe_pack.formats.plan import QUANTIZERS, TRELLIS_WIDTHS
from moe_pack.formats.spec import read_size
from moe_pack.runtime import MachineFacts, load_facts

NUM_CORES = os.cpu_count() or 1
WORKERS_OPTION = option("--workers", least=1, most=256, help="Experts worked on at once.  [default: all cores]")
EVAL_TOKENS = 16384  # that the loss is measured on, where nothing else is asked for
PlanCodec = Literal["auto", "affine", "trellis"]
AnyQuantizer = Quantizer | Literal["auto"]
_QUANTIZERS: tuple[AnyQuantizer, ...] = ("auto", "calibrated", *(name for name in QUANTIZERS if name != "calibrated"))
_EXPERT_BITS_CHOICE = ("1", "1.5", "2", "2.5", "3", "3.5", "4", "8", "16", SOURCE)
_TRELLIS_BITS = tuple(width / 2 for width in TRELLIS_WIDTHS)
_AFFINE_GROUP = 64  # where none is asked for; a trellis has one scale a row
_EXPERT_BITS = 4  # of experts that are not in codes already, where nothing else is asked for
_USUAL = f"source for FP8 and MXFP4, else {_EXPERT_BITS}"


def _bits(text: str) -> Bits:
    return text if text == SOURCE else float(text)


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """How every expert, and what is dense, is stored. None: the default of each, which may hang on the checkpoint."""

    selector: Selector | None = field(
        default=None,
        metadata=option(
            "--selector",
            help="Which matrix decides what neurons run, and is stored apart to be read whole.  [default: up]",
        ),
    )
    selector_bits: Bits = field(
        default=None,
        metadata=option(
            "--selector-bits",
            choices=_EXPERT_BITS_CHOICE,
            parse=_bits,
            help="Bits of a weight of the selector; source: what the checkpoint has, without loss.  "
            f"[default: {_USUAL}]",
        ),
    )
    record_bits: Bits = field(
        default=None,
        metadata=option(
            "--record-bits",
            choices=_EXPERT_BITS_CHOICE,
            parse=_bits,
            help="Bits of a weight of the neuron records; source: what the checkpoint has, without loss. FP8 and MXFP4 "
            f"are kept wherever these are not below theirs.  [default: {_USUAL}]",
        ),
    )
    codec: PlanCodec = field(
        default="auto",
        metadata=option(
            "--codec",
            help="What experts' weights of 4 bits and less are stored in. trellis: a code's value depends on those "
            "before it too, the best for its bytes, and alone takes 1.5, 2.5 and 3.5 bits; affine: equal steps. auto: "
            "trellis where the quantizer is calibrated, and for half bits.",
        ),
    )
    group: int | None = field(
        default=None,
        metadata=option(
            "--group-size",
            choices=("16", "32", "64", "128", "row"),
            parse=lambda text: ROW_GROUP if text == "row" else int(text),
            help="Weights that share a scale, in affine with a zero; row: one for each row.  [default: row for a "
            f"trellis, {_AFFINE_GROUP} for affine]",
        ),
    )
    scale_bits: int = field(
        default=16,
        metadata=option(
            "--scale-bits",
            choices=("8", "16"),
            parse=int,
            help="Width of scales and zeros; 8 saves bytes where groups are small.",
        ),
    )
    dense_bits: Bits = field(
        default=None,
        metadata=option(
            "--dense-bits",
            choices=("1", "2", "3", "4", "8", "16", SOURCE),
            parse=_bits,
            help="Width of attention, embedding, head, shared experts and dense layers; source, and 16, do not "
            "quantize them. Norms, biases and routers never are.  [default: source]",
        ),
    )

    def plan(self, spec: ModelSpec, quantizer: Quantizer) -> Plan:
        """The plan for a model without a checkpoint.

        Raises:  PlanError if these formats cannot hold its rows, or a source is asked for.
        """
        bits = {"selector": self.selector_bits, "record": self.record_bits, "dense": self.dense_bits}
        asked = next((name for name, width in bits.items() if width == SOURCE), None)
        if asked is not None:
            raise PlanError(f"--{asked}-bits source: there is no checkpoint here whose weights could be kept")
        return self._planned(spec, quantizer)

    def plan_for(self, checkpoint: Checkpoint, quantizer: Quantizer) -> Plan:
        """The plan for a checkpoint, whose own codes are kept where that is no wider.

        Raises:  PlanError if these formats cannot hold its rows, or nothing keeps what shall be kept.
        """
        plan = self._planned(checkpoint.spec, quantizer)
        return keep_source(checkpoint, plan, self.selector_bits, self.record_bits, self.dense_bits)

    def _planned(self, spec: ModelSpec, quantizer: Quantizer) -> Plan:
        selector, record = (
            self._part(flag, _width(bits, _EXPERT_BITS), quantizer)
            for flag, bits in (("--selector-bits", self.selector_bits), ("--record-bits", self.record_bits))
        )
        width = _width(self.dense_bits, 16)
        dense = None if width == 16 else self._affine(width)
        return uniform_plan(spec, self.selector or "up", selector, record, dense, quantizer)

    def _part(self, flag: str, bits: float, quantizer: Quantizer) -> PartFormat:
        """The format of experts' matrices that take so many bits a weight."""
        fits = bits in _TRELLIS_BITS
        if self.codec == "trellis" and not fits and bits != 16:
            raise PlanError(f"{flag} {bits:g}: a trellis takes 1.5 to 4 bits a weight; use --codec affine")
        if self.codec == "affine" and bits % 1:
            raise PlanError(f"{flag} {bits:g}: affine takes whole bits; use --codec trellis")
        if fits and (self.codec == "trellis" or (self.codec == "auto" and (quantizer == "calibrated" or bits % 1))):
            return trellis_format(int(2 * bits), ROW_GROUP if self.group is None else self.group, self.scale_bits)
        return self._affine(bits)

    def _affine(self, bits: float) -> PartFormat:
        return part_format(int(bits), _AFFINE_GROUP if self.group is None else self.group, self.scale_bits)


def _width(bits: Bits, usual: int) -> float:
    """The bits a weight of what is not kept: what was given, or the usual one; 16 where the source shall be kept."""
    if bits == SOURCE:
        return 16
    return bits if isinstance(bits, float | int) else usual


@dataclass(frozen=True, slots=True)
class ConvertOptions:
    """What `convert` was asked for.

    `target`: None: a pack as `plan` says, or `plan_file`.   `eval_data`, `eval_tokens`: the text that a pack for a
    target is measured on, and how much of it.   `profile`: None: for a target, one is made beside the output.
    """

    output: Path = field(
        default=Path("packed"), metadata=option("--output", "-o", help="The pack's folder, new or empty.")
    )
    target: Target | None = None
    eval_data: str | None = field(
        default=None,
        metadata=option(
            "--eval-data",
            metavar="NAME_OR_FILE",
            mark="target",
            help="With --target-vram: the text that the loss is measured on, as for eval.  [default: the end of our "
            "sample]",
        ),
    )
    eval_tokens: int = field(
        default=EVAL_TOKENS,
        metadata=option(
            "--eval-tokens",
            least=256,
            metavar="N",
            mark="target",
            help="How many tokens of it: the more, the less of the limit goes to the interval of the estimate.",
        ),
    )
    plan: PlanOptions = field(default_factory=PlanOptions)
    plan_file: Path | None = field(
        default=None,
        metadata=option(
            "--plan",
            path="file",
            metavar="FILE",
            mark="plan",
            help="A plan (moe-pack plan -o): each expert's widths and sparsity, in place of the seven options above, "
            "--quantizer and --sparsity.",
        ),
    )
    quantizer: AnyQuantizer = field(
        default="auto",
        metadata=option(
            "--quantizer",
            choices=_QUANTIZERS,
            mark="plan",
            help="How codes are found. calibrated: by what experts were given in the profile's text, the best; hqq: by "
            "the weights alone, the best without a profile; nearest and absmax are plain and quick. auto: calibrated "
            "with a profile that has inputs, else hqq.",
        ),
    )
    profile: Path | None = field(
        default=None,
        metadata=option(
            "--profile",
            metavar="DIR",
            help="A profile of this model (moe-pack profile): experts are rounded by what they were given in its text, "
            "neurons are stored hottest first, at --sparsity, and what it knows of routes is put beside the pack (as "
            "moe-pack attach does).",
        ),
    )
    sparsity: float | None = field(
        default=None,
        metadata=option(
            "--sparsity",
            metavar="S",
            mark="plan",
            help="Share of an expert's neurons that shall not run: thresholds are measured on the finished pack, on "
            "the profile's text, or on our sample.  [default: all run]",
        ),
    )
    workers: int = field(default=NUM_CORES, metadata=WORKERS_OPTION)
    memory_bytes: int = field(
        default=MEMORY_BYTES,
        metadata=option(
            "--memory",
            parse=read_size,
            default_text=f"{MEMORY_BYTES >> 30}G",
            metavar="SIZE",
            help="What experts worked on at once may hold between them. Calibrated ones hold some hundred MiB each: "
            "with many cores, more memory is less time.",
        ),
    )

    def check(self) -> None:
        """Refuses options that do not go together.

        Raises:  UsageError.
        """
        if self.target is not None:
            self._check_with(self.target)
        elif wrong := given(self, "target"):
            raise UsageError(
                f"{wrong[0]}: is of --target-vram, which measures what a pack loses; moe-pack eval measures any"
            )
        elif self.plan_file is not None:
            if others := given(self.plan) + given(replace(self, plan_file=None), "plan"):
                raise UsageError(f"--plan: says all of a plan; leave {', '.join(others)} out")
        else:
            self._check_plan()

    def _check_with(self, target: Target) -> None:
        """Refuses what a target's plan decides by itself: formats, but not a selector or what a preset leaves open."""
        plan = replace(self.plan, selector=None) if target.preset is None else self.plan
        decided = replace(self, sparsity=None) if target.preset == "floe" else self
        if names := given(plan) + given(decided, "plan"):
            raise UsageError(f"--target-vram: a plan is made that decides this; leave {', '.join(names)} out")

    def _check_plan(self) -> None:
        if self.sparsity is not None and (fault := ThresholdRule(sparsity=self.sparsity).fault()):
            raise UsageError(fault)
        if self.profile is None and self.quantizer == "calibrated":
            raise UsageError(
                "--quantizer calibrated: rounds by what experts are given; give a --profile, which has kept it"
            )
        if self.profile is not None and self.sparsity is None and self.quantizer not in ("auto", "calibrated"):
            raise UsageError(
                f"--profile: says nothing to {self.quantizer}, and orders neurons at a sparsity; give --sparsity too"
            )


def large_bytes(layout: PackLayout) -> int:
    """Bytes of a pack's large files, padding apart."""
    return sum(item.num_bytes for item in layout.items())


def known_facts(folder: Path) -> MachineFacts | None:
    """What `doctor` measured of this machine and of the drive that holds a folder, which need not be there yet.

    Raises:  RunError if what was kept is damaged.
    """
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    return load_facts(cache_folder(), there)
