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
from moe_pack.formats import (
    ROW_GROUP,
    SELECTORS,
    ModelSpec,
    PackLayout,
    Plan,
    Quantizer,
    Selector,
    part_format,
    uniform_plan,
)

F = TypeVar("F", bound=Callable[..., Any])
_BITS = click.Choice(["1", "2", "3", "4", "8", "16"])
_GROUPS = ("16", "32", "64", "128", "row")


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """How every expert, and what is dense, shall be stored."""

    selector: Selector
    selector_bits: int
    record_bits: int
    group: int
    scale_bits: int
    dense_bits: int

    def plan(self, spec: ModelSpec, quantizer: Quantizer) -> Plan:
        """The plan for a model.

        Raises:  PlanError if these formats cannot hold its rows.
        """
        selector, record, dense = (
            part_format(bits, self.group, self.scale_bits)
            for bits in (self.selector_bits, self.record_bits, self.dense_bits)
        )
        return uniform_plan(spec, self.selector, selector, record, None if self.dense_bits == 16 else dense, quantizer)


_OPTIONS = (
    click.option(
        "--selector",
        type=click.Choice(SELECTORS),
        default="up",
        show_default=True,
        help="Which matrix decides what neurons run, and is stored apart to be read whole.",
    ),
    click.option(
        "--selector-bits", type=_BITS, default="4", show_default=True, help="Width of the selector's weights."
    ),
    click.option(
        "--record-bits", type=_BITS, default="4", show_default=True, help="Width of the neuron records' weights."
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
        default="16",
        show_default=True,
        help="Width of attention, embedding, head, shared experts and dense layers; 16 does not quantize them. "
        "Norms, biases and routers never are.",
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
            int(chosen["selector_bits"]),
            int(chosen["record_bits"]),
            ROW_GROUP if group == "row" else int(group),
            int(chosen["scale_bits"]),
            int(chosen["dense_bits"]),
        )
        return body(*args, plan_options=gathered_options, **options)

    for option in reversed(_OPTIONS):
        option(gathered)
    return gathered  # type: ignore[return-value]  # click calls it with the options it has added


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
