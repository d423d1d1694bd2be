"""Arguments of commands: a pack, a checkpoint or a model, by its path or by its name."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from moe_pack.formats.base import cli, errors
from moe_pack.formats.base.commands import check_is_folder
from moe_pack.formats.hub.names import parse_name, source_name


class _Pack(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.5
    """The path of a pack, or its name on the hub. A path that leads nowhere is refused before torch is imported."""

    name = "path"

    def __init__(self, exit_code: int = 1) -> None:
        self._exit_code = exit_code  # of that refusal

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Returns the path."""
        try:
            _check_pack(str(value))
        except errors.MoePackError as fault:
            raise cli.failure_of(fault, self._exit_code) from fault
        return Path(value)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Lets the shell complete folders."""
        return [CompletionItem(incomplete, type="dir")]


class _Named(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.5
    """A path, or a name of a model."""

    name = "text"

    def __init__(self, check: Callable[[str], object], names: Callable[[], Iterable[str]]) -> None:
        self._check = check  # raises for a text that is neither
        self._names = names  # returns the names that completion offers

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Returns the text."""
        if (wrong := cli.text_fault(value)) is not None:
            self.fail(wrong, param, ctx)
        try:
            if not Path(value).exists():
                self._check(value)
        except errors.MoePackError as fault:
            raise cli.failure_of(fault) from fault
        return value

    def list_option(self, body: Any) -> Any:
        """Adds the option `--list`, which prints all names and ends the command."""

        def show(context: click.Context, parameter: click.Parameter, is_given: bool) -> None:
            if is_given and not context.resilient_parsing:
                click.echo("\n".join(sorted(self._names())))
                context.exit()

        return click.option(
            "--list", is_flag=True, is_eager=True, expose_value=False, callback=show, help="Print the names of models."
        )(body)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Returns names and folders that begin so; without one, the shell completes paths."""
        texts = [*sorted(self._names()), *sorted(f"{path}/" for path in Path().iterdir() if path.is_dir())]
        found = [CompletionItem(text) for text in texts if text.startswith(incomplete)]
        return found or [CompletionItem(incomplete, type="file")]


def _check_pack(text: str) -> None:
    path = Path(text)
    if not path.exists():
        if parse_name(text) is not None:
            return
        if text.lower() in _short_names():
            raise errors.PackError(
                f"{text}: no such folder; this is a model's name, and a pack of the model is needed; make one first: "
                f"moe-pack convert {text} -o packed/"
            )
    check_is_folder(path)


def _check_model(name: str) -> None:
    from moe_pack.formats.families.published import published_name

    _ = source_name(name) if "/" in name else published_name(name)


def _short_names() -> Iterable[str]:
    from moe_pack.formats.families import short_names

    return short_names()


def _published_names() -> Iterable[str]:
    from moe_pack.formats.families.published import published_names

    return published_names()


PACK = _Pack()
PACK_TO_CHECK = _Pack(exit_code=3)
CHECKPOINT = _Named(source_name, _short_names)
MODEL = _Named(_check_model, _published_names)


def pack_folder(pack: Path) -> Path:
    """Returns the folder of a command's pack; one on the hub is downloaded and checked first. Raises as `find_pack`."""
    if pack.exists() or parse_name(str(pack)) is None:
        return pack
    from moe_pack.formats.hub.packs import find_pack

    with cli.TerminalProgress() as progress:
        return find_pack(pack, progress)
