"""The command `moe-pack synth`: makes a pack with a real model's dimensions and random weights."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import click

from moe_pack import formats
from moe_pack.calib import evaluate, profile, quantize
from moe_pack.calib.quantize.options import ROTATE_OPTION
from moe_pack.convert import plan
from moe_pack.convert.cli.options import INTERRUPTED
from moe_pack.convert.options import WORKERS_OPTION, PlanOptions
from moe_pack.formats import families
from moe_pack.formats.base import cli, commands
from moe_pack.formats.base.limits import num_cpus
from moe_pack.formats.hub.cli import MODEL

if TYPE_CHECKING:
    from moe_pack.convert import ConversionResult

_MAX_SKEW = 4.0


@dataclass(frozen=True, slots=True)
class SynthOptions:
    """The options of `synth`."""

    output: Path = field(metadata=formats.option("--output", "-o", help="The pack's folder, new or empty."))
    layers: int | None = commands.option_field(
        None, "--layers N", least=1, help="Only the first N decoder layers.  [default: all]"
    )
    vocab: int | None = commands.option_field(
        None, "--vocab N", least=1, help="Only N tokens of the vocabulary.  [default: all]"
    )
    plan: PlanOptions = field(default_factory=PlanOptions)
    plan_file: Path | None = commands.option_field(
        None,
        "--plan FILE",
        path="file",
        help="A plan (moe-pack plan -o): formats and sparsity of each expert, in place of "
        "--selector to --dense-bits and --sparsity.",
    )
    rotate: quantize.Rotate = field(default="off", metadata=ROTATE_OPTION)
    sparsity: float = commands.option_field(0.0, "--sparsity S", help="Share of neurons that do not run.")
    skew: float = commands.option_field(
        0.0,
        "--skew X",
        help="How uneven the experts' popularity is, from 0 (all alike) to 4: the r-th most popular expert "
        "of a layer is chosen in proportion to r to the power of -X.",
    )
    path_correlation: float = commands.option_field(
        0.0,
        "--path-correlation C",
        help="How well a token's experts in one layer predict those in the next, from 0 (not at all) to 1 (fully).",
    )
    profile: Path | None = commands.option_field(
        None,
        "--profile DIR",
        help="A profile of the same model (moe-pack profile): experts get its popularity, in place of --skew.",
    )
    in_memory: bool = commands.option_field(
        False,
        "--in-memory",
        help="Write the pack to a file system in memory (/dev/shm), and make the output a link to it. The "
        "pack takes memory until you remove it or restart the machine.",
    )
    seed: int = commands.option_field(0, "--seed", least=0, most=2**63 - 1, help="Seed of the random weights.")
    workers: int = field(default=num_cpus(), metadata=WORKERS_OPTION)

    def check(self) -> None:
        """Refuses numbers out of range and options that do not go together; raises UsageError."""
        if fault := evaluate.ThresholdRule(sparsity=self.sparsity).fault():
            raise formats.UsageError(fault)
        for name, value, most in (("--skew", self.skew, _MAX_SKEW), ("--path-correlation", self.path_correlation, 1.0)):
            if not (math.isfinite(value) and 0 <= value <= most):
                raise formats.UsageError(f"{name}: found {value}, expected a number from 0 to {most:g}")
        if self.profile is not None and self.skew:
            raise formats.UsageError("--profile decides how popular experts are; remove --skew")
        others = [*commands.given(self.plan), *(["--sparsity"] if self.sparsity else [])]
        if self.plan_file is not None and others:
            raise formats.UsageError(f"--plan decides all formats and sparsities; remove {', '.join(others)}")


@click.command("synth")
@click.argument("name", type=MODEL)
@MODEL.list_option
@cli.options_from(SynthOptions)
@cli.command_errors(interrupted=INTERRUPTED)
def synth_command(name: str, options: SynthOptions) -> None:
    """Make a pack with the dimensions of the model NAME and random weights, to measure how fast NAME would run here.

    NAME is a published model such as mixtral-8x7b (--list prints all), a config.json, or a folder with one.
    Nothing is downloaded. moe-run OUTPUT --bench measures the speed. The text of such a pack is noise.
    """
    import numpy as np

    spec = families.model_spec(name, options.layers, options.vocab)
    if options.plan_file is None:
        shape = (len(spec.moe_layers), spec.router.num_experts)
        decision = plan.Decision(options.plan.plan(spec, "nearest"), np.full(shape, options.sparsity))
    else:
        decision = plan.read_plan(options.plan_file, spec)
    _synthesize(spec, decision, options)


def _synthesize(spec: formats.ModelSpec, decision: plan.Decision, options: SynthOptions) -> None:
    from moe_pack.convert import (
        SyntheticTraits,
        link_memory_folder,
        profiled_popularity,
        skewed_popularity,
        synthesize,
        synthetic_layout,
    )
    from moe_pack.convert.making import model_text
    from moe_pack.convert.pipeline import large_bytes

    output, layout = options.output, synthetic_layout(spec, decision.plan)
    if options.profile is None:
        popularity = skewed_popularity(spec, options.skew, options.seed)
    else:
        popularity = profiled_popularity(spec, profile.Profile(options.profile))
    traits = SyntheticTraits(decision.sparsity, popularity, options.path_correlation, options.seed, decision.theta)
    click.echo(f"{model_text(spec)}: about {formats.size_text(large_bytes(layout))}; {cli.NOISE}", err=True)
    start = time.perf_counter()
    folder = link_memory_folder(output, large_bytes(layout)) if options.in_memory else output
    with cli.TerminalProgress() as progress:
        rotation = quantize.rotation_vectors(spec, options.rotate)
        result = synthesize(spec, decision.plan, traits, folder, options.workers, progress, rotation=rotation)
    _say_done(result, layout, output, time.perf_counter() - start)
    if options.in_memory:
        click.echo(f"the pack is in memory until the machine restarts; to free the memory: rm -r {folder} {output}")


def _say_done(result: ConversionResult, layout: formats.PackLayout, output: Path, seconds: float) -> None:
    from moe_pack.convert.pipeline import large_bytes
    from moe_pack.runtime.quality import bits_per_weight

    if not result.written:
        click.echo(f"{output}: already contains the pack of this model with these options; nothing to do; {cli.NOISE}")
        return
    with formats.Pack(output) as pack:
        content, bits = pack.manifest.totals.content, bits_per_weight(pack)
    made_bytes = large_bytes(layout) - result.resumed_bytes
    rate = f"{made_bytes / max(seconds, 1e-9) / 1e6:.0f} MB/s"
    click.echo(
        f"{output}: {formats.size_text(content)}, {bits:.2f} bits an expert weight, in {seconds:.1f} s ({rate}); "
        f"{cli.NOISE}"
    )
    click.echo(f"measure its speed: moe-run {output} --bench")
