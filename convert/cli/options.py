"""Options that several commands share, and the facts of this machine.

`PlanOptions` says how every matrix is stored; `EvalOptions` says on what text a pack is measured, and against what.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from moe_pack import formats, runtime
from moe_pack.convert import options
from moe_pack.formats import hub
from moe_pack.formats.base import cli, commands
from moe_pack.formats.pack.plans import TRELLIS_WIDTHS
from moe_pack.formats.parts.specs import with_repeats

if TYPE_CHECKING:
    import torch

    from moe_pack.convert import ray_launcher
    from moe_pack.formats.families import Checkpoint

INTERRUPTED = "interrupted; the finished part is kept; run the same command again to continue"
NUM_CORES = os.cpu_count() or 1
CALIBRATION_TOKENS = 16384  # of a profile and of thresholds, by default
EVAL_TOKENS = 8192  # of `eval` and `check`, by default
SEQUENCE_LENGTH = 512  # tokens of a sequence, by default

WORKERS_OPTION = formats.option(
    "--workers", least=1, most=256, help="Number of experts worked on at once, one thread each.  [default: all cores]"
)
FIELD_OPTION = formats.option(
    "--field",
    metavar="F",
    help="The field of JSONL, Parquet or a data set that contains the text or the messages of a conversation.  "
    "[default: text, messages or conversations]",
)


@dataclass(frozen=True, slots=True)
class PartOptions:
    """How several machines share the work. At most one of `part` and `ray` is given."""

    part: commands.Part | None = field(
        default=None,
        metadata=formats.option(
            "--part",
            parse=commands.Part.of,
            metavar="I/N",
            mark="many",
            help="Make part I of N; run the same command with each I, on as many machines, over an output folder that "
            "all of them see. A part that is done makes what others have left, so any part may be killed, and the "
            "result has the bytes of one process. The same command without --part continues too.",
        ),
    )
    ray: str | None = field(
        default=None,
        metadata=formats.option(
            "--ray",
            metavar="ADDRESS",
            mark="many",
            help="Let a Ray cluster make the parts, over an output folder that all its machines see: auto is the "
            "cluster that runs on this machine, HOST:PORT that of a head node, local a new one of this machine.",
        ),
    )
    num_parts: int | None = field(
        default=None,
        metadata=formats.option(
            "--parts",
            least=1,
            metavar="N",
            mark="many",
            help="With --ray: number of parts.  [default: as many as the cluster has room for, by CPUs and memory]",
        ),
    )

    def check(self) -> None:
        """Refuses options that do not go together.

        Raises:  UsageError.
        """
        if self.ray is not None and self.part is not None:
            raise formats.UsageError(
                "--ray makes all parts; remove --part, or remove --ray and start each part yourself"
            )
        if self.num_parts is not None and self.ray is None:
            raise formats.UsageError("--parts needs --ray; add it, or start each part yourself with --part I/N")
        if self.ray is not None and "://" in self.ray:
            raise formats.UsageError(
                f"--ray {self.ray}: the command must run on a machine of the cluster; give auto or HOST:PORT there"
            )


PlanCodec = Literal["auto", "affine", "trellis"]
_EXPERT_BITS_CHOICE = ("1", "2", "2.5", "3", "3.5", "4", "8", "16", options.SOURCE)
_TRELLIS_BITS = tuple(width / 2 for width in TRELLIS_WIDTHS)
_AFFINE_GROUP = 64  # by default; a trellis has one scale a row
_EXPERT_BITS = 4  # by default, of experts that the checkpoint does not have in codes
_DEFAULT_BITS = f"source for FP8 and MXFP4, else {_EXPERT_BITS}"


def _bits(text: str) -> options.Bits:
    return text if text == options.SOURCE else float(text)


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """How all experts and all dense matrices are stored. None: the default, which may depend on the checkpoint."""

    selector: formats.Selector | None = field(
        default=None,
        metadata=formats.option(
            "--selector",
            help="The matrix whose activations decide which neurons run. It is stored apart from the records, so that "
            "it can be read whole.  [default: up]",
        ),
    )
    selector_bits: options.Bits = field(
        default=None,
        metadata=formats.option(
            "--selector-bits",
            choices=_EXPERT_BITS_CHOICE,
            parse=_bits,
            help="Bits of a weight of the selector. source keeps what the checkpoint has, without loss.  "
            f"[default: {_DEFAULT_BITS}]",
        ),
    )
    record_bits: options.Bits = field(
        default=None,
        metadata=formats.option(
            "--record-bits",
            choices=_EXPERT_BITS_CHOICE,
            parse=_bits,
            help="Bits of a weight of the records. source keeps what the checkpoint has, without loss. FP8 and MXFP4 "
            f"codes are also kept if these bits are not below theirs.  [default: {_DEFAULT_BITS}]",
        ),
    )
    codec: PlanCodec = field(
        default="auto",
        metadata=formats.option(
            "--codec",
            help="The codec of expert weights of 4 bits and less. affine has equal steps. In trellis a value also "
            "depends on the codes before it; it loses least for its bytes, and only trellis has 2.5 and 3.5 bits. "
            "auto is trellis if the quantizer is calibrated, and for half bits.",
        ),
    )
    group: int | None = field(
        default=None,
        metadata=formats.option(
            "--group-size",
            choices=("16", "32", "64", "128", "row"),
            parse=lambda text: formats.ROW_GROUP if text == "row" else int(text),
            help="Number of weights that share a scale (in affine also a zero); row is the whole row.  [default: row "
            f"for a trellis, {_AFFINE_GROUP} for affine]",
        ),
    )
    scale_bits: int = field(
        default=16,
        metadata=formats.option(
            "--scale-bits",
            choices=("8", "16"),
            parse=int,
            help="Width of scales and zeros; 8 saves bytes if groups are small.",
        ),
    )
    dense_bits: options.Bits = field(
        default=None,
        metadata=formats.option(
            "--dense-bits",
            choices=("1", "2", "3", "4", "8", "16", options.SOURCE),
            parse=_bits,
            help="Bits of a weight of attention, embedding, head, shared experts and dense layers. source and 16 keep "
            "the checkpoint's bytes. Norms, biases and routers always keep theirs.  [default: source]",
        ),
    )

    def plan(self, spec: formats.ModelSpec, quantizer: formats.Quantizer) -> formats.Plan:
        """Returns the plan for a model without a checkpoint.

        Raises:  PlanError if these formats cannot represent its rows, or an option says `source`.
        """
        bits = {"selector": self.selector_bits, "record": self.record_bits, "dense": self.dense_bits}
        for name, width in bits.items():
            if width == options.SOURCE:
                raise formats.PlanError(
                    f"--{name}-bits source: no checkpoint is given whose weights can be kept; give a width"
                )
        return self._planned(spec, quantizer)

    def plan_for(
        self, checkpoint: Checkpoint, quantizer: formats.Quantizer, repeats: int | None = None
    ) -> formats.Plan:
        """Returns the plan for a checkpoint, whose own codes are kept if they are not wider.

        Args:    repeats: neurons of each expert with two rows; None: the usual number where codes are calibrated.
        Raises:  PlanError if these formats cannot represent its rows, or no format keeps what `source` asks for.
        """
        from moe_pack.convert import keep_source
        from moe_pack.convert.kept import checkpoint_repeats

        plan = self._planned(checkpoint.spec, quantizer, repeats, checkpoint_repeats(checkpoint))
        return keep_source(checkpoint, plan, self.selector_bits, self.record_bits, self.dense_bits)

    def _planned(
        self, spec: formats.ModelSpec, quantizer: formats.Quantizer, repeats: int | None = 0, usual: int = 0
    ) -> formats.Plan:
        from moe_pack.calib.quantize import needs_inputs

        selector, record = (
            self._part(flag, _width(bits, _EXPERT_BITS), quantizer)
            for flag, bits in (("--selector-bits", self.selector_bits), ("--record-bits", self.record_bits))
        )
        width = _width(self.dense_bits, 16)
        dense = None if width == 16 else self._affine(width)
        is_calibrated = quantizer == "calibrated" and needs_inputs(record)
        if repeats is None:
            repeats = usual * is_calibrated
        if repeats and not is_calibrated:
            raise formats.PlanError(
                f"--repeats {repeats}: only calibrated codes of less than 8 bits repeat neurons; give a profile and "
                "such --record-bits, or remove --repeats"
            )
        if repeats > spec.expert.source_size:
            raise formats.PlanError(f"--repeats {repeats}: an expert has {spec.expert.source_size} neurons; give fewer")
        return formats.uniform_plan(
            with_repeats(spec, repeats), self.selector or "up", selector, record, dense, quantizer
        )

    def _part(self, flag: str, bits: float, quantizer: formats.Quantizer) -> formats.PartFormat:
        """Returns the format of experts' matrices with `bits` bits a weight."""
        fits = bits in _TRELLIS_BITS
        if self.codec == "trellis" and not fits and bits != 16:
            raise formats.PlanError(f"{flag} {bits:g}: a trellis has 2 to 4 bits a weight; use --codec affine")
        if self.codec == "affine" and bits % 1:
            raise formats.PlanError(f"{flag} {bits:g}: affine has whole bits only; use --codec trellis")
        if fits and (self.codec == "trellis" or (self.codec == "auto" and (quantizer == "calibrated" or bits % 1))):
            return formats.trellis_format(
                int(2 * bits), formats.ROW_GROUP if self.group is None else self.group, self.scale_bits
            )
        return self._affine(bits)

    def _affine(self, bits: float) -> formats.PartFormat:
        return formats.part_format(int(bits), _AFFINE_GROUP if self.group is None else self.group, self.scale_bits)


def _width(bits: options.Bits, default: int) -> float:
    """Returns the bits a weight before `keep_source`: the option's or the default; 16 where the source is kept."""
    if bits == options.SOURCE:
        return 16
    return bits if isinstance(bits, float | int) else default


@dataclass(frozen=True, slots=True)
class EvalOptions:
    """The text on which a pack is measured, and the source that it is compared with. None: the default."""

    against: str | None = field(
        default=None,
        metadata=formats.option(
            "--against",
            metavar="PATH",
            help="The checkpoint that the pack was made from (as for convert), or a reference of it "
            "(--keep-reference): measure KL divergence, agreement, and the growth of perplexity.",
        ),
    )
    data: str | None = field(
        default=None,
        metadata=formats.option(
            "--data",
            metavar="NAME_OR_FILE",
            help="The text, as for profile.  [default: the end of our sample, which profiles do not use by default]",
        ),
    )
    field_name: str | None = field(default=None, metadata=FIELD_OPTION)
    num_tokens: int | None = field(
        default=None,
        metadata=formats.option(
            "--tokens", least=256, metavar="N", help=f"Number of tokens.  [default: {EVAL_TOKENS}]"
        ),
    )
    keep_reference: Path | None = field(
        default=None,
        metadata=formats.option(
            "--keep-reference",
            path="folder",
            metavar="DIR",
            mark="source",
            help="Write the source's predictions to DIR; --against DIR then needs no checkpoint. Predictions of the "
            "same model and text that are there already are used; others are refused.",
        ),
    )
    tasks: Path | None = field(
        default=None,
        metadata=formats.option(
            "--tasks",
            metavar="FILE.jsonl",
            help="Also answer multiple-choice tasks: a JSON object a line with prompt, choices and answer (the number "
            "of the right choice, from 0).",
        ),
    )
    exact: bool = field(
        default=False,
        metadata=formats.option(
            "--exact",
            mark="source",
            help="Compute the KL divergence over the whole vocabulary: the source runs together with the pack.",
        ),
    )
    prices: bool = field(
        default=False,
        metadata=formats.option(
            "--prices", help="Also measure what more sparsity and moe-run --substitute would cost this pack."
        ),
    )
    as_json: bool = field(default=False, metadata=formats.option("--json", help="Print the measurements as JSON."))
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
        """Refuses options that do not go together.

        Raises:  UsageError.
        """
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


def chosen_device(name: str) -> torch.device:
    """Returns the device of this name.

    Raises:  PlanError if it is `cuda` and torch finds no GPU.
    """
    import torch

    if name == "cuda" and not torch.cuda.is_available():
        raise formats.PlanError("--device cuda: torch finds no GPU on this machine; use --device cpu")
    return torch.device(name)


def absolute_source(source: str) -> str:
    """Returns the name of a checkpoint under which other machines find it; one on the hub is in the cache of each."""
    return str(Path(source).absolute()) if Path(source).exists() else source


def run_on_ray(
    job: ray_launcher.Job,
    many: PartOptions,
    each: ray_launcher.Resources,
    progress: formats.Progress,
    stage: commands.Stage,
    done: Callable[[], tuple[int, str]],
) -> None:
    """Connects to the cluster that the options name, and makes all parts of a job there.

    Args:    each: what a part uses.   progress, stage, done: as for `Cluster.run`.
    Raises:  RunError, and what the parts raise.
    """
    from moe_pack.convert.ray_launcher import connected

    assert many.ray is not None, "the options name a cluster"
    # Neither usage statistics of a command line nor hidden GPUs are what a user asks for with --ray.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    with connected(many.ray) as cluster:
        room = cluster.num_parts(each)
        num_parts = many.num_parts or room
        cluster.check(job)
        progress.say(
            f"{num_parts} part{'' if num_parts == 1 else 's'} by Ray, {min(num_parts, room)} at once, each with {each}"
        )
        cluster.run(job, num_parts, each, progress, stage, done)


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """Whether a source on the hub is read without downloading it whole, and how much of it the disk may have."""

    is_given: bool = field(
        default=False,
        metadata=formats.option(
            "--stream",
            help="Read a source on the hub without downloading it whole: pieces are fetched when they are needed, and "
            "removed for others.",
        ),
    )
    space_bytes: int | None = field(
        default=None,
        metadata=formats.option(
            "--stream-space",
            parse=commands.read_size,
            metavar="SIZE",
            help="With --stream: disk space for pieces of the source, where the output is. With less, more pieces are "
            f"fetched twice.  [default: {hub.STREAM_BYTES >> 30}G]",
        ),
    )

    def check(self) -> None:
        """Refuses a space without `--stream`, and one too small.

        Raises:  UsageError.
        """
        if self.space_bytes is not None and not self.is_given:
            raise formats.UsageError("--stream-space needs --stream; add it or remove --stream-space")
        if self.space_bytes is not None and self.space_bytes < hub.LEAST_STREAM_BYTES:
            raise formats.UsageError(f"--stream-space: give at least {formats.size_text(hub.LEAST_STREAM_BYTES)}")


def checkpoint_at(source: str) -> Checkpoint:
    """Opens a checkpoint by its folder or its name on the hub, from where it may be downloaded, with progress.

    Raises:  CheckpointError.
    """
    from moe_pack.convert import find_checkpoint
    from moe_pack.formats.families import Checkpoint

    with cli.TerminalProgress() as progress:
        return Checkpoint(find_checkpoint(source, progress))


def open_source(source: str, stream: StreamOptions, output: Path) -> Checkpoint:
    """Opens a command's source: a folder, or a name of the hub, downloaded or streamed; prints how it is read.

    Args:    output: where the command writes; pieces of a streamed source are on the same disk.
    Raises:  CheckpointError; UsageError if --stream is given for a source on this disk.
    """
    from moe_pack.convert.hub import open_streamed
    from moe_pack.formats.families import Checkpoint

    if not stream.is_given:
        checkpoint = checkpoint_at(source)
    else:
        output.absolute().parent.mkdir(parents=True, exist_ok=True)
        space = hub.STREAM_BYTES if stream.space_bytes is None else stream.space_bytes
        checkpoint = Checkpoint(open_streamed(source, output.absolute().parent, space))
    for note in checkpoint.notes():
        click.echo(note, err=True)
    return checkpoint


def check_stream_space(files: hub.StreamedFiles, output: Path, output_bytes: int) -> str:
    """Returns a line that says how much of the disk a streamed source and the output need.

    Args:    output: a folder, in which an earlier run may have left files.   output_bytes: its size in the end.
    Raises:  ConversionError if the disk lacks it.
    """
    present = sum(path.stat().st_blocks * 512 for path in output.rglob("*") if path.is_file())
    needed, free = files.disk_bytes + output_bytes, shutil.disk_usage(output.absolute().parent).free + present
    parts = (
        f"{formats.size_text(files.disk_bytes)} for pieces of the source, {formats.size_text(output_bytes)} for "
        "the pack"
    )
    if needed > free:
        raise formats.ConversionError(
            f"{output}: needs {formats.size_text(needed)} on its disk ({parts}), where {formats.size_text(free)} "
            "can be used; free "
            "some, or give less with --stream-space"
        )
    return f"the disk needs {formats.size_text(needed)}: {parts}"


def large_bytes(layout: formats.PackLayout) -> int:
    """Returns the bytes of a pack's large files, without padding."""
    return sum(item.num_bytes for item in layout.items())


def known_facts(folder: Path) -> runtime.MachineFacts | None:
    """Returns what `doctor` measured of this machine and of the disk of a folder, which need not exist yet.

    Raises:  RunError if the stored facts are damaged.
    """
    nearest = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    return runtime.load_facts(cli.cache_folder(), nearest)


def write_output(path: Path, content: bytes, option_name: str, appends: bool = False) -> None:
    """Writes the file that an option names, or appends to it.

    Raises:  ConversionError if that fails.
    """
    try:
        with path.open("ab" if appends else "wb") as file:
            file.write(content)
    except OSError as fault:
        raise formats.ConversionError(
            f"{option_name} {path}: cannot be written ({fault.strerror}); give another file"
        ) from fault
