"""The command `moe-pack synth`."""

import math
import time
from dataclasses import dataclass, field
from pathlib import Path

import click

from moe_pack.calib.evaluate import ThresholdRule
from moe_pack.calib.profile import Profile
from moe_pack.convert import (
    ConversionResult,
    SyntheticTraits,
    bits_per_weight,
    link_memory_folder,
    profiled_popularity,
    skewed_popularity,
    synthesize,
    synthetic_layout,
)
from moe_pack.convert.cli.options import NUM_CORES, WORKERS_OPTION, PlanOptions, large_bytes
from moe_pack.convert.plan import read_plan
from moe_pack.formats import ModelSpec, Pack, PackLayout, Plan, UsageError, option, size_text
from moe_pack.formats.cli import NOISE, TerminalProgress, command_errors, options_from
from moe_pack.formats.commands import given
from moe_pack.formats.families import model_spec

_MAX_SKEW = 4.0


@dataclass(frozen=True, slots=True)
class SynthOptions:
    """What `synth` was asked for."""

    output: Path = field(metadata=option("--output", "-o", help="The pack's folder, new or empty."))
    layers: int | None = field(
        default=None, metadata=option("--layers", least=1, metavar="N", help="The first N layers only.  [default: all]")
    )
    vocab: int | None = field(
        default=None, metadata=option("--vocab", least=1, metavar="N", help="N tokens only.  [default: all]")
    )
    plan: PlanOptions = field(default_factory=PlanOptions)
    plan_file: Path | None = field(
        default=None,
        metadata=option(
            "--plan",
            path="file",
            metavar="FILE",
            help="A plan (moe-pack plan -o), each expert's widths, in place of the seven options above.",
        ),
    )
    sparsity: float = field(
        default=0.0, metadata=option("--sparsity", metavar="S", help="Share of neurons that shall not run.")
    )
    skew: float = field(
        default=0.0,
        metadata=option(
            "--skew",
            metavar="X",
            help="The r-th most popular expert of a layer is chosen as often as r to the power of -X; 0: all alike.",
        ),
    )
    path_correlation: float = field(
        default=0.0,
        metadata=option(
            "--path-correlation",
            metavar="C",
            help="How far a token's experts in one layer say those in the next; 0: not at all, 1: wholly.",
        ),
    )
    profile: Path | None = field(
        default=None,
        metadata=option(
            "--profile",
            metavar="DIR",
            help="Experts are as popular as in this profile of the same model (moe-pack profile).",
        ),
    )
    in_memory: bool = field(
        default=False,
        metadata=option(
            "--in-memory",
            help="Write to memory (/dev/shm), and make the output a link to it. Gone after a restart; to have the "
            "memory back before, remove the folder that the link leads to.",
        ),
    )
    seed: int = field(default=0, metadata=option("--seed", least=0, most=2**63 - 1, help="Other weights."))
    workers: int = field(default=NUM_CORES, metadata=WORKERS_OPTION)

    def check(self) -> None:
        """Refuses numbers out of range, and options that do not go together.

        Raises:  UsageError.
        """
        if fault := ThresholdRule(sparsity=self.sparsity).fault():
            raise UsageError(fault)
        for name, found, most in (
            ("--skew", self.skew, _MAX_SKEW),
            ("--path-correlation", self.path_correlation, 1.0),
        ):
            if not (math.isfinite(found) and 0 <= found <= most):
                raise UsageError(f"{name}: found {found}, expected a number from 0 to {most:g}")
        if self.profile is not None and self.skew:
            raise UsageError("--profile: says how popular experts are; leave --skew out")
        if self.plan_file is not None and (others := given(self.plan)):
            raise UsageError(f"--plan: says all of a plan; leave {', '.join(others)} out")


@click.command("synth", short_help="Make a pack of the dimensions of NAME, with random weights.")
@click.argument("name")
@options_from(SynthOptions)
@command_errors(interrupted="interrupted; what is done stays, run the same command again to go on")
def synth_command(name: str, options: SynthOptions) -> None:
    """Make a pack of the dimensions of the model NAME, with random weights: see how fast it would run here.

    NAME is a published model whose dimensions we know (a name that is none lists them), a config.json, or a folder
    with one; nothing is downloaded. moe-run OUTPUT --bench then measures. The text of such a pack is noise.
    """
    spec = model_spec(name, options.layers, options.vocab)
    file = options.plan_file
    plan = options.plan.plan(spec, "nearest") if file is None else read_plan(file, spec).plan
    _synthesize(spec, plan, options)


def _synthesize(spec: ModelSpec, plan: Plan, options: SynthOptions) -> None:
    output = options.output
    layout = synthetic_layout(spec, plan)
    if options.profile is None:
        popularity = skewed_popularity(spec, options.skew, options.seed)
    else:
        popularity = profiled_popularity(spec, Profile(options.profile))
    character = SyntheticTraits(options.sparsity, popularity, options.path_correlation, options.seed)
    model = f"{spec.family}, {len(spec.moe_layers)} layers of {spec.router.num_experts} experts"
    click.echo(f"{model}: about {size_text(large_bytes(layout))}; {NOISE}", err=True)
    start = time.perf_counter()
    folder = link_memory_folder(output, large_bytes(layout)) if options.in_memory else output
    with TerminalProgress() as progress:
        done = synthesize(spec, plan, character, folder, options.workers, progress)
    _say_done(done, layout, output, time.perf_counter() - start)
    if options.in_memory:
        click.echo(f"in memory, and gone after a restart; to have the memory back: rm -r {folder} {output}")


def _say_done(done: ConversionResult, layout: PackLayout, output: Path, seconds: float) -> None:
    if not done.written:
        click.echo(f"{output}: holds the pack of this model with these options already; nothing to do; {NOISE}")
        return
    with Pack(output) as pack:
        content, bits = pack.manifest.totals.content, bits_per_weight(pack)
    made_bytes = large_bytes(layout) - done.resumed_bytes
    rate = f"{made_bytes / max(seconds, 1e-9) / 1e6:.0f} MB/s"
    click.echo(
        f"{output}: {size_text(content)}, {bits:.2f} bits an expert weight, in {seconds:.1f} s ({rate}); {NOISE}"
    )
    click.echo(f"how fast it runs here: moe-run {output} --bench")
