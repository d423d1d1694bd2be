"""The target of a plan: a memory budget, a limit of loss and a machine, with their defaults; and the planner for it."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from moe_pack import formats, runtime
from moe_pack.calib.profile import Profile, profiler
from moe_pack.convert.plan import cpu_speed, gpu_speed, machines, options, speed
from moe_pack.convert.plan.planned import PlanningModel
from moe_pack.convert.plan.planner import Planner
from moe_pack.formats.base.commands import given
from moe_pack.formats.pack import plans
from moe_pack.formats.pack.layouts import pack_layout
from moe_pack.runtime import offload
from moe_pack.runtime.engine import machine
from moe_pack.runtime.engine.options import cpu_only
from moe_pack.runtime.gpu.fit import least_gpu_budget
from moe_pack.runtime.offload.routing_file import routing_file_bytes


def held_out_passes(profile: Profile) -> offload.Passes:
    """Returns the routes of the held-out text, one token a pass, with the popularity of the other text.

    Raises:  RunError if no text was held out.
    """
    if not profile.num_held_out_tokens:
        raise formats.RunError(f"{profile.folder}: the profile has no held-out text; profile more text")
    layers = [profile.statistics(layer_idx) for layer_idx in range(len(profile.spec.moe_layers))]
    routes = np.stack([layer.routes[-profile.num_held_out_tokens :] for layer in layers], axis=1)
    learned = np.stack([layer.tokens.astype(np.int64) - layer.held_out_tokens for layer in layers])
    popularity = (learned / learned.sum(axis=1, keepdims=True)).astype("<f4")
    return offload.Passes(routes, np.ones(len(routes), "<u4"), None, popularity)


_RAM_SHARE = 0.75
_SMALLEST = (
    formats.trellis_format(4, formats.ROW_GROUP),
    formats.BF16,
)  # the smallest format is the first of these that fits the rows


def choose_target_device(
    target: options.Target, spec: formats.ModelSpec, dense_dtypes: tuple[str, ...]
) -> tuple[options.Target, str | None]:
    """Returns the target with a device in place of `auto`, and a line for people that says which one and why.

    An option that only one device has decides; else the GPU of this machine is chosen, if it runs the model in the
    target's memory. The rule is that of `moe-run`, so that it chooses the same for the pack on this machine.
    Returns: a target that names a device as it is, and None.
    Raises:  RunError if the context is too long.
    """
    if target.device != "auto":
        return target, None
    if names := given(target, "gpu"):
        return replace(target, device="cuda"), f"device: cuda ({names[0]} describes a GPU)"
    gpu = machine.gpu_here()
    if names := given(target, "cpu"):
        why_cpu: str | None = f"{names[0]} needs it"
    elif (part := cpu_only(spec)) is not None:
        why_cpu = f"models with {part} do not run on GPUs"
    elif gpu is None:
        why_cpu = "no GPU found; --gpu NAME plans for one"
    else:
        why_cpu = gpu.fault or _why_too_small(replace(target, device="cuda"), spec, dense_dtypes, gpu)
    if gpu is not None and why_cpu is None:
        return replace(target, device="cuda"), f"device: cuda ({gpu.name})"
    return replace(target, device="cpu"), f"device: cpu ({why_cpu}): --target-vram is this machine's memory"


def _why_too_small(
    target: options.Target, spec: formats.ModelSpec, dense_dtypes: tuple[str, ...], gpu: machine.GpuHere
) -> str | None:
    """Returns why no pack of a model runs on a GPU in the target's memory, in words; None if one does."""
    budget = target.memory_bytes
    if budget > gpu.memory_bytes:
        return f"--target-vram is {formats.size_text(budget)}, {gpu.name} has {formats.size_text(gpu.memory_bytes)}"
    least = _least_budget(target, spec, dense_dtypes)
    return None if least <= budget else f"a GPU needs {formats.size_text(least)} for this model"


def context_of(target: options.Target, spec: formats.ModelSpec) -> int:
    """Returns the tokens for which a plan has a key-value cache.

    Raises:  RunError if they are more than the model can take.
    """
    most = spec.max_position_embeddings
    if target.context_tokens is None:
        return min(options.USUAL_CONTEXT, most)
    if target.context_tokens > most:
        raise formats.RunError(f"--context: found {target.context_tokens}, this model takes at most {most} tokens")
    return target.context_tokens


def planner_for(
    target: options.Target,
    model: PlanningModel,
    profile: Profile | None,
    facts: runtime.MachineFacts | None,
    progress: formats.Progress = formats.NO_PROGRESS,
) -> Planner:
    """Returns the planner for a target.

    Args:    profile: the one with the losses; if None, routes are drawn at random and all neurons run equally often.
             facts: of `moe-pack doctor`, if it has measured this machine.
    Raises:  RunError if the context is too long, the GPU is not known, or it has less memory than the budget; PlanError
             as `Planner`.
    """
    context, popularity = context_of(target, model.spec), model.losses.popularity
    check_device(target, model.spec)
    if profile is None:
        routing = speed.RoutingFacts(popularity, predictor_bytes=profiler.most_routing_bytes(model.spec))
    else:  # as `moe-pack convert` stores it with the pack
        data = profiler.routing_of(profile)
        passes = held_out_passes(profile) if profile.num_held_out_tokens else None
        routing = speed.RoutingFacts(popularity, passes, data.best_recall, routing_file_bytes(data))
    tier: speed.MemoryTier
    if target.device == "cpu":
        cpu, kv_dtype = _cpu(target, facts), target.kv_dtype or "f32"
        tier = cpu_speed.CpuTier(cpu, routing, target.memory_bytes, context, kv_dtype)
    else:
        heats = gpu_speed.RowHeat(profile)
        tier = gpu_speed.GpuTier(_gpu_machine(target, facts), routing, heats, target.memory_bytes, context)
    return Planner(model, tier, target.search, target.selectors, progress, is_fused=target.purpose == "vllm")


def defaults_text(target: options.Target, spec: formats.ModelSpec, facts: runtime.MachineFacts | None) -> list[str]:
    """Returns a line for each default that the target takes: `--context 4096: ...`."""
    return list(_defaults(target, spec, facts))


def _defaults(target: options.Target, spec: formats.ModelSpec, facts: runtime.MachineFacts | None) -> Iterator[str]:
    if target.limit is None and target.loss_limit is not None:
        of_paper = "" if target.preset is None else f", as in the paper of {target.preset}"
        yield f"--max-loss {target.loss_limit.percent}: of perplexity{of_paper}"
    if target.budget_bytes is None:
        return
    if target.context_tokens is None:
        yield f"--context {context_of(target, spec)}: tokens of key-value cache"
    if facts is None or not _is_measured(facts):
        yield f"the CPU: {_cpu(target, None).name}; moe-pack doctor measures this machine"
    if target.device == "cpu":
        return
    name, why = _gpu_name(target)
    if target.gpu is None:
        yield f"--gpu {name}: {why}"
    if target.link_rate is None and name != machines.MEASURE:
        how = (
            "the link was not measured; moe-pack doctor measures it" if _measured_link(facts) is None else "as measured"
        )
        yield f"--link {(_link_rate(target, facts, machines.find_gpu(name)) or 0) / 2**30:.1f}G: bytes a second; {how}"
    if target.ram_bytes is None:
        ram = _ram_bytes(target)
        yield (
            "--ram: as much as the pack needs"
            if ram is None
            else f"--ram {formats.size_text(ram)}: 75% of this machine's"
        )


def _cpu(target: options.Target, facts: runtime.MachineFacts | None) -> machines.Machine:
    """Returns this machine's CPU and disk, assumed as far as they were not measured."""
    assumed = machines.assumed_cpu() if target.device == "cpu" else machines.assumed_host()
    if facts is None:
        return assumed
    return machines.machine_of_cpu(facts) if _is_measured(facts) else replace(assumed, disk=facts.drive)


def _is_measured(facts: runtime.MachineFacts) -> bool:
    return bool(facts.cpu.experts) and facts.fixed is not None


def _gpu_machine(target: options.Target, facts: runtime.MachineFacts | None) -> machines.Machine:
    gpu = machines.find_gpu(_gpu_name(target)[0])
    if target.memory_bytes > gpu.memory_bytes:
        raise formats.RunError(
            f"--target-vram: found {formats.size_text(target.memory_bytes)}, {gpu.name} has "
            f"{formats.size_text(gpu.memory_bytes)}; give less, or another GPU with --gpu"
        )
    return machines.machine_of_gpu(gpu, _link_rate(target, facts, gpu), _ram_bytes(target), _cpu(target, facts))


def _gpu_name(target: options.Target) -> tuple[str, str]:
    """Returns the name of the GPU, or `measure`, and the reason for it."""
    if target.gpu is not None:
        return target.gpu, "given"
    here = machine.gpu_here()
    if here is not None and here.fault is None:
        if machines.known_gpu(here.name):
            return here.name, "this machine's"
        return machines.MEASURE, f"this machine's {here.name}, whose rates are not known"
    large = [gpu for gpu in machines.GPUS.values() if gpu.memory_bytes >= target.memory_bytes]
    if large:
        gpu, why = min(large, key=lambda gpu: gpu.memory_bytes), "the smallest known one with this much memory"
    else:
        gpu, why = max(machines.GPUS.values(), key=lambda gpu: gpu.memory_bytes), "the largest known one"
    return gpu.name, f"assumed: {why}; --device cpu plans for the CPU"


def _link_rate(target: options.Target, facts: runtime.MachineFacts | None, gpu: machines.Gpu) -> float | None:
    """Returns the link's bytes a second; None for a GPU that was measured, because its rate is."""
    if target.link_rate is not None or _gpu_name(target)[0] == machines.MEASURE:
        return target.link_rate
    return _measured_link(facts) or min(machines.USUAL_LINK_RATE, machines.LINK_SHARE * gpu.link_rate)


def _measured_link(facts: runtime.MachineFacts | None) -> float | None:
    return None if facts is None or facts.link is None else max(copy.rate for copy in facts.link.copies)


def _ram_bytes(target: options.Target) -> int | None:
    """Returns the bytes of host memory for the pack; None if this machine's memory is not known."""
    if target.ram_bytes is not None:
        return target.ram_bytes
    total = runtime.total_bytes()
    return None if total is None else int(_RAM_SHARE * total)


def check_budget(target: options.Target, spec: formats.ModelSpec, dense_dtypes: tuple[str, ...]) -> None:
    """Refuses a device on which the model does not run, and a budget in which no pack of it runs.

    Raises:  RunError; if no pack runs in the budget it says the smallest budget that is enough.
    """
    check_device(target, spec)
    context, least = context_of(target, spec), _least_budget(target, spec, dense_dtypes)
    if target.memory_bytes < least:
        raise formats.RunError(
            f"--target-vram: {formats.size_text(target.memory_bytes)} is too small; with a context of {context} tokens "
            f"this model needs {formats.size_text(least)}, whatever the loss; give more memory, or a shorter --context"
        )


def with_kv_dtype(target: options.Target, spec: formats.ModelSpec, dense_dtypes: tuple[str, ...]) -> options.Target:
    """Returns the target with a key-value cache of 8 bits, if none is asked for and no pack runs with one of float32.

    q8 has the fewest bytes of the forms whose KL is below 0.0005 nats on a real model (docs/benchmarks/memory.md).
    """
    if target.device != "cpu" or target.kv_dtype is not None or spec.encoder is not None:
        return target
    smaller = replace(target, kv_dtype="q8")
    needs = (_least_budget(each, spec, dense_dtypes) for each in (smaller, target))
    with_codes, with_floats = needs
    return smaller if with_codes <= target.memory_bytes < with_floats else target


def kv_text(target: options.Target) -> str | None:
    """Returns how keys and values are stored, for people; None if as by default."""
    if target.kv_dtype in (None, "f32"):
        return None
    return f"keys and values are stored as {target.kv_dtype}; give moe-run --kv-dtype {target.kv_dtype} too"


def _least_budget(target: options.Target, spec: formats.ModelSpec, dense_dtypes: tuple[str, ...]) -> int:
    """Returns the smallest budget in which a pack of the model runs; predictors are not counted."""
    possible = [part for part in _SMALLEST if plans.format_fault(part, spec.hidden_size) is None]
    dense = plans.uniform_dense(spec, formats.part_format(4, 64))
    plan = replace(formats.uniform_plan(spec, "none", possible[0], possible[0], quantizer="calibrated"), dense=dense)
    layout, context = pack_layout(spec, plan, dense_dtypes), context_of(target, spec)
    if target.device != "cpu":
        return least_gpu_budget(layout, context)
    return offload.least_budget(layout, context, 0, offload.Sequences(kv_dtype=target.kv_dtype or "f32"))


def check_device(target: options.Target, spec: formats.ModelSpec) -> None:
    """Refuses a GPU for a model that the GPU's engine does not run, and keys and values that no engine has.

    Raises:  RunError.
    """
    if spec.encoder is not None and target.kv_dtype not in (None, "f32"):
        raise formats.RunError(f"--kv-dtype {target.kv_dtype} does not support models with an encoder; remove it")
    if target.kind != "cpu" and (part := cpu_only(spec)) is not None:
        raise formats.RunError(f"--device cuda: models with {part} do not run on GPUs; give --device cpu")
