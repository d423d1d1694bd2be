"""The command `moe-pack convert`: makes a pack from a checkpoint, with options, by a plan, or for a target."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from moe_pack import formats
from moe_pack.convert import plan
from moe_pack.convert.cli.options import INTERRUPTED, known_facts, quiet_ray
from moe_pack.convert.options import PackOrder
from moe_pack.formats.base import cli
from moe_pack.formats.hub.cli import CHECKPOINT

if TYPE_CHECKING:
    from moe_pack.convert.making import MadePack, PackForTarget


@click.command("convert")
@click.argument("path", type=CHECKPOINT)
@CHECKPOINT.list_option
@cli.options_from(PackOrder)
@cli.command_errors(interrupted=INTERRUPTED)
def convert_command(path: str, options: PackOrder) -> None:
    """Make a pack from the checkpoint at PATH.

    PATH is a Hugging Face folder with safetensors, a GGUF file (or one of its parts), a hub id such as
    mistralai/Mixtral-8x7B-v0.1, or a short name such as mixtral. A hub id and a short name are looked up in the local
    hub cache, and downloaded if they are not there; with --stream the checkpoint is never on the disk whole.

    \b
    moe-pack convert mixtral -o packed/                    all experts in 4 bit, dense matrices in 8
    moe-pack convert mixtral -o packed/ --profile profile/ calibrated, with routing data
    moe-pack convert mixtral -o packed/ --plan plan.json   by a plan of moe-pack plan
    moe-pack convert mixtral -o packed/ --target-vram 11G  for a memory
    moe-pack convert mixtral -o packed/ --preset floe      as a paper stores it

    --target-vram does everything in one command: it makes a profile (if --profile is not given), a plan and the pack,
    measures thresholds and loss, and repeats with another plan until the loss is at most --max-loss. The last line says
    how to run the pack. --device says whose memory --target-vram is. --preset does the same with a paper's plan, which
    is the same for every memory.

    A checkpoint can be larger than the memory: each worker has one expert in memory, all together at most --memory. If
    the command is stopped or killed, run it again to continue.
    """
    from moe_pack.convert import making

    order = replace(options, source=path)
    with cli.TerminalProgress() as progress:
        if order.target is not None:
            made = making.make_pack_for_target(replace(order, machine=known_facts(order.output)), progress)
            lines = [*_rounding_lines(order.output), *_result_lines(made)]
        else:
            if order.many.ray is not None:
                quiet_ray()
            lines = _pack_lines(making.make_pack(order, progress), order)
    for line in lines:
        click.echo(line)


def _pack_lines(made: MadePack, order: PackOrder) -> list[str]:
    from moe_pack.convert.cli import measure
    from moe_pack.runtime.quality import bits_per_weight

    output, result = made.output, made.conversion
    if order.many.part is not None and not result.written:
        return [f"{output}: the pack is complete; another part has finished it"]
    with formats.Pack(output) as pack:
        content, bits, layers = pack.manifest.totals.content, bits_per_weight(pack), pack.spec.moe_layers
    lines = [f"{output}: already contains the pack of this checkpoint with these options; nothing to do"]
    if result.written:
        if result.resumed_bytes:  # a rate would count what an earlier run has done
            how = f"; {formats.size_text(result.resumed_bytes)} are from an earlier run"
        else:
            how = f" ({made.source_bytes / max(made.seconds, 1e-9) / 1e6:.0f} MB/s of source)"
        size = formats.size_text(content)
        lines = [f"{output}: {size}, {bits:.2f} bits an expert weight, in {made.seconds:.1f} s{how}"]
    if made.thresholds is not None:
        lines += measure.threshold_lines(output, layers, made.thresholds)
    if made.routing is not None:
        lines.append(f"{output}: {measure.routing_text(output, made.routing)}")
    return lines + _rounding_lines(output)


def _rounding_lines(output: Path) -> list[str]:
    from moe_pack.convert import account

    with formats.Pack(output) as pack:
        rounding = account.read_rounding(pack)
        return [] if rounding is None else account.warning_lines(pack, rounding)


def _result_lines(made: PackForTarget) -> list[str]:
    from moe_pack.convert import loss_text

    result, output, target = made.result, made.output, made.target
    kept = f"attempt {result.taken + 1} of {len(result.attempts)} is kept: " if len(result.attempts) > 1 else ""
    loss = f"{loss_text(result.quality)}, with 95% confidence"
    if (limit := target.loss_limit) is not None:
        loss += f"; the limit is {limit.text()}, for the upper end of the interval"
    lines = [f"{output}: {kept}{loss}"]
    if target.purpose == "vllm":
        lines.append(f"for vLLM: moe-pack export {output} --to compressed-tensors -o exported/")
    lines.append(_run_line(output, target))
    if target.preset is not None:
        budget = "SIZE" if target.budget_bytes is None else _budget_text(target.budget_bytes)
        lines.append(f"as its paper runs it: moe-run {output} --policy {target.preset} --budget {budget}")
    return lines


def _run_line(output: Path, target: plan.Target) -> str:
    """Returns the command that runs the pack as planned, on this machine if it can."""
    from moe_pack.runtime.engine import machine

    if target.budget_bytes is None:
        return f"run it: moe-run {output}"
    gpu = machine.gpu_here()
    has_gpu, budget = gpu is not None and gpu.fault is None, _budget_text(target.budget_bytes)
    if target.device == "cuda" and not has_gpu:
        return f"run it here, on the CPU: moe-run {output}; where the GPU is: moe-run {output} --budget {budget}"
    device = " --device cpu" if has_gpu and target.device == "cpu" else ""  # where moe-run would take the GPU
    kv_dtype = "" if plan.kv_text(target) is None else f" --kv-dtype {target.kv_dtype}"
    return f"run it: moe-run {output}{device} --budget {budget}{kv_dtype}"


def _budget_text(num_bytes: int) -> str:
    """Returns bytes as an option takes them, to the byte: 11G, 24M, 12345678."""
    units = ((1 << 30, "G"), (1 << 20, "M"))
    return next((f"{num_bytes // unit}{name}" for unit, name in units if num_bytes % unit == 0), str(num_bytes))
