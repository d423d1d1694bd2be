"""The command `moe-pack`: options, one call each, tables on standard output and progress on standard error."""

import json
from dataclasses import asdict, dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any, TextIO

import click
import torch

from moe_pack.calib.evaluate import QUALITY_FILE, Quality
from moe_pack.convert import (
    LogitsError,
    MatrixError,
    bits_per_weight,
    compare_logits,
    compare_weights,
    describe,
    find_checkpoint,
    format_runs,
    same_tensors,
)
from moe_pack.convert.cli.check import check_command
from moe_pack.convert.cli.convert import convert_command
from moe_pack.convert.cli.doctor import doctor_command
from moe_pack.convert.cli.eval import eval_command, prices_summary, quality_summary
from moe_pack.convert.cli.plan import plan_command
from moe_pack.convert.cli.profile import (
    attach_command,
    profile_command,
    report_command,
    routing_text,
    thresholds_command,
)
from moe_pack.convert.cli.replay import replay_command
from moe_pack.convert.cli.synth import synth_command
from moe_pack.formats import MATRICES, ExpertFormat, Matrix, Pack, RunError, option
from moe_pack.formats.cli import NOISE, TerminalProgress, command_errors, common_options, options_from
from moe_pack.formats.families import Checkpoint
from moe_pack.formats.pack import audit
from moe_pack.formats.plan import format_text
from moe_pack.formats.sidecar import read_sidecar
from moe_pack.formats.spec import cached_values, num_active_parameters, num_parameters
from moe_pack.runtime import Text
from moe_pack.runtime.model import operations_for
from moe_pack.runtime.offload import Routing

_COMPARED_TOKENS = 512


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@common_options
def main(debug: bool) -> None:
    """Pack mixture-of-experts checkpoints, once and offline, into folders that moe-run streams from.

    \b
    moe-pack convert mixtral --target-vram 11G  all of it: profile, plan, convert, measure
    moe-pack plan mixtral --target-vram 11G     what would fit, how fast, at what loss
    moe-pack profile mixtral -o profile/        what its experts and neurons do on text
    moe-pack report profile/                    look at it
    moe-pack convert mixtral -o packed/         all alike: 4 bit, group 64, selector up
    moe-pack thresholds packed/ --sparsity 0.8  let the weakest neurons rest
    moe-pack attach packed/ --profile profile/  let moe-run foretell experts
    moe-pack inspect packed/                    what is in it
    moe-pack verify packed/ --against mixtral   is it whole, and how close are its weights
    moe-pack eval packed/ --against mixtral     what it lost, measured on text
    moe-pack check packed/ --max-kl 0.05        for pipelines: exit code 1 if a limit is broken
    moe-pack synth mixtral-8x7b -o synthetic/   its size and speed without its weights
    moe-pack doctor                             how fast this machine is
    moe-run packed/ --prompt "It was a dark night"
    """


@main.command("inspect", short_help="Show model, bytes and widths of PACK.")
@click.argument("pack", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print every fact, each expert's formats included, as JSON.")
@command_errors(interrupted="interrupted")
def inspect_command(pack: Path, as_json: bool) -> None:
    """Show what PACK holds: the model, bytes by part, widths by layer and expert.

    Reads and checks the manifest, the index and what lies beside the pack; moe-pack verify checks every byte.
    """
    with Pack(pack) as held:
        if as_json:
            click.echo(json.dumps(describe(held), indent=2))
            return
        _print_model(held)
        _print_bytes(held)
        _print_formats(held)
        routing = Routing.open(held)
        click.echo(f"beside it: {'no routing' if routing is None else routing_text(pack, routing)}")
        quality = read_sidecar(pack, QUALITY_FILE, Quality, held.manifest.root)
        if quality is not None:
            click.echo(f"measured: {quality_summary(quality)}")
            if quality.prices is not None:
                click.echo(f"prices: {prices_summary(quality.prices)}")


def _print_model(pack: Pack) -> None:
    spec, manifest = pack.spec, pack.manifest
    experts = f"{spec.router.num_experts} experts, {spec.router.num_experts_per_tok} a token"
    if spec.shared_expert is not None:
        experts += f", beside a shared one of {spec.shared_expert.intermediate_size}"
    if spec.dense_intermediate_size is not None:
        num_dense = spec.num_hidden_layers - len(spec.moe_layers)
        experts += f"; {num_dense} dense layer{'s' if num_dense > 1 else ''} of {spec.dense_intermediate_size}"
    rows = [
        ("model", f"{spec.family}, {len(spec.moe_layers)} layers of {experts}"),
        ("sizes", f"hidden {spec.hidden_size}, intermediate {spec.expert.intermediate_size}, "
                  f"vocabulary {spec.vocab_size}, context {spec.max_position_embeddings}"),
        ("", f"{_millions(num_parameters(spec))} parameters, {_millions(num_active_parameters(spec))} active a token, "
             f"{4 * cached_values(spec):,} bytes of KV cache a token (float32)"),
        ("pack", f"format {manifest.version}, selector {manifest.selector}, quantizer {manifest.quantizer}, "
                 f"{bits_per_weight(pack):.2f} bits an expert weight"),
        ("root", manifest.root),
        *([("", NOISE)] if pack.is_synthetic else []),
    ]  # fmt: skip
    for name, value in rows:
        click.echo(f"{name:6} {value}")


def _millions(number: int) -> str:
    return f"{number / 1e9:.2f} B" if number >= 1e9 else f"{number / 1e6:.2f} M"


def _print_bytes(pack: Pack) -> None:
    totals = pack.manifest.totals
    click.echo("\npart                bytes   share")
    for name, num_bytes in asdict(totals).items():
        if num_bytes and name != "content":
            click.echo(f"{name:10} {num_bytes:>14,} {num_bytes / totals.content:7.1%}")
    click.echo(f"{'total':10} {totals.content:>14,} {1:7.1%}")


def _print_formats(pack: Pack) -> None:
    click.echo(f"\n{'layers':9} {'experts':9} {'gate':22} {'up':22} {'down':22} bytes an expert")
    for run in format_runs(pack):
        cells = " ".join(f"{_part_text(run.formats, pack, matrix):22}" for matrix in MATRICES)
        click.echo(f"{_span(run.layers):9} {_span(run.experts):9} {cells} {run.num_bytes:>15,}")
    quantized = sorted({format_text(dense.format) for dense in pack.manifest.dense})
    unquantized = "bf16" if pack.is_synthetic else "as in the source"
    click.echo(f"dense matrices: {', '.join(quantized) if quantized else unquantized}; * in the selector")


def _part_text(formats: ExpertFormat, pack: Pack, matrix: Matrix) -> str:
    part = formats.of(matrix)
    if part is None:
        return "-"
    selected = pack.layout.experts[0][0].selector
    mark = "*" if selected is not None and selected.part(matrix) is not None else ""
    return format_text(part) + mark


def _span(ends: tuple[int, int]) -> str:
    return str(ends[0]) if ends[0] == ends[1] else f"{ends[0]}-{ends[1]}"


@dataclass(frozen=True, slots=True)
class VerifyOptions:
    """What `verify` was asked for."""

    against: str | None = field(
        default=None,
        metadata=option("--against", metavar="PATH", help="Compare with the checkpoint it was made from."),
    )
    text: TextIO | None = field(
        default=None, metadata=option("--text", help="Compare logits on this text instead of our passage.")
    )
    as_json: bool = field(default=False, metadata=option("--json", help="Print the result as JSON."))


@main.command("verify", short_help="Check every byte of PACK, or compare it with its source.")
@click.argument("pack", type=click.Path(path_type=Path))
@options_from(VerifyOptions)
@command_errors(interrupted="interrupted")
def verify_command(pack: Path, options: VerifyOptions) -> None:
    """Check every byte of PACK; with --against, measure how far it is from the original.

    Digests of all files and experts, the CRC of every row, padding, order. --against compares every weight with the
    source's, and the predictions on up to 512 tokens of text; one expert at a time is in memory. Exit code 1 if
    anything is damaged, or the pack is not one of that checkpoint.
    """
    with Pack(pack) as held:
        totals = held.manifest.totals
        with TerminalProgress() as progress:
            audit(held, progress)
        if not options.as_json:
            note = f"; {NOISE}" if held.is_synthetic else ""
            click.echo(f"{pack}: whole; {totals.content:,} bytes checked, root {held.manifest.root[:16]}{note}")
        if options.against is None:
            if options.as_json:
                click.echo(json.dumps(_whole(held)))
            return
        checkpoint = Checkpoint(find_checkpoint(options.against))
        try:
            same_tensors(held, checkpoint)
            with operations_for(torch.device("cpu")) as operations:
                with TerminalProgress() as progress:
                    matrices = compare_weights(held, checkpoint, progress, operations)
                logits = compare_logits(held, checkpoint, _compared_ids(held, options.text), operations)
        finally:
            checkpoint.close()
        _print_comparison(held, matrices, logits, options.as_json)


def _whole(pack: Pack) -> dict[str, Any]:
    """What `verify --json` says of a pack that is whole."""
    manifest = pack.manifest
    facts = {"whole": True, "synthetic": pack.is_synthetic, "content_bytes": manifest.totals.content}
    return {**facts, "root": manifest.root}


def _print_comparison(pack: Pack, matrices: list[MatrixError], logits: LogitsError, as_json: bool) -> None:
    if as_json:
        click.echo(
            json.dumps({**_whole(pack), "weights": [asdict(m) for m in matrices], "logits": asdict(logits)}, indent=2)
        )
        return
    click.echo(f"\n{'weights':8} {'stored as':22} {'number':>15} {'mean error':>12} {'relative':>9} {'largest':>10}")
    for held in matrices:
        click.echo(
            f"{held.matrix:8} {held.stored_as:22} {held.num_weights:>15,} {held.mean:>12.3e} "
            f"{held.relative:>9.2%} {held.largest:>10.3e}"
        )
    click.echo(
        f"\nlogits of {logits.num_tokens} tokens: largest difference {logits.largest:.2e}, "
        f"KL divergence {logits.kl:.5f} nats, same likeliest token {logits.agreement:.1%}"
    )


def _compared_ids(pack: Pack, text: TextIO | None) -> list[int]:
    most = min(_COMPARED_TOKENS, pack.spec.max_position_embeddings)
    if not pack.has("tokenizer.json"):
        return [7919 * place % pack.spec.vocab_size for place in range(most)]  # no tokenizer: any tokens will do
    words = files("moe_pack.convert.cli").joinpath("passage.txt").read_text("utf-8") if text is None else text.read()
    ids = Text(pack).encode(words)[:most]
    if not ids:
        raise RunError("--text: the tokenizer makes no token of it")
    return ids


main.add_command(convert_command)
main.add_command(doctor_command)
main.add_command(plan_command)
main.add_command(profile_command)
main.add_command(report_command)
main.add_command(thresholds_command)
main.add_command(attach_command)
main.add_command(synth_command)
main.add_command(replay_command)
main.add_command(eval_command)
main.add_command(check_command)
