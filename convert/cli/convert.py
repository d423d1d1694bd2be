"""The command `moe-pack convert`: makes a pack from a checkpoint, with options, by a plan, or for a target."""

from __future__ import annotations

import math
import time
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from moe_pack import formats
from moe_pack.calib.profile import ProfileOptions
from moe_pack.calib.quantize import RotateChoice
from moe_pack.calib.quantize.options import ROTATE_CHOICE_OPTION
from moe_pack.convert import MEMORY_BYTES, SOURCE
from moe_pack.convert.cli.options import (
    CALIBRATION_TOKENS,
    INTERRUPTED,
    NUM_CORES,
    SEQUENCE_LENGTH,
    WORKERS_OPTION,
    PartOptions,
    PlanOptions,
    StreamOptions,
    absolute_source,
    check_stream_space,
    known_facts,
    large_bytes,
    open_source,
    run_on_ray,
)
from moe_pack.convert.plan import Target
from moe_pack.formats.base import cli, commands
from moe_pack.formats.hub.cli import CHECKPOINT
from moe_pack.formats.pack.plans import QUANTIZERS
from moe_pack.formats.parts import DenseRole
from moe_pack.formats.parts.specs import with_repeats

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from moe_pack.calib.evaluate import ThresholdRule
    from moe_pack.calib.forward import Tokens
    from moe_pack.calib.profile import Profile
    from moe_pack.convert import AutoPackResult, ConversionResult
    from moe_pack.convert.plan import Decision, Planner, PlanningModel
    from moe_pack.convert.ray_launcher import PackJob
    from moe_pack.formats.families import Checkpoint
    from moe_pack.formats.pack.manifests import RotationVectors
    from moe_pack.runtime import Text

AnyQuantizer = formats.Quantizer | Literal["auto"]
_QUANTIZERS: tuple[AnyQuantizer, ...] = ("auto", "calibrated", *(name for name in QUANTIZERS if name != "calibrated"))
_OTHER_PARTS_S = 900.0  # an expert of a large model takes minutes
_TARGET_EVAL_TOKENS = 16384  # by default: more than for `eval`, because the interval counts against the limit


@dataclass(frozen=True, slots=True)
class ConvertOptions:
    """The options of `convert`.

    `target`: None: the pack that `plan_file` or else `plan` describes.   `eval_data`, `eval_tokens`: the text on which
    a pack for a target is measured, and how much of it.   `profile`: None: for a target, it is made next to it.
    """

    output: Path = field(
        default=Path("packed"), metadata=formats.option("--output", "-o", help="The pack's folder, new or empty.")
    )
    target: Target | None = None
    eval_data: str | None = field(
        default=None,
        metadata=formats.option(
            "--eval-data",
            metavar="NAME_OR_FILE",
            mark="target",
            help="With --target-vram or --preset: the text on which the loss is measured, as for eval.  [default: the "
            "end of our sample]",
        ),
    )
    eval_tokens: int = field(
        default=_TARGET_EVAL_TOKENS,
        metadata=formats.option(
            "--eval-tokens",
            least=256,
            metavar="N",
            mark="target",
            help="Number of tokens of it. More tokens make the interval of the loss narrower, which leaves more of the "
            "limit for the plan.",
        ),
    )
    plan: PlanOptions = field(default_factory=PlanOptions)
    plan_file: Path | None = field(
        default=None,
        metadata=formats.option(
            "--plan",
            path="file",
            metavar="FILE",
            mark="plan",
            help="A plan (moe-pack plan -o): the formats and the sparsity of each expert. In place of "
            "--selector to --dense-bits, --quantizer, --repeats and --sparsity.",
        ),
    )
    quantizer: AnyQuantizer = field(
        default="auto",
        metadata=formats.option(
            "--quantizer",
            choices=_QUANTIZERS,
            mark="plan",
            help="How codes are found. calibrated uses the experts' inputs on the profile's text and loses least. hqq "
            "uses the weights only and loses least without a profile. nearest and absmax are simple and fast. auto is "
            "calibrated with a profile that has inputs, else hqq.",
        ),
    )
    repeats: int | None = field(
        default=None,
        metadata=formats.option(
            "--repeats",
            least=0,
            metavar="N",
            mark="plan",
            help="Number of neurons of each expert whose row of down is stored a second time, for what the first one "
            "lost: a few neurons decide much of an expert's output. Needs calibrated codes.  [default: 1 of 128]",
        ),
    )
    rotate: RotateChoice = field(default="auto", metadata=ROTATE_CHOICE_OPTION)
    sequential: bool = field(
        default=True,
        metadata=formats.option(
            "--sequential/--no-sequential",
            help="With calibrated: quantize each layer for the inputs that the stored layers before it give, and make "
            "up for a part of their errors. --no-sequential takes the source's inputs: the conversion is a little "
            "faster, repeated attempts of --target-vram much, and the pack loses more.",
        ),
    )
    profile: Path | None = field(
        default=None,
        metadata=formats.option(
            "--profile",
            metavar="DIR",
            help="A profile of this model (moe-pack profile). Experts are calibrated with its inputs; neurons "
            "are sorted "
            "by how often they run at --sparsity, most often first; its routing data is added to the pack (as moe-pack "
            "attach does).",
        ),
    )
    sparsity: float | None = field(
        default=None,
        metadata=formats.option(
            "--sparsity",
            metavar="S",
            mark="plan",
            help="Share of an expert's neurons that do not run, such as 0.8. Thresholds are measured on the finished "
            "pack, on the profile's text or else on our sample.  [default: all run]",
        ),
    )
    many: PartOptions = field(default_factory=PartOptions)
    stream: StreamOptions = field(default_factory=StreamOptions)
    workers: int = field(default=NUM_CORES, metadata=WORKERS_OPTION)
    memory_bytes: int = field(
        default=MEMORY_BYTES,
        metadata=formats.option(
            "--memory",
            parse=commands.read_size,
            default_text=f"{MEMORY_BYTES >> 30}G",
            metavar="SIZE",
            help="Memory for all experts that are worked on at once. An expert that is calibrated takes some hundred "
            "MiB: with many cores, more memory makes it faster.",
        ),
    )

    def check(self) -> None:
        """Refuses options that do not go together.

        Raises:  UsageError.
        """
        if self.rotate == "on" and SOURCE in (self.plan.selector_bits, self.plan.record_bits):
            raise formats.UsageError(
                "--rotate on rounds the experts' weights, which source would keep; give a width such as 16, or remove "
                "--rotate"
            )
        if self.many.ray is not None and self.stream.is_given:
            raise formats.UsageError("--stream does not go with --ray; start each part with --part I/N and --stream")
        if self.target is not None:
            self._check_with(self.target)
        elif wrong := commands.given(self, "target"):
            raise formats.UsageError(
                f"{wrong[0]} needs --target-vram or --preset; add one of them, or remove {wrong[0]} and measure the "
                "pack with moe-pack eval"
            )
        elif self.plan_file is not None:
            if others := commands.given(self.plan) + commands.given(replace(self, plan_file=None), "plan"):
                raise formats.UsageError(f"--plan decides all formats and sparsities; remove {', '.join(others)}")
        else:
            self._check_plan()

    def _check_with(self, target: Target) -> None:
        """Refuses what the target's plan decides, and work in parts: the source is read again for each attempt.

        A selector is free, of a preset a sparsity.
        """
        name = "--target-vram" if target.preset is None else f"--preset {target.preset}"
        if self.stream.is_given:
            raise formats.UsageError(
                f"--stream: {name} reads the source many times; make the plan first (moe-pack profile --stream, "
                "moe-pack plan), then convert with --plan and --stream"
            )
        if many := commands.given(self, "many"):
            raise formats.UsageError(
                f"{many[0]} does not go with {name}; make the profile, then a plan (moe-pack plan --target-vram), "
                f"then give both to convert with {many[0]}"
            )
        if target.purpose == "vllm" and self.rotate == "on":
            raise formats.UsageError(
                "--rotate on does not go with --for vllm, which runs no rotated layers; remove one of the two"
            )
        plan = replace(self.plan, selector=None) if target.preset is None else self.plan
        decided = replace(self, sparsity=None) if target.preset == "floe" else self
        if names := commands.given(plan) + commands.given(decided, "plan"):
            raise formats.UsageError(f"{name} makes a plan, which decides this; remove {', '.join(names)}")

    def _check_plan(self) -> None:
        from moe_pack.calib.evaluate import ThresholdRule

        if self.sparsity is not None and (fault := ThresholdRule(sparsity=self.sparsity).fault()):
            raise formats.UsageError(fault)
        if self.profile is None and self.quantizer == "calibrated":
            raise formats.UsageError(
                "--quantizer calibrated needs the experts' inputs; give a profile that has them with --profile"
            )
        if self.profile is not None and self.sparsity is None and self.quantizer not in ("auto", "calibrated"):
            raise formats.UsageError(
                f"--profile: {self.quantizer} does not use a profile, and neurons are sorted only for a sparsity; give "
                "--sparsity, or remove --quantizer"
            )


@click.command("convert")
@click.argument("path", type=CHECKPOINT)
@CHECKPOINT.list_option
@cli.options_from(ConvertOptions)
@cli.command_errors(interrupted=INTERRUPTED)
def convert_command(path: str, options: ConvertOptions) -> None:
    """Make a pack from the checkpoint at PATH.

    PATH is a Hugging Face folder with safetensors, a GGUF file (or one of its parts), a hub id such as
    mistralai/Mixtral-8x7B-v0.1, or a short name such as mixtral. A hub id and a short name are looked up in the local
    hub cache, and downloaded if they are not there; with --stream the checkpoint is never on the disk whole.

    \b
    moe-pack convert mixtral -o packed/                    all experts alike, 4 bit
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
    from moe_pack.runtime.text import check_text

    with closing(open_source(path, options.stream, options.output)) as checkpoint:
        notes = check_text(checkpoint.files, checkpoint.spec.vocab_size)
        if options.target is None:
            _convert(path, checkpoint, options, notes)
        else:
            _make_for_target(checkpoint, _narrowed(options.target, options), options, notes)


def _tell(line: str) -> None:
    click.echo(line, err=True)


def _say_notes(notes: list[str]) -> None:
    for note in notes:
        _tell(f"note: {note}")


def _sequence_length(checkpoint: Checkpoint) -> int:
    return min(SEQUENCE_LENGTH, checkpoint.spec.max_position_embeddings)


def _sample(checkpoint: Checkpoint, text: Text) -> Tokens:
    """Reads the start of our sample, which calibrates by default."""
    from moe_pack.calib.forward import read_tokens

    return read_tokens(None, None, text, CALIBRATION_TOKENS, _sequence_length(checkpoint))


def _convert(path: str, checkpoint: Checkpoint, options: ConvertOptions, notes: list[str]) -> None:
    """Makes the pack that the options or a plan describe, after it has said the notes."""
    from moe_pack.calib.evaluate import ThresholdRule
    from moe_pack.calib.profile import Profile, attach, hottest_first
    from moe_pack.convert import check_calibration, layout_for, threshold_rule
    from moe_pack.convert.cli.measure import attached_line
    from moe_pack.convert.plan.rotation import PlanRotation, check_rotation
    from moe_pack.formats import Pack
    from moe_pack.formats.hub import StreamedFiles
    from moe_pack.formats.pack.writer import await_parts

    profile = None if options.profile is None else Profile(options.profile)
    decision = _decision(options, checkpoint, profile)
    plan, output = decision.plan, options.output
    rotate = PlanRotation.choice(options.rotate, decision.is_plain)
    chosen = PlanRotation.chosen(rotate, checkpoint, profile)
    notes = [*notes, *filter(None, [_rotated_note(rotate, decision.is_plain)])]
    rotation = chosen.of(plan)
    check_calibration(checkpoint, plan, profile, rotation)
    if rotation is not None:
        check_rotation(rotation, plan, checkpoint.spec)
    order = None
    if profile is not None and profile.facts.imatrix is None:
        order = hottest_first(profile, checkpoint, plan.selector, decision.sparsity)
    rule = threshold_rule(decision) if options.sparsity is None else ThresholdRule(sparsity=options.sparsity)
    # The text is read first: if it cannot be read, that would otherwise be found after hours.
    tokens = None if rule is None else _threshold_tokens(checkpoint, profile)
    source_bytes = sum(file.bytes for file in checkpoint.account()[0])
    _say_notes(notes)
    _say_plan(checkpoint, plan, options, rotation, source_bytes)
    files = checkpoint.files
    if isinstance(files, StreamedFiles):
        _tell(check_stream_space(files, output, large_bytes(layout_for(checkpoint, plan))))
    start = time.perf_counter()
    result = _made(path, checkpoint, plan, options, order, profile, rotation)
    if options.many.part is not None and not result.written:
        click.echo(f"{output}: the pack is complete; another part has finished it")
        return
    seconds = time.perf_counter() - start
    if options.many.part is not None:  # the others end what they work on, and what follows needs the folder alone
        with cli.TerminalProgress() as progress, commands.stage_of(progress, "waiting for other parts"):
            await_parts(output, _OTHER_PARTS_S)
    _say_converted(result, output, seconds, source_bytes)
    if isinstance(files, StreamedFiles):
        _tell(
            f"fetched {formats.size_text(files.fetched_bytes)} of weights; the source has "
            f"{formats.size_text(source_bytes)}"
        )
    if tokens is not None and rule is not None:
        _measure_thresholds(output, tokens, rule)
    if profile is not None and profile.facts.imatrix is None:
        with Pack(output) as pack:
            click.echo(attached_line(output, attach(pack, profile)))
    _say_rounding(output)


def _made(
    path: str,
    checkpoint: Checkpoint,
    plan: formats.Plan,
    options: ConvertOptions,
    order: NDArray[np.uint32] | None,
    profile: Profile | None,
    rotation: RotationVectors | None,
) -> ConversionResult:
    """Makes a pack in this process, or on a Ray cluster."""
    from moe_pack.convert import convert, layout_for
    from moe_pack.convert.account import Preparation
    from moe_pack.convert.ray_launcher import PackJob

    with cli.TerminalProgress() as progress:
        if options.many.ray is not None:
            job = PackJob(
                absolute_source(path),
                options.output.absolute(),
                plan,
                options.workers,
                order,
                None if options.profile is None else options.profile.absolute(),
                options.memory_bytes,
                rotation,
                options.sequential,
            )
            return _made_by_ray(job, layout_for(checkpoint, plan, rotation), options.many, progress)
        return convert(
            checkpoint,
            plan,
            options.output,
            options.workers,
            progress=progress,
            prepared=Preparation(order=order, calibration=profile, rotation=rotation, sequential=options.sequential),
            memory_bytes=options.memory_bytes,
            part=options.many.part,
        )


def _made_by_ray(
    job: PackJob, layout: formats.PackLayout, many: PartOptions, progress: formats.Progress
) -> ConversionResult:
    """Makes a pack on a Ray cluster."""
    from moe_pack.convert import ConversionResult
    from moe_pack.convert.ray_launcher import PROCESS_BYTES, Resources
    from moe_pack.formats.pack.writer import journaled_bytes

    total = sum(item.num_bytes for item in layout.items())
    done = journaled_bytes(job.output, layout)
    run_on_ray(
        job,
        many,
        Resources(job.workers, job.memory_bytes + PROCESS_BYTES),
        progress,
        commands.Stage("packing", total, "B", done),
        lambda: (journaled_bytes(job.output, layout), ""),
    )
    return ConversionResult(layout, done, written=done < total)


def _decision(options: ConvertOptions, checkpoint: Checkpoint, profile: Profile | None) -> Decision:
    """Returns the plan and the sparsity of each expert.

    Raises:  PlanError if the plan does not fit the model.
    """
    import numpy as np

    from moe_pack.convert.plan import Decision, read_plan

    spec = checkpoint.spec
    if options.plan_file is not None:
        return read_plan(options.plan_file, spec)
    quantizer = options.quantizer
    if quantizer == "auto":
        quantizer = "hqq" if profile is None or not profile.calibrates else "calibrated"
    shape = (len(spec.moe_layers), spec.router.num_experts)
    return Decision(
        options.plan.plan_for(checkpoint, quantizer, options.repeats), np.full(shape, options.sparsity or 0.0)
    )


def _threshold_tokens(checkpoint: Checkpoint, profile: Profile | None) -> Tokens:
    """Returns the text on which thresholds are measured: the profile's if it has one, or else our sample."""
    from moe_pack.runtime import Text

    if profile is not None and profile.facts.imatrix is None:
        return profile.tokens()
    return _sample(checkpoint, Text(checkpoint.files))


def _say_plan(
    checkpoint: Checkpoint,
    plan: formats.Plan,
    options: ConvertOptions,
    rotation: RotationVectors | None,
    source_bytes: int,
) -> None:
    """Says before the conversion how large the pack will be, what is lossless, what is not, and if workers wait."""
    from moe_pack.convert import kept_text, layout_for, memory_line
    from moe_pack.convert.cli.measure import model_text

    layout = layout_for(checkpoint, plan)
    _tell(
        f"{model_text(checkpoint.spec)}: {formats.size_text(source_bytes)} in the checkpoint, about "
        f"{formats.size_text(large_bytes(layout))} in the pack"
    )
    if kept := kept_text(plan, checkpoint, rotation):
        _tell(kept)
    dtypes = {
        f"{source.num_bits}-bit" if source.codec == "packed" else checkpoint.dtype(source)
        for source in checkpoint.claims.experts.values()
        if source.codec != "mxfp4"
    }
    narrowed = sorted(dtypes - {"BF16"})
    has_bf16 = any(
        expert.of(matrix) == formats.BF16 for layer in plan.experts for expert in layer for matrix in formats.MATRICES
    )
    if narrowed and has_bf16:
        _tell(f"note: 16 bit is bfloat16; the source's {', '.join(narrowed)} expert weights lose their last bits")
    widened = _widened(checkpoint, plan)
    if widened and options.plan_file is None:
        _tell(
            f"note: {len(widened)} dense matrices are dequantized and stored as float32, "
            f"{formats.size_text(4 * sum(math.prod(role.shape) for role in widened))}; --dense-bits 8 takes about "
            "a quarter"
        )
    if limited := memory_line(checkpoint, plan, layout, options.workers, options.memory_bytes):
        _tell(limited)


def _widened(checkpoint: Checkpoint, plan: formats.Plan) -> list[DenseRole]:
    """Returns the dense matrices that have codes in the source and are stored as its dequantized values."""
    return [
        role
        for role, part in zip(formats.dense_roles(checkpoint.spec), plan.dense, strict=True)
        if part is None
        and role.quantizable
        and checkpoint.files.decoded_from(checkpoint.dense_source(role.name).tensor) is not None
    ]


def _say_converted(result: ConversionResult, output: Path, seconds: float, source_bytes: int) -> None:
    from moe_pack.formats import Pack
    from moe_pack.runtime.quality import bits_per_weight

    if not result.written:
        click.echo(f"{output}: already contains the pack of this checkpoint with these options; nothing to do")
        return
    with Pack(output) as pack:
        content, bits = pack.manifest.totals.content, bits_per_weight(pack)
    if result.resumed_bytes:  # a rate would count what an earlier run has done
        how = f"; {formats.size_text(result.resumed_bytes)} are from an earlier run"
    else:
        how = f" ({source_bytes / max(seconds, 1e-9) / 1e6:.0f} MB/s of source)"
    click.echo(f"{output}: {formats.size_text(content)}, {bits:.2f} bits an expert weight, in {seconds:.1f} s{how}")


def _say_rounding(output: Path) -> None:
    """Says which experts lose much, if that was measured; `inspect` says more."""
    from moe_pack.convert.rounding import read_rounding, warning_lines
    from moe_pack.formats import Pack

    with Pack(output) as pack:
        rounding = read_rounding(pack)
        for line in [] if rounding is None else warning_lines(pack, rounding):
            click.echo(line)


def _measure_thresholds(output: Path, tokens: Tokens, rule: ThresholdRule) -> None:
    from moe_pack.convert.cli.measure import measure_thresholds_of, threshold_lines
    from moe_pack.formats import Pack

    with Pack(output) as pack:
        measured, layers = measure_thresholds_of(pack, tokens, rule, "cpu"), pack.spec.moe_layers
    for line in threshold_lines(output, layers, measured):
        click.echo(line)


def _narrowed(target: Target, options: ConvertOptions) -> Target:
    """Returns the target with the selector and the sparsity of the options."""
    selector = options.plan.selector
    selectors = target.selectors if selector is None else (selector,)
    return replace(target, selectors=selectors, sparsity=options.sparsity)


def _make_for_target(checkpoint: Checkpoint, target: Target, options: ConvertOptions, notes: list[str]) -> None:
    """Makes the pack for a target, or continues an earlier run, and prints its loss."""
    import torch

    from moe_pack.calib.profile import losses_of
    from moe_pack.convert import AutoPacker, dense_dtypes, lossless_formats, pack_goal, with_kept
    from moe_pack.convert.kept import checkpoint_repeats
    from moe_pack.convert.plan import PlanningModel
    from moe_pack.convert.plan.rotation import PlanRotation
    from moe_pack.runtime import Text
    from moe_pack.runtime.model import operations_for

    dtypes = dense_dtypes(checkpoint)
    target = _placed(target, checkpoint, dtypes)
    rotate = PlanRotation.choice(options.rotate, not target.has_our_parts)
    text = Text(checkpoint.files)
    _say_notes(notes)
    tokens = _eval_tokens(checkpoint, text, options)
    with ExitStack() as stack:
        progress = stack.enter_context(cli.TerminalProgress())
        operations = stack.enter_context(operations_for(torch.device("cpu")))
        profile = _profile(checkpoint, text, options, rotate, progress)
        rotation = PlanRotation.chosen(rotate, checkpoint, profile)
        for note in (_rotated_note(rotate, not target.has_our_parts), rotation.note(profile)):
            if note is not None:
                _tell(note)
        # Layers that keep the checkpoint's codes stay as they are, but with --rotate on they cannot be kept.
        losses = with_kept(losses_of(profile), {} if rotate == "on" else lossless_formats(checkpoint))
        repeats = checkpoint_repeats(checkpoint) if losses.quantizer == "calibrated" and target.has_our_parts else 0
        model = PlanningModel(with_repeats(checkpoint.spec, repeats), dtypes, losses, rotation)
        packer = AutoPacker(
            checkpoint,
            profile,
            tokens,
            options.output,
            pack_goal(
                model,
                _planner(model, profile, target, options.output, progress),
                profile,
                tokens,
                target,
                options.sequential,
            ),
            options.workers,
            progress,
            operations,
            memory_bytes=options.memory_bytes,
        )
        result = packer.make()
    _say_rounding(options.output)
    for line in _result_lines(result, options.output, target):
        click.echo(line)


def _placed(target: Target, checkpoint: Checkpoint, dtypes: tuple[str, ...]) -> Target:
    """Returns the target with the device and the key-value cache that it leaves open; without a memory as it is."""
    from moe_pack.convert.plan import check_budget, choose_target_device, with_kv_dtype

    if target.budget_bytes is None:
        return target
    target, device_line = choose_target_device(target, checkpoint.spec, dtypes)
    if device_line is not None:
        _tell(device_line)
    target = with_kv_dtype(target, checkpoint.spec, dtypes)
    check_budget(target, checkpoint.spec, dtypes)
    return target


def _rotated_note(rotate: RotateChoice, is_plain: bool) -> str | None:
    """Returns a line that says that a plain plan (`Decision`) is rotated all the same; None if it is not."""
    if rotate != "on" or not is_plain:
        return None
    return "note: --rotate on rotates layers that this plan, a paper's or one for vLLM, leaves as they are"


def _eval_tokens(checkpoint: Checkpoint, text: Text, options: ConvertOptions) -> Tokens:
    from moe_pack.calib.forward import read_tokens, unseen_tokens

    length = _sequence_length(checkpoint)
    if options.eval_data is None:
        return unseen_tokens(text, options.eval_tokens, length)
    return read_tokens(options.eval_data, None, text, options.eval_tokens, length)


def _profile(
    checkpoint: Checkpoint, text: Text, options: ConvertOptions, rotate: RotateChoice, progress: formats.Progress
) -> Profile:
    """Returns the profile of the options, or makes one of our sample next to the output.

    Args:    rotate: `--rotate`, as it is meant for the pack.
    """
    from moe_pack.calib.profile import Profile, make_profile
    from moe_pack.convert.cli.measure import say_text

    if options.profile is not None:
        profile = Profile(options.profile)
        if profile.facts.imatrix is not None:
            raise formats.PlanError(
                f"--profile {options.profile}: was made from an importance file, which does not say what bits cost; "
                "for --target-vram and --preset remove --profile, or profile the model on text"
            )
        return profile
    folder = options.output.with_name(f"{options.output.name}.profile")
    tokens = _sample(checkpoint, text)
    _tell(f"{folder}: the profile; it is kept, and --profile {folder} uses it again")
    say_text(checkpoint.spec, tokens)
    return make_profile(checkpoint, tokens, folder, ProfileOptions(rotate=rotate), progress)


def _planner(
    model: PlanningModel, profile: Profile, target: Target, output: Path, progress: formats.Progress
) -> Planner | None:
    """Returns the planner for a target, after its defaults are said; None for a paper's pack without a memory."""
    from moe_pack.convert.plan import defaults_text, kv_text, planner_for

    facts = known_facts(output)
    for line in defaults_text(target, model.spec, facts):
        _tell(f"by default {line}")
    if (stored := kv_text(target)) is not None:
        _tell(stored)
    if target.budget_bytes is None:
        return None
    return planner_for(target, model, profile, facts, progress)


def _result_lines(result: AutoPackResult, output: Path, target: Target) -> list[str]:
    """Returns the loss of the pack and how to run it, as lines for people."""
    from moe_pack.convert import loss_text

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


def _run_line(output: Path, target: Target) -> str:
    """Returns the command that runs the pack as planned, on this machine if it can."""
    from moe_pack.convert.plan import kv_text
    from moe_pack.runtime import machine

    if target.budget_bytes is None:
        return f"run it: moe-run {output}"
    gpu = machine.gpu_here()
    has_gpu, budget = gpu is not None and gpu.fault is None, _budget_text(target.budget_bytes)
    if target.device == "cuda" and not has_gpu:
        return f"run it here, on the CPU: moe-run {output}; where the GPU is: moe-run {output} --budget {budget}"
    device = " --device cpu" if has_gpu and target.device == "cpu" else ""  # where moe-run would take the GPU
    kv_dtype = "" if kv_text(target) is None else f" --kv-dtype {target.kv_dtype}"
    return f"run it: moe-run {output}{device} --budget {budget}{kv_dtype}"


def _budget_text(num_bytes: int) -> str:
    """Returns bytes as an option takes them, to the byte: 11G, 24M, 12345678."""
    units = ((1 << 30, "G"), (1 << 20, "M"))
    return next((f"{num_bytes // unit}{name}" for unit, name in units if num_bytes % unit == 0), str(num_bytes))
