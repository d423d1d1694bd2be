"""The text and the source of measurements as options, and what several commands do: open, find, write."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from moe_pack import formats, runtime
from moe_pack.convert.options import FIELD_OPTION
from moe_pack.formats.base import cli, commands

if TYPE_CHECKING:
    from moe_pack.formats.families import Checkpoint

INTERRUPTED = "interrupted; the finished part is kept; run the same command again to continue"
EVAL_TOKENS = 8192  # of `eval` and `check`, by default


@dataclass(frozen=True, slots=True)
class EvalOptions:
    """The text on which a pack is measured, and the source that it is compared with. None: the default."""

    against: str | None = commands.option_field(
        None,
        "--against PATH",
        help="The checkpoint that the pack was made from (as for convert), or a reference of it "
        "(--keep-reference): measure KL divergence, agreement, and the growth of perplexity.",
    )
    data: str | None = commands.option_field(
        None,
        "--data NAME_OR_FILE",
        help="The text, as for profile.  [default: the end of our sample, which profiles do not use by default]",
    )
    field_name: str | None = field(default=None, metadata=FIELD_OPTION)
    num_tokens: int | None = commands.option_field(
        None, "--tokens N", least=256, help=f"Number of tokens.  [default: {EVAL_TOKENS}]"
    )
    keep_reference: Path | None = commands.option_field(
        None,
        "--keep-reference DIR",
        path="folder",
        mark="source",
        help="Write the source's predictions to DIR; --against DIR then needs no checkpoint. Predictions of the "
        "same model and text that are there already are used; others are refused.",
    )
    tasks: Path | None = commands.option_field(
        None,
        "--tasks FILE.jsonl",
        help="Also answer multiple-choice tasks: a JSON object a line with prompt, choices and answer (the number "
        "of the right choice, from 0).",
    )
    exact: bool = commands.option_field(
        False,
        "--exact",
        mark="source",
        help="Compute the KL divergence over the whole vocabulary: the source runs together with the pack.",
    )
    prices: bool = commands.option_field(
        False, "--prices", help="Also measure what more sparsity and moe-run --substitute would cost this pack."
    )
    as_json: bool = commands.option_field(False, "--json", help="Print the measurements as JSON.")
    device: Literal["cpu", "cuda"] = field(default="cpu", metadata=runtime.DEVICE_OPTION)

    @property
    def reference_file(self) -> Path | None:
        """The reference that `against` names; None if it names a checkpoint."""
        from moe_pack.calib.evaluate import REFERENCE_FILE
        from moe_pack.formats.gguf import find_gguf

        if self.against is None:
            return None
        path = Path(self.against)
        if path.is_dir():
            path = path / REFERENCE_FILE
            return path if path.is_file() and not path.with_name("config.json").exists() else None
        return path if path.is_file() and find_gguf(path) is None else None

    def check(self) -> None:
        """Refuses options that do not go together; raises UsageError."""
        of_text = (self.data, self.field_name, self.num_tokens)
        if self.reference_file is not None and of_text != (None, None, None):
            raise formats.UsageError(
                "--data/--field/--tokens: a reference has its own text; remove them, or give the checkpoint with "
                "--against"
            )
        if self.against is None or self.reference_file is not None:
            for name in commands.given(self, "source"):
                raise formats.UsageError(f"{name} runs the source; give the checkpoint with --against")
        if self.prices and self.against is None:
            raise formats.UsageError(
                "--prices are stored together with the loss; give the checkpoint or a reference with --against"
            )
        if self.exact and self.keep_reference is not None:
            raise formats.UsageError(
                "--exact makes no reference, because it compares with the source itself; remove --keep-reference"
            )


def checkpoint_at(source: str) -> Checkpoint:
    """Opens a checkpoint by its folder or its name on the hub, with progress; raises CheckpointError."""
    from moe_pack.convert import find_checkpoint
    from moe_pack.formats.families import Checkpoint

    with cli.TerminalProgress() as progress:
        return Checkpoint(find_checkpoint(source, progress))


def quiet_ray() -> None:
    """Keeps Ray from sending usage statistics and from hiding GPUs, neither of which `--ray` asks for."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")


def known_facts(folder: Path) -> runtime.MachineFacts | None:
    """Returns the facts that `doctor` stored of this machine and a folder's disk; RunError if they are damaged."""
    nearest = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    return runtime.load_facts(cli.cache_folder(), nearest)


def write_output(path: Path, content: bytes, option_name: str, appends: bool = False) -> None:
    """Writes the file that an option names, or appends to it; raises ConversionError if that fails."""
    try:
        with path.open("ab" if appends else "wb") as file:
            file.write(content)
    except OSError as fault:
        raise formats.ConversionError(
            f"{option_name} {path}: cannot be written ({fault.strerror}); give another file"
        ) from fault
