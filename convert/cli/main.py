"""The command `moe-pack`, and its commands `inspect` and `verify`; every other command has a file of its own.

Results go to standard output, progress and notes to standard error.
"""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from moe_pack import formats
from moe_pack.convert.cli.options import checkpoint_at
from moe_pack.formats.base import cli, commands
from moe_pack.formats.hub.cli import PACK, pack_folder
from moe_pack.formats.pack import plans
from moe_pack.formats.parts import specs
from moe_pack.runtime import model, offload
from moe_pack.runtime.engine.numerics import read_numerics

if TYPE_CHECKING:
    from moe_pack.convert import verify


@click.group(cls=cli.Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@cli.common_options
def main(debug: bool) -> None:
    """Turn mixture-of-experts checkpoints into packs, which moe-run runs in less memory than the model needs.

    \b
    One command for everything, for 11 GiB of memory:
      moe-pack convert mixtral -o packed/ --target-vram 11G
      moe-run packed/ --prompt "It was a dark night" --budget 11G
    \b
    Or step by step:
      moe-pack profile mixtral -o profile/          measure the model on text
      moe-pack report profile/                      draw what was measured
      moe-pack plan mixtral --profile profile/ --target-vram 11G -o plan.json
                                                    estimate bytes, speed and loss of a pack
      moe-pack convert mixtral -o packed/ --plan plan.json --profile profile/
      moe-pack thresholds packed/ --sparsity 0.8    measure which neurons need not run
      moe-pack attach packed/ --profile profile/    let moe-run predict experts
    \b
    Look at a pack:
      moe-pack inspect packed/                      its model, bytes and formats
      moe-pack verify packed/ --against mixtral     check every byte, compare every weight
      moe-pack eval packed/ --against mixtral       measure its loss on text
      moe-pack check packed/ --max-kl 0.05          exit code 1 if a limit is exceeded
    \b
    Share the work, and take results elsewhere:
      moe-pack convert mixtral -o packed/ --part 1/2
                                                    the first of two machines, over one folder
      moe-pack merge prose/ code/ -o profile/       one profile of several texts
      moe-pack imatrix profile/ -o imatrix.gguf     an importance file for llama.cpp
      moe-pack export packed/ --to compressed-tensors -o exported/
                                                    a checkpoint for vLLM and transformers
      moe-pack upload packed/ someone/model:4bit    put it on the hub, with a model card
    \b
    Learn about a machine:
      moe-pack doctor                               measure its disk, CPU and link
      moe-pack synth mixtral-8x7b -o synthetic/     measure speed without the real weights
      moe-pack replay profile/ --pack packed/ --budget 4G
                                                    compare policies on recorded routes

    moe-pack COMMAND --help describes each command.
    """


@main.command("inspect", short_help="Show the model, bytes and formats of PACK.")
@click.argument("pack", type=PACK)
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON, with the formats of every expert.")
@cli.command_errors(interrupted="interrupted")
def inspect_command(pack: Path, as_json: bool) -> None:
    """Show what PACK contains: the model, bytes by part, formats by layer and expert, and what was measured of it.

    This reads and checks the manifest, the index, the source's account and the sidecars only; moe-pack verify checks
    every byte.
    """
    from moe_pack.convert import account, describe
    from moe_pack.convert.cli import measure
    from moe_pack.runtime.quality import read_quality

    pack = pack_folder(pack)
    with formats.Pack(pack) as opened:
        if as_json:
            click.echo(json.dumps(describe(opened), indent=2))
            return
        _print_model(opened)
        _print_bytes(opened)
        _print_formats(opened)
        routing = offload.Routing.open(opened)
        click.echo(f"attached: {'no routing' if routing is None else measure.routing_text(pack, routing)}")
        for line in account.rounding_lines(opened, account.read_rounding(opened)):
            click.echo(line)
        quality = read_quality(opened)
        if quality is not None:
            click.echo(f"measured: {measure.quality_summary(quality)}")
        if (numerics := read_numerics(opened)) is not None:
            click.echo(f"numerics: {measure.numerics_summary(numerics)}")
        if quality is not None and quality.prices is not None:
            click.echo(f"prices: {measure.prices_summary(quality.prices)}")


def _print_model(pack: formats.Pack) -> None:
    from moe_pack.runtime.quality import bits_per_weight

    spec, manifest = pack.spec, pack.manifest
    experts = f"{spec.router.num_experts} experts, {spec.router.num_experts_per_tok} a token"
    if spec.shared_expert is not None:
        experts += f", and a shared one of {spec.shared_expert.intermediate_size}"
    if spec.dense_intermediate_size is not None:
        num_dense = specs.num_dense_layers(spec)
        experts += f"; {num_dense} dense layer{'s' if num_dense > 1 else ''} of {spec.dense_intermediate_size}"
    repeats = f" and {spec.expert.repeats} stored twice" if spec.expert.repeats else ""
    state = f" and {4 * specs.state_values(spec):,} bytes of states" if specs.state_values(spec) else ""
    rows = [
        ("model", f"{spec.family}, {len(spec.moe_layers)} layers of {experts}"),
        ("sizes", f"hidden {spec.hidden_size}, intermediate {spec.expert.source_size}{repeats}, "
                  f"vocabulary {spec.vocab_size}, context {spec.max_position_embeddings}"),
        ("", f"{_millions(specs.num_parameters(spec))} parameters, "
             f"{_millions(specs.num_active_parameters(spec))} active a token, "
             f"{4 * specs.cached_values(spec):,} bytes of KV cache a token{state} (float32)"),
        ("pack", f"format {manifest.version}, selector {manifest.selector}, quantizer {manifest.quantizer}, "
                 f"{bits_per_weight(pack):.2f} bits an expert weight"),
        ("root", manifest.root),
        *([("", cli.NOISE)] if pack.is_synthetic else []),
    ]  # fmt: skip
    for name, value in rows:
        click.echo(f"{name:6} {value}")


def _millions(number: int) -> str:
    return f"{number / 1e9:.2f} B" if number >= 1e9 else f"{number / 1e6:.2f} M"


def _print_bytes(pack: formats.Pack) -> None:
    from moe_pack.convert.verify import left_out, token_bytes

    totals = pack.manifest.totals
    click.echo("\npart                bytes   share")
    for name, num_bytes in asdict(totals).items():
        if num_bytes and name != "content":
            click.echo(f"{name:10} {num_bytes:>14,} {num_bytes / totals.content:7.1%}")
    click.echo(f"{'total':10} {totals.content:>14,} {1:7.1%}")
    read = token_bytes(pack)
    click.echo(
        f"a token reads {commands.size_text(read.dense)} of dense tensors ({read.dense_bits:.1f} bits a weight) and, "
        f"if all neurons run, {commands.size_text(read.experts)} of experts"
    )
    for part in left_out(pack):
        kept = "kept" if part.fate == "unused" else "not in the pack"
        tensors = f"{part.num_tensors} tensor{'s' if part.num_tensors > 1 else ''}"
        click.echo(f"not run: {tensors}, {commands.size_text(part.num_bytes)}, {kept}: {part.reason}")


_LEAST_WIDTH = 22  # of a column of formats, letters


def _print_formats(pack: formats.Pack) -> None:
    from moe_pack.convert import format_runs

    runs = format_runs(pack)
    texts = [[_part_text(run.formats, pack, matrix) for matrix in specs.MATRICES] for run in runs]
    width = max([_LEAST_WIDTH, *(len(text) for row in texts for text in row)])
    titles = " ".join(f"{matrix:{width}}" for matrix in specs.MATRICES)
    click.echo(f"\n{'layers':9} {'experts':9} {titles} bytes an expert")
    for run, row in zip(runs, texts, strict=True):
        cells = " ".join(f"{text:{width}}" for text in row)
        click.echo(f"{_span(run.layers):9} {_span(run.experts):9} {cells} {run.num_bytes:>15,}")
    click.echo(f"rotated layers: {_rotated_text(pack)}")
    quantized = sorted({plans.format_text(dense.format) for dense in pack.manifest.dense})
    unquantized = "bf16" if pack.is_synthetic else "as in the source"
    click.echo(f"dense matrices: {', '.join(quantized) if quantized else unquantized}; * in the selector")


def _rotated_text(pack: formats.Pack) -> str:
    """Returns the layers that store their experts in rotated coordinates, numbered as in the table of formats."""
    import numpy as np

    rotated = [pack.rotation is not None and pack.rotation.is_rotated(l) for l in range(len(pack.index.experts))]
    if all(rotated) or not any(rotated):
        return "all" if all(rotated) else "none"
    spans = list[tuple[int, int]]()
    for layer in np.flatnonzero(rotated).tolist():
        first = spans.pop()[0] if spans and spans[-1][1] == layer - 1 else layer
        spans.append((first, layer))
    return ", ".join(_span(span) for span in spans)


def _part_text(expert: plans.ExpertFormat, pack: formats.Pack, matrix: specs.Matrix) -> str:
    part = expert.of(matrix)
    if part is None:
        return "-"
    selector = pack.layout.experts[0][0].selector
    mark = "*" if selector is not None and selector.part(matrix) is not None else ""
    return plans.format_text(part) + mark


def _span(ends: tuple[int, int]) -> str:
    return str(ends[0]) if ends[0] == ends[1] else f"{ends[0]}-{ends[1]}"


@dataclass(frozen=True, slots=True)
class VerifyOptions:
    """The options of `verify`."""

    against: str | None = commands.option_field(
        None, "--against PATH", help="Also compare with the checkpoint that the pack was made from."
    )
    text: TextIO | None = commands.option_field(
        None, "--text", help="Compare logits on this text; without it, on a passage of ours."
    )
    as_json: bool = commands.option_field(False, "--json", help="Print the result as JSON.")


@main.command("verify", short_help="Check every byte of PACK; compare every weight with its source.")
@click.argument("pack", type=PACK)
@cli.options_from(VerifyOptions)
@cli.command_errors(interrupted="interrupted")
def verify_command(pack: Path, options: VerifyOptions) -> None:
    """Check every byte of PACK: digests of all files and experts, the CRC of every row, padding, neuron order.

    With --against, also compare every weight with the checkpoint's, and the predictions of both on up to 512 tokens of
    text; one expert at a time is in memory. The exit code is 1 if the pack is damaged or comes from another checkpoint.
    """
    from moe_pack.formats.pack.reader import audit

    with formats.Pack(pack_folder(pack)) as opened:
        with cli.TerminalProgress() as progress:
            audit(opened, progress)
        if not options.as_json:
            note = f"; {cli.NOISE}" if opened.is_synthetic else ""
            num_bytes, root = opened.manifest.totals.content, opened.manifest.root[:16]
            click.echo(f"{pack}: intact; {num_bytes:,} bytes checked, root {root}{note}")
        if options.against is not None:
            _compare(opened, options.against, options)
        elif options.as_json:
            click.echo(json.dumps(_intact_json(opened)))


def _compare(pack: formats.Pack, against: str, options: VerifyOptions) -> None:
    import torch

    from moe_pack.convert import compare_logits, compare_weights, same_tensors
    from moe_pack.convert.cli.measure import compared_ids

    with closing(checkpoint_at(against)) as checkpoint:
        same_tensors(pack, checkpoint)
        with model.operations_for(torch.device("cpu")) as operations, cli.TerminalProgress() as progress:
            matrices = compare_weights(pack, checkpoint, progress, operations)
            with commands.stage_of(progress, "comparing predictions"):
                logits = compare_logits(pack, checkpoint, compared_ids(pack, options.text), operations)
    _print_comparison(pack, matrices, logits, options.as_json)


def _intact_json(pack: formats.Pack) -> dict[str, Any]:
    manifest = pack.manifest
    facts = {"whole": True, "synthetic": pack.is_synthetic, "content_bytes": manifest.totals.content}
    return {**facts, "root": manifest.root}


def _print_comparison(
    pack: formats.Pack, matrices: list[verify.MatrixError], logits: verify.LogitsError, as_json: bool
) -> None:
    if as_json:
        click.echo(
            json.dumps(
                {**_intact_json(pack), "weights": [asdict(m) for m in matrices], "logits": asdict(logits)}, indent=2
            )
        )
        return
    width = max([_LEAST_WIDTH, *(len(error.stored_as) for error in matrices)])
    titles = f"{'weights':8} {'stored as':{width}} {'number':>15} {'mean error':>12} {'relative':>9} {'largest':>10}"
    click.echo(f"\n{titles}")
    for error in matrices:
        click.echo(
            f"{error.matrix:8} {error.stored_as:{width}} {error.num_weights:>15,} {error.mean:>12.3e} "
            f"{error.relative:>9.2%} {error.largest:>10.3e}"
        )
    click.echo(
        f"\nlogits of {logits.num_tokens} tokens: largest difference {logits.largest:.2g}, "
        f"KL divergence {logits.kl:.5f} nats, same likeliest token {logits.agreement:.1%}"
    )


_OTHERS = (  # name, module, and the line in the list of commands
    ("attach", "profile", "Add a profile's routing data to PACK, for moe-run."),
    ("check", "check", "Check PACK for a pipeline; exit code 1 if a check fails."),
    ("convert", "convert", "Make a pack from the checkpoint at PATH."),
    ("doctor", "doctor", "Measure the disk, CPU and GPU link of this machine."),
    ("eval", "eval", "Measure the perplexity of PACK, and its loss against the source."),
    ("export", "export", "Write PACK as a checkpoint for vLLM, llama.cpp and others."),
    ("imatrix", "profile", "Write a profile's importance file, for llama.cpp."),
    ("merge", "profile", "Put profiles of several texts together."),
    ("plan", "plan", "Estimate which pack of PATH fits a memory, its speed and its loss."),
    ("profile", "profile", "Measure the model at PATH on text, for plans and moe-run."),
    ("replay", "replay", "Compare policies and budgets on recorded routes."),
    ("report", "profile", "Draw a profile as one HTML file."),
    ("synth", "synth", "Make a pack with the dimensions of NAME and random weights."),
    ("thresholds", "profile", "Measure which neurons of PACK need not run, and store that."),
    ("upload", "upload", "Upload PACK to the hub, with a model card."),
)
for _name, _module, _line in _OTHERS:
    main.add_command(cli.LateCommand(_name, f"moe_pack.convert.cli.{_module}", _line))
