"""The use cases of this folder as functions: they make a profile, plans, a pack, or a pack for a memory.

Each takes an order (`options`), tells a progress what it does, and returns a result. The command line makes orders of
its options and prints results; `convert` is for those who write Python.
"""

import math
import re
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from tempfile import gettempdir

import numpy as np
import torch
from numpy.typing import NDArray

from moe_pack import formats
from moe_pack.calib import forward, profile, quantize
from moe_pack.calib.evaluate import thresholds
from moe_pack.convert import account, autopack, hub, kept, options, pipeline, plan, ray_launcher
from moe_pack.convert.plan.options import PresetName, read_limit
from moe_pack.convert.plan.rotation import PlanRotation
from moe_pack.formats import families
from moe_pack.formats.base import commands, errors
from moe_pack.formats.gguf import find_gguf
from moe_pack.formats.hub import StreamedFiles
from moe_pack.formats.pack.writer import await_parts
from moe_pack.formats.parts import specs
from moe_pack.runtime import Text, offload
from moe_pack.runtime.model import operations_for
from moe_pack.runtime.text import check_text

_OTHER_PARTS_S = 900.0  # an expert of a large model takes minutes
# Plans next to the one for the given loss: factors of that loss.
_OTHER_PLANS = ((0.25, "a quarter of the loss"), (4.0, "four times the loss"))


def model_text(spec: formats.ModelSpec) -> str:
    """Returns a model in a few words: its family, its layers with experts, their experts."""
    return f"{spec.family}, {len(spec.moe_layers)} layers of {spec.router.num_experts} experts"


def text_lines(spec: formats.ModelSpec, tokens: forward.Tokens) -> Iterator[str]:
    """Yields lines about the model and the text that will be measured."""
    number, length = tokens.sequences.shape
    yield f"{model_text(spec)}; {number * length:,} tokens in sequences of {length}, from {tokens.name}"
    if spec.encoder is not None:
        yield f"the encoder reads the first {length // 2} tokens of each sequence; the decoder predicts the others"
    yield from (f"note: {note}" for note in tokens.notes)


def make_profile(order: options.ProfileOrder, progress: formats.Progress = formats.NO_PROGRESS) -> profile.Profile:
    """Measures a model on text, or reads an importance file; continues where a killed run stopped.

    Raises:  UsageError, CheckpointError, ConversionError, RunError.
    """
    with closing(hub.open_source(order.source, order.stream, order.output, progress)) as checkpoint:
        if order.imatrix is not None:
            with commands.stage_of(progress, "reading the importance file"):
                return profile.profile_of_imatrix(profile.read_imatrix(order.imatrix), checkpoint, order.output)
        tokens = order.text.tokens(Text(checkpoint.files))
        for line in text_lines(checkpoint.spec, tokens):
            progress.say(line)
        if order.many.ray is not None:
            return ray_launcher.make_profile_on_cluster(order, tokens, checkpoint.spec.moe_layers, progress)
        device, part = options.chosen_device(order.device), order.many.part
        return profile.make_profile(checkpoint, tokens, order.output, order.profile, progress, device, part)


@dataclass(frozen=True, slots=True, eq=False)
class MadePlans:
    """The plans for a memory, with what is known of the model."""

    target: plan.Target
    model: plan.PlanningModel
    is_measured: bool  # whether routes and losses are, not only assumed
    defaults: list[str]  # the choices that the target leaves open, as texts
    # The device that `auto` is, and why; whether the profile is rotated as the pack would be, if not.
    notes: list[str]
    offers: list[plan.PlanOption]  # the one for the given loss first

    @property
    def origin(self) -> str:
        """Returns the source of losses and routes, in words."""
        losses = self.model.losses
        if self.is_measured:
            return f"losses and routes: {losses.origin}"
        drawn = "evenly" if not np.ptp(losses.popularity) else "by that popularity"
        return f"losses {losses.origin}; routes drawn {drawn}; moe-pack profile measures both"


def make_plan(order: options.PlanOrder, progress: formats.Progress = formats.NO_PROGRESS) -> MadePlans:
    """Makes the plan for a memory and a loss, and plans for other losses next to it; converts nothing.

    Raises:  UsageError, PlanError, RunError; CheckpointError.
    """
    order.check()
    assert order.target is not None, "`check` refuses that"
    target = order.target.narrowed(order.selector, order.sparsity)
    spec, dtypes, lossless = _model_of(order.source, progress)
    found = None if order.profile is None else profile.Profile(order.profile)
    if found is not None and found.spec != spec:
        raise formats.PlanError(
            f"--profile {order.profile}: is a profile of another model; give a profile of {order.source}"
        )
    losses = kept.with_kept(profile.assumed_losses(spec) if found is None else profile.losses_of(found), lossless)
    rotation = PlanRotation(None if found is None or not target.has_our_parts else found.rotation())
    is_repeated = losses.quantizer == "calibrated" and not lossless and target.has_our_parts
    repeats = quantize.usual_repeats(spec.expert.source_size) if is_repeated else 0
    model = plan.PlanningModel(specs.with_repeats(spec, repeats), dtypes, losses, rotation)
    target, device_line = plan.choose_target_device(target, spec, dtypes)
    notes = list(filter(None, [device_line, None if found is None else rotation.note(found)]))
    target = plan.with_kv_dtype(target, spec, dtypes)
    if found is not None and found.facts.imatrix is not None:
        found = None  # it has no routes, and its popularity is among the losses
    defaults = plan.defaults_text(target, spec, order.machine)
    planner = plan.planner_for(target, model, found, order.machine, progress)
    return MadePlans(target, model, found is not None, defaults, notes, list(_offers(planner, target, model)))


def _model_of(
    source: str, progress: formats.Progress
) -> tuple[formats.ModelSpec, tuple[str, ...], dict[formats.Matrix, formats.PartFormat]]:
    """Returns the model, the dtype of each dense tensor, and the formats that keep its experts without loss.

    If only the model's dimensions are known, everything counts as bfloat16, which every plan may use.
    """
    folder = Path(source)
    is_on_hub = "/" in source and not folder.exists()
    has_weights = find_gguf(folder) is not None or (folder.is_dir() and any(folder.glob("*.safetensors")))
    if is_on_hub or has_weights:
        with commands.stage_of(progress, "reading the checkpoint"):
            # On the hub, a plan needs the headers of the weights' files only.
            files = hub.find_checkpoint(source) if has_weights else hub.open_streamed(source, Path(gettempdir()))
            with closing(families.Checkpoint(files)) as checkpoint:
                return checkpoint.spec, pipeline.dense_dtypes(checkpoint), kept.lossless_formats(checkpoint)
    spec = families.model_spec(source)
    return spec, specs.usual_dtypes(spec), {}


def _offers(planner: plan.Planner, target: plan.Target, model: plan.PlanningModel) -> Iterator[plan.PlanOption]:
    """Yields the plan for the given loss and two others; with a preset, the paper's plan only."""
    limit, nll_per_kl = target.loss_limit, model.losses.nll_per_kl
    nats = None if limit is None else limit.nats(nll_per_kl)
    if target.preset is not None:
        decision = plan.preset_decision(target.preset, model, target.sparsity, nats)
        yield plan.PlanOption(f"preset {target.preset}", planner.estimate(decision))
        return
    assert limit is not None and nats is not None, "only a paper's pack has no limit"
    yield plan.PlanOption(f"asked: {limit.text()}", planner.plan(nats))
    for factor, name in _OTHER_PLANS:
        try:
            yield plan.PlanOption(name, planner.plan(limit.times(factor).nats(nll_per_kl)))
        except errors.MoePackError as fault:  # the plan for the given loss exists
            yield plan.PlanOption(name, None, str(fault))


@dataclass(frozen=True, slots=True, eq=False)
class MadePack:
    """A pack that was made by options or by a plan."""

    output: Path
    conversion: pipeline.ConversionResult
    seconds: float  # of the conversion
    source_bytes: int
    thresholds: thresholds.MeasuredThresholds | None  # None if all neurons run
    routing: offload.Routing | None  # the data that were attached; None without a profile of text


@dataclass(frozen=True, slots=True, eq=False)
class PackForTarget:
    """A pack that was made for a target, or as a paper stores it."""

    output: Path
    target: plan.Target  # with the device and the key-value cache that were chosen
    result: autopack.AutoPackResult


def make_pack(order: options.PackOrder, progress: formats.Progress = formats.NO_PROGRESS) -> MadePack:
    """Makes the pack that options or a plan describe; continues where a killed run stopped.

    Raises:  UsageError, PlanError, CheckpointError, ConversionError, RunError.
    """
    order.check()
    with closing(hub.open_source(order.source, order.stream, order.output, progress)) as checkpoint:
        notes = check_text(checkpoint.files, checkpoint.spec.vocab_size)
        found = None if order.profile is None else profile.Profile(order.profile)
        routed = None if found is None or found.facts.imatrix is not None else found
        decision = _decision(order, checkpoint, found)
        prepared = _prepared(order, checkpoint, decision, found)
        rule = autopack.threshold_rule(decision)
        if order.sparsity is not None:
            rule = thresholds.ThresholdRule(sparsity=order.sparsity)
        # The text is read first: if it cannot be read, that would otherwise be found after hours.
        tokens = None
        if rule is not None:
            tokens = _sample(checkpoint, Text(checkpoint.files)) if routed is None else routed.tokens()
        source_bytes = sum(file.bytes for file in checkpoint.account()[0])
        for note in (*notes, *_rotated_note(order, decision.is_plain)):
            progress.say(f"note: {note}")
        _say_plan(checkpoint, decision.plan, order, prepared, source_bytes, progress)
        start = time.perf_counter()
        result = _converted(order, checkpoint, decision.plan, prepared, progress)
        seconds, measured, routing = time.perf_counter() - start, None, None
        if order.many.part is None or result.written:
            if order.many.part is not None:  # the others end what they work on; what follows needs the folder alone
                with commands.stage_of(progress, "waiting for other parts"):
                    await_parts(order.output, _OTHER_PARTS_S)
            if isinstance(checkpoint.files, StreamedFiles):
                progress.say(
                    f"fetched {formats.size_text(checkpoint.files.fetched_bytes)} of weights; the source has "
                    f"{formats.size_text(source_bytes)}"
                )
            if rule is not None and tokens is not None:
                with formats.Pack(order.output) as pack, operations_for(torch.device("cpu")) as operations:
                    measured = thresholds.measure_thresholds(pack, tokens, rule, progress, operations=operations)
            if routed is not None:
                with formats.Pack(order.output) as pack:
                    routing = profile.attach(pack, routed)
    return MadePack(order.output, result, seconds, source_bytes, measured, routing)


def _decision(
    order: options.PackOrder, checkpoint: families.Checkpoint, found: profile.Profile | None
) -> plan.Decision:
    spec = checkpoint.spec
    if order.plan_file is not None:
        return plan.read_plan(order.plan_file, spec)
    quantizer = order.quantizer
    if quantizer == "auto":
        quantizer = "hqq" if found is None or not found.calibrates else "calibrated"
    shape = (len(spec.moe_layers), spec.router.num_experts)
    return plan.Decision(
        kept.plan_for(order.plan, checkpoint, quantizer, order.repeats), np.full(shape, order.sparsity or 0.0)
    )


def _prepared(
    order: options.PackOrder, checkpoint: families.Checkpoint, decision: plan.Decision, found: profile.Profile | None
) -> account.Preparation:
    rotate = PlanRotation.choice(order.rotate, decision.is_plain)
    rotation = PlanRotation.chosen(rotate, checkpoint, found).of(decision.plan)
    prepared = account.Preparation(None, found, rotation, order.sequential)
    pipeline.check_prepared(checkpoint, decision.plan, prepared)
    if found is None or found.facts.imatrix is not None:
        return prepared
    hottest: NDArray[np.uint32] = profile.hottest_first(found, checkpoint, decision.plan.selector, decision.sparsity)
    return replace(prepared, order=hottest)


def _converted(
    order: options.PackOrder,
    checkpoint: families.Checkpoint,
    chosen: formats.Plan,
    prepared: account.Preparation,
    progress: formats.Progress,
) -> pipeline.ConversionResult:
    if order.many.ray is not None:
        layout = pipeline.layout_for(checkpoint, chosen, prepared.rotation)
        return ray_launcher.make_pack_on_cluster(order, chosen, prepared, layout, progress)
    return pipeline.convert(
        checkpoint,
        chosen,
        order.output,
        order.workers,
        progress,
        prepared=prepared,
        memory_bytes=order.memory_bytes,
        part=order.many.part,
    )


def _say_plan(
    checkpoint: families.Checkpoint,
    chosen: formats.Plan,
    order: options.PackOrder,
    prepared: account.Preparation,
    source_bytes: int,
    progress: formats.Progress,
) -> None:
    """Says before the conversion how large the pack will be, what is lossless, what is not, and if workers wait."""
    layout = pipeline.layout_for(checkpoint, chosen)
    progress.say(
        f"{model_text(checkpoint.spec)}: {formats.size_text(source_bytes)} in the checkpoint, about "
        f"{formats.size_text(pipeline.large_bytes(layout))} in the pack"
    )
    if line := kept.kept_text(chosen, checkpoint, prepared.rotation):
        progress.say(line)
    dtypes = {
        f"{source.num_bits}-bit" if source.codec == "packed" else checkpoint.dtype(source)
        for source in checkpoint.claims.experts.values()
        if source.codec != "mxfp4"
    }
    narrowed = sorted(dtypes - {"BF16"})
    has_bf16 = any(e.of(matrix) == formats.BF16 for layer in chosen.experts for e in layer for matrix in specs.MATRICES)
    if narrowed and has_bf16:
        progress.say(
            f"note: 16 bit is bfloat16; the source's {', '.join(narrowed)} expert weights lose their last bits"
        )
    widened = [  # dense matrices that have codes in the source and are stored as its dequantized values
        role
        for role, part in zip(formats.dense_roles(checkpoint.spec), chosen.dense, strict=True)
        if part is None
        and role.quantizable
        and checkpoint.files.decoded_from(checkpoint.dense_source(role.name).tensor) is not None
    ]
    if widened and order.plan_file is None:
        matrices = f"{len(widened)} dense matri{'ces are' if len(widened) > 1 else 'x is'}"
        # With fewer bits they stay as they are if groups do not divide their rows: then no advice is true.
        advice = "; --dense-bits 8 takes about a quarter" if order.plan.dense in (16, options.SOURCE) else ""
        progress.say(
            f"note: {matrices} dequantized and stored as float32, "
            f"{formats.size_text(4 * sum(math.prod(role.shape) for role in widened))}{advice}"
        )
    if limited := pipeline.memory_line(checkpoint, chosen, layout, order.workers, order.memory_bytes):
        progress.say(limited)
    if isinstance(checkpoint.files, StreamedFiles):
        progress.say(hub.check_stream_space(checkpoint.files, order.output, pipeline.large_bytes(layout)))


def _rotated_note(order: options.PackOrder, is_plain: bool) -> list[str]:
    """Returns a note that a plain plan (`Decision`) is rotated all the same; none if it is not."""
    if order.rotate != "on" or not is_plain:
        return []
    return ["--rotate on rotates layers that this plan, a paper's or one for vLLM, leaves as they are"]


def _sample(checkpoint: families.Checkpoint, text: Text) -> forward.Tokens:
    length = min(options.SEQUENCE_LENGTH, checkpoint.spec.max_position_embeddings)
    return forward.read_tokens(None, None, text, options.CALIBRATION_TOKENS, length)


def make_pack_for_target(order: options.PackOrder, progress: formats.Progress = formats.NO_PROGRESS) -> PackForTarget:
    """Makes the pack for a target, or continues an earlier run: plans, converts and measures until the loss fits.

    Raises:  UsageError, PlanError, CheckpointError, ConversionError, RunError.
    """
    assert order.target is not None, "an order for a target"
    order.check()
    order.target.check()
    with ExitStack() as stack:
        checkpoint = stack.enter_context(closing(hub.open_source(order.source, order.stream, order.output, progress)))
        notes, dtypes = check_text(checkpoint.files, checkpoint.spec.vocab_size), pipeline.dense_dtypes(checkpoint)
        target = _placed(order.target.narrowed(order.plan.selector, order.sparsity), checkpoint, dtypes, progress)
        order = replace(order, target=target)
        rotate, text = PlanRotation.choice(order.rotate, not target.has_our_parts), Text(checkpoint.files)
        for note in notes:
            progress.say(f"note: {note}")
        length = min(options.SEQUENCE_LENGTH, checkpoint.spec.max_position_embeddings)
        if order.eval_data is None:
            tokens = forward.unseen_tokens(text, order.eval_tokens, length)
        else:
            tokens = forward.read_tokens(order.eval_data, None, text, order.eval_tokens, length)
        operations = stack.enter_context(operations_for(torch.device("cpu")))
        found = _profile_for_target(checkpoint, text, order, rotate, progress)
        rotation = PlanRotation.chosen(rotate, checkpoint, found)
        for line in (*(f"note: {n}" for n in _rotated_note(order, not target.has_our_parts)), rotation.note(found)):
            if line is not None:
                progress.say(line)
        # Layers that keep the checkpoint's codes stay as they are, but with --rotate on they cannot be kept.
        lossless = {} if rotate == "on" else kept.lossless_formats(checkpoint)
        losses = kept.with_kept(profile.losses_of(found), lossless)
        is_repeated = losses.quantizer == "calibrated" and target.has_our_parts
        spec = specs.with_repeats(checkpoint.spec, kept.checkpoint_repeats(checkpoint) if is_repeated else 0)
        model = plan.PlanningModel(spec, dtypes, losses, rotation)
        planner = _planner(model, found, order, target, progress)
        goal = autopack.pack_goal(model, planner, found, tokens, target, order.sequential)
        packer = autopack.AutoPacker(checkpoint, found, tokens, order, goal, progress, operations)
        return PackForTarget(order.output, target, packer.make())


def _placed(
    target: plan.Target, checkpoint: families.Checkpoint, dtypes: tuple[str, ...], progress: formats.Progress
) -> plan.Target:
    """Returns the target with the device and the key-value cache that it leaves open; without a memory as it is."""
    if target.budget_bytes is None:
        return target
    target, device_line = plan.choose_target_device(target, checkpoint.spec, dtypes)
    if device_line is not None:
        progress.say(device_line)
    target = plan.with_kv_dtype(target, checkpoint.spec, dtypes)
    plan.check_budget(target, checkpoint.spec, dtypes)
    return target


def _profile_for_target(
    checkpoint: families.Checkpoint,
    text: Text,
    order: options.PackOrder,
    rotate: quantize.RotateChoice,
    progress: formats.Progress,
) -> profile.Profile:
    """Returns the profile of the order, or makes one of our sample next to the output."""
    if order.profile is not None:
        found = profile.Profile(order.profile)
        if found.facts.imatrix is not None:
            raise formats.PlanError(
                f"--profile {order.profile}: was made from an importance file, which does not say what bits cost; "
                "for --target-vram and --preset remove --profile, or profile the model on text"
            )
        return found
    folder, tokens = order.output.with_name(f"{order.output.name}.profile"), _sample(checkpoint, text)
    progress.say(f"{folder}: the profile; it is kept, and --profile {folder} uses it again")
    for line in text_lines(checkpoint.spec, tokens):
        progress.say(line)
    return profile.make_profile(checkpoint, tokens, folder, profile.ProfileOptions(rotate=rotate), progress)


def _planner(
    model: plan.PlanningModel,
    found: profile.Profile,
    order: options.PackOrder,
    target: plan.Target,
    progress: formats.Progress,
) -> plan.Planner | None:
    for line in plan.defaults_text(target, model.spec, order.machine):
        progress.say(f"by default {line}")
    if (stored := plan.kv_text(target)) is not None:
        progress.say(stored)
    if target.budget_bytes is None:
        return None
    return plan.planner_for(target, model, found, order.machine, progress)


def convert(
    source: str | Path,
    output: str | Path,
    *,
    target_vram: str | int | None = None,
    max_loss: str | None = None,
    preset: PresetName | None = None,
    plan_file: str | Path | None = None,
    profile: str | Path | None = None,
    order: options.PackOrder | None = None,
    progress: formats.Progress = formats.NO_PROGRESS,
) -> MadePack | PackForTarget:
    """Makes a pack of a checkpoint, as the command `moe-pack convert` does; the defaults are the command's.

    Args:    source: a folder, a GGUF file, a hub id or a short name.   target_vram: memory in which the pack will run,
             in bytes or as "11G".   max_loss: with a target, "1%" of perplexity or "0.02" nats.   preset: a paper's
             pack.   plan_file: of `moe-pack plan`.   profile: a folder.   order: everything else; arguments replace it.
             Its `machine` has measured speeds, which the command reads from `moe-pack doctor`; None: they are assumed.
    Raises:  UsageError for arguments that do not go together; PlanError, CheckpointError, ConversionError, RunError.
    """
    order = replace(order or options.PackOrder(), source=str(source), output=Path(output))
    if plan_file is not None:
        order = replace(order, plan_file=Path(plan_file))
    if profile is not None:
        order = replace(order, profile=Path(profile))
    target = order.target or plan.Target(None)
    try:
        if target_vram is not None:
            num_bytes = commands.read_size(target_vram) if isinstance(target_vram, str) else target_vram
            target = replace(target, budget_bytes=num_bytes)
        if preset is not None:
            target = replace(target, preset=preset)
        if max_loss is not None:
            target = replace(target, limit=read_limit(max_loss))
    except ValueError as fault:
        raise formats.UsageError(f"convert: {fault}") from fault
    try:
        if target == plan.Target(None):
            return make_pack(order, progress)
        if target.budget_bytes is None and target.preset is None:
            raise formats.UsageError("--max-loss needs --target-vram or --preset; add one of them or remove --max-loss")
        return make_pack_for_target(replace(order, target=target), progress)
    except errors.MoePackError as fault:
        fault.args = (_in_python(str(fault)),)
        raise


_ARGUMENTS = {
    "--target-vram": "target_vram", "--max-loss": "max_loss", "--preset": "preset", "--plan": "plan_file",
    "--profile": "profile", "--output": "output",
}  # fmt: skip


def _in_python(message: str) -> str:
    """Returns a message with the names of `convert`'s arguments, and of its order's fields, in place of options.

    Commands stay as they are: moe-pack plan --target-vram.
    """
    names = {**dict(_fields(options.PackOrder(target=plan.Target(None)), "order.")), **_ARGUMENTS}
    return re.sub(
        r"moe-pack [a-z]+(?: --[a-z-]+)*|--[a-z][a-z-]*", lambda found: names.get(found[0], found[0]), message
    )


def _fields(order: object, before: str) -> Iterator[tuple[str, str]]:
    """Yields each option of an order with the name of its field: --memory and order.memory_bytes."""
    assert is_dataclass(order), "options are fields of a dataclass"
    for each in fields(order):
        value, option = getattr(order, each.name), commands.option_of(each)
        if option is not None:
            yield option.name, f"{before}{each.name}"
        elif is_dataclass(value):
            yield from _fields(value, f"{before}{each.name}.")
