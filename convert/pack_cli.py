"""What commands share: the options that decide a plan of those that write packs, and bars over bytes."""

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import click
from click.core import ParameterSource
from tqdm import tqdm

from moe_pack.convert.pipeline import MEMORY_BYTES, Progress
from moe_pack.convert.source_formats import SOURCE, Bits, keep_source
from moe_pack.formats import (
    ROW_GROUP,
    SELECTORS,
    TRELLIS_WIDTHS,
    Checkpoint,
    ModelSpec,
    PackLayout,
    PartFormat,
    Plan,
    PlanError,
    Quantizer,
    Selector,
    part_format,
    trellis_format,
    uniform_plan,
)
from moe_pack.formats.cli import read_size

F = TypeVar("F", bound=Callable[..., Any])
_EXPERT_BITS_CHOICE = click.Choice(["1", "1.5", "2", "2.5", "3", "3.5", "4", "8", "16", SOURCE])
_DENSE_BITS_CHOICE = click.Choice(["1", "2", "3", "4", "8", "16", SOURCE])
PlanCodec = Literal["auto", "affine", "trellis"]
_CODECS: tuple[PlanCodec, ...] = ("auto", "affine", "trellis")
_TRELLIS_BITS = tuple(width / 2 for width in TRELLIS_WIDTHS)
_AFFINE_GROUP = 64  # where none is asked for; a trellis has one scale a row
_EXPERT_BITS = 4  # of experts that are not in codes already, where nothing else is asked for
_USUAL = f"source for FP8 and MXFP4, else {_EXPERT_BITS}"
_GROUPS = ("16", "32", "64", "128", "row")


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """How every expert, and what is dense, shall be stored. `group`: None where none was asked for."""

    selector: Selector
    selector_bits: Bits
    record_bits: Bits
    codec: PlanCodec
    group: int | None
    scale_bits: int
    dense_bits: Bits

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
        return uniform_plan(spec, self.selector, selector, record, dense, quantizer)

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


_OPTIONS = (
    click.option(
        "--selector",
        type=click.Choice(SELECTORS),
        default="up",
        show_default=True,
        help="Which matrix decides what neurons run, and is stored apart to be read whole.",
    ),
    click.option(
        "--selector-bits",
        type=_EXPERT_BITS_CHOICE,
        help=f"Bits of a weight of the selector; source: what the checkpoint has, without loss.  [default: {_USUAL}]",
    ),
    click.option(
        "--record-bits",
        type=_EXPERT_BITS_CHOICE,
        help="Bits of a weight of the neuron records; source: what the checkpoint has, without loss. FP8 and MXFP4 are "
        f"kept wherever these are not below theirs.  [default: {_USUAL}]",
    ),
    click.option(
        "--codec",
        type=click.Choice(_CODECS),
        default="auto",
        show_default=True,
        help="What experts' weights of 4 bits and less are stored in. trellis: a code's value depends on those before "
        "it too, the best for its bytes, and alone takes 1.5, 2.5 and 3.5 bits; affine: equal steps. auto: trellis "
        "where the quantizer is calibrated, and for half bits.",
    ),
    click.option(
        "--group-size",
        type=click.Choice(_GROUPS),
        help="Weights that share a scale, in affine with a zero; row: one for each row.  [default: row for a trellis, "
        f"{_AFFINE_GROUP} for affine]",
    ),
    click.option(
        "--scale-bits",
        type=click.Choice(["8", "16"]),
        default="16",
        show_default=True,
        help="Width of scales and zeros; 8 saves bytes where groups are small.",
    ),
    click.option(
        "--dense-bits",
        type=_DENSE_BITS_CHOICE,
        help="Width of attention, embedding, head, shared experts and dense layers; source, and 16, do not quantize "
        "them. Norms, biases and routers never are.  [default: source]",
    ),
)
_NAMES = ("selector", "selector_bits", "record_bits", "codec", "group_size", "scale_bits", "dense_bits")


def plan_options(body: F) -> F:
    """Adds the options that decide a plan; the body gets them as one argument, `plan_options`."""

    @functools.wraps(body)
    def gathered(*args: Any, **options: Any) -> Any:
        chosen = {name: options.pop(name) for name in _NAMES}
        group = chosen["group_size"]
        gathered_options = PlanOptions(
            chosen["selector"],
            _bits(chosen["selector_bits"]),
            _bits(chosen["record_bits"]),
            chosen["codec"],
            None if group is None else ROW_GROUP if group == "row" else int(group),
            int(chosen["scale_bits"]),
            _bits(chosen["dense_bits"]),
        )
        return body(*args, plan_options=gathered_options, **options)

    for option in reversed(_OPTIONS):
        option(gathered)
    return gathered  # type: ignore[return-value]  # click calls it with the options it has added


def _bits(text: str | None) -> Bits:
    return text if text is None or text == SOURCE else float(text)


def given_plan_options() -> list[str]:
    """Which of these options stand on the command line."""
    return given_options(*_NAMES)


def given_options(*names: str) -> list[str]:
    """Which of the command's options, by their parameters' names, stand on the command line."""
    context = click.get_current_context()
    given = [name for name in names if context.get_parameter_source(name) is not ParameterSource.DEFAULT]
    return [f"--{name.replace('_', '-')}" for name in given]


def workers_option(body: F) -> F:
    """Adds the number of threads."""
    return click.option(
        "--workers",
        type=click.IntRange(1, 256),
        default=os.cpu_count() or 1,
        help="Experts worked on at once.  [default: all cores]",
    )(body)


def memory_option(body: F) -> F:
    """Adds the memory that items at work at once hold."""
    return click.option(
        "--memory",
        "memory_bytes",
        callback=lambda context, parameter, value: read_size(value),
        default=f"{MEMORY_BYTES >> 30}G",
        show_default=True,
        metavar="SIZE",
        help="What experts worked on at once may hold between them. Calibrated ones hold some hundred MiB each: with "
        "many cores, more memory is less time.",
    )(body)


def large_bytes(layout: PackLayout) -> int:
    """Bytes of a pack's large files, padding apart."""
    return sum(item.num_bytes for item in layout.items())


@contextmanager
def pack_bar(layout: PackLayout) -> Iterator[Callable[[Progress], None]]:
    """A bar over a pack's large files on standard error, on a terminal only; what is yielded moves it."""
    with tqdm(total=large_bytes(layout), unit="B", unit_scale=True, disable=None, leave=False) as bar:

        def advance(progress: Progress) -> None:
            if not progress.what:  # the first report: what an earlier run left is no work of this one
                bar.initial = progress.done_bytes
            bar.set_postfix_str(progress.what, refresh=False)
            bar.update(progress.done_bytes - bar.n)

        yield advance
