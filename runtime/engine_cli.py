"""The options of `moe-run` that say how a pack is run: where, within what memory, by which policy."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, get_args

import click

from moe_pack.formats.cli import read_size
from moe_pack.runtime.engine import EngineName, EngineOptions, KernelsName, KvDtype, ReadMode, Verify
from moe_pack.runtime.policies import PRESETS
from moe_pack.runtime.streaming import Trust

F = TypeVar("F", bound=Callable[..., Any])


def _size(context: click.Context, parameter: click.Parameter, value: str | None) -> int | None:
    return None if value is None else read_size(value)


_OPTIONS = (
    click.option(
        "--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True, help="Where to compute."
    ),
    click.option(
        "--budget",
        callback=_size,
        metavar="SIZE",
        help="Memory for weights, key-value cache and what computing needs, as 11G or 800M: of the card with --device "
        "cuda, all that the driver charges included; experts that do not fit stream.  [default: as much as is free]",
    ),
    click.option(
        "--engine",
        type=click.Choice(get_args(EngineName)),
        default="auto",
        show_default=True,
        help="With --device cuda: graph runs a token as one CUDA graph, which pulls what the card lacks from host "
        "memory; staged brings experts layer by layer, by any policy, from the drive too; auto: graph where it can.",
    ),
    click.option(
        "--ram",
        callback=_size,
        metavar="SIZE",
        help="With --device cuda: host memory for experts; those of a larger pack come from the drive.  "
        "[default: three quarters of what is free]",
    ),
    click.option(
        "--kv-dtype",
        type=click.Choice(get_args(KvDtype)),
        help="Keys and values in 32 or 16 bit.  [default: f32 on the CPU, which has no other, bf16 on a card]",
    ),
    click.option(
        "--policy",
        type=click.Choice(["auto", *PRESETS]),
        default="auto",
        show_default=True,
        help="Which experts stay in memory and which are read ahead; auto keeps as the policy does that hits most on "
        "the profile's routes, where the pack has them, and foretells by what the profile found best.",
    ),
    click.option("--no-prefetch", is_flag=True, help="Read no expert before its router has chosen it."),
    click.option(
        "--cutover",
        type=click.FloatRange(0, 1),
        metavar="SHARE",
        help="Read single rows of an expert where less than this share of its neurons runs.  [default: where it pays, "
        "once moe-pack doctor has measured the drive; else the policy's]",
    ),
    click.option(
        "--read",
        type=click.Choice(get_args(ReadMode)),
        default="auto",
        show_default=True,
        help="direct: past the system's cache; pread: through it; map: use mapped files, which keeps to no budget.",
    ),
    click.option(
        "--verify",
        type=click.Choice(get_args(Verify)),
        default="lazy",
        show_default=True,
        help="Check experts when they are first read, all files before the first token, or not at all.",
    ),
    click.option(
        "--substitute",
        type=click.FloatRange(0, 1),
        metavar="ALPHA",
        help="CHANGES THE ANSWER: experts that hardly count give way to similar ones in memory.  [default: off]",
    ),
    click.option(
        "--trust-prediction",
        is_flag=True,
        help="CHANGES THE ANSWER: where single rows are read, only those that were foretold run.",
    ),
    click.option(
        "--threads", "-t", type=click.IntRange(1, 1024), help="CPU threads at work; all that may be used if not given."
    ),
    click.option(
        "--kernels",
        type=click.Choice(get_args(KernelsName)),
        default="auto",
        show_default=True,
        help="What computes on the CPU: the best native kernels for this machine, certain ones, or plain torch.",
    ),
    click.option("--strict", is_flag=True, help="End with an error where something would fall back on another way."),
    click.option(
        "--trace",
        type=click.Path(path_type=Path, dir_okay=False),
        metavar="FILE",
        help="Write what happened when, to be opened in ui.perfetto.dev.",
    ),
    click.option(
        "--record",
        type=click.Path(path_type=Path, dir_okay=False),
        metavar="FILE",
        help="Write what the routers chose, for moe-pack replay.",
    ),
)


def engine_options(body: F) -> F:
    """Adds these options; the body gets them as one argument, `engine`."""

    @functools.wraps(body)
    def gathered(
        *args: Any,
        budget: int | None,
        no_prefetch: bool,
        substitute: float | None,
        trust_prediction: bool,
        strict: bool,
        device: str,
        engine: str,
        ram: int | None,
        kv_dtype: str | None,
        policy: str,
        cutover: float | None,
        read: str,
        verify: str,
        threads: int | None,
        kernels: str,
        trace: Path | None,
        record: Path | None,
        **options: Any,
    ) -> Any:
        chosen = EngineOptions(
            device=device,  # type: ignore[arg-type]  # click.Choice keeps to the literals, here and below
            engine=engine,  # type: ignore[arg-type]
            budget_bytes=budget,
            ram_bytes=ram,
            kv_dtype=kv_dtype,  # type: ignore[arg-type]
            policy=policy,  # type: ignore[arg-type]
            foretells=not no_prefetch,
            cutover=cutover,
            read=read,  # type: ignore[arg-type]
            verify=verify,  # type: ignore[arg-type]
            threads=threads,
            kernels=kernels,  # type: ignore[arg-type]
            trust=Trust(substitute, trust_prediction),
            is_strict=strict,
            trace=trace,
            record=record,
        )
        return body(*args, engine=chosen, **options)

    for option in reversed(_OPTIONS):
        option(gathered)
    return gathered  # type: ignore[return-value]  # click calls it with the options it has added
