"""The command `moe-pack upload`: a pack with its model card goes to a repository of the hub."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from moe_pack import formats
from moe_pack.formats import hub
from moe_pack.formats.base import cli, commands
from moe_pack.formats.hub.cli import PACK

_SIDECARS = ("*.json", "*.safetensors")


@dataclass(frozen=True, slots=True)
class UploadOptions:
    """The options of `upload`."""

    private: bool = commands.option_field(
        False, "--private", help="Create the repository as a private one, if it is new."
    )
    dry_run: bool = commands.option_field(
        False, "--dry-run", help="Upload nothing: print the files, their bytes and the model card."
    )
    base_model: str | None = commands.option_field(
        None,
        "--base-model NAME",
        help="The hub id of the checkpoint, for the model card. The license is that which its own page names.",
    )
    command: str | None = commands.option_field(
        None, "--command TEXT", help="The command that made the pack, for the model card."
    )
    budget: str | None = commands.option_field(
        None, "--budget SIZE", help="A memory in which the pack runs, for the model card, such as 11G."
    )


@click.command("upload")
@click.argument("pack", type=PACK)
@click.argument("name")
@cli.options_from(UploadOptions)
@cli.command_errors(interrupted="interrupted; uploaded files are kept; run the same command again to continue")
def upload_command(pack: Path, name: str, options: UploadOptions) -> None:
    """Upload PACK to the hub as NAME: owner/repository, or owner/repository:variant for one of several packs.

    \b
    moe-pack upload packed/ someone/Mixtral-8x7B-moe-pack:4bit --base-model mistralai/Mixtral-8x7B-v0.1

    The pack is checked first. The repository is created if it is new. Its card (README.md) gets a section with the
    pack's bits and what moe-pack eval measured; what else the card says is kept. Log in with hf auth login, or set
    HF_TOKEN. Files that an interrupted upload has finished are not uploaded again.
    """
    from moe_pack.convert.hub import CardFacts, card_text
    from moe_pack.formats.pack.reader import audit

    target = hub.parse_name(name)
    if target is None or target.revision is not None:
        raise formats.UsageError(f"NAME: found {name!r}, expected owner/repository or owner/repository:variant")
    client = hub.import_client(target, formats.ConversionError)
    with formats.Pack(pack) as opened:
        with cli.TerminalProgress() as progress:
            audit(opened, progress)
        files = _files(opened)
        facts = CardFacts(options.base_model, _license(options.base_model), options.command, options.budget)
        card = card_text(_old_card(target), opened, target, facts)
    if options.dry_run:
        for path in files:
            click.echo(f"{path.stat().st_size:>15,} {target.path(path.name)}", err=True)
        click.echo(f"{formats.size_text(sum(path.stat().st_size for path in files))} in {len(files)} files", err=True)
        click.echo(card)
        return
    name = f"uploading {formats.size_text(sum(path.stat().st_size for path in files))}"
    # On a terminal the hub's client shows bars of its own.
    with (
        cli.TerminalProgress() as progress,
        nullcontext() if sys.stderr.isatty() else commands.stage_of(progress, name),
    ):
        _upload(client, target, files, card, options.private)
    click.echo(f"{pack}: is now {client.constants.ENDPOINT}/{target.repository}; run it: moe-run {target.text()}")


def _upload(client: Any, target: hub.HubName, files: list[Path], card: str, private: bool) -> None:
    from moe_pack.convert.hub import CARD_FILE

    api = client.HfApi(library_name="moe-pack")
    repository = target.repository
    hub.patiently(
        target, formats.ConversionError, lambda: api.create_repo(repository, private=private or None, exist_ok=True)
    )

    def commit() -> None:
        added = [client.CommitOperationAdd(target.path(path.name), str(path)) for path in files]
        added.append(client.CommitOperationAdd(CARD_FILE, card.encode()))
        what = f"Add the pack {target.variant}".rstrip()
        try:
            api.create_commit(repository, added, commit_message=f"{what} with moe-pack")
        except RuntimeError as fault:  # in which the client wraps what stopped a file
            if isinstance(fault.__cause__, Exception):
                raise fault.__cause__ from fault
            raise

    hub.patiently(target, formats.ConversionError, commit)


def _files(pack: formats.Pack) -> list[Path]:
    from moe_pack.formats.pack.manifests import MANIFEST_FILE

    listed = {MANIFEST_FILE, *(f.name for f in pack.manifest.files), *(f.name for f in pack.manifest.expert_files)}
    sidecars = {path.name for pattern in _SIDECARS for path in pack.folder.glob(pattern) if path.is_file()}
    return [pack.folder / name for name in sorted(listed | sidecars)]


def _license(base_model: str | None) -> str | None:
    if base_model is None:
        return None
    name = hub.parse_name(base_model)
    if name is None:
        raise formats.UsageError(f"--base-model: found {base_model!r}, expected a hub id such as owner/repository")
    return hub.HubRepository(name, formats.ConversionError).license


def _old_card(target: hub.HubName) -> str | None:
    from moe_pack.convert.hub import CARD_FILE

    if not hub.has_repository(target, formats.ConversionError):
        return None
    repository = hub.HubRepository(target, formats.ConversionError)
    if CARD_FILE not in repository.files:
        return None
    return repository.read(CARD_FILE, 0, repository.files[CARD_FILE].num_bytes).tobytes().decode()
