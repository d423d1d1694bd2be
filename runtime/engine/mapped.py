"""The engine on the CPU that uses experts in their mapped files; the system decides what stays in memory."""

from __future__ import annotations

from contextlib import ExitStack, closing

import torch

from moe_pack import formats
from moe_pack.formats.base.limits import num_cores
from moe_pack.runtime import cpu, drafts, model, offload
from moe_pack.runtime.engine import built, machine, numerics
from moe_pack.runtime.engine.drafting import DraftChoice

CPU = torch.device("cpu")


def build_mapped(setup: built.Setup, computing: built.Computing, choice: DraftChoice) -> built.Built:
    """Builds the engine. The caller owns the operations."""
    with ExitStack() as stack:
        opened = model.open_weights(setup.pack, CPU, computing.operations, _panel_bytes(setup))
        weights = stack.enter_context(closing(opened))
        decoder = cpu_decoder(setup, weights, model.PREFILL_TOKENS)
        drafter = choice.open(setup, decoder, weights, 1 + drafts.MOST_DRAFTED)
        return built.Built(setup, computing, weights, decoder, drafter, choice.why_not, built.Facts(), stack.pop_all())


def _panel_bytes(setup: built.Setup) -> int:
    """Returns the memory for experts in panels: what a run takes by default and the whole pack does not need."""
    most, routing = machine.usual_bytes(), offload.routing_bytes(setup.pack.folder)
    needed = offload.whole_bytes(setup.pack.layout, setup.context_tokens, routing, setup.sequences)
    return 0 if most is None else max(0, most - needed)


def open_operations(setup: built.Setup, stack: ExitStack) -> built.Computing:
    """Opens what computes on the CPU, and chooses its numeric mode; the stack closes it."""
    options = setup.options
    threads = options.threads or num_cores()
    kernels = None
    if options.kernels == "torch":
        if options.numerics in ("fast", "fastest"):
            setup.fall_back("--numerics is exact: torch does not round inputs")
    else:
        kernels = open_kernels(setup, threads, stack)
        if kernels is None:
            setup.fall_back(f"torch computes: native kernels {cpu.why_unavailable()}")
    if kernels is None:
        torch.set_num_threads(threads)
        return built.Computing(model.TORCH)
    best = kernels.instruction_set
    if options.kernels not in ("auto", best):
        raise formats.RunError(
            f"--kernels {options.kernels}: this machine cannot run these kernels; use --kernels auto"
        )
    # Next to the kernels torch has little to compute: its own threads would only wait, and spin while they wait.
    torch.set_num_threads(1)
    losses = numerics.read_numerics(setup.pack)
    mode = numerics.chosen_mode(options.numerics, losses)
    if kernels.take_digits(numerics.DIGITS[mode]) != numerics.DIGITS[mode]:
        if options.numerics != "auto":
            setup.fall_back(f"--numerics is exact: {best} kernels do not round inputs")
        mode = "exact"
    loss = None if losses is None else losses.of(mode)
    return built.Computing(model.NativeOperations(kernels), mode, None if loss is None else loss.kl)


def open_kernels(setup: built.Setup, threads: int, stack: ExitStack) -> cpu.Kernels | None:
    """Opens the kernels of `--kernels`; None for `auto` where there are none."""
    name = setup.options.kernels
    assert name != "torch", "torch is no kernel"
    kernels = cpu.open_kernels(threads) if name == "auto" else cpu.Kernels(threads, name)
    return None if kernels is None else stack.enter_context(closing(kernels))


def cpu_decoder(
    setup: built.Setup, weights: model.PackWeights, most_tokens: int
) -> model.Decoder | model.EncoderDecoder:
    """Returns the decoder of the model, whose passes have at most `most_tokens`."""
    chunk_tokens, sequences = min(setup.options.chunk_tokens or most_tokens, most_tokens), setup.sequences
    if setup.pack.spec.encoder is not None:
        return model.EncoderDecoder(weights, setup.context_tokens, CPU, chunk_tokens)
    return model.Decoder(
        weights,
        setup.context_tokens,
        CPU,
        max(chunk_tokens, sequences.number),
        sequences.kv_dtype,
        num_sequences=sequences.number,
        num_checkpoints=sequences.checkpoints,
    )
