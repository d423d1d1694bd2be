"""What commands share: the options that decide a plan of those that write packs, and bars over bytes."""

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import click
from click.core import ParameterSource
from tqdm import tqdm

from moe_pack.convert.pipeline import Progress
from moe_pack.convert.source_formats import SOURCE, Bits, keep_source
from moe_pack.formats import (
    ROW_GROUP,
    SELECTORS,
    Checkpoint,
    ModelSpec,
    PackLayout,
    Plan,
    PlanError,
    Quantizer,
    Selector,
    part_format,
    uniform_plan,
)

F = TypeVar("F", bound=Callable[..., Any])
_BITS = click.Choice(["1", "2", "3", "4", "8", "16", SOURCE])
_EXPERT_BITS = 4  # of experts that are not in codes already, where nothing else is asked for
_USUAL = f"source for FP8 and MXFP4, else {_EXPERT_BITS}"
_GROUPS = ("16", "32", "64", "128", "row")


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """How every expert, and what is dense, shall be stored."""

    selector: Selector
    selector_bits: Bits
    record_bits: Bits
    group: int
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
            part_format(_width(bits, _EXPERT_BITS), self.group, self.scale_bits)
            for bits in (self.selector_bits, self.record_bits)
        )
        width = _width(self.dense_bits, 16)
        dense = None if width == 16 else part_format(width, self.group, self.scale_bits)
        return uniform_plan(spec, self.selector, selector, record, dense, quantizer)


def _width(bits: Bits, usual: int) -> int:
    """The width of what is not kept: what was given, or the usual one; 16 where the source shall be kept."""
    if bits == SOURCE:
        return 16
    return bits if isinstance(bits, int) else usual


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
        type=_BITS,
        help=f"Width of the selector's weights; source: what the checkpoint has, without loss.  [default: {_USUAL}]",
    ),
    click.option(
        "--record-bits",
        type=_BITS,
        help="Width of the neuron records' weights; source: what the checkpoint has, without loss. FP8 and MXFP4 are "
        f"kept wherever the width is not below theirs.  [default: {_USUAL}]",
    ),
    click.option(
        "--group-size",
        type=click.Choice(_GROUPS),
        default="64",
        show_default=True,
        help="Weights that share a scale and a zero; row: one pair a row.",
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
        type=_BITS,
        help="Width of attention, embedding, head, shared experts and dense layers; source, and 16, do not quantize "
        "them. Norms, biases and routers never are.  [default: source]",
    ),
)
_NAMES = ("selector", "selector_bits", "record_bits", "group_size", "scale_bits", "dense_bits")


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
            ROW_GROUP if group == "row" else int(group),
            int(chosen["scale_bits"]),
            _bits(chosen["dense_bits"]),
        )
        return body(*args, plan_options=gathered_options, **options)

    for option in reversed(_OPTIONS):
        option(gathered)
    return gathered  # type: ignore[return-value]  # click calls it with the options it has added


def _bits(text: str | None) -> Bits:
    return text if text is None or text == SOURCE else int(text)


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
