"""What commands share that plan for a memory: the options that say which, and what is printed of them."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
import torch
from click.core import ParameterSource

from moe_pack.convert.cards import CARDS, MEASURE
from moe_pack.convert.planner import SEARCHES
from moe_pack.convert.presets import PRESET_NAMES
from moe_pack.convert.target import USUAL_CONTEXT, USUAL_LIMIT, Device, Limit, Target, parse_limit
from moe_pack.formats.cli import cache_folder, read_size
from moe_pack.runtime import MachineFacts, load_facts

F = TypeVar("F", bound=Callable[..., Any])


def _size(context: click.Context, parameter: click.Parameter, value: str | None) -> int | None:
    return None if value is None else read_size(value)


def _limit(context: click.Context, parameter: click.Parameter, value: str) -> Limit:
    found = parse_limit(value)
    if found is None:
        raise click.BadParameter(f"found {value!r}, expected a share of perplexity such as 1%, or nats such as 0.02")
    return found


_OPTIONS = (
    click.option(
        "--target-vram",
        callback=_size,
        metavar="SIZE",
        help="Memory that the pack shall run in, such as 11G: a card's, or with --device cpu the machine's.",
    ),
    click.option(
        "--max-loss",
        callback=_limit,
        default=f"{100 * USUAL_LIMIT.value:g}%",
        show_default=True,
        metavar="P%|KL",
        help="The most that the pack may lose: growth of perplexity, or nats of KL divergence a token.",
    ),
    click.option(
        "--context",
        "context_tokens",
        type=click.IntRange(1),
        metavar="N",
        help=f"Tokens of key-value cache to make room for.  [default: {USUAL_CONTEXT}, or the model's maximum]",
    ),
    click.option(
        "--device",
        type=click.Choice(["auto", "cpu", "cuda"]),
        default="auto",
        show_default=True,
        help="What shall compute; auto: a card if there is one here, or --gpu or --link says so.",
    ),
    click.option(
        "--gpu",
        metavar="NAME",
        help=f"The card: {', '.join(CARDS)}, or {MEASURE} for this machine's.",
    ),
    click.option(
        "--link",
        "link_rate",
        callback=_size,
        metavar="SIZE",
        help="Bytes a second from host memory to the card, such as 25G.  [default: the doctor's, or 16 GB/s]",
    ),
    click.option(
        "--ram",
        "ram_bytes",
        callback=_size,
        metavar="SIZE",
        help="Host memory for what the card cannot hold; the rest comes from the drive.  [default: 75% of this "
        "machine's]",
    ),
    click.option(
        "--search",
        type=click.Choice(SEARCHES),
        default=SEARCHES[0],
        show_default=True,
        help="How formats are chosen.",
    ),
    click.option("--preset", type=click.Choice(PRESET_NAMES), help="A paper's pack in place of a search."),
)
_NAMES = (
    "target_vram",
    "max_loss",
    "context_tokens",
    "device",
    "gpu",
    "link_rate",
    "ram_bytes",
    "search",
    "preset",
)
_OF_CARDS = ("gpu", "link_rate", "ram_bytes")
_OF_SEARCHES = ("max_loss", "search")
_FLAGS = {"context_tokens": "--context", "link_rate": "--link", "ram_bytes": "--ram"}


def target_options(body: F) -> F:
    """Adds the options that say what to plan for; the body gets `target`: None without --target-vram.

    Usage errors: one of the others without --target-vram; one that the device or the preset has no use for.
    """

    @functools.wraps(body)
    def gathered(*args: Any, **options: Any) -> Any:
        chosen = {name: options.pop(name) for name in _NAMES}
        return body(*args, target=_target(chosen), **options)

    for option in reversed(_OPTIONS):
        option(gathered)
    return gathered  # type: ignore[return-value]  # click calls it with the options it has added


def _target(chosen: dict[str, Any]) -> Target | None:
    given = [name for name in _NAMES if _is_given(name)]
    if chosen["target_vram"] is None:
        if given:
            raise click.UsageError(f"{_flag(given[0])}: says how to plan for a memory; give --target-vram too")
        return None
    device = _device(chosen["device"], given)
    if device == "cpu" and (wrong := [name for name in _OF_CARDS if name in given]):
        raise click.UsageError(f"{_flag(wrong[0])}: is of a card; leave it out with --device cpu")
    if chosen["preset"] is not None and (wrong := [name for name in _OF_SEARCHES if name in given]):
        raise click.UsageError(f"{_flag(wrong[0])}: preset {chosen['preset']} decides by itself; leave it out")
    return Target(
        chosen["target_vram"],
        device,
        chosen["max_loss"],
        chosen["context_tokens"],
        chosen["ram_bytes"],
        chosen["link_rate"],
        chosen["gpu"],
        chosen["search"],
        chosen["preset"],
    )


def _is_given(name: str) -> bool:
    return click.get_current_context().get_parameter_source(name) is ParameterSource.COMMANDLINE


def _flag(name: str) -> str:
    return _FLAGS.get(name, f"--{name.replace('_', '-')}")


def _device(asked: str, given: list[str]) -> Device:
    if asked != "auto":
        return "cpu" if asked == "cpu" else "cuda"
    is_card = "gpu" in given or "link_rate" in given or torch.cuda.is_available()
    return "cuda" if is_card else "cpu"


def known_facts(folder: Path) -> MachineFacts | None:
    """What `doctor` measured of this machine and of the drive that holds a folder, which need not be there yet.

    Raises:  RunError if what was kept is damaged.
    """
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    return load_facts(cache_folder(), there)
