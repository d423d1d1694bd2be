"""The command `moe-pack export`: writes a pack as a checkpoint that other programs load."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from moe_pack import formats
from moe_pack.convert import export
from moe_pack.convert.cli.options import INTERRUPTED
from moe_pack.convert.options import Dtype, GgufType
from moe_pack.formats import gguf
from moe_pack.formats.base import cli, commands
from moe_pack.formats.hub.cli import PACK
from moe_pack.runtime import model

if TYPE_CHECKING:
    from moe_pack.convert.verify import LogitsError

ExportFormat = Literal["safetensors", "compressed-tensors", "gguf"]
# Mark the options of some formats alone.
_CODED_ONLY, _GGUF_ONLY, _CHECKPOINTS_ONLY = "codes", "gguf", "checkpoints"


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """The options of `export`."""

    to: ExportFormat = field(
        metadata=formats.option(
            "--to",
            help="safetensors: all weights in 16 bit, for any program. compressed-tensors: experts in 4 or 8 bit, as "
            "vLLM and transformers load them; all other weights in 16 bit. gguf: for llama.cpp.",
        )
    )
    output: Path = field(metadata=formats.option("--output", "-o DIR", help="The folder to write, new or empty."))
    dtype: Dtype | None = commands.option_field(
        None,
        "--dtype",
        help="With safetensors and compressed-tensors: the dtype of matrices, or of the scales of their codes.  "
        "[default: the source's if it has 16 bits, else bf16]",
        mark=_CHECKPOINTS_ONLY,
    )
    type: GgufType | None = commands.option_field(
        None,
        "--type",
        help="With gguf: the type of matrices; vectors and routers are f32. bf16 and f16 are for llama-quantize, "
        "which makes other types of them. mxfp4: of experts, with q8_0 for the rest.  [default: q8_0; mxfp4 if the "
        "experts of the pack are]",
        mark=_GGUF_ONLY,
    )
    bits: str | None = commands.option_field(
        None,
        "--bits",
        choices=("4", "8"),
        help="With compressed-tensors: the bits of the experts' codes.  [default: 4 for a layer that has at most "
        "4 in the pack, else 8]",
        mark=_CODED_ONLY,
    )
    group_size: str | None = commands.option_field(
        None,
        "--group-size",
        choices=("32", "64", "128"),
        help="With compressed-tensors: how many weights share a scale.  [default: as in the pack if that is "
        "possible, else the largest that divides the rows]",
        mark=_CODED_ONLY,
    )
    shard_bytes: int | None = commands.option_field(
        None,
        "--shard-size SIZE",
        help="The most bytes in a file.  [default: 5G; with gguf 45G]",
        parse=commands.read_size,
    )
    compare_tokens: int = commands.option_field(
        64,
        "--compare-tokens N",
        least=0,
        help="Compare the logits of the export and of the pack on N tokens of a passage of ours; 0 does not.",
    )
    as_json: bool = commands.option_field(False, "--json", help="Print the result as JSON.")

    def check(self) -> None:
        """Refuses options that do not go together; raises UsageError."""
        if self.to != "compressed-tensors" and (others := commands.given(self, _CODED_ONLY)):
            raise formats.UsageError(
                f"{others[0]} needs --to compressed-tensors; remove it, or give --to compressed-tensors"
            )
        if self.to != "gguf" and (others := commands.given(self, _GGUF_ONLY)):
            raise formats.UsageError(f"{others[0]} needs --to gguf; remove it, or give --to gguf")
        if self.to == "gguf" and (others := commands.given(self, _CHECKPOINTS_ONLY)):
            raise formats.UsageError(f"{others[0]} does not go with --to gguf; give --type instead")
        if self.output.suffix == ".gguf" and not self.output.is_dir():
            raise formats.UsageError(
                f"--output is the folder in which the file is written, as model-Q8_0.gguf; give {self.output.stem}/"
            )


def _exported(pack: formats.Pack, options: ExportOptions, work: export.ExportWork) -> export.ExportResult:
    if options.to == "gguf":
        return export.export_gguf(pack, options.output, options.type, work)
    if options.to == "safetensors":
        return export.export_plain(pack, options.output, options.dtype, work)
    width: Literal[4, 8] | None = None if options.bits is None else 4 if options.bits == "4" else 8
    group = None if options.group_size is None else int(options.group_size)
    return export.export_compressed(pack, options.output, options.dtype, width, group, work)


@click.command("export")
@click.argument("pack", type=PACK)
@cli.options_from(ExportOptions)
@cli.command_errors(interrupted=INTERRUPTED)
def export_command(pack: Path, options: ExportOptions) -> None:
    """Write PACK as a checkpoint of its model's family, or as a GGUF file: tensors, config and tokenizer.

    The tensors have the names and shapes that other programs expect, and the weights that the pack stands for. All
    neurons run in an export, also those that the pack skips below its thresholds. At most one expert is in memory. If
    the command is stopped or killed, run it again to continue.
    """
    import torch

    from moe_pack.convert.cli.measure import compared_ids

    with formats.Pack(pack) as opened, model.operations_for(torch.device("cpu")) as operations:
        with cli.TerminalProgress() as progress:
            usual = export.GGUF_BYTES if options.to == "gguf" else export.SHARD_BYTES
            work = export.ExportWork(operations, options.shard_bytes or usual, progress)
            result = _exported(opened, options, work)
        logits = None
        if options.compare_tokens:
            ids = compared_ids(opened, None, options.compare_tokens, "leave out the comparison: --compare-tokens 0")
            with cli.TerminalProgress() as progress, commands.stage_of(progress, "comparing predictions"):
                logits = export.compare_export(opened, options.output, ids, operations)
        if options.as_json:
            click.echo(json.dumps({"path": str(_written(options.output)), **_as_json(result, logits)}, indent=2))
            return
        for line in _lines(opened, options, result, logits):
            click.echo(line)


def _written(folder: Path) -> Path:
    """Returns the path for other programs: the folder, or of GGUF the file, or the first of several."""
    return gguf.find_gguf(folder) or folder


def _lines(
    pack: formats.Pack, options: ExportOptions, result: export.ExportResult, logits: LogitsError | None
) -> Iterator[str]:
    yield f"{_written(options.output)}: {result.num_tensors:,} tensors, {formats.size_text(result.num_bytes)}"
    if result.resumed_bytes:
        yield (
            f"an earlier run has written {formats.size_text(result.resumed_bytes)} of it; codes below are of this "
            "run alone"
        )
    if result.formats is not None:
        yield from _code_lines(result)
    for reason, number in result.lost.items():
        yield f"not in the export: {number} tensor{'s' if number > 1 else ''} that the pack does not keep: {reason}"
    yield from result.notes
    if result.num_zeros:
        yield f"zero in the export: {result.num_zeros:,} values that the model does not use and the pack does not keep"
    if (pack.thresholds > 0).any():
        yield (
            "the pack skips neurons below thresholds; in the export all neurons run, so its text differs from moe-run's"
        )
    if logits is not None:
        yield (
            f"logits of {logits.num_tokens} tokens against the pack with all neurons: largest difference "
            f"{logits.largest:.2g}, KL divergence {logits.kl:.5f} nats, same likeliest token {logits.agreement:.1%}"
        )


def _code_lines(result: export.ExportResult) -> Iterator[str]:
    assert result.formats is not None and result.codes is not None, "the result of an export with codes"
    by_format: dict[export.CodeFormat, list[int]] = {}
    for layer, each in result.formats.items():
        by_format.setdefault(each, []).append(layer)
    for each, layers in by_format.items():
        where = "all layers" if len(by_format) == 1 else f"layers {', '.join(map(str, layers))}"
        yield f"experts of {where}: {each.width} bit, a scale for {each.group} weights"
    if len(by_format) > 1:
        yield "vLLM loads layers of different widths; transformers 5 loads experts of one width: give --bits for it"
    if result.is_renamed:
        yield (
            "the source has all experts of a layer in one tensor, the export each in its own, as vLLM reads codes; "
            "transformers 5 does not read them so in this family"
        )
    for matrix in formats.MATRICES:
        if (codes := result.codes.get(matrix)) is not None:
            yield (
                f"{matrix:4} codes of the pack kept: {codes.carried:,}, quantized again: {codes.quantized:,}; mean "
                f"error {codes.relative:.3%} of the pack's weights"
            )


def _as_json(result: export.ExportResult, logits: LogitsError | None) -> dict[str, Any]:
    codes = result.codes
    return {
        "bytes": result.num_bytes,
        "resumed_bytes": result.resumed_bytes,
        "tensors": result.num_tensors,
        "lost": result.lost,
        "zeros": result.num_zeros,
        "notes": list(result.notes),
        "formats": None if result.formats is None else {str(i): asdict(each) for i, each in result.formats.items()},
        "codes": None if codes is None else {m: {**asdict(c), "relative": c.relative} for m, c in codes.items()},
        "logits": None if logits is None else asdict(logits),
    }
